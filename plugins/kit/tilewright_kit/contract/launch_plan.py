"""Launch plans: execution plans as bytes, for libtilewright. docs/protocol.md has the format.

Little-endian, version 1: a header, then operands, stages, code objects, relocations, tensor maps, pairs of operands,
sizes and strides, and texts, each section at a multiple of 8 bytes, and at a multiple of 64 the image of all argument
blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from struct import Struct

from tilewright_kit.contract.arguments import ARGS, COUNTERS, WORKSPACE, PackedArgs, TensorMap, pack
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import ExecutionPlan
from tilewright_kit.contract.problem import Operand, Role, problem_name
from tilewright_kit.types.errors import InternalError, UnsupportedError

__all__ = ["FORMAT_VERSION", "MAX_OPERANDS", "MAX_PAIRS", "Entry", "launch_plan"]

FORMAT_VERSION = 1
MAX_OPERANDS = 4096
"""Operands, and stages, of a launch plan."""
MAX_PAIRS = 4096
"""Pairs of operands that are compared before every launch."""

_MAGIC = b"TWPLAN\0\0"
_KINDS = {"cpu": 1, "cuda": 2, "hip": 3}
_LINE = 64
_DEPENDENT = 1
_HEAD = Struct("<8sIIQ32s")
_REST = Struct("<10I5Q4I")
_OPERAND = Struct("<6IQ")
_STAGE = Struct("<14I2Q")
_OBJECT = Struct("<32sQ")
_RELOCATION = Struct("<QqII")
_MAP = Struct("<Qq6I5Q4Q5I6i3I")
_PAIR = Struct("<4I")
# Numbers of <cuda.h>: CUtensorMapDataType, CUtensorMapSwizzle, CUtensorMapL2promotion.
_MAP_TYPES = {"fp32": 7, "fp16": 6, "bf16": 9, "int32": 3, "int8": 0, "fp8": 0, "bf8": 0}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_FETCHES = {0: 0, 64: 1, 128: 2, 256: 3}


@dataclass(frozen=True, slots=True)
class Entry:
    """Entry point of a stage in a code object, which is named by the SHA-256 of its bytes."""

    sha256: bytes
    nbytes: int
    symbol: str


class _Texts:
    def __init__(self) -> None:
        self.data = bytearray(1)
        self._known = {"": 0}

    def add(self, text: str) -> int:
        """Offset of a text, which ends with a zero byte."""
        known = self._known.get(text)
        if known is None:
            known = self._known[text] = len(self.data)
            self.data += text.encode() + b"\0"
        return known


class _Image:
    """Argument blocks of all stages: on a CPU one behind the other, on a GPU first every root and then every table."""

    def __init__(self, blocks: Sequence[PackedArgs], places: dict[str, int], on_cpu: bool) -> None:
        self._places = places
        self._own = len(places)
        self.data = bytearray()
        self.roots: list[int] = []
        self.relocations: list[bytes] = []
        self.maps: list[bytes] = []
        sizes = [len(args.template) if on_cpu else _lines(args.root_bytes or len(args.template)) for args in blocks]
        for args, size in zip(blocks, sizes, strict=True):
            self.data += bytes(-len(self.data) % _LINE)
            self.roots.append(len(self.data))
            self.data += args.template[:size].ljust(size, b"\0")
        self.data += bytes(-len(self.data) % _LINE)
        self.tables_at = len(self.data)
        tables: list[int] = []
        for args, size in zip(blocks, sizes, strict=True):
            tables.append(len(self.data))
            self.data += args.template[size:]
            self.data += bytes(-len(self.data) % _LINE)
        base = 0 if on_cpu else self.tables_at
        for args, root, size, table in zip(blocks, self.roots, sizes, tables, strict=True):
            self._fill(args, root, size, table, base)

    def _fill(self, args: PackedArgs, root: int, size: int, table: int, base: int) -> None:
        def moved(offset: int) -> int:
            return root + offset if offset < size else table + offset - size

        for offset, name, addend in args.relocations:
            place = self._own if name == ARGS else self._places[name]
            value = moved(addend) - base if name == ARGS else addend
            if value < 0 and name == ARGS:
                raise InternalError(
                    "an argument block points into its own root",
                    field="plan.args",
                    rule="plan_argument",
                    fix="report it as a fault of the operation's plugin",
                )
            self.relocations.append(_RELOCATION.pack(moved(offset), value, place, 0))
        for offset, item in args.maps:
            self.maps.append(_map(moved(offset), self._places[item.operand], item))


def launch_plan(plan: ExecutionPlan, device: DeviceInfo, entries: Sequence[Entry], name: str = "") -> bytes:
    """The bytes of a plan for a device, whose stages run ``entries``, one for each. ``name`` says what it computes; the
    default leaves attributes out.

    Raises ``UnsupportedError`` for a plan that libtilewright cannot launch, ``InternalError`` for one that contradicts
    itself.
    """
    _check(plan, device)
    texts = _Texts()
    on_cpu = device.kind == "cpu"
    names = [item.name for item in plan.operands]
    places = {name: place for place, name in enumerate((*names, WORKSPACE, COUNTERS))}
    try:
        blocks = [pack(stage.args) for stage in plan.stages]
        image = _Image(blocks, places, on_cpu)
    except KeyError as error:
        raise InternalError(
            f"a stage of the plan reads {error}, which is not among its operands",
            field="plan",
            value=str(error),
            rule="plan_operand",
            fix="report it as a fault of the operation's plugin",
        ) from error
    objects = {entry.sha256: entry.nbytes for entry in entries}
    numbers = {sha256: number for number, sha256 in enumerate(objects)}
    stages = []
    for stage, entry, args, root in zip(plan.stages, entries, blocks, image.roots, strict=True):
        geometry = stage.geometry
        stages.append(
            _STAGE.pack(
                numbers[entry.sha256],
                texts.add(entry.symbol),
                geometry.team,
                _DEPENDENT if geometry.dependent else 0,
                *geometry.grid,
                *geometry.block,
                *geometry.cluster,
                geometry.shared_bytes,
                root,
                args.root_bytes or len(args.template),
            )
        )
    dims: list[int] = []
    operands = [_operand(item, plan, texts, dims) for item in plan.operands]
    pairs = list(_pairs(plan))
    name = name or problem_name(plan.operation, plan.operands, {})
    facts = [texts.add(text) for text in (plan.operation, plan.arch, name, _features(device))]
    rest = _REST.pack(
        _KINDS[device.kind],
        max((stage.geometry.team for stage in plan.stages), default=1),
        len(operands),
        len(stages),
        len(objects),
        len(image.relocations),
        len(image.maps),
        len(pairs),
        len(dims),
        len(texts.data),
        plan.workspace_bytes,
        plan.counter_bytes,
        plan.flops,
        len(image.data),
        image.tables_at,
        *facts,
    )
    sections = (
        operands,
        stages,
        [_OBJECT.pack(sha256, nbytes) for sha256, nbytes in objects.items()],
        image.relocations,
        image.maps,
        pairs,
        [Struct(f"<{len(dims)}q").pack(*dims)],
        [bytes(texts.data)],
    )
    body = bytearray(rest)
    for section in sections:
        body += bytes(-(len(body) + _HEAD.size) % 8)
        for record in section:
            body += record
    body += bytes(-(len(body) + _HEAD.size) % _LINE)
    body += image.data
    head = _HEAD.pack(
        _MAGIC, FORMAT_VERSION, _HEAD.size + _REST.size, _HEAD.size + len(body), hashlib.sha256(body).digest()
    )
    return head + bytes(body)


def _check(plan: ExecutionPlan, device: DeviceInfo) -> None:
    if device.kind not in _KINDS:
        raise _unsupported("device.kind", device.kind, f"no launches on a device of kind {device.kind}")
    most = max(len(plan.operands), len(plan.stages))
    if most > MAX_OPERANDS:
        raise _unsupported("operands", most, f"no plans with more than {MAX_OPERANDS} operands or stages")
    for item in plan.operands:
        if len(item.desc.strides) != len(item.desc.shape):  # as only packed formats may have
            raise _unsupported(item.name, item.desc.packing, "no operands in a packed format: only the server has them")
    present = sum(1 for item in plan.operands if item.desc.nbytes)
    outputs = sum(1 for item in plan.operands if item.desc.nbytes and item.role is Role.OUTPUT)
    if present * outputs > MAX_PAIRS:
        raise _unsupported("operands", present, f"no plans with more than {MAX_PAIRS} pairs of operands to compare")


def _unsupported(field: str, value: object, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"launch plans have {what}",
        field=field,
        value=value,
        rule="launch_plan_limits",
        fix='launch it in the server: launch="server" or "auto"',
    )


def _operand(item: Operand, plan: ExecutionPlan, texts: _Texts, dims: list[int]) -> bytes:
    desc = item.desc
    begin = len(dims)
    dims += [*desc.shape, *desc.strides]
    alignment = max(1, int(plan.details.get("alignment", {}).get(item.name, 1)))
    return _OPERAND.pack(
        texts.add(item.name),
        texts.add(desc.dtype.value),
        int(item.role is Role.OUTPUT),
        len(desc.shape),
        begin,
        alignment,
        desc.nbytes,
    )


def _pairs(plan: ExecutionPlan) -> Iterable[bytes]:
    """Outputs with whatever may not lie under them."""
    in_place = {(str(output), str(source)) for output, source in plan.details.get("in_place", ())}
    present = [(place, item) for place, item in enumerate(plan.operands) if item.desc.nbytes]
    for place, output in present:
        for other_place, other in present if output.role is Role.OUTPUT else ():
            if other_place == place or (other.role is Role.OUTPUT and other_place < place):
                continue
            allowed = (output.name, other.name) in in_place or (other.name, output.name) in in_place
            yield _PAIR.pack(place, other_place, int(allowed and output.desc == other.desc), 0)


def _map(offset: int, place: int, item: TensorMap) -> bytes:
    rank = len(item.sizes)
    fits = (
        item.dtype in _MAP_TYPES
        and item.swizzle in _SWIZZLES
        and item.fetch in _FETCHES
        and 1 <= rank <= 5
        and len(item.strides) == rank - 1
        and len(item.box) == (2 if item.walk else rank)
    )
    if not fits:
        raise InternalError(
            "a tensor map of the plan cannot be encoded",
            field="plan.args",
            value=item,
            rule="tensor_map",
            fix="report it as a fault of the operation's plugin",
        )
    walk = item.walk
    corners = (_padded(walk.lower, 3), _padded(walk.upper, 3), _padded(walk.step, 3)) if walk else ((0,) * 3,) * 3
    return _MAP.pack(
        offset,
        item.offset,
        place,
        _MAP_TYPES[item.dtype],
        rank,
        _SWIZZLES[item.swizzle],
        _FETCHES[item.fetch],
        int(walk is not None),
        *_padded(item.sizes, 5),
        *_padded(item.strides, 4),
        *_padded(item.box, 5),
        *(number for corner in corners for number in corner),
    )


def _padded(values: Sequence[int], count: int) -> tuple[int, ...]:
    return (*values, *(0,) * (count - len(values)))


def _features(device: DeviceInfo) -> str:
    """Features that the code asks of a CPU, as /proc/cpuinfo spells them."""
    if device.kind != "cpu":
        return ""
    arch = device.arch
    flags = [*arch.match.cpu_flags]
    for name in arch.features:
        flags += arch.optional_features[name].cpu_flags
    return ",".join(dict.fromkeys(flags))


def _lines(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE
