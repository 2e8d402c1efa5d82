// What the simulated libraries share: the devices of this node, and the streams of the simulated runtime (cudart.cpp).
// Environment variables: SIMGPU_DEVICES is their number, SIMGPU_MEMORY_MB the memory of each, SIMGPU_COPY_US the duration
// of a copy; SIMGPU_FAULTS is a folder of faults, and messages are appended to SIMGPU_LOG.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <functional>
#include <string>
#include <vector>

struct SimRange { const void* start; size_t size; bool write; };  // memory of a device, or pinned memory

// Queue `work` on a stream: it runs on the stream's thread when all before it is done.
void sim_queue(void* stream, const char* what, const std::vector<SimRange>& ranges, std::function<void()> work);
// Run `work` on the caller's thread when all that the stream holds is done; what the stream gets later waits for it.
void sim_run(void* stream, const char* what, const std::vector<SimRange>& ranges, const std::function<void()>& work);
// Record an access of the work that `sim_run` has just run, to memory that was not known before.
void sim_touch(void* stream, const char* what, const SimRange& range);
// The address at which the simulated kernels read and write device memory, which the host cannot access.
void* sim_memory(const void* device_address);
int sim_device();           // index among the node's devices, -1 without one
bool sim_has_context(int visible_index);
int sim_device_of(const void* address, const void** start, size_t* size);  // -1: pinned, -2: neither
void sim_log(const char* format, ...);

inline int sim_number(const char* name, int other) {
  const char* text = getenv(name);
  return text && *text ? atoi(text) : other;
}
inline int sim_device_count() { return sim_number("SIMGPU_DEVICES", 0); }
inline std::string sim_node() {
  if (const char* name = getenv("SLURMD_NODENAME")) return name;
  char host[256] = {0};
  gethostname(host, 255);
  return host;
}
// Faults come and go while programs run: that device 1 is "lost", "slow" (contains the milliseconds of an operation), or has
// errors of its memory ("ecc", contains their number), is the file $SIMGPU_FAULTS/1.lost.
inline bool sim_fault(int device, const char* kind, int* value = nullptr) {
  const char* folder = getenv("SIMGPU_FAULTS");
  if (!folder) return false;
  FILE* file = fopen((std::string(folder) + "/" + std::to_string(device) + "." + kind).c_str(), "r");
  if (!file) return false;
  if (value && fscanf(file, "%d", value) != 1) *value = 0;
  fclose(file);
  return true;
}
inline void sim_uuid_bytes(int device, unsigned char bytes[16]) {
  uint64_t hash = std::hash<std::string>()(sim_node());
  memset(bytes, 0, 16);
  memcpy(bytes, &hash, 8);
  bytes[15] = (unsigned char)device;
}
inline std::string sim_uuid(int device) {
  unsigned char bytes[16];
  sim_uuid_bytes(device, bytes);
  std::string text = "GPU-";
  for (int i = 0; i < 16; i++) {
    char digits[4];
    snprintf(digits, 4, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", bytes[i]);
    text += digits;
  }
  return text;
}
inline std::vector<std::string> sim_words(const char* text) {
  std::vector<std::string> words(1);
  for (; *text; text++)
    if (*text == ',') words.emplace_back();
    else if (*text != ' ') words.back() += *text;
  return words;
}
// The devices that CUDA shows. CUDA_VISIBLE_DEVICES ends at its first invalid word, and shows none if one is repeated.
inline std::vector<int> sim_visible() {
  std::vector<int> all, visible;
  for (int i = 0; i < sim_device_count(); i++) all.push_back(i);
  const char* text = getenv("CUDA_VISIBLE_DEVICES");
  if (!text) return all;
  for (auto& word : sim_words(text)) {
    int found = -1;
    char* end = nullptr;
    long number = strtol(word.c_str(), &end, 10);
    if (!word.empty() && !*end && number >= 0 && number < (long)all.size()) found = (int)number;
    if (word.rfind("GPU-", 0) == 0)
      for (int device : all) if (sim_uuid(device).rfind(word, 0) == 0) found = device;
    if (found < 0) break;
    for (int device : visible) if (device == found) return {};
    visible.push_back(found);
  }
  return visible;
}
