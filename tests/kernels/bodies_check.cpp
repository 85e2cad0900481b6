// The bodies of the CPU kernels against plain arithmetic in double precision, without MLX: what an emulated processor of
// another kind can run. Prints one line a check: its name, the largest error and the largest value.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kernels.h"
#include "pack.h"

using namespace metalctl;

static float uniform() { return float(std::rand() % 2001 - 1000) / 1000; }

static std::vector<float> uniforms(int count) {
  std::vector<float> values(count);
  for (float& value : values) value = uniform();
  return values;
}

// Activations that 16 bits hold: multiples of 2^-10, the largest of each group the largest code.
static std::vector<float> whole_codes(int count, int group) {
  std::vector<float> values(count);
  for (int i = 0; i < count; i++) {
    const int largest = i / group % 2 ? 32512 : -32512;
    values[i] = float(i % group ? std::rand() % 65025 - 32512 : largest) / 1024;
  }
  return values;
}

struct Error {
  double error = 0, largest = 0;
  void add(double expected, double found) {
    error = std::max(error, std::fabs(expected - found));
    largest = std::max(largest, std::fabs(expected));
  }
  void print(const char* name) const { std::printf("%s %g %g\n", name, error, largest); }
};

// A random matrix in MLX's layout, packed, and its values.
struct Matrix {
  std::vector<uint8_t> data;
  std::vector<float> values;
  Pack pack;

  Matrix(int bits, int n, int k, int group) : values(n * k), pack{nullptr, Format(bits), n, k, group, false} {
    const int groups = k / group;
    std::vector<uint8_t> codes(n * k * bits / 8 + 1);
    std::vector<uint16_t> scales(n * groups), offsets(n * groups);
    for (auto& scale : scales) scale = float_to_half(0.01f + 0.005f * uniform());
    for (auto& offset : offsets) offset = float_to_half(0.1f * uniform());
    for (int row = 0; row < n; row++)
      for (int i = 0; i < k; i++) {
        const int code = std::rand() & ((1 << bits) - 1), at = i * bits;
        uint8_t* bytes = &codes[row * (k * bits / 8)];
        const unsigned shifted = unsigned(code) << at % 8;
        bytes[at / 8] |= uint8_t(shifted);
        if (at % 8 + bits > 8) bytes[at / 8 + 1] |= uint8_t(shifted >> 8);
        const int g = row * groups + i / group;
        values[row * k + i] = half_to_float(scales[g]) * float(code) + half_to_float(offsets[g]);
      }
    data.resize(pack.bytes());
    for (int tile = 0; tile < pack.tiles(); tile++)
      pack_quantized_tile(pack, tile, codes.data(), (const uint8_t*)scales.data(), (const uint8_t*)offsets.data(), data.data());
    pack.data = data.data();
  }
};

static void check_product(const Kernels& kernels, int bits) {
  const int n = 50, k = 192, m = 7, group = 32, groups = k / group;
  Matrix w(bits, n, k, group);
  Error unpacked, product;
  std::vector<float> row(k), x = whole_codes(m * k, group), y(m * n), scales(m * groups), sums(m * groups);
  std::vector<int16_t> codes(m * k);
  for (int r = 0; r < n; r++) {
    kernels.unpack(w.pack, r, row.data());
    for (int i = 0; i < k; i++) unpacked.add(w.values[r * k + i], row[i]);
  }
  for (int r = 0; r < m; r++) kernels.quantize(&x[r * k], k, group, &codes[r * k], &scales[r * groups], &sums[r * groups]);
  Product p;
  p.weight = w.pack;
  p.q = {codes.data(), scales.data(), sums.data()};
  p.y = y.data();
  p.y_stride = n;
  kernels.product(p, 0, w.pack.tiles(), 0, m);
  for (int r = 0; r < m; r++)
    for (int c = 0; c < n; c++) {
      double expected = 0;
      for (int i = 0; i < k; i++) expected += double(x[r * k + i]) * w.values[c * k + i];
      product.add(expected, y[r * n + c]);
    }
  unpacked.print("unpack");
  product.print("product");
}

static void check_elements(const Kernels& kernels) {
  const int count = 100;
  const std::vector<float> x = uniforms(count), ones(count, 1.0f);
  std::vector<float> out(count);
  double squares = 0;
  for (float v : x) squares += double(v) * v;
  Error norm;
  kernels.rms_norm(x.data(), ones.data(), 1e-5f, out.data(), count);
  for (int i = 0; i < count; i++) norm.add(x[i] / std::sqrt(squares / count + 1e-5), out[i]);
  norm.print("norm");
  for (Gate gate : {Gate::silu, Gate::gelu_tanh, Gate::gelu}) {
    Error error;
    kernels.glu(x.data(), ones.data(), gate, out.data(), count);
    for (int i = 0; i < count; i++) {
      const double v = x[i];
      const double inner = gate == Gate::gelu ? std::erf(v / std::sqrt(2.0)) : std::tanh(0.7978845608 * (v + 0.044715 * v * v * v));
      error.add(gate == Gate::silu ? v / (1 + std::exp(-v)) : 0.5 * v * (1 + inner), out[i]);
    }
    error.print("gate");
  }
}

static void check_attention(const Kernels& kernels, int rows) {
  const int tokens = 70, width = 40, size = 16;
  std::vector<uint16_t> keys(80 * width), values(80 * width);
  for (auto& key : keys) key = float_to_half(uniform());
  for (auto& value : values) value = float_to_half(uniform());
  const std::vector<float> queries = uniforms(rows * width);
  const int32_t table[5] = {3, 1, 0, 4, 2};
  std::vector<const float*> of(rows);
  std::vector<int32_t> positions(rows);
  std::vector<float> sums(rows * width), top(rows), total(rows);
  for (int r = 0; r < rows; r++) of[r] = &queries[r * width], positions[r] = tokens - rows + r;
  Attention a{};
  a.keys = keys.data(), a.values = values.data(), a.format = Format::f16;
  a.k_block = a.v_block = size * width, a.k_token = a.v_token = width;
  a.table = table, a.block_size = size, a.last_slot = tokens, a.scale = 0.3f;
  a.rows = rows, a.width = a.value_width = width;
  a.queries = of.data(), a.positions = positions.data();
  a.sums = sums.data(), a.top = top.data(), a.total = total.data();
  kernels.attention(a);
  Error error;
  for (int r = 0; r < rows; r++) {
    std::vector<double> expected(width);
    double weights = 0;
    for (int j = 0; j <= positions[r]; j++) {
      const int at = (table[j / size] * size + j % size) * width;
      double score = 0;
      for (int i = 0; i < width; i++) score += queries[r * width + i] * half_to_float(keys[at + i]);
      const double weight = std::exp(0.3 * score);
      weights += weight;
      for (int i = 0; i < width; i++) expected[i] += weight * half_to_float(values[at + i]);
    }
    for (int i = 0; i < width; i++) error.add(expected[i] / weights, sums[r * width + i] / total[r]);
  }
  error.print("attention");
}

int main() {
  const Kernels& kernels = *baseline_kernels();
  for (int bits : {4, 5, 6, 8}) check_product(kernels, bits);
  check_elements(kernels);
  for (int rows : {1, 3, 27}) check_attention(kernels, rows);
}
