// The platform of AMD GPUs; see platform.hpp. No HIP headers: the compiler's own built-ins.
#pragma once

#define TW_DEVICE __attribute__((device)) inline __attribute__((always_inline))
#define TW_UNROLL _Pragma("clang loop unroll(full)")
#define TW_NO_UNROLL _Pragma("clang loop unroll(disable)")
#define TW_UNROLL_BY(COUNT) TW_PRAGMA(clang loop unroll_count(COUNT))
#define TW_PRAGMA(...) _Pragma(#__VA_ARGS__)
#define TW_KERNEL(THREADS, MIN_BLOCKS, NAME, PARAMS, ...)                                                       \
  extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(THREADS, THREADS))) void NAME( \
      const PARAMS params) {                                                                                    \
    __VA_ARGS__;                                                                                                \
  }

namespace tw::gpu {

#if defined(__GFX10__) || defined(__GFX11__) || defined(__GFX12__)
constexpr int kWave = 32;
#else
constexpr int kWave = 64;
#endif

TW_DEVICE int thread_index() { return (int)__builtin_amdgcn_workitem_id_x(); }
TW_DEVICE int block_index() { return (int)__builtin_amdgcn_workgroup_id_x(); }
TW_DEVICE int block_count() { return (int)(__builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x()); }
// The kernel's only parameter, as if read for the first time: scalar registers for what does not change from round to
// round of a loop would be too many.
template <class Params>
TW_DEVICE const Params& read_again(const Params&) {
  auto from = (const __attribute__((address_space(4))) Params*)__builtin_amdgcn_kernarg_segment_ptr();
  asm volatile("" : "+s"(from));
  return *(const Params*)from;
}
TW_DEVICE int compute_again(int x) {
  asm volatile("" : "+v"(x));
  return x;
}
TW_DEVICE int lane_index() { return thread_index() % kWave; }

// This wave's operations on shared memory are done. The fence of a barrier asks for the same, but not every compiler
// heeds it: before clang 22 not for RDNA4 where it is for shared memory only, and clang 22 takes that wait away where
// nothing is under way in the first round of a loop, whatever later rounds bring.
TW_DEVICE void wait_shared() {
#if defined(__GFX12__)
  asm volatile("s_wait_dscnt 0x0" ::: "memory");
#else
  asm volatile("s_waitcnt lgkmcnt(0)" ::: "memory");
#endif
}
// Waits until other workgroups can find this wave's writes to global memory. A thread that publishes them behind a
// barrier waits for the stores of its own wave only; those of others may still be on their way to another channel of
// the L2 cache than the counter's. On gfx9 the fence of a barrier does not wait either: within a workgroup, which runs
// on one compute unit, stores are in order without.
TW_DEVICE void wait_stores() {
#if defined(__GFX9__)
  asm volatile("s_waitcnt vmcnt(0)" ::: "memory");
#elif defined(__GFX12__)
  asm volatile("s_wait_storecnt 0x0" ::: "memory");
#else
  asm volatile("s_waitcnt_vscnt null, 0x0" ::: "memory");
#endif
}
TW_DEVICE void barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  wait_shared();
  wait_stores();
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
TW_DEVICE void wave_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}

TW_DEVICE int shuffle(int x, int lane) { return __builtin_amdgcn_ds_bpermute(lane * 4, x); }
TW_DEVICE float shuffle_xor(float x, int mask) {
  return __builtin_bit_cast(float, shuffle(__builtin_bit_cast(int, x), lane_index() ^ mask));
}
TW_DEVICE int count_lanes(bool condition) {
  if constexpr (kWave == 64) return __builtin_popcountll(__builtin_amdgcn_ballot_w64(condition));
  else return __builtin_popcount(__builtin_amdgcn_ballot_w32(condition));
}

template <class T, int kCount>
struct VectorOf {
  typedef T type __attribute__((ext_vector_type(kCount)));
};
template <class T, int kCount>
using Vector = typename VectorOf<T, kCount>::type;

template <class To, class From>
TW_DEVICE To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  return __builtin_bit_cast(To, from);
}
TW_DEVICE uint32_t bits_of(float x) { return bits_as<uint32_t>(x); }
TW_DEVICE float float_of(uint32_t bits) { return bits_as<float>(bits); }
TW_DEVICE float fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
TW_DEVICE float reciprocal(float x) { return __builtin_amdgcn_rcpf(x); }
TW_DEVICE float exp2(float x) { return __builtin_amdgcn_exp2f(x); }
TW_DEVICE float log2(float x) { return __builtin_amdgcn_logf(x); }
TW_DEVICE uint32_t funnel_right(uint32_t low, uint32_t high, uint32_t bits) {
  return __builtin_amdgcn_alignbit(high, low, bits);  // bits modulo 32
}
TW_DEVICE uint32_t permute_bytes(uint32_t x, uint32_t y, uint32_t selector) {  // a nibble selects a byte of y:x
  const uint32_t low = (selector & 0xf) | (selector & 0xf0) << 4;
  const uint32_t spread = low | (selector & 0xf00) << 8 | (selector & 0xf000) << 12;
  return __builtin_amdgcn_perm(y, x, spread);
}

// ---- conversions (the rules of core/types.hpp) ----

TW_DEVICE float half_to_float(uint16_t bits) { return (float)bits_as<_Float16>(bits); }
TW_DEVICE uint32_t pack_halves(float low, float high) {
  return (uint32_t)bits_as<uint16_t>((_Float16)low) | (uint32_t)bits_as<uint16_t>((_Float16)high) << 16;
}
// The compiler's own conversion: gfx950 has an instruction for it, and elsewhere the compiler is done with it much
// sooner than with the same in words.
TW_DEVICE uint32_t pack_bfloats(float low, float high) {
  const Vector<float, 2> x = {low, high};
  return bits_as<uint32_t>(__builtin_convertvector(x, Vector<__bf16, 2>));
}
// Saturates; a NaN gives 0. So does the instruction; C++ leaves both undefined, and testing for them first costs a
// compiler long: two branches for every result.
TW_DEVICE int32_t nearest_integer(float x) {
  int32_t y;
  asm("v_cvt_i32_f32 %0, %1" : "=v"(y) : "v"(__builtin_rintf(x)));
  return y;
}

// ---- shared memory ----

#define TW_SHARED __attribute__((address_space(3)))
TW_DEVICE uint32_t shared_base() {
  extern __attribute__((shared)) unsigned char tw_shared_memory[];
  return (uint32_t)(TW_SHARED unsigned char*)tw_shared_memory;
}
template <int kCount>
TW_DEVICE Vector<uint32_t, kCount> load_shared_vector(uint32_t address) {
  return *(const TW_SHARED Vector<uint32_t, kCount>*)address;
}
template <int kCount>
TW_DEVICE Words<kCount> load_shared(uint32_t address) {
  return bits_as<Words<kCount>>(load_shared_vector<kCount>(address));
}
template <int kCount>
TW_DEVICE void store_shared(uint32_t address, Words<kCount> x) {
  *(TW_SHARED Vector<uint32_t, kCount>*)address = bits_as<Vector<uint32_t, kCount>>(x);
}

TW_DEVICE void store_shared_short(uint32_t address, uint16_t x) { *(TW_SHARED uint16_t*)address = x; }

// ---- global memory ----

#define TW_GLOBAL __attribute__((address_space(1)))
template <int kBytes>
struct Transfer {
  using type = Vector<uint32_t, kBytes / 4>;
};
template <>
struct Transfer<1> {
  typedef uint8_t type;
};
template <>
struct Transfer<2> {
  typedef uint16_t type;
};
template <>
struct Transfer<4> {
  typedef uint32_t type;
};
template <class T>
TW_DEVICE T load_global(const void* from) {
  return bits_as<T>(*(const TW_GLOBAL typename Transfer<sizeof(T)>::type*)from);
}
template <class T>
TW_DEVICE T load_constant(const void* from) {
  return load_global<T>(from);
}
template <class T>
TW_DEVICE void store_global(void* to, const T& value) {
  *(TW_GLOBAL typename Transfer<sizeof(T)>::type*)to = bits_as<typename Transfer<sizeof(T)>::type>(value);
}

template <int kCount>
TW_DEVICE Words<kCount> load_coherent(const void* from) {
  Words<kCount> x;
  TW_UNROLL
  for (int i = 0; i < kCount; i++)
    x.w[i] = __hip_atomic_load((uint32_t*)from + i, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  return x;
}
template <int kCount>
TW_DEVICE void store_coherent(void* to, Words<kCount> x) {
  TW_UNROLL
  for (int i = 0; i < kCount; i++)
    __hip_atomic_store((uint32_t*)to + i, x.w[i], __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
TW_DEVICE uint32_t arrive(uint32_t* counter) {
  return __hip_atomic_fetch_add(counter, 1u, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_AGENT);
}

TW_DEVICE void or_global(uint32_t* to, uint32_t bits) {
  __hip_atomic_fetch_or((TW_GLOBAL uint32_t*)to, bits, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
TW_DEVICE void max_global(uint64_t* to, uint64_t x) {
  __hip_atomic_fetch_max((TW_GLOBAL uint64_t*)to, x, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
TW_DEVICE void add_global(float* to, float x) {
  __hip_atomic_fetch_add((TW_GLOBAL float*)to, x, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

// ---- copies: none of these GPUs copies asynchronously what is shorter than its place, so they are made at once ----

TW_DEVICE void copy_async(uint32_t address, const void* from, int bytes) {
  Words<4> x = {};
  if (bytes > 0) x = load_global<Words<4>>(from);
  TW_UNROLL
  for (int i = 0; i < 4; i++) {
    const int left = bytes - i * 4;
    x.w[i] = left >= 4 ? x.w[i] : left <= 0 ? 0u : x.w[i] & ((1u << (left * 8)) - 1u);
  }
  store_shared(address, x);
}
TW_DEVICE void copy_word_async(uint32_t address, const void* from, bool exists) {
  store_shared(address, exists ? load_global<Words<1>>(from) : Words<1>{});
}
TW_DEVICE void commit_async() {}
template <int kPending>
TW_DEVICE void wait_async() {}

}  // namespace tw::gpu
