#include "extension.h"

#include <algorithm>
#include <string>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"
#include "huge_pages.h"
#include "pack.h"

namespace metalctl {
namespace {

const Kernels* chosen = nullptr;
Pool* workers = nullptr;  // never destroyed: MLX's threads may outlive every static

constexpr int64_t ROOM = 4 << 20;
thread_local std::unique_ptr<char[]> room;
thread_local int64_t used = 0;

class Native : public mx::Primitive {
 public:
  Native(mx::Stream stream, std::shared_ptr<const Body> body) : Primitive(stream), body_(std::move(body)) {}

  void eval_cpu(const Arrays& in, Arrays& out) override {
    body_->allocate(in, out);
    auto weak = [](const Arrays& arrays) {
      Arrays copies;
      copies.reserve(arrays.size());
      for (auto& a : arrays) copies.push_back(mx::array::unsafe_weak_copy(a));
      return copies;
    };
    auto& encoder = mx::cpu::get_command_encoder(stream());
    encoder.dispatch([body = body_, in = weak(in), out = weak(out)]() mutable { body->run(in, out); });
  }

  void eval_gpu(const Arrays&, Arrays&) override { throw std::runtime_error("a CPU kernel was sent to a GPU"); }
  const char* name() const override { return "MetalctlCpu"; }
  std::vector<mx::Shape> output_shapes(const Arrays& in) override { return body_->shapes(in); }

 private:
  std::shared_ptr<const Body> body_;
};

template <class T>
float element(const void* data, int64_t at) {
  if constexpr (std::is_same_v<T, float>) return static_cast<const float*>(data)[at];
  const uint16_t bits = static_cast<const uint16_t*>(data)[at];
  return std::is_same_v<T, mx::float16_t> ? half_to_float(bits) : bfloat_to_float(bits);
}

template <class T>
void copy_strided(const mx::array& a, float* to) {
  const void* data = a.data<char>();
  const int dims = int(a.ndim());
  std::vector<int> index(dims, 0);
  const int64_t inner = dims ? a.shape(-1) : 1, step = dims ? a.strides(-1) : 1;
  for (int64_t done = 0; done < int64_t(a.size()); done += inner) {
    int64_t at = 0;
    for (int d = 0; d + 1 < dims; d++) at += index[d] * a.strides(d);
    for (int64_t i = 0; i < inner; i++) to[done + i] = element<T>(data, at + i * step);
    for (int d = dims - 2; d >= 0 && ++index[d] == a.shape(d); d--) index[d] = 0;
  }
}

class Packing : public Body {
 public:
  Packing(Pack layout, int count) : layout_(layout), count_(count) {}
  mx::Dtype dtype() const override { return mx::uint8; }
  std::vector<mx::Shape> shapes(const Arrays&) const override {
    // Two dimensions, so that the size may pass 2^31.
    return {{count_ * layout_.tiles(), int(layout_.tile_bytes())}};
  }
  void allocate(const Arrays& in, Arrays& out) const override {
    if (!lay_in_huge_pages(out[0])) Body::allocate(in, out);
  }
  void run(Arrays& in, Arrays& out) const override {
    const int tiles = layout_.tiles();
    auto bytes = [&](int i) { return in[i].data<uint8_t>(); };
    uint8_t* to = out[0].data<uint8_t>();
    pool().each(count_ * tiles, [&](int i) {
      const int64_t which = i / tiles;
      uint8_t* data = to + which * layout_.bytes();
      if (is_quantized(layout_.format)) {
        const int64_t heads = int64_t(layout_.n) * layout_.groups() * (layout_.wide_scales ? 4 : 2);
        const int64_t codes = int64_t(layout_.n) * layout_.k * int(layout_.format) / 8;
        pack_quantized_tile(layout_, i % tiles, bytes(0) + which * codes, bytes(1) + which * heads,
                            bytes(2) + which * heads, data);
      } else {
        const int64_t size = int64_t(layout_.n) * layout_.k * (layout_.format == Format::f32 ? 4 : 2);
        pack_floating_tile(layout_, i % tiles, bytes(0) + which * size, data);
      }
    });
  }

 private:
  Pack layout_;
  int count_;
};

}  // namespace

const Kernels& kernels() { return *chosen; }
Pool& pool() { return *workers; }

void start(const Kernels* table, int threads) {
  chosen = table;
  if (!workers) workers = new Pool(threads);
}

Scratch::Scratch() : mark_(used) {
  if (!room) room.reset(new char[ROOM]);
}

Scratch::~Scratch() { used = mark_; }

void* Scratch::bytes(int64_t count) {
  const int64_t rounded = (count + 63) / 64 * 64;
  if (used + rounded + 64 <= ROOM) {
    auto start = (reinterpret_cast<uintptr_t>(room.get()) + 63) / 64 * 64;
    void* p = reinterpret_cast<void*>(start + used);
    used += rounded;
    return p;
  }
  extra_.emplace_back(new char[rounded + 64]);
  return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(extra_.back().get()) + 63) / 64 * 64);
}

void Body::allocate(const Arrays&, Arrays& out) const {
  for (auto& a : out) a.set_data(mx::allocator::malloc(a.nbytes()));
}

Arrays build(std::shared_ptr<const Body> body, Arrays in) {
  auto shapes = body->shapes(in);
  std::vector<mx::Dtype> types(shapes.size(), body->dtype());
  auto stream = mx::default_stream(mx::Device::cpu);
  return mx::array::make_arrays(std::move(shapes), types, std::make_shared<Native>(stream, std::move(body)), std::move(in));
}

const float* floats(const mx::array& a, Scratch& scratch) {
  if (a.dtype() == mx::float32 && a.flags().row_contiguous) return a.data<float>();
  float* to = scratch.take<float>(a.size());
  if (a.dtype() == mx::float32) copy_strided<float>(a, to);
  else if (a.dtype() == mx::float16) copy_strided<mx::float16_t>(a, to);
  else copy_strided<mx::bfloat16_t>(a, to);
  return to;
}

std::shared_ptr<Body> make_packing(Pack layout, int count) { return std::make_shared<Packing>(layout, count); }

}  // namespace metalctl
