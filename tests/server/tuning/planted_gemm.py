"""GEMM with planted faults: of the six kernels that it proposes one crashes, one hangs, one writes nothing, one is off
by a hundredth, one does not compile, and one is right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.plugin import GemmOperation
from tilewright_gemm.problem.problem import GemmProblem
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Operation
from tilewright_kit.contract.plan import ExecutionPlan
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.loading.hookspecs import hookimpl

FAULTS = {512: "", 448: "crash", 384: "hang", 320: "empty", 256: "off", 192: "broken"}
"""By the depth of the tile, the right one first."""
BODIES = {
    "crash": "*(volatile int*)8 = 1;",
    "hang": "for (volatile int i = 0;; i = 1 - i) {}",
    "empty": "",
}


def fault_of(config: GemmConfig) -> str:
    return FAULTS.get(config.tile[2], "")


class PlantedGemm(GemmOperation):
    def candidates(self, problem: GemmProblem, device: DeviceInfo) -> Sequence[GemmConfig]:
        first = next(item for item in super().candidates(problem, device) if item.waves == 1 and item.tile[2] >= 512)
        found = [first.replace(tile=(*first.tile[:2], depth)) for depth in FAULTS]
        assert all(self.rules.allows(config, device.arch) for config in found)
        return found

    def generate(self, config: GemmConfig, arch: ArchSpec) -> SourceUnit:
        unit = super().generate(config, arch)
        fault = fault_of(config)
        if fault == "broken":
            return dataclasses.replace(unit, text=unit.text + "\n#error planted by the test\n")
        if fault in BODIES:
            body = 'extern "C" __attribute__((visibility("default"))) void planted(const void*, void*)'
            text = f"{unit.text}\n{body} {{ {BODIES[fault]} }}\n"
            return dataclasses.replace(unit, text=text, entries=dict.fromkeys(unit.entries, "planted"))
        return unit

    def plan(self, problem: GemmProblem, config: GemmConfig, device: DeviceInfo) -> ExecutionPlan:
        if fault_of(config) == "off":
            problem = dataclasses.replace(problem, alpha=1.01)
        return super().plan(problem, config, device)


@hookimpl
def tilewright_operations() -> Sequence[Operation[Any, Any]]:
    return (PlantedGemm(),)
