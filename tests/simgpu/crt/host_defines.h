// Words of the CUDA compiler, whose header is not among the packages that torch needs.
#pragma once
#define __host__
#define __device__
#define __global__
#define __shared__
#define __constant__
#define __managed__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __location__(a)
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDACG_API
#define __forceinline__ inline
#define __no_return__ __attribute__((noreturn))
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __annotate__(a) __attribute__((a))
