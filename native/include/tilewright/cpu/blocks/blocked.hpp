// The cache-blocked GEMM of one batch item: packs, shares, claims and calls the microkernel. See
// cpu/blocks/blocking.hpp for the plan it follows.
#pragma once
#include "tilewright/cpu/blocks/blocking.hpp"
#include "tilewright/cpu/blocks/microkernel.hpp"
#include "tilewright/cpu/team.hpp"

TW_NAMESPACE_BEGIN

// One matrix product: element (i, j) of `out` is the sum over k0 <= k < k1 of A(i, k) B(k, j).
template <class Output>
struct ProductOf {
  const char* a;
  const char* b;
  int64_t lda, ldb;
  int64_t m, n, k;  // of the whole operands (k: what a pre-shuffled B was packed with)
  int64_t k0, k1;
  Output out;
};
using Product = ProductOf<Output>;

struct Range {
  int64_t begin, end;
  TW_INLINE int64_t size() const { return end - begin; }
};

// Part `index` of `parts` of a range, cut at multiples of `unit`.
TW_INLINE Range part_of(Range whole, int64_t parts, int64_t index, int64_t unit) {
  const int64_t size = round_up(ceil_div(whole.size(), parts), unit);
  const int64_t begin = min_of(whole.begin + index * size, whole.end);
  return {begin, min_of(begin + size, whole.end)};
}

// Scratch memory of one member.
struct Scratch {
  char* shared[2];
  int parity;  // which of the two S is packed next: the members agree, across products
  char* slab;
  int32_t* sums;
  char* partial_tiles;
};

// Where the operands come from: matrices in memory. (Convolutions: see cpu/conv/gather.hpp.)
template <class Config>
struct MatrixSources {
  using Product = tw::Product;
  using RowMap = LinearRows;
  using Plan = Blocking<Config>;
  using Dot = typename Plan::Dot;
  // A is read by the microkernel wherever it lies, and never packed.
  static constexpr bool a_in_place = false, blocked_summation = false;
  static constexpr int together_a = panels_together<typename Config::A, Plan::mr, !Config::a_col>;
  static constexpr int together_b = panels_together<typename Config::B, Plan::nr, Config::b_col>;

  // Packs k values from k0 + k_begin on of the next few panels, `panel` groups apart; `first` is the first row (A) or
  // column (B), `end` one beyond the last.
  template <bool kIsB>
  static TW_INLINE void pack(const Product& product, int64_t first, int64_t end, int64_t k_begin, int64_t k_count,
                             uint32_t* to, int64_t panel, int32_t* sums) {
    if constexpr (kIsB) {
      using View = Rows<typename Config::B, Config::b_col>;
      const View view = {View{product.b, product.ldb}.at(first, product.k0 + k_begin), product.ldb};
      pack_panels<typename Config::B, Dot, Plan::nr, Config::b_col, false, together_b>(view, end - first, k_count, to,
                                                                                       panel, sums);
    } else {
      using View = Rows<typename Config::A, !Config::a_col>;
      const View view = {View{product.a, product.lda}.at(first, product.k0 + k_begin), product.lda};
      pack_panels<typename Config::A, Dot, Plan::mr, !Config::a_col, Dot::offset_a, together_a>(
          view, end - first, k_count, to, panel, sums);
    }
  }
};

template <class Config, class Sources = MatrixSources<Config>>
struct BlockedGemm {
  using Product = typename Sources::Product;
  using Output = typename Sources::RowMap::Output;
  using Plan = Blocking<Config, typename Sources::RowMap>;
  using Dot = typename Plan::Dot;
  using Out = typename Plan::Out;
  using Accumulator = typename Dot::scalar;
  static constexpr int mr = Plan::mr, nr = Plan::nr, depth = Dot::depth;
  static constexpr bool shares_b = Plan::shares_b;

  const Product& product;
  Crew& crew;
  Scratch& scratch;

  // A tile of S and a slab of P, as the loops read them.
  struct Packed {
    const char* groups;   // of the first panel, at the first k of this product
    int64_t panel;        // groups from one panel to the next
    const int32_t* sums;  // NULL: no correction
    TW_INLINE const uint32_t* at(int64_t index, int r, int64_t group) const {
      return (const uint32_t*)groups + index * panel + group * r;
    }
  };

  TW_INLINE int64_t k_size() const { return product.k1 - product.k0; }
  TW_INLINE int64_t k_groups() const { return ceil_div(k_size(), depth); }

  // Pre-shuffled B: panels lie ready, whole k together.
  TW_INLINE Packed packed_b(int64_t first_column) const {
    const int64_t groups = ceil_div(product.k, depth);
    const char* panels = product.b + ((first_column / nr * groups * nr) + product.k0 / depth * nr) * 4;
    // The sums cover the whole k: one slice alone may apply them.
    const int32_t* sums = (const int32_t*)(product.b + ceil_div(product.n, nr) * groups * nr * 4) + first_column;
    return {panels, groups * nr, Dot::offset_a && product.k0 == 0 ? sums : nullptr};
  }

  // Packs the tile of S together: one piece is a few panels, or a stretch of them.
  TW_INLINE Packed share(Range s) {
    if constexpr (Plan::shared_is_packed) return packed_b(s.begin);
    constexpr int r = Plan::shared_r, few = shares_b ? Sources::together_b : Sources::together_a;
    constexpr bool with_sums = shares_b && Dot::offset_a;
    const int64_t stretch = with_sums ? max_of(k_size(), 1) : Plan::block_groups * depth;
    const int64_t stretches = max_of(ceil_div(k_size(), stretch), 1), panels = ceil_div(s.size(), r),
                  pieces = ceil_div(panels, few) * stretches, panel_groups = r * k_groups();
    char* const to = scratch.shared[scratch.parity];
    int32_t* const sums = (int32_t*)(to + panels * panel_groups * 4);
    if (crew.size > 1) scratch.parity ^= 1;
    for (int64_t piece; (piece = crew.claim(pieces)) >= 0;) {
      const int64_t panel = piece / stretches * few, k_begin = piece % stretches * stretch;
      if constexpr (with_sums) clear_sums(sums + panel * r, min_of(panels - panel, few) * r);
      Sources::template pack<shares_b>(product, s.begin + panel * r, s.end, k_begin,
                                       min_of(stretch, k_size() - k_begin),
                                       (uint32_t*)to + panel * panel_groups + k_begin / depth * r, panel_groups,
                                       sums + panel * r);
    }
    crew.end_stage(pieces);
    crew.barrier();
    return {to, panel_groups, with_sums ? sums : nullptr};
  }

  // Makes k block [group, group + groups) of a slab of P readable.
  TW_INLINE Packed take_slab(Range p, int64_t group, int64_t groups) const {
    constexpr int r = Plan::slab_r;
    if constexpr (Plan::slab_is_packed) {
      Packed packed = packed_b(p.begin);
      packed.groups += group * r * 4;
      return packed;
    }
    if constexpr (Sources::a_in_place) {
      static_assert(shares_b, "the operand that is not packed is A");
      if (group == 0) Sources::locate(product, p.begin, p.end, scratch.slab);
      return {scratch.slab, Sources::located_panel / 4, nullptr};
    }
    const int64_t k_begin = group * depth, k_count = min_of(groups * depth, k_size() - k_begin);
    if (!shares_b && Dot::offset_a && group == 0) clear_sums(scratch.sums, round_up(p.size(), r));
    for (int64_t panel = 0; panel * r < p.size(); panel += shares_b ? Sources::together_a : Sources::together_b)
      Sources::template pack<!shares_b>(product, p.begin + panel * r, p.end, k_begin, k_count,
                                        (uint32_t*)scratch.slab + panel * groups * r, groups * r,
                                        scratch.sums + panel * r);
    return {scratch.slab, groups * r, !shares_b && Dot::offset_a ? scratch.sums : nullptr};
  }

  // All tiles of S times one slab of P, one k block after the other.
  void multiply_slab(Range s, const Packed& shared, Range p) const {
    for (int64_t group = 0; group == 0 || group < k_groups(); group += Plan::block_groups) {
      const int64_t groups = min_of(k_groups() - group, Plan::block_groups);
      const Packed slab = take_slab(p, group, groups);
      const int64_t s_panels = ceil_div(s.size(), Plan::shared_r), p_panels = ceil_div(p.size(), Plan::slab_r);
      // Panels of S come from afar and go through all of P, which is near. With few rows and a pre-shuffled B it is the
      // other way round.
      const bool p_outside = Plan::slab_is_packed && s_panels * Plan::shared_r * groups * 4 <= kNearBytes;
      const int64_t outside = p_outside ? p_panels : s_panels, inside = p_outside ? s_panels : p_panels;
      for (int64_t o = 0; o < outside; o++)
        for (int64_t i = 0; i < inside; i++) {
          const int64_t si = p_outside ? i : o, pi = p_outside ? o : i;
          const uint32_t* const s_panel = shared.at(si, Plan::shared_r, group);
          const uint32_t* const p_panel = slab.at(pi, Plan::slab_r, 0);
          const int64_t s0 = s.begin + si * Plan::shared_r, p0 = p.begin + pi * Plan::slab_r;
          const int32_t* const sums = shares_b ? shared.sums : slab.sums;
          const int64_t column = (shares_b ? si : pi) * nr;
          Tile tile;
          tile.i0 = shares_b ? p0 : s0, tile.j0 = shares_b ? s0 : p0;
          tile.rows = min_of((shares_b ? p.end : s.end) - tile.i0, mr),
          tile.cols = min_of((shares_b ? s.end : p.end) - tile.j0, nr);
          tile.unfinished = (Accumulator*)scratch.partial_tiles + (si * p_panels + pi) * mr * nr;
          // Sums of the whole k that are known before the first block are what accumulation begins with, which costs
          // nothing.
          const bool known = shares_b || Plan::slab_is_packed || groups >= k_groups();
          tile.initial = known && sums ? sums + column : nullptr,
          tile.correction = !known && sums ? sums + column : nullptr;
          // The next outer panel is fetched meanwhile: each tile of this row of tiles asks for its share of it.
          tile.ahead_step = ceil_div((p_outside ? Plan::slab_r : Plan::shared_r) * 4, inside);
          const uint32_t* const next =
              p_outside ? slab.at(pi + 1, Plan::slab_r, 0) : shared.at(si + 1, Plan::shared_r, group);
          tile.ahead = (const char*)next + i * groups * tile.ahead_step;
          tile.first = group == 0, tile.last = group + groups >= k_groups();
          multiply_tile(tile, group, groups, shares_b ? p_panel : s_panel, shares_b ? s_panel : p_panel);
        }
    }
  }

  struct Tile {
    int64_t i0, j0, rows, cols;
    Accumulator* unfinished;    // this tile's accumulators between k blocks, if they may not live in C
    const int32_t* initial;     // NULL: zeros
    const int32_t* correction;  // NULL, or what to add at the end
    const char* ahead;
    int64_t ahead_step;
    bool first, last;
  };

  TW_INLINE void multiply_tile(const Tile& tile, int64_t group, int64_t groups, const uint32_t* a,
                               const uint32_t* b) const {
    alignas(64) static const Accumulator zeros[nr] = {};
    alignas(64) Accumulator buffer[mr * nr];
    const Output& out = product.out;
    const bool full = (!Config::pad_m || tile.rows == mr) && (!Config::pad_n || tile.cols == nr);
    const Accumulator* start = zeros;
    if constexpr (Dot::offset_a) start = tile.initial ? tile.initial : zeros;
    Accumulator* to = buffer;
    int64_t start_ld = 0, to_ld = nr;
    if constexpr (Out::accumulates_in_c) {
      Accumulator* const c = (Accumulator*)out.data + tile.i0 * out.ld + tile.j0;
      const bool finish = tile.last && (tile.correction || !Out::verbatim(out));
      if (full && !finish) to = c, to_ld = out.ld;
      if (!tile.first && full) start = c, start_ld = out.ld;
      if (!tile.first && !full) start = buffer, start_ld = nr, fetch_edge(c, tile, buffer);
      sum_tile(tile, group, groups, a, b, start, start_ld, to, to_ld);
      if (to == c) return;
      if (!tile.last) return store_edge(buffer, tile, c);
    } else {
      if (!tile.first) start = tile.unfinished, start_ld = nr;
      if (!tile.last) to = tile.unfinished;
      sum_tile(tile, group, groups, a, b, start, start_ld, to, to_ld);
      if (!tile.last) return;
    }
    Out::store(out, tile.i0, tile.j0, tile.rows, tile.cols, buffer, nr, tile.correction);
  }

  // start + A x B: in one chain, or, where the product's sums are to be short (cpu/blocks/blocked_summation.hpp), in
  // several.
  TW_INLINE void sum_tile(const Tile& tile, int64_t group, int64_t groups, const uint32_t* a, const uint32_t* b,
                          const Accumulator* start, int64_t start_ld, Accumulator* to, int64_t to_ld) const {
    (void)group;  // only operands that lie in place ask for it
    if constexpr (Sources::a_in_place)
      return Sources::multiply(product, group, groups, a, b, start, start_ld, to, to_ld, tile.ahead, tile.ahead_step);
    int64_t done = 0;
    do {
      int64_t now = groups;
      if constexpr (Sources::blocked_summation) now = min_of(groups - done, product.chain);
      microkernel<Dot, mr, nr>(now, a + done * mr, b + done * nr, start, start_ld, to, to_ld, tile.ahead,
                               tile.ahead_step);
      start = to, start_ld = to_ld, done += now;
    } while (Sources::blocked_summation && done < groups);
  }

  TW_NOINLINE void fetch_edge(const Accumulator* c, const Tile& tile, Accumulator* buffer) const {
    for (int64_t i = 0; i < mr; i++)
      for (int64_t j = 0; j < nr; j++)
        buffer[i * nr + j] = i < tile.rows && j < tile.cols ? c[i * product.out.ld + j] : 0;
  }
  TW_NOINLINE void store_edge(const Accumulator* buffer, const Tile& tile, Accumulator* c) const {
    for (int64_t i = 0; i < tile.rows; i++)
      for (int64_t j = 0; j < tile.cols; j++) c[i * product.out.ld + j] = buffer[i * nr + j];
  }

  // Computes one rectangle of the result with the whole crew.
  void run(Range rows, Range columns) {
    const Range whole_s = shares_b ? columns : rows, whole_p = shares_b ? rows : columns;
    if (whole_s.size() <= 0 || whole_p.size() <= 0) return;
    const int64_t length = Plan::shared_length(whole_s.size(), k_groups());
    // A few slabs for each member, so that none waits long at the end.
    const int64_t wanted =
        crew.size > 1 ? round_up(ceil_div(whole_p.size(), 4 * crew.size), Plan::slab_r) : whole_p.size();
    const int64_t slab = min_of(Plan::slab_length(whole_p.size()), max_of(wanted, Plan::slab_r));
    const int64_t slabs = ceil_div(whole_p.size(), slab);
    for (int64_t s0 = whole_s.begin; s0 < whole_s.end; s0 += length) {
      const Range s = {s0, min_of(s0 + length, whole_s.end)};
      const Packed shared = share(s);
      for (int64_t piece; (piece = crew.claim(slabs)) >= 0;) {
        const int64_t p0 = whole_p.begin + piece * slab;
        multiply_slab(s, shared, {p0, min_of(p0 + slab, whole_p.end)});
      }
      crew.end_stage(slabs);
    }
  }
};

TW_NAMESPACE_END
