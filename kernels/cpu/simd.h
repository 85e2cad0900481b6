// One vector type of each element for the instruction set that this translation unit is compiled for. Everything but
// the dot product of codes and the half-precision load is the compiler's own vector arithmetic, so that the bodies read
// the same on AVX-512, AVX2, NEON and plain SSE.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
constexpr int W = 16;  // lanes of 32 bits
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float f32x __attribute__((vector_size(W * 4)));
typedef int32_t i32x __attribute__((vector_size(W * 4)));
typedef uint32_t u32x __attribute__((vector_size(W * 4)));
typedef uint16_t u16x __attribute__((vector_size(W * 2)));
typedef uint16_t u16y __attribute__((vector_size(W * 4)));

template <class V>
inline V load(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <class V>
inline void store(void* to, V v) {
  std::memcpy(to, &v, sizeof v);
}

template <class To, class From>
inline To bits_of(From from) {
  To to;
  static_assert(sizeof to == sizeof from);
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline f32x splat(float x) { return x - f32x{}; }
inline i32x splat(int32_t x) { return x - i32x{}; }
inline f32x to_float(i32x x) { return __builtin_convertvector(x, f32x); }
inline f32x select(i32x mask, f32x yes, f32x no) { return mask ? yes : no; }
inline f32x maximum(f32x a, f32x b) { return a > b ? a : b; }
inline f32x minimum(f32x a, f32x b) { return a < b ? a : b; }

inline float sum(f32x v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(v);
#else
  float total = 0;
  for (int i = 0; i < W; i++) total += v[i];
  return total;
#endif
}

inline float largest(f32x v) {
  float top = v[0];
  for (int i = 1; i < W; i++) top = v[i] > top ? v[i] : top;
  return top;
}

// -- fewer than a vector's worth

inline f32x load_some(const float* from, int count) {
  if (count >= W) return load<f32x>(from);
  f32x v{};
  for (int i = 0; i < count; i++) v[i] = from[i];
  return v;
}

inline void store_some(float* to, f32x v, int count) {
  if (count >= W) return store(to, v);
  for (int i = 0; i < count; i++) to[i] = v[i];
}

// -- sixteen-bit floats

struct half {
  uint16_t bits;
};
struct bfloat {
  uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(bfloat x) { return bits_of<float>(uint32_t(x.bits) << 16); }
inline float widen(half x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#elif defined(__aarch64__)
  return float(bits_of<__fp16>(x.bits));
#else
  uint32_t sign = uint32_t(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff;
  if (rest >= 0x7c00) return bits_of<float>(sign | 0x7f800000 | ((rest & 0x3ff) << 13));
  if (rest >= 0x0400) return bits_of<float>(sign | ((rest << 13) + (112u << 23)));
  float tiny = float(rest) * 5.9604644775390625e-8f;  // 2^-24
  return sign ? -tiny : tiny;
#endif
}

inline f32x load_as_float(const float* from) { return load<f32x>(from); }

inline f32x load_as_float(const bfloat* from) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)  // in one instruction: value i to the upper half of lane i
  const __m512i upper = _mm512_set_epi32(0xf0000, 0xe0000, 0xd0000, 0xc0000, 0xb0000, 0xa0000, 0x90000, 0x80000, 0x70000, 0x60000,
                                         0x50000, 0x40000, 0x30000, 0x20000, 0x10000, 0);
  return bits_of<f32x>(_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, upper, _mm512_castsi256_si512(load<__m256i>(from))));
#elif defined(__AVX2__)
  return bits_of<f32x>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load<__m128i>(from)), 16));
#else
  u32x wide = __builtin_convertvector(load<u16x>(from), u32x) << 16;
  return bits_of<f32x>(wide);
#endif
}

inline f32x load_as_float(const half* from) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(load<__m256i>(from));
#elif defined(__AVX2__)
  return _mm256_cvtph_ps(load<__m128i>(from));
#elif defined(__aarch64__)
  return bits_of<f32x>(vcvt_f32_f16(load<float16x4_t>(from)));
#else
  f32x v;
  for (int i = 0; i < W; i++) v[i] = widen(from[i]);
  return v;
#endif
}

// -- rounding and exp

constexpr float ROUNDER = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest whole number in the low bits

inline i32x round_to_int(f32x x) { return bits_of<i32x>(x + ROUNDER) - splat(bits_of<int32_t>(ROUNDER)); }

// e^x to 2 ulp: reduced to [-ln2/2, ln2/2], then the Taylor polynomial of degree 7.
inline f32x exp(f32x x) {
  x = maximum(minimum(x, splat(88.0f)), splat(-87.0f));
  f32x shifted = x * 1.44269504f + ROUNDER;
  f32x n = shifted - ROUNDER;
  f32x r = x - n * 0.693359375f + n * 2.12194440e-4f;
  f32x p = splat(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  i32x power = (bits_of<i32x>(shifted) - splat(bits_of<int32_t>(ROUNDER)) + 127) << 23;
  return p * bits_of<f32x>(power);
}

inline f32x tanh(f32x x) { return 1.0f - 2.0f / (exp(2.0f * x) + 1.0f); }

// Abramowitz and Stegun 7.1.26: to 2e-7.
inline f32x erf(f32x x) {
  const f32x size = maximum(x, -x), t = 1.0f / (1.0f + 0.3275911f * size);
  f32x p = splat(1.061405429f);
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const f32x positive = 1.0f - p * t * exp(-size * size);
  return select(x < 0.0f, -positive, positive);
}

// -- the dot product of codes: each lane gains the products of four unsigned bytes of w with four codes of 16 bits
//
// A row's codes lie as the dot product takes them. ARM's multiplies bytes: the upper and lower bytes of 32 codes, each
// signed (code = 256 * upper + lower), lie apart. Elsewhere codes 0 and 2, then 1 and 3 of each four are a pair.

constexpr int FULL = 127 * 256;  // the largest code: its upper byte, rounded, fits in 8 bits

#if defined(__ARM_FEATURE_DOTPROD)

constexpr bool CENTRED = true;  // w of eight bits is signed: less by 128

inline void store_codes(int16_t* row, int at, i32x codes) {
  typedef int8_t i8x __attribute__((vector_size(W)));
  int8_t* unit = reinterpret_cast<int8_t*>(row + at / 32 * 32) + at % 32;
  const i32x upper = (codes + 128) >> 8;
  store(unit, __builtin_convertvector(upper, i8x));
  store(unit + 32, __builtin_convertvector(codes - (upper << 8), i8x));
}

template <int R>
inline void dot(i32x acc[R], const u32x w[8], const int16_t* const x[R]) {
  i32x upper[R] = {};
#pragma GCC unroll 8
  for (int t = 0; t < 8; t++)
    for (int r = 0; r < R; r++) {
      const int16_t *above = x[r] + 2 * t, *below = above + 16;
      upper[r] = (i32x)vdotq_s32((int32x4_t)upper[r], (int8x16_t)w[t], (int8x16_t)splat(load<int32_t>(above)));
      acc[r] = (i32x)vdotq_s32((int32x4_t)acc[r], (int8x16_t)w[t], (int8x16_t)splat(load<int32_t>(below)));
    }
  for (int r = 0; r < R; r++) acc[r] += upper[r] << 8;
}

#else

constexpr bool CENTRED = false;

inline void store_codes(int16_t* row, int at, i32x codes) {
  typedef int16_t i16x __attribute__((vector_size(W * 2)));
  typedef uint64_t u64x __attribute__((vector_size(W * 2)));
  const u64x fours = bits_of<u64x>(__builtin_convertvector(codes, i16x));
  store(row + at, (fours & 0xffff00000000ffff) | (fours & 0xffff0000) << 16 | (fours >> 16 & 0xffff0000));
}

inline i32x dot(i32x acc, u32x w, i32x x) {  // of two words a lane
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return (i32x)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
#elif defined(__SSE2__)
#if defined(__AVX512BW__)
  acc += (i32x)_mm512_madd_epi16((__m512i)w, (__m512i)x);
#elif defined(__AVX2__)
  acc += (i32x)_mm256_madd_epi16((__m256i)w, (__m256i)x);
#else
  acc += (i32x)_mm_madd_epi16((__m128i)w, (__m128i)x);
#endif
  asm("" : "+v"(acc));  // a compiler that puts off the additions runs out of registers
  return acc;
#else
  return acc + (i32x)(w & 0xffff) * (x << 16 >> 16) + (i32x)(w >> 16) * (x >> 16);
#endif
}

template <int R>
inline void dot(i32x acc[R], const u32x w[8], const int16_t* const x[R]) {
  constexpr int CHAINS = R == 1 ? 4 : R == 2 ? 2 : 1;  // sums that do not wait for each other
  i32x sums[CHAINS][R] = {};
  for (int r = 0; r < R; r++) sums[0][r] = acc[r];
#pragma GCC unroll 8
  for (int t = 0; t < 8; t++) {
    const u32x even = w[t] & 0x00ff00ff, odd = bits_of<u32x>(bits_of<u16y>(w[t]) >> 8);
    for (int r = 0; r < R; r++) {
      const int16_t* four = x[r] + 4 * t;
      i32x &one = sums[2 * t % CHAINS][r], &other = sums[(2 * t + 1) % CHAINS][r];
      one = dot(one, even, splat(load<int32_t>(four)));
      other = dot(other, odd, splat(load<int32_t>(four + 2)));
    }
  }
  for (int r = 0; r < R; r++) {
    acc[r] = sums[0][r];
    for (int c = 1; c < CHAINS; c++) acc[r] += sums[c][r];
  }
}

#endif

}  // namespace
