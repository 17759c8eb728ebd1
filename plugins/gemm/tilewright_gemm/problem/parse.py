"""Problems of requests: every check that a caller's mistake can fail, each with field, value, rule and fix."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilewright_gemm.config.block_scales import SCALES, columns_of_block
from tilewright_gemm.config.int4 import is_int4
from tilewright_gemm.config.packing import Packing, parse_packing
from tilewright_gemm.problem.attributes import Attributes, read_attributes, refuse
from tilewright_gemm.problem.block_scales import check_block_scales
from tilewright_gemm.problem.int4 import check_int4, int4_output, no_zeros
from tilewright_gemm.problem.layout import broadcast_shapes
from tilewright_gemm.problem.narrow import narrow_scales, stored_values
from tilewright_gemm.problem.operands import Group, read_groups
from tilewright_gemm.problem.problem import GemmProblem, Product, View
from tilewright_gemm.problem.products import products_of, slots_of
from tilewright_gemm.vocabulary import (
    BFormat,
    Binary,
    ScaleA,
    ScaleB,
    ScaleBlock,
    Unary,
    default_output,
    epilogue_dtypes,
    output_dtypes,
)
from tilewright_kit.contract.problem import Operand, OperationRequest, Role
from tilewright_kit.requests.operands import (
    binary_step,
    check_dtype_agrees,
    check_epilogue_dtype,
    check_exact_integers,
    check_output,
    check_pair,
    in_order,
)
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.tensor import MAX_ELEMENTS, TensorDesc

__all__ = ["parse_gemm"]

_VECTORS = ("bias", "scale_a", "scale_b", "zero_b")


@dataclass(frozen=True, slots=True)
class _Parsed:
    """One group, checked: its signature, its products, and the layouts that would describe A and B."""

    dtypes: tuple[DType, DType, DType]
    dtype_bias: DType | None
    dtype_d: tuple[DType, ...]
    binary: Binary
    packing: Packing | None
    scales: tuple[ScaleA, ScaleB]
    """The kinds of scales of blocks, and of a B of packed weights; none, if there are others or none."""
    a_layouts: str
    b_layouts: str
    products: tuple[Product, ...]
    tensors: tuple[Operand, ...]


def parse_gemm(request: OperationRequest) -> GemmProblem:
    """Check a GEMM request and infer what it left out. Raises ``InvalidArgumentError``, never anything else."""
    attributes = read_attributes(request.attributes)
    groups, grouped = read_groups(request, attributes.groups)
    parsed = [_parse_group(group, attributes) for group in groups]
    first = parsed[0]
    for index, other in enumerate(parsed[1:], 1):
        _require_same_signature(first, other, index)
    layout = _common(parsed, "a") + _common(parsed, "b") + "r"
    products = tuple(product for item in parsed for product in item.products)
    scale_a, scale_b = _scale_kinds(products, first.scales)
    _check_integer_output(first, attributes, scale_a, scale_b)
    tensors = tuple(operand for item in parsed for operand in item.tensors)
    return GemmProblem(
        dtype_a=first.dtypes[0],
        dtype_b=first.dtypes[1],
        dtype_c=first.dtypes[2],
        layout=layout,
        products=products,
        tensors=tuple(sorted(tensors, key=lambda operand: operand.role is Role.OUTPUT)),
        grouped=grouped or len(products) > 1,
        packing=first.packing,
        alpha=attributes.alpha,
        binary=first.binary,
        unary=attributes.unary,
        clamp_lo=attributes.clamp_lo,
        clamp_hi=attributes.clamp_hi,
        dtype_bias=first.dtype_bias,
        dtype_d=first.dtype_d,
        scale_a=scale_a,
        scale_b=scale_b,
        split_k=attributes.split_k,
        alignment=attributes.alignment,
        fast_accumulation=attributes.fast_accumulation,
    )


# ---- one group ----


def _parse_group(group: Group, attributes: Attributes) -> _Parsed:
    a_name, a = _matrix(group, "a")
    b_name, b = _matrix(group, "b")
    if a.packing:
        raise refuse(
            "only B may be packed", f"{a_name}.packing", a.packing, "packed_operand", "pass a as a plain tensor"
        )
    stored = {"a": a, "b": b}
    a, b = stored_values(group, attributes, a, b)
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    scales = (ScaleA.NONE, ScaleB.NONE)
    if (block := attributes.scale_block) is not ScaleBlock.NONE:
        scales = narrow_scales(attributes, SCALES[block])
    int4 = attributes.b_format is BFormat.INT4
    if int4:
        scales = (ScaleA.NONE, check_int4(group, block, a, b))
    else:
        no_zeros(group)
        check_pair("GEMM", a.dtype, b_name, b.dtype, "b")
    if not int4 and b.shape[-2] != k:
        raise refuse(
            f"{a_name} has {k} columns but {b_name} has {b.shape[-2]} rows",
            f"{b_name}.shape",
            b.shape,
            "k_mismatch",
            "make the last dimension of a equal to the second-to-last of b (transpose one of them?)",
        )
    if not int4 and block is not ScaleBlock.NONE:
        check_block_scales(group.inputs, block, a, b)
    batch = broadcast_shapes([(a_name, a.shape[:-2]), (b_name, b.shape[:-2])])
    out_name, out = _output(group, attributes, (*batch, m, n), a.dtype, int4)
    packing = _packed_b(b_name, b)
    binary, d = _binary(group, attributes)
    descs = {"a": a, "b": b, "out": out} | {name: group.inputs[name][1] for name in _VECTORS if name in group.inputs}
    names = {"a": a_name, "b": b_name, "out": out_name} | {
        name: group.inputs[name][0] for name in _VECTORS if name in group.inputs
    }
    for index, (d_name, desc) in enumerate(d):
        descs[f"d{index}"], names[f"d{index}"] = desc, d_name
    checked = ("a", "b", "out", *(("scale_b", "zero_b") if int4 else ()))
    checked += ("scale_a", "scale_b") if columns_of_block(scales[1]) else ()
    for key in descs:
        if key not in checked:
            _check_epilogue_dtype(names[key], key, descs[key], a.dtype)
    slots = slots_of(names, descs, batch, (m, n, k), scales[1])
    products, a_layouts, b_layouts = products_of(names, slots, batch, (m, n, k), packing, len(d), out, int4)
    given = descs | stored
    inputs = [Operand(names[key], desc, Role.INPUT) for key, desc in given.items() if key != "out"]
    return _Parsed(
        dtypes=(a.dtype, a.dtype if int4 else b.dtype, out.dtype),
        dtype_bias=descs["bias"].dtype if "bias" in descs else None,
        dtype_d=tuple(desc.dtype for _, desc in d),
        binary=binary,
        packing=packing,
        scales=scales,
        a_layouts=a_layouts,
        b_layouts=b_layouts,
        products=products,
        tensors=(*inputs, Operand(out_name, out, Role.OUTPUT)),
    )


def _matrix(group: Group, base: str) -> tuple[str, TensorDesc]:
    if base not in group.inputs:
        raise refuse(f"the input {base} is missing", base, "", "operand_missing", f"give the matrix {base}")
    name, desc = group.inputs[base]
    if len(desc.shape) < 2:
        raise refuse(
            f"{name} has {len(desc.shape)} dimensions; a matrix needs at least two",
            f"{name}.shape",
            desc.shape,
            "matrix_rank",
            "reshape a vector of n elements to [1, n] or [n, 1]",
        )
    return name, desc


def _output(
    group: Group, attributes: Attributes, shape: tuple[int, ...], dtype_a: DType, int4: bool
) -> tuple[str, TensorDesc]:
    wanted = attributes.out_dtype
    own = int4_output(dtype_a) if int4 else default_output(dtype_a)
    if group.out is None:
        name = "out" + group.inputs["a"][0][1:]
        if math.prod(shape) > MAX_ELEMENTS:
            raise refuse(
                "the result has more than 2**48 elements",
                f"{name}.shape",
                shape,
                "tensor_overflow",
                "split the problem",
            )
        desc = TensorDesc.of(wanted or own, shape)
    else:
        name, desc = group.out
        if desc.packing:
            raise refuse(
                f"{name} cannot be packed", f"{name}.packing", desc.packing, "packed_operand", "give a plain output"
            )
        check_output(name, desc, shape, "product")
        check_dtype_agrees(name, desc, wanted)
    if desc.dtype not in output_dtypes(dtype_a):
        raise refuse(
            f"a GEMM of {dtype_a} cannot write {desc.dtype}",
            f"{name}.dtype",
            desc.dtype.value,
            "output_dtype",
            f"use one of: {', '.join(output_dtypes(dtype_a))}",
        )
    return name, desc


def _packed_b(name: str, b: TensorDesc) -> Packing | None:
    if not b.packing:
        return None
    packing = parse_packing(b.packing, name)
    if len(b.shape) != 2:
        raise refuse(
            f"packed {name} has {len(b.shape)} dimensions",
            f"{name}.shape",
            b.shape,
            "packed_rank",
            "pack every matrix on its own and use groups",
        )
    needed = packing.nbytes(*b.shape)
    if b.packed_bytes != needed:
        raise refuse(
            f"packed {name} holds {b.packed_bytes} bytes, but {list(b.shape)} in this format fills {needed}",
            f"{name}.packed_bytes",
            b.packed_bytes,
            "packed_size",
            "pass the shape that the matrix had when it was packed",
        )
    return packing


def _binary(group: Group, attributes: Attributes) -> tuple[Binary, list[tuple[str, TensorDesc]]]:
    """The canonical binary step (``MultiD`` forms only for two or more D) and its operands, the addend ``c`` last."""
    d = in_order(group.d)
    given = attributes.binary
    if "c" in group.inputs:
        if given not in (None, Binary.ADD, Binary.MULTI_D_ADD) and (d or given is not Binary.NONE):
            raise refuse(
                f"c is added, which does not go together with {given}",
                "attributes.binary",
                given.value,
                "one_binary_step",
                "use binary=MultiDAdd, or leave c out",
            )
        given = None
        d.append(group.inputs["c"])
    return binary_step(given, len(d)), d


def _check_epilogue_dtype(name: str, key: str, desc: TensorDesc, dtype_a: DType) -> None:
    allowed = (DType.FP32,) if key.startswith("scale") else epilogue_dtypes(dtype_a)
    if desc.packing:
        raise refuse(
            f"{name} cannot be packed", f"{name}.packing", desc.packing, "packed_operand", "give a plain tensor"
        )
    check_epilogue_dtype(name, desc, allowed, f"a GEMM of {dtype_a}")


# ---- all groups together ----


def _require_same_signature(first: _Parsed, other: _Parsed, index: int) -> None:
    for what in ("dtypes", "dtype_bias", "dtype_d", "binary", "packing", "scales"):
        if getattr(first, what) != getattr(other, what):
            raise refuse(
                f"group {index} differs from group 0 in its {what}",
                f"a[{index}]",
                str(getattr(other, what)),
                "group_signature",
                "all groups of a call share element types, bias, D operands and format of b; make two calls",
            )
    if {view is None for item in (first, other) for product in item.products for view in (product.scale_a,)} == {
        True,
        False,
    }:
        raise refuse(
            f"group {index} differs from group 0 in scale_a",
            f"scale_a[{index}]",
            "",
            "group_signature",
            "give scale_a for all groups or for none",
        )
    if {view is None for item in (first, other) for product in item.products for view in (product.scale_b,)} == {
        True,
        False,
    }:
        raise refuse(
            f"group {index} differs from group 0 in scale_b",
            f"scale_b[{index}]",
            "",
            "group_signature",
            "give scale_b for all groups or for none",
        )


def _common(parsed: list[_Parsed], which: str) -> str:
    choices: list[str] = [item.a_layouts if which == "a" else item.b_layouts for item in parsed]
    for letter in choices[0]:
        if all(letter in others for others in choices):
            return letter
    index = next(index for index, others in enumerate(choices) if not set(others) & set(choices[0]))
    raise refuse(
        f"{which} is row-major in one group and column-major in another",
        f"{which}[{index}].strides",
        choices[index],
        "group_layout",
        "give all groups the same layout, or make two calls",
    )


def _scale_kinds(products: tuple[Product, ...], scales: tuple[ScaleA, ScaleB]) -> tuple[ScaleA, ScaleB]:
    if is_int4(scales[1]):
        return ScaleA(_scale_kind(products, "scale_a", "row")), scales[1]
    if columns_of_block(scales[1]):
        return scales
    return ScaleA(_scale_kind(products, "scale_a", "row")), ScaleB(_scale_kind(products, "scale_b", "column"))


def _scale_kind(products: tuple[Product, ...], which: str, vector: str) -> str:
    views: list[View | None] = [getattr(product, which) for product in products]
    if views[0] is None:
        return "none"
    return vector if any(view is not None and (view.row_stride or view.col_stride) for view in views) else "tensor"


def _check_integer_output(parsed: _Parsed, attributes: Attributes, scale_a: ScaleA, scale_b: ScaleB) -> None:
    check_exact_integers(
        parsed.dtypes[2],
        (
            ("attributes.alpha", attributes.alpha, attributes.alpha != 1.0),
            ("scale_a", "", scale_a is not ScaleA.NONE),
            ("scale_b", "", scale_b is not ScaleB.NONE),
            ("attributes.unary", attributes.unary.value, attributes.unary is not Unary.NONE),
            ("bias", "", parsed.dtype_bias is not None),
            ("d" if parsed.binary is not Binary.ADD else "c", "", parsed.binary is not Binary.NONE),
        ),
    )
