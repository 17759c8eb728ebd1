// Tiles from global memory to the LDS of AMD GPUs, through registers. Tiles in LDS are k-major (gpu/amd/layout.hpp):
// where k runs across the lines of global memory, blocks of a few lines are transposed in registers on the way.
//
// Two ways, chosen per task:
//  * fetch and put (lines are 16-byte aligned, a tile spans less than 2 GiB): whole steps along k, as raw buffer loads.
//    The buffer ends where the operand ends, so that rows beyond it cost nothing and read as zero.
//  * move (anything else, and the last, partial step): byte by byte where it must be, at once, without prefetch.
//    Nothing outside of 16-byte units that hold wanted bytes is read.
#pragma once
#include "tilewright/gpu/amd/convert.hpp"
#include "tilewright/gpu/amd/layout.hpp"
#include "tilewright/gpu/blocks/loader.hpp"

namespace tw::gpu {

#if defined(__GFX11__) || defined(__GFX12__)
constexpr int kBufferFlags = 0x31004000;  // raw, checked byte by byte
#else
constexpr int kBufferFlags = 0x00020000;
#endif

TW_DEVICE uint32_t uniform(uint32_t x) { return (uint32_t)__builtin_amdgcn_readfirstlane((int)x); }
TW_DEVICE const char* uniform(const char* p) {
  const uint64_t bits = (uint64_t)p;
  return (const char*)((uint64_t)uniform((uint32_t)(bits >> 32)) << 32 | uniform((uint32_t)bits));
}

// kBytes of a buffer; zero beyond its end.
template <int kBytes>
TW_DEVICE Words<kBytes / 4> load_buffer(__amdgpu_buffer_rsrc_t buffer, uint32_t offset) {
  if constexpr (kBytes == 16)
    return bits_as<Words<4>>(__builtin_amdgcn_raw_buffer_load_b128(buffer, (int)offset, 0, 0));
  else if constexpr (kBytes == 8)
    return bits_as<Words<2>>(__builtin_amdgcn_raw_buffer_load_b64(buffer, (int)offset, 0, 0));
  else return bits_as<Words<1>>(__builtin_amdgcn_raw_buffer_load_b32(buffer, (int)offset, 0, 0));
}

// The whole steps of an operand, as buffers. Steps that do not exist are empty.
template <class Tile>
struct Source {
  const char* base;
  int64_t advance;             // bytes from step to step
  uint32_t ld, records;        // bytes from line to line; bytes that a step spans
  int steps;

  TW_DEVICE explicit Source(const Operand<Tile>& operand)
      : base(uniform(operand.base)), ld(uniform((uint32_t)operand.ld)), steps(operand.k / Tile::depth) {
    const int lines = Tile::source_k_major ? min_of(operand.extent, Tile::extent) : Tile::depth;
    const int bytes =
        Tile::source_k_major ? Tile::line_bytes : min_of(operand.extent, Tile::extent) * Tile::element_bytes;
    advance = Tile::source_k_major ? (int64_t)Tile::line_bytes : (int64_t)ld * Tile::depth;
    records = uniform((uint32_t)(lines - 1) * ld + (uint32_t)(bytes + 15) / 16 * 16);
  }
  TW_DEVICE static bool suits(const Operand<Tile>& operand) {
    return operand.aligned() && operand.ld <= 0x7fffffff / max_of(Tile::extent, Tile::depth);
  }
  TW_DEVICE __amdgpu_buffer_rsrc_t at(int step) const {
    char* const from = (char*)base + step * advance;
    return __builtin_amdgcn_make_buffer_rsrc(from, 0, step < steps ? (int)records : 0, kBufferFlags);
  }
};

// Blocks of `rows` lines along k and `width` bytes across, transposed: `depth` bytes along k of width / element_bytes
// lines of the tile.
template <int kElementBytes, int kRows, int kWidth>
struct Transposition {
  static constexpr int across = kWidth / kElementBytes, words = kRows * kElementBytes / 4;
  using Input = Words<kWidth / 4>[kRows];

  // Line i of the result.
  TW_DEVICE static Words<words> line(const Input& x, int i) {
    Words<words> y;
    TW_UNROLL
    for (int w = 0; w < words; w++) {
      if constexpr (kElementBytes == 4) {
        y.w[w] = x[w].w[i];
      } else if constexpr (kElementBytes == 2) {
        y.w[w] = __builtin_amdgcn_perm(x[2 * w + 1].w[i / 2], x[2 * w].w[i / 2], i % 2 == 0 ? 0x05040100 : 0x07060302);
      } else {
        const uint32_t pairs = i % 4 < 2 ? 0x05010400 : 0x07030602;
        const uint32_t low = __builtin_amdgcn_perm(x[4 * w + 1].w[i / 4], x[4 * w].w[i / 4], pairs);
        const uint32_t high = __builtin_amdgcn_perm(x[4 * w + 3].w[i / 4], x[4 * w + 2].w[i / 4], pairs);
        y.w[w] = __builtin_amdgcn_perm(high, low, i % 2 == 0 ? 0x05040100 : 0x07060302);
      }
    }
    return y;
  }
};

// A thread's fetch: `rows` lines of global memory, `width` bytes of each.
struct BlockShape {
  int rows, width;
};
// The largest block of which there is one for every thread.
constexpr BlockShape block_shape(bool source_k_major, int element_bytes, int tile_bytes, int threads) {
  if (source_k_major) return {1, 16};
  const BlockShape shapes[] = {{16, 16}, {8, 16}, {16, 8}, {8, 8}, {4, 16}, {4, 8}};
  for (const BlockShape& shape : shapes)  // of bytes along k, until here
    if (shape.rows * shape.width / element_bytes * threads <= tile_bytes)
      return {shape.rows / element_bytes, shape.width};
  return {4 / element_bytes, element_bytes == 4 ? 16 : 8};
}

template <class Tile, int kThreads>
struct RegisterLoader {
  static constexpr int size = Tile::element_bytes;
  static constexpr BlockShape shape = block_shape(Tile::source_k_major, size, Tile::bytes, kThreads);
  static constexpr int rows = shape.rows, width = shape.width;
  // Blocks along k, and across. Neighbouring threads take `near` blocks across, then those along k.
  static constexpr int along = Tile::source_k_major ? Tile::chunks : Tile::depth / rows;
  static constexpr int across = Tile::source_k_major ? Tile::extent : Tile::extent * size / width;
  static constexpr int near = Tile::source_k_major             ? 1
                              : across % Tile::units == 0 ? Tile::units
                              : across % 8 == 0           ? 8
                                                          : 1;
  static constexpr int total = along * across, per_thread = ceil_div(total, kThreads);
  static_assert(Tile::source_k_major || Tile::depth % rows == 0, "blocks divide the tile");
  using Block = Transposition<size, rows, width>;
  // Instructions of a thread.
  static constexpr int loads = per_thread * rows, writes = per_thread * (Tile::source_k_major ? 1 : Block::across);

  struct Held {
    Words<width / 4> data[per_thread][rows];
  };
  struct Place {
    int along, across;
  };
  TW_DEVICE static Place place(int thread, int j) {
    const int id = thread + j * kThreads;
    return {id / near % along, id / near / along * near + id % near};
  }

  // Fetch and put do part `part` of `parts`.
  TW_DEVICE static void fetch(Held& held, const Source<Tile>& source, int step, int thread, int part = 0,
                              int parts = 1) {
    const auto buffer = source.at(step);
    TW_UNROLL
    for (int j = per_thread * part / parts; j < per_thread * (part + 1) / parts; j++) {
      const Place at = place(thread, j);
      TW_UNROLL
      for (int r = 0; r < rows; r++) {
        const uint32_t line = Tile::source_k_major ? at.across : at.along * rows + r;
        held.data[j][r] = load_buffer<width>(
            buffer, line * source.ld + (uint32_t)(Tile::source_k_major ? at.along : at.across) * width);
      }
    }
  }

  // Threads without a block write zeros beyond the tile: bytes to leave room for, tile included.
  static constexpr int stored_lines =
      total % kThreads == 0
          ? Tile::extent
          : ceil_div(per_thread * kThreads, near * along) * near * (Tile::source_k_major ? 1 : Block::across);
  static constexpr int stored_bytes = ceil_div(stored_lines, 16) * 16 * Tile::line_bytes;

  TW_DEVICE static void put(const Held& held, uint32_t to, int thread, int part = 0, int parts = 1) {
    TW_UNROLL
    for (int j = per_thread * part / parts; j < per_thread * (part + 1) / parts; j++) {
      if constexpr (Tile::source_k_major) {
        store_shared(to + offset_of(thread, j), stored_words<Tile>(held.data[j][0]));
      } else {
        const Place at = place(thread, j);
        const int byte = at.along * rows * size;
        TW_UNROLL
        for (int i = 0; i < Block::across; i++)
          store_shared(to + Tile::offset(at.across * Block::across + i, byte / 16) + byte % 16,
                       stored_words<Tile>(Block::line(held.data[j], i)));
      }
    }
  }

 private:
  // Offset of block j of a k-major source: a constant further than the first one where keys repeat.
  TW_DEVICE static uint32_t offset_of(int thread, int j) {
    constexpr int kStep = kThreads / along;
    const Place at = place(thread, 0), own = place(thread, j);
    if constexpr (kThreads % along == 0 && kStep % max_of(Tile::period, 1) == 0 && Tile::period > 0)
      return Tile::offset(at.across, at.along) + j * kStep * Tile::line_bytes;
    return Tile::offset(own.across, own.along);
  }
};

// Any alignment and any size, at once.
template <class Tile, int kThreads>
struct SlowLoader {
  static constexpr int size = Tile::element_bytes;
  static constexpr int rows = Tile::source_k_major ? 1 : 4 / size;  // lines that a thread takes at a time
  static constexpr int along = Tile::source_k_major ? Tile::chunks : Tile::extent * size / 16;  // 16 bytes of a line
  static constexpr int lines = Tile::source_k_major ? Tile::extent : Tile::depth;
  static constexpr int total = lines / rows * along;
  using Block = Transposition<size, rows * (Tile::source_k_major ? 4 / size : 1), 16>;

  // 16 bytes of a panel, of which some exist.
  TW_DEVICE static Words<4> load(const Panel& panel, int line, int chunk) {
    const int bytes = line < panel.lines ? max_of(0, min_of(16, panel.bytes - chunk * 16)) : 0;
    const char* const from = panel.base + line * panel.ld + chunk * 16;
    const int shift = (int)((uintptr_t)from & 15);
    Words<4> low = {}, high = {};
    if (bytes > 0) low = load_constant<Words<4>>(from - shift);
    if (shift + bytes > 16) high = load_constant<Words<4>>(from - shift + 16);
    return keep_bytes(shift_bytes(low, high, shift), bytes);
  }

  TW_DEVICE static void move(uint32_t to, const Panel& panel, int thread) {
    TW_NO_UNROLL
    for (int id = thread; id < total; id += kThreads) {
      const int chunk = id % along, line = id / along * rows;
      if constexpr (Tile::source_k_major) {
        store_shared(to + Tile::offset(line, chunk), stored_words<Tile>(load(panel, line, chunk)));
      } else {
        typename Block::Input x;
        TW_UNROLL
        for (int r = 0; r < rows; r++) x[r] = load(panel, line + r, chunk);
        const int byte = line * size;
        TW_UNROLL
        for (int i = 0; i < Block::across; i++)
          store_shared(to + Tile::offset(chunk * Block::across + i, byte / 16) + byte % 16,
                       stored_words<Tile>(Block::line(x, i)));
      }
    }
  }
};

}  // namespace tw::gpu
