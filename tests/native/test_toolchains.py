"""Every level builds with the pip-installable clang too, and so does AArch64, run in an emulator if there is one."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from native_harness import FLAGS, INCLUDE, LEVELS, RUNTIME, Config, build_once, compiler, zig

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("ziglang"), reason="ziglang is not installed: pip install ziglang"),
    pytest.mark.slow,
    pytest.mark.extended,  # zig builds its own runtime for each CPU first
]

ZIG = [*zig(), "-nostdlib++", "-Wl,-z,defs"]
"""Kernels use no C++ library, as for servers: zig would build it anew for each CPU. Missing symbols are errors."""

UNITS = [
    Config(bias="fp32", d=("fp16", "bf16"), binary="Add", unary="Gelu"),
    Config(a="fp16", b="fp16", c="fp16", pipeline="compv1"),
    Config(a="bf16", b="bf16", c="bf16", warp_tile=(6, 16, 2), a_col=True, b_col=False),
    Config(a="fp8", b="bf8", c="fp16", warp_tile=(6, 16, 2), pipeline="mem"),
    Config(a="int8", b="int8", c="int32", warp_tile=(6, 16, 4), preshuffle=True, pipeline="preshufflev2"),
    Config(a="int8", b="int8", c="bf16", warp_tile=(6, 16, 2), scale_a="row", scale_b="column", scheduler="interwave"),
]
SOURCE = '#include "tilewright/cpu/gemm/gemm.hpp"\n' + "".join(unit.source(f"k{i}") for i, unit in enumerate(UNITS))

# One small product without any library: what the emulator runs.
MAIN = """
#include <stdio.h>
int main() {
  static float a[19 * 23], b[23 * 35], c[19 * 35];
  for (int i = 0; i < 19 * 23; i++) a[i] = (float)(i % 13) - 6;
  for (int i = 0; i < 23 * 35; i++) b[i] = (float)(i % 7) - 3;
  tw_gemm_problem p = {};
  p.a = a, p.b = b, p.c = c, p.m = 19, p.n = 35, p.k = 23, p.lda = 23, p.ldb = 23, p.ldc = 35, p.batch = 1, p.alpha = 1;
  tw_gemm_args args = {&p, 1, nullptr, 0, 1};
  static char workspace[1 << 20] __attribute__((aligned(64)));
  if (plain_workspace(&args) > (int64_t)sizeof workspace) return 2;
  args.workspace = workspace;
  tw_team_state state = {};
  tw_team team = {0, 1, &state};
  plain(&args, &team);
  for (int i = 0; i < 19; i++)
    for (int j = 0; j < 35; j++) {
      float want = 0;
      for (int k = 0; k < 23; k++) want += a[i * 23 + k] * b[j * 23 + k];
      if (c[i * 35 + j] != want) return 1;
    }
  return 0;
}
"""


def zig_flags(level: str) -> list[str]:
    """zig writes a level and its extensions in one word."""
    march, *more = LEVELS[level][0]
    return [march.replace("x86-64-", "x86_64_") + "".join(flag.replace("-m", "+") for flag in more)]


@pytest.mark.parametrize("target", [*LEVELS, "aarch64"])
def test_units_build_with_ziglang(build_folder: Path, target: str) -> None:
    flags = ["-target", "aarch64-linux-gnu"] if target == "aarch64" else zig_flags(target)
    assert build_once(build_folder, SOURCE, flags, ZIG).stat().st_size > 0


def test_the_runtime_builds_with_ziglang(build_folder: Path) -> None:
    for flags in (["-pthread"], ["-pthread", "-target", "aarch64-linux-gnu"]):
        assert build_once(build_folder, RUNTIME.read_text(), flags, ZIG).stat().st_size > 0


@pytest.mark.slow  # the first time zig builds a C library for it
def test_aarch64_code_runs_in_the_emulator(build_folder: Path) -> None:
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if not emulator:
        pytest.skip("qemu-aarch64-static is not installed")
    source, program = build_folder / "emulated.cpp", build_folder / "emulated"
    source.write_text(f'#include "tilewright/cpu/gemm/gemm.hpp"\n{Config().source("plain")}{MAIN}')
    command = [
        *ZIG,
        *FLAGS,
        "-target",
        "aarch64-linux-musl",
        "-static",
        f"-I{INCLUDE}",
        str(source),
        "-o",
        str(program),
    ]
    subprocess.run(command, check=True)
    assert subprocess.run([emulator, str(program)]).returncode == 0


def test_compile_time_is_reported(build_folder: Path) -> None:
    """Printed, not asserted: the machine is shared. The aim is 0.3 s a kernel."""
    for index, unit in enumerate(UNITS):
        begin = time.perf_counter()
        text = f'#include "tilewright/cpu/gemm/gemm.hpp"\n// {begin}\n{unit.source("timed")}'
        build_once(build_folder, text, LEVELS["v3"][0], compiler())
        sys.stdout.write(f"unit {index}: {time.perf_counter() - begin:.2f} s\n")
