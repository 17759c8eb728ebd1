// Elements of C from sums: the fused steps, and what they take from memory, loaded while chunks before are finished.
#pragma once
#include "tilewright/gpu/blocks/epilogue.hpp"
#include "tilewright/sm90/gemm/plan.hpp"
#include "tilewright/sm90/gemm/d_operand.hpp"
#include "tilewright/sm90/gemm/accumulators.hpp"

namespace tw::sm90 {

template <class Plan>
struct Elements {
  using Config = typename Plan::Config;
  using T = typename Plan::Accumulator;
  using C = typename Config::C;
  using Epilogue = gpu::Epilogue<Config, T>;
  using Accumulators = AccumulatorsOf<Plan>;
  static constexpr int kRepeats = Plan::repeats, kChunks = Accumulators::chunks, kPortions = kRepeats * kChunks;
  static constexpr int kBlocks = Plan::columns / 8, kChunkBlocks = kBlocks < 4 ? kBlocks : 4;
  static constexpr bool kHalf = Plan::c_size == 2;
  // A single D operand of 16-bit elements goes its own way to staged results.
  using D = typename FirstOf<typename Config::D>::type;
  static constexpr bool kOneD = Plan::staged && !Plan::swap && Config::D::size == 1 && size_of<D> == 2;
  // With transpose_c: one of 16 bits to results of 16 bits, read for a whole chunk at once.
  static constexpr bool kTurnedD =
      Plan::swap && kHalf && Config::D::size == 1 && size_of<D> == 2 && Config::scale_a == Scale::none;
  static constexpr int kAhead = 2;  // chunks for which D is on its way
  static constexpr bool kColumnsAhead = !Plan::swap && !kOneD;  // D leaves no registers for them
  // Chunks that are elements of C when they are read: pairs of 16 bits, which are what `pair` and `column_pair` give.
  static constexpr bool kPairs = Epilogue::plain && kHalf && is_same<T, float>;
  static constexpr bool kExact = Epilogue::plain && is_same<C, int32>;  // sums beyond 2^24 are to stay exact
  static constexpr bool kScaledRows = Config::scale_a != Scale::none, kScaledColumns = Config::scale_b == Scale::column;
  static constexpr bool kColumnsVary = Epilogue::Bias::present || kScaledColumns;
  // All other operands D are applied to a whole chunk at once: compilers take long over a choice of ways to read for
  // each pair of elements.
  static constexpr bool kByChunk = !Plan::swap && Config::D::size > 0 && !kOneD;
  // True if the steps between scaling and conversion are stated here, with all operands at hand.
  static constexpr bool kAtHand = kOneD || kByChunk || (Config::D::size == 0 && !Epilogue::plain && !Plan::swap);

  // Operands of the next chunks. Rows of fragments: two halves, h * 8.
  struct Ahead {
    uint32_t d[kAhead][2][4];  // by chunk, half, block
    gpu::Columns<2> columns[4];
    float row_scale[2];
    gpu::Columns<1> turned[2];  // with transpose_c, whose fragments have their columns in both halves
  };

  const Epilogue epilogue;
  int m, n;         // sizes
  int row, column;  // this warpgroup's first row and column of C
  int batch, thread, warp, lane, quad;
  bool columns_whole;  // what columns have in common can be read by twos

  template <class Task>
  TW_SM90 Elements(const Task& task, const Work& work, int wave)
      : epilogue(task.problem, task.operands(), work.batch, {task.problem.ldc}),
        m((int)task.problem.m),
        n((int)task.problem.n),
        batch(work.batch),
        thread(threadIdx.x % kWarpgroup),
        warp(thread / kWarp),
        lane(thread % kWarp),
        quad(thread % 4),
        columns_whole(are_columns_whole()) {
    const int x = wave % Plan::x_waves * kRepeats * 64, y = wave / Plan::x_waves * Plan::columns;
    row = work.tile_m * Plan::tile_m + (Plan::swap ? y : x);
    column = work.tile_n * Plan::tile_n + (Plan::swap ? x : y);
  }

  // Has the lines of D in L1 when they are read, with transpose_c. Comes before the products.
  TW_SM90 void fetch_d() const {
    if constexpr (kTurnedD) {
      const tw_gemm_operand& of = *epilogue.d;
      const char* const base = (const char*)of.ptr + batch * of.batch_stride * 2;
#pragma unroll 1
      for (int at = thread; at < Plan::columns * kRepeats; at += kWarpgroup) {
        const int i = inside(row + at % Plan::columns), j = column + at / Plan::columns * 64;
        if (j < n)
          asm volatile("prefetch.global.L1 [%0];" ::"l"(base + (i * of.row_stride + j * of.col_stride) * 2) : "memory");
      }
    }
  }
  // Loads what the first chunks take. May come long before `store`.
  TW_SM90 void begin(Ahead& ahead) const {
    if constexpr (kOneD)
#pragma unroll
      for (int q = 0; q < kAhead; q++) load_d(ahead.d[q], q);
    if constexpr (kColumnsAhead) load_columns(ahead, 0);
    load_rows(ahead, 0);
  }

  // ---- from memory ----

  // Loads the operands of a chunk's columns: by vectors where all are there and lie side by side.
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
    const char* const from = (const char*)of.ptr + batch * of.batch_stride * size_of<E>;
    return of.col_stride == 1 && gpu::is_aligned(from, 2 * size_of<E>);
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
  // Loads the operands of all chunks of 64 rows (with transpose_c: columns).
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
    const DOperand<D> d_operand(*epilogue.d, batch, n);
    const int j = column + q % kChunks * 32;
    if (q < kPortions && d_operand.whole(j))
#pragma unroll
      for (int h = 0; h < 2; h++) d_operand.load(d[h], inside(row_of(q / kChunks, h)), j, quad);
  }
  // D as the sums are arranged, from what was loaded.
  TW_SM90 void take_d(uint32_t (&to)[2][4], const uint32_t (&d)[2][4], int q) const {
    const DOperand<D> d_operand(*epilogue.d, batch, n);
    const int j = column + q % kChunks * 32;
    if (d_operand.whole(j)) {
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
        d_operand.gather(x, inside(row_of(q / kChunks, h)), j, quad);
#pragma unroll
        for (int b = 0; b < 4; b++)
          if (h == 0) to[0][b] = x[b];
          else to[1][b] = x[b];
      }
    }
  }

  // With transpose_c, D of the chunk that begins at block `first`, for columns j and j + 8: words of two rows, by block
  // and half. All loads are on their way at once. What lies beyond m and n is unspecified.
  TW_SM90 void load_turned_d(uint32_t (&d)[kChunkBlocks][2], int first, int j) const {
    const tw_gemm_operand& of = *epilogue.d;
    const char* const base = (const char*)of.ptr + batch * of.batch_stride * 2;
    int64_t columns[2];
#pragma unroll
    for (int h = 0; h < 2; h++) columns[h] = (j + h * 8 < n ? j + h * 8 : n - 1) * of.col_stride * 2;
    uint16_t x[kChunkBlocks][2][2];
#pragma unroll
    for (int b = 0; b < kChunkBlocks; b++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const char* const from = base + inside(row + (first + b) * 8 + quad * 2 + e) * of.row_stride * 2;
#pragma unroll
        for (int h = 0; h < 2; h++) x[b][h][e] = gpu::load_global<uint16_t>(from + columns[h]);
      }
#pragma unroll
    for (int b = 0; b < kChunkBlocks; b++)
#pragma unroll
      for (int h = 0; h < 2; h++) d[b][h] = x[b][h][0] | (uint32_t)x[b][h][1] << 16;
  }

  // ---- elements of C, packed ----

  static TW_SM90 T number(uint32_t x) {
    if constexpr (is_same<T, float>) return gpu::float_of(x);
    else return (T)x;
  }
  // The sums of a chunk to elements of C, where those are of 4 bytes and all that there is to do is alpha: one branch
  // for the chunk.
  TW_SM90 void convert(uint32_t (&x)[kChunk]) const {
    if (epilogue.alpha == 1.0f) return;
#pragma unroll
    for (int i = 0; i < kChunk; i++) {
      const T values[1] = {number(x[i])};
      x[i] = epilogue.finish(values, gpu::Columns<1>{{epilogue.alpha}, {0.0f}}, 0, 0, 1).data.w[0];
    }
  }
  // Chunk q of all sums, for what follows.
  TW_SM90 void read(uint32_t (&x)[kChunk], int q) const {
    if constexpr (kPairs) Accumulators::template read_pairs<C, kPortions>(x, q, epilogue.alpha);
    else Accumulators::template read<kPortions>(x, q);
    if constexpr (kExact) convert(x);
  }
  // The sums of a chunk to elements of C, where operands D take part by chunks.
  TW_SM90 void finish_chunk(uint32_t (&x)[kChunk], const Ahead& at_hand, int r, int chunk) const {
    float y[kChunk];
#pragma unroll
    for (int i = 0; i < kChunkBlocks * 4; i++) {
      const int b = i / 4, h = i / 2 % 2, l = i % 2;
      y[i] = (float)number(x[i]) * at_hand.columns[b].scale[l];
      if constexpr (kScaledRows) y[i] *= at_hand.row_scale[h];
      if constexpr (Epilogue::Bias::present) y[i] += at_hand.columns[b].shift[l];
    }
    apply_all(y, epilogue.d, r, column + chunk * 32, typename Config::D{});
#pragma unroll
    for (int i = 0; i < kChunkBlocks * 4; i += 2) {
      float two[2];
#pragma unroll
      for (int l = 0; l < 2; l++) two[l] = gpu::apply_unary<Config::unary>(y[i + l], epilogue.lo, epilogue.hi);
      const auto packed = gpu::pack<C>(two);
      if constexpr (kHalf) x[i / 2] = packed.data.w[0];
      else x[i] = packed.data.w[0], x[i + 1] = packed.data.w[1];
    }
  }
  // Operands D in their order: of one type in a loop, so that the kernel does not grow with their number.
  TW_SM90 void apply_all(float (&)[kChunk], const tw_gemm_operand*, int, int, types<>) const {}
  template <class E, class... Rest>
  TW_SM90 void apply_all(float (&y)[kChunk], const tw_gemm_operand* d, int r, int j, types<E, Rest...>) const {
    if constexpr ((is_same<E, Rest> && ...)) {
#pragma unroll 1
      for (int i = 0; i < 1 + (int)sizeof...(Rest); i++) apply<E>(y, d[i], r, j);
    } else {
      apply<E>(y, *d, r, j);
      apply_all(y, d + 1, r, j, types<Rest...>{});
    }
  }
  // One of them to the chunk of columns from j on: by pairs where all are there and lie so, else one by one.
  template <class E>
  TW_SM90 void apply(float (&y)[kChunk], const tw_gemm_operand& d, int r, int j) const {
    constexpr int kPair = 2 * size_of<E>;
    const char* const base = (const char*)d.ptr + batch * d.batch_stride * size_of<E>;
    if (d.col_stride == 1 && d.row_stride % 2 == 0 && gpu::is_aligned(base, kPair) && j + 32 <= n) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const char* const from = base + (inside(row_of(r, h)) * d.row_stride + j + quad * 2) * size_of<E>;
#pragma unroll
        for (int b = 0; b < kChunkBlocks; b++) {
          const auto two = gpu::load_global<gpu::Packed<E, 2>>(from + b * 4 * kPair);
#pragma unroll
          for (int l = 0; l < 2; l++) step(y[b * 4 + h * 2 + l], gpu::to_float<E>(two.get(l)));
        }
      }
    } else {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const char* const from = base + inside(row_of(r, h)) * d.row_stride * size_of<E>;
#pragma unroll
        for (int i = 0; i < kChunkBlocks * 2; i++) {
          const int at = j + i / 2 * 8 + quad * 2 + i % 2;
          const char* const place = from + (at < n ? at : n - 1) * d.col_stride * size_of<E>;
          step(y[i / 2 * 4 + h * 2 + i % 2], gpu::to_float<E>(gpu::load_global<typename E::storage>(place)));
        }
      }
    }
  }
  static TW_SM90 void step(float& y, float d) { y = gpu::apply_binary<Config::binary>(y, d); }
  // Two neighbours of row i, from column j on; of half h and block b of a chunk.
  TW_SM90 auto pair(const uint32_t (&x)[kChunk], const Ahead& at_hand, int b, int h, int i, int j,
                    uint32_t d = 0) const {
    const T values[2] = {number(x[b * 4 + h * 2]), number(x[b * 4 + h * 2 + 1])};
    const gpu::Columns<2>& columns = at_hand.columns[b];
    if constexpr (kPairs || (kByChunk && kHalf)) {
      gpu::Packed<C, 2> word;
      word.data.w[0] = x[b * 2 + h];
      return word;
    } else if constexpr (kExact || kByChunk) {
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
        if constexpr (kOneD)
          y[l] = gpu::apply_binary<Config::binary>(y[l], gpu::to_float<D>((typename D::storage)(d >> (l * 16))));
        y[l] = gpu::apply_unary<Config::unary>(y[l], epilogue.lo, epilogue.hi);
      }
      return gpu::pack<C>(y);
    } else {
      return epilogue.finish(values, columns, inside(i), j, n - j);
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
  TW_SM90 uint32_t column_pair(const uint32_t (&x)[kChunk], int at, const gpu::Columns<1>& columns, int i, int j,
                               uint32_t d) const {
    if constexpr (kPairs) return x[at / 2];
    else if constexpr (kTurnedD) {
      float y[2];
#pragma unroll
      for (int l = 0; l < 2; l++) {
        y[l] = (float)number(x[at + l]) * columns.scale[0];
        if constexpr (Epilogue::Bias::present) y[l] += columns.shift[0];
        step(y[l], gpu::to_float<D>((typename D::storage)(d >> (l * 16))));
        y[l] = gpu::apply_unary<Config::unary>(y[l], epilogue.lo, epilogue.hi);
      }
      return gpu::pack<C>(y).data.w[0];
    } else {
      return (uint32_t)(uint16_t)single(x[at], columns, i, j).get(0) |
             (uint32_t)(uint16_t)single(x[at + 1], columns, i + 1, j).get(0) << 16;
    }
  }

  // True if a 64 x N piece has block b: the last chunk may be of fewer than four.
  static TW_SM90 bool has(int b) { return kBlocks % 4 == 0 || b < kBlocks; }
  TW_SM90 int inside(int i) const { return i < m ? i : m - 1; }
  TW_SM90 int row_of(int r, int h) const { return row + r * 64 + warp * 16 + lane / 4 + h * 8; }
};

}  // namespace tw::sm90
