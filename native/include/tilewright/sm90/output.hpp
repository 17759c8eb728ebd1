// From the accumulators of one consumer warpgroup to C: the fused epilogue, then either pieces that are staged in
// shared memory and stored by the copy engine while the next ones are prepared, or predicated stores by the threads.
#pragma once
#include "tilewright/gpu/epilogue.hpp"
#include "tilewright/sm90/gemm_plan.hpp"
#include "tilewright/sm90/residual.hpp"
#include "tilewright/sm90/tma.hpp"

namespace tw::sm90 {

template <class Plan>
struct Output {
  using Config = typename Plan::Config;
  using T = typename Plan::Accumulator;
  using C = typename Config::C;
  using Epilogue = gpu::Epilogue<Config, T>;
  static constexpr int kRepeats = Plan::repeats, kBlocks = Plan::columns / 8, kRegisters = Plan::columns / 2;
  static constexpr bool kHalf = Plan::c_size == 2;
  // A staged piece: lines of 128 bytes, each a row of C; with transpose_c and 4-byte elements two such blocks.
  static constexpr int kLineElements = 128 / Plan::c_size, kLines = Plan::swap ? Plan::columns : 64;
  static constexpr int kHalves = Plan::swap ? Plan::c_size / 2 : 1;
  // A single D operand of 16-bit elements goes its own way to staged results.
  using D = typename FirstOf<typename Config::D>::type;
  static constexpr bool kResidual = Plan::staged && !Plan::swap && Config::D::size == 1 && size_of<D> == 2;
  static constexpr int kGroups = Plan::swap ? 1 : Plan::piece_columns / 32;  // of four blocks, in a staged piece
  static constexpr int kAcross = Plan::pieces / kRepeats;
  struct Given {
    uint32_t words[kGroups][2][4];  // by group, half (rows h * 8), block
  };

  const Epilogue epilogue;
  const void* map;
  int m, n;         // sizes
  int row, column;  // this warpgroup's first row and column of C
  int batch;
  uint32_t staging;  // this warpgroup's buffers
  int barrier;       // and its named barrier
  int thread, warp, lane, quad;

  template <class Task>
  TW_SM90 Output(const Task& task, const Work& work, int wave, uint32_t buffers, int named_barrier)
      : epilogue(task.problem, task.operands(), work.batch, {task.problem.ldc}),
        map(&task.c),
        m((int)task.problem.m),
        n((int)task.problem.n),
        batch(work.batch),
        staging(buffers),
        barrier(named_barrier),
        thread(threadIdx.x % kWarpgroup),
        warp(thread / kWarp),
        lane(thread % kWarp),
        quad(thread % 4) {
    const int x = wave % Plan::x_waves * kRepeats * 64, y = wave / Plan::x_waves * Plan::columns;
    row = work.tile_m * Plan::tile_m + (Plan::swap ? y : x);
    column = work.tile_n * Plan::tile_n + (Plan::swap ? x : y);
  }

  TW_SM90 void store(const T (&acc)[kRepeats][kRegisters]) const {
    if constexpr (Plan::staged) {
      Given given[2];  // the piece at hand, and the next one on its way
      if constexpr (kResidual) load_given(given[0], 0);
#pragma unroll
      for (int index = 0; index < Plan::pieces; index++) {
        if constexpr (kResidual)
          if (index + 1 < Plan::pieces) load_given(given[(index + 1) % 2], index + 1);
        stage_piece(acc[index / kAcross], index, given[index % 2]);
      }
    } else {
#pragma unroll
      for (int r = 0; r < kRepeats; r++) {
        if constexpr (Plan::swap) store_transposed(acc[r], r);
        else store_rows(acc[r], r);
      }
    }
  }

 private:
  // ---- elements of C, packed ----

  // Two neighbours of row i, from column j on.
  TW_SM90 auto pair(const T (&acc)[kRegisters], int at, const gpu::Columns<2>& columns, int i, int j,
                    uint32_t d = 0) const {
    const T values[2] = {acc[at], acc[at + 1]};
    if constexpr (kResidual) {
      using Raw = typename D::storage;
      const float pair_of_d[2] = {gpu::to_float<D>((Raw)d), gpu::to_float<D>((Raw)(d >> 16))};
      return finish(values, columns, i, pair_of_d);
    }
    return epilogue.finish(values, columns, i < m ? i : m - 1, j, n - j);
  }
  // The epilogue's steps with the D operand at hand.
  TW_SM90 gpu::Packed<C, 2> finish(const T (&values)[2], const gpu::Columns<2>& columns, int i,
                                   const float (&d)[2]) const {
    float row_scale = 1.0f, x[2];
    if constexpr (Config::scale_a != Scale::none) {
      const tw_gemm_operand& scale = epilogue.problem.scale_a;
      row_scale = gpu::load_constant<float>((const float*)scale.ptr + batch * scale.batch_stride +
                                            (int64_t)(i < m ? i : m - 1) * scale.row_stride);
    }
#pragma unroll
    for (int l = 0; l < 2; l++) {
      x[l] = (float)values[l] * columns.scale[l];
      if constexpr (Config::scale_a != Scale::none) x[l] *= row_scale;
      if constexpr (Epilogue::Bias::present) x[l] += columns.shift[l];
      x[l] = gpu::apply_unary<Config::unary>(gpu::apply_binary<Config::binary>(x[l], d[l]), epilogue.lo, epilogue.hi);
    }
    return gpu::pack<C>(x);
  }
  TW_SM90 void load_given(Given& given, int index) const {
    const Residual<D> residual(*epilogue.d, batch, n);
    const int j = column + index % kAcross * Plan::piece_columns;
#pragma unroll
    for (int g = 0; g < kGroups; g++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int i = row_of(index / kAcross, h);
        residual.load(given.words[g][h], i < m ? i : m - 1, j + g * 32, quad);
      }
  }
  TW_SM90 void arrange_given(Given& given, int index) const {
    const Residual<D> residual(*epilogue.d, batch, n);
    const int j = column + index % kAcross * Plan::piece_columns;
#pragma unroll
    for (int g = 0; g < kGroups; g++)
#pragma unroll
      for (int h = 0; h < 2; h++) residual.arrange(given.words[g][h], j + g * 32);
  }
  // Element (i, j).
  TW_SM90 auto single(T value, const gpu::Columns<1>& columns, int i, int j) const {
    const T values[1] = {value};
    return epilogue.finish(values, columns, i < m ? i : m - 1, j, n - j);
  }
  // Elements (i, j) and (i + 1, j) of 16 bits in one register.
  TW_SM90 uint32_t column_pair(const T (&acc)[kRegisters], int at, const gpu::Columns<1>& columns, int i, int j) const {
    return (uint32_t)(uint16_t)single(acc[at], columns, i, j).get(0) |
           (uint32_t)(uint16_t)single(acc[at + 1], columns, i + 1, j).get(0) << 16;
  }

  // ---- through shared memory ----

  TW_SM90 void stage_piece(const T (&acc)[kRegisters], int index, Given& given) const {
    const int r = index / kAcross, c = index % kAcross;
    const uint32_t buffer = staging + index % Plan::buffers * Plan::piece_bytes;
    if (thread == 0) {  // until the copy engine has read what this buffer held
      if (index == 0 && Plan::pieces % Plan::buffers != 0) wait_stores_read<0>();
      else wait_stores_read<Plan::buffers - 1>();
    }
    join_barrier(barrier, kWarpgroup);
    if constexpr (kResidual) arrange_given(given, index);
    if constexpr (Plan::swap) write_transposed(acc, r, buffer);
    else write_rows(acc, r, c, buffer, given);
    fence_async_proxy();
    join_barrier(barrier, kWarpgroup);
    const int first_row = Plan::swap ? row : row + r * 64;
    const int first_column = column + (Plan::swap ? r * 64 : c * Plan::piece_columns);
#pragma unroll
    for (int half = 0; half < kHalves; half++) {
      const uint32_t lines = buffer + half * kLines * 128;
      const int at = first_column + half * kLineElements;
      if (at + kLineElements > n && (uint32_t)n * Plan::c_size % 16 != 0) copy_lines(lines, first_row, at);
      else if (thread == 0) store_box(map, lines, {at, first_row, batch});
    }
    if (thread == 0) commit_stores();
  }

  // The copy engine writes whole units of 16 bytes: where C's rows end within one, threads write instead.
  TW_SM90 void copy_lines(uint32_t lines, int i, int j) const {
    using Storage = typename C::storage;
#pragma unroll 1
    for (int at = thread; at < kLines * kLineElements; at += kWarpgroup) {
      const int line = at / kLineElements, byte = at % kLineElements * Plan::c_size;
      const uint32_t word = gpu::load_shared<1>(swizzled(lines, line, byte / 16) + byte % 16 / 4 * 4).w[0];
      if (i + line < m && j + at % kLineElements < n) {
        char* const to = epilogue.c + ((int64_t)(i + line) * epilogue.rows.ld + j + at % kLineElements) * Plan::c_size;
        if constexpr (kHalf) gpu::store_global(to, (Storage)(word >> (byte % 4 * 8)));
        else gpu::store_global(to, word);
      }
    }
  }

  TW_SM90 void write_rows(const T (&acc)[kRegisters], int r, int c, uint32_t buffer, const Given& given) const {
    const int i = row + r * 64 + warp * 16 + lane / 4;
#pragma unroll
    for (int b = 0; b < Plan::piece_columns / 8; b += kHalf ? 2 : 1) {
      const int block = c * (Plan::piece_columns / 8) + b, j = column + block * 8 + quad * 2;
      if constexpr (kHalf) {
        uint32_t words[4];
#pragma unroll
        for (int next = 0; next < 2; next++) {
          const auto columns = epilogue.template columns<2>(j + next * 8, n - j - next * 8);
#pragma unroll
          for (int h = 0; h < 2; h++)
            words[next * 2 + h] =
                pair(acc, (block + next) * 4 + h * 2, columns, i + h * 8, j + next * 8,
                     given.words[b / 4][h][b % 4 + next])
                    .data.w[0];
        }
        store_fragments(swizzled(buffer, warp * 16 + lane % 16, b + lane / 16), words);
      } else {
        const auto columns = epilogue.template columns<2>(j, n - j);
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const auto value = pair(acc, block * 4 + h * 2, columns, i + h * 8, j, given.words[b / 4][h][b % 4]);
          store_words(swizzled(buffer, warp * 16 + lane / 4 + h * 8, b * 2 + quad / 2) + quad % 2 * 8, value.data.w[0],
                      value.data.w[1]);
        }
      }
    }
  }

  TW_SM90 void write_transposed(const T (&acc)[kRegisters], int r, uint32_t buffer) const {
    const int j = column + r * 64 + warp * 16 + lane / 4;
    const gpu::Columns<1> columns[2] = {epilogue.template columns<1>(j, n - j),
                                        epilogue.template columns<1>(j + 8, n - j - 8)};
#pragma unroll
    for (int b = 0; b < kBlocks; b += kHalf ? 2 : 1) {
      const int i = row + b * 8 + quad * 2;
      if constexpr (kHalf) {
        constexpr int kLast = kBlocks - 1;
        uint32_t words[4];
#pragma unroll
        for (int f = 0; f < 4; f++)
          if (f < 2 || b < kLast)
            words[f] = column_pair(acc, (b + f / 2) * 4 + f % 2 * 2, columns[f % 2], i + f / 2 * 8, j + f % 2 * 8);
        if (b < kLast) {
          store_fragments_transposed(swizzled(buffer, b * 8 + lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2),
                                     words);
        } else {
          const uint32_t two[2] = {words[0], words[1]};
          store_fragments_transposed(swizzled(buffer, b * 8 + lane % 8, warp * 2 + lane / 8 % 2), two);
        }
      } else {
#pragma unroll
        for (int f = 0; f < 4; f++) {  // h, then the neighbour along m
          const int h = f / 2, e = f % 2, at = warp % 2 * 16 + lane / 4 + h * 8;
          const auto value = single(acc[b * 4 + f], columns[h], i + e, j + h * 8);
          store_word(swizzled(buffer + warp / 2 * Plan::columns * 128, b * 8 + quad * 2 + e, at / 4) + at % 4 * 4,
                     value.data.w[0]);
        }
      }
    }
  }

  // ---- by the threads ----

  TW_SM90 void store_rows(const T (&acc)[kRegisters], int r) const {
    constexpr int kWide = kHalf ? kBlocks / 4 * 4 : 0;  // blocks that are stored four at a time, 16 bytes a thread
#pragma unroll
    for (int b = 0; b < kWide; b += 4) {
      uint32_t words[2][4];
#pragma unroll
      for (int f = 0; f < 4; f++) {
        const int j = column + (b + f) * 8 + quad * 2;
        const auto columns = epilogue.template columns<2>(j, n - j);
#pragma unroll
        for (int h = 0; h < 2; h++) words[h][f] = pair(acc, (b + f) * 4 + h * 2, columns, row_of(r, h), j).data.w[0];
      }
#pragma unroll
      for (int h = 0; h < 2; h++) {
        transpose_quad(words[h]);
        const int j = column + (b + quad) * 8, i = row_of(r, h);
        if (i < m && j < n) epilogue.put(eight(words[h]), i, j, n - j);
      }
    }
#pragma unroll
    for (int b = kWide; b < kBlocks; b++) {
      const int j = column + b * 8 + quad * 2;
      const auto columns = epilogue.template columns<2>(j, n - j);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const auto value = pair(acc, b * 4 + h * 2, columns, row_of(r, h), j);
        if (row_of(r, h) < m && j < n) epilogue.put(value, row_of(r, h), j, n - j);
      }
    }
  }

  TW_SM90 void store_transposed(const T (&acc)[kRegisters], int r) const {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int first = column + r * 64 + warp * 16 + h * 8, j = first + lane / 4;
      const auto columns = epilogue.template columns<1>(j, n - j);
#pragma unroll
      for (int b = 0; b < kBlocks; b++) {
        const int i = row + b * 8 + quad * 2;
        if constexpr (kHalf) {
          const uint32_t turned = transpose_fragment(column_pair(acc, b * 4 + h * 2, columns, i, j));
          const int to_i = row + b * 8 + lane / 4, to_j = first + quad * 2;
          gpu::Packed<C, 2> value;
          value.data.w[0] = turned;
          if (to_i < m && to_j < n) epilogue.put(value, to_i, to_j, n - to_j);
        } else {
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const auto value = single(acc[b * 4 + h * 2 + e], columns, i + e, j);
            if (i + e < m && j < n) epilogue.put(value, i + e, j, 1);
          }
        }
      }
    }
  }

  TW_SM90 int row_of(int r, int h) const { return row + r * 64 + warp * 16 + lane / 4 + h * 8; }
  static TW_SM90 gpu::Packed<C, 8> eight(const uint32_t (&words)[4]) {
    gpu::Packed<C, 8> value;
#pragma unroll
    for (int i = 0; i < 4; i++) value.data.w[i] = words[i];
    return value;
  }
};

}  // namespace tw::sm90
