// Decode steps from tokens to tokens: forward pass, sampling, and update of the sequences.

#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "decoder.h"
#include "sampling.h"

// State of the sequences, one row each, with the layout of SequenceTable.
struct Table {
  int64_t columns, num_stops;
  int64_t* token_ids;         // [rows, columns]
  float* logprobs;            // [rows, columns]
  int32_t* versions;          // [rows, columns]
  int64_t *num_tokens, *num_computed;
  const int64_t *num_prompt, *limit;
  const uint64_t* noise_key;
  const float* temperature;
  const int64_t* stop_ids;    // [rows, num_stops] -1: unused
};

enum Outcome : int8_t { GOES_ON, STOPPED, FULL, NOT_FINITE };

// Returns a number in (0, 1), equal to keyed_uniform in sampling.py.
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

// Limits on a run of decode steps, and the outcomes of its rows.
struct Advance {
  int64_t version, max_steps;
  double max_s;
  int64_t past_ends;           // 0: until a row ends; else until all rows have ended
  const int64_t* interrupted;  // set by another thread: the current step is the last
  int8_t* outcome;             // [count]
  int64_t* ended;              // [count] indices of the ended rows, in order of their end
};

// The rows that still run, with the inputs and outputs of a step.
struct Step {
  std::vector<int64_t> row, place, position, last, wanted, drawn;  // place: among the rows of the call
  std::vector<double> uniform, scratch;
  std::vector<float> temperature, logprob;

  Step(const Tokens& tokens, int64_t vocab)
      : row(tokens.row, tokens.row + tokens.count), place(tokens.count), position(tokens.count), last(tokens.count),
        wanted(tokens.count), drawn(tokens.count), uniform(tokens.count), scratch(vocab / 64 + 1),
        temperature(tokens.count), logprob(tokens.count) {
    std::iota(wanted.begin(), wanted.end(), 0);
    place = wanted;
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
  const Sampling sampling{tokens.count, d.drawn_vocab, d.vocab, b.logits, step.temperature.data(), step.uniform.data(),
                          step.drawn.data(), step.logprob.data(), step.scratch.data()};
  draw_rows(&sampling);
}

// Appends the sampled tokens, unless a logit was not finite, and keeps the rows that continue. Returns their number.
static int64_t keep_running(const Table& table, const Advance& call, int64_t count, Buffers& b, Step& step) {
  const auto drawn = step.logprob.begin();
  const bool finite = std::none_of(drawn, drawn + count, [](float x) { return std::isnan(x); });
  int64_t kept = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = step.row[i], place = step.place[i];
    const Outcome outcome =
        finite ? append(table, row, step.drawn[i], step.logprob[i], int32_t(call.version)) : NOT_FINITE;
    call.outcome[place] = outcome;
    if (outcome == GOES_ON) {
      step.row[kept] = row;
      step.place[kept++] = place;
    } else {
      call.ended[b.num_ended++] = place;
    }
  }
  b.num_drawn += finite ? count : 0;
  return kept;
}

// Decodes a token for each row of `tokens` per step, starting from its last token; see Advance. Ignores `position`.
static void decode_rows(const Decoder& d, Tokens tokens, const Table& table, const Advance& call, Buffers& b) {
  const double start = seconds();
  Step step(tokens, d.vocab);
  b.attention_s = b.forward_s = 0.0;
  b.num_steps = b.num_drawn = b.num_ended = 0;
  tokens.row = step.row.data();
  tokens.position = step.position.data();
  do {
    draw_next(d, tokens, table, b, step);
    tokens.count = keep_running(table, call, tokens.count, b, step);
    ++b.num_steps;
  } while (tokens.count && (call.past_ends || !b.num_ended) && b.num_steps < call.max_steps &&
           seconds() - start < call.max_s && !__atomic_load_n(call.interrupted, __ATOMIC_RELAXED));
}
