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

#define TW_RS_NAMES_64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15" \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TW_RS_REGISTERS_64 \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define TW_RS_NAMES_128 TW_RS_NAMES_64 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TW_RS_REGISTERS_128 TW_RS_REGISTERS_64, \
  "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
  "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
  "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
  "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define TW_RS_NAMES_192 TW_RS_NAMES_128 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define TW_RS_REGISTERS_192 TW_RS_REGISTERS_128, \
  "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), \
  "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), \
  "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), \
  "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define TW_RS_NAMES_256 TW_RS_NAMES_192 \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define TW_RS_REGISTERS_256 TW_RS_REGISTERS_192, \
  "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), \
  "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), \
  "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), \
  "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

// N; the numbers of a[0] to a[3], of B's descriptor, of `accumulate` and of the operands' types.
#define TW_WGMMA_RS(N, A0, A1, A2, A3, B, ACCUMULATE, TYPES)                                                       \
  template <class X>                                                                                               \
  TW_SM90 void wgmma_rs(float (&d)[N / 2], const uint32_t* a, uint64_t b, int accumulate) {                        \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ACCUMULATE ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k%" \
                 #TYPES " {" TW_RS_NAMES_##N "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B                   \
                 ", p, 1, 1, 1;\n}\n"                                                                              \
                 : TW_RS_REGISTERS_##N                                                                             \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),                            \
                   "C"(WgmmaRsText<X>::types));                                                                    \
  }
TW_WGMMA_RS(64, 32, 33, 34, 35, 36, 37, 38)
TW_WGMMA_RS(128, 64, 65, 66, 67, 68, 69, 70)
TW_WGMMA_RS(192, 96, 97, 98, 99, 100, 101, 102)
TW_WGMMA_RS(256, 128, 129, 130, 131, 132, 133, 134)
#undef TW_WGMMA_RS

}  // namespace tw::sm90
