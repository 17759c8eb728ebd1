"""Imported before every test module."""

from __future__ import annotations

import gc
import hashlib
import os
import shutil
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Before anything imports NumPy or PyTorch: their threads wait busily for the next product, beside as many workers as
# the machine has cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Before anything imports gRPC: the client asks it to survive forks, which tests of forked children need.
import tilewright  # noqa: F401
import tilewright_arch
from tilewright_emulator.code.compiler import WITHOUT_OBJDUMP, have_objdump

sys.path.append(str(Path(__file__).parent / "kernels"))  # helpers that areas share


def own_level() -> str:
    """The level of the instruction set that this machine's CPU has, by the names of ``tests/native``."""
    own = tilewright_arch.detect_cpu().id
    if own.startswith("x86-64-v4+"):
        return "v4_dot"
    return own.removeprefix("x86-64-").partition("+")[0]


ROOT = Path(__file__).resolve().parents[1]
KEPT = 3
"""Folders of compiled kernels, of the headers that were compiled last."""
WHOLE = frozenset({"gfx90a", "gfx950", "gfx1100"}) | frozenset({"v3", "v4", "v4_dot"} - {own_level()})
"""Values of parameters that ``make test`` leaves to ``make test-all``: GPUs beside one of CDNA and one of RDNA, and
levels of CPUs beside the portable one and the machine's own."""
GATES = (
    "test_conv_shipped_sets", "test_fmha_shipped_sets", "test_moe_shipped_sets", "test_hip_compile", "test_cuda_compile"
)  # fmt: skip
"""Compile gates, which ``make test-all`` runs: after a change of what they guard they take minutes."""
GATED = ("test_conv_shipped_sets", "test_fmha_shipped_sets", "test_moe_shipped_sets")
"""Gates that read the instructions of kernels for AMD GPUs. Their own modules are part of the record of what passed."""

# A test that forgets to say where its server is must not start one for the user.
os.environ.setdefault("TILEWRIGHT_START", "0")

# An example that takes long on a busy machine is no failure.
settings.register_profile("tilewright", deadline=None)
settings.load_profile("tilewright")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--foreign-emulator",
        default="",
        metavar="COMMAND",
        help="another emulator of AMD GPUs (tests/emulator/foreign.py)",
    )
    parser.addoption(
        "--gates", action="store_true", help="compile whole sets and record what passed (tests/kernels/gated.py)"
    )
    parser.addoption(
        "--record",
        action="store_true",
        help="run extended tests of kernels that passed before, too, and record which pass (tests/kernels/passed.py)",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("record") and not hasattr(config, "workerinput"):
        from passed import Recorder

        config.pluginmanager.register(Recorder(config))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker which tests are left out: found once, for all of them."""
    from passed import as_they_stand

    node.workerinput["passed"] = as_they_stand(node.config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with slow tests first, then those with many: at the end no worker waits long for another's file."""
    from passed import leave_out

    if not have_objdump():
        for item in items:
            case = getattr(item, "callspec", None)
            if item.path.stem in GATED and case is not None and str(case.params.get("name", "")).startswith("gfx"):
                item.add_marker(pytest.mark.skip(reason=WITHOUT_OBJDUMP))
    for item in items:
        if item.path.stem in GATES or not WHOLE.isdisjoint(_values(item)):
            item.add_marker(pytest.mark.extended)
    _leave_some_out(items)
    leave_out(config, items)
    usual = [item for item in items if not item.get_closest_marker("exhaustive")]
    counts = Counter(item.path for item in usual)
    slow = {item.path for item in usual if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in slow, -counts[item.path], str(item.path)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while modules and items are made, which live to the end of the run, and leave these out of
    all later collections, those that tests ask for too."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the run, for all its workers."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def _leave_some_out(items: list[pytest.Item]) -> None:
    """Leave all but n cases of a test marked ``some(n)``, spread over all of them, to the extended run."""
    cases: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("some") and not any(map(item.get_closest_marker, ("exhaustive", "extended"))):
            cases.setdefault((item.path, getattr(item, "originalname", item.name)), []).append(item)
    for alike in cases.values():
        mark = alike[0].get_closest_marker("some")
        assert mark is not None
        count = min(mark.args[0], len(alike))
        kept = {place * len(alike) // count for place in range(count)}
        for place, item in enumerate(alike):
            if place not in kept:
                item.add_marker(pytest.mark.extended)


def _values(item: pytest.Item) -> Iterator[str]:
    case = getattr(item, "callspec", None)
    for value in () if case is None else case.params.values():
        if isinstance(value, str):
            yield value


@pytest.fixture(scope="session")
def built_kernels() -> Path:
    """A folder of what was compiled from the present headers by the present compilers, kept between runs.

    ``make clean`` removes it. Folders of other headers go when a new one is made.
    """
    digest = hashlib.sha256()
    for path in sorted((ROOT / "native" / "include").rglob("*.h*")):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    for name in ("c++", "g++", "clang++"):
        found = shutil.which(name)
        stamp = Path(found).stat() if found else None
        digest.update(f"{found} {stamp and (stamp.st_size, stamp.st_mtime_ns)}\0".encode())
    folder = ROOT / "build" / "test-kernels" / digest.hexdigest()[:16]
    if not folder.exists():
        folder.mkdir(parents=True, exist_ok=True)
        others = sorted(folder.parent.iterdir(), key=lambda each: each.stat().st_mtime)
        for old in others[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    return folder


@pytest.fixture(scope="session")
def kernel_cache(built_kernels: Path) -> Path:
    """An artifact cache for all servers of all runs: for tests to which it is no matter who built."""
    return built_kernels / "server"


@pytest.fixture(scope="session")
def kernel_folder(built_kernels: Path) -> Path:
    """Where all workers keep kernels that are built without a server (``kernels/cpu_kernels.py``)."""
    folder = built_kernels / "cpu_kernels"
    folder.mkdir(exist_ok=True)
    return folder
