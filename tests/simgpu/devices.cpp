// Simulated GPUs: what torch and pynvml call of libcudart, libcuda and libnvidia-ml.
//
// The addresses of a device are addresses of the process without access; its data lies at a fixed distance (REGION).
// Copies, collectives and host functions run late, on the thread of their stream, so that a value which is used without
// waiting for it is wrong. Kernels (simgpu_kernels.py) run on the caller's thread when their stream is done. What two
// streams do to the same memory without an order between them is found by vector clocks and logged as a RACE.
//
// Environment: SIMGPU_DEVICES is the number of devices, SIMGPU_MEMORY_MB the memory of each, SIMGPU_COPY_US the time
// that a copy takes, SIMGPU_LOG_COPIES the least number of bytes of a copy to the host that is logged. Messages are
// appended to the file `log` of the folder SIMGPU_FOLDER. Faults come and go while programs run: while this folder has the
// file `1.lost`, device 1 is lost; likewise "hung", "nccl", "slow" (contains the milliseconds of each operation), "ecc"
// (contains the number of memory errors) and "xid" (contains its number).
#include "sim.h"
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>
#include <utility>

using Clock = std::chrono::steady_clock;
using Lock = std::unique_lock<std::mutex>;
using Order = std::vector<uint64_t>;  // by stream: the last ticket that is known to be done before
struct Task { uint64_t ticket; std::function<void()> work; };
struct Mark { bool done = false; Clock::time_point at; };
struct Access { SimRange range; int stream; uint64_t ticket; std::string what; };
struct Segment { size_t size; int device; std::vector<Access> accesses; };  // device -1: pinned memory of the host
struct CUstream_st {
  int id, device, priority;
  uint64_t queued = 0, done = 0;
  Order before;
  std::deque<Task> tasks;
  bool has_thread = false;
};
struct CUevent_st { unsigned flags; int device; std::shared_ptr<Mark> mark; Order before; };

// Never destroyed, because threads of streams outlive main().
static auto& mutex = *new std::mutex;
static auto& changed = *new std::condition_variable;
static auto& streams = *new std::vector<CUstream_st*>;
static auto& default_streams = *new std::map<int, CUstream_st*>;
static auto& segments = *new std::map<const char*, Segment>;
static auto& devices = *new std::vector<int>;  // those that CUDA_VISIBLE_DEVICES shows
static auto& host_before = *new Order;
static size_t used[64];
static bool contexts[64], initialised = false, forked = false;
static const size_t REGION = 1ull << 40, BLOCK = 2 << 20;
static char* region = nullptr;
static size_t region_used = 0;
static thread_local int current = 0;
static thread_local cudaError_t last_error = cudaSuccess;

// --- the node

static int number(const char* name, int other) { return getenv(name) ? atoi(getenv(name)) : other; }
static int count() { return number("SIMGPU_DEVICES", 0); }
static size_t memory_size() { return (size_t)number("SIMGPU_MEMORY_MB", 16384) << 20; }
std::string sim_file(const std::string& name) { return getenv("SIMGPU_FOLDER") + ("/" + name); }
void sim_log(const char* format, ...) {
  va_list list;
  va_start(list, format);
  char text[1024];
  vsnprintf(text, sizeof text, format, list);
  FILE* file = fopen(sim_file("log").c_str(), "a");
  fprintf(file, "process %d: %s\n", getpid(), text);
  fclose(file);
}
static bool has_fault(int device, const char* kind, int* value = nullptr) {
  FILE* file = fopen(sim_file(std::to_string(device) + "." + kind).c_str(), "r");
  if (!file) return false;
  if (value && fscanf(file, "%d", value) != 1) *value = 0;
  fclose(file);
  return true;
}
bool sim_has_fault(int device, const char* kind) { return has_fault(devices[device], kind); }
static std::array<unsigned char, 16> uuid_bytes(int device) {  // differs between nodes, virtual ones included
  char host[256] = {0};
  gethostname(host, 255);
  uint64_t hash = std::hash<std::string>()(getenv("SLURMD_NODENAME") ? getenv("SLURMD_NODENAME") : host);
  std::array<unsigned char, 16> bytes{};
  memcpy(bytes.data(), &hash, 8);
  bytes[15] = (unsigned char)device;
  return bytes;
}
static std::string uuid(int device) {
  std::string text = "GPU-";
  for (int i = 0; auto byte : uuid_bytes(device)) {
    char digits[4];
    snprintf(digits, 4, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", byte);
    text += digits;
    i++;
  }
  return text;
}
// CUDA_VISIBLE_DEVICES ends at its first invalid word, and shows no device if one is repeated.
static std::vector<int> visible() {
  std::vector<int> all, found;
  for (int i = 0; i < count(); i++) all.push_back(i);
  const char* text = getenv("CUDA_VISIBLE_DEVICES");
  if (!text) return all;
  std::istringstream words(text);
  for (std::string word; std::getline(words >> std::ws, word, ',');) {
    auto device = std::ranges::find_if(all, [&](int device) {
      return word == std::to_string(device) || (word.starts_with("GPU-") && uuid(device).starts_with(word));
    });
    if (device == all.end()) break;
    if (std::ranges::count(found, *device)) return {};
    found.push_back(*device);
  }
  return found;
}

// --- streams and the order of their work. Most of these functions need the lock.

static cudaError_t fail(cudaError_t error) { return last_error = error; }
static cudaError_t initialise(int device = current) {
  if (forked) return fail(cudaErrorInitializationError);
  Lock lock(mutex);
  if (!initialised) {
    devices = visible();
    initialised = true;
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
    region = (char*)mmap(nullptr, 2 * REGION, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  if (devices.empty()) return fail(cudaErrorNoDevice);
  if (device < 0 || device >= (int)devices.size()) return fail(cudaErrorInvalidDevice);
  return has_fault(devices[device], "lost") ? fail(cudaErrorDevicesUnavailable) : cudaSuccess;
}
// A function of the runtime: an error without a usable device, otherwise the statements with the lock.
#define CALL(name, declared, ...)                       \
  API cudaError_t name declared {                       \
    if (cudaError_t error = initialise()) return error; \
    Lock lock(mutex);                                   \
    __VA_ARGS__;                                        \
    return cudaSuccess;                                 \
  }

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
  open_context(device);
  return streams.emplace_back(new CUstream_st{(int)streams.size(), device, priority});
}
static CUstream_st* stream_of(void* stream, int device = current) {
  if (stream > (void*)2) return (CUstream_st*)stream;
  auto& found = default_streams[device];
  return found ? found : found = new_stream(device, 0);
}
static Segment* segment_of(const void* address, const char** start = nullptr) {
  auto found = segments.upper_bound((const char*)address);
  if (found == segments.begin() || (const char*)address >= (--found)->first + found->second.size) return nullptr;
  if (start) *start = found->first;
  return &found->second;
}
void* sim_memory(const void* address) {
  bool on_device = region && (char*)address >= region && (char*)address < region + REGION;
  return (char*)address + (on_device ? REGION : 0);
}
std::string sim_gpu() { return initialise() ? "" : uuid(devices[current]); }

static void record(CUstream_st* stream, const char* what, const SimRange& range, uint64_t ticket) {
  Segment* segment = range.size ? segment_of(range.start) : nullptr;
  if (!segment) return;
  const char *start = (const char*)range.start, *end = start + range.size;
  std::erase_if(segment->accesses, [&](const Access& other) {
    const char *other_start = (const char*)other.range.start, *other_end = other_start + other.range.size;
    bool is_before = other.stream == stream->id || ticket_of(stream->before, other.stream) >= other.ticket;
    bool overlaps = start < other_end && other_start < end, conflicts = range.write || other.range.write;
    if (overlaps && conflicts && !is_before)
      sim_log("RACE: %s %s on stream %d what %s %s on stream %d, without an order between them", what,
              range.write ? "writes" : "reads", stream->id, other.what.c_str(),
              other.range.write ? "writes" : "reads", other.stream);
    // Forget what the host knows to be done, and what this access covers: a race with it is a race with this one, too.
    bool covers = is_before && start <= other_start && other_end <= end;
    return other.ticket <= ticket_of(host_before, other.stream) ||
           (covers && (range.write || (!other.range.write && other.stream == stream->id)));
  });
  segment->accesses.push_back({range, stream->id, ticket, what});
}
static uint64_t take_ticket(CUstream_st* stream, const char* what, const SimRange* ranges, int num_ranges) {
  open_context(stream->device);
  join(stream->before, host_before);
  for (int i = 0; i < num_ranges; i++) record(stream, what, ranges[i], stream->queued + 1);
  stream->before.resize(streams.size());
  return stream->before[stream->id] = ++stream->queued;
}
static void pause(CUstream_st* stream, int microseconds = 0) {
  int milliseconds = 0;
  if (has_fault(devices[stream->device], "slow", &milliseconds)) microseconds += 1000 * milliseconds;
  usleep(microseconds);
  while (sim_has_fault(stream->device, "hung")) usleep(10000);
}
static void run_tasks(CUstream_st* stream) {
  for (Lock lock(mutex);;) {
    changed.wait(lock, [&] { return !stream->tasks.empty() && stream->tasks.front().ticket == stream->done + 1; });
    auto work = std::move(stream->tasks.front().work);
    stream->tasks.pop_front();
    lock.unlock();
    work();
    lock.lock();
    stream->done++;
    changed.notify_all();
  }
}
using Ranges = std::vector<SimRange>;
static void queue(CUstream_st* stream, const char* what, const Ranges& ranges, std::function<void()> work) {
  uint64_t ticket = take_ticket(stream, what, ranges.data(), (int)ranges.size());
  if (!stream->has_thread) std::thread(run_tasks, stream).detach();
  stream->has_thread = true;
  stream->tasks.push_back({ticket, std::move(work)});
  changed.notify_all();
}
static void wait(Lock& lock, CUstream_st* stream) {
  Order before = stream->before;
  changed.wait(lock, [stream, ticket = stream->queued] { return stream->done >= ticket; });
  join(host_before, before);
}
static void wait_for_device(Lock& lock, int device) {
  for (size_t i = 0; i < streams.size(); i++)  // another thread may add one
    if (streams[i]->device == device) wait(lock, streams[i]);
}
void sim_queue(void* handle, const char* what, const std::vector<SimRange>& ranges, std::function<void()> work) {
  Lock lock(mutex);
  CUstream_st* stream = stream_of(handle);
  queue(stream, what, ranges, [stream, work] { pause(stream); work(); });
}
int64_t sim_begin(int device, void* handle, const char* what, const SimRange* ranges, int num_ranges) {
  if (cudaError_t error = initialise(device)) return -error;
  Lock lock(mutex);
  CUstream_st* stream = stream_of(handle, device);
  uint64_t ticket = take_ticket(stream, what, ranges, num_ranges);
  changed.wait(lock, [&] { return stream->done + 1 == ticket; });
  lock.unlock();
  pause(stream);
  return ticket;
}
void sim_end(int device, void* handle, int64_t ticket) {
  Lock lock(mutex);
  stream_of(handle, device)->done = ticket;
  changed.notify_all();
}

// --- devices

API const char* cudaGetErrorString(cudaError_t code) {
  switch (code) {
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInitializationError: return "initialization error";
    case cudaErrorDevicesUnavailable: return "CUDA-capable device(s) is/are busy or unavailable";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    default: return "not supported by the simulation";
  }
}
API const char* cudaGetErrorName(cudaError_t code) { return cudaGetErrorString(code); }
API cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
API cudaError_t cudaGetDeviceCount(int* count) {
  cudaError_t error = initialise();
  *count = (int)devices.size();
  return *count ? cudaSuccess : error;
}
CALL(cudaGetDevice, (int* device), *device = current)
API cudaError_t cudaSetDevice(int device) {
  if (cudaError_t error = initialise(device)) return error;
  Lock lock(mutex);
  open_context(current = device);
  return cudaSuccess;
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int device) {
  if (cudaError_t error = initialise(device)) return error;
  *found = {.name = "Simulated GPU", .totalGlobalMem = memory_size(), .major = 9, .multiProcessorCount = 132};
  memcpy(found->uuid.bytes, uuid_bytes(devices[device]).data(), 16);
  found->pciBusID = devices[device] + 1;
  return cudaSuccess;
}
CALL(cudaDeviceGetStreamPriorityRange, (int* low, int* high), *low = 0; *high = -5)
CALL(cudaDeviceSynchronize, (), wait_for_device(lock, current))

// --- memory

static size_t room_of(size_t size) { return (size + BLOCK - 1) / BLOCK * BLOCK; }
CALL(cudaMalloc, (void** address, size_t size), {
  open_context(current);
  if (used[current] + size > memory_size()) return fail(cudaErrorMemoryAllocation);
  *address = region + region_used;
  mprotect((char*)*address + REGION, room_of(size), PROT_READ | PROT_WRITE);
  region_used += room_of(size) + BLOCK;  // an address is never used again, so that stale pointers are found
  used[current] += size;
  segments[(char*)*address] = {size, current};
})
CALL(cudaFree, (void* address), {
  open_context(current);
  if (!address) return cudaSuccess;
  Segment& segment = segments.at((char*)address);
  wait_for_device(lock, segment.device);
  used[segment.device] -= segment.size;
  mprotect((char*)address + REGION, room_of(segment.size), PROT_NONE);
  madvise((char*)address + REGION, room_of(segment.size), MADV_DONTNEED);
  segments.erase((char*)address);
})
CALL(cudaHostAlloc, (void** address, size_t size, unsigned), {
  open_context(current);
  *address = aligned_alloc(4096, (size + 4095) / 4096 * 4096);
  segments[(char*)*address] = {size, -1};
})
CALL(cudaFreeHost, (void* address), {
  for (size_t device = 0; device < devices.size(); device++) wait_for_device(lock, (int)device);
  segments.erase((char*)address);
  free(address);
})
CALL(cudaMemGetInfo, (size_t* available, size_t* total), {
  open_context(current);
  *total = memory_size();
  *available = *total - used[current];
})
CALL(cudaPointerGetAttributes, (cudaPointerAttributes* found, const void* address), {
  Segment* segment = segment_of(address);
  bool on_device = segment && segment->device >= 0;
  found->type = !segment ? cudaMemoryTypeUnregistered : on_device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  found->device = on_device ? segment->device : current;
  found->devicePointer = segment ? (void*)address : nullptr;
  found->hostPointer = on_device ? nullptr : (void*)address;
})
// Pageable memory is staged, as by CUDA: read before the call returns, written before it returns.
CALL(cudaMemcpyAsync, (void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t handle), {
  CUstream_st* stream = stream_of(handle);
  std::shared_ptr<std::vector<char>> staged;
  Segment *source = segment_of(from), *target = segment_of(to);
  static int logged = number("SIMGPU_LOG_COPIES", 0);
  bool to_host = source && source->device >= 0 && (!target || target->device < 0);
  if (logged && to_host && size >= (size_t)logged) sim_log("copy of %zu bytes to the host", size);
  if (!segment_of(from)) staged = std::make_shared<std::vector<char>>((const char*)from, (const char*)from + size);
  static int delay = number("SIMGPU_COPY_US", 100);
  queue(stream, "copy", {{from, size, false}, {to, size, true}}, [=] {
    pause(stream, delay);
    memmove(sim_memory(to), staged ? staged->data() : sim_memory(from), size);
  });
  if (!segment_of(to)) wait(lock, stream);
})
API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, stream);
}

// --- streams and events

CALL(cudaStreamCreateWithPriority, (cudaStream_t* stream, unsigned, int priority),
     *stream = new_stream(current, priority))
CALL(cudaStreamIsCapturing, (cudaStream_t, cudaStreamCaptureStatus* status), *status = cudaStreamCaptureStatusNone)
CALL(cudaThreadExchangeStreamCaptureMode, (cudaStreamCaptureMode* mode), *mode = cudaStreamCaptureModeGlobal)
CALL(cudaStreamGetCaptureInfo, (cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long*, cudaGraph_t*,
                                const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*),
     *status = cudaStreamCaptureStatusNone)
CALL(cudaStreamSynchronize, (cudaStream_t stream), wait(lock, stream_of(stream)))
CALL(cudaStreamWaitEvent, (cudaStream_t handle, cudaEvent_t event, unsigned), {
  if (!event->mark) return cudaSuccess;
  join(stream_of(handle)->before, event->before);
  if (event->mark->done) return cudaSuccess;
  queue(stream_of(handle), "wait", {}, [mark = event->mark] {
    Lock lock(mutex);
    changed.wait(lock, [&] { return mark->done; });
  });
})
CALL(cudaEventCreateWithFlags, (cudaEvent_t* event, unsigned flags), *event = new CUevent_st{flags, current})
CALL(cudaEventDestroy, (cudaEvent_t event), delete event)
CALL(cudaEventRecordWithFlags, (cudaEvent_t event, cudaStream_t handle, unsigned), {
  CUstream_st* stream = stream_of(handle);
  if (event->device != stream->device) return fail(cudaErrorInvalidResourceHandle);
  event->mark = std::make_shared<Mark>();
  auto stamp = [mark = event->mark] { mark->at = Clock::now(); mark->done = true; };
  if (stream->done == stream->queued) stamp();
  else queue(stream, "event", {}, [stamp] { Lock lock(mutex); stamp(); });
  event->before = stream->before;
})
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}
CALL(cudaEventQuery, (cudaEvent_t event), {
  if (event->mark && !event->mark->done) return cudaErrorNotReady;
  join(host_before, event->before);
})
CALL(cudaEventSynchronize, (cudaEvent_t event), {
  auto [mark, before] = std::pair(event->mark, event->before);
  changed.wait(lock, [mark = mark] { return !mark || mark->done; });
  join(host_before, before);
})
CALL(cudaEventElapsedTime, (float* milliseconds, cudaEvent_t start, cudaEvent_t end), {
  bool timed = !((start->flags | end->flags) & cudaEventDisableTiming);
  if (!timed || !start->mark || !end->mark) return fail(cudaErrorInvalidResourceHandle);
  if (!start->mark->done || !end->mark->done) return cudaErrorNotReady;
  *milliseconds = std::chrono::duration<float, std::milli>(end->mark->at - start->mark->at).count();
})
CALL(cudaStreamAddCallback, (cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned),
     queue(stream_of(stream), "callback", {}, [=, before = stream_of(stream)->before] {
       { Lock lock(mutex); join(host_before, before); }
       function(stream, cudaSuccess, data);
     }))

// --- kernels: simgpu_kernels.py replaces those that are in use

API void** __cudaRegisterFatBinary(void*) { static void* handle; return &handle; }
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterFunction() {}
API void __cudaRegisterVar() {}
API int __cudaPushCallConfiguration() { return fail(cudaErrorNotSupported); }
API void sim_sleep(int device, void* stream, int microseconds) {
  Lock lock(mutex);
  CUstream_st* found = stream_of(stream, device);
  queue(found, "sleep", {}, [=] { pause(found, microseconds); });
}
API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (!*function) *function = (void*)+[] { return (int)cudaErrorNotSupported; };
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// --- the driver. The context of device N has the number 1 + N.

API int cuInit(unsigned) { return visible().empty() ? cudaErrorNoDevice : cudaSuccess; }
API int cuDeviceGetCount(int* found) { return cudaGetDeviceCount(found); }
API int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  *flags = 0;
  *active = !forked && contexts[device];
  return cudaSuccess;
}
API int cuCtxGetCurrent(size_t* context) { return *context = !forked && contexts[0], cudaSuccess; }
API int cuCtxSetCurrent(size_t) { return cudaSuccess; }
API int cuPointerGetAttribute(void* value, int attribute, const char* address) {
  enum { CONTEXT = 1, MEMORY_TYPE = 2, BUFFER_ID = 7, DEVICE_ORDINAL = 9, HOST = 1, DEVICE = 2 };
  Lock lock(mutex);
  Segment* segment = segment_of(address);
  if (!segment) return cudaErrorInvalidValue;
  switch (attribute) {
    case MEMORY_TYPE: *(unsigned*)value = segment->device < 0 ? HOST : DEVICE; break;
    case DEVICE_ORDINAL: *(int*)value = segment->device; break;
    case BUFFER_ID: *(const char**)value = address; break;
    case CONTEXT: *(size_t*)value = 1 + segment->device; break;
    default: return cudaErrorNotSupported;
  }
  return cudaSuccess;
}
// --- NVML. The handle of device N is 1 + N.

enum { OK = 0, INVALID = 2, NOT_FOUND = 6, DRIVER_NOT_LOADED = 9, TIMEOUT = 10, GPU_IS_LOST = 15 };
using Number = unsigned long long;
static const Number RESERVED = 600 << 20;
#define ANSWER(name, declared, ...)                             \
  API int nvmlDevice##name declared {                           \
    if (has_fault((int)device - 1, "lost")) return GPU_IS_LOST; \
    __VA_ARGS__;                                                \
    return OK;                                                  \
  }
API int nvmlInit_v2() { return count() ? OK : DRIVER_NOT_LOADED; }
API int nvmlInitWithFlags(unsigned) { return nvmlInit_v2(); }
API int nvmlSystemGetDriverVersion(char* text, unsigned size) { return snprintf(text, size, "595.45.04"), OK; }
API int nvmlDeviceGetCount_v2(int* found) { return *found = count(), OK; }
API int nvmlDeviceGetHandleByIndex_v2(unsigned index, size_t* device) {
  if ((int)index >= count()) return INVALID;
  *device = 1 + index;
  return has_fault((int)index, "lost") ? GPU_IS_LOST : OK;
}
API int nvmlDeviceGetHandleByUUID(const char* wanted, size_t* device) {
  for (int index = 0; index < count(); index++)
    if (uuid(index) == wanted) return nvmlDeviceGetHandleByIndex_v2(index, device);
  return NOT_FOUND;
}
API int nvmlDeviceGetHandleByPciBusId_v2(const char* text, size_t* device) {
  unsigned bus = 0;
  return sscanf(text, "%*x:%x", &bus) == 1 ? nvmlDeviceGetHandleByIndex_v2(bus - 1, device) : NOT_FOUND;
}
ANSWER(GetName, (size_t device, char* text, unsigned size), snprintf(text, size, "Simulated GPU"))
ANSWER(GetMemoryInfo, (size_t device, Number* out),  // total, free, used
       out[0] = memory_size(); out[1] = out[0] - RESERVED; out[2] = RESERVED)
ANSWER(GetMemoryInfo_v2, (size_t device, Number* out),  // version, total, reserved, free, used
       out[1] = memory_size(); out[2] = 0; out[3] = out[1] - RESERVED; out[4] = RESERVED)
ANSWER(GetUtilizationRates, (size_t device, unsigned* out), out[0] = 37; out[1] = 5)
ANSWER(GetPowerUsage, (size_t device, unsigned* milliwatts), *milliwatts = 312000)
ANSWER(GetEnforcedPowerLimit, (size_t device, unsigned* milliwatts), *milliwatts = 700000)
ANSWER(GetTotalEnergyConsumption, (size_t device, Number* millijoules), *millijoules = (Number)time(nullptr) * 312000)
ANSWER(GetTotalEccErrors, (size_t device, int, int, Number* found),
       int errors = 0; has_fault((int)device - 1, "ecc", &errors); *found = errors)
ANSWER(GetCurrentClocksEventReasons, (size_t device, Number* bits),
       *bits = has_fault((int)device - 1, "slow") ? 0x20 : 0)
ANSWER(GetComputeRunningProcesses_v3, (size_t device, unsigned* found, void*), *found = 0)

// The only set of events gets one Xid of each device.
struct Event { size_t device; Number type, xid; };
API int nvmlEventSetCreate(size_t* events) { return *events = 1, OK; }
ANSWER(RegisterEvents, (size_t device, Number types, size_t))
API int nvmlEventSetWait_v2(size_t, Event* event, unsigned milliseconds) {
  static std::set<int> reported;
  usleep(1000 * milliseconds);
  for (int index = 0, xid = 0; index < count(); index++)
    if (has_fault(index, "xid", &xid) && reported.insert(index).second)
      return *event = {1 + (size_t)index, 8, (Number)xid}, OK;
  return TIMEOUT;
}
