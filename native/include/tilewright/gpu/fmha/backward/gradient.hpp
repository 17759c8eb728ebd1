// Terms of the gradients, score by score, for every template of them: which queries see a key, P of a score, and dS
// of what comes back to it; and where a head's dq_acc has what belongs to a column.
#pragma once
#include "tilewright/gpu/fmha/dot.hpp"
#include "tilewright/gpu/fmha/softmax.hpp"

namespace tw::gpu {

// Queries first to first + span see a key; none: of no number of a row.
struct FmhaSeers {
  int first;
  uint32_t span;
  TW_DEVICE bool have(int i) const { return (uint32_t)(i - first) <= span; }
};

// The scores of head h of item b.
template <class Config>
struct FmhaGradient {
  const tw_fmha_args& args;
  const FmhaItem& item;
  int b, h;
  float factor, cap, slope;

  TW_DEVICE FmhaGradient(const tw_fmha_args& args, const FmhaItem& item, int b, int h)
      : args(args), item(item), b(b), h(h), cap((float)args.softcap), slope(0.0f) {
    factor = (float)args.scale * (Config::softcap ? 1.0f / cap : kLog2E);
    if constexpr (Config::bias == FmhaBias::alibi)
      slope = load_constant<float>(args.slopes + b * args.slope_batch + h) * kLog2E;
  }

  // The first and the last query that see key j, by fmha_visible, if any do; both ascend with j, but that all later
  // queries see a sink.
  TW_DEVICE static int64_t first_seer(const tw_fmha_args& args, const FmhaItem& item, int j) {
    return Config::mask == FmhaMask::no || args.right < 0 ? 0 : fmha_max(j - item.off - args.right, 0);
  }
  TW_DEVICE static int64_t last_seer(const tw_fmha_args& args, const FmhaItem& item, int j) {
    const bool all = Config::mask == FmhaMask::no || args.left < 0 || j < args.sink_size;
    return all ? item.q_rows - 1 : fmha_min(item.q_rows - 1, j - item.off + args.left);
  }
  TW_DEVICE static FmhaSeers seers(const tw_fmha_args& args, const FmhaItem& item, int j) {
    const int64_t first = first_seer(args, item, j), last = last_seer(args, item, j);
    if (j >= (int)item.k_rows || last < first) return {0x7fffffff, 0};
    return {(int)first, (uint32_t)(last - first)};
  }

  // x: a score q . k, of which P is made, as it was kept; y: dO . v, of which dS is made. lse: in log2, infinite for a
  // row that saw nothing. slice: of dbias_acc; -1: another wave adds to it.
  TW_DEVICE void run(float& x, float& y, int i, int j, bool seen, bool drops, float lse, float delta, int slice) const {
    float t = x * factor, bent = 0.0f;
    if constexpr (Config::softcap) bent = fmha_tanh(t), t = bent * (cap * kLog2E);
    if constexpr (Config::bias == FmhaBias::elementwise) {
      using E = typename Config::Bias;
      const int64_t at = b * args.bias.batch + h * args.bias.head + i * args.bias.row + j * args.bias.col;
      if (exists(i, j))
        t += to_float<E>(load_constant<typename E::storage>((const char*)args.bias.ptr + at * size_of<E>)) * kLog2E;
    }
    if constexpr (Config::bias == FmhaBias::alibi) {
      const int d = j - i - (int)item.off;
      t -= slope * (float)(d < 0 ? -d : d);
    }
    const float p = seen ? exp2(t - lse) : 0.0f;
    float step = y;
    if constexpr (Config::dropout) step = drops ? 0.0f : step * (float)args.keep_scale;
    float grad = p == 0.0f ? 0.0f : p * (step - delta);
    if constexpr (Config::dbias)
      if (slice >= 0 && exists(i, j)) add_bias(i, j, slice, grad);
    if constexpr (Config::softcap) grad *= 1.0f - bent * bent;
    x = Config::dropout && drops ? 0.0f : p;
    y = grad;
  }

 private:
  TW_DEVICE bool exists(int i, int j) const { return i < (int)item.q_rows && j < (int)item.k_rows; }
  TW_DEVICE void add_bias(int i, int j, int slice, float x) const {
    const tw_fmha_tensor& to = args.dbias;
    const int64_t items = to.batch ? args.batch : 1, heads = to.head ? args.heads_q : 1, lines = to.row ? args.seq_q : 1;
    const int64_t columns = to.col ? args.seq_k : 1, copy = to.col ? 0 : slice * items;
    add_global(args.dbias_acc + (((copy + (to.batch ? b : 0)) * heads + (to.head ? h : 0)) * lines + (to.row ? i : 0)) *
                                    columns + (to.col ? j : 0), x);
  }
};

// Random bytes of a block, in shared memory: for each query the generator's calls of all 64 columns that the block has
// part in.
template <class Config>
struct FmhaDrops {
  static constexpr int groups = (Config::n0 > 64 ? Config::n0 / 64 : 1) * 4, bytes = Config::m0 * groups * 16;
  static_assert(!Config::dropout || Config::n0 % 64 == 0 || 64 % Config::n0 == 0,
                "blocks of columns divide 64, or the reverse");

  TW_DEVICE static void draw(const tw_fmha_args& args, uint32_t to, int b, int h, int i0, int j0, int thread,
                             int threads) {
    const FmhaSeed seed = fmha_seed(args);
    TW_NO_UNROLL
    for (int id = thread; id < Config::m0 * groups; id += threads) {
      const PhiloxWords words =
          fmha_random(seed, (int64_t)b * args.heads_q + h, i0 + id / groups, (j0 >> 6) * 4 + id % groups);
      store_shared(to + id * 16, Words<4>{words.w[0], words.w[1], words.w[2], words.w[3]});
    }
  }
  // i: within the block.
  TW_DEVICE static bool dropped(const tw_fmha_args& args, uint32_t from, int i, int j, int j0) {
    const int group = ((j >> 6) - (j0 >> 6)) * 4 + ((j & 7) >> 1), byte = ((j >> 3) & 7) * 2 + (j & 1);
    const uint32_t word = load_shared<1>(from + (i * groups + group) * 16 + byte / 4 * 4).w[0];
    return (word >> (byte % 4 * 8) & 255u) < (uint32_t)args.drop_below;
  }

  // To the caller: the bytes of a workgroup's blocks of keys, `pieces` apart, for `rows` queries of all heads of a
  // group, seen or not; zeros beyond the item's rows and keys.
  TW_DEVICE static void store(const tw_fmha_args& args, const FmhaItem& item, int rows, int b, int hk, int piece,
                              int pieces, int thread, int threads) {
    const int group = (int)(args.heads_q / args.heads_k), columns = (int)args.seq_k;
    TW_NO_UNROLL
    for (int j0 = piece * Config::n0; j0 < columns; j0 += pieces * Config::n0)
      TW_NO_UNROLL
      for (int h = hk * group; h < hk * group + group; h++)
        TW_NO_UNROLL
        for (int id = thread; id < rows * groups; id += threads)
          store_call(args, item, b, h, id / groups, j0, min_of(j0 + Config::n0, columns), (j0 >> 6) * 4 + id % groups);
  }

 private:
  // Those of one call of the generator that are of keys [j0, j1).
  TW_DEVICE static void store_call(const tw_fmha_args& args, const FmhaItem& item, int b, int h, int i, int j0, int j1,
                                   int call) {
    const PhiloxWords words = fmha_random(fmha_seed(args), (int64_t)b * args.heads_q + h, i, call);
    const int drawn = i < (int)item.q_rows ? (int)item.k_rows : 0;
    char* const to = (char*)args.randval.ptr + (Config::varlen ? 0 : b * args.randval.batch) + h * args.randval.head +
                     (item.q_first + i) * args.randval.row;
    TW_UNROLL
    for (int byte = 0; byte < 16; byte++) {
      const int j = call / 4 * 64 + byte / 2 * 8 + call % 4 * 2 + byte % 2;
      const uint32_t x = words.w[byte / 4] >> (byte % 4 * 8) & 255u;
      if (j >= j0 && j < j1) store_global<uint8_t>(to + j * args.randval.col, (uint8_t)(j < drawn ? x : 0));
    }
  }
};

// Where a row of dq_acc has column c. What one thread adds at a time (see gpu/fmha/backward/mma.hpp) stands together:
// of sixteen columns 2q, 2q + 1, 2q + 8 and 2q + 9 at 4q. Kernels on other atoms leave columns where they are.
template <class Config>
struct FmhaQueryPlace {
#if defined(__HIP__)
  static constexpr bool mixes = false;
#else
  static constexpr bool mixes = size_of<typename Config::Q> == 2;
#endif
  // The first of two neighbouring columns at place `at` (a multiple of 2).
  static constexpr int column(int at) { return mixes ? at / 16 * 16 + at % 4 / 2 * 8 + at % 16 / 4 * 2 : at; }
};

// lse in log2 and delta of a row.
struct FmhaLine {
  float lse, delta;
};
template <class Config>
TW_DEVICE FmhaLine fmha_line(const tw_fmha_args& args, const FmhaItem& item, int b, int h, int i) {
  FmhaLine line = {-minus_infinity(), 0.0f};  // a row that saw nothing has no probabilities
  if (i >= (int)item.q_rows) return line;
  const int64_t at = (Config::varlen ? 0 : b * args.lse.batch) + h * args.lse.head + (item.q_first + i) * args.lse.row;
  const float x = load_constant<float>((const float*)args.lse.ptr + at);
  if (x != minus_infinity()) line.lse = x * kLog2E;
  line.delta = load_constant<float>(args.delta + fmha_line_of<Config>(args, item, b, h, i));
  return line;
}

}  // namespace tw::gpu
