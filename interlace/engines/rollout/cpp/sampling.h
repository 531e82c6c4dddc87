// Drawing tokens from rows of logits.

#pragma once

#include "vectors.h"

struct Sampling {
  int64_t count, vocab, stride;
  const float* logits;      // [count, stride]
  const float* temperature; // [count] 0: greedy
  const double* uniform;    // [count] in (0, 1)
  int64_t* token;           // [count]
  float* logprob;           // [count] NaN where the logits are not finite
  double* scratch;          // [vocab / 64 + 1]
};

static int64_t first_largest(const float* x, int64_t n) {
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
  for (k = 0; k < n; ++k)
    if (x[k] == max) return k;
  return 0;  // only NaNs: the sum that follows says so
}

// One token a row from softmax(logits / temperature) by inverse CDF; the sums are double.
static void draw_rows(const Sampling* s) {
  for (int64_t i = 0; i < s->count; ++i) {
    const float* x = s->logits + i * s->stride;
    const int64_t best = first_largest(x, s->vocab);
    const bool greedy = s->temperature[i] == 0.0f;
    const float inverse = greedy ? 1.0f : 1.0f / s->temperature[i], max = x[best];
    const int64_t blocks = (s->vocab + 63) / 64;
    double total = 0.0;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t start = b * 64, end = start + 64 < s->vocab ? start + 64 : s->vocab;
      v8 acc = set8(0.0f);
      int64_t k = start;
      for (; k + 8 <= end; k += 8) acc += exp8((load8(x + k) - set8(max)) * set8(inverse));
      float rest = 0.0f;
      for (; k < end; ++k) rest += exp1((x[k] - max) * inverse);
      total += double(sum8(acc) + rest);
      s->scratch[b] = total;
    }
    int64_t token = best;
    if (!greedy) {
      const double target = s->uniform[i] * total;
      int64_t b = 0;
      while (b < blocks - 1 && s->scratch[b] <= target) ++b;
      double mass = b ? s->scratch[b - 1] : 0.0;
      const int64_t start = b * 64, end = start + 64 < s->vocab ? start + 64 : s->vocab;
      token = start;
      // The last candidate with any mass is kept where rounding leaves the target beyond the block's sum.
      for (int64_t k = start; k < end && mass <= target; ++k) {
        const float e = exp1((x[k] - max) * inverse);
        mass += e;
        if (e > 1e-37f) token = k;
      }
    }
    s->token[i] = token;
    s->logprob[i] = std::isfinite(max) && std::isfinite(total) ? (x[token] - max) * inverse - float(std::log(total)) : NAN;
  }
}
