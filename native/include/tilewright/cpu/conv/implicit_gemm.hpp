// Forward convolution and the image's gradient as products whose operand is gathered (see cpu/conv/gather.hpp), on the
// loops of GEMM. What a unit exports: see cpu/conv/entries.hpp.
//
// Workspace, in bytes, every part a multiple of 64, `sizes` being those of Blocking for the m and n of each problem and
// one slice of its padded k, and each part the largest of any problem:
//     split-K partial sums, 4 * sum over problems of batch * split_k * m * n (none if split_k <= 1),
//     then team * (shared + slab + sums + partial_tiles)
// padded k: taps * round_up(channels, depth).
#pragma once
#include "tilewright/cpu/conv/entries.hpp"
#include "tilewright/cpu/conv/in_place.hpp"
#include "tilewright/cpu/blocks/partials.hpp"

TW_NAMESPACE_BEGIN

template <class Config>
struct ImplicitConv {
  using Sources = ImageSources<Config>;
  using Located = LocatedSources<Config>;
  using Plan = typename Sources::Plan;
  using Dot = typename Plan::Dot;
  using Out = typename Plan::Out;
  using Accumulator = typename Dot::scalar;
  static_assert(Plan::mr <= kMostRows, "the epilogue keeps the offsets of as many rows");
  static constexpr bool image_is_b = Sources::image_is_b, items_are_images = ConvRows<Config>::items_are_images;

  static int64_t split_bytes(const tw_conv_args& args) {
    if (args.split_k <= 1) return 0;
    int64_t elements = 0;
    for (int64_t i = 0; i < args.count; i++) {
      const tw_gemm_problem& p = args.problems[i].gemm;
      elements += p.batch * args.split_k * p.m * p.n;
    }
    return round_up(elements * 4, 64);
  }

  static typename Plan::Sizes sizes(const tw_conv_args& args) {
    typename Plan::Sizes sizes;
    for (int64_t i = 0; i < args.count; i++) {
      const tw_conv_problem& p = args.problems[i];
      const int64_t k = slice_length(padded_k(p, Dot::depth), args.split_k, Config::tile_k);
      sizes.grow_to(Plan::sizes(p.gemm.m, p.gemm.n, k));
    }
    return sizes;
  }

  static int64_t workspace(const tw_conv_args& args) {
    const typename Plan::Sizes s = sizes(args);
    return split_bytes(args) + Plan::team * (s.shared + s.of_member());
  }

  // Position of a product among all: problem, item, slice.
  struct Cursor {
    const tw_conv_args& args;
    int64_t slices;
    char* partials;
    int64_t problem = 0, item = 0, slice = 0;
    TW_INLINE bool valid() {
      while (problem < args.count && args.problems[problem].gemm.batch <= 0) problem++;
      return problem < args.count;
    }
    TW_INLINE void advance() {
      const tw_gemm_problem& p = args.problems[problem].gemm;
      partials += p.m * p.n * 4;
      if (++slice < slices) return;
      slice = 0;
      if (++item < p.batch) return;
      item = 0, problem++;
    }
  };

  static ConvOutput output_of(const tw_conv_problem& p, int64_t item) {
    ConvOutput out;
    out.problem = &p.gemm, out.item = item, out.data = result_of<Config>(p, item), out.ld = p.gemm.ldc, out.raw = false;
    out.conv = &p;
    return out;
  }

  static TW_NOINLINE void describe(ConvProduct& product, const Cursor& at, bool partial) {
    const tw_conv_problem& p = at.args.problems[at.problem];
    const int64_t image = items_are_images ? at.item / p.groups : 0;
    const int64_t group = items_are_images ? at.item % p.groups : at.item;
    const char* const first = (const char*)(image_is_b ? p.gemm.b : p.gemm.a);
    const char* const other = (const char*)(image_is_b ? p.gemm.a : p.gemm.b);
    using Image = typename Config::A;  // both operands have elements of one size
    static_assert(size_of<typename Config::A> == size_of<typename Config::B>, "operands have elements of one size");
    product.conv = &p;
    product.image = first + (image * p.image_n + group * p.image_g) * size_of<Image>;
    product.weights = other + group * p.weight_g * size_of<Image>;
    product.a = product.b = nullptr, product.lda = product.ldb = 0;
    product.m = p.gemm.m, product.n = p.gemm.n;
    describe_taps(product, image_is_b ? product.m : product.n, Dot::depth,
                  !image_is_b && (p.channels < 4 * Dot::depth || p.channels % Dot::depth));
    const int64_t length = slice_length(product.k, at.slices, Config::tile_k);
    product.k0 = min_of(at.slice * length, product.k), product.k1 = min_of(product.k0 + length, product.k);
    product.out = output_of(p, at.item);
    if (partial) product.out.data = at.partials, product.out.ld = p.gemm.n, product.out.raw = true;
  }

  static TW_INLINE void multiply(ConvProduct& product, Crew& crew, Scratch& scratch) {
    const Range rows = {0, product.m}, columns = {0, product.n};
    if constexpr (Located::possible) {
      if (Located::suits(product)) {
        Located::prepare(product);
        return BlockedGemm<Config, Located>{product, crew, scratch}.run(rows, columns);
      }
    }
    BlockedGemm<Config, Sources>{product, crew, scratch}.run(rows, columns);
  }

  // The members share one product after the other, or, with enough of them, take a product each.
  static void run(const tw_conv_args& args, const tw_team* team, bool partial) {
    Crew crew = crew_of(team, Plan::team);
    if (crew.rank >= crew.size) return;
    const typename Plan::Sizes s = sizes(args);
    char* const base = (char*)args.workspace + split_bytes(args);
    Scratch scratch = {};
    scratch.slab = base + Plan::team * s.shared + crew.rank * s.of_member();
    scratch.sums = (int32_t*)(scratch.slab + s.slab);
    scratch.partial_tiles = scratch.slab + s.slab + s.sums;
    Cursor at{args, partial ? max_of(args.split_k, 1) : 1, (char*)args.workspace};
    int64_t products = 0;
    for (int64_t i = 0; i < args.count; i++) products += max_of(args.problems[i].gemm.batch, 0) * at.slices;
    const bool apart = crew.size > 1 && products >= 4 * crew.size;
    scratch.shared[0] = base + (apart ? crew.rank * s.shared : 0);
    scratch.shared[1] = !apart && crew.size > 1 ? base + s.shared : scratch.shared[0];
    Crew alone;
    int64_t index = 0, mine = apart ? crew.claim(products) : 0;
    for (; at.valid() && mine >= 0; at.advance(), index++) {
      if (apart && index != mine) continue;
      ConvProduct product;
      describe(product, at, partial);
      multiply(product, apart ? alone : crew, scratch);
      if (apart) mine = crew.claim(products);
    }
    if (apart) crew.end_stage(products);
  }

  static void reduce(const tw_conv_args& args, const tw_team* team) {
    Crew crew = crew_of(team, 1 << 30);  // needs no scratch memory: any team
    const Accumulator* partials = (const Accumulator*)args.workspace;
    const int64_t slices = max_of(args.split_k, 1);
    for (int64_t i = 0; i < args.count; i++) {
      const tw_conv_problem& p = args.problems[i];
      const int64_t m = p.gemm.m, n = p.gemm.n, strips = ceil_div(m, kReduceRows),
                    pieces = max_of(p.gemm.batch, 0) * strips;
      for (int64_t piece; (piece = crew.claim(pieces)) >= 0;) {
        const int64_t item = piece / strips, row = piece % strips * kReduceRows;
        reduce_rows<Out>(output_of(p, item), partials + item * slices * m * n, slices, row,
                         min_of(m - row, kReduceRows));
      }
      crew.end_stage(pieces);
      partials += max_of(p.gemm.batch, 0) * slices * m * n;
    }
  }
};

template <class Config>
using ConvKernel = ImplicitConv<Config>;

TW_NAMESPACE_END
