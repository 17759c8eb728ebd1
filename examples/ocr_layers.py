"""Read the text of a picture with PP-OCRv4, all convolutions by Tilewright, and compare with onnxruntime.

    tilewright serve &                        # or give no --target: a server is started for the run
    python examples/ocr_layers.py
    python examples/ocr_layers.py --target unix:/run/user/1000/tilewright/tilewright.sock --image photo.png

Needs the models, and something to read and compare them with:
    pip install --no-deps rapidocr-onnxruntime==1.4.4; pip install onnx onnxruntime pillow
The picture is the scanned page that scikit-image brings (pip install --no-deps scikit-image); without it text is drawn.

Three networks find the lines, tell which stand on their heads, and read them. Their convolutions are of every sort:
pointwise, 3x3, 5x5, depthwise, strides that differ by axis, transposed. Each of them is compared with onnxruntime on
onnxruntime's own intermediate results, and the networks as wholes, where an error of one layer meets all later ones.

Worth copying into an application:
- Each layer is prepared once for its shape (`client.plan_conv`); bias and activation are part of its kernel.
- Weights lie in memory that the server shares (`client.asarray`).
- Pictures stay channels-last throughout: views of [N, C, H, W] whose strides say so, which nobody has to copy.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx_graph import Graph, Layer, MissingPackageError, Node, fuse, read, run

Array = npt.NDArray[Any]

PACKAGE = "rapidocr_onnxruntime"
MODELS = {
    "det": "ch_PP-OCRv4_det_infer.onnx",
    "cls": "ch_ppocr_mobile_v2.0_cls_infer.onnx",
    "rec": "ch_PP-OCRv4_rec_infer.onnx",
}
LABELS = {"det": "finding lines", "cls": "telling which way up", "rec": "reading"}
TEXT = ("Tilewright reads this", "with 155 convolutions", "of three networks, 2026")
LAYER_TOLERANCE = 2e-5
"""Relative error, in norm, of one layer: both sides sum in fp32, in different orders."""
NETWORK_TOLERANCE = 2e-3
"""The same of a whole network's output."""
HEIGHT = 48
"""Height in pixels of the lines that the networks take."""
GET = "pip install --no-deps rapidocr-onnxruntime==1.4.4; pip install onnx onnxruntime pillow"


def load(name: str) -> tuple[Path, Graph]:
    """One of the models, as a file and as a graph."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise MissingPackageError(f"the models are missing; get them with: {GET}")
    path = Path(next(iter(found.submodule_search_locations))) / "models" / MODELS[name]
    return path, fuse(read(path))


# ---- the picture ----


def picture(path: str) -> tuple[Array, str]:
    """[H, W, 3] of bytes, and what it is: the file, a scanned page, or drawn text."""
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise MissingPackageError("the package pillow is missing; get it with: pip install pillow") from None
    if path:
        return np.asarray(Image.open(path).convert("RGB")), path
    found = importlib.util.find_spec("skimage")
    if found is not None and found.submodule_search_locations:
        page = Path(next(iter(found.submodule_search_locations))) / "data" / "page.png"
        if page.is_file():
            return np.asarray(Image.open(page).convert("RGB")), "a scanned page (scikit-image)"
    return drawn(TEXT), "drawn text"


def drawn(lines: tuple[str, ...], size: int = 28) -> Array:
    """Black lines on uneven grey."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (18 * size, (2 * len(lines) + 1) * size))
    width, height = image.size
    shade = np.add.outer(np.linspace(170, 230, height), np.linspace(0, 25, width)).astype(np.uint8)
    image.paste(Image.fromarray(shade).convert("RGB"))
    font = ImageFont.load_default(size)
    for index, text in enumerate(lines):
        ImageDraw.Draw(image).text((size, (2 * index + 0.7) * size), text, fill=(25, 20, 30), font=font)
    return np.asarray(image)


def resized(image: Array, height: int, width: int) -> Array:
    from PIL import Image

    return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BILINEAR))


def as_input(images: list[Array]) -> Array:
    """[N, 3, H, W] in -1..1, blue first as the networks were trained, channels-last in memory."""
    batch = np.stack(images)[..., ::-1].astype(np.float32) / 127.5 - 1
    return np.ascontiguousarray(batch).transpose(0, 3, 1, 2)


def enlarged(image: Array, least: int) -> Array:
    """Until the shorter side has ``least`` pixels; sides become multiples of 32, as the network for lines wants."""
    factor = max(1.0, least / min(image.shape[:2]))
    height, width = (max(32, round(side * factor / 32) * 32) for side in image.shape[:2])
    return resized(image, height, width)


def for_reading(lines: list[Array], width: int = 0) -> Array:
    """Lines of one height; what is shorter than the widest is filled up with mid-grey."""
    widths = [max(1, min(round(line.shape[1] * HEIGHT / line.shape[0]), width or 4096)) for line in lines]
    whole = width or -(-max(*widths, 320) // 32) * 32
    batch = np.zeros((len(lines), HEIGHT, whole, 3), np.float32).transpose(0, 3, 1, 2)
    for index, (line, count) in enumerate(zip(lines, widths, strict=True)):
        batch[index, :, :, :count] = as_input([resized(line, HEIGHT, count)])[0]
    return batch


# ---- what the networks' outputs mean ----


@dataclass(frozen=True)
class Line:
    """Where a line of text lies, in parts of the picture's sides; it may slope."""

    left: float
    right: float
    middle: tuple[float, float]
    """Middle of its height, at the left and at the right."""
    half: float
    """Half of its height."""

    def cut(self, image: Array) -> Array:
        """The line, straightened."""
        height, width = image.shape[:2]
        columns = np.arange(int(self.left * width), max(int(self.right * width), int(self.left * width) + 1))
        middles = np.interp(columns, [self.left * width, self.right * width], [part * height for part in self.middle])
        count = max(1, round(2 * self.half * height))
        rows = np.rint(middles[None, :] + np.arange(count)[:, None] - (count - 1) / 2).astype(int)
        found: Array = image[rows.clip(0, height - 1), columns.clip(0, width - 1)]
        return found


def lines_of(probability: Array, least: float = 0.3, sure: float = 0.5) -> list[Line]:
    """The regions that are text, from the top down."""
    mask = probability > least
    height, width = mask.shape
    found = []
    for top, left, bottom, right in regions(mask):
        inside = mask[top:bottom, left:right]
        columns, rows = right - left, inside.sum() / (right - left)
        if min(rows, columns) < 3 or probability[top:bottom, left:right][inside].mean() < sure:
            continue
        ys, xs = np.nonzero(inside)
        slope, start = np.polyfit(xs, ys + 0.5, 1) if columns > 2 * rows else (0.0, (bottom - top) / 2)
        margin = 0.8 * rows * columns / (rows + columns)  # the network marks the cores of lines
        ends = [(top + start + slope * x) / height for x in (-margin, columns + margin)]
        begin, end = max(0.0, (left - margin) / width), min(1.0, (right + margin) / width)
        found.append(Line(begin, end, (ends[0], ends[1]), (rows / 2 + margin) / height))
    return sorted(found, key=lambda line: (line.middle, line.left))


def regions(mask: Array) -> list[tuple[int, int, int, int]]:
    """Bounding boxes of connected regions: runs of each row are joined to those of the row above that they touch."""
    parents: list[int] = []
    bounds: list[list[int]] = []

    def root(index: int) -> int:
        while parents[index] != index:
            index = parents[index]
        return index

    above: list[tuple[int, int, int]] = []
    for row, line in enumerate(mask):
        edges = np.flatnonzero(np.diff(np.concatenate(([False], line, [False])).astype(np.int8)))
        runs = []
        for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            touched = {root(index) for first, last, index in above if first <= end and begin <= last}
            index = min(touched, default=len(parents))
            if index == len(parents):
                parents.append(index)
                bounds.append([row, begin, row + 1, end])
            for other in touched - {index}:
                parents[other] = index
                bounds[index] = [*np.minimum(bounds[index][:2], bounds[other][:2]), *bounds[index][2:]]
                bounds[index][2:] = np.maximum(bounds[index][2:], bounds[other][2:]).tolist()
            box = bounds[index]
            bounds[index] = [min(box[0], row), min(box[1], begin), row + 1, max(box[3], end)]
            runs.append((begin, end, index))
        above = runs
    return [tuple(map(int, bounds[index])) for index in range(len(parents)) if parents[index] == index]  # type: ignore[misc]


def decode(scores: Array, alphabet: list[str]) -> str:
    """The most likely character of each column; repetitions and blanks (0) left out."""
    best = scores.argmax(axis=-1)
    kept = [index for index, before in zip(best, [0, *best[:-1]], strict=True) if index and index != before]
    return "".join(alphabet[index] for index in kept)


# ---- who computes the networks ----


class Onnxruntime:
    """The models by onnxruntime, and any value on the way."""

    name = "onnxruntime"

    def __init__(self, models: dict[str, tuple[Path, Graph]], threads: int = 0) -> None:
        try:
            import onnxruntime
        except ModuleNotFoundError:
            raise MissingPackageError("onnxruntime is missing; get it with: pip install onnxruntime") from None
        self._runtime = onnxruntime
        self._options = onnxruntime.SessionOptions()
        self._options.intra_op_num_threads = threads
        self._models = models
        self._sessions = {name: self._open(str(path)) for name, (path, _) in models.items()}

    def _open(self, model: str | bytes) -> Any:
        return self._runtime.InferenceSession(model, self._options, providers=["CPUExecutionProvider"])

    def __call__(self, name: str, x: Array) -> Array:
        result: Array = self._sessions[name].run(None, {self._models[name][1].input: np.ascontiguousarray(x)})[0]
        return result

    def between(self, name: str, x: Array, wanted: list[str]) -> dict[str, Array]:
        """Values inside a network."""
        import onnx

        path, graph = self._models[name]
        model = onnx.load(str(path))
        inside = [entry for entry in wanted if entry != graph.input and entry not in graph.outputs]
        model.graph.output.extend(onnx.ValueInfoProto(name=entry) for entry in inside)
        fed = [entry for entry in wanted if entry != graph.input]
        values = self._open(model.SerializeToString()).run(fed, {graph.input: np.ascontiguousarray(x)})
        return dict(zip(fed, values, strict=True)) | {graph.input: x}


@dataclass
class _Prepared:
    plan: Any
    weight: Array
    bias: Array | None
    out: Array


class Tilewright:
    """The same graphs: convolutions by a server, each prepared once; the rest by NumPy."""

    name = "Tilewright"

    def __init__(self, client: Any, models: dict[str, tuple[Path, Graph]]) -> None:
        self._client = client
        self._graphs = {name: graph for name, (_, graph) in models.items()}
        self._prepared: dict[tuple[str, int, tuple[int, ...]], _Prepared] = {}
        self._network = ""
        self.device_ns = 0
        self.count = 0
        self.kernels: dict[str, int] = {}
        """How many layers each kernel serves."""

    def __call__(self, name: str, x: Array) -> Array:
        self._network = name
        return run(self._graphs[name], x, self.convolve)[0]

    def convolve(self, layer: Layer, x: Array) -> Array:
        """The layer's result. It lies in memory that the next call of the layer with such an ``x`` overwrites."""
        if x.strides[1] != x.itemsize:
            x = channels_last(x)
        key = (self._network, id(layer), x.shape)
        item = self._prepared.get(key) or self._prepare(key, layer, x)
        operands = (x, item.weight) if item.bias is None else (x, item.weight, item.bias)
        item.plan(*operands, out=item.out)
        self.count += 1
        self.device_ns += self._client.report.timing.device_ns
        return item.out

    def _prepare(self, key: tuple[str, int, tuple[int, ...]], layer: Layer, x: Array) -> _Prepared:
        client = self._client
        weight = client.asarray(layer.weight)
        bias = None if layer.bias is None else client.asarray(layer.bias)
        words = {"bias": bias, "stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation}
        words |= {"groups": layer.groups, "activation": layer.activation}
        plan = (client.plan_conv_transpose if layer.transposed else client.plan_conv)(x, weight, **words)
        for kernel in plan.report.kernels:
            self.kernels[kernel] = self.kernels.get(kernel, 0) + 1
        shape = next(iter(plan.outputs.values())).shape
        out = client.empty((shape[0], *shape[2:], shape[1]), "fp32")
        out.fill(np.nan)  # what is not written would be seen
        item = _Prepared(plan, weight, bias, np.moveaxis(out, -1, 1))
        self._prepared[key] = item
        return item


def channels_last(x: Array) -> Array:
    """A copy whose channels lie side by side."""
    copy: Array = np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1)
    return copy


# ---- comparing ----


def relative(got: Array, want: Array) -> float:
    return float(np.linalg.norm(got.astype(np.float64) - want) / max(float(np.linalg.norm(want)), 1e-30))


def compare_layers(
    ours: Tilewright, theirs: Onnxruntime, name: str, graph: Graph, x: Array
) -> list[tuple[Node, float]]:
    """The error of each layer, given what onnxruntime gave its own."""
    found = []
    step = 12  # their values are kept for a few layers at a time
    for first in range(0, len(graph.layers), step):
        nodes = graph.layers[first : first + step]
        values = theirs.between(name, x, sorted({entry for node in nodes for entry in (*node.inputs, *node.outputs)}))
        for node in nodes:
            assert node.layer is not None
            got = ours.convolve(node.layer, values[node.inputs[0]])
            found.append((node, relative(got, values[node.outputs[0]])))
    return found


@dataclass
class Reading:
    """The text of a picture, and every network's input and output."""

    lines: list[str]
    passed: dict[str, tuple[Array, Array]]


def read_text(network: Any, image: Array, alphabet: list[str], least: int = 480, most: int = 32) -> Reading:
    """The whole way, by either of the two."""
    passed = {}
    large = enlarged(image, least)
    x = as_input([large])
    probability = network("det", x)
    passed["det"] = (x, probability.copy())
    lines = [line.cut(large) for line in lines_of(probability[0, 0])[:most]]
    if not lines:
        return Reading([], passed)
    x = for_reading(lines, 192)
    turned = network("cls", x)
    passed["cls"] = (x, turned.copy())
    upright = [np.rot90(line, 2) if scores[1] > 0.9 else line for line, scores in zip(lines, turned, strict=True)]
    x = for_reading(upright)
    scores = network("rec", x)
    passed["rec"] = (x, scores.copy())
    return Reading([decode(item, alphabet) for item in scores], passed)


@contextlib.contextmanager
def server(target: str) -> Iterator[Any]:
    """A client of the server at ``target``, or of one started for the purpose."""
    if target:
        import tilewright

        with tilewright.connect(target) as client:
            yield client
    else:
        from tilewright_tools.cli.private_server import connected

        with connected("") as client:
            yield client


def timed(call: Any, count: int = 3) -> float:
    """Milliseconds of the fastest call."""
    best = float("inf")
    for _ in range(count):
        begun = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begun)
    return best * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description="Read a picture's text, all convolutions by Tilewright.")
    parser.add_argument("--target", default="", help="server; default: one for this run")
    parser.add_argument("--image", default="", help="picture to read; default: a scanned page, or drawn text")
    parser.add_argument("--layers", action="store_true", help="a line for every layer")
    parser.add_argument("--least", type=int, default=480, help="pixels of the shorter side that lines are sought on")
    options = parser.parse_args()
    try:
        image, title = picture(options.image)
        models = {name: load(name) for name in MODELS}
        theirs = Onnxruntime(models)
    except (MissingPackageError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 4
    # The first is what stands for no character, the last a space.
    alphabet = ["", *models["rec"][1].metadata["character"].splitlines(), " "]
    expected = read_text(theirs, image, alphabet, options.least)
    failed = 0
    with server(options.target) as client:
        ours = Tilewright(client, models)
        found = read_text(ours, image, alphabet, options.least)
        print(f"{title}, {image.shape[1]} x {image.shape[0]} pixels, {len(found.lines)} lines of text:")
        print("\n".join(f"  {line}" for line in found.lines))
        print("network                layers  worst layer  whole network  convolutions  Tilewright  onnxruntime")
        for name, (x, want) in expected.passed.items():
            graph = models[name][1]
            layers = compare_layers(ours, theirs, name, graph, x)
            off = relative(ours(name, x), want)
            ours.device_ns = ours.count = 0
            mine = timed(lambda name=name, x=x: ours(name, x))
            inside = ours.device_ns / ours.count * len(layers) / 1e6
            peer = timed(lambda name=name, x=x: theirs(name, x))
            worst = max(error for _, error in layers)
            failed += worst > LAYER_TOLERANCE or off > NETWORK_TOLERANCE
            print(
                f"{LABELS[name]:22} {len(layers):6} {worst:12.1e} {off:14.1e} {inside:10.1f} ms "
                f"{mine:8.1f} ms {peer:9.1f} ms"
            )
            for node, error in layers if options.layers else []:
                print(f"    {node.layer!s:44} {node.layer.activation or '':10} {error:.1e}")
        print(f"{len(ours.kernels)} kernels for {sum(ours.kernels.values())} layers of one shape each")
    failed += found.lines != expected.lines
    print("OK: the text is the same" if not failed else "FAILED: layers, networks or the text differ")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
