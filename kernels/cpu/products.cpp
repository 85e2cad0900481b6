// Matrix products: linear layers, experts and embeddings.
#include <algorithm>
#include <map>
#include <stdexcept>

#include "extension.h"

namespace metalctl {
namespace {

constexpr int ROW_BLOCK = 64;  // rows of x that one piece of work multiplies

template <class Work>
void each_row(int rows, const Work& work) {
  constexpr int SOME = 8;
  if (rows < SOME) {
    for (int r = 0; r < rows; r++) work(r);
    return;
  }
  pool().each((rows + SOME - 1) / SOME, [&](int i) {
    for (int r = i * SOME; r < std::min(rows, (i + 1) * SOME); r++) work(r);
  });
}

struct Piece {
  const Product* product;
  int tile_from, tile_to, row_from, row_to;
};

void cut(const Product& p, int rows, std::vector<Piece>& pieces) {
  const int tiles = p.weight.tiles();
  const int parts = rows > ROW_BLOCK ? 1 : 4 * pool().threads();
  const int many = is_quantized(p.weight.format) ? 4 : 16;
  const int some = rows > ROW_BLOCK ? many : std::max(1, tiles / parts);
  for (int tile = 0; tile < tiles; tile += some)
    for (int row = 0; row < rows; row += ROW_BLOCK)
      pieces.push_back({&p, tile, std::min(tiles, tile + some), row, std::min(rows, row + ROW_BLOCK)});
}

void run_all(const std::vector<Piece>& pieces) {
  pool().each(int(pieces.size()), [&](int i) {
    const Piece& piece = pieces[i];
    kernels().product(*piece.product, piece.tile_from, piece.tile_to, piece.row_from, piece.row_to);
  });
}

// Without a gate: one result for each weight. With one: one result, of two weights the gated product, of one weight what
// the gate makes of it. A second input is added to it.
class LinearBody : public Body {
 public:
  LinearBody(std::vector<Weight> weights, std::vector<std::optional<mx::array>> biases, Gate gate, std::optional<Norm> norm)
      : weights_(std::move(weights)), biases_(std::move(biases)), gate_(gate), norm_(std::move(norm)) {}

  std::vector<mx::Shape> shapes(const Arrays& in) const override {
    const int k = weights_[0].layout.k;
    if (in[0].ndim() == 0 || in[0].shape(-1) != k)
      throw std::invalid_argument("the last axis of the input does not have the length " + std::to_string(k));
    std::vector<mx::Shape> shapes;
    for (size_t i = 0; i < results(); i++) {
      shapes.push_back(in[0].shape());
      shapes.back().back() = weights_[i].layout.n;
    }
    return shapes;
  }

  void run(Arrays& in, Arrays& out) const override {
    const int k = weights_[0].layout.k, rows = int(in[0].size() / k);
    Scratch scratch;
    Rows x(floats(in[0], scratch), rows, k, norm_ ? &*norm_ : nullptr, scratch);
    std::vector<Product> products;
    const Pack up = weights_.back().pack();
    for (size_t i = 0; i < results(); i++) {
      Product p = Linear{weights_[i], biases_[i]}.product(x, out[i].data<float>());
      p.gate = gate_;
      if (weights_.size() == 2 && gate_ != Gate::none) {
        p.up = &up;
        p.up_bias = biases_[1] ? biases_[1]->data<float>() : nullptr;
      }
      p.residual = in.size() > 1 ? floats(in[1], scratch) : nullptr;
      products.push_back(p);
    }
    multiply(products, rows);
  }

 private:
  size_t results() const { return gate_ == Gate::none ? weights_.size() : 1; }

  std::vector<Weight> weights_;
  std::vector<std::optional<mx::array>> biases_;
  Gate gate_;
  std::optional<Norm> norm_;
};

// x [..., 1, k] with experts [...]: the leading axes are broadcast against each other.
class Experts : public Body {
 public:
  Experts(std::vector<Weight> weights, std::vector<std::optional<mx::array>> biases, Gate gate)
      : weights_(std::move(weights)), biases_(std::move(biases)), gate_(gate) {}

  std::vector<mx::Shape> shapes(const Arrays& in) const override {
    mx::Shape shape = leading(in);
    shape.push_back(1);
    shape.push_back(weights_[0].layout.n);
    return {shape};
  }

  void run(Arrays& in, Arrays& out) const override {
    const Pack& layout = weights_[0].layout;
    const int k = layout.k, x_rows = int(in[0].size() / k), count = int(out[0].size() / layout.n);
    if (count == 0) return;
    Scratch scratch;
    const float* x = floats(in[0], scratch);
    Order order = sorted(in, count);
    Rows rows(x, x_rows, k, nullptr, scratch);
    std::vector<Product> products(weights_[0].count);
    std::vector<Pack> ups(weights_[0].count);
    std::vector<Piece> pieces;
    for (int e = 0; e < weights_[0].count; e++) {
      const int from = order.starts[e], rows_here = order.starts[e + 1] - from;
      if (!rows_here) continue;
      Product& p = products[e];
      p.weight = weights_[0].pack(e);
      p.gate = gate_;
      const int64_t bias_at = int64_t(e) * layout.n;
      if (biases_[0]) p.bias = biases_[0]->data<float>() + bias_at;
      if (gate_ != Gate::none) {
        ups[e] = weights_[1].pack(e);
        p.up = &ups[e];
        if (biases_[1]) p.up_bias = biases_[1]->data<float>() + bias_at;
      }
      p.rows = order.x_rows.data() + from;
      p.outputs = order.outputs.data() + from;
      p.y = out[0].data<float>();
      p.y_stride = layout.n;
      rows.serve(p);
      cut(p, rows_here, pieces);
    }
    run_all(pieces);
  }

 private:
  struct Order {
    std::vector<int> starts;  // of each expert's rows
    std::vector<int32_t> x_rows, outputs;
  };

  static mx::Shape leading(const Arrays& in) {
    const mx::Shape &x = in[0].shape(), &e = in[1].shape();
    if (x.size() < 2 || x[x.size() - 2] != 1) throw std::invalid_argument("experts take one row at a time");
    const int dims = std::max(int(x.size()) - 2, int(e.size()));
    mx::Shape shape;
    for (int d = 0; d < dims; d++) {
      const int i = d - (dims - (int(x.size()) - 2)), j = d - (dims - int(e.size()));
      const int a = i < 0 ? 1 : x[i], b = j < 0 ? 1 : e[j];
      if (a != b && a != 1 && b != 1) throw std::invalid_argument("inputs and experts do not go together");
      shape.push_back(a == 1 ? b : a);
    }
    return shape;
  }

  // Which row of x and which expert each output has, and the outputs ordered by expert.
  Order sorted(const Arrays& in, int count) const {
    const mx::Shape shape = leading(in);
    const int dims = int(shape.size()), x_dims = int(in[0].ndim()) - 2, e_dims = int(in[1].ndim());
    const int32_t* experts = in[1].data<int32_t>();
    std::vector<int32_t> x_of(count), e_of(count);
    std::vector<int> index(dims, 0);
    for (int i = 0; i < count; i++) {
      int64_t x_at = 0, e_at = 0;
      for (int d = 0; d < x_dims; d++) {
        const int length = in[0].shape(d);
        x_at = x_at * length + (length == 1 ? 0 : index[d + dims - x_dims]);
      }
      for (int d = 0; d < e_dims; d++)
        if (in[1].shape(d) != 1) e_at += index[d + dims - e_dims] * in[1].strides(d);
      x_of[i] = int32_t(x_at);
      e_of[i] = std::clamp(experts[e_at], 0, weights_[0].count - 1);
      for (int d = dims - 1; d >= 0 && ++index[d] == shape[d]; d--) index[d] = 0;
    }
    Order order{std::vector<int>(weights_[0].count + 1, 0), std::vector<int32_t>(count), std::vector<int32_t>(count)};
    for (int e : e_of) order.starts[e + 1]++;
    for (int e = 0; e < weights_[0].count; e++) order.starts[e + 1] += order.starts[e];
    std::vector<int> at(order.starts.begin(), order.starts.end() - 1);
    for (int i = 0; i < count; i++) {
      const int place = at[e_of[i]]++;
      order.x_rows[place] = x_of[i];
      order.outputs[place] = i;
    }
    return order;
  }

  std::vector<Weight> weights_;
  std::vector<std::optional<mx::array>> biases_;
  Gate gate_;
};

// ids of any shape, int32 or uint32; an id out of range reads the nearest row there is.
class Embedding : public Body {
 public:
  explicit Embedding(Weight weight) : weight_(std::move(weight)) {}

  std::vector<mx::Shape> shapes(const Arrays& in) const override {
    mx::Shape shape = in[0].shape();
    shape.push_back(weight_.layout.k);
    return {shape};
  }

  void run(Arrays& in, Arrays& out) const override {
    const Pack pack = weight_.pack();
    const mx::array& ids = in[0];
    float* to = out[0].data<float>();
    auto one = [&](int i) {
      int64_t at = 0, rest = i;
      for (int d = int(ids.ndim()) - 1; d >= 0; rest /= ids.shape(d), d--) at += rest % ids.shape(d) * ids.strides(d);
      const int row = std::clamp(ids.data<int32_t>()[at], 0, pack.n - 1);
      kernels().unpack(pack, row, to + int64_t(i) * pack.k);
    };
    if (ids.size() < 4) {
      for (int i = 0; i < int(ids.size()); i++) one(i);
    } else {
      pool().each(int(ids.size()), one);
    }
  }

 private:
  Weight weight_;
};

}  // namespace

Rows::Rows(const float* x, int rows, int k, const Norm* norm, Scratch& scratch) : x_(x), rows_(rows), k_(k), scratch_(scratch) {
  if (!norm) return;
  float* normed = scratch.take<float>(int64_t(rows) * k);
  const float* weight = norm->weight.data<float>();
  each_row(rows, [&](int r) { kernels().rms_norm(x + int64_t(r) * k, weight, norm->eps, normed + int64_t(r) * k, k); });
  x_ = normed;
}

void Rows::serve(Product& p) {
  if (is_quantized(p.weight.format)) p.q = quantized(p.weight.group);
  else p.x = x_;
}

Quantized Rows::quantized(int group) {
  auto found = forms_.find(group);
  if (found != forms_.end()) return found->second;
  const int64_t groups = k_ / group;
  Quantized q{scratch_.take<int16_t>(int64_t(rows_) * k_), scratch_.take<float>(rows_ * groups), scratch_.take<float>(rows_ * groups)};
  each_row(rows_, [&](int r) {
    kernels().quantize(x_ + int64_t(r) * k_, k_, group, q.codes + int64_t(r) * k_, q.scales + r * groups, q.sums + r * groups);
  });
  return forms_[group] = q;
}

Product Linear::product(Rows& x, float* y) const {
  Product p;
  p.weight = weight.pack();
  p.bias = bias ? bias->data<float>() : nullptr;
  p.y = y;
  p.y_stride = p.weight.n;
  x.serve(p);
  return p;
}

void multiply(const std::vector<Product>& products, int rows) {
  std::vector<Piece> pieces;
  for (const Product& p : products) cut(p, rows, pieces);
  run_all(pieces);
}

std::shared_ptr<Body> make_linear(std::vector<Weight> weights, std::vector<std::optional<mx::array>> biases, Gate gate,
                                  std::optional<Norm> norm) {
  return std::make_shared<LinearBody>(std::move(weights), std::move(biases), gate, std::move(norm));
}

std::shared_ptr<Body> make_experts(std::vector<Weight> weights, std::vector<std::optional<mx::array>> biases, Gate gate) {
  return std::make_shared<Experts>(std::move(weights), std::move(biases), gate);
}

std::shared_ptr<Body> make_embedding(Weight weight) { return std::make_shared<Embedding>(std::move(weight)); }

}  // namespace metalctl
