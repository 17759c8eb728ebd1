"""Extended tests of kernels that passed as they stand: what they read has not changed since, so they are not run again.

``passed.json`` has, for each file of tests, the tools and a digest of all sources that its tests read: kernels,
plugins, the emulator, the tests themselves and the bugs that they plant. ``make test-rest`` skips its extended tests
where both are as recorded, and runs all of them where anything differs. With ``--record`` they run in any case, and
what passed is written: ``make passed``, or ``make test-rest PYTEST_ARGS=--record``. ``make test`` reads no record.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from contents import content

import tilewright_arch
from tilewright_emulator.code.compiler import have_objdump, tool

__all__ = ["FILES", "MARKS", "SUFFIXES", "Recorder", "as_they_stand", "leave_out", "reads"]

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).with_name("passed.json")
MARKS = "extended and not exhaustive"
"""The tests that are recorded: those of ``make test-rest``."""
EVERY = (
    "arch", "emulator", "native/include", "native/tilewright_native", "plugins/kit", "server/tilewright_server/build",
    "server/tilewright_server/clients", "server/tilewright_server/protocol", "server/tilewright_server/__init__.py",
    "tools/tilewright_tools/analysis", "tools/tilewright_tools/__init__.py", "tests/kernels", "tests/conftest.py",
)  # fmt: skip
"""Folders and files that all of these tests may read."""
ATTENTION, CONVOLUTION, PRODUCTS = "plugins/fmha", "plugins/grouped_conv", "plugins/gemm"
NATIVE = ("tests/native", "tests/fmha", ATTENTION, CONVOLUTION)
AREAS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "native": (
        (*NATIVE, "native/runtime"),
        (
            "test_amd_compile", "test_amd_gemm", "test_amd_pipelines", "test_conv_amd", "test_conv_cpu",
            "test_conv_gpu", "test_conv_gpu_compile", "test_conv_taps", "test_fmha_amd", "test_fmha_append_gpu",
            "test_fmha_backward_gpu", "test_fmha_cpu", "test_fmha_direct", "test_fmha_gpu", "test_fmha_paged_cpu",
            "test_fmha_split_cpu", "test_gemm", "test_gpu_compile", "test_gpu_gemm", "test_sm90_compile",
            "test_toolchains", "test_types",
        ),
    ),
    "emulator": (
        ("tests/emulator", *NATIVE),
        (
            "test_conv_mutants", "test_conv_tap_mutants", "test_fmha_mutants", "test_launch", "test_listing",
            "test_memory_order", "test_mutants", "test_short_buffers",
        ),
    ),
    "gemm": (
        ("tests/gemm", PRODUCTS),
        (
            "test_block_scales", "test_conformance", "test_cuda_compile", "test_execution", "test_exponent_scales",
            "test_gpu_codegen", "test_gpu_emulated", "test_hip_candidates", "test_hip_codegen", "test_hip_compile",
            "test_hip_cost", "test_hip_emulated", "test_hip_packed", "test_hip_rules", "test_int4", "test_narrow",
            "test_rules", "test_sets", "test_wide_space",
        ),
    ),
    "conv": (
        ("tests/conv", CONVOLUTION),
        (
            "test_conv_adjoint", "test_conv_bulk", "test_conv_candidates", "test_conv_conformance",
            "test_conv_execution", "test_conv_far_images", "test_conv_gpu_emulated", "test_conv_im2col",
            "test_conv_large_filters", "test_conv_plan", "test_conv_rules", "test_conv_sets", "test_conv_shipped_sets",
            "test_conv_two_stage", "test_conv_whole_steps",
        ),
    ),
    "fmha": (
        ("tests/fmha", ATTENTION),
        (
            "test_fmha_append_rounded", "test_fmha_backward", "test_fmha_conformance", "test_fmha_decode",
            "test_fmha_decode_emulated", "test_fmha_execution", "test_fmha_gpu_emulated", "test_fmha_heads",
            "test_fmha_plan", "test_fmha_prefix", "test_fmha_receipts", "test_fmha_scores", "test_fmha_shipped_sets",
            "test_fmha_ws", "test_fmha_ws_backward", "test_fmha_ws_decode",
        ),
    ),
    "moe": (
        ("tests/moe", "tests/gemm", "plugins/moe", PRODUCTS),
        ("test_moe_execution", "test_moe_gpu", "test_moe_shipped_sets"),
    ),
    "kernels": (("plugins",), ("test_proposals",)),
}  # fmt: skip
"""Sources that the tests of an area read beside ``EVERY``, and its files of tests."""
FILES = {f"tests/{area}/{name}.py": own for area, (own, names) in AREAS.items() for name in names}
SUFFIXES = frozenset({".c", ".cpp", ".csv", ".h", ".hpp", ".in", ".json", ".jsonl", ".map", ".npz", ".py", ".toml"})
"""Suffixes of sources; other files are made from them."""
PACKAGES = ("hypothesis", "ml_dtypes", "numpy", "nvidia-cuda-nvrtc", "pytest", "ziglang")


def reads(file: str) -> tuple[str, ...]:
    """Folders and files of which a change has the tests of a file run again, from the project's root."""
    return (*EVERY, *FILES[file])


def state(file: str) -> list[str]:
    """The tools and the digest that a record of the file has now."""
    return [_tools(), hashlib.sha256("".join(map(_digest, reads(file))).encode()).hexdigest()]


@functools.cache
def as_they_stand(config: pytest.Config) -> list[str]:
    """Files, of those that a run was asked for, whose extended tests passed as they stand. It reads some 1,000 sources:
    the process that hands tests out does so for all workers.
    """
    given = vars(config.option)
    if any(map(given.get, ("record", "gates", "collectonly"))) or "not extended" in config.option.markexpr:
        return []
    records = _records()
    asked = [config.invocation_params.dir / each.partition("::")[0] for each in config.args]
    files = [file for file in FILES if file in records and any(map((ROOT / file).is_relative_to, asked))]
    return [file for file in files if records[file] == state(file)]


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the extended tests of all files that passed as they stand."""
    handed: dict[str, list[str]] = getattr(config, "workerinput", {})
    passed = {ROOT / file for file in (handed["passed"] if "passed" in handed else as_they_stand(config))}
    for item in items:
        if item.path in passed and item.get_closest_marker("extended"):
            item.add_marker(
                pytest.mark.skip(reason="passed as it stands (tests/kernels/passed.json); --record runs it")
            )


class Recorder:
    """Writes down which files passed in a run with ``--record``: of which all extended tests ran, and none failed."""

    def __init__(self, config: pytest.Config) -> None:
        option = config.option
        whole = option.markexpr == MARKS and not (option.keyword or option.maxfail or option.deselect)
        asked = [Path(each) for each in config.args]
        files = [file for file in FILES if whole and any(Path(file).is_relative_to(each) for each in asked)]
        self._states = {file: state(file) for file in files}
        """States before the tests: what is edited while they run did not pass."""
        self._passed: set[str] = set()
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        if report.failed:
            self._failed.add(file)
        elif report.when == "call" and report.passed:
            self._passed.add(file)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return
        found = {file: each for file, each in self._states.items() if file in self._passed - self._failed}
        if found:
            with RECORD.open("a+") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                RECORD.write_text(json.dumps(_records() | found, indent=1, sort_keys=True) + "\n")


@functools.cache
def _digest(place: str) -> str:
    """Digest of all sources in a folder, or of a file; records are none. Prose of Python is not part of it."""
    path, digest = ROOT / place, hashlib.sha256()
    for each in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if each.suffix in SUFFIXES and each.is_file() and each not in (RECORD, RECORD.with_name("gated.json")):
            digest.update(each.relative_to(ROOT).as_posix().encode() + b"\0" + content(each) + b"\0")
    return digest.hexdigest()


@functools.cache
def _tools() -> str:
    """Compilers, the interpreter, packages, and the level of the CPU on which kernels run."""
    compilers = [_first_line(path) for name in ("c++", "clang++") if (path := tool(name))]
    disassembler = "llvm-objdump" if have_objdump() else "no llvm-objdump"
    python = ".".join(platform.python_version_tuple()[:2])
    packages = [f"{name} {_version(name)}" for name in PACKAGES]
    return "; ".join([tilewright_arch.detect_cpu().id, *compilers, disassembler, f"Python {python}", *packages])


def _first_line(compiler: str) -> str:
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    return said.partition("\n")[0]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _records() -> dict[str, list[str]]:
    text = RECORD.read_text() if RECORD.exists() else ""
    found: dict[str, list[str]] = json.loads(text or "{}")
    return found


if __name__ == "__main__":  # the Makefile's list
    print(*sorted(FILES))  # noqa: T201
