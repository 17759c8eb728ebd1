// Convolution as an implicit product on GPUs: all three directions. A generated source unit states a Config and writes
// TW_CONV_KERNEL(symbol, Config); see gpu/gemm/gemm.hpp for what a product's Config states and how it is launched.
//
// Besides, Config has: Direction direction; ConvKind kind (implicit, pointwise); int ndim; bool linear_rows (C's rows
// lie at one distance, ldc), accumulate, two_stage; int vector_a, vector_b (elements of one access; they divide the
// numbers of channels, the strides, and addresses are aligned to them), groups_merged.
//
//   forward          A: image, k-major   B: weights, b_col (all taps and channels of a column lie side by side)
//   backward data    A: image, k-major   B: weights, row-major (columns lie side by side). Steps keep within a tap
//   backward weight  A: dy, a_col, pixels at one distance (lda)       B: image, row-major
//   pointwise        matrices, as lda, ldb, stride_a and stride_b say
// Shared memory: that of the product, without room for unaligned lines. two_stage (backward weight): the sums of every
// slice go to the workspace as they are, [slice][item][m][n] in fp32; a kernel of gpu/conv/convert.hpp adds them.
#pragma once
#include "tilewright/core/meta.hpp"
#include "tilewright/gpu/conv/params.hpp"
#include "tilewright/gpu/gemm/gemm.hpp"
#include "tilewright/gpu/conv/image_loader.hpp"
#if defined(__HIP__)
#include "tilewright/gpu/amd/image_loader.hpp"
#endif

namespace tw::gpu {

template <class Config>
struct ConvSources {
  static constexpr bool any_alignment = false;
  static constexpr bool implicit = Config::kind == ConvKind::implicit;
  static constexpr bool is_weight = Config::direction == Direction::backward_weight;
  static constexpr bool has_wide = implicit && !is_weight;  // see ImageRows
  static constexpr bool by_taps = implicit && Config::direction == Direction::backward_data;

  using Rows = Choose<Config::two_stage, LinearRows, ConvRows<Config>>;

  template <class Tile, int kThreads, int kVector>
  struct Matrix {
    using Place = Operand<Tile>;
    using Copy = PanelLoader<Tile, kThreads, kVector>;
#if defined(__HIP__)
    using Fast = Checked<Place>;
    using Registers = PanelRegisters<Place, Tile, kThreads, kVector>;
#endif
  };
  template <class Tile, int kThreads>
  struct Image {
    using Place = ImageRows<Config, Tile, kThreads, Config::vector_a, by_taps>;
    using Copy = ImageRowsLoader<Place>;
#if defined(__HIP__)
    using Fast = Checked<Place>;
    using Wide = Checked<Place, true>;
    using Registers = ImageRowsRegisters<Place, Tile, kThreads>;
#endif
  };
#if defined(__HIP__)
  template <class Tile, int kThreads, bool kLds = kIsLds<Tile>>
#else
  template <class Tile, int kThreads, bool kLds = false>
#endif
  struct Lines {
    using Place = ImageColumns<Config, Tile, kThreads, Config::vector_b>;
    using Copy = ImageColumnsLoader<Place>;
  };
#if defined(__HIP__)
  template <class Tile, int kThreads>
  struct Lines<Tile, kThreads, true> {
    using Place = ImageBlocks<Config, Tile, Config::vector_b>;
    using Fast = Checked<Place>;
    using Registers = ImageBlocksRegisters<Config, Tile, kThreads, Config::vector_b>;
  };
#endif
  template <class Tile, int kThreads>
  struct Taps {
    using Place = TapPanels<Config, Tile>;
    using Copy = PanelLoader<Tile, kThreads, Config::vector_b>;
#if defined(__HIP__)
    using Fast = Checked<Place>;
    using Registers = PanelRegisters<Place, Tile, kThreads, Config::vector_b>;
#endif
  };

  template <class Tile, int kThreads>
  struct A : Choose<implicit && !is_weight, Image<Tile, kThreads>, Matrix<Tile, kThreads, Config::vector_a>> {};
  template <class Tile, int kThreads>
  struct B : Choose<implicit && is_weight, Lines<Tile, kThreads>,
                    Choose<by_taps, Taps<Tile, kThreads>, Matrix<Tile, kThreads, Config::vector_b>>> {};
};

// Sums as they are.
template <class Config>
struct PartialConfig : Config {
  using C = fp32;
  using Bias = void;
  using D = types<>;
  static constexpr Unary unary = Unary::PassThrough;
  static constexpr Scale scale_a = Scale::none, scale_b = Scale::none;
  static constexpr EpilogueKind epilogue = EpilogueKind::default_;
};

template <class Config, bool kPartial = Config::two_stage>
struct ConvFinish {
  using type = Config;
};
template <class Config>
struct ConvFinish<Config, true> {
  using type = PartialConfig<Config>;
};

template <class Config>
struct Conv : Gemm<typename ConvFinish<Config>::type, ConvSources<Config>> {
  using Sources = ConvSources<Config>;
  using Base = Gemm<typename ConvFinish<Config>::type, Sources>;
  using Loop = typename Base::Loop;
  using A = typename Loop::OperandA;
  using B = typename Loop::OperandB;
  using TileA = typename Base::TileA;
  using TileB = typename Base::TileB;
  using Params = ConvParams<Config>;
  static constexpr int min_blocks = Config::blocks_per_unit > 0 ? Config::blocks_per_unit : Base::min_blocks;

  TW_DEVICE static const char* moved(const void* p, int64_t elements, int size) {
    return (const char*)p + elements * size;
  }

  // loop: the problem again, see task_again.
  TW_DEVICE static void multiply(typename Base::Atom& atom, const tw_conv_problem& problem, const tw_conv_problem& loop,
                                 int64_t item, int i0, int j0, int slices, int slice, const Where& at) {
    const tw_gemm_problem& g = problem.gemm;
    if constexpr (Sources::by_taps) {
      const int each = ceil_div((int)problem.channels, Config::tile_k);
      const int total = g.k > 0 ? divide((int)g.k, problem.by_channels) * each : 0;
      const Slice range = slice_of(total, slices, slice, 1);
      const A a(problem, loop, item, i0, each, range.begin, range.length, at.thread);
      const B b(loop, item, j0, each, range.begin, range.length);
      Loop::run(atom, a, b, at);
    } else {
      const Slice range = slice_of((int)g.k, slices, slice, Config::tile_k);
      if constexpr (!Sources::implicit) {
        const A a(moved(g.a, item * g.stride_a, TileA::element_bytes), g.lda, i0, (int)g.m, range.begin, range.length);
        const B b(moved(g.b, item * g.stride_b, TileB::element_bytes), g.ldb, j0, (int)g.n, range.begin, range.length);
        Loop::run(atom, a, b, at);
      } else if constexpr (Sources::is_weight) {
        const A a(moved(g.a, item * problem.row_g, TileA::element_bytes), g.lda, i0, (int)g.m, range.begin,
                  range.length);
        const B b(problem, item, j0, range.begin, range.length, at.thread);
        Loop::run(atom, a, b, at);
      } else {
        const A a(problem, loop, item, i0, 0, range.begin, range.length, at.thread);
        const B b(moved(g.b, item * problem.weight_g, TileB::element_bytes), problem.weight_n, j0, (int)g.n,
                  range.begin, range.length);
        Loop::run(atom, a, b, at);
      }
    }
  }

  TW_DEVICE static void run(const Params& params) {
    const int thread = thread_index(), wave = thread / kWave;
    const Where at = {thread, lane_index(), wave % Config::wave_m * Base::wave_rows,
                      wave / Config::wave_m * Base::wave_columns, shared_base()};
    const int slices = Config::split_k > 1 ? (int)params.launch.split_k : 1, work = block_index();
    const auto job = find_work<Config>(params, slices > 1 ? work / slices : work);
    const int slice = slices > 1 ? work % slices : 0;
    const tw_conv_problem& problem = job.task->conv;
    const int i0 = job.tile.row * Config::tile_m, j0 = job.tile.column * Config::tile_n;
    typename Base::Atom atom;
    atom.clear();
    multiply(atom, problem, task_again<Config>(params, job.task).conv, job.item, i0, j0, slices, slice, at);
    if constexpr (Config::two_stage) {
      tw_gemm_problem partial = problem.gemm;
      partial.alpha = 1.0;
      partial.ldc = partial.n;
      partial.stride_c = partial.m * partial.n;
      partial.c = (char*)params.launch.workspace + (int64_t)slice * partial.batch * partial.stride_c * 4;
      Base::finish_tile(atom, typename Base::Finish(partial, nullptr, job.item, {partial.ldc}), i0, j0, at);
    } else {
      if constexpr (Config::split_k > 1)
        if (slices > 1 && !Base::gather(atom, params.launch, job.index, slice, at)) return;
      const auto& task = task_again<Config>(params, job.task);
      const ConvRows<Config> rows(task.conv, job.item, size_of<typename Config::C>);
      Base::finish_tile(atom, typename Base::Finish(task.conv.gemm, task.operands(), job.item, rows), i0, j0, at);
    }
  }
};

}  // namespace tw::gpu

#define TW_CONV_KERNEL(NAME, ...) \
  TW_KERNEL(tw::gpu::Conv<__VA_ARGS__>::threads, tw::gpu::Conv<__VA_ARGS__>::min_blocks, NAME, \
            tw::ConvParams<__VA_ARGS__>, tw::gpu::Conv<__VA_ARGS__>::run(params);)
