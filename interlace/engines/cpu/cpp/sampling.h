// Sampling of tokens from rows of logits.

#pragma once

#include "vectors.h"

struct Sampling {
  int64_t count, vocab, stride;
  const float* logits;      // [count, stride]
  const float* temperature; // [count] 0: greedy
  const double* uniform;    // [count] in (0, 1)
  int64_t* token;           // [count]
  float* logprob;           // [count] NaN if the logits are not finite
  double* scratch;          // [vocab / 64 + 1]
};

static float largest(const float* x, int64_t n) {
  float max = x[0];
  int64_t k = 0;
  if (n >= 8) {
    v8 top = load8(x);
    for (; k + 8 <= n; k += 8) {
      const v8 next = load8(x + k);
      top = next > top ? next : top;
    }
    for (int j = 0; j < 8; ++j) max = top[j] > max ? top[j] : max;
  }
  for (; k < n; ++k) max = x[k] > max ? x[k] : max;
  return max;
}

// exp((x - max) * inverse) of up to eight numbers; the other lanes must not be read.
static inline v8 weights8(const float* x, int64_t n, float max, float inverse) {
  v8 part = set8(max);
  if (n >= 8) part = load8(x);
  else std::memcpy(&part, x, n * sizeof(float));
  return exp8((part - set8(max)) * set8(inverse));
}

// Samples one token per row from softmax(logits / temperature) by inverse CDF; the sums are double.
static void draw_rows(const Sampling* s) {
  const int64_t blocks = (s->vocab + 63) / 64;
  for (int64_t i = 0; i < s->count; ++i) {
    const float* x = s->logits + i * s->stride;
    const bool greedy = s->temperature[i] == 0.0f;
    const float inverse = greedy ? 1.0f : 1.0f / s->temperature[i], max = largest(x, s->vocab);
    double total = 0.0;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t start = b * 64, end = start + 64 < s->vocab ? start + 64 : s->vocab;
      v8 acc = set8(0.0f);
      int64_t k = start;
      for (; k + 8 <= end; k += 8) acc += weights8(x + k, 8, max, inverse);
      float rest = 0.0f;
      if (k < end) {
        const v8 last = weights8(x + k, end - k, max, inverse);
        for (int64_t j = 0; j < end - k; ++j) rest += last[j];
      }
      total += double(sum8(acc) + rest);
      s->scratch[b] = total;
    }
    int64_t token = 0;
    if (greedy) {
      while (token < s->vocab - 1 && x[token] != max) ++token;
    } else {
      const double target = s->uniform[i] * total;
      int64_t b = 0;
      while (b < blocks - 1 && s->scratch[b] <= target) ++b;
      double mass = b ? s->scratch[b - 1] : 0.0;
      const int64_t start = b * 64, end = start + 64 < s->vocab ? start + 64 : s->vocab;
      token = start;
      // The last candidate with any mass is kept if rounding leaves the target beyond the block's sum.
      for (int64_t k = start; k < end && mass <= target; k += 8) {
        const v8 e = weights8(x + k, end - k, max, inverse);
        for (int64_t j = 0; j < 8 && k + j < end && mass <= target; ++j) {
          mass += e[j];
          if (e[j] > 1e-37f) token = k + j;
        }
      }
    }
    s->token[i] = token;
    s->logprob[i] = std::isfinite(max) && std::isfinite(total) ? (x[token] - max) * inverse - float(std::log(total)) : NAN;
  }
}
