"""Devices, plans' stages and memory handles as JSON, for the way between a server and a worker."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tilewright_arch
from tilewright_arch import ArchSpec
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import Geometry, PackedArgs, PixelWalk, TensorMap
from tilewright_server.devices.contract import MemoryHandle, ProgramStage, WorkerSpec

__all__ = [
    "geometry_from",
    "geometry_record",
    "handle_from",
    "handle_record",
    "info_from",
    "info_record",
    "spec_from",
    "spec_record",
    "stages_from",
    "stages_record",
]

_CHIP = ("units", "clock_mhz", "memory_bytes_per_second")


def info_record(info: DeviceInfo) -> dict[str, Any]:
    """Record for ``info_from``. Of the architecture that is its id and what the machine itself has reported."""
    arch = info.arch
    return {
        "id": info.id,
        "kind": info.kind,
        "name": info.name,
        "arch": arch.id,
        "caches": dataclasses.asdict(arch.caches),
        "chip": {name: getattr(arch.throughput, name) for name in _CHIP},
        "lds_bytes": arch.lds_bytes,
        "gpu_arch": arch.toolchain.gpu_arch,
        "units": info.units,
        "memory_bytes": info.memory_bytes,
        "attributes": dict(info.attributes),
    }


def info_from(record: Mapping[str, Any]) -> DeviceInfo:
    """The inverse of ``info_record``; sequences among the attributes become lists."""
    return DeviceInfo(
        record["id"],
        record["kind"],
        record["name"],
        _arch(record),
        record["units"],
        record["memory_bytes"],
        record["attributes"],
    )


def _arch(record: Mapping[str, Any]) -> ArchSpec:
    arch = tilewright_arch.load(record["arch"])
    arch = arch.with_caches(dataclasses.replace(arch.caches, **record["caches"]))
    arch = arch.with_device(lds_bytes=record["lds_bytes"], **record["chip"])
    if record["gpu_arch"] != arch.toolchain.gpu_arch:
        arch = dataclasses.replace(arch, toolchain=arch.toolchain.retargeted(record["gpu_arch"]))
    return arch


def spec_record(spec: WorkerSpec) -> dict[str, Any]:
    return {"factory": spec.factory, "options": dict(spec.options)}


def spec_from(record: Mapping[str, Any]) -> WorkerSpec:
    return WorkerSpec(record["factory"], record["options"])


def geometry_record(geometry: Geometry) -> list[Any]:
    return [
        geometry.team,
        geometry.grid,
        geometry.block,
        geometry.cluster,
        geometry.shared_bytes,
        geometry.dependent,
    ]


def geometry_from(record: Sequence[Any]) -> Geometry:
    team, grid, block, cluster, shared_bytes, dependent = record
    return Geometry(team, tuple(grid), tuple(block), tuple(cluster), shared_bytes, dependent)


def stages_record(stages: Sequence[ProgramStage]) -> list[dict[str, Any]]:
    return [
        {
            "function": stage.function,
            "geometry": geometry_record(stage.geometry),
            "template": base64.b64encode(stage.args.template).decode(),
            "relocations": stage.args.relocations,
            "maps": [(offset, dataclasses.astuple(item)) for offset, item in stage.args.maps],
            "root_bytes": stage.args.root_bytes,
        }
        for stage in stages
    ]


def stages_from(records: Sequence[Mapping[str, Any]]) -> list[ProgramStage]:
    """The inverse of ``stages_record``; the functions are still the ids that travelled."""
    return [
        ProgramStage(
            record["function"],
            PackedArgs(
                base64.b64decode(record["template"]),
                tuple((hole, operand, addend) for hole, operand, addend in record["relocations"]),
                tuple((offset, _tensor_map(item)) for offset, item in record["maps"]),
                record["root_bytes"],
            ),
            geometry_from(record["geometry"]),
        )
        for record in records
    ]


def _tensor_map(record: Sequence[Any]) -> TensorMap:
    operand, offset, dtype, sizes, strides, box, swizzle, fetch, steps = record
    walk = PixelWalk(*map(tuple, steps)) if steps else None
    return TensorMap(operand, offset, dtype, tuple(sizes), tuple(strides), tuple(box), swizzle, fetch, walk)


def handle_record(handle: MemoryHandle) -> dict[str, Any]:
    """All but the descriptors, which travel beside it."""
    data = base64.b64encode(handle.data).decode()
    return {
        "kind": handle.kind,
        "data": data,
        "nbytes": handle.nbytes,
        "offset": handle.offset,
        "part_bytes": handle.part_bytes,
    }


def handle_from(record: Mapping[str, Any], fds: Sequence[int]) -> MemoryHandle:
    parts = tuple(record["part_bytes"])
    return MemoryHandle(
        record["kind"],
        base64.b64decode(record["data"]),
        record["nbytes"],
        fds[0] if fds else -1,
        record["offset"],
        tuple(fds) if parts else (),
        parts,
    )
