// One decoding step of a memory: lookup of each sample's entry, attention to local rows, and their merge.
//
// The same as reference.py, in place: keys are read where they lie, each once for the samples of a codebook
// (flat), or only those of the best cells (two-level). A step reads well under a megabyte per layer, so what it
// costs is these reads; everything else is kept in registers.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <type_traits>
#include <vector>
#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

typedef float V __attribute__((vector_size(64), aligned(4), may_alias));
typedef float H __attribute__((vector_size(32)));
typedef float Q __attribute__((vector_size(16)));
typedef _Float16 Half;
constexpr int64_t LANES = 16;
constexpr int64_t AHEAD = 4096;  // bytes that are asked for before they are read
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

inline V load(const float* p) { return *reinterpret_cast<const V*>(p); }
inline V load(const Half* p) {
#if defined(__AVX512F__)
  return (V)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  const __m128i* parts = reinterpret_cast<const __m128i*>(p);
  const H low = (H)_mm256_cvtph_ps(_mm_loadu_si128(parts)), high = (H)_mm256_cvtph_ps(_mm_loadu_si128(parts + 1));
  return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#else
  V v;
  for (int i = 0; i < LANES; i++) v[i] = p[i];
  return v;
#endif
}
inline void store(float* p, V v) { *reinterpret_cast<V*>(p) = v; }

inline float sum(V v) {
  H h = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
        __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  Q q = __builtin_shufflevector(h, h, 0, 1, 2, 3) + __builtin_shufflevector(h, h, 4, 5, 6, 7);
  return (q[0] + q[2]) + (q[1] + q[3]);
}

// Ask for a row that is read soon: what the processor foresees ends with a page, and with a cell.
inline void ahead(const void* row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(row) + i);
}

// Dot products of a row with N queries that lie one behind the other; D: the width, 0 where it is not constant.
template <int D, int N, typename T>
inline void dots(const T* row, const float* query, int64_t width, float* out) {
  const int64_t d = D ? D : width;
  V part[N] = {};
  int64_t i = 0;
  for (; i + LANES <= d; i += LANES)
    {
    const V loaded = load(row + i);
    for (int n = 0; n < N; n++) part[n] += loaded * load(query + n * d + i);
  }
  for (int n = 0; n < N; n++) out[n] = sum(part[n]);
  if constexpr (D % LANES != 0 || D == 0)
    for (int n = 0; n < N; n++)
      for (int64_t j = i; j < d; j++) out[n] += float(row[j]) * query[n * d + j];
}

}  // namespace

extern "C" {

// Mirrored field by field in native.py.
struct Memory {
  const float* keys;           // [C, K, d] unit vectors, in order of entries
  const float* const* centres; // C times [M, d]; flat lookup where the tables of cells are null
  const int64_t* cells;        // [C]: M of each codebook, whose cells stand one behind the other in the tables
  const void* const* cell_keys;           // [n, d] float, or half where `half`
  const int64_t* const* cell_entries;     // [n], plus `base` times the number of the codebook
  const int64_t* cell_sizes;
  const float* cell_radii;                // the cosine of its farthest key from its centre
  const float *a, *log_z;  // [C, K, h, Dv], [C, K, h]
  const int8_t* codes;     // [C, K, h, Dv] in place of a, with a_scale [C, K, h]
  const float* a_scale;
  const int64_t* head_of;  // [C, n, h]: the query head of each head of a token's n samples
  int64_t books, held, probe, samples, heads, width, value_width, half, base;
  float longest;  // length of the longest key of a cell
};

struct Step {
  const float* x;                  // [C, B n, d]
  const float *query, *key, *value;  // [B, Hq, D]; [B, Hkv, S, D] and [B, Hkv, S, Dv] of the strides below
  int64_t batch, query_heads, kv_heads, rows, query_width;
  int64_t key_batch, key_head, key_row, value_batch, value_head, value_row;
  float scale;
  float *out, *lse;  // [B, Hq, Dv], [B, Hq]
  int64_t* index;    // [C, B n]: the entries found
  int64_t scored;    // out: keys scored, first level included
};

}

namespace {

// Call `work(first, some)` for all of `count` queries, four, three or one of them at a time.
template <typename Work>
inline void by_some(int64_t count, Work work) {
  for (int64_t n = 0; n < count;) {
    if (count - n >= 4) work(n, std::integral_constant<int, 4>()), n += 4;
    else if (count - n == 3) work(n, std::integral_constant<int, 3>()), n += 3;
    else work(n, std::integral_constant<int, 1>()), n += 1;
  }
}

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

// The cells of one codebook, and room for the scores of its samples.
struct Cells {
  const float* centres;
  const void* const* keys;
  const int64_t* const* entries;
  const int64_t* sizes;
  const float* radii;
  int64_t count;
  std::vector<float> near, best, scores;  // [n, M], the best of them, and those of keys
  std::vector<int64_t> chosen, read;
};

// Products of N samples with all centres.
template <int D, int N>
void score_cells(const Cells& c, const float* x, int64_t width, float* near) {
  float score[N];
  for (int64_t cell = 0; cell < c.count; cell++) {
    dots<D, N>(c.centres + cell * width, x, width, score);
    for (int n = 0; n < N; n++) near[n * c.count + cell] = score[n];
  }
}

// The `probe` cells of a sample whose centres are nearest, and among them the nearest first.
void choose(const Memory& m, Cells& c, const float* near) {
  const size_t probe = std::min(m.probe, c.count);
  const std::greater<float> lower;
  c.best.assign(near, near + probe);
  std::make_heap(c.best.begin(), c.best.end(), lower);
  for (int64_t cell = probe; cell < c.count; cell++) {
    if (near[cell] <= c.best.front()) continue;
    std::pop_heap(c.best.begin(), c.best.end(), lower);
    c.best.back() = near[cell];
    std::push_heap(c.best.begin(), c.best.end(), lower);
  }
  const float least = c.best.front();
  int64_t equal = std::count(c.best.begin(), c.best.end(), least);
  c.chosen.clear();
  for (int64_t cell = 0; cell < c.count; cell++)
    if (near[cell] > least || (near[cell] == least && equal-- > 0)) c.chosen.push_back(cell);
  if (c.chosen.empty()) c.chosen.push_back(0);  // numbers that are none
  const auto nearer = [&](int64_t p, int64_t q) { return near[p] > near[q]; };
  std::swap(c.chosen[0], *std::min_element(c.chosen.begin(), c.chosen.end(), nearer));
}

// No key of a cell has a larger cosine: the cell's angle from the query less its radius.
inline float bound(float near, float radius) {
  if (near >= radius) return 1;
  const float squares = (1 - near * near) * (1 - radius * radius);
  return near * radius + std::sqrt(std::max(squares, 0.0f));
}

// The best entry of the chosen cells, of which those are left out that cannot hold it. Half precision moves a
// product by no more than `doubt`; what it leaves open is decided by the keys themselves.
template <int D, typename T>
int64_t best_of(const Memory& m, Cells& c, int64_t book, const float* x, const float* near, int64_t& scored) {
  float length;
  dots<D, 1>(x, x, m.width, &length);
  length = std::sqrt(length);
  const float doubt = m.half ? length * m.longest * 0.0011f : 0;  // twice 2^-11, and what sums are rounded by
  float best = LOWEST;
  size_t next = 0;  // the cell, and its row, that is asked for
  int64_t line = 0;
  const auto out = [&](int64_t cell) {  // 0.001: what all of this is rounded by
    return length * (m.longest * bound(near[cell] / length, c.radii[cell]) + 0.001f) < best - doubt;
  };
  const auto ask = [&] {
    while (line == 0 && next < c.chosen.size() && out(c.chosen[next])) next++;
    if (next == c.chosen.size()) return;
    const int64_t cell = c.chosen[next];
    ahead(static_cast<const T*>(c.keys[cell]) + line * m.width, m.width * sizeof(T));
    if (++line == c.sizes[cell]) line = 0, next++;
  };
  c.scores.clear(), c.read.clear();
  for (int64_t bytes = 0; bytes < AHEAD; bytes += m.width * sizeof(T)) ask();
  for (const int64_t cell : c.chosen) {
    if (out(cell)) continue;
    c.read.push_back(cell);
    const T* rows = static_cast<const T*>(c.keys[cell]);
    for (int64_t row = 0; row < c.sizes[cell]; row++) {
      float score;
      ask();
      dots<D, 1>(rows + row * m.width, x, m.width, &score);
      c.scores.push_back(score);
      best = std::max(best, score);
    }
  }
  scored += c.count + c.scores.size();
  const float* keys = m.keys + book * m.held * m.width;
  float top = LOWEST;
  int64_t found = m.held, at = 0;
  for (const int64_t cell : c.read)
    for (int64_t row = 0; row < c.sizes[cell]; row++) {
      float score = c.scores[at++];
      if (score < best - doubt) continue;
      const int64_t entry = c.entries[cell][row] - m.base * book;
      if (m.half) dots<D, 1>(keys + entry * m.width, x, m.width, &score);
      if (score > top || (score == top && entry < found)) top = score, found = entry;
    }
  return found < m.held ? found : 0;
}

template <int D>
void all_in_cells(const Memory& m, Step& s) {
  const int64_t count = s.batch * m.samples;
  Cells c{};
  s.scored = 0;
  for (int64_t book = 0, at = 0; book < m.books; at += m.cells[book++]) {
    c.centres = m.centres[book], c.count = m.cells[book];
    c.keys = m.cell_keys + at, c.entries = m.cell_entries + at, c.sizes = m.cell_sizes + at, c.radii = m.cell_radii + at;
    c.near.resize(count * c.count);
    const float* x = s.x + book * count * m.width;
    by_some(count, [&](int64_t n, auto some) {
      score_cells<D, some.value>(c, x + n * m.width, m.width, &c.near[n * c.count]);
    });
    for (int64_t n = 0; n < count; n++) {
      const float* near = &c.near[n * c.count];
      choose(m, c, near);
      const auto best = m.half ? best_of<D, Half> : best_of<D, float>;
      s.index[book * count + n] = best(m, c, book, x + n * m.width, near, s.scored);
    }
  }
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
