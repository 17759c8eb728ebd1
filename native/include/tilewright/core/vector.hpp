// Vectors of the width that the instruction-set level offers (64, 32 or 16 bytes), made from compiler vector types: the
// same source serves x86-64-v2, -v3, -v4 and AArch64. No intrinsics header and no standard library header: they would
// cost more compile time than the kernel.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define TW_INLINE inline __attribute__((always_inline))
#define TW_NOINLINE __attribute__((noinline))
#if defined(__clang__)
#define TW_UNROLL _Pragma("clang loop unroll(full)")
#define TW_UNROLL_BY_2 _Pragma("clang loop unroll_count(2)")
#else
#define TW_UNROLL _Pragma("GCC unroll 128")
#define TW_UNROLL_BY_2 _Pragma("GCC unroll 2")
#pragma GCC diagnostic ignored \
    "-Wpsabi"  // every function that passes vectors is inlined, so their calling convention does not matter
#endif

// Everything of ours is hidden: two kernels that are loaded side by side never share (or collide in) a symbol.
#define TW_NAMESPACE_BEGIN namespace tw __attribute__((visibility("hidden"))) {
#define TW_NAMESPACE_END }

TW_NAMESPACE_BEGIN

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define TW_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define TW_VECTOR_BYTES 32
#else
#define TW_VECTOR_BYTES 16
#endif
constexpr int kVectorBytes = TW_VECTOR_BYTES;
constexpr int kLanes = kVectorBytes / 4;  // 32-bit lanes of one vector: L in the comments

typedef float f32v __attribute__((vector_size(kVectorBytes)));
typedef int32_t i32v __attribute__((vector_size(kVectorBytes)));
typedef uint32_t u32v __attribute__((vector_size(kVectorBytes)));
typedef int16_t i16v __attribute__((vector_size(kVectorBytes)));
typedef uint16_t u16v __attribute__((vector_size(kVectorBytes)));
typedef uint16_t u16_half __attribute__((vector_size(kVectorBytes / 2)));
typedef uint8_t u8_quarter __attribute__((vector_size(kVectorBytes / 4)));

template <int... kIndex>
struct Sequence {};
#if defined(__clang__)
template <class, int... kIndex>
struct SequenceOf {
  using type = Sequence<kIndex...>;
};
template <int kCount>
struct MakeSequence : __make_integer_seq<SequenceOf, int, kCount> {};
#else
template <int kCount>
struct MakeSequence {
  using type = Sequence<__integer_pack(kCount)...>;
};
#endif

constexpr int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

template <class To, class From>
TW_INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

template <class T>
TW_INLINE T load_as(const void* from) {
  T value;
  __builtin_memcpy(&value, from, sizeof(T));
  return value;
}

template <class T>
TW_INLINE void store_as(void* to, const T& value) {
  __builtin_memcpy(to, &value, sizeof(T));
}

TW_INLINE f32v splat(float x) { return x - f32v{}; }  // x - 0 keeps the sign of a zero; x + 0 would not
TW_INLINE u32v splat_bits(uint32_t x) { return u32v{} + x; }

// mask lanes are all ones or all zeros, as vector comparisons give them
TW_INLINE u32v select(i32v mask, u32v yes, u32v no) { return ((u32v)mask & yes) | (~(u32v)mask & no); }
TW_INLINE f32v select(i32v mask, f32v yes, f32v no) { return (f32v)select(mask, (u32v)yes, (u32v)no); }

// L bytes, or L 16-bit values, zero-extended to 32-bit lanes. g++ 12 takes the small vectors apart lane by lane: hence
// its builtins.
#if defined(__SSE4_1__) && !defined(__clang__)
#define TW_WIDEN_BY_BUILTIN 1
typedef char v16qi __attribute__((vector_size(16)));
typedef short v8hi __attribute__((vector_size(16)));
typedef short v16hi __attribute__((vector_size(32)));
typedef int v4si __attribute__((vector_size(16)));
typedef long long v2di __attribute__((vector_size(16)));
#else
#define TW_WIDEN_BY_BUILTIN 0
#endif

TW_INLINE u32v widen_u8(const void* from) {
#if TW_WIDEN_BY_BUILTIN && TW_VECTOR_BYTES == 16
  return (u32v)__builtin_ia32_pmovzxbd128((v16qi)v4si{load_as<int>(from), 0, 0, 0});
#elif TW_WIDEN_BY_BUILTIN && TW_VECTOR_BYTES == 32
  return (u32v)__builtin_ia32_pmovzxbd256((v16qi)v2di{load_as<long long>(from), 0});
#elif TW_WIDEN_BY_BUILTIN
  return (u32v)__builtin_ia32_pmovzxbd512_mask(load_as<v16qi>(from), i32v{}, (unsigned short)-1);
#else
  return __builtin_convertvector(load_as<u8_quarter>(from), u32v);
#endif
}

TW_INLINE u32v widen_u16(const void* from) {
#if TW_WIDEN_BY_BUILTIN && TW_VECTOR_BYTES == 16
  return (u32v)__builtin_ia32_pmovzxwd128((v8hi)v2di{load_as<long long>(from), 0});
#elif TW_WIDEN_BY_BUILTIN && TW_VECTOR_BYTES == 64
  return (u32v)__builtin_ia32_pmovzxwd512_mask(load_as<v16hi>(from), i32v{}, (unsigned short)-1);
#else
  return __builtin_convertvector(load_as<u16_half>(from), u32v);
#endif
}

template <int... kIndex>
TW_INLINE u16v even_halves(u16v x, Sequence<kIndex...>) {
  return __builtin_shufflevector(x, x, (2 * kIndex % (2 * kLanes))...);
}

// The low 16 bits of every lane, stored as L contiguous values.
TW_INLINE void store_low_u16(void* to, u32v x) {
#if TW_VECTOR_BYTES == 64 && defined(__clang__)
  store_as(to, __builtin_convertvector(x, u16_half));
#elif TW_VECTOR_BYTES == 64
  store_as(to, __builtin_ia32_pmovdw512_mask((i32v)x, v16hi{}, (unsigned short)-1));
#else
  const u16v packed = even_halves((u16v)x, MakeSequence<2 * kLanes>::type{});
  __builtin_memcpy(to, &packed, kVectorBytes / 2);
#endif
}

// The low 8 bits of every lane, stored as L contiguous values.
TW_INLINE void store_low_u8(void* to, u32v x) {
#if TW_VECTOR_BYTES == 64 && defined(__clang__)
  store_as(to, __builtin_convertvector(x, u8_quarter));
#elif TW_VECTOR_BYTES == 64
  store_as(to, __builtin_ia32_pmovdb512_mask((i32v)x, v16qi{}, (unsigned short)-1));
#else
  uint8_t bytes[kLanes];
  TW_UNROLL
  for (int i = 0; i < kLanes; i++) bytes[i] = (uint8_t)x[i];
  __builtin_memcpy(to, bytes, kLanes);
#endif
}

TW_INLINE float sum_lanes(f32v x) {
  float lanes[kLanes];
  store_as(lanes, x);
  TW_UNROLL
  for (int width = kLanes / 2; width > 0; width /= 2)
    TW_UNROLL
    for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
  return lanes[0];
}

TW_INLINE int32_t sum_lanes(i32v x) {
  uint32_t lanes[kLanes], sum = 0;
  store_as(lanes, x);
  for (int i = 0; i < kLanes; i++) sum += lanes[i];
  return (int32_t)sum;
}

TW_NAMESPACE_END
