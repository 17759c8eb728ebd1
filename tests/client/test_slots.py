"""What tensors in device memory a plan takes: those that lie as planned, whatever is said of dimensions of one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import tilewright as tw
from tilewright.dispatch.operands.slots import Slot
from tilewright.types.spec import Spec


def tensor(*args: Any) -> Any:
    return SimpleNamespace(spec=Spec.of(*args))


def slot(*args: Any) -> Slot:
    spec = Spec.of(*args)
    assert spec.strides is not None
    return Slot("dw", spec, tuple(stride * spec.dtype.itemsize for stride in spec.strides))


@pytest.mark.parametrize("strides", [(9, 1, 3, 1), (9, 9, 3, 1), (9, 0, 3, 1), None])
def test_strides_of_dimensions_of_one_do_not_matter(strides: tuple[int, ...] | None) -> None:
    slot((96, 1, 3, 3), "fp16", (9, 1, 3, 1)).check_tensor(tensor((96, 1, 3, 3), "fp16", strides))


@pytest.mark.parametrize(
    "args",
    [
        ((96, 1, 3, 3), "fp16", (9, 1, 1, 3)),
        ((96, 1, 3, 3), "bf16", (9, 1, 3, 1)),
        ((95, 1, 3, 3), "fp16", (9, 1, 3, 1)),
    ],
)
def test_other_tensors_are_refused(args: tuple[Any, ...]) -> None:
    with pytest.raises(tw.InvalidArgumentError) as caught:
        slot((96, 1, 3, 3), "fp16", (9, 1, 3, 1)).check_tensor(tensor(*args))
    assert caught.value.field == "dw"
    assert caught.value.fix
