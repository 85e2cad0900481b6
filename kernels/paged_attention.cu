// Paged attention for CUDA. paged_attention.metal says the same in Metal, section for section.
//
// A block takes one KV head of one sequence, a part of its context, and ROWS of the queries that read this head, so that
// each key and value is loaded once for all of them. scalar: LANES neighbouring lanes hold a key between them; a warp
// reads UNROLL * 32 / LANES keys at a time. paged_attention_tensor.cu has another way. merge: the softmax over what the
// parts found. Scores and their exponentials are in base 2.

//@ header
#define UNROLLED _Pragma("unroll")

static constexpr float LOG2E = 1.44269504f;
static constexpr float LOWEST = -3.0e38f;
static constexpr unsigned ALL = 0xffffffffu;

// Eight elements of a row, as they lie in memory.
template <typename U>
struct Packet {
  uint4 raw[sizeof(U) / 2];
};

template <typename U>
__device__ __forceinline__ Packet<U> load(const U* from) {
  Packet<U> packet;
  UNROLLED
  for (unsigned i = 0; i < sizeof(U) / 2; i++) {
    packet.raw[i] = reinterpret_cast<const uint4*>(from)[i];
  }
  return packet;
}

template <typename U>
__device__ __forceinline__ Packet<U> nothing() {
  Packet<U> packet;
  UNROLLED
  for (unsigned i = 0; i < sizeof(U) / 2; i++) {
    packet.raw[i] = uint4{0, 0, 0, 0};
  }
  return packet;
}

__device__ __forceinline__ void unpack(const Packet<__nv_bfloat16>& packet, float* to) {
  const unsigned raw[4] = {packet.raw[0].x, packet.raw[0].y, packet.raw[0].z, packet.raw[0].w};
  UNROLLED
  for (int i = 0; i < 4; i++) {
    to[2 * i] = __uint_as_float(raw[i] << 16);
    to[2 * i + 1] = __uint_as_float(raw[i] & 0xffff0000u);
  }
}

__device__ __forceinline__ void unpack(const Packet<__half>& packet, float* to) {
  const unsigned raw[4] = {packet.raw[0].x, packet.raw[0].y, packet.raw[0].z, packet.raw[0].w};
  UNROLLED
  for (int i = 0; i < 4; i++) {
    const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&raw[i]));
    to[2 * i] = both.x;
    to[2 * i + 1] = both.y;
  }
}

__device__ __forceinline__ void unpack(const Packet<float>& packet, float* to) {
  UNROLLED
  for (int i = 0; i < 2; i++) {
    to[4 * i] = __uint_as_float(packet.raw[i].x);
    to[4 * i + 1] = __uint_as_float(packet.raw[i].y);
    to[4 * i + 2] = __uint_as_float(packet.raw[i].z);
    to[4 * i + 3] = __uint_as_float(packet.raw[i].w);
  }
}

__device__ __forceinline__ float shuffle_xor(float x, int mask) {
  return __shfl_xor_sync(ALL, x, mask);
}

//@ setup
//@ setup
__shared__ int blocks[LONGEST / BLOCK_SIZE + 2];
__shared__ float group_top[WARPS];
__shared__ float group_sum[WARPS];
__shared__ float group_output[WARPS][VALUE_DIM];

// Who this is.
const int thread_index = int(threadIdx.x);
const int warp = int(threadIdx.x) / 32;
const int lane = int(threadIdx.x) % 32;

// Which rows: a row is one query head at one position. Heads that share keys come first, then positions.
const int length = queries_shape[2];
const int query_heads = queries_shape[1];
const int kv_heads = keys_shape[2];
const int sharing = query_heads / kv_heads;
const int rows = sharing * length;
const int tiles = (rows + ROWS - 1) / ROWS;
const int kv_head = int(blockIdx.x) / tiles;
const int first_row = int(blockIdx.x) % tiles * ROWS;
const int part = int(blockIdx.y);
const int parts = int(gridDim.y);
const int batch = int(blockIdx.z);

// Which positions.
const int first_query = lengths[batch] - length;
const int start = STARTS ? starts[batch] : 0;
const int oldest = first_query + first_row / sharing;
const int newest = first_query + min(first_row + ROWS - 1, rows - 1) / sharing;
const int hidden = WINDOW > 0 ? max(0, oldest - WINDOW + 1 - start) / 16 * 16 : 0;
const int span = newest + 1 - start - hidden;
const int share_of_part = ((span + parts - 1) / parts + 63) / 64 * 64;  // whole steps, at most LONGEST
const int begin = start + hidden + part * share_of_part;
const int end = min(begin + share_of_part, newest + 1);

// The blocks they lie in.
const int first_block = (begin - start) / BLOCK_SIZE;
const int last_block = (end - 1 - start) / BLOCK_SIZE;
for (int i = thread_index; begin < end && i <= last_block - first_block; i += WARPS * 32) {
  blocks[i] = block_tables[int64_t(batch) * block_tables_shape[1] + first_block + i];
}
__syncthreads();
// Where a position's row of this head lies in the pools.
auto place = [&](int position) {
  const unsigned slot = min(position, end - 1) - start;
  const unsigned block = blocks[slot / BLOCK_SIZE - first_block];
  return int64_t((block * BLOCK_SIZE + slot % BLOCK_SIZE) * kv_heads + kv_head);
};

//@ scalar
constexpr int GROUPS = 32 / LANES;      // keys that a warp holds side by side
constexpr int CHUNK = GROUPS * UNROLL;  // and in one step
constexpr int KEY_PACKETS = KEY_WIDTH / 8;
constexpr int VALUE_PACKETS = VALUE_WIDTH / 8;
const int key_lane = lane % LANES;
const int key_group = lane / LANES;

// This lane's share of each query, scaled for what follows.
const float scale = SOFTCAP ? constants[0] / constants[1] : constants[0] * LOG2E;
float query[ROWS][KEY_WIDTH];
int row_position[ROWS];
UNROLLED
for (int r = 0; r < ROWS; r++) {
  const int row = min(first_row + r, rows - 1);
  const int head = kv_head * sharing + row % sharing;
  row_position[r] = first_query + row / sharing;
  const int64_t from = ((int64_t(batch) * query_heads + head) * length + row / sharing) * KEY_DIM;
  UNROLLED
  for (int i = 0; i < KEY_WIDTH; i++) {
    const int dim = key_lane * KEY_WIDTH + i;
    query[r][i] = dim < KEY_DIM ? scale * float(queries[from + dim]) : 0.0f;
  }
}

// Every warp goes through its own keys, a step ahead of itself, each group of lanes with a softmax of its own.
float top[ROWS], sum[ROWS], output_share[ROWS][VALUE_WIDTH];
UNROLLED
for (int r = 0; r < ROWS; r++) {
  top[r] = LOWEST;
  sum[r] = 0.0f;
  UNROLLED
  for (int i = 0; i < VALUE_WIDTH; i++) {
    output_share[r][i] = 0.0f;
  }
}
Packet<U> key[UNROLL][KEY_PACKETS], value[UNROLL][VALUE_PACKETS];
auto fetch_keys = [&](int base) {
  UNROLLED
  for (int u = 0; u < UNROLL; u++) {
    const U* from = keys + place(base + u * GROUPS + key_group) * KEY_DIM;
    UNROLLED
    for (int i = 0; i < KEY_PACKETS; i++) {
      const int dim = key_lane * KEY_WIDTH + i * 8;
      key[u][i] = dim < KEY_DIM ? load<U>(from + dim) : nothing<U>();
    }
  }
};
auto fetch_values = [&](int base) {
  UNROLLED
  for (int u = 0; u < UNROLL; u++) {
    const U* from = values + place(base + u * GROUPS + key_group) * VALUE_DIM;
    UNROLLED
    for (int i = 0; i < VALUE_PACKETS; i++) {
      const int dim = key_lane * VALUE_WIDTH + i * 8;
      value[u][i] = dim < VALUE_DIM ? load<U>(from + dim) : nothing<U>();
    }
  }
};
const int stride = WARPS * CHUNK;
if (begin + warp * CHUNK < end) {
  fetch_keys(begin + warp * CHUNK);
  fetch_values(begin + warp * CHUNK);
}
for (int base = begin + warp * CHUNK; base < end; base += stride) {
  // Scores.
  float score[ROWS][UNROLL];
  UNROLLED
  for (int u = 0; u < UNROLL; u++) {
    float numbers[KEY_WIDTH];
    UNROLLED
    for (int i = 0; i < KEY_PACKETS; i++) {
      unpack(key[u][i], numbers + i * 8);
    }
    const int position = base + u * GROUPS + key_group;
    UNROLLED
    for (int r = 0; r < ROWS; r++) {
      float dot = 0.0f;
      UNROLLED
      for (int i = 0; i < KEY_WIDTH; i++) {
        dot += query[r][i] * numbers[i];
      }
      UNROLLED
      for (int offset = LANES / 2; offset > 0; offset /= 2) {
        dot += shuffle_xor(dot, offset);
      }
      if (SOFTCAP) {
        dot = constants[1] * LOG2E * tanhf(dot);
      }
      const bool seen = position < end && position <= row_position[r] &&
                        (WINDOW == 0 || position > row_position[r] - WINDOW);
      score[r][u] = seen ? dot : -__uint_as_float(0x7f800000u);
    }
  }

  // The next keys, to be on their way meanwhile.
  if (base + stride < end) {
    fetch_keys(base + stride);
  }

  // Their exponentials, and what was summed so far brought to the new maximum.
  UNROLLED
  for (int r = 0; r < ROWS; r++) {
    float new_top = top[r];
    UNROLLED
    for (int u = 0; u < UNROLL; u++) {
      new_top = fmaxf(new_top, score[r][u]);
    }
    const float factor = exp2f(top[r] - new_top);
    top[r] = new_top;
    sum[r] *= factor;
    UNROLLED
    for (int u = 0; u < UNROLL; u++) {
      score[r][u] = exp2f(score[r][u] - new_top);
      sum[r] += score[r][u];
    }
    UNROLLED
    for (int i = 0; i < VALUE_WIDTH; i++) {
      output_share[r][i] *= factor;
    }
  }

  // Values.
  UNROLLED
  for (int u = 0; u < UNROLL; u++) {
    float numbers[VALUE_WIDTH];
    UNROLLED
    for (int i = 0; i < VALUE_PACKETS; i++) {
      unpack(value[u][i], numbers + i * 8);
    }
    UNROLLED
    for (int r = 0; r < ROWS; r++) {
      UNROLLED
      for (int i = 0; i < VALUE_WIDTH; i++) {
        output_share[r][i] += score[r][u] * numbers[i];
      }
    }
  }
  if (base + stride < end) {
    fetch_values(base + stride);
  }
}

// The groups of a warp together.
UNROLLED
for (int r = 0; r < ROWS; r++) {
  UNROLLED
  for (int offset = LANES; offset < 32; offset *= 2) {
    const float other_top = shuffle_xor(top[r], offset);
    const float new_top = fmaxf(top[r], other_top);
    const float factor = exp2f(top[r] - new_top);
    const float other_factor = exp2f(other_top - new_top);
    top[r] = new_top;
    sum[r] = sum[r] * factor + shuffle_xor(sum[r], offset) * other_factor;
    UNROLLED
    for (int i = 0; i < VALUE_WIDTH; i++) {
      const float other = shuffle_xor(output_share[r][i], offset);
      output_share[r][i] = output_share[r][i] * factor + other * other_factor;
    }
  }
}
auto publish = [&](int r) {
  if (lane == 0) {
    group_top[warp] = top[r];
    group_sum[warp] = sum[r];
  }
  UNROLLED
  for (int i = 0; i < VALUE_WIDTH; i++) {
    const int dim = key_lane * VALUE_WIDTH + i;
    if (key_group == 0 && dim < VALUE_DIM) {
      group_output[warp][dim] = output_share[r][i];
    }
  }
};

//@ finish
// All warps together, a row at a time.
UNROLLED
for (int r = 0; r < ROWS; r++) {
  __syncthreads();
  publish(r);
  __syncthreads();

  const int row = first_row + r;
  const int head = kv_head * sharing + row % sharing;
  const float sink = FINAL && SINKS ? LOG2E * float(sinks[head]) : LOWEST;
  float new_top = sink, total = 0.0f;
  UNROLLED
  for (int s = 0; s < WARPS; s++) {
    new_top = fmaxf(new_top, group_top[s]);
  }
  UNROLLED
  for (int s = 0; s < WARPS; s++) {
    total += group_sum[s] * exp2f(group_top[s] - new_top);
  }
  if (FINAL && SINKS) {
    total += exp2f(sink - new_top);
  }
  // A part that lies outside what the row sees leaves its output alone, unless it is the only one.
  const bool wanted = first_row + r < rows && (FINAL || begin < end);
  const int64_t place = ((int64_t(batch) * query_heads + head) * length + row / sharing) * parts + part;
  for (int dim = thread_index; wanted && dim < VALUE_DIM; dim += WARPS * 32) {
    float share = 0.0f;
    UNROLLED
    for (int s = 0; s < WARPS; s++) {
      share += group_output[s][dim] * exp2f(group_top[s] - new_top);
    }
    output[place * VALUE_DIM + dim] = static_cast<OUT>(total > 0.0f ? share / total : 0.0f);
  }
  if (thread_index == 0 && first_row + r < rows) {
    stats[place * 2] = new_top;
    stats[place * 2 + 1] = total;
  }
}

//@ merge
__shared__ float weights[MOST_PARTS];
__shared__ float group_output[WARPS][VALUE_DIM];

// Who this is: a block for a row, a warp for every WARPS-th part of it.
const int thread_index = int(threadIdx.x);
const int warp = int(threadIdx.x) / 32;
const int lane = int(threadIdx.x) % 32;
const int64_t row = blockIdx.x;
const int parts = partial_shape[3];
const int head = int(row / partial_shape[2]) % partial_shape[1];

// How much each part counts, in the softmax over parts.
const float sink = SINKS ? LOG2E * float(sinks[head]) : LOWEST;
float top = sink;
for (int part = lane; part < parts; part += 32) {
  top = fmaxf(top, stats[(row * parts + part) * 2]);
}
UNROLLED
for (int offset = 16; offset > 0; offset /= 2) {
  top = fmaxf(top, shuffle_xor(top, offset));
}
float total = 0.0f;
for (int part = lane; part < parts; part += 32) {
  const int64_t place = (row * parts + part) * 2;
  const float weight = stats[place + 1] * exp2f(stats[place] - top);
  total += weight;
  if (warp == 0) {
    weights[part] = weight;
  }
}
UNROLLED
for (int offset = 16; offset > 0; offset /= 2) {
  total += shuffle_xor(total, offset);
}
if (SINKS) {
  total += exp2f(sink - top);
}
__syncthreads();

// The parts' outputs by their weights. A part that saw nothing wrote none.
float share[(VALUE_DIM + 31) / 32];
UNROLLED
for (int i = 0; i * 32 < VALUE_DIM; i++) {
  share[i] = 0.0f;
}
for (int part = warp; part < parts; part += WARPS) {
  const float weight = weights[part];
  UNROLLED
  for (int i = 0; i * 32 < VALUE_DIM; i++) {
    const int dim = i * 32 + lane;
    if (weight > 0.0f && dim < VALUE_DIM) {
      share[i] += weight * partial[(row * parts + part) * VALUE_DIM + dim];
    }
  }
}
UNROLLED
for (int i = 0; i * 32 < VALUE_DIM; i++) {
  if (i * 32 + lane < VALUE_DIM) {
    group_output[warp][i * 32 + lane] = share[i];
  }
}
__syncthreads();
for (int dim = thread_index; dim < VALUE_DIM; dim += WARPS * 32) {
  float combined = 0.0f;
  UNROLLED
  for (int s = 0; s < WARPS; s++) {
    combined += group_output[s][dim];
  }
  output[row * VALUE_DIM + dim] = static_cast<T>(total > 0.0f ? combined / total : 0.0f);
}
