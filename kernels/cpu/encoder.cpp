// Attention of texts whose tokens see both ways.
#include <algorithm>
#include <stdexcept>

#include "extension.h"
#include "mlx/allocator.h"

namespace metalctl {
namespace {

// Elements of [B, H, L, D] in float32 whose last axis is dense.
struct View {
  const float* data;
  int64_t batch, head, token;

  View(const mx::array& a, Scratch& scratch) {
    if (a.dtype() == mx::float32 && a.strides(-1) == 1) {
      data = a.data<float>(), batch = a.strides(0), head = a.strides(1), token = a.strides(2);
    } else {
      data = floats(a, scratch);
      token = a.shape(3), head = a.shape(2) * token, batch = a.shape(1) * head;
    }
  }

  const float* at(int64_t b, int64_t h, int64_t l = 0) const { return data + b * batch + h * head + l * token; }
};

// Inputs: queries, keys and values [B, H, L, D], then int32 lengths [B]: a token sees those before its text's length that
// are at most `window` away (negative: all). Result [B, H, L, D], token-major in memory, zeros beyond the lengths.
class BothWays : public Body {
 public:
  BothWays(float scale, int window) : scale_(scale), window_(window) {}

  std::vector<mx::Shape> shapes(const Arrays& in) const override {
    if (in[0].ndim() != 4 || in[0].shape() != in[1].shape() || in[0].shape() != in[2].shape() || in[3].size() != in[0].shape(0))
      throw std::invalid_argument("queries, keys, values and lengths do not go together");
    return {in[0].shape()};
  }

  void allocate(const Arrays&, Arrays& out) const override {
    auto& o = out[0];
    const int64_t heads = o.shape(1), length = o.shape(2), width = o.shape(3);
    const bool plain = heads == 1 || length == 1;
    o.set_data(mx::allocator::malloc(o.nbytes()), o.size(), {length * heads * width, width, heads * width, 1}, {true, plain, false});
  }

  void run(Arrays& in, Arrays& out) const override {
    Scratch scratch;
    const View queries(in[0], scratch), keys(in[1], scratch), values(in[2], scratch);
    const int batch = in[0].shape(0), heads = in[0].shape(1), length = in[0].shape(2), width = in[0].shape(3);
    const int parts = (length + MAX_ROWS - 1) / MAX_ROWS;
    float* to = out[0].data<float>();
    pool().each(batch * heads * parts, [&](int i) {
      const int b = i / (heads * parts), h = i / parts % heads, from = i % parts * MAX_ROWS;
      const int known = std::clamp(in[3].data<int32_t>()[b * in[3].strides(0)], 0, length);
      const int rows = std::clamp(known - from, 0, MAX_ROWS), all = std::min(MAX_ROWS, length - from);
      float* row = to + ((int64_t(b) * length + from) * heads + h) * width;
      const int64_t step = int64_t(heads) * width;
      if (rows) attend(queries, keys, values, b, h, from, rows, known, width, row, step);
      for (int r = rows; r < all; r++) std::fill(row + r * step, row + r * step + width, 0.0f);
    });
  }

 private:
  void attend(const View& q, const View& k, const View& v, int b, int h, int from, int rows, int known, int width, float* to,
              int64_t step) const {
    static const int32_t one_block = 0;
    const float* starts[MAX_ROWS];
    int32_t positions[MAX_ROWS];
    float top[MAX_ROWS], total[MAX_ROWS];
    thread_local std::vector<float> sums;
    sums.resize(std::max(sums.size(), size_t(rows) * width));
    Attention a{};
    for (int r = 0; r < rows; r++) {
      starts[r] = q.at(b, h, from + r);
      // The kernel sees from a position back: a window to both sides is one twice as long that ends further on.
      positions[r] = window_ < 0 ? known - 1 : from + r + window_;
    }
    a.keys = k.at(b, h), a.values = v.at(b, h);
    a.format = Format::f32;
    a.k_token = k.token, a.v_token = v.token;
    a.table = &one_block;
    a.block_size = known;
    a.first_slot = window_ < 0 ? 0 : std::max(0, from - window_);
    a.last_slot = window_ < 0 ? known : std::min(known, from + rows + window_);
    a.window = window_ < 0 ? 0 : 2 * window_ + 1;
    a.scale = scale_;
    a.rows = rows, a.width = a.value_width = width;
    a.queries = starts;
    a.positions = positions;
    a.sums = sums.data(), a.top = top, a.total = total;
    kernels().attention(a);
    for (int r = 0; r < rows; r++) {
      const float inverse = total[r] > 0 ? 1 / total[r] : 0.0f;
      for (int d = 0; d < width; d++) to[r * step + d] = sums[int64_t(r) * width + d] * inverse;
    }
  }

  float scale_;
  int window_;
};

}  // namespace

std::shared_ptr<Body> make_both_ways(float scale, int window) { return std::make_shared<BothWays>(scale, window); }

}  // namespace metalctl
