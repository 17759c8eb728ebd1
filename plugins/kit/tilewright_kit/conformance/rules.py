"""Rules: they judge without raising, their fixes correct, and correction ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.config.rules import RuleBook, Violation
from tilewright_kit.conformance.fields import Pool, variants
from tilewright_kit.conformance.report import CheckReport, Skipped
from tilewright_kit.contract.operation import Operation

__all__ = ["check_rules"]


def check_rules(report: CheckReport, operation: Operation[Any, Any], pool: Pool) -> None:
    """Judge every kernel of the pool, and what comes of changing each of its fields."""
    report.run("sets.valid", _sets_valid, operation, pool)
    report.run("sets.deterministic", _sets_deterministic, operation, pool)
    report.run("sets.prefilter", _prefilter_agrees, operation, pool)
    report.run("rules.reasons", _reasons, operation, pool)
    report.run("rules.fixes", _fixes, operation, pool)
    report.run("rules.correct", _corrections, operation, pool)


def _sets_valid(operation: Operation[Any, Any], pool: Pool) -> Iterator[str]:
    for arch, configs in pool.configs.items():
        for config in configs:
            if violations := operation.rules.check(config, arch):
                yield f"{config.name} is in a kernel set but breaks {violations[0].rule} on {arch.id}"
    if not pool.configs:
        yield "no kernel set has a valid kernel on any arch"


def _sets_deterministic(operation: Operation[Any, Any], pool: Pool) -> Iterator[str]:
    for arch in pool.configs:
        for name, kernels in operation.kernel_sets.items():
            # ``expand`` caches; ``iterate`` does the work again.
            if tuple(kernels.iterate(arch, operation.rules)) != kernels.expand(arch, operation.rules):
                yield f"kernel set {name!r} expands to another order or content the second time on {arch.id}"


def _prefilter_agrees(operation: Operation[Any, Any], pool: Pool) -> Iterator[str]:
    filters = [kernels.prefilter for kernels in operation.kernel_sets.values() if kernels.prefilter]
    if not filters:
        raise Skipped("no kernel set has a prefilter")
    for config, arch in _changed(pool):
        if operation.rules.allows(config, arch):
            known = {name: getattr(config, name) for name in config.field_names()}
            if not all(prefilter(known, arch) for prefilter in filters):
                yield f"{config.name} is valid on {arch.id}, but a prefilter drops it"


def _changed(pool: Pool) -> Iterator[tuple[KernelConfig, ArchSpec]]:
    """Kernels of the pool with one field changed: valid ones and broken ones."""
    for arch in pool.configs:
        for base in pool.bases(arch, 3):
            for name in base.field_names():
                for changed in variants(base, name, pool.values[name], limit=6):
                    yield changed, arch


def _broken(operation: Operation[Any, Any], pool: Pool) -> Iterator[tuple[KernelConfig, ArchSpec, list[Violation]]]:
    count = 0
    for config, arch in _changed(pool):
        if violations := list(operation.rules.check(config, arch)):
            count += 1
            yield config, arch, violations
    if not count:
        raise Skipped("no configuration that the rules refuse was found")


def _reasons(operation: Operation[Any, Any], pool: Pool) -> Iterator[str]:
    fields = set(operation.config_type.field_names())
    for config, _arch, violations in _broken(operation, pool):
        for violation in violations:
            if not violation.rule or not violation.reason:
                yield f"a violation of {config.name} has no rule or no reason"
            if not set(violation.fix) <= fields:
                yield f"rule {violation.rule} mends fields that do not exist: {sorted(set(violation.fix) - fields)}"


def _fixes(operation: Operation[Any, Any], pool: Pool) -> Iterator[str]:
    told: set[tuple[str, str]] = set()
    for config, arch, violations in _broken(operation, pool):
        for violation in violations:
            if not violation.fix or (violation.rule, violation.field) in told:
                continue
            mended = config.replace(**violation.fix)
            hash(mended)
            left = operation.rules.check(mended, arch)
            if any((item.rule, item.field) == (violation.rule, violation.field) for item in left):
                told.add((violation.rule, violation.field))
                yield f"rule {violation.rule} is still broken on {arch.id} after its own fix {violation.fix_text}"


def _corrections(operation: Operation[Any, Any], pool: Pool) -> Iterator[str]:
    rules = operation.rules
    for config, arch, _ in _broken(operation, pool):
        result, again = rules.correct(config, arch), rules.correct(config, arch)
        if (result.config, result.applied) != (again.config, again.applied):
            yield f"correct({config.name}) differs from run to run"
        if result.remaining != rules.check(result.config, arch):
            yield f"correct({config.name}) is wrong about what remains"
        if len(result.applied) >= RuleBook.MAX_FIXES:
            yield f"correct({config.name}) does not come to an end (last: {result.applied[-1].rule})"
    for arch, configs in pool.configs.items():
        if any(rules.correct(config, arch).changed for config in configs[:3]):
            yield "correct() changes a valid configuration"
