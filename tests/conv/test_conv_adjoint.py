"""The three directions are one linear map seen from three sides: <conv(x, w), dy> = <x, dx(dy, w)> = <w, dw(x, dy)>.

The reference and the kernels are held to it alike: the reference computes no direction from another.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from conv_cases import FIRST, LAST, SMALL, Case
from conv_runner import Array, ConvRunner
from conv_truth import CONVS, planned
from sampling import partly

from tilewright_grouped_conv.problem.layout import Order
from tilewright_grouped_conv.vocabulary import Direction
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.types.dtypes import DType

FWD, DATA, WEIGHT = Direction


def tensors(case: Case, dtype: str, seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    shapes = case.shapes()
    kind = DType(dtype).numpy
    return {name: rng.standard_normal(shapes[name]).astype(np.float32).astype(kind) for name in ("x", "w", "dy")}


def inner(a: Array, b: Array) -> float:
    return float(np.vdot(np.asarray(a, np.float64), np.asarray(b, np.float64)))


def size(a: Array, b: Array) -> float:
    return float(np.linalg.norm(np.asarray(a, np.float64)) * np.linalg.norm(np.asarray(b, np.float64)))


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_the_reference_is_its_own_adjoint(device: DeviceInfo, case: Case) -> None:
    given = tensors(case, "fp32", 1)
    results = {}
    for direction in Direction:
        request = case.request(direction, "fp32")
        operation = CONVS[request.operation]
        results |= operation.reference(operation.parse(request), {name: given[name] for name in request.inputs})
    left, *rights = inner(results["y"], given["dy"]), inner(given["x"], results["dx"]), inner(given["w"], results["dw"])
    for right in rights:
        assert abs(left - right) <= 1e-11 * size(results["y"], given["dy"])


@pytest.mark.parametrize(
    ("case", "dtype", "order"),
    partly(
        itertools.product((SMALL[0], SMALL[3], SMALL[4], SMALL[5], SMALL[10]), ("fp32", "fp16", "bf16"), (LAST, FIRST)),
        lambda case: {case[:2], case[1:], (case[0], case[2])},
    ),
    ids=str,
)
def test_kernels_are_adjoint_to_one_another(
    conv_runner: ConvRunner, device: DeviceInfo, case: Case, dtype: str, order: Order
) -> None:
    given = tensors(case, dtype, 2)
    results = {}
    for direction in Direction:
        item = planned(case.request(direction, dtype, order), device)
        inputs = {
            name: given[name] for name in ("x", "w", "dy") if any(op.name == name for op in item.problem.operands)
        }
        results[item.output] = conv_runner.run(item.plan, inputs)[item.output].view
    left = inner(results["y"], given["dy"])
    # Rounding errors of the results are independent of the other factor: their product grows with the norms.
    allowed = {"fp32": 2e-6, "fp16": 2e-3, "bf16": 1.5e-2}[dtype]
    for name, other in (("dx", "x"), ("dw", "w")):
        right = inner(given[other], results[name])
        assert abs(left - right) <= allowed * max(size(results["y"], given["dy"]), size(results[name], given[other]))
