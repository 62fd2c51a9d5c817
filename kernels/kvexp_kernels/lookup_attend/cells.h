// Two-level lookup: the centres of all cells are scored, and the keys of the best cells where they lie.

#pragma once

#include "step.h"

namespace {

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
    c.keys = m.cell_keys + at, c.entries = m.cell_entries + at;
    c.sizes = m.cell_sizes + at, c.radii = m.cell_radii + at;
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

}  // namespace
