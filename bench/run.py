"""Measure Tilewright against its peers and write the figures down.

    make bench
    python bench/run.py --suite gemm --suite service --threads 1 --threads 2 --output results/today
    python bench/run.py --suite conv --suite attention --threads 2 --sample
    python bench/run.py --quick

Every suite runs in a process of its own, with the environment in which NumPy and PyTorch are at their best
(OPENBLAS_CORETYPE and its kin unset, thread counts stated), and compares only within that process, in turns. Leave the
machine alone meanwhile: whatever else runs on one of two cores halves what a team of two can do. `selection` builds
some hundred kernels and takes a quarter of an hour. Some suites run only when they are named: `load` (latency under
load of 1 to 256 clients) takes as long; `cuda`, `cuda-conv` and `cuda-attention` need an NVIDIA GPU, and PyTorch built
for it; `amd-static` measures nothing, it analyses kernels for AMD GPUs.
`--output NAME` writes NAME.json and NAME.md, with date, hardware and versions; the tables are printed in any case.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import timing

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
SUITES = {
    "gemm": True,
    "conv": True,
    "attention": True,
    "selection": True,
    "build": False,
    "service": False,
    "load": False,
    "cuda": False,
    "cuda-conv": False,
    "cuda-attention": False,
    "amd-static": False,
}
"""Suites, and whether they are run once for each number of threads."""
SAMPLED = ("conv", "attention")
NAMED_ONLY = ("load", "cuda", "cuda-conv", "cuda-attention", "amd-static")


def run_suite(name: str, threads: int, quick: bool, sample: bool = False) -> list[dict[str, Any]]:
    """The tables of one suite, from a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "tables.json"
        command = [
            sys.executable,
            "-m",
            f"suites.{name.replace('-', '_')}",
            "--threads",
            str(threads),
            "--result",
            str(result),
        ]
        command += ["--quick"] if quick else []
        command += ["--sample"] if sample else []
        environment = timing.peer_environment(threads)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), environment.get("PYTHONPATH"))))
        done = subprocess.run(command, env=environment, check=False)
        if done.returncode != 0:
            return [
                {"title": f"{name}: failed with exit code {done.returncode}", "columns": [], "rows": [], "notes": []}
            ]
        tables: list[dict[str, Any]] = json.loads(result.read_text())
        return tables


def markdown(machine: dict[str, Any], tables: list[dict[str, Any]], done: str = "Measured") -> str:
    versions = ", ".join(f"{name} {text}" for name, text in machine["versions"].items() if text)
    lines = [
        f"{done} {machine['date']} on {machine['cpu']} ({machine['cores']} cores, {machine['arch']}, load "
        f"{machine['load']} before the run), "
        f"Linux {machine['kernel']}, Python {machine['python']}, {machine['compiler'] or 'no system compiler'}; "
        f"{versions}; commit {machine['commit'] or 'unknown'}.",
        "",
    ]
    for table in tables:
        lines += [f"### {table['title']}", ""]
        if table["columns"]:
            lines += ["| " + " | ".join(table["columns"]) + " |", "|" + "---|" * len(table["columns"])]
            lines += ["| " + " | ".join(_cell(value) for value in row) + " |" for row in table["rows"]]
            lines.append("")
        lines += [*table["notes"], ""] if table["notes"] else []
    return "\n".join(lines)


def put_into_page(page: Path, name: str, text: str) -> None:
    """Put tables between the marks ``<!-- NAME -->`` and ``<!-- end of NAME -->`` of a document, with its wrapping."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    whole = page.read_text()
    if whole.count(begin) != 1 or whole.count(end) != 1 or whole.index(begin) > whole.index(end):
        raise SystemExit(f"{page} has no part between {begin.strip()} and {end.strip()}")
    lines: list[str] = []
    for line in text.strip().splitlines():
        plain = line.removeprefix("### ")
        lines += (
            [plain] if plain.startswith("|") else textwrap.wrap(plain, 100, subsequent_indent=_indent(plain)) or [""]
        )
    before, after = whole.partition(begin)[0], whole.partition(end)[2]
    page.write_text(before + begin + "\n".join(lines) + "\n" + end + after)


def _indent(line: str) -> str:
    return "  " if line.startswith("- ") else ""


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", action="append", choices=list(SUITES), help="only this suite; may be repeated")
    parser.add_argument(
        "--threads", action="append", type=int, help="threads of kernels and peers (default: 1 and all)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer shapes and rounds: a check that it works, not a figure"
    )
    parser.add_argument(
        "--sample",
        action="store_true",
        help="conv: two layers of each kind of each network; attention: decoding alone; all measured as carefully",
    )
    parser.add_argument("--output", type=Path, help="write NAME.json and NAME.md")
    parser.add_argument("--page", help="put the tables into the part of docs/benchmarks.md that is marked by this name")
    parser.add_argument("--result", type=Path, help="run nothing: FILE.json of an earlier run, for --page")
    options = parser.parse_args()
    if options.page and options.quick:
        parser.error("--page is for figures of record, and --quick makes none")
    if options.result is not None:
        record = json.loads(options.result.read_text())
        if record["quick"]:
            parser.error(f"{options.result} is of a quick run, which is no figure of record")
        put_into_page(PAGE, options.page, markdown(record["machine"], record["tables"]))
        return 0
    machine = timing.machine()
    done = "Analysed (not measured)" if options.suite == ["amd-static"] else "Measured"
    threads = options.threads or sorted({1, machine["cores"]})
    tables: list[dict[str, Any]] = []
    failed = False
    for name in options.suite or (name for name in SUITES if name not in NAMED_ONLY):
        for count in threads if SUITES[name] else threads[-1:]:
            found = run_suite(name, count, options.quick, options.sample and name in SAMPLED)
            failed |= any(not table["columns"] for table in found)
            tables += found
            print(markdown(machine, found).partition("\n\n")[2], flush=True)
    record = {"machine": machine, "quick": options.quick, "sample": options.sample, "tables": tables}
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
        options.output.with_suffix(".md").write_text(markdown(machine, tables, done) + "\n")
    if options.page and not failed:
        put_into_page(PAGE, options.page, markdown(machine, tables, done))
    print(markdown(machine, [], done).strip())
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
