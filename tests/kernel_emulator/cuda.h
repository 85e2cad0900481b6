// CUDA C++ as far as kernels for mx.fast.cuda_kernel use it, in C++ for clang.
#pragma once
#include "runtime.h"

using uint = unsigned int;

#define __device__
#define __global__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __restrict__
#define KERNEL_EMULATOR 1
#define _Pragma(text)  // nothing is gained from unrolled loops here
#define METAL_SHARED(name, size, item, alignment)        \
  (static_cast<char*>(({                                 \
    static char key;                                     \
    emulator::shared(&key, name, size, item, alignment); \
  })))

struct uint3 {
  unsigned x, y, z;
};
#define threadIdx (uint3{emulator::self->at[0], emulator::self->at[1], emulator::self->at[2]})
#define blockIdx (uint3{emulator::self->group[0], emulator::self->group[1], emulator::self->group[2]})
#define blockDim (uint3{emulator::self->nominal_size[0], emulator::self->nominal_size[1], emulator::self->nominal_size[2]})
#define gridDim (uint3{emulator::self->groups[0], emulator::self->groups[1], emulator::self->groups[2]})

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

// 16-bit floats convert to and from float, and nothing else is promised of them.
template <typename Bits>
struct Narrow {
  Bits value;
  Narrow() = default;
  explicit Narrow(float x) : value(static_cast<Bits>(x)) {}
  operator float() const { return static_cast<float>(value); }
};
using __half = Narrow<_Float16>;
using __nv_bfloat16 = Narrow<__bf16>;
struct alignas(4) __half2 {
  __half x, y;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline float2 __half22float2(__half2 v) { return {v.x, v.y}; }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {v.x, v.y}; }
inline __half2 __floats2half2_rn(float a, float b) { return {__half(a), __half(b)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {__nv_bfloat16(a), __nv_bfloat16(b)}; }
inline __half2 __hsub2(__half2 a, __half2 b) { return {__half(a.x - b.x), __half(a.y - b.y)}; }
inline __nv_bfloat162 __hsub2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return {__nv_bfloat16(a.x - b.x), __nv_bfloat16(a.y - b.y)};
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  return {__half(__builtin_fmaf(a.x, b.x, c.x)), __half(__builtin_fmaf(a.y, b.y, c.y))};
}
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
  return {__nv_bfloat16(__builtin_fmaf(a.x, b.x, c.x)), __nv_bfloat16(__builtin_fmaf(a.y, b.y, c.y))};
}
inline float __half2float(__half v) { return v; }
inline float __bfloat162float(__nv_bfloat16 v) { return v; }
inline float __uint_as_float(unsigned v) { return __builtin_bit_cast(float, v); }
inline unsigned __float_as_uint(float v) { return __builtin_bit_cast(unsigned, v); }

inline float exp2f(float x) { return __builtin_exp2f(x); }
inline float expf(float x) { return __builtin_expf(x); }
inline float tanhf(float x) { return __builtin_tanhf(x); }
inline float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
inline float fminf(float a, float b) { return __builtin_fminf(a, b); }
inline float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float rsqrtf(float x) { return 1.0f / __builtin_sqrtf(x); }
inline void sincosf(float x, float* sine, float* cosine) {
  *sine = __builtin_sinf(x);
  *cosine = __builtin_cosf(x);
}
inline float sqrtf(float x) { return __builtin_sqrtf(x); }
template <typename T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
T max(T a, T b) {
  return a < b ? b : a;
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t both = uint64_t(y) << 32 | x;
  unsigned out = 0;
  for (int i = 0; i < 4; i++) out |= unsigned(both >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
  return out;
}
template <typename T>
T __ldg(const T* p) {
  return *p;
}
template <typename T>
T __ldcs(const T* p) {
  return *p;
}

inline void __syncthreads(int line = __builtin_LINE()) {
  emulator::barrier(true, emulator::DEVICE | emulator::THREADGROUP, line);
}
inline void __syncwarp(unsigned = ~0u, int line = __builtin_LINE()) {
  emulator::barrier(false, emulator::DEVICE | emulator::THREADGROUP, line);
}

template <typename T>
T emulator_lane(const emulator::Exchange* box, unsigned lane) {
  if (lane >= 32 || !(box->active >> lane & 1)) emulator::fail("a warp operation reads lane %u, which does not take part", lane);
  T value;
  __builtin_memcpy(&value, box->slot[lane], sizeof(T));
  return value;
}
template <typename T>
T __shfl_sync(unsigned, T value, int from, int width = 32, int line = __builtin_LINE()) {
  const unsigned lane = emulator::self->lane;
  return emulator_lane<T>(emulator::exchange("__shfl_sync", line, &value, sizeof(T)), lane / width * width + from % width);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask, int = 32, int line = __builtin_LINE()) {
  const unsigned lane = emulator::self->lane;
  return emulator_lane<T>(emulator::exchange("__shfl_xor_sync", line, &value, sizeof(T)), lane ^ mask);
}

// D = A B + C for tiles of 16 x 16 and 16 x 8, spread over the warp as mma.sync.aligned.m16n8k16 says.
template <typename T>
void emulator_mma(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2], int line) {
  struct Parts {
    T a[8], b[4];
  } mine;
  __builtin_memcpy(mine.a, a, 16);
  __builtin_memcpy(mine.b, b, 8);
  const emulator::Exchange* box = emulator::exchange("mma", line, &mine, sizeof(mine));
  Parts lanes[32];
  for (unsigned i = 0; i < 32; i++) lanes[i] = emulator_lane<Parts>(box, i);
  const unsigned lane = emulator::self->lane;
  for (int i = 0; i < 4; i++) {
    const unsigned row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    float sum = c[i];
    for (unsigned k = 0; k < 16; k++) {
      const unsigned half = k / 8, within = k % 8;
      const T x = lanes[row % 8 * 4 + within / 2].a[half * 4 + row / 8 * 2 + within % 2];
      const T y = lanes[column * 4 + within / 2].b[half * 2 + within % 2];
      sum += float(x) * float(y);
    }
    c[i] = sum;
  }
}

#define EMULATOR_MMA(T, name)                                                                                     \
  template <>                                                                                                     \
  inline void name<T>(float(&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) { \
    const unsigned a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};                                                      \
    emulator_mma<T>(d, a, b, __LINE__);                                                                           \
  }

// What MLX passes beside an array whose shape the source asks for.
struct Shape {
  int value[10];
  int operator[](int i) const { return value[i]; }
};
struct Strides {
  int64_t value[10];
  int64_t operator[](int i) const { return value[i]; }
};
