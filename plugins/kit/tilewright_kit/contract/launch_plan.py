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

from tilewright_kit.contract.arguments import ARGS, COUNTERS, WORKSPACE, PackedArgs, PixelWalk, TensorMap, pack
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import ExecutionPlan, Geometry
from tilewright_kit.contract.problem import Operand, Role, problem_name
from tilewright_kit.types.errors import InternalError, UnsupportedError

__all__ = ["FORMAT_VERSION", "MAX_OPERANDS", "MAX_PAIRS", "Entry", "launch_plan", "root_bytes", "stages_plan"]

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
        sizes = [len(args.template) if on_cpu else root_bytes(args) for args in blocks]
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
    stages = [
        _stage(
            numbers[entry.sha256], texts.add(entry.symbol), stage.geometry, root, args.root_bytes or len(args.template)
        )
        for stage, entry, args, root in zip(plan.stages, entries, blocks, image.roots, strict=True)
    ]
    dims: list[int] = []
    operands = [_operand(item, plan, texts, dims) for item in plan.operands]
    name = name or problem_name(plan.operation, plan.operands, {})
    facts = [texts.add(text) for text in (plan.operation, plan.arch, name, _features(device))]
    team = max((stage.geometry.team for stage in plan.stages), default=1)
    needs = plan.workspace_bytes, plan.counter_bytes, plan.flops
    made = [_OBJECT.pack(sha256, nbytes) for sha256, nbytes in objects.items()]
    sections = operands, stages, made, image.relocations, image.maps, list(_pairs(plan))
    return _assembled(_KINDS[device.kind], team, sections, dims, texts, needs, image, facts)


def stages_plan(
    kind: str, stages: Sequence[tuple[PackedArgs, Geometry, int]], operands: Sequence[str], counter_bytes: int = 0
) -> bytes:
    """A launch plan without code: its functions are given to libtilewright by their number (``tw_plan_adopt``), and its
    operands are addresses about which it says nothing. ``kind`` is ``cuda`` or ``hip``; the number of a stage is how
    many bytes of arguments its kernel takes by value, at most ``root_bytes``.

    Raises ``KeyError`` for an operand that is not listed, ``InternalError`` for arguments that contradict themselves.
    """
    places = {name: place for place, name in enumerate((*operands, WORKSPACE, COUNTERS))}
    image = _Image([args for args, _, _ in stages], places, on_cpu=False)
    if image.maps and kind != "cuda":
        raise InternalError(
            "this device has no tensor maps",
            field="plan.args",
            value=kind,
            rule="tensor_map",
            fix="report it as a fault of the operation's plugin",
        )
    records = [
        _stage(0, 0, geometry, root, taken) for (_, geometry, taken), root in zip(stages, image.roots, strict=True)
    ]
    blank = [_OPERAND.pack(0, 0, 0, 0, 0, 1, 0)] * len(operands)
    sections: tuple[Sequence[bytes], ...] = (blank, records, (), image.relocations, image.maps, ())
    return _assembled(_KINDS[kind], 1, sections, [], _Texts(), (0, counter_bytes, 0), image, (0, 0, 0, 0))


def root_bytes(args: PackedArgs) -> int:
    """Bytes that a GPU's plan has for the arguments of a stage that go by value: the next multiple of 64."""
    return _lines(args.root_bytes or len(args.template))


def _stage(number: int, symbol: int, geometry: Geometry, root: int, nbytes: int) -> bytes:
    return _STAGE.pack(
        number,
        symbol,
        geometry.team,
        _DEPENDENT if geometry.dependent else 0,
        *geometry.grid,
        *geometry.block,
        *geometry.cluster,
        geometry.shared_bytes,
        root,
        nbytes,
    )


def _assembled(
    kind: int,
    team: int,
    sections: Sequence[Sequence[bytes]],
    dims: Sequence[int],
    texts: _Texts,
    needs: tuple[int, int, int],
    image: _Image,
    facts: Sequence[int],
) -> bytes:
    """The plan's bytes. ``sections`` are operands, stages, code objects, relocations, tensor maps and pairs; ``needs``
    bytes of workspace and of counters, and arithmetic operations."""
    rest = _REST.pack(
        kind,
        team,
        *(len(section) for section in sections),
        len(dims),
        len(texts.data),
        *needs,
        len(image.data),
        image.tables_at,
        *facts,
    )
    body = bytearray(rest)
    for section in (*sections, [Struct(f"<{len(dims)}q").pack(*dims)], [bytes(texts.data)]):
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
        and (item.walk is None or _walks(item.walk, rank))
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


def _walks(walk: PixelWalk, rank: int) -> bool:
    """True if a map of that rank has a corner and a step for each of its spatial dimensions."""
    return rank >= 3 and {len(walk.lower), len(walk.upper), len(walk.step)} == {rank - 2}


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
