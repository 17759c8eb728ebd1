"""Kernels compiled and run on this machine, compared with the reference: what is planned is what is computed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from gemm_runner import Memory, Runner, draw

from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.config.packing import PackedFormat
from tilewright_gemm.plugin import GemmOperation, PackBOperation
from tilewright_gemm.problem.problem import GemmProblem
from tilewright_gemm.references.reference import unpack
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import ExecutionPlan
from tilewright_kit.contract.problem import OperationRequest, Role
from tilewright_kit.numerics.compare import compare
from tilewright_kit.selection.strategies import Selector
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.tensor import TensorDesc

GEMM, PACK_B = GemmOperation(), PackBOperation()
PAIRS = [
    ("fp32", "fp32"),
    ("fp16", "fp16"),
    ("bf16", "bf16"),
    ("fp8", "fp8"),
    ("bf8", "bf8"),
    ("fp8", "bf8"),
    ("bf8", "fp8"),
    ("int8", "int8"),
]
LAYOUTS = ("rcr", "rrr", "crr", "ccr")


def matrix(dtype: str, rows: int, cols: int, letter: str, pad: int = 0, batch: tuple[int, ...] = ()) -> TensorDesc:
    """A matrix with a leading dimension ``pad`` larger than it need be."""
    lead = (cols if letter == "r" else rows) + pad
    strides = [lead, 1] if letter == "r" else [1, lead]
    step = lead * (rows if letter == "r" else cols)
    for size in reversed(batch):
        strides.insert(0, step)
        step *= size
    return TensorDesc.of(dtype, (*batch, rows, cols), tuple(strides))


def check(
    runner: Runner,
    device: DeviceInfo,
    request: OperationRequest,
    config: GemmConfig | None = None,
    team: int | None = None,
    seed: int = 0,
) -> ExecutionPlan:
    """Parse, select, plan, build, run and compare."""
    problem = GEMM.parse(request)
    chosen = config or selected(request, device)
    assert not GEMM.mismatches(problem, chosen, device)
    plan = GEMM.plan(problem, chosen, device)
    rng = np.random.default_rng(seed)
    inputs = {item.name: draw(rng, item.desc) for item in problem.operands if item.role is Role.INPUT}
    memory = runner.run(plan, inputs, team)
    truth = GEMM.reference(problem, inputs)
    for item in problem.operands:
        if item.role is Role.OUTPUT:
            k = max(product.k for product in problem.products)
            result = compare(memory[item.name].view, truth[item.name], item.desc.dtype, k, problem.dtype_acc)
            assert result.passed, f"{item.name} of {chosen.name}: {result}"
    return plan


def selected(request: OperationRequest, device: DeviceInfo) -> GemmConfig:
    """The kernel that the cost model picks."""
    config = Selector().select(GEMM, GEMM.parse(request), device).config
    assert isinstance(config, GemmConfig)
    return config


def blocked_by_two(request: OperationRequest, device: DeviceInfo, scheduler: str = "intrawave") -> GemmConfig:
    """The blocked kernel for a team of two: problems of this size would be given one thread."""
    candidates = GEMM.candidates(GEMM.parse(request), device)
    blocked = next(config for config in candidates if config.pipeline == "compv3")
    corrected = GEMM.rules.correct(blocked.replace(wave=(1, 2, 1), scheduler=scheduler), device.arch)
    assert corrected.is_valid and corrected.config.waves == 2 and corrected.config.scheduler == scheduler
    return corrected.config


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("a", "b"), PAIRS)
@pytest.mark.some(8)
@pytest.mark.extended
def test_every_type_and_layout_is_right_with_padded_leading_dimensions(
    runner: Runner, device: DeviceInfo, a: str, b: str, layout: str
) -> None:
    m, n, k = 61, 83, 147
    requests = {
        each: OperationRequest(
            "gemm",
            {"a": matrix(a, m, k, each[0], 3), "b": matrix(b, k, n, each[1], 5)},
            {"out": matrix("int32" if a == "int8" else "fp32", m, n, "r", 7)},
        )
        for each in LAYOUTS
    }
    kernels = {each: blocked_by_two(request, device) for each, request in requests.items()}
    runner.prepare(kernels.values())  # those of all layouts are built together
    check(runner, device, requests[layout], kernels[layout])


@pytest.mark.parametrize(
    "shape", [(1, 300, 200), (5, 129, 64), (200, 3, 70), (64, 64, 64), (33, 1, 500), (1, 1, 1), (7, 9, 0)]
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
@pytest.mark.some(6)
def test_the_kernel_that_the_cost_model_picks_is_right(
    runner: Runner, device: DeviceInfo, dtype: str, shape: tuple[int, int, int]
) -> None:
    m, n, k = shape
    check(runner, device, OperationRequest("gemm", {"a": matrix(dtype, m, k, "r"), "b": matrix(dtype, k, n, "c")}))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8", "fp16", "fp8"])
@pytest.mark.some(5)
def test_few_rows_and_few_columns_are_streamed_right(
    runner: Runner, device: DeviceInfo, dtype: str, layout: str
) -> None:
    # One kernel computes one, few, all and more rows than are held at a time; widths leave every kind of rest.
    stream = None
    for m, n, k in [(1, 619, 77), (2, 64, 33), (3, 83, 150), (4, 121, 1), (8, 1045, 66), (13, 57, 131), (1, 9001, 9)]:
        for rows, columns in ((m, n), (n, m)):
            inputs = {"a": matrix(dtype, rows, k, layout[0], 3), "b": matrix(dtype, k, columns, layout[1], 5)}
            request = OperationRequest("gemm", inputs)
            found = [item for item in GEMM.candidates(GEMM.parse(request), device) if item.pipeline == "mem"]
            tall = [item for item in found if (item.tile[0] > item.tile[1]) == (rows > columns)]
            stream = tall[-1]
            check(runner, device, request, stream, seed=m)
    assert stream is not None


def test_what_two_vectors_of_a_row_share_counts_once(runner: Runner, device: DeviceInfo) -> None:
    # The last vector of a row begins in the one before: an infinity that both hold must not be multiplied by zero.
    k = 77
    inputs = {"a": matrix("fp32", 1, k, "r"), "b": matrix("fp32", k, 40, "c")}
    problem = GEMM.parse(OperationRequest("gemm", inputs))
    stream = next(item for item in GEMM.candidates(problem, device) if item.pipeline == "mem")
    a, b = np.ones((1, k), np.float32), np.ones((k, 40), np.float32)
    b[62, 3] = np.inf
    found = runner.run(GEMM.plan(problem, stream, device), {"a": a, "b": b})["out"].view
    assert found[0, 3] == np.inf
    assert (np.delete(found, 3, 1) == k).all()


@pytest.mark.extended
def test_every_candidate_of_a_problem_is_right(runner: Runner, device: DeviceInfo) -> None:
    request = OperationRequest("gemm", {"a": matrix("fp32", 31, 90, "r"), "b": matrix("fp32", 90, 70, "r")})
    candidates = GEMM.candidates(GEMM.parse(request), device)
    assert {"mem", "compv1", "compv3"} <= {config.pipeline for config in candidates}
    runner.prepare(candidates)
    for config in candidates:
        check(runner, device, request, config)


@pytest.mark.parametrize("out", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "fp8", "int8"])
@pytest.mark.some(6)
def test_results_are_written_in_every_float_type(runner: Runner, device: DeviceInfo, dtype: str, out: str) -> None:
    inputs = {"a": matrix(dtype, 20, 65, "r"), "b": matrix(dtype, 65, 50, "c")}
    requests = {
        each: OperationRequest("gemm", inputs, {}, {"out_dtype": each, "alpha": 0.01})
        for each in ("fp32", "fp16", "bf16")
    }
    runner.prepare(selected(request, device) for request in requests.values())
    check(runner, device, requests[out])


UNARY = (
    "Relu", "Gelu", "FastGelu", "Silu", "Sigmoid", "Tanh", "HardSwish", "Clamp", "LeakyRelu", "Elu", "Softplus", "Mish",
)  # fmt: skip


@pytest.mark.parametrize("unary", UNARY)
def test_every_unary_step_is_right(runner: Runner, device: DeviceInfo, unary: str) -> None:
    inputs = {"a": matrix("fp32", 19, 30, "r"), "b": matrix("fp32", 30, 45, "c"), "bias": TensorDesc.of("fp32", (45,))}
    limits: dict[str, dict[str, float]] = {"Clamp": {"clamp_lo": -0.5, "clamp_hi": 1.25}, "Elu": {"slope": 1.5}}
    requests = {
        each: OperationRequest("gemm", inputs, {}, {"unary": each, "alpha": 0.25, **limits.get(each, {})})
        for each in UNARY
    }
    runner.prepare(selected(request, device) for request in requests.values())
    check(runner, device, requests[unary])


@pytest.mark.parametrize("binary", ["Add", "Multiply"])
@pytest.mark.parametrize("shape", [(19, 45), (1, 45), (19, 1), (45,), (1, 1)])
def test_d_operands_broadcast_rows_columns_and_scalars(
    runner: Runner, device: DeviceInfo, binary: str, shape: tuple[int, ...]
) -> None:
    inputs = {"a": matrix("fp32", 19, 30, "r"), "b": matrix("fp32", 30, 45, "c"), "d[0]": TensorDesc.of("fp32", shape)}
    check(runner, device, OperationRequest("gemm", inputs, {}, {"binary": binary}))


def test_several_d_operands_of_different_types_chain_with_a_unary_step(runner: Runner, device: DeviceInfo) -> None:
    inputs = {
        "a": matrix("bf16", 19, 30, "r"),
        "b": matrix("bf16", 30, 45, "c"),
        "bias": TensorDesc.of("bf16", (45,)),
        "d[0]": TensorDesc.of("fp32", (19, 45)),
        "d[1]": TensorDesc.of("fp16", (19, 1)),
        "d[2]": TensorDesc.of("bf16", (19, 45), (1, 19)),
    }
    for binary in ("MultiDAdd", "MultiDMultiply"):
        request = OperationRequest("gemm", inputs, {}, {"binary": binary, "unary": "Silu", "out_dtype": "fp32"})
        check(runner, device, request)


@pytest.mark.parametrize("a_scale", [(), (37,), (37, 1)])
@pytest.mark.parametrize("b_scale", [(1,), (41,), (1, 41)])
def test_scales_of_tensors_rows_and_columns(
    runner: Runner, device: DeviceInfo, a_scale: tuple[int, ...], b_scale: tuple[int, ...]
) -> None:
    inputs = {
        "a": matrix("int8", 37, 64, "r"),
        "b": matrix("int8", 64, 41, "c"),
        "scale_a": TensorDesc.of("fp32", a_scale),
        "scale_b": TensorDesc.of("fp32", b_scale),
    }
    check(runner, device, OperationRequest("gemm", inputs, {}, {"out_dtype": "bf16", "alpha": 0.001}))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((3, 20, 40), (3, 40, 33)),
        ((3, 20, 40), (1, 40, 33)),
        ((20, 40), (3, 40, 33)),
        ((2, 3, 20, 40), (3, 40, 33)),
        ((2, 1, 20, 40), (1, 3, 40, 33)),
        ((4, 1, 40), (40, 33)),
        ((0, 20, 40), (40, 33)),
    ],
)
def test_batches_broadcast_as_in_numpy(
    runner: Runner, device: DeviceInfo, a: tuple[int, ...], b: tuple[int, ...]
) -> None:
    inputs = {"a": TensorDesc.of("fp32", a), "b": TensorDesc.of("fp32", b), "bias": TensorDesc.of("fp32", (33,))}
    check(runner, device, OperationRequest("gemm", inputs))


def test_batches_of_heads_split_from_features_need_no_copy(runner: Runner, device: DeviceInfo) -> None:
    batch, heads, tokens, width = 2, 3, 17, 16
    split = (tokens * heads * width, width, heads * width, 1)
    inputs = {
        "a": TensorDesc.of("fp32", (batch, heads, tokens, width), split),
        "b": TensorDesc.of("fp32", (batch, heads, width, tokens), (split[0], split[1], 1, split[2])),
    }
    plan = check(runner, device, OperationRequest("gemm", inputs))
    assert len(plan.stages) == 1


@pytest.mark.parametrize("scheduler", ["intrawave", "interwave"])
@pytest.mark.extended
def test_groups_of_products_of_different_sizes_run_in_one_dispatch(
    runner: Runner, device: DeviceInfo, scheduler: str
) -> None:
    sizes = [(17, 33, 64), (1, 5, 3), (0, 8, 4), (70, 20, 0), (48, 100, 30)]
    inputs = {}
    for group, (m, n, k) in enumerate(sizes):
        inputs |= {f"a[{group}]": matrix("bf16", m, k, "r"), f"b[{group}]": matrix("bf16", k, n, "c")}
        inputs |= {f"bias[{group}]": TensorDesc.of("fp32", (n,)), f"d[{group}][0]": TensorDesc.of("fp32", (m, n))}
    request = OperationRequest("gemm", inputs, {}, {"unary": "Relu", "groups": len(sizes), "out_dtype": "fp32"})
    plan = check(runner, device, request, blocked_by_two(request, device, scheduler))
    assert [stage.role for stage in plan.stages] == ["main"]


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_split_k_adds_slices_in_a_fixed_order(runner: Runner, device: DeviceInfo, dtype: str) -> None:
    inputs = {
        "a": matrix(dtype, 24, 5000, "r"),
        "b": matrix(dtype, 5000, 40, "c"),
        "bias": TensorDesc.of("fp32", (40,)),
    }
    request = OperationRequest("gemm", inputs, {}, {"split_k": 3, "unary": "Relu", "out_dtype": "fp32"})
    plan = check(runner, device, request)
    assert [stage.role for stage in plan.stages] == ["partial", "reduce"]
    rng = np.random.default_rng(0)
    drawn = {item.name: draw(rng, item.desc) for item in plan.operands if item.role is Role.INPUT}
    first, second = (runner.run(plan, drawn)["out"].view.tobytes() for _ in range(2))
    assert first == second


@pytest.mark.extended
def test_threads_of_a_team_agree_with_one_alone(runner: Runner, device: DeviceInfo) -> None:
    request = OperationRequest("gemm", {"a": matrix("fp32", 150, 700, "r"), "b": matrix("fp32", 700, 130, "c")})
    problem = GEMM.parse(request)
    for config in GEMM.candidates(problem, device):
        if config.waves == 2:
            for team in (1, 2):
                check(runner, device, request, config, team)


@pytest.mark.parametrize("letter", ["r", "c"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "int8", "fp8"])
@pytest.mark.some(6)
def test_a_packed_b_serves_products_and_can_be_unpacked(
    runner: Runner, device: DeviceInfo, dtype: str, letter: str
) -> None:
    m, n, k = 40, 75, 130
    b = matrix(dtype, k, n, letter)
    packing = PACK_B.parse(OperationRequest("gemm_pack_b", {"b": b}, {}, {"m": m}))
    config = Selector().select(PACK_B, packing, device).config
    plan = PACK_B.plan(packing, config, device)  # type: ignore[arg-type]
    rng = np.random.default_rng(1)
    values = draw(rng, b)
    out = runner.run(plan, {"b": values})["out"]
    desc = next(item.desc for item in plan.operands if item.role is Role.OUTPUT)
    layout = PackedFormat.parse(desc.packing, "out")
    assert np.array_equal(unpack(out.view, layout, k, n), values.astype(np.float64))

    request = OperationRequest(
        "gemm", {"a": matrix(dtype, m, k, "r"), "b": desc}, {}, {"out_dtype": "fp32", "alpha": 0.5}
    )
    problem = GEMM.parse(request)
    candidates = GEMM.candidates(problem, device)
    assert candidates
    a = draw(rng, problem.operands[0].desc)
    truth = GEMM.reference(problem, {"a": a, "b": values})["out"]
    runner.prepare(candidates)
    for candidate in candidates:
        memory = runner.run(GEMM.plan(problem, candidate, device), {"a": a, "b": out.view})
        result = compare(memory["out"].view, truth, DType.FP32, k)
        assert result.passed, f"{candidate.name}: {result}"


@pytest.mark.parametrize(("dtype", "out"), [("fp32", "fp32"), ("fp32", "fp16"), ("int8", "int32"), ("bf16", "fp32")])
@pytest.mark.extended
def test_workspace_formulas_agree_with_the_kernels_own(
    runner: Runner, device: DeviceInfo, dtype: str, out: str
) -> None:
    shapes = [(5, 700, 3000), (300, 40, 1500), (1, 1, 1), (64, 64, 5000), (2000, 3000, 9000), (9000, 3, 50)]

    def problem_of(m: int, n: int, k: int, split: int) -> GemmProblem:
        inputs = {"a": matrix(dtype, m, k, "r"), "b": matrix(dtype, k, n, "c")}
        return GEMM.parse(OperationRequest("gemm", inputs, {}, {"out_dtype": out, "split_k": split}))

    candidates = GEMM.candidates(problem_of(32, 40, 50, 0), device)
    kinds = {(config.pipeline, config.tile[0] > config.tile[1], config.waves): config for config in candidates}
    for config in kinds.values():
        for m, n, k in shapes:
            for split in (1, 3):
                plan = GEMM.plan(problem_of(m, n, k, split), config.replace(split_k=split), device)
                stages = [dataclasses.replace(stage, config=config) for stage in plan.stages]
                own = runner.workspace(dataclasses.replace(plan, stages=tuple(stages)))
                assert own == plan.workspace_bytes, (config.name, m, n, k, split)


def test_nan_and_infinity_in_inputs_reach_the_results_they_belong_to(runner: Runner, device: DeviceInfo) -> None:
    request = OperationRequest("gemm", {"a": matrix("fp32", 16, 32, "r"), "b": matrix("fp32", 32, 48, "c")})
    problem = GEMM.parse(request)
    config = GEMM.candidates(problem, device)[0]
    plan = GEMM.plan(problem, config, device)
    rng = np.random.default_rng(2)
    a, b = (draw(rng, item.desc) for item in problem.operands[:2])
    a[3, 5], a[7, 1], b[9, 4] = np.nan, np.inf, -np.inf
    with np.errstate(invalid="ignore"):
        truth = GEMM.reference(problem, {"a": a, "b": b})["out"]
    result = compare(runner.run(plan, {"a": a, "b": b})["out"].view, truth, DType.FP32, 32)
    assert result.passed, result


def test_memory_of_a_poisoned_output_is_wholly_written() -> None:
    desc = matrix("fp32", 3, 4, "r", 2)
    memory = Memory.of(desc)
    assert np.isnan(memory.view).all() and not memory.overrun()
