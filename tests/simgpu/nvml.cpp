// libnvidia-ml.so.1 without a GPU: constant figures, and the faults of sim.h ("lost", "ecc" and "slow").
#include <time.h>
#include "sim.h"
#define API extern "C" __attribute__((visibility("default"))) int
enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15 };
typedef unsigned long long Number;
static int handles[64];
static int index_of(void* handle) { return (int)((int*)handle - handles); }
#define ANSWER(name, declared, statement) \
  API name declared { if (sim_fault(index_of(device), "lost")) return GPU_IS_LOST; statement; return OK; }
API nvmlInit_v2() { return sim_device_count() ? OK : DRIVER_NOT_LOADED; }
API nvmlInitWithFlags(unsigned) { return nvmlInit_v2(); }
API nvmlShutdown() { return OK; }
extern "C" __attribute__((visibility("default"))) const char* nvmlErrorString(int code) {
  return code == GPU_IS_LOST ? "GPU is lost" : "an error of the simulation";
}
API nvmlSystemGetDriverVersion(char* text, unsigned size) { snprintf(text, size, "595.45.04"); return OK; }
API nvmlDeviceGetCount_v2(unsigned* count) { *count = sim_device_count(); return OK; }
API nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  if ((int)index >= sim_device_count()) return INVALID;
  if (sim_fault(index, "lost")) return GPU_IS_LOST;
  *device = handles + index;
  return OK;
}
API nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  for (int index = 0; index < sim_device_count(); index++)
    if (sim_uuid(index) == uuid) return nvmlDeviceGetHandleByIndex_v2(index, device);
  return NOT_FOUND;
}
API nvmlDeviceGetHandleByPciBusId_v2(const char* text, void** device) {
  unsigned bus = 0;
  const char* colon = strchr(text, ':');
  if (!colon || sscanf(colon + 1, "%x", &bus) != 1 || !bus) return NOT_FOUND;
  return nvmlDeviceGetHandleByIndex_v2(bus - 1, device);
}
ANSWER(nvmlDeviceGetUUID, (void* device, char* text, unsigned size), snprintf(text, size, "%s", sim_uuid(index_of(device)).c_str()))
ANSWER(nvmlDeviceGetName, (void* device, char* text, unsigned size), snprintf(text, size, "Simulated GPU"))
static Number memory() { return (Number)sim_number("SIMGPU_MEMORY_MB", 16384) << 20; }
ANSWER(nvmlDeviceGetMemoryInfo, (void* device, Number* out), out[0] = memory(); out[2] = 600 << 20; out[1] = out[0] - out[2])
ANSWER(nvmlDeviceGetMemoryInfo_v2, (void* device, Number* out),  // version, total, reserved, free, used
       out[1] = memory(); out[2] = 0; out[4] = 600 << 20; out[3] = out[1] - out[4])
ANSWER(nvmlDeviceGetUtilizationRates, (void* device, unsigned* out), out[0] = 37; out[1] = 5)
ANSWER(nvmlDeviceGetPowerUsage, (void* device, unsigned* milliwatts), *milliwatts = 312000)
ANSWER(nvmlDeviceGetEnforcedPowerLimit, (void* device, unsigned* milliwatts), *milliwatts = 700000)
ANSWER(nvmlDeviceGetTotalEnergyConsumption, (void* device, Number* millijoules), *millijoules = (Number)(time(nullptr)) * 312000)
ANSWER(nvmlDeviceGetTotalEccErrors, (void* device, int, int, Number* count), int n = 0; sim_fault(index_of(device), "ecc", &n); *count = n)
ANSWER(nvmlDeviceGetCurrentClocksEventReasons, (void* device, Number* bits), *bits = sim_fault(index_of(device), "slow") ? 0x20 : 0)
ANSWER(nvmlDeviceGetComputeRunningProcesses_v3, (void* device, unsigned* count, void*), *count = 0)
