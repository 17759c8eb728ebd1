"""Runs plans of convolutions without a server: the system's compiler, ctypes, and a team made of Python threads.

Inputs end at a page that nobody may touch, so a kernel that reads outside them stops the process; outputs and what lies
around them are poisoned.
"""

from __future__ import annotations

import ctypes
import mmap
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
from tilewright_grouped_conv.codegen import generate
from tilewright_grouped_conv.transform_config import TransformConfig, generate_transform
from tilewright_kit.compare import poison
from tilewright_kit.config import KernelConfig
from tilewright_kit.dtypes import DType
from tilewright_kit.plan import WORKSPACE, ExecutionPlan, Stage, pack
from tilewright_kit.problem import Operand, Role
from tilewright_kit.source import SourceUnit
from tilewright_kit.templates import symbol_of
from tilewright_kit.tensor import TensorDesc

Array = npt.NDArray[Any]
INCLUDE = Path(__file__).resolve().parents[2] / "native" / "include"
MARGIN = 64
"""Bytes before and behind every output that nobody may write."""
CANARY = 0xA5
NAN = 0xFF
"""A byte that, repeated, is a NaN in every float type."""
_PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)


def compiler() -> list[str]:
    """The system's C++ compiler, else ziglang."""
    found = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    return [found] if found else [sys.executable, "-m", "ziglang", "c++"]


class Team(ctypes.Structure):
    """``tw_team``."""

    _fields_ = (("rank", ctypes.c_int32), ("size", ctypes.c_int32), ("state", ctypes.c_void_p))


@dataclass
class Tensor:
    """Storage of one tensor: its bytes, and the tensor as NumPy sees it."""

    raw: npt.NDArray[np.uint8]
    start: int
    view: Array
    desc: TensorDesc
    margin: bool

    @property
    def address(self) -> int:
        return int(self.raw.ctypes.data) + self.start

    def overrun(self) -> bool:
        """Whether bytes around the tensor, or between its elements, were written."""
        if not self.margin:
            return False
        own = np.zeros(self.raw.size, dtype=bool)
        if self.desc.size:
            width = self.desc.dtype.bytes
            offsets = sum(np.indices(self.desc.shape)[dim] * step for dim, step in enumerate(self.desc.strides))
            for byte in range(width):
                own[self.start + np.asarray(offsets).ravel() * width + byte] = True
        return bool(np.any(self.raw[~own] != CANARY))


def stored(desc: TensorDesc, values: Array | None = None) -> Tensor:
    """An input with ``values``, behind which a page is closed; or an output, poisoned, with margins."""
    if values is not None:
        raw = _closed(desc.nbytes)
        start = (raw.size - desc.nbytes) // 64 * 64 if desc.nbytes else 0
    else:
        raw = np.full(desc.nbytes + 2 * MARGIN + 64, CANARY, dtype=np.uint8)
        start = MARGIN + -(raw.ctypes.data + MARGIN) % 64
    width = desc.dtype.bytes
    words = np.lib.stride_tricks.as_strided(
        raw[start : start + max(desc.nbytes, 0)].view(f"u{width}"), desc.shape, [step * width for step in desc.strides]
    )
    if desc.size:
        given = poison(desc.dtype, desc.shape) if values is None else np.asarray(values)
        words[...] = np.ascontiguousarray(given).astype(desc.dtype.numpy).reshape(desc.shape).view(f"u{width}")
    return Tensor(raw, start, words.view(desc.dtype.numpy), desc, values is None)


def _closed(nbytes: int) -> npt.NDArray[np.uint8]:
    """At least that many bytes of NaNs, the last before a page that may not be touched."""
    pages = -(-max(nbytes, 1) // _PAGE)
    memory = mmap.mmap(-1, (pages + 1) * _PAGE)
    raw = np.frombuffer(memory, dtype=np.uint8)
    closed = ctypes.c_void_p(raw.ctypes.data + pages * _PAGE)
    if _libc.mprotect(closed, ctypes.c_size_t(_PAGE), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    raw[: pages * _PAGE] = NAN
    return raw[: pages * _PAGE]


class ConvRunner:
    """Builds each kernel once and runs plans."""

    def __init__(self, arch: ArchSpec, command: Sequence[str], folder: Path) -> None:
        self.arch, self.command, self.folder = arch, list(command), folder
        self._libraries: dict[str, tuple[ctypes.CDLL, SourceUnit]] = {}
        self._lock = threading.Lock()

    def prepare(self, plans: Sequence[ExecutionPlan]) -> None:
        """Build all kernels of several plans side by side."""
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(self.kernel, dict.fromkeys(config for plan in plans for config in plan.kernels)))

    def kernel(self, config: KernelConfig) -> tuple[ctypes.CDLL, SourceUnit]:
        symbol = symbol_of(config)
        with self._lock:
            if symbol in self._libraries:
                return self._libraries[symbol]
        if isinstance(config, TransformConfig):
            unit = generate_transform(config, self.arch)
        else:
            unit = generate(config, self.arch)  # type: ignore[arg-type]
        source, library = (
            self.folder / f"{config.operation}_{symbol[-12:]}.cpp",
            self.folder / f"{config.operation}_{symbol[-12:]}.so",
        )
        source.write_text(unit.text)
        flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", f"-I{INCLUDE}"]
        command = [*self.command, *flags, *self.arch.toolchain.flags, *unit.flags, str(source), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{config.name} does not build:\n{done.stderr[:4000]}")
        with self._lock:
            self._libraries[symbol] = (ctypes.CDLL(str(library)), unit)
            return self._libraries[symbol]

    def run(
        self, plan: ExecutionPlan, inputs: Mapping[str, Array], team: int | None = None, in_place: bool = False
    ) -> dict[str, Tensor]:
        """Execute all stages; returns every tensor's memory. ``in_place``: what is accumulated is the output itself."""
        memory = {item.name: stored(item.desc, _values(item, inputs)) for item in plan.operands}
        addresses = {name: item.address for name, item in memory.items()}
        if in_place:
            output = next(item for item in plan.operands if item.role is Role.OUTPUT)
            memory[output.name].view[...] = memory["acc"].view
            addresses["acc"] = addresses[output.name]
        scratch = np.full(plan.workspace_bytes + 64 + MARGIN, CANARY, dtype=np.uint8)
        start = -(-scratch.ctypes.data // 64) * 64
        first = start - scratch.ctypes.data
        scratch[first : first + plan.workspace_bytes] = NAN
        addresses[WORKSPACE] = start
        for stage in plan.stages:
            library, unit = self.kernel(stage.config)
            self._launch(
                getattr(library, unit.entries[stage.role]), bound(stage, addresses), team or stage.geometry.team
            )
        assert np.all(scratch[first + plan.workspace_bytes :] == CANARY), "the workspace was overrun"
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

    def workspace(self, stage: Stage, plan: ExecutionPlan) -> int:
        """What the kernel of a stage itself says it needs."""
        library, unit = self.kernel(stage.config)
        function = getattr(library, unit.entries["workspace"])
        function.restype = ctypes.c_int64
        return int(function(bound(stage, {item.name: 64 for item in plan.operands} | {WORKSPACE: 64})))


def bound(stage: Stage, addresses: Mapping[str, int]) -> Any:
    """A stage's argument block as a kernel reads it."""
    packed = pack(stage.args)
    block = bytearray(len(packed.template))
    store = (ctypes.c_char * len(block))()
    packed.bind(addresses, block, ctypes.addressof(store))
    ctypes.memmove(store, bytes(block), len(block))
    return store


def _values(item: Operand, inputs: Mapping[str, Array]) -> Array | None:
    return inputs[item.name] if item.role is Role.INPUT else None


def draw(rng: np.random.Generator, desc: TensorDesc) -> Array:
    """Random values of mean zero in the tensor's own type, so that the reference sees what the kernel sees. Dimensions
    with a stride of zero repeat their first element.
    """
    shape = tuple(min(size, 1) if step == 0 else size for size, step in zip(desc.shape, desc.strides, strict=True))
    if desc.dtype in (DType.INT8, DType.INT32):
        values = rng.integers(-128, 128, shape)
    else:
        values = rng.standard_normal(shape).astype(np.float32)
    return np.array(np.broadcast_to(values.astype(desc.dtype.numpy), desc.shape))
