"""Tokens per second of a decoder of random weights: plain PyTorch, ``torch.compile``, and Tilewright's operations.

    python examples/torch_decoder.py                      # a GPU: 8 layers of 4096, batches of 1, 16 and 64
    python examples/torch_decoder.py --device cpu --layers 2 --width 256 --batches 1,4 --context 64
    python examples/torch_decoder.py --gate fused         # Tilewright's gate and up as two, the gate in the second

A model as language models are: root mean squares, grouped heads, rotary positions, a gated product, residuals; every
sequence holds ``--context`` tokens, and each step adds one. PyTorch keeps keys and values in one tensor for each layer
and masks what is not there yet; Tilewright keeps pages, appends with the rotation in one kernel, adds residuals in the
products themselves, and makes one product of the weights of gate and up, whose gate is PyTorch's; or, with ``--gate
fused``, two products with the gate in them. All weights, and the results that are compared, are the same. With a GPU,
Tilewright's steps run in a CUDA graph, as ``torch.compile(mode="reduce-overhead")`` runs its own. A server is started
for the run unless yours runs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import minilm
import torch

import tilewright.torch as twt

F = torch.nn.functional
HEAD = 128
"""Elements of a head."""
PAGE = 64
"""Tokens of a page."""
EPSILON = 1e-5
AGREES = 0.999
"""Least cosine between the last layer's results, of PyTorch's sums in one order and ours in another."""


class Layer(torch.nn.Module):
    """Weights of one layer, ``[out, in]``, and keys and values. Buffers, which lie still: graphs need no copies."""

    def __init__(self, width: int, heads: int, shared: int, kind: dict[str, Any]) -> None:
        super().__init__()
        hidden = width * 7 // 2
        shapes = {
            "qkv": ((heads + 2 * shared) * HEAD, width), "out": (width, heads * HEAD),
            "gate": (hidden, width), "up": (hidden, width), "down": (width, hidden),
        }  # fmt: skip
        for name, shape in shapes.items():
            self.register_buffer(name, torch.randn(shape, **kind) * shape[1] ** -0.5)
        for name in ("before", "between"):
            self.register_buffer(name, 1 + 0.1 * torch.randn(width, **kind))

    def hold(self, keys: Any, values: Any) -> None:
        self.register_buffer("keys", keys)
        self.register_buffer("values", values)


class Decoder(torch.nn.Module):
    """One step for all sequences, with the operations of PyTorch."""

    def __init__(self, layers: list[Layer], width: int, heads: int, shared: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)
        self.width, self.heads, self.shared = width, heads, shared

    def prepare(self, past: list[tuple[Any, Any]], room: int) -> None:
        """Take the keys and values ``[B, shared, context, HEAD]`` of each layer, with ``room`` tokens in all."""
        for layer, pair in zip(self.layers, past, strict=True):
            layer.hold(*(F.pad(value, (0, 0, 0, room - value.shape[2])) for value in pair))
        self.register_buffer("places", torch.arange(room, device=past[0][0].device))

    def split(self, x: Any, layer: Any) -> Any:
        heads = self.linear(F.rms_norm(x, (self.width,), layer.before, EPSILON), layer.qkv).unflatten(-1, (-1, HEAD))
        return heads.split((self.heads, self.shared, self.shared), 1)

    def linear(self, x: Any, w: Any) -> Any:
        return F.linear(x, w)

    def place(self, x: Any, length: Any, cos: Any, sin: Any) -> tuple[Any, ...]:
        """Values of the new token's place that all layers share."""
        return length.long(), (self.places <= length).view(1, 1, 1, -1), cos[length], sin[length]

    def attend(self, layer: Any, q: Any, k: Any, v: Any, at: Any, mask: Any, cos: Any, sin: Any) -> Any:
        q, k = (rotated(part, cos, sin).unsqueeze(2) for part in (q, k))
        layer.keys.index_copy_(2, at, k)
        layer.values.index_copy_(2, at, v.unsqueeze(2))
        return F.scaled_dot_product_attention(q, layer.keys, layer.values, mask, enable_gqa=True).flatten(1)

    def gated(self, x: Any, layer: Any) -> Any:
        return F.silu(F.linear(x, layer.gate)) * F.linear(x, layer.up)

    def added(self, x: Any, w: Any, to: Any) -> Any:
        return to + F.linear(x, w)

    def forward(self, x: Any, length: Any, cos: Any, sin: Any) -> Any:
        place = self.place(x, length, cos, sin)
        for layer in self.layers:
            x = self.added(self.attend(layer, *self.split(x, layer), *place), layer.out, x)
            hidden = self.gated(F.rms_norm(x, (self.width,), layer.between, EPSILON), layer)
            x = self.added(hidden, layer.down, x)
        return x


class TileDecoder(Decoder):
    """The same with operations of Tilewright, and pages."""

    joined = False
    """True: gate and up are one product."""

    def prepare(self, past: list[tuple[Any, Any]], room: int) -> None:
        batch, device = past[0][0].shape[0], past[0][0].device
        pages = -(-room // PAGE)
        self.register_buffer("table", torch.arange(batch * pages, device=device, dtype=torch.int32).view(batch, pages))
        for layer, pair in zip(self.layers, past, strict=True):
            full = (F.pad(value, (0, 0, 0, pages * PAGE - value.shape[2])) for value in pair)
            # [B, heads, pages * PAGE, HEAD] to [B * pages, PAGE, heads, HEAD]
            paged = (value.unflatten(2, (pages, PAGE)).permute(0, 2, 3, 1, 4).flatten(0, 1) for value in full)
            layer.hold(*(value.contiguous() for value in paged))
            if self.joined:
                layer.register_buffer("joined", torch.cat((layer.gate, layer.up)))

    def linear(self, x: Any, w: Any) -> Any:
        return twt.linear(x, w)

    def place(self, x: Any, length: Any, cos: Any, sin: Any) -> tuple[Any, ...]:
        lengths = length.expand(len(x)).contiguous()
        words = {"block_table": self.table, "rotary_cos": cos, "rotary_sin": sin, "rotary": "half"}
        return lengths, lengths + 1, words, cos[length], sin[length]

    def attend(self, layer: Any, q: Any, k: Any, v: Any, held: Any, holds: Any, words: Any, cos: Any, sin: Any) -> Any:
        twt.kv_append(k.unsqueeze(2), v.unsqueeze(2), layer.keys, layer.values, held, **words)
        q = rotated(q, cos, sin).unsqueeze(2)
        return twt.attention_paged(q, layer.keys, layer.values, self.table, holds).flatten(1)

    def gated(self, x: Any, layer: Any) -> Any:
        if hasattr(layer, "joined"):
            gate, up = twt.linear(x, layer.joined).chunk(2, -1)
            return F.silu(gate) * up
        gate = twt.gemm(x, layer.gate.t(), activation="silu")
        return twt.gemm(x, layer.up.t(), d=[gate], binary="multiply")

    def added(self, x: Any, w: Any, to: Any) -> Any:
        return twt.gemm(x, w.t(), d=[to], binary="add")


def rotated(x: Any, cos: Any, sin: Any) -> Any:
    """Turn element t with t + HEAD / 2, ``[B, heads, HEAD]``."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def waits(device: str) -> Callable[[], None]:
    return torch.cuda.synchronize if device.startswith("cuda") else lambda: None


def best_s(step: Callable[[], Any], wait: Callable[[], None], seconds: float) -> float:
    """Seconds of a step, the least mean of rounds of several steps."""
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds / 4 or count < 2:
        step()
        count += 1
    wait()
    least = float("inf")
    for _ in range(4):
        begin = time.perf_counter()
        for _ in range(count):
            step()
        wait()
        least = min(least, (time.perf_counter() - begin) / count)
    return least


def in_graph(step: Callable[[], Any]) -> Callable[[], Any]:
    """``step`` in a CUDA graph of one's own."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


def compare(given: argparse.Namespace, batch: int) -> bool:
    """Print a line; False if the results are not the same."""
    kind: dict[str, Any] = {"device": given.device, "dtype": getattr(torch, given.dtype)}
    torch.manual_seed(0)
    heads = given.width // HEAD
    shared = max(1, heads // 4)
    layers = [Layer(given.width, heads, shared, kind) for _ in range(given.layers)]
    shape = (batch, shared, given.context, HEAD)
    past = [(torch.randn(shape, **kind), torch.randn(shape, **kind)) for _ in layers]
    x = torch.randn(batch, given.width, **kind)
    length = torch.tensor([given.context], device=given.device, dtype=torch.int32)
    turns = torch.outer(torch.arange(given.context + 1), 1e4 ** (-torch.arange(0, HEAD, 2) / HEAD))
    on_gpu, wait = given.device.startswith("cuda"), waits(given.device)
    operands = x, length, *(part.to(**kind) for part in (turns.cos(), turns.sin()))
    rates: dict[str, float] = {}
    results = []
    for name, kind_of_model in (("PyTorch", Decoder), ("Tilewright", TileDecoder)):
        # The step is the same each time: it writes the token behind the context again.
        model = kind_of_model(layers, given.width, heads, shared)
        model.joined = given.gate == "joined"
        model.prepare(past, given.context + 1)

        def plain(model: Any = model) -> Any:
            return model(*operands)

        steps = {name: plain}
        if on_gpu:
            steps[f"{name}, graph"] = in_graph(plain)
        if given.compile:
            torch.compiler.reset()
            compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead" if on_gpu else None)
            steps[f"{name}, compiled"] = lambda compiled=compiled: compiled(*operands)
        for way, step in steps.items():
            results.append(step().clone())
            rates[way] = batch / best_s(step, wait, given.seconds)
    cosines = [
        F.cosine_similarity(results[0].double().flatten(), found.double().flatten(), dim=0).item()
        for found in results[1:]
    ]
    ours = max(rate for name, rate in rates.items() if name.startswith("Tilewright"))
    theirs = rates.get("PyTorch, compiled", rates["PyTorch"])
    shown = "".join(f"  {name}: {rate:,.0f}\n" for name, rate in rates.items())
    sys.stdout.write(f"batch {batch}\n{shown}  ratio {ours / theirs:.2f}, least cosine {min(cosines):.5f}\n")
    sys.stdout.flush()
    return min(cosines) >= AGREES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="", help="server; default: your own if it runs, else one for this run")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=4096, help="a multiple of 128")
    parser.add_argument("--context", type=int, default=2048, help="tokens that each sequence has")
    parser.add_argument("--batches", default="1,16,64")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each measurement")
    parser.add_argument("--gate", choices=("joined", "fused"), default="joined", help="how Tilewright makes it")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="without torch.compile")
    given = parser.parse_args()
    sys.stdout.write(f"{given.layers} layers of {given.width}, {given.context} tokens each: tokens per second\n")
    with minilm.server(given.target) as client, torch.no_grad():
        twt.use(client)
        same = [compare(given, int(batch)) for batch in given.batches.split(",")]
        return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
