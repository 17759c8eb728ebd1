"""Units of a GPU that have no tile in the last round, for the best candidate of each of many products: all that
Stream-K could win. Needs no GPU: ``python bench/lab/idle_units.py --arch gfx942 --units 304``.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import statistics

import tilewright_arch
from tilewright_gemm.plugin import GemmOperation
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.tensor import TensorDesc

ROWS = (512, 1024, 1536, 2048, 3072, 4096, 5120, 8192)
COLUMNS = (1024, 2048, 3072, 4096, 5120, 8192, 11008)
DEPTHS = (1024, 4096)


def idle(m: int, n: int, k: int, device: DeviceInfo) -> float:
    """Part of the units' time that the best candidate leaves unused: uneven tiles, and rounds that are not full."""
    operation = GemmOperation()
    inputs = {"a": TensorDesc.of("fp16", (m, k)), "b": TensorDesc.of("fp16", (k, n), (1, k))}
    problem = operation.parse(OperationRequest("gemm", inputs, {}, {}))
    best = 0.0
    for config in operation.candidates(problem, device):
        tiles = math.ceil(m / config.tile[0]) * math.ceil(n / config.tile[1]) * max(config.split_k, 1)
        work = m * n * max(config.split_k, 1) / (config.tile[0] * config.tile[1])
        best = max(best, work / (math.ceil(tiles / device.units) * device.units))
    return 1 - best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", default="gfx942")
    parser.add_argument("--units", type=int, default=304, help="compute units of the device")
    given = parser.parse_args()
    device = dataclasses.replace(device_of(tilewright_arch.load(given.arch)), units=given.units)
    found = sorted((idle(*sizes, device), sizes) for sizes in itertools.product(ROWS, COLUMNS, DEPTHS))
    lost = [part for part, _ in found]
    print(
        f"{len(lost)} products in fp16: median {statistics.median(lost):.1%}, nine in ten below "
        f"{lost[int(0.9 * len(lost))]:.1%}, most {lost[-1]:.1%} ({'x'.join(map(str, found[-1][1]))})"
    )


if __name__ == "__main__":
    main()
