"""Hopper GEMM kernels as their configuration: the source text that instantiates the template, and its compilation.

Needs NVRTC alone (packages ``cuda-bindings`` and ``nvidia-cuda-nvrtc``): no GPU, no driver.
"""

from __future__ import annotations

import dataclasses
import re
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Built", "Config", "compile_source", "source_of"]

INCLUDE = Path(__file__).resolve().parents[2] / "native" / "include"
ELEMENT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "bf8": 1, "int8": 1, "int32": 4}
SHARED_BYTES = 232448
BARRIER_BYTES = 512
OPTIONS = ("--gpu-architecture=sm_90a", "-default-device", "--std=c++17", "-DNDEBUG", "--ptxas-options=-v")


@dataclass(frozen=True)
class Config:
    """One kernel. Fields are named as in the template's ``Config`` (tilewright/sm90/gemm/gemm.hpp)."""

    a: str = "bf16"
    b: str = "bf16"
    c: str = "bf16"
    layout: str = "rcr"
    tile: tuple[int, int, int] = (128, 256, 64)
    wave: tuple[int, int] = (2, 1)
    scheduler: str = "cooperative"
    epilogue: str = "cshuffle"
    persistent: bool = True
    cluster: tuple[int, int] = (1, 1)
    cluster_k: int = 1
    """More than 1: the slices of split_k, which equals it, are the workgroups of one cluster."""
    swap: bool = False
    stages: int = 0
    """0: as many as fit."""
    split_k: int = 1
    stream: bool = False
    promote: int = 0
    grouped: bool = False
    bias: str = ""
    d: tuple[str, ...] = ()
    scale_a: str = "none"
    scale_b: str = "none"
    binary: str = "PassThrough"
    unary: str = "PassThrough"

    @property
    def waves(self) -> int:
        """Consumer warpgroups that share a tile."""
        return self.wave[0] * self.wave[1]

    @property
    def consumers(self) -> int:
        return 2 if self.scheduler == "pingpong" else self.waves

    @property
    def threads(self) -> int:
        return 128 * (1 + self.consumers)

    @property
    def stage_bytes(self) -> int:
        m, n, k = self.tile
        return (m + n) * k * ELEMENT_BYTES[self.a]

    @property
    def staging_bytes(self) -> int:
        """Shared memory in which C is staged: up to two pieces per consumer."""
        if self.epilogue != "cshuffle":
            return 0
        size = ELEMENT_BYTES[self.c]
        if self.swap:
            repeats, columns = self.tile[1] // self.wave[1] // 64, self.tile[0] // self.wave[0]
            return self.consumers * min(2, repeats) * columns * 64 * size
        repeats, columns = self.tile[0] // self.wave[0] // 64, self.tile[1] // self.wave[1]
        return self.consumers * min(2, repeats * (columns // (128 // size))) * 64 * 128

    @property
    def gather_bytes(self) -> int:
        """Shared memory in which a cluster's first workgroup receives the other slices' sums."""
        return (self.cluster_k - 1) * self.tile[0] * self.tile[1] * 4

    @property
    def stage_count(self) -> int:
        room = SHARED_BYTES - BARRIER_BYTES - self.staging_bytes - self.gather_bytes
        return self.stages or min(24, room // self.stage_bytes)

    @property
    def shared_bytes(self) -> int:
        return self.stage_count * self.stage_bytes + self.staging_bytes + self.gather_bytes + BARRIER_BYTES

    @property
    def label(self) -> str:
        """A short name: what differs from the defaults."""
        parts = ["x".join(map(str, self.tile)), f"w{self.wave[0]}x{self.wave[1]}", self.scheduler[:4]]
        if self.cluster != (1, 1):
            parts.append(f"c{self.cluster[0]}x{self.cluster[1]}")
        if self.cluster_k > 1:
            parts.append(f"ck{self.cluster_k}")
        flags = {
            "swap": self.swap, "np": not self.persistent, "stream": self.stream, "group": self.grouped,
            "direct": self.epilogue == "default", f"split{self.split_k}": self.split_k > 1,
            f"p{self.promote}": self.promote > 0, self.layout: self.layout != "rcr",
            f"st{self.stages}": self.stages > 0,
            f"bias_{self.bias}": bool(self.bias), "d_" + "_".join(self.d): bool(self.d),
            f"{self.scale_a}-{self.scale_b}": self.scale_a != "none", self.unary: self.unary != "PassThrough",
        }  # fmt: skip
        return ".".join(parts + [name for name, on in flags.items() if on])


@dataclass(frozen=True)
class Built:
    """A compiled kernel and what the compiler says about it. ``spills``: bytes of spills and stack."""

    cubin: bytes
    registers: int
    spills: int
    warnings: tuple[str, ...]
    seconds: float


def source_of(config: Config, symbol: str = "kernel") -> str:
    """The unit that instantiates the kernel, as the GEMM plugin writes it."""

    def flag(value: bool) -> str:
        return "true" if value else "false"

    epilogue = "default_" if config.epilogue == "default" else config.epilogue
    m, n, k = config.tile
    warp_m, warp_n = (m // config.wave[0], 64) if config.swap else (64, n // config.wave[1])
    return f"""#include "tilewright/sm90/gemm/gemm.hpp"
namespace {{
struct Config {{
  using A = tw::{config.a};
  using B = tw::{config.b};
  using C = tw::{config.c};
  using Bias = {f"tw::{config.bias}" if config.bias else "void"};
  using D = tw::types<{", ".join(f"tw::{d}" for d in config.d)}>;
  static constexpr bool a_col = {flag(config.layout[0] == "c")}, b_col = {flag(config.layout[1] == "c")};
  static constexpr int tile_m = {m}, tile_n = {n}, tile_k = {k};
  static constexpr int wave_m = {config.wave[0]}, wave_n = {config.wave[1]}, wave_k = 1;
  static constexpr int warp_tile_m = {warp_m}, warp_tile_n = {warp_n}, warp_tile_k = {32 // ELEMENT_BYTES[config.a]};
  static constexpr tw::Pipeline pipeline = tw::Pipeline::ws;
  static constexpr tw::Scheduler scheduler = tw::Scheduler::{config.scheduler};
  static constexpr tw::EpilogueKind epilogue = tw::EpilogueKind::{epilogue};
  static constexpr bool persistent = {flag(config.persistent)}, pad_m = true, pad_n = true, pad_k = true;
  static constexpr bool grouped = {flag(config.grouped)}, batched = false, transpose_c = {flag(config.swap)};
  static constexpr int split_k = {config.split_k}, stages = {config.stage_count}, promote = {config.promote};
  static constexpr int cluster_m = {config.cluster[0]}, cluster_n = {config.cluster[1]}, cluster_k = {config.cluster_k};
  static constexpr int num_wave_groups = {2 if config.scheduler == "pingpong" else 1};
  static constexpr tw::Reduction reduction = tw::Reduction::{"linear" if config.stream else "none"};
  static constexpr tw::Scale scale_a = tw::Scale::{config.scale_a}, scale_b = tw::Scale::{config.scale_b};
  static constexpr tw::Binary binary = tw::Binary::{config.binary};
  static constexpr tw::Unary unary = tw::Unary::{config.unary};
}};
}}  // namespace
TW_GEMM_KERNEL({symbol}, Config)
"""


def compile_source(source: str) -> Built:
    """Compile for sm_90a. Raises ``RuntimeError`` with the compiler's log; a missing package raises ``ImportError``."""
    from cuda.bindings import nvrtc

    begun = time.perf_counter()
    status, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], [])
    options = [option.encode() for option in (*OPTIONS, f"--include-path={INCLUDE}")]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    buffer = b" " * size
    nvrtc.nvrtcGetProgramLog(program, buffer)
    log = buffer.decode(errors="replace").rstrip("\0 ")
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        nvrtc.nvrtcDestroyProgram(program)
        raise RuntimeError(log)
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    cubin = b" " * size
    nvrtc.nvrtcGetCUBIN(program, cubin)
    nvrtc.nvrtcDestroyProgram(program)
    seconds = time.perf_counter() - begun
    registers = max((int(found) for found in re.findall(r"Used (\d+) registers", log)), default=0)
    spills = sum(int(found) for found in re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", log))
    warnings = tuple(line for line in log.splitlines() if re.search(r"C7\d\d\d", line))
    return Built(cubin, registers, spills, warnings, seconds)


def with_fields(config: Config, **changes: object) -> Config:
    """A copy with other fields."""
    return dataclasses.replace(config, **changes)  # type: ignore[arg-type]
