// A whole decoder layer as one operation. For a small model the cost of a graph node is more than that of what it
// computes, and a layer written out is about thirty nodes.
#include <algorithm>
#include <stdexcept>

#include "extension.h"
#include "pack.h"

namespace metalctl {
namespace {

enum { Q, K, V, O, GATE, UP, DOWN };
enum { BEFORE_ATTENTION, OF_Q, OF_K, AFTER_ATTENTION, BEFORE_MLP, AFTER_MLP };

void write_row(const float* from, int count, mx::array& pool, int64_t token) {
  const int64_t at = token * count;
  if (pool.dtype() == mx::float32) std::copy(from, from + count, pool.data<float>() + at);
  else if (pool.dtype() == mx::float16) std::transform(from, from + count, pool.data<uint16_t>() + at, float_to_half);
  else std::transform(from, from + count, pool.data<uint16_t>() + at, float_to_bfloat);
}

// Inputs: x [B, L, hidden]; pools of keys and values [blocks * block size, Hkv, D], contiguous; then int32: slots [B * L],
// where the new tokens go; tables [B, n] and lengths [B] as for paged attention; the position of each first token [B].
//
// The pools are written in place. In MLX's terms they are inputs that change: whoever reads the new slots must come
// later on the same stream, and nobody may rely on what the slots held before. That is how block pools are used: a
// slot that is written is owned by the one sequence that writes it.
class Layer : public Body {
 public:
  explicit Layer(LayerParts parts) : p_(std::move(parts)) {}

  std::vector<mx::Shape> shapes(const Arrays& in) const override {
    if (in.size() != 7 || in[0].ndim() != 3 || in[0].shape(-1) != p_.linears[Q].weight.layout.k || in[1].ndim() != 3 || in[1].shape(1) != p_.kv_heads)
      throw std::invalid_argument("the input does not go with this layer");
    return {in[0].shape()};
  }

  void run(Arrays& in, Arrays& out) const override {
    const int hidden = in[0].shape(-1), rows = int(in[0].size() / hidden);
    Scratch scratch;
    const float* x = floats(in[0], scratch);
    const bool whole = p_.gate != Gate::none;  // otherwise attention alone
    float* middle = whole ? scratch.take<float>(int64_t(rows) * hidden) : out[0].data<float>();
    const float* attended = attend(in, x, rows, hidden, scratch);
    add(O, AFTER_ATTENTION, attended, x, middle, rows, hidden, scratch);
    if (!whole) return;
    Rows normed(middle, rows, hidden, norm(BEFORE_MLP), scratch);
    const int inner = p_.linears[GATE].weight.layout.n;
    float* gated = scratch.take<float>(int64_t(rows) * inner);
    Product product = p_.linears[GATE].product(normed, gated);
    const Pack up = p_.linears[UP].weight.pack();
    product.up = &up;
    product.up_bias = p_.linears[UP].bias ? p_.linears[UP].bias->data<float>() : nullptr;
    product.gate = p_.gate;
    multiply({product}, rows);
    add(DOWN, AFTER_MLP, gated, middle, out[0].data<float>(), rows, hidden, scratch);
  }

 private:
  const Norm* norm(int which) const { return p_.norms[which] ? &*p_.norms[which] : nullptr; }

  // to = around + norm(linear(from))
  void add(int which, int norm_after, const float* from, const float* around, float* to, int rows, int hidden, Scratch& scratch) const {
    const Linear& linear = p_.linears[which];
    Rows x(from, rows, linear.weight.layout.k, nullptr, scratch);
    Product product = linear.product(x, to);
    const Norm* after = norm(norm_after);
    if (!after) product.residual = around;
    multiply({product}, rows);
    if (!after) return;
    each(rows, [&](int r) {
      float* row = to + int64_t(r) * hidden;
      kernels().rms_norm(row, after->weight.data<float>(), after->eps, row, hidden);
      for (int i = 0; i < hidden; i++) row[i] += around[int64_t(r) * hidden + i];
    });
  }

  const float* attend(Arrays& in, const float* x, int rows, int hidden, Scratch& scratch) const {
    const int q_width = p_.heads * p_.width, kv_width = p_.kv_heads * p_.width, length = in[0].shape(1);
    Rows normed(x, rows, hidden, norm(BEFORE_ATTENTION), scratch);
    float* q = scratch.take<float>(int64_t(rows) * q_width);
    float* k = scratch.take<float>(int64_t(rows) * kv_width);
    float* v = scratch.take<float>(int64_t(rows) * kv_width);
    multiply({p_.linears[Q].product(normed, q), p_.linears[K].product(normed, k), p_.linears[V].product(normed, v)}, rows);
    place(in, q, k, v, rows);
    float* out = scratch.take<float>(int64_t(rows) * q_width);
    PagedQueries queries{q, {int64_t(length) * q_width, p_.width, q_width}, in[0].shape(0), p_.heads, p_.kv_heads, length, p_.width,
                         p_.block_size, view(in[1]), view(in[2]), in[4], in[5]};
    queries.scale = p_.scale, queries.softcap = p_.softcap, queries.window = p_.window;
    paged_attention(queries, scratch, out);
    return out;
  }

  PoolView view(const mx::array& pool) const {
    const int64_t token = int64_t(p_.kv_heads) * p_.width;
    return {pool.data<char>(), pool.dtype(), p_.width, token * p_.block_size, token, p_.width};
  }

  // Norms and positions for q and k, in place; then k and v into the pools.
  void place(Arrays& in, float* q, float* k, float* v, int rows) const {
    const int length = in[0].shape(1);
    const mx::array &offsets = in[6], &slots = in[3];
    auto position = [&](int r) {
      return offsets.data<int32_t>()[r / length * offsets.strides(0)] + r % length;
    };
    std::shared_ptr<const Turns::Table> table;
    if (p_.turns) {
      int last = 0;
      for (int r = length - 1; r < rows; r += length) last = std::max(last, position(r));
      table = p_.turns->up_to(last);
    }
    each(rows, [&](int r) {
      turn(q + int64_t(r) * p_.heads * p_.width, p_.heads, norm(OF_Q), table.get(), position(r));
      float* key = k + int64_t(r) * p_.kv_heads * p_.width;
      turn(key, p_.kv_heads, norm(OF_K), table.get(), position(r));
      const int64_t slot = slots.data<int32_t>()[r * slots.strides(0)];
      write_row(key, p_.kv_heads * p_.width, in[1], slot);
      write_row(v + int64_t(r) * p_.kv_heads * p_.width, p_.kv_heads * p_.width, in[2], slot);
    });
  }

  void turn(float* row, int heads, const Norm* norm, const Turns::Table* table, int position) const {
    for (int h = 0; h < heads; h++, row += p_.width) {
      if (norm) kernels().rms_norm(row, norm->weight.data<float>(), norm->eps, row, p_.width);
      if (!table) continue;
      const int half = p_.turns->half();
      const int64_t at = int64_t(std::max(0, position)) * half;
      kernels().rope(&table->cosine[at], &table->sine[at], half, p_.traditional, row, row);
    }
  }

  template <class Work>
  static void each(int rows, const Work& work) {
    constexpr int SOME = 8;
    if (rows < SOME) {
      for (int r = 0; r < rows; r++) work(r);
      return;
    }
    pool().each((rows + SOME - 1) / SOME, [&](int i) {
      for (int r = i * SOME; r < std::min(rows, (i + 1) * SOME); r++) work(r);
    });
  }

  LayerParts p_;
};

}  // namespace

std::shared_ptr<Body> make_layer(LayerParts parts) { return std::make_shared<Layer>(std::move(parts)); }

}  // namespace metalctl
