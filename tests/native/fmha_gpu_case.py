"""Attention kernels for GPUs: the configurations that a generated unit states, the host's emulation of the CUDA form,
and the emulator of AMD instructions.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from amd_config import AmdUnits
from amd_emulation import aligned
from fmha_native_args import FmhaArgs, FmhaKernel
from fmha_native_case import FmhaCall
from gpu_emulation import HostUnits
from native_harness import Guarded

from tilewright_emulator import Checks, CodeObject, Memory, Report

HEADERS = {
    "combine": ("fmha/combine.hpp", "TW_FMHA_COMBINE_KERNEL", "FmhaCombine"),
    "append": ("fmha/append.hpp", "TW_FMHA_APPEND_KERNEL", "FmhaAppend"),
    "dq_dk_dv": ("fmha/backward/backward.hpp", "TW_FMHA_BACKWARD_KERNEL", "FmhaBackward"),
    "dot_do_o": ("fmha/dot.hpp", "TW_FMHA_DOT_DO_O_KERNEL", "FmhaDot"),
    "convert_dq": ("fmha/convert.hpp", "TW_FMHA_CONVERT_DQ_KERNEL", "FmhaConvert"),
}
FORWARD = ("fmha/forward.hpp", "TW_FMHA_KERNEL", "FmhaForward")
DIRECT = {
    "forward": ("amd/fmha/forward.hpp", "TW_FMHA_DIRECT_KERNEL", "FmhaForwardDirect"),
    "dq_dk_dv": ("amd/fmha/backward.hpp", "TW_FMHA_BACKWARD_DIRECT_KERNEL", "FmhaBackwardDirect"),
}


@dataclass(frozen=True)
class GpuFmhaKernel(FmhaKernel):
    """``register`` only says whether P is rounded (2) or not (1); ``block`` is (m0, n0)."""

    block: tuple[int, int] = (64, 64)
    waves: int = 4
    warp: tuple[int, int, int] = (16, 8, 16)
    pipeline: str = "qr"
    pack_gqa: bool = False
    dbias: bool = False
    deterministic: bool = True
    parts: int = 1  # gradients: waves that share keys, and
    dq_rows: int = 1  # parts of the rows of dQ
    arch: str = ""  # of AMD; empty: the CUDA form

    def lines(self) -> list[str]:
        lines = [line for line in super().lines() if " warp_" not in line and " team " not in line]
        q, v = self.hdim
        numbers = {
            "k0": q, "n1": v, "k1": self.block[1], "k0max": q, "tile_6": 0, "tile_7": 0, "tile_8": 0, "align_q": 8,
            "align_v": 8, "block_per_cu": -1, "num_wave_groups": 1, "max_splits": 8, "stages": 0, "team": 1,
        }  # fmt: skip
        for stage in range(3):
            rows = self.waves if stage == 1 or (stage == 0 and self.family != "dq_dk_dv") else 1
            numbers |= {f"wave_m{stage}": rows, f"wave_n{stage}": self.waves // rows, f"wave_k{stage}": 1}
            if self.parts > 1:
                numbers |= self.shared_out(stage)
            numbers |= dict(zip((f"warp_m{stage}", f"warp_n{stage}", f"warp_k{stage}"), self.warp, strict=True))
        lines += [f"static constexpr int {name} = {value};" for name, value in numbers.items()]
        lines.append(f"static constexpr tw::FmhaPipeline pipeline = tw::FmhaPipeline::{self.pipeline};")
        flags = {
            "pack_gqa": self.pack_gqa, "dbias": self.dbias, "deterministic": self.deterministic, "persistent": False,
            "use_trload": False, **dict.fromkeys(("pad_s", "pad_sk", "pad_d", "pad_dv"), True),
        }  # fmt: skip
        lines += [f"static constexpr bool {name} = {'true' if on else 'false'};" for name, on in flags.items()]
        return lines

    def shared_out(self, stage: int) -> dict[str, int]:
        """Waves of a product of gradients, where several have the same keys."""
        keys = self.waves // self.parts
        if self.arch or self.q == "fp32":
            m, n, k = ((1, keys, self.parts), (keys, self.parts, 1), (1, self.waves, 1))[stage]
        else:
            m, k = (self.parts, keys, self.dq_rows)[stage], 1
            n = self.waves // m
        return {f"wave_m{stage}": m, f"wave_n{stage}": n, f"wave_k{stage}": k}

    def definition(self, name: str) -> str:
        """The struct, the kernel, and what a launch needs to know."""
        portable = HEADERS.get(self.family, FORWARD)
        header, macro, kind = DIRECT.get(self.family, portable) if self.pipeline == "v3" else portable
        body = "\n  ".join(self.lines())
        text = f'#include "tilewright/gpu/{header}"\nstruct Config_{name} {{\n  {body}\n}};\n'
        text += f"{macro}({name}, Config_{name})\n"
        template = f"tw::gpu::{kind}<Config_{name}>"
        value = f"const uint32_t {name}_facts[2] = {{{template}::threads, {template}::shared_bytes}};\n"
        if self.arch:
            return text + f'extern "C" __attribute__((device, used, visibility("protected"))) {value}'
        return text + f'extern "C" __attribute__((visibility("default"))) const uint32_t {name}_facts[2];\n{value}'

    def grid(self, args: FmhaArgs) -> int:
        """Sets what depends on the tile; workgroups."""
        m0, n0 = self.block
        packed = args.heads_q // args.heads_k if self.pack_gqa else 1
        if self.family != "append":  # which has the rows of the rotary tables there
            args.q_tiles, args.k_tiles = -(-args.seq_q * packed // m0), -(-args.seq_k // n0)
        heads = args.heads_k if self.pack_gqa else args.heads_q
        rows = {"combine": 1, "dot_do_o": 64, "convert_dq": 64}.get(self.family)
        if self.family == "append":
            return int(args.batch * (args.heads_k + args.heads_q) * -(-args.new_rows // 16))
        if self.family == "dq_dk_dv":
            args.tiles = args.batch * args.heads_k * (args.splits if self.deterministic else args.k_tiles)
        elif rows:
            args.tiles = args.batch * args.heads_q * -(-args.seq_q // rows)
        else:
            args.tiles = args.q_tiles * heads * args.batch * (args.splits if self.family == "split" else 1)
        return int(args.tiles)


def gpu_combine_of(kernel: GpuFmhaKernel) -> GpuFmhaKernel:
    """The second stage of a split kernel."""
    return GpuFmhaKernel(
        q=kernel.q, kv=kernel.kv, o=kernel.o, family="combine", hdim=kernel.hdim, varlen=kernel.varlen, lse=kernel.lse,
        learned_sinks=kernel.learned_sinks, skip_min=kernel.skip_min, arch=kernel.arch,
    )  # fmt: skip


def stages_of(kernel: GpuFmhaKernel) -> list[GpuFmhaKernel]:
    if kernel.family == "dq_dk_dv":
        return [kernel.replace(family="dot_do_o"), kernel, kernel.replace(family="convert_dq")]
    return [kernel, gpu_combine_of(kernel)] if kernel.family == "split" else [kernel]


def _stages(kernels: Iterable[GpuFmhaKernel]) -> list[GpuFmhaKernel]:
    return list(dict.fromkeys(stage for kernel in kernels for stage in stages_of(kernel)))


class HostKernels:
    """Kernels in the CUDA form that run on this machine's CPU, compiled when they are first wanted, with a few
    others."""

    def __init__(
        self,
        folder: Path,
        kernels: Sequence[GpuFmhaKernel],
        each: int = 6,
        first: Collection[GpuFmhaKernel] | None = None,
    ) -> None:
        """``first``: those that this run wants, which are compiled together; others then are compiled alone."""
        self._units = HostUnits(
            folder, _stages(kernels), None if first is None else _stages(first), lambda _: "",
            lambda kernel, name: kernel.definition(name), each, lambda _: 32,
        )  # fmt: skip

    def launch(self, kernel: GpuFmhaKernel, call: Any, seed: int) -> None:
        args, (library, name) = call.args, self._units.library(kernel)
        _, shared = (ctypes.c_uint32 * 2).in_dll(library, f"{name}_facts")
        counters = np.zeros(16, np.uint32)
        args.counters = counters.ctypes.data
        grid = kernel.grid(args)
        status = getattr(library, name)(bytes(args), grid, shared, ctypes.c_uint(seed))
        assert status == 0, f"{kernel} failed, or its threads wait for each other for ever"
        assert not counters.any(), "the launch leaves its counters at zero"
        args.counters = None


class AmdKernels(AmdUnits[GpuFmhaKernel]):
    """Kernels for AMD GPUs in the project's emulator. ``waves``: the order of waves (``Checks``); with one, memory is
    weak."""

    waves = 0

    def __init__(
        self,
        folder: Path,
        kernels: Sequence[GpuFmhaKernel],
        each: int = 6,
        first: Collection[GpuFmhaKernel] | None = None,
    ) -> None:
        """``first``: those that this run wants, which are compiled together; others then are compiled alone."""
        super().__init__(
            folder,
            _stages(kernels),
            None if first is None else _stages(first),
            lambda _: "",
            lambda kernel, name: kernel.definition(name),
            each,
        )

    def launch(self, kernel: GpuFmhaKernel, call: Any, seed: int = 0) -> Report:
        built, name = self.built(kernel)
        threads, shared = built.facts(name)
        args, memory = call.args, memory_of(call)
        counters = aligned(np.zeros(16, np.uint32))
        args.counters = counters.ctypes.data
        memory.map(counters.ctypes.data, counters, "counters", writable=True)
        grid = kernel.grid(args)
        report = CodeObject.load(built.path).kernel(name).launch(
            memory, grid=(grid, 1, 1), block=(threads, 1, 1), arguments=bytes(args), dynamic_lds=shared,
            checks=Checks(order=seed + 1, waves=self.waves, weak=bool(self.waves)),
        )  # fmt: skip
        assert not counters.any(), "the launch leaves its counters at zero"
        args.counters = None
        return report


WRITTEN = ("o", "lse", "randval", "status", "o_acc", "lse_acc", "dq", "dk", "dv", "dbias", "delta", "dq_acc",
           "dbias_acc", "dsinks", "lens_out")  # fmt: skip


def memory_of(call: Any) -> Memory:
    """The call's operands at their own addresses: what kernels only read in whole units of 16 bytes."""
    written = [getattr(call.args, name) for name in WRITTEN]
    outputs = {getattr(item, "ptr", item) for item in written} | set(call.outputs)
    memory = Memory()
    for kept in call.keep:
        if not isinstance(kept, Guarded) or kept.bytes == 0:
            continue
        mine = kept.address in outputs
        begin, end = kept.address, kept.address + kept.bytes
        if not mine:
            begin, end = begin // 16 * 16, -(-end // 16) * 16
        data = np.frombuffer((ctypes.c_char * (end - begin)).from_address(begin), np.uint8)
        memory.map(begin, data, "a result" if mine else "an operand", writable=mine)
    return memory


class GpuFmhaCall(FmhaCall):
    """A call whose kernels run in one of the emulations."""

    outputs: tuple[int, ...] = ()

    def run(self, kernels: HostKernels | AmdKernels, seed: int = 1) -> None:
        assert isinstance(self.kernel, GpuFmhaKernel)
        for stage in stages_of(self.kernel):
            kernels.launch(stage, self, seed)
