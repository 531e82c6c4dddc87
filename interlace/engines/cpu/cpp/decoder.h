// Forward pass of a decoder of the Llama shape over a step's tokens, for one CPU thread.

#pragma once

#include <ctime>

#include "attention.h"
#include "int8.h"
#include "product.h"

// Weights of one layer, as the model stores them: [outputs, inputs], row-major.
struct Layer {
  const float *input_norm, *query, *key, *value, *out, *post_norm, *gate, *up, *down;
  const float *query_bias, *key_bias, *value_bias;  // or null
  const float *query_norm, *key_norm;               // [head_dim] RMS norm of each head before the rotation, or null
  const float* sinks;                               // [heads] or null
  float *key_pool, *value_pool;
  int64_t window;
  float scale, softcap, epsilon, norm_epsilon;
  const Quantized* eight;                           // query, key, value, out, gate, up, down as int8; or null
};

struct Decoder {
  int64_t num_layers, hidden, heads, kv_heads, head_dim, inner, vocab, rotary_dim;
  const Layer* layers;
  const float *embedding, *norm, *head;  // [vocab, hidden], [hidden], [vocab, hidden]
  const float *cos, *sin;                // [positions, rotary_dim]
  float epsilon;
  const Quantized* head8;                // the head as int8, or null
  int64_t drawn_vocab;                   // tokens from 0 that are sampled, at most vocab
};

// Working memory of one thread; `rows` is at least the number of tokens.
struct Buffers {
  float *residual, *normed;  // [rows, hidden]
  float* qkv;                // [rows, (heads + 2 kv_heads) * head_dim]
  float* attended;           // [rows, heads * head_dim]
  float* gate_up;            // [rows, 2 inner]
  float* logits;             // [wanted, vocab]
  float* turned;             // see Product: for the deepest one
  float* scratch;            // see Attention
  int64_t scratch_row;
  float* inverse;
  Codes codes;               // see multiply8: for the deepest one
  // Results of the last call: seconds, steps, sampled tokens, ended rows.
  double attention_s, forward_s;
  int64_t num_steps, num_drawn, num_ended;
};

static inline double seconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

static inline void add_bias(float* x, const float* bias, int64_t dim) {
  if (bias)
    for (int64_t k = 0; k < dim; ++k) x[k] += bias[k];
}

// Applies bias, head norms and rotation to each token's queries and keys, and the bias to its values.
static void rotate(const Decoder& d, const Layer& layer, const Tokens& t, float* qkv) {
  const int64_t width = (d.heads + 2 * d.kv_heads) * d.head_dim, half = d.rotary_dim / 2;
  for (int64_t i = 0; i < t.count; ++i) {
    float *row = qkv + i * width, *keys = row + d.heads * d.head_dim;
    add_bias(row, layer.query_bias, d.heads * d.head_dim);
    add_bias(keys, layer.key_bias, d.kv_heads * d.head_dim);
    add_bias(keys + d.kv_heads * d.head_dim, layer.value_bias, d.kv_heads * d.head_dim);
    const float* cos = d.cos + t.position[i] * d.rotary_dim;
    const float* sin = d.sin + t.position[i] * d.rotary_dim;
    for (int64_t h = 0; h < d.heads + d.kv_heads; ++h) {
      float* x = row + h * d.head_dim;
      const float* norm = h < d.heads ? layer.query_norm : layer.key_norm;
      if (norm) rms_norm(x, norm, x, d.head_dim, layer.norm_epsilon);
      for (int64_t k = 0; k < half; ++k) {
        const float low = x[k], high = x[k + half];
        x[k] = low * cos[k] - high * sin[k];
        x[k + half] = high * cos[k + half] + low * sin[k + half];
      }
    }
  }
}

// gate = silu(gate) * up, in the first half of each row.
static void gate_rows(float* gate_up, int64_t dim, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    float *gate = gate_up + i * 2 * dim, *up = gate + dim;
    int64_t k = 0;
    for (; k + 8 <= dim; k += 8) {
      const v8 x = load8(gate + k), zero = set8(0.0f);
      const v8 e = exp8(x > zero ? -x : x);  // exp(-|x|) never overflows
      const v8 top = x > zero ? set8(1.0f) : e;
      store8(gate + k, x * top / (set8(1.0f) + e) * load8(up + k));
    }
    for (; k < dim; ++k) gate[k] = gate[k] / (1.0f + std::exp(-gate[k])) * up[k];
  }
}

static void attend_layer(const Decoder& d, const Layer& layer, const Tokens& t, Buffers& b) {
  const int64_t width = (d.heads + 2 * d.kv_heads) * d.head_dim;
  float *key = b.qkv + d.heads * d.head_dim, *value = key + d.kv_heads * d.head_dim;
  const Attention a{b.qkv, key, value, width, d.head_dim, width, d.head_dim, width, d.head_dim, b.attended,
                    layer.key_pool, layer.value_pool, d.heads, d.kv_heads, d.head_dim, d.head_dim, layer.scale,
                    layer.softcap, layer.window, layer.sinks, b.scratch, b.scratch_row, b.inverse};
  write_and_attend(t, a);
}

// eight: the weight as int8, or null.
static void multiply_by(const Product& p, const Quantized* eight, Buffers& b) {
  if (eight) multiply8(p, *eight, b.codes);
  else multiply(p);
}

// next: the weight that is read after the layer's weights.
static void run_layer(const Decoder& d, const Layer& layer, const float* next, const Tokens& t, Buffers& b) {
  const int64_t count = t.count, query = d.heads * d.head_dim, key = d.kv_heads * d.head_dim, width = query + 2 * key;
  auto normalise = [&](const float* weight) {
    for (int64_t i = 0; i < count; ++i)
      rms_norm(b.residual + i * d.hidden, weight, b.normed + i * d.hidden, d.hidden, layer.epsilon);
  };
  auto eight = [&](int number) { return layer.eight ? layer.eight + number : nullptr; };
  auto project = [&](const float* weight, int number, int64_t rows, float* out, int64_t out_row, const float* after) {
    multiply_by({b.normed, d.hidden, count, d.hidden, weight, rows, out, out_row, false, after, b.turned},
                eight(number), b);
  };
  normalise(layer.input_norm);
  project(layer.query, 0, query, b.qkv, width, layer.key);
  project(layer.key, 1, key, b.qkv + query, width, layer.value);
  project(layer.value, 2, key, b.qkv + query + key, width, layer.out);
  const double start = seconds();
  rotate(d, layer, t, b.qkv);
  attend_layer(d, layer, t, b);
  b.attention_s += seconds() - start;
  multiply_by({b.attended, query, count, query, layer.out, d.hidden, b.residual, d.hidden, true, layer.gate, b.turned},
              eight(3), b);
  normalise(layer.post_norm);
  project(layer.gate, 4, d.inner, b.gate_up, 2 * d.inner, layer.up);
  project(layer.up, 5, d.inner, b.gate_up + d.inner, 2 * d.inner, layer.down);
  gate_rows(b.gate_up, d.inner, count);
  multiply_by({b.gate_up, 2 * d.inner, count, d.inner, layer.down, d.hidden, b.residual, d.hidden, true, next, b.turned},
              eight(6), b);
}

// Computes logits [num_wanted, vocab] of the tokens whose indices are `wanted`.
static void run_decoder(const Decoder& d, const Tokens& t, const int64_t* token_ids, const int64_t* wanted,
                        int64_t num_wanted, Buffers& b) {
  for (int64_t i = 0; i < t.count; ++i)
    std::memcpy(b.residual + i * d.hidden, d.embedding + token_ids[i] * d.hidden, sizeof(float) * d.hidden);
  for (int64_t layer = 0; layer < d.num_layers; ++layer)
    run_layer(d, d.layers[layer], layer + 1 < d.num_layers ? d.layers[layer + 1].query : d.head, t, b);
  for (int64_t i = 0; i < num_wanted; ++i)
    rms_norm(b.residual + wanted[i] * d.hidden, d.norm, b.normed + i * d.hidden, d.hidden, d.epsilon);
  multiply_by({b.normed, d.hidden, num_wanted, d.hidden, d.head, d.vocab, b.logits, d.vocab, false, d.layers->query,
               b.turned},
              d.head8, b);
}
