// Rows of queries, keys and values from global to shared memory. A tile's chunk is 16 bytes of what is multiplied;
// where its elements are neighbours and aligned it is one read (or an asynchronous copy), else one for each element.
// What does not exist is zero.
#pragma once
#include "tilewright/gpu/fmha/params.hpp"

namespace tw::gpu {

// Elements of a chunk: the first one's place (null: none exist), and bytes from one to the next.
struct FmhaChunk {
  const char* from;
  int64_t step;
  int count;
};

template <class E, class X>
TW_DEVICE uint32_t fmha_bits(const char* from) {
  using S = typename E::storage;
  const S raw = load_constant<S>(from);
  if constexpr (is_same<E, X>) {
    if constexpr (is_same<E, fp32>) return bits_of(raw);
    else return (uint32_t)raw;
  } else {
    return is_same<X, fp16> ? pack_halves(to_float<E>(raw), 0.0f) & 0xffffu
                            : pack_bfloats(to_float<E>(raw), 0.0f) & 0xffffu;
  }
}

// Four 8-bit floats as 16-bit ones: exact.
template <class X>
TW_DEVICE Words<2> fmha_widen(uint32_t x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  Words<2> halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves.w[0]) : "h"((uint16_t)x));
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves.w[1]) : "h"((uint16_t)(x >> 16)));
  if constexpr (is_same<X, fp16>) return halves;
  Words<2> bfloats;
  TW_UNROLL
  for (int i = 0; i < 2; i++)
    bfloats.w[i] = pack_bfloats(half_to_float((uint16_t)halves.w[i]), half_to_float((uint16_t)(halves.w[i] >> 16)));
  return bfloats;
#endif
  float y[4];
  TW_UNROLL
  for (int e = 0; e < 4; e++) y[e] = to_float<fp8>((uint8_t)(x >> (8 * e)));
  if constexpr (is_same<X, fp16>) return {pack_halves(y[0], y[1]), pack_halves(y[2], y[3])};
  else return {pack_bfloats(y[0], y[1]), pack_bfloats(y[2], y[3])};
}

template <class E, class X>
TW_DEVICE bool fmha_is_vector(const FmhaChunk& x) {
  constexpr int kBytes = 16 / size_of<X> * size_of<E>;
  return x.step == size_of<E> && ((uintptr_t)x.from & (kBytes - 1)) == 0;
}

template <class E, class X>
TW_DEVICE Words<4> fmha_load_chunk(const FmhaChunk& x) {
  constexpr int kElements = 16 / size_of<X>;
  Words<4> w = {};
  if (!x.from || x.count <= 0) return w;
  if (fmha_is_vector<E, X>(x)) {
    if constexpr (is_same<E, X>) {
      w = load_constant<Words<4>>(x.from);
    } else {
      static_assert(is_same<E, fp8>, "what is widened is E4M3");
      const Words<2> bytes = load_constant<Words<2>>(x.from);
      const Words<2> low = fmha_widen<X>(bytes.w[0]), high = fmha_widen<X>(bytes.w[1]);
      w = {low.w[0], low.w[1], high.w[0], high.w[1]};
    }
    TW_UNROLL
    for (int i = 0; i < 4; i++) {
      const int left = x.count * size_of<X> - i * 4;
      w.w[i] = left >= 4 ? w.w[i] : left <= 0 ? 0u : w.w[i] & ((1u << (left * 8)) - 1u);
    }
    return w;
  }
  constexpr int kPerWord = kElements / 4;
  TW_NO_UNROLL  // small code matters more than these reads
  for (int e = 0; e < min_of(x.count, kElements); e++) {
    const uint32_t bits = fmha_bits<E, X>(x.from + e * x.step) << (e % kPerWord * (32 / kPerWord % 32));
    TW_UNROLL
    for (int i = 0; i < 4; i++) w.w[i] |= e / kPerWord == i ? bits : 0u;
  }
  return w;
}

// A tile whose lines are chunks of `at(line, first element)`.
template <class E, class X, class Tile, int kThreads, bool kAsync, int kUnroll = 2, class At>
TW_DEVICE void fmha_load_lines(uint32_t to, int thread, At at) {
  constexpr int kElements = 16 / size_of<X>, kTotal = Tile::lines * Tile::chunks;
  TW_UNROLL_BY(kUnroll)
  for (int id = thread; id < kTotal; id += kThreads) {
    const int line = id / Tile::chunks, chunk = id % Tile::chunks;
    const FmhaChunk x = at(line, chunk * kElements);
    const uint32_t place = to + Tile::offset(line, chunk);
    if constexpr (kAsync && is_same<E, X>) {
      if (x.from && x.count > 0 && fmha_is_vector<E, X>(x)) {
        copy_async(place, x.from, min_of(x.count * size_of<X>, 16));
        continue;
      }
    }
    store_shared(place, fmha_load_chunk<E, X>(x));
  }
}

#if defined(__HIP__)
// A tile whose lines run along k, of chunks `at(k, first line)` that run across: blocks are transposed in registers.
template <class E, class X, class Tile, int kThreads, class At>
TW_DEVICE void fmha_load_turned(uint32_t to, int thread, At at) {
  constexpr int kElements = 16 / size_of<X>, kAcross = Tile::extent / kElements;
  constexpr int kTotal = kAcross * (Tile::depth / kElements);
  static_assert(Tile::extent % kElements == 0 && Tile::depth % kElements == 0, "blocks divide the tile");
  using Block = Transposition<size_of<X>, kElements, 16>;
  TW_NO_UNROLL
  for (int id = thread; id < kTotal; id += kThreads) {
    const int across = id % kAcross, along = id / kAcross;
    typename Block::Input x;
    TW_UNROLL
    for (int r = 0; r < kElements; r++) x[r] = fmha_load_chunk<E, X>(at(along * kElements + r, across * kElements));
    TW_UNROLL
    for (int i = 0; i < kElements; i++) store_shared(to + Tile::offset(across * kElements + i, along), Block::line(x, i));
  }
}
#endif

// 16 bytes, or zeros if they do not exist.
TW_DEVICE void fmha_copy_chunk(uint32_t to, const char* from, bool exists) {
#if defined(__CUDA_ARCH__)
  asm volatile(
      "{.reg .pred exists; setp.ne.b32 exists, %2, 0;"
      "@exists cp.async.cg.shared.global.L2::128B [%0], [%1], 16;"
      "@!exists st.shared.v4.b32 [%0], {%3, %3, %3, %3};}" ::"r"(to), "l"(from), "r"((int)exists), "r"(0)
      : "memory");
#else
  copy_async(to, from, exists ? 16 : 0);
#endif
}

// A tile whose lines are rows of aligned memory, by asynchronous copies. `row(line)` is where a row begins, called in
// turn for those of the thread; lines from `count` on, and null rows (kNulls), do not exist. `chunks` of 16 bytes of a
// row exist, `step` bytes apart. What is asked for once is not worth much code: kMost copies for each turn of the loop.
template <class Tile, int kThreads, bool kNulls, int kMost = 16, class Row>
TW_DEVICE void fmha_copy_rows(uint32_t to, int thread, int count, int chunks, int64_t step, Row row) {
  constexpr int kTotal = Tile::lines * Tile::chunks, kRounds = (kTotal + kThreads - 1) / kThreads;
  constexpr bool kSame = kThreads % Tile::chunks == 0;  // a thread's chunks stand in one column
  const int chunk0 = thread % Tile::chunks;
  if (kSame && chunk0 >= chunks) count = 0;
  TW_UNROLL_BY(kRounds > kMost ? 4 : kRounds)
  for (int i = 0; i < kRounds; i++) {
    const int id = thread + i * kThreads;
    if (kTotal % kThreads != 0 && id >= kTotal) return;
    const int line = kSame ? thread / Tile::chunks + i * (kThreads / Tile::chunks) : id / Tile::chunks;
    const int chunk = kSame ? chunk0 : id % Tile::chunks;
    const char* const from = row(line);
    const bool exists = line < count && (kSame || chunk < chunks) && (!kNulls || from != nullptr);
    fmha_copy_chunk(to + Tile::offset(line, chunk), from + chunk * step, exists);
  }
}

// Tile: B of a product over rows (k), whose lines in global memory are rows of `at(row, first column)`.
template <class E, class X, class Tile, int kThreads, bool kAsync, int kUnroll = 2, class At>
TW_DEVICE void fmha_load_across(uint32_t to, int thread, At at) {
#if defined(__HIP__)
  if constexpr (Tile::k_major) {
    fmha_load_turned<E, X, Tile, kThreads>(to, thread, at);
    return;
  }
#endif
  if constexpr (!Tile::k_major) fmha_load_lines<E, X, Tile, kThreads, kAsync, kUnroll>(to, thread, at);
}

// Where keys (or values) of one head of an item lie.
template <class Config, class E, class X, bool kValues>
struct FmhaSource {
  static constexpr bool vectorized = Config::paged && Config::kv_layout == KvLayout::vectorized;
  static constexpr bool along_rows = kValues && (vectorized || (Config::v_col && !Config::paged));  // as chunks run
  static constexpr int x = 16 / size_of<E>, elements = 16 / size_of<X>;

  const tw_fmha_tensor& tensor;
  const char* base;  // of the head; unless paged, of the item's row 0
  int hdim, rows;
  uint32_t pages;  // in shared memory: the page of each row of the block
  int64_t row_bytes;
  bool aligned;  // chunks of 16 bytes of a row can be copied as they are

  // Distance within a row: from one chunk of 16 bytes to the next.
  TW_DEVICE int64_t chunk_bytes() const { return vectorized && !kValues ? tensor.chunk * size_of<E> : 16; }

  TW_DEVICE FmhaSource(const tw_fmha_tensor& tensor, const FmhaItem& item, int64_t head, int64_t hdim, uint32_t pages)
      : tensor(tensor), base((const char*)tensor.ptr), hdim((int)hdim), rows((int)item.k_rows), pages(pages) {
    int64_t at = head * tensor.head;
    if constexpr (!Config::paged) at += (Config::varlen ? 0 : item.cache * tensor.batch) + item.k_first * tensor.row;
    base += at * size_of<E>;
    row_bytes = tensor.row * size_of<E>;
    int64_t odd = (int64_t)(uintptr_t)base | row_bytes;
    if constexpr (Config::paged) odd |= tensor.batch * size_of<E>;
    odd |= chunk_bytes();
    odd |= (int64_t)this->hdim * size_of<E>;
    aligned = !along_rows && odd % 16 == 0 && (vectorized || tensor.col == 1);
  }

  // Where row j begins; null: it has no page. Paged: `page` is its page.
  TW_DEVICE const char* line(const tw_fmha_args& args, int j, int page) const {
    if constexpr (!Config::paged) return base + j * row_bytes;
    if (page < 0) return nullptr;
    return base + (page * tensor.batch * size_of<E> + (j & (int)(page_size(args) - 1)) * row_bytes);
  }
  // All rows from c0 on to a tile; `aligned` holds.
  template <class Tile, int kThreads, int kMost = 16>
  TW_DEVICE void copy(const tw_fmha_args& args, uint32_t to, int thread, int c0) const {
    const int count = rows - c0, chunks = hdim * size_of<E> / 16;
    if constexpr (Config::paged) {
      fmha_copy_rows<Tile, kThreads, true, kMost>(to, thread, count, chunks, chunk_bytes(), [&](int r) {
        return line(args, c0 + r, (int)load_shared<1>(pages + r * 4).w[0]);
      });
    } else if constexpr (kThreads % Tile::chunks == 0) {
      const char* from = base + (c0 + thread / Tile::chunks) * row_bytes;
      fmha_copy_rows<Tile, kThreads, false, kMost>(to, thread, count, chunks, 16, [&](int) {
        const char* const here = from;
        from += kThreads / Tile::chunks * row_bytes;
        return here;
      });
    } else {
      fmha_copy_rows<Tile, kThreads, false, kMost>(to, thread, count, chunks, 16,
                                                   [&](int r) { return line(args, c0 + r, 0); });
    }
  }

  // From column c on, of row c0 + r.
  TW_DEVICE FmhaChunk row(const tw_fmha_args& args, int c0, int r, int c) const {
    const int j = c0 + r;
    FmhaChunk chunk = {nullptr, tensor.col * size_of<E>, min_of(hdim - c, elements)};
    if (j >= rows || c >= hdim) return chunk;
    int64_t at;
    if constexpr (Config::paged) {
      const int page = (int)load_shared<1>(pages + r * 4).w[0];
      if (page < 0) return chunk;
      const int64_t place = j & (page_size(args) - 1);
      at = page * tensor.batch + place * tensor.row;
      if constexpr (vectorized && !kValues) {
        at += c / x * tensor.chunk + c % x;
        chunk.step = size_of<E>;
      } else {
        at += c * tensor.col;
      }
    } else {
      at = j * tensor.row + c * tensor.col;
    }
    chunk.from = base + at * size_of<E>;
    return chunk;
  }
  // From row c0 + r on, of column c.
  TW_DEVICE FmhaChunk column(const tw_fmha_args& args, int c0, int c, int r) const {
    const int j = c0 + r;
    FmhaChunk chunk = {nullptr, tensor.row * size_of<E>, min_of(rows - j, elements)};
    if (j >= rows || c >= hdim) return chunk;
    int64_t at;
    if constexpr (vectorized) {
      const int page = (int)load_shared<1>(pages + r * 4).w[0];
      if (page < 0) return chunk;
      const int64_t place = j & (page_size(args) - 1);
      at = page * tensor.batch + place / x * tensor.chunk + c * tensor.col + place % x;
      chunk.step = size_of<E>;
    } else {
      at = j * tensor.row + c * tensor.col;
    }
    chunk.from = base + at * size_of<E>;
    return chunk;
  }
  TW_DEVICE static int64_t page_size(const tw_fmha_args& args) {
    return Config::page_size > 0 ? Config::page_size : args.page_size;
  }
};

}  // namespace tw::gpu
