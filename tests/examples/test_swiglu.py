"""The example plugin that builds on GEMM: SwiGLU between two products, without a kernel of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewright_arch
from tilewright_kit.conformance.check_plugin import check_plugin, device_of, plan_findings
from tilewright_kit.contract.arguments import WORKSPACE, pack
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.loading.loader import PluginManager
from tilewright_kit.numerics.compare import compare
from tilewright_kit.selection.strategies import Selector
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_kit.types.tensor import TensorDesc
from tilewright_server.engine.call import Call
from tilewright_server.engine.engine import Engine
from tilewright_server.engine.types import EngineOptions, Selection

PLUGIN = Path(__file__).resolve().parents[2] / "examples" / "swiglu"
DOCS = PLUGIN.parents[1] / "docs" / "adding-an-operation.md"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    plugins = PluginManager()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PLUGIN))
        for module in ("tilewright_gemm.plugin", "tilewright_swiglu.plugin", "tilewright_server.devices.cpu.plugin"):
            plugins.load_module(module, module.split(".")[-2])
        assert not plugins.failures
        made = Engine(EngineOptions(cache_dir=tmp_path_factory.mktemp("swiglu") / "cache"), plugins)
        yield made
        made.close()
    for name in [name for name in sys.modules if name.startswith("tilewright_swiglu")]:
        del sys.modules[name]


def request_of(dtype: str, m: int, k: int, n: int, width: int, **attributes: Any) -> OperationRequest:
    shapes = {"x": (m, k), "w_gate": (k, n), "w_up": (k, n), "w_down": (n, width)}
    inputs = {name: TensorDesc.of(dtype, shape) for name, shape in shapes.items()}
    return OperationRequest("swiglu", inputs, attributes=attributes)


def execute(engine: Engine, request: OperationRequest, arrays: dict[str, Any]) -> np.ndarray:
    prepared = engine.plan(request, Selection(), Call())
    memory = {}
    for operand in prepared.operands:
        memory[operand.name] = np.ascontiguousarray(arrays[operand.name]) if operand.name in arrays else np.full(
            operand.desc.shape, np.nan, np.float32
        ).astype(operand.desc.dtype.numpy)  # fmt: skip
    engine.execute(prepared, [memory[operand.name].ctypes.data for operand in prepared.operands], Call())
    return memory["out"]


@pytest.mark.parametrize(
    ("dtype", "sizes"), [("fp32", (33, 70, 51, 29)), ("bf16", (8, 128, 96, 64)), ("fp32", (1, 1, 1, 1))]
)
@pytest.mark.extended
def test_it_computes_the_feed_forward_block(engine: Engine, dtype: str, sizes: tuple[int, int, int, int]) -> None:
    request, operation = request_of(dtype, *sizes), engine.operations["swiglu"]
    rng = np.random.default_rng(7)
    arrays = {
        name: (rng.standard_normal(desc.shape) / np.sqrt(desc.shape[0])).astype(desc.dtype.numpy)
        for name, desc in request.inputs.items()
    }
    truth = operation.reference(operation.parse(request), arrays)["out"]
    assert compare(execute(engine, request, arrays), truth, DType(dtype), sizes[2]).passed


@pytest.mark.extended
def test_it_keeps_the_contract(engine: Engine) -> None:
    archs = [engine.devices.info().arch, tilewright_arch.load("sm_80"), tilewright_arch.load("sm_90a")]
    check_plugin(engine.operations["swiglu"], archs=archs, per_arch=16).raise_if_failed()


@pytest.mark.parametrize("name", ["sm_80", "sm_90a"])
def test_on_nvidia_gpus_it_takes_the_kernels_that_gemm_would(engine: Engine, name: str) -> None:
    operation, device = engine.operations["swiglu"], device_of(tilewright_arch.load(name))
    problem = operation.parse(request_of("bf16", 4096, 4096, 11008, 4096))
    chosen = Selector().select(operation, problem, device).config
    plan = operation.plan(problem, chosen, device)
    assert [stage.name for stage in plan.stages] == ["gate.main", "up.main", "down.main"]
    assert {stage.config.to_dict()["pipeline"] for stage in plan.stages} == {"ws" if name == "sm_90a" else "compv4"}
    assert not list(plan_findings(operation, problem, chosen, device))
    hidden = [item.operand for _, item in pack(plan.stages[2].args).maps]
    assert hidden == ([WORKSPACE, "w_down", "out"] if name == "sm_90a" else [])


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"w_up": TensorDesc.of("fp32", (8, 7))}, "w_up"),
        ({"w_down": TensorDesc.of("fp32", (7, 8))}, "w_down"),
        ({"w_gate": TensorDesc.of("bf16", (8, 6))}, "w_gate"),
        ({"x": TensorDesc.of("int8", (4, 8))}, "x"),
        ({"w_gate": TensorDesc.of("fp32", (8, 6), (20, 3))}, "w_gate"),
    ],
)
def test_what_does_not_fit_is_rejected_by_name(engine: Engine, change: dict[str, TensorDesc], field: str) -> None:
    request = request_of("fp32", 4, 8, 6, 8)
    with pytest.raises(InvalidArgumentError) as caught:
        engine.operations["swiglu"].parse(OperationRequest("swiglu", {**request.inputs, **change}))
    assert caught.value.field == field and caught.value.fix


def test_it_is_small_and_the_guide_names_it() -> None:
    lines = sum(len(path.read_text("utf-8").splitlines()) for path in (PLUGIN / "tilewright_swiglu").glob("*.py"))
    assert lines <= 400
    assert "`examples/swiglu`" in DOCS.read_text("utf-8")
