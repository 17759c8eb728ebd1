"""Every shipped spec is well formed, complete and says what the hardware can do."""

from __future__ import annotations

import ast
import math
import pickle
from pathlib import Path

import jsonschema  # type: ignore[import-untyped, unused-ignore]
import pytest

import tilewright_arch as arch

PACKAGE = Path(arch.__file__).parent
SPECS = sorted((PACKAGE / "specs").glob("*.json"))
NAMES = [path.stem for path in SPECS]
CPUS = [name for name in NAMES if arch.load(name).kind == "cpu"]
GPUS = [name for name in NAMES if arch.load(name).kind != "cpu"]


def test_the_schema_is_a_valid_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(arch.schema())


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_every_spec_file_passes_the_schema_and_the_loader(path: Path) -> None:
    arch.validate_spec(path)
    assert arch.load(path.stem).name == path.stem
    assert arch.parse_spec(path) == arch.load(path.stem)


def test_names_are_the_files_and_are_sorted() -> None:
    assert arch.names() == tuple(sorted(NAMES))
    assert {"gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201", "sm_80", "sm_90a", "aarch64"} <= set(NAMES)
    assert {"x86-64-v2", "x86-64-v3", "x86-64-v4"} <= set(NAMES)


def test_no_arch_name_occurs_in_code() -> None:
    for module in PACKAGE.glob("*.py"):
        tree = ast.parse(module.read_text("utf-8"))
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                assert not [name for name in NAMES if name in node.value], f"{module.name}: {node.value!r}"


@pytest.mark.parametrize("name", NAMES)
def test_a_spec_is_hashable_and_survives_pickling(name: str) -> None:
    spec = arch.load(name)
    again = pickle.loads(pickle.dumps(spec))
    assert again == spec
    assert hash(again) == hash(spec)


@pytest.mark.parametrize("name", NAMES)
def test_every_warp_tile_has_an_instruction_and_a_pipeline(name: str) -> None:
    spec = arch.load(name).with_features(arch.load(name).optional_features)
    for key, tiles in spec.warp_tiles.items():
        assert len(set(tiles)) == len(tiles)
        normal = [p for p in spec.pipelines if p not in spec.preshuffle_pipelines]
        usable = {tile for pipeline in normal for tile in spec.warp_tiles_for(key, pipeline)}
        assert usable == set(tiles)
        assert all(spec.instruction(key, tile) for tile in tiles)
    for key, tiles in spec.preshuffle_warp_tiles.items():
        for pipeline in spec.preshuffle_pipelines:
            assert spec.warp_tiles_for(key, pipeline) == tiles


@pytest.mark.parametrize("name", NAMES)
def test_waves_fit_into_a_workgroup(name: str) -> None:
    spec = arch.load(name)
    for wave in spec.waves:
        assert math.prod(wave) * spec.wave_size <= spec.max_threads_per_workgroup


@pytest.mark.parametrize("name", CPUS)
def test_cpu_accumulators_leave_four_registers_for_operands(name: str) -> None:
    spec = arch.load(name).with_features(arch.load(name).optional_features)
    lanes = spec.vector_bytes // 4
    for tiles in spec.warp_tiles.values():
        for m, n, k in tiles:
            assert n % lanes == 0
            assert m * n // lanes <= spec.vector_registers - 4
            assert k in (1, 2, 4)


@pytest.mark.parametrize("name", CPUS)
def test_cpu_teams_have_sizes_of_small_factors_in_every_arrangement(name: str) -> None:
    waves = arch.load(name).waves
    sizes = {m * n for m, n, _ in waves}
    assert sizes == {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128}
    assert set(waves) == {(m, size // m, 1) for size in sizes for m in range(1, size + 1) if size % m == 0}
    assert len(waves) == len(set(waves))


@pytest.mark.parametrize("name", NAMES)
def test_rates_are_known_for_every_dtype_with_warp_tiles(name: str) -> None:
    spec = arch.load(name)
    for key in spec.warp_tiles:
        assert key.split("_")[0] in spec.throughput.flops_per_cycle_per_unit
    if spec.kind != "cpu":
        assert spec.throughput.units > 0
        assert spec.throughput.memory_bytes_per_second > 0


@pytest.mark.parametrize("name", NAMES)
def test_fp8_encoding_is_stated_where_there_are_8_bit_floats(name: str) -> None:
    spec = arch.load(name)
    assert (spec.fp8_encoding == "none") == (spec.acc_dtype("fp8", "fp8") is None)


@pytest.mark.parametrize("name", GPUS)
def test_gpu_flags_aim_at_the_gpu_arch(name: str) -> None:
    toolchain = arch.load(name).toolchain
    assert toolchain.gpu_arch
    assert any(toolchain.gpu_arch in flag for flag in toolchain.flags)


def test_published_peaks_follow_from_the_figures() -> None:
    def tera(name: str, dtype: str) -> int:
        peak = arch.load(name).throughput.peak_flops(dtype)
        assert peak is not None
        return round(peak / 1e12)

    assert tera("sm_90a", "fp16") == 989
    assert tera("sm_80", "fp16") == 312
    assert tera("gfx942", "fp16") == 1307
    assert tera("gfx950", "fp8") == 5033
    assert tera("gfx1201", "fp16") == 195
    assert arch.load("x86-64-v4").throughput.peak_flops("fp32") is None
    assert arch.load("x86-64-v4").throughput.peak_flops("fp32", units=2, clock_mhz=4000) == 512e9
