// The Metal Shading Language as far as kernels for mx.fast.metal_kernel use it, in C++ for clang.
#pragma once
#include "runtime.h"

using half = _Float16;
using bfloat = __bf16;
using float16_t = half;
using bfloat16_t = bfloat;
using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long;

#define _Pragma(text)  // nothing is gained from unrolled loops here
#define kernel
#define thread
#ifdef METAL_ADDRESS_SPACES  // compiled for its errors only: pointers to different memories do not mix
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
extern threadgroup char metal_shared[];
#define METAL_SHARED(name, size, item, alignment) metal_shared
#else
#define device
#define constant
#define threadgroup
#define METAL_SHARED(name, size, item, alignment)            \
  (static_cast<char*>(({                                     \
    static char key;                                         \
    emulator::shared(&key, name, size, item, alignment);     \
  })))
#endif
#define METAL_FUNC inline __attribute__((always_inline))

namespace metal {

// ---- vectors --------------------------------------------------------------------------------------------------------

template <typename T, int N>
using vec = T __attribute__((ext_vector_type(N)));

#define VECTORS(name, T)   \
  using name##2 = vec<T, 2>; \
  using name##3 = vec<T, 3>; \
  using name##4 = vec<T, 4>;
VECTORS(float, float)
VECTORS(half, half)
VECTORS(bfloat, bfloat)
VECTORS(char, signed char)
VECTORS(uchar, uchar)
VECTORS(short, short)
VECTORS(ushort, ushort)
VECTORS(int, int)
VECTORS(uint, uint)
VECTORS(long, long)
VECTORS(ulong, ulong)
VECTORS(bool, bool)
#undef VECTORS

template <typename T>
struct element_of {
  using type = T;
  static constexpr int size = 1;
};
template <typename T, int N>
struct element_of<vec<T, N>> {
  using type = T;
  static constexpr int size = N;
};

template <typename V, typename A>
void put(V& out, int& at, A value) {
  if constexpr (element_of<A>::size == 1)
    out[at++] = static_cast<typename element_of<V>::type>(value);
  else
    for (int i = 0; i < element_of<A>::size; i++) out[at++] = static_cast<typename element_of<V>::type>(value[i]);
}

// A vector from one scalar, from a vector of another type, or from parts in a row.
template <typename V, typename... A>
V make(A... parts) {
  constexpr int given = (element_of<A>::size + ... + 0);
  static_assert(given == 0 || given == 1 || given == element_of<V>::size, "parts do not fill the vector");
  V out = V(0);
  int at = 0;
  (put(out, at, parts), ...);
  if constexpr (given == 1)
    for (; at < element_of<V>::size; at++) out[at] = out[0];
  return out;
}

template <typename To, typename From>
To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of one size");
  return __builtin_bit_cast(To, value);
}

// ---- mathematics ----------------------------------------------------------------------------------------------------

#define UNARY(name, expression)                                             \
  inline float name(float x) { return expression; }                         \
  inline half name(half x) { return half(name(float(x))); }                 \
  inline bfloat name(bfloat x) { return bfloat(name(float(x))); }           \
  template <typename T, int N>                                              \
  vec<T, N> name(vec<T, N> x) {                                             \
    for (int i = 0; i < N; i++) x[i] = name(T(x[i]));                       \
    return x;                                                               \
  }
#define FUNCTIONS                              \
  UNARY(acos, __builtin_acosf(x))              \
  UNARY(asin, __builtin_asinf(x))              \
  UNARY(atan, __builtin_atanf(x))              \
  UNARY(ceil, __builtin_ceilf(x))              \
  UNARY(cos, __builtin_cosf(x))                \
  UNARY(cosh, __builtin_coshf(x))              \
  UNARY(exp, __builtin_expf(x))                \
  UNARY(exp2, __builtin_exp2f(x))              \
  UNARY(fabs, __builtin_fabsf(x))              \
  UNARY(floor, __builtin_floorf(x))            \
  UNARY(log, __builtin_logf(x))                \
  UNARY(log2, __builtin_log2f(x))              \
  UNARY(rint, __builtin_rintf(x))              \
  UNARY(round, __builtin_roundf(x))            \
  UNARY(rsqrt, 1.0f / __builtin_sqrtf(x))      \
  UNARY(sin, __builtin_sinf(x))                \
  UNARY(sinh, __builtin_sinhf(x))              \
  UNARY(sqrt, __builtin_sqrtf(x))              \
  UNARY(tan, __builtin_tanf(x))                \
  UNARY(tanh, __builtin_tanhf(x))              \
  UNARY(trunc, __builtin_truncf(x))
FUNCTIONS
namespace precise {
FUNCTIONS
}
namespace fast {
FUNCTIONS
}
#undef FUNCTIONS
#undef UNARY

inline bool isnan(float x) { return x != x; }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }
inline float sign(float x) { return x > 0 ? 1 : x < 0 ? -1 : 0; }
inline float pow(float x, float y) { return __builtin_powf(x, y); }
inline float fmod(float x, float y) { return __builtin_fmodf(x, y); }
inline float atan2(float y, float x) { return __builtin_atan2f(y, x); }
inline float copysign(float x, float y) { return __builtin_copysignf(x, y); }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

template <typename T>
T abs(T x) {
  return x < 0 ? T(-x) : x;
}
#define BINARY(name, expression)                                             \
  template <typename T>                                                      \
  T name(T a, T b) {                                                         \
    if constexpr (element_of<T>::size > 1) {                                 \
      for (int i = 0; i < element_of<T>::size; i++) a[i] = name(typename element_of<T>::type(a[i]), \
                                                                typename element_of<T>::type(b[i])); \
      return a;                                                              \
    } else                                                                   \
      return expression;                                                     \
  }
BINARY(min, b < a ? b : a)
BINARY(max, a < b ? b : a)
BINARY(fmin, b < a || a != a ? b : a)
BINARY(fmax, a < b || a != a ? b : a)
#undef BINARY
template <typename T>
T clamp(T x, T low, T high) {
  return min(max(x, low), high);
}
template <typename T>
T select(T no, T yes, bool condition) {
  return condition ? yes : no;
}
template <typename T, int N>
T dot(vec<T, N> a, vec<T, N> b) {
  T sum = 0;
  for (int i = 0; i < N; i++) sum += a[i] * b[i];
  return sum;
}
inline uint popcount(uint x) { return __builtin_popcount(x); }
inline uint clz(uint x) { return x ? __builtin_clz(x) : 32; }
inline uint ctz(uint x) { return x ? __builtin_ctz(x) : 32; }

// ---- barriers -------------------------------------------------------------------------------------------------------

enum class mem_flags { mem_none = 0, mem_device = emulator::DEVICE, mem_threadgroup = emulator::THREADGROUP };
inline mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
inline void threadgroup_barrier(mem_flags flags, int line = __builtin_LINE()) {
  emulator::barrier(true, int(flags), line);
}
inline void simdgroup_barrier(mem_flags flags, int line = __builtin_LINE()) {
  emulator::barrier(false, int(flags), line);
}

// ---- SIMD-groups ----------------------------------------------------------------------------------------------------

template <typename T>
struct Lanes {
  const emulator::Exchange* box;
  Lanes(const char* operation, T value, int line) : box(emulator::exchange(operation, line, &value, sizeof(T))) {}
  bool active(uint lane) const { return lane < emulator::SIMD_WIDTH && (box->active >> lane & 1); }
  T operator[](uint lane) const {
    if (!active(lane)) emulator::fail("a SIMD operation reads lane %u, which does not take part", lane);
    T value;
    __builtin_memcpy(&value, box->slot[lane], sizeof(T));
    return value;
  }
  template <typename F>
  T fold(uint from, uint to, F combine) const {
    T result{};
    bool first = true;
    for (uint lane = from; lane < to; lane++) {
      if (!active(lane)) continue;
      result = first ? (*this)[lane] : combine(result, (*this)[lane]);
      first = false;
    }
    return result;
  }
};

inline uint lane() { return emulator::self->lane; }

#define FOLD(name, expression)                                                              \
  template <typename T>                                                                     \
  T simd_##name(T value, int line = __builtin_LINE()) {                                     \
    return Lanes<T>("simd_" #name, value, line).fold(0, 32, [](T a, T b) { return T(expression); }); \
  }                                                                                         \
  template <typename T>                                                                     \
  T quad_##name(T value, int line = __builtin_LINE()) {                                     \
    const uint quad = lane() / 4 * 4;                                                       \
    return Lanes<T>("quad_" #name, value, line).fold(quad, quad + 4, [](T a, T b) { return T(expression); }); \
  }
FOLD(sum, a + b)
FOLD(product, a* b)
FOLD(max, max(a, b))
FOLD(min, min(a, b))
FOLD(and, a& b)
FOLD(or, a | b)
FOLD(xor, a ^ b)
#undef FOLD

#define SHUFFLE(name, base, source)                                                        \
  template <typename T>                                                                    \
  T simd_##name(T value, ushort with, int line = __builtin_LINE()) {                       \
    return Lanes<T>("simd_" #name, value, line)[source];                                   \
  }
SHUFFLE(shuffle, 0, with)
SHUFFLE(broadcast, 0, with)
SHUFFLE(shuffle_xor, 0, lane() ^ with)
SHUFFLE(shuffle_rotate_down, 0, (lane() + with) % 32)
SHUFFLE(shuffle_rotate_up, 0, (lane() + 32 - with) % 32)
// Past the end of the SIMD-group the value is the lane's own.
SHUFFLE(shuffle_down, 0, lane() + with < 32 ? lane() + with : lane())
SHUFFLE(shuffle_up, 0, lane() >= with ? lane() - with : lane())
#undef SHUFFLE
template <typename T>
T quad_shuffle_xor(T value, ushort with, int line = __builtin_LINE()) {
  return Lanes<T>("quad_shuffle_xor", value, line)[lane() / 4 * 4 + (lane() % 4 ^ with)];
}
template <typename T>
T quad_broadcast(T value, ushort from, int line = __builtin_LINE()) {
  return Lanes<T>("quad_broadcast", value, line)[lane() / 4 * 4 + from];
}
template <typename T>
T simd_broadcast_first(T value, int line = __builtin_LINE()) {
  Lanes<T> lanes("simd_broadcast_first", value, line);
  return lanes[ctz(lanes.box->active)];
}
template <typename T>
T simd_prefix_inclusive_sum(T value, int line = __builtin_LINE()) {
  return Lanes<T>("simd_prefix_inclusive_sum", value, line).fold(0, lane() + 1, [](T a, T b) { return T(a + b); });
}
template <typename T>
T simd_prefix_exclusive_sum(T value, int line = __builtin_LINE()) {
  return Lanes<T>("simd_prefix_exclusive_sum", value, line).fold(0, lane(), [](T a, T b) { return T(a + b); });
}
inline bool simd_all(bool value, int line = __builtin_LINE()) {
  return Lanes<bool>("simd_all", value, line).fold(0, 32, [](bool a, bool b) { return a && b; });
}
inline bool simd_any(bool value, int line = __builtin_LINE()) {
  return Lanes<bool>("simd_any", value, line).fold(0, 32, [](bool a, bool b) { return a || b; });
}

// ---- 8 x 8 matrices, two elements a lane -----------------------------------------------------------------------------

struct Matrix8 {
  // Where this lane's element i stands.
  static uint row() { return (lane() / 4 & 4) + lane() / 2 % 4; }
  static uint column(int i) { return (lane() / 4 & 2) * 2 + lane() % 2 * 2 + i; }
  // Which lane holds an element.
  static uint holder(uint row, uint column) { return (row / 4 * 4 + column / 4 * 2) * 4 + row % 4 * 2 + column / 2 % 2; }
};

template <typename T, int Rows = 8, int Columns = 8>
struct simdgroup_matrix {
  static_assert(Rows == 8 && Columns == 8, "SIMD-group matrices are 8 x 8");
  T elements[2];
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) {
    for (int i = 0; i < 2; i++) elements[i] = Matrix8::row() == Matrix8::column(i) ? diagonal : T(0);
  }
  T* thread_elements() { return elements; }
};
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;

template <typename T, int R, int C>
simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, R, C> matrix;
  matrix.elements[0] = matrix.elements[1] = value;
  return matrix;
}
template <typename T, typename P>
void simdgroup_load(thread simdgroup_matrix<T>& to, P from, ulong stride = 8, ulong2 origin = ulong2(0),
                    bool transpose = false) {
  for (int i = 0; i < 2; i++) {
    const ulong row = transpose ? Matrix8::column(i) : Matrix8::row();
    const ulong column = transpose ? Matrix8::row() : Matrix8::column(i);
    to.elements[i] = from[(origin.y + row) * stride + origin.x + column];
  }
}
template <typename T, typename P>
void simdgroup_store(simdgroup_matrix<T> from, P to, ulong stride = 8, ulong2 origin = ulong2(0),
                     bool transpose = false) {
  for (int i = 0; i < 2; i++) {
    const ulong row = transpose ? Matrix8::column(i) : Matrix8::row();
    const ulong column = transpose ? Matrix8::row() : Matrix8::column(i);
    to[(origin.y + row) * stride + origin.x + column] = from.elements[i];
  }
}
template <typename D, typename A, typename B, typename C>
void simdgroup_multiply_accumulate(thread simdgroup_matrix<D>& d, simdgroup_matrix<A> a, simdgroup_matrix<B> b,
                                   simdgroup_matrix<C> c, int line = __builtin_LINE()) {
  struct Both {
    A a[2];
    B b[2];
  } mine = {{a.elements[0], a.elements[1]}, {b.elements[0], b.elements[1]}};
  Lanes<Both> lanes("simdgroup_multiply_accumulate", mine, line);
  for (int i = 0; i < 2; i++) {
    float sum = float(c.elements[i]);
    const uint row = Matrix8::row(), column = Matrix8::column(i);
    for (uint k = 0; k < 8; k++)
      sum += float(lanes[Matrix8::holder(row, k)].a[k % 2]) * float(lanes[Matrix8::holder(k, column)].b[column % 2]);
    d.elements[i] = D(sum);
  }
}
template <typename D, typename A, typename B>
void simdgroup_multiply(thread simdgroup_matrix<D>& d, simdgroup_matrix<A> a, simdgroup_matrix<B> b,
                        int line = __builtin_LINE()) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0)), line);
}

// ---- atomics --------------------------------------------------------------------------------------------------------

enum memory_order { memory_order_relaxed };
template <typename T>
struct atomic {
  T value;
};
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_float = atomic<float>;

template <typename P>
__attribute__((no_sanitize("thread"))) auto& reach(P object) {
#ifndef METAL_ADDRESS_SPACES
  emulator::atomic_access(&object->value, sizeof(object->value));
#endif
  return object->value;
}
#define ATOMIC(name, expression)                                                                       \
  template <typename P, typename T>                                                                    \
  __attribute__((no_sanitize("thread"))) auto atomic_##name##_explicit(P object, T argument, memory_order) { \
    auto& place = reach(object);                                                                       \
    auto before = object->value;                                                                       \
    decltype(before) operand = argument;                                                               \
    place = expression;                                                                                \
    return before;                                                                                     \
  }
ATOMIC(fetch_add, before + operand)
ATOMIC(fetch_sub, before - operand)
ATOMIC(fetch_max, max(before, operand))
ATOMIC(fetch_min, min(before, operand))
ATOMIC(fetch_and, before& operand)
ATOMIC(fetch_or, before | operand)
ATOMIC(fetch_xor, before ^ operand)
ATOMIC(exchange, operand)
ATOMIC(store, operand)
#undef ATOMIC
template <typename P>
__attribute__((no_sanitize("thread"))) auto atomic_load_explicit(P object, memory_order) {
  auto value = reach(object);
  return value;
}
template <typename P, typename E, typename T>
__attribute__((no_sanitize("thread"))) bool atomic_compare_exchange_weak_explicit(P object, E expected, T desired,
                                                                                  memory_order, memory_order) {
  auto& place = reach(object);
  const bool equal = place == *expected;
  if (equal)
    place = desired;
  else
    *expected = place;
  return equal;
}

// ---- limits ---------------------------------------------------------------------------------------------------------

template <typename T>
struct numeric_limits;
template <>
struct numeric_limits<float> {
  static constexpr float infinity() { return __builtin_inff(); }
  static constexpr float max() { return 3.40282347e+38f; }
  static constexpr float lowest() { return -3.40282347e+38f; }
};

template <typename A, typename B>
struct is_same {
  static constexpr bool value = false;
};
template <typename A>
struct is_same<A, A> {
  static constexpr bool value = true;
};
template <typename A, typename B>
constexpr bool is_same_v = is_same<A, B>::value;

}  // namespace metal

using namespace metal;

#undef INFINITY
#define INFINITY (__builtin_inff())
#define NAN (__builtin_nanf(""))

constexpr half operator""h(long double value) { return static_cast<half>(value); }
constexpr half operator""h(unsigned long long value) { return static_cast<half>(value); }

// From MLX's own prelude: the offset of element `elem` of a strided array.
template <typename S, typename D>
long elem_to_loc(uint elem, S shape, D strides, int ndim) {
  long location = 0;
  for (int i = ndim - 1; i >= 0 && elem > 0; --i) {
    location += (elem % shape[i]) * strides[i];
    elem /= shape[i];
  }
  return location;
}

// What MLX passes to the kernel by these names.
#define EMULATOR_ATTRIBUTES                                                                                           \
  [[maybe_unused]] const uint3 thread_position_in_grid = {                                                            \
      emulator::self->group[0] * emulator::self->nominal_size[0] + emulator::self->at[0],                         \
      emulator::self->group[1] * emulator::self->nominal_size[1] + emulator::self->at[1],                         \
      emulator::self->group[2] * emulator::self->nominal_size[2] + emulator::self->at[2]};                        \
  [[maybe_unused]] const uint3 thread_position_in_threadgroup = {emulator::self->at[0], emulator::self->at[1], \
                                                                 emulator::self->at[2]};                          \
  [[maybe_unused]] const uint3 threadgroup_position_in_grid = {emulator::self->group[0], emulator::self->group[1],    \
                                                               emulator::self->group[2]};                             \
  [[maybe_unused]] const uint3 threadgroups_per_grid = {emulator::self->groups[0], emulator::self->groups[1],         \
                                                        emulator::self->groups[2]};                                   \
  [[maybe_unused]] const uint3 threads_per_grid = {emulator::self->grid[0], emulator::self->grid[1],                  \
                                                   emulator::self->grid[2]};                                          \
  [[maybe_unused]] const uint3 threads_per_threadgroup = {                                                            \
      emulator::self->group_size[0], emulator::self->group_size[1], emulator::self->group_size[2]};                   \
  [[maybe_unused]] const uint3 dispatch_threads_per_threadgroup = {                                                   \
      emulator::self->nominal_size[0], emulator::self->nominal_size[1], emulator::self->nominal_size[2]};             \
  [[maybe_unused]] const uint thread_index_in_threadgroup = emulator::self->index;                                    \
  [[maybe_unused]] const uint thread_index_in_simdgroup = emulator::self->lane;                                       \
  [[maybe_unused]] const uint simdgroup_index_in_threadgroup = emulator::self->simd;                                  \
  [[maybe_unused]] const uint simdgroups_per_threadgroup = emulator::self->simds;                                     \
  [[maybe_unused]] const uint threads_per_simdgroup = emulator::SIMD_WIDTH;                                           \
  [[maybe_unused]] const uint quadgroup_index_in_threadgroup = emulator::self->index / 4;                             \
  [[maybe_unused]] const uint thread_index_in_quadgroup = emulator::self->index % 4;
