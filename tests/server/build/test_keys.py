from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import tilewright_arch
from tilewright_kit.contract.source import SourceUnit
from tilewright_server.build.cache.artifacts import artifact_key
from tilewright_server.build.toolchains.toolchain import CpuToolchain


@pytest.fixture
def headers(tmp_path: Path) -> Path:
    folder = tmp_path / "include"
    (folder / "tw").mkdir(parents=True)
    (folder / "tw" / "outer.hpp").write_text('#pragma once\n  #  include "inner.hpp"\n#include <stdint.h>\n')
    (folder / "tw" / "inner.hpp").write_text('#pragma once\n#include "tw/outer.hpp"\nint x;\n')
    (folder / "tw" / "stranger.hpp").write_text("int z;\n")
    return folder


@pytest.fixture
def toolchain(headers: Path, fake) -> CpuToolchain:
    return CpuToolchain([headers], compiler=str(fake.path))


@pytest.fixture
def key(unit: Callable[..., SourceUnit], toolchain: CpuToolchain) -> Callable[..., str]:
    def make(arch: str = "x86-64-v3", **changes: object) -> str:
        text = "#include <tw/outer.hpp>\nint main_() { return 0; }\n"
        return artifact_key(unit(**{"text": text, **changes}), tilewright_arch.load(arch), toolchain)

    return make


def rewrite(path: Path, text: str) -> None:
    path.write_text(text)
    later = path.stat().st_mtime_ns + 1_000_000
    os.utime(path, ns=(later, later))


@pytest.mark.parametrize(
    "changes",
    [
        {"text": "int other;"},
        {"flags": ("-DX",)},
        {"defines": {"X": "1"}},
        {"plugin_version": "2"},
        {"arch": "x86-64-v4"},
        {"arch": "x86-64-v4+bf16"},
    ],
    ids=str,
)
def test_every_input_of_a_build_makes_another_key(changes: dict[str, object], key: Callable[..., str]) -> None:
    assert key(**changes) != key()


def test_a_header_that_a_header_includes_makes_another_key(headers: Path, key: Callable[..., str]) -> None:
    before = key()
    rewrite(headers / "tw" / "inner.hpp", "#pragma once\nint y;\n")
    changed = key()
    assert changed != before
    rewrite(headers / "tw" / "inner.hpp", '#pragma once\n#include "tw/outer.hpp"\nint x;\n')
    assert key() == before


def test_the_compiler_makes_another_key(fake, key: Callable[..., str]) -> None:
    before = key()
    fake.behave("exit 1", version="fake 2.0")
    assert key() != before


def test_a_compiler_of_the_same_version_but_other_bytes_makes_another_key(fake, key: Callable[..., str]) -> None:
    before = key()
    fake.behave("exit 2")
    assert key() != before


def test_nothing_else_makes_another_key(
    headers: Path, key: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key()
    monkeypatch.setenv("CXXFLAGS", "-O0")
    monkeypatch.chdir(headers)
    rewrite(headers / "tw" / "stranger.hpp", "int changed;\n")
    os.utime(headers / "tw" / "inner.hpp", ns=(1, 1))
    assert key(name="another_name", entries={"main": "other"}) == before


def test_the_folder_of_the_headers_is_not_in_the_key(
    headers: Path, tmp_path: Path, fake, unit: Callable[..., SourceUnit], key: Callable[..., str]
) -> None:
    moved = tmp_path / "moved"
    moved.mkdir()
    (headers / "tw").rename(moved / "tw")
    text = "#include <tw/outer.hpp>\nint main_() { return 0; }\n"
    arch = tilewright_arch.load("x86-64-v3")
    (headers / "tw").symlink_to(moved / "tw")
    assert artifact_key(unit(text=text), arch, CpuToolchain([moved], compiler=str(fake.path))) == key()


def test_headers_are_found_beside_their_includer_and_in_the_folder(toolchain: CpuToolchain) -> None:
    names = [name for name, _ in toolchain.headers.closure('#include "tw/outer.hpp"')]
    assert names == ["tw/inner.hpp", "tw/outer.hpp"]
