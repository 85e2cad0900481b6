// The bridge between MLX's graph and the bodies. An operation is a Body: it names the shapes of its results and computes
// them on the thread of MLX's stream, sharing the work out through the pool.
#pragma once

#include <map>
#include <memory>
#include <mutex>
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

// A pool of keys or values in memory; strides in elements.
struct PoolView {
  const char* data;
  mx::Dtype dtype;
  int width;
  int64_t block, token, head;
};

// Queries over the blocks of a pool; `out` is [batch, length, heads, value width].
struct PagedQueries {
  const float* data;
  int64_t strides[3];  // of batch, head and position
  int batch, heads, kv_heads, length, width, block_size;
  PoolView keys, values;
  const mx::array &tables, &lengths;
  const mx::array* starts = nullptr;
  const float* sinks = nullptr;
  float scale = 1, softcap = 0;
  int window = 0;
};
void paged_attention(const PagedQueries& q, Scratch& scratch, float* out);

// Rows of x in each form that weights ask for: made when one asks, read by all that do.
class Rows {
 public:
  Rows(const float* x, int rows, int k, const Norm* norm, Scratch& scratch);
  void serve(Product& p);
  int count() const { return rows_; }

 private:
  Quantized quantized(int group);

  const float* x_;
  int rows_, k_;
  Scratch& scratch_;
  std::map<int, Quantized> forms_;
};

// All products, each over `rows` rows, shared out together.
void multiply(const std::vector<Product>& products, int rows);

// Cosines and sines of whole positions, shared by all layers that turn alike.
class Turns {
 public:
  struct Table {
    int positions;
    std::vector<float> cosine, sine;  // [positions, half]
  };
  Turns(std::vector<float> inverse_frequencies, float scale);
  std::shared_ptr<const Table> up_to(int position);
  int half() const { return int(inverse_.size()); }
  static std::shared_ptr<Turns> of(const std::vector<float>& inverse_frequencies, float scale);

 private:
  std::shared_ptr<const Table> made(int positions) const;

  std::vector<float> inverse_;
  float scale_;
  std::mutex mutex_;
  std::shared_ptr<const Table> table_;
};

struct Linear {
  Weight weight;
  std::optional<mx::array> bias;

  Product product(Rows& x, float* y) const;
};

// A decoder layer: attention, then a gated MLP, each behind a norm and added to what goes around it.
struct LayerParts {
  int heads, kv_heads, width;
  float scale, softcap;
  int window;
  bool traditional;
  std::shared_ptr<Turns> turns;  // null: positions play no part
  Gate gate;
  int block_size;
  std::vector<Linear> linears;               // q k v o gate up down
  std::vector<std::optional<Norm>> norms;    // before attention, of q, of k, after attention, before the MLP, after it
};

std::shared_ptr<Body> make_packing(Pack layout, int count);
std::shared_ptr<Body> make_linear(std::vector<Weight> weights, std::vector<std::optional<mx::array>> biases, Gate gate,
                                  std::optional<Norm> norm);
std::shared_ptr<Body> make_experts(std::vector<Weight> weights, std::vector<std::optional<mx::array>> biases, Gate gate);
std::shared_ptr<Body> make_embedding(Weight weight);
std::shared_ptr<Body> make_rms_norm(Norm norm);
std::shared_ptr<Body> make_glu(Gate kind);
std::shared_ptr<Body> make_rope(bool traditional, std::shared_ptr<Turns> turns);
std::shared_ptr<Body> make_layer(LayerParts parts);
std::shared_ptr<Body> make_draw();
std::shared_ptr<Body> make_attention(float scale, float softcap, int window, bool sinks, bool starts);
std::shared_ptr<Body> make_both_ways(float scale, int window);

}  // namespace metalctl
