// Attention over the blocks of a pool.
#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "extension.h"
#include "mlx/allocator.h"

namespace metalctl {
namespace {

constexpr int SPLIT = 256;  // slots that one piece of a decode step reads; fixed, so that the sums do not depend on the batch

Format format_of(mx::Dtype dtype) {
  return dtype == mx::float32 ? Format::f32 : dtype == mx::float16 ? Format::f16 : Format::bf16;
}

// Rows of one sequence and one key head over a range of its slots, and what came out.
struct Piece {
  int batch, head, row_from, row_to, first, last;
  float *sums, *top, *total;
};

int at(const mx::array& a, int b) { return a.data<int32_t>()[b * a.strides(0)]; }

// Which slots the rows can see; one piece, or several for a step of decoding.
void cut(const PagedQueries& q, int b, int h, int row_from, int row_to, std::vector<Piece>& pieces) {
  const int group = q.heads / q.kv_heads, start = q.starts ? at(*q.starts, b) : 0, base = at(q.lengths, b) - q.length;
  const int slots = q.tables.shape(1) * q.block_size;
  const int lowest = base + row_from / group, highest = base + (row_to - 1) / group;
  const int last = std::clamp(highest + 1 - start, 0, slots);
  const int first = q.window ? std::clamp(lowest - q.window + 1 - start, 0, last) : 0;
  int from = first;
  do {
    const int to = q.length > 1 ? last : std::min(last, (from / SPLIT + 1) * SPLIT);
    pieces.push_back({b, h, row_from, row_to, from, to, nullptr, nullptr, nullptr});
    from = to;
  } while (from < last);
}

void attend(const PagedQueries& q, const Piece& piece) {
  const PoolView &k = q.keys, &v = q.values;
  const int rows = piece.row_to - piece.row_from, group = q.heads / q.kv_heads, base = at(q.lengths, piece.batch) - q.length;
  const float* from[MAX_ROWS];
  int32_t positions[MAX_ROWS];
  for (int r = 0; r < rows; r++) {
    const int l = (piece.row_from + r) / group, head = piece.head * group + (piece.row_from + r) % group;
    from[r] = q.data + piece.batch * q.strides[0] + head * q.strides[1] + l * q.strides[2];
    positions[r] = base + l;
  }
  Attention a{};
  a.keys = k.data + piece.head * k.head * int64_t(mx::size_of(k.dtype));
  a.values = v.data + piece.head * v.head * int64_t(mx::size_of(v.dtype));
  a.format = format_of(k.dtype);
  a.k_block = k.block, a.k_token = k.token;
  a.v_block = v.block, a.v_token = v.token;
  a.table = q.tables.data<int32_t>() + piece.batch * q.tables.strides(0);
  a.block_size = q.block_size;
  a.first_slot = piece.first, a.last_slot = piece.last;
  a.start = q.starts ? at(*q.starts, piece.batch) : 0;
  a.window = q.window;
  a.scale = q.scale, a.softcap = q.softcap;
  a.rows = rows, a.width = q.width, a.value_width = v.width;
  a.queries = from;
  a.positions = positions;
  a.sums = piece.sums, a.top = piece.top, a.total = piece.total;
  kernels().attention(a);
}

// Pieces of the same rows follow each other.
void join(const PagedQueries& q, const std::vector<Piece>& pieces, float* out) {
  const int group = q.heads / q.kv_heads, width = q.values.width;
  for (size_t i = 0; i < pieces.size();) {
    const Piece& p = pieces[i];
    size_t end = i + 1;
    while (end < pieces.size() && pieces[end].batch == p.batch && pieces[end].head == p.head && pieces[end].row_from == p.row_from)
      end++;
    for (int r = 0; r < p.row_to - p.row_from; r++) {
      const int l = (p.row_from + r) / group, head = p.head * group + (p.row_from + r) % group;
      float top = q.sinks ? q.sinks[head] : p.top[r];
      for (size_t s = i; s < end; s++) top = std::max(top, pieces[s].top[r]);
      float total = q.sinks ? std::exp(q.sinks[head] - top) : 0.0f;
      float* to = out + ((int64_t(p.batch) * q.length + l) * q.heads + head) * width;
      std::fill(to, to + width, 0.0f);
      for (size_t s = i; s < end; s++) {
        const float share = pieces[s].total[r] > 0 ? std::exp(pieces[s].top[r] - top) : 0.0f;
        total += share * pieces[s].total[r];
        const float* sums = pieces[s].sums + int64_t(r) * width;
        for (int d = 0; d < width && share > 0; d++) to[d] += share * sums[d];
      }
      const float inverse = total > 0 ? 1 / total : 0.0f;
      for (int d = 0; d < width; d++) to[d] *= inverse;
    }
    i = end;
  }
}

// Inputs: queries [B, Hq, L, D], pools [blocks, size, Hkv, D], tables [B, n] int32, lengths [B] int32, then sinks [Hq] in
// float32 and starts [B] int32 where they are said to be there. Result [B, Hq, L, Dv], token-major in memory.
class PagedAttention : public Body {
 public:
  PagedAttention(float scale, float softcap, int window, bool sinks, bool starts)
      : scale_(scale), softcap_(softcap), window_(window), sinks_(sinks), starts_(starts) {}

  std::vector<mx::Shape> shapes(const Arrays& in) const override {
    const auto &q = in[0], &k = in[1], &v = in[2];
    if (q.ndim() != 4 || k.ndim() != 4 || v.ndim() != 4 || q.shape(1) % k.shape(2) || q.shape(3) != k.shape(3))
      throw std::invalid_argument("queries and pools do not go together");
    return {{q.shape(0), q.shape(1), q.shape(2), v.shape(3)}};
  }

  void allocate(const Arrays& in, Arrays& out) const override {
    auto& o = out[0];
    const int64_t heads = o.shape(1), length = o.shape(2), width = o.shape(3);
    const bool plain = heads == 1 || length == 1;
    o.set_data(mx::allocator::malloc(o.nbytes()), o.size(), {length * heads * width, width, heads * width, 1},
               {true, plain, false});
  }

  void run(Arrays& in, Arrays& out) const override {
    const auto& q = in[0];
    Scratch scratch;
    const bool own = q.dtype() == mx::float32 && q.strides(-1) == 1;
    const int64_t heads = q.shape(1), length = q.shape(2), width = q.shape(3);
    PagedQueries queries{own ? q.data<float>() : floats(q, scratch), {heads * length * width, length * width, width},
                         q.shape(0), int(heads), in[1].shape(2), int(length), int(width), in[1].shape(1),
                         view(in[1]), view(in[2]), in[3], in[4]};
    if (own) queries.strides[0] = q.strides(0), queries.strides[1] = q.strides(1), queries.strides[2] = q.strides(2);
    if (sinks_) queries.sinks = in[5].data<float>();
    if (starts_) queries.starts = &in[sinks_ ? 6 : 5];
    queries.scale = scale_, queries.softcap = softcap_, queries.window = window_;
    paged_attention(queries, scratch, out[0].data<float>());
  }

 private:
  static PoolView view(const mx::array& pool) {
    return {pool.data<char>(), pool.dtype(), pool.shape(3), pool.strides(0), pool.strides(1), pool.strides(2)};
  }

  float scale_, softcap_;
  int window_;
  bool sinks_, starts_;
};

}  // namespace

void paged_attention(const PagedQueries& q, Scratch& scratch, float* out) {
  const int rows = q.length * (q.heads / q.kv_heads), width = q.values.width;
  std::vector<Piece> pieces;
  for (int b = 0; b < q.batch; b++)
    for (int h = 0; h < q.kv_heads; h++)
      for (int from = 0; from < rows; from += MAX_ROWS) cut(q, b, h, from, std::min(rows, from + MAX_ROWS), pieces);
  for (Piece& piece : pieces) {
    const int some = piece.row_to - piece.row_from;
    piece.sums = scratch.take<float>(int64_t(some) * width);
    piece.top = scratch.take<float>(some);
    piece.total = scratch.take<float>(some);
  }
  pool().each(int(pieces.size()), [&](int i) { attend(q, pieces[i]); });
  join(q, pieces, out);
}

std::shared_ptr<Body> make_attention(float scale, float softcap, int window, bool sinks, bool starts) {
  return std::make_shared<PagedAttention>(scale, softcap, window, sinks, starts);
}

}  // namespace metalctl
