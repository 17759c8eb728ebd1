"""Compare the protocol with the one that was released: clients that were made from that one must go on working.

    python proto/compatibility.py             # exit 1 and say what broke
    python proto/compatibility.py --record    # a release: this is the protocol from now on

Until 1.0 the protocol may change in ways that break clients: record it then, and say so in CHANGELOG.md. A field may go
if its number and name are reserved.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

ROOT = Path(__file__).resolve().parent
RELEASED = {"tilewright/": ROOT / "released.binpb", "inference/": ROOT / "released_inference.binpb"}
"""Each a ``FileDescriptorSet``, which `buf breaking --against` reads too; by where its files lie. Each protocol has its
own, since tests run the client of the commit that recorded the first."""
FOLDERS = {"v1": "tilewright/v1", "inference": "inference"}
"""Folders of stubs, and of the files that they are made from."""


def present() -> FileDescriptorSet:
    """The protocol as it stands, by its stubs (a test of their own compares them with the files)."""
    found = files_of(
        {
            f"{sources}/{path.name}": (stubs_of(stubs, path.stem),)
            for stubs, sources in FOLDERS.items()
            for path in sorted((ROOT / sources).glob("*.proto"))
        }
    )
    for file in found.file:
        for stubs, sources in FOLDERS.items():
            file.dependency[:] = [name.replace(f"tilewright_proto/{stubs}/", f"{sources}/") for name in file.dependency]
    found.file.sort(key=lambda file: [file.name in other.dependency for other in found.file].count(True), reverse=True)
    return found


def stubs_of(folder: str, name: str) -> Any:
    """The module of the stubs of one file."""
    sys.path.insert(0, str(ROOT))
    try:
        return importlib.import_module(f"tilewright_proto.{folder}.{name}_pb2")
    finally:
        sys.path.remove(str(ROOT))


def files_of(stubs: Mapping[str, Iterable[Any]]) -> FileDescriptorSet:
    """Files by name, each of what modules of stubs have: stubs are made in another folder, and know their file by
    that."""
    found = FileDescriptorSet()
    for name, modules in stubs.items():
        whole = found.file.add()
        for module in modules:
            part = FileDescriptorProto()
            module.DESCRIPTOR.CopyToProto(part)
            for message in part.message_type:
                _name_in_json(message, module.DESCRIPTOR.message_types_by_name[message.name])
            whole.MergeFrom(part)
        whole.name = name
    return found


def _name_in_json(message: DescriptorProto, descriptor: Any) -> None:
    """Add the names that fields have in JSON, which a copy of a descriptor leaves out."""
    for field in message.field:
        field.json_name = descriptor.fields_by_name[field.name].json_name
    for nested in message.nested_type:
        _name_in_json(nested, descriptor.nested_types_by_name[nested.name])


def released() -> FileDescriptorSet:
    found = FileDescriptorSet()
    for path in RELEASED.values():
        found.MergeFromString(path.read_bytes())
    return found


def record() -> None:
    """Make the present protocol the released one."""
    files = present().file
    for folder, path in RELEASED.items():
        part = FileDescriptorSet(file=[file for file in files if file.name.startswith(folder)])
        made = part.SerializeToString(deterministic=True)
        if not path.exists() or made != path.read_bytes():
            path.write_bytes(made)


def breaks(old: FileDescriptorSet, new: FileDescriptorSet) -> list[str]:
    """Changes by which clients of ``old`` would fail with a server of ``new``, or no longer compile."""
    files = {file.name: file for file in new.file}
    found: list[str] = []
    for file in old.file:
        if file.name not in files:
            found.append(f"{file.name} is gone: its stubs are imported by that name")
            continue
        ours = files[file.name]
        found += _each("message", file.message_type, ours.message_type, _message, "")
        found += _each("enum", file.enum_type, ours.enum_type, _enum, "")
        found += _each("service", file.service, ours.service, _service, "")
    return found


def _each(kind: str, old: Any, new: Any, compare: Any, inside: str) -> Iterator[str]:
    named = {item.name: item for item in new}
    for item in old:
        name = f"{inside}{item.name}"
        if item.name not in named:
            yield f"{kind} {name} is gone"
        else:
            yield from compare(name, item, named[item.name])


def _message(name: str, old: DescriptorProto, new: DescriptorProto) -> Iterator[str]:
    fields = {field.number: field for field in new.field}
    for field in old.field:
        now = fields.get(field.number)
        if now is None:
            reserved = any(part.start <= field.number < part.end for part in new.reserved_range)
            if not (reserved and field.name in new.reserved_name):
                yield f"field {name}.{field.name} = {field.number} is gone, and not reserved by number and name"
        elif changed := _changed(old, field, new, now):
            yield f"field {name}.{field.name} = {field.number} has another {changed}"
    yield from _each("message", old.nested_type, new.nested_type, _message, f"{name}.")
    yield from _each("enum", old.enum_type, new.enum_type, _enum, f"{name}.")


def _changed(old: DescriptorProto, field: FieldDescriptorProto, new: DescriptorProto, now: FieldDescriptorProto) -> str:
    for what in ("name", "type", "type_name", "label", "json_name", "proto3_optional"):
        if getattr(field, what) != getattr(now, what):
            return what
    return "" if _choice(old, field) == _choice(new, now) else "oneof"


def _choice(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    return message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""


def _enum(name: str, old: EnumDescriptorProto, new: EnumDescriptorProto) -> Iterator[str]:
    values = {value.number: value.name for value in new.value}
    for value in old.value:
        if values.get(value.number) != value.name:
            yield f"value {name}.{value.name} = {value.number} is gone or has another name"


def _service(name: str, old: ServiceDescriptorProto, new: ServiceDescriptorProto) -> Iterator[str]:
    methods = {method.name: method for method in new.method}
    for method in old.method:
        now = methods.get(method.name)
        kept = ("input_type", "output_type", "client_streaming", "server_streaming")
        if now is None:
            yield f"call {name}.{method.name} is gone"
        elif any(getattr(method, what) != getattr(now, what) for what in kept):
            yield f"call {name}.{method.name} takes or gives other messages"


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the protocol with the released one.")
    parser.add_argument("--record", action="store_true", help="the present protocol is the released one")
    if parser.parse_args().record:
        record()
        return 0
    found = breaks(released(), present())
    for line in found:
        sys.stderr.write(line + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
