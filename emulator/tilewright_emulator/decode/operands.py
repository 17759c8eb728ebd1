"""Operand access: readers and writers of each operand type, and steps made of a function and its signature."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright_emulator.decode import modifiers
from tilewright_emulator.decode.registry import Semantic, Step, is_implicit
from tilewright_emulator.errors import UnknownInstruction
from tilewright_emulator.isa.arch import Arch
from tilewright_emulator.isa.instruction import Instruction, Operand
from tilewright_emulator.isa.registers import EXEC, NULL, VCC, Array
from tilewright_emulator.state.waves import Waves, widened

Reader = Callable[[Waves], Array]
Writer = Callable[[Waves, Array], None]
MakeReader = Callable[[Instruction, Operand, int, Arch], Reader]
MakeWriter = Callable[[Instruction, Operand, Arch], Writer]

U32, U64 = np.uint32, np.uint64


@dataclass(frozen=True)
class OperandType:
    """``reader(instruction, operand, source, arch)``: ``source`` counts the printed sources from 0."""

    reader: MakeReader
    writer: MakeWriter


TYPES: dict[str, OperandType] = {}


def register_type(name: str, reader: MakeReader, writer: MakeWriter) -> None:
    """Makes an operand type known; alu modules add theirs (16-bit, packed ...)."""
    if name in TYPES:
        raise ValueError(f"operand type {name} is registered twice")
    TYPES[name] = OperandType(reader, writer)


# ---- constants ----


def bits32(operand: Operand) -> int:
    """A constant as a 32-bit operation sees it."""
    if isinstance(operand.value, float):
        return int(struct.unpack("<I", struct.pack("<f", operand.value))[0])
    return operand.value & 0xFFFFFFFF


def bits64(operand: Operand, kind: str) -> int:
    """A constant as a 64-bit operation sees it: a literal is the high half of an f64, else extended."""
    if isinstance(operand.value, float):
        return int(struct.unpack("<Q", struct.pack("<d", operand.value))[0])
    if kind == "f64" and operand.text.lstrip("-").startswith("0x"):
        return (operand.value & 0xFFFFFFFF) << 32
    value = operand.value
    if kind == "i64" and operand.text.startswith("0x") and value <= 0xFFFFFFFF and value & 0x80000000:
        value -= 1 << 32
    return value & 0xFFFFFFFFFFFFFFFF


# ---- readers ----


def read_bits(instruction: Instruction, operand: Operand, source: int, arch: Arch) -> Reader:
    """Raw 32-bit lanes of a one-register operand, with what DPP and SDWA do to them, without neg and abs."""
    index = operand.index
    if operand.kind == "v":
        change = modifiers.source_lanes(instruction, operand, source, arch)
        return _changed(lambda w: w.u32[index], change)
    if operand.kind == "s":
        change = modifiers.source_lanes(instruction, operand, source, arch)
        if index == NULL:
            return constant(np.zeros((1, 1), U32))
        return _changed(lambda w: w.s_u32[index], change)
    if operand.kind == "scc":
        return lambda w: w.scc.astype(U32)
    return constant(np.array([[bits32(operand)]], U32))


def _changed(read: Reader, change: Callable[[Waves, Array], Array] | None) -> Reader:
    return read if change is None else lambda w: change(w, read(w))


def constant(value: Array) -> Reader:
    value.flags.writeable = False
    return lambda w: value


def _signs(operand: Operand, read: Reader) -> Reader:
    """Applies |x| and -x to floats."""
    negative, absolute = operand.negative, operand.absolute
    if negative and absolute:
        return lambda w: -np.abs(read(w))
    if absolute:
        return lambda w: np.abs(read(w))
    if negative:
        return lambda w: -read(w)
    return read


def _reader32(dtype: Any, rows: str) -> MakeReader:
    def make(instruction: Instruction, operand: Operand, source: int, arch: Arch) -> Reader:
        if rows != "f32" and (operand.negative or operand.absolute):
            raise UnknownInstruction(f"neg or abs of an integer: {instruction.text}")
        index = operand.index
        plain = modifiers.source_lanes(instruction, operand, source, arch) is None and index != NULL
        if operand.kind == "v" and plain:
            if rows == "f32":
                return _signs(operand, lambda w: w.f32[index])
            if rows == "i32":
                return lambda w: w.i32[index]
            return lambda w: w.u32[index]
        if operand.kind == "s" and plain:
            if rows == "f32":
                return _signs(operand, lambda w: w.s_f32[index])
            if rows == "i32":
                return lambda w: w.s_i32[index]
            return lambda w: w.s_u32[index]
        if operand.kind == "constant":
            value = np.array([[bits32(operand)]], U32).view(dtype)
            return _signs(operand, constant(value)) if rows == "f32" else constant(value)
        bits = read_bits(instruction, operand, source, arch)

        def cast(w: Waves) -> Array:
            return bits(w).view(dtype)

        return _signs(operand, cast) if rows == "f32" else cast

    return make


def _read_pair(index: int, dtype: Any) -> Reader:
    def read(w: Waves) -> Array:
        wide = w.u32[index + 1].astype(U64)
        wide <<= U64(32)
        wide |= w.u32[index]
        return wide.view(dtype)

    return read


def _reader64(dtype: Any, kind: str) -> MakeReader:
    def make(instruction: Instruction, operand: Operand, source: int, arch: Arch) -> Reader:
        index = operand.index
        if operand.kind == "v":
            if modifiers.source_lanes(instruction, operand, source, arch) is not None:
                raise UnknownInstruction(f"DPP or SDWA of a 64-bit operand: {instruction.text}")
            return _signs(operand, _read_pair(index, dtype))
        if operand.kind != "s":
            return _signs(operand, constant(np.array([[bits64(operand, kind)]], U64).view(dtype)))
        if index & 1:
            raise UnknownInstruction(f"odd pair of scalar registers: {instruction.text}")
        if index == NULL:
            return constant(np.zeros((1, 1), dtype))
        return _signs(operand, lambda w: w.s_u64[index >> 1].view(dtype))

    return make


def read_mask(instruction: Instruction, operand: Operand, source: int, arch: Arch) -> Reader:
    """A lane mask, bool ``(waves, lanes)``."""
    index = operand.index
    if operand.kind == "constant":
        bits = bits64(operand, "i64")
        lanes = np.array([[bool(bits >> lane & 1) for lane in range(arch.lanes)]])
        return constant(lanes)
    return lambda w: w.read_mask(index)


# ---- writers ----


def write_bits(instruction: Instruction, operand: Operand, arch: Arch) -> Writer:
    """Writes 32-bit values of any dtype: active lanes of a vector register, or a scalar register."""
    index = operand.index
    if operand.kind == "s":
        if index in (EXEC, EXEC + 1):

            def write_exec(w: Waves, value: Array) -> None:
                w.s_u32[index][...] = value.view(U32)
                w.sync_exec()

            return write_exec
        if index == NULL:
            return lambda w, value: None

        def write_scalar(w: Waves, value: Array) -> None:
            w.s_u32[index][...] = value.view(U32)

        return write_scalar
    change = modifiers.result_lanes(instruction, operand, arch)
    if change is not None:

        def write_changed(w: Waves, value: Array) -> None:
            final, lanes = change(w, value)
            np.copyto(w.u32[index], final.view(U32), where=lanes)

        return write_changed

    def write(w: Waves, value: Array) -> None:
        if w.full:
            w.u32[index][...] = value.view(U32)
        else:
            np.copyto(w.u32[index], value.view(U32), where=w.exec)

    return write


def write_bits64(instruction: Instruction, operand: Operand, arch: Arch) -> Writer:
    """Writes 64-bit values of any dtype to a pair of registers."""
    index = operand.index
    if operand.kind == "s":

        def write_scalar(w: Waves, value: Array) -> None:
            if index != NULL:
                w.s_u64[index >> 1][...] = value.view(U64)
            if index == EXEC:
                w.sync_exec()

        return write_scalar
    if modifiers.result_lanes(instruction, operand, arch) is not None:
        raise UnknownInstruction(f"modifier of a 64-bit result: {instruction.text}")

    def write(w: Waves, value: Array) -> None:
        wide = value.view(U64)
        np.copyto(w.u32[index], wide.astype(U32), where=w.exec)
        np.copyto(w.u32[index + 1], (wide >> U64(32)).astype(U32), where=w.exec)

    return write


def write_mask(instruction: Instruction, operand: Operand, arch: Arch) -> Writer:
    """A comparison's result: one bit for each active lane, zeros for the others."""
    index = operand.index
    return lambda w, value: w.write_mask(index, value & w.exec)


for _kind, _dtype in (("u32", np.uint32), ("i32", np.int32), ("f32", np.float32)):
    register_type(_kind, _reader32(_dtype, _kind), write_bits)
for _kind, _dtype in (("u64", np.uint64), ("i64", np.int64), ("f64", np.float64)):
    register_type(_kind, _reader64(_dtype, _kind), write_bits64)
register_type("mask", read_mask, write_mask)


# ---- implicit operands ----


def _write_scc(w: Waves, value: Array) -> None:
    w.scc = widened(value, (w.count, 1)).astype(bool)


IMPLICIT_READERS: dict[str, Reader] = {
    "scc": lambda w: w.scc,
    "vcc": lambda w: w.read_mask(VCC),
    "exec": lambda w: w.exec,
}
IMPLICIT_WRITERS: dict[str, Writer] = {
    "scc": _write_scc,
    "vcc": lambda w, value: w.write_mask(VCC, value & w.exec),
    "exec": lambda w, value: w.set_exec(value & w.exec),
}


# ---- steps ----


@dataclass(frozen=True)
class Operation:
    """An instruction in two halves, so that a VOPD pair can read all before it writes."""

    readers: tuple[Reader, ...]
    function: Callable[..., Any]
    writers: tuple[Writer, ...]

    def compute(self, w: Waves) -> Any:
        return self.function(*[read(w) for read in self.readers])

    def commit(self, w: Waves, result: Any) -> None:
        if len(self.writers) == 1:
            self.writers[0](w, result)
        else:
            for write, value in zip(self.writers, result, strict=True):
                write(w, value)


def operation(row: Semantic, instruction: Instruction, arch: Arch) -> Operation:
    """Readers and writers for the printed operands, by the signature's types."""
    assert row.function is not None
    printed = [Operand.parse(text) for text in instruction.operands]
    needed = row.written + sum(not is_implicit(kind) for kind in row.src)
    if len(printed) != needed:
        raise UnknownInstruction(f"{instruction.text}: {len(printed)} operands, its semantics have {needed}")
    writers, readers, position = [], [], 0
    for kind in row.dst:
        if kind in IMPLICIT_WRITERS:
            writers.append(IMPLICIT_WRITERS[kind])
        else:
            writers.append(TYPES[kind].writer(instruction, printed[position], arch))
            position += 1
    for kind in row.src:
        if kind in IMPLICIT_READERS:
            readers.append(IMPLICIT_READERS[kind])
        elif kind.startswith("dst:"):  # the destination's old value, without the sources' modifiers
            readers.append(TYPES[kind[4:]].reader(instruction, printed[0], -1, arch))
        else:
            readers.append(TYPES[kind].reader(instruction, printed[position], position - row.written, arch))
            position += 1
    modifiers.check_modifiers(instruction, row.dst + row.src)
    function = modifiers.wrap_function(row.function, instruction, row.dst, arch)
    return Operation(tuple(readers), function, tuple(writers))


def step_of(row: Semantic, instruction: Instruction, arch: Arch) -> Step:
    """The closure that executes one instruction."""
    if row.build is not None:
        return row.build(instruction, arch)
    made = operation(row, instruction, arch)
    if len(made.writers) == 1:
        return _short_step(made, instruction, row, arch)
    readers, function, writers = made.readers, made.function, made.writers

    def step(w: Waves) -> None:
        for write, value in zip(writers, function(*[read(w) for read in readers]), strict=True):
            write(w, value)

    return step


def _short_step(made: Operation, instruction: Instruction, row: Semantic, arch: Arch) -> Step:
    """Without loops over operands, which cost as much as the arithmetic."""
    function, write = made.function, made.writers[0]
    if len(made.readers) == 1:
        (a,) = made.readers
        return lambda w: write(w, function(a(w)))
    if len(made.readers) == 2:
        a, b = made.readers
        return _in_place(function, a, b, instruction, row, arch) or (lambda w: write(w, function(a(w), b(w))))
    if len(made.readers) == 3:
        a, b, c = made.readers
        return lambda w: write(w, function(a(w), b(w), c(w)))
    readers = made.readers
    return lambda w: write(w, function(*[read(w) for read in readers]))


def _in_place(
    function: Callable[..., Any], a: Reader, b: Reader, instruction: Instruction, row: Semantic, arch: Arch
) -> Step | None:
    """A NumPy function of two 32-bit sources straight into the destination's row, if nothing stands between."""
    if not isinstance(function, np.ufunc) or row.dst[0] not in ("u32", "i32", "f32") or is_implicit(row.dst[0]):
        return None
    operand = instruction.operand(0)
    if operand.kind != "v" or modifiers.result_lanes(instruction, operand, arch) is not None:
        return None
    index, rows = operand.index, row.dst[0]

    def step(w: Waves) -> None:
        out = getattr(w, rows)[index]
        if w.full:
            function(a(w), b(w), out=out)
        else:
            function(a(w), b(w), out=out, where=w.exec)

    return step


def dual_step(first: Operation, second: Operation) -> Step:
    """A VOPD pair: both halves read their sources before either writes."""

    def step(w: Waves) -> None:
        one = np.array(first.compute(w))  # a copy: it may be a register's own row
        two = np.array(second.compute(w))
        first.commit(w, one)
        second.commit(w, two)

    return step
