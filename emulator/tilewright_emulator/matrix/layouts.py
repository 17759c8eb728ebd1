"""Where matrix instructions keep the elements of their operands: the data sheets, and index arrays made of them.

Written from the ISA documents (CDNA2, CDNA3, CDNA4, RDNA3, RDNA4: chapters on matrix arithmetic), not from any kernel.
An operand is a set of blocks of rows (A: i, B: j) by k; the result a set of blocks of i by j. A sheet says for every
element the lane and the place within the lane; places count elements from the lowest bits of the first register on.

MFMA, wave of 64. With ``e = M * K * blocks / 64`` elements of A in a lane:
    A[block b][i][k]   lane i + M * (b + blocks * (k / e)), place k % e; B likewise with j and N
    but 8-bit operands of the gfx950 shapes with K of 64 and 128 come in two runs of 16:
    A[i][k]            lane i + M * (k / 16 % lanes_of_k), place 16 * (k / 16 / lanes_of_k) + k % 16
    D[b][i][j]         M of 32 or 16, with g = 64 / N: lane j + N * (i / 4 % g),
                       place b * M * N / 64 + 4 * (i / 4 / g) + i % 4
                       M of 4: lane j + 4 * b, place i
WMMA of gfx11, wave of 32 (lanes 16 to 31 hold the same A and B as lanes 0 to 15):
    A[i][k]            lanes i and i + 16, place k;                     D[i][j]: lane j + 16 * (i % 2), place i / 2
WMMA of gfx12, wave of 32:
    A[i][k]            lane i + 16 * (k / 8), place k % 8;              D[i][j]: lane j + 16 * (i / 8), place i % 8
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from tilewright_emulator.isa.registers import Array


@dataclass(frozen=True)
class Shape:
    """A matrix instruction's sizes. ``run``: consecutive k in a lane; 0 means all that the lane holds."""

    m: int
    n: int
    k: int
    blocks: int = 1
    run: int = 0
    lanes: int = 64

    @property
    def held(self) -> int:
        """Elements of A (and of B: M equals N) in a lane."""
        return self.m * self.k * self.blocks // self.lanes

    @property
    def results(self) -> int:
        """Elements of D in a lane."""
        return self.m * self.n * self.blocks // self.lanes


def _grid(*sizes: int) -> tuple[Array, ...]:
    return tuple(np.indices(sizes))


@functools.cache
def mfma_operand(shape: Shape) -> Array:
    """For each element of A, shape ``(blocks, M, K)``: lane * held + place."""
    b, i, k = _grid(shape.blocks, shape.m, shape.k)
    held = shape.held
    run = shape.run or held
    groups = shape.lanes // (shape.m * shape.blocks)  # lanes that share a row and divide its k among them
    lane = i + shape.m * (b + shape.blocks * (k // run % groups))
    place = run * (k // run // groups) + k % run
    return np.asarray(lane * held + place)


@functools.cache
def mfma_result(shape: Shape) -> Array:
    """For each register and lane, shape ``(results, 64)``: the element of D, counted in ``(blocks, M, N)``."""
    b, i, j = _grid(shape.blocks, shape.m, shape.n)
    if shape.m == 4:
        lane, place = j + 4 * b, i
    else:
        groups = 64 // shape.n
        lane = j + shape.n * (i // 4 % groups)
        place = b * (shape.m * shape.n // 64) + 4 * (i // 4 // groups) + i % 4
    return _inverted(lane, place, shape)


@functools.cache
def wmma_operand(generation: int, k_size: int) -> Array:
    """For each element of A, shape ``(16, K)``: lane * held + place."""
    i, k = _grid(16, k_size)
    if generation == 11:
        return np.asarray(i * k_size + k)
    half = k_size // 2
    return np.asarray((i + 16 * (k // half)) * half + k % half)


@functools.cache
def wmma_result(generation: int) -> Array:
    """For each place and lane, shape ``(8, 32)``: the element of D, counted in ``(16, 16)``."""
    _, i, j = _grid(1, 16, 16)
    if generation == 11:
        lane, place = j + 16 * (i % 2), i // 2
    else:
        lane, place = j + 16 * (i // 8), i % 8
    return _inverted(lane, place, Shape(16, 16, 16, lanes=32))


def _inverted(lane: Array, place: Array, shape: Shape) -> Array:
    elements = np.full((shape.results, shape.lanes), -1)
    elements[place.ravel(), lane.ravel()] = np.arange(lane.size)
    assert (elements >= 0).all(), "a place that holds no element"
    return elements


def broadcast_blocks(blocks: int, size: int, chosen: int) -> Array:
    """Which block of A each block uses: within every 2**size blocks, number ``chosen`` (CBSZ and ABID)."""
    group = 1 << size
    b = np.arange(blocks)
    return np.asarray(b // group * group + chosen)


def swizzled_lanes(pattern: int) -> Array:
    """Which lane of B each lane uses (BLGP): halves or quarters broadcast, or all turned by 16 lanes."""
    lane = np.arange(64)
    if pattern == 0:
        return lane
    if pattern in (1, 2):
        return np.asarray(lane % 32 + 32 * (pattern - 1))
    if pattern == 3:
        return np.asarray((lane + 16) % 64)
    return np.asarray(lane % 16 + 16 * (pattern - 4))
