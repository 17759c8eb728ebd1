// How tiles of A and B lie in the LDS of AMD GPUs: always k-major, a line of 16-byte chunks for every row of A (column
// of B), whatever the layout in global memory: see gpu/amd/loader.hpp. Within `units` neighbouring chunks, which fill
// all banks once, chunks are permuted by an XOR with a key of their line, and nothing is padded.
//
// Banks are 4 bytes wide: 64 of them on gfx950, 32 elsewhere (gfx11 and gfx12: of the half that a workgroup's waves
// share). An access of a wave is served in groups of lanes that fill the banks once; lanes of different groups never
// meet. With 16 bytes a lane:
//   ds_write_b128  groups of neighbouring lanes: 0-7, 8-15, ... (gfx950: 0-15, ...)
//   ds_read_b128   gfx90a, gfx942: 0-3 and 20-23, 4-7 and 16-19, 8-11 and 28-31, 12-15 and 24-27, and so on from 32;
//                  gfx950: 0-3, 12-15 and 20-27; 4-11, 16-19 and 28-31, and so on from 32
// The keys are linear in the bits of a line's number, so that "no two lanes of a group meet" is a question of
// independent bit vectors; tests/native/test_amd_pipelines.py counts every case. They serve three kinds of access:
//   fragments       a group's lanes read 16 or 32 neighbouring lines, at one or at neighbouring chunks
//   whole lines     as they arrive where k is contiguous in global memory: neighbouring chunks
//   transposed      lanes write one chunk of every 4th, 8th or 16th line (`folded`: the key takes the line's upper bits
//                   in, too)
#pragma once
#include "tilewright/core/dtypes.hpp"
#include "tilewright/gpu/platform.hpp"

namespace tw::gpu {

#if defined(__gfx950__)
constexpr int kLdsBanks = 64;
#else
constexpr int kLdsBanks = 32;
#endif

// E: element type. kSourceKMajor: k is contiguous in global memory. kExtent: tile_m or tile_n. kDepth: tile_k.
// kRaw: elements are as they were in global memory; else as the matrix unit reads them (see gpu/amd/convert.hpp).
template <class E, bool kSourceKMajor, int kExtent, int kDepth, int kBanks = kLdsBanks, bool kRaw = false>
struct LdsTile {
  using Element = E;
  static constexpr bool k_major = true, source_k_major = kSourceKMajor, raw = kRaw;
  static constexpr int element_bytes = size_of<E>, extent = kExtent, depth = kDepth;
  static constexpr int lines = kExtent, line_bytes = kDepth * element_bytes, chunks = line_bytes / 16;
  static constexpr int bytes = lines * line_bytes;
  static constexpr int units = kBanks / 4;  // chunks that fill all banks once
  static constexpr int unit_bits = units == 16 ? 4 : 3;
  static_assert(line_bytes % 16 == 0 && chunks > 0, "a line of a tile is a multiple of 16 bytes");
  static_assert(kExtent % 16 == 0, "a tile has a multiple of 16 lines");

  static constexpr bool folded = !kSourceKMajor;
  // Neighbouring lines that fill all banks once.
  static constexpr int lines_together = chunks >= units || units % chunks != 0 ? 1 : units / chunks;
  static constexpr int together_bits =
      lines_together == 16 ? 4 : lines_together == 8 ? 3 : lines_together == 4 ? 2 : lines_together == 2 ? 1 : 0;
  // Lines of which only one chunk in four is another line's neighbour (gfx950, 64 bytes): a fragment of 16 lines reads
  // two chunks of them at once.
  static constexpr bool twisted = lines_together == 4 && units == 16;
  // Keys repeat after so many lines; 0: they do not.
  static constexpr int period = folded ? 0 : lines_together * units;

  static constexpr int key(int line) {
    const int y = line >> together_bits;
    int bits = y;
    if constexpr (folded) bits = y ^ (y >> unit_bits) ^ (y >> (2 * unit_bits));
    if constexpr (twisted) bits ^= (bits & 1) << 1;
    return bits & (units - 1);
  }
  // Bytes from the tile's begin.
  static constexpr uint32_t offset(int line, int chunk) {
    return (uint32_t)(((line * chunks + chunk) ^ key(line)) * 16);
  }

  // Chunk `chunk + more` of line `first + line + beyond`, where `beyond` and `more` are known to the compiler:
  // a constant that the instruction adds, as far as keys allow. chunk < kTogether, a power of two of which `more` is a
  // multiple; `first` and `beyond` are multiples of 16.
  template <int kTogether>
  static constexpr uint32_t place(int first, int line, int beyond, int chunk, int more) {
    constexpr bool kSplits = (chunks & (chunks - 1)) == 0;
    const bool repeats = period > 0 && beyond % (period > 0 ? period : 1) == 0;
    const int near = first + line + (repeats ? 0 : beyond);
    const uint32_t added = repeats ? (uint32_t)(beyond * line_bytes) : 0;
    if constexpr (!kSplits) return offset(near, chunk + more) + added;
    return (offset(near, chunk) ^ (uint32_t)(more % units * 16)) + (uint32_t)(more / units * units * 16) + added;
  }
};

}  // namespace tw::gpu
