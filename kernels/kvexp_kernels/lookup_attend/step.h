// What a decoding step is given, and products of rows that lie in memory.

#pragma once

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
  const H low = (H)_mm256_cvtph_ps(_mm_loadu_si128(parts));
  const H high = (H)_mm256_cvtph_ps(_mm_loadu_si128(parts + 1));
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

// Dot products of a row with N queries that follow each other; D: the width, 0 where it is not constant.
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
  const int64_t* cells;        // [C]: M of each codebook; its cells follow each other in the tables
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

}  // namespace
