// Products of many rows: a vector contains one k of eight rows, and each weight is multiplied by all of them at once.
//
// The bits equal the bits of tiles.h. Lane l of a sum there, over k = l, l + 8, ..., is a separate sum here; the eight
// sums are computed one after the other and added by the same tree. Nothing is added across the lanes of a vector,
// which would cost a tile up to a third of its time. Used only with vectors of eight lanes; sixteen lanes were not
// tried.

#pragma once

#include "tiles.h"

#ifdef __AVX512F__
constexpr int64_t panels_from = INT64_MAX;
static void multiply_panels(const Product&, int64_t, int64_t) {}
#else
constexpr int64_t panel_rows = 16;   // two vectors
constexpr int64_t panels_from = 12;  // rows: the cost of a panel does not depend on the number of its rows
constexpr int sums_width = 6;        // rows of the weight: their sums and two vectors of x fit the registers
constexpr int panel_width = 2 * sums_width;

// Transposes an 8 x 8 square: out[8 lanes, step] = eight k of eight rows.
static inline void turn_square(const float* const* rows, int64_t k, float* out, int64_t step) {
  v8 a[8], b[8];
#pragma GCC unroll 8
  for (int r = 0; r < 8; ++r) a[r] = load8(rows[r] + k);
#pragma GCC unroll 4
  for (int r = 0; r < 8; r += 2) {
    b[r] = SHUFFLE(a[r], a[r + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    b[r + 1] = SHUFFLE(a[r], a[r + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
#pragma GCC unroll 2
  for (int r = 0; r < 8; r += 4)
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      a[r + 2 * i] = SHUFFLE(b[r + i], b[r + i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      a[r + 2 * i + 1] = SHUFFLE(b[r + i], b[r + i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) {
    store8(out + r * step, SHUFFLE(a[r], a[r + 4], 0, 1, 2, 3, 8, 9, 10, 11));
    store8(out + (r + 4) * step, SHUFFLE(a[r], a[r + 4], 4, 5, 6, 7, 12, 13, 14, 15));
  }
}

// Transposes one part of k of up to 16 rows to [8 lanes, part / 8, 16 rows]; missing rows repeat the last one.
static void turn(const float* x, int64_t x_row, int64_t count, int64_t part, float* turned) {
  const int64_t eighth = ceil_div(part, 8), step = eighth * panel_rows;
  for (int64_t first = 0; first < panel_rows; first += 8) {
    const float* rows[8];
    for (int64_t r = 0; r < 8; ++r) rows[r] = x + (first + r < count ? first + r : count - 1) * x_row;
    for (int64_t k = 0; k + 8 <= part; k += 8) turn_square(rows, k, turned + k / 8 * panel_rows + first, step);
    for (int64_t k = part / 8 * 8; k < part; ++k)
      for (int64_t r = 0; r < 8; ++r) turned[k % 8 * step + k / 8 * panel_rows + first + r] = rows[r][k];
  }
}

// Computes one lane of 6 x 16 sums. With each k, it prefetches the address `asked` floats further.
static inline void add_lane(const float* x, const float* weight, int64_t weight_row, int64_t count, const float* ahead,
                            int64_t asked, v8* acc) {
#pragma GCC unroll 12
  for (int i = 0; i < 2 * sums_width; ++i) acc[i] = v8{};
  for (int64_t j = 0; j < count; ++j, ahead += asked) {
    __builtin_prefetch(ahead, 0, 2);
    v8 low = load8(x + j * panel_rows), high = load8(x + j * panel_rows + 8);
    IN_REGISTER(low);
    IN_REGISTER(high);
#pragma GCC unroll 6
    for (int c = 0; c < sums_width; ++c) {
      const v8 w = set8(weight[c * weight_row + j * 8]);
      acc[2 * c] += low * w;
      acc[2 * c + 1] += high * w;
    }
  }
}

// found[6, 16] = weight[6, part] @ turned^T. Meanwhile it prefetches asked * part floats from `ahead`.
static inline void panel_sums(const float* turned, const float* weight, int64_t weight_row, int64_t part,
                              const float* ahead, int64_t asked, v8* found) {
  constexpr int num_sums = 2 * sums_width;
  const int64_t eighth = ceil_div(part, 8);
  v8 held[3][num_sums];
#pragma GCC unroll 8
  for (int lane = 0; lane < 8; ++lane) {
    add_lane(turned + lane * eighth * panel_rows, weight + lane, weight_row, (part - lane + 7) / 8,
             ahead + lane * eighth * asked, asked, found);
    int level = 0;  // level of the tree ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))
    for (; lane >> level & 1; ++level)
#pragma GCC unroll 12
      for (int i = 0; i < num_sums; ++i) found[i] = held[level][i] + found[i];
    if (lane < 7)
#pragma GCC unroll 12
      for (int i = 0; i < num_sums; ++i) held[level][i] = found[i];
  }
}

// Multiplies half a tile of the weight, of which `left` rows exist, by a panel of which `count` rows exist.
static void panel_to_out(const Product& p, const Tile& t, int64_t half, const float* turned, int64_t row, int64_t count,
                         int64_t asked) {
  const int64_t column = t.column + half * sums_width, left = p.width - column;
  v8 found[2 * sums_width];
  panel_sums(turned, t.weight + half * sums_width * t.weight_row, t.weight_row, t.part, t.ahead, asked, found);
  const bool add = p.add || t.k;
  for (int64_t r = 0; r < count; ++r) {
    float* out = p.out + (row + r) * p.out_row + column;
#pragma GCC unroll 6
    for (int64_t c = 0; c < sums_width; ++c) {
      const float sum = found[2 * c + r / 8][r % 8];
      if (c < left) out[c] = add ? out[c] + sum : sum;
    }
  }
}

// Multiplies rows first to last: whole panels, then the rest as tiles, or as a panel if it has enough rows.
static void multiply_panels(const Product& p, int64_t first, int64_t last) {
  const int64_t left = (last - first) % panel_rows, end = last - (left < panels_from ? left : 0);
  const int64_t depth = ceil_div(p.depth, 8) * 8, part = part_of(p.depth);
  for (int64_t row = first; row < end; row += panel_rows)
    for (int64_t k = 0; k < p.depth; k += part)
      turn(p.x + row * p.x_row + k, p.x_row, end - row, k + part < p.depth ? part : p.depth - k,
           p.turned + (row - first) * depth + k * panel_rows);
  // Prefetches are spread evenly: if all were issued at once, the first panel would wait for memory.
  const int64_t halves = 2 * ceil_div(end - first, panel_rows), asked = ceil_div(panel_width, halves);
  each_tile<panel_width>(p, [&](Tile t) {
    int64_t unasked = panel_width;
    for (int64_t row = first; row < end; row += panel_rows)
      for (int64_t half = 0; half < 2; ++half) {
        const int64_t asking = asked < unasked ? asked : unasked;
        panel_to_out(p, t, half, p.turned + (row - first) * depth + t.k * panel_rows, row,
                     end - row < panel_rows ? end - row : panel_rows, asking);
        unasked -= asking, t.ahead += asking * t.part;
      }
    for (int64_t row = end; row < last; row += pass_rows)
      for (int64_t c = 0; c < panel_width; c += pass_width) {
        const Tile part{t.column + c, t.k, t.part, t.weight + c * t.weight_row, t.ahead, t.weight_row};
        if (last - row >= pass_rows) tile_to_out<pass_rows, pass_width, 0>(p, part, row);
        else if (last - row == 2) tile_to_out<2, pass_width, 0>(p, part, row);
        else tile_to_out<1, pass_width, 0>(p, part, row);
      }
  });
}
#endif
