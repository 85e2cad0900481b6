// y = x W^T for few rows of x and W of 4 bits, on tensor cores: W is A, so that its rows fill the tiles, and x is B.

//@ header
template <typename T>
struct Pair;
template <>
struct Pair<__half> {
  using type = __half2;
  static constexpr unsigned BASE = 0x64006400u;  // 1024, twice: the last bits of its mantissa count in ones
};
template <>
struct Pair<__nv_bfloat16> {
  using type = __nv_bfloat162;
  static constexpr unsigned BASE = 0x43004300u;  // 128, twice
};

// Of a word that holds elements 0 to 7, i and i + 4 as numbers: scale q + bias, rounded once.
template <typename T>
__device__ __forceinline__ unsigned dequantize(unsigned word, int i, typename Pair<T>::type scale,
                                               typename Pair<T>::type bias) {
  using Two = typename Pair<T>::type;
  const unsigned base = Pair<T>::BASE;
  const unsigned bits = (word >> (4 * i) & 0x000f000fu) | base;
  const Two integers = __hsub2(*reinterpret_cast<const Two*>(&bits), *reinterpret_cast<const Two*>(&base));
  const Two numbers = __hfma2(integers, scale, bias);
  return *reinterpret_cast<const unsigned*>(&numbers);
}

//@ product
// A block computes 16 columns of y. Its warps part the K elements among themselves, in chunks of 4 lanes by 32, and
// each lane takes 32 neighbours, all of one group of the quantisation.
__shared__ float shares[WARPS][16][TILES * 8];
const int lane = threadIdx.x % 32;
const int warp = threadIdx.x / 32;
const int g = lane / 4;
const int t = lane % 4;
const int first_column = blockIdx.x * 16;
const int rows = x_shape[0];
const int width = x_shape[1];
const int columns = weight_shape[0];
const int chunks = (width + 127) / 128;

float result[TILES][4];
#pragma unroll
for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    result[tile][i] = 0.0f;
  }
}

for (int chunk = warp; chunk < chunks; chunk += WARPS * UNROLL) {
  // Loads first. What lies outside counts as zero.
  uint4 raw[UNROLL][2];
  T scale[UNROLL][2], bias[UNROLL][2];
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    const int k = (chunk + u * WARPS) * 128 + t * 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int column = first_column + g + 8 * half;
      const bool real = k < width && column < columns;
      const int64_t group = int64_t(column) * (width / GROUP_SIZE) + k / GROUP_SIZE;
      raw[u][half] = real ? *reinterpret_cast<const uint4*>(weight + (int64_t(column) * width + k) / 8) : uint4{0, 0, 0, 0};
      scale[u][half] = real ? scales[group] : T(0.0f);
      bias[u][half] = real ? biases[group] : T(0.0f);
    }
  }

#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    if (chunk + u * WARPS < chunks) {
      typename Pair<T>::type scale2[2], bias2[2];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        scale2[half].x = scale2[half].y = scale[u][half];
        bias2[half].x = bias2[half].y = bias[u][half];
      }
      const unsigned words[2][4] = {{raw[u][0].x, raw[u][0].y, raw[u][0].z, raw[u][0].w},
                                    {raw[u][1].x, raw[u][1].y, raw[u][1].z, raw[u][1].w}};
#pragma unroll
      for (int word = 0; word < 4; word++) {
        const int k = (chunk + u * WARPS) * 128 + t * 32 + word * 8;
        unsigned a[2][4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
          for (int i = 0; i < 4; i++) {
            a[half][i] = dequantize<T>(words[half][word], i, scale2[half], bias2[half]);
          }
        }
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
          const int row = tile * 8 + g;
          const bool real = row < rows && k < width;
          const uint4 from = real ? *reinterpret_cast<const uint4*>(x + int64_t(row) * width + k) : uint4{0, 0, 0, 0};
          multiply<T>(result[tile], a[0][0], a[1][0], a[0][1], a[1][1], __byte_perm(from.x, from.z, 0x5410),
                      __byte_perm(from.x, from.z, 0x7632));
          multiply<T>(result[tile], a[0][2], a[1][2], a[0][3], a[1][3], __byte_perm(from.y, from.w, 0x5410),
                      __byte_perm(from.y, from.w, 0x7632));
        }
      }
    }
  }
}

#pragma unroll
for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    shares[warp][g + i / 2 * 8][tile * 8 + t * 2 + i % 2] = result[tile][i];
  }
}
__syncthreads();
write_sums(shares, y, rows, columns, first_column);
