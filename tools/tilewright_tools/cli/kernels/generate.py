"""`tilewright kernels generate`: write the sources of kernels to a folder, without a server, a compiler or a device."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tilewright_tools.cli.exits import Exit
from tilewright_tools.cli.kernels import generate_conv as c
from tilewright_tools.cli.kernels import generate_fmha as f
from tilewright_tools.cli.output import examples, note, out, print_json, progress

if TYPE_CHECKING:
    from tilewright_arch import ArchSpec
    from tilewright_kit.config.kernel_config import KernelConfig
    from tilewright_kit.contract.operation import Operation

__all__ = ["EPILOG", "generate"]

EPILOG = examples(
    "tilewright kernels generate --output-dir out --datatype bf16 --layout rcr",
    "tilewright kernels generate --output-dir out --gpu-target gfx942 --preselected fp16_rcr_essential",
    "tilewright kernels generate --output-dir out --variants standard --variants multi_d --limit 20",
    "tilewright kernels generate --operation conv --rule-set tiny --arch gfx942 --list-configs",
    "tilewright kernels generate -o out --operation attention --receipt 4 --hdim 128",
    "tilewright kernels generate --operation attention --arch gfx942 --wave 4x1x1 --warp-tile 16x16x16 --list-configs",
    "tilewright kernels generate -o out --operation conv --variant bwd_weight --ndim 3 --datatype bf16 --two-stage",
    'tilewright kernels generate --output-dir out --tile-config-json \'{"tile_m": [64, 128], "tile_n": [64]}\'',
)
_SUFFIXES = {"c++": ".cpp", "cuda": ".cu", "hip": ".hip"}
_TRIPLES = {"tile": "tile", "warp": "wave", "warp_tile": "warp_tile"}
_SECTIONS = ("tile_config", "trait_config", "multi_d_config")


def generate(
    output_dir: Path | None = typer.Option(
        None, "--output-dir", "--output", "-o", help="Folder to write to; made if need be."
    ),
    operation: str = typer.Option("gemm", help="Operation."),
    datatype: str = typer.Option("", "--datatype", "-d", help="Only kernels of this element type of the first input."),
    layout: str = typer.Option("", "--layout", help="Only this layout: rcr, ...; of convolutions nhwgc, ..."),
    gpu_target: str = typer.Option(
        "", "--gpu-target", "--arch", "-a", help="Architecture. Default: this machine's CPU."
    ),
    variants: list[str] = typer.Option([], "--variants", help="Only these variants, for example multi_d. Repeatable."),
    preselected: str = typer.Option("", "--preselected", help="Kernel set. Default: the operation's `default`."),
    config: Path | None = typer.Option(
        None, "--config", help="JSON file of lists to combine: tile_config, trait_config."
    ),
    tile_config_json: str = typer.Option("", "--tile-config-json", help="The same as text, flat or in sections."),
    kernel_set: str = typer.Option("", "--kernel-set", help="Name of a subfolder for this set."),
    limit: int = typer.Option(0, help="At most so many kernels; 0: all."),
    show_arch_info: bool = typer.Option(False, "--show-arch-info", help="Print the architecture's tables and stop."),
    list_configs: bool = typer.Option(False, "--list-configs", help="Print the kernels' names and write nothing."),
    verbose: bool = typer.Option(False, "--verbose", help="Name every kernel."),
    as_json: bool = typer.Option(False, "--json", help="Print the names and the failures as JSON."),
    rule_set: c.RuleSet = "",
    variant: c.Variant = "",
    ndim: c.Ndim = None,
    tile_m: c.TileM = None,
    tile_n: c.TileN = None,
    tile_k: c.TileK = None,
    warp_m: c.WarpM = None,
    warp_n: c.WarpN = None,
    warp_k: c.WarpK = None,
    warp_tile_m: c.WarpTileM = None,
    warp_tile_n: c.WarpTileN = None,
    warp_tile_k: c.WarpTileK = None,
    pipeline: c.Pipeline = "",
    scheduler: c.Scheduler = "",
    epilogue: c.Epilogue = "",
    pad_m: c.PadM = None,
    pad_n: c.PadN = None,
    pad_k: c.PadK = None,
    vector_a: c.VectorA = None,
    vector_b: c.VectorB = None,
    vector_c: c.VectorC = None,
    num_wave_groups: c.WaveGroups = None,
    num_groups_to_merge: c.MergedGroups = None,
    double_smem_buffer: c.DoubleBuffer = None,
    split_image: c.SplitImage = None,
    two_stage: c.TwoStage = None,
    explicit_gemm: c.ExplicitGemm = None,
    streamk_enabled: c.StreamK = None,
    streamk_reduction_strategy: c.StreamKReduction = "",
    streamk_persistent: c.StreamKPersistent = None,
    family: f.Family = "",
    receipt: f.Receipt = "",
    profile: f.Profile = "",
    hdim: f.Hdim = [],  # noqa: B006 (typer reads it)
    hdim_v: f.HdimV = [],  # noqa: B006
    mask: f.Mask = "",
    bias: f.Bias = "",
    mode: f.Mode = "",
    tile_m0: f.TileM0 = None,
    tile_n0: f.TileN0 = None,
    tile_k0: f.TileK0 = None,
    tile_n1: f.TileN1 = None,
    tile_k1: f.TileK1 = None,
    tile_k0max: f.TileK0Max = None,
    wave: f.Wave = "",
    warp_tile: f.WarpTile = "",
    rope: f.Rope = "",
    qscale: f.QScale = "",
    sink: f.Sink = None,
    learned_sinks: f.LearnedSinks = None,
    lse: f.Lse = None,
    dropout: f.Dropout = None,
    softcap: f.Softcap = None,
    paged: f.Paged = None,
    deterministic: f.Deterministic = None,
) -> None:
    """Write the source of every kernel that matches, and `kernels.json`, which describes them.

    Exit code 1 if one could not be generated.
    """
    import tilewright_arch
    from tilewright_kit.contract.abilities import GeneratesSets

    options = c.chosen_options(locals()) | f.chosen_options(locals())
    arch = tilewright_arch.load(gpu_target) if gpu_target else tilewright_arch.detect_cpu()
    if show_arch_info:
        print_json(arch.to_dict())
        return
    found = load_operation(c.operation_of(operation, variant))
    if options or (not preselected and not config and not tile_config_json and isinstance(found, GeneratesSets)):
        given = {"datatype": datatype, "layout": layout}
        configs: Iterable[KernelConfig] = c.select(found, arch, options | {key: v for key, v in given.items() if v})
    elif config is not None or tile_config_json:
        configs = _swept(found, arch, _read_lists(config, tile_config_json), datatype, layout)
    else:
        configs = _declared(found, arch, preselected or "default")
    wanted = (item for item in configs if _matches(item, datatype, layout, variants))
    chosen = list(itertools.islice(wanted, limit or None))
    if list_configs:
        _list(chosen, arch, as_json)
    else:
        _generate(found, arch, chosen, _folder(output_dir, kernel_set), as_json, verbose)


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
            note("nothing matches; `tilewright kernels list --sets` names the kernel sets")
    if failed or not chosen:
        raise typer.Exit(Exit.FAILED)


def load_operation(name: str) -> Operation[Any, Any]:
    """An operation of the installed plugins, without a server."""
    from tilewright_kit.loading.loader import PluginManager
    from tilewright_kit.types.errors import NotFoundError

    manager = PluginManager()
    manager.load_entry_points()
    if name not in manager.operations:
        raise NotFoundError(
            f"no installed plugin offers the operation {name!r}",
            field="operation",
            value=name,
            rule="operation_known",
            fix=f"use one of {', '.join(manager.operations) or '(none are installed)'}",
        )
    return manager.operations[name]


def _declared(operation: Operation[Any, Any], arch: ArchSpec, name: str) -> Iterable[KernelConfig]:
    from tilewright_kit.types.errors import NotFoundError

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


def _read_lists(path: Path | None, text: str) -> dict[str, list[Any]]:
    """Field to values, from a file or a text; sections are joined, single values become lists."""
    from tilewright_kit.types.errors import InvalidArgumentError

    try:
        record = json.loads(text or (path.read_text() if path else "{}"))
    except (OSError, json.JSONDecodeError) as error:
        raise InvalidArgumentError(
            f"the configuration cannot be read: {error}",
            field="config",
            value=str(path or text),
            rule="json",
            fix="give a JSON object of fields and values",
        ) from error
    if not isinstance(record, dict):
        raise InvalidArgumentError(
            "the configuration must be a JSON object",
            field="config",
            rule="json",
            fix="give a JSON object of fields and values",
        )
    flat: dict[str, Any] = {key: value for key, value in record.items() if key not in _SECTIONS}
    for section in _SECTIONS:
        flat |= record.get(section, {})
    return {key: value if isinstance(value, list) else [value] for key, value in flat.items()}


def _swept(
    operation: Operation[Any, Any], arch: ArchSpec, lists: Mapping[str, list[Any]], datatype: str, layout: str
) -> Iterable[KernelConfig]:
    """Every valid combination of lists in the seeds' form: `tile_m`, `warp_n`, `warp_tile_k`, `pipeline`, ..."""
    from tilewright_kit.kernel_sets.declare import KernelSet, declare

    fields: dict[str, Any] = {}
    rest = dict(lists)
    for prefix, field in _TRIPLES.items():
        axes = [rest.pop(f"{prefix}_{axis}", None) for axis in "mnk"]
        if any(axis is not None for axis in axes):
            default = getattr(operation.config_type(), field)
            filled = [axis or [default[index]] for index, axis in enumerate(axes)]
            fields[field] = [tuple(combination) for combination in itertools.product(*filled)]
    fields |= rest
    if datatype:
        fields[_first_dtype(operation.config_type)] = datatype
    if layout:
        fields["layout"] = layout
    declaration = declare(operation.config_type, **fields)
    return KernelSet("swept", "from the command line", (declaration,)).iterate(arch, operation.rules)


def _first_dtype(config_type: type[KernelConfig]) -> str:
    """The field of the first input's element type."""
    return next((name for name in config_type.field_names() if name.startswith("dtype")), "")


def _matches(config: KernelConfig, datatype: str, layout: str, variants: list[str]) -> bool:
    fields = config.to_dict()
    return (
        (not datatype or fields.get(_first_dtype(type(config))) == datatype)
        and (not layout or fields.get("layout") == layout)
        and (not variants or getattr(config, "variant", "standard") in variants)
    )


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
