// Matrix products x @ weight^T as int8 on one CPU thread: x has one scale per row, the weight one per output.
//
// Sums are integers and exact, so a row's bits do not depend on the number of rows in the call. A vector contains four
// k of sixteen outputs and is multiplied by four k of a row at once: nothing is added across the lanes of a vector.

#pragma once

#include "product.h"

#ifdef __AVX512VNNI__
#include <immintrin.h>
#endif

constexpr int64_t outputs8 = 16, ks8 = 4;

// A weight [width, depth] in the layout of the products; width is padded to a multiple of 16 and depth to 4, with
// zeros.
struct Quantized {
  const int8_t* codes;    // [width / 16, depth / 4, 16, 4]
  const float* scale;     // [width]
  const int32_t* offset;  // [width] 128 times the sum of an output's codes
};

// Rows of x: each code is round(x / scale) + 128.
struct Codes {
  uint8_t* codes;  // [count, depth rounded up to 4]
  float* scale;    // [count]
};

static float largest_of(const float* x, int64_t depth) {
  float largest = 1e-30f;
  int64_t k = 0;
#ifdef __AVX512VNNI__
  __m512 top = _mm512_setzero_ps();
  for (; k + 16 <= depth; k += 16) top = _mm512_max_ps(top, _mm512_abs_ps(_mm512_loadu_ps(x + k)));
  largest = std::max(largest, _mm512_reduce_max_ps(top));
#endif
  for (; k < depth; ++k) largest = std::max(largest, std::abs(x[k]));
  return largest;
}

static void quantize_row(const float* x, int64_t depth, uint8_t* codes, float* scale) {
  const float largest = largest_of(x, depth), inverse = 127.0f / largest;
  *scale = largest / 127.0f;
  int64_t k = 0;
#ifdef __AVX512VNNI__
  for (; k + 16 <= depth; k += 16) {
    const __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + k), _mm512_set1_ps(inverse)));
    const __m512i shifted = _mm512_add_epi32(code, _mm512_set1_epi32(128));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + k), _mm512_cvtepi32_epi8(shifted));
  }
#endif
  for (; k < depth; ++k) codes[k] = uint8_t(int(std::nearbyint(x[k] * inverse)) + 128);
  std::memset(codes + depth, 0, ceil_div(depth, ks8) * ks8 - depth);
}

#ifdef __AVX512VNNI__
constexpr int rows8 = 6, blocks8 = 4;  // these sums, the weights and one x fit the registers

template <int R, int C>
static inline void tile8(const Product& p, const Quantized& q, const Codes& x, int64_t row, int64_t block) {
  const int64_t steps = ceil_div(p.depth, ks8), depth = steps * ks8;
  const int8_t* weight = q.codes + block * steps * 64;
  const uint8_t* codes = x.codes + row * depth;
  __m512i acc[R * C];
#pragma GCC unroll 24
  for (int i = 0; i < R * C; ++i) acc[i] = _mm512_setzero_si512();
  for (int64_t k = 0; k < steps; ++k) {
    __m512i held[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) held[c] = _mm512_loadu_si512(weight + (c * steps + k) * 64);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      int32_t four;
      std::memcpy(&four, codes + r * depth + k * ks8, sizeof four);
      const __m512i own = _mm512_set1_epi32(four);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) acc[r * C + c] = _mm512_dpbusd_epi32(acc[r * C + c], own, held[c]);
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < C; ++c) {
    const int64_t column = (block + c) * outputs8, left = p.width - column;
    const __mmask16 there = left < outputs8 ? __mmask16((1 << left) - 1) : __mmask16(0xffff);
    const __m512 scale = _mm512_loadu_ps(q.scale + column);
    const __m512i offset = _mm512_loadu_si512(q.offset + column);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      float* out = p.out + (row + r) * p.out_row + column;
      const __m512 sum = _mm512_cvtepi32_ps(_mm512_sub_epi32(acc[r * C + c], offset));
      const __m512 value = _mm512_mul_ps(sum, _mm512_mul_ps(_mm512_set1_ps(x.scale[row + r]), scale));
      _mm512_mask_storeu_ps(out, there, p.add ? _mm512_add_ps(_mm512_maskz_loadu_ps(there, out), value) : value);
    }
  }
}

template <int R, int C>
static void rows_of_tile8(const Product& p, const Quantized& q, const Codes& x, int64_t row, int64_t block) {
  if constexpr (R > 1)
    if (p.count - row < R) return rows_of_tile8<R - 1, C>(p, q, x, row, block);
  tile8<R, C>(p, q, x, row, block);
}

static void multiply_tiles8(const Product& p, const Quantized& q, const Codes& x) {
  const int64_t blocks = ceil_div(p.width, outputs8);
  int64_t block = 0;
  for (; block + blocks8 <= blocks; block += blocks8)
    for (int64_t row = 0; row < p.count; row += rows8) rows_of_tile8<rows8, blocks8>(p, q, x, row, block);
  for (; block < blocks; ++block)
    for (int64_t row = 0; row < p.count; row += rows8) rows_of_tile8<rows8, 1>(p, q, x, row, block);
}
#else
static void multiply_tiles8(const Product& p, const Quantized& q, const Codes& x) {
  const int64_t steps = ceil_div(p.depth, ks8), depth = steps * ks8;
  for (int64_t c = 0; c < p.width; ++c)
    for (int64_t r = 0; r < p.count; ++r) {
      int32_t sum = 0;
      for (int64_t k = 0; k < depth; ++k)
        sum += int32_t(x.codes[r * depth + k]) *
               q.codes[(c / outputs8 * steps + k / ks8) * 64 + c % outputs8 * ks8 + k % ks8];
      float* out = p.out + r * p.out_row + c;
      const float value = float(sum - q.offset[c]) * (x.scale[r] * q.scale[c]);
      *out = p.add ? *out + value : value;
    }
}
#endif

static void multiply8(const Product& p, const Quantized& q, const Codes& x) {
  const int64_t depth = ceil_div(p.depth, ks8) * ks8;
  for (int64_t r = 0; r < p.count; ++r) quantize_row(p.x + r * p.x_row, p.depth, x.codes + r * depth, x.scale + r);
  multiply_tiles8(p, q, x);
}
