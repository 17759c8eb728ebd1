// Matrix instructions of AMD GPUs as functions, and which of them a GPU has. The layouts of their operands are stated
// in gpu/amd/fragments.hpp.
#pragma once
#include "tilewright/core/dtypes.hpp"
#include "tilewright/gpu/amd/fragments.hpp"

namespace tw::gpu {

#if defined(__GFX12__)
constexpr MatrixUnit kMatrixUnit = MatrixUnit::wmma_gfx12;
#elif defined(__GFX11__)
constexpr MatrixUnit kMatrixUnit = MatrixUnit::wmma_gfx11;
#else
constexpr MatrixUnit kMatrixUnit = MatrixUnit::mfma;
#endif

// The type as which the matrix unit multiplies elements of type E. 8-bit floats on gfx90a are widened, exactly, to
// bf16: it multiplies no 8-bit floats, and takes subnormal fp16 values for zero.
template <class E>
struct MultipliedAs {
  using type = E;
};
#if defined(__gfx90a__)
template <>
struct MultipliedAs<fp8> {
  using type = bf16;
};
template <>
struct MultipliedAs<bf8> {
  using type = bf16;
};
#endif

// Bytes along k that a lane gives to the deepest instruction whose depth divides `depth` (elements); 0 if there is
// none. E: what is multiplied; kM x kN: results of the instruction.
template <class E, int kM, int kN>
constexpr int lane_bytes_of(int depth) {
  constexpr int kSize = size_of<E>;
#if defined(__GFX12__)
  constexpr int kBytes[] = {kSize <= 2 ? 8 * kSize : 0};
#elif defined(__GFX11__)
  constexpr int kBytes[] = {kSize == 2 || is_same<E, int8> ? 16 * kSize : 0};
#else
#if defined(__gfx950__)
  constexpr int kBytes[] = {kSize == 4 ? 4 : kM != kN ? 8 : kSize == 1 && E::is_float ? 32 : 16, kSize == 4 ? 0 : 8};
#elif defined(__gfx942__)
  constexpr int kBytes[] = {kSize == 4 ? 4 : 8};
#else
  constexpr int kBytes[] = {kSize == 2 ? 8 : 4};
#endif
  if (kM != kN && kSize != 2) return 0;  // 4 x 64 and 64 x 4
#endif
  constexpr FragmentLayout kLayout = fragment_layout(kMatrixUnit, kN);
  if (kLayout.rows != kN || kLayout.columns != kM) return 0;
  for (const int bytes : kBytes)
    if (bytes > 0 && depth % (kLayout.groups * bytes / kSize) == 0) return bytes;
  return 0;
}

// `multiply_matrix`: c += x * y, for a first operand of kRows rows of type X and a second one of type Y. A lane's part
// of either is a vector of registers.
#if defined(__GFX11__) || defined(__GFX12__)

#if defined(__GFX12__)
#define TW_WMMA_NAME(NAME) __builtin_amdgcn_wmma_##NAME##_w32_gfx12
#else
#define TW_WMMA_NAME(NAME) __builtin_amdgcn_wmma_##NAME##_w32
#endif
#define TW_WMMA(NAME, TYPE) c = TW_WMMA_NAME(NAME)(bits_as<TYPE>(x), bits_as<TYPE>(y), c)
template <class X, class Y, int kRows, class Operand, class Results>
TW_DEVICE void multiply_matrix(Results& c, Operand x, Operand y) {
  constexpr int kWords = sizeof(Operand) / 4;
  using Half = Vector<_Float16, kWords * 2>;
  using Short = Vector<short, kWords * 2>;
  using Int = Vector<int, kWords>;
  if constexpr (is_same<X, fp16>) TW_WMMA(f32_16x16x16_f16, Half);
  else if constexpr (is_same<X, bf16>) TW_WMMA(f32_16x16x16_bf16, Short);
  else if constexpr (is_same<X, int8>)  // both signed, no clamping
    c = TW_WMMA_NAME(i32_16x16x16_iu8)(true, bits_as<Int>(x), true, bits_as<Int>(y), c, false);
#if defined(__GFX12__)
  else if constexpr (is_same<X, fp8> && is_same<Y, fp8>) TW_WMMA(f32_16x16x16_fp8_fp8, Int);
  else if constexpr (is_same<X, fp8>) TW_WMMA(f32_16x16x16_fp8_bf8, Int);
  else if constexpr (is_same<Y, fp8>) TW_WMMA(f32_16x16x16_bf8_fp8, Int);
  else TW_WMMA(f32_16x16x16_bf8_bf8, Int);
#endif
}
#undef TW_WMMA
#undef TW_WMMA_NAME

#else

#define TW_MFMA(NAME, TYPE) c = __builtin_amdgcn_mfma_##NAME(bits_as<TYPE>(x), bits_as<TYPE>(y), c, 0, 0, 0)
#if defined(__gfx942__) || defined(__gfx950__)
template <class X, class Y, int kRows, class Results>
TW_DEVICE void multiply_bytes(Results& c, Vector<uint32_t, 2> x, Vector<uint32_t, 2> y) {
#define TW_MFMA_BYTES(TYPES)                                          \
  {                                                                   \
    if constexpr (kRows == 32) TW_MFMA(f32_32x32x16_##TYPES, int64_t); \
    else TW_MFMA(f32_16x16x32_##TYPES, int64_t);                      \
  }
  if constexpr (is_same<X, int8>) {
    if constexpr (kRows == 32) TW_MFMA(i32_32x32x16_i8, int64_t);
    else TW_MFMA(i32_16x16x32_i8, int64_t);
  } else if constexpr (is_same<X, fp8> && is_same<Y, fp8>) TW_MFMA_BYTES(fp8_fp8)
  else if constexpr (is_same<X, fp8>) TW_MFMA_BYTES(fp8_bf8)
  else if constexpr (is_same<Y, fp8>) TW_MFMA_BYTES(bf8_fp8)
  else TW_MFMA_BYTES(bf8_bf8)
#undef TW_MFMA_BYTES
}
#endif

#if defined(__gfx950__)
template <class X, class Y, int kRows, class Results>
TW_DEVICE void multiply_deep(Results& c, Vector<uint32_t, 4> x, Vector<uint32_t, 4> y) {
  using Half = Vector<_Float16, 8>;
  using Bfloat = Vector<__bf16, 8>;
  using Int = Vector<int, 4>;
  if constexpr (is_same<X, fp16> && kRows == 32) TW_MFMA(f32_32x32x16_f16, Half);
  else if constexpr (is_same<X, fp16>) TW_MFMA(f32_16x16x32_f16, Half);
  else if constexpr (is_same<X, bf16> && kRows == 32) TW_MFMA(f32_32x32x16_bf16, Bfloat);
  else if constexpr (is_same<X, bf16>) TW_MFMA(f32_16x16x32_bf16, Bfloat);
  else if constexpr (kRows == 32) TW_MFMA(i32_32x32x32_i8, Int);
  else TW_MFMA(i32_16x16x64_i8, Int);
}
// Scales of 0 select the form without scales.
template <class X, class Y, int kRows, class Results>
TW_DEVICE void multiply_deep(Results& c, Vector<uint32_t, 8> x, Vector<uint32_t, 8> y) {
  using Int = Vector<int, 8>;
  constexpr int kX = is_same<X, bf8>, kY = is_same<Y, bf8>;  // codes of the formats: E4M3 0, E5M2 1
  if constexpr (kRows == 32)
    c = __builtin_amdgcn_mfma_scale_f32_32x32x64_f8f6f4(bits_as<Int>(x), bits_as<Int>(y), c, kX, kY, 0, 0, 0, 0);
  else c = __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(bits_as<Int>(x), bits_as<Int>(y), c, kX, kY, 0, 0, 0, 0);
}
#endif

template <class X, class Y, int kRows, class Operand, class Results>
TW_DEVICE void multiply_matrix(Results& c, Operand x, Operand y) {
  constexpr int kWords = sizeof(Operand) / 4;
  using Half = Vector<_Float16, 4>;
  using Short = Vector<short, 4>;
  if constexpr (is_same<X, fp32>) {
    if constexpr (kRows == 32) TW_MFMA(f32_32x32x2f32, float);
    else TW_MFMA(f32_16x16x4f32, float);
  } else if constexpr (kWords == 2 && is_same<X, fp16>) {
    if constexpr (kRows == 32) TW_MFMA(f32_32x32x8f16, Half);
    else if constexpr (kRows == 16) TW_MFMA(f32_16x16x16f16, Half);
    else TW_MFMA(f32_4x4x4f16, Half);
  } else if constexpr (kWords == 2 && is_same<X, bf16>) {
    if constexpr (kRows == 32) TW_MFMA(f32_32x32x8bf16_1k, Short);
    else if constexpr (kRows == 16) TW_MFMA(f32_16x16x16bf16_1k, Short);
    else TW_MFMA(f32_4x4x4bf16_1k, Short);
  } else {
#if defined(__gfx90a__)
    if constexpr (kRows == 32) TW_MFMA(i32_32x32x8i8, int32_t);
    else TW_MFMA(i32_16x16x16i8, int32_t);
#else
    if constexpr (kWords == 2) multiply_bytes<X, Y, kRows>(c, x, y);
#if defined(__gfx950__)
    else multiply_deep<X, Y, kRows>(c, x, y);
#endif
#endif
  }
}
#undef TW_MFMA

#endif

}  // namespace tw::gpu
