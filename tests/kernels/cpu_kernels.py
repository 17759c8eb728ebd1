"""Kernels of a CPU without a server: the system's compiler, ctypes, and a team made of Python threads."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_arch import ArchSpec
from tilewright_kit.dtypes import DType
from tilewright_kit.plan import WORKSPACE, ExecutionPlan, Stage, pack
from tilewright_kit.source import SourceUnit
from tilewright_kit.templates import symbol_of
from tilewright_kit.tensor import TensorDesc

Array = npt.NDArray[Any]
INCLUDE = Path(__file__).resolve().parents[2] / "native" / "include"
PER_UNIT = 4
"""Kernels of one translation unit, where several are wanted: what they share is compiled once."""


def compiler() -> list[str]:
    """The system's C++ compiler, else ziglang."""
    found = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    return [found] if found else [sys.executable, "-m", "ziglang", "c++"]


class Team(ctypes.Structure):
    """``tw_team``."""

    _fields_ = (("rank", ctypes.c_int32), ("size", ctypes.c_int32), ("state", ctypes.c_void_p))


class CpuKernels:
    """Builds each kernel once and launches stages. ``generate`` makes the unit of a configuration.

    Other processes may build the same ones in ``folder`` at the same time. ``level``: of optimisation; servers build
    with -O2, which takes longer, and makes one instruction that rounds once of a product and a sum.
    """

    def __init__(
        self,
        arch: ArchSpec,
        command: Sequence[str],
        folder: Path,
        generate: Callable[[Any, ArchSpec], SourceUnit],
        level: str = "-O1",
    ) -> None:
        self.arch, self.command, self.folder, self.level = arch, list(command), folder, level
        self._generate = generate
        self._libraries: dict[str, tuple[ctypes.CDLL, SourceUnit]] = {}
        self._lock = threading.Lock()

    def build(self, configs: Iterable[Any]) -> None:
        """Build several kernels side by side, a few to a unit."""
        groups: dict[tuple[str, ...], list[SourceUnit]] = {}
        for config in dict.fromkeys(configs):
            if symbol_of(config) not in self._libraries:
                unit = self._generate(config, self.arch)
                groups.setdefault((*_INCLUDES.findall(unit.text), *unit.flags), []).append(unit)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(self._build_together, (part for units in groups.values() for part in _parts(units))))

    def kernel(self, config: Any) -> tuple[ctypes.CDLL, SourceUnit]:
        symbol = symbol_of(config)
        with self._lock:
            if symbol in self._libraries:
                return self._libraries[symbol]
        unit = self._generate(config, self.arch)
        self._build_together([unit])
        with self._lock:
            self._libraries[symbol] = (ctypes.CDLL(str(self._library(unit))), unit)
            return self._libraries[symbol]

    def _library(self, unit: SourceUnit) -> Path:
        return self.folder / f"{hashlib.sha256(unit.text.encode()).hexdigest()[:24]}.so"

    def _build_together(self, units: Sequence[SourceUnit]) -> None:
        """One library for those that nobody has built, under the names of all of them."""
        units = sorted(units, key=self._library)  # all processes take locks in the same order
        with ExitStack() as held:
            for unit in units:
                lock = held.enter_context(self._library(unit).with_suffix(".lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
            missing = [unit for unit in units if not self._library(unit).exists()]
            if missing:
                self._compile(missing)

    def _compile(self, units: Sequence[SourceUnit]) -> None:
        libraries = [self._library(unit) for unit in units]
        source, partial = (libraries[0].with_suffix(suffix) for suffix in (".cpp", ".partial"))
        source.write_text(_joined([unit.text for unit in units]))
        flags = ["-std=c++17", self.level, "-shared", "-fPIC", "-fvisibility=hidden", f"-I{INCLUDE}"]
        command = [*self.command, *flags, *self.arch.toolchain.flags, *units[0].flags, str(source), "-o", str(partial)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{', '.join(unit.name for unit in units)}: does not build:\n{done.stderr[:4000]}")
        for library in libraries:
            library.hardlink_to(partial)
        partial.unlink()

    def launch(self, stage: Stage, addresses: Mapping[str, int], team: int | None = None) -> None:
        """Run a stage on a team of threads, of the plan's size unless another is given."""
        library, unit = self.kernel(stage.config)
        function, args = getattr(library, unit.entries[stage.role]), bound(stage, addresses)
        size = team or stage.geometry.team
        function.restype = None
        state = (ctypes.c_int64 * (8 * 32))()
        teams = [Team(rank, size, ctypes.addressof(state)) for rank in range(size)]
        threads = [threading.Thread(target=function, args=(args, ctypes.byref(item))) for item in teams[1:]]
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


_INCLUDES = re.compile(r"^#include .*\n", re.MULTILINE)


def _parts(units: Sequence[SourceUnit]) -> Iterator[Sequence[SourceUnit]]:
    return (units[first : first + PER_UNIT] for first in range(0, len(units), PER_UNIT))


def _joined(texts: Sequence[str]) -> str:
    """One text of several with the same headers, each of which has a struct ``Config`` of its own."""
    parts = _INCLUDES.findall(texts[0])
    for number, text in enumerate(texts):
        parts.append(f"#define Config Config{number}\n{_INCLUDES.sub('', text)}\n#undef Config\n")
    return "".join(parts)


def bound(stage: Stage, addresses: Mapping[str, int]) -> Any:
    """A stage's argument block as a kernel reads it."""
    packed = pack(stage.args)
    block = bytearray(len(packed.template))
    store = (ctypes.c_char * len(block))()
    packed.bind(addresses, block, ctypes.addressof(store))
    ctypes.memmove(store, bytes(block), len(block))
    return store


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
