"""Encode sentences with all-MiniLM-L6-v2 in PyTorch, as it is and through ``torch.compile(backend="tilewright")``.

    python examples/torch_minilm.py
    python examples/torch_minilm.py --choose always --rest eager "one sentence" "another"

Needs PyTorch, and the weights and tokenizer of ``minilm.py``. A server is started for the run unless yours runs. With
``--choose measured`` (the default) each product and attention goes to whoever was faster when the model was compiled;
what that was is printed. ``--rest inductor`` (the default) needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections import Counter
from typing import Any

import minilm
import torch

import tilewright.torch as twt

F = torch.nn.functional
COSINE_FLOOR = 0.99999


class Encoder(torch.nn.Module):
    """BERT's encoder, then the mean over each sentence's tokens."""

    def __init__(self, weights: dict[str, Any]) -> None:
        super().__init__()
        self.names = {}
        for index, (name, value) in enumerate(weights.items()):
            self.names[name] = f"w{index}"
            # Linear layers have [out, in], of which the weights here are views.
            plain = value.T if name[0].isdigit() and value.ndim == 2 else value
            self.register_buffer(f"w{index}", torch.from_numpy(plain))

    def _weight(self, name: str) -> Any:
        return getattr(self, self.names[name])

    def _normal(self, x: Any, name: str) -> Any:
        return F.layer_norm(
            x, x.shape[-1:], self._weight(f"{name}.weight"), self._weight(f"{name}.bias"), minilm.EPSILON
        )

    def _linear(self, x: Any, name: str) -> Any:
        return F.linear(x, self._weight(f"{name}.weight"), self._weight(f"{name}.bias"))

    def forward(self, ids: Any, mask: Any) -> Any:
        words = F.embedding(ids, self._weight("embeddings.word_embeddings.weight"))
        places = self._weight("embeddings.position_embeddings.weight")[: ids.shape[1]]
        x = words + places + self._weight("embeddings.token_type_embeddings.weight")[0]
        x = self._normal(x, "embeddings.LayerNorm")
        bias = torch.where(mask, 0.0, -1e9)[:, None, None, :]
        for layer in range(minilm.LAYERS):
            heads = self._linear(x, f"{layer}.qkv").unflatten(-1, (3, minilm.HEADS, -1)).transpose(1, 3)
            q, k, v = heads.unbind(2)
            joined = F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(2)
            x = self._normal(x + self._linear(joined, f"{layer}.out"), f"{layer}.norm1")
            up = F.gelu(self._linear(x, f"{layer}.up"))
            x = self._normal(x + self._linear(up, f"{layer}.down"), f"{layer}.norm2")
        kept = mask[:, :, None].to(x.dtype)
        return F.normalize((x * kept).sum(1) / kept.sum(1), dim=1)


def main() -> int:
    parser = argparse.ArgumentParser(description="Encode sentences with all-MiniLM-L6-v2 in PyTorch.")
    parser.add_argument("sentences", nargs="*", default=list(minilm.SENTENCES))
    parser.add_argument("--target", default="", help="server; default: your own if it runs, else one for this run")
    parser.add_argument("--choose", default="measured", choices=["measured", "always"])
    parser.add_argument("--rest", default="inductor", help="backend of what Tilewright does not do")
    options = parser.parse_args()
    try:
        weights, tokens = minilm.load_weights(), minilm.tokenize(options.sentences)
    except minilm.MissingPackageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 4
    model = Encoder(weights).eval()
    given = torch.from_numpy(tokens.ids), torch.from_numpy(tokens.mask).bool()
    with minilm.server(options.target) as client, torch.no_grad():
        twt.use(client)
        plain = torch.compile(model, backend=options.rest)
        ours = torch.compile(model, backend="tilewright", options={"choose": options.choose, "rest": options.rest})
        plain(*given)
        first_s, _ = minilm.best_of(lambda: ours(*given), 1)
        calls = {"eager": model, "plain": plain, "ours": ours}
        taken = minilm.in_turns({name: functools.partial(call, *given) for name, call in calls.items()})
        (eager_s, expected), (plain_s, _), (ours_s, found) = taken.values()
    rows, length = tokens.ids.shape
    print(f"all-MiniLM-L6-v2 in PyTorch {torch.__version__}, {rows} sentences of up to {length} tokens")
    for decision, count in Counter(twt.report()).items():
        times = f", {decision.ours_us:.0f} us, PyTorch {decision.pytorch_us:.0f} us" if decision.ours_us else ""
        side = "Tilewright" if decision.replaced else "PyTorch"
        print(f"  {count} x {side}: {decision.problem} ({decision.reason}{times})")
    print(
        f"time: {ours_s * 1e3:.1f} ms; {options.rest} alone {plain_s * 1e3:.1f} ms, eager {eager_s * 1e3:.1f} ms; "
        f"first run, with its builds and measurements, {first_s:.2f} s"
    )
    lowest = float((found * expected).sum(1).min())
    print(f"{'OK' if lowest >= COSINE_FLOOR else 'FAILED'}: lowest cosine to plain PyTorch {lowest:.8f}")
    return 0 if lowest >= COSINE_FLOOR else 1


if __name__ == "__main__":
    raise SystemExit(main())
