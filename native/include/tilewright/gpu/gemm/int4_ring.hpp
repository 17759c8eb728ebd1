// Packed 4-bit weights straight from a ring of shared memory to the registers that multiply them, on NVIDIA GPUs
// (pipeline compv4): A's tile and the packed bytes of B are copied asynchronously, and every wave unpacks the fragments
// of its own columns. Few rows are bound by the bytes of B, which are read once; the ring holds as many stages as the
// shared memory of `stages` plain tiles has room for.
//
// The order of k within 128 bytes of A's line is free as long as A and B agree: thread q of a group of four takes
// neighbouring values, 32 bytes of A's line from 32q on and as many values of B's column, instead of every fourth register.
// So both are read 16 (B: of 16-bit types 8) bytes at a time.
#pragma once
#include "tilewright/core/int4.hpp"
#include "tilewright/gpu/gemm/int4.hpp"

namespace tw::gpu {

// ---- values ----

// x - y of two values; all of them and the differences are small integers, beside 1024 (fp16) or 128 (bf16).
template <class E>
TW_DEVICE uint32_t subtract_pair(uint32_t x, uint32_t y) {
#if defined(TW_PLATFORM_HOST)
  const auto one = [](uint32_t bits) {
    return is_same<E, fp16> ? half_to_float((uint16_t)bits) : float_of((bits & 0xffff) << 16);
  };
  const float low = one(x) - one(y), high = one(x >> 16) - one(y >> 16);
  return is_same<E, fp16> ? pack_halves(low, high) : pack_bfloats(low, high);
#else
  uint32_t z;
  if constexpr (is_same<E, fp16>) asm("sub.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  else asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(0x3f803f80), "r"(y ^ 0x80008000));
  return z;
#endif
}

// Eight values of a word, less a zero point that was prepared by `shift`, as registers of the matrix instruction.
template <class E>
struct Int4Pairs {  // fp16, bf16: two to a register
  static constexpr int registers = 4;
  static constexpr uint32_t magic = is_same<E, fp16> ? 0x64006400 : 0x43004300;  // 1024, 128: steps of 1 above them
  TW_DEVICE static uint32_t shift(int zero) { return magic + (uint32_t)zero * 0x00010001u; }
  TW_DEVICE static void unpack(uint32_t (&to)[registers], uint32_t word, uint32_t shift) {
    const uint32_t upper = word >> 4;
    TW_UNROLL
    for (int i = 0; i < 4; i++)  // byte i, and the byte that has its upper four bits low
      to[i] = subtract_pair<E>((permute_bytes(word, upper, 0x4400u + 0x1111u * i) & 0x000f000fu) | magic, shift);
  }
};
template <class E>
struct Int4Bytes;
template <>
struct Int4Bytes<int8> {  // four to a register
  static constexpr int registers = 2;
  static constexpr uint32_t signs = 0x80808080u;  // keep bytes from borrowing of each other
  TW_DEVICE static uint32_t shift(int zero) { return (uint32_t)zero * 0x01010101u; }
  TW_DEVICE static void unpack(uint32_t (&to)[registers], uint32_t word, uint32_t shift) {
    const uint32_t even = word & 0x0f0f0f0fu, odd = word >> 4 & 0x0f0f0f0fu;
    to[0] = (permute_bytes(even, odd, 0x5140) + signs - shift) ^ signs;
    to[1] = (permute_bytes(even, odd, 0x7362) + signs - shift) ^ signs;
  }
};
template <>
struct Int4Bytes<fp8> {
  static constexpr int registers = 2;
  using Halves = Int4Pairs<fp16>;
  TW_DEVICE static uint32_t shift(int zero) { return Halves::shift(zero); }
  TW_DEVICE static void unpack(uint32_t (&to)[registers], uint32_t word, uint32_t shift) {
#if defined(TW_PLATFORM_HOST) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890)
    const int zero = (int)(shift & 15);
    TW_UNROLL
    for (int w = 0; w < 2; w++) {
      to[w] = 0;
      TW_UNROLL
      for (int i = 0; i < 4; i++) to[w] |= small_float_of((int)(word >> (w * 16 + i * 4) & 15) - zero) << (i * 8);
    }
#else
    uint32_t halves[4];
    Halves::unpack(halves, word, shift);
    TW_UNROLL
    for (int w = 0; w < 2; w++) {
      uint16_t low, high;
      asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(low) : "r"(halves[w * 2]));
      asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(high) : "r"(halves[w * 2 + 1]));
      to[w] = (uint32_t)low | (uint32_t)high << 16;
    }
#endif
  }
};

// ---- the loop ----

template <class Config>
struct Int4Ring : PortableLoop<Config, MatrixSources> {
  using Base = PortableLoop<Config, MatrixSources>;
  using typename Base::LoaderA, typename Base::OperandA, typename Base::TileA;
  using Part = typename Base::Atom;
  using Atom = Int4Atom<Part>;
  using E = typename Config::A;
  using Values = Choose<size_of<E> == 2, Int4Pairs<E>, Int4Bytes<E>>;
  static constexpr int threads = Base::threads;
  static constexpr int line = 128 / size_of<E>;                                            // values of 128 bytes
  static constexpr int blocks = Config::tile_k / line, per_group = kInt4Group / line;      // of a tile, of a group
  static constexpr int column_bytes = Config::tile_k / 2, chunks = column_bytes / 16;      // packed, of one column
  static constexpr int slot_bytes = TileA::bytes + Config::tile_n * column_bytes;
  static constexpr int ring = min_of(Base::bytes / slot_bytes, 8);
  static_assert(!Config::a_col && Config::b_col, "k is contiguous in A and B");
  static_assert(Config::tile_k % kInt4Group == 0, "a step is whole groups");
  static_assert(ring >= 2, "one stage is filled while another is used");

  // Chunks that a block's columns take, and where chunk `chunk` of a column lies: neighbouring columns in other banks.
  static constexpr int unit = line / 32, units = chunks / unit, around = 8 / unit;
  static constexpr uint32_t place(int column, int chunk) {
    const int key = units >= around ? column & (around - 1) : column / (around / units) & (units - 1);
    return (uint32_t)(column * chunks + (chunk / unit ^ key) * unit + chunk % unit) * 16;
  }

  // One output tile's columns of B, from the slice's first byte on.
  struct OperandB {
    const char* base;
    int64_t ld;
    int columns, bytes, first_group, last_group;  // bytes of a column that exist
    const char* zeros;                            // of the wave's columns: this lane's first
    int64_t zero_column, zero_step;
    int left;  // columns from this lane's first to the last

    TW_DEVICE OperandB(const tw_gemm_problem& problem, const tw_gemm_operand* zero, int64_t item, int j0, int begin,
                       const Where& at)
        : base((const char*)problem.b + item * problem.stride_b + j0 * problem.ldb + begin / 2),
          ld(problem.ldb),
          columns((int)problem.n - j0),
          bytes(ceil_div((int)problem.k, 2) - begin / 2),
          first_group(begin / kInt4Group),
          last_group(((int)problem.k - 1) / kInt4Group),
          zeros(nullptr),
          zero_column(0),
          zero_step(0),
          left(columns - 1 - at.n0 - at.lane / 4) {
      if constexpr (Config::has_zeros) {
        zero_column = zero->row_stride, zero_step = zero->col_stride;
        zeros = (const char*)zero->ptr + item * zero->batch_stride;
        zeros += (j0 + min_of(at.n0 + at.lane / 4, columns - 1)) * zero_column;
      }
    }
    TW_DEVICE int group(int index) const { return min_of(first_group + index, last_group); }
    // The zero point of the lane's column j.
    TW_DEVICE int zero(int j, int group) const {
      if constexpr (!Config::has_zeros) return kInt4Middle;
      else return load_constant<unsigned char>(zeros + max_of(min_of(j * 8, left), 0) * zero_column + group * zero_step) & 15;
    }
  };

  TW_DEVICE static void copy(uint32_t to, const OperandA& a, const OperandB& b, int step, int thread) {
    LoaderA::copy_aligned(to, a.at(step), thread);
    constexpr int kTotal = Config::tile_n * chunks;
    TW_UNROLL
    for (int j = 0; j < ceil_div(kTotal, threads); j++) {
      const int id = thread + j * threads, column = id / chunks, chunk = id % chunks;
      if (kTotal % threads != 0 && id >= kTotal) continue;
      const int from = step * column_bytes + chunk * 16;
      const int bytes = column < b.columns ? max_of(0, min_of(16, b.bytes - from)) : 0;
      copy_async(to + TileA::bytes + place(column, chunk), b.base + (bytes > 0 ? column * b.ld + from : 0), bytes);
    }
  }

  // What belongs to a group: factors of the results, zero points of the fragments.
  struct OfGroup {
    typename Atom::template Factors<typename Config::GroupScale> factors;
    int zero[Part::columns];
    TW_DEVICE void load(const tw_gemm_problem& problem, int64_t item, const OperandB& b, int group, int j0, int lane) {
      factors.load(problem, item, group, j0, lane);
      TW_UNROLL
      for (int j = 0; j < Part::columns; j++) zero[j] = b.zero(j, group);
    }
  };

  // The products of 128 bytes of A's lines: two vectors of 16 bytes of a thread's part of each. 8-bit floats take one
  // after the other, for their products need more registers.
  TW_DEVICE static void multiply(Atom& atom, uint32_t tile, int block, const uint32_t (&shift)[Part::columns],
                                 const Where& at) {
    const int g = at.lane / 4, q = at.lane % 4;
    constexpr int kTogether = Base::is_tight ? 1 : 2, kWords = line / 64;  // packed words beside a vector
    TW_UNROLL_BY(kTogether)
    for (int first = 0; first < 2; first += kTogether) {
      Words<4> a[kTogether][Part::rows][2];
      TW_UNROLL
      for (int c = 0; c < kTogether; c++)
        TW_UNROLL
        for (int i = 0; i < Part::rows; i++)
          TW_UNROLL
          for (int h = 0; h < 2; h++)
            a[c][i][h] = load_shared<4>(
                tile + TileA::offset(at.m0 + i * 16 + h * 8 + g, block * 8 + 2 * q + first + c));
      Words<kWords * kTogether> b[Part::columns];
      TW_UNROLL
      for (int j = 0; j < Part::columns; j++) {
        const int chunk = block * unit + (unit == 2 ? q / 2 : q), within = unit == 2 ? q % 2 * 8 : 0;
        b[j] = load_shared<kWords * kTogether>(tile + TileA::bytes + place(at.n0 + j * 8 + g, chunk) + within +
                                               first * kWords * 4);
      }
      TW_UNROLL
      for (int c = 0; c < kTogether; c++) multiply_vector(atom, a[c], b, c, shift);
    }
  }
  template <int kCount>
  TW_DEVICE static void multiply_vector(Atom& atom, const Words<4> (&a)[Part::rows][2],
                                        const Words<kCount> (&b)[Part::columns], int c,
                                        const uint32_t (&shift)[Part::columns]) {
    constexpr int kWords = line / 64, kParts = Values::registers / 2;  // instructions along k for a packed word
    TW_UNROLL
    for (int w = 0; w < kWords; w++) {
      uint32_t values[Part::columns][Values::registers];
      TW_UNROLL
      for (int j = 0; j < Part::columns; j++) Values::unpack(values[j], b[j].w[c * kWords + w], shift[j]);
      TW_UNROLL
      for (int part = 0; part < kParts; part++) {
        const int s = (w * kParts + part) * 2;
        TW_UNROLL
        for (int i = 0; i < Part::rows; i++) {
          const Words<4> x = {a[i][0].w[s], a[i][1].w[s], a[i][0].w[s + 1], a[i][1].w[s + 1]};
          TW_UNROLL
          for (int j = 0; j < Part::columns; j++)
            mma_16x8<E, E>(atom.acc[i][j], x, Words<2>{values[j][part * 2], values[j][part * 2 + 1]});
        }
      }
    }
  }

  TW_DEVICE static void run(Atom& atom, const OperandA& a, const OperandB& b, const tw_gemm_problem& problem,
                            int64_t item, int j0, const Where& at) {
    const int steps = a.steps(), ahead = ring - 1;
    OfGroup next;
    if (steps > 0) next.load(problem, item, b, b.group(0), j0, at.lane);
    int slot = 0, filled = 0;
    TW_NO_UNROLL
    for (int step = -ahead; step < steps; step++) {  // the first ones only copy
      if (step >= 0) {
        wait_async<ring - 2>();
        barrier();  // the step has arrived for all, and the slot before it is free
      }
      if (step + ahead < steps) copy(at.shared + filled * slot_bytes, a, b, step + ahead, at.thread);
      commit_async();
      filled = filled == ahead ? 0 : filled + 1;
      if (step < 0) continue;
      const uint32_t tile = at.shared + slot * slot_bytes;
      TW_UNROLL
      for (int group = 0; group < blocks / per_group; group++) {
        const OfGroup now = next;
        next.load(problem, item, b, b.group(step * (blocks / per_group) + group + 1), j0, at.lane);
        uint32_t shift[Part::columns];
        TW_UNROLL
        for (int j = 0; j < Part::columns; j++) shift[j] = Values::shift(now.zero[j]);
        TW_UNROLL
        for (int block = 0; block < per_group; block++) multiply(atom, tile, group * per_group + block, shift, at);
        atom.add(now.factors);
      }
      slot = slot == ahead ? 0 : slot + 1;
    }
    wait_async<0>();
  }
};

}  // namespace tw::gpu
