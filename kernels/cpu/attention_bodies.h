// The body of attention: keys and values are read from the pool once, a tile of keys at a time, for all rows of queries
// that share them. Included by bodies.h.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace metalctl {
namespace {

constexpr float NOWHERE = -1e38f;  // below every score

// A tile of keys (or values) as rows of floats: pointers into the pool where it holds floats, else into `room`.
template <class T>
void rows_of(const T* pool, int64_t block_stride, int64_t token_stride, int width, const Attention& a, int from, int count,
             float* room, const float** rows) {
  int block = from / a.block_size, inside = from % a.block_size;
  for (int j = 0; j < count; j++, inside++) {
    if (inside == a.block_size) block++, inside = 0;
    const T* row = pool + a.table[block] * block_stride + inside * token_stride;
    if constexpr (sizeof(T) == 4) {
      rows[j] = row;
    } else {
      float* to = room + int64_t(j) * width;
      int i = 0;
      for (; i + W <= width; i += W) store(to + i, load_as_float(row + i));
      for (; i < width; i++) to[i] = widen(row[i]);
      rows[j] = to;
    }
  }
}

void rows_of(const void* pool, int64_t block_stride, int64_t token_stride, int width, const Attention& a, int from, int count,
             float* room, const float** rows) {
  if (a.format == Format::f32)
    rows_of(static_cast<const float*>(pool), block_stride, token_stride, width, a, from, count, room, rows);
  else if (a.format == Format::f16)
    rows_of(static_cast<const half*>(pool), block_stride, token_stride, width, a, from, count, room, rows);
  else
    rows_of(static_cast<const bfloat*>(pool), block_stride, token_stride, width, a, from, count, room, rows);
}

// scores[j][r] = key j . query r, for J keys and V vectors of queries that lie transposed, [width][lanes]
template <int J, int V>
inline void score(const float* const* keys, const float* queries, int lanes, int width, float* scores) {
  f32x acc[J][V] = {};
  for (int d = 0; d < width; d++) {
    f32x q[V];
    for (int v = 0; v < V; v++) q[v] = load<f32x>(queries + int64_t(d) * lanes + v * W);
    for (int j = 0; j < J; j++)
      for (int v = 0; v < V; v++) acc[j][v] += q[v] * keys[j][d];
  }
  for (int j = 0; j < J; j++)
    for (int v = 0; v < V; v++) store(scores + j * lanes + v * W, acc[j][v]);
}

template <int J>
inline void score_lanes(const float* const* keys, const float* queries, int lanes, int width, float* scores) {
  int at = 0;
  for (; at + 4 * W <= lanes; at += 4 * W) score<J, 4>(keys, queries + at, lanes, width, scores + at);
  for (; at < lanes; at += W) score<J, 1>(keys, queries + at, lanes, width, scores + at);
}

// The same for a few queries: along the width instead, four keys at a time so that their sums overlap. Scores [rows][KEYS].
inline void score_few(const Attention& a, const float* const* keys, int count, float* scores) {
  for (int j = 0; j < count; j += 4)
    for (int r = 0; r < a.rows; r++) {
      const float* four[4];
      for (int i = 0; i < 4; i++) four[i] = keys[j + i < count ? j + i : j];
      f32x acc[4] = {};
      int d = 0;
      for (; d + W <= a.width; d += W) {
        const f32x query = load<f32x>(a.queries[r] + d);
        for (int i = 0; i < 4; i++) acc[i] += load<f32x>(four[i] + d) * query;
      }
      for (int i = 0; i < 4; i++) {
        float total = sum(acc[i]);
        for (int rest = d; rest < a.width; rest++) total += four[i][rest] * a.queries[r][rest];
        scores[r * KEYS + j + i] = total * a.scale;
      }
    }
}

// Scores of a few queries, [rows][KEYS], become weights; as `soften` does it for many.
inline void soften_few(const Attention& a, int from, int count, float* scores, float* top, float* total, float* fade) {
  i32x lane;
  for (int i = 0; i < W; i++) lane[i] = i;
  for (int r = 0; r < a.rows; r++, scores += KEYS) {
    const int newest = a.positions[r] - a.start - from;  // the last key that is seen
    const int last = newest < count ? newest : count - 1, first = a.window > 0 ? newest - a.window + 1 : 0;
    f32x peak = splat(top[r]);
    for (int at = 0; at < count; at += W) {
      f32x s = load<f32x>(scores + at);
      if (a.softcap > 0) s = a.softcap * tanh(s / a.softcap);
      s = select((lane + at <= last) & (lane + at >= first), s, splat(-__builtin_inff()));
      store(scores + at, s);
      peak = maximum(peak, s);
    }
    const float most = largest(peak);
    f32x gained{};
    for (int at = 0; at < count; at += W) {
      const f32x s = load<f32x>(scores + at), weight = select(s > NOWHERE, exp(s - most), f32x{});
      store(scores + at, weight);
      gained += weight;
    }
    fade[r] = exp(splat(top[r] - most))[0];
    total[r] = total[r] * fade[r] + sum(gained);
    top[r] = most;
  }
}

// Scores become weights; `fade[r]` is what earlier sums of row r shrink by.
inline void soften(const Attention& a, int from, int count, int lanes, const int32_t* positions, float* scores, float* top,
                   float* total, float* fade) {
  for (int at = 0; at < lanes; at += W) {
    const i32x position = load<i32x>(positions + at);
    const f32x before = load<f32x>(top + at);
    f32x peak = before;
    for (int j = 0; j < count; j++) {
      f32x s = load<f32x>(scores + j * lanes + at);
      if (a.softcap > 0) s = a.softcap * tanh(s / a.softcap);
      const int key = a.start + from + j;
      i32x seen = position >= key;
      if (a.window > 0) seen &= position - a.window < key;
      s = select(seen, s, splat(-__builtin_inff()));
      store(scores + j * lanes + at, s);
      peak = maximum(peak, s);
    }
    const f32x shrink = exp(before - peak);
    f32x gained{};
    for (int j = 0; j < count; j++) {
      f32x s = load<f32x>(scores + j * lanes + at);
      f32x weight = select(s > NOWHERE, exp(s - peak), f32x{});
      store(scores + j * lanes + at, weight);
      gained += weight;
    }
    store(top + at, peak);
    store(total + at, load<f32x>(total + at) * shrink + gained);
    store(fade + at, shrink);
  }
}

// Where the weight of key j for row r lies: j * key + r * row.
struct Order {
  int key, row;
};

// sums[r] = fade[r] * sums[r] + weights . values, for R rows and V vectors of the width
template <int R, int V>
inline void gather_values(const float* const* values, int count, int at, const float* weights, Order order, const float* fade,
                          float* sums, int width) {
  f32x acc[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) acc[r][v] = load<f32x>(sums + int64_t(r) * width + at + v * W) * fade[r];
  for (int j = 0; j < count; j++)
    for (int v = 0; v < V; v++) {
      const f32x value = load<f32x>(values[j] + at + v * W);
      for (int r = 0; r < R; r++) acc[r][v] += value * weights[j * order.key + r * order.row];
    }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store(sums + int64_t(r) * width + at + v * W, acc[r][v]);
}

template <int R>
inline void gather_width(const float* const* values, int count, const float* weights, Order order, const float* fade, float* sums,
                         int width) {
  int at = 0;
  for (; at + 4 * W <= width; at += 4 * W) gather_values<R, 4>(values, count, at, weights, order, fade, sums, width);
  for (; at + W <= width; at += W) gather_values<R, 1>(values, count, at, weights, order, fade, sums, width);
  for (; at < width; at++)
    for (int r = 0; r < R; r++) {
      float total = sums[int64_t(r) * width + at] * fade[r];
      for (int j = 0; j < count; j++) total += values[j][at] * weights[j * order.key + r * order.row];
      sums[int64_t(r) * width + at] = total;
    }
}

void attention(const Attention& a) {
  const int lanes = (a.rows + W - 1) / W * W;
  const bool few = a.rows * 2 <= W;
  alignas(64) float scores[KEYS * MAX_ROWS];
  alignas(64) float top[MAX_ROWS], total[MAX_ROWS], fade[MAX_ROWS];
  alignas(64) int32_t positions[MAX_ROWS];
  const float *keys[KEYS], *values[KEYS];
  const bool narrow = a.format != Format::f32;
  float* key_room = static_cast<float*>(narrow ? __builtin_alloca(sizeof(float) * KEYS * a.width) : nullptr);
  float* value_room = static_cast<float*>(narrow ? __builtin_alloca(sizeof(float) * KEYS * a.value_width) : nullptr);
  float* queries = static_cast<float*>(few ? nullptr : __builtin_alloca(sizeof(float) * lanes * a.width));
  for (int r = 0; r < lanes; r++) {
    top[r] = NOWHERE;
    total[r] = 0;
    positions[r] = r < a.rows ? a.positions[r] : -1;
    for (int d = 0; d < a.width && !few; d++) queries[int64_t(d) * lanes + r] = r < a.rows ? a.queries[r][d] * a.scale : 0;
  }
  std::memset(scores, 0, sizeof scores);
  std::memset(a.sums, 0, sizeof(float) * a.rows * a.value_width);
  for (int from = a.first_slot; from < a.last_slot;) {
    const int next = (from / KEYS + 1) * KEYS, count = (next < a.last_slot ? next : a.last_slot) - from;
    rows_of(a.keys, a.k_block, a.k_token, a.width, a, from, count, key_room, keys);
    rows_of(a.values, a.v_block, a.v_token, a.value_width, a, from, count, value_room, values);
    int j = 0;
    if (few) {
      score_few(a, keys, count, scores);
      soften_few(a, from, count, scores, top, total, fade);
    } else {
      for (; j + 4 <= count; j += 4) score_lanes<4>(keys + j, queries, lanes, a.width, scores + j * lanes);
      for (; j < count; j++) score_lanes<1>(keys + j, queries, lanes, a.width, scores + j * lanes);
      soften(a, from, count, lanes, positions, scores, top, total, fade);
    }
    const Order order = few ? Order{1, KEYS} : Order{lanes, 1};
    int r = 0;
    auto gather = [&]<int R>() {
      for (; r + R <= a.rows; r += R)
        gather_width<R>(values, count, scores + r * order.row, order, fade + r, a.sums + int64_t(r) * a.value_width, a.value_width);
    };
    gather.template operator()<4>();
    gather.template operator()<3>();
    gather.template operator()<2>();
    gather.template operator()<1>();
    from += count;
  }
  std::memcpy(a.top, top, sizeof(float) * a.rows);
  std::memcpy(a.total, total, sizeof(float) * a.rows);
}

}  // namespace
}  // namespace metalctl
