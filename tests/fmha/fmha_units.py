"""Several kernels of attention to a translation unit: their templates are then read once."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cpu_kernels import INCLUDE, CpuKernels
from fmha_runner import FmhaRunner

from tilewright_arch import ArchSpec
from tilewright_fmha.codegen import generate
from tilewright_kit.plan import ExecutionPlan
from tilewright_kit.templates import symbol_of

__all__ = ["UnitRunner"]


class _Units(CpuKernels):
    """Kernels that are built together share a unit with all others of their header."""

    def build(self, configs: Iterable[Any]) -> None:
        groups: dict[str, dict[str, Any]] = {}
        for config in configs:
            if symbol_of(config) not in self._libraries:
                header = re.search(r'#include "([^"]+)"', generate(config, self.arch).text)
                assert header
                groups.setdefault(header[1], {})[symbol_of(config)] = config
        for group in groups.values():
            self._build_together(list(group.values()))

    def _build_together(self, configs: list[Any]) -> None:
        units = [generate(config, self.arch) for config in configs]
        text = "\n".join(re.findall(r"#include .*", units[0].text)) + "\n"
        for index, unit in enumerate(units):
            # Every unit has a struct of the same name.
            body = re.sub(r"#include .*\n", "", unit.text)
            text += f"#define Config Config{index}\n{body}\n#undef Config\n"
        stem = f"{symbol_of(configs[0])[-12:]}_{len(configs)}"
        source, library = self.folder / f"{stem}.cpp", self.folder / f"{stem}.so"
        source.write_text(text)
        flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", f"-I{INCLUDE}"]
        command = [*self.command, *flags, *self.arch.toolchain.flags, str(source), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{stem} does not build:\n{done.stderr[:4000]}")
        loaded = ctypes.CDLL(str(library))
        for config, unit in zip(configs, units, strict=True):
            self._libraries[symbol_of(config)] = (loaded, unit)


class UnitRunner(FmhaRunner):
    """Runs plans; kernels of plans that are prepared together are built together."""

    def __init__(self, arch: ArchSpec, command: Sequence[str], folder: Path) -> None:
        super().__init__(arch, command, folder)
        self._kernels = _Units(arch, command, folder, generate)
        self.workspace = self._kernels.workspace

    def prepare(self, plans: Sequence[ExecutionPlan]) -> None:
        self._kernels.build(config for plan in plans for config in plan.kernels)
