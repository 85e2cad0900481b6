// The bridge between MLX's graph and the bodies. An operation is a Body: it names the shapes of its results and computes
// them on the thread of MLX's stream, sharing the work out through the pool.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "kernels.h"
#include "mlx/array.h"
#include "pool.h"

namespace metalctl {

namespace mx = mlx::core;
using Arrays = std::vector<mx::array>;

// What was chosen once for the process.
const Kernels& kernels();
Pool& pool();

// Memory for the length of one operation, on the thread that runs it.
class Scratch {
 public:
  Scratch();
  ~Scratch();
  template <class T>
  T* take(int64_t count) {
    return static_cast<T*>(bytes(count * int64_t(sizeof(T))));
  }

 private:
  void* bytes(int64_t count);
  std::vector<std::unique_ptr<char[]>> extra_;
  int64_t mark_;
};

class Body {
 public:
  virtual ~Body() = default;
  virtual std::vector<mx::Shape> shapes(const Arrays& in) const = 0;  // throws std::invalid_argument
  virtual void allocate(const Arrays& in, Arrays& out) const;
  virtual void run(Arrays& in, Arrays& out) const = 0;
  virtual mx::Dtype dtype() const { return mx::float32; }
};

Arrays build(std::shared_ptr<const Body> body, Arrays in);

// A packed matrix, or `count` of them one after the other.
struct Weight {
  mx::array data;
  Pack layout;
  int count;

  Pack pack(int which = 0) const {
    Pack p = layout;
    p.data = data.data<uint8_t>() + which * p.bytes();
    return p;
  }
};

// Elements as contiguous float32: the array's own, or a copy.
const float* floats(const mx::array& a, Scratch& scratch);

struct Norm {
  mx::array weight;
  float eps;
};

std::shared_ptr<Body> make_packing(Pack layout, int count);
std::shared_ptr<Body> make_linear(std::vector<Weight> weights, std::vector<std::optional<mx::array>> biases, Gate gate,
                                  std::optional<Norm> norm);
std::shared_ptr<Body> make_experts(std::vector<Weight> weights, std::vector<std::optional<mx::array>> biases, Gate gate);
std::shared_ptr<Body> make_embedding(Weight weight);
std::shared_ptr<Body> make_rms_norm(Norm norm);
std::shared_ptr<Body> make_glu(Gate kind);
std::shared_ptr<Body> make_rope(int width, bool traditional, std::vector<float> inverse_frequencies, float scale, int offset);
std::shared_ptr<Body> make_attention(float scale, float softcap, int window, bool sinks, bool starts);

}  // namespace metalctl
