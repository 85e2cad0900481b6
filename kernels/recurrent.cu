// Recurrent updates for CUDA, where mlx-lm has kernels for Metal only.

//@ header
static constexpr unsigned ALL = 0xffffffffu;

// The sum over groups of LANES neighbouring lanes, in each of them.
template <int LANES>
__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2) {
    x += __shfl_xor_sync(ALL, x, offset);
  }
  return x;
}

//@ gated_delta
// LANES lanes hold a row of the state, WIDTH elements each, and go through the tokens; rows are independent.
const int lane = threadIdx.x % LANES;
const int row = (blockIdx.x * blockDim.x + threadIdx.x) / LANES;  // of batch, head and value dimension
const int rows = state_in_shape[0] * VALUE_HEADS * VALUE_DIM;
const int tokens = q_shape[1];
const bool real = row < rows;  // lanes past the end go along, as the shuffles want all of them
const int safe_row = real ? row : rows - 1;
const int value = safe_row % VALUE_DIM;
const int head = safe_row / VALUE_DIM % VALUE_HEADS;
const int batch = safe_row / (VALUE_DIM * VALUE_HEADS);
const int key_head = head / (VALUE_HEADS / KEY_HEADS);

float state[WIDTH];
#pragma unroll
for (int i = 0; i < WIDTH; i++) {
  state[i] = state_in[int64_t(safe_row) * KEY_DIM + lane * WIDTH + i];
}

for (int token = 0; token < tokens; token++) {
  const int64_t at = int64_t(batch) * tokens + token;
  const bool seen = !MASK || mask[at];  // no branch on it: the rows of a warp can belong to different sequences
  const int64_t key_at = (at * KEY_HEADS + key_head) * KEY_DIM + lane * WIDTH;
  const int64_t head_at = at * VALUE_HEADS + head;
  float key[WIDTH], query[WIDTH];
#pragma unroll
  for (int i = 0; i < WIDTH; i++) {
    key[i] = float(k[key_at + i]);
    query[i] = float(q[key_at + i]);
  }
  float remembered = 0.0f;
#pragma unroll
  for (int i = 0; i < WIDTH; i++) {
    const float decay = VECTOR ? g[head_at * KEY_DIM + lane * WIDTH + i] : g[head_at];
    state[i] *= seen ? decay : 1.0f;
    remembered += state[i] * key[i];
  }
  remembered = sum_of_lanes<LANES>(remembered);
  const float strength = seen ? float(beta[head_at]) : 0.0f;
  const float delta = (float(v[head_at * VALUE_DIM + value]) - remembered) * strength;
  float out = 0.0f;
#pragma unroll
  for (int i = 0; i < WIDTH; i++) {
    state[i] += key[i] * delta;
    out += state[i] * query[i];
  }
  out = sum_of_lanes<LANES>(out);
  if (real && lane == 0) {
    y[head_at * VALUE_DIM + value] = T(seen ? out : 0.0f);
  }
}

#pragma unroll
for (int i = 0; i < WIDTH; i++) {
  if (real) {
    state_out[int64_t(row) * KEY_DIM + lane * WIDTH + i] = state[i];
  }
}

//@ state_space
// A warp holds a row of the state: one element of one head's hidden vector, for one token of each sequence.
const int lane = threadIdx.x % 32;
const int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32;  // of batch, head and hidden dimension
const int rows = state_in_shape[0] * HEADS * HEAD_DIM;
const bool real = row < rows;
const int safe_row = real ? row : rows - 1;
const int head = safe_row / HEAD_DIM % HEADS;
const int batch = safe_row / (HEAD_DIM * HEADS);
const int64_t group_at = (int64_t(batch) * GROUPS + head / (HEADS / GROUPS)) * STATE_DIM;

const float step = dt[batch * HEADS + head];
const float input = float(x[safe_row]);
const float decay = expf(-expf(float(a_log[head])) * step);
float out = 0.0f;
for (int i = lane; i < STATE_DIM; i += 32) {
  const int64_t at = int64_t(safe_row) * STATE_DIM + i;
  const float next = decay * float(state_in[at]) + step * input * float(b[group_at + i]);
  out += next * float(c[group_at + i]);
  if (real) {
    state_out[at] = S(next);
  }
}
out = sum_of_lanes<32>(out);
if (real && lane == 0) {
  y[row] = T(out + input * float(d[head]));
}
