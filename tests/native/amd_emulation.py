"""Runs the portable GPU kernels for AMD GPUs in the project's emulator (docs/emulator.md)."""

from __future__ import annotations

import ctypes

import numpy as np
from amd_config import AmdConfig, KernelSet
from gpu_emulation import LaunchHead, task_bytes, tiles_of
from native_case import Call
from native_harness import Guarded

from tilewright_emulator import Checks, CodeObject, Memory, Report


class AmdKernels(KernelSet):
    """Kernels that the emulator runs."""

    def launch(self, call: Call, grid: int = 0, checks: Checks | None = None) -> Report:
        """One launch of the call's kernel; ``grid`` is the number of workgroups of a persistent kernel."""
        config = call.config
        assert isinstance(config, AmdConfig)
        built, name = self.built(config)
        threads, shared = built.facts(name)
        counts = [tiles_of(config, args) for args in call.table]
        firsts = np.cumsum([0, *counts]).tolist()
        tiles = int(firsts[-1])
        tasks = b"".join(task_bytes(config, args, first) for args, first in zip(call.table, firsts[:-1], strict=True))
        memory = memory_of(call)
        table = aligned(np.frombuffer(tasks, np.uint8))
        slot = config.tile[0] * config.tile[1] * 4
        workspace = aligned(np.full(tiles * call.split_k * slot if call.split_k > 1 else 16, 0xFF, np.uint8))
        counters = aligned(np.zeros(tiles + 1, np.uint32))
        for array, what in ((table, "tasks"), (workspace, "workspace"), (counters, "counters")):
            memory.map(array.ctypes.data, array, what, writable=what != "tasks")
        head = LaunchHead(
            0, len(call.table), tiles, workspace.ctypes.data, counters.ctypes.data, call.split_k, workspace.nbytes, 0
        )
        if config.grouped:
            head.tasks = table.ctypes.data
        total = tiles * call.split_k
        report = CodeObject.load(built.path).kernel(name).launch(
            memory,
            grid=(grid if config.persistent else total, 1, 1),
            block=(threads, 1, 1),
            arguments=bytes(head) + (b"" if config.grouped else tasks),
            dynamic_lds=shared,
            checks=checks,
        )  # fmt: skip
        assert not counters.any(), "the launch leaves its counters at zero"
        return report


def aligned(array: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    """A copy that begins at a multiple of 64."""
    room = np.zeros(array.nbytes + 64, np.uint8)
    begin = -room.ctypes.data % 64
    result = room[begin : begin + array.nbytes].view(array.dtype)
    result[:] = array
    return result


def memory_of(call: Call) -> Memory:
    """The call's operands at their own addresses. What kernels only read may be read in whole units of 16 bytes; what
    they write, byte for byte."""
    outputs = {args.c for args in call.table}
    memory = Memory()
    for kept in call.keep:
        if not isinstance(kept, Guarded) or kept.bytes == 0:
            continue
        written = kept.address in outputs
        begin, end = kept.address, kept.address + kept.bytes
        if not written:
            begin, end = begin // 16 * 16, -(-end // 16) * 16
        data = np.frombuffer((ctypes.c_char * (end - begin)).from_address(begin), np.uint8)
        memory.map(begin, data, "C" if written else "an operand", writable=written)
    return memory
