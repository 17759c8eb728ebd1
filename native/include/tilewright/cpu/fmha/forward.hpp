// The entry point of the forward attention kernels: whole sequences, several that follow each other (varlen), paged
// caches, and parts of the keys (split). A unit states a Config (see docs of the attention plugin) and exports
//   TW_FMHA_FORWARD(name, Config)      name: tw_cpu_kernel with tw_fmha_args as args. o and lse, or, if
//                                      Config::family is split, o_acc and lse_acc of all parts
//   TW_FMHA_WORKSPACE(name, Config)    name_workspace: bytes of scratch that a launch with these args needs
#pragma once
#include "tilewright/cpu/fmha/decode.hpp"
#include "tilewright/cpu/fmha/pack.hpp"
#include "tilewright/cpu/fmha/softmax.hpp"
#include "tilewright/cpu/fmha/status.hpp"

TW_NAMESPACE_BEGIN

template <class Config>
struct FmhaForward {
  using B = FmhaBlocking<Config>;
  using Pack = FmhaPack<Config>;
  using Softmax = FmhaSoftmax<Config>;
  using Products = FmhaProducts<Config>;
  using Decode = FmhaDecode<Config>;
  using Layout = typename B::Layout;
  using O = typename Config::O;
  static constexpr bool split = Config::family == FmhaFamily::split, quantized = Config::qscale != FmhaScale::no;

  const tw_fmha_args& args;
  const Layout at;
  char* const own;
  int64_t together = 1;  // key heads of an item
  FmhaStatus status = {};
  FmhaSeed seed = {};

  template <class T>
  TW_INLINE T* part(int64_t offset) const {
    return (T*)(own + offset);
  }
  // Heads of queries that share a key head, and those of an item.
  TW_INLINE int64_t sharing() const { return args.heads_q / args.heads_k; }
  TW_INLINE int64_t group() const { return together * sharing(); }
  static TW_INLINE int64_t batch_of(int64_t b) { return Config::varlen ? 0 : b; }

  static int64_t workspace(const tw_fmha_args& args) { return Config::team * B::layout(args).bytes; }

  static void run(const tw_fmha_args& args, const tw_team* members) {
    Crew crew = crew_of(members, Config::team);
    if (crew.rank >= crew.size) return;
    const Layout at = B::layout(args);
    FmhaForward self{args, at, (char*)args.workspace + crew.rank * at.bytes};
    if constexpr (!Softmax::varying) self.together = Decode::heads(args, crew.size);
    self.all(crew);
  }

  void all(Crew& crew) {
    if constexpr (Config::dropout) seed = fmha_seed(args);
    const int64_t rows = args.seq_q * group(), splits = split ? args.splits : 1, heads = args.heads_k / together;
    const int64_t each = together > 1 ? rows : B::item_rows(args, crew.size);
    const int64_t tiles = ceil_div(rows, each), pieces = args.batch * heads * tiles * splits;
    for (int64_t piece; (piece = crew.claim(pieces)) >= 0;) {
      const int64_t part = piece % splits, of_head = piece / splits, tile = tiles - 1 - of_head % tiles;  // long ones first
      const int64_t head = of_head / tiles;
      compute(head / heads, head % heads * together, tile * each, min_of(tile * each + each, rows), part);
    }
    crew.end_stage(pieces);
    status.publish(crew, args.status);
  }

  // Packed rows [p0, p1) of the key heads from hk on of item b.
  TW_NOINLINE void compute(int64_t b, int64_t hk, int64_t p0, int64_t p1, int64_t part) {
    const FmhaItem item = fmha_item<Config>(args, b);
    if (item.bad) status.add(item.bad, b, item.culprit);
    const int64_t g = group(), end = min_of(p1, item.q_rows * g), rows = max_of(end - p0, 0);
    if constexpr (Config::randval) store_random(item, b, hk, p0, Config::varlen ? max_of(end, p0) : p1, part);
    if (!Config::varlen && p0 + rows < p1) store(item, b, hk, p0 + rows, p1 - p0 - rows, part, -1);
    if (rows == 0) return;
    if (Config::skip_min && item.skip) return store(item, b, hk, p0, rows, part, -1);
    FmhaRange range = fmha_range(args, item, p0 / g, (end - 1) / g + 1);
    if constexpr (split) range = fmha_split(args, range, part, B::n0);
    load_queries(item, b, hk, p0, rows);
    const typename Pack::Keys keys{args, args.k, item, b, hk, args.hdim_q};
    const typename Pack::Values values{args, args.v, item, b, hk, args.hdim_v};
    const Softmax softmax{args, item, seed, b, hk * sharing(), g, this->template part<float>(at.m),
                          this->template part<float>(at.l), this->template part<float>(at.scale),
                          this->template part<float>(at.rescale), this->template part<uint8_t>(at.random)};
    // Rows are read a few at a time, also behind the last one.
    alignas(64) uint32_t queries[(max_of(Decode::most_merged, 1) + Decode::together) * Decode::q_words];
    const bool few = Decode::fits(args, item.q_rows * sharing());  // however rows were shared out
    if (few) Decode::queries(this->template part<uint32_t>(at.q), rows, ceil_div(args.hdim_q, B::depth), queries);
    const int64_t last = range.first < range.last ? range.last : range.sink_last;
    for (int64_t c0 = 0; c0 < last; c0 += B::n0) {
      if (c0 >= range.sink_last && c0 + B::n0 <= range.first) {
        c0 = range.first / B::n0 * B::n0 - B::n0;
        continue;
      }
      const int64_t count = min_of(last - c0, B::n0);
      const FmhaColumns columns = load_block(keys, values, c0, count, few);
      if (few) {
        float* const s = this->template part<float>(at.s);
        Decode::scores(keys, c0, count, together, rows / together, queries, s, values.run(c0).at);
        softmax.run(s, p0, 0, rows, columns);
        Decode::add_values(values, c0, count, together, rows / together, (const uint32_t*)s,
                        this->template part<float>(at.o), softmax.rescale,
                        c0 + count < last ? keys.run(c0 + count).at : nullptr);
        continue;
      }
      for (int64_t r = 0; r < rows; r += B::m0)
        block(softmax, item, p0 + r, r, min_of(rows - r, B::m0), columns);
    }
    store(item, b, hk, p0, rows, part, 0);
  }

  // few: keys and values stay where they are.
  TW_INLINE FmhaColumns load_block(const typename Pack::Keys& keys, const typename Pack::Values& values, int64_t first,
                                   int64_t count, bool few) {
    FmhaColumns columns = {first, count, nullptr, nullptr, nullptr};
    if constexpr (Config::paged)
      if (keys.find_absent(first, count, part<uint8_t>(at.absent))) {
        columns.absent = part<uint8_t>(at.absent);
        status.add(kFmhaBadPage, keys.b, first);
      }
    if (!few) {
      Pack::keys(keys, first, count, part<uint32_t>(at.k), part<char>(at.gathered));
      Pack::values(values, first, count, part<uint32_t>(at.v), part<char>(at.gathered));
    }
    if constexpr (Softmax::varying) {
      load_scales(args.k_scale, keys, first, count, part<float>(at.k_scale));
      load_scales(args.v_scale, keys, first, count, part<float>(at.v_scale));
      columns.k_scale = part<float>(at.k_scale), columns.v_scale = part<float>(at.v_scale);
    }
    return columns;
  }

  TW_NOINLINE void load_scales(const tw_fmha_scale& scale, const typename Pack::Keys& keys, int64_t first, int64_t count,
                               float* to) const {
    for (int64_t j = 0; j < B::n0; j++) {
      to[j] = j < count && !scale.ptr ? 1.0f : 0.0f;  // a factor that is not given
      if (j >= count || !scale.ptr) continue;
      if constexpr (Config::qscale == FmhaScale::kv_blockscale) {
        const int64_t page = fmha_page<Config>(args, keys.b, first + j);
        if (page >= 0) to[j] = scale.ptr[page * scale.batch + keys.head * scale.head];
      } else {
        to[j] = scale.ptr[keys.b * scale.batch + keys.head * scale.head +
                          (scale.block_rows ? (first + j) / scale.block_rows * scale.block : 0)];
      }
    }
  }

  TW_INLINE void block(const Softmax& softmax, const FmhaItem& item, int64_t p, int64_t r, int64_t rows,
                       const FmhaColumns& packed) {
    const int64_t g = group();
    FmhaColumns c = packed;
    if constexpr (Config::mask != FmhaMask::no) {
      const FmhaRange range = fmha_range(args, item, p / g, (p + rows - 1) / g + 1);
      if (c.first >= range.last || (c.first >= range.sink_last && c.first + c.count <= range.first)) return;
      c.count = min_of(c.count, range.last - c.first);
    }
    float* const s = part<float>(at.s);
    Products::scores(rows, c.count, ceil_div(args.hdim_q, B::depth), part<uint32_t>(at.q) + r * B::q_words,
                     part<uint32_t>(at.k), s);
    softmax.run(s, p, r, rows, c);
    Products::values(rows, ceil_div(c.count, B::depth), ceil_div(packed.count, B::depth), args.hdim_v,
                     (const uint32_t*)s, part<uint32_t>(at.v), part<float>(at.o) + r * B::hdim_v, softmax.rescale);
  }

  // Queries as groups, and the state before any column.
  TW_NOINLINE void load_queries(const FmhaItem& item, int64_t b, int64_t hk, int64_t p0, int64_t rows) const {
    using Q = typename Config::Q;
    const int64_t g = group();
    for (int64_t r = 0; r < rows; r++) {
      const int64_t i = (p0 + r) / g, h = hk * sharing() + (p0 + r) % g;
      float factor = (float)args.scale;
      if constexpr (quantized) {
        factor *= scale_at(args.q_scale, b, h, i);
        if constexpr (!Softmax::varying) factor *= scale_at(args.k_scale, b, h / sharing(), 0);
      }
      const int kind = factor < 0 ? -1 : factor == 0 ? 0 : 1;  // scores keep their order when they are scaled
      factor = kind < 0 ? -factor : kind == 0 ? 1.0f : factor;
      part<float>(at.scale)[r] = Config::softcap ? factor : (float)((double)factor * 1.4426950408889634);
      const char* const from = (const char*)args.q.ptr + (batch_of(b) * args.q.batch + h * args.q.head +
                                                          (item.q_first + i) * args.q.row) * size_of<Q>;
      Pack::query(from, args.q.col, args.hdim_q, kind, part<uint32_t>(at.q) + r * B::q_words);
      const bool sink = Config::learned_sinks && !split;
      part<float>(at.m)[r] = sink ? args.sinks[h] * kLog2E : -__builtin_inff();
      part<float>(at.l)[r] = sink && args.sinks[h] > -__builtin_inff() ? 1.0f : 0.0f;
    }
    __builtin_memset(part<float>(at.o), 0, (size_t)(round_up(rows, B::mr) * B::hdim_v) * 4);
  }

  static TW_INLINE float scale_at(const tw_fmha_scale& scale, int64_t b, int64_t h, int64_t row) {
    if (!scale.ptr) return 1.0f;
    return scale.ptr[b * scale.batch + h * scale.head + (scale.block_rows ? row / scale.block_rows * scale.block : 0)];
  }

  // Packed rows [p, p + rows) of the result, from row r of the state; r < 0: rows that see nothing.
  TW_NOINLINE void store(const FmhaItem& item, int64_t b, int64_t hk, int64_t p, int64_t rows, int64_t part_of,
                         int64_t r) const {
    const int64_t g = group();
    for (int64_t k = 0; k < rows; k++) {
      const int64_t i = (p + k) / g, h = hk * sharing() + (p + k) % g;
      const float l = r < 0 ? 0.0f : part<float>(at.l)[r + k], m = r < 0 ? 0.0f : part<float>(at.m)[r + k];
      float factor = l == 0.0f ? 0.0f : 1.0f / l;
      if constexpr (Config::dropout) factor *= (float)args.keep_scale;
      if constexpr (quantized && !Softmax::varying) factor *= scale_at(args.v_scale, b, h / sharing(), 0);
      const float lse = l == 0.0f ? -__builtin_inff() : m * kLn2 + log(splat(l))[0];
      const float* const from = l == 0.0f ? nullptr : part<float>(at.o) + (r + k) * B::hdim_v;
      if constexpr (split) {
        const int64_t row = Config::varlen ? (part_of * args.heads_q + h) * args.total_q + item.q_first + i
                                           : ((part_of * args.batch + b) * args.heads_q + h) * args.seq_q + i;
        fmha_store_line<fp32>(from, factor, Config::hdim_v, (char*)(args.o_acc + row * Config::hdim_v), 1);
        args.lse_acc[row] = lse;
      } else {
        fmha_store_line<O>(from, factor, args.hdim_v,
                      (char*)args.o.ptr + (batch_of(b) * args.o.batch + h * args.o.head +
                                           (item.q_first + i) * args.o.row) * size_of<O>, args.o.col);
        if constexpr (Config::lse)
          ((float*)args.lse.ptr)[batch_of(b) * args.lse.batch + h * args.lse.head + (item.q_first + i) * args.lse.row] =
              lse;
      }
    }
  }

  // The bytes of rows [p0, p1), seen or not; zeros beyond the item's rows and columns. Of split plans each part stores
  // its share of the columns.
  TW_NOINLINE void store_random(const FmhaItem& item, int64_t b, int64_t hk, int64_t p0, int64_t p1,
                                int64_t part_of) const {
    const int64_t g = group(), splits = split ? args.splits : 1, share = round_up(ceil_div(args.seq_k, splits), 64);
    const int64_t first = min_of(part_of * share, args.seq_k), last = min_of(first + share, args.seq_k);
    uint8_t* const random = part<uint8_t>(at.random);
    for (int64_t p = p0; p < p1; p++) {
      const int64_t i = p / g, h = hk * sharing() + p % g, drawn = item.skip || i >= item.q_rows ? 0 : item.k_rows;
      char* const to = (char*)args.randval.ptr + batch_of(b) * args.randval.batch + h * args.randval.head +
                       (item.q_first + i) * args.randval.row;
      for (int64_t j = first; j < last; j += B::n0) {
        const int64_t count = min_of(last - j, B::n0);
        const uint8_t* const bytes = fmha_random_row(seed, b * args.heads_q + h, i, j, count, random);
        for (int64_t k = 0; k < count; k++) to[(j + k) * args.randval.col] = j + k < drawn ? (char)bytes[k] : 0;
      }
    }
  }
};

TW_NAMESPACE_END

#define TW_FMHA_FORWARD(NAME, CONFIG)                          \
  TW_EXPORT void NAME(const void* args, tw_team* team) {       \
    tw::FmhaForward<CONFIG>::run(*(const tw_fmha_args*)args, team); \
  }
#define TW_FMHA_WORKSPACE(NAME, CONFIG) \
  TW_EXPORT int64_t NAME##_workspace(const tw_fmha_args* args) { return tw::FmhaForward<CONFIG>::workspace(*args); }
