"""The loops of a function, and which of them is the main loop: the innermost one that multiplies most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilewright_tools.analysis.disassembly import Function, Instruction
from tilewright_tools.analysis.instructions import Kind, work_of

__all__ = ["Loop", "find_loops", "main_loop", "main_loops", "whole_loop"]


@dataclass(frozen=True, slots=True)
class Loop:
    """The blocks that one passes through on the way round, in the order of their addresses."""

    header: int
    """Address of the first instruction."""
    body: tuple[Instruction, ...]
    matrix_instructions: int
    lane_flops: int
    """FLOP of multiply-adds of the vector unit, in one lane."""
    branches: int
    """Conditional branches beside the one that closes the loop: parts of the body may be skipped."""


def find_loops(function: Function) -> tuple[Loop, ...]:
    """The natural loops of a function, by header, those that share one header as one."""
    blocks = _blocks(function)
    successors = {start: _successors(body, blocks) for start, body in blocks.items()}
    predecessors: dict[int, list[int]] = {start: [] for start in blocks}
    for start, targets in successors.items():
        for target in targets:
            predecessors[target].append(start)
    dominators = _dominators(function.address, predecessors)
    members: dict[int, set[int]] = {}
    for start, targets in successors.items():
        for target in targets:
            if target in dominators.get(start, ()):
                members.setdefault(target, {target}).update(_reaching(start, target, predecessors))
    return tuple(_loop(header, sorted(found), blocks) for header, found in sorted(members.items()))


def main_loop(function: Function) -> Loop | None:
    """The innermost loop with the most matrix instructions, or with the most multiply-adds if none has any; of several
    the one with the fewest branches. None if no loop multiplies.
    """
    loops = main_loops(function)
    return max(loops, key=lambda loop: (-loop.branches, len(loop.body)), default=None)


def main_loops(function: Function) -> tuple[Loop, ...]:
    """All innermost loops that multiply as much as the main loop does, the shortest one first."""
    loops = find_loops(function)
    inner = [
        loop
        for loop in loops
        if not any(other is not loop and _inside(other, loop) and _rank(other) > (0, 0) for other in loops)
    ]
    most = max((_rank(loop) for loop in inner), default=(0, 0))
    found = (loop for loop in inner if most > (0, 0) and _rank(loop) == most)
    return tuple(sorted(found, key=lambda loop: len(loop.body)))


def whole_loop(function: Function, inner: Loop) -> tuple[Loop, tuple[Loop, ...]]:
    """The loop around ``inner`` and the other loops that multiply, and these: the outermost one inside which no loop
    that multiplies contains another. ``inner`` itself, and none, if nothing around it multiplies between its loops.
    """
    multiplying = [loop for loop in find_loops(function) if loop.matrix_instructions]
    best, inside = inner, tuple[Loop, ...]()
    for loop in sorted(multiplying, key=lambda item: len(item.body)):
        contained = [other for other in multiplying if other is not loop and _inside(other, loop)]
        flat = not any(_inside(one, other) for one in contained for other in contained)
        if flat and any(other.header == inner.header for other in contained):
            best, inside = loop, tuple(contained)
    return best, inside


def _rank(loop: Loop) -> tuple[int, int]:
    return loop.matrix_instructions, loop.lane_flops


def _inside(inner: Loop, outer: Loop) -> bool:
    addresses = {item.address for item in outer.body}
    return len(inner.body) < len(outer.body) and all(item.address in addresses for item in inner.body)


def _blocks(function: Function) -> dict[int, list[Instruction]]:
    """Instructions by the address at which their basic block begins."""
    starts = {function.address}
    for instruction in function.instructions:
        if instruction.target is not None:
            starts |= {instruction.target, instruction.address + instruction.size}
    blocks: dict[int, list[Instruction]] = {}
    current: list[Instruction] = []
    for instruction in function.instructions:
        if instruction.address in starts:
            current = blocks.setdefault(instruction.address, [])
        current.append(instruction)
    return blocks


def _successors(body: Sequence[Instruction], blocks: Mapping[int, object]) -> tuple[int, ...]:
    last = body[-1]
    follow = last.address + last.size
    if last.mnemonic in ("s_endpgm", "s_setpc_b64"):
        return ()
    if last.target is None:
        found: tuple[int, ...] = (follow,)
    elif last.mnemonic == "s_branch":
        found = (last.target,)
    else:
        found = (last.target, follow)
    return tuple(address for address in found if address in blocks)


def _dominators(entry: int, predecessors: Mapping[int, Sequence[int]]) -> dict[int, set[int]]:
    """For each block that can be reached, the blocks on every way to it, itself included."""
    found: dict[int, set[int]] = {entry: {entry}}
    changed = True
    while changed:
        changed = False
        for block, before in predecessors.items():
            known = [found[item] for item in before if item in found]
            if block == entry or not known:
                continue
            now = set.intersection(*known) | {block}
            if found.get(block) != now:
                found[block], changed = now, True
    return found


def _reaching(latch: int, header: int, predecessors: Mapping[int, Sequence[int]]) -> set[int]:
    """Blocks from which ``latch`` is reached without passing ``header``."""
    found, pending = {header}, [latch]
    while pending:
        block = pending.pop()
        if block not in found:
            found.add(block)
            pending.extend(predecessors[block])
    return found


def _loop(header: int, starts: Sequence[int], blocks: Mapping[int, Sequence[Instruction]]) -> Loop:
    body = tuple(instruction for start in starts for instruction in blocks[start])
    conditional = sum(item.mnemonic.startswith("s_cbranch") for item in body)
    closing = sum(item.target == header and item.mnemonic.startswith("s_cbranch") for item in body)
    works = [work_of(item) for item in body]
    matrix = sum(work.kind is Kind.MATRIX for work in works)
    return Loop(header, body, matrix, sum(work.lane_flops for work in works), conditional - min(closing, 1))
