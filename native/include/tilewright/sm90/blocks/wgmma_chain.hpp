// Four of the warpgroup's products in a row as one statement: compilers take the accumulators apart and put them
// together again at each (heads of 256 elements compile in nine tenths of the time). See sm90/blocks/wgmma.hpp and
// sm90/blocks/wgmma_rs.hpp.
#pragma once
#include "tilewright/sm90/blocks/wgmma_rs.hpp"

namespace tw::sm90 {

// The product of a panel: 64 x 64 elements of A by 64 x N of B, both K-major, four steps of 16.
// N; the numbers of the descriptors' halves, of `accumulate`, and of the texts.
#define TW_PANEL_STEP(N, P, TYPES, TAIL) \
  "wgmma.mma_async.sync.aligned.m64n" #N "k%" #TYPES " {" TW_NAMES_##N "}, a, b, " P "%" #TAIL ";\n"
#define TW_PANEL_NEXT(OFFSET, AL, AH, BL, BH) \
  "add.s32 x, %" #AL ", " OFFSET ";\nadd.s32 y, %" #BL ", " OFFSET ";\nmov.b64 a, {x, %" #AH "};\nmov.b64 b, {y, %" #BH "};\n"
#define TW_WGMMA_PANEL(N, AL, AH, BL, BH, ACCUMULATE, TYPES, TAIL)                                              \
  template <class Text>                                                                                        \
  TW_SM90 void wgmma_panel(float (&d)[N / 2], Descriptor a, Descriptor b, int accumulate) {                    \
    asm volatile("{\n.reg .pred p, t;\n.reg .b32 x, y;\n.reg .b64 a, b;\nsetp.ne.b32 p, %" #ACCUMULATE           \
                 ", 0;\nsetp.eq.b32 t, 0, 0;\n" TW_PANEL_NEXT("0", AL, AH, BL, BH)                             \
                 TW_PANEL_STEP(N, "p", TYPES, TAIL) TW_PANEL_NEXT("2", AL, AH, BL, BH)                         \
                 TW_PANEL_STEP(N, "t", TYPES, TAIL) TW_PANEL_NEXT("4", AL, AH, BL, BH)                         \
                 TW_PANEL_STEP(N, "t", TYPES, TAIL) TW_PANEL_NEXT("6", AL, AH, BL, BH)                         \
                 TW_PANEL_STEP(N, "t", TYPES, TAIL) "}\n"                                                      \
                 : TW_REGISTERS_##N("+f")                                                                      \
                 : "r"(a.low), "r"(a.high), "r"(b.low), "r"(b.high), "r"(accumulate), "C"(Text::types),        \
                   "C"(Text::tail));                                                                           \
  }
TW_WIDTHS_16(TW_WGMMA_PANEL)
#undef TW_WGMMA_PANEL
#undef TW_PANEL_NEXT
#undef TW_PANEL_STEP

// Four steps with A in registers, 16 of them, B 128 units further at each: D += A x B.
// N; the numbers of A's registers, of the descriptor's halves, and of the operands' types.
#define TW_RS_STEP(N, OFFSET, A0, A1, A2, A3, BL, BH, TYPES)                                                   \
  "add.s32 y, %" #BL ", " OFFSET ";\nmov.b64 b, {y, %" #BH "};\nwgmma.mma_async.sync.aligned.m64n" #N "k%" #TYPES \
  " {" TW_NAMES_##N "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, b, t, 1, 1, 1;\n"
#define TW_WGMMA_RS_FOUR(N, A0, A1, A2, A3, A4, A5, A6, A7, A8, A9, A10, A11, A12, A13, A14, A15, BL, BH, TYPES) \
  template <class X>                                                                                           \
  TW_SM90 void wgmma_rs_four(float (&d)[N / 2], const uint32_t* a, Descriptor b) {                             \
    asm volatile("{\n.reg .pred t;\n.reg .b32 y;\n.reg .b64 b;\nsetp.eq.b32 t, 0, 0;\n"                       \
                 TW_RS_STEP(N, "0", A0, A1, A2, A3, BL, BH, TYPES)                                             \
                 TW_RS_STEP(N, "128", A4, A5, A6, A7, BL, BH, TYPES)                                           \
                 TW_RS_STEP(N, "256", A8, A9, A10, A11, BL, BH, TYPES)                                         \
                 TW_RS_STEP(N, "384", A12, A13, A14, A15, BL, BH, TYPES) "}\n"                                 \
                 : TW_REGISTERS_##N("+f")                                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]),     \
                   "r"(a[8]), "r"(a[9]), "r"(a[10]), "r"(a[11]), "r"(a[12]), "r"(a[13]), "r"(a[14]),           \
                   "r"(a[15]), "r"(b.low), "r"(b.high), "C"(WgmmaRsText<X>::types));                           \
  }
TW_WGMMA_RS_FOUR(64, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50)
TW_WGMMA_RS_FOUR(128, 64, 65, 66, 67, 68, 69, 70, 71, 72, 73, 74, 75, 76, 77, 78, 79, 80, 81, 82)
TW_WGMMA_RS_FOUR(192, 96, 97, 98, 99, 100, 101, 102, 103, 104, 105, 106, 107, 108, 109, 110, 111, 112, 113, 114)
TW_WGMMA_RS_FOUR(256, 128, 129, 130, 131, 132, 133, 134, 135, 136, 137, 138, 139, 140, 141, 142, 143, 144, 145, 146)
#undef TW_WGMMA_RS_FOUR
#undef TW_RS_STEP

}  // namespace tw::sm90
