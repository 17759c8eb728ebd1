// From the accumulators of one consumer warpgroup to C: the fused epilogue, then either pieces that are staged in
// shared memory and stored by the copy engine while the next ones are prepared, or predicated stores by the threads.
#pragma once
#include "tilewright/gpu/epilogue.hpp"
#include "tilewright/sm90/gemm_plan.hpp"
#include "tilewright/sm90/named/residual.hpp"
#include "tilewright/sm90/named/sums.hpp"
#include "tilewright/sm90/tma.hpp"

namespace tw::sm90::named {

template <class Plan>
struct Output {
  using Config = typename Plan::Config;
  using T = typename Plan::Accumulator;
  using C = typename Config::C;
  using Epilogue = gpu::Epilogue<Config, T>;
  using Sums = SumsOf<Plan>;
  static constexpr int kRepeats = Plan::repeats, kChunks = Sums::chunks, kBlocks = Plan::columns / 8;
  static constexpr int kColumns = Plan::swap ? kRepeats * 64 : Plan::columns;  // of C
  static constexpr int kChunkBlocks = kBlocks < 4 ? kBlocks : 4;
  static constexpr bool kHalf = Plan::c_size == 2;
  // A staged piece: lines of 128 bytes, each a row of C; with transpose_c and 4-byte elements two such blocks.
  static constexpr int kLineElements = 128 / Plan::c_size, kLines = Plan::swap ? Plan::columns : 64;
  static constexpr int kHalves = Plan::swap ? Plan::c_size / 2 : 1;
  // A single D operand of 16-bit elements goes its own way to staged results.
  using D = typename FirstOf<typename Config::D>::type;
  static constexpr bool kResidual = Plan::staged && !Plan::swap && Config::D::size == 1 && size_of<D> == 2;
  // Sums are finished chunk by chunk. Fused steps are in a loop: as straight code they take the compiler most of its
  // time. Plain kernels are straight code, which is quicker where there are few tiles.
  static constexpr int kPortions = kRepeats * kChunks, kPerPiece = Plan::swap ? kChunks : Plan::piece_columns / 32;
  static constexpr int kAhead = 2;  // chunks for which D is on its way
  // Straight code states once what only the last columns of C take: it ends with the piece in which they lie, which
  // takes those of all rows side by side.
  static constexpr bool kEndsEarly = Plan::staged && Epilogue::plain && (Plan::swap || kRepeats <= Plan::buffers);
  static constexpr bool kColumnsFirst = kEndsEarly && !Plan::swap;
  // A loop holds all sums to its end: with operands D registers move earlier. Where enough are left, two chunks at a
  // time hide more of the latency of D.
  static constexpr int kSums = Plan::accumulators * (Plan::promote ? 2 : 1);
  using Registers = RegisterShares<Plan::consumers, kSums + Plan::joining + (Config::D::size > 0 ? 16 : 0)>;
  static constexpr int kLeft = Registers::consumer - kSums;
  static constexpr int kUnroll = Epilogue::plain ? kPortions : kResidual && !Plan::partial && kLeft >= 104 && Config::unary == Unary::PassThrough
                                                            ? 2 : 1;
  static constexpr bool kColumnsAhead = !Plan::swap && !kResidual;  // D leaves no registers for them
  // Chunks that are elements of C when they are read: pairs of 16 bits, which are what `pair` and `column_pair` give.
  static constexpr bool kPairs = Epilogue::plain && kHalf && is_same<T, float>;
  static constexpr bool kExact = Epilogue::plain && is_same<C, int32>;  // sums beyond 2^24 are to stay exact
  static constexpr bool kScaledRows = Config::scale_a != Scale::none, kScaledColumns = Config::scale_b == Scale::column;
  static constexpr bool kColumnsVary = Epilogue::Bias::present || kScaledColumns;
  // Whether the steps between scaling and conversion are stated here, with all operands at hand.
  static constexpr bool kAtHand = kResidual || (Config::D::size == 0 && !Epilogue::plain && !Plan::swap);

  // What the next chunks take from memory, loaded while others are finished. Rows of fragments: two halves, h * 8.
  struct Ahead {
    uint32_t d[kAhead][2][4];  // by chunk, half, block
    gpu::Columns<2> columns[4];
    float row_scale[2];
    gpu::Columns<1> turned[2];  // with transpose_c, whose fragments have their columns in both halves
  };

  const Epilogue epilogue;
  const void* map;
  int m, n;         // sizes
  int row, column;  // this warpgroup's first row and column of C
  int batch;
  uint32_t staging;  // this warpgroup's buffers
  int barrier;       // and its named barrier
  int thread, warp, lane, quad;
  bool columns_whole;  // what columns have in common can be read by twos

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
        quad(thread % 4),
        columns_whole(are_columns_whole()) {
    const int x = wave % Plan::x_waves * kRepeats * 64, y = wave / Plan::x_waves * Plan::columns;
    row = work.tile_m * Plan::tile_m + (Plan::swap ? y : x);
    column = work.tile_n * Plan::tile_n + (Plan::swap ? x : y);
  }

  // Loads what the first chunks take. May come long before `store`.
  TW_SM90 void begin(Ahead& ahead) const {
    if constexpr (kResidual)
#pragma unroll
      for (int q = 0; q < kAhead; q++) load_d(ahead.d[q], q);
    if constexpr (kColumnsAhead) load_columns(ahead, 0);
    load_rows(ahead, 0);
  }

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
      if constexpr (kPairs) Sums::template read_pairs<C, kPortions>(x, r * kChunks + chunk, epilogue.alpha);
      else Sums::template read<kPortions>(x, r * kChunks + chunk);
      if constexpr (kExact) convert(x);
      if constexpr (Plan::swap) {
        if constexpr (Plan::staged) write_transposed(x, ahead.turned, r, chunk, buffer);
        else store_transposed(x, ahead.turned, r, chunk);
      } else {
        if constexpr (!kColumnsAhead) load_columns(ahead, q);
        const Ahead now = ahead;
        if constexpr (kColumnsAhead) load_columns(ahead, q + 1 < kPortions ? q + 1 : q);
        uint32_t d[2][4] = {};
        if constexpr (kResidual) {
          take_d(d, now.d[0], q);
#pragma unroll
          for (int i = 0; i < 8; i++) ahead.d[0][i / 4][i % 4] = now.d[1][i / 4][i % 4];
          load_d(ahead.d[1], q + kAhead);
        }
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

  // ---- elements of C, packed ----

  static TW_SM90 T number(uint32_t x) {
    if constexpr (is_same<T, float>) return gpu::float_of(x);
    else return (T)x;
  }
  // The sums of a chunk to elements of C, where those are of 4 bytes and all that there is to do is alpha: one branch for
  // the chunk.
  TW_SM90 void convert(uint32_t (&x)[kChunk]) const {
    if (epilogue.alpha == 1.0f) return;
#pragma unroll
    for (int i = 0; i < kChunk; i++) {
      const T values[1] = {number(x[i])};
      x[i] = epilogue.finish(values, gpu::Columns<1>{{epilogue.alpha}, {0.0f}}, 0, 0, 1).data.w[0];
    }
  }
  // Two neighbours of row i, from column j on; of half h and block b of a chunk.
  TW_SM90 auto pair(const uint32_t (&x)[kChunk], const Ahead& at_hand, int b, int h, int i, int j,
                    uint32_t d = 0) const {
    const T values[2] = {number(x[b * 4 + h * 2]), number(x[b * 4 + h * 2 + 1])};
    const gpu::Columns<2>& columns = at_hand.columns[b];
    if constexpr (kPairs) {
      gpu::Packed<C, 2> word;
      word.data.w[0] = x[b * 2 + h];
      return word;
    } else if constexpr (kExact) {
      gpu::Packed<C, 2> raw;
      raw.data.w[0] = x[b * 4 + h * 2], raw.data.w[1] = x[b * 4 + h * 2 + 1];
      return raw;
    } else if constexpr (kAtHand) {
      float y[2];
#pragma unroll
      for (int l = 0; l < 2; l++) {
        y[l] = (float)values[l] * columns.scale[l];
        if constexpr (kScaledRows) y[l] *= at_hand.row_scale[h];
        if constexpr (Epilogue::Bias::present) y[l] += columns.shift[l];
        if constexpr (kResidual)
          y[l] = gpu::apply_binary<Config::binary>(y[l], gpu::to_float<D>((typename D::storage)(d >> (l * 16))));
        y[l] = gpu::apply_unary<Config::unary>(y[l], epilogue.lo, epilogue.hi);
      }
      return gpu::pack<C>(y);
    } else {
      return epilogue.finish(values, columns, inside(i), j, n - j);
    }
  }
  // What the columns of a chunk have in common: by vectors where all are there and lie side by side.
  TW_SM90 void load_columns(Ahead& ahead, int q) const {
    const int first = column + q % kChunks * 32;
    if (!kColumnsVary || (columns_whole && first + 32 <= n)) {
#pragma unroll
      for (int b = 0; b < kChunkBlocks; b++) ahead.columns[b] = whole_columns(first + b * 8 + quad * 2);
    } else {
#pragma unroll 1
      for (int i = 0; i < kChunkBlocks * 2; i++) {
        const int j = first + i / 2 * 8 + quad * 2 + i % 2;
        const gpu::Columns<1> one = epilogue.template columns<1>(j, n - j);
#pragma unroll
        for (int to = 0; to < kChunkBlocks * 2; to++)
          if (to == i) {
            ahead.columns[to / 2].scale[to % 2] = one.scale[0];
            ahead.columns[to / 2].shift[to % 2] = one.shift[0];
          }
      }
    }
  }
  template <class E>
  TW_SM90 bool is_whole(const tw_gemm_operand& of) const {
    return of.col_stride == 1 && gpu::is_aligned((const char*)of.ptr + batch * of.batch_stride * size_of<E>, 2 * size_of<E>);
  }
  TW_SM90 bool are_columns_whole() const {
    bool whole = true;
    if constexpr (Epilogue::Bias::present) whole = is_whole<typename Epilogue::Bias::type>(epilogue.problem.bias);
    if constexpr (kScaledColumns) whole = whole && is_whole<fp32>(epilogue.problem.scale_b);
    return whole;
  }
  template <class E>
  static TW_SM90 gpu::Packed<E, 2> two_of(const tw_gemm_operand& of, int batch, int j) {
    return gpu::load_constant<gpu::Packed<E, 2>>((const char*)of.ptr + (batch * of.batch_stride + j) * size_of<E>);
  }
  TW_SM90 gpu::Columns<2> whole_columns(int j) const {
    using E = typename Epilogue::Bias::type;
    gpu::Columns<2> y = {{epilogue.alpha, epilogue.alpha}, {0.0f, 0.0f}};
    if constexpr (kScaledColumns) {
      const auto x = two_of<fp32>(epilogue.problem.scale_b, batch, j);
      y.scale[0] *= gpu::to_float<fp32>(x.get(0)), y.scale[1] *= gpu::to_float<fp32>(x.get(1));
    } else if constexpr (Config::scale_b != Scale::none) {
      const tw_gemm_operand& scale = epilogue.problem.scale_b;
      const float x = gpu::load_constant<float>((const float*)scale.ptr + batch * scale.batch_stride);
      y.scale[0] *= x, y.scale[1] *= x;
    }
    if constexpr (Epilogue::Bias::present) {
      const auto x = two_of<E>(epilogue.problem.bias, batch, j);
      y.shift[0] = gpu::to_float<E>(x.get(0)), y.shift[1] = gpu::to_float<E>(x.get(1));
    }
    return y;
  }
  // What stays for all chunks of 64 rows (with transpose_c: columns).
  TW_SM90 void load_rows(Ahead& ahead, int r) const {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if constexpr (Plan::swap) {
        const int j = column + r * 64 + warp * 16 + lane / 4 + h * 8;
        ahead.turned[h] = epilogue.template columns<1>(j, n - j);
      } else if constexpr (kScaledRows && kAtHand) {
        const tw_gemm_operand& scale = epilogue.problem.scale_a;
        ahead.row_scale[h] = gpu::load_constant<float>((const float*)scale.ptr + batch * scale.batch_stride +
                                                       (int64_t)inside(row_of(r, h)) * scale.row_stride);
      }
    }
  }
  TW_SM90 void load_d(uint32_t (&d)[2][4], int q) const {
    const Residual<D> residual(*epilogue.d, batch, n);
    const int j = column + q % kChunks * 32;
    if (q < kPortions && residual.whole(j))
#pragma unroll
      for (int h = 0; h < 2; h++) residual.load(d[h], inside(row_of(q / kChunks, h)), j, quad);
  }
  // D as the sums are arranged, from what was loaded.
  TW_SM90 void take_d(uint32_t (&to)[2][4], const uint32_t (&d)[2][4], int q) const {
    const Residual<D> residual(*epilogue.d, batch, n);
    const int j = column + q % kChunks * 32;
    if (residual.whole(j)) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int b = 0; b < 4; b++) to[h][b] = d[h][b];
        transpose_quad(to[h]);
      }
    } else {
#pragma unroll 1
      for (int h = 0; h < 2; h++) {
        uint32_t x[4];
        residual.gather(x, inside(row_of(q / kChunks, h)), j, quad);
#pragma unroll
        for (int b = 0; b < 4; b++)
          if (h == 0) to[0][b] = x[b];
          else to[1][b] = x[b];
      }
    }
  }
  // Element (i, j).
  TW_SM90 auto single(uint32_t x, const gpu::Columns<1>& columns, int i, int j) const {
    if constexpr (kExact) {
      gpu::Packed<C, 1> raw;
      raw.data.w[0] = x;
      return raw;
    } else {
      const T values[1] = {number(x)};
      return epilogue.finish(values, columns, inside(i), j, n - j);
    }
  }
  // Elements (i, j) and (i + 1, j) of 16 bits in one register.
  TW_SM90 uint32_t column_pair(const uint32_t (&x)[kChunk], int at, const gpu::Columns<1>& columns, int i,
                               int j) const {
    if constexpr (kPairs) return x[at / 2];
    else
      return (uint32_t)(uint16_t)single(x[at], columns, i, j).get(0) |
             (uint32_t)(uint16_t)single(x[at + 1], columns, i + 1, j).get(0) << 16;
  }

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
        if (thread == 0) store_box(map, lines, {at, first_row, batch});
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
            words[f] = column_pair(x, (at + f / 2) * 4 + f % 2 * 2, columns[f % 2], i + f / 2 * 8, j + f % 2 * 8);
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
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int first = column + r * 64 + warp * 16 + h * 8, j = first + lane / 4;
#pragma unroll
      for (int at = 0; at < kChunkBlocks; at++) {
        const int b = chunk * 4 + at, i = row + b * 8 + quad * 2;
        if (!has(b)) continue;
        if constexpr (kHalf) {
          const uint32_t turned = transpose_fragment(column_pair(x, at * 4 + h * 2, columns[h], i, j));
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

  // Whether a 64 x N piece has block b: the last chunk may be of fewer than four.
  static TW_SM90 bool has(int b) { return kBlocks % 4 == 0 || b < kBlocks; }
  TW_SM90 int inside(int i) const { return i < m ? i : m - 1; }
  TW_SM90 int row_of(int r, int h) const { return row + r * 64 + warp * 16 + lane / 4 + h * 8; }
  static TW_SM90 gpu::Packed<C, 8> eight(const uint32_t (&words)[4]) {
    gpu::Packed<C, 8> value;
#pragma unroll
    for (int i = 0; i < 4; i++) value.data.w[i] = words[i];
    return value;
  }
};

}  // namespace tw::sm90::named
