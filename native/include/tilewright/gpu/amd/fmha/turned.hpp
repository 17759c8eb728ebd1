// Parts that the attention kernels of gfx942 and gfx950 share: rows that are transposed on their way to LDS, in the
// order in which a lane has results of a matrix instruction, and how results become operands.
#pragma once
#include "tilewright/gpu/amd/loader.hpp"

namespace tw::gpu {

// Rows of 16-bit elements (keys) as lines of elements, transposed on their way: blocks of 4 keys and 4 elements. Tile:
// as it is in LDS, its depth keys.
template <class Tile, int kThreads>
struct FmhaTurnedValues {
  using Block = Transposition<2, 4, 8>;
  static constexpr int along = Tile::depth / 4, across = Tile::extent / 4;
  static constexpr int near = across < Tile::units ? across : Tile::units;
  static constexpr int per_thread = along * across / kThreads;
  static_assert(along * across % kThreads == 0 && across % near == 0, "every thread has as many blocks");
  Words<2> data[per_thread][4];

  TW_DEVICE static int key_of(int thread, int j) { return (thread + j * kThreads) / near % along * 4; }
  TW_DEVICE static int element_of(int thread, int j) {
    const int id = thread + j * kThreads;
    return (id / near / along * near + id % near) * 4;
  }
  // Bytes from a line's begin to the run of four keys from `key` on. Of 16 keys, the first and third run lie side by
  // side, and so do the others: that is how a lane has results of 16 rows of a matrix instruction.
  static constexpr int key_run(int key) { return key / 16 * 32 + key / 4 % 2 * 16 + key / 8 % 2 * 8; }

  // from: bytes from the buffer's begin to row 0.
  TW_DEVICE void fetch(__amdgpu_buffer_rsrc_t buffer, uint32_t ld, int thread, uint32_t from = 0) {
    TW_UNROLL
    for (int j = 0; j < per_thread; j++)
      TW_UNROLL
      for (int r = 0; r < 4; r++)
        data[j][r] = load_buffer<8>(buffer, from + (uint32_t)(key_of(thread, j) + r) * ld +
                                                (uint32_t)element_of(thread, j) * 2);
  }
  TW_DEVICE void put(uint32_t to, int thread) const {
    TW_UNROLL
    for (int j = 0; j < per_thread; j++)
      TW_UNROLL
      for (int i = 0; i < 4; i++) put_line(to, thread, j, i);
  }
  TW_DEVICE void put_line(uint32_t to, int thread, int j, int i) const {
    const int byte = key_run(key_of(thread, j));
    store_shared(to + Tile::offset(element_of(thread, j) + i, byte / 16) + byte % 16, Block::line(data[j], i));
  }
};

// To nearest, of bf16 on gfx942 ties to even by hand. A NaN of bf16 stays one.
template <class X>
TW_DEVICE uint32_t fmha_pack_pair(Vector<float, 2> x) {
#if !defined(__gfx950__)
  if constexpr (is_same<X, bf16>) {
    const uint32_t low = bits_of(x[0]), high = bits_of(x[1]);
    return __builtin_amdgcn_perm(high + (high >> 16 & 1) + 0x7fff, low + (low >> 16 & 1) + 0x7fff, 0x07060302);
  }
#endif
  if constexpr (is_same<X, fp16>) return bits_as<uint32_t>(__builtin_convertvector(x, Vector<_Float16, 2>));
  return pack_bfloats(x[0], x[1]);
}

}  // namespace tw::gpu
