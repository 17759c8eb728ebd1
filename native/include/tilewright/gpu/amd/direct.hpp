// Tiles from global memory straight to LDS, for the pipeline comp_async: where k is contiguous in global memory, and a
// tile of it becomes whole lines in LDS. A wave writes 64 neighbouring words (gfx950: 16-byte chunks) of LDS at a time;
// which chunk of which line belongs there follows from the tile's key, so the permutation is one of the addresses that
// lanes read from.
//
// The compiler does not know what these instructions write: it would wait for all of them before every read of LDS.
// `wait_direct` is the wait, to be followed by a barrier. (m0 is reserved: compilers keep nothing there.)
#pragma once
#include "tilewright/gpu/amd/loader.hpp"

namespace tw::gpu {

#if defined(__gfx950__)
constexpr int kDirectBytes = 16;
#else
constexpr int kDirectBytes = 4;
#endif
#if defined(__gfx90a__) || defined(__gfx942__) || defined(__gfx950__)
constexpr bool kHasDirect = true;
#else
constexpr bool kHasDirect = false;
#endif

// To LDS at `to` + lane * kDirectBytes (`to` is the same for all lanes) from a buffer at `offset`.
TW_DEVICE void load_direct(uint32_t to, Vector<uint32_t, 4> buffer, uint32_t offset) {
#if defined(__gfx950__)
  asm volatile("s_mov_b32 m0, %0\n\ts_nop 0\n\tbuffer_load_dwordx4 %1, %2, 0 offen lds"
               :
               : "s"(to), "v"(offset), "s"(buffer)
               : "memory");
#elif defined(__gfx90a__) || defined(__gfx942__)
  asm volatile("s_mov_b32 m0, %0\n\ts_nop 0\n\tbuffer_load_dword %1, %2, 0 offen lds"
               :
               : "s"(to), "v"(offset), "s"(buffer)
               : "memory");
#else
  (void)to, (void)buffer, (void)offset;
#endif
}
TW_DEVICE void wait_direct() { asm volatile("s_waitcnt vmcnt(0)" ::: "memory"); }

template <class Tile, int kThreads>
struct DirectLoader {
  static constexpr int pieces = 16 / kDirectBytes;  // of a chunk
  static constexpr int total = Tile::lines * Tile::chunks * pieces, per_thread = ceil_div(total, kThreads);
  static constexpr int stored_bytes = per_thread * kThreads * kDirectBytes;
  static constexpr bool suits = Tile::source_k_major;

  using Buffer = Vector<uint32_t, 4>;
  TW_DEVICE static Buffer buffer_of(const Source<Tile>& source, int step) {
    const uint64_t base = (uint64_t)(source.base + step * source.advance);
    return {(uint32_t)base, (uint32_t)(base >> 32) & 0xffff, step < source.steps ? source.records : 0,
            (uint32_t)kBufferFlags};
  }
  // Part `part` of `parts` of the copies; ld: bytes from line to line.
  TW_DEVICE static void copy(uint32_t to, Buffer buffer, uint32_t ld, int thread, int part = 0, int parts = 1) {
    const uint32_t first = uniform((uint32_t)(thread / kWave)) * (kWave * kDirectBytes);
    TW_UNROLL
    for (int j = per_thread * part / parts; j < per_thread * (part + 1) / parts; j++) {
      const int piece = thread + j * kThreads, slot = piece / pieces;
      const int chunk = slot ^ Tile::key(slot / Tile::chunks);  // an involution: keys leave lines_together together
      const uint32_t line = (uint32_t)(chunk / Tile::chunks);
      load_direct(to + first + j * (kThreads * kDirectBytes), buffer,
                  line * ld + (uint32_t)(chunk % Tile::chunks * 16 + piece % pieces * kDirectBytes));
    }
  }
};

}  // namespace tw::gpu
