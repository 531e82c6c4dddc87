// Attention over the KV store for one CPU thread, float32.
//
// Each query is computed by the same sequence of operations, regardless of the rest of the batch and of the chunks of
// its prompt: the bits of a result depend on the query and its keys alone.

#pragma once

#include "vectors.h"

// Location of each token of the step. A page table with shift 62 has one page per row: a contiguous slot.
struct Tokens {
  int64_t count;
  const int64_t* row;         // [count]
  const int64_t* position;    // [count]
  const int64_t* page_table;  // [rows, pages_per_row] first token of each page in the pool
  int64_t pages_per_row;
  int64_t page_shift;         // log2 of the page size
};

struct Attention {
  const float *query, *key, *value;  // addressed by the strides below, in elements
  int64_t query_token, query_head, key_token, key_head, value_token, value_head;
  float* out;              // [count, heads, value_dim]
  float *key_pool, *value_pool;  // [pool tokens, kv_heads, key_dim or value_dim]
  int64_t heads, kv_heads, key_dim, value_dim;
  float scale, softcap;    // softcap 0: no cap
  int64_t window;          // 0: no window
  const float* sinks;      // [heads] or null
  float* scratch;          // [heads / kv_heads, longest context rounded up to 8]
  int64_t scratch_row;
  float* inverse;          // [heads / kv_heads]
};

static inline int64_t locate(const Tokens& t, int64_t row, int64_t position) {
  int64_t page = position >> t.page_shift;
  return t.page_table[row * t.pages_per_row + page] + (position & ((int64_t(1) << t.page_shift) - 1));
}

// Products of eight keys with one query, summed by one transposing tree. D is a multiple of 8.
template <int D>
static inline v8 dot_keys(const float* query, const float* const* keys) {
  v8 acc[8];
#pragma GCC unroll 8
  for (int k = 0; k < 8; ++k) acc[k] = load8(query) * load8(keys[k]);
#pragma GCC unroll 16
  for (int i = 8; i < D; i += 8) {
    const v8 q = load8(query + i);
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) acc[k] += q * load8(keys[k] + i);
  }
  return add_eight(acc);
}

// sums[G, E] += weights[G, count] x values[count, E]; sums stay in registers. E is a multiple of 8, at most 32. U keys
// have separate sums, because a chain of dependent additions is slower than the loads.
template <int G, int E, int U>
static inline void add_values(float* sums, int64_t sums_row, const float* weights, int64_t weights_row,
                              const float* values, int64_t step, int64_t count) {
  v8 acc[U][G][E / 8];
#pragma GCC unroll 4
  for (int u = 0; u < U; ++u)
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
      for (int i = 0; i < E / 8; ++i) acc[u][g][i] = u ? set8(0.0f) : load8(sums + g * sums_row + i * 8);
  int64_t k = 0;
  for (; k + U <= count; k += U) {
#pragma GCC unroll 4
    for (int u = 0; u < U; ++u)
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) {
        const v8 w = set8(weights[g * weights_row + k + u]);
#pragma GCC unroll 4
        for (int i = 0; i < E / 8; ++i) acc[u][g][i] += w * load8(values + (k + u) * step + i * 8);
      }
  }
  for (; k < count; ++k)
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      const v8 w = set8(weights[g * weights_row + k]);
#pragma GCC unroll 4
      for (int i = 0; i < E / 8; ++i) acc[0][g][i] += w * load8(values + k * step + i * 8);
    }
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
    for (int i = 0; i < E / 8; ++i) {
      v8 total = acc[0][g][i];
#pragma GCC unroll 4
      for (int u = 1; u < U; ++u) total += acc[u][g][i];
      store8(sums + g * sums_row + i * 8, total);
    }
}

// Replaces scores[0:n] by exp(score - max); returns 1 / sum. The row is padded to a multiple of 8 with zeros.
static float softmax_row(float* scores, int64_t n, const Attention& a, int64_t head) {
  if (a.softcap != 0.0f)
    for (int64_t i = 0; i < n; ++i) scores[i] = a.softcap * std::tanh(scores[i] / a.softcap);
  const int64_t padded = (n + 7) & ~int64_t(7);
  for (int64_t i = n; i < padded; ++i) scores[i] = -INFINITY;
  v8 top = load8(scores);
  for (int64_t i = 8; i < padded; i += 8) {
    v8 x = load8(scores + i);
    top = x > top ? x : top;
  }
  float max = a.sinks ? a.sinks[head] : top[0];
  for (int k = 0; k < 8; ++k) max = top[k] > max ? top[k] : max;
  v8 sum = set8(0.0f);
  for (int64_t i = 0; i < padded; i += 8) {
    v8 e = exp8(load8(scores + i) - set8(max));
    if (i + 8 > n)
      for (int k = 0; k < 8; ++k) e[k] = i + k < n ? e[k] : 0.0f;
    store8(scores + i, e);
    sum += e;
  }
  float total = sum8(sum);
  if (a.sinks) total += exp1(a.sinks[head] - max);
  return 1.0f / total;
}

// Visits the pages that one token attends to: calls `work(first position, cell, count)` for each.
template <class Work>
static inline void each_page(const Tokens& t, int64_t row, int64_t first, int64_t last, Work work) {
  const int64_t page = int64_t(1) << t.page_shift;
  for (int64_t p = first; p <= last;) {
    const int64_t end = (p & ~(page - 1)) + (page - 1), stop = end < last ? end : last;
    work(p, locate(t, row, p), stop - p + 1);
    p = stop + 1;
  }
}

template <int D>
static inline void score_keys(const Attention& a, const float* query, int64_t group, const float* key, int64_t step,
                              int64_t count, float* scores) {
  if (!D) {
    for (int64_t k = 0; k < count; ++k)
      for (int64_t g = 0; g < group; ++g)
        scores[g * a.scratch_row + k] = a.scale * dot(query + g * a.query_head, key + k * step, a.key_dim);
    return;
  }
  for (int64_t k = 0; k < count; k += 8) {
    const float* keys[8];  // past the end, the last key again: a score's bits do not depend on its neighbours
    for (int64_t j = 0; j < 8; ++j) keys[j] = key + (k + j < count ? k + j : count - 1) * step;
    for (int64_t g = 0; g < group; ++g) {
      const v8 found = dot_keys<D ? D : 8>(query + g * a.query_head, keys) * set8(a.scale);
      float* out = scores + g * a.scratch_row + k;
      if (k + 8 <= count) store8(out, found);
      else for (int64_t j = 0; j < count - k; ++j) out[j] = found[j];
    }
  }
}

template <int E>
static inline void sum_values(const Attention& a, float* out, int64_t group, const float* weights, const float* value,
                              int64_t step, int64_t count) {
  if (!E) {
    for (int64_t k = 0; k < count; ++k)
      for (int64_t g = 0; g < group; ++g)
        add_scaled(out + g * a.value_dim, weights[g * a.scratch_row + k], value + k * step, a.value_dim);
    return;
  }
  constexpr int part = E >= 32 ? 32 : 16;
  for (int i = 0; i < E; i += part) {
    int64_t g = 0;
    for (; g + 2 <= group; g += 2)
      add_values<2, part, part == 16 ? 2 : 1>(out + g * E + i, E, weights + g * a.scratch_row, a.scratch_row, value + i, step, count);
    for (; g < group; ++g)
      add_values<1, part, part == 16 ? 4 : 2>(out + g * E + i, E, weights + g * a.scratch_row, a.scratch_row, value + i, step, count);
  }
}

// D and E are the dimensions if known at compile time, else 0.
template <int D, int E>
static void attend(const Tokens& t, const Attention& a, int64_t token, int64_t kv_head) {
  const int64_t group = a.heads / a.kv_heads, row = t.row[token], last = t.position[token];
  const int64_t first = a.window > 0 && last >= a.window ? last - a.window + 1 : 0;
  const float* query = a.query + token * a.query_token + kv_head * group * a.query_head;
  const int64_t key_dim = D ? D : a.key_dim, value_dim = E ? E : a.value_dim;
  const int64_t key_step = a.kv_heads * key_dim, value_step = a.kv_heads * value_dim;
  each_page(t, row, first, last, [&](int64_t position, int64_t cell, int64_t count) {
    const float* key = a.key_pool + cell * key_step + kv_head * key_dim;
    score_keys<D>(a, query, group, key, key_step, count, a.scratch + position - first);
  });
  float* out = a.out + (token * a.heads + kv_head * group) * value_dim;
  std::memset(out, 0, sizeof(float) * group * value_dim);
  for (int64_t g = 0; g < group; ++g)
    a.inverse[g] = softmax_row(a.scratch + g * a.scratch_row, last - first + 1, a, kv_head * group + g);
  each_page(t, row, first, last, [&](int64_t position, int64_t cell, int64_t count) {
    const float* value = a.value_pool + cell * value_step + kv_head * value_dim;
    sum_values<E>(a, out, group, a.scratch + position - first, value, value_step, count);
  });
  for (int64_t g = 0; g < group; ++g)
    for (int64_t i = 0; i < value_dim; ++i) out[g * value_dim + i] *= a.inverse[g];
}

static void write_kv(const Tokens& t, const Attention& a) {
  for (int64_t i = 0; i < t.count; ++i) {
    const int64_t at = locate(t, t.row[i], t.position[i]);
    for (int64_t h = 0; h < a.kv_heads; ++h) {
      std::memcpy(a.key_pool + (at * a.kv_heads + h) * a.key_dim, a.key + i * a.key_token + h * a.key_head,
                  sizeof(float) * a.key_dim);
      std::memcpy(a.value_pool + (at * a.kv_heads + h) * a.value_dim, a.value + i * a.value_token + h * a.value_head,
                  sizeof(float) * a.value_dim);
    }
  }
}

template <int D, int E>
static void attend_all(const Tokens& t, const Attention& a) {
  for (int64_t i = 0; i < t.count; ++i)
    for (int64_t h = 0; h < a.kv_heads; ++h) attend<D, E>(t, a, i, h);
}

// Writes the step's keys and values to the pool, then attends from each token to the keys of its row up to its
// position.
static void write_and_attend(const Tokens& t, const Attention& a) {
  write_kv(t, a);
  if (a.key_dim == 16 && a.value_dim == 16) attend_all<16, 16>(t, a);
  else if (a.key_dim == 32 && a.value_dim == 32) attend_all<32, 32>(t, a);
  else if (a.key_dim == 64 && a.value_dim == 64) attend_all<64, 64>(t, a);
  else if (a.key_dim == 96 && a.value_dim == 96) attend_all<96, 96>(t, a);
  else if (a.key_dim == 128 && a.value_dim == 128) attend_all<128, 128>(t, a);
  else attend_all<0, 0>(t, a);
}
