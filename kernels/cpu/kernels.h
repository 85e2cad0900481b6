// What the bodies compute, for one thread's share of the work. Every instruction set fills one table of these.
#pragma once

#include <cstdint>

namespace metalctl {

constexpr int TILE = 16;  // output rows of a weight matrix that lie together

enum class Format : int { q4 = 4, q5 = 5, q6 = 6, q8 = 8, f16 = 16, bf16 = 17, f32 = 32 };

constexpr bool is_quantized(Format f) { return int(f) <= 8; }

// A weight matrix [n, k], packed in tiles of 16 rows (the last one filled up with zeros).
//
// Quantised: a tile is a sequence of groups along k; a group is 16 scales, 16 offsets (float16, or float32 with
// `wide_scales`), then for each 32 values of k the codes: 4-byte units, each four consecutive k of one row, 16 rows to a
// vector of 64 bytes. Vector t of the low four bits holds unit t in its low and unit t + 4 in its high halves; five- and
// six-bit codes have their upper bits after that (1 vector, 2 vectors); eight-bit codes take one vector a unit.
// Floating: a tile is k times 16 values.
struct Pack {
  const uint8_t* data;
  Format format;
  int n, k, group;  // group: 32, 64 or 128
  bool wide_scales;

  int tiles() const { return (n + TILE - 1) / TILE; }
  int groups() const { return k / group; }
  int64_t unit_bytes() const { return int(format) * TILE * 4; }  // of the codes of 32 values of k
  int64_t group_bytes() const { return (wide_scales ? 128 : 64) + group / 32 * unit_bytes(); }
  int64_t tile_bytes() const {
    if (is_quantized(format)) return groups() * group_bytes();
    return int64_t(k) * TILE * (format == Format::f32 ? 4 : 2);
  }
  int64_t bytes() const { return tiles() * tile_bytes(); }
};

// Activations [m, k] in 16 bits: x is about scale * code in each group; `sums` holds scale * (sum of the group's codes).
struct Quantized {
  int16_t* codes;  // of each 32 values in an order of the instruction set's own (simd.h)
  float* scales;
  float* sums;
};

enum class Gate : int { none = 0, silu = 1, gelu_tanh = 2, gelu = 3 };

// y[m, n] = x . w  (+ bias[n]) (+ residual[m, n]);  with `up`: gate(x . w + bias) * (x . up + up_bias)
struct Product {
  Pack weight;
  const Pack* up = nullptr;
  Gate gate = Gate::none;
  const float* x = nullptr;  // [m, k], for floating weights
  Quantized q{};             // for quantised ones
  const int32_t* rows = nullptr;  // row i of the product reads x's row rows[i] and writes y's row outputs[i]
  const int32_t* outputs = nullptr;
  const float* bias = nullptr;
  const float* up_bias = nullptr;
  const float* residual = nullptr;
  float* y = nullptr;
  int64_t y_stride = 0;
};

struct RopeRow {
  const float* from;
  float* to;
};

// Attention of the query rows of one sequence that share one key and value head.
struct Attention {
  const void* keys;  // of this head, in the first block of the pool
  const void* values;
  Format format;             // of the pools
  int64_t k_block, v_block;  // elements from one block to the next
  int64_t k_token, v_token;  // elements from one token to the next within a block
  const int32_t* table;
  int block_size, first_slot, last_slot;  // slots that any of the rows can see: [first, last)
  int start;                              // position of slot 0
  int window;                             // 0: none
  float scale, softcap;                   // softcap 0: none
  int rows, width, value_width;           // rows: at most MAX_ROWS
  const float* const* queries;            // [rows] -> [width]
  const int32_t* positions;               // [rows]
  // Results: unnormalised sums, and the maximum and the sum of each row's weights.
  float* sums;  // [rows, value_width]
  float* top;   // [rows]
  float* total;
};

constexpr int MAX_ROWS = 64;
constexpr int KEYS = 64;  // keys that are scored at a time

struct Kernels {
  const char* name;
  void (*quantize)(const float* x, int k, int group, int16_t* codes, float* scales, float* sums);
  void (*product)(const Product& p, int tile_from, int tile_to, int row_from, int row_to);
  void (*unpack)(const Pack& w, int row, float* out);
  void (*rms_norm)(const float* x, const float* weight, float eps, float* out, int k);
  void (*glu)(const float* gate, const float* up, Gate kind, float* out, int64_t count);
  void (*rope)(const float* cosine, const float* sine, int half, bool traditional, const float* from, float* to);
  void (*attention)(const Attention& a);
  float (*peak)(const float* x, int64_t count);
  // out[i] = e^((x[i] - top) / temperature), 0 for x[i] below `least`; returns their sum.
  float (*weights)(const float* x, int64_t count, float top, float temperature, float least, float* out);
};

// Null where they were left out, or where the compiler does not target x86-64.
const Kernels* baseline_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();      // AVX-512 without VNNI
const Kernels* avx512vnni_kernels();

}  // namespace metalctl
