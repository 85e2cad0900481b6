// Drawing a token from what temperature, top-k, top-p and min-p leave of a row of logits.
#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "extension.h"

namespace metalctl {
namespace {

constexpr int BLOCK = 1024;

struct Settings {
  float temperature, top_k, top_p, min_p, uniform;
};

// The least logit that is kept. Everything is kept in order of size up to the first that fails: rank below top_k, what is
// likelier by less than top_p in all, and at least min_p of the likeliest. The likeliest always is.
float least_kept(const float* x, int64_t count, float top, const Settings& s, float* room) {
  float least = s.min_p > 0 ? top + s.temperature * std::log(s.min_p) : -std::numeric_limits<float>::infinity();
  const int64_t k = std::max<int64_t>(1, int64_t(s.top_k));
  if (k < count) {
    std::copy(x, x + count, room);
    std::nth_element(room, room + k - 1, room + count, std::greater<float>());
    least = std::max(least, room[k - 1]);
  }
  if (s.top_p >= 1) return std::min(least, top);
  const float kth = k < count ? room[k - 1] : -std::numeric_limits<float>::infinity();
  double total = kernels().weights(x, count, top, s.temperature, kth, room);
  if (k < count) {  // of several that equal the last, only as many as top_k lets in
    const int64_t from = std::count_if(x, x + count, [&](float v) { return v >= kth; });
    total -= double(from - k) * std::exp((kth - top) / s.temperature);
  }
  for (float reach = 6; ; reach *= 2) {  // sorts no more than it must
    const float bound = std::max(top - reach * s.temperature, kth);
    float* end = std::copy_if(x, x + count, room, [&](float v) { return v >= bound; });
    std::sort(room, end, std::greater<float>());
    double before = 0;
    for (float* v = room; v < end; v++) {
      if (before >= s.top_p * total) return std::max(least, v[-1]);
      before += std::exp((*v - top) / s.temperature);
    }
    if (bound <= kth || end == room + count) return std::min(std::max(least, end[-1]), top);
  }
}

int draw(const float* x, int64_t count, const Settings& s, float* room) {
  const float top = kernels().peak(x, count);
  const bool filtered = s.top_k < count || s.top_p < 1 || s.min_p > 0;
  const float least = filtered ? least_kept(x, count, top, s, room) : -std::numeric_limits<float>::infinity();
  std::vector<double> sums;
  double total = 0;
  for (int64_t at = 0; at < count; at += BLOCK) {
    sums.push_back(kernels().weights(x + at, std::min<int64_t>(BLOCK, count - at), top, s.temperature, least, room + at));
    total += sums.back();
  }
  double left = s.uniform * total * (1 - 1e-6);
  size_t block = 0;
  while (block + 1 < sums.size() && left >= sums[block]) left -= sums[block++];
  int chosen = -1;  // the last that has any weight, where rounding leaves something over
  for (int64_t i = int64_t(block) * BLOCK; i < std::min<int64_t>(count, int64_t(block + 1) * BLOCK); i++) {
    if (room[i] <= 0) continue;
    chosen = int(i);
    if (left < room[i]) break;
    left -= room[i];
  }
  return chosen >= 0 ? chosen : int(std::max_element(x, x + count) - x);
}

// Logits [N, V] and settings [N, 5] (temperature, top_k, top_p, min_p, a uniform number) in float32; tokens [N].
class Draw : public Body {
 public:
  mx::Dtype dtype() const override { return mx::int32; }

  std::vector<mx::Shape> shapes(const Arrays& in) const override {
    if (in[0].ndim() != 2 || in[1].ndim() != 2 || in[1].shape(0) != in[0].shape(0) || in[1].shape(1) != 5)
      throw std::invalid_argument("sampling takes logits [N, V] and settings [N, 5]");
    return {{in[0].shape(0)}};
  }

  void run(Arrays& in, Arrays& out) const override {
    const int64_t rows = in[0].shape(0), count = in[0].shape(1);
    Scratch scratch;
    const float *logits = floats(in[0], scratch), *settings = floats(in[1], scratch);
    float* room = scratch.take<float>(rows * count);
    int32_t* tokens = out[0].data<int32_t>();
    pool().each(int(rows), [&](int r) {
      Settings s;
      std::copy(settings + 5 * r, settings + 5 * r + 5, &s.temperature);
      tokens[r] = draw(logits + r * count, count, s, room + r * count);
    });
  }
};

}  // namespace

std::shared_ptr<Body> make_draw() { return std::make_shared<Draw>(); }

}  // namespace metalctl
