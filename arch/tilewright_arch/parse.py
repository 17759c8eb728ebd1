"""From a resolved JSON document to an ``ArchSpec``, with an error for every malformed field."""

from __future__ import annotations

import math
from collections.abc import Mapping

from .frozen import FrozenMap
from .rates import read_rates
from .reading import Fields
from .spec import (
    ArchSpec,
    BulkCopy,
    Caches,
    Feature,
    Instruction,
    Match,
    Pipeline,
    RegisterSplit,
    Throughput,
    Toolchain,
    Trait,
    Triple,
    combination_reason,
)
from .tables import DTYPES, Shapes, Tables, read_shapes, read_tiles, read_waves

SCHEMA_VERSION = 1
KINDS = ("cpu", "cuda", "hip")
FP8_ENCODINGS = ("ocp", "fnuz", "none")


def parse_document(document: object, source: str) -> ArchSpec:
    """Build the spec that ``document`` (includes already merged) describes.

    Raises ``SpecError``, which names ``source`` and the field.
    """
    spec = Fields(document, source)
    version = spec.integer("schema_version")
    if version != SCHEMA_VERSION:
        raise spec.fail("schema_version", f"must be {SCHEMA_VERSION}, not {version}")
    name = spec.text("name")
    kind = spec.text("kind", choices=KINDS)
    caches = _caches(spec.fields("caches"))
    lds_bytes, lds_l2_fraction = _lds(spec, kind, caches)
    instructions = _instructions(spec.fields("instructions"))
    shapes = read_shapes(spec)
    normal = read_tiles(spec, "warp_tiles", shapes, instructions)
    if not normal.tiles:
        raise spec.fail("warp_tiles", "needs at least 1 entry")
    shuffled = _preshuffle(spec, normal, shapes, instructions)
    pipelines = _pipelines(spec.fields("pipelines"), instructions)
    result = ArchSpec(
        name=name,
        kind=kind,
        family=spec.text("family"),
        target_family=spec.text("target_family"),
        vendor=spec.text("vendor"),
        description=spec.text("description"),
        wave_size=spec.integer("wave_size", minimum=1),
        vector_bytes=spec.integer("vector_bytes"),
        vector_registers=spec.integer("vector_registers"),
        max_vgprs=spec.integer("max_vgprs"),
        max_threads_per_workgroup=spec.integer("max_threads_per_workgroup", minimum=1),
        register_file=spec.integer("register_file", 0),
        lds_banks=spec.integer("lds_banks", 0),
        lds_bytes=lds_bytes,
        lds_l2_fraction=lds_l2_fraction,
        caches=caches,
        fp8_encoding=spec.text("fp8_encoding", choices=FP8_ENCODINGS),
        features=(),
        optional_features=_features(spec, shapes, instructions),
        instructions=instructions,
        waves=read_waves(spec),
        warp_tiles=normal.tiles,
        preshuffle_warp_tiles=shuffled.tiles,
        tile_instructions=normal.merged(shuffled).instructions,
        bulk_copy=_bulk_copy(spec.fields("bulk_copy")) if "bulk_copy" in spec else None,
        pipelines=pipelines,
        preshuffle_pipelines=_preshuffle_pipelines(spec, pipelines),
        unsupported_traits=_traits(spec, pipelines),
        throughput=_throughput(spec.fields("throughput")),
        rates=read_rates(spec.fields("rates"), spec.integer("lds_banks", minimum=1)) if "rates" in spec else None,
        toolchain=_toolchain(spec.fields("toolchain")),
        match=_match(spec.fields("match"), kind),
        operations=_operations(spec),
    )
    spec.finish()
    return result


def _caches(fields: Fields) -> Caches:
    caches = Caches(
        line_bytes=fields.integer("line_bytes", minimum=1),
        l1_bytes=fields.integer("l1_bytes"),
        l2_bytes=fields.integer("l2_bytes"),
        l3_bytes=fields.integer("l3_bytes"),
    )
    fields.finish()
    return caches


def _lds(spec: Fields, kind: str, caches: Caches) -> tuple[int, float]:
    # A CPU's LDS is the part of L2 that packed blocks may fill, so that it follows the
    # real cache of the machine; a GPU's is a limit of the hardware.
    if kind == "cpu":
        fraction = spec.number("lds_l2_fraction")
        return math.floor(caches.l2_bytes * fraction), fraction
    return spec.integer("lds_bytes", minimum=1), 0.0


def _instructions(fields: Fields) -> FrozenMap[str, Instruction]:
    found: dict[str, Instruction] = {}
    for name, entry in fields.entries():
        found[name] = Instruction(
            name=name,
            wave_threads=entry.integer("wave_threads", minimum=1),
            description=entry.text("description"),
            operand_copies=entry.integer("operand_copies", 1, minimum=1),
        )
        entry.finish()
    return FrozenMap(found)


def _preshuffle(spec: Fields, normal: Tables, shapes: Shapes, instructions: Mapping[str, Instruction]) -> Tables:
    if spec.get("preshuffle_warp_tiles") == "same":
        return normal
    return read_tiles(spec, "preshuffle_warp_tiles", shapes, instructions)


def _features(spec: Fields, shapes: Shapes, instructions: Mapping[str, Instruction]) -> FrozenMap[str, Feature]:
    shares_tables = spec.get("preshuffle_warp_tiles") == "same"
    found: dict[str, Feature] = {}
    owners: dict[str, str] = {}
    for name, entry in spec.fields("optional_features", {}).entries():
        normal = read_tiles(entry, "warp_tiles", shapes, instructions)
        shuffled = normal if shares_tables else read_tiles(entry, "preshuffle_warp_tiles", shapes, instructions)
        rates = _rates(entry.fields("flops_per_cycle_per_unit", {}))
        for field, keys in (
            ("warp_tiles", {*normal.tiles, *shuffled.tiles}),
            ("flops_per_cycle_per_unit", set(rates)),
        ):
            for key in sorted(keys):
                if owners.setdefault(key, name) != name:
                    raise entry.fail(field, f"{key} is also changed by {owners[key]}")
        found[name] = Feature(
            name=name,
            description=entry.text("description"),
            cpu_flags=entry.texts("cpu_flags", minimum=1),
            compiler_flags=entry.texts("compiler_flags", []),
            warp_tiles=normal.tiles,
            preshuffle_warp_tiles=shuffled.tiles,
            tile_instructions=normal.merged(shuffled).instructions,
            flops_per_cycle_per_unit=rates,
        )
        entry.finish()
    return FrozenMap(found)


def _pipelines(fields: Fields, instructions: Mapping[str, Instruction]) -> FrozenMap[str, Pipeline]:
    found: dict[str, Pipeline] = {}
    for name, entry in fields.entries():
        usable = entry.texts("instructions", list(instructions), minimum=1)
        for instruction in usable:
            if instruction not in instructions:
                raise entry.fail("instructions", f"{instruction!r} is not defined")
        double_buffer = entry.boolean("double_buffer")
        fewest, most = _stages(entry, 2 if double_buffer else 1)
        found[name] = Pipeline(
            name=name,
            lds_fraction=entry.number("lds_fraction"),
            double_buffer=double_buffer,
            schedulers=entry.texts("schedulers", minimum=1),
            epilogues=entry.texts("epilogues", minimum=1),
            instructions=usable,
            extra_threads=entry.integer("extra_threads", 0),
            min_stages=fewest,
            max_stages=most,
            clusters=_clusters(entry),
            reserved_registers=entry.integer("reserved_registers", 0),
            register_splits=_register_splits(entry),
            description=entry.text("description"),
        )
        entry.finish()
    if not found:
        raise fields.fail("", "needs at least 1 entry")
    return FrozenMap(found)


def _stages(entry: Fields, usual: int) -> tuple[int, int]:
    if "stages" not in entry:
        return usual, usual
    values = entry.array("stages")
    if len(values) != 2:
        raise entry.fail("stages", "must be [fewest, most]")
    fewest, most = (entry.positive(f"stages[{index}]", value) for index, value in enumerate(values))
    if fewest > most:
        raise entry.fail("stages", f"{fewest} are more than {most}")
    return fewest, most


def _clusters(entry: Fields) -> tuple[Triple, ...]:
    clusters = tuple((m, n, k) for m, n, k in entry.tuples("clusters", 3, [[1, 1, 1]]))
    if not clusters or clusters[0] != (1, 1, 1):
        raise entry.fail("clusters", "must begin with [1, 1, 1]: a kernel without a cluster")
    return clusters


def _register_splits(entry: Fields) -> tuple[RegisterSplit, ...]:
    found: list[RegisterSplit] = []
    for index, raw in enumerate(entry.array("register_splits", [])):
        row = Fields(raw, entry.source, entry.where(f"register_splits[{index}]"))
        found.append(
            RegisterSplit(
                consumers=row.integer("consumers", minimum=1),
                producer=row.integer("producer", minimum=1),
                consumer=row.integer("consumer", minimum=1),
            )
        )
        row.finish()
        if [split.consumers for split in found].count(found[-1].consumers) > 1:
            raise row.fail("consumers", f"repeats {found[-1].consumers}")
    return tuple(found)


def _bulk_copy(fields: Fields) -> BulkCopy:
    found = BulkCopy(
        max_box=fields.integer("max_box", minimum=1),
        alignment=fields.integer("alignment", minimum=1),
        swizzle_bytes=fields.integer("swizzle_bytes", minimum=1),
        swizzle_rows=fields.integer("swizzle_rows", minimum=1),
    )
    fields.finish()
    return found


def _preshuffle_pipelines(spec: Fields, pipelines: Mapping[str, Pipeline]) -> tuple[str, ...]:
    names = spec.texts("preshuffle_pipelines")
    for index, name in enumerate(names):
        if name not in pipelines:
            raise spec.fail(f"preshuffle_pipelines[{index}]", f"{name!r} is not a pipeline")
    return names


def _traits(spec: Fields, pipelines: Mapping[str, Pipeline]) -> tuple[Trait, ...]:
    """Every refused combination of the arch's own vocabulary, each with its reason.

    What a pipeline's lists exclude is derived, so it is stated once; the file adds only
    combinations that the lists alone would allow.
    """
    extra: dict[tuple[str, str, str], str] = {}
    for index, raw in enumerate(spec.array("unsupported_traits", [])):
        entry = Fields(raw, spec.source, spec.where(f"unsupported_traits[{index}]"))
        pipeline = entry.text("pipeline", choices=tuple(pipelines))
        epilogue = entry.text("epilogue", choices=pipelines[pipeline].epilogues)
        scheduler = entry.text("scheduler", choices=pipelines[pipeline].schedulers)
        extra[pipeline, epilogue, scheduler] = entry.text("reason")
        entry.finish()
    epilogues = dict.fromkeys(e for p in pipelines.values() for e in p.epilogues)
    schedulers = dict.fromkeys(s for p in pipelines.values() for s in p.schedulers)
    refused: list[Trait] = []
    for name, pipeline_ in pipelines.items():
        for epilogue in epilogues:
            for scheduler in schedulers:
                reason = extra.get((name, epilogue, scheduler))
                reason = reason or combination_reason(pipeline_, epilogue, scheduler)
                if reason:
                    refused.append(Trait(name, epilogue, scheduler, reason))
    return tuple(refused)


def _rates(fields: Fields) -> FrozenMap[str, int]:
    for key in fields:
        if key not in DTYPES:
            raise fields.fail(key, "is not a known dtype")
    return FrozenMap({key: fields.integer(key, minimum=1) for key in fields})


def _throughput(fields: Fields) -> Throughput:
    throughput = Throughput(
        units=fields.integer("units"),
        clock_mhz=fields.integer("clock_mhz"),
        flops_per_cycle_per_unit=_rates(fields.fields("flops_per_cycle_per_unit")),
        memory_bytes_per_second=fields.integer("memory_bytes_per_second"),
        l2_bytes_per_second=fields.integer("l2_bytes_per_second", 0),
    )
    fields.finish()
    return throughput


def _toolchain(fields: Fields) -> Toolchain:
    toolchain = Toolchain(
        flags=fields.texts("flags", minimum=1),
        gpu_arch=fields.text("gpu_arch", ""),
        zig_cpu=fields.text("zig_cpu", ""),
    )
    fields.finish()
    return toolchain


def _match(fields: Fields, kind: str) -> Match:
    if kind == "cpu":
        match = Match(
            machines=fields.texts("machines", minimum=1),
            cpu_flags=fields.texts("cpu_flags", minimum=1),
        )
    elif kind == "hip":
        match = Match(gcn_arch_names=fields.texts("gcn_arch_names", minimum=1))
    else:
        version = fields.array("compute_capability")
        if len(version) != 2 or not all(type(part) is int for part in version):
            raise fields.fail("compute_capability", "must be [major, minor]")
        major, minor = (int(str(part)) for part in version)
        match = Match(
            compute_capability=(major, minor),
            forward_compatible=fields.boolean("forward_compatible"),
        )
    fields.finish()
    return match


def _operations(spec: Fields) -> FrozenMap[str, object]:
    # Each operation's plugin reads its own section, so only the outer shape is ours to check.
    sections = spec.fields("operations", {})
    return FrozenMap({key: _frozen(sections.fields(key).raw) for key in sections})


def _frozen(value: object) -> object:
    if isinstance(value, dict):
        return FrozenMap({str(key): _frozen(item) for key, item in value.items()})
    if isinstance(value, list):
        return tuple(_frozen(item) for item in value)
    return value
