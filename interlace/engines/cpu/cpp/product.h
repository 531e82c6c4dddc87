// Matrix products x @ weight^T on one CPU thread, float32, on the weights as the model stores them.
//
// A sum over k is taken in one order for any number of rows, so that a row's bits do not depend on how many share the
// call. Weights are never packed. They are read once for each block of rows, and asked for in the order of memory while
// earlier ones are worked on, across the border of one product and the next: few rows cost what reading them costs.

#pragma once

#include "panels.h"

static void multiply(const Product& p) {
  const int64_t fitting = block_floats / p.depth < 24 ? 24 : block_floats / p.depth;
  // Blocks of about one size: a last one of a few rows would read the whole weight for them.
  for (int64_t first = 0, blocks = ceil_div(p.count, fitting); blocks; --blocks) {
    const int64_t last = first + ceil_div(p.count - first, blocks);
    if (last - first >= panels_from) multiply_panels(p, first, last);
    else multiply_rows<single_rows>(p, first, last);
    first = last;
  }
}
