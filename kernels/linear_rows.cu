// y = x W^T for few rows of x and up to three matrices W of 16 bits, on tensor cores: W is A, so that its rows fill the
// tiles, and x is B. Fragments come straight from memory: which element counts as which column of A and row of B is free
// as long as both agree, so a lane takes 16 bytes of neighbours.

//@ one
const T* matrix = w0;
T* y = y0;
const int columns = w0_shape[0];
const int block = blockIdx.x;

//@ two
const int blocks0 = (w0_shape[0] + 16 * STRIPS - 1) / (16 * STRIPS);
const bool second = blockIdx.x >= blocks0;
const T* matrix = second ? w1 : w0;
T* y = second ? y1 : y0;
const int columns = second ? w1_shape[0] : w0_shape[0];
const int block = blockIdx.x - (second ? blocks0 : 0);

//@ three
const int blocks0 = (w0_shape[0] + 16 * STRIPS - 1) / (16 * STRIPS);
const int blocks1 = (w1_shape[0] + 16 * STRIPS - 1) / (16 * STRIPS);
const int which = blockIdx.x < blocks0 ? 0 : blockIdx.x < blocks0 + blocks1 ? 1 : 2;
const T* matrix = which == 0 ? w0 : which == 1 ? w1 : w2;
T* y = which == 0 ? y0 : which == 1 ? y1 : y2;
const int columns = which == 0 ? w0_shape[0] : which == 1 ? w1_shape[0] : w2_shape[0];
const int block = blockIdx.x - (which == 0 ? 0 : which == 1 ? blocks0 : blocks0 + blocks1);

//@ product
// A block computes 16 STRIPS columns of y. Its warps part the K elements among themselves: each takes UNROLL chunks of
// 32 neighbours at a time, a quarter of a chunk a lane.
__shared__ float shares[WARPS][16 * STRIPS][TILES * 8 + 1];
const int lane = threadIdx.x % 32;
const int warp = threadIdx.x / 32;
const int g = lane / 4;
const int t = lane % 4;
const int first_column = block * 16 * STRIPS;
const int rows = x_shape[0];
const int width = x_shape[1];

float result[STRIPS][TILES][4];
#pragma unroll
for (int i = 0; i < STRIPS * TILES * 4; i++) {
  (&result[0][0][0])[i] = 0.0f;
}

// What lies outside is read from a place inside: past the last row or column nobody looks at the result, and past the
// width W counts as zero.
const T* from_matrix[STRIPS][2];
#pragma unroll
for (int strip = 0; strip < STRIPS; strip++) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int column = first_column + 16 * strip + 8 * half + g;
    from_matrix[strip][half] = matrix + int64_t(column < columns ? column : columns - 1) * width;
  }
}
const T* from_x[TILES];
#pragma unroll
for (int tile = 0; tile < TILES; tile++) {
  const int row = tile * 8 + g;
  from_x[tile] = x + int64_t(row < rows ? row : rows - 1) * width;
}

for (int start = warp * UNROLL * 32; start < width; start += WARPS * UNROLL * 32) {
  uint4 a[UNROLL][STRIPS][2];  // loads first
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    const int k = start + 32 * u + 8 * t;
#pragma unroll
    for (int strip = 0; strip < STRIPS; strip++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        a[u][strip][half] =
            k < width ? __ldcs(reinterpret_cast<const uint4*>(from_matrix[strip][half] + k)) : uint4{0, 0, 0, 0};
      }
    }
  }
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    const int k = start + 32 * u + 8 * t;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      const uint4 b = k < width ? *reinterpret_cast<const uint4*>(from_x[tile] + k) : uint4{0, 0, 0, 0};
#pragma unroll
      for (int strip = 0; strip < STRIPS; strip++) {
        const uint4 upper = a[u][strip][0];
        const uint4 lower = a[u][strip][1];
        multiply<T>(result[strip][tile], upper.x, lower.x, upper.y, lower.y, b.x, b.y);
        multiply<T>(result[strip][tile], upper.z, lower.z, upper.w, lower.w, b.z, b.w);
      }
    }
  }
}

#pragma unroll
for (int strip = 0; strip < STRIPS; strip++) {
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      shares[warp][strip * 16 + g + i / 2 * 8][tile * 8 + t * 2 + i % 2] = result[strip][tile][i];
    }
  }
}
__syncthreads();
write_sums(shares, y, rows, columns, first_column);
