// What the kernels for CUDA's tensor cores share.

//@ header
// D += A B for a tile of 16 x 16 and one of 16 x 8, spread over the warp as m16n8k16 wants it: lane 4 g + t holds
// columns 2 t, 2 t + 1 (a0, a1) and 2 t + 8, 2 t + 9 (a2, a3) of rows g (a0, a2) and g + 8 (a1, a3) of A, the same rows
// of column g of B, and columns 2 t, 2 t + 1 of rows g (d0, d1) and g + 8 (d2, d3) of D.
template <typename U>
__device__ void multiply(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1);

#define MULTIPLY(U, name)                                                                                         \
  template <>                                                                                                     \
  __device__ __forceinline__ void multiply<U>(                                                                    \
      float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {              \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." name "." name ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "        \
        "{%8, %9}, {%0, %1, %2, %3};"                                                                             \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                          \
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));                                                  \
  }
#ifdef KERNEL_EMULATOR
#undef MULTIPLY
#define MULTIPLY(U, name) EMULATOR_MMA(U, multiply)
#endif
MULTIPLY(__half, "f16")
MULTIPLY(__nv_bfloat16, "bf16")
#undef MULTIPLY

// Of a block that computes COLUMNS columns of y for up to ROWS rows of x, and whose warps have shared their sums.
template <int WARPS, int COLUMNS, int ROWS, typename T>
__device__ __forceinline__ void write_sums(const float (&shares)[WARPS][COLUMNS][ROWS], T* y, int rows, int columns,
                                           int first_column) {
  for (int i = threadIdx.x; i < COLUMNS * rows; i += WARPS * 32) {
    const int column = i % COLUMNS;
    const int row = i / COLUMNS;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      sum += shares[w][column][row];
    }
    if (first_column + column < columns) {
      y[int64_t(row) * columns + first_column + column] = T(sum);
    }
  }
}
