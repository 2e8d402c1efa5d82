// libcuda.so.1 without a GPU: what torch and TensorPipe ask the driver for.
#include <cuda.h>
#include "sim.h"
#undef cuDeviceGetUuid
#undef cuMemGetAddressRange
#define API extern "C" __attribute__((visibility("default"))) CUresult
static const long CONTEXT = 0x1000;  // of device 0; of device 1 the next number
API cuInit(unsigned) { return sim_visible().empty() ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS; }
API cuDriverGetVersion(int* version) { *version = CUDA_VERSION; return CUDA_SUCCESS; }
API cuDeviceGetCount(int* count) { *count = (int)sim_visible().size(); return CUDA_SUCCESS; }
API cuDeviceGet(CUdevice* device, int index) { *device = index; return CUDA_SUCCESS; }
API cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  sim_uuid_bytes(sim_visible()[device], (unsigned char*)uuid->bytes);
  return CUDA_SUCCESS;
}
API cuDeviceGetUuid(CUuuid* uuid, CUdevice device) { return cuDeviceGetUuid_v2(uuid, device); }
API cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID ? sim_visible()[device] + 1 : attribute == CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING;
  return CUDA_SUCCESS;
}
API cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  *flags = 0;
  *active = sim_has_context(device);
  return CUDA_SUCCESS;
}
API cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) { *context = (CUcontext)(CONTEXT + device); return CUDA_SUCCESS; }
API cuCtxGetCurrent(CUcontext* context) { *context = sim_has_context(0) ? (CUcontext)CONTEXT : nullptr; return CUDA_SUCCESS; }
API cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
API cuGetErrorString(CUresult, const char** text) { *text = "an error of the simulated driver"; return CUDA_SUCCESS; }
API cuGetErrorName(CUresult, const char** text) { *text = "CUDA_ERROR_SIMULATED"; return CUDA_SUCCESS; }
API cuMemGetAddressRange_v2(CUdeviceptr* start, size_t* size, CUdeviceptr address) {
  return sim_device_of((void*)address, (const void**)start, size) == -2 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
API cuMemGetAddressRange(CUdeviceptr* start, size_t* size, CUdeviceptr address) { return cuMemGetAddressRange_v2(start, size, address); }
API cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
  int device = sim_device_of((void*)address, nullptr, nullptr);
  if (device == -2) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned*)value = device < 0 ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int*)value = device; break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(unsigned long long*)value = address; break;
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(long*)value = CONTEXT + device; break;
    default: return CUDA_ERROR_NOT_SUPPORTED;
  }
  return CUDA_SUCCESS;
}
API cuPointerGetAttributes(unsigned count, CUpointer_attribute* attributes, void** values, CUdeviceptr address) {
  for (unsigned i = 0; i < count; i++)
    if (CUresult error = cuPointerGetAttribute(values[i], attributes[i], address)) return error;
  return CUDA_SUCCESS;
}
API cuGetProcAddress_v2(const char*, void** function, int, cuuint64_t, CUdriverProcAddressQueryResult*) {
  *function = nullptr;
  return CUDA_ERROR_NOT_FOUND;
}
