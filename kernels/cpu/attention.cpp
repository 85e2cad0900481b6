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
    const auto &q = in[0], &v = in[2];
    const int batch = q.shape(0), heads = q.shape(1), length = q.shape(2), value_width = v.shape(3);
    const int kv_heads = in[1].shape(2), group = heads / kv_heads;
    Scratch scratch;
    std::vector<Piece> pieces;
    for (int b = 0; b < batch; b++)
      for (int h = 0; h < kv_heads; h++)
        for (int from = 0; from < length * group; from += MAX_ROWS)
          cut(in, b, h, from, std::min(length * group, from + MAX_ROWS), group, pieces);
    for (Piece& piece : pieces) {
      const int rows = piece.row_to - piece.row_from;
      piece.sums = scratch.take<float>(int64_t(rows) * value_width);
      piece.top = scratch.take<float>(rows);
      piece.total = scratch.take<float>(rows);
    }
    const float* queries = rows_are_floats(q) ? q.data<float>() : floats(q, scratch);
    pool().each(int(pieces.size()), [&](int i) { attend(in, queries, group, pieces[i]); });
    const float* sinks = sinks_ ? in[5].data<float>() : nullptr;
    join(pieces, group, heads, length, value_width, sinks, out[0].data<float>());
  }

 private:
  static bool rows_are_floats(const mx::array& q) { return q.dtype() == mx::float32 && q.strides(-1) == 1; }

  int start_of(const Arrays& in, int b) const {
    if (!starts_) return 0;
    const auto& starts = in[sinks_ ? 6 : 5];
    return starts.data<int32_t>()[b * starts.strides(0)];
  }

  static int length_of(const Arrays& in, int b) { return in[4].data<int32_t>()[b * in[4].strides(0)]; }

  void cut(const Arrays& in, int b, int h, int row_from, int row_to, int group, std::vector<Piece>& pieces) const {
    const int length = in[0].shape(2), start = start_of(in, b), base = length_of(in, b) - length;
    const int slots = in[3].shape(1) * in[1].shape(1);
    const int lowest = base + row_from / group, highest = base + (row_to - 1) / group;
    const int last = std::clamp(highest + 1 - start, 0, slots);
    const int first = window_ ? std::clamp(lowest - window_ + 1 - start, 0, last) : 0;
    if (length > 1) {
      pieces.push_back({b, h, row_from, row_to, first, last, nullptr, nullptr, nullptr});
      return;
    }
    int from = first;
    do {
      const int to = std::min(last, (from / SPLIT + 1) * SPLIT);
      pieces.push_back({b, h, row_from, row_to, from, to, nullptr, nullptr, nullptr});
      from = to;
    } while (from < last);
  }

  void attend(const Arrays& in, const float* queries, int group, const Piece& piece) const {
    const auto &q = in[0], &k = in[1], &v = in[2], &tables = in[3];
    const int rows = piece.row_to - piece.row_from, length = q.shape(2), base = length_of(in, piece.batch) - length;
    const bool own = rows_are_floats(q);
    const int64_t width = q.shape(3), strides[3] = {own ? q.strides(0) : q.shape(1) * length * width,
                                                    own ? q.strides(1) : length * width, own ? q.strides(2) : width};
    const float* from[MAX_ROWS];
    int32_t positions[MAX_ROWS];
    for (int r = 0; r < rows; r++) {
      const int l = (piece.row_from + r) / group, head = piece.head * group + (piece.row_from + r) % group;
      from[r] = queries + piece.batch * strides[0] + head * strides[1] + l * strides[2];
      positions[r] = base + l;
    }
    Attention a{};
    const int64_t item = k.itemsize();
    a.keys = k.data<char>() + piece.head * k.strides(2) * item;
    a.values = v.data<char>() + piece.head * v.strides(2) * int64_t(v.itemsize());
    a.format = format_of(k.dtype());
    a.k_block = k.strides(0), a.k_token = k.strides(1);
    a.v_block = v.strides(0), a.v_token = v.strides(1);
    a.table = tables.data<int32_t>() + piece.batch * tables.strides(0);
    a.block_size = k.shape(1);
    a.first_slot = piece.first, a.last_slot = piece.last;
    a.start = start_of(in, piece.batch);
    a.window = window_;
    a.scale = scale_, a.softcap = softcap_;
    a.rows = rows, a.width = int(width), a.value_width = v.shape(3);
    a.queries = from;
    a.positions = positions;
    a.sums = piece.sums, a.top = piece.top, a.total = piece.total;
    kernels().attention(a);
  }

  // Pieces of the same rows follow each other.
  static void join(const std::vector<Piece>& pieces, int group, int heads, int length, int width, const float* sinks, float* out) {
    for (size_t i = 0; i < pieces.size();) {
      const Piece& p = pieces[i];
      size_t end = i + 1;
      while (end < pieces.size() && pieces[end].batch == p.batch && pieces[end].head == p.head && pieces[end].row_from == p.row_from)
        end++;
      for (int r = 0; r < p.row_to - p.row_from; r++) {
        const int l = (p.row_from + r) / group, head = p.head * group + (p.row_from + r) % group;
        float top = sinks ? sinks[head] : p.top[r];
        for (size_t s = i; s < end; s++) top = std::max(top, pieces[s].top[r]);
        float total = sinks ? std::exp(sinks[head] - top) : 0.0f;
        float* to = out + ((int64_t(p.batch) * length + l) * heads + head) * width;
        std::fill(to, to + width, 0.0f);
        for (size_t s = i; s < end; s++) {
          const float share = pieces[s].total[r] > 0 ? std::exp(pieces[s].top[r] - top) : 0.0f;
          total += share * pieces[s].total[r];
          const float* sums = pieces[s].sums + int64_t(r) * width;
          for (int d = 0; d < width && share > 0; d++) to[d] += share * sums[d];
        }
        for (int d = 0; d < width && total > 0; d++) to[d] /= total;
      }
      i = end;
    }
  }

  float scale_, softcap_;
  int window_;
  bool sinks_, starts_;
};

}  // namespace

std::shared_ptr<Body> make_attention(float scale, float softcap, int window, bool sinks, bool starts) {
  return std::make_shared<PagedAttention>(scale, softcap, window, sinks, starts);
}

}  // namespace metalctl
