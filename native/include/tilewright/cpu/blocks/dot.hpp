// Dot-product steps: the innermost operation of every kernel here.
//
// Packed operands are arrays of 32-bit groups; one group holds `depth` consecutive values of k (the warp_tile_k of a
// configuration). A step multiplies one group of A, broadcast to all lanes, with L groups of B and adds the products to
// L accumulators. Each has the instruction where the level has it, and else the same arithmetic from vector operations,
// so that a configuration means the same everywhere.
#pragma once
#include "tilewright/core/meta.hpp"
#include "tilewright/core/types.hpp"

TW_NAMESPACE_BEGIN

struct DotF32 {  // any float type, widened to fp32
  using accumulator = f32v;
  using scalar = float;
  static constexpr int depth = 1;
  static constexpr bool is_float = true, offset_a = false;
  TW_INLINE static f32v step(f32v c, u32v a, u32v b) { return c + (f32v)a * (f32v)b; }
};

struct DotBf16 {  // pairs of bf16
  using accumulator = f32v;
  using scalar = float;
  static constexpr int depth = 2;
  static constexpr bool is_float = true, offset_a = false;
  TW_INLINE static f32v step(f32v c, u32v a, u32v b) {
#if defined(__AVX512BF16__) && defined(__clang__)
    typedef __bf16 v32bf __attribute__((vector_size(64)));
    return (f32v)__builtin_ia32_dpbf16ps_512(c, (v32bf)a, (v32bf)b);
#elif defined(__AVX512BF16__)
#if __GNUC__ >= 13  // takes its own type since then, shorts before
    typedef __bf16 v32bf __attribute__((vector_size(64)));
#else
    typedef short v32bf __attribute__((vector_size(64)));
#endif
    return (f32v)__builtin_ia32_dpbf16ps_v16sf(c, (v32bf)a, (v32bf)b);
#else
    c += (f32v)(a << 16) * (f32v)(b << 16);
    return c + (f32v)(a & 0xffff0000u) * (f32v)(b & 0xffff0000u);
#endif
  }
};

struct DotI32 {  // int8 widened to int32
  using accumulator = i32v;
  using scalar = int32_t;
  static constexpr int depth = 1;
  static constexpr bool is_float = false, offset_a = false;
  TW_INLINE static i32v step(i32v c, u32v a, u32v b) { return (i32v)((u32v)c + a * b); }
};

struct DotI16 {  // int8 widened to pairs of int16
  using accumulator = i32v;
  using scalar = int32_t;
  static constexpr int depth = 2;
  static constexpr bool is_float = false, offset_a = false;
  TW_INLINE static i32v step(i32v c, u32v a, u32v b) {
#if defined(__x86_64__)
    typedef short shorts __attribute__((vector_size(kVectorBytes)));
#if TW_VECTOR_BYTES == 16
    return c + (i32v)__builtin_ia32_pmaddwd128((shorts)a, (shorts)b);
#elif TW_VECTOR_BYTES == 32
    return c + (i32v)__builtin_ia32_pmaddwd256((shorts)a, (shorts)b);
#elif defined(__clang__)
    return c + (i32v)__builtin_ia32_pmaddwd512((shorts)a, (shorts)b);
#else
    return c + (i32v)__builtin_ia32_pmaddwd512_mask((shorts)a, (shorts)b, i32v{}, (unsigned short)-1);
#endif
#else
    return c + ((i32v)(a << 16) >> 16) * ((i32v)(b << 16) >> 16) + ((i32v)a >> 16) * ((i32v)b >> 16);
#endif
  }
};

// Quadruples of bytes: unsigned a times signed b. Signed A is packed with 128 added to every value; what that adds to a
// sum, 128 times the column sum of B, is taken away at the end (`offset_a`).
struct DotI8 {
  using accumulator = i32v;
  using scalar = int32_t;
  static constexpr int depth = 4;
  static constexpr bool is_float = false, offset_a = true;
  TW_INLINE static i32v step(i32v c, u32v a, u32v b) {
#if defined(__AVX512VNNI__) && defined(__clang__)
    return (i32v)__builtin_ia32_vpdpbusd512(c, (i32v)a, (i32v)b);
#elif defined(__AVX512VNNI__)
    return (i32v)__builtin_ia32_vpdpbusd_v16si(c, (i32v)a, (i32v)b);
#else
    TW_UNROLL
    for (int byte = 0; byte < 4; byte++) c += (i32v)((a >> (8 * byte)) & 0xffu) * ((i32v)(b << (24 - 8 * byte)) >> 24);
    return c;
#endif
  }
};

// The step that multiplies elements of types A and B in groups of kDepth.
template <class A, class B, int kDepth>
struct DotFor {
  static constexpr bool bf16_exact =
      (is_same<A, bf16> || size_of<A> == 1) && (is_same<B, bf16> || size_of<B> == 1) && A::is_float && B::is_float;
  static constexpr bool integers = is_same<A, int8> && is_same<B, int8>;
  static_assert(integers || (A::is_float && B::is_float), "int8 is multiplied with int8, floats with floats");
  static_assert(kDepth == 1 || (kDepth == 2 && (integers || bf16_exact)) || (kDepth == 4 && integers),
                "warp_tile_k: 1 for all types, 2 for bf16, fp8, bf8 and int8, 4 for int8");
  using float_dot = Choose<kDepth == 1, DotF32, DotBf16>;
  using integer_dot = Choose<kDepth == 1, DotI32, Choose<kDepth == 2, DotI16, DotI8>>;
  using type = Choose<integers, integer_dot, float_dot>;
};

TW_NAMESPACE_END
