// What Python calls, through ctypes and with the interpreter's lock held. Arrays come as Python objects of MLX's own
// type: that type's lookup does not reach across modules, but an instance says where its C++ object lies.
#include <cstring>
#include <string>

#include "extension.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace metalctl {
void start(const Kernels* table, int threads);
}

namespace {

using namespace metalctl;

std::string failure;
int header_bytes = 16;   // of a Python object
int instance_bytes = 0;  // of an MLX array as a Python object
void* none = nullptr;

// nanobind: after the object's header an int32 offset to the value (or to a pointer to it), then flags.
constexpr uint32_t DIRECT = 1u << 2;

mx::array* array_in(void* object) {
  char* self = static_cast<char*>(object);
  int32_t offset;
  uint32_t flags;
  std::memcpy(&offset, self + header_bytes, 4);
  std::memcpy(&flags, self + header_bytes + 4, 4);
  if (offset < header_bytes + 8 || offset + int(sizeof(mx::array)) > instance_bytes || !(flags & DIRECT)) return nullptr;
  return reinterpret_cast<mx::array*>(self + offset);
}

std::optional<mx::array> maybe(void* object) {
  if (object == none) return std::nullopt;
  return *array_in(object);
}

template <class Call>
bool guarded(const Call& call) {
  try {
    call();
    return true;
  } catch (const std::exception& error) {
    failure = error.what();
    return false;
  }
}

using Handle = std::shared_ptr<Body>;

Pack layout_of(int format, int n, int k, int group, int wide) { return {nullptr, Format(format), n, k, group, wide != 0}; }

}  // namespace

EXPORT const char* metalctl_failure() { return failure.c_str(); }

// The best instruction set that this processor has and that was compiled; an empty name for none.
EXPORT const char* metalctl_best() {
#if defined(__x86_64__)
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  if (avx512 && __builtin_cpu_supports("avx512vnni") && avx512vnni_kernels()) return "avx512-vnni";
  if (avx512 && avx512_kernels()) return "avx512";
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && avx2_kernels()) return "avx2";
#endif
  return baseline_kernels() ? "baseline" : "";
}

// `sample` is an int32 array [7, 8]: whether its C++ object is where this build looks for it.
EXPORT bool metalctl_start(void* sample, void* none_object, int header, int size, const char* isa, int threads) {
  header_bytes = header;
  instance_bytes = size;
  none = none_object;
  mx::array* a = array_in(sample);
  if (!a || a->ndim() != 1 || a->size() != 2 || a->dtype() != mx::int32 || a->data<int32_t>()[0] != 7 || a->data<int32_t>()[1] != 8) {
    failure = "arrays are laid out otherwise in this MLX";
    return false;
  }
  const std::string wanted = isa;
  for (auto table : {avx512vnni_kernels(), avx512_kernels(), avx2_kernels(), baseline_kernels()})
    if (table && wanted == table->name) {
      start(table, threads);
      return true;
    }
  failure = "no kernels for " + wanted;
  return false;
}

EXPORT int metalctl_threads() { return pool().threads(); }

EXPORT void* metalctl_packing(int format, int count, int n, int k, int group, int wide) {
  return new Handle(make_packing(layout_of(format, n, k, group, wide), count));
}

EXPORT void* metalctl_weight(void* data, int format, int count, int n, int k, int group, int wide) {
  return new Weight{*array_in(data), layout_of(format, n, k, group, wide), count};
}

EXPORT void metalctl_release_weight(void* weight) { delete static_cast<Weight*>(weight); }

EXPORT void* metalctl_linear(int count, void** weights, void** biases, int gate, void* norm, float eps, int experts) {
  std::vector<Weight> own;
  std::vector<std::optional<mx::array>> own_biases;
  for (int i = 0; i < count; i++) {
    own.push_back(*static_cast<Weight*>(weights[i]));
    own_biases.push_back(maybe(biases[i]));
  }
  if (experts) return new Handle(make_experts(std::move(own), std::move(own_biases), Gate(gate)));
  std::optional<Norm> before;
  if (norm != none) before = Norm{*array_in(norm), eps};
  return new Handle(make_linear(std::move(own), std::move(own_biases), Gate(gate), std::move(before)));
}

EXPORT void* metalctl_embedding(void* weight) { return new Handle(make_embedding(*static_cast<Weight*>(weight))); }

EXPORT void* metalctl_rms_norm(void* weight, float eps) { return new Handle(make_rms_norm({*array_in(weight), eps})); }

EXPORT void* metalctl_glu(int kind) { return new Handle(make_glu(Gate(kind))); }

EXPORT void* metalctl_turns(int half, const float* inverse_frequencies, float scale) {
  return new std::shared_ptr<Turns>(Turns::of({inverse_frequencies, inverse_frequencies + half}, scale));
}

EXPORT void metalctl_release_turns(void* turns) { delete static_cast<std::shared_ptr<Turns>*>(turns); }

EXPORT void* metalctl_rope(void* turns, int traditional) {
  return new Handle(make_rope(traditional != 0, *static_cast<std::shared_ptr<Turns>*>(turns)));
}

// `numbers`: heads, kv_heads, width, window, traditional, gate, block size. Weights and biases of q k v o gate up down; norm weights
// (None where there is none) and eps before attention, of q, of k, after attention, before the MLP, after it.
EXPORT void* metalctl_layer(const int* numbers, float scale, float softcap, void* turns, void** weights, void** biases, void** norms,
                            const float* eps) {
  LayerParts parts{numbers[0], numbers[1], numbers[2], scale, softcap, numbers[3], numbers[4] != 0, nullptr, Gate(numbers[5]), numbers[6], {}, {}};
  if (turns) parts.turns = *static_cast<std::shared_ptr<Turns>*>(turns);
  for (int i = 0; i < 7; i++) parts.linears.push_back({*static_cast<Weight*>(weights[i]), maybe(biases[i])});
  for (int i = 0; i < 6; i++)
    parts.norms.push_back(norms[i] == none ? std::nullopt : std::optional(Norm{*array_in(norms[i]), eps[i]}));
  return new Handle(make_layer(std::move(parts)));
}

EXPORT void* metalctl_attention(float scale, float softcap, int window, int sinks, int starts) {
  return new Handle(make_attention(scale, softcap, window, sinks != 0, starts != 0));
}

EXPORT void* metalctl_both_ways(float scale, int window) { return new Handle(make_both_ways(scale, window)); }

EXPORT void* metalctl_draw() { return new Handle(make_draw()); }

EXPORT void metalctl_release(void* body) { delete static_cast<Handle*>(body); }

// Inputs that are None are left out. The results replace what the output arrays held.
EXPORT bool metalctl_apply(void* body, void* a, void* b, void* out0, void* out1, void* out2) {
  return guarded([&] {
    Arrays in;
    in.reserve(2);
    in.push_back(*array_in(a));
    if (b != none) in.push_back(*array_in(b));
    auto results = build(*static_cast<Handle*>(body), std::move(in));
    void* outs[] = {out0, out1, out2};
    for (size_t i = 0; i < results.size(); i++) array_in(outs[i])->overwrite_descriptor(results[i]);
  });
}

EXPORT bool metalctl_apply_many(void* body, int count, void** inputs, void* out) {
  return guarded([&] {
    Arrays in;
    for (int i = 0; i < count; i++)
      if (inputs[i] != none) in.push_back(*array_in(inputs[i]));
    array_in(out)->overwrite_descriptor(build(*static_cast<Handle*>(body), std::move(in))[0]);
  });
}
