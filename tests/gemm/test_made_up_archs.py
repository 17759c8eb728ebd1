"""A new arch is a spec and nothing else: made-up ones get kernel sets, candidates, plans and sources of GEMM."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gemm_runner import Runner, compiler, draw

import tilewright_arch
from tilewright_arch import ArchSpec
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.plugin import GemmOperation
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.problem import OperationRequest, Role
from tilewright_kit.numerics.compare import compare
from tilewright_kit.selection.strategies import Selector
from tilewright_kit.tiles.footprint.workgroup import threads_of
from tilewright_kit.types.errors import ConfigInvalidError
from tilewright_kit.types.tensor import TensorDesc

GEMM = GemmOperation()
GUIDE = Path(__file__).parents[2] / "docs" / "adding-an-arch.md"
SPECS = Path(tilewright_arch.__file__).parent / "specs"


def request_of(m: int, n: int, k: int, dtype: str = "fp16") -> OperationRequest:
    return OperationRequest("gemm", {"a": TensorDesc.of(dtype, (m, k)), "b": TensorDesc.of(dtype, (k, n), (1, k))})


def changed(known: str, **fields: Any) -> dict[str, Any]:
    """The document of a spec with other fields: the same processor under another name."""
    document: dict[str, Any] = json.loads((SPECS / f"{known}.json").read_text("utf-8"))
    return document | fields


def parsed(tmp_path: Path, document: Mapping[str, Any]) -> ArchSpec:
    """The spec as the guide has it: a file that is validated and read."""
    path = tmp_path / f"{document['name']}.json"
    path.write_text(json.dumps(document))
    tilewright_arch.validate_spec(path)
    return tilewright_arch.parse_spec(path)


def serves(arch: ArchSpec, request: OperationRequest) -> GemmConfig:
    """The selected kernel of a request, after its plan and source were made."""
    device = device_of(arch)
    problem = GEMM.parse(request)
    config = Selector().select(GEMM, problem, device).config
    assert isinstance(config, GemmConfig)
    plan = GEMM.plan(problem, config, device)
    assert plan.arch == arch.id and plan.stages
    assert config.name in GEMM.generate(config, arch).text
    return config


def test_the_guides_own_example_is_served(tmp_path: Path) -> None:
    example = re.search(r"```json\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
    assert example is not None
    arch = parsed(tmp_path, json.loads(example[1]))
    assert len(GEMM.kernel_sets["default"].expand(arch, GEMM.rules)) > 100
    for m, n, k in ((4096, 4096, 4096), (1, 4096, 4096), (77, 130, 65)):
        assert serves(arch, request_of(m, n, k)).warp_tile == (16, 16, 32)


def test_the_guides_session_gives_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = GUIDE.read_text("utf-8")
    example, session = (re.search(rf"```{kind}\n(.*?)```", text, re.DOTALL) for kind in ("json", "python"))
    assert example is not None and session is not None
    (tmp_path / "gfx1250.json").write_text(example[1])
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    said = 0
    for line in re.sub(r"\n# '", "  # '", session[1]).splitlines():
        code, _, result = line.partition("  # ")
        value = eval(code, names) if re.match(r"spec\.", code) else exec(code, names)
        if re.match(r"'|\d", result):
            assert repr(value) == result
            said += 1
    assert said == 3


def test_a_made_up_cpu_level_computes(tmp_path: Path, kernel_folder: Path, cpu: ArchSpec) -> None:
    document = changed(cpu.name, name=f"{cpu.name}-narrow", description="The same with half the cache, by another name")
    document["caches"] = document["caches"] | {"l2_bytes": document["caches"]["l2_bytes"] // 2}
    arch = parsed(tmp_path, document)
    for dtype in ("fp32", "bf16", "int8"):
        request = request_of(61, 83, 147, dtype)
        config, problem = serves(arch, request), GEMM.parse(request)
        rng = np.random.default_rng(3)
        inputs = {item.name: draw(rng, item.desc) for item in problem.operands if item.role is Role.INPUT}
        plan = GEMM.plan(problem, config, device_of(arch))
        out = Runner(arch, compiler(), kernel_folder).run(plan, inputs)["out"].view
        truth = GEMM.reference(problem, inputs)["out"]
        assert compare(out, truth, problem.dtype_c, 147, problem.dtype_acc).passed


def test_a_made_up_nvidia_gpu_of_common_parts_gets_the_kernels_that_all_have(tmp_path: Path) -> None:
    arch = parsed(tmp_path, changed("sm_80", name="sm_81", family="made up", lds_bytes=101376))
    known = tilewright_arch.load("sm_80")
    assert len(GEMM.kernel_sets["default"].expand(arch, GEMM.rules)) > 100
    for size in (64, 1024):
        assert serves(arch, request_of(size, size, size)).pipeline in known.pipelines


def test_a_warp_specialised_arch_of_any_name_gets_the_template_of_its_instruction(tmp_path: Path) -> None:
    hopper = tilewright_arch.load("sm_90a")
    twin = parsed(tmp_path, changed("sm_90a", name="sm_97a"))
    for name, kernels in {**GEMM.kernel_sets, "tune_hopper": GEMM.spaces["tune_hopper"]}.items():
        assert list(kernels.iterate(twin, GEMM.rules)) == list(kernels.iterate(hopper, GEMM.rules)), name
    config = serves(twin, request_of(4096, 4096, 4096))
    assert config == serves(hopper, request_of(4096, 4096, 4096)) and config.pipeline == "ws"
    assert threads_of(config, twin) == threads_of(config, hopper)


def test_a_pipeline_of_an_instruction_that_no_template_issues_is_not_given_another_ones(tmp_path: Path) -> None:
    text = (SPECS / "sm_90a.json").read_text("utf-8").replace("wgmma", "tcgen05").replace('"sm_90a"', '"sm_100a"')
    arch = parsed(tmp_path, json.loads(text))
    assert "ws" in arch.pipelines
    found = GEMM.kernel_sets["default"].expand(arch, GEMM.rules)
    assert found and all(config.pipeline != "ws" for config in found)
    assert serves(arch, request_of(4096, 4096, 4096)).pipeline in ("compv3", "compv4")
    ours = serves(tilewright_arch.load("sm_90a"), request_of(4096, 4096, 4096))
    assert "template" in {item.rule for item in GEMM.rules.check(ours, arch)}
    with pytest.raises(ConfigInvalidError):
        GEMM.generate(ours, arch)
    assert GEMM.rules.correct(ours, arch).is_valid
