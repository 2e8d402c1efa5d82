// libcudart.so.13 without a GPU. Device memory is shared memory that is mapped twice: at the address that torch knows,
// where no access is allowed, and at a fixed distance, where the simulated kernels read and write.
// Copies, collectives and host functions run late, on the thread of their stream, so that a value which is used without
// waiting for it is wrong. Kernels run on the caller's thread when their stream is done. What two streams do to the same
// memory without an order between them is found by vector clocks, and ends the work with an error (RACE).
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include "sim.h"

using Clock = std::chrono::steady_clock;
using Order = std::vector<uint64_t>;  // of each stream, the last ticket that is known to be done before

struct Mark { bool done = false; Clock::time_point at; };
struct Task { uint64_t ticket; std::function<void()> work; };
struct CUstream_st {
  int id, device, priority;
  uint64_t queued = 0, done = 0;
  Order before;
  std::deque<Task> tasks;
  bool has_thread = false;
};
struct CUevent_st { unsigned flags; int device; std::shared_ptr<Mark> mark; Order before; };
struct Access { const char *start, *end; int stream; uint64_t ticket; bool write; std::string what; };
struct Segment { size_t size; int device; std::vector<Access> accesses; };  // device -1: pinned memory of the host

// Never destroyed, because threads of streams outlive main().
static std::mutex& mutex = *new std::mutex;
static std::condition_variable& changed = *new std::condition_variable;
static auto& streams = *new std::vector<CUstream_st*>;
static auto& default_streams = *new std::map<int, CUstream_st*>;
static auto& segments = *new std::map<const char*, Segment>;
static auto& kernel_names = *new std::map<const void*, std::string>;
static auto& reported = *new std::set<std::string>;
static Order& host_before = *new Order;
static auto& devices = *new std::vector<int>;
static size_t used[64];
static bool contexts[64], initialised = false, forked = false;
static const int CUDA_NOT_SUPPORTED = 801;
static const size_t REGION = 1ull << 40, BLOCK = 2 << 20;
static char* region = nullptr;
static size_t region_used = 0;
static thread_local int current = 0;
static thread_local cudaError_t last_error = cudaSuccess;
using Lock = std::unique_lock<std::mutex>;

void sim_log(const char* format, ...) {
  char text[2048];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  FILE* file = getenv("SIMGPU_LOG") ? fopen(getenv("SIMGPU_LOG"), "a") : nullptr;
  fprintf(file ? file : stderr, "simulated GPU, process %d: %s\n", getpid(), text);
  if (file) fclose(file);
}

static cudaError_t initialise() {
  if (forked) return cudaErrorInitializationError;
  Lock lock(mutex);
  if (!initialised) {
    devices = sim_visible();
    initialised = true;
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
    region = (char*)mmap(nullptr, 2 * REGION, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  if (devices.empty()) return cudaErrorNoDevice;
  if (sim_fault(devices[current], "lost")) return cudaErrorDevicesUnavailable;
  return cudaSuccess;
}
static cudaError_t fail(cudaError_t error) {
  if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
  return error;
}
#define ENTER()                                           \
  if (cudaError_t error_ = initialise()) return fail(error_); \
  Lock lock(mutex)

static void open_context(int device) {
  if (!contexts[device]) sim_log("context on device %d, the node's %d", device, devices[device]);
  contexts[device] = true;
}
static uint64_t ticket_of(const Order& order, int stream) { return stream < (int)order.size() ? order[stream] : 0; }
static void join(Order& order, const Order& other) {
  order.resize(std::max(order.size(), other.size()));
  for (size_t i = 0; i < other.size(); i++) order[i] = std::max(order[i], other[i]);
}
static CUstream_st* new_stream(int device, int priority) {
  streams.push_back(new CUstream_st{(int)streams.size(), device, priority});
  return streams.back();
}
static CUstream_st* stream_of(cudaStream_t stream) {
  if (stream > (cudaStream_t)2) return stream;
  auto& found = default_streams[current];
  if (!found) found = new_stream(current, 0);
  return found;
}
static Segment* segment_of(const void* address, const char** start = nullptr) {
  auto found = segments.upper_bound((const char*)address);
  if (found == segments.begin()) return nullptr;
  --found;
  if ((const char*)address >= found->first + std::max<size_t>(found->second.size, 1)) return nullptr;
  if (start) *start = found->first;
  return &found->second;
}
void* sim_memory(const void* address) {
  bool on_device = (char*)address >= region && (char*)address < region + REGION;
  return (char*)address + (region && on_device ? REGION : 0);
}

// --- the order of work. The functions below need the lock.

static void record(CUstream_st* stream, const char* what, const SimRange& range, uint64_t ticket) {
  Segment* segment = range.size ? segment_of(range.start) : nullptr;
  if (!segment) return;
  const char *start = (const char*)range.start, *end = start + range.size;
  auto& list = segment->accesses;
  for (auto& other : list) {
    if (other.end <= start || end <= other.start || !(other.write || range.write)) continue;
    if (other.stream == stream->id || ticket_of(stream->before, other.stream) >= other.ticket) continue;
    std::string text = std::string("RACE: ") + what + (range.write ? " writes" : " reads") + " on stream " +
                       std::to_string(stream->id) + " what " + other.what + (other.write ? " writes" : " reads") +
                       " on stream " + std::to_string(other.stream) + ", without an order between them";
    sim_log("%s", text.c_str());
    throw std::runtime_error(text);
  }
  // Forget what the host knows to be done, and what this access covers: a race with it is a race with this one, too.
  auto known = [&](const Access& other) {
    bool covered = start <= other.start && other.end <= end && ticket_of(stream->before, other.stream) >= other.ticket;
    return other.ticket <= ticket_of(host_before, other.stream) ||
           (covered && (range.write || (!other.write && other.stream == stream->id)));
  };
  list.erase(std::remove_if(list.begin(), list.end(), known), list.end());
  list.push_back({start, end, stream->id, ticket, range.write, what});
}
static uint64_t take_ticket(CUstream_st* stream, const char* what, const std::vector<SimRange>& ranges) {
  open_context(stream->device);
  join(stream->before, host_before);
  for (auto& range : ranges) record(stream, what, range, stream->queued + 1);
  stream->before.resize(std::max(stream->before.size(), streams.size()));
  return stream->before[stream->id] = ++stream->queued;
}
static void finish(CUstream_st* stream, uint64_t ticket) {
  stream->done = ticket;
  changed.notify_all();
}
static void run_tasks(CUstream_st* stream) {
  Lock lock(mutex);
  for (;;) {
    changed.wait(lock, [&] { return !stream->tasks.empty() && stream->tasks.front().ticket == stream->done + 1; });
    Task task = std::move(stream->tasks.front());
    stream->tasks.pop_front();
    lock.unlock();
    task.work();
    lock.lock();
    finish(stream, task.ticket);
  }
}
static uint64_t queue(CUstream_st* stream, const char* what, const std::vector<SimRange>& ranges, std::function<void()> work) {
  uint64_t ticket = take_ticket(stream, what, ranges);
  if (!stream->has_thread) std::thread(run_tasks, stream).detach();
  stream->has_thread = true;
  stream->tasks.push_back({ticket, std::move(work)});
  changed.notify_all();
  return ticket;
}
static void wait(Lock& lock, CUstream_st* stream) {
  Order before = stream->before;
  uint64_t ticket = stream->queued;
  changed.wait(lock, [&] { return stream->done >= ticket; });
  join(host_before, before);
}
static void wait_for_device(Lock& lock, int device) {
  for (size_t i = 0; i < streams.size(); i++)
    if (streams[i]->device == device) wait(lock, streams[i]);
}
static void pause(CUstream_st* stream, int microseconds) {
  int milliseconds = 0;
  if (sim_fault(devices[stream->device], "slow", &milliseconds)) microseconds += 1000 * milliseconds;
  if (microseconds) usleep(microseconds);
}

void sim_queue(void* handle, const char* what, const std::vector<SimRange>& ranges, std::function<void()> work) {
  Lock lock(mutex);
  CUstream_st* stream = stream_of((cudaStream_t)handle);
  queue(stream, what, ranges, [stream, work] { pause(stream, 0); work(); });
}
void sim_run(void* handle, const char* what, const std::vector<SimRange>& ranges, const std::function<void()>& work) {
  if (cudaError_t error = initialise()) throw std::runtime_error(std::string("CUDA error: ") + cudaGetErrorString(error));
  Lock lock(mutex);
  CUstream_st* stream = stream_of((cudaStream_t)handle);
  uint64_t ticket = take_ticket(stream, what, ranges);
  changed.wait(lock, [&] { return stream->done + 1 == ticket; });
  lock.unlock();
  struct Finish {
    Lock& lock; CUstream_st* stream; uint64_t ticket;
    ~Finish() { lock.lock(); finish(stream, ticket); }
  } at_end{lock, stream, ticket};
  pause(stream, 0);
  work();
}
void sim_touch(void* handle, const char* what, const SimRange& range) {
  Lock lock(mutex);
  CUstream_st* stream = stream_of((cudaStream_t)handle);
  record(stream, what, range, stream->queued);
}
int sim_device() { return initialise() ? -1 : devices[current]; }
bool sim_has_context(int device) { return !forked && device < 64 && contexts[device]; }
int sim_device_of(const void* address, const void** start, size_t* size) {
  Lock lock(mutex);
  Segment* segment = segment_of(address, (const char**)start);
  if (segment && size) *size = segment->size;
  return segment ? segment->device : -2;
}

// --- devices

#define API extern "C" __attribute__((visibility("default")))
static const struct { cudaError_t code; const char *name, *text; } ERRORS[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorDevicesUnavailable, "cudaErrorDevicesUnavailable", "CUDA-capable device(s) is/are busy or unavailable"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported by the simulation"}};
API const char* cudaGetErrorName(cudaError_t code) {
  for (auto& error : ERRORS) if (error.code == code) return error.name;
  return "cudaErrorUnknown";
}
API const char* cudaGetErrorString(cudaError_t code) {
  for (auto& error : ERRORS) if (error.code == code) return error.text;
  return "unknown error";
}
API cudaError_t cudaGetLastError() { cudaError_t error = last_error; last_error = cudaSuccess; return error; }
API cudaError_t cudaPeekAtLastError() { return last_error; }
API cudaError_t cudaGetDeviceCount(int* count) {
  cudaError_t error = initialise();
  *count = error == cudaSuccess || error == cudaErrorDevicesUnavailable ? (int)devices.size() : 0;
  return fail(*count ? cudaSuccess : error);
}
API cudaError_t cudaGetDevice(int* device) { ENTER(); *device = current; return cudaSuccess; }
API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= (int)devices.size()) return fail(initialise() ? initialise() : cudaErrorInvalidDevice);
  int before = current;
  current = device;
  if (cudaError_t error = initialise()) { current = before; return fail(error); }
  Lock lock(mutex);
  open_context(device);
  return cudaSuccess;
}
static size_t memory_size() { return (size_t)sim_number("SIMGPU_MEMORY_MB", 16384) << 20; }
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int device) {
  ENTER();
  if (device < 0 || device >= (int)devices.size()) return fail(cudaErrorInvalidDevice);
  memset(found, 0, sizeof *found);
  snprintf(found->name, sizeof found->name, "Simulated GPU");
  sim_uuid_bytes(devices[device], (unsigned char*)found->uuid.bytes);
  found->totalGlobalMem = memory_size();
  found->major = 9;
  found->multiProcessorCount = 132;
  found->maxThreadsPerMultiProcessor = 2048;
  found->maxThreadsPerBlock = found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
  found->maxThreadsDim[2] = 64;
  found->maxGridSize[0] = 2147483647;
  found->maxGridSize[1] = found->maxGridSize[2] = 65535;
  found->sharedMemPerBlock = 49152;
  found->sharedMemPerBlockOptin = 232448;
  found->warpSize = 32;
  found->pciBusID = devices[device] + 1;
  found->unifiedAddressing = found->canMapHostMemory = 1;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp found;
  if (cudaError_t error = cudaGetDeviceProperties(&found, device)) return error;
  static const std::map<int, int> VALUES = {
      {cudaDevAttrMaxThreadsPerBlock, 1024}, {cudaDevAttrWarpSize, 32}, {cudaDevAttrMultiProcessorCount, 132},
      {cudaDevAttrComputeCapabilityMajor, 9}, {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
      {cudaDevAttrMaxThreadsPerMultiProcessor, 2048}, {cudaDevAttrMaxGridDimX, 2147483647},
      {cudaDevAttrMaxBlockDimX, 1024}, {cudaDevAttrUnifiedAddressing, 1}};
  *value = attribute == cudaDevAttrPciBusId ? found.pciBusID : VALUES.count(attribute) ? VALUES.at(attribute) : 0;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  ENTER();
  snprintf(text, size, "0000:%02x:00.0", devices[device] + 1);
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* low, int* high) { ENTER(); *low = 0; *high = -5; return cudaSuccess; }
API cudaError_t cudaDeviceSynchronize() { ENTER(); wait_for_device(lock, current); return cudaSuccess; }

// --- memory

API cudaError_t cudaMalloc(void** address, size_t size) {
  ENTER();
  open_context(current);
  *address = nullptr;
  if (used[current] + size > memory_size()) return fail(cudaErrorMemoryAllocation);
  size_t room = (size + BLOCK - 1) / BLOCK * BLOCK;
  int file = memfd_create("simulated GPU", MFD_CLOEXEC);
  char* start = region + region_used;
  if (file < 0 || ftruncate(file, room) || region_used + room + BLOCK > REGION) return fail(cudaErrorMemoryAllocation);
  mmap(start + REGION, room, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0);
  close(file);
  region_used += room + BLOCK;  // an address is never used again, so that stale pointers are found
  used[current] += size;
  segments[start] = {size, current, {}};
  *address = start;
  return cudaSuccess;
}
API cudaError_t cudaFree(void* address) {
  ENTER();
  open_context(current);
  auto found = segments.find((char*)address);
  if (!address) return cudaSuccess;
  if (found == segments.end()) return fail(cudaErrorInvalidValue);
  wait_for_device(lock, found->second.device);
  used[found->second.device] -= found->second.size;
  size_t room = (found->second.size + BLOCK - 1) / BLOCK * BLOCK;
  mmap((char*)address + REGION, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  segments.erase(found);
  return cudaSuccess;
}
API cudaError_t cudaHostAlloc(void** address, size_t size, unsigned) {
  ENTER();
  open_context(current);
  if (posix_memalign(address, 4096, std::max<size_t>(size, 1))) return fail(cudaErrorMemoryAllocation);
  segments[(char*)*address] = {size, -1, {}};
  return cudaSuccess;
}
API cudaError_t cudaFreeHost(void* address) {
  ENTER();
  if (!segments.erase((char*)address)) return fail(cudaErrorInvalidValue);
  for (size_t device = 0; device < devices.size(); device++) wait_for_device(lock, (int)device);
  free(address);
  return cudaSuccess;
}
API cudaError_t cudaHostRegister(void* address, size_t size, unsigned) {
  ENTER();
  open_context(current);
  segments[(char*)address] = {size, -1, {}};
  return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void* address) { ENTER(); segments.erase((char*)address); return cudaSuccess; }
API cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
  ENTER();
  open_context(current);
  *total = memory_size();
  *available = *total - used[current];
  return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* address) {
  ENTER();
  memset(found, 0, sizeof *found);
  Segment* segment = segment_of(address);
  bool on_device = segment && segment->device >= 0;
  found->type = !segment ? cudaMemoryTypeUnregistered : on_device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  found->device = on_device ? segment->device : current;
  found->devicePointer = segment ? (void*)address : nullptr;
  found->hostPointer = on_device ? nullptr : (void*)address;
  return cudaSuccess;
}

// Pageable memory is staged, as by CUDA: read before the call returns, written before it returns.
static cudaError_t copy(void* to, const void* from, size_t size, cudaStream_t handle, bool blocking) {
  ENTER();
  if (!size) return cudaSuccess;
  CUstream_st* stream = stream_of(handle);
  Segment *target = segment_of(to), *source = segment_of(from);
  std::vector<SimRange> ranges;
  if (source) ranges.push_back({from, size, false});
  if (target) ranges.push_back({to, size, true});
  std::shared_ptr<std::vector<char>> staged;
  if (!source) staged = std::make_shared<std::vector<char>>((const char*)from, (const char*)from + size);
  static int delay = sim_number("SIMGPU_COPY_US", 100);
  queue(stream, "copy", ranges, [=] {
    pause(stream, delay);
    memmove(sim_memory(to), staged ? staged->data() : sim_memory(from), size);
  });
  if (blocking || !target) wait(lock, stream);
  return cudaSuccess;
}
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t stream) {
  return copy(to, from, size, stream, false);
}
API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t stream) {
  return copy(to, from, size, stream, false);
}
API cudaError_t cudaMemsetAsync(void* address, int value, size_t size, cudaStream_t handle) {
  ENTER();
  CUstream_st* stream = stream_of(handle);
  queue(stream, "memset", {{address, size, true}}, [=] { pause(stream, 0); memset(sim_memory(address), value, size); });
  return cudaSuccess;
}

// --- streams and events

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  ENTER();
  open_context(current);
  *stream = new_stream(current, priority);
  return cudaSuccess;
}
API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  ENTER();
  *priority = stream_of(stream)->priority;
  return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t*,
                                         const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  *mode = cudaStreamCaptureModeGlobal;
  return cudaSuccess;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) { ENTER(); wait(lock, stream_of(stream)); return cudaSuccess; }
API cudaError_t cudaStreamQuery(cudaStream_t handle) {
  ENTER();
  CUstream_st* stream = stream_of(handle);
  if (stream->done < stream->queued) return cudaErrorNotReady;
  join(host_before, stream->before);
  return cudaSuccess;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
  ENTER();
  if (!event->mark) return cudaSuccess;
  CUstream_st* stream = stream_of(handle);
  auto mark = event->mark;
  join(stream->before, event->before);
  if (!mark->done) queue(stream, "wait", {}, [mark] { Lock lock(mutex); changed.wait(lock, [&] { return mark->done; }); });
  return cudaSuccess;
}
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  ENTER();
  open_context(current);
  *event = new CUevent_st{flags, current, nullptr, {}};
  return cudaSuccess;
}
API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  if (!forked) { Lock lock(mutex); delete event; }
  return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t handle, unsigned) {
  ENTER();
  CUstream_st* stream = stream_of(handle);
  if (event->device != stream->device) return fail(cudaErrorInvalidResourceHandle);
  auto mark = event->mark = std::make_shared<Mark>();
  auto stamp = [mark] { mark->at = Clock::now(); mark->done = true; };
  if (stream->done == stream->queued) stamp();
  else queue(stream, "event", {}, [stamp] { Lock lock(mutex); stamp(); });
  event->before = stream->before;
  return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }
API cudaError_t cudaEventQuery(cudaEvent_t event) {
  ENTER();
  if (event->mark && !event->mark->done) return cudaErrorNotReady;
  join(host_before, event->before);
  return cudaSuccess;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  ENTER();
  auto mark = event->mark;
  Order before = event->before;
  changed.wait(lock, [&] { return !mark || mark->done; });
  join(host_before, before);
  return cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  ENTER();
  bool timed = !((start->flags | end->flags) & cudaEventDisableTiming);
  if (!timed || !start->mark || !end->mark) return fail(cudaErrorInvalidResourceHandle);
  if (!start->mark->done || !end->mark->done) return cudaErrorNotReady;
  *milliseconds = std::chrono::duration<float, std::milli>(end->mark->at - start->mark->at).count();
  return cudaSuccess;
}
static cudaError_t call_on_host(cudaStream_t handle, std::function<void()> function) {
  ENTER();
  CUstream_st* stream = stream_of(handle);
  Order before = stream->before;
  queue(stream, "host function", {}, [before, function] {
    { Lock lock(mutex); join(host_before, before); }
    function();
  });
  return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return call_on_host(stream, [=] { function(data); });
}
API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
  return call_on_host(stream, [=] { function(stream, cudaSuccess, data); });
}

// --- kernels that kernels.cpp does not replace fail with their name, torch.cuda._sleep excepted

API void** __cudaRegisterFatBinary(void*) { static void* handle; return &handle; }
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  kernel_names[function] = name;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) { *kernel = (cudaKernel_t)function; return cudaSuccess; }
static thread_local struct { dim3 grid, block; size_t shared; void* stream; } launch_shape;
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  launch_shape = {grid, block, shared, stream};
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = launch_shape.grid;
  *block = launch_shape.block;
  *shared = launch_shape.shared;
  *(void**)stream = launch_shape.stream;
  return cudaSuccess;
}
API cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void** arguments, size_t, cudaStream_t handle) {
  ENTER();
  std::string name = kernel_names.count(function) ? kernel_names[function] : "an unknown kernel";
  if (name.find("spin_kernel") != std::string::npos) {
    CUstream_st* stream = stream_of(handle);
    int microseconds = (int)(*(int64_t*)arguments[0] / 1000);  // a clock of 1 GHz
    queue(stream, "sleep", {}, [=] { pause(stream, microseconds); });
    return cudaSuccess;
  }
  if (reported.insert(name).second) sim_log("no kernel %s in the simulation", name.c_str());
  return fail(cudaErrorNotSupported);
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  found->binaryVersion = found->ptxVersion = 90;
  return cudaSuccess;
}
static int no_driver_function() { return CUDA_NOT_SUPPORTED; }
API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (!*function) *function = (void*)no_driver_function;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
