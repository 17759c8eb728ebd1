"""Hopper's attention kernels on the GPU of this machine: is every feature right, and how do variants fare beside cuDNN?

    python bench/sm90/attention.py --suite correct --suite fast

Plans are the plugin's own, kernels those named here; experiments run in a process of their own, which is ended if one
of them hangs. Results are compared with PyTorch in fp32, what lies beyond lengths holds NaN, and every launch is made
twice. Times are those of bench/common/cuda_local.py: in turns, with cold caches.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sm90.attention_cases import SUITES, Experiment

__all__ = ["main"]


# ---- the process that has the GPU ----


class Worker:
    """Runs experiments, given by number, and answers with a line of JSON each."""

    def __init__(self, experiments: list[Experiment], cache: Path) -> None:
        import torch
        from common.cuda_local import Cuda

        self.torch = torch
        self.experiments = experiments
        self.cuda = Cuda(cache)
        self.operation: Any = self.cuda.engine.operations["attention"]

    def build(self) -> dict[str, Any]:
        from tilewright_server.engine.call import Call

        begun = time.perf_counter()
        named = [item for item in self.experiments if not (item.chosen or item.few)]
        configs = list(dict.fromkeys(config for item in named for config in item.configs))
        results = self.cuda.engine.build(configs, self.cuda.info.arch, lambda _: None, Call())
        failed = {config.name: str(item.error) for config, item in zip(configs, results, strict=True) if item.error}
        return {"built": len(configs), "seconds": round(time.perf_counter() - begun, 1), "failed": failed}

    def run(self, number: int) -> dict[str, Any]:
        from sm90.attention_run import Attended

        item = self.experiments[number]
        begun = time.perf_counter()
        attended = Attended(self.cuda, self.operation, item.case)
        answer: dict[str, Any] = {"case": item.case.label, "errors": {}}
        calls = {}
        if item.few:
            chosen = attended.few_rows()
        else:
            chosen = (self.cuda.choose(self.operation, attended.problem, ""),) if item.chosen else item.configs
        for config in (*chosen, *(attended.portable() if item.portable else ())):
            name = item.name_of(config)
            try:
                call = attended.call(config)
                answer["errors"][name] = attended.check(call) if item.checked else attended.glance(call)
                calls[name] = call
            except Exception as error:  # the next variant is another experiment
                answer["errors"][name] = f"{type(error).__name__}: {str(error)[:300]}"
        if item.timed:
            # cuDNN knows no pages: the portable kernel stands in.
            peer = {} if item.case.page else {"cudnn": attended.peer()}
            seconds = self.cuda.alternate(calls | peer, seconds=item.seconds)
            theirs = seconds.pop("cudnn") if peer else list(seconds.values())[-1]
            answer["us"] = round(theirs * 1e6, 1)
            answer["cudnn"] = round(attended.flops / theirs / 1e12, 1)
            answer["ratios"] = {name: round(theirs / own, 3) for name, own in seconds.items()}
        answer["seconds"] = round(time.perf_counter() - begun, 2)
        return answer


def serve(experiments: list[Experiment], cache: Path) -> None:
    worker = Worker(experiments, cache)
    print(json.dumps(worker.build()), flush=True)
    for line in sys.stdin:
        number = int(line)
        try:
            answer = worker.run(number)
        except Exception as error:  # told to the parent
            answer = {"case": experiments[number].case.label, "fault": f"{type(error).__name__}: {str(error)[:600]}"}
            print(json.dumps(answer), flush=True)
            return  # the context may be lost
        print(json.dumps(answer), flush=True)


# ---- the parent ----


class Process:
    def __init__(self, arguments: list[str], timeout: float) -> None:
        self.timeout = timeout
        command = [sys.executable, __file__, "--worker", *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        print(self.read(120), flush=True)

    def read(self, timeout: float) -> str | None:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], timeout)
        return (self.process.stdout.readline().strip() or None) if ready else None

    def run(self, number: int) -> str | None:
        assert self.process.stdin is not None
        try:
            print(number, file=self.process.stdin, flush=True)
        except BrokenPipeError:
            return None
        return self.read(self.timeout)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def run_all(experiments: list[Experiment], arguments: list[str], timeout: float, deadline: float) -> Iterator[Any]:
    process: Process | None = None
    for number, item in enumerate(experiments):
        if time.monotonic() > deadline:
            yield {"case": item.case.label, "fault": "no time left"}
            continue
        process = process or Process(arguments, timeout)
        line = process.run(number)
        answer = json.loads(line) if line else {"case": item.case.label, "fault": "hung, or died"}
        if "fault" in answer:
            process.end()
            process = None
        yield answer
    if process:
        process.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", action="append", choices=sorted(SUITES))
    parser.add_argument("--filter", default="")
    parser.add_argument("--timeout", type=float, default=20.0)
    parser.add_argument("--budget", type=float, default=1e9)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / f"tw-attention-{os.getpid()}")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    suites = args.suite or ["correct"]
    experiments = [item for suite in suites for item in SUITES[suite]() if args.filter in item.case.label]
    if args.worker:
        serve(experiments, args.cache)
        return 0
    arguments = [f"--cache={args.cache}", f"--filter={args.filter}", *(f"--suite={suite}" for suite in suites)]
    answers, failures = [], 0
    for answer in run_all(experiments, arguments, args.timeout, time.monotonic() + args.budget):
        answers.append(answer)
        wrong = {name: text for name, text in answer.get("errors", {}).items() if text != "ok"}
        failures += bool(wrong or "fault" in answer)
        mark = "FAIL" if wrong or "fault" in answer else "ok"
        told = answer.get("fault") or wrong or ""
        print(mark, answer["case"], told, answer.get("cudnn", ""), answer.get("ratios", ""), flush=True)
    if args.log:
        args.log.write_text(
            json.dumps({"experiments": [asdict(item.case) for item in experiments], "answers": answers})
        )
    print(f"{len(answers)} experiments, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
