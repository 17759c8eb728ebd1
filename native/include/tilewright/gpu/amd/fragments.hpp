// How the operands of AMD's matrix instructions lie in the registers of a wave, as data.
//
// An instruction multiplies a first operand (rows x depth) by a second one (columns x depth); lane l holds one row of
// the first, one column of the second, and a run of neighbouring k of each. Atoms pass B as the first operand and A as
// the second: a lane then has several results of one row of C, which stand side by side.
//
// Sources: "AMD Instinct MI200 / MI300 / CDNA4 Instruction Set Architecture", chapter Matrix Arithmetic Instructions
// (operands: row = lane % rows, k = lane / rows * run + e; results of 32x32 and 16x16 in groups of four rows); "RDNA3"
// and "RDNA4 Instruction Set Architecture", section Wave Matrix Multiply Accumulate. Which k a place in the registers
// stands for matters to no one, as long as both operands agree: the instructions add over all of them.
#pragma once
#include "tilewright/gpu/platform.hpp"

namespace tw::gpu {

enum class MatrixUnit { mfma, wmma_gfx11, wmma_gfx12 };

struct FragmentLayout {
  int lanes;          // of a wave
  int rows, columns;  // of the first and of the second operand
  int groups;         // of lanes that hold different k of one row
  // Result v (register) of a lane belongs to the row  v % run + lane / columns * lane_stride + v / run * run_stride  as
  // the hardware counts.
  int run, lane_stride, run_stride;
  bool interleaved;  // see line_of

  constexpr int results() const { return rows * columns / lanes; }
  constexpr int row(int lane) const { return lane % rows; }
  constexpr int column(int lane) const { return lane % columns; }
  constexpr int group(int lane) const { return lane / (lanes / groups); }
  constexpr int result_row(int lane, int v) const {
    return v % run + lane / columns * lane_stride + v / run * run_stride;
  }
  // Which line of the tile (of C: which column) the hardware's row r is. Interleaved: the two halves of a wave hold the
  // even and the odd rows; four even rows followed by four odd ones become neighbours.
  constexpr int line_of(int r) const { return interleaved ? r % 2 * 4 + r / 2 % 4 + r / 8 * 8 : r; }

  // Results of a run, as an atom uses them: v0 to v0 + result_run - 1 of a lane are neighbours.
  constexpr int result_run() const { return interleaved ? 4 : run; }
  constexpr int result_line(int lane, int v) const { return line_of(result_row(lane, v)); }
};

//                                             lanes rows columns groups run lane_stride run_stride interleaved
constexpr FragmentLayout kMfma32x32 = {64, 32, 32, 2, 4, 4, 8, false};
constexpr FragmentLayout kMfma16x16 = {64, 16, 16, 4, 4, 4, 16, false};
// Sixteen products of 4 x 4, of which the first or the second operand is the same in all: 64 x 4 and 4 x 64.
constexpr FragmentLayout kMfma64x4 = {64, 64, 4, 1, 4, 4, 64, false};
constexpr FragmentLayout kMfma4x64 = {64, 4, 64, 1, 4, 0, 4, false};
// Both halves of a wave hold the same operands; the results of one register are two rows.
constexpr FragmentLayout kWmmaGfx11 = {32, 16, 16, 1, 1, 1, 2, true};
constexpr FragmentLayout kWmmaGfx12 = {32, 16, 16, 2, 8, 8, 16, false};

constexpr FragmentLayout fragment_layout(MatrixUnit unit, int rows) {
  if (unit == MatrixUnit::wmma_gfx11) return kWmmaGfx11;
  if (unit == MatrixUnit::wmma_gfx12) return kWmmaGfx12;
  return rows == 32 ? kMfma32x32 : rows == 16 ? kMfma16x16 : rows == 64 ? kMfma64x4 : kMfma4x64;
}

// Checked in full by tests/native/test_amd_fragments.py: every result has one place, every row of an operand one line,
// and runs are neighbours. (Here that would take a quarter of a kernel's compile time.) A few places as the ISA
// documents show them:
static_assert(kMfma32x32.result_row(0, 15) == 27 && kMfma32x32.result_row(32, 4) == 12,
              "32 x 32: row 8*(v/4) + 4*half + v%4");
static_assert(kMfma16x16.result_row(17, 3) == 7 && kMfma16x16.column(17) == 1, "16 x 16: row 4*(lane/16) + v");
static_assert(kMfma64x4.result_row(9, 1) == 9 && kMfma64x4.column(9) == 1, "4 x 4 x 16 blocks: block lane/4, row v");
static_assert(kWmmaGfx11.result_row(16, 3) == 7 && kWmmaGfx12.result_row(16, 3) == 11, "WMMA: 2v + half, v + 8*half");

}  // namespace tw::gpu
