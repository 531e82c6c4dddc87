// Functions that Python calls through ctypes: a plain C interface without state.

#include "decoding.h"

extern "C" {

void attention(const Tokens* tokens, const Attention* arguments) { write_and_attend(*tokens, *arguments); }

void decode(const Decoder* decoder, const Tokens* tokens, const int64_t* token_ids, const int64_t* wanted,
            int64_t num_wanted, Buffers* buffers) {
  buffers->attention_s = 0.0;
  run_decoder(*decoder, *tokens, token_ids, wanted, num_wanted, *buffers);
}

void advance(const Decoder* decoder, const Tokens* tokens, const Table* table, const Advance* call, Buffers* buffers) {
  decode_rows(*decoder, *tokens, *table, *call, *buffers);
}

void sample(const Sampling* arguments) { draw_rows(arguments); }
}
