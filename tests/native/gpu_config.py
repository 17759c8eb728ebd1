"""Configurations of the portable GPU kernels, as a generated source unit states them, and what their launches need."""

from __future__ import annotations

import dataclasses
import re
import sys
from dataclasses import dataclass
from typing import Any

from native_harness import DTYPES, INCLUDE, Config


def say(text: str) -> None:
    """A line for who runs a script, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


MMA_K = {"fp16": 16, "bf16": 16, "fp8": 32, "bf8": 32, "int8": 32, "fp32": 1}


@dataclass(frozen=True)
class GpuConfig(Config):
    """One kernel. ``stages`` 0 is 1 for compv3 and 3 for the asynchronous pipelines."""

    a: str = "fp16"
    b: str = "fp16"
    c: str = "fp16"
    tile: tuple[int, int, int] = (64, 64, 32)
    wave: tuple[int, int] = (2, 2)
    warp_tile: tuple[int, int, int] = (16, 8, 0)
    pipeline: str = "compv4"
    persistent: bool = False
    epilogue: str = "cshuffle"
    stages: int = 3
    split_k: int = 1
    grouped: bool = False
    wave_size: int = 32

    def replace(self, **changes: Any) -> GpuConfig:
        return dataclasses.replace(self, **changes)

    @property
    def threads(self) -> int:
        return self.team * self.wave_size

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a workgroup: ``Gemm::shared_bytes`` in Python."""
        m, n, k = self.tile
        size = DTYPES[self.a].itemsize
        raw = sum(
            (depth * size // 16 + 1) * 16 * lines
            for lines, depth in ((k, m) if self.a_col else (m, k), (n, k) if self.b_col else (k, n))
        )
        tile = (m + n) * k * size
        ring = tile if self.pipeline == "compv3" else self.stages * tile
        if self.pipeline != "compv3" and size < 4:
            ring = max(ring, tile + max(2, self.stages - 1) * raw)
        strip = 0
        if self.epilogue == "cshuffle":
            rows = 16
            if self.a == "fp32":
                per_thread = m // self.wave[0] // 8
                rows = 8 * (4 if per_thread % 4 == 0 else 2)
            strip = self.team * rows * (n // self.wave[1] + 8) * 4
        return max(ring, strip) + 16

    def text(self, name: str) -> str:
        """The Config struct and the kernel's definition."""

        def flag(value: bool) -> str:
            return "true" if value else "false"

        depth = self.warp_tile[2] or MMA_K[self.a]
        constants: dict[str, dict[str, Any]] = {
            "bool": {
                "a_col": flag(self.a_col),
                "b_col": flag(self.b_col),
                "persistent": flag(self.persistent),
                "pad_m": "true",
                "pad_n": "true",
                "pad_k": "true",
                "grouped": flag(self.grouped),
                "batched": "false",
                "transpose_c": "false",
            },
            "int": {
                **dict(zip(("tile_m", "tile_n", "tile_k"), self.tile, strict=True)),
                **dict(zip(("wave_m", "wave_n", "wave_k"), (*self.wave, 1), strict=True)),
                **dict(zip(("warp_tile_m", "warp_tile_n", "warp_tile_k"), (*self.warp_tile[:2], depth), strict=True)),
                "split_k": self.split_k,
                "stages": 1 if self.pipeline == "compv3" else self.stages,
                "promote": 0,
                "cluster_m": 1,
                "cluster_n": 1,
                "num_wave_groups": 1,
            },
            "tw::Pipeline": {"pipeline": f"tw::Pipeline::{self.pipeline}"},
            "tw::Scheduler": {"scheduler": f"tw::Scheduler::{self.scheduler}"},
            "tw::EpilogueKind": {
                "epilogue": f"tw::EpilogueKind::{'default_' if self.epilogue == 'default' else self.epilogue}"
            },
            "tw::Reduction": {"reduction": "tw::Reduction::none"},
            "tw::Scale": {"scale_a": f"tw::Scale::{self.scale_a}", "scale_b": f"tw::Scale::{self.scale_b}"},
            "tw::Binary": {"binary": f"tw::Binary::{self.binary}"},
            "tw::Unary": {"unary": f"tw::Unary::{self.unary}"},
        }
        lines = [f"using {x} = tw::{y};" for x, y in (("A", self.a), ("B", self.b), ("C", self.c))]
        lines.append(f"using Bias = {f'tw::{self.bias}' if self.bias else 'void'};")
        lines.append(f"using D = tw::types<{', '.join(f'tw::{d}' for d in self.d)}>;")
        lines += [
            f"static constexpr {kind} {key} = {value};"
            for kind, group in constants.items()
            for key, value in group.items()
        ]
        body = "\n  ".join(lines)
        return f"struct Config_{name} {{\n  {body}\n}};\nTW_GEMM_KERNEL({name}, Config_{name})\n"

    def unit(self, name: str) -> str:
        """A whole source unit."""
        return f'#include "tilewright/gpu/gemm/gemm.hpp"\n{self.text(name)}'


@dataclass(frozen=True)
class Built:
    """What the compiler made of a source text, and said about it."""

    log: str
    ptx: str
    cubin: bytes

    @property
    def registers(self) -> int:
        return max(map(int, re.findall(r"Used (\d+) registers", self.log)), default=0)

    @property
    def spilled_bytes(self) -> int:
        return sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", self.log)))


def compile_text(text: str, arch: str = "sm_90a", options: tuple[str, ...] = ()) -> Built:
    """Compiles with NVRTC, which needs no GPU. Raises ``RuntimeError`` with its words if it fails."""
    from cuda.bindings import nvrtc

    _, program = nvrtc.nvrtcCreateProgram(text.encode(), b"unit.cu", 0, [], [])
    flags = [f"--gpu-architecture={arch}", "-default-device", "--std=c++17", "-DNDEBUG", "--ptxas-options=-v"]
    flags += [f"-I{INCLUDE}", *options]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
    log = bytes(nvrtc.nvrtcGetProgramLogSize(program)[1])
    nvrtc.nvrtcGetProgramLog(program, log)
    words = log.decode(errors="replace").strip("\0 \n")
    if int(status) != 0:
        raise RuntimeError(words)
    ptx = bytes(nvrtc.nvrtcGetPTXSize(program)[1])
    nvrtc.nvrtcGetPTX(program, ptx)
    cubin = bytes(nvrtc.nvrtcGetCUBINSize(program)[1])
    nvrtc.nvrtcGetCUBIN(program, cubin)
    nvrtc.nvrtcDestroyProgram(program)
    return Built(words, ptx.decode(), cubin)
