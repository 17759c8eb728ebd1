// The entry points of a GEMM kernel: what a generated source unit includes. A unit states a Config (see docs of the
// GEMM plugin) and exports, with C linkage, what it is used for; what is not exported is not compiled:
//   TW_GEMM_MAIN(name, Config)
//     name            the whole product and its epilogue, for all problems and batch items
//   TW_GEMM_SPLIT(name, Config)
//     name            as above, for when k is too short to be sliced
//     name_partial    split-K, first stage: accumulators of every slice of k to the workspace, as
//                     [problem][batch][slice][m][n]
//     name_reduce     second stage: adds the slices in their order (so the result never varies), applies the epilogue
//   TW_GEMM_PACK_B(name, Config)
//     name_pack_b     packs B of problems[0] from `b` to `c`, batch items packed_bytes(n, k, ...) apart (see
//     cpu/blocks/pack.hpp)
//     name_packed_b   bytes of one packed batch item of B for (n, k)
//   TW_GEMM_WORKSPACE(name, Config)
//     name_workspace  bytes of workspace that a launch of the product with these args needs (see
//     cpu/blocks/blocking.hpp)
//   TW_GEMM_ENTRIES(name, Config): SPLIT, PACK_B and WORKSPACE
// All but name_packed_b and name_workspace have the signature tw_cpu_kernel, with tw_gemm_args as args.
#pragma once
#include "tilewright/cpu/gemm/in_place.hpp"
#include "tilewright/cpu/blocks/partials.hpp"
#include "tilewright/cpu/gemm/streaming.hpp"

TW_NAMESPACE_BEGIN

template <class Config>
struct Gemm {
  using Plan = Blocking<Config>;
  using Dot = typename Plan::Dot;
  using Out = typename Plan::Out;
  using Accumulator = typename Dot::scalar;
  static constexpr bool streams = Config::pipeline == Pipeline::mem, in_place = Config::pipeline == Pipeline::compv1;
  static_assert(Config::warp_tile_n % kLanes == 0, "warp_tile_n is a multiple of the vector's 32-bit lanes");
  static_assert(Config::tile_k % Config::warp_tile_k == 0, "tile_k is a multiple of warp_tile_k");
  static_assert(!Config::preshuffle || !(streams || in_place), "a pre-shuffled B needs a blocked pipeline");

  // The members work on the same item together, or (interwave, and always for in-place) each on items or rectangles of
  // its own.
  static constexpr bool together = streams || (!in_place && Plan::intrawave);

  // Position of a product among all: problem, batch item, slice.
  struct Cursor {
    const tw_gemm_args& args;
    int64_t problem = 0, item = 0, slice = 0;
    char* partials;
    TW_INLINE bool valid() {
      while (problem < args.count && args.problems[problem].batch <= 0) problem++;
      return problem < args.count;
    }
    TW_INLINE void advance(int64_t slices) {
      const tw_gemm_problem& p = args.problems[problem];
      partials += p.m * p.n * 4;
      if (++slice < slices) return;
      slice = 0;
      if (++item < p.batch) return;
      item = 0, problem++;
    }
  };

  static TW_INLINE int64_t slices_of(const tw_gemm_args& args, bool partial) {
    return partial ? max_of(args.split_k, 1) : 1;
  }

  static Product product_at(const Cursor& at, int64_t slices, bool partial) {
    const tw_gemm_problem& p = at.args.problems[at.problem];
    const int64_t length = slice_length(p.k, slices, Config::tile_k);
    const int64_t b_item =
        Config::preshuffle ? p.stride_b : p.stride_b * size_of<typename Config::B>;  // packed items: stride in bytes
    Product product;
    product.a = (const char*)p.a + at.item * p.stride_a * size_of<typename Config::A>;
    product.b = (const char*)p.b + at.item * b_item;
    product.lda = p.lda, product.ldb = p.ldb;
    product.m = p.m, product.n = p.n, product.k = p.k;
    product.k0 = min_of(at.slice * length, p.k), product.k1 = min_of(product.k0 + length, p.k);
    if (partial) product.out = {&p, at.item, at.partials, p.n, true};
    else product.out = {&p, at.item, (char*)p.c + at.item * p.stride_c * size_of<typename Config::C>, p.ldc, false};
    return product;
  }

  static Scratch scratch_of(const tw_gemm_args& args, int rank) {
    typename Plan::Sizes sizes;
    for (int64_t i = 0; i < args.count; i++)
      sizes.grow_to(Plan::sizes(args.problems[i].m, args.problems[i].n,
                                slice_length(args.problems[i].k, args.split_k, Config::tile_k)));
    char* const base = (char*)args.workspace + split_bytes(args);
    Scratch scratch = {};
    scratch.shared[0] = base + (Plan::intrawave ? 0 : rank * sizes.shared);
    scratch.shared[1] = Plan::intrawave && Plan::team > 1 ? base + sizes.shared : scratch.shared[0];
    scratch.slab = base + Plan::shared_copies * sizes.shared + rank * sizes.of_member();
    scratch.sums = (int32_t*)(scratch.slab + sizes.slab);
    scratch.partial_tiles = scratch.slab + sizes.slab + sizes.sums;
    return scratch;
  }

  static void compute(const Product& product, Crew& crew, Scratch& scratch, char* own, Range rows, Range columns) {
    if constexpr (streams) StreamingGemm<Config>{product, crew, own}.run(rows, columns);
    else if constexpr (in_place) InPlaceGemm<Config>{product, own}.run(rows, columns);
    else BlockedGemm<Config>{product, crew, scratch}.run(rows, columns);
  }

  static TW_INLINE void run(const tw_gemm_args& args, const tw_team* team, bool partial) {
    Crew crew = crew_of(team, Plan::team);
    if (crew.rank >= crew.size) return;
    crew.fixed = !Config::persistent;
    Scratch scratch = {};
    char* own = nullptr;
    if constexpr (streams || in_place) own = (char*)args.workspace + split_bytes(args) + crew.rank * member_bytes(args);
    else scratch = scratch_of(args, crew.rank);
    const int64_t slices = slices_of(args, partial);
    if constexpr (together) {
      for (Cursor at{args, 0, 0, 0, (char*)args.workspace}; at.valid(); at.advance(slices)) {
        const Product product = product_at(at, slices, partial);
        compute(product, crew, scratch, own, {0, product.m}, {0, product.n});
      }
    } else {
      run_apart(args, crew, scratch, own, slices, partial);
    }
  }

  // Rectangles of all products are dealt out; each is computed by one member alone.
  static TW_INLINE void run_apart(const tw_gemm_args& args, Crew& crew, Scratch& scratch, char* own, int64_t slices,
                                  bool partial) {
    int64_t products = 0;
    for (int64_t p = 0; p < args.count; p++) products += max_of(args.problems[p].batch, 0) * slices;
    // With products enough for all there is no need to cut them up.
    const bool cut = crew.size > 1 && products < 4 * crew.size;
    const int64_t across = cut ? Config::wave_m : 1, along = cut ? Config::wave_n : 1,
                  pieces = products * across * along;
    Cursor at{args, 0, 0, 0, (char*)args.workspace};
    int64_t index = 0;
    for (int64_t piece; (piece = crew.claim(pieces)) >= 0;) {
      while (at.valid() && index < piece / (across * along)) at.advance(slices), index++;
      if (!at.valid()) break;
      const Product product = product_at(at, slices, partial);
      const int64_t part = piece % (across * along);
      Crew alone;
      compute(product, alone, scratch, own, part_of({0, product.m}, across, part / along, Plan::mr),
              part_of({0, product.n}, along, part % along, Plan::nr));
    }
    crew.end_stage(pieces);
  }

  static int64_t member_bytes(const tw_gemm_args& args) {
    return (workspace_bytes<Config>(args) - split_bytes(args)) / Plan::team;
  }

  static void reduce(const tw_gemm_args& args, const tw_team* team) {
    Crew crew = crew_of(team, 1 << 30);  // needs no scratch memory: any team
    crew.fixed = !Config::persistent;
    const char* partials = (const char*)args.workspace;
    const int64_t slices = max_of(args.split_k, 1);
    for (int64_t i = 0; i < args.count; i++) {
      const tw_gemm_problem& p = args.problems[i];
      const int64_t strips = ceil_div(p.m, kReduceRows), pieces = max_of(p.batch, 0) * strips;
      for (int64_t piece; (piece = crew.claim(pieces)) >= 0;) {
        const int64_t item = piece / strips, row = piece % strips * kReduceRows;
        const Output out = {&p, item, (char*)p.c + item * p.stride_c * size_of<typename Config::C>, p.ldc, false};
        reduce_rows<Out>(out, (const Accumulator*)partials + item * slices * p.m * p.n, slices, row,
                    min_of(p.m - row, kReduceRows));
      }
      crew.end_stage(pieces);
      partials += max_of(p.batch, 0) * slices * p.m * p.n * 4;
    }
  }

  static int64_t packed_b(int64_t n, int64_t k) { return packed_bytes(n, k, Plan::nr, Plan::depth, Dot::offset_a); }

  static void pack_b(const tw_gemm_args& args, const tw_team* team) {
    const tw_gemm_problem& p = args.problems[0];
    using View = Rows<typename Config::B, Config::b_col>;
    Crew crew = crew_of(team, 1 << 30);
    const int64_t groups = ceil_div(p.k, Plan::depth), panels = ceil_div(p.n, Plan::nr),
                  pieces = max_of(p.batch, 0) * panels;
    for (int64_t piece; (piece = crew.claim(pieces)) >= 0;) {
      const int64_t item = piece / panels, panel = piece % panels, j = panel * Plan::nr;
      const View b = {(const char*)p.b + item * p.stride_b * size_of<typename Config::B>, p.ldb};
      uint32_t* const to = (uint32_t*)((char*)p.c + item * packed_b(p.n, p.k));
      uint32_t* const panel_to = to + panel * groups * Plan::nr;
      int32_t* const sums = (int32_t*)(to + panels * groups * Plan::nr) + j;
      if constexpr (Dot::offset_a) clear_sums(sums, Plan::nr);
      pack_panels<typename Config::B, Dot, Plan::nr, Config::b_col, false>({b.at(j, 0), b.ld}, p.n - j, p.k, panel_to, 0,
                                                                           sums);
    }
    crew.end_stage(pieces);
  }
};

TW_NAMESPACE_END

#define TW_EXPORT extern "C" __attribute__((visibility("default")))
#define TW_GEMM_MAIN(NAME, CONFIG)                                  \
  TW_EXPORT void NAME(const void* args, tw_team* team) {            \
    tw::Gemm<CONFIG>::run(*(const tw_gemm_args*)args, team, false); \
  }
// Product and slices share their code, which learns at run time what it is asked for.
#define TW_GEMM_SPLIT(NAME, CONFIG)                                                                 \
  static __attribute__((noinline)) void NAME##_run(const void* args, tw_team* team, bool partial) { \
    tw::Gemm<CONFIG>::run(*(const tw_gemm_args*)args, team, partial);                               \
  }                                                                                                 \
  TW_EXPORT void NAME(const void* args, tw_team* team) { NAME##_run(args, team, false); }           \
  TW_EXPORT void NAME##_partial(const void* args, tw_team* team) { NAME##_run(args, team, true); }  \
  TW_EXPORT void NAME##_reduce(const void* args, tw_team* team) {                                   \
    tw::Gemm<CONFIG>::reduce(*(const tw_gemm_args*)args, team);                                     \
  }
#define TW_GEMM_PACK_B(NAME, CONFIG)                              \
  TW_EXPORT void NAME##_pack_b(const void* args, tw_team* team) { \
    tw::Gemm<CONFIG>::pack_b(*(const tw_gemm_args*)args, team);   \
  }                                                               \
  TW_EXPORT int64_t NAME##_packed_b(int64_t n, int64_t k) { return tw::Gemm<CONFIG>::packed_b(n, k); }
#define TW_GEMM_WORKSPACE(NAME, CONFIG) \
  TW_EXPORT int64_t NAME##_workspace(const tw_gemm_args* args) { return tw::workspace_bytes<CONFIG>(*args); }
#define TW_GEMM_ENTRIES(NAME, CONFIG) \
  TW_GEMM_SPLIT(NAME, CONFIG)         \
  TW_GEMM_PACK_B(NAME, CONFIG)        \
  TW_GEMM_WORKSPACE(NAME, CONFIG)
