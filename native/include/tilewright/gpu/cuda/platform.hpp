// The platform of NVIDIA GPUs, sm_80 and later; see platform.hpp. No CUDA headers: NVRTC's own built-ins and PTX.
#pragma once

#define TW_DEVICE __device__ __forceinline__
#define TW_UNROLL _Pragma("unroll")
#define TW_NO_UNROLL _Pragma("unroll 1")
#define TW_UNROLL_BY(COUNT) TW_PRAGMA(unroll (COUNT))
#define TW_PRAGMA(...) _Pragma(#__VA_ARGS__)
// A kernel whose only parameter is `params`; the variadic rest is its body.
#define TW_KERNEL(THREADS, MIN_BLOCKS, NAME, PARAMS, ...)                                                          \
  extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) NAME(const __grid_constant__ PARAMS params) { \
    __VA_ARGS__;                                                                                                   \
  }

namespace tw::gpu {

constexpr int kWave = 32;

TW_DEVICE int thread_index() { return (int)threadIdx.x; }
TW_DEVICE int block_index() { return (int)blockIdx.x; }
TW_DEVICE int block_count() { return (int)gridDim.x; }
template <class Params>
TW_DEVICE const Params& read_again(const Params& params) {
  return params;
}
TW_DEVICE int compute_again(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
TW_DEVICE int lane_index() { return (int)(threadIdx.x % 32); }

TW_DEVICE void barrier() { __syncthreads(); }
TW_DEVICE void wave_barrier() { __syncwarp(); }

TW_DEVICE int shuffle(int x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
TW_DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
TW_DEVICE int count_lanes(bool condition) { return __popc(__ballot_sync(0xffffffffu, condition)); }

TW_DEVICE uint32_t bits_of(float x) { return __float_as_uint(x); }
TW_DEVICE float float_of(uint32_t bits) { return __uint_as_float(bits); }
TW_DEVICE float fma(float x, float y, float z) { return __fmaf_rn(x, y, z); }
TW_DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
TW_DEVICE float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
TW_DEVICE float log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
TW_DEVICE uint32_t funnel_right(uint32_t low, uint32_t high, uint32_t bits) {
  return __funnelshift_r(low, high, bits);  // bits modulo 32
}
TW_DEVICE uint32_t permute_bytes(uint32_t x, uint32_t y, uint32_t selector) { return __byte_perm(x, y, selector); }

// ---- conversions (the rules of core/types.hpp) ----

TW_DEVICE float half_to_float(uint16_t bits) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
  return y;
}
TW_DEVICE uint32_t pack_halves(float low, float high) {
  uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
TW_DEVICE uint32_t pack_bfloats(float low, float high) {
  uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
TW_DEVICE int32_t nearest_integer(float x) {  // saturates; a NaN gives 0
  int32_t y;
  asm("cvt.rni.s32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

// ---- shared memory ----

TW_DEVICE uint32_t shared_base() {
  extern __shared__ __align__(1024) unsigned char tw_shared_memory[];
  return (uint32_t)__cvta_generic_to_shared(tw_shared_memory);
}

template <int kCount>
TW_DEVICE Words<kCount> load_shared(uint32_t address) {
  Words<kCount> x;
  if constexpr (kCount == 1) asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x.w[0]) : "r"(address));
  else if constexpr (kCount == 2)
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x.w[0]), "=r"(x.w[1]) : "r"(address));
  else
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3])
                 : "r"(address));
  return x;
}

template <int kCount>
TW_DEVICE void store_shared(uint32_t address, Words<kCount> x) {
  if constexpr (kCount == 1) asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x.w[0]) : "memory");
  else if constexpr (kCount == 2)
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(x.w[0]), "r"(x.w[1]) : "memory");
  else
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.w[0]), "r"(x.w[1]), "r"(x.w[2]),
                 "r"(x.w[3])
                 : "memory");
}

TW_DEVICE void store_shared_short(uint32_t address, uint16_t x) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(x) : "memory");
}

// ---- global memory ----

#define TW_LOAD_GLOBAL(NAME, HOW)                                                                               \
  template <class T>                                                                                            \
  TW_DEVICE T NAME(const void* from) {                                                                          \
    static_assert(sizeof(T) == 1 || sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, ""); \
    union Bits {                                                                                                \
      T value;                                                                                                  \
      uint32_t w[sizeof(T) < 4 ? 1 : sizeof(T) / 4];                                                            \
      __device__ Bits() {}                                                                                      \
    } x;                                                                                                        \
    if constexpr (sizeof(T) == 1) {                                                                             \
      asm("ld.global" HOW ".u8 %0, [%1];" : "=r"(x.w[0]) : "l"(from));                                          \
    } else if constexpr (sizeof(T) == 2) {                                                                      \
      uint16_t half;                                                                                            \
      asm("ld.global" HOW ".u16 %0, [%1];" : "=h"(half) : "l"(from));                                           \
      x.w[0] = half;                                                                                            \
    } else if constexpr (sizeof(T) == 4) {                                                                      \
      asm("ld.global" HOW ".b32 %0, [%1];" : "=r"(x.w[0]) : "l"(from));                                         \
    } else if constexpr (sizeof(T) == 8) {                                                                      \
      asm("ld.global" HOW ".v2.b32 {%0, %1}, [%2];" : "=r"(x.w[0]), "=r"(x.w[1]) : "l"(from));                  \
    } else {                                                                                                    \
      asm("ld.global" HOW ".v4.b32 {%0, %1, %2, %3}, [%4];"                                                     \
          : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3])                                              \
          : "l"(from));                                                                                         \
    }                                                                                                           \
    return x.value;                                                                                             \
  }
TW_LOAD_GLOBAL(load_global, "")
TW_LOAD_GLOBAL(load_constant, ".nc")
#undef TW_LOAD_GLOBAL

template <class T>
TW_DEVICE void store_global(void* to, const T& value) {
  union Bits {
    T value;
    uint32_t w[sizeof(T) < 4 ? 1 : sizeof(T) / 4];
    __device__ Bits() {}
  } x;
  x.value = value;
  if constexpr (sizeof(T) == 1) asm volatile("st.global.u8 [%0], %1;" ::"l"(to), "r"(x.w[0]) : "memory");
  else if constexpr (sizeof(T) == 2)
    asm volatile("st.global.u16 [%0], %1;" ::"l"(to), "h"((uint16_t)x.w[0]) : "memory");
  else if constexpr (sizeof(T) == 4) asm volatile("st.global.b32 [%0], %1;" ::"l"(to), "r"(x.w[0]) : "memory");
  else if constexpr (sizeof(T) == 8)
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(x.w[0]), "r"(x.w[1]) : "memory");
  else
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.w[0]), "r"(x.w[1]), "r"(x.w[2]),
                 "r"(x.w[3])
                 : "memory");
}

template <int kCount>
TW_DEVICE Words<kCount> load_coherent(const void* from) {
  Words<kCount> x;
  if constexpr (kCount == 4)
    asm volatile("ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3])
                 : "l"(from)
                 : "memory");
  else if constexpr (kCount == 2)
    asm volatile("ld.global.cg.v2.b32 {%0, %1}, [%2];" : "=r"(x.w[0]), "=r"(x.w[1]) : "l"(from) : "memory");
  else asm volatile("ld.global.cg.b32 %0, [%1];" : "=r"(x.w[0]) : "l"(from) : "memory");
  return x;
}
template <int kCount>
TW_DEVICE void store_coherent(void* to, Words<kCount> x) {
  if constexpr (kCount == 4)
    asm volatile("st.global.cg.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.w[0]), "r"(x.w[1]), "r"(x.w[2]),
                 "r"(x.w[3])
                 : "memory");
  else if constexpr (kCount == 2)
    asm volatile("st.global.cg.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(x.w[0]), "r"(x.w[1]) : "memory");
  else asm volatile("st.global.cg.b32 [%0], %1;" ::"l"(to), "r"(x.w[0]) : "memory");
}

TW_DEVICE uint32_t arrive(uint32_t* counter) {
  uint32_t before;
  asm volatile("atom.global.acq_rel.gpu.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

TW_DEVICE void or_global(uint32_t* to, uint32_t bits) {
  asm volatile("red.global.or.b32 [%0], %1;" ::"l"(to), "r"(bits) : "memory");
}
TW_DEVICE void max_global(uint64_t* to, uint64_t x) {
  asm volatile("red.global.max.u64 [%0], %1;" ::"l"(to), "l"(x) : "memory");
}
TW_DEVICE void add_global(float* to, float x) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
}

// ---- asynchronous copies ----

TW_DEVICE void copy_async(uint32_t address, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(bytes)
               : "memory");
}
TW_DEVICE void copy_word_async(uint32_t address, const void* from, bool exists) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(from), "r"(exists ? 4 : 0)
               : "memory");
}
TW_DEVICE void commit_async() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
TW_DEVICE void wait_async() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace tw::gpu
