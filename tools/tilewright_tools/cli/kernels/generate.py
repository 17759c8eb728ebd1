"""`tilewright kernels generate`: write the sources of kernels to a folder, without a server, a compiler or a device."""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright_tools.cli.console.exits import Exit
from tilewright_tools.cli.console.options import AsJson, command_of, parameters_of, taken
from tilewright_tools.cli.console.output import examples, note, out, print_json, progress, working
from tilewright_tools.cli.kernels.lists import first_dtype, read_lists, swept
from tilewright_tools.cli.problems.parameters import signature_of

if TYPE_CHECKING:
    from tilewright_arch import ArchSpec
    from tilewright_kit.config.kernel_config import KernelConfig
    from tilewright_kit.contract.operation import Operation

__all__ = ["EPILOG", "generate_command"]

EPILOG = examples(
    "tilewright kernels generate --output-dir out --datatype bf16 --layout rcr",
    "tilewright kernels generate --output-dir out --gpu-target gfx942 --preselected fp16_rcr_essential",
    "tilewright kernels generate --output-dir out --variants standard multi_d --limit 20",
    "tilewright kernels generate --operation conv --rule-set tiny --arch gfx942 --list-configs",
    "tilewright kernels generate -o out --operation attention --receipt 4 --hdim 128",
    "tilewright kernels generate --operation attention --arch gfx942 --wave 4x1x1 --warp-tile 16x16x16 --list-configs",
    "tilewright kernels generate -o out --operation conv --variant bwd_weight --ndim 3 --datatype bf16 --two-stage",
    'tilewright kernels generate --output-dir out --tile-config-json \'{"tile_m": [64, 128], "tile_n": [64]}\'',
)
_SUFFIXES = {"c++": ".cpp", "cuda": ".cu", "hip": ".hip"}


def _options(
    output_dir: Annotated[
        Path | None,
        typer.Option("--output-dir", "--output", "-o", help="Folder to write to; made if need be."),
    ] = None,
    operation: Annotated[str, typer.Option(help="Operation. Default: the first that is installed.")] = "",
    variant: Annotated[
        str,
        typer.Option(
            "--variant", "-v", help="Variant of the operation, in any of its spellings: fwd, bwd_data, bwd_weight."
        ),
    ] = "",
    datatype: Annotated[
        str, typer.Option("--datatype", "--dtype", "-d", help="Only kernels of this element type of the first input.")
    ] = "",
    layout: Annotated[str, typer.Option(help="Only this layout, in the operation's words: rcr, nhwgc, ...")] = "",
    gpu_target: Annotated[
        str, typer.Option("--gpu-target", "--arch", "-a", help="Architecture. Default: this machine's CPU.")
    ] = "",
    variants: Annotated[
        list[str], typer.Option("--variants", help="Only these kinds of kernels: one or several.")
    ] = [],  # noqa: B006 (read only, as all defaults of options)
    preselected: Annotated[
        str, typer.Option("--preselected", help="Kernel set. Default: the operation's `default`.")
    ] = "",
    config: Annotated[
        str, typer.Option("--config", help="JSON file, or text, of lists to combine: tile_config, trait_config, ...")
    ] = "",
    tile_config_json: Annotated[
        str, typer.Option("--tile-config-json", help="The same as text, flat or in sections.")
    ] = "",
    kernel_set: Annotated[str, typer.Option("--kernel-set", help="Name of a subfolder for this set.")] = "",
    limit: Annotated[int, typer.Option(help="At most so many kernels; 0: all.")] = 0,
    show_arch_info: Annotated[
        bool, typer.Option("--show-arch-info", help="Print the architecture's tables and stop.")
    ] = False,
    list_configs: Annotated[
        bool, typer.Option("--list-configs", help="Print the kernels' names and write nothing.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Name every kernel.")] = False,
    as_json: AsJson = False,
) -> None:
    """The options that every operation has."""


def generate_command() -> Callable[..., None]:
    """The command, with the options of every installed operation."""
    from tilewright_kit.commands.discovery import installed_commands

    shared = parameters_of(_options)
    known = {item.name for item in shared}
    own: list[inspect.Parameter] = []
    for command in installed_commands().values():
        fresh = [item for item in command.generated if item.name not in known]
        known |= {item.name for item in fresh}
        own += signature_of(fresh, f"Kernels of {command.name}")

    def run(given: dict[str, Any]) -> None:
        options: dict[str, Any] = {}
        for command in installed_commands().values():
            options |= command.generate_options(given)
        _run(options, **taken(given, shared))

    text = (
        "Write the source of every kernel that matches, and `kernels.json`, which describes them.\n\n"
        "Exit code 1 if one could not be generated."
    )
    return command_of(run, "generate", text, shared, own)


def _run(
    options: dict[str, Any],
    *,
    output_dir: Path | None,
    operation: str,
    variant: str,
    datatype: str,
    layout: str,
    gpu_target: str,
    variants: list[str],
    preselected: str,
    config: str,
    tile_config_json: str,
    kernel_set: str,
    limit: int,
    show_arch_info: bool,
    list_configs: bool,
    verbose: bool,
    as_json: bool,
) -> None:
    import tilewright_arch
    from tilewright_kit.contract.abilities import GeneratesSets
    from tilewright_tools.cli.problems.loading import load_operation

    arch = tilewright_arch.load(gpu_target) if gpu_target else tilewright_arch.detect_cpu()
    if show_arch_info:
        print_json(arch.to_dict())
        return
    found = load_operation(_operation_of(operation, variant))
    sources = {"--preselected": preselected, "--config": config, "--tile-config-json": tile_config_json}
    said = [name for name, value in sources.items() if value]
    _check_sources(said, options)
    _check_variants(found, variants)
    narrow = {"datatype": datatype, "layout": layout}
    lists = read_lists(config or tile_config_json) if config or tile_config_json else {}

    kinds: set[str] = set()

    def wanted(item: KernelConfig, *narrowed: str) -> bool:
        if not _matches(item, *narrowed):
            return False
        kind = getattr(item, "variant", "standard")
        kinds.add(kind)
        return not variants or kind in variants

    def matching(where: ArchSpec) -> Iterator[KernelConfig]:
        if not said and (options or isinstance(found, GeneratesSets)):
            given = options | {key: value for key, value in narrow.items() if value}
            return (item for item in _select(found, where, given) if wanted(item, "", ""))
        declared = swept(found, where, lists, datatype, layout) if lists else _declared(found, where, preselected)
        return (item for item in declared if wanted(item, datatype, layout))

    chosen = list(itertools.islice(matching(arch), limit or None))
    if not chosen:
        _explain_none(matching, arch)
        if variants and kinds and not kinds & set(variants):
            note(f"kinds of kernels that match else: {', '.join(sorted(kinds))}")
        elif "rule_set" in options and len(options) > 1:
            note("without --rule-set the options describe one kernel, of which the rules say why it cannot be")
    elif options and "rule_set" not in options and len(chosen) == 1 and "rule_set" in _known_options(found):
        note("this kernel is described by the options; with --rule-set default they choose among the shipped ones")
    if list_configs:
        _list(chosen, arch, as_json)
    else:
        _generate(found, arch, chosen, _folder(output_dir, kernel_set), as_json, verbose)


def _operation_of(name: str, variant: str) -> str:
    """The operation that a name and a variant mean; without a name, the first installed one that has the variant.

    Raises ``NotFoundError``, and ``InvalidArgumentError`` for a name that is another variant's.
    """
    from tilewright_kit.commands.discovery import installed_commands
    from tilewright_kit.contract.abilities import HasVariants
    from tilewright_kit.types.errors import InvalidArgumentError, NotFoundError
    from tilewright_tools.cli.problems.loading import default_operation, load_operation

    if not variant:
        return name or default_operation()
    families = [item.family().operations[0] for item in installed_commands().values()]
    candidates = [name] if name else families
    known: dict[str, str] = {}
    for candidate in candidates:
        operation = load_operation(candidate)
        if isinstance(operation, HasVariants):
            known = dict(operation.variants) | known
    if variant not in known:
        raise NotFoundError(
            f"{name or 'no installed operation'} has {'no' if name else 'the'} variant {variant!r}",
            field="variant",
            value=variant,
            rule="variant_known",
            fix=f"use one of {', '.join(known)}" if known else "leave --variant out, or name another --operation",
        )
    if name and name not in (known[variant], *families):
        raise InvalidArgumentError(
            f"the variant {variant!r} is the operation {known[variant]}, not {name}",
            field="variant",
            value=variant,
            rule="variant_operation",
            fix="leave --variant or --operation out",
        )
    return known[variant]


def _check_sources(said: Sequence[str], options: Mapping[str, Any]) -> None:
    """Raise ``InvalidArgumentError`` for two ways to say which kernels: one of them would be ignored."""
    from tilewright_kit.types.errors import InvalidArgumentError

    both = [*said, *(f"--{name.replace('_', '-')}" for name in options)]
    if said and len(both) > 1:
        raise InvalidArgumentError(
            f"{both[0]} says which kernels, and so does {both[1]}",
            field=both[1],
            rule="generate_sources",
            fix=f"leave one of them out; --datatype, --layout, --variants and --limit narrow what {both[0]} names",
        )


def _check_variants(operation: Operation[Any, Any], variants: Sequence[str]) -> None:
    """Raise ``InvalidArgumentError`` where kernels are of no kinds, and for words that mean another operation."""
    from tilewright_kit.contract.abilities import HasVariants
    from tilewright_kit.types.errors import InvalidArgumentError

    if variants and not hasattr(operation.config_type, "variant"):
        raise InvalidArgumentError(
            f"kernels of {operation.name} are of no kinds",
            field="variants",
            value=",".join(variants),
            rule="generate_options",
            fix="leave --variants out; --variant names a direction or family",
        )
    directions = operation.variants if isinstance(operation, HasVariants) else {}
    kinds = operation.config_type.kinds
    for word in variants:
        if kinds and word not in kinds:
            raise InvalidArgumentError(
                f"kernels of {operation.name} are of no kind {word!r}",
                field="variants",
                value=word,
                rule="generate_options",
                fix=f"use one or several of {', '.join(kinds)}",
            )
        if directions.get(word, operation.name) != operation.name:
            raise InvalidArgumentError(
                f"{word} is a direction of its own, not a kind of kernel of {operation.name}",
                field="variants",
                value=word,
                rule="variant_operation",
                fix=f"use --variant {word}",
            )


def _explain_none(matching: Callable[[ArchSpec], Iterator[KernelConfig]], arch: ArchSpec) -> None:
    """Say for which other architectures there are such kernels."""
    import tilewright_arch
    from tilewright_kit.types.errors import TilewrightError

    elsewhere = []
    with working("looking at the other architectures"):
        for name in tilewright_arch.names():
            other = tilewright_arch.load(name)
            with suppress(TilewrightError):
                if other.id != arch.id and next(matching(other), None) is not None:
                    elsewhere.append(name)
    if elsewhere:
        note(f"no such kernel for {arch.id}; there are for --arch {', '.join(elsewhere)}")
    else:
        note("no such kernel is declared for any architecture")


def _known_options(operation: Operation[Any, Any]) -> Sequence[str]:
    from tilewright_kit.contract.abilities import GeneratesSets

    return operation.generate_options if isinstance(operation, GeneratesSets) else ()


def _list(configs: Sequence[KernelConfig], arch: ArchSpec, as_json: bool) -> None:
    if as_json:
        print_json({"arch": arch.id, "kernels": [{"name": item.name, "config": item.to_dict()} for item in configs]})
    else:
        for item in configs:
            out().print(item.name, markup=False)
        note(f"{len(configs)} kernels for {arch.id}")
    if not configs:
        raise typer.Exit(Exit.FAILED)


def _folder(output_dir: Path | None, kernel_set: str) -> Path:
    if output_dir is None:
        raise typer.BadParameter(
            "say where to: a folder, or --list-configs to write nothing", param_hint="--output-dir"
        )
    folder = output_dir / kernel_set if kernel_set else output_dir
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _generate(
    operation: Operation[Any, Any],
    arch: ArchSpec,
    chosen: list[KernelConfig],
    folder: Path,
    as_json: bool,
    verbose: bool,
) -> None:
    names, failed = _write(operation, arch, chosen, folder)
    summary = {"arch": arch.id, "kernels": names, "failed": failed, "folder": str(folder)}
    if as_json:
        print_json(summary)
    else:
        for name in names if verbose else ():
            note(f"  {name}")
        note(f"{len(names)} kernels for {arch.id} in {folder}" + (f", {len(failed)} failed" if failed else ""))
        for failure in failed[:10]:
            note(f"  {failure['name']}: {failure['reason']}")
        if not chosen:
            note("`tilewright kernels list --sets` names the kernel sets")
    if failed or not chosen:
        raise typer.Exit(Exit.FAILED)


def _select(operation: Operation[Any, Any], arch: ArchSpec, options: Mapping[str, Any]) -> list[KernelConfig]:
    """The kernels that the options select. Raises what ``select_set`` raises, ``InvalidArgumentError`` for options that
    the operation has not.
    """
    from tilewright_kit.contract.abilities import GeneratesSets
    from tilewright_kit.types.errors import InvalidArgumentError, UnsupportedError

    known = _known_options(operation)
    for name in options:
        if name not in known:
            raise InvalidArgumentError(
                f"{operation.name} has no option {name.replace('_', '-')}",
                field=name,
                value=options[name],
                rule="generate_options",
                fix=f"use {', '.join(known)}" if known else "leave it out, or name an --operation that has it",
            )
    if not isinstance(operation, GeneratesSets):
        raise UnsupportedError(
            f"{operation.name} selects no kernels by options",
            field="operation",
            value=operation.name,
            rule="generate_options",
            fix="leave the options out",
        )
    return list(operation.select_set(arch, **options))


def _declared(operation: Operation[Any, Any], arch: ArchSpec, name: str) -> Iterable[KernelConfig]:
    from tilewright_kit.types.errors import NotFoundError

    name = name or "default"
    if name not in operation.kernel_sets:
        raise NotFoundError(
            f"{operation.name} has no kernel set {name!r}",
            field="preselected",
            value=name,
            rule="kernel_set_known",
            fix=f"use one of {', '.join(operation.kernel_sets)}",
        )
    found: Iterable[KernelConfig] = operation.kernel_sets[name].iterate(arch, operation.rules)
    return found


def _matches(config: KernelConfig, datatype: str, layout: str) -> bool:
    fields = config.to_dict()
    typed = not datatype or fields.get(first_dtype(type(config))) == datatype
    return typed and (not layout or fields.get("layout") == layout)


def _write(
    operation: Operation[Any, Any], arch: ArchSpec, configs: list[KernelConfig], folder: Path
) -> tuple[list[str], list[dict[str, str]]]:
    from tilewright_kit.kernel_sets.registry import Registry
    from tilewright_kit.types.errors import TilewrightError

    registry = Registry(folder.name)
    names: list[str] = []
    failed: list[dict[str, str]] = []
    with progress() as bar:
        for config in bar.track(configs, description="generating"):
            try:
                unit = operation.generate(config, arch)
            except TilewrightError as error:
                failed.append({"name": config.name, "code": error.code, "reason": error.reason})
                continue
            (folder / f"{unit.name}{_SUFFIXES.get(unit.language, '.txt')}").write_text(unit.text)
            registry.register(config, arch.id)
            names.append(config.name)
    (folder / "kernels.json").write_text(json.dumps(registry.to_dict(), indent=2))
    return names, failed
