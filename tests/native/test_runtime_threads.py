"""libtilewright under ThreadSanitizer, launched from many threads; its interface as a C compiler sees it."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from sanitized_runtime import NATIVE, build

from tilewright.launch import library as bindings
from tilewright_native import library_path
from tilewright_tools.cli import main

STRUCTS = {"tw_error": 496, "tw_plan_info": 64, "tw_operand_info": 56, "tw_object_info": 24, "tw_bind_options": 24}
STRUCTS |= {"tw_launch_record": 64}


@pytest.mark.extended
def test_launches_from_many_threads_race_with_nothing(tmp_path: Path, kernel_cache: Path) -> None:
    bundle = tmp_path / "model.twb"
    shapes = ["--gemm", "64x48x32", "--gemm", "200x100x70", "--dtype", "fp32"]
    assert main(["bundle", "build", *shapes, "--cache-dir", str(kernel_cache), "-o", str(bundle)]) == 0
    driver = build(tmp_path, "launch_threads.cpp", "thread")
    done = subprocess.run(
        [str(driver), str(bundle), "6", "40"],
        env={"PATH": os.environ["PATH"], "TSAN_OPTIONS": "halt_on_error=1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "counted" in done.stdout


def test_structs_have_the_sizes_that_callers_were_compiled_with(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler: install gcc")
    lines = "".join(f'_Static_assert(sizeof({name}) == {size}, "{name}");\n' for name, size in STRUCTS.items())
    (tmp_path / "sizes.c").write_text(f'#include "tilewright.h"\n{lines}')
    command = [compiler, "-std=c11", "-Wall", "-Werror", "-fsyntax-only", f"-I{NATIVE / 'runtime'}", "sizes.c"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    header = (NATIVE / "runtime" / "tilewright.h").read_text()
    named = set(re.findall(r"^typedef struct (tw_\w+) {", header, re.M))
    assert named == set(STRUCTS), "every struct of the interface is looked at"
    assert ctypes.sizeof(bindings.PlanInfo) == 64 and ctypes.sizeof(bindings.OperandInfo) == 56


def test_nothing_else_is_exported_and_nothing_foreign_is_needed() -> None:
    if shutil.which("readelf") is None:
        pytest.skip("no readelf: install binutils")
    try:
        library = str(library_path())
    except FileNotFoundError as error:
        pytest.skip(str(error))

    def read(option: str) -> str:
        return subprocess.run(["readelf", option, "-W", library], capture_output=True, text=True, check=True).stdout

    symbols = [line.split() for line in read("--dyn-syms").splitlines() if " UND " not in line and "GLOBAL" in line]
    header = (NATIVE / "runtime" / "tilewright.h").read_text()
    public = set(re.findall(r"^TW_API [^;(]*?(tw_\w+)\(", header, re.M))
    others = {parts[-1].split("@")[0] for parts in symbols} - public
    assert all(name.startswith("tw_") for name in others), others
    needed = set(re.findall(r"NEEDED.*\[(.*?)\]", read("--dynamic")))
    allowed = {
        "libc.so.6",
        "libdl.so.2",
        "libpthread.so.0",
        "libgcc_s.so.1",
        "ld-linux-x86-64.so.2",
        "ld-linux-aarch64.so.1",
    }
    assert needed <= allowed, needed
