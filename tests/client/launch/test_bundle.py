"""Bundles: built once, run without a server, and refused when they are damaged, foreign or for other machines."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewright as tw
import tilewright_arch
from tilewright_tools.cli import main

F = np.float32
SHAPES = "m,n,k,layout,activation\n64,48,32,rrr,\n64,48,32,rrr,Relu\n"
PLAIN = "gemm(a: fp32[64, 32], b: fp32[32, 48], out: fp32[64, 48])"
RELU = f"{PLAIN[:-1]}; unary=Relu)"
HEADER, ENTRY, INDEX_DIGEST = 72, 32, slice(24, 56)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Path:
    """A bundle of two products, a convolution and an attention, for this machine and for another of its kind."""
    folder = tmp_path_factory.mktemp("bundle")
    (folder / "shapes.csv").write_text(SHAPES)
    shapes = ["--gemm", str(folder / "shapes.csv"), "--conv", "2x6x8x9x7:3s1p1g1", "--attention", "1x2x33x40"]
    own = tilewright_arch.detect_cpu().id
    archs = ["--arch", own, "--arch", "x86-64-v2"] if own.startswith("x86") else ["--arch", own]
    made = folder / "made.twb"
    common = ["--dtype", "fp32", "--cache-dir", str(kernel_cache), "-o", str(made)]
    assert main(["bundle", "build", *shapes, *archs, *common]) == 0
    return made


def refusal(call: Callable[[], Any]) -> tuple[type[Exception], str]:
    with pytest.raises(tw.TilewrightError) as caught:
        call()
    assert caught.value.fix, "says what mends it"
    return type(caught.value), caught.value.rule


@pytest.mark.extended
def test_plans_run_on_numpy_arrays_without_a_server(path: Path, rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((64, 32), F), rng.standard_normal((32, 48), F)
    with tw.load_bundle(path) as bundle:
        assert {PLAIN, RELU} <= set(bundle)
        plan, relu = bundle[PLAIN], bundle[RELU]
    assert {name: (spec.shape, spec.dtype.name) for name, spec in plan.inputs.items()} == {
        "a": ((64, 32), "float32"),
        "b": ((32, 48), "float32"),
    }
    out = np.full((64, 48), np.nan, F)
    assert plan(a, b, out=out) is out
    np.testing.assert_allclose(out, a @ b, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(relu(a, b), np.maximum(a @ b, 0), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(plan(np.asfortranarray(a), b), out)  # copied
    bound = plan.bind(a, b)
    a[:] = 1
    np.testing.assert_allclose(bound(), a @ b, rtol=1e-4, atol=1e-4)


def test_the_best_level_of_this_cpu_is_taken(path: Path) -> None:
    bundle = tw.load_bundle(path)
    archs = [item.arch for item in bundle.problems if item.name == PLAIN]
    assert bundle[PLAIN].arch == max(archs)
    assert len(bundle) == 4 and len(bundle.problems) == 4 * len(archs)


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (lambda plan, a, b: plan(a), (tw.InvalidArgumentError, "operand_count")),
        (lambda plan, a, b: plan(b, a), (tw.InvalidArgumentError, "plan_operand")),
        (lambda plan, a, b: plan(a.astype(np.float16), b), (tw.InvalidArgumentError, "plan_operand")),
        (lambda plan, a, b: plan(a, b, out=np.empty((48, 64), F)), (tw.InvalidArgumentError, "plan_operand")),
        (lambda plan, a, b: plan(a, b, out={"c": a}), (tw.InvalidArgumentError, "operand_names")),
        (lambda plan, a, b: plan.bind(np.asfortranarray(a), b), (tw.InvalidArgumentError, "plan_operand")),
        (lambda plan, a, b: plan(a, b, out=_over(a)), (tw.InvalidArgumentError, "operand_overlap")),
    ],
)
def test_operands_that_do_not_fit_are_refused(path: Path, call: Any, wanted: tuple[type[Exception], str]) -> None:
    memory = np.zeros(64 * 64, F)
    a, b = memory[: 64 * 32].reshape(64, 32), np.zeros((32, 48), F)
    assert refusal(lambda: call(tw.load_bundle(path)[PLAIN], a, b)) == wanted


def _over(a: Any) -> Any:
    return a.base[16 : 16 + 64 * 48].reshape(64, 48)


def test_a_closed_bundle_and_an_unknown_name(path: Path) -> None:
    bundle = tw.load_bundle(path)
    with pytest.raises(KeyError):
        bundle["gemm"]
    bundle.close()
    bundle.close()
    assert refusal(lambda: bundle[PLAIN]) == (tw.InvalidArgumentError, "bundle_closed")


def test_what_is_no_bundle_is_refused(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()

    def opened(content: bytes) -> tuple[type[Exception], str]:
        (tmp_path / "other.twb").write_bytes(content)
        return refusal(lambda: tw.load_bundle(tmp_path / "other.twb"))

    assert refusal(lambda: tw.load_bundle(tmp_path / "nothing")) == (tw.NotFoundError, "bundle_file")
    assert refusal(lambda: tw.load_bundle(tmp_path)) == (tw.NotFoundError, "bundle_file")
    damaged = (tw.InvalidArgumentError, "bundle_format")
    assert opened(b"") == opened(b"\x7fELF" + data[4:]) == damaged
    assert {opened(data[:size]) for size in (*range(200), len(data) - 1)} == {damaged}
    assert opened(data + b"x") == damaged
    assert opened(data[:8] + struct.pack("<I", 2) + data[12:]) == (tw.UnsupportedError, "bundle_version")


def resealed(data: bytearray) -> bytes:
    """A bundle with the right digest of its index."""
    entries, objects, texts = struct.unpack_from("<IIQ", data, 56)
    end = HEADER + ENTRY * entries + 48 * objects + texts
    if end <= len(data):
        data[INDEX_DIGEST] = hashlib.sha256(data[56:end]).digest()
    return bytes(data)


def test_a_bundle_for_other_machines_says_so(path: Path, tmp_path: Path) -> None:
    """A feature that no CPU has, in every plan."""
    data = bytearray(path.read_bytes())
    (entries,) = struct.unpack_from("<I", data, 56)
    for number in range(entries):
        offset, size = struct.unpack_from("<QQ", data, HEADER + ENTRY * number + 16)
        plan = data[offset : offset + size]
        (features,) = struct.unpack_from("<I", plan, 148)
        (dims, texts) = struct.unpack_from("<II", plan, 88)
        assert texts > features > 0 and dims
        begin = plan.index(b"sse", 152) if b"sse" in plan else plan.index(b"avx", 152)
        plan[begin : begin + 3] = b"zzz"
        plan[24:56] = hashlib.sha256(plan[56:]).digest()
        data[offset : offset + size] = plan
    (tmp_path / "other.twb").write_bytes(bytes(data))
    assert refusal(lambda: tw.load_bundle(tmp_path / "other.twb")[PLAIN]) == (tw.UnsupportedError, "bundle_arch")


@pytest.mark.extended
def test_mutated_bundles_open_or_are_refused(path: Path, tmp_path: Path) -> None:
    """With the digests of index and plans made right again, so that what is behind them is reached."""
    whole, draw, found = path.read_bytes(), random.Random(3), set()
    entries, objects, texts = struct.unpack_from("<IIQ", whole, 56)
    index_end = HEADER + ENTRY * entries + 48 * objects + texts
    place = tmp_path / "mutated.twb"
    for turn in range(400):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            where = draw.randrange(12, index_end) if turn % 4 else draw.randrange(len(data))
            data[where] = draw.choice((0, 1, 255, draw.randrange(256)))
        if turn % 3 == 0:
            del data[draw.randrange(len(data)) :]
        place.write_bytes(resealed(data) if len(data) > HEADER and turn % 2 else bytes(data))
        try:
            with tw.load_bundle(place) as bundle:
                bundle.verify()
                for name in bundle:
                    bundle[name]
            found.add("whole")
        except (tw.InvalidArgumentError, tw.UnsupportedError, tw.NotFoundError) as error:
            found.add(error.rule)
        except KeyError:
            raise AssertionError("a name that the bundle lists is not found") from None
    assert {"whole", "bundle_format"} <= found, found


def test_commands_show_verify_and_run(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["bundle", "show", "--json", str(path)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {PLAIN, RELU} <= {item["name"] for item in shown["problems"]}
    assert all(item["kernels"] and item["request"]["operation"] for item in shown["problems"])
    assert shown["bytes"] == path.stat().st_size
    assert main(["bundle", "verify", str(path)]) == 0
    assert main(["bundle", "run", "--json", str(path), "--repeat", "2"]) == 0
    ran = json.loads(capsys.readouterr().out.partition("plans\n")[2])
    assert [item["status"] for item in ran] == ["success"] * 4
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    (tmp_path / "damaged.twb").write_bytes(bytes(data))
    assert main(["bundle", "verify", str(tmp_path / "damaged.twb")]) == 1
    assert "digest of a code object" in capsys.readouterr().err
    assert main(["bundle", "show", str(tmp_path / "nothing")]) == 2


@pytest.mark.extended
def test_what_cannot_be_built_is_left_out_and_named(
    tmp_path: Path, kernel_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["bundle", "build", "--dtype", "fp32", "--cache-dir", str(kernel_cache), "--json"]
    wanted = ["--gemm", "64x48x32", "--attention", "tiny", "--journal", str(tmp_path / "journal")]
    line = {
        "journal": 1,
        "id": "x",
        "strategy": "",
        "kernel": "none such",
        "config": "",
        "device": "cpu:0",
        "arch": "x86-64-v3",
    }
    desc = {"dtype": "fp32", "shape": [4, 4]}
    request = {"operation": "gemm", "inputs": {"a": desc, "b": desc}, "outputs": {}, "attributes": {}}
    (tmp_path / "journal").write_text(json.dumps({**line, "request": request}) + "\n{damaged\n")
    assert main([*common, *wanted, "-o", str(tmp_path / "some.twb")]) == 1
    out, err = capsys.readouterr()
    made = json.loads(out)
    assert [item["rule"] for item in made["left_out"]] == ["kernel_name"] and made["problems"]
    assert "line 2 of the journal is skipped" in err
    assert main([*common, "-o", str(tmp_path / "none.twb")]) == 2
    assert main([*common, "--gemm", "64x48x32", "-o", str(tmp_path / "no" / "folder.twb")]) == 2
    assert not (tmp_path / "none.twb").exists()
