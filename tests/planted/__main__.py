"""Plants bugs, one after the other, and runs the tests that must find each: ``python -m tests.planted [WORD ...]``.

All is done in a copy of the tree in a temporary folder. Words choose the bugs whose kind has one of them. First, all
tests have to pass without a bug. Prints a table in the form of docs/planted-bugs.md, and ends with 1 if a bug is
missed. ``--workers N`` runs that many bugs at a time, each in a copy of its own.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

from tests.planted.bug import Bug
from tests.planted.front_bugs import FRONT_BUGS
from tests.planted.host_bugs import HOST_BUGS
from tests.planted.kernel_bugs import KERNEL_BUGS

BUGS = [*HOST_BUGS, *FRONT_BUGS, *KERNEL_BUGS]
ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 900.0
"""After which tests that hang with a bug have found it."""
PASSED, FAILED = 0, 1
"""Exit codes of pytest. Others are errors of the command itself, or (below zero) a crash."""
LINES = 20
"""Lines of pytest's output that are shown where a run did not end as it has to."""
LEFT_OUT = frozenset({".git", ".venv", "build", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis"})
"""In the tree's own folder."""


class Tree:
    """A copy of the project with an environment that imports the copy."""

    def __init__(self, folder: Path) -> None:
        self._root = folder / "tree"
        shutil.copytree(ROOT, self._root, ignore=_left_out, symlinks=True)
        venv.create(self._root / ".venv", symlinks=True)
        packages = Path(sysconfig.get_path("purelib"))
        own = (packages / "_tilewright.pth").read_text().replace(str(ROOT), str(self._root))
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        paths = self._root / ".venv" / "lib" / version / "site-packages" / "planted.pth"
        paths.write_text(f"{own.rstrip()}\n{packages}\n")

    def run(self, tests: str) -> tuple[int, str]:
        """pytest's exit code and its last lines."""
        command = [str(self._root / ".venv" / "bin" / "python"), "-m", "pytest", "-q", "-x", "-n", "0"]
        options = ["-p", "no:cacheprovider", "-m", "not exhaustive", *shlex.split(tests)]
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "PYTHON"))}
        with subprocess.Popen(
            [*command, *options], cwd=self._root, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                out, _ = process.communicate(timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                return FAILED, f"took longer than {LIMIT_S:g} s"
        return process.returncode, "\n".join(out.strip().splitlines()[-LINES:])

    def with_bug(self, bug: Bug) -> tuple[int, str]:
        """``run`` of a bug's tests with the bug; the tree is as before afterwards."""
        path = self._root / bug.file
        text, times = path.read_text(), path.stat()
        assert text.count(bug.old) == 1, f"{bug.kind}: its place is not there once"
        path.write_text(text.replace(bug.old, bug.new))
        try:
            return self.run(bug.tests)
        finally:
            path.write_text(text)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def _left_out(folder: str, names: list[str]) -> set[str]:
    return LEFT_OUT & set(names) if Path(folder) == ROOT else set()


def verdict(code: int) -> str:
    """How a run with a bug ended."""
    if code == FAILED:
        return "caught"
    return "caught (crash)" if code < 0 else "missed" if code == PASSED else f"error {code}"


def check(bugs: Sequence[Bug], trees: Sequence[Tree]) -> int:
    """Number of bugs that are missed, or of tests that fail without any."""
    free: Queue[Tree] = Queue()
    for tree in trees:
        free.put(tree)

    def without(tests: str) -> tuple[int, str]:
        tree = free.get()
        try:
            return tree.run(tests)
        finally:
            free.put(tree)

    def planted(bug: Bug) -> tuple[int, str]:
        tree = free.get()
        try:
            return tree.with_bug(bug)
        finally:
            free.put(tree)

    wrong = 0
    with ThreadPoolExecutor(len(trees)) as pool:
        for tests, (code, line) in zip(
            every := list(dict.fromkeys(bug.tests for bug in bugs)), pool.map(without, every), strict=True
        ):
            if code != PASSED:
                wrong += 1
                sys.stdout.write(f"without a bug: {tests}\n{line}\n")
        sys.stdout.write("| bug | tests | result |\n|---|---|---|\n")
        for bug, (code, line) in zip(bugs, pool.map(planted, bugs), strict=True):
            found = verdict(code)
            wrong += not found.startswith("caught")
            sys.stdout.write(f"| {bug.kind} | `{bug.tests}` | {found} |\n")
            if not found.startswith("caught"):
                sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only bugs whose kind has one of these words")
    parser.add_argument("--workers", type=int, default=1, help="bugs at a time")
    options = parser.parse_args()
    bugs = [bug for bug in BUGS if not options.words or any(word in bug.kind for word in options.words)]
    with tempfile.TemporaryDirectory(prefix="tilewright-planted-") as folder:
        trees = [Tree(Path(folder) / str(number)) for number in range(max(1, min(options.workers, len(bugs))))]
        return 1 if check(bugs, trees) else 0


if __name__ == "__main__":
    raise SystemExit(main())
