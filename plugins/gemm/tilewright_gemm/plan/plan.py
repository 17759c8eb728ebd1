"""Stages of a problem with a kernel.

The argument block of a CPU kernel is ``tw_gemm_args`` of ``tilewright/core/args/gemm.h``, field for field; a test
compares the two. Launches on GPUs are in ``launch/geometry``.
"""

from __future__ import annotations

from dataclasses import replace

from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.config.packing import VectorFormat, packing_of
from tilewright_gemm.footprint.cpu import workspace_bytes
from tilewright_gemm.launch.geometry import alignments, gpu_parts
from tilewright_gemm.launch.kernel_args import bare_row, problem_row
from tilewright_gemm.launch.pack_b import hip_pack_stage
from tilewright_gemm.problem.problem import GemmProblem, PackBProblem, Product, View
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import I64, WORKSPACE, ExecutionPlan, Geometry, Pointer, Stage, Struct, Table
from tilewright_kit.contract.problem import Operand, Role
from tilewright_kit.tiles.footprint.cpu import slices
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["plan_gemm", "plan_pack_b"]


def plan_gemm(problem: GemmProblem, config: GemmConfig, device: DeviceInfo) -> ExecutionPlan:
    """Stages: one for a product, a batch or a group; none if nothing is to be written. Split-K takes two on a CPU: the
    slices, then their sum in a fixed order.
    """
    products = tuple(product for product in problem.products if not product.is_empty)
    # All slices of a cluster run, even those that a short K leaves empty.
    split = slices(problem.k, config.split_k, config.tile[2]) if config.cluster[2] == 1 else config.split_k
    nbytes = workspace_bytes(config, products, split) if products and device.arch.kind == "cpu" else 0
    notes = _notes(problem, config, split)
    if device.arch.kind != "cpu":
        plan = _plan(problem, device, notes)
        details = {**plan.details, "alignment": alignments(problem, config, device.arch)}
        return replace(plan, details=details, **gpu_parts(problem, products, config, device, split))
    rows = tuple(problem_row(problem, product) for product in products)
    args = Struct((Table(rows), I64(len(rows)), Pointer(WORKSPACE) if nbytes else Pointer(), I64(nbytes), I64(split)))
    geometry = Geometry(team=config.waves)
    roles = ("partial", "reduce") if split > 1 else ("main",)
    stages = tuple(Stage(role, config, role, args, geometry) for role in roles) if rows else ()
    return replace(_plan(problem, device, notes), stages=stages, workspace_bytes=nbytes)


def _plan(problem: GemmProblem, device: DeviceInfo, notes: tuple[str, ...]) -> ExecutionPlan:
    """The part of a plan that does not depend on the kind of device."""
    return ExecutionPlan(
        operation=problem.operation,
        arch=device.arch.id,
        operands=problem.operands,
        stages=(),
        notes=notes,
        flops=problem.flops,
        bytes_moved=problem.bytes_moved,
        details={"in_place": _in_place(problem)},
    )


def _notes(problem: GemmProblem, config: GemmConfig, split: int) -> tuple[str, ...]:
    notes = []
    if config.split_k > 1 and split != config.split_k:
        notes.append(f"K = {problem.k} gives {split} slices of whole tiles, not {config.split_k}")
    if problem.dtype_acc == DType.INT32 and problem.k > 2**31 // 128**2:
        notes.append(f"K = {problem.k}: sums of int8 products may wrap around in int32")
    return tuple(notes)


def _in_place(problem: GemmProblem) -> list[list[str]]:
    """(output, D operand) pairs that may be one tensor: an element of D is read just before its own place in the output
    is written, and by nobody else.
    """
    outputs = {item.name[4:].partition("]")[0]: item for item in problem.operands if item.role is Role.OUTPUT}
    pairs = []
    for item in problem.operands:
        kind, _, rest = item.name.partition("[")
        out = outputs.get(rest.partition("]")[0] if problem.grouped else "")
        if kind in ("c", "d") and item.role is Role.INPUT and out is not None and out.desc == item.desc:
            pairs.append([out.name, item.name])
    return pairs


def plan_pack_b(problem: PackBProblem, config: GemmConfig, device: DeviceInfo) -> ExecutionPlan:
    """One stage that packs B. The plan's output operand states the format and its size."""
    packing = packing_of(config, device.arch)
    operands = []
    for operand in problem.operands:
        desc = operand.desc
        if operand.role is Role.OUTPUT:
            nbytes = packing.nbytes(problem.k, problem.n)
            desc = TensorDesc(desc.dtype, desc.shape, desc.strides, packing=str(packing), packed_bytes=nbytes)
        operands.append(Operand(operand.name, desc, operand.role))
    out = next(operand for operand in operands if operand.role is Role.OUTPUT)
    if isinstance(packing, VectorFormat):
        stage = hip_pack_stage(problem, config, packing, out.name)
    else:
        product = Product(0, problem.n, problem.k, 1, View("", 0, 0), problem.b, View(out.name, 0, 0))
        row = bare_row(problem.layout, product, (1, problem.dtype_b.bytes, 1))
        args = Struct((Table((row,)), I64(1), Pointer(), I64(0), I64(1)))
        stage = Stage("pack_b", config, "pack_b", args, Geometry(team=config.waves))
    return ExecutionPlan(
        operation=problem.operation,
        arch=device.arch.id,
        operands=tuple(operands),
        stages=() if problem.is_empty else (stage,),
        bytes_moved=problem.k * problem.n * problem.dtype_b.bytes + out.desc.packed_bytes,
    )
