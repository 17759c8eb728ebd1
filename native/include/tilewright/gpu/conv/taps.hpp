// Forward convolution and the image's gradient on the matrix units of AMD GPUs, where steps of k keep within a tap: the
// gathered channels of a group are a multiple of tile_k, and a filter has up to 32 taps, of an axis as many as TapBits
// has bits for. See gpu/conv/implicit_gemm.hpp, whose Config, directions, launch and epilogue it has, for everything
// else; accesses are of 16 bytes.
#pragma once
#include "tilewright/gpu/conv/params.hpp"
#include "tilewright/gpu/gemm/gemm.hpp"
#include "tilewright/gpu/amd/conv/loop.hpp"

namespace tw::gpu {

template <class Config>
struct Conv : Gemm<Config, TapSources<Config>> {
  using Sources = TapSources<Config>;
  using Base = Gemm<Config, Sources>;
  using Loop = typename Base::Loop;
  using A = typename Loop::OperandA;
  using B = typename Loop::OperandB;
  using Params = ConvParams<Config>;
  static_assert(Config::direction != Direction::backward_weight && Config::kind == ConvKind::implicit, "see above");

  TW_DEVICE static void run(const Params& params) {
    const int thread = thread_index(), wave = thread / kWave;
    const Where at = {thread, lane_index(), wave % Config::wave_m * Base::wave_rows,
                      wave / Config::wave_m * Base::wave_columns, shared_base()};
    const int slices = Config::split_k > 1 ? (int)params.launch.split_k : 1, work = block_index();
    const auto job = find_work<Config>(params, slices > 1 ? work / slices : work);
    const int slice = slices > 1 ? work % slices : 0;
    const tw_conv_problem& problem = job.task->conv;
    const int i0 = job.tile.row * Config::tile_m, j0 = job.tile.column * Config::tile_n;
    const Slice k = slice_of((int)problem.gemm.k, slices, slice, Config::tile_k);
    typename Base::Atom atom;
    atom.clear();
    if (k.length > 0)
      Loop::run(atom, A(problem, job.item, i0, k.begin, k.length, thread),
                B(problem, job.item, j0, k.begin, k.length, thread), at);
    if constexpr (Config::split_k > 1)
      if (slices > 1 && !Base::gather(atom, params.launch, job.index, slice, at)) return;
    const auto& task = task_again<Config>(params, job.task);
    const ConvRows<Config> rows(task.conv, job.item, size_of<typename Config::C>);
    Base::finish_tile(atom, typename Base::Finish(task.conv.gemm, task.operands(), job.item, rows), i0, j0, at);
  }
};

}  // namespace tw::gpu

#define TW_CONV_KERNEL(NAME, ...) \
  TW_KERNEL(tw::gpu::Conv<__VA_ARGS__>::threads, 1, NAME, \
            tw::ConvParams<__VA_ARGS__>, tw::gpu::Conv<__VA_ARGS__>::run(params);)
