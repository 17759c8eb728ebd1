// How tiles of A and B lie in shared memory. A tile is lines of 16-byte chunks: a line runs along the dimension that is
// contiguous in global memory, so that every copy is a whole chunk. Within a line the chunks are permuted (XOR with a
// key of the line) so that the eight lines which a matrix load, or a quarter of a wave, reads at once stand in
// different banks.
#pragma once
#include "tilewright/core/dtypes.hpp"
#include "tilewright/gpu/platform.hpp"

namespace tw::gpu {

// E: element type. kKMajor: k is contiguous, a line is one row of A (or column of B); else a line is one step of k.
// kExtent: tile_m or tile_n. kDepth: tile_k.
template <class E, bool kKMajor, int kExtent, int kDepth>
struct OperandTile {
  using Element = E;
  static constexpr bool k_major = kKMajor, source_k_major = kKMajor;  // in shared and in global memory
  static constexpr int element_bytes = size_of<E>, extent = kExtent, depth = kDepth;
  static constexpr int lines = kKMajor ? kExtent : kDepth;
  static constexpr int line_bytes = (kKMajor ? kDepth : kExtent) * element_bytes;
  static constexpr int chunks = line_bytes / 16;
  static constexpr int bytes = lines * line_bytes;
  static_assert(line_bytes % 16 == 0 && chunks > 0, "a line of a tile is a multiple of 16 bytes");
  // Lines as they come from memory that is not 16-byte aligned: one chunk more, shifted by 0 to 15 bytes. Elements of 4
  // bytes need no such detour.
  static constexpr bool has_raw = element_bytes < 4;
  static constexpr int raw_chunks = chunks + 1;
  static constexpr int raw_bytes = has_raw ? lines * raw_chunks * 16 : 0;
  // 8-bit elements with k across the lines: a matrix load takes lines 0, 1, 4, 5, 8, 9, 12, 13 (see
  // gpu/cuda/atom_mma.hpp), else eight neighbours.
  static constexpr bool byte_lines = !kKMajor && element_bytes == 1;
  // Chunks that may change places: the largest power of two, up to the 8 that fill all banks, that divides a line.
  static constexpr int group = chunks % 8 == 0 ? 8 : chunks % 4 == 0 ? 4 : chunks % 2 == 0 ? 2 : 1;

  // Keys repeat after 8 lines (byte_lines: 16).
  static constexpr int key(int line) {
    if constexpr (!kKMajor && element_bytes == 4) {
      return 0;  // all lanes read the same line: its chunks stand side by side as they are
    } else if constexpr (byte_lines) {
      if constexpr (group == 8) return (line & 1) | ((line >> 1) & 6);
      else return (line >> 2) & (group - 1);
    } else {
      return (line / (8 / group)) & (group - 1);
    }
  }
  // Bytes from the tile's begin; `of` is a line with the same key, for callers who know one at hand.
  static constexpr uint32_t offset(int line, int chunk, int of) {
    return (uint32_t)((line * chunks + (chunk ^ key(of))) * 16);
  }
  static constexpr uint32_t offset(int line, int chunk) { return offset(line, chunk, line); }
};

}  // namespace tw::gpu
