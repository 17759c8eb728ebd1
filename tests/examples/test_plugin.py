"""The example plugin of docs/adding-an-operation.md keeps the contract and computes what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewright_kit.conformance.check_plugin import check_plugin
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.loading.loader import PluginManager
from tilewright_kit.numerics.compare import compare
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.tensor import TensorDesc
from tilewright_server.engine.call import Call
from tilewright_server.engine.engine import Engine
from tilewright_server.engine.types import EngineOptions, Selection

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PLUGIN = Path(__file__).resolve().parents[2] / "examples" / "plugin"
DOCS = PLUGIN.parents[1] / "docs" / "adding-an-operation.md"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    plugins = PluginManager()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PLUGIN))
        plugins.load_module("tilewright_rmsnorm.plugin", "rmsnorm")
        plugins.load_module("tilewright_server.devices.cpu.plugin", "cpu")
        assert not plugins.failures
        made = Engine(EngineOptions(cache_dir=tmp_path_factory.mktemp("plugin") / "cache"), plugins)
        yield made
        made.close()
    for name in [name for name in sys.modules if name.startswith("tilewright_rmsnorm")]:
        del sys.modules[name]


def execute(engine: Engine, request: OperationRequest, arrays: dict[str, Any]) -> dict[str, Any]:
    """Runs a request on arrays of this process."""
    prepared = engine.plan(request, Selection(), Call())
    memory = {}
    for operand in prepared.operands:
        desc = operand.desc
        memory[operand.name] = np.full(max(desc.span, 1), np.nan, desc.dtype.numpy)
        if operand.name in arrays:
            memory[operand.name][: desc.span] = arrays[operand.name].reshape(-1)
    addresses = [memory[operand.name].ctypes.data for operand in prepared.operands]
    engine.execute(prepared, addresses, Call())
    out = next(operand.desc for operand in prepared.operands if operand.name == "out")
    return {"out": memory["out"][: out.span].reshape(out.shape)}


def test_the_example_conforms(engine: Engine) -> None:
    operation = engine.operations["rmsnorm"]

    def run(_operation: Any, request: OperationRequest, inputs: dict[str, Any]) -> dict[str, Any]:
        return execute(engine, request, inputs)

    report = check_plugin(operation, engine.devices.info(), None, run)
    report.raise_if_failed()


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (2, 7), (33, 384), (128, 1023)])
def test_the_example_computes_rms_normalisation(engine: Engine, rows: int, columns: int) -> None:
    rng = np.random.default_rng()
    arrays = {
        "x": rng.standard_normal((rows, columns)).astype(np.float32),
        "weight": rng.standard_normal(columns).astype(np.float32),
    }
    inputs = {name: TensorDesc.of("fp32", array.shape) for name, array in arrays.items()}
    request = OperationRequest("rmsnorm", inputs, attributes={"epsilon": 1e-5})
    operation = engine.operations["rmsnorm"]
    truth = operation.reference(operation.parse(request), arrays)["out"]
    assert compare(execute(engine, request, arrays)["out"], truth, DType.FP32, columns).passed


@pytest.fixture(scope="module")
def tilewright(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The command line of a machine where the example is installed beside Tilewright."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "tilewright_rmsnorm").symlink_to(PLUGIN / "tilewright_rmsnorm")
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text("utf-8"))["project"]
    metadata = folder / f"tilewright_rmsnorm-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    groups = (
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in entries.items())
        for group, entries in project["entry-points"].items()
    )
    (metadata / "entry_points.txt").write_text("\n".join(groups))
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    private = {"XDG_RUNTIME_DIR": str(folder), "TILEWRIGHT_CACHE_DIR": str(folder / "cache")}
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **private}
    env.pop("TILEWRIGHT_TARGET", None)

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "tilewright_tools.cli", *arguments]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=240)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.extended
def test_the_commands_run_explain_and_bench_know_the_example(tilewright: Any) -> None:
    assert "rmsnorm" in tilewright("run", "--help")
    record = json.loads(tilewright("run", "rmsnorm", "33", "384", "--validate", "--json"))
    assert record["problem"] == {"rows": 33, "columns": 384, "dtype": "fp32"}
    assert (record["status"], record["validation"]["total_elements"]) == ("success", 33 * 384)
    found = json.loads(tilewright("kernels", "explain", "rmsnorm", "33", "384", "--json"))
    assert found["candidates"][0]["kernel"].startswith("rmsnorm")
    quick = ("--repeat", "2", "--warmup", "1", "--device", "cpu:0", "--limit", "1", "--json")
    (line,) = json.loads(tilewright("bench", "rmsnorm", "--shapes", "17x100", *quick))["problems"]
    assert (line["problem"]["columns"], line["tried"], line["failed"]) == (100, 1, 0)


@pytest.mark.extended
def test_the_demonstration_shows_the_example(tilewright: Any) -> None:
    record = json.loads(tilewright("demo", "--size", "64", "--dtype", "rmsnorm", "--json"))
    assert [(row["what"], row["check"]["ok"]) for row in record["rows"]] == [("rmsnorm fp32", True)]


def test_a_kernel_leaves_subnormal_numbers_of_the_process_as_they_are(engine: Engine) -> None:
    arrays = {"x": np.ones((2, 64), np.float32), "weight": np.ones(64, np.float32)}
    inputs = {name: TensorDesc.of("fp32", array.shape) for name, array in arrays.items()}
    execute(engine, OperationRequest("rmsnorm", inputs), arrays)
    assert (np.full(8, 1e-310) / 2 > 0).all()


def test_the_guide_names_every_room_of_the_example() -> None:
    text = DOCS.read_text("utf-8")
    rooms = {path.name for path in (PLUGIN / "tilewright_rmsnorm").glob("*.py")} - {"__init__.py"}
    assert {room for room in rooms if f"`{room}`" not in text} == set()
