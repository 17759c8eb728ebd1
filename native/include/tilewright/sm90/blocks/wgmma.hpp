// The warpgroup's asynchronous matrix product (wgmma): D (64 x N, registers) += A (64 x K) x B (K x N), K being 32
// bytes. A and B lie in shared memory, swizzled over 128 bytes, and are named by descriptors. fp16 and bf16 operands
// may be K-major (k contiguous) or MN-major; fp8, bf8 and int8 are K-major. N: multiples of 8 up to 256; int8: 8, 24
// and the multiples of 16.
//
// Thread t of the warpgroup holds, in d[4*j + 2*h + e], row 16*(t/32) + (t%32)/4 + 8*h and column 8*j + 2*(t%4) + e.
#pragma once
#include "tilewright/core/dtypes.hpp"
#include "tilewright/sm90/blocks/base.hpp"

namespace tw::sm90 {

// Before the first product that touches the accumulators, and after ordinary code has written them.
TW_SM90 void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Closes a group of products; `wgmma_wait` waits until at most kPending groups are unfinished.
TW_SM90 void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
TW_SM90 void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving reads of the accumulators before the wait that precedes this.
template <int kCount>
TW_SM90 void pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4)
    asm volatile("" : "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])::"memory");
}
template <int kCount>
TW_SM90 void pin(int32_t (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4)
    asm volatile("" : "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3])::"memory");
}

// A descriptor's halves: the low word carries the address, and sums of it with offsets in units of 16 bytes stay valid.
struct Descriptor {
  uint32_t low, high;
  TW_SM90 Descriptor moved(uint32_t offset) const { return {low + offset, high}; }
  TW_SM90 uint64_t plus(uint32_t offset) const { return ((uint64_t)high << 32) | (low + offset); }
};
// K-major: rows of 128 bytes along k, 8 rows (1024 bytes) after 8 rows; the address is a multiple of 1024 bytes. A step
// of K is 2 units.
TW_SM90 Descriptor k_major(uint32_t address) {
  return {((address & 0x3ffff) >> 4) | (1u << 16), (1024 >> 4) | (1u << 30)};
}
// MN-major: panels of 64 elements (128 bytes) along m or n, `panel_bytes` apart; within a panel one row of 128 bytes
// per k. A step of K (16 elements) is 128 units.
TW_SM90 Descriptor mn_major(uint32_t address, uint32_t panel_bytes) {
  return {((address & 0x3ffff) >> 4) | ((panel_bytes >> 4) << 16), (1024 >> 4) | (1u << 30)};
}

// The middle of the instruction's name and its last operands, as text.
template <class A, class B, bool kAMn, bool kBMn>
struct WgmmaText;
#define TW_WGMMA_WIDE(TYPE, NAME, A_MN, B_MN)                              \
  template <>                                                              \
  struct WgmmaText<TYPE, TYPE, A_MN, B_MN> {                               \
    static constexpr char types[] = "16.f32." NAME "." NAME;               \
    static constexpr char tail[] = {',', '1', ',', '1', ',', '0' + A_MN, ',', '0' + B_MN, 0}; \
  };
TW_WGMMA_WIDE(fp16, "f16", false, false)
TW_WGMMA_WIDE(fp16, "f16", false, true)
TW_WGMMA_WIDE(fp16, "f16", true, false)
TW_WGMMA_WIDE(fp16, "f16", true, true)
TW_WGMMA_WIDE(bf16, "bf16", false, false)
TW_WGMMA_WIDE(bf16, "bf16", false, true)
TW_WGMMA_WIDE(bf16, "bf16", true, false)
TW_WGMMA_WIDE(bf16, "bf16", true, true)
#undef TW_WGMMA_WIDE
#define TW_WGMMA_NARROW(A, B, TYPES, TAIL)          \
  template <>                                       \
  struct WgmmaText<A, B, false, false> {            \
    static constexpr char types[] = "32." TYPES;    \
    static constexpr char tail[] = TAIL;            \
  };
TW_WGMMA_NARROW(fp8, fp8, "f32.e4m3.e4m3", ",1,1")
TW_WGMMA_NARROW(fp8, bf8, "f32.e4m3.e5m2", ",1,1")
TW_WGMMA_NARROW(bf8, fp8, "f32.e5m2.e4m3", ",1,1")
TW_WGMMA_NARROW(bf8, bf8, "f32.e5m2.e5m2", ",1,1")
TW_WGMMA_NARROW(int8, int8, "s32.s8.s8", "")
#undef TW_WGMMA_NARROW

// wgmma<Text>(d, a, b, accumulate): one product; the size of d gives N. accumulate == 0: D is overwritten.
#define TW_NAMES_8 "%0, %1, %2, %3"
#define TW_REGISTERS_8(K) K(d[0]), K(d[1]), K(d[2]), K(d[3])
#define TW_NAMES_16 TW_NAMES_8 ", %4, %5, %6, %7"
#define TW_REGISTERS_16(K) TW_REGISTERS_8(K), K(d[4]), K(d[5]), K(d[6]), K(d[7])
#define TW_NAMES_24 TW_NAMES_16 ", %8, %9, %10, %11"
#define TW_REGISTERS_24(K) TW_REGISTERS_16(K), K(d[8]), K(d[9]), K(d[10]), K(d[11])
#define TW_NAMES_32 TW_NAMES_24 ", %12, %13, %14, %15"
#define TW_REGISTERS_32(K) TW_REGISTERS_24(K), K(d[12]), K(d[13]), K(d[14]), K(d[15])
#define TW_NAMES_40 TW_NAMES_32 ", %16, %17, %18, %19"
#define TW_REGISTERS_40(K) TW_REGISTERS_32(K), K(d[16]), K(d[17]), K(d[18]), K(d[19])
#define TW_NAMES_48 TW_NAMES_40 ", %20, %21, %22, %23"
#define TW_REGISTERS_48(K) TW_REGISTERS_40(K), K(d[20]), K(d[21]), K(d[22]), K(d[23])
#define TW_NAMES_56 TW_NAMES_48 ", %24, %25, %26, %27"
#define TW_REGISTERS_56(K) TW_REGISTERS_48(K), K(d[24]), K(d[25]), K(d[26]), K(d[27])
#define TW_NAMES_64 TW_NAMES_56 ", %28, %29, %30, %31"
#define TW_REGISTERS_64(K) TW_REGISTERS_56(K), K(d[28]), K(d[29]), K(d[30]), K(d[31])
#define TW_NAMES_72 TW_NAMES_64 ", %32, %33, %34, %35"
#define TW_REGISTERS_72(K) TW_REGISTERS_64(K), K(d[32]), K(d[33]), K(d[34]), K(d[35])
#define TW_NAMES_80 TW_NAMES_72 ", %36, %37, %38, %39"
#define TW_REGISTERS_80(K) TW_REGISTERS_72(K), K(d[36]), K(d[37]), K(d[38]), K(d[39])
#define TW_NAMES_88 TW_NAMES_80 ", %40, %41, %42, %43"
#define TW_REGISTERS_88(K) TW_REGISTERS_80(K), K(d[40]), K(d[41]), K(d[42]), K(d[43])
#define TW_NAMES_96 TW_NAMES_88 ", %44, %45, %46, %47"
#define TW_REGISTERS_96(K) TW_REGISTERS_88(K), K(d[44]), K(d[45]), K(d[46]), K(d[47])
#define TW_NAMES_104 TW_NAMES_96 ", %48, %49, %50, %51"
#define TW_REGISTERS_104(K) TW_REGISTERS_96(K), K(d[48]), K(d[49]), K(d[50]), K(d[51])
#define TW_NAMES_112 TW_NAMES_104 ", %52, %53, %54, %55"
#define TW_REGISTERS_112(K) TW_REGISTERS_104(K), K(d[52]), K(d[53]), K(d[54]), K(d[55])
#define TW_NAMES_120 TW_NAMES_112 ", %56, %57, %58, %59"
#define TW_REGISTERS_120(K) TW_REGISTERS_112(K), K(d[56]), K(d[57]), K(d[58]), K(d[59])
#define TW_NAMES_128 TW_NAMES_120 ", %60, %61, %62, %63"
#define TW_REGISTERS_128(K) TW_REGISTERS_120(K), K(d[60]), K(d[61]), K(d[62]), K(d[63])
#define TW_NAMES_136 TW_NAMES_128 ", %64, %65, %66, %67"
#define TW_REGISTERS_136(K) TW_REGISTERS_128(K), K(d[64]), K(d[65]), K(d[66]), K(d[67])
#define TW_NAMES_144 TW_NAMES_136 ", %68, %69, %70, %71"
#define TW_REGISTERS_144(K) TW_REGISTERS_136(K), K(d[68]), K(d[69]), K(d[70]), K(d[71])
#define TW_NAMES_152 TW_NAMES_144 ", %72, %73, %74, %75"
#define TW_REGISTERS_152(K) TW_REGISTERS_144(K), K(d[72]), K(d[73]), K(d[74]), K(d[75])
#define TW_NAMES_160 TW_NAMES_152 ", %76, %77, %78, %79"
#define TW_REGISTERS_160(K) TW_REGISTERS_152(K), K(d[76]), K(d[77]), K(d[78]), K(d[79])
#define TW_NAMES_168 TW_NAMES_160 ", %80, %81, %82, %83"
#define TW_REGISTERS_168(K) TW_REGISTERS_160(K), K(d[80]), K(d[81]), K(d[82]), K(d[83])
#define TW_NAMES_176 TW_NAMES_168 ", %84, %85, %86, %87"
#define TW_REGISTERS_176(K) TW_REGISTERS_168(K), K(d[84]), K(d[85]), K(d[86]), K(d[87])
#define TW_NAMES_184 TW_NAMES_176 ", %88, %89, %90, %91"
#define TW_REGISTERS_184(K) TW_REGISTERS_176(K), K(d[88]), K(d[89]), K(d[90]), K(d[91])
#define TW_NAMES_192 TW_NAMES_184 ", %92, %93, %94, %95"
#define TW_REGISTERS_192(K) TW_REGISTERS_184(K), K(d[92]), K(d[93]), K(d[94]), K(d[95])
#define TW_NAMES_200 TW_NAMES_192 ", %96, %97, %98, %99"
#define TW_REGISTERS_200(K) TW_REGISTERS_192(K), K(d[96]), K(d[97]), K(d[98]), K(d[99])
#define TW_NAMES_208 TW_NAMES_200 ", %100, %101, %102, %103"
#define TW_REGISTERS_208(K) TW_REGISTERS_200(K), K(d[100]), K(d[101]), K(d[102]), K(d[103])
#define TW_NAMES_216 TW_NAMES_208 ", %104, %105, %106, %107"
#define TW_REGISTERS_216(K) TW_REGISTERS_208(K), K(d[104]), K(d[105]), K(d[106]), K(d[107])
#define TW_NAMES_224 TW_NAMES_216 ", %108, %109, %110, %111"
#define TW_REGISTERS_224(K) TW_REGISTERS_216(K), K(d[108]), K(d[109]), K(d[110]), K(d[111])
#define TW_NAMES_232 TW_NAMES_224 ", %112, %113, %114, %115"
#define TW_REGISTERS_232(K) TW_REGISTERS_224(K), K(d[112]), K(d[113]), K(d[114]), K(d[115])
#define TW_NAMES_240 TW_NAMES_232 ", %116, %117, %118, %119"
#define TW_REGISTERS_240(K) TW_REGISTERS_232(K), K(d[116]), K(d[117]), K(d[118]), K(d[119])
#define TW_NAMES_248 TW_NAMES_240 ", %120, %121, %122, %123"
#define TW_REGISTERS_248(K) TW_REGISTERS_240(K), K(d[120]), K(d[121]), K(d[122]), K(d[123])
#define TW_NAMES_256 TW_NAMES_248 ", %124, %125, %126, %127"
#define TW_REGISTERS_256(K) TW_REGISTERS_248(K), K(d[124]), K(d[125]), K(d[126]), K(d[127])

// The widths N, each with the numbers that a statement's seven operands after the accumulators have: multiples of
// 64, of 16, the two others that int8 has too, and those of floats alone.
#define TW_WIDTHS_64(X) \
  X(64, 32, 33, 34, 35, 36, 37, 38) X(128, 64, 65, 66, 67, 68, 69, 70) X(192, 96, 97, 98, 99, 100, 101, 102) \
  X(256, 128, 129, 130, 131, 132, 133, 134)
#define TW_WIDTHS_16(X) TW_WIDTHS_64(X) \
  X(16, 8, 9, 10, 11, 12, 13, 14) X(32, 16, 17, 18, 19, 20, 21, 22) X(48, 24, 25, 26, 27, 28, 29, 30) \
  X(80, 40, 41, 42, 43, 44, 45, 46) X(96, 48, 49, 50, 51, 52, 53, 54) X(112, 56, 57, 58, 59, 60, 61, 62) \
  X(144, 72, 73, 74, 75, 76, 77, 78) X(160, 80, 81, 82, 83, 84, 85, 86) X(176, 88, 89, 90, 91, 92, 93, 94) \
  X(208, 104, 105, 106, 107, 108, 109, 110) X(224, 112, 113, 114, 115, 116, 117, 118) \
  X(240, 120, 121, 122, 123, 124, 125, 126)
#define TW_WIDTHS_8_24(X) \
  X(8, 4, 5, 6, 7, 8, 9, 10) X(24, 12, 13, 14, 15, 16, 17, 18)
#define TW_WIDTHS_ODD(X) \
  X(40, 20, 21, 22, 23, 24, 25, 26) X(56, 28, 29, 30, 31, 32, 33, 34) X(72, 36, 37, 38, 39, 40, 41, 42) \
  X(88, 44, 45, 46, 47, 48, 49, 50) X(104, 52, 53, 54, 55, 56, 57, 58) X(120, 60, 61, 62, 63, 64, 65, 66) \
  X(136, 68, 69, 70, 71, 72, 73, 74) X(152, 76, 77, 78, 79, 80, 81, 82) X(168, 84, 85, 86, 87, 88, 89, 90) \
  X(184, 92, 93, 94, 95, 96, 97, 98) X(200, 100, 101, 102, 103, 104, 105, 106) \
  X(216, 108, 109, 110, 111, 112, 113, 114) X(232, 116, 117, 118, 119, 120, 121, 122) \
  X(248, 124, 125, 126, 127, 128, 129, 130)

// N; the numbers of descriptor A, descriptor B, accumulate, types, tail; the accumulators' type and constraint.
#define TW_WGMMA(N, A, B, ACCUMULATE, TYPES, TAIL, T, K)                                                          \
  template <class Text>                                                                                           \
  TW_SM90 void wgmma(T (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) {                                     \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ACCUMULATE ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k%" \
                 #TYPES " {" TW_NAMES_##N "}, %" #A ", %" #B ", p%" #TAIL ";\n}\n"                                 \
                 : TW_REGISTERS_##N(K)                                                                            \
                 : "l"(a), "l"(b), "r"(accumulate), "C"(Text::types), "C"(Text::tail));                           \
  }
#define TW_WGMMA_FLOAT(N, A, B, C, D, E, F, G) TW_WGMMA(N, A, B, C, D, E, float, "+f")
#define TW_WGMMA_BOTH(N, A, B, C, D, E, F, G) \
  TW_WGMMA_FLOAT(N, A, B, C, D, E, F, G) TW_WGMMA(N, A, B, C, D, E, int32_t, "+r")
TW_WIDTHS_8_24(TW_WGMMA_BOTH)
TW_WIDTHS_16(TW_WGMMA_BOTH)
TW_WIDTHS_ODD(TW_WGMMA_FLOAT)
#undef TW_WGMMA_BOTH
#undef TW_WGMMA_FLOAT
#undef TW_WGMMA

}  // namespace tw::sm90
