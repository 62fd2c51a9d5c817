// One decoding step of a memory: lookup of each sample's entry, attention to local rows, and their merge.
//
// The same as reference.py, in place: keys are read where they lie, each once for the samples of a codebook
// (flat), or only those of the best cells (two-level). A step reads well under a megabyte per layer, so what
// it costs is these reads; everything else is kept in registers.

#include "cells.h"
#include "step.h"

namespace {

template <int D, int N>
void flat(const float* keys, int64_t held, const float* x, int64_t width, int64_t* index) {
  float best[N], score[N];
  std::fill(best, best + N, LOWEST);
  std::fill(index, index + N, 0);
  for (int64_t row = 0; row < held; row++) {
    ahead(keys + row * width + AHEAD / 4, width * 4);
    dots<D, N>(keys + row * width, x, width, score);
    for (int n = 0; n < N; n++)
      if (score[n] > best[n]) best[n] = score[n], index[n] = row;
  }
}

template <int D>
void all_flat(const Memory& m, Step& s) {
  const int64_t count = s.batch * m.samples;
  for (int64_t book = 0; book < m.books; book++) {
    const float* keys = m.keys + book * m.held * m.width;
    by_some(count, [&](int64_t n, auto some) {
      const int64_t at = book * count + n;
      flat<D, some.value>(keys, m.held, s.x + at * m.width, m.width, s.index + at);
    });
  }
  s.scored = m.books * count * m.held;
}

// Attention of the N query heads that read one KV head: their outputs and log-sum-exp.
template <int D, int N>
void group(const Memory& m, const Step& s, const float* query, const float* key, const float* value,
           float* weight, float* out, float* lse) {
  float score[N], top[N], total[N];
  const int64_t dv = m.value_width;
  std::fill(top, top + N, LOWEST);
  for (int64_t row = 0; row < s.rows; row++) {
    ahead(key + row * s.key_row + AHEAD / 4, s.query_width * 4);
    dots<D, N>(key + row * s.key_row, query, s.query_width, score);
    for (int n = 0; n < N; n++) {
      weight[n * s.rows + row] = score[n] *= s.scale;
      top[n] = std::max(top[n], score[n]);
    }
  }
  for (int n = 0; n < N; n++) {
    float sum = 0, *w = weight + n * s.rows;
    for (int64_t row = 0; row < s.rows; row++) sum += w[row] = std::exp(w[row] - top[n]);
    total[n] = sum;
    lse[n] = s.rows ? top[n] + std::log(sum) : LOWEST;
  }
  for (int64_t i = 0; i < dv; i += LANES) {
    if (i + LANES <= dv) {
      V part[N] = {};
      for (int64_t row = 0; row < s.rows; row++) {
        const V v = load(value + row * s.value_row + i);
        for (int n = 0; n < N; n++) part[n] += v * weight[n * s.rows + row];
      }
      for (int n = 0; n < N; n++) store(out + n * dv + i, s.rows ? part[n] / total[n] : V{});
      continue;
    }
    for (int n = 0; n < N; n++)
      for (int64_t j = i; j < dv; j++) {
        float sum = 0;
        for (int64_t row = 0; row < s.rows; row++)
          sum += value[row * s.value_row + j] * weight[n * s.rows + row];
        out[n * dv + j] = s.rows ? sum / total[n] : 0;
      }
  }
}

template <int D>
void attend(const Memory& m, const Step& s) {
  const int64_t members = s.query_heads / s.kv_heads;
  std::vector<float> weight(4 * s.rows);
  for (int64_t b = 0; b < s.batch; b++)
    for (int64_t kv = 0; kv < s.kv_heads; kv++) {
      const float *key = s.key + b * s.key_batch + kv * s.key_head,
                  *value = s.value + b * s.value_batch + kv * s.value_head;
      by_some(members, [&](int64_t member, auto some) {
        const int64_t at = b * s.query_heads + kv * members + member;
        group<D, some.value>(m, s, s.query + at * s.query_width, key, value, weight.data(),
                             s.out + at * m.value_width, s.lse + at);
      });
    }
}

// Merge the entries found into the local states, which lie in `out` and `lse`.
void merge(const Memory& m, Step& s) {
  const int64_t count = s.batch * m.samples, dv = m.value_width;
  for (int64_t book = 0; book < m.books; book++)
    for (int64_t n = 0; n < count; n++)
      for (int64_t h = 0; h < m.heads; h++) {
        const int64_t b = n / m.samples, sample = n % m.samples;
        const int64_t to = b * s.query_heads + m.head_of[(book * m.samples + sample) * m.heads + h];
        const int64_t from = (book * m.held + s.index[book * count + n]) * m.heads + h;
        float *out = s.out + to * dv, *lse = s.lse + to;
        const float far = m.log_z[from], gap = far - *lse;
        if (far == LOWEST) continue;
        const float share = std::isinf(*lse) ? 1.0f : 1.0f / (1.0f + std::exp(-gap));
        const float top = std::max(far, *lse);
        *lse = top + std::log1p(std::exp(-std::fabs(gap)));
        if (m.codes) {
          const float scale = m.a_scale[from];
          for (int64_t i = 0; i < dv; i++) out[i] += share * (scale * m.codes[from * dv + i] - out[i]);
        } else {
          for (int64_t i = 0; i < dv; i++) out[i] += share * (m.a[from * dv + i] - out[i]);
        }
      }
}

}  // namespace

extern "C" {

void lookup(const Memory* m, Step* s) {
  const bool cells = m->centres != nullptr;
  switch (m->width) {
    case 64: return cells ? all_in_cells<64>(*m, *s) : all_flat<64>(*m, *s);
    case 128: return cells ? all_in_cells<128>(*m, *s) : all_flat<128>(*m, *s);
    case 192: return cells ? all_in_cells<192>(*m, *s) : all_flat<192>(*m, *s);
    default: return cells ? all_in_cells<0>(*m, *s) : all_flat<0>(*m, *s);
  }
}

void lookup_attend(const Memory* m, Step* s) {
  std::vector<int64_t> index(m->books * s->batch * m->samples);
  s->index = index.data();
  lookup(m, s);
  switch (s->query_width) {
    case 64: attend<64>(*m, *s); break;
    case 128: attend<128>(*m, *s); break;
    default: attend<0>(*m, *s);
  }
  merge(*m, *s);
}
}
