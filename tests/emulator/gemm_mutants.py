"""Bugs to plant in the project's GEMM kernels: edits of headers, each with a kernel and a problem that meets it."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from amd_config import FLAGS, WAVE, AmdConfig
from native_case import Sizes
from native_harness import INCLUDE

from tilewright_emulator.code.compiler import compiler

SMALL: dict[str, Any] = {"tile": (64, 64, 32), "wave": (2, 2), "warp_tile": (16, 16, 16)}
ALIGNED = Sizes(72, 136, 160)  # whole rows of 16 bytes, edges within tiles, five steps
RAGGED = Sizes(71, 67, 45, pad_a=1, pad_b=4)


@dataclass(frozen=True)
class Mutant:
    """``old`` becomes ``new``, wherever it stands, in header ``file``."""

    kind: str
    file: str
    old: str
    new: str
    config: dict[str, Any] = field(default_factory=dict)
    sizes: Sizes = field(default_factory=lambda: ALIGNED)
    split_k: int = 1
    arch: str = ""  # where only some GPUs have the bug
    order: int = 0  # of workgroups: see ``Checks``

    def kernel(self, arch: str) -> AmdConfig:
        changes = {**SMALL, **self.config}
        if arch == "gfx950":
            changes["warp_tile"] = (16, 16, 32)
        return AmdConfig(arch=arch, wave_size=WAVE[arch], **changes)


MAIN, LOADER, ATOM, GEMM = "amd/mainloop.hpp", "amd/loader.hpp", "amd/atom.hpp", "gemm/gemm.hpp"
PLATFORM, SCHEDULER = "amd/platform.hpp", "blocks/scheduler.hpp"
COMPV3: dict[str, Any] = {"pipeline": "compv3"}
COMPV4: dict[str, Any] = {"pipeline": "compv4", "tile": (64, 64, 64)}
ONE_SLICE: dict[str, Any] = {"pipeline": "compv4"}
MEM: dict[str, Any] = {"pipeline": "mem"}
DIRECT_LDS: dict[str, Any] = {"pipeline": "comp_async", "tile": (64, 64, 64)}
DIRECT = {"epilogue": "default"}
NEAR = ("1u, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_AGENT", "1u, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_WORKGROUP")
SPLIT: dict[str, Any] = {"config": {"split_k": 3}, "split_k": 3}
LOOP = "for (int step = 0; step < from.a.steps; step++) {"

MUTANTS = [
    # barriers
    Mutant("compv3: no barrier before the tile is replaced", MAIN,
           "lds_barrier();  // the tile has been read\n", "\n", COMPV3),
    Mutant("compv3: no barrier behind the writes", MAIN,
           "held.put(at.shared, at);\n          lds_barrier();", "held.put(at.shared, at);", COMPV3),
    Mutant("compv4: no barrier", MAIN,
           "lds_barrier();  // the other tile is complete; this one has been read\n", "\n", COMPV4),
    Mutant("compv4, one slice: no barrier", MAIN, "lds_barrier();\n        load(fragments[1 - side], other, at, 0);",
           "load(fragments[1 - side], other, at, 0);", ONE_SLICE),
    Mutant("mem: no barrier behind the products", MAIN,
           "multiply_tile(atom, at);\n        lds_barrier();", "multiply_tile(atom, at);", MEM),
    Mutant("the barrier does not wait for LDS", MAIN,
           '__builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");\n  wait_shared();\n  '
           '__builtin_amdgcn_s_barrier();\n'
           '  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");', "__builtin_amdgcn_s_barrier();",
           COMPV3),
    Mutant("rest of k: no barrier before the tile is filled", MAIN,
           "lds_barrier();  // the tile before has been multiplied\n", "\n", COMPV3, RAGGED),
    Mutant("only the first wave reaches the barrier", MAIN,
           "lds_barrier();  // the tile before has been multiplied\n", "if (at.thread < kWave) lds_barrier();\n",
           COMPV3, RAGGED),
    Mutant("cshuffle: the ring may still be read", GEMM, "barrier();  // the ring is free\n", "\n", COMPV3),
    Mutant("split-K: the flag is read before it is there", GEMM,
           "{arrive(launch.counters + tile)});\n    barrier();", "{arrive(launch.counters + tile)});", **SPLIT),
    # loads straight into LDS, whose waits the compiler does not write
    Mutant("comp_async: no wait", "amd/direct.hpp", 'asm volatile("s_waitcnt vmcnt(0)" ::: "memory");', "", DIRECT_LDS),
    Mutant("comp_async: one load may be under way", "amd/direct.hpp", 'asm volatile("s_waitcnt vmcnt(0)"',
           'asm volatile("s_waitcnt vmcnt(1)"', DIRECT_LDS),
    Mutant("comp_async: no barrier", MAIN, "lds_barrier();  // the other tile is complete; this one has been read\n",
           "\n", DIRECT_LDS),
    Mutant("comp_async: lanes write elsewhere", "amd/direct.hpp", "load_direct(to + first + j", "load_direct(to + j",
           DIRECT_LDS),
    Mutant("comp_async: the tile that is read is copied to", MAIN,
           "fragments[kk % 2], tile, from, step + 2", "fragments[kk % 2], other, from, step + 2", DIRECT_LDS),
    # loops
    Mutant("compv4: a step too few", MAIN, LOOP, LOOP.replace("0", "1"), COMPV4),
    Mutant("mem: a step too few", MAIN, "step < from.a.steps; step += held_steps",
           "step + 1 < from.a.steps; step += held_steps", MEM),
    Mutant("a slice of k too few", MAIN, "min_of(ceil_div(a.k - step * Config::tile_k, Atom::depth), slices)",
           "min_of((a.k - step * Config::tile_k) / Atom::depth, slices)", COMPV3, RAGGED),
    Mutant("an endless loop", MAIN, "step * Config::tile_k < a.k; step++",
           "step * Config::tile_k < a.k;", COMPV3, RAGGED),
    Mutant("the fragments of the step before", MAIN, "load(fragments[slices % 2], other, at, 0);",
           "load(fragments[slices % 2], tile, at, 0);", COMPV4),
    # layouts and operands
    Mutant("A and B swapped", ATOM, "part<B>(f.b[j], p), part<A>(f.a[i], p)", "part<A>(f.a[i], p), part<B>(f.b[j], p)",
           COMPV3),
    Mutant("every group of lanes reads the same k", ATOM, "const int group = layout().group(lane),",
           "const int group = layout().group(lane) / 4,", COMPV3),
    Mutant("results in the wrong columns", ATOM, "return index / runs_per_tile * kTileN +",
           "return index / runs_per_tile * (kTileN - 4) +", {**COMPV3, **DIRECT}),
    Mutant("the sums do not begin at zero", GEMM, "Atom atom;\n    atom.clear();", "Atom atom;", COMPV3),
    Mutant("A takes its k from another group", ATOM, "i * kTileM, group, kk)", "i * kTileM, group ^ 1, kk)", COMPV3),
    Mutant("half of the tile of B is not written", LOADER, "store_shared(to + offset_of(thread, j),",
           "if (thread % 2 == 0) store_shared(to + offset_of(thread, j),", COMPV3),
    Mutant("transposed the wrong way", LOADER, "i % 2 == 0 ? 0x05040100 : 0x07060302);\n      } else {",
           "i % 2 != 0 ? 0x05040100 : 0x07060302);\n      } else {", {**COMPV3, "b_col": False}),
    Mutant("tiles in rows for columns", SCHEDULER, "return {band * kBand + within % height, within / height};",
           "return {within / height, band * kBand + within % height};", COMPV3),
    # strides and bounds
    Mutant("a wrong leading dimension", LOADER, "buffer, line * source.ld +",
           "buffer, line * (source.ld + 16) +", COMPV3),
    Mutant("a buffer that ends a row late", LOADER, "(uint32_t)(lines - 1) * ld", "(uint32_t)lines * ld",
           {**COMPV3, "tile": (128, 64, 32)}, Sizes(127, 64, 160)),
    Mutant("bytes beyond k are kept", LOADER, "return keep_bytes(shift_bytes(low, high, shift), bytes);",
           "return shift_bytes(low, high, shift);", COMPV3, RAGGED),
    Mutant("unaligned operands taken for aligned", LOADER, "return operand.aligned() && operand.ld",
           "return operand.ld", COMPV3, RAGGED),
    Mutant("one row too many", GEMM, "if (i < m) finish.store", "if (i <= m) finish.store", {**COMPV3, **DIRECT}),
    Mutant("columns are not bounded", GEMM, "count = min_of(n - j, Atom::run);\n      if (count <= 0) continue;",
           "count = Atom::run;", {**COMPV3, **DIRECT}, Sizes(64, 62, 96)),
    Mutant("a strip that is too short", GEMM, "strip_bytes = Atom::strip_rows * strip_ld * 4",
           "strip_bytes = Atom::strip_rows * strip_ld * 2", COMPV3),
    Mutant("the batch's stride is missing", GEMM, "(const char*)problem.b + job.item * problem.stride_b",
           "(const char*)problem.b + 0 * problem.stride_b", COMPV3, Sizes(72, 136, 160, 2)),
    # split-K
    Mutant("split-K: slices overlap", SCHEDULER, "const int64_t begin = (int64_t)slice * per_slice,",
           "const int64_t begin = (int64_t)slice * each,", sizes=Sizes(64, 64, 200), **SPLIT),
    Mutant("split-K: every thread arrives", GEMM, "if (at.thread == 0) store_shared<1>(flag,", "store_shared<1>(flag,",
           **SPLIT),
    Mutant("split-K: the counter stays", GEMM, "if (at.thread == 0) store_coherent<1>(launch.counters + tile, {0});",
           "", **SPLIT),
    Mutant("split-K: arrives ahead of the other waves", GEMM,
           "barrier();\n    if (at.thread == 0) store_shared<1>(flag, {arrive",
           "if (at.thread == 0) store_shared<1>(flag, {arrive", **SPLIT),
    Mutant("split-K: arrives ahead of other waves' stores", PLATFORM, "  wait_stores();\n", "", arch="gfx942", **SPLIT),
    Mutant("split-K: arrives for its workgroup", PLATFORM, *NEAR, arch="gfx942", **SPLIT),
    Mutant("split-K: arrives for its workgroup (RDNA4)", PLATFORM, *NEAR, arch="gfx1201", **SPLIT),
    Mutant("split-K: nobody arrives", GEMM, "{arrive(launch.counters + tile)}", "{2u}", **SPLIT),
    Mutant("split-K: slots overlap", GEMM, "slots + slice * kSlot + v", "slots + slice * (kSlot / 2) + v", **SPLIT),
]  # fmt: skip


def build(mutant: Mutant | None, arch: str, folder: Path, config: AmdConfig) -> Path:
    """Compiles a kernel from changed headers. Raises ``ValueError`` if the place to change is not there (any more)."""
    include = folder / "include"
    shutil.copytree(INCLUDE, include)
    if mutant is not None:
        header = include / "tilewright" / "gpu" / mutant.file
        text = header.read_text()
        if mutant.old not in text:
            raise ValueError(f"{mutant.kind}: {mutant.file} has no {mutant.old!r}")
        header.write_text(text.replace(mutant.old, mutant.new))
    command = compiler(folder)
    assert command is not None
    flags = [flag for flag in FLAGS if not flag.startswith(("-I", "-W"))]
    source, output = folder / "unit.hip", folder / "unit.co"
    source.write_text(config.unit("kernel"))
    done = subprocess.run(
        [*command, *flags, f"-I{include}", f"--offload-arch={arch}", str(source), "-o", str(output)],
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[:2000])
    return output
