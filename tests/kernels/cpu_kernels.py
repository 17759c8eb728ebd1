"""Kernels of a CPU without a server: the system's compiler, ctypes, and a team made of Python threads."""

from __future__ import annotations

import ctypes
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from libraries import Libraries

from tilewright_arch import ArchSpec
from tilewright_kit.contract.plan import WORKSPACE, ExecutionPlan, Stage, pack
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.contract.templates import symbol_of
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.tensor import TensorDesc
from tilewright_server.build.toolchains.toolchain import CpuToolchain

Array = npt.NDArray[Any]
INCLUDE = Path(__file__).resolve().parents[2] / "native" / "include"


def compiler() -> list[str]:
    """The system's C++ compiler, else ziglang."""
    found = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    return [found] if found else [sys.executable, "-m", "ziglang", "c++"]


def as_servers_build(arch: ArchSpec) -> list[str]:
    """Flags of optimisation and code that a server gives this compiler."""
    flags = CpuToolchain([INCLUDE]).flags(SourceUnit("kernel", "c++", "", {}), arch)
    return [flag for flag in flags if flag.startswith(("-O", "-f"))]


class Team(ctypes.Structure):
    """``tw_team``."""

    _fields_ = (("rank", ctypes.c_int32), ("size", ctypes.c_int32), ("state", ctypes.c_void_p))


class CpuKernels:
    """Builds each kernel once and launches stages. ``generate`` makes the unit of a configuration.

    Other processes may build the same ones in ``folder`` at the same time. ``options``: what the compiler is told of
    code; servers' own (``as_servers_build``) take longer, and make one instruction, which rounds once, of a product and
    a sum.
    """

    def __init__(
        self,
        arch: ArchSpec,
        command: Sequence[str],
        folder: Path,
        generate: Callable[[Any, ArchSpec], SourceUnit],
        options: Sequence[str] = ("-Og",),
    ) -> None:
        self.arch = arch
        flags = ["-std=c++17", *options, "-shared", "-fPIC", "-fvisibility=hidden", f"-I{INCLUDE}"]
        self._units = Libraries(command, [*flags, *arch.toolchain.flags], folder)
        self._generate = generate
        self._libraries: dict[str, tuple[ctypes.CDLL, SourceUnit]] = {}
        self._lock = threading.Lock()

    def build(self, configs: Iterable[Any]) -> None:
        """Build several kernels side by side, a few to a unit."""
        wanted = [config for config in dict.fromkeys(configs) if symbol_of(config) not in self._libraries]
        self._units.build(self._generate(config, self.arch) for config in wanted)

    def kernel(self, config: Any) -> tuple[ctypes.CDLL, SourceUnit]:
        symbol = symbol_of(config)
        with self._lock:
            if symbol in self._libraries:
                return self._libraries[symbol]
        unit = self._generate(config, self.arch)
        library = self._units.load(unit)
        with self._lock:
            self._libraries[symbol] = (library, unit)
            return self._libraries[symbol]

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
        """Needs of a stage, as its kernel states them."""
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
