"""Steps on accumulators before they are stored: the operands and steps of a request, checked."""

from __future__ import annotations

from typing import Any

from tilewright_grouped_conv.problem.attributes import Attributes
from tilewright_grouped_conv.problem.layout import VectorView, image_view, vector_view
from tilewright_grouped_conv.problem.operands import Tensors
from tilewright_grouped_conv.problem.sizes import ConvGeometry
from tilewright_grouped_conv.vocabulary import Direction, Scale
from tilewright_kit.requests.attributes import refuse
from tilewright_kit.requests.operands import binary_step, check_epilogue_dtype, check_exact_integers
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.tensor import TensorDesc
from tilewright_kit.types.vocabulary import Binary, Unary, epilogue_dtypes

__all__ = ["read_epilogue"]


def read_epilogue(
    tensors: Tensors, attributes: Attributes, geometry: ConvGeometry, direction: Direction, output: TensorDesc
) -> tuple[dict[str, Any], dict[str, TensorDesc], TensorDesc]:
    """The epilogue's fields of a problem, all inputs in binding order, and the output.

    Raises ``InvalidArgumentError``.
    """
    names = tensors.names
    a = tensors.inputs[names.first].dtype
    operation = f"a convolution of {a}"
    channels = geometry.c if direction is Direction.BACKWARD_DATA else geometry.k
    inputs = {name: tensors.inputs[name] for name in (names.first, names.second)}
    found: dict[str, Any] = {"binary": binary_step(attributes.binary, len(tensors.d)), "scale_view": None}
    if "bias" in tensors.inputs:
        bias = inputs["bias"] = tensors.inputs["bias"]
        check_epilogue_dtype("bias", bias, epilogue_dtypes(a), operation)
        found["bias"] = _vector("bias", bias, channels, geometry.groups, "bias_shape", scalar=False)
        found["dtype_bias"] = bias.dtype
    views = []
    for index, desc in enumerate(tensors.d):
        name = f"d[{index}]"
        inputs[name] = desc
        check_epilogue_dtype(name, desc, epilogue_dtypes(a), operation)
        _same_shape(name, desc, names.output, output.shape)
        views.append(image_view(name, desc.shape, desc.strides, geometry.groups))
    found |= {"d": tuple(views), "dtype_d": tuple(desc.dtype for desc in tensors.d)}
    if "scale" in tensors.inputs:
        scale = inputs["scale"] = tensors.inputs["scale"]
        check_epilogue_dtype("scale", scale, (DType.FP32,), operation)
        view = _vector("scale", scale, channels, geometry.groups, "scale_shape", scalar=True)
        found["scale_view"] = view
        found["scale"] = Scale.CHANNEL if view.g or view.c else Scale.TENSOR
    if attributes.accumulate:
        inputs["acc"] = _accumulated(tensors, output)
    elif "acc" in tensors.inputs:
        raise refuse(
            "acc is given, but nothing says that it is to be added",
            "acc",
            "",
            "acc_without_accumulate",
            "set accumulate=True, or leave acc out",
        )
    check_exact_integers(
        output.dtype,
        (
            ("attributes.alpha", attributes.alpha, attributes.alpha != 1.0),
            ("scale", "", "scale" in inputs),
            ("attributes.unary", attributes.unary.value, attributes.unary is not Unary.NONE),
            ("bias", "", "bias" in inputs),
            ("d", "", found["binary"] is not Binary.NONE),
        ),
    )
    return found, inputs, output


def _vector(name: str, desc: TensorDesc, channels: int, groups: int, rule: str, scalar: bool) -> VectorView:
    """One value per channel, or (``scalar``) one for all."""
    if scalar and desc.shape in ((), (1,)):
        return VectorView(name, 0, 0)
    if desc.shape != (channels,):
        forms = f"[{channels}]" + (" or [] for one value" if scalar else "")
        raise refuse(
            f"{name} has shape {list(desc.shape)}, but the result has {channels} channels",
            f"{name}.shape",
            desc.shape,
            rule,
            f"give it the shape {forms}",
        )
    return vector_view(name, channels, desc.strides[0], groups)


def _same_shape(name: str, desc: TensorDesc, output: str, shape: tuple[int, ...]) -> None:
    if desc.shape != shape:
        raise refuse(
            f"{name} has shape {list(desc.shape)}, but {output} has {list(shape)}",
            f"{name}.shape",
            desc.shape,
            "operand_shape",
            f"give it the shape {list(shape)}; what repeats may have strides of zero",
        )


def _accumulated(tensors: Tensors, output: TensorDesc) -> TensorDesc:
    name = tensors.names.output
    if "acc" not in tensors.inputs:
        raise refuse(
            "accumulate is set, but there is nothing to add to",
            "acc",
            "",
            "operand_missing",
            f"give acc, of {name}'s shape: the very memory of {name} will do",
        )
    acc = tensors.inputs["acc"]
    _same_shape("acc", acc, name, output.shape)
    if acc.dtype != output.dtype:
        raise refuse(
            f"acc is {acc.dtype}, but {name} is {output.dtype}",
            "acc.dtype",
            acc.dtype.value,
            "epilogue_dtype",
            f"convert acc to {output.dtype}, or set out_dtype={acc.dtype}",
        )
    wanted, have = (
        [stride for size, stride in zip(desc.shape, desc.strides, strict=True) if size > 1] for desc in (output, acc)
    )
    if wanted != have and output.size:
        raise refuse(
            f"acc has the strides {list(acc.strides)}, but {name} {list(output.strides)}",
            "acc.strides",
            acc.strides,
            "acc_strides",
            f"give acc and {name} the same strides, or leave {name} out",
        )
    return acc
