// Normalisation, rotary positions and gates.
#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <stdexcept>

#include "extension.h"
#include "mlx/allocator.h"

namespace metalctl {
namespace {

constexpr int64_t SMALL = 1 << 14;  // elements that one thread does faster than two

template <class Work>
void each_row(int64_t rows, int64_t width, const Work& work) {
  if (rows * width <= SMALL) {
    for (int64_t r = 0; r < rows; r++) work(r);
    return;
  }
  const int64_t some = std::max<int64_t>(1, SMALL / 4 / width);
  pool().each(int((rows + some - 1) / some), [&](int i) {
    for (int64_t r = i * some; r < std::min(rows, (i + 1) * some); r++) work(r);
  });
}

class RmsNorm : public Body {
 public:
  explicit RmsNorm(Norm norm) : norm_(std::move(norm)) {}

  std::vector<mx::Shape> shapes(const Arrays& in) const override {
    if (in[0].ndim() == 0 || in[0].shape(-1) != int(norm_.weight.size()))
      throw std::invalid_argument("the last axis does not have the length of the norm's weight");
    return {in[0].shape()};
  }

  void run(Arrays& in, Arrays& out) const override {
    const int k = int(norm_.weight.size());
    Scratch scratch;
    const float *x = floats(in[0], scratch), *weight = norm_.weight.data<float>();
    float* y = out[0].data<float>();
    each_row(in[0].size() / k, k, [&](int64_t r) { kernels().rms_norm(x + r * k, weight, norm_.eps, y + r * k, k); });
  }

 private:
  Norm norm_;
};

class Glu : public Body {
 public:
  explicit Glu(Gate kind) : kind_(kind) {}

  std::vector<mx::Shape> shapes(const Arrays& in) const override {
    if (in[0].shape() != in[1].shape()) throw std::invalid_argument("gate and input differ in shape");
    return {in[0].shape()};
  }

  void run(Arrays& in, Arrays& out) const override {
    constexpr int64_t SOME = 4096;
    const int64_t size = in[0].size();
    Scratch scratch;
    const float *gate = floats(in[0], scratch), *up = floats(in[1], scratch);
    float* y = out[0].data<float>();
    each_row((size + SOME - 1) / SOME, SOME, [&](int64_t r) {
      const int64_t at = r * SOME;
      kernels().glu(gate + at, up + at, kind_, y + at, std::min(SOME, size - at));
    });
  }

 private:
  Gate kind_;
};

// x [B, ..., L, D] from the position that the second input says: int32, one value or one a row [B].
class Rope : public Body {
 public:
  Rope(bool traditional, std::shared_ptr<Turns> turns) : traditional_(traditional), half_(turns->half()), turns_(std::move(turns)) {}

  std::vector<mx::Shape> shapes(const Arrays& in) const override {
    if (in[0].ndim() < 3 || in[0].shape(-1) < 2 * half_) throw std::invalid_argument("rope takes [B, ..., L, D]");
    return {in[0].shape()};
  }

  // In the memory order of the input, so that a transposed view stays one.
  void allocate(const Arrays& in, Arrays& out) const override {
    const mx::array& x = in[0];
    if (dense(x)) out[0].set_data(mx::allocator::malloc(x.nbytes()), x.data_size(), x.strides(), x.flags());
    else Body::allocate(in, out);
  }

  void run(Arrays& in, Arrays& out) const override {
    const mx::array& x = in[0];
    Scratch scratch;
    const bool same = dense(x);
    const float* from = same ? x.data<float>() : floats(x, scratch);
    float* to = out[0].data<float>();
    const int dims = int(x.ndim()), length = x.shape(-2), width = x.shape(-1);
    const int64_t rows = x.size() / width, inner = rows / x.shape(0);
    auto start = [&](int64_t b) { return in[1].data<int32_t>()[in[1].size() > 1 ? b * in[1].strides(0) : 0]; };
    int last = 0;
    for (int b = 0; b < x.shape(0); b++) last = std::max(last, start(b) + length);
    const auto table = turns_->up_to(last);
    each_row(rows, width, [&](int64_t r) {
      int64_t at = r * width;
      if (same) {
        at = 0;
        int64_t rest = r;
        for (int d = dims - 2; d >= 0; rest /= x.shape(d), d--) at += rest % x.shape(d) * x.strides(d);
      }
      const int64_t turn = int64_t(std::max(0, start(r / inner) + int(r % length))) * half_;
      kernels().rope(&table->cosine[turn], &table->sine[turn], half_, traditional_, from + at, to + at);
      if (width > 2 * half_) std::copy(from + at + 2 * half_, from + at + width, to + at + 2 * half_);
    });
  }

 private:
  static bool dense(const mx::array& x) {
    return x.dtype() == mx::float32 && x.flags().contiguous && x.data_size() == x.size() && x.strides(-1) == 1;
  }

  bool traditional_;
  int half_;
  std::shared_ptr<Turns> turns_;
};

}  // namespace

std::shared_ptr<Body> make_rms_norm(Norm norm) { return std::make_shared<RmsNorm>(std::move(norm)); }
std::shared_ptr<Body> make_glu(Gate kind) { return std::make_shared<Glu>(kind); }
std::shared_ptr<Body> make_rope(bool traditional, std::shared_ptr<Turns> turns) {
  return std::make_shared<Rope>(traditional, std::move(turns));
}

Turns::Turns(std::vector<float> inverse_frequencies, float scale) : inverse_(std::move(inverse_frequencies)), scale_(scale) {}

std::shared_ptr<const Turns::Table> Turns::up_to(int position) {
  std::lock_guard lock(mutex_);
  if (!table_ || table_->positions <= position) table_ = made(std::max(256, 2 * position));
  return table_;
}

std::shared_ptr<Turns> Turns::of(const std::vector<float>& inverse_frequencies, float scale) {
  static std::mutex mutex;
  static auto* known = new std::map<std::pair<std::vector<float>, float>, std::shared_ptr<Turns>>;
  std::lock_guard lock(mutex);
  auto& turns = (*known)[{inverse_frequencies, scale}];
  if (!turns) turns = std::make_shared<Turns>(inverse_frequencies, scale);
  return turns;
}

std::shared_ptr<const Turns::Table> Turns::made(int positions) const {
  auto table = std::make_shared<Table>();
  const size_t half = inverse_.size();
  table->positions = positions;
  table->cosine.resize(positions * half);
  table->sine.resize(positions * half);
  for (int p = 0; p < positions; p++)
    for (size_t i = 0; i < half; i++) {
      const float angle = float(p) * scale_ * inverse_[i];
      table->cosine[p * half + i] = std::cos(angle);
      table->sine[p * half + i] = std::sin(angle);
    }
  return table;
}

}  // namespace metalctl
