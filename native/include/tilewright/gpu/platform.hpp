// Operations that every device offers to the kernels, under one set of names. Nothing outside the platform files knows
// CUDA, HIP or the host emulation:
//   TW_DEVICE, TW_UNROLL, TW_UNROLL_BY(count), TW_NO_UNROLL
//   TW_KERNEL(threads, min_blocks, name, Params, body)   min_blocks: workgroups that share a multiprocessor
//   kWave                    lanes of a wave
//   read_again(params)       a kernel's parameter, not to be kept in registers from an earlier reading
//   compute_again(x)         x, of which nothing is kept in registers from an earlier use
//   thread_index(), block_index(), block_count(), lane_index()
//   barrier(), wave_barrier()
//   shuffle(x, lane), shuffle_xor(x, mask), count_lanes(condition)   over the lanes of a wave, all of which take part
//   shared_base()            address of the workgroup's dynamic shared memory. Shared addresses are 32-bit numbers of
//                            bytes; only the functions below read and write there
//   load_shared<N>(address), store_shared(address, Words<N>)   N of 1, 2 or 4, aligned to its size
//   load_global<T>(p), load_constant<T>(p), store_global(p, x)   T of 1, 2, 4, 8 or 16 bytes, aligned to its size.
//                            load_constant is for what no thread of the launch writes
//   load_coherent<N>(p), store_coherent(p, Words<N>)             seen by all workgroups, ordered by arrive()
//   arrive(counter)          adds 1 and returns the old value: what this thread wrote (and, after a barrier, its
//                            workgroup) is visible to those who arrive later
//   or_global(p, bits), max_global(p, x), add_global(p, x)   atomically: 32 bits, 64 bits, fp32 (in no order)
//   copy_async(address, p, bytes), commit_async(), wait_async<N>()   16 bytes from global to shared memory, of which
//                            the first `bytes` are read and the rest is zero; groups complete in order
//   copy_word_async(address, p, exists)   likewise 4 bytes, or zero
//   funnel_right(low, high, bits), permute_bytes(x, y, selector)
//   bits_of(x), float_of(bits), fma(x, y, z), reciprocal(x)   reciprocal: within 1 ulp; subnormal results may be 0
//   exp2(x), log2(x)                                           within 2 ulp (log2: 2^-22 near 1); subnormal results may
//                            be 0
//   store_shared_short(address, bits)                          two bytes
//   half_to_float(bits), pack_halves(low, high), pack_bfloats(low, high), nearest_integer(x)   as core/types.hpp rules
#pragma once
#include "tilewright/core/integers.hpp"

namespace tw::gpu {

// N registers of 32 bits.
template <int kCount>
struct alignas(kCount * 4) Words {
  uint32_t w[kCount];
};

template <class T>
constexpr T min_of(T a, T b) {
  return a < b ? a : b;
}
template <class T>
constexpr T max_of(T a, T b) {
  return a > b ? a : b;
}
template <class T>
constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

}  // namespace tw::gpu

#if defined(TW_PLATFORM_HOST)
#include "tilewright/gpu/host/platform.hpp"
#elif defined(__HIP__)
#include "tilewright/gpu/amd/platform.hpp"
#else
#include "tilewright/gpu/cuda/platform.hpp"
#endif
