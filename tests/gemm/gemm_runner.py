"""Runs execution plans without a server: the system's compiler, ctypes, and a team made of Python threads."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_arch import ArchSpec
from tilewright_gemm.codegen import generate, symbol_of
from tilewright_gemm.config import GemmConfig
from tilewright_kit.compare import poison
from tilewright_kit.dtypes import DType
from tilewright_kit.plan import WORKSPACE, ExecutionPlan, pack
from tilewright_kit.problem import Operand, Role
from tilewright_kit.source import SourceUnit
from tilewright_kit.tensor import TensorDesc

Array = npt.NDArray[Any]
INCLUDE = Path(__file__).resolve().parents[2] / "native" / "include"
MARGIN = 64
"""Bytes behind every tensor that nobody may write."""
CANARY = 0xA5


def compiler() -> list[str]:
    """The system's C++ compiler, else ziglang."""
    found = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    return [found] if found else [sys.executable, "-m", "ziglang", "c++"]


class Team(ctypes.Structure):
    """``tw_team``."""

    _fields_ = (("rank", ctypes.c_int32), ("size", ctypes.c_int32), ("state", ctypes.c_void_p))


@dataclass
class Memory:
    """Storage of one tensor: its bytes with a margin behind them, and the tensor as NumPy sees it."""

    raw: npt.NDArray[np.uint8]
    view: Array
    size: int

    @classmethod
    def of(cls, desc: TensorDesc, values: Array | None = None) -> Memory:
        """Memory laid out as ``desc`` says, holding ``values``, or poison."""
        raw = np.full(desc.nbytes + MARGIN, CANARY, dtype=np.uint8)
        if desc.packing:
            raw[: desc.nbytes] = 0xFF if values is None else values
            return cls(raw, raw[: desc.nbytes], desc.nbytes)
        width = desc.dtype.bytes
        whole = raw[: desc.nbytes].view(f"u{width}")
        strides = [stride * width for stride in desc.strides]
        words = np.lib.stride_tricks.as_strided(whole, desc.shape, strides)
        if values is None:
            values = poison(desc.dtype, desc.shape)
        if desc.nbytes:
            words[...] = np.ascontiguousarray(values).astype(desc.dtype.numpy).reshape(desc.shape).view(f"u{width}")
        return cls(
            raw, words.view(desc.dtype.numpy) if desc.nbytes else np.zeros(desc.shape, desc.dtype.numpy), desc.nbytes
        )

    @property
    def address(self) -> int:
        return self.raw.ctypes.data

    def overrun(self) -> bool:
        return bool(np.any(self.raw[self.size :] != CANARY))


class Runner:
    """Builds each kernel once and runs plans."""

    def __init__(self, arch: ArchSpec, command: Sequence[str], folder: Path) -> None:
        self.arch, self.command, self.folder = arch, list(command), folder
        self._libraries: dict[str, tuple[ctypes.CDLL, SourceUnit]] = {}

    def prepare(self, configs: Sequence[GemmConfig]) -> None:
        """Build several kernels side by side."""
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(self.kernel, dict.fromkeys(configs)))

    def kernel(self, config: GemmConfig) -> tuple[ctypes.CDLL, SourceUnit]:
        unit = generate(config, self.arch)
        symbol = symbol_of(config)
        if symbol not in self._libraries:
            stem = symbol[-12:] + str(len(config.name))
            source, library = self.folder / f"{stem}.cpp", self.folder / f"{stem}.so"
            source.write_text(unit.text)
            flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", f"-I{INCLUDE}"]
            command = [*self.command, *flags, *self.arch.toolchain.flags, *unit.flags, str(source), "-o", str(library)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{config.name} does not build:\n{done.stderr[:4000]}")
            self._libraries[symbol] = (ctypes.CDLL(str(library)), unit)
        return self._libraries[symbol]

    def run(self, plan: ExecutionPlan, inputs: Mapping[str, Array], team: int | None = None) -> dict[str, Memory]:
        """Execute all stages; returns every tensor's memory. Packed inputs are given as ``uint8`` bytes."""
        memory = {item.name: Memory.of(item.desc, _values(item, inputs)) for item in plan.operands}
        scratch = np.full(plan.workspace_bytes + 64 + MARGIN, CANARY, dtype=np.uint8)
        start = -(-scratch.ctypes.data // 64) * 64
        addresses = {name: item.address for name, item in memory.items()} | {WORKSPACE: start}
        for stage in plan.stages:
            packed = pack(stage.args)
            block = bytearray(len(packed.template))
            store = (ctypes.c_char * len(block))()
            packed.bind(addresses, block, ctypes.addressof(store))
            ctypes.memmove(store, bytes(block), len(block))
            library, unit = self.kernel(stage.config)  # type: ignore[arg-type]
            self._launch(getattr(library, unit.entries[stage.role]), store, team or stage.geometry.team)
        end = start - scratch.ctypes.data + plan.workspace_bytes
        assert np.all(scratch[end:] == CANARY), "the workspace was overrun"
        for name, item in memory.items():
            assert not item.overrun(), f"{name} was overrun"
        return memory

    def _launch(self, function: Any, args: Any, size: int) -> None:
        function.restype = None
        state = (ctypes.c_int64 * (8 * 32))()
        teams = [Team(rank, size, ctypes.addressof(state)) for rank in range(size)]
        threads = [threading.Thread(target=function, args=(args, ctypes.byref(team))) for team in teams[1:]]
        for thread in threads:
            thread.start()
        function(args, ctypes.byref(teams[0]))
        for thread in threads:
            thread.join()

    def workspace(self, plan: ExecutionPlan) -> int:
        """What the first kernel itself says it needs."""
        stage = plan.stages[0]
        packed = pack(stage.args)
        block = bytearray(len(packed.template))
        store = (ctypes.c_char * len(block))()
        packed.bind({item.name: 64 for item in plan.operands} | {WORKSPACE: 64}, block, ctypes.addressof(store))
        ctypes.memmove(store, bytes(block), len(block))
        library, unit = self.kernel(stage.config)  # type: ignore[arg-type]
        function = getattr(library, unit.entries["workspace"])
        function.restype = ctypes.c_int64
        return int(function(store))


def _values(item: Operand, inputs: Mapping[str, Array]) -> Array | None:
    return inputs[item.name] if item.role is Role.INPUT else None


def draw(rng: np.random.Generator, desc: TensorDesc) -> Array:
    """Random values of mean zero in the tensor's own type, so that the reference sees what the kernel sees."""
    if desc.dtype in (DType.INT8, DType.INT32):
        return rng.integers(-128, 128, desc.shape).astype(desc.dtype.numpy)
    return rng.standard_normal(desc.shape).astype(np.float32).astype(desc.dtype.numpy)
