// The bodies, written once. Each translation unit that includes this compiles them for its own instruction set and
// names the table METALCTL_TABLE.
#pragma once

#include "attention_bodies.h"
#include "kernels.h"
#include "sampling_bodies.h"
#include "simd.h"

namespace metalctl {
namespace {

constexpr int PARTS = TILE / W;  // vectors to a tile's rows

// -- codes

template <int BITS>
inline void units(const uint8_t* codes, int part, u32x out[8]) {
  codes += part * W * 4;
  if constexpr (BITS == 8) {
    for (int t = 0; t < 8; t++) out[t] = load<u32x>(codes + 64 * t) ^ (CENTRED ? 0x80808080 : 0);
    return;
  }
  for (int t = 0; t < 4; t++) {
    u32x both = load<u32x>(codes + 64 * t);
    out[t] = both & 0x0f0f0f0f;
    out[t + 4] = (both >> 4) & 0x0f0f0f0f;
  }
  if constexpr (BITS == 5) {
    u32x upper = load<u32x>(codes + 256);
    for (int t = 0; t < 4; t++) out[t] |= (upper << (4 - t)) & 0x10101010;
    for (int t = 4; t < 8; t++) out[t] |= (upper >> (t - 4)) & 0x10101010;
  } else if constexpr (BITS == 6) {
    for (int v = 0; v < 2; v++) {
      u32x upper = load<u32x>(codes + 256 + 64 * v);
      out[4 * v] |= (upper << 4) & 0x30303030;
      out[4 * v + 1] |= (upper << 2) & 0x30303030;
      out[4 * v + 2] |= upper & 0x30303030;
      out[4 * v + 3] |= (upper >> 2) & 0x30303030;
    }
  }
}

// -- products: `acc[r]` is the part of the tile's 16 outputs for row r of x

// Sixteen output rows, R rows of x, quantised. The order of the sums does not depend on R.
template <int BITS, class Scale, int R>
inline void accumulate_quantized(const Pack& w, int tile, int part, const Quantized& q, const int32_t* x_rows, f32x acc[R]) {
  const int groups = w.groups(), units32 = w.group / 32;
  const uint8_t* p = w.data + tile * w.tile_bytes();
  const int16_t* codes[R];
  f32x total[R];  // not acc, which for all that a compiler knows is where the scales are
  const float *scales[R], *sums[R];
  for (int r = 0; r < R; r++) {
    codes[r] = q.codes + int64_t(x_rows[r]) * w.k;
    scales[r] = q.scales + int64_t(x_rows[r]) * groups;
    sums[r] = q.sums + int64_t(x_rows[r]) * groups;
    total[r] = f32x{};
  }
  for (int g = 0; g < groups; g++) {
    const Scale* head = reinterpret_cast<const Scale*>(p);
    f32x scale = load_as_float(head + part * W), offset = load_as_float(head + TILE + part * W);
    if (CENTRED && BITS == 8) offset += scale * 128.0f;
    p += 2 * TILE * sizeof(Scale);
    i32x whole[R] = {};
    for (int u = 0; u < units32; u++) {
      u32x weights[8];
      units<BITS>(p, part, weights);
      p += w.unit_bytes();
      dot<R>(whole, weights, codes);
      for (int r = 0; r < R; r++) codes[r] += 32;
    }
    for (int r = 0; r < R; r++) {
      total[r] += to_float(whole[r]) * (scale * scales[r][g]);
      total[r] += offset * sums[r][g];
    }
  }
  for (int r = 0; r < R; r++) acc[r] = total[r];
}

template <class T, int R>
inline void accumulate_floating(const Pack& w, int tile, int part, const float* x, const int32_t* x_rows, f32x acc[R]) {
  const T* p = reinterpret_cast<const T*>(w.data + tile * w.tile_bytes()) + part * W;
  const float* rows[R];
  for (int r = 0; r < R; r++) {
    rows[r] = x + int64_t(x_rows[r]) * w.k;
    acc[r] = f32x{};
  }
  for (int k = 0; k < w.k; k++) {
    f32x weight = load_as_float(p + int64_t(k) * TILE);
    for (int r = 0; r < R; r++) acc[r] += weight * rows[r][k];
  }
}

template <int R>
inline void accumulate(const Pack& w, int tile, int part, const Product& p, const int32_t* x_rows, f32x acc[R]) {
  switch (w.format) {
#define QUANTIZED(BITS)                                                                          \
  case Format::q##BITS:                                                                          \
    if (w.wide_scales) return accumulate_quantized<BITS, float, R>(w, tile, part, p.q, x_rows, acc); \
    return accumulate_quantized<BITS, half, R>(w, tile, part, p.q, x_rows, acc);
    QUANTIZED(4)
    QUANTIZED(5)
    QUANTIZED(6)
    QUANTIZED(8)
#undef QUANTIZED
    case Format::f16: return accumulate_floating<half, R>(w, tile, part, p.x, x_rows, acc);
    case Format::bf16: return accumulate_floating<bfloat, R>(w, tile, part, p.x, x_rows, acc);
    case Format::f32: return accumulate_floating<float, R>(w, tile, part, p.x, x_rows, acc);
  }
}

inline f32x gated(Gate gate, f32x x) {
  if (gate == Gate::silu) return x / (1.0f + exp(-x));
  if (gate == Gate::gelu) return 0.5f * x * (1.0f + erf(x * 0.70710678f));
  // 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
  return 0.5f * x * (1.0f + tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
}

// What comes after the sums for R rows from `row` on: biases, gate, residual. `up`: of the second weight, or null.
template <int R>
inline void finish(const Product& p, int column, int row, f32x acc[R], const f32x* up) {
  const int count = p.weight.n - column;
  if (count <= 0) return;
  const f32x bias = p.bias ? load_some(p.bias + column, count) : f32x{};
  const f32x up_bias = p.up_bias ? load_some(p.up_bias + column, count) : f32x{};
  for (int r = 0; r < R; r++) {
    if (p.bias) acc[r] += bias;
    if (p.gate != Gate::none) acc[r] = gated(p.gate, acc[r]);
    if (up) acc[r] *= p.up_bias ? up[r] + up_bias : up[r];
    const int64_t at = int64_t(p.outputs ? p.outputs[row + r] : row + r) * p.y_stride + column;
    if (p.residual) acc[r] += load_some(p.residual + at, count);
    store_some(p.y + at, acc[r], count);
  }
}

template <int R>
inline void product_rows(const Product& p, int tile, int row) {
  int32_t x_rows[R];
  for (int r = 0; r < R; r++) x_rows[r] = p.rows ? p.rows[row + r] : row + r;
  for (int part = 0; part < PARTS; part++) {
    f32x acc[R], up[R];
    accumulate<R>(p.weight, tile, part, p, x_rows, acc);
    if (p.up) accumulate<R>(*p.up, tile, part, p, x_rows, up);
    finish<R>(p, tile * TILE + part * W, row, acc, p.up ? up : nullptr);
  }
}

// -- products of floating weights with many rows, a stretch of k at a time: R rows of x lie transposed in a panel,
// [k][R], so that one pointer serves all of them; two vectors of outputs share what is read of it; and weights of 16
// bits are widened once for all panels. The order of the sums is that of single rows.

constexpr int PANEL_ROWS = 128, DEPTH = 128, PANEL = PANEL_ROWS * DEPTH, VECTORS = 16 * PARTS;

template <int R>
inline void fill_panel(const Product& p, int row, int from, int depth, float* panel) {
  for (int r = 0; r < R; r++) {
    const float* x = p.x + int64_t(p.rows ? p.rows[row + r] : row + r) * p.weight.k + from;
    for (int i = 0; i < depth; i++) panel[i * R + r] = x[i];
  }
}

// Also writes the weights as floats to `wide`, where that is given.
template <class T, int R, bool WIDEN = false>
inline void accumulate_panel(const T* first, const T* second, const float* panel, int depth, f32x* left, f32x* right,
                             float (*wide)[DEPTH * TILE] = nullptr) {
  f32x a[R], b[R];
  for (int r = 0; r < R; r++) a[r] = left[r], b[r] = right[r];
  for (int i = 0; i < depth; i++) {
    const f32x one = load_as_float(first + i * TILE), other = load_as_float(second + i * TILE);
    if (WIDEN) store(wide[0] + i * TILE, one), store(wide[1] + i * TILE, other);
    for (int r = 0; r < R; r++) {
      a[r] += one * panel[i * R + r];
      b[r] += other * panel[i * R + r];
    }
  }
  for (int r = 0; r < R; r++) left[r] = a[r], right[r] = b[r];
}

// Vectors of outputs: of the weight one after the other, or in turn of the weight and of `up`.
template <class T, int R>
void panels(const Product& p, int vector_from, int vectors, int row, int rows) {
  alignas(64) float x[PANEL], wide[2][DEPTH * TILE];
  f32x sums[VECTORS][PANEL_ROWS];
  const int ways = p.up ? 2 : 1, k = p.weight.k;
  const bool widen = !std::is_same_v<T, float> && rows >= 4 * R;
  const int stretch = widen ? DEPTH : PANEL / rows;
  auto weights = [&](int j) {
    const int v = vector_from + j / ways;
    const uint8_t* data = j % ways ? p.up->data : p.weight.data;
    return reinterpret_cast<const T*>(data) + int64_t(v / PARTS) * k * TILE + v % PARTS * W;
  };
  for (auto& of_vector : sums)
    for (int r = 0; r < rows; r++) of_vector[r] = f32x{};
  for (int from = 0; from < k; from += stretch) {
    const int depth = k - from < stretch ? k - from : stretch;
    for (int r = 0; r < rows; r += R) fill_panel<R>(p, row + r, from, depth, x + r * depth);
    for (int j = 0; j < vectors; j += 2) {
      const T* first = weights(j) + int64_t(from) * TILE;
      const T* second = j + 1 < vectors ? weights(j + 1) + int64_t(from) * TILE : first;
      for (int r = 0; r < rows; r += R) {
        f32x *left = &sums[j][r], *right = &sums[j + 1][r];
        const float* panel = x + r * depth;
        if (!widen) accumulate_panel<T, R>(first, second, panel, depth, left, right);
        else if (r == 0) accumulate_panel<T, R, true>(first, second, panel, depth, left, right, wide);
        else accumulate_panel<float, R>(wide[0], wide[1], panel, depth, left, right);
      }
    }
  }
  for (int j = 0; j < vectors; j += ways)
    for (int r = 0; r < rows; r += R)
      finish<R>(p, (vector_from + j / ways) * W, row + r, &sums[j][r], p.up ? &sums[j + 1][r] : nullptr);
}

template <int R>
inline void panels(const Product& p, int tile_from, int tile_to, int row, int rows) {
  const int ways = p.up ? 2 : 1, last = tile_to * PARTS, step = VECTORS / ways;
  for (int v = tile_from * PARTS; v < last; v += step) {
    const int vectors = ways * (last - v < step ? last - v : step);
    if (p.weight.format == Format::f32) panels<float, R>(p, v, vectors, row, rows);
    else if (p.weight.format == Format::f16) panels<half, R>(p, v, vectors, row, rows);
    else panels<bfloat, R>(p, v, vectors, row, rows);
  }
}

void product(const Product& p, int tile_from, int tile_to, int row_from, int row_to) {
  constexpr int R = W == 16 ? 8 : 4;
  const bool alike = !p.up || p.up->format == p.weight.format;
  while (!is_quantized(p.weight.format) && alike && row_from + R <= row_to) {
    const int left = (row_to - row_from) / R * R, rows = left < PANEL_ROWS ? left : PANEL_ROWS;
    panels<R>(p, tile_from, tile_to, row_from, rows);
    row_from += rows;
  }
  for (int tile = tile_from; tile < tile_to; tile++) {
    int row = row_from;
    for (; row + R <= row_to; row += R) product_rows<R>(p, tile, row);
    if (R > 4 && row + 4 <= row_to) product_rows<4>(p, tile, row), row += 4;
    if (row + 2 <= row_to) product_rows<2>(p, tile, row), row += 2;
    for (; row < row_to; row++) product_rows<1>(p, tile, row);
  }
}

void quantize(const float* x, int k, int group, int16_t* codes, float* scales, float* sums) {
  for (int g = 0; g < k / group; g++, x += group, codes += group) {
    f32x top{};
    for (int i = 0; i < group; i += W) {
      f32x v = load<f32x>(x + i);
      top = maximum(top, maximum(v, -v));
    }
    const float peak = largest(top), inverse = peak > 1e-34f ? float(FULL) / peak : 0.0f;  // a larger one is infinite
    i32x total{};
    for (int i = 0; i < group; i += W) {
      i32x code = round_to_int(load<f32x>(x + i) * inverse);
      total += code;
      store_codes(codes, i, code);
    }
    int whole = 0;
    for (int lane = 0; lane < W; lane++) whole += total[lane];
    scales[g] = peak / float(FULL);
    sums[g] = scales[g] * float(whole);
  }
}

// -- one row of a packed matrix, as floats

template <int BITS>
inline int code_at(const uint8_t* codes, int lane, int i) {  // of the 32 values of a unit
  const int unit = i / 4, byte = lane * 4 + i % 4;
  if constexpr (BITS == 8) return codes[64 * unit + byte];
  int low = codes[64 * (unit % 4) + byte] >> (unit < 4 ? 0 : 4) & 15;
  if constexpr (BITS == 5) low |= (codes[256 + byte] >> unit & 1) << 4;
  if constexpr (BITS == 6) low |= (codes[256 + 64 * (unit / 4) + byte] >> 2 * (unit % 4) & 3) << 4;
  return low;
}

template <int BITS, class Scale>
void unpack_quantized(const Pack& w, int row, float* out) {
  const int lane = row % TILE;
  const uint8_t* p = w.data + row / TILE * w.tile_bytes();
  for (int g = 0; g < w.groups(); g++) {
    const Scale* head = reinterpret_cast<const Scale*>(p);
    const float scale = widen(head[lane]), offset = widen(head[TILE + lane]);
    p += 2 * TILE * sizeof(Scale);
    for (int u = 0; u < w.group / 32; u++, p += w.unit_bytes())
      for (int i = 0; i < 32; i++) *out++ = scale * float(code_at<BITS>(p, lane, i)) + offset;
  }
}

template <class T>
void unpack_floating(const Pack& w, int row, float* out) {
  const T* p = reinterpret_cast<const T*>(w.data + row / TILE * w.tile_bytes()) + row % TILE;
  for (int k = 0; k < w.k; k++) out[k] = widen(p[int64_t(k) * TILE]);
}

void unpack(const Pack& w, int row, float* out) {
  switch (w.format) {
#define QUANTIZED(BITS) \
  case Format::q##BITS: \
    return w.wide_scales ? unpack_quantized<BITS, float>(w, row, out) : unpack_quantized<BITS, half>(w, row, out);
    QUANTIZED(4)
    QUANTIZED(5)
    QUANTIZED(6)
    QUANTIZED(8)
#undef QUANTIZED
    case Format::f16: return unpack_floating<half>(w, row, out);
    case Format::bf16: return unpack_floating<bfloat>(w, row, out);
    case Format::f32: return unpack_floating<float>(w, row, out);
  }
}

// -- element by element

inline float root(float x) {
#if defined(__x86_64__)
  return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x)));
#else
  return __builtin_sqrtf(x);
#endif
}

void rms_norm(const float* x, const float* weight, float eps, float* out, int k) {
  f32x squares{};
  int i = 0;
  for (; i + W <= k; i += W) {
    f32x v = load<f32x>(x + i);
    squares += v * v;
  }
  float total = sum(squares);
  for (; i < k; i++) total += x[i] * x[i];
  const float scale = 1.0f / root(total / float(k) + eps);
  for (i = 0; i + W <= k; i += W) {
    f32x v = load<f32x>(x + i) * scale;
    store(out + i, weight ? v * load<f32x>(weight + i) : v);
  }
  for (; i < k; i++) out[i] = x[i] * scale * (weight ? weight[i] : 1.0f);
}

void glu(const float* gate, const float* up, Gate kind, float* out, int64_t count) {
  for (int64_t i = 0; i < count; i += W) {
    const int some = count - i < W ? int(count - i) : W;
    store_some(out + i, gated(kind, load_some(gate + i, some)) * load_some(up + i, some), some);
  }
}

void rope(const float* cosine, const float* sine, int half, bool traditional, const float* from, float* to) {
  if (traditional) {
    for (int i = 0; i < half; i++) {
      const float a = from[2 * i], b = from[2 * i + 1];
      to[2 * i] = a * cosine[i] - b * sine[i];
      to[2 * i + 1] = a * sine[i] + b * cosine[i];
    }
    return;
  }
  for (int i = 0; i < half; i += W) {
    const int some = half - i < W ? half - i : W;
    f32x a = load_some(from + i, some), b = load_some(from + half + i, some);
    f32x c = load_some(cosine + i, some), s = load_some(sine + i, some);
    store_some(to + i, a * c - b * s, some);
    store_some(to + half + i, a * s + b * c, some);
  }
}

}  // namespace
}  // namespace metalctl

#define METALCTL_TABLE(function, name) \
  const metalctl::Kernels* metalctl::function() { \
    static const Kernels table{name, quantize, product, unpack, rms_norm, glu, rope, attention, peak, weights}; \
    return &table; \
  }
