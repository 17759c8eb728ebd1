// From the accumulators of one consumer warpgroup to C: the fused epilogue, then either pieces that are staged in
// shared memory and stored by the copy engine while the next ones are prepared, or predicated stores by the threads.
#pragma once
#include "tilewright/sm90/gemm/elements.hpp"
#include "tilewright/sm90/blocks/tma.hpp"

namespace tw::sm90 {

template <class Plan>
struct Output : Elements<Plan> {
  using Base = Elements<Plan>;
  using typename Base::Ahead, typename Base::C, typename Base::Config, typename Base::Epilogue;
  using Base::batch, Base::column, Base::epilogue, Base::lane, Base::m, Base::n, Base::quad, Base::row, Base::thread;
  using Base::column_pair, Base::has, Base::load_columns, Base::load_d, Base::load_rows, Base::load_turned_d;
  using Base::pair, Base::read;
  using Base::kAhead, Base::kBlocks, Base::kChunkBlocks, Base::kChunks, Base::kColumnsAhead, Base::kHalf;
  using Base::kPortions, Base::kRepeats, Base::kOneD, Base::kTurnedD;
  using Base::row_of, Base::single, Base::take_d, Base::warp;
  static constexpr int kColumns = Plan::swap ? kRepeats * 64 : Plan::columns;  // of C
  // A staged piece: lines of 128 bytes, each a row of C; with transpose_c and 4-byte elements two such blocks.
  static constexpr int kLineElements = 128 / Plan::c_size, kLines = Plan::swap ? Plan::columns : 64;
  static constexpr int kHalves = Plan::swap ? Plan::c_size / 2 : 1;
  // Sums are finished chunk by chunk. Fused steps and stores by the threads are in a loop: as straight code they take
  // the compiler most of its time. Plain staged kernels are straight code, which is quicker where there are few tiles.
  static constexpr int kPerPiece = Plan::swap ? kChunks : Plan::piece_columns / 32;
  // Straight code states once what only the last columns of C take: it ends with the piece in which they lie, which
  // takes those of all rows side by side.
  static constexpr bool kEndsEarly = Plan::staged && Epilogue::plain && (Plan::swap || kRepeats <= Plan::buffers);
  static constexpr bool kColumnsFirst = kEndsEarly && !Plan::swap;
  // A loop holds all sums to its end: with operands D registers move earlier. Where enough are left, two chunks at a
  // time hide more of the latency of D, unless the steps after it hide it anyway.
  static constexpr int kSums = Plan::accumulators * (Plan::promote ? 2 : 1);
  using Registers = RegisterShares<Plan::consumers, kSums + Plan::joining + (Config::D::size > 0 ? 24 : 0)>;
  static constexpr bool kTwo = kOneD && !Plan::partial && Registers::consumer - kSums >= 104 &&
                               Config::unary == Unary::PassThrough;
  static constexpr int kUnroll = Epilogue::plain && Plan::staged ? kPortions : kTwo ? 2 : 1;

  const void* map;
  uint32_t staging;  // this warpgroup's buffers
  int barrier;       // and its named barrier

  template <class Task>
  TW_SM90 Output(const Task& task, const Work& work, int wave, uint32_t buffers, int named_barrier)
      : Base(task, work, wave), map(&task.c), staging(buffers), barrier(named_barrier) {}

  TW_SM90 void store(Ahead& ahead) const {
    asm volatile("" ::"f"(epilogue.alpha));  // converted here, not again for each chunk
    const bool cut = (uint32_t)n * Plan::c_size % 16 != 0;  // rows of C end within a unit of the copy engine
#pragma unroll kUnroll
    for (int q = 0; q < kPortions; q++) {
      const int r = repeat_of(q), chunk = chunk_of(q);
      const uint32_t buffer = buffer_of(q / kPerPiece);
      if constexpr (Plan::staged)
        if (q % kPerPiece == 0) begin_piece(q / kPerPiece);
      if constexpr (kRepeats > 1)
        if (chunk == 0 && q > 0) load_rows(ahead, r);
      uint32_t x[kChunk];
      read(x, r * kChunks + chunk);
      if constexpr (Plan::swap) {
        if constexpr (Plan::staged) write_transposed(x, ahead.turned, r, chunk, buffer);
        else store_transposed(x, ahead.turned, r, chunk);
      } else {
        if constexpr (!kColumnsAhead) load_columns(ahead, q);
        const Ahead now = ahead;
        if constexpr (kColumnsAhead) load_columns(ahead, q + 1 < kPortions ? q + 1 : q);
        uint32_t d[2][4] = {};
        if constexpr (kOneD) {
          take_d(d, now.d[0], q);
#pragma unroll
          for (int i = 0; i < 8; i++) ahead.d[0][i / 4][i % 4] = now.d[1][i / 4][i % 4];
          load_d(ahead.d[1], q + kAhead);
        }
        if constexpr (Base::kByChunk) this->finish_chunk(x, now, r, chunk);
        if constexpr (Plan::staged) write_rows(x, now, d, r, chunk, buffer);
        else store_rows(x, now, r, chunk);
      }
      if constexpr (Plan::staged)
        if (q % kPerPiece == kPerPiece - 1) {
          const int c = chunk / kPerPiece, end = store_piece(r, c, buffer, cut);
          if constexpr (kEndsEarly)
            if (cut && end > n && (Plan::swap || r == kRepeats - 1)) break;
        }
    }
    if constexpr (kEndsEarly)
      if (cut && n < column + kColumns) store_end();
  }

 private:
  // ---- order ----

  static TW_SM90 int repeat_of(int q) { return kColumnsFirst ? q / kPerPiece % kRepeats : q / kChunks; }
  static TW_SM90 int chunk_of(int q) {
    return kColumnsFirst ? q / kPerPiece / kRepeats * kPerPiece + q % kPerPiece : q % kChunks;
  }
  TW_SM90 uint32_t buffer_of(int piece) const { return staging + piece % Plan::buffers * Plan::piece_bytes; }

  // ---- through shared memory ----

  TW_SM90 void begin_piece(int index) const {
    if (thread == 0) {  // until the copy engine has read what this buffer held
      if (index == 0 && Plan::pieces % Plan::buffers != 0) wait_stores_read<0>();
      else wait_stores_read<Plan::buffers - 1>();
    }
    join_barrier(barrier, kWarpgroup);
  }
  // Returns the column of C in which the piece ends. `cut`: see `store`.
  TW_SM90 int store_piece(int r, int c, uint32_t buffer, bool cut) const {
    fence_async_proxy();
    join_barrier(barrier, kWarpgroup);
    const int first_row = Plan::swap ? row : row + r * 64;
    const int first_column = column + (Plan::swap ? r * 64 : c * Plan::piece_columns);
#pragma unroll
    for (int half = 0; half < kHalves; half++) {
      const uint32_t lines = buffer + half * kLines * 128;
      const int at = first_column + half * kLineElements;
      if (at + kLineElements <= n || !cut) {
        if (thread == 0) tma_store(map, lines, {at, first_row, batch});
      } else if constexpr (!kEndsEarly) {
        copy_lines(lines, first_row, at);
      }
    }
    if (thread == 0) commit_stores();
    return first_column + kHalves * kLineElements;
  }

  // The last columns of C, from the buffers in which `store` left them.
  TW_SM90 void store_end() const {
    constexpr int kPiece = kHalves * kLineElements;
    if (thread == 0) wait_stores_read<0>();  // the next tile's pieces count from the first buffer
    if (n <= column) return;
    const int c = (n - column) / kPiece, first_column = column + c * kPiece;
    if constexpr (Plan::swap) {
      const int half = (n - first_column) / kLineElements;
      copy_lines(buffer_of(c) + half * kLines * 128, row, first_column + half * kLineElements);
    } else {
#pragma unroll 1
      for (int r = 0; r < kRepeats; r++) copy_lines(buffer_of(c * kRepeats + r), row + r * 64, first_column);
    }
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

  // A chunk into a piece, which begins at a multiple of its columns.
  TW_SM90 void write_rows(const uint32_t (&x)[kChunk], const Ahead& at_hand, const uint32_t (&d)[2][4], int r,
                          int chunk, uint32_t buffer) const {
    const int i = row_of(r, 0), first = chunk % kPerPiece * 4;  // the chunk's first block in the piece
#pragma unroll
    for (int b = 0; b < 4; b += kHalf ? 2 : 1) {
      const int j = column + (chunk * 4 + b) * 8 + quad * 2;
      if constexpr (kHalf) {
        uint32_t words[4];
#pragma unroll
        for (int f = 0; f < 4; f++)
          words[f] = pair(x, at_hand, b + f / 2, f % 2, i + f % 2 * 8, j + f / 2 * 8, d[f % 2][b + f / 2]).data.w[0];
        store_fragments(swizzled(buffer, warp * 16 + lane % 16, first + b + lane / 16), words);
      } else {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const auto value = pair(x, at_hand, b, h, i + h * 8, j, d[h][b]);
          store_words(swizzled(buffer, warp * 16 + lane / 4 + h * 8, (first + b) * 2 + quad / 2) + quad % 2 * 8,
                      value.data.w[0], value.data.w[1]);
        }
      }
    }
  }

  TW_SM90 void write_transposed(const uint32_t (&x)[kChunk], const gpu::Columns<1> (&columns)[2], int r, int chunk,
                                uint32_t buffer) const {
    const int j = column + r * 64 + warp * 16 + lane / 4;
    uint32_t d[kChunkBlocks][2] = {};
    if constexpr (kTurnedD) load_turned_d(d, chunk * 4, j);
#pragma unroll
    for (int at = 0; at < kChunkBlocks; at += kHalf ? 2 : 1) {
      const int b = chunk * 4 + at, i = row + b * 8 + quad * 2;
      if (!has(b)) continue;
      if constexpr (kHalf) {
        const bool two = has(b + 1);
        uint32_t words[4];
#pragma unroll
        for (int f = 0; f < 4; f++)
          if (f < 2 || two)
            words[f] = column_pair(x, (at + f / 2) * 4 + f % 2 * 2, columns[f % 2], i + f / 2 * 8, j + f % 2 * 8,
                                   d[at + f / 2][f % 2]);
        const uint32_t line = b * 8 + lane % 8;
        if (two) {
          store_fragments_transposed(swizzled(buffer, line + lane / 16 * 8, warp * 2 + lane / 8 % 2), words);
        } else {
          const uint32_t one[2] = {words[0], words[1]};
          store_fragments_transposed(swizzled(buffer, line, warp * 2 + lane / 8 % 2), one);
        }
      } else {
#pragma unroll
        for (int f = 0; f < 4; f++) {  // h, then the neighbour along m
          const int h = f / 2, e = f % 2, place = warp % 2 * 16 + lane / 4 + h * 8;
          const auto value = single(x[at * 4 + f], columns[h], i + e, j + h * 8);
          store_word(swizzled(buffer + warp / 2 * Plan::columns * 128, b * 8 + quad * 2 + e, place / 4) + place % 4 * 4,
                     value.data.w[0]);
        }
      }
    }
  }

  // ---- by the threads ----

  TW_SM90 void store_rows(const uint32_t (&x)[kChunk], const Ahead& at_hand, int r, int chunk) const {
    const int first = column + chunk * 32;
    if (kHalf && has(chunk * 4 + 3)) {  // four blocks at a time, 16 bytes a thread
      uint32_t words[2][4];
#pragma unroll
      for (int b = 0; b < 4; b++) {
        const int j = first + b * 8 + quad * 2;
#pragma unroll
        for (int h = 0; h < 2; h++) words[h][b] = pair(x, at_hand, b, h, row_of(r, h), j).data.w[0];
      }
#pragma unroll
      for (int h = 0; h < 2; h++) {
        transpose_quad(words[h]);
        const int j = first + quad * 8, i = row_of(r, h);
        if (i < m && j < n) epilogue.put(eight(words[h]), i, j, n - j);
      }
      return;
    }
#pragma unroll
    for (int b = 0; b < kChunkBlocks; b++) {
      if (!has(chunk * 4 + b)) continue;
      const int j = first + b * 8 + quad * 2;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const auto value = pair(x, at_hand, b, h, row_of(r, h), j);
        if (row_of(r, h) < m && j < n) epilogue.put(value, row_of(r, h), j, n - j);
      }
    }
  }

  TW_SM90 void store_transposed(const uint32_t (&x)[kChunk], const gpu::Columns<1> (&columns)[2], int r,
                                int chunk) const {
    uint32_t d[kChunkBlocks][2] = {};
    if constexpr (kTurnedD) load_turned_d(d, chunk * 4, column + r * 64 + warp * 16 + lane / 4);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int first = column + r * 64 + warp * 16 + h * 8, j = first + lane / 4;
#pragma unroll
      for (int at = 0; at < kChunkBlocks; at++) {
        const int b = chunk * 4 + at, i = row + b * 8 + quad * 2;
        if (!has(b)) continue;
        if constexpr (kHalf) {
          const uint32_t turned = transpose_fragment(column_pair(x, at * 4 + h * 2, columns[h], i, j, d[at][h]));
          const int to_i = row + b * 8 + lane / 4, to_j = first + quad * 2;
          gpu::Packed<C, 2> value;
          value.data.w[0] = turned;
          if (to_i < m && to_j < n) epilogue.put(value, to_i, to_j, n - to_j);
        } else {
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const auto value = single(x[at * 4 + h * 2 + e], columns[h], i + e, j);
            if (i + e < m && j < n) epilogue.put(value, i + e, j, 1);
          }
        }
      }
    }
  }

  static TW_SM90 gpu::Packed<C, 8> eight(const uint32_t (&words)[4]) {
    gpu::Packed<C, 8> value;
#pragma unroll
    for (int i = 0; i < 4; i++) value.data.w[i] = words[i];
    return value;
  }
};

}  // namespace tw::sm90
