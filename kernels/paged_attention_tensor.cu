// The part of paged_attention.cu between its sections setup and finish, on tensor cores.

//@ helpers
// Two numbers side by side, the first in the lower half.
template <typename U>
__device__ __forceinline__ unsigned pair(float first, float second) {
  const U both[2] = {U(first), U(second)};
  return *reinterpret_cast<const unsigned*>(both);
}

//@ tensor
// The same for 16-bit keys on tensor cores: 16 rows by 16 keys a step and warp, straight from memory into the layout
// that m16n8k16 wants. There, lane 4 g + t holds columns 2 t, 2 t + 1 (and 8 more) of row g (and g + 8) of A, the same
// rows of column g of B, and columns 2 t, 2 t + 1 of rows g and g + 8 of the result. Which element of a head counts as
// which row or column is ours to say, as long as both factors agree, so that every lane reads 8 neighbours at once.
constexpr int KEY_CHUNKS = (KEY_DIM + 31) / 32;      // of 4 lanes by 8 elements
constexpr int VALUE_CHUNKS = (VALUE_DIM + 63) / 64;  // of 8 lanes by 8 elements
const int g = lane / 4;
const int t = lane % 4;

// The queries of rows g and g + 8.
unsigned query[KEY_CHUNKS][2][4];
int row_position[2];
UNROLLED
for (int half = 0; half < 2; half++) {
  const int row = first_row + g + 8 * half;
  const int head = kv_head * sharing + row % sharing;
  const int64_t from = ((int64_t(batch) * query_heads + head) * length + row / sharing) * KEY_DIM;
  row_position[half] = first_query + row / sharing;
  UNROLLED
  for (int c = 0; c < KEY_CHUNKS; c++) {
    const int dim = c * 32 + t * 8;
    const bool real = row < rows && g + 8 * half < ROWS && dim < KEY_DIM;
    const Packet<T> packet = real ? load<T>(queries + from + dim) : nothing<T>();
    query[c][half][0] = packet.raw[0].x;
    query[c][half][1] = packet.raw[0].y;
    query[c][half][2] = packet.raw[0].z;
    query[c][half][3] = packet.raw[0].w;
  }
}

const float scale = SOFTCAP ? constants[0] / constants[1] : constants[0] * LOG2E;
float top[2] = {LOWEST, LOWEST}, sum[2] = {0.0f, 0.0f};
float result[VALUE_CHUNKS][8][4];
UNROLLED
for (int c = 0; c < VALUE_CHUNKS; c++) {
  UNROLLED
  for (int i = 0; i < 8; i++) {
    UNROLLED
    for (int k = 0; k < 4; k++) {
      result[c][i][k] = 0.0f;
    }
  }
}

// A step ahead: keys g and g + 8; values of the keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9.
Packet<U> key[2][KEY_CHUNKS], value[4][VALUE_CHUNKS];
auto fetch_keys = [&](int base) {
  UNROLLED
  for (int k = 0; k < 2; k++) {
    const U* from = keys + place(base + g + 8 * k) * KEY_DIM;
    UNROLLED
    for (int c = 0; c < KEY_CHUNKS; c++) {
      const int dim = c * 32 + t * 8;
      key[k][c] = dim < KEY_DIM ? load<U>(from + dim) : nothing<U>();
    }
  }
};
auto fetch_values = [&](int base) {
  UNROLLED
  for (int k = 0; k < 4; k++) {
    const U* from = values + place(base + 2 * t + k % 2 + k / 2 * 8) * VALUE_DIM;
    UNROLLED
    for (int c = 0; c < VALUE_CHUNKS; c++) {
      const int dim = c * 64 + g * 8;
      value[k][c] = dim < VALUE_DIM ? load<U>(from + dim) : nothing<U>();
    }
  }
};

const int stride = WARPS * 16;
if (begin + warp * 16 < end) {
  fetch_keys(begin + warp * 16);
  fetch_values(begin + warp * 16);
}
for (int base = begin + warp * 16; base < end; base += stride) {
  // Scores: score[k][2 * half + i] is that of row g + 8 * half for key 8 * k + 2 * t + i.
  float score[2][4];
  UNROLLED
  for (int k = 0; k < 2; k++) {
    UNROLLED
    for (int i = 0; i < 4; i++) {
      score[k][i] = 0.0f;
    }
    UNROLLED
    for (int c = 0; c < KEY_CHUNKS; c++) {
      const uint4 raw = key[k][c].raw[0];
      multiply<U>(score[k], query[c][0][0], query[c][1][0], query[c][0][1], query[c][1][1], raw.x, raw.y);
      multiply<U>(score[k], query[c][0][2], query[c][1][2], query[c][0][3], query[c][1][3], raw.z, raw.w);
    }
    UNROLLED
    for (int i = 0; i < 4; i++) {
      const int position = base + 8 * k + 2 * t + i % 2;
      const float dot = SOFTCAP ? constants[1] * LOG2E * tanhf(scale * score[k][i]) : scale * score[k][i];
      const bool seen = position < end && position <= row_position[i / 2] &&
                        (WINDOW == 0 || position > row_position[i / 2] - WINDOW);
      score[k][i] = seen ? dot : -__uint_as_float(0x7f800000u);
    }
  }

  if (base + stride < end) {
    fetch_keys(base + stride);
  }

  // Their exponentials, and what was summed so far brought to the new maximum.
  float factor[2];
  UNROLLED
  for (int half = 0; half < 2; half++) {
    const float first = fmaxf(score[0][2 * half], score[0][2 * half + 1]);
    const float second = fmaxf(score[1][2 * half], score[1][2 * half + 1]);
    float new_top = fmaxf(top[half], fmaxf(first, second));
    new_top = fmaxf(new_top, shuffle_xor(new_top, 1));
    new_top = fmaxf(new_top, shuffle_xor(new_top, 2));
    factor[half] = exp2f(top[half] - new_top);
    top[half] = new_top;
    sum[half] *= factor[half];
    UNROLLED
    for (int i = 0; i < 4; i++) {
      float& weight = score[i / 2][2 * half + i % 2];
      weight = exp2f(weight - new_top);
      sum[half] += weight;
    }
  }
  UNROLLED
  for (int c = 0; c < VALUE_CHUNKS; c++) {
    UNROLLED
    for (int i = 0; i < 8; i++) {
      UNROLLED
      for (int k = 0; k < 4; k++) {
        result[c][i][k] *= factor[k / 2];
      }
    }
  }

  // Values: the weights are A as they stand; for B the elements of two keys are paired up. Result i of chunk c has
  // elements 64 c + 8 n + i of a row in column n.
  const unsigned weights[4] = {pair<U>(score[0][0], score[0][1]), pair<U>(score[0][2], score[0][3]),
                               pair<U>(score[1][0], score[1][1]), pair<U>(score[1][2], score[1][3])};
  UNROLLED
  for (int c = 0; c < VALUE_CHUNKS; c++) {
    unsigned raw[4][4];
    UNROLLED
    for (int k = 0; k < 4; k++) {
      raw[k][0] = value[k][c].raw[0].x;
      raw[k][1] = value[k][c].raw[0].y;
      raw[k][2] = value[k][c].raw[0].z;
      raw[k][3] = value[k][c].raw[0].w;
    }
    UNROLLED
    for (int i = 0; i < 8; i++) {
      const unsigned selector = i % 2 ? 0x7632 : 0x5410;
      multiply<U>(result[c][i], weights[0], weights[1], weights[2], weights[3],
                  __byte_perm(raw[0][i / 2], raw[1][i / 2], selector),
                  __byte_perm(raw[2][i / 2], raw[3][i / 2], selector));
    }
  }
  if (base + stride < end) {
    fetch_values(base + stride);
  }
}

// The lanes of a row together.
UNROLLED
for (int half = 0; half < 2; half++) {
  sum[half] += shuffle_xor(sum[half], 1);
  sum[half] += shuffle_xor(sum[half], 2);
}
auto publish = [&](int r) {
  const int half = r / 8;
  if (g == r % 8) {
    if (t == 0) {
      group_top[warp] = top[half];
      group_sum[warp] = sum[half];
    }
    UNROLLED
    for (int c = 0; c < VALUE_CHUNKS; c++) {
      UNROLLED
      for (int i = 0; i < 16; i++) {
        const int dim = c * 64 + t * 16 + i;
        if (dim < VALUE_DIM) {
          group_output[warp][dim] = result[c][i % 8][2 * half + i / 8];
        }
      }
    }
  }
};
