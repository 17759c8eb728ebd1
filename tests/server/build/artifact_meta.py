"""What an entry of the cache says of itself, for tests that make entries without a compiler."""

from __future__ import annotations

import hashlib

from tilewright_server.build.cache.artifacts import ArtifactMeta

BINARY = b"\x7fELF not really"


def meta_of(key: str, binary: bytes = BINARY) -> ArtifactMeta:
    return ArtifactMeta(
        key=key,
        name=f"kernel-{key[:4]}",
        language="c++",
        arch="x86-64-v3",
        compiler="fake",
        flags=("-O2",),
        plugin_version="1",
        entries={"main": "f"},
        source="kernel.cpp",
        binary="kernel.so",
        binary_sha256=hashlib.sha256(binary).hexdigest(),
        binary_bytes=len(binary),
        build_ns=1,
        created=0.0,
    )
