"""Units of GPU kernels: every kernel has one, it states the configuration, and the headers agree with it."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from conv_rule_cases import depthwise

import tilewright_arch
from tilewright_arch import ArchSpec
from tilewright_grouped_conv.codegen import generate, header_of, render_gpu
from tilewright_grouped_conv.config.config import ConvBackwardDataConfig, ConvBackwardWeightConfig, ConvConfig
from tilewright_grouped_conv.config.pipelines import IM2COL
from tilewright_grouped_conv.kernel_sets.sets import KERNEL_SETS
from tilewright_grouped_conv.rules.rulebook import RULES
from tilewright_grouped_conv.vocabulary import Direction, Specialization
from tilewright_kit.tiles.footprint.workgroup import shared_bytes, stages_of, threads_of
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import ConfigInvalidError
from tilewright_native import include_dir

GPUS = ("sm_80", "sm_90a", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
HOPPER = tilewright_arch.load("sm_90a")
CUDA = ConvBackwardWeightConfig(
    tile=(128, 64, 32),
    wave=(2, 2, 1),
    warp_tile=(16, 8, 16),
    vector_sizes=(8, 4, 2),
    split_k=8,
    two_stage=True,
    stages=3,
    dtype_out="fp32",
)


def _have_nvrtc() -> bool:
    try:
        return importlib.util.find_spec("cuda.bindings.nvrtc") is not None
    except ModuleNotFoundError:
        return False


needs_nvrtc = pytest.mark.skipif(not _have_nvrtc(), reason="NVRTC is not installed: pip install 'tilewright[cuda]'")


def kernels(direction: Direction, arch: ArchSpec) -> tuple[ConvConfig, ...]:
    return KERNEL_SETS[direction]["default"].expand(arch, RULES)


@pytest.mark.parametrize(
    ("name", "more", "turned"),
    [
        ("gfx950", {}, True),
        ("gfx950", {"dtype_in": "fp16", "tile": (224, 64, 32), "wave": (2, 2, 1)}, True),
        ("gfx950", {"tile": (256, 128, 32), "wave": (2, 2, 1), "warp_tile": (32, 32, 16)}, False),
        ("gfx942", {"warp_tile": (16, 16, 16)}, False),
    ],
)
def test_weights_are_transposed_by_lds_where_it_can(name: str, more: dict[str, Any], turned: bool) -> None:
    fields = {"pipeline": "taps", "tile": (208, 128, 32), "wave": (1, 4, 1), "warp_tile": (16, 16, 32)}
    fields |= {"vector_sizes": (8, 8, 8), "dtype_in": "bf16"} | more
    text = generate(ConvBackwardDataConfig.from_dict(fields), tilewright_arch.load(name)).text
    assert ("conv/turned_taps.hpp" in text, "conv/taps.hpp" in text) == (turned, not turned)


@pytest.mark.parametrize(
    ("name", "more", "shared"),
    [
        ("gfx942", {}, True),
        ("gfx90a", {"tile": (64, 64, 32), "dtype_in": "fp16"}, True),
        ("gfx950", {"tile": (64, 32, 32)}, False),
        ("gfx1100", {"tile": (64, 64, 32), "warp_tile": (16, 16, 16)}, False),
    ],
)
def test_lanes_share_pixels_where_quads_have_the_same(name: str, more: dict[str, Any], shared: bool) -> None:
    fields = {"pipeline": "compv3", "tile": (128, 128, 32), "wave": (2, 2, 1), "dtype_in": "bf16", "dtype_out": "fp32"}
    warp = (16, 16, 32 if name == "gfx950" else 16)
    fields |= {"warp_tile": warp, "vector_sizes": (8, 8, 4), "two_stage": True, "epilogue": "default"} | more
    text = render_gpu(ConvBackwardWeightConfig.from_dict(fields), tilewright_arch.load(name)).text
    assert ("conv/shared_pixels.hpp" in text, "conv/weight.hpp" in text) == (shared, not shared)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("name", GPUS)
def test_every_kernel_of_the_default_set_has_a_unit_of_its_own(name: str, direction: Direction) -> None:
    arch = tilewright_arch.load(name)
    configs = kernels(direction, arch)
    units = [generate(config, arch) for config in configs]
    assert len({unit.text for unit in units}) == len({unit.name for unit in units}) == len(units) >= 20
    for config, unit in zip(configs, units, strict=True):
        two = config.two_stage or (direction is Direction.BACKWARD_WEIGHT and not config.is_matrix)
        assert unit.language == arch.kind and list(unit.entries) == (["main", "convert"] if two else ["main"])
        assert "$" not in unit.text and "auto" not in unit.text.partition("struct Config")[2]
        folder = f"tilewright/{'sm90' if IM2COL.makes(config) else 'gpu'}/conv"
        assert f'#include "{folder}/{header_of(config, arch)}"' in unit.text
        assert (include_dir() / folder / header_of(config)).is_file()
        assert f"TW_CONV_KERNEL({unit.entries['main']}, Config)" in unit.text


def test_a_unit_states_every_constant() -> None:
    text = generate(CUDA, HOPPER).text
    for line in (
        "using A = tw::fp16;",
        "using C = tw::fp32;",
        "using Bias = void;",
        "bool a_col = true, b_col = false;",
        "tile_m = 128, tile_n = 64, tile_k = 32;",
        "wave_m = 2, wave_n = 2, wave_k = 1;",
        "warp_tile_m = 16, warp_tile_n = 8, warp_tile_k = 16;",
        "pipeline = tw::Pipeline::compv4;",
        "epilogue = tw::EpilogueKind::cshuffle;",
        "reduction = tw::Reduction::none;",
        "persistent = false, grouped = false, batched = true, preshuffle = false;",
        "direction = tw::Direction::backward_weight;",
        "kind = tw::ConvKind::implicit;",
        "int ndim = 2;",
        "channels_first = false, bias_rows = false;",
        "accumulate = false, linear_rows = true, unpadded = false;",
        "transpose_c = false, double_buffer = true, two_stage = true;",
        "int split_k = 8;",
        "stages = 3, promote = 0, num_wave_groups = 1;",
        "vector_a = 8, vector_b = 4, vector_c = 2;",
        "groups_merged = 1, blocks_per_unit = 0;",
    ):
        assert line in text, line


def test_phases_of_backward_data_come_as_a_table() -> None:
    config = ConvBackwardDataConfig(tile=(128, 64, 32), warp_tile=(16, 8, 16), mapped_rows=True)
    text = generate(config, HOPPER).text
    assert "grouped = true" in text and "linear_rows = false" in text
    assert "grouped = false" in generate(config.replace(mapped_rows=False), HOPPER).text
    rows = ConvConfig(tile=(128, 64, 32), warp_tile=(16, 8, 16), mapped_rows=True)
    assert "grouped = false" in generate(rows, HOPPER).text


def test_stages_that_are_left_open_are_stated_as_a_number() -> None:
    config = CUDA.replace(stages=0)
    stages = stages_of(config, HOPPER)
    assert stages > 2 and f"stages = {stages}," in generate(config, HOPPER).text


def test_a_depthwise_unit_states_its_step() -> None:
    constants: dict[str, Any] = {"filter": (1, 3, 3), "stride": (1, 2, 2), "dilation": (1, 1, 1)}
    config = depthwise(Direction.FORWARD, channel_tile=32, pixel_tile=(1, 1, 4), **constants)
    text = generate(config, HOPPER).text
    for line in (
        "pipeline = tw::Pipeline::direct;",
        "scheduler = tw::Scheduler::default_;",
        "kind = tw::ConvKind::depthwise;",
        "int channel_tile = 32;",
        "pixel_tile[3] = {1, 1, 4}, filter[3] = {1, 3, 3};",
        "stride[3] = {1, 2, 2}, dilation[3] = {1, 1, 1};",
        "stages = 0,",
    ):
        assert line in text, line


def test_what_cannot_be_built_is_refused_with_a_reason() -> None:
    special = ConvConfig(pipeline="ws", scheduler="cooperative", tile=(128, 128, 64), warp_tile=(64, 64, 16))
    with pytest.raises(ConfigInvalidError) as caught:
        generate(special.replace(dtype_in=DType.INT8, warp_tile=(64, 64, 32)), HOPPER)
    assert "im2col_signature" in {item.rule for item in caught.value.violations}


def test_units_of_the_same_kernel_are_equal() -> None:
    assert render_gpu(CUDA, HOPPER) == render_gpu(CUDA.replace(), HOPPER)


# ---- what the headers compute for themselves ----


def statement_of(config: ConvConfig, number: int, expected: str) -> str:
    """A piece of source that states a configuration and asserts ``expected`` of its kernel, here called ``Kernel``."""
    text = render_gpu(config, HOPPER).text
    struct = text[text.index("struct Config") : text.index("TW_CONV_KERNEL")]
    return f"namespace n{number} {{\n{struct}\nusing Kernel = tw::gpu::Conv<Config>;\n{expected}\n}}"


def compiled(parts: list[str]) -> str:
    """The log of a failure; empty if it compiled."""
    nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")
    source = '#include "tilewright/gpu/conv/implicit_gemm.hpp"\n' + "\n".join(parts)
    error, program = nvrtc.nvrtcCreateProgram(source.encode(), b"test.cu", 0, None, None)
    assert int(error) == 0
    options = [*(flag.encode() for flag in HOPPER.toolchain.flags), b"-default-device", b"--std=c++17", b"-DNDEBUG"]
    options.append(f"-I{include_dir()}".encode())
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = ""
    if int(error) != 0:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        buffer = b" " * size
        nvrtc.nvrtcGetProgramLog(program, buffer)
        log = buffer.decode(errors="replace")
    nvrtc.nvrtcDestroyProgram(program)
    return log


@needs_nvrtc
@pytest.mark.parametrize("direction", Direction)
def test_threads_stages_and_shared_memory_are_what_the_kernels_state(direction: Direction) -> None:
    parts = []
    # Those whose pixels a copy engine gathers are another template's: test_conv_im2col.py.
    products = [config for config in kernels(direction, HOPPER) if config.is_matrix and not IM2COL.makes(config)]
    for number, config in enumerate(products):
        stages = stages_of(config, HOPPER) if config.pipeline != "compv3" else 1
        expected = (
            f'static_assert(Kernel::shared_bytes == {shared_bytes(config, HOPPER)}, "shared_bytes of {config.name}");\n'
            f'static_assert(Kernel::threads == {threads_of(config, HOPPER)}, "threads of {config.name}");\n'
            f'static_assert(Kernel::Loop::stages == {stages}, "stages of {config.name}");'
        )
        parts.append(statement_of(config, number, expected))
    assert len(parts) > 20
    log = compiled(parts)
    assert log == "", log[:3000]


@needs_nvrtc
def test_the_comparison_with_the_headers_can_fail() -> None:
    wrong = statement_of(CUDA, 0, 'static_assert(Kernel::shared_bytes == 1, "planted");')
    assert "planted" in compiled([wrong])


@pytest.mark.parametrize("special", [Specialization.FILTER1X1_PAD0, Specialization.FILTER3X3])
def test_specialised_kernels_state_what_they_rely_on(special: Specialization) -> None:
    plain = ConvConfig(tile=(128, 64, 32), warp_tile=(16, 8, 16))
    one, other = (render_gpu(item, HOPPER).text for item in (plain, plain.replace(specialization=special)))
    assert one.partition("struct")[2].partition("TW_CONV")[0] != other.partition("struct")[2].partition("TW_CONV")[0]
