// The warpgroup's asynchronous matrix product with A in registers: D (64 x N) += A (64 x 16) x B (16 x N), fp16 or bf16.
// B lies in shared memory with n contiguous, in panels of 64 elements (`mn_major`). Thread t of the warpgroup gives A's
// rows r = 16*(t/32) + (t%32)/4 and r + 8: a[0] and a[2] hold columns c = 2*(t%4) and c + 8 of row r, a[1] and a[3] of row
// r + 8, two neighbouring columns in each. So results of two neighbouring groups of 8 columns, rounded, are an A.
//
// What was said of wgmma's accumulators holds for A's registers too: none of them may change before the wait.
#pragma once
#include "tilewright/sm90/blocks/wgmma.hpp"

namespace tw::sm90 {

template <class X>
struct WgmmaRsText {
  static constexpr char types[] = "16.f32.bf16.bf16";
};
template <>
struct WgmmaRsText<fp16> {
  static constexpr char types[] = "16.f32.f16.f16";
};

// N; the numbers of a[0] to a[3], of B's descriptor, of `accumulate` and of the operands' types.
#define TW_WGMMA_RS(N, A0, A1, A2, A3, B, ACCUMULATE, TYPES)                                                       \
  template <class X>                                                                                               \
  TW_SM90 void wgmma_rs(float (&d)[N / 2], const uint32_t* a, uint64_t b, int accumulate) {                        \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ACCUMULATE ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k%" \
                 #TYPES " {" TW_NAMES_##N "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B                   \
                 ", p, 1, 1, 1;\n}\n"                                                                              \
                 : TW_REGISTERS_##N("+f")                                                                         \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),                            \
                   "C"(WgmmaRsText<X>::types));                                                                    \
  }
TW_WIDTHS_64(TW_WGMMA_RS)
#undef TW_WGMMA_RS

}  // namespace tw::sm90
