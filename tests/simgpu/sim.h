// What the simulated NCCL (nccl.cpp) and the kernels (kernels.py) use of the simulated devices (devices.cpp).
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <functional>
#include <string>
#include <vector>

#define API extern "C"
struct SimRange { const void* start; size_t size; bool write; };  // memory of a device, or pinned memory

std::string sim_file(const std::string& name);  // path in the folder of the simulation
void sim_log(const char* format, ...);
std::string sim_gpu();  // UUID of the calling thread's device
bool sim_has_fault(int device, const char* kind);
// Queue `work` on a stream: it runs on the stream's thread when all before it is done.
void sim_queue(void* stream, const char* what, const std::vector<SimRange>& ranges, std::function<void()> work);
// Wait for all that a stream holds. What the caller does until `sim_end` comes before what the stream gets later.
// Return the ticket for `sim_end`, or a negative error of CUDA.
API int64_t sim_begin(int device, void* stream, const char* what, const SimRange* ranges, int num_ranges);
API void sim_end(int device, void* stream, int64_t ticket);
// The address at which the simulation reads and writes memory of a device, which the host cannot access.
API void* sim_memory(const void* address);
