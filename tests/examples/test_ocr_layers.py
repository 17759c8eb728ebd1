"""The example that reads a picture: its reader of graphs by hand-made ones, and the whole where its packages are."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NEEDED = ("rapidocr_onnxruntime", "onnx", "onnxruntime", "PIL")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]


@pytest.fixture(scope="module")
def onnx_graph() -> Iterator[Any]:
    yield from imported("onnx_graph")


@pytest.fixture(scope="module")
def ocr_layers() -> Iterator[Any]:
    yield from imported("ocr_layers")


def imported(name: str) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module(name)


def convolve(layer: Any, x: np.ndarray) -> np.ndarray:
    """A layer of one dimension in plain loops, with its activation."""
    (stride,), (before, behind) = layer.stride, layer.padding
    padded = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (before, behind)))
    taps, each = layer.weight.shape[2], layer.weight.shape[1]
    per_group = layer.filters // layer.groups
    count = (padded.shape[2] - taps) // stride + 1
    y = np.zeros((x.shape[0], layer.filters, count))
    for k in range(layer.filters):
        channels = slice(k // per_group * each, (k // per_group + 1) * each)
        for row in range(count):
            window = padded[:, channels, row * stride : row * stride + taps]
            y[:, k, row] = (window * layer.weight[k]).sum(axis=(1, 2))
    y += 0 if layer.bias is None else layer.bias[:, None]
    if layer.activation == "hard_swish":
        y = y * np.clip(y + 3, 0, 6) / 6
    return np.maximum(y, 0) if layer.activation == "relu" else y


def a_graph(module: Any, steps: list[tuple[str, dict[str, Any]]], read_twice: bool = False) -> Any:
    """A convolution and what follows it; each step names its further operands."""
    rng = np.random.default_rng(5)
    weight, bias = rng.standard_normal((6, 2, 3)), rng.standard_normal(6)
    layer = module.Layer("c", weight, bias, stride=(2,), padding=(1, 2), dilation=(1,), groups=2)
    nodes, constants, last = [module.Node("Conv", ("x",), ("c",), layer=layer)], {}, "c"
    for index, (op, operands) in enumerate(steps):
        names = []
        for name, value in operands.items():
            if value is not None:
                constants[name] = np.asarray(value)
            names.append(last if name == "last" else name)
        name = f"v{index}"
        nodes.append(module.Node(op, tuple(names), (name,)))
        last = name
    outputs = (last, "c") if read_twice else (last,)
    return module.Graph(tuple(nodes), constants, "x", outputs, {})


def per_channel(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.5, 2.0, (1, 6, 1))


NORMALISED = ("BatchNormalization", {"last": None, **{name: per_channel(i).ravel() for i, name in enumerate("gsmv")}})
SWISH = [
    ("Add", {"last": None, "three": 3.0}),
    ("Clip", {"last": None, "low": 0.0, "high": 6.0}),
    ("Mul", {"last": None, "before": None}),
    ("Div", {"last": None, "six": 6.0}),
]


def test_what_follows_a_convolution_becomes_part_of_it(onnx_graph):
    swish = [
        (op, {("v2" if name == "before" else name): value for name, value in words.items()}) for op, words in SWISH
    ]
    steps = [NORMALISED, ("Mul", {"factor": 1.5, "last": None}), ("Add", {"last": None, "b": per_channel(9)}), *swish]
    graph = a_graph(onnx_graph, steps)
    fused = onnx_graph.fuse(graph)
    assert len(fused.nodes) == 1
    assert fused.nodes[0].layer.activation == "hard_swish"
    x = np.random.default_rng(1).standard_normal((2, 4, 11))
    (want,), (got,) = (onnx_graph.run(each, x, convolve) for each in (graph, fused))
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
    assert np.abs(want).max() > 0.5


def test_a_value_that_others_read_is_left_to_them(onnx_graph):
    graph = a_graph(onnx_graph, [("Relu", {"last": None})], read_twice=True)
    fused = onnx_graph.fuse(graph)
    assert [node.op for node in fused.nodes] == ["Conv", "Relu"]
    x = np.random.default_rng(2).standard_normal((1, 4, 9))
    relu, plain = onnx_graph.run(fused, x, convolve)
    np.testing.assert_array_equal(relu, np.maximum(plain, 0))
    assert plain.min() < 0


def test_swishes_with_other_numbers_are_left_alone(onnx_graph):
    words = [(op, {("c" if name == "before" else name): value for name, value in item.items()}) for op, item in SWISH]
    words[1] = ("Clip", {"last": None, "low": 0.0, "high": 5.0})
    fused = onnx_graph.fuse(a_graph(onnx_graph, words))
    assert [node.op for node in fused.nodes] == ["Conv", "Add", "Clip", "Mul", "Div"]


def test_factors_of_transposed_layers_go_to_their_output_channels(onnx_graph):
    weight = np.random.default_rng(3).standard_normal((4, 3, 2))  # two groups: 4 channels to 6
    layer = onnx_graph.Layer("t", weight, None, (1,), (0, 0), (1,), 2, transposed=True)
    factor = np.arange(1.0, 7.0)
    scaled = onnx_graph._scaled(layer, factor)
    np.testing.assert_allclose(scaled.weight[:2], weight[:2] * factor[:3, None])
    np.testing.assert_allclose(scaled.weight[2:], weight[2:] * factor[3:, None])


def test_operators_that_are_not_there_are_refused_by_name(onnx_graph):
    graph = onnx_graph.Graph((onnx_graph.Node("Einsum", ("x",), ("y",)),), {}, "x", ("y",), {})
    with pytest.raises(NotImplementedError, match="Einsum"):
        onnx_graph.run(graph, np.ones(3), convolve)


def test_regions_are_joined_where_their_rows_touch(ocr_layers):
    picture = ["..##..#", "..#...#", "###.###", ".......", "#.#....", "###...."]
    mask = np.array([[letter == "#" for letter in line] for line in picture])
    assert sorted(ocr_layers.regions(mask)) == [(0, 0, 3, 4), (0, 4, 3, 7), (4, 0, 6, 3)]


def test_lines_that_slope_are_cut_straight(ocr_layers):
    image = np.zeros((60, 200, 3), np.uint8)
    probability = np.zeros((60, 200))
    for column in range(20, 180):
        middle = 15 + column // 8
        probability[middle - 4 : middle + 5, column] = 0.9
        image[middle, column] = 255
    (line,) = ocr_layers.lines_of(probability)
    cut = line.cut(image)
    bright = (cut[:, 20:140, 0] == 255).mean(axis=1)
    assert bright.argmax() in (len(cut) // 2 - 1, len(cut) // 2)
    assert bright[len(cut) // 2 - 1 : len(cut) // 2 + 2].sum() > 0.95


def test_columns_of_scores_become_text(ocr_layers):
    scores = np.zeros((9, 4))
    scores[np.arange(9), [1, 1, 0, 1, 2, 2, 0, 3, 3]] = 1.0
    assert ocr_layers.decode(scores, ["", "a", "b", " "]) == "aab "


def test_without_its_packages_it_says_how_to_get_them():
    code = (
        "import runpy, sys; sys.modules['rapidocr_onnxruntime'] = None; sys.modules['PIL'] = None;"
        f"sys.path.insert(0, {str(EXAMPLES)!r}); sys.argv = ['ocr_layers.py'];"
        f"runpy.run_path({str(EXAMPLES / 'ocr_layers.py')!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 4
    assert "pip install" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
def test_the_networks_read_what_onnxruntime_reads():
    command = [sys.executable, str(EXAMPLES / "ocr_layers.py"), "--least", "192", "--layers"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    for text in ("finding lines", "telling which way up", "reading", "OK: the text is the same"):
        assert text in done.stdout
    assert " 0 lines of text" not in done.stdout
