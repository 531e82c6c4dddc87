// Vectors of eight floats, in GCC's and Clang's notation: one source for every processor.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "exp_lanes.h"

typedef float v8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));

static inline v8 load8(const float* p) { v8 r; std::memcpy(&r, p, sizeof r); return r; }
static inline void store8(float* p, v8 x) { std::memcpy(p, &x, sizeof x); }
static inline v8 set8(float x) { return v8{x, x, x, x, x, x, x, x}; }
static inline float sum8(v8 x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }

static inline v8 exp8(v8 x) { return exp_lanes<v8, i8>(x); }
static inline float exp1(float x) { return exp8(set8(x))[0]; }

static inline float dot(const float* a, const float* b, int64_t n) {
  v8 acc = set8(0.0f);
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) acc += load8(a + i) * load8(b + i);
  float rest = 0.0f;
  for (; i < n; ++i) rest += a[i] * b[i];
  return sum8(acc) + rest;
}

static inline void add_scaled(float* out, float weight, const float* x, int64_t n) {
  const v8 w = set8(weight);
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) store8(out + i, load8(out + i) + w * load8(x + i));
  for (; i < n; ++i) out[i] += weight * x[i];
}

#define SHUFFLE __builtin_shufflevector
// [a0+a1, a2+a3, b0+b1, b2+b3, and the same of the upper halves]: one instruction per shuffle.
static inline v8 add_pairs(v8 a, v8 b) {
  return SHUFFLE(a, b, 0, 2, 8, 10, 4, 6, 12, 14) + SHUFFLE(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
}
static inline v8 add_halves(v8 a, v8 b) {
  return SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}
// Returns the sum of each of eight vectors, in order.
static inline v8 add_eight(const v8* x) {
  return add_halves(add_pairs(add_pairs(x[0], x[1]), add_pairs(x[2], x[3])),
                    add_pairs(add_pairs(x[4], x[5]), add_pairs(x[6], x[7])));
}

static void rms_norm(const float* x, const float* weight, float* out, int64_t dim, float epsilon) {
  const float scale = 1.0f / std::sqrt(dot(x, x, dim) / float(dim) + epsilon);
  for (int64_t k = 0; k < dim; ++k) out[k] = x[k] * scale * weight[k];
}
