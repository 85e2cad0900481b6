// What drawing a token takes: the largest of a row, and its weights.
#pragma once

#include "simd.h"

namespace metalctl {
namespace {

float peak(const float* x, int64_t count) {
  f32x top = splat(-__builtin_inff());
  int64_t i = 0;
  for (; i + W <= count; i += W) top = maximum(top, load<f32x>(x + i));
  float most = largest(top);
  for (; i < count; i++) most = x[i] > most ? x[i] : most;
  return most;
}

float weights(const float* x, int64_t count, float top, float temperature, float least, float* out) {
  const float inverse = 1.0f / temperature;
  f32x total{};
  for (int64_t i = 0; i < count; i += W) {
    const int some = count - i < W ? int(count - i) : W;
    f32x v = load_some(x + i, some);
    f32x weight = select(v >= least, exp((v - top) * inverse), f32x{});
    if (some < W)
      for (int lane = some; lane < W; lane++) weight[lane] = 0;
    store_some(out + i, weight, some);
    total += weight;
  }
  return sum(total);
}

}  // namespace
}  // namespace metalctl
