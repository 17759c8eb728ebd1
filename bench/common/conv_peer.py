"""Convolutions in memory: cases as arrays that both contenders read, and what PyTorch makes of the same arrays.

Import this only in a process that was started with ``timing.peer_environment``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from common import local, peers
from tilewright_grouped_conv.commands.cases import ConvCase
from tilewright_grouped_conv.commands.family import CONV
from tilewright_kit.contract.problem import OperationRequest, Role
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["DIRECTIONS", "Convolution", "kind_of", "peer", "peer_tensors", "relative", "truth"]

DIRECTIONS = {"fwd": "forward", "bwd_data": "backward data", "bwd_weight": "backward weight"}


def kind_of(case: ConvCase) -> str:
    """Facts that decide which kernels a case has."""
    if case.groups > 1:
        return "depthwise" if case.groups == case.c else "grouped"
    if case.ndim == 3:
        return "3D"
    if case.c <= 4:
        return "first layer"
    return "pointwise" if set(case.filters) == {1} else "dense"


@dataclass(frozen=True)
class Convolution:
    """A case, its request with the output described, and memory for every operand."""

    case: ConvCase
    request: OperationRequest
    arrays: Mapping[str, peers.Array]
    output: str

    @classmethod
    def of(cls, here: local.Local, case: ConvCase) -> Convolution:
        """Random operands, each in memory that begins at a page; the output is poisoned."""
        request = case.request()
        arrays, described = {}, {}
        for seed, item in enumerate(here.engine.operations[request.operation].parse(request).operands):
            arrays[item.name] = array = strided(item.desc)
            if item.role is Role.OUTPUT:
                array[...] = np.nan
                described[item.name] = item.desc
            else:
                array[...] = peers.random(item.desc.shape, item.desc.dtype.value, seed)
        (output,) = described
        return cls(case, replace(request, outputs=described), arrays, output)

    def ours(self, here: local.Local, kernel: str = "") -> local.Product:
        return here.product(self.request, self.arrays, kernel)


def strided(desc: TensorDesc) -> peers.Array:
    """Zeros with the description's strides, which leave no holes."""
    dtype = np.dtype(peers.NUMPY_DTYPES[desc.dtype.value])
    flat = local.aligned((desc.nbytes // dtype.itemsize,), dtype)
    return np.lib.stride_tricks.as_strided(flat, desc.shape, [step * dtype.itemsize for step in desc.strides])


def peer_tensors(torch: Any, item: Convolution) -> dict[str, Any]:
    """The same memory, as PyTorch sees it."""
    return {
        name: torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        if item.case.dtype == "bf16"
        else torch.from_numpy(array)
        for name, array in item.arrays.items()
        if name != item.output
    }


def peer(torch: Any, item: Convolution) -> Callable[[], Any]:
    """PyTorch's convolution or gradient of the same memory."""
    call: Callable[[], Any] = CONV.peer_call(torch, item.case, peer_tensors(torch, item))
    return call


def truth(torch: Any, item: Convolution) -> Any:
    """The result in float64."""
    operands = {name: tensor.double() for name, tensor in peer_tensors(torch, item).items()}
    return CONV.peer_call(torch, item.case, operands)()


def relative(got: Any, want: Any) -> float:
    """The relative error in norm; not a number where the result is not."""
    want = want.double()
    return float((got.double() - want).norm() / want.norm())
