// Causal attention within the sequences of a packed row, and its gradients, on a CPU; float32.
//
// Keys are transposed so that every product multiplies a broadcast number by vectors. A block of queries is multiplied
// only by the keys up to its last query, so the masked part costs almost nothing. The backward pass recomputes the
// probabilities from the normalizers that the forward pass stored. The order of each sum is fixed, regardless of the
// rest of the row.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "exp_lanes.h"

#ifdef __AVX512F__
constexpr int WIDTH = 16, ROWS = 8;
#else
constexpr int WIDTH = 8, ROWS = 4;
#endif
constexpr int PAIR = 2 * WIDTH;  // a tile has ROWS rows and two vectors per row: as many sums as the registers hold
constexpr int BLOCK = 32;        // queries per block

typedef float vec __attribute__((vector_size(WIDTH * 4)));
typedef int32_t ints __attribute__((vector_size(WIDTH * 4)));

static inline vec load(const float* p) { vec r; std::memcpy(&r, p, sizeof r); return r; }
static inline void store(float* p, vec x) { std::memcpy(p, &x, sizeof x); }
static inline vec all(float x) { return vec{} + x; }
static inline int64_t padded(int64_t n) { return (n + PAIR - 1) / PAIR * PAIR; }

// Numbers of all tokens: `token` and `head` are strides; the numbers of one head are contiguous.
struct Rows {
  float* data;
  int64_t token, head;
  float* at(int64_t place, int64_t number) const { return data + place * token + number * head; }
};

struct Packed {
  int64_t num_parts, num_threads;
  const int64_t* parts;   // [num_parts + 1] first sequence of each group; groups share no tokens
  const int64_t* starts;  // [sequences + 1] first token of each
  const int64_t* known;   // [sequences] leading tokens of an earlier sequence: only keys here, no queries
  const int64_t* places;  // [tokens] position of each token in the row
  int64_t heads, kv_heads, key_dim, value_dim;
  int64_t window;  // 0: no window
  float scale;
  float* normalizers;  // [row, heads] logarithm of the sum of exponentials
  Rows query, key, value, out;
  Rows out_grad, query_grad, key_grad, value_grad;  // backward pass only; the last two are zero at the start
};

// Buffers of one thread; they grow to the longest sequence.
struct Scratch {
  std::vector<float> keys, keys_T, values, values_T, query, out_grad, scores, score_grads, result, key_grad, value_grad;
};

static float* sized(std::vector<float>& buffer, int64_t count) {
  if (int64_t(buffer.size()) < count) buffer.resize(count);
  return buffer.data();
}

// c[M, PAIR] = (c +) a[M, depth] x b[depth, PAIR].
template <int M>
static inline void tile(const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_row, float* c,
                        int64_t c_row, int64_t depth, bool add) {
  vec sums[M][2];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) sums[m][i] = add ? load(c + m * c_row + i * WIDTH) : vec{};
  for (int64_t k = 0; k < depth; ++k) {
    const vec low = load(b + k * b_row), high = load(b + k * b_row + WIDTH);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const vec weight = all(a[m * a_row + k * a_step]);
      sums[m][0] += weight * low;
      sums[m][1] += weight * high;
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) store(c + m * c_row + i * WIDTH, sums[m][i]);
}

struct Factor {  // element (m, k) is data[m * row + k * step]
  const float* data;
  int64_t row, step;
};

// c[rows, columns] = (c +) a[rows, depth] x b[depth, columns]; columns must be a multiple of PAIR.
static void multiply(Factor a, const float* b, int64_t b_row, float* c, int64_t c_row, int64_t rows, int64_t columns,
                     int64_t depth, bool add) {
  for (int64_t n = 0; n < columns; n += PAIR) {
    int64_t m = 0;
    for (; m + ROWS <= rows; m += ROWS)
      tile<ROWS>(a.data + m * a.row, a.row, a.step, b + n, b_row, c + m * c_row + n, c_row, depth, add);
    for (; m + 2 <= rows; m += 2)
      tile<2>(a.data + m * a.row, a.row, a.step, b + n, b_row, c + m * c_row + n, c_row, depth, add);
    for (; m < rows; ++m)
      tile<1>(a.data + m * a.row, a.row, a.step, b + n, b_row, c + m * c_row + n, c_row, depth, add);
  }
}

// Copies [count, dim] of one head, times `scale`, into rows of length `to_row`; the rest of each row is zero.
static float* gather(std::vector<float>& buffer, int64_t to_row, Rows from, const int64_t* places, int64_t count,
                     int64_t head, int64_t dim, float scale) {
  float* to = sized(buffer, count * to_row);
  for (int64_t t = 0; t < count; ++t) {
    const float* row = from.at(places[t], head);
    float* out = to + t * to_row;
    for (int64_t d = 0; d < dim; ++d) out[d] = scale * row[d];
    std::fill(out + dim, out + to_row, 0.0f);
  }
  return to;
}

// Transposes [count, from_row] into [dim, to_row].
static float* turn(std::vector<float>& buffer, int64_t to_row, const float* from, int64_t from_row, int64_t count,
                   int64_t dim) {
  float* to = sized(buffer, dim * to_row);
  for (int64_t d = 0; d < dim; ++d) {
    for (int64_t t = 0; t < count; ++t) to[d * to_row + t] = from[t * from_row + d];
    std::fill(to + d * to_row + count, to + (d + 1) * to_row, 0.0f);
  }
  return to;
}

// A block of queries [first, last) and its keys [low, last), which take `columns` columns with padding.
struct Block {
  int64_t first, last, low, rows, seen, columns;
};

static Block block_at(const Packed& p, int64_t first, int64_t length) {
  const int64_t last = std::min(first + BLOCK, length);
  const int64_t low = p.window ? std::max<int64_t>(0, first - p.window + 1) / PAIR * PAIR : 0;
  return {first, last, low, last - first, last - low, padded(last - low)};
}

// Overwrites the scores of keys that the query does not attend to with `value`.
static inline void mask(const Packed& p, const Block& b, int64_t query, float* row, float value) {
  std::fill(row + (query + 1 - b.low), row + b.columns, value);
  if (p.window && query - p.window + 1 > b.low) std::fill(row, row + (query - p.window + 1 - b.low), value);
}

// Replaces scores by exp(score - normalizer), masked.
static inline void weigh(const Packed& p, const Block& b, int64_t query, float* row, float normalizer) {
  const vec least = all(normalizer);
  for (int64_t j = 0; j < b.columns; j += WIDTH) store(row + j, exp_lanes<vec, ints>(load(row + j) - least));
  mask(p, b, query, row, 0.0f);
}

static float largest(const float* row, int64_t columns) {
  vec tops = load(row);
  for (int64_t j = WIDTH; j < columns; j += WIDTH) tops = load(row + j) > tops ? load(row + j) : tops;
  float top = tops[0];
  for (int k = 1; k < WIDTH; ++k) top = tops[k] > top ? tops[k] : top;
  return top;
}

static float total(const float* row, int64_t columns) {
  vec sums = {};
  for (int64_t j = 0; j < columns; j += WIDTH) sums += load(row + j);
  float sum = 0.0f;
  for (int k = 0; k < WIDTH; ++k) sum += sums[k];
  return sum;
}

static void attend_sequence(const Packed& p, Scratch& own, int64_t sequence, int64_t kv_head) {
  const int64_t start = p.starts[sequence], length = p.starts[sequence + 1] - start, wide = padded(length);
  const int64_t group = p.heads / p.kv_heads, value_row = padded(p.value_dim);
  const int64_t* places = p.places + start;
  const float* keys = gather(own.keys, p.key_dim, p.key, places, length, kv_head, p.key_dim, 1.0f);
  const float* keys_T = turn(own.keys_T, wide, keys, p.key_dim, length, p.key_dim);
  const float* values = gather(own.values, value_row, p.value, places, length, kv_head, p.value_dim, 1.0f);
  float *scores = sized(own.scores, BLOCK * wide), *result = sized(own.result, BLOCK * value_row);
  for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head)
    for (int64_t first = p.known[sequence]; first < length; first += BLOCK) {
      const Block b = block_at(p, first, length);
      const float* query =
          gather(own.query, p.key_dim, p.query, places + first, b.rows, head, p.key_dim, p.scale);
      multiply({query, p.key_dim, 1}, keys_T + b.low, wide, scores, b.columns, b.rows, b.columns, p.key_dim, false);
      float inverse[BLOCK];
      for (int64_t i = 0; i < b.rows; ++i) {
        float* row = scores + i * b.columns;
        mask(p, b, first + i, row, -INFINITY);
        const float top = largest(row, b.columns);
        weigh(p, b, first + i, row, top);
        const float sum = total(row, b.columns);
        inverse[i] = 1.0f / sum;
        p.normalizers[places[first + i] * p.heads + head] = top + std::log(sum);
      }
      multiply({scores, b.columns, 1}, values + b.low * value_row, value_row, result, value_row, b.rows, value_row,
               b.seen, false);
      for (int64_t i = 0; i < b.rows; ++i) {
        float* out = p.out.at(places[first + i], head);
        for (int64_t d = 0; d < p.value_dim; ++d) out[d] = result[i * value_row + d] * inverse[i];
      }
    }
}

static void attend_sequence_backward(const Packed& p, Scratch& own, int64_t sequence, int64_t kv_head) {
  const int64_t start = p.starts[sequence], length = p.starts[sequence + 1] - start, wide = padded(length);
  const int64_t group = p.heads / p.kv_heads, key_row = padded(p.key_dim), value_row = padded(p.value_dim);
  const int64_t* places = p.places + start;
  const float* keys = gather(own.keys, key_row, p.key, places, length, kv_head, p.key_dim, 1.0f);
  const float* keys_T = turn(own.keys_T, wide, keys, key_row, length, p.key_dim);
  const float* values = gather(own.values, value_row, p.value, places, length, kv_head, p.value_dim, 1.0f);
  const float* values_T = turn(own.values_T, wide, values, value_row, length, p.value_dim);
  float *scores = sized(own.scores, BLOCK * wide), *score_grads = sized(own.score_grads, BLOCK * wide);
  float* result = sized(own.result, BLOCK * key_row);
  float* key_grad = sized(own.key_grad, length * key_row);
  float* value_grad = sized(own.value_grad, length * value_row);
  std::fill_n(key_grad, length * key_row, 0.0f);
  std::fill_n(value_grad, length * value_row, 0.0f);
  for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head)
    for (int64_t first = p.known[sequence]; first < length; first += BLOCK) {
      const Block b = block_at(p, first, length);
      const float* query = gather(own.query, key_row, p.query, places + first, b.rows, head, p.key_dim, p.scale);
      const float* out_grad =
          gather(own.out_grad, value_row, p.out_grad, places + first, b.rows, head, p.value_dim, 1.0f);
      multiply({query, key_row, 1}, keys_T + b.low, wide, scores, b.columns, b.rows, b.columns, p.key_dim, false);
      multiply({out_grad, value_row, 1}, values_T + b.low, wide, score_grads, b.columns, b.rows, b.columns, p.value_dim,
               false);
      for (int64_t i = 0; i < b.rows; ++i) {
        const int64_t place = places[first + i];
        const float* out = p.out.at(place, head);
        float along = 0.0f;  // gradient along the output: weights with sum one cannot follow it
        for (int64_t d = 0; d < p.value_dim; ++d) along += out[d] * out_grad[i * value_row + d];
        float *row = scores + i * b.columns, *grads = score_grads + i * b.columns;
        weigh(p, b, first + i, row, p.normalizers[place * p.heads + head]);
        for (int64_t j = 0; j < b.columns; j += WIDTH)
          store(grads + j, load(row + j) * (load(grads + j) - all(along)));
      }
      multiply({score_grads, b.columns, 1}, keys + b.low * key_row, key_row, result, key_row, b.rows, key_row, b.seen,
               false);
      for (int64_t i = 0; i < b.rows; ++i) {
        float* query_grad = p.query_grad.at(places[first + i], head);
        for (int64_t d = 0; d < p.key_dim; ++d) query_grad[d] = p.scale * result[i * key_row + d];
      }
      multiply({score_grads, 1, b.columns}, query, key_row, key_grad + b.low * key_row, key_row, b.seen, key_row,
               b.rows, true);
      multiply({scores, 1, b.columns}, out_grad, value_row, value_grad + b.low * value_row, value_row, b.seen,
               value_row, b.rows, true);
    }
  for (int64_t t = 0; t < length; ++t) {
    float *to_key = p.key_grad.at(places[t], kv_head), *to_value = p.value_grad.at(places[t], kv_head);
    for (int64_t d = 0; d < p.key_dim; ++d) to_key[d] += key_grad[t * key_row + d];
    for (int64_t d = 0; d < p.value_dim; ++d) to_value[d] += value_grad[t * value_row + d];
  }
}

// The sequences of a part run in order on one thread, because they add to the same gradients. Parts share nothing.
template <class Work>
static void each_part(const Packed& p, Work work) {
  std::atomic<int64_t> next{0};
  const auto serve = [&] {
    Scratch own;
    for (int64_t item = next++; item < p.num_parts * p.kv_heads; item = next++)
      for (int64_t sequence = p.parts[item / p.kv_heads]; sequence < p.parts[item / p.kv_heads + 1]; ++sequence)
        work(p, own, sequence, item % p.kv_heads);
  };
  std::vector<std::thread> others;
  for (int64_t thread = 1; thread < p.num_threads; ++thread) others.emplace_back(serve);
  serve();
  for (std::thread& other : others) other.join();
}

extern "C" {

void attend(const Packed* packed) { each_part(*packed, attend_sequence); }

void attend_backward(const Packed* packed) { each_part(*packed, attend_sequence_backward); }
}
