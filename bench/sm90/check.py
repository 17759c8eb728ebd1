"""Hopper GEMM kernels, instantiated from the template itself: compiled, checked against float64, timed beside cuBLAS.

``--compile-only`` needs no GPU and prints registers, spills, warnings and seconds. Otherwise every experiment runs in a
worker process under a watchdog, so that a kernel that hangs costs seconds. Suites are in suites.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sm90 import config as sm90_config
from sm90.config import ELEMENT_BYTES, Built, Config, compile_source, source_of
from sm90.suites import SUITES, Experiment

TOLERANCE = {"bf16": 4e-3, "fp16": 6e-4, "fp32": 3e-3, "int32": 0.0}
"""Largest relative error by type of C. (fp32: fp8 products are summed in fewer bits than 24.)"""


def build_all(configs: Iterable[Config], jobs: int) -> dict[Config, Built | str]:
    """Compile each once; a failure is its message."""

    def build(config: Config) -> Built | str:
        try:
            return compile_source(source_of(config))
        except RuntimeError as failed:
            errors = [line for line in str(failed).splitlines() if "error" in line]
            return "; ".join(errors[:3]) or str(failed)[:300]

    unique = list(dict.fromkeys(configs))
    with ThreadPoolExecutor(jobs) as pool:
        return dict(zip(unique, pool.map(build, unique), strict=True))


def report_builds(built: dict[Config, Built | str]) -> bool:
    """Print one line each; true if all are clean."""
    clean = True
    for config, result in built.items():
        name = f"{config.a}.{config.b}.{config.c} {config.label}"
        if isinstance(result, str):
            print(f"{name:72} FAILED {result}")
            clean = False
            continue
        faults = "".join(f" {warning}" for warning in result.warnings) + (
            f" SPILLS {result.spills}" if result.spills else ""
        )
        clean = clean and not faults
        figures = f"st {config.stage_count:2} smem {config.shared_bytes:6} regs {result.registers}"
        print(f"{name:72} {figures} {result.seconds:.2f} s{faults}")
    return clean


class Worker:
    """A process that runs experiments one after the other; it is replaced when it hangs or dies."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.buffer = b""

    def start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(Path(__file__).resolve()), "--worker"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.buffer = b""
        self._read(60.0)  # ready
        return self.process

    def run(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        process = self.process or self.start()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            answer = self._read(timeout)
        except OSError as failed:
            answer = {"failed": f"worker: {failed}"}
        if answer.get("lost"):
            process.kill()
            process.wait()
            self.process = None
        return answer

    def _read(self, timeout: float) -> dict[str, Any]:
        assert self.process is not None and self.process.stdout is not None
        until = time.monotonic() + timeout
        while b"\n" not in self.buffer:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, until - time.monotonic()))
            data = os.read(self.process.stdout.fileno(), 65536) if ready else b""
            if not data:
                return {"failed": "died" if ready else f"hung for {timeout:.0f} s", "lost": True}
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer


def serve() -> None:
    """The worker: experiments as JSON lines on stdin, results on stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    from sm90 import experiment as sm90_experiment

    sm90_experiment.prepare()
    answers.write("{}\n")
    answers.flush()
    for line in sys.stdin:
        request = json.loads(line)
        config = Config(**{k: tuple(v) if isinstance(v, list) else v for k, v in request.pop("config").items()})
        cubin = Path(request.pop("cubin")).read_bytes()
        experiment = Experiment(config, tuple(request.pop("shape")), **request)
        try:
            result = sm90_experiment.run(experiment, cubin)
        except Exception as failed:
            text = str(failed).splitlines()
            result = {
                "failed": f"{type(failed).__name__}: {text[0] if text else ''}",
                "lost": "driver" in str(failed) or "CUDA" in str(failed),
            }
        answers.write(json.dumps(result) + "\n")
        answers.flush()


def verdict(experiment: Experiment, result: dict[str, Any]) -> str:
    """Why the result is not good, or nothing."""
    if "failed" in result:
        return str(result["failed"])
    config, error = experiment.config, result.get("error", 0.0)
    limit = TOLERANCE[config.c]
    if ELEMENT_BYTES[config.a] > 1 and config.c == "fp32":
        limit = 1e-5
    elif config.a != "int8" and ELEMENT_BYTES[config.a] == 1:  # summed in fewer bits than fp32 has
        limit = 4e-3 if config.promote else 4e-3 + 1e-7 * experiment.shape[2]
    if not error <= limit:
        return f"WRONG {error:.1e}"
    if not result.get("repeatable", True):
        return "NOT REPEATABLE"
    return "" if result.get("counters", 0) == 0 else "COUNTERS LEFT"


def line_of(experiment: Experiment, result: dict[str, Any]) -> str:
    m, n, k = experiment.shape
    config = experiment.config
    text = f"{config.a:4} {m}x{n}x{k}" + (f" b{experiment.batch}" if experiment.batch > 1 else "")
    text = f"{text:28} {config.label:58}"
    bad = verdict(experiment, result)
    if "error" in result:
        text += f" err {result['error']:.1e}"
    if "seconds" in result:
        seconds = result["seconds"]
        text += f" {seconds * 1e6:8.1f} us {2e-12 * m * n * k * experiment.batch / seconds:6.0f} TF"
        if "peer" in result:
            text += f" peer {result['peer'] * 1e6:8.1f} us  ratio {result['peer'] / seconds:.3f}"
    return text + (f"  {bad}" if bad else "")


def run_all(
    experiments: list[Experiment], built: dict[Config, Built | str], timeout: float, deadline: float, log: Path
) -> int:
    """Run them in turn; returns the number of failures."""
    worker, failures, records = Worker(), 0, []
    lost: set[Config] = set()  # hung or died: not run again
    with tempfile.TemporaryDirectory() as folder:
        for experiment in experiments:
            kernel = built[experiment.config]
            if isinstance(kernel, str):
                result: dict[str, Any] = {"failed": "does not compile"}
            elif experiment.config in lost or time.monotonic() > deadline:
                result = {"failed": "skipped"}
            else:
                path = Path(folder) / f"{abs(hash(experiment.config))}.cubin"
                if not path.exists():
                    path.write_bytes(kernel.cubin)
                result = worker.run({**dataclasses.asdict(experiment), "cubin": str(path)}, timeout)
            if result.get("lost"):
                lost.add(experiment.config)
            failures += bool(verdict(experiment, result))
            records.append({**dataclasses.asdict(experiment), **result})
            print(line_of(experiment, result), flush=True)
            log.write_text(json.dumps(records))
    if worker.process is not None:
        worker.process.kill()
        worker.process.wait()
    return failures


def summary(experiments: list[Experiment], records: list[dict[str, Any]]) -> None:
    """The best configuration of every shape, and geometric means."""
    best: dict[tuple[Any, ...], tuple[float, str]] = {}
    for experiment, record in zip(experiments, records, strict=True):
        if "peer" not in record or verdict(experiment, record):
            continue
        config = experiment.config
        key = (config.a, config.layout, config.bias, config.unary, config.promote > 0, experiment.shape)
        ratio = record["peer"] / record["seconds"]
        if ratio > best.get(key, (0.0, ""))[0]:
            best[key] = (ratio, config.label)
    for key, (ratio, label) in best.items():
        print(f"{key[0]:4} {key[1]} {key[2]}{key[3]}{' promoted' if key[4] else ''} {key[5]}: {ratio:.3f} {label}")
    for dtype in dict.fromkeys(key[0] for key in best):
        ratios = [ratio for key, (ratio, _) in best.items() if key[0] == dtype]
        print(
            f"{dtype}: geometric mean {math.exp(sum(map(math.log, ratios)) / len(ratios)):.3f}, least {min(ratios):.3f}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", action="append", choices=sorted(SUITES), help="default: correct, wide")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--filter", default="", help="only experiments whose line contains this text")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--timeout", type=float, default=15.0, help="seconds for one experiment")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which experiments are skipped")
    parser.add_argument("--log", type=Path, help="write the records as JSON")
    parser.add_argument("--include", type=Path, help="the headers, if not the shipped ones")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    deadline = time.monotonic() + args.budget
    if args.worker:
        serve()
        return 0
    if args.include:
        sm90_config.INCLUDE = args.include
    experiments = [e for suite in args.suite or ["correct", "wide"] for e in SUITES[suite]()]
    experiments = [e for e in experiments if args.filter in line_of(e, {})]
    built = build_all((e.config for e in experiments), args.jobs)
    clean = report_builds(built)
    if args.compile_only:
        return 0 if clean else 1
    log = args.log or Path(tempfile.gettempdir()) / "sm90_check.json"
    failures = run_all(experiments, built, args.timeout, deadline, log)
    summary(experiments, json.loads(log.read_text()))
    print(f"{len(experiments)} experiments, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
