// Constants that follow from a GEMM's configuration: roles, shapes, the layout of shared memory.
//
// The kernel multiplies X (64-row pieces, the wgmma's M) by Y (its N). Ordinarily X = A and Y = B; with transpose_c X =
// B and Y = A, so that C^T is computed and a small m costs little.
#pragma once
#include "tilewright/core/meta.hpp"
#include "tilewright/gpu/gemm/params.hpp"
#include "tilewright/sm90/blocks/mbarrier.hpp"
#include "tilewright/sm90/blocks/registers.hpp"
#include "tilewright/sm90/gemm/scheduler.hpp"
#include "tilewright/sm90/blocks/wgmma.hpp"

namespace tw::sm90 {

constexpr int kSharedBytes = 232448;  // what one workgroup can have on sm_90
constexpr int kBarrierBytes = 512;    // barriers of the ring, and 8 bytes per consumer

// `cluster_k`, 1 if the configuration does not say.
template <class C, class = void>
struct ClusterK {
  static constexpr int value = 1;
};
template <class C>
struct ClusterK<C, decltype((void)C::cluster_k)> {
  static constexpr int value = C::cluster_k;
};

template <class C>
struct GemmPlan {
  using Config = C;
  using Cluster = ClusterShape<C::cluster_m, C::cluster_n>;
  static constexpr bool swap = C::transpose_c, pingpong = C::scheduler == Scheduler::pingpong;
  using X = Choose<swap, typename C::B, typename C::A>;
  using Y = Choose<swap, typename C::A, typename C::B>;
  static constexpr bool a_mn = C::a_col, b_mn = !C::b_col, x_mn = swap ? b_mn : a_mn, y_mn = swap ? a_mn : b_mn;
  static constexpr int tile_m = C::tile_m, tile_n = C::tile_n, tile_k = C::tile_k;
  static constexpr int x_tile = swap ? tile_n : tile_m, y_tile = swap ? tile_m : tile_n;
  static constexpr int x_waves = swap ? C::wave_n : C::wave_m, y_waves = swap ? C::wave_m : C::wave_n;
  static constexpr int waves = x_waves * y_waves, consumers = pingpong ? 2 : waves;
  // One consumer's share of the tile: `repeats` products of 64 x columns per step of 32 bytes along k.
  static constexpr int repeats = x_tile / x_waves / 64, columns = y_tile / y_waves;
  static constexpr int accumulators = repeats * columns / 2;  // per thread
  // Adding up parts of tiles takes registers of its own.
  static constexpr int joining = C::split_k > 1 || C::reduction == Reduction::linear ? 16 : 0;
  using Registers = RegisterShares<consumers, accumulators * (C::promote ? 2 : 1) + joining>;
  static constexpr int threads = Registers::threads;
  using Text = WgmmaText<X, Y, x_mn, y_mn>;
  using Accumulator = Choose<X::is_float, float, int32_t>;

  static constexpr int element = size_of<X>, k_steps = tile_k * element / 32, chunks = tile_k * element / 128;
  static constexpr int a_bytes = tile_m * tile_k * element, b_bytes = tile_n * tile_k * element;
  static constexpr int x_bytes = swap ? b_bytes : a_bytes, y_bytes = swap ? a_bytes : b_bytes;
  static constexpr int stages = C::stages, stage_bytes = a_bytes + b_bytes;
  static constexpr int panel_bytes = tile_k * 128;  // of an MN-major operand: 64 elements along m or n, all of tile_k

  // Staging of C: pieces of 64 rows x 128 bytes (transpose_c: 64 columns of C x all rows), two per consumer.
  static constexpr bool staged = C::epilogue == EpilogueKind::cshuffle;
  static constexpr int c_size = size_of<typename C::C>;
  static constexpr int piece_columns = swap ? columns : 128 / c_size;  // along Y
  static constexpr int pieces = repeats * (columns / piece_columns);   // per consumer
  static constexpr int piece_bytes = swap ? columns * 64 * c_size : 64 * 128;
  static constexpr int buffers = pieces < 2 ? pieces : 2;
  static constexpr int staging_bytes = staged ? consumers * buffers * piece_bytes : 0;

  // Split-K within a cluster: the slices of a tile are the workgroups of one cluster, and the first gathers the sums.
  static constexpr int cluster_k = ClusterK<C>::value;
  static constexpr int sums_bytes = accumulators * kWarpgroup * 4;  // of one consumer
  static constexpr int gather_bytes = (cluster_k - 1) * waves * sums_bytes;

  static constexpr int a_at = 0, b_at = stages * a_bytes, staging_at = stages * stage_bytes;
  static constexpr int gather_at = staging_at + staging_bytes, barriers_at = gather_at + gather_bytes;
  static constexpr int flags_at = barriers_at + 2 * stages * 8;  // 8 bytes per consumer
  static constexpr int shared_bytes = barriers_at + kBarrierBytes;

  static constexpr bool split = C::split_k > 1, stream = C::reduction == Reduction::linear, partial = split || stream;
  static constexpr int promote = C::promote;

  // Rows of clusters in a band, so that the operands of one wave of about 132 workgroups are as few as possible: the
  // largest b with (b * cluster rows)^2 * tile_m <= 132 * tile_n.
  static constexpr int band_for(int b) {
    const int rows = (b + 1) * C::cluster_m;
    return rows * rows * tile_m > 160 * tile_n ? b : band_for(b + 1);
  }
  static constexpr int band = band_for(1);

  static_assert(is_same<X, Y> || (X::is_float && Y::is_float && element == 1 && size_of<Y> == 1),
                "one kind of operands");
  static_assert(x_tile % (64 * x_waves) == 0, "a consumer computes whole pieces of 64 rows");
  static_assert(y_tile % (8 * y_waves) == 0 && columns <= 256, "the wgmma's N is a multiple of 8 up to 256");
  static_assert(X::is_float || columns == 8 || columns == 24 || columns % 16 == 0,
                "int8: N is 8, 24 or a multiple of 16");
  static_assert(element == 2 || (!x_mn && !y_mn), "8-bit operands are K-major");
  static_assert(tile_k * element % 128 == 0 && tile_k <= 256, "steps of 128 bytes along k");
  static_assert((!a_mn || tile_m % 64 == 0) && (!b_mn || tile_n % 64 == 0), "MN-major operands come in panels of 64");
  static_assert(a_mn ? tile_m / 64 % C::cluster_n == 0 : tile_m % (8 * C::cluster_n) == 0, "A is split over cluster_n");
  static_assert(b_mn ? tile_n / 64 % C::cluster_m == 0 : tile_n % (8 * C::cluster_m) == 0, "B is split over cluster_m");
  static_assert(!pingpong || (waves == 1 && !stream), "pingpong: each consumer has a tile of its own");
  static_assert(!staged || columns % piece_columns == 0, "staged rows of C are whole lines of 128 bytes");
  static_assert(!staged || !swap || y_waves == 1, "transpose_c: consumers lie along n");
  static_assert(stages >= 2, "one stage is filled while another is used");
  static_assert(2 * stages * 8 + 4 * 8 <= kBarrierBytes, "too many stages");
  static_assert(shared_bytes <= kSharedBytes, "too much shared memory");
  static_assert(accumulators * (promote ? 2 : 1) <= Registers::consumer - 28, "too many accumulators");
  static_assert(promote == 0 || (element == 1 && X::is_float && promote % k_steps == 0),
                "promotion: fp8, whole stages");
  static_assert(!stream || (!split && !C::grouped && C::persistent), "Stream-K: one task, persistent, no split-K");
  static_assert(cluster_k == 1 || (cluster_k == C::split_k && Cluster::size == 1 && cluster_k <= 8 && !C::persistent),
                "cluster_k: all slices of a tile in one cluster, not persistent");
  static_assert(!pingpong || C::persistent, "pingpong is persistent");
};

// The tasks of a launch, as the scheduler sees them.
template <class Config>
TW_SM90 Extent extent_of(const tw_gemm_problem& problem) {
  constexpr int kRows = Config::tile_m * Config::cluster_m, kColumns = Config::tile_n * Config::cluster_n;
  return {((int)problem.m + kRows - 1) / kRows, ((int)problem.n + kColumns - 1) / kColumns, (int)problem.batch,
          ((int)problem.k + Config::tile_k - 1) / Config::tile_k};
}

template <class Config, bool kGrouped = Config::grouped>
struct GemmTasks {  // one
  const GemmParams<Config>& params;
  TW_SM90 int tiles() const { return extent_of<Config>(params.task.problem).tiles(); }
  TW_SM90 const GemmTaskOf<Config>& at(int) const { return params.task; }
  TW_SM90 Extent find(int index, int&, int& within) const {
    within = index;
    return extent_of<Config>(params.task.problem);
  }
};

template <class Config>
struct GemmTasks<Config, true> {  // a table in device memory, ordered by first_tile
  static constexpr int kCluster = Config::cluster_m * Config::cluster_n;
  const GemmParams<Config>& params;
  TW_SM90 const GemmTaskOf<Config>& at(int task) const {
    return ((const GemmTaskOf<Config>*)params.launch.tasks)[task];
  }
  TW_SM90 int tiles() const { return (int)(params.launch.tiles / kCluster); }
  TW_SM90 Extent find(int index, int& task, int& within) const {
    int low = task, high = (int)params.launch.count;  // the last task in [low, high) that begins at or before `index`
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (at(middle).first_tile <= (int64_t)index * kCluster) low = middle;
      else high = middle;
    }
    task = low;
    within = index - (int)(at(low).first_tile / kCluster);
    return extent_of<Config>(at(low).problem);
  }
};

template <class Plan, bool kStream = Plan::stream>
struct GemmQueue {
  using type = TileQueue<GemmTasks<typename Plan::Config>, typename Plan::Cluster, Plan::band, Plan::Config::persistent,
                         Plan::split>;
};
template <class Plan>
struct GemmQueue<Plan, true> {
  using type = StreamQueue<GemmTasks<typename Plan::Config>, typename Plan::Cluster, Plan::band>;
};

}  // namespace tw::sm90
