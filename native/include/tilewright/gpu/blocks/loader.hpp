// Tiles from global to shared memory, zero where the matrix ends. The vector accesses are chosen per task:
//  * aligned (16-byte aligned lines): chunks go straight to their place.
//  * words (fp32 of any alignment): the same, element by element.
//  * raw (smaller elements of any alignment): the aligned chunks that cover a line are copied as they are, and
//    `realign` moves the bytes to where they belong. Nothing outside of 16-byte units that hold wanted bytes is read.
#pragma once
#include "tilewright/gpu/blocks/layout.hpp"

namespace tw::gpu {

// Where a tile lies in global memory at one step along k.
struct Panel {
  const char* base;  // its first line
  int64_t ld;        // bytes from line to line
  int lines;         // lines that exist (may be more than the tile has, or none)
  int bytes;         // bytes of a line that exist, likewise
};

// One operand of one output tile: all its panels along k.
template <class Tile>
struct Operand {
  const char* base;
  int64_t ld;
  int extent;  // rows or columns that exist from the tile's first on
  int k;       // length of the reduction

  // `first`: the tile's first row (or column); k0: begin of the reduction; counts are elements.
  TW_DEVICE Operand(const void* matrix, int64_t ld_elements, int first, int total, int k0, int length)
      : base((const char*)matrix +
             (Tile::source_k_major ? first * ld_elements + k0 : k0 * ld_elements + first) * Tile::element_bytes),
        // The leading dimension of a single line is not used.
        ld((Tile::source_k_major ? total - first : length) > 1 ? ld_elements * Tile::element_bytes : 0),
        extent(total - first),
        k(length) {}

  TW_DEVICE int steps() const { return ceil_div(k, Tile::depth); }
  TW_DEVICE bool aligned() const { return (((uintptr_t)base | (uintptr_t)ld) & 15) == 0; }

  TW_DEVICE Panel at(int step) const {
    const int k_left = min_of(k - step * Tile::depth, Tile::depth), left = min_of(extent, Tile::extent);
    if constexpr (Tile::source_k_major)
      return {base + (int64_t)step * Tile::line_bytes, ld, left, k_left * Tile::element_bytes};
    else return {base + (int64_t)step * Tile::depth * ld, ld, k_left, left * Tile::element_bytes};
  }
};

// The 16 bytes that begin `bytes` (0 to 15) into the 32 of low and high.
// (Single values, not arrays: a choice between elements of an array would be a choice of addresses.)
TW_DEVICE Words<4> shift_bytes(const Words<4>& low, const Words<4>& high, int bytes) {
  uint32_t a = low.w[0], b = low.w[1], c = low.w[2], d = low.w[3], e = high.w[0], f = high.w[1];
  const bool two = (bytes & 8) != 0, one = (bytes & 4) != 0;
  a = two ? c : a, b = two ? d : b, c = two ? e : c, d = two ? f : d;
  e = two ? high.w[2] : e, f = two ? high.w[3] : f;
  a = one ? b : a, b = one ? c : b, c = one ? d : c, d = one ? e : d, e = one ? f : e;
  const uint32_t bits = (uint32_t)(bytes & 3) * 8;
  return {funnel_right(a, b, bits), funnel_right(b, c, bits), funnel_right(c, d, bits), funnel_right(d, e, bits)};
}

// Keeps the first `bytes` (any number) and clears the rest.
TW_DEVICE Words<4> keep_bytes(Words<4> x, int bytes) {
  TW_UNROLL
  for (int i = 0; i < 4; i++) {
    const int left = bytes - i * 4;
    x.w[i] = left >= 4 ? x.w[i] : left <= 0 ? 0u : x.w[i] & ((1u << (left * 8)) - 1u);
  }
  return x;
}

template <class Tile, int kThreads>
struct Loader {
  static constexpr int total = Tile::lines * Tile::chunks, per_thread = ceil_div(total, kThreads);
  // Where every thread keeps to one chunk of the lines, addresses advance by a constant.
  static constexpr bool regular = kThreads % Tile::chunks == 0;

  struct Place {
    int line, chunk;
  };
  TW_DEVICE static Place place(int thread, int j) {
    if constexpr (regular) return {thread / Tile::chunks + j * (kThreads / Tile::chunks), thread % Tile::chunks};
    const int id = thread + j * kThreads;
    return {id / Tile::chunks, id % Tile::chunks};
  }
  // Where its chunk belongs in the tile. Lines of the same key share an address, up to a constant.
  TW_DEVICE static uint32_t offset_of(int thread, int j) {
    const Place at = place(thread, j), first = place(thread, 0);
    if constexpr (regular && kThreads / Tile::chunks % 16 == 0)
      return Tile::offset(first.line, first.chunk) + j * (kThreads * 16);
    return Tile::offset(at.line, at.chunk);
  }
  TW_DEVICE static bool exists(int thread, int j) {
    return total % kThreads == 0 || j + 1 < per_thread || thread + j * kThreads < total;
  }
  TW_DEVICE static int bytes_of(const Panel& panel, Place at) {
    return at.line < panel.lines ? max_of(0, min_of(16, panel.bytes - at.chunk * 16)) : 0;
  }

  // ---- asynchronous: the caller commits and waits ----

  TW_DEVICE static void copy_aligned(uint32_t to, const Panel& panel, int thread) {
    const Place first = place(thread, 0);
    const char* from = panel.base + first.line * panel.ld + first.chunk * 16;
    TW_UNROLL_BY(regular ? per_thread : 2)
    for (int j = 0; j < per_thread; j++)
      if (exists(thread, j)) {
        const Place at = place(thread, j);
        if constexpr (!regular) from = panel.base + at.line * panel.ld + at.chunk * 16;
        copy_async(to + offset_of(thread, j), from, bytes_of(panel, at));
        from += kThreads / Tile::chunks * panel.ld;
      }
  }

  TW_DEVICE static void copy_words(uint32_t to, const Panel& panel, int thread) {
    constexpr int kWords = Tile::chunks * 4, kTotal = Tile::lines * kWords, kStep = kThreads / kWords;
    constexpr bool kRegular = kThreads % kWords == 0, kSameKey = kStep % 8 == 0 || !Tile::k_major;
    const int first = thread / kWords, own = thread % kWords;
    const char* from = panel.base + first * panel.ld + own * 4;
    TW_UNROLL_BY(kRegular ? 4 : 2)
    for (int j = 0; j < ceil_div(kTotal, kThreads); j++) {
      const int id = thread + j * kThreads;
      const int line = kRegular ? first + j * kStep : id / kWords, word = kRegular ? own : id % kWords;
      const uint32_t at = kRegular && kSameKey ? Tile::offset(first, own / 4) + j * kStep * Tile::line_bytes
                                               : Tile::offset(line, word / 4);
      if constexpr (!kRegular) from = panel.base + line * panel.ld + word * 4;
      if (kTotal % kThreads == 0 || id < kTotal)
        copy_word_async(to + at + word % 4 * 4, from, line < panel.lines && word * 4 < panel.bytes);
      from += kStep * panel.ld;
    }
  }

  TW_DEVICE static void copy_raw(uint32_t to, const Panel& panel, int thread) {
    TW_UNROLL_BY(2)
    for (int j = 0; j < per_thread; j++)
      if (exists(thread, j)) copy_raw_chunk(to, panel, place(thread, j));
    TW_UNROLL
    for (int j = 0; j < ceil_div(Tile::lines, kThreads); j++) {  // the chunk more of every line
      const int line = thread + j * kThreads;
      if (Tile::lines % kThreads == 0 || line < Tile::lines) copy_raw_chunk(to, panel, {line, Tile::chunks});
    }
  }
  TW_DEVICE static void copy_raw_chunk(uint32_t to, const Panel& panel, Place at) {
    const char* const begin = panel.base + at.line * panel.ld;
    const int shift = (int)((uintptr_t)begin & 15);
    const int left = at.line < panel.lines ? shift + min_of(panel.bytes, Tile::line_bytes) - at.chunk * 16 : 0;
    copy_async(to + (at.line * Tile::raw_chunks + at.chunk) * 16, begin - shift + at.chunk * 16,
               max_of(0, min_of(16, left)));
  }

  // From a raw copy of the panel to the tile.
  TW_DEVICE static void realign(uint32_t from, uint32_t to, const Panel& panel, int thread) {
    constexpr int kBatch = min_of(4, per_thread);  // read together: writes between reads would hold them up
    TW_NO_UNROLL
    for (int j0 = 0; j0 < per_thread; j0 += kBatch) {
      Words<4> low[kBatch], high[kBatch];
      TW_UNROLL
      for (int l = 0; l < kBatch; l++)
        if (j0 + l < per_thread && exists(thread, j0 + l)) {
          const Place at = place(thread, j0 + l);
          const uint32_t source = from + (at.line * Tile::raw_chunks + at.chunk) * 16;
          low[l] = load_shared<4>(source), high[l] = load_shared<4>(source + 16);
        }
      TW_UNROLL
      for (int l = 0; l < kBatch; l++)
        if (j0 + l < per_thread && exists(thread, j0 + l)) {
          const int line = place(thread, j0 + l).line;
          const int shift = (int)(((uint32_t)(uintptr_t)panel.base + (uint32_t)line * (uint32_t)panel.ld) & 15);
          store_shared(to + offset_of(thread, j0 + l), shift_bytes(low[l], high[l], shift));
        }
    }
  }

  // ---- through registers ----

  struct Held {
    Words<4> data[per_thread];
  };

  // Whole aligned chunks; what does not exist is cleared when it is stored.
  TW_DEVICE static void fetch(Held& held, const Panel& panel, int thread) {
    TW_UNROLL
    for (int j = 0; j < per_thread; j++) {
      const Place at = place(thread, j);
      held.data[j] = {};
      if (exists(thread, j) && bytes_of(panel, at) > 0)
        held.data[j] = load_constant<Words<4>>(panel.base + at.line * panel.ld + at.chunk * 16);
    }
  }
  TW_DEVICE static void put(const Held& held, uint32_t to, const Panel& panel, int thread) {
    TW_UNROLL
    for (int j = 0; j < per_thread; j++)
      if (exists(thread, j)) {
        const Place at = place(thread, j);
        store_shared(to + offset_of(thread, j), keep_bytes(held.data[j], bytes_of(panel, at)));
      }
  }

  // Any alignment, at once.
  TW_DEVICE static void move(uint32_t to, const Panel& panel, int thread) {
    TW_UNROLL_BY(2)
    for (int j = 0; j < per_thread; j++)
      if (exists(thread, j)) {
        const Place at = place(thread, j);
        const char* const from = panel.base + at.line * panel.ld + at.chunk * 16;
        const int shift = (int)((uintptr_t)from & 15), bytes = bytes_of(panel, at);
        Words<4> low = {}, high = {};
        if (bytes > 0) low = load_constant<Words<4>>(from - shift);
        if (shift + bytes > 16) high = load_constant<Words<4>>(from - shift + 16);
        store_shared(to + offset_of(thread, j), keep_bytes(shift_bytes(low, high, shift), bytes));
      }
  }
};

}  // namespace tw::gpu
