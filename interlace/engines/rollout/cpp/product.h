// Matrix products x @ weight^T on one CPU thread, float32, on the weights as the model stores them.
//
// A sum over k is kept in the lanes of one vector, each lane in order of k, and its lanes are added by one tree: in one
// order for any number of rows, so that a row's bits do not depend on how many share the call. Weights are read once
// for each block of rows and never packed: what few rows cost is the time to read them.

#pragma once

#include "vectors.h"

// The tile of sums that fits the registers: 3 rows of x by `tile_width` rows of the weight.
#ifdef __AVX512F__
typedef float lanes __attribute__((vector_size(64)));
typedef v8 sums;
#else
typedef v8 lanes;
typedef float sums __attribute__((vector_size(16)));
#endif
constexpr int64_t num_lanes = sizeof(lanes) / sizeof(float), tile_width = sizeof(sums) / sizeof(float), tile_rows = 3;
constexpr int64_t longest_part = 640;         // of k: a tile's part of the weight stays in the first-level cache
constexpr int64_t block_floats = 128 * 1024;  // of x: what every tile of the weight meets stays in the second-level one

// Holds a value in a register. Else the compiler reads it again for each product, and the loads become the limit.
#if defined(__x86_64__)
#define IN_REGISTER(x) asm("" : "+v"(x))
#elif defined(__aarch64__) && !defined(__clang__)
#define IN_REGISTER(x) asm("" : "+w"(x))
#else
#define IN_REGISTER(x)
#endif

static inline lanes load_lanes(const float* p, int64_t count = num_lanes) {
  lanes r{};
  std::memcpy(&r, p, count < num_lanes ? count * sizeof(float) : sizeof r);
  return r;
}

#ifdef __AVX512F__
static inline v8 fold(lanes x) {
  return SHUFFLE(x, x, 0, 1, 2, 3, 4, 5, 6, 7) + SHUFFLE(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
}
static inline sums add_lanes(const lanes* x) {
  const v8 folded[8] = {fold(x[0]), fold(x[1]), fold(x[2]), fold(x[3]), fold(x[4]), fold(x[5]), fold(x[6]), fold(x[7])};
  return add_eight(folded);
}
#else
static inline sums add_lanes(const lanes* x) {
  const v8 both = add_pairs(add_pairs(x[0], x[1]), add_pairs(x[2], x[3]));
  return SHUFFLE(both, both, 0, 1, 2, 3) + SHUFFLE(both, both, 4, 5, 6, 7);
}
#endif

// found[R] = x[R, count] @ weight[tile_width, count]^T. F * count floats from `ahead` on are asked for meanwhile.
template <int R, int F>
static inline void tile(const float* x, int64_t x_row, const float* weight, int64_t weight_row, int64_t count,
                        const float* ahead, sums* found) {
  lanes acc[R][tile_width];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < tile_width; ++c) acc[r][c] = lanes{};
  int64_t k = 0;
  for (; k + num_lanes <= count; k += num_lanes) {
    lanes a[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) a[r] = load_lanes(x + r * x_row + k);
#pragma GCC unroll 8
    for (int f = 0; f < F; ++f) __builtin_prefetch(ahead + F * k + f * num_lanes, 0, 2);
#pragma GCC unroll 8
    for (int c = 0; c < tile_width; ++c) {
      lanes b = load_lanes(weight + c * weight_row + k);
      IN_REGISTER(b);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) acc[r][c] += a[r] * b;
    }
  }
  if (k < count)
    for (int c = 0; c < tile_width; ++c)
      for (int r = 0; r < R; ++r)
        acc[r][c] += load_lanes(x + r * x_row + k, count - k) * load_lanes(weight + c * weight_row + k, count - k);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) found[r] = add_lanes(acc[r]);
}

// Where a product's tiles lie and where their sums go.
struct Product {
  const float* x;       // [count, depth], a row every x_row elements
  int64_t x_row, count, depth;
  const float* weight;  // [width, depth]
  int64_t width;
  float* out;           // [count, width], a row every out_row elements
  int64_t out_row;
  bool add;             // to what is in out
};

// One tile of the weight: where it lies, and the one that is asked for while it is worked on.
struct Tile {
  int64_t column, k, part;
  const float *weight, *ahead;
  int64_t weight_row;
};

template <int R, int F>
static void tile_to_out(const Product& p, const Tile& t, int64_t row, int64_t pass) {
  sums found[R];
  tile<R, F>(p.x + row * p.x_row + t.k, p.x_row, t.weight, t.weight_row, t.part, t.ahead + F * pass * t.part, found);
  const int64_t left = p.width - t.column;
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    float* out = p.out + (row + r) * p.out_row + t.column;
    sums old{};
    if (left >= tile_width) {
      if (p.add || t.k) std::memcpy(&old, out, sizeof old);
      old += found[r];
      std::memcpy(out, &old, sizeof old);
    } else {
      for (int c = 0; c < left; ++c) out[c] = p.add || t.k ? out[c] + found[r][c] : found[r][c];
    }
  }
}

// All rows of a block against one tile. Each pass asks for F rows' worth of the floats to come, in the order of memory:
// were all asked for at once, the first pass would wait for memory and the others leave it idle.
template <int F>
static void pass_over(const Product& p, const Tile& t, int64_t first, int64_t last) {
  int64_t row = first, pass = 0;
  for (; row + tile_rows <= last && F * pass < tile_width; row += tile_rows, ++pass)
    tile_to_out<tile_rows, F>(p, t, row, pass);
  for (; row + tile_rows <= last; row += tile_rows) tile_to_out<tile_rows, 0>(p, t, row, 0);
  const bool more = F * pass < tile_width;
  if (row + 2 == last) more ? tile_to_out<2, F>(p, t, row, pass) : tile_to_out<2, 0>(p, t, row, 0);
  if (row + 1 == last) more ? tile_to_out<1, F>(p, t, row, pass) : tile_to_out<1, 0>(p, t, row, 0);
}

static void block_by_tile(const Product& p, int64_t first, int64_t last, int64_t column, int64_t k, int64_t part) {
  Tile t{column, k, part, p.weight + column * p.depth + k, nullptr, p.depth};
  // Rows of the weight are neighbours, so the parts of a column's tiles ask in turn for the parts of one stretch.
  t.ahead = p.weight + (column + 2 * tile_width) * p.depth + tile_width * k;
  float padded[tile_width * longest_part];
  if (p.width - column < tile_width) {
    std::memset(padded, 0, sizeof padded);
    for (int64_t c = 0; c < p.width - column; ++c)
      std::memcpy(padded + c * longest_part, t.weight + c * p.depth, part * sizeof(float));
    t.weight = padded, t.weight_row = longest_part;
  }
  const int64_t passes = (last - first + tile_rows - 1) / tile_rows;
  if (passes >= tile_width) pass_over<1>(p, t, first, last);
  else if (passes >= 4) pass_over<(tile_width + 3) / 4>(p, t, first, last);
  else if (passes == 3) pass_over<(tile_width + 2) / 3>(p, t, first, last);
  else if (passes == 2) pass_over<tile_width / 2>(p, t, first, last);
  else pass_over<tile_width>(p, t, first, last);
}

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

static void multiply(const Product& p) {
  if (!p.count) return;  // a step of prompts that all go on wants no logits
  const int64_t part = ceil_div(ceil_div(p.depth, ceil_div(p.depth, longest_part)), num_lanes) * num_lanes;
  const int64_t fitting = block_floats / p.depth < 24 ? 24 : block_floats / p.depth;
  // Blocks of one size: a last one of a few rows would read the whole weight for them.
  const int64_t block = ceil_div(ceil_div(p.count, ceil_div(p.count, fitting)), tile_rows) * tile_rows;
  for (int64_t first = 0; first < p.count; first += block) {
    const int64_t last = first + block < p.count ? first + block : p.count;
    for (int64_t column = 0; column < p.width; column += tile_width)
      for (int64_t k = 0; k < p.depth; k += part)
        block_by_tile(p, first, last, column, k, k + part < p.depth ? part : p.depth - k);
  }
}
