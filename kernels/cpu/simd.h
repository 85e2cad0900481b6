// One vector type of each element for the instruction set that this translation unit is compiled for. Everything but
// the dot product of bytes and the half-precision load is the compiler's own vector arithmetic, so that the bodies read
// the same on AVX-512, AVX2, NEON and plain SSE.
#pragma once

#include <cstdint>
#include <cstring>

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
  u32x wide = __builtin_convertvector(load<u16x>(from), u32x) << 16;
  return bits_of<f32x>(wide);
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

// -- the dot product of bytes: each lane of `acc` gains the product of four unsigned bytes of w with four signed of x

template <bool Wide>  // whether w may exceed 127
inline i32x dot(i32x acc, u32x w, i32x x) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return (i32x)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
#elif defined(__AVX512BW__)
  const __m512i ones = _mm512_set1_epi16(1);
  if constexpr (Wide) {  // sums of two products would not fit in 16 bits: low and high halves of w apart
    __m512i low = _mm512_maddubs_epi16((__m512i)(w & 0x0f0f0f0f), (__m512i)x);
    __m512i high = _mm512_maddubs_epi16((__m512i)((w >> 4) & 0x0f0f0f0f), (__m512i)x);
    return acc + (i32x)_mm512_madd_epi16(low, ones) + ((i32x)_mm512_madd_epi16(high, ones) << 4);
  } else {
    return acc + (i32x)_mm512_madd_epi16(_mm512_maddubs_epi16((__m512i)w, (__m512i)x), ones);
  }
#elif defined(__AVX2__)
  const __m256i ones = _mm256_set1_epi16(1);
  if constexpr (Wide) {
    __m256i low = _mm256_maddubs_epi16((__m256i)(w & 0x0f0f0f0f), (__m256i)x);
    __m256i high = _mm256_maddubs_epi16((__m256i)((w >> 4) & 0x0f0f0f0f), (__m256i)x);
    return acc + (i32x)_mm256_madd_epi16(low, ones) + ((i32x)_mm256_madd_epi16(high, ones) << 4);
  } else {
    return acc + (i32x)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)w, (__m256i)x), ones);
  }
#elif defined(__ARM_FEATURE_DOTPROD)
  if constexpr (Wide) {  // signed times signed only: w = (w - 128) + 128
    int8x16_t centred = vreinterpretq_s8_u8(veorq_u8((uint8x16_t)w, vdupq_n_u8(0x80)));
    int32x4_t low = vdotq_s32((int32x4_t)acc, centred, (int8x16_t)x);
    return (i32x)vaddq_s32(low, vshlq_n_s32(vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(1), (int8x16_t)x), 7));
  } else {
    return (i32x)vdotq_s32((int32x4_t)acc, (int8x16_t)w, (int8x16_t)x);
  }
#else
  for (int byte = 0; byte < 4; byte++) {
    i32x wide = (i32x)((w >> (8 * byte)) & 0xff);
    acc += wide * (x << (24 - 8 * byte) >> 24);
  }
  return acc;
#endif
}

}  // namespace
