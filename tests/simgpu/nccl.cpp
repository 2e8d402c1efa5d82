// Simulated NCCL for one process per rank. A message is a file in the folder of its communicator (nccl-…), which all
// nodes see. A collective sends every input to every rank, and each rank computes its result. Calls return at once and
// run on the thread of their stream. As in NCCL, two ranks on one GPU are refused, and a missing rank hangs the others.
#include "sim.h"
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <string.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>

namespace fs = std::filesystem;
using Bytes = std::vector<char>;
struct ncclComm {
  fs::path folder;
  int rank, ranks, device = 0, splits = 0;
  std::vector<int> sent, received;  // number of messages by rank
  std::atomic<int> queued = 0;
  std::atomic<bool> aborted = false;
};
static std::string last_error;

// --- messages

static void send(ncclComm_t comm, int to, const char* data, size_t size) {
  if (!size) return;
  auto name = std::to_string(comm->rank) + "-" + std::to_string(to) + "-" + std::to_string(comm->sent[to]++);
  std::ofstream(comm->folder / ("part." + name), std::ios::binary).write(data, size);
  fs::rename(comm->folder / ("part." + name), comm->folder / name);
}
static Bytes receive(ncclComm_t comm, int from, size_t size) {
  Bytes bytes(size);
  if (!size) return bytes;
  auto name = std::to_string(from) + "-" + std::to_string(comm->rank) + "-" + std::to_string(comm->received[from]++);
  while (!fs::exists(comm->folder / name)) {
    if (comm->aborted) return bytes;
    usleep(100);
  }
  std::ifstream(comm->folder / name, std::ios::binary).read(bytes.data(), size);
  fs::remove(comm->folder / name);
  return bytes;
}
static std::vector<Bytes> send_to_all(ncclComm_t comm, const std::string& own) {
  std::vector<Bytes> found;
  for (int to = 0; to < comm->ranks; to++) send(comm, to, own.data(), own.size());
  for (int from = 0; from < comm->ranks; from++) found.push_back(receive(comm, from, own.size()));
  return found;
}
static ncclResult_t join(ncclComm_t* out, const std::string& name, int rank, int ranks) {
  auto* comm = *out = new ncclComm{sim_file(name), rank, ranks};
  comm->sent.resize(ranks);
  comm->received.resize(ranks);
  fs::create_directories(comm->folder);
  cudaGetDevice(&comm->device);
  cudaFree(nullptr);
  std::vector<Bytes> gpus = send_to_all(comm, sim_gpu());
  for (int a = 0; a < ranks; a++)
    for (int b = 0; b < a; b++)
      if (gpus[a] == gpus[b]) {
        last_error = "Duplicate GPU detected : rank " + std::to_string(b) + " and rank " + std::to_string(a) +
                     " both on CUDA device " + std::string(gpus[a].begin(), gpus[a].end());
        return ncclInvalidUsage;
      }
  return ncclSuccess;
}

// --- operations

// Call a function with a value of the type; one that is not in the list is sent as bytes.
static auto with_type(ncclDataType_t type, auto function) {
  switch (type) {
    case ncclInt8: return function(int8_t());
    case ncclInt32: return function(int32_t());
    case ncclUint32: return function(uint32_t());
    case ncclInt64: return function(int64_t());
    case ncclUint64: return function(uint64_t());
    case ncclFloat16: return function(__half());
    case ncclFloat32: return function(float());
    case ncclFloat64: return function(double());
    case ncclBfloat16: return function(__nv_bfloat16());
    default: return function(uint8_t());
  }
}
static size_t size_of(ncclDataType_t type) {
  return with_type(type, [](auto zero) { return sizeof zero; });
}
template <class T> static void reduce(const std::vector<Bytes>& in, size_t count, ncclRedOp_t op, T* out) {
  using Wide = std::conditional_t<std::is_integral_v<T>, int64_t, std::conditional_t<sizeof(T) == 8, double, float>>;
  for (size_t i = 0; i < count; i++) {
    auto value_of = [&](const Bytes& bytes) { return (Wide)((T*)bytes.data())[i]; };
    Wide total = value_of(in[0]);
    for (size_t rank = 1; rank < in.size(); rank++) {
      Wide value = value_of(in[rank]);
      if (op == ncclProd) total *= value;
      else if (op == ncclMax) total = std::max(total, value);
      else if (op == ncclMin) total = std::min(total, value);
      else total += value;
    }
    out[i] = (T)(op == ncclAvg ? total / (Wide)in.size() : total);
  }
}

struct Part { size_t start = 0, size = 0; };
struct Call {
  const char* name;
  ncclComm_t comm;
  void* stream;
  const void* input;
  void* output;
  std::vector<Part> sends, receives;  // by rank: bytes of the input, and number of bytes from each
  std::function<void(std::vector<Bytes>& received, char* output)> use;
};
static void concatenate(std::vector<Bytes>& received, char* output) {
  for (auto& bytes : received) output = std::ranges::copy(bytes, output).out;
}
// The operations of a group go together: all that is sent comes before what is received.
static void run(ncclComm_t comm, const std::vector<Call>& calls) {
  for (auto& call : calls)
    for (int to = 0; to < comm->ranks; to++)
      send(comm, to, (char*)sim_memory(call.input) + call.sends[to].start, call.sends[to].size);
  for (auto& call : calls) {
    std::vector<Bytes> received;
    for (int from = 0; from < comm->ranks; from++) received.push_back(receive(comm, from, call.receives[from].size));
    if (!comm->aborted && call.output) call.use(received, (char*)sim_memory(call.output));
  }
  comm->queued--;
  comm->queued.notify_all();
}
static thread_local int depth = 0;
static thread_local std::map<ncclComm_t, std::vector<Call>> group;
static ncclResult_t submit() {
  for (auto& [key, calls] : std::exchange(group, {})) {
    ncclComm_t comm = key;
    std::vector<SimRange> ranges;
    for (auto& call : calls) {
      size_t read = 0, written = 0;
      for (auto& part : call.sends) read = std::max(read, part.start + part.size);
      for (auto& part : call.receives) written = std::max(written, part.start + part.size);
      ranges.insert(ranges.end(), {{call.input, read, false}, {call.output, written, true}});
    }
    comm->queued++;
    sim_queue(calls[0].stream, calls[0].name, ranges, [comm, calls = calls] { run(comm, calls); });
  }
  return ncclSuccess;
}
static ncclResult_t add(Call call) {
  group[call.comm].push_back(std::move(call));
  return depth ? ncclSuccess : submit();
}
// The same size for each rank, or for one alone; `step` is the distance between the ranks' parts.
static std::vector<Part> parts(ncclComm_t comm, size_t size, size_t step = 0, int only = -1) {
  std::vector<Part> found(comm->ranks);
  for (int rank = 0; rank < comm->ranks; rank++)
    if (only < 0 || rank == only) found[rank] = {rank * step, size};
  return found;
}
static auto reduced(size_t count, ncclDataType_t type, ncclRedOp_t op) {
  return [=](std::vector<Bytes>& received, char* output) {
    with_type(type, [&](auto zero) { reduce(received, count, op, (decltype(zero)*)output); });
  };
}

API ncclResult_t ncclGetVersion(int* version) { return *version = NCCL_VERSION_CODE, ncclSuccess; }
API const char* ncclGetErrorString(ncclResult_t) { return "invalid usage"; }
API const char* ncclGetLastError(ncclComm_t) { return last_error.c_str(); }
API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::random_device random;
  snprintf(id->internal, sizeof id->internal, "nccl-%08x%08x", random(), random());
  return ncclSuccess;
}
API ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t*) {
  return join(comm, id.internal, rank, ranks);
}
API ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  while (int queued = comm->queued) comm->queued.wait(queued);
  return ncclSuccess;
}
API ncclResult_t ncclCommAbort(ncclComm_t comm) { return comm->aborted = true, ncclSuccess; }
API ncclResult_t ncclCommDestroy(ncclComm_t comm) { return ncclCommFinalize(comm); }
API ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* result) {
  return *result = sim_has_fault(comm->device, "nccl") ? ncclRemoteError : ncclSuccess, ncclSuccess;
}
API ncclResult_t ncclCommCount(ncclComm_t comm, int* ranks) { return *ranks = comm->ranks, ncclSuccess; }
API ncclResult_t ncclCommUserRank(ncclComm_t comm, int* rank) { return *rank = comm->rank, ncclSuccess; }
API ncclResult_t ncclCommRegister(ncclComm_t, void*, size_t, void** handle) { return *handle = handle, ncclSuccess; }
API ncclResult_t ncclCommDeregister(ncclComm_t, void*) { return ncclSuccess; }
API ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* out, ncclConfig_t*) {
  ncclCommFinalize(comm);  // what was queued before uses the same messages
  struct Choice { int color, key, rank; } own{color, key, comm->rank};
  std::vector<Choice> members;
  for (auto& bytes : send_to_all(comm, std::string((char*)&own, sizeof own))) members.push_back((Choice&)bytes[0]);
  std::erase_if(members, [&](auto& member) { return member.color != color; });
  std::ranges::stable_sort(members, {}, &Choice::key);
  auto name = comm->folder.filename().string() + "-" + std::to_string(comm->splits++) + "-" + std::to_string(color);
  int rank = (int)(std::ranges::find(members, own.rank, &Choice::rank) - members.begin());
  *out = nullptr;
  return color < 0 ? ncclSuccess : join(out, name, rank, (int)members.size());
}
API ncclResult_t ncclGroupStart() { return depth++, ncclSuccess; }
API ncclResult_t ncclGroupEnd() { return --depth ? ncclSuccess : submit(); }

#define DATA size_t count, ncclDataType_t type
#define WHERE ncclComm_t comm, cudaStream_t stream
#define SIZE (count * size_of(type))
API ncclResult_t ncclAllReduce(const void* in, void* out, DATA, ncclRedOp_t op, WHERE) {
  return add({"ncclAllReduce", comm, stream, in, out, parts(comm, SIZE), parts(comm, SIZE), reduced(count, type, op)});
}
API ncclResult_t ncclReduce(const void* in, void* out, DATA, ncclRedOp_t op, int root, WHERE) {
  bool here = comm->rank == root;
  return add({"ncclReduce", comm, stream, in, here ? out : nullptr, parts(comm, SIZE, 0, root),
              parts(comm, here ? SIZE : 0), reduced(count, type, op)});
}
API ncclResult_t ncclReduceScatter(const void* in, void* out, DATA, ncclRedOp_t op, WHERE) {
  return add({"ncclReduceScatter", comm, stream, in, out, parts(comm, SIZE, SIZE), parts(comm, SIZE),
              reduced(count, type, op)});
}
API ncclResult_t ncclBroadcast(const void* in, void* out, DATA, int root, WHERE) {
  auto sends = parts(comm, comm->rank == root ? SIZE : 0);
  return add({"ncclBroadcast", comm, stream, in, out, sends, parts(comm, SIZE, 0, root), concatenate});
}
API ncclResult_t ncclBcast(void* data, DATA, int root, WHERE) {
  return ncclBroadcast(data, data, count, type, root, comm, stream);
}
API ncclResult_t ncclAllGather(const void* in, void* out, DATA, WHERE) {
  return add({"ncclAllGather", comm, stream, in, out, parts(comm, SIZE), parts(comm, SIZE, SIZE), concatenate});
}
API ncclResult_t ncclAlltoAll(const void* in, void* out, DATA, WHERE) {
  auto each = parts(comm, SIZE, SIZE);
  return add({"ncclAlltoAll", comm, stream, in, out, each, each, concatenate});
}
API ncclResult_t ncclSend(const void* in, DATA, int peer, WHERE) {
  return add({"ncclSend", comm, stream, in, nullptr, parts(comm, SIZE, 0, peer), parts(comm, 0), concatenate});
}
API ncclResult_t ncclRecv(void* out, DATA, int peer, WHERE) {
  return add({"ncclRecv", comm, stream, nullptr, out, parts(comm, 0), parts(comm, SIZE, 0, peer), concatenate});
}
