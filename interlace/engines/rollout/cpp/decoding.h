// Decode steps from tokens to tokens: the forward pass, the draw, and what follows for the sequences.

#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "decoder.h"
#include "sampling.h"

// The sequences' numbers, a row each, as SequenceTable keeps them.
struct Table {
  int64_t columns, num_stops;
  int64_t* token_ids;         // [rows, columns]
  float* logprobs;            // [rows, columns]
  int32_t* versions;          // [rows, columns]
  int64_t *num_tokens, *num_computed;
  const int64_t *num_prompt, *limit;
  const uint64_t* noise_key;
  const float* temperature;
  const int64_t* stop_ids;    // [rows, num_stops] -1: none
};

enum Outcome : int8_t { GOES_ON, STOPPED, FULL, NOT_FINITE };

// A number in (0, 1), as keyed_uniform in sampling.py makes it.
static inline double keyed_uniform(uint64_t key, int64_t index) {
  uint64_t x = (uint64_t(index) + 1) * 0x9E3779B97F4A7C15u + key;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  x ^= x >> 31;
  return (double(x >> 11) + 0.5) * 0x1p-53;
}

static inline bool is_stop(const Table& table, int64_t row, int64_t token) {
  const int64_t* stops = table.stop_ids + row * table.num_stops;
  for (int64_t k = 0; k < table.num_stops; ++k)
    if (stops[k] == token) return true;
  return false;
}

static Outcome append(const Table& table, int64_t row, int64_t token, float logprob, int32_t version) {
  const int64_t at = table.num_tokens[row]++, cell = row * table.columns + at;
  table.token_ids[cell] = token;
  table.logprobs[cell] = logprob;
  table.versions[cell] = version;
  ++table.num_computed[row];
  return is_stop(table, row, token) ? STOPPED : at + 1 >= table.limit[row] ? FULL : GOES_ON;
}

// What a step needs of its rows and makes for them; [count] each.
struct Step {
  std::vector<int64_t> position, last, wanted, drawn;
  std::vector<double> uniform, scratch;
  std::vector<float> temperature, logprob;

  Step(int64_t count, int64_t vocab)
      : position(count), last(count), wanted(count), drawn(count), uniform(count), scratch(vocab / 64 + 1),
        temperature(count), logprob(count) {
    std::iota(wanted.begin(), wanted.end(), 0);
  }
};

static void draw_next(const Decoder& d, const Tokens& tokens, const Table& table, Buffers& b, Step& step) {
  for (int64_t i = 0; i < tokens.count; ++i) {
    const int64_t row = tokens.row[i], known = table.num_tokens[row];
    step.position[i] = known - 1;
    step.last[i] = table.token_ids[row * table.columns + known - 1];
    step.uniform[i] = keyed_uniform(table.noise_key[row], known - table.num_prompt[row]);
    step.temperature[i] = table.temperature[row];
  }
  const double start = seconds();
  run_decoder(d, tokens, step.last.data(), step.wanted.data(), tokens.count, b);
  b.forward_s += seconds() - start;
  const Sampling sampling{tokens.count, d.vocab, d.vocab, b.logits, step.temperature.data(), step.uniform.data(),
                          step.drawn.data(), step.logprob.data(), step.scratch.data()};
  draw_rows(&sampling);
}

// A token for each row of `tokens`, whose last one runs, and so on: until a row ends, or after max_steps, or once they
// have taken max_s. `position` of `tokens` is not looked at.
static void decode_rows(const Decoder& d, Tokens tokens, const Table& table, int32_t version, int64_t max_steps,
                        double max_s, Buffers& b, int8_t* outcome) {
  const double start = seconds();
  Step step(tokens.count, d.vocab);
  b.attention_s = b.forward_s = 0.0;
  b.num_drawn = b.num_ended = 0;
  tokens.position = step.position.data();
  for (int64_t steps = 1; !b.num_ended; ++steps) {
    draw_next(d, tokens, table, b, step);
    if (std::any_of(step.logprob.begin(), step.logprob.end(), [](float x) { return std::isnan(x); })) {
      std::fill(outcome, outcome + tokens.count, NOT_FINITE);  // and nothing is appended
      b.num_ended = tokens.count;
      return;
    }
    for (int64_t i = 0; i < tokens.count; ++i) {
      outcome[i] = append(table, tokens.row[i], step.drawn[i], step.logprob[i], version);
      b.num_ended += outcome[i] != GOES_ON;
    }
    b.num_drawn += tokens.count;
    if (steps == max_steps || seconds() - start >= max_s) return;
  }
}
