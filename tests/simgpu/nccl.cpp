// libnccl.so.2 without a GPU, for one process per rank: the ranks of a communicator are connected to each other by TCP, a
// collective sends every input to every rank, and each computes its result. Calls return at once and run on the thread of
// their stream. As in NCCL two ranks on one GPU are refused, and a missing rank hangs the others until they abort.
#include <arpa/inet.h>
#include <cuda_runtime_api.h>
#include <ifaddrs.h>
#include <nccl.h>
#include <net/if.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>
#include "sim.h"

using Bytes = std::vector<char>;
struct Id { uint64_t key; sockaddr_in address; };
struct Member { uint64_t key; int rank; unsigned char gpu[16]; sockaddr_in address; };
struct ncclComm {
  int rank, ranks, device;
  std::vector<int> sockets;  // by rank; -1 for this one
  std::mutex mutex;
  std::condition_variable changed;
  int queued = 0;
  std::atomic<bool> aborted{false};
  std::map<int, double> factors;  // of reductions made by ncclRedOpCreatePreMulSum
};
static std::string last_error;
static ncclResult_t fail(ncclResult_t code, const std::string& text) {
  last_error = text;
  sim_log("NCCL: %s", text.c_str());
  return code;
}
static bool send_all(int socket, const void* data, size_t size) {
  for (ssize_t n; size; data = (const char*)data + n, size -= n)
    if ((n = TEMP_FAILURE_RETRY(send(socket, data, size, MSG_NOSIGNAL))) <= 0) return false;
  return true;
}
static bool receive_all(int socket, void* data, size_t size) {
  for (ssize_t n; size; data = (char*)data + n, size -= n)
    if ((n = TEMP_FAILURE_RETRY(recv(socket, data, size, 0))) <= 0) return false;
  return true;
}

// --- communicators

static bool own_address(in_addr* address) {
  const char* wanted = getenv("NCCL_SOCKET_IFNAME");
  ifaddrs* list;
  if (getifaddrs(&list)) return false;
  bool found = false;
  for (bool loopback : {false, true})
    for (ifaddrs* i = list; i && !found; i = i->ifa_next) {
      bool up = i->ifa_addr && i->ifa_addr->sa_family == AF_INET && (i->ifa_flags & IFF_UP);
      bool named = wanted && *wanted, chosen = !named && loopback == !!(i->ifa_flags & IFF_LOOPBACK);
      if (named) for (auto& word : sim_words(wanted)) chosen |= !strncmp(i->ifa_name, word.c_str() + (word[0] == '='), word.size() - (word[0] == '='));
      if ((found = up && chosen)) *address = ((sockaddr_in*)i->ifa_addr)->sin_addr;
    }
  freeifaddrs(list);
  return found;
}
static int listen_at(sockaddr_in* address) {
  *address = {};
  address->sin_family = AF_INET;
  socklen_t size = sizeof *address;
  int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  bool ready = own_address(&address->sin_addr) && !bind(socket, (sockaddr*)address, size) && !listen(socket, 64);
  if (ready && !getsockname(socket, (sockaddr*)address, &size)) return socket;
  close(socket);
  return -1;
}
static int connect_to(const sockaddr_in& address) {
  int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  if (!connect(socket, (const sockaddr*)&address, sizeof address)) return socket;
  close(socket);
  return -1;
}
// Collects the members of a communicator, and tells each of them all.
static void gather_members(int listener, uint64_t key) {
  std::map<int, int> sockets;
  std::vector<Member> members(1);
  while (sockets.size() < members.size()) {
    int socket = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC), ranks;
    Member member;
    if (!receive_all(socket, &ranks, sizeof ranks) || !receive_all(socket, &member, sizeof member) || member.key != key) {
      close(socket);
      continue;
    }
    members.resize(ranks);
    members.at(member.rank) = member;
    sockets[member.rank] = socket;
  }
  for (auto& [rank, socket] : sockets) {
    send_all(socket, members.data(), members.size() * sizeof(Member));
    close(socket);
  }
  close(listener);
}
static ncclResult_t connect_all(ncclComm_t comm, const Id& id) {
  Member own{id.key, comm->rank, {}, {}};
  int physical = sim_device(), listener = listen_at(&own.address), root = connect_to(id.address);
  if (physical < 0) return fail(ncclUnhandledCudaError, "no CUDA device");
  if (listener < 0 || root < 0) return fail(ncclSystemError, "the other ranks cannot be reached");
  sim_uuid_bytes(physical, own.gpu);
  std::vector<Member> members(comm->ranks);
  bool told = send_all(root, &comm->ranks, sizeof(int)) && send_all(root, &own, sizeof own);
  told = told && receive_all(root, members.data(), members.size() * sizeof(Member));
  close(root);
  if (!told) return fail(ncclRemoteError, "the connection to rank 0 is lost");
  for (int a = 0; a < comm->ranks; a++)
    for (int b = 0; b < a; b++)
      if (!memcmp(members[a].gpu, members[b].gpu, 16))
        return fail(ncclInvalidUsage, "Duplicate GPU detected : rank " + std::to_string(b) + " and rank " + std::to_string(a) +
                                          " both on CUDA device " + std::to_string((members[a].gpu[15] + 1) << 12));
  for (int rank = 0; rank < comm->rank; rank++) {
    comm->sockets[rank] = connect_to(members[rank].address);
    send_all(comm->sockets[rank], &comm->rank, sizeof(int));
  }
  for (int rank = comm->rank + 1, from; rank < comm->ranks; rank++) {
    int socket = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC), on = 1;
    setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (receive_all(socket, &from, sizeof from)) comm->sockets.at(from) = socket;
  }
  close(listener);
  return ncclSuccess;
}
static ncclResult_t join(ncclComm_t* comm, const Id& id, int rank, int ranks) {
  *comm = new ncclComm{rank, ranks, 0, std::vector<int>(ranks, -1)};
  cudaGetDevice(&(*comm)->device);
  cudaFree(nullptr);
  return connect_all(*comm, id);
}

// --- operations

// The messages of an operation, by rank: an empty one is not sent, and received only if a size is expected.
static bool exchange(ncclComm_t comm, const std::vector<Bytes>& out, std::vector<Bytes>& in) {
  std::vector<std::thread> senders;
  for (int rank = 0; rank < comm->ranks; rank++)
    if (rank == comm->rank) in[rank] = out[rank];
    else if (!out[rank].empty())
      senders.emplace_back([&, rank] { send_all(comm->sockets[rank], out[rank].data(), out[rank].size()); });
  bool complete = true;
  for (int rank = 0; rank < comm->ranks; rank++)
    if (rank != comm->rank) complete &= receive_all(comm->sockets[rank], in[rank].data(), in[rank].size());
  for (auto& sender : senders) sender.join();
  return complete;
}
static size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
    case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
    case ncclFloat16: case ncclBfloat16: return 2;
    default: return 1;
  }
}
static float from_bfloat16(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}
static uint16_t to_bfloat16(float value) {
  uint32_t wide;
  memcpy(&wide, &value, 4);
  return value != value ? 0x7fc0 : (uint16_t)((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
}
using Wide = long double;  // holds every 64-bit integer
static Wide load(const void* data, size_t i, ncclDataType_t type) {
  switch (type) {
    case ncclInt8: return ((int8_t*)data)[i];
    case ncclInt32: return ((int32_t*)data)[i];
    case ncclUint32: return ((uint32_t*)data)[i];
    case ncclInt64: return ((int64_t*)data)[i];
    case ncclUint64: return ((uint64_t*)data)[i];
    case ncclFloat16: return ((_Float16*)data)[i];
    case ncclFloat32: return ((float*)data)[i];
    case ncclFloat64: return ((double*)data)[i];
    case ncclBfloat16: return from_bfloat16(((uint16_t*)data)[i]);
    default: return ((uint8_t*)data)[i];
  }
}
static void store(void* data, size_t i, ncclDataType_t type, Wide value) {
  switch (type) {
    case ncclInt8: ((int8_t*)data)[i] = (int8_t)value; break;
    case ncclInt32: ((int32_t*)data)[i] = (int32_t)value; break;
    case ncclUint32: ((uint32_t*)data)[i] = (uint32_t)value; break;
    case ncclInt64: ((int64_t*)data)[i] = (int64_t)value; break;
    case ncclUint64: ((uint64_t*)data)[i] = (uint64_t)value; break;
    case ncclFloat16: ((_Float16*)data)[i] = (_Float16)(float)value; break;
    case ncclFloat32: ((float*)data)[i] = (float)value; break;
    case ncclFloat64: ((double*)data)[i] = (double)value; break;
    case ncclBfloat16: ((uint16_t*)data)[i] = to_bfloat16((float)value); break;
    default: ((uint8_t*)data)[i] = (uint8_t)value;
  }
}
static void reduce(const std::vector<Bytes>& in, size_t count, ncclDataType_t type, int op, Wide factor, void* out) {
  for (size_t i = 0; i < count; i++) {
    Wide total = load(in[0].data(), i, type) * factor;
    for (size_t rank = 1; rank < in.size(); rank++) {
      Wide value = load(in[rank].data(), i, type) * factor;
      total = op == ncclProd ? total * value : op == ncclMax ? std::max(total, value) : op == ncclMin ? std::min(total, value) : total + value;
    }
    store(out, i, type, op == ncclAvg ? total / in.size() : total);
  }
}

// An operation: which bytes of `input` go to each rank (offset and size), how many come from each, and what becomes of them.
struct Call {
  const char* name;
  ncclComm_t comm;
  cudaStream_t stream;
  const void* input;
  void* output;
  size_t output_size;
  std::vector<std::pair<size_t, size_t>> sends;
  std::vector<size_t> receives;
  std::function<void(std::vector<Bytes>& received, char* output)> use;
};
// The operations of a group go together: one message to each rank.
static void run(ncclComm_t comm, const std::vector<Call>& calls) {
  std::vector<Bytes> out(comm->ranks), in(comm->ranks);
  for (int rank = 0; rank < comm->ranks; rank++)
    for (auto& call : calls) {
      const char* start = (const char*)sim_memory(call.input) + call.sends[rank].first;
      out[rank].insert(out[rank].end(), start, start + call.sends[rank].second);
      in[rank].resize(in[rank].size() + call.receives[rank]);
    }
  bool complete = exchange(comm, out, in);
  while (!complete && !comm->aborted) usleep(1000);  // a lost rank hangs the others
  std::vector<size_t> used(comm->ranks);
  for (auto& call : calls) {
    std::vector<Bytes> received(comm->ranks);
    for (int rank = 0; rank < comm->ranks; used[rank] += call.receives[rank], rank++) {
      auto start = in[rank].begin() + used[rank];
      received[rank].assign(start, start + call.receives[rank]);
    }
    if (complete && call.output_size) call.use(received, (char*)sim_memory(call.output));
  }
  std::lock_guard<std::mutex> lock(comm->mutex);
  comm->queued--;
  comm->changed.notify_all();
}
static thread_local int depth = 0;
static thread_local std::vector<Call> group;
static void submit() {
  std::map<ncclComm_t, std::vector<Call>> by_comm;
  for (auto& call : group) by_comm[call.comm].push_back(std::move(call));
  group.clear();
  for (auto& [key, calls] : by_comm) {
    ncclComm_t comm = key;
    std::vector<SimRange> ranges;
    for (auto& call : calls) {
      size_t size = 0;
      for (auto& [start, part] : call.sends) size = std::max(size, start + part);
      ranges.push_back({call.input, size, false});
      ranges.push_back({call.output, call.output_size, true});
    }
    { std::lock_guard<std::mutex> lock(comm->mutex); comm->queued++; }
    sim_queue(calls[0].stream, calls[0].name, ranges, [comm, calls = calls] { run(comm, calls); });
  }
}
static ncclResult_t add(Call call) {
  if (call.comm->aborted) return ncclInvalidUsage;
  group.push_back(std::move(call));
  if (!depth) submit();
  return ncclSuccess;
}
static void concatenate(std::vector<Bytes>& received, char* output) {
  for (auto& bytes : received) output = std::copy(bytes.begin(), bytes.end(), output);
}
using Sends = std::vector<std::pair<size_t, size_t>>;
static Sends to_all(ncclComm_t comm, size_t size) { return Sends(comm->ranks, {0, size}); }
static Sends to_each(ncclComm_t comm, size_t size) {
  Sends sends;
  for (int rank = 0; rank < comm->ranks; rank++) sends.push_back({rank * size, size});
  return sends;
}
static Sends to_one(ncclComm_t comm, int to, size_t size) {
  Sends sends(comm->ranks);
  sends[to].second = size;
  return sends;
}
static std::vector<size_t> from_all(ncclComm_t comm, size_t size) { return std::vector<size_t>(comm->ranks, size); }
static std::vector<size_t> from_one(ncclComm_t comm, int from, size_t size) {
  std::vector<size_t> receives(comm->ranks);
  receives[from] = size;
  return receives;
}
static auto reduced(ncclComm_t comm, size_t count, ncclDataType_t type, ncclRedOp_t op) {
  Wide factor = comm->factors.count(op) ? comm->factors[op] : 1;
  return [=](std::vector<Bytes>& received, char* output) { reduce(received, count, type, op, factor, output); };
}

extern "C" {
ncclResult_t ncclGetVersion(int* version) { *version = NCCL_VERSION_CODE; return ncclSuccess; }
const char* ncclGetErrorString(ncclResult_t code) { return code == ncclInvalidUsage ? "invalid usage" : code ? "unhandled error of the simulation" : "no error"; }
const char* ncclGetLastError(ncclComm_t) { return last_error.c_str(); }
ncclResult_t ncclGetUniqueId(ncclUniqueId* out) {
  static std::atomic<int> made{0};
  Id id{((uint64_t)getpid() << 32) + (uint32_t)time(nullptr) + ++made, {}};
  int listener = listen_at(&id.address);
  if (listener < 0) return fail(ncclSystemError, "no network interface");
  std::thread(gather_members, listener, id.key).detach();
  memset(out, 0, sizeof *out);
  memcpy(out, &id, sizeof id);
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t*) {
  return join(comm, (Id&)id, rank, ranks);
}
ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  std::unique_lock<std::mutex> lock(comm->mutex);
  comm->changed.wait(lock, [&] { return !comm->queued; });
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  comm->aborted = true;
  for (int socket : comm->sockets) if (socket >= 0) shutdown(socket, SHUT_RDWR);
  return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) { ncclCommFinalize(comm); return ncclCommAbort(comm); }
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* result) { *result = ncclSuccess; return ncclSuccess; }
ncclResult_t ncclCommCount(const ncclComm_t comm, int* ranks) { *ranks = comm->ranks; return ncclSuccess; }
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) { *rank = comm->rank; return ncclSuccess; }
ncclResult_t ncclCommRegister(const ncclComm_t, void*, size_t, void** handle) { *handle = handle; return ncclSuccess; }
ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* out, ncclConfig_t*) {
  ncclCommFinalize(comm);  // what was queued before uses the same connections
  struct Choice { int color, key, rank; ncclUniqueId id; };
  Choice own{color, key, comm->rank, {}};
  ncclGetUniqueId(&own.id);
  std::vector<Bytes> in(comm->ranks, Bytes(sizeof own));
  if (!exchange(comm, std::vector<Bytes>(comm->ranks, Bytes((char*)&own, (char*)(&own + 1))), in)) return ncclRemoteError;
  std::vector<Choice> members;
  for (auto& bytes : in) if (((Choice&)bytes[0]).color == color) members.push_back((Choice&)bytes[0]);
  std::stable_sort(members.begin(), members.end(), [](const Choice& a, const Choice& b) { return a.key < b.key; });
  *out = nullptr;
  if (color < 0) return ncclSuccess;
  int rank = 0;
  while (members[rank].rank != comm->rank) rank++;
  return join(out, (Id&)members[0].id, rank, (int)members.size());
}
ncclResult_t ncclGroupStart() { depth++; return ncclSuccess; }
ncclResult_t ncclGroupEnd() {
  if (--depth == 0) submit();
  return ncclSuccess;
}
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* factor, ncclDataType_t type, ncclScalarResidence_t, ncclComm_t comm) {
  *op = (ncclRedOp_t)(ncclNumOps + 1 + comm->factors.size());
  comm->factors[*op] = (double)load(factor, 0, type);
  return ncclSuccess;
}
#define ARGUMENTS ncclComm_t comm, cudaStream_t stream
#define SIZE (count * size_of(type))
ncclResult_t ncclAllReduce(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op, ARGUMENTS) {
  return add({"ncclAllReduce", comm, stream, in, out, SIZE, to_all(comm, SIZE), from_all(comm, SIZE), reduced(comm, count, type, op)});
}
ncclResult_t ncclReduce(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op, int root, ARGUMENTS) {
  bool here = comm->rank == root;
  return add({"ncclReduce", comm, stream, in, out, here ? SIZE : 0, to_one(comm, root, SIZE), from_all(comm, here ? SIZE : 0),
              reduced(comm, count, type, op)});
}
ncclResult_t ncclReduceScatter(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op, ARGUMENTS) {
  return add({"ncclReduceScatter", comm, stream, in, out, SIZE, to_each(comm, SIZE), from_all(comm, SIZE), reduced(comm, count, type, op)});
}
ncclResult_t ncclBroadcast(const void* in, void* out, size_t count, ncclDataType_t type, int root, ARGUMENTS) {
  return add({"ncclBroadcast", comm, stream, in, out, SIZE, to_all(comm, comm->rank == root ? SIZE : 0), from_one(comm, root, SIZE), concatenate});
}
ncclResult_t ncclBcast(void* data, size_t count, ncclDataType_t type, int root, ARGUMENTS) {
  return ncclBroadcast(data, data, count, type, root, comm, stream);
}
ncclResult_t ncclAllGather(const void* in, void* out, size_t count, ncclDataType_t type, ARGUMENTS) {
  return add({"ncclAllGather", comm, stream, in, out, SIZE * comm->ranks, to_all(comm, SIZE), from_all(comm, SIZE), concatenate});
}
ncclResult_t ncclAlltoAll(const void* in, void* out, size_t count, ncclDataType_t type, ARGUMENTS) {
  return add({"ncclAlltoAll", comm, stream, in, out, SIZE * comm->ranks, to_each(comm, SIZE), from_all(comm, SIZE), concatenate});
}
ncclResult_t ncclSend(const void* in, size_t count, ncclDataType_t type, int peer, ARGUMENTS) {
  return add({"ncclSend", comm, stream, in, nullptr, 0, to_one(comm, peer, SIZE), from_all(comm, 0), concatenate});
}
ncclResult_t ncclRecv(void* out, size_t count, ncclDataType_t type, int peer, ARGUMENTS) {
  return add({"ncclRecv", comm, stream, nullptr, out, SIZE, to_all(comm, 0), from_one(comm, peer, SIZE), concatenate});
}
}
