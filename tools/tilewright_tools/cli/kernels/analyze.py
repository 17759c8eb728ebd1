"""`tilewright kernels analyze`: what a kernel for an AMD GPU can reach at the most, told from its instructions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from tilewright_tools.cli.console.output import examples, note, out, print_json, table
from tilewright_tools.cli.problems.loading import load_operation

if TYPE_CHECKING:
    from tilewright_kit.config.kernel_config import KernelConfig
    from tilewright_tools.analysis.kernels import Finding

__all__ = ["EPILOG", "analyze"]

EPILOG = examples(
    "tilewright kernels analyze NAME --arch gfx942",
    "tilewright kernels analyze NAME --arch gfx942 --shape 4096,4096,4096 --schedule",
    "tilewright kernels analyze NAME --arch gfx942 --operation conv --shape 32,256,256,14x14,3x3,1,1,1",
    "tilewright kernels analyze --config config.json --arch gfx950 --json",
)


def analyze(
    name: str = typer.Argument("", help="Kernel, by name."),
    arch: str = typer.Option(..., "--arch", help="AMD GPU: gfx90a, gfx942, gfx950, gfx1100 or gfx1201."),
    shape: str = typer.Option(
        "", help="Problem that the bound is for: M,N,K; of convolutions N,C,K,HxW,RxS,stride,pad,groups."
    ),
    config: str = typer.Option("", "--config", help="Analyse this configuration: a file, JSON text, or -."),
    operation: str = typer.Option("", "--operation", help="Operation. Default: the first that is installed."),
    resident: int = typer.Option(0, min=0, help="Workgroups on a compute unit. 0: as many as fit."),
    schedule: bool = typer.Option(False, "--schedule", help="Print the main loop and what its instructions wait for."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Build a kernel and tell from its instructions the least that its main loop and a problem can take.

    Static analysis: a bound, not a measurement. docs/analysis.md says what is in it. Needs no GPU.
    """
    import tilewright_arch
    from tilewright_native import include_dir
    from tilewright_server.build.toolchains.hip import HipToolchain
    from tilewright_server.settings import load
    from tilewright_tools.analysis.disassembly import Disassembler
    from tilewright_tools.analysis.kernels import analyze_config, summary

    if bool(name) == bool(config):
        raise typer.BadParameter("say what to analyse: a name, or --config (one of them)")
    settings = load()
    toolchain = HipToolchain([include_dir()], compiler=settings.hip_compiler)
    try:
        finding = analyze_config(
            load_operation(operation),
            _config(operation, name, config, arch),
            tilewright_arch.load(arch),
            toolchain,
            shape=shape,
            resident=resident,
            disassembler=Disassembler(settings.llvm_objdump),
        )
    finally:
        toolchain.close()
    if as_json:
        print_json(summary(finding) | ({"schedule": _steps(finding)} if schedule else {}))
        return
    _print(finding)
    if schedule:
        _print_schedule(finding)


def _config(operation: str, name: str, text: str, arch: str) -> KernelConfig:
    import tilewright_arch
    from tilewright_tools.analysis.kernels import named_config
    from tilewright_tools.cli.problems.config_file import configuration

    found = load_operation(operation)
    if not text:
        return named_config(found, tilewright_arch.load(arch), name)
    _, record = configuration(text, operation)
    config: KernelConfig = found.config_type.from_dict(record)
    return config


def _print(finding: Finding) -> None:
    from tilewright_tools.analysis.kernels import summary

    found = summary(finding)
    loop, bound, resources = found["loop"], found["bound"], found["resources"]
    out().print(f"{found['kernel']} on {found['arch']}: static analysis, not measured", markup=False)
    cycles: dict[str, float] = loop["cycles"]
    rows = [(what, f"{value:.0f}", f"{value / max(cycles.values()):.0%}") for what, value in cycles.items()]
    title = f"Cycles of one iteration of the main loop, {loop['workgroups']} workgroups on a unit"
    table(title, ("limit", "cycles", "share"), rows, right=("cycles", "share"))
    note(f"If all waves use LDS and memory at the same moments, an iteration takes {loop['in_step']:.0f} cycles.")
    instructions = ", ".join(f"{count} {kind}" for kind, count in loop["instructions"].items())
    matrix = ", ".join(f"{count} x {name}" for name, count in loop["matrix_instructions"].items())
    parts = {key: f"{value * 1e6:.1f} us" for key, value in bound["parts"].items()}
    size = finding.problem.product
    rows_of: list[tuple[str, Any]] = [
        (
            "instructions of an iteration",
            instructions + (f"; {loop['branches']} inner branches" * (loop["branches"] > 0)),
        ),
        ("matrix instructions", matrix or "none"),
        ("limited by", f"{loop['limit']}; matrix units busy {loop['matrix_share']:.1%}"),
        ("registers", f"{resources['vgprs']} vector ({resources['agprs']} accumulation), {resources['sgprs']} scalar"),
        ("LDS", f"{resources['lds_bytes']} bytes of a workgroup"),
        (
            "resident",
            f"{resources['workgroups_per_unit']} workgroups, {resources['waves_per_simd']} waves on a SIMD"
            f" (limited by {resources['occupancy_limit']})",
        ),
        (
            f"{size.m} x {size.n} x {size.k}" + f", {size.batch} of them" * (size.batch > 1),
            ", ".join(f"{key} {value}" for key, value in parts.items()),
        ),
        ("units used, edge", f"{bound['units_used']:.1%}, {bound['edge']:.1%}"),
        ("bound", f"{bound['tflops']:.0f} TFLOP/s, {bound['share_of_peak']:.1%} of {bound['peak_tflops']:.0f}"),
    ]
    table("", ("", ""), rows_of)


def _steps(finding: Finding) -> list[dict[str, Any]]:
    """The last of a few iterations of one wave, instruction by instruction."""
    from tilewright_tools.analysis.roofline import rates_of
    from tilewright_tools.analysis.schedule import run

    found = finding.analysis
    *_, before, last = run(found.loop.body, rates_of(found.arch), found.kernel.wave, 6)
    begin = before[-1].begin
    return [
        {"cycle": step.begin - begin, "stall": step.stall, "cause": step.cause, "instruction": step.instruction.text}
        for step in last
    ]


def _print_schedule(finding: Finding) -> None:
    """One line for each instruction: when it begins, what it waited for."""
    steps = _steps(finding)
    note("One iteration of one wave alone on its SIMD: cycle, wait and its cause, instruction")
    for step in steps:
        stall = f"+{step['stall']} {step['cause']}" if step["stall"] else ""
        out().print(f"{step['cycle']:6d}  {stall:16s}  {step['instruction']}", markup=False)
