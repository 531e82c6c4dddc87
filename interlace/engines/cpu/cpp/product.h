// Matrix products x @ weight^T on one CPU thread, float32, on the weights as the model stores them.
//
// The order of a sum over k is the same for any number of rows, so a row's bits do not depend on the number of rows in
// the call. Weights are never packed. They are read once per block of rows and prefetched in memory order during the
// work on earlier ones, across the boundary between two products: the cost of few rows is the cost of reading the
// weights.

#pragma once

#include "panels.h"

static void multiply(const Product& p) {
  const int64_t fitting = block_floats / p.depth < 24 ? 24 : block_floats / p.depth;
  // Blocks of about equal size: a short last block would read the whole weight for a few rows.
  for (int64_t first = 0, blocks = ceil_div(p.count, fitting); blocks; --blocks) {
    const int64_t last = first + ceil_div(p.count - first, blocks);
    if (last - first >= panels_from) multiply_panels(p, first, last);
    else multiply_rows<single_rows>(p, first, last);
    first = last;
  }
}
