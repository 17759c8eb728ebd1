// The atom that a device multiplies a type with. An atom states the wave's part of a tile in fragments: how they are
// read from shared memory, multiplied, and where the results belong (see MmaAtom); the kernels know no more than that.
#pragma once
#include "tilewright/gpu/blocks/atom_simt.hpp"
#if defined(__HIP__)
#include "tilewright/gpu/amd/atom.hpp"
#else
#include "tilewright/gpu/cuda/atom_mma.hpp"
#endif

namespace tw::gpu {

#if defined(__gfx90a__) || defined(__gfx942__) || defined(__gfx950__)
constexpr bool kMultipliesFp32 = true;  // the matrix unit does
#else
constexpr bool kMultipliesFp32 = false;
#endif

// Where the matrix unit multiplies fp32, a warp tile that is not one of its tiles asks for the vector unit.
template <class Config>
constexpr bool kIsSimt = is_same<typename Config::A, fp32> &&
                         !(kMultipliesFp32 && Config::warp_tile_m == Config::warp_tile_n);

template <class Config, class TileA, class TileB, int kM, int kN, bool kSimt = kIsSimt<Config>>
struct AtomFor {
  using type = SimtAtom<TileA, TileB, kM, kN>;
};
template <class Config, class TileA, class TileB, int kM, int kN>
struct AtomFor<Config, TileA, TileB, kM, kN, false> {
#if defined(__HIP__)
  using type = MatrixAtom<TileA, TileB, kM, kN, Config::warp_tile_m, Config::warp_tile_n, Config::warp_tile_k>;
#else
  using type = MmaAtom<TileA, TileB, kM, kN>;
#endif
};

}  // namespace tw::gpu
