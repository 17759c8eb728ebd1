"""The layouts of AMD's matrix instructions are complete. The compiler checks them: they are constants of a header."""

from __future__ import annotations

from pathlib import Path

import pytest
from amd_config import compile_text, missing_tools

CHECK = """
#include "tilewright/gpu/amd/fragments.hpp"
using namespace tw::gpu;

// Every result has one place, every row of an operand one line, and runs are neighbours.
constexpr bool is_complete(const FragmentLayout& layout) {
  bool seen[64 * 64] = {}, lines[64] = {};
  for (int lane = 0; lane < layout.lanes; lane++)
    for (int v = 0; v < layout.results(); v++) {
      const int line = layout.result_line(lane, v), place = line * layout.columns + layout.column(lane);
      if (line < 0 || line >= layout.rows || seen[place]) return false;
      seen[place] = true;
      const int first = v / layout.result_run() * layout.result_run();
      if (line != layout.result_line(lane, first) + v - first) return false;
    }
  for (int r = 0; r < layout.rows; r++) {
    if (lines[layout.line_of(r)]) return false;
    lines[layout.line_of(r)] = true;
  }
  return layout.results() * layout.lanes == layout.rows * layout.columns;
}
"""

LAYOUTS = ["kMfma32x32", "kMfma16x16", "kMfma64x4", "kMfma4x64", "kWmmaGfx11", "kWmmaGfx12"]

FAULTS = {
    "two results at one place": "{64, 32, 32, 2, 4, 0, 8, false}",
    "results beyond the last row": "{64, 16, 16, 4, 4, 8, 16, false}",
    "runs that are not neighbours": "{64, 16, 16, 4, 4, 4, 16, true}",
}


@pytest.fixture(scope="module", autouse=True)
def _tools(build_folder: Path) -> None:
    if missing := missing_tools(build_folder):
        pytest.skip(f"needs {missing}")


def test_every_result_and_every_row_has_one_place(build_folder: Path) -> None:
    text = CHECK + "".join(f'static_assert(is_complete({name}), "{name}");\n' for name in LAYOUTS)
    assert compile_text(build_folder, text, "gfx942").path.exists()


@pytest.mark.parametrize("layout", FAULTS.values(), ids=FAULTS)
def test_a_layout_with_a_fault_is_found(layout: str, build_folder: Path) -> None:
    text = f'{CHECK}constexpr FragmentLayout kFaulty = {layout};\nstatic_assert(is_complete(kFaulty), "faulty");\n'
    with pytest.raises(RuntimeError, match="faulty"):
        compile_text(build_folder, text, "gfx942")
