"""Lists of attention and of convolutions for data of selection: training, and a hold-out that no training ever sees.

    python bench/lab/selection_layers.py train attention > attention.csv
    python bench/lab/selection_layers.py more conv > conv_more.csv
    python bench/lab/selection_layers.py holdout conv > conv_holdout.csv

The hold-out of convolutions has layers of other networks; that of attention other draws of lengths and heads. ``more``
is for training too: random layers, lengths and heads, none of which is a layer, or has lengths and heads, of the
hold-out.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from typing import Any

Row = dict[str, Any]
_LARGEST = 24 << 20
"""Elements of the largest operand."""
_LENGTHS = {
    "train": (128, 256, 384, 512, 577, 1000, 1024, 2048, 4096, 8192),
    "more": (64, 160, 200, 257, 384, 512, 729, 768, 1024, 1200, 1536, 2000, 2500, 4000, 5000, 8000),
    "holdout": (197, 320, 640, 1500, 3072, 6000),
}
_CACHES = {
    "train": (512, 1024, 2048, 4096, 8192, 32768),
    "more": (300, 512, 800, 1300, 2048, 2600, 4096, 5000, 8192, 10000, 24000, 65536),
    "holdout": (700, 3000, 6144, 16384),
}
_HEADS = {
    "train": ((12, 12), (16, 16), (32, 8), (32, 32), (8, 1)),
    "more": ((6, 6), (10, 10), (12, 12), (16, 16), (24, 24), (32, 8), (64, 8), (16, 2), (14, 2), (32, 32), (8, 1)),
    "holdout": ((20, 20), (28, 4), (40, 8)),
}
_COUNTS = {"train": 66, "more": 200, "holdout": 20}
_SEEDS = {"train": 1, "more": 3, "holdout": 2}
_LAYERS = {  # (channels, results, pixels, filter, stride)
    "train": (  # ResNet-50, VGG, MobileNet's pointwise, EfficientNet, U-Net of Stable Diffusion
        (64, 64, 56, 3, 1), (64, 256, 56, 1, 1), (256, 64, 56, 1, 1), (128, 128, 28, 3, 1), (256, 128, 56, 1, 1),
        (128, 512, 28, 1, 1), (256, 512, 56, 1, 2), (128, 128, 56, 3, 2), (256, 256, 14, 3, 1), (1024, 256, 14, 1, 1),
        (512, 512, 7, 3, 1), (512, 2048, 7, 1, 1), (1024, 2048, 14, 1, 2), (64, 128, 112, 3, 1), (256, 512, 28, 3, 1),
        (32, 64, 112, 1, 1), (96, 24, 56, 1, 1), (384, 64, 14, 1, 1), (960, 160, 7, 1, 1), (320, 1280, 7, 1, 1),
        (320, 320, 64, 3, 1), (640, 640, 32, 3, 1), (1280, 1280, 16, 3, 1), (320, 640, 32, 1, 1), (40, 240, 28, 1, 1),
        (320, 320, 64, 3, 2),
    ),
    "holdout": (  # ConvNeXt, RegNet, DenseNet, YOLO, a VAE's decoder
        (96, 384, 56, 1, 1), (192, 768, 28, 1, 1), (96, 192, 56, 2, 2), (224, 224, 28, 3, 1), (128, 32, 28, 3, 1),
        (80, 160, 40, 3, 2), (160, 160, 20, 3, 1), (512, 512, 32, 3, 1), (128, 128, 128, 3, 1), (448, 112, 14, 1, 1),
    ),
}  # fmt: skip


def attention(kind: str) -> list[Row]:
    """Forward passes, gradients, and steps of decoding, mixed."""
    rng = random.Random(_SEEDS[kind])
    found: dict[tuple[Any, ...], Row] = {}
    while len(found) < _COUNTS[kind]:
        heads, heads_k = rng.choice(_HEADS[kind])
        row: Row = {"heads": heads, "heads_k": heads_k, "hdim": rng.choice((64, 128, 128))}
        if rng.random() < 0.45:
            row |= {"seq_q": rng.choice((1, 1, 1, 2, 4)), "seq_k": rng.choice(_CACHES[kind]), "mask": ""}
            row |= {"batch": rng.choice((1, 4, 16, 32, 64)), "direction": "fwd"}
        else:
            length = rng.choice(_LENGTHS[kind])
            row |= {"seq_q": length, "seq_k": length, "mask": rng.choice(("", "top_left"))}
            row |= {"batch": rng.choice((1, 2, 4, 8, 16)), "direction": rng.choice(("fwd", "fwd", "fwd", "bwd"))}
        largest = row["batch"] * max(heads * row["seq_q"], heads_k * row["seq_k"]) * row["hdim"]
        if largest <= _LARGEST:
            found.setdefault(tuple(row.values()), row)
    return list(found.values())


def conv(kind: str) -> list[Row]:
    """Layers in the three directions, mixed."""
    rng = random.Random(_SEEDS[kind])
    found: list[Row] = []
    for channels, results, pixels, side, stride in _random_layers(rng) if kind == "more" else _LAYERS[kind]:
        for direction in ("fwd", "bwd_data", "bwd_weight"):
            fits = [n for n in (1, 4, 8, 16, 32, 64) if n * max(channels, results) * pixels * pixels <= _LARGEST]
            found.append({
                "n": rng.choice(fits), "c": channels, "k": results, "size": f"{pixels}x{pixels}",
                "filter": f"{side}x{side}", "stride": stride, "padding": side // 2 if side != 2 else 0,
                "direction": direction,
            })  # fmt: skip
    rng.shuffle(found)
    return found


def _random_layers(rng: random.Random) -> Iterator[tuple[int, int, int, int, int]]:
    """Layers of no network in particular; none is one of the hold-out."""
    channels = (16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 288, 384, 512, 576, 768, 1024, 1280, 1536, 2048)
    for _ in range(110):
        side = rng.choice((1, 1, 1, 3, 3, 3, 3, 5))
        stride = rng.choice((1, 1, 1, 2))
        pixels = rng.choice((7, 8, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128))
        layer = (rng.choice(channels), rng.choice(channels), pixels, side, stride)
        fits = layer[0] * layer[1] * side * side <= 1 << 24 and max(layer[:2]) * pixels * pixels <= _LARGEST
        if fits and layer not in _LAYERS["holdout"]:
            yield layer


def lines(rows: list[Row]) -> Iterator[str]:
    """The list as CSV."""
    yield ",".join(rows[0])
    yield from (",".join(str(value) for value in row.values()) for row in rows)


def main() -> None:
    """Print the list."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=tuple(_SEEDS))
    parser.add_argument("what", choices=("attention", "conv"))
    given = parser.parse_args()
    print("\n".join(lines((attention if given.what == "attention" else conv)(given.kind))))


if __name__ == "__main__":
    main()
