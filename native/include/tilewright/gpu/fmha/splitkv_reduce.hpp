// The end of attention by waves that share keys (gpu/fmha/decode.hpp): what the waves have is added up row by row, and
// the workgroup that comes last adds the parts of its rows. A ticket for each tile of rows counts the workgroups; the
// last one leaves it zero. The order of the sums does not depend on who that is.
//
// Launches without counters leave parts to the combine stage. A part is what that stage takes: o_acc = (P V) / l of its
// columns and lse_acc = log(l), natural; -inf and zeros where it saw nothing. Learned sinks enter once, at the very
// end.
#pragma once
#include "tilewright/gpu/fmha/bytes.hpp"
#include "tilewright/gpu/fmha/dot.hpp"

namespace tw::gpu {

constexpr int kFmhaTickets = 16;  // the first of them among the counters: others tell what was wrong with lengths

// The tile of rows that a workgroup has, of heads from `head` on; `rows` of them are stored.
struct FmhaRows {
  int part, b, head, key_head, group, first, rows, ticket;
  bool skipped;
};

// Columns of part `part` of the keys that rows [r0, r1) may see: whole blocks, as many as other parts
// have, or one more. Sink columns belong to part 0.
template <class Config>
TW_DEVICE FmhaRange fmha_part(const tw_fmha_args& args, const FmhaItem& item, int part, int64_t r0, int64_t r1) {
  constexpr int n0 = Config::n0;
  FmhaRange range = {0, item.k_rows, 0};
  if constexpr (Config::mask != FmhaMask::no) range = fmha_range(args, item, r0, r1);
  if (!Config::token_sinks || part > 0) range.sink_last = 0;  // kernels without this feature look at no sinks
  const uint32_t start = (uint32_t)range.first / n0, count = ((uint32_t)range.last + n0 - 1) / n0 - start;
  const uint32_t splits = (uint32_t)args.splits, each = count / splits, more = count - each * splits;
  const uint32_t from = start + part * each + min_of((uint32_t)part, more);
  const uint32_t end = (uint32_t)range.last, last = (from + each + ((uint32_t)part < more ? 1 : 0)) * n0;
  const uint32_t first = min_of(max_of((uint32_t)range.first, from * n0), end);
  return {first, max_of(min_of(end, last), first), range.sink_last};
}

// As many parts of every tile, whose accumulators lie part by part.
struct FmhaEqualParts {
  using Rows = FmhaRows;
  TW_DEVICE static int count(const tw_fmha_args& args, const Rows&) { return (int)args.splits; }
  // The line of part 0 of row r of the tile, whose place among all rows is `line`; how far behind it part p lies.
  TW_DEVICE static int64_t first(const tw_fmha_args&, const Rows&, int, int64_t line) { return line; }
  TW_DEVICE static int64_t behind(const tw_fmha_args&, int64_t lines, int p) { return p * lines; }
};

// All threads of a workgroup wait for each other.
struct FmhaWorkgroup {
  TW_DEVICE static void meet() { barrier(); }
};

// Forward: the FmhaForward of the same Config. kStates: who has rows of results, all waves if they share keys; Team:
// the waves that add them; Parts: how many parts there are of a tile, and where.
template <class Forward, int kStates = Forward::waves, class Team = FmhaWorkgroup, class Parts = FmhaEqualParts>
struct FmhaSplitKvReduce {
  using Config = typename Forward::Config;
  using ScoreAtom = typename Forward::ScoreAtom;
  using ValueAtom = typename Forward::ValueAtom;
  using Softmax = typename Forward::Softmax;
  using O = typename Config::O;
  static constexpr int waves = Forward::waves, hdim = Config::hdim_v;
  // A wave's state, in its own part of shared memory: rows of results, padded so that the eight which lanes write at
  // once stand in different banks, then a maximum and a sum of each row.
  static constexpr int row_bytes = (hdim + 8) * 4, stats_at = Config::m0 * row_bytes;
  static constexpr int state_bytes = stats_at + Config::m0 * 8;
  static constexpr int columns = hdim % 128 == 0 ? 4 : hdim % 64 == 0 ? 2 : 1;  // a lane's, of each chunk of a row
  static constexpr int chunks = ceil_div(hdim, columns * kWave);
  static_assert(hdim % columns == 0, "a lane has whole vectors");
  static constexpr int batch = chunks == 1 ? 16 : chunks == 2 ? 8 : 4;  // parts on their way at once
  static_assert(kWave % batch == 0, "weights of a wave's worth of parts serve whole batches");

  const tw_fmha_args& args;
  const FmhaItem& item;
  const typename Parts::Rows& work;
  const int wave, lane;
  const uint32_t shared, states, step;  // of the workgroup; of the first wave, and from one to the next

  // All waves; `own` is where this one's state goes. Nothing else in shared memory is needed any more.
  TW_DEVICE void run(Softmax& softmax, const ValueAtom& o) const {
    wave_barrier();  // all lanes have read what lay there
    put(softmax, o);
    add();
  }

  // The same of states that are on their way into shared memory.
  TW_DEVICE void add() const {
    Team::meet();
    const int parts = Parts::count(args, work);
    const bool alone = parts == 1;
    TW_NO_UNROLL
    for (int r = wave; r < work.rows; r += waves) add_waves(r, alone);
    if (alone || !args.counters) return;
    Team::meet();
    if (wave == 0 && lane == 0) store_shared(shared, Words<1>{arrive(args.counters + kFmhaTickets + work.ticket)});
    Team::meet();
    if ((int)load_shared<1>(shared).w[0] + 1 != parts) return;
    if (wave == 0 && lane == 0) store_coherent(args.counters + kFmhaTickets + work.ticket, Words<1>{0});
    TW_NO_UNROLL
    for (int r = wave; r < work.rows; r += waves) add_parts(r);
  }

 private:
  TW_DEVICE uint32_t state(int of) const { return states + of * step; }

  TW_DEVICE void put(Softmax& softmax, const ValueAtom& o) const {
    const uint32_t own = state(wave);
    TW_UNROLL
    for (int slot = 0; slot < Softmax::slots; slot++) {
      const float l = fmha_row_sum<ScoreAtom>(softmax.l[slot]);
      const int r = ScoreAtom::row_at(lane, slot);
      if (r < work.rows && (lane & ScoreAtom::row_bits) == 0)
        store_shared(own + stats_at + r * 8, Words<2>{bits_of(softmax.m[slot]), bits_of(l)});
    }
    fmha_each_run(o, [&](float (&x)[ValueAtom::run], int slot, int, int index) {
      const int r = ScoreAtom::row_at(lane, slot);
      if (r >= work.rows) return;
      const uint32_t to = own + r * row_bytes;
      if constexpr (Forward::Ring::pairs) {
        const int c = fmha_paired_column<ValueAtom>(lane, index);
        store_shared(to + c * 4, Words<1>{bits_of(x[0])}), store_shared(to + c * 4 + 8, Words<1>{bits_of(x[1])});
      } else {
        store_shared(to + ValueAtom::run_column(lane, index) * 4, pack<fp32, ValueAtom::run>(x).data);
      }
    });
  }

  // Row r of the tile: its head, query, and whether that exists.
  struct Row {
    int head, query;
    bool exists;
  };
  TW_DEVICE Row row_of(int r) const {
    const int p = work.first + r;
    Row row = {work.head, p, false};
    if constexpr (Config::pack_gqa) {
      row.query = (int)((uint32_t)p / (uint32_t)work.group);
      row.head += p - row.query * work.group;
    }
    row.exists = row.query < (int)item.q_rows && !work.skipped;
    return row;
  }

  TW_DEVICE void add_waves(int r, bool alone) const {
    const Row row = row_of(r);
    float m[kStates], l[kStates], most = minus_infinity(), sink = minus_infinity();
    if constexpr (Config::learned_sinks)
      if (alone && row.exists) most = sink = load_constant<float>(args.sinks + row.head) * kLog2E;
    TW_UNROLL
    for (int w = 0; w < kStates; w++) {
      const Words<2> words = load_shared<2>(state(w) + stats_at + r * 8);
      m[w] = float_of(words.w[0]), l[w] = float_of(words.w[1]);
      most = fmha_larger(most, m[w]);
    }
    const float safe = most == minus_infinity() ? 0.0f : most;
    float total = 0.0f;
    TW_UNROLL
    for (int w = 0; w < kStates; w++) {
      m[w] = exp2(m[w] - safe);
      total += l[w] * m[w];
    }
    if (Config::learned_sinks && sink != minus_infinity()) total += exp2(sink - safe);
    if (!row.exists) total = 0.0f;
    const float scale = total == 0.0f ? 0.0f : Softmax::result_factor(args, work.b, work.key_head) / total;
    const float lse = total == 0.0f ? minus_infinity() : (most + log2(total)) * kLn2;
    const int64_t line = first_line(row, r) + Parts::behind(args, fmha_lines<Config>(args), work.part);
    TW_UNROLL
    for (int i = 0; i < chunks; i++) {
      const int c = (i * kWave + lane) * columns;
      if (c >= hdim) continue;
      float x[columns] = {};
      TW_UNROLL
      for (int w = 0; w < kStates; w++) {
        const Words<columns> y = load_shared<columns>(state(w) + r * row_bytes + c * 4);
        TW_UNROLL
        for (int e = 0; e < columns; e++) x[e] = fma(m[w], float_of(y.w[e]), x[e]);
      }
      TW_UNROLL
      for (int e = 0; e < columns; e++) x[e] = scale == 0.0f ? 0.0f : x[e] * scale;
      if (alone) store(row, c, x);
      else store_coherent(args.o_acc + line * hdim + c, pack<fp32, columns>(x).data);
    }
    if (lane != 0) return;
    if (alone) store_lse(row, lse);
    else store_coherent(args.lse_acc + line, Words<1>{bits_of(lse)});
  }

  TW_DEVICE void add_parts(int r) const {
    const Row row = row_of(r);
    const int splits = row.exists ? Parts::count(args, work) : 0;
    const int64_t lines = fmha_lines<Config>(args), line = first_line(row, r);
    const int64_t next = Parts::behind(args, lines, 1), step = Parts::behind(args, lines, 2) - next;
    const auto lse_of = [&](int s) {
      if (s >= splits) return minus_infinity();
      return float_of(load_coherent<1>(args.lse_acc + line + Parts::behind(args, lines, s)).w[0]);
    };
    const float* from = args.o_acc + line * hdim + lane * columns;
    float most = minus_infinity(), safe = 0.0f, weight = 0.0f, total = 0.0f, sum[chunks][columns] = {};
    TW_NO_UNROLL
    for (int first = 0; first < splits; first += batch) {
      Words<columns> part[batch][chunks] = {};
      TW_UNROLL
      for (int n = 0; n < batch; n++) {
        TW_UNROLL
        for (int i = 0; i < chunks; i++)
          if (first + n < splits && (i * kWave + lane) * columns < hdim)
            part[n][i] = load_coherent<columns>(from + i * kWave * columns);
        from += (n == 0 && first == 0 ? next : step) * hdim;
      }
      if (first == 0) {
        TW_NO_UNROLL
        for (int s = lane; s < splits; s += kWave) most = fmha_larger(most, lse_of(s));
        most = over_lanes(most, fmha_larger);
        if constexpr (Config::learned_sinks) most = fmha_larger(load_constant<float>(args.sinks + row.head), most);
        safe = most == minus_infinity() ? 0.0f : most;
      }
      if (first % kWave == 0) {  // those of a wave's worth of parts, a lane each
        weight = exp2((lse_of(first + lane) - safe) * kLog2E);
        total += weight;
      }
      TW_UNROLL
      for (int n = 0; n < batch; n++) {
        const float own = float_of((uint32_t)shuffle((int)bits_of(weight), first % kWave + n));
        TW_UNROLL
        for (int i = 0; i < chunks; i++)
          TW_UNROLL
          for (int e = 0; e < columns; e++) sum[i][e] = fma(own, float_of(part[n][i].w[e]), sum[i][e]);
      }
    }
    total = over_lanes(total, [](float x, float y) { return x + y; });
    if constexpr (Config::learned_sinks) {
      const float sink = splits > 0 ? load_constant<float>(args.sinks + row.head) : minus_infinity();
      if (sink != minus_infinity()) total += exp2((sink - safe) * kLog2E);
    }
    const float scale = total == 0.0f ? 0.0f : 1.0f / total;
    TW_UNROLL
    for (int i = 0; i < chunks; i++) {
      const int c = (i * kWave + lane) * columns;
      if (c >= hdim) continue;
      TW_UNROLL
      for (int e = 0; e < columns; e++) sum[i][e] = total == 0.0f ? 0.0f : sum[i][e] * scale;
      store(row, c, sum[i]);
    }
    if (lane == 0) store_lse(row, total == 0.0f ? minus_infinity() : most + log2(total) * kLn2);
  }

  template <class F>
  TW_DEVICE static float over_lanes(float x, F f) {
    TW_UNROLL
    for (int mask = kWave / 2; mask > 0; mask /= 2) x = f(x, shuffle_xor(x, mask));
    return x;
  }

  TW_DEVICE int64_t first_line(const Row& row, int r) const {
    return Parts::first(args, work, r, fmha_line_of<Config>(args, item, work.b, row.head, row.query));
  }
  TW_DEVICE int64_t place_in(const tw_fmha_tensor& tensor, const Row& row) const {
    return (Config::varlen ? 0 : work.b) * tensor.batch + row.head * tensor.head + (item.q_first + row.query) * tensor.row;
  }
  TW_DEVICE void store(const Row& row, int c, const float (&x)[columns]) const {
    char* const to = (char*)args.o.ptr + (place_in(args.o, row) + c * args.o.col) * size_of<O>;
    fmha_store_run<O>(to, x, (int)args.hdim_v - c, args.o.col);
  }
  TW_DEVICE void store_lse(const Row& row, float lse) const {
    if constexpr (Config::lse) store_global((float*)args.lse.ptr + place_in(args.lse, row), lse);
  }
};

}  // namespace tw::gpu
