// From registers to shared memory in the layout that the copy engine's stores expect, and between registers. Fragments
// are 8 x 8 matrices of 16-bit elements: lane t holds row t/4, columns 2*(t%4) and the next, in one register.
#pragma once
#include "tilewright/sm90/blocks/base.hpp"

namespace tw::sm90 {

// Where line `line` (128 bytes) and 16-byte block `block` of it lie in a buffer swizzled over 128 bytes, at a multiple
// of 1024 bytes.
TW_SM90 uint32_t swizzled(uint32_t buffer, int line, int block) {
  return buffer + line * 128 + ((block ^ (line & 7)) << 4);
}

// Stores 4 (2) fragments; lanes 8*i to 8*i+7 give the addresses of the lines of 16 bytes of fragment i. Transposed:
// each line takes a column.
TW_SM90 void store_fragments(uint32_t address, const uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}
TW_SM90 void store_fragments_transposed(uint32_t address, const uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]),
               "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}
TW_SM90 void store_fragments_transposed(uint32_t address, const uint32_t (&x)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(x[0]), "r"(x[1])
               : "memory");
}
TW_SM90 void store_word(uint32_t address, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
TW_SM90 void store_words(uint32_t address, uint32_t x, uint32_t y) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(x), "r"(y) : "memory");
}

// One fragment, transposed within the warp.
TW_SM90 uint32_t transpose_fragment(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// Within each four lanes: lane q gives x[i] to lane i as its x[q].
TW_SM90 void transpose_quad(uint32_t (&x)[4]) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    const bool upper = threadIdx.x & bit;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i & bit) continue;
      const uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? x[i] : x[i | bit], bit);
      if (upper) x[i] = got;
      else x[i | bit] = got;
    }
  }
}

}  // namespace tw::sm90
