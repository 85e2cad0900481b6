// From MLX's layouts to packed tiles (kernels.h).
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace metalctl {

inline float half_to_float(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7fff, bits;
  if (rest >= 0x7c00) bits = sign | 0x7f800000 | ((rest & 0x3ff) << 13);
  else if (rest >= 0x0400) bits = sign | ((rest << 13) + (112u << 23));
  else {
    float tiny = float(rest) * 5.9604644775390625e-8f;
    return sign ? -tiny : tiny;
  }
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

inline float bfloat_to_float(uint16_t b) {
  uint32_t bits = uint32_t(b) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

// To the nearest, ties to even.
inline uint16_t float_to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint16_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;
  if (bits >= 0x477ff000) return sign | 0x7c00;  // 65520 and more round to infinity
  if (bits < 0x38800000) {                       // below 2^-14: 0.5 has the precision that is left
    float shifted;
    std::memcpy(&shifted, &bits, 4);
    shifted += 0.5f;
    std::memcpy(&bits, &shifted, 4);
    return sign | uint16_t(bits - 0x3f000000);
  }
  return sign | uint16_t((bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
}

inline uint16_t float_to_bfloat(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Codes i to i + 7 of a row, a byte each, i a multiple of 8: MLX writes codes one after the other, from the lowest bit up.
template <int bits>
uint64_t eight_codes(const uint8_t* row, int64_t i) {
  uint32_t first, second = 0;  // not one number in two writes: reading it back would wait for both
  std::memcpy(&first, row + i * bits / 8, 4);
  if (bits == 5) second = row[i * bits / 8 + 4];
  else std::memcpy(&second, row + i * bits / 8 + 4, bits - 4);
  uint64_t codes = first | uint64_t(second) << 32;
  if (bits == 8) return codes;
  const uint64_t fours = (uint64_t(1) << 4 * bits) - 1, one = (1 << bits) - 1, two = (1 << 2 * bits) - 1;
  const uint64_t pairs = two * 0x0000000100000001, ones = one * 0x0001000100010001;
  codes = (codes & fours) | codes >> 4 * bits << 32;
  codes = (codes & pairs) | (codes & pairs << 2 * bits) << (16 - 2 * bits);
  return (codes & ones) | (codes & ones << bits) << (8 - bits);
}

// 32 codes of one row to its lane of a unit.
template <int bits>
void pack_unit(const uint8_t* row, int64_t from, uint8_t* to) {
  uint64_t eights[4];
  for (int i = 0; i < 4; i++) eights[i] = eight_codes<bits>(row, from + 8 * i);
  auto store = [&](int place, uint64_t bytes) {
    const uint32_t words[2] = {uint32_t(bytes), uint32_t(bytes >> 32)};
    std::memcpy(to + 64 * place, words, 4);
    std::memcpy(to + 64 * (place + 1), words + 1, 4);
  };
  if (bits == 8) {
    for (int i = 0; i < 4; i++) store(2 * i, eights[i]);
    return;
  }
  constexpr uint64_t LOW = 0x0f0f0f0f0f0f0f0f;
  for (int i = 0; i < 2; i++) store(2 * i, (eights[i] & LOW) | (eights[i + 2] & LOW) << 4);
  uint32_t high[2] = {0, 0};
  for (int i = 0; i < 8; i++) {
    const uint32_t upper = uint32_t(eights[i / 2] >> 32 * (i % 2)) >> 4;
    if (bits == 5) high[0] |= (upper & 0x01010101) << i;
    if (bits == 6) high[i / 4] |= (upper & 0x03030303) << 2 * (i % 4);
  }
  for (int i = 0; i < bits - 4; i++) std::memcpy(to + 64 * (4 + i), high + i, 4);
}

// `scales` and `offsets` are [n, k / group], float16 or float32 as the pack says.
template <int bits>
void pack_tile(const Pack& to, int tile, const uint8_t* codes, const uint8_t* scales, const uint8_t* offsets, uint8_t* out) {
  const int groups = to.groups(), width = to.wide_scales ? 4 : 2;
  if ((tile + 1) * TILE > to.n) std::memset(out, 0, to.tile_bytes());
  for (int lane = 0; lane < TILE && tile * TILE + lane < to.n; lane++) {
    const int64_t row = tile * TILE + lane;
    const uint8_t* from = codes + row * (int64_t(to.k) * bits / 8);
    for (int g = 0; g < groups; g++) {
      uint8_t* p = out + g * to.group_bytes();
      std::memcpy(p + lane * width, scales + (row * groups + g) * width, width);
      std::memcpy(p + (TILE + lane) * width, offsets + (row * groups + g) * width, width);
      p += 2 * TILE * width + 4 * lane;
      for (int i = 0; i < to.group; i += 32) pack_unit<bits>(from, int64_t(g) * to.group + i, p + i / 32 * to.unit_bytes());
    }
  }
}

inline void pack_quantized_tile(const Pack& to, int tile, const uint8_t* codes, const uint8_t* scales, const uint8_t* offsets,
                                uint8_t* data) {
  uint8_t* out = data + tile * to.tile_bytes();
  switch (int(to.format)) {
    case 4: return pack_tile<4>(to, tile, codes, scales, offsets, out);
    case 5: return pack_tile<5>(to, tile, codes, scales, offsets, out);
    case 6: return pack_tile<6>(to, tile, codes, scales, offsets, out);
    case 8: return pack_tile<8>(to, tile, codes, scales, offsets, out);
  }
}

// `rows` is [n, k] of the pack's own type.
inline void pack_floating_tile(const Pack& to, int tile, const uint8_t* rows, uint8_t* data) {
  const int width = to.format == Format::f32 ? 4 : 2;
  uint8_t* out = data + tile * to.tile_bytes();
  for (int lane = 0; lane < TILE; lane++) {
    const int64_t row = tile * TILE + lane;
    for (int64_t k = 0; k < to.k; k++) {
      uint8_t* at = out + (k * TILE + lane) * width;
      if (row < to.n) std::memcpy(at, rows + (row * to.k + k) * width, width);
      else std::memset(at, 0, width);
    }
  }
}

}  // namespace metalctl
