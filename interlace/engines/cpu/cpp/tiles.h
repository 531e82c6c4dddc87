// Products of few rows: a vector contains neighbouring k of one row.
//
// The lanes of one vector accumulate a sum over k, each lane in order of k, and one tree adds the lanes: the order is
// the same for any number of rows and any shape of tile.

#pragma once

#include "vectors.h"

// Tiles of sums that fit the registers. If all rows fit one tile, each weight is used once when it is loaded. More rows
// run in passes of `pass_rows`, and the tile's weights stay in the first-level cache between the passes.
#ifdef __AVX512F__
typedef float lanes __attribute__((vector_size(64)));
constexpr int single_rows = 10, pass_rows = 4, pass_width = 6;
constexpr int single_width(int rows) { return rows <= 6 ? 4 : rows <= 8 ? 3 : 2; }
#else
typedef v8 lanes;
constexpr int single_rows = 3, pass_rows = 3, pass_width = 4;
constexpr int single_width(int) { return 4; }
#endif
constexpr int64_t num_lanes = sizeof(lanes) / sizeof(float);
constexpr int64_t longest_part = 640;         // k per tile, at most: its weights stay in the first-level cache
constexpr int64_t block_floats = 128 * 1024;  // floats of x that stay in the second-level cache for all tiles
constexpr int64_t group_floats = 64 * 1024;   // floats of a group of weights, at most: two groups stay there too
constexpr int64_t group_width = 24;           // rows of the weight per group: a multiple of every tile's width

// Keeps a value in a register. Otherwise the compiler reads it again for each product, and the loads become the limit.
#if defined(__x86_64__)
#define IN_REGISTER(x) asm("" : "+v"(x))
#elif defined(__aarch64__) && !defined(__clang__)
#define IN_REGISTER(x) asm("" : "+w"(x))
#else
#define IN_REGISTER(x)
#endif

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

static inline lanes load_lanes(const float* p) {
  lanes r;
  std::memcpy(&r, p, sizeof r);
  return r;
}

// Returns the sum of each of eight vectors, in order.
static inline v8 add_lanes(const lanes* x) {
#ifdef __AVX512F__
  v8 folded[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    folded[i] = SHUFFLE(x[i], x[i], 0, 1, 2, 3, 4, 5, 6, 7) + SHUFFLE(x[i], x[i], 8, 9, 10, 11, 12, 13, 14, 15);
  return add_eight(folded);
#else
  return add_eight(x);
#endif
}

// acc[R, C] += x[R, num_lanes] * weight[C, num_lanes], lane by lane.
template <int R, int C>
static inline void add_products(const float* x, int64_t x_row, const float* weight, int64_t weight_row, lanes* acc) {
  lanes held[R <= C ? R : C];
  if constexpr (R <= C) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) held[r] = load_lanes(x + r * x_row);
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      lanes b = load_lanes(weight + c * weight_row);
      IN_REGISTER(b);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) acc[r * C + c] += held[r] * b;
    }
  } else {
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      held[c] = load_lanes(weight + c * weight_row);
      IN_REGISTER(held[c]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      lanes a = load_lanes(x + r * x_row);
      IN_REGISTER(a);
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) acc[r * C + c] += a * held[c];
    }
  }
}

// found[R, C] = x[R, count] @ weight[C, count]^T. Meanwhile it prefetches F * count floats from `ahead`.
template <int R, int C, int F>
static inline void tile(const float* x, int64_t x_row, const float* weight, int64_t weight_row, int64_t count,
                        const float* ahead, float* found) {
  lanes acc[R * C];
#pragma GCC unroll 32
  for (int i = 0; i < R * C; ++i) acc[i] = lanes{};
  const int64_t whole = count / num_lanes * num_lanes;
  float rest[(R + C) * num_lanes];  // filled before the loop: a call after it would move the sums out of the registers
  if (whole < count) {
    std::memset(rest, 0, sizeof rest);
    for (int i = 0; i < R + C; ++i)
      std::memcpy(rest + i * num_lanes, (i < R ? x + i * x_row : weight + (i - R) * weight_row) + whole,
                  (count - whole) * sizeof(float));
  }
  for (int64_t k = 0; k < whole; k += num_lanes) {
#pragma GCC unroll 8
    for (int f = 0; f < F; ++f) __builtin_prefetch(ahead + F * k + f * num_lanes, 0, 2);
    add_products<R, C>(x + k, x_row, weight + k, weight_row, acc);
  }
  if (whole < count) add_products<R, C>(rest, num_lanes, rest + R * num_lanes, num_lanes, acc);
#pragma GCC unroll 4
  for (int i = 0; i < R * C; i += 8) {
    lanes eight[8];
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) eight[j] = i + j < R * C ? acc[i + j < R * C ? i + j : i] : lanes{};
    store8(found + i, add_lanes(eight));
  }
}

struct Product {
  const float* x;       // [count, depth], a row every x_row elements
  int64_t x_row, count, depth;
  const float* weight;  // [width, depth]
  int64_t width;
  float* out;           // [count, width], a row every out_row elements
  int64_t out_row;
  bool add;             // add to the content of out
  const float* next;    // the weight that is read after this one
  float* turned;        // buffer of panels.h: count rounded up to 16 times depth rounded up to 8
};

// One tile of the weight: its location, and the address to prefetch during its computation.
struct Tile {
  int64_t column, k, part;
  const float *weight, *ahead;
  int64_t weight_row;
};

template <int R, int C, int F>
static void tile_to_out(const Product& p, const Tile& t, int64_t row) {
  float found[(R * C + 7) / 8 * 8];
  tile<R, C, F>(p.x + row * p.x_row + t.k, p.x_row, t.weight, t.weight_row, t.part, t.ahead, found);
  const int64_t left = p.width - t.column;
  const bool add = p.add || t.k;
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    float* out = p.out + (row + r) * p.out_row + t.column;
    const float* sums = found + r * C;
    if (left < C)
      for (int c = 0; c < left; ++c) out[c] = add ? out[c] + sums[c] : sums[c];
    else if (add)
      for (int c = 0; c < C; ++c) out[c] += sums[c];
    else
      for (int c = 0; c < C; ++c) out[c] = sums[c];
  }
}

// Returns the k per tile; the last tile has the rest.
static inline int64_t part_of(int64_t depth) {
  return ceil_div(ceil_div(depth, ceil_div(depth, longest_part)), num_lanes) * num_lanes;
}

// Calls `work` for each tile of the weight and prefetches the following group. Within a group the parts of k come one
// after the other, so that a part of few rows of x stays in the first-level cache.
template <int C, class Work>
static inline void each_tile(const Product& p, Work work) {
  const int64_t part = part_of(p.depth);
  const int64_t group = group_width * p.depth <= group_floats ? group_width : C;
  for (int64_t first = 0; first < p.width; first += group) {
    const int64_t last = first + group < p.width ? first + group : p.width;
    const float* ahead = last < p.width ? p.weight + last * p.depth : p.next;
    for (int64_t k = 0; k < p.depth; k += part)
      for (int64_t column = first; column < last; column += C) {
        Tile t{column, k, k + part < p.depth ? part : p.depth - k, p.weight + column * p.depth + k, ahead, p.depth};
        ahead += C * t.part;
        float padded[C * longest_part];
        if (p.width - column < C) {
          std::memset(padded, 0, sizeof padded);
          for (int64_t c = 0; c < p.width - column; ++c)
            std::memcpy(padded + c * longest_part, t.weight + c * p.depth, t.part * sizeof(float));
          t.weight = padded, t.weight_row = longest_part;
        }
        work(t);
      }
  }
}

// Multiplies R rows at once.
template <int R>
static void single_pass(const Product& p, int64_t first) {
  constexpr int C = single_width(R);
  each_tile<C>(p, [&](const Tile& t) { tile_to_out<R, C, C>(p, t, first); });
}

// Multiplies rows in passes of pass_rows and pass_rows - 1. Each of the first passes prefetches F rows of the following
// weights: if the first pass prefetched all of them, it would wait for memory and the others would leave it idle.
template <int F>
static void many_passes(const Product& p, int64_t first, int64_t last, int64_t passes) {
  constexpr int R = pass_rows, C = pass_width;
  const int64_t whole = last - first - passes * (R - 1);
  each_tile<C>(p, [&](Tile t) {
    int64_t row = first;
    for (int64_t pass = 0; pass < passes; ++pass, t.ahead += F * t.part) {
      if (pass < whole) pass < C / F ? tile_to_out<R, C, F>(p, t, row) : tile_to_out<R, C, 0>(p, t, row);
      else pass < C / F ? tile_to_out<R - 1, C, F>(p, t, row) : tile_to_out<R - 1, C, 0>(p, t, row);
      row += pass < whole ? R : R - 1;
    }
  });
}

template <int R>
static void multiply_rows(const Product& p, int64_t first, int64_t last) {
  if (const int64_t passes = ceil_div(last - first, pass_rows); last - first > single_rows)
    return passes < pass_width ? many_passes<2>(p, first, last, passes) : many_passes<1>(p, first, last, passes);
  if (last - first == R) return single_pass<R>(p, first);
  if constexpr (R > 1) multiply_rows<R - 1>(p, first, last);
}
