"""Lists of products for data of selection: training, and a hold-out that no training ever sees.

    python bench/lab/selection_shapes.py train bf16 > train.csv
    python bench/lab/selection_shapes.py holdout bf16 > holdout.csv

Training has sizes drawn uniformly in their logarithms, layers of networks, primes, tails, counts around whole rounds of
132 units, and few rows. The hold-out has layers of other networks and other draws; products of both are left out of the
training.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence

Shape = tuple[int, int, int]
_LARGEST = 200 << 20
"""Elements of all operands together: larger ones measure the allocator."""
_TRAINED = (  # (n, k) of layers: Llama 7B, 8B, 70B; Mistral; BERT; GPT-2; T5; ViT
    (4096, 4096), (11008, 4096), (4096, 11008), (6144, 4096), (28672, 4096), (4096, 14336), (8192, 8192),
    (10240, 8192), (28672, 8192), (8192, 28672), (1024, 1024), (3072, 768), (768, 3072), (2304, 768), (4096, 1024),
    (1600, 6400), (4800, 1600), (1280, 5120), (3840, 1280),
)  # fmt: skip
_HELD_OUT = (  # Qwen2 7B, Gemma 2B and 9B, Phi-3, DeepSeek-V2 Lite, Whisper, CLIP, DiT
    (4608, 3584), (18944, 3584), (3584, 18944), (2048, 16384), (16384, 2048), (3584, 4096), (14336, 3584),
    (9216, 3072), (3072, 8192), (2816, 2048), (5120, 1280), (1152, 4608), (3456, 1152),
)  # fmt: skip


def _uniform(rng: random.Random, low: int, high: int, step: int) -> int:
    value = low * (high / low) ** rng.random()
    return max(step, round(value / step) * step)


def _drawn(rng: random.Random, count: int) -> Iterator[Shape]:
    for _ in range(count):
        step = rng.choice((8, 8, 64, 128))
        yield (
            _uniform(rng, 64, 12000, rng.choice((1, 8, 64, 128))),
            _uniform(rng, 64, 16000, step),
            _uniform(rng, 64, 16000, step),
        )


def _few_rows(rng: random.Random, layers: Sequence[tuple[int, int]], count: int) -> Iterator[Shape]:
    for _ in range(count):
        n, k = rng.choice(layers)
        yield rng.choice((1, 2, 4, 7, 8, 13, 16, 24, 32, 33, 48, 64, 80, 96, 128, 192)), n, k


def _layers(rng: random.Random, layers: Sequence[tuple[int, int]], count: int) -> Iterator[Shape]:
    for _ in range(count):
        n, k = rng.choice(layers)
        yield rng.choice((197, 256, 384, 512, 577, 1000, 1024, 1500, 2048, 3000, 4096, 8192)), n, k


def _primes(rng: random.Random, count: int) -> Iterator[Shape]:
    for _ in range(count):
        yield (
            rng.choice((67, 131, 257, 509, 1021, 2039, 4093)),
            8 * rng.choice((17, 37, 61, 127, 251, 509)),
            8 * (rng.choice((13, 53, 127, 251, 499, 997))),
        )


def _rounds(rng: random.Random, count: int) -> Iterator[Shape]:
    """One tile less than whole rounds, as many, and one more."""
    for _ in range(count):
        tiles = 132 * rng.choice((1, 1, 2, 3)) + rng.choice((-4, 0, 4))
        rows = rng.choice((4, 6, 8, 11, 12))
        yield 128 * rows, 128 * max(tiles // rows, 1), rng.choice((512, 1024, 2048, 4096, 8192))


def _tall(rng: random.Random, count: int) -> Iterator[Shape]:
    """Few columns, and long sums of small outputs."""
    for place in range(count):
        if place % 2:
            yield _uniform(rng, 1000, 60000, 8), rng.choice((8, 16, 32, 64, 96)), _uniform(rng, 256, 8000, 64)
        else:
            yield _uniform(rng, 64, 700, 8), _uniform(rng, 64, 700, 8), _uniform(rng, 4000, 60000, 64)


def shapes(kind: str) -> list[Shape]:
    """The list of one kind, in an order that mixes classes, so that a part of it is a sample."""
    held: dict[Shape, None] = {}
    rng = random.Random(2)
    for part in (
        _drawn(rng, 16), _few_rows(rng, _HELD_OUT, 14), _layers(rng, _HELD_OUT, 16), _primes(rng, 4), _rounds(rng, 5),
        _tall(rng, 5),
    ):  # fmt: skip
        held.update(dict.fromkeys(part))
    found: dict[Shape, None] = held
    if kind == "train":
        rng, found = random.Random(1), {}
        for part in (
            _drawn(rng, 90), _few_rows(rng, _TRAINED, 60), _layers(rng, _TRAINED, 55), _primes(rng, 14),
            _rounds(rng, 20), _tall(rng, 20),
        ):  # fmt: skip
            found.update(dict.fromkeys(item for item in part if item not in held))
    usable = [item for item in found if item[0] * item[2] + item[1] * item[2] + item[0] * item[1] <= _LARGEST]
    random.Random(3).shuffle(usable)
    return usable


def main() -> None:
    """Print the list as CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("train", "holdout"))
    parser.add_argument("dtype", choices=("bf16", "fp8"))
    given = parser.parse_args()
    print("m,n,k,dtype,out_dtype")
    for m, n, k in shapes(given.kind):
        if given.dtype == "bf16" or (n % 16 == 0 and k % 16 == 0):
            print(f"{m},{n},{k},{given.dtype},{'bf16' if given.dtype == 'fp8' else ''}")


if __name__ == "__main__":
    main()
