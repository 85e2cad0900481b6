// One new token of each of several sequences: the norms and rotations of its queries and keys, and its keys and values
// written to their places in the pools. A warp takes a head.

//@ append
__shared__ float numbers[WARPS][HEAD_DIM];
const int warp = threadIdx.x / 32;
const int lane = threadIdx.x % 32;
const int kv_heads = key_pool_shape[1];
const int query_heads = queries_shape[1] / HEAD_DIM;
const int heads = query_heads + 2 * kv_heads;
const int row = (blockIdx.x * WARPS + warp) / heads;
const int head = (blockIdx.x * WARPS + warp) % heads;
if (row >= queries_shape[0] || (head >= query_heads && slots[row] == 0)) {
  return;
}
const bool is_query = head < query_heads;
const bool is_value = head >= query_heads + kv_heads;
const int kv_head = head - query_heads - (is_value ? kv_heads : 0);
const T* from = is_query ? queries + row * queries_strides[0] + head * HEAD_DIM
                         : is_value ? values + row * values_strides[0] + kv_head * HEAD_DIM
                                    : keys + row * keys_strides[0] + kv_head * HEAD_DIM;
const int64_t place = (int64_t(slots[row]) * kv_heads + kv_head) * HEAD_DIM;

if (is_value) {
  T* to = const_cast<T*>(value_pool) + place;
  for (int i = lane; i < HEAD_DIM; i += 32) {
    to[i] = from[i];
  }
  return;
}

float squares = 0.0f;
for (int i = lane; i < HEAD_DIM; i += 32) {
  const float number = from[i];
  numbers[warp][i] = number;
  squares += number * number;
}
if (NORMS) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    squares += __shfl_xor_sync(0xffffffffu, squares, offset);
  }
  const float factor = rsqrtf(squares / HEAD_DIM + constants[0]);
  const float* weight = is_query ? query_norm : key_norm;
  for (int i = lane; i < HEAD_DIM; i += 32) {
    numbers[warp][i] *= factor * weight[i];
  }
}
__syncwarp();

T* to = is_query ? output + (int64_t(row) * query_heads + head) * HEAD_DIM : const_cast<T*>(key_pool) + place;
const float position = positions[row];
for (int i = lane; i < HEAD_DIM; i += 32) {
  float number = numbers[warp][i];
  if (i < ROTATED) {  // pairs are neighbours, or lie half of what is rotated apart
    const bool first = TRADITIONAL ? i % 2 == 0 : i < ROTATED / 2;
    const int other = TRADITIONAL ? i ^ 1 : first ? i + ROTATED / 2 : i - ROTATED / 2;
    float sine, cosine;
    sincosf(position * frequencies[TRADITIONAL ? i / 2 : i % (ROTATED / 2)], &sine, &cosine);
    number = first ? number * cosine - numbers[warp][other] * sine : number * cosine + numbers[warp][other] * sine;
  }
  to[i] = T(number);
}
