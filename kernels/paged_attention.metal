// Paged attention for Metal. paged_attention.cu says the same in CUDA, section for section.
//
// A threadgroup takes one KV head of one sequence, a part of its context, and ROWS of the queries that read this head,
// so that each key and value is loaded once for all of them. scalar: LANES neighbouring lanes hold a key between them; a
// SIMD-group reads UNROLL * 32 / LANES keys at a time. merge: the softmax over what the parts found.
// Scores and their exponentials are in base 2.

//@ header
#define UNROLLED _Pragma("clang loop unroll(full)")

constant constexpr float LOG2E = 1.44269504f;
constant constexpr float LOWEST = -3.0e38f;

// Eight elements of a row, as they lie in memory.
template <typename U>
struct Packet {
  uint4 raw[sizeof(U) / 2];
};

template <typename U>
METAL_FUNC Packet<U> load(const device U* from) {
  Packet<U> packet;
  UNROLLED
  for (uint i = 0; i < sizeof(U) / 2; i++) {
    packet.raw[i] = ((const device uint4*)from)[i];
  }
  return packet;
}

template <typename U>
METAL_FUNC Packet<U> nothing() {
  Packet<U> packet;
  UNROLLED
  for (uint i = 0; i < sizeof(U) / 2; i++) {
    packet.raw[i] = uint4(0);
  }
  return packet;
}

template <typename U>
METAL_FUNC void unpack(Packet<U> packet, thread float* to) {
  const vec<U, 4> low = as_type<vec<U, 4>>(packet.raw[0].xy);
  const vec<U, 4> high = as_type<vec<U, 4>>(packet.raw[0].zw);
  UNROLLED
  for (int i = 0; i < 4; i++) {
    to[i] = float(low[i]);
    to[4 + i] = float(high[i]);
  }
}

METAL_FUNC void unpack(Packet<float> packet, thread float* to) {
  UNROLLED
  for (int i = 0; i < 8; i++) {
    to[i] = as_type<float>(packet.raw[i / 4][i % 4]);
  }
}

//@ setup
threadgroup int blocks[LONGEST / BLOCK_SIZE + 2];
threadgroup float group_top[SIMDS];
threadgroup float group_sum[SIMDS];
threadgroup float group_output[SIMDS][VALUE_DIM];

// Who this is.
const int thread_index = int(thread_index_in_threadgroup);
const int simd = int(simdgroup_index_in_threadgroup);
const int lane = int(thread_index_in_simdgroup);

// Which rows: a row is one query head at one position. Heads that share keys come first, then positions.
const int length = queries_shape[2];
const int query_heads = queries_shape[1];
const int kv_heads = keys_shape[2];
const int sharing = query_heads / kv_heads;
const int rows = sharing * length;
const int tiles = (rows + ROWS - 1) / ROWS;
const int kv_head = int(threadgroup_position_in_grid.x) / tiles;
const int first_row = int(threadgroup_position_in_grid.x) % tiles * ROWS;
const int part = int(threadgroup_position_in_grid.y);
const int parts = int(threadgroups_per_grid.y);
const int batch = int(threadgroup_position_in_grid.z);

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
for (int i = thread_index; begin < end && i <= last_block - first_block; i += SIMDS * 32) {
  blocks[i] = block_tables[long(batch) * block_tables_shape[1] + first_block + i];
}
threadgroup_barrier(mem_flags::mem_threadgroup);

//@ scalar
constexpr int GROUPS = 32 / LANES;      // keys that a SIMD-group holds side by side
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
  const long from = ((long(batch) * query_heads + head) * length + row / sharing) * KEY_DIM;
  UNROLLED
  for (int i = 0; i < KEY_WIDTH; i++) {
    const int dim = key_lane * KEY_WIDTH + i;
    query[r][i] = dim < KEY_DIM ? scale * float(queries[from + dim]) : 0.0f;
  }
}

// Every SIMD-group goes through its own keys, a step ahead of itself, each group of lanes with a softmax of its own.
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
#define FETCH(packets, count, width, pool, dims, base)                                    \
  UNROLLED                                                                                \
  for (int u = 0; u < UNROLL; u++) {                                                      \
    const uint slot = min(base + u * GROUPS + key_group, end - 1) - start;                \
    const uint block = blocks[slot / BLOCK_SIZE - first_block];                           \
    const long place = (block * BLOCK_SIZE + slot % BLOCK_SIZE) * kv_heads + kv_head;     \
    UNROLLED                                                                              \
    for (int i = 0; i < count; i++) {                                                     \
      const int dim = key_lane * width + i * 8;                                           \
      packets[u][i] = dim < dims ? load<U>(pool + place * dims + dim) : nothing<U>();     \
    }                                                                                     \
  }
const int stride = SIMDS * CHUNK;
if (begin + simd * CHUNK < end) {
  FETCH(key, KEY_PACKETS, KEY_WIDTH, keys, KEY_DIM, begin + simd * CHUNK)
  FETCH(value, VALUE_PACKETS, VALUE_WIDTH, values, VALUE_DIM, begin + simd * CHUNK)
}
for (int base = begin + simd * CHUNK; base < end; base += stride) {
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
        dot += simd_shuffle_xor(dot, ushort(offset));
      }
      if (SOFTCAP) {
        dot = constants[1] * LOG2E * precise::tanh(dot);
      }
      const bool seen = position < end && position <= row_position[r] &&
                        (WINDOW == 0 || position > row_position[r] - WINDOW);
      score[r][u] = seen ? dot : -INFINITY;
    }
  }

  // The next keys, to be on their way meanwhile.
  if (base + stride < end) {
    FETCH(key, KEY_PACKETS, KEY_WIDTH, keys, KEY_DIM, base + stride)
  }

  // Their exponentials, and what was summed so far brought to the new maximum.
  UNROLLED
  for (int r = 0; r < ROWS; r++) {
    float new_top = top[r];
    UNROLLED
    for (int u = 0; u < UNROLL; u++) {
      new_top = max(new_top, score[r][u]);
    }
    const float factor = exp2(top[r] - new_top);
    top[r] = new_top;
    sum[r] *= factor;
    UNROLLED
    for (int u = 0; u < UNROLL; u++) {
      score[r][u] = exp2(score[r][u] - new_top);
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
    FETCH(value, VALUE_PACKETS, VALUE_WIDTH, values, VALUE_DIM, base + stride)
  }
}
#undef FETCH

// The groups of a SIMD-group together.
UNROLLED
for (int r = 0; r < ROWS; r++) {
  UNROLLED
  for (int offset = LANES; offset < 32; offset *= 2) {
    const float other_top = simd_shuffle_xor(top[r], ushort(offset));
    const float new_top = max(top[r], other_top);
    const float factor = exp2(top[r] - new_top);
    const float other_factor = exp2(other_top - new_top);
    top[r] = new_top;
    sum[r] = sum[r] * factor + simd_shuffle_xor(sum[r], ushort(offset)) * other_factor;
    UNROLLED
    for (int i = 0; i < VALUE_WIDTH; i++) {
      const float other = simd_shuffle_xor(output_share[r][i], ushort(offset));
      output_share[r][i] = output_share[r][i] * factor + other * other_factor;
    }
  }
}
//@ finish
// All SIMD-groups together, a row at a time.
UNROLLED
for (int r = 0; r < ROWS; r++) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lane == 0) {
    group_top[simd] = top[r];
    group_sum[simd] = sum[r];
  }
  UNROLLED
  for (int i = 0; i < VALUE_WIDTH; i++) {
    const int dim = key_lane * VALUE_WIDTH + i;
    if (key_group == 0 && dim < VALUE_DIM) {
      group_output[simd][dim] = output_share[r][i];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const int row = first_row + r;
  const int head = kv_head * sharing + row % sharing;
  const float sink = FINAL && SINKS ? LOG2E * float(sinks[head]) : LOWEST;
  float new_top = sink, total = 0.0f;
  UNROLLED
  for (int s = 0; s < SIMDS; s++) {
    new_top = max(new_top, group_top[s]);
  }
  UNROLLED
  for (int s = 0; s < SIMDS; s++) {
    total += group_sum[s] * exp2(group_top[s] - new_top);
  }
  if (FINAL && SINKS) {
    total += exp2(sink - new_top);
  }
  // A part that lies outside what the row sees leaves its output alone, unless it is the only one.
  const bool wanted = first_row + r < rows && (FINAL || begin < end);
  const long place = ((long(batch) * query_heads + head) * length + row / sharing) * parts + part;
  for (int dim = thread_index; wanted && dim < VALUE_DIM; dim += SIMDS * 32) {
    float share = 0.0f;
    UNROLLED
    for (int s = 0; s < SIMDS; s++) {
      share += group_output[s][dim] * exp2(group_top[s] - new_top);
    }
    output[place * VALUE_DIM + dim] = static_cast<OUT>(total > 0.0f ? share / total : 0.0f);
  }
  if (thread_index == 0 && first_row + r < rows) {
    stats[place * 2] = new_top;
    stats[place * 2 + 1] = total;
  }
}

//@ merge
threadgroup float weights[MOST_PARTS];
threadgroup float group_output[SIMDS][VALUE_DIM];

// Who this is: a threadgroup for a row, a SIMD-group for every SIMDS-th part of it.
const int thread_index = int(thread_index_in_threadgroup);
const int simd = int(simdgroup_index_in_threadgroup);
const int lane = int(thread_index_in_simdgroup);
const long row = threadgroup_position_in_grid.x;
const int parts = partial_shape[3];
const int head = int(row / partial_shape[2]) % partial_shape[1];

// How much each part counts, in the softmax over parts.
const float sink = SINKS ? LOG2E * float(sinks[head]) : LOWEST;
float top = sink;
for (int part = lane; part < parts; part += 32) {
  top = max(top, stats[(row * parts + part) * 2]);
}
top = simd_max(top);
float total = 0.0f;
for (int part = lane; part < parts; part += 32) {
  const long place = (row * parts + part) * 2;
  const float weight = stats[place + 1] * exp2(stats[place] - top);
  total += weight;
  if (simd == 0) {
    weights[part] = weight;
  }
}
total = simd_sum(total);
if (SINKS) {
  total += exp2(sink - top);
}
threadgroup_barrier(mem_flags::mem_threadgroup);

// The parts' outputs by their weights. A part that saw nothing wrote none.
float share[(VALUE_DIM + 31) / 32];
UNROLLED
for (int i = 0; i * 32 < VALUE_DIM; i++) {
  share[i] = 0.0f;
}
for (int part = simd; part < parts; part += SIMDS) {
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
    group_output[simd][i * 32 + lane] = share[i];
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int dim = thread_index; dim < VALUE_DIM; dim += SIMDS * 32) {
  float combined = 0.0f;
  UNROLLED
  for (int s = 0; s < SIMDS; s++) {
    combined += group_output[s][dim];
  }
  output[row * VALUE_DIM + dim] = static_cast<T>(total > 0.0f ? combined / total : 0.0f);
}
