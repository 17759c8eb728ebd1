"""Options of fused steps, the same for every operation that ends in the steps of ``vocabulary``."""

from __future__ import annotations

from tilewright_kit.commands.parameters import option
from tilewright_kit.types.vocabulary import SLOPES, Binary, Unary

__all__ = ["ACTIVATION", "BINARY", "CLAMP", "SLOPE", "SPLIT_K"]

_ACTIVATIONS = tuple(step.value for step in Unary if step not in (Unary.NONE, Unary.CLAMP))
_BINARIES = tuple(step.value for step in Binary if step is not Binary.NONE)
_SLOPES = " and ".join(f"{step.value} (else {default:g})" for step, default in SLOPES.items())

ACTIVATION = option("activation", "", f"One of {', '.join(_ACTIVATIONS)}.", words=_ACTIVATIONS, strict=True)
BINARY = option("binary", "", f"Step that brings them in: {', '.join(_BINARIES)}.", words=_BINARIES, strict=True)
CLAMP = option("clamp", "", "Bounds of the result: 0:6, 0: or :6.", metavar="LOW:HIGH")
SLOPE = option("slope", "", f"Factor below zero of {_SLOPES}.", metavar="NUMBER")
SPLIT_K = option("split_k", 0, "Parts that the sums are made in; 0: the planner decides.", least=0)
