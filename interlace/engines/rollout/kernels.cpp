// Attention over the KV store and sampling for one CPU thread, float32. Plain C ABI, called through ctypes.
//
// Each query is computed by the same sequence of operations whatever else is in the batch and however its prompt was
// split into chunks: the bits of a result depend on the query and its keys alone.

#include <cmath>
#include <cstdint>
#include <cstring>

typedef float v8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));

static inline v8 load8(const float* p) { v8 r; std::memcpy(&r, p, sizeof r); return r; }
static inline void store8(float* p, v8 x) { std::memcpy(p, &x, sizeof x); }
static inline v8 set8(float x) { return v8{x, x, x, x, x, x, x, x}; }
static inline float sum8(v8 x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }

// exp by Cephes' polynomial (relative error about 1e-7); the argument is at most 0 here.
static inline v8 exp8(v8 x) {
  x = x < set8(-87.0f) ? set8(-87.0f) : x;
  const v8 magic = set8(12582912.0f);  // 1.5 * 2^23: adding and taking it away again rounds to an integer
  v8 n = (x * set8(1.44269504088896341f) + magic) - magic;
  v8 r = x - n * set8(0.693359375f) - n * set8(-2.12194440e-4f);
  v8 p = set8(1.9875691500e-4f);
  p = p * r + set8(1.3981999507e-3f);
  p = p * r + set8(8.3334519073e-3f);
  p = p * r + set8(4.1665795894e-2f);
  p = p * r + set8(1.6666665459e-1f);
  p = p * r + set8(5.0000001201e-1f);
  p = p * r * r + r + set8(1.0f);
  i8 e = (__builtin_convertvector(n, i8) + 127) << 23;
  v8 scale;
  std::memcpy(&scale, &e, sizeof scale);
  return p * scale;
}
static inline float exp1(float x) { return exp8(set8(x))[0]; }

extern "C" {

// Where each token of the step lives. A page table of shift 62 has one page a row: a contiguous slot.
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
  float scale, softcap;    // softcap 0: none
  int64_t window;          // 0: none
  const float* sinks;      // [heads] or null
  float* scratch;          // [heads / kv_heads, longest context rounded up to 8]
  int64_t scratch_row;
  float* inverse;          // [heads / kv_heads]
};

// The parts of a decoder layer around its matrix products. Buffers are [rows, ...] row-major; `count` rows are worked on.
struct Norm {
  int64_t dim;
  float* residual;      // [rows, dim]
  const float* add;     // [rows, dim] added to the residual first, or null
  const float* weight;  // [dim]
  float* out;           // [rows, dim]
  float epsilon;
};

struct Rotary {
  float* qkv;               // [rows, (heads + 2 kv_heads) * head_dim], in place
  const float* bias;        // one row of it, or null
  const float* query_norm;  // [head_dim] RMS norm of each head before the rotation, or null
  const float* key_norm;
  const float *cos, *sin;   // [positions, rotary_dim]
  int64_t heads, kv_heads, head_dim, rotary_dim;
  float epsilon;
};

struct Gate {
  int64_t dim;
  const float* gate_up;  // [rows, 2 dim]
  float* out;            // [rows, dim]
};

struct Sampling {
  int64_t count, vocab, stride;
  const float* logits;      // [count, stride]
  const float* temperature; // [count] 0: greedy
  const double* uniform;    // [count] in (0, 1)
  int64_t* token;           // [count]
  float* logprob;           // [count] NaN where the logits are not finite
  double* scratch;          // [vocab / 64 + 1]
};
}

static inline int64_t locate(const Tokens& t, int64_t row, int64_t position) {
  int64_t page = position >> t.page_shift;
  return t.page_table[row * t.pages_per_row + page] + (position & ((int64_t(1) << t.page_shift) - 1));
}

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
static inline v8 pairs1(v8 a, v8 b) { return SHUFFLE(a, b, 0, 8, 2, 10, 4, 12, 6, 14) + SHUFFLE(a, b, 1, 9, 3, 11, 5, 13, 7, 15); }
static inline v8 pairs2(v8 a, v8 b) { return SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15); }
static inline v8 pairs4(v8 a, v8 b) { return SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15); }

// Eight keys' products with one query, summed by one transposing tree. D is a multiple of 8.
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
  return pairs4(pairs2(pairs1(acc[0], acc[1]), pairs1(acc[2], acc[3])),
                pairs2(pairs1(acc[4], acc[5]), pairs1(acc[6], acc[7])));
}

// sums[G, E] += weights[G, count] x values[count, E]; sums stay in registers. E is a multiple of 8, at most 32.
// U keys go to sums of their own, for a chain of dependent additions is slower than the loads.
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

// scores[0:n] -> exp(score - max); returns 1 / sum. The row is padded to a multiple of 8 with zeros.
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

// What one token's query heads of one kv head attend to, page by page: calls `work(first position, cell, count)`.
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
    const float* keys[8];  // past the end the last key again: a score's bits do not depend on its neighbours
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

// D and E are the dimensions where known at compile time, 0 for any.
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

static void rms_norm(const float* x, const float* weight, float* out, int64_t dim, float epsilon) {
  const float scale = 1.0f / std::sqrt(dot(x, x, dim) / float(dim) + epsilon);
  for (int64_t k = 0; k < dim; ++k) out[k] = x[k] * scale * weight[k];
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

extern "C" {

// Writes the step's keys and values to the pool, then attends from each token to its row's keys up to its own.
void attention(const Tokens* t, const Attention* a) {
  write_kv(*t, *a);
  if (a->key_dim == 16 && a->value_dim == 16) attend_all<16, 16>(*t, *a);
  else if (a->key_dim == 32 && a->value_dim == 32) attend_all<32, 32>(*t, *a);
  else if (a->key_dim == 64 && a->value_dim == 64) attend_all<64, 64>(*t, *a);
  else if (a->key_dim == 96 && a->value_dim == 96) attend_all<96, 96>(*t, *a);
  else if (a->key_dim == 128 && a->value_dim == 128) attend_all<128, 128>(*t, *a);
  else attend_all<0, 0>(*t, *a);
}

// residual += add; out = weight * residual / rms(residual).
void add_norm(const Norm* a, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    float* x = a->residual + i * a->dim;
    if (a->add)
      for (int64_t k = 0; k < a->dim; ++k) x[k] += a->add[i * a->dim + k];
    rms_norm(x, a->weight, a->out + i * a->dim, a->dim, a->epsilon);
  }
}

// Bias, head norms and rotation, then attention on the same buffer.
void rotary_attention(const Tokens* t, const Rotary* r, const Attention* a) {
  const int64_t width = (r->heads + 2 * r->kv_heads) * r->head_dim;
  for (int64_t i = 0; i < t->count; ++i) {
    float* row = r->qkv + i * width;
    if (r->bias)
      for (int64_t k = 0; k < width; ++k) row[k] += r->bias[k];
    const float* cos = r->cos + t->position[i] * r->rotary_dim;
    const float* sin = r->sin + t->position[i] * r->rotary_dim;
    for (int64_t h = 0; h < r->heads + r->kv_heads; ++h) {
      float* x = row + h * r->head_dim;
      const float* norm = h < r->heads ? r->query_norm : r->key_norm;
      if (norm) rms_norm(x, norm, x, r->head_dim, r->epsilon);
      const int64_t half = r->rotary_dim / 2;
      for (int64_t k = 0; k < half; ++k) {
        const float low = x[k], high = x[k + half];
        x[k] = low * cos[k] - high * sin[k];
        x[k + half] = high * cos[k + half] + low * sin[k + half];
      }
    }
  }
  attention(t, a);
}

// out = silu(gate) * up.
void silu_gate(const Gate* g, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float *gate = g->gate_up + i * 2 * g->dim, *up = gate + g->dim;
    float* out = g->out + i * g->dim;
    int64_t k = 0;
    for (; k + 8 <= g->dim; k += 8) {
      const v8 x = load8(gate + k), zero = set8(0.0f);
      const v8 e = exp8(x > zero ? -x : x);  // exp(-|x|) never overflows
      const v8 top = x > zero ? set8(1.0f) : e;
      store8(out + k, x * top / (set8(1.0f) + e) * load8(up + k));
    }
    for (; k < g->dim; ++k) out[k] = gate[k] / (1.0f + std::exp(-gate[k])) * up[k];
  }
}

// Draws one token a row from softmax(logits / temperature) by inverse CDF; the sums are double.
void sample(const Sampling* s) {
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
}
