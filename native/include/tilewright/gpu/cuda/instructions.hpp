// Matrix instructions of NVIDIA GPUs as functions. The layouts of their operands are stated in gpu/cuda/atom_mma.hpp.
#pragma once
#include "tilewright/core/dtypes.hpp"
#include "tilewright/gpu/platform.hpp"

namespace tw::gpu {

// kCount (2 or 4) matrices of 8 x 8 16-bit values; lane 8*i + r gives the shared address of row r of matrix i. Lane l
// gets of each matrix the values (l / 4, l % 4 * 2) and the next; transposed: (l % 4 * 2, l / 4) and the one below.
template <int kCount, bool kTransposed>
TW_DEVICE Words<kCount> load_matrices(uint32_t address) {
  Words<kCount> x;
  if constexpr (kCount == 4 && kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3])
                 : "r"(address));
  else if constexpr (kCount == 4)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3])
                 : "r"(address));
  else if constexpr (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(x.w[0]), "=r"(x.w[1])
                 : "r"(address));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(x.w[0]), "=r"(x.w[1])
                 : "r"(address));
  return x;
}

#define TW_MMA(WHAT, KIND)                                                                                    \
  asm volatile("mma.sync.aligned." WHAT " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"    \
               : "+" KIND(c[0]), "+" KIND(c[1]), "+" KIND(c[2]), "+" KIND(c[3])                               \
               : "r"(a.w[0]), "r"(a.w[1]), "r"(a.w[2]), "r"(a.w[3]), "r"(b.w[0]), "r"(b.w[1]))

// c += a * b: 16 x 8 results, 32 bytes along k.
template <class A, class B>
TW_DEVICE void mma_16x8(float (&c)[4], const Words<4>& a, const Words<2>& b) {
  if constexpr (is_same<A, fp16>) TW_MMA("m16n8k16.row.col.f32.f16.f16.f32", "f");
  else if constexpr (is_same<A, bf16>) TW_MMA("m16n8k16.row.col.f32.bf16.bf16.f32", "f");
  else {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
    if constexpr (is_same<A, fp8> && is_same<B, fp8>) TW_MMA("m16n8k32.row.col.f32.e4m3.e4m3.f32", "f");
    else if constexpr (is_same<A, fp8>) TW_MMA("m16n8k32.row.col.f32.e4m3.e5m2.f32", "f");
    else if constexpr (is_same<B, fp8>) TW_MMA("m16n8k32.row.col.f32.e5m2.e4m3.f32", "f");
    else TW_MMA("m16n8k32.row.col.f32.e5m2.e5m2.f32", "f");
#else
    static_assert(is_same<A, fp16>, "this GPU has no matrix instruction for 8-bit floats");
#endif
  }
}
template <class A, class B>
TW_DEVICE void mma_16x8(int32_t (&c)[4], const Words<4>& a, const Words<2>& b) {
  TW_MMA("m16n8k32.row.col.s32.s8.s8.s32", "r");
}
#undef TW_MMA

#define TW_MMA_HALF(WHAT)                                                                                  \
  asm volatile("mma.sync.aligned." WHAT " {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"             \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                            \
               : "r"(a0), "r"(a1), "r"(b))

// The same with 16 bytes along k, of fp16 or bf16: a0, a1 and b are a[0], a[1] and b[0] of gpu/cuda/atom_mma.hpp.
template <class E>
TW_DEVICE void mma_16x8_half(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  if constexpr (is_same<E, fp16>) TW_MMA_HALF("m16n8k8.row.col.f32.f16.f16.f32");
  else TW_MMA_HALF("m16n8k8.row.col.f32.bf16.bf16.f32");
}
#undef TW_MMA_HALF

}  // namespace tw::gpu
