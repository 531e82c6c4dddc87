// What Python calls, through ctypes: a plain C interface without state.

#include "decoder.h"
#include "sampling.h"

extern "C" {

void attention(const Tokens* tokens, const Attention* arguments) { write_and_attend(*tokens, *arguments); }

void decode(const Decoder* decoder, const Tokens* tokens, const int64_t* token_ids, const int64_t* wanted,
            int64_t num_wanted, Buffers* buffers) {
  run_decoder(*decoder, *tokens, token_ids, wanted, num_wanted, *buffers);
}

void sample(const Sampling* arguments) { draw_rows(arguments); }
}
