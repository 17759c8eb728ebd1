// Packed 4-bit weights straight from a ring of shared memory to the registers that multiply them, on NVIDIA GPUs
// (pipeline compv4): A's tile and the packed bytes of B are copied asynchronously, and every wave unpacks the fragments
// of its own columns. Few rows are bound by the bytes of B, which are read once; the ring holds as many stages as the
// shared memory of `stages` plain tiles has room for.
//
// The order of k within 128 bytes of A's line is free as long as A and B agree: thread q of a group of four takes
// neighbouring values, 32 bytes of A's line from 32q on and as many values of B's column, instead of every fourth register.
// So both are read 16 (B: of 16-bit types 8) bytes at a time. The product is computed turned, C's columns as the
// instruction's rows: what is unpacked and what is read are its operands as they are.
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

// The low four bits of both halves, and other bits. (Of two constants the compiler makes two operations.)
TW_DEVICE uint32_t with_bits(uint32_t x, uint32_t bits) {
#if defined(TW_PLATFORM_HOST)
  return (x & 0x000f000fu) | bits;
#else
  uint32_t y;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(y) : "r"(x), "r"(0x000f000f), "r"(bits));
  return y;
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
      to[i] = subtract_pair<E>(with_bits(permute_bytes(word, upper, 0x4400u + 0x1111u * i), magic), shift);
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

// ---- sums ----

// A wave's part of a tile, turned: columns of C are the instruction's 16 rows, rows of C its 8 columns, so that a thread's
// unpacked values are whole operands, and what it reads of A too. Lane l holds columns l / 4 and l / 4 + 8 of every 16, and
// rows l % 4 * 2 and the next of every 8.
template <class E, int kM, int kN>
struct Int4Turned {
  using Accumulator = float;
  using Sum = Choose<E::is_float, float, int32_t>;
  static_assert(kM % 8 == 0 && kN % 16 == 0, "a wave's part is a multiple of 8 x 16");
  static constexpr int tiles = kN / 16, strips = kM / 8, strip_rows = 8, count = tiles * strips * 4;
  static constexpr int run = 1, runs_per_row = 2 * tiles, strip_runs = 2 * runs_per_row;
  Sum acc[tiles][strips][4];  // of a group
  float sums[tiles][strips][4];

  static constexpr int run_row(int lane, int index) { return lane % 4 * 2 + index / runs_per_row; }
  static constexpr int run_column(int lane, int index) {
    const int at = index % runs_per_row;
    return at / 2 * 16 + at % 2 * 8 + lane / 4;
  }
  TW_DEVICE float& at(int i) { return sums[i / (strips * 4)][i / 4 % strips][i % 4]; }
  TW_DEVICE void get(float (&x)[run], int strip, int index) const {
    const int at = index % runs_per_row;
    x[0] = sums[at / 2][strip][at % 2 * 2 + index / runs_per_row];
  }
  TW_DEVICE void clear() {
    TW_UNROLL
    for (int i = 0; i < count; i++) at(i) = 0.0f;
  }
  TW_DEVICE void begin() {
    clear();
    TW_UNROLL
    for (int i = 0; i < count; i++) acc[i / (strips * 4)][i / 4 % strips][i % 4] = 0;
  }
  // Adds the sums of a group, and begins the next one's.
  TW_DEVICE void add(const float (&factor)[tiles][2]) {
    TW_UNROLL
    for (int t = 0; t < tiles; t++)
      TW_UNROLL
      for (int s = 0; s < strips; s++)
        TW_UNROLL
        for (int e = 0; e < 4; e++) {
          sums[t][s][e] += (float)acc[t][s][e] * factor[t][e / 2];
          acc[t][s][e] = 0;
        }
  }
};

// ---- the loop ----

template <class Config>
struct Int4Ring : PortableLoop<Config, MatrixSources> {
  using Base = PortableLoop<Config, MatrixSources>;
  using typename Base::LoaderA, typename Base::OperandA, typename Base::TileA;
  using E = typename Config::A;
  using Atom = Int4Turned<E, Config::tile_m / Config::wave_m, Config::tile_n / Config::wave_n>;
  using Scale = typename Config::GroupScale;
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

    TW_DEVICE OperandB(const tw_gemm_problem& problem, const tw_gemm_operand*, int64_t item, int j0, int begin,
                       const Where&)
        : base((const char*)problem.b + item * problem.stride_b + j0 * problem.ldb + begin / 2),
          ld(problem.ldb),
          columns((int)problem.n - j0),
          bytes(ceil_div((int)problem.k, 2) - begin / 2),
          first_group(begin / kInt4Group),
          last_group(((int)problem.k - 1) / kInt4Group) {}
    TW_DEVICE int group(int index) const { return min_of(first_group + index, last_group); }
  };

  // A value of each of a lane's columns for every group: factors, or zero points.
  template <class T>
  struct Groups {
    const char* column[Atom::tiles][2];
    int64_t step;  // bytes from group to group
    TW_DEVICE Groups(const tw_gemm_operand& of, int64_t item, int j0, int n, int lane)
        : step(of.col_stride * (int64_t)sizeof(T)) {
      TW_UNROLL
      for (int t = 0; t < Atom::tiles; t++)
        TW_UNROLL
        for (int h = 0; h < 2; h++) {
          const int j = min_of(j0 + t * 16 + h * 8 + lane / 4, n - 1);
          column[t][h] = (const char*)of.ptr + (item * of.batch_stride + j * of.row_stride) * (int64_t)sizeof(T);
        }
    }
    TW_DEVICE void load(T (&to)[Atom::tiles][2], int group) const {
      const int64_t from = group * step;
      TW_UNROLL
      for (int t = 0; t < Atom::tiles; t++)
        TW_UNROLL
        for (int h = 0; h < 2; h++) to[t][h] = load_constant<T>(column[t][h] + from);
    }
  };

  TW_DEVICE static void copy(uint32_t to, const OperandA& a, const OperandB& b, int step, int thread) {
    LoaderA::copy_aligned(to, a.at(step), thread);
    constexpr int kTotal = Config::tile_n * chunks, kStep = threads / chunks;  // columns
    static_assert(threads % chunks == 0, "a thread keeps to its chunk of the columns");
    const int first = thread / chunks, chunk = thread % chunks, at = step * column_bytes + chunk * 16;
    const int left = max_of(0, min_of(16, b.bytes - at));
    const char* from = b.base + first * b.ld + at;
    TW_UNROLL
    for (int j = 0; j < ceil_div(kTotal, threads); j++, from += kStep * b.ld) {
      const int column = first + j * kStep;
      if (kTotal % threads != 0 && column >= Config::tile_n) continue;
      copy_async(to + TileA::bytes + place(column, chunk), from, column < b.columns ? left : 0);
    }
  }

  // The products of 128 bytes of A's lines: two vectors of 16 bytes of a thread's part of each. 8-bit floats take one
  // after the other, for their products need more registers.
  TW_DEVICE static void multiply(Atom& atom, uint32_t tile, int block, const uint32_t (&shift)[Atom::tiles][2],
                                 const Where& at) {
    const int g = at.lane / 4, q = at.lane % 4;
    constexpr int kTogether = Base::is_tight ? 1 : 2, kWords = line / 64;  // packed words beside a vector
    TW_UNROLL_BY(kTogether)
    for (int first = 0; first < 2; first += kTogether) {
      Words<4> a[kTogether][Atom::strips];
      TW_UNROLL
      for (int c = 0; c < kTogether; c++)
        TW_UNROLL
        for (int s = 0; s < Atom::strips; s++)
          a[c][s] = load_shared<4>(tile + TileA::offset(at.m0 + s * 8 + g, block * 8 + 2 * q + first + c));
      TW_UNROLL
      for (int t = 0; t < Atom::tiles; t++) {
        Words<kWords * kTogether> b[2];
        TW_UNROLL
        for (int h = 0; h < 2; h++) {
          const int chunk = block * unit + (unit == 2 ? q / 2 : q), within = unit == 2 ? q % 2 * 8 : 0;
          b[h] = load_shared<kWords * kTogether>(tile + TileA::bytes + place(at.n0 + t * 16 + h * 8 + g, chunk) +
                                                 within + first * kWords * 4);
        }
        TW_UNROLL
        for (int c = 0; c < kTogether; c++)
          TW_UNROLL
          for (int w = 0; w < kWords; w++) multiply_word(atom, t, a[c], b, c * kWords + w, w, shift[t]);
      }
    }
  }
  // Packed word `word` of two columns times what lies beside it in a vector of A.
  template <int kCount>
  TW_DEVICE static void multiply_word(Atom& atom, int t, const Words<4> (&a)[Atom::strips],
                                      const Words<kCount> (&b)[2], int word, int w, const uint32_t (&shift)[2]) {
    constexpr int kParts = Values::registers / 2;  // instructions along k for a packed word
    uint32_t low[Values::registers], high[Values::registers];
    Values::unpack(low, b[0].w[word], shift[0]);
    Values::unpack(high, b[1].w[word], shift[1]);
    TW_UNROLL
    for (int part = 0; part < kParts; part++) {
      const int s = (w * kParts + part) * 2;
      const Words<4> x = {low[part * 2], high[part * 2], low[part * 2 + 1], high[part * 2 + 1]};
      TW_UNROLL
      for (int strip = 0; strip < Atom::strips; strip++)
        mma_16x8<E, E>(atom.acc[t][strip], x, Words<2>{a[strip].w[s], a[strip].w[s + 1]});
    }
  }

  TW_DEVICE static void run(Atom& atom, const OperandA& a, const OperandB& b, const tw_gemm_problem& problem,
                            int64_t item, int j0, const Where& at, const tw_gemm_operand* zero) {
    using Storage = typename Scale::storage;
    const int steps = a.steps(), ahead = ring - 1;
    const Groups<Storage> factors(problem.scale_b, item, j0, (int)problem.n, at.lane);
    const Groups<unsigned char> zeros(Config::has_zeros ? *zero : problem.scale_b, item, j0, (int)problem.n, at.lane);
    Storage next_factor[Atom::tiles][2];
    unsigned char next_zero[Atom::tiles][2];
    const auto load = [&](int index) {
      const int group = b.group(index);
      factors.load(next_factor, group);
      if constexpr (Config::has_zeros) zeros.load(next_zero, group);
    };
    if (steps > 0) load(0);
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
        float factor[Atom::tiles][2];
        uint32_t shift[Atom::tiles][2];
        TW_UNROLL
        for (int t = 0; t < Atom::tiles; t++)
          TW_UNROLL
          for (int h = 0; h < 2; h++) {
            factor[t][h] = to_float<Scale>(next_factor[t][h]);
            shift[t][h] = Values::shift(Config::has_zeros ? next_zero[t][h] & 15 : kInt4Middle);
          }
        load(step * (blocks / per_group) + group + 1);
        TW_UNROLL
        for (int block = 0; block < per_group; block++) multiply(atom, tile, group * per_group + block, shift, at);
        atom.add(factor);
      }
      slot = slot == ahead ? 0 : slot + 1;
    }
    wait_async<0>();
  }
};

}  // namespace tw::gpu
