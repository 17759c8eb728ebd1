"""Bugs to plant in the project's convolution kernels: edits of headers, each with a case that meets it."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from amd_config import FLAGS, Built
from conv_amd_emulation import for_arch, unit
from conv_gpu_cases import CASES
from conv_gpu_config import ConvGpuConfig
from native_harness import INCLUDE

from tilewright_emulator.code.compiler import compiler


@dataclass(frozen=True)
class ConvMutant:
    """``old`` becomes ``new``, wherever it stands, in header ``file``; ``case`` of conv_gpu_cases.py meets it."""

    kind: str
    file: str
    old: str
    new: str
    case: str = "forward"
    arch: str = "gfx942"

    def config(self) -> ConvGpuConfig:
        config = CASES[self.case][0]
        if config.is_matrix:
            config = config.replace(pipeline="compv3", epilogue="default")
        found = for_arch(config, self.arch)
        assert found is not None
        return found


IMAGE, ROWS, AMD, CONV = "conv/image.hpp", "conv/image_loader.hpp", "amd/image_loader.hpp", "conv/implicit_gemm.hpp"
PIXELS = "conv/shared_pixels.hpp"
TILE, DEPTHWISE, WEIGHT, GROUPS = (
    "conv/depthwise/tile.hpp",
    "conv/depthwise/depthwise.hpp",
    "conv/direct/weight.hpp",
    "conv/direct/conv.hpp",
)

CONV_MUTANTS = [
    # pixels and taps
    ConvMutant("taps in the wrong order", IMAGE, "s.w = tap - s.h * (int)axes[2].taps;", "s.w = s.h;"),
    ConvMutant(
        "the origin is off by one",
        IMAGE,
        "x.at[i] = (int)p.axes[i].origin + s",
        "x.at[i] = 1 + (int)p.axes[i].origin + s",
    ),
    ConvMutant("the stride is missing", IMAGE, "s.axis(i) * (int)p.axes[i].row_step;", "s.axis(i);", "forward_fused"),
    ConvMutant(
        "the dilation is missing",
        IMAGE,
        "x.at[i] = s.axis(i) * (int)p.axes[i].tap_step;",
        "x.at[i] = s.axis(i);",
        "forward_fused",
    ),
    ConvMutant("pixels outside of the image are read", IMAGE, " + moved < size ? bit", " + moved >= 0u ? bit"),
    ConvMutant("rows run on from one image to the next", IMAGE, "s.n = rest;", "s.n = 0;"),
    ConvMutant("a wide filter is cut short", IMAGE, "wide = wide || p.axes[i].taps > each;", "", "forward_wide"),
    ConvMutant(
        "the rows of a phase lie side by side",
        IMAGE,
        "offset += s.axis(axis) * problem.axes[axis].row_stride;",
        "offset += s.axis(axis);",
        "data_phases",
    ),
    # groups
    ConvMutant(
        "all groups read the first one's pixels",
        ROWS,
        "base((const char*)of.gemm.a + item * of.image_g * size)",
        "base((const char*)of.gemm.a)",
        "forward_fused",
    ),
    ConvMutant(
        "all groups take the first one's weights",
        CONV,
        "moved(g.b, item * problem.weight_g",
        "moved(g.b, 0",
        "forward_fused",
    ),
    ConvMutant(
        "the gradient of the wrong group", CONV, "moved(g.a, item * problem.row_g", "moved(g.a, 0", "weight_adds"
    ),
    # steps along k
    ConvMutant(
        "a tap's last channels are missing",
        CONV,
        "ceil_div((int)problem.channels, Config::tile_k)",
        "max_of((int)problem.channels / Config::tile_k, 1)",
        "data",
    ),
    ConvMutant("weights of channels that do not exist", AMD, "(line < panel.lines) & (byte", "(true) & (byte"),
    ConvMutant("steps beyond the last tap", ROWS, "step < count ? left : 0", "left", "data"),
    ConvMutant("channels of another tap", ROWS, "channel = k - tap * (int)p.channels;", "channel = k;"),
    ConvMutant(
        "weights of the tap before",
        ROWS,
        "offset += s.axis(i) * problem.axes[i].tap_stride;",
        "offset += (s.axis(i) > 0 ? s.axis(i) - 1 : 0) * problem.axes[i].tap_stride;",
        "data",
    ),
    ConvMutant(
        "pixels beyond a slice count twice", AMD, "exists[i] & (row < end);", "exists[i];", "weight_split", "gfx1201"
    ),
    ConvMutant(
        "the first channel for all columns",
        AMD,
        "channel = column - tap * (int)p.channels;",
        "channel = 0;",
        "weight",
        "gfx1201",
    ),
    # results
    ConvMutant("the old gradient is not added", "blocks/epilogue.hpp", "x[l] += y[l];", "x[l] += 0.0f;", "data_adds"),
    ConvMutant(
        "a slice is not added",
        "conv/convert.hpp",
        "s < (int)params.launch.split_k",
        "s + 1 < (int)params.launch.split_k",
        "weight_two_stages",
    ),
    ConvMutant(
        "slices overlap in the workspace",
        CONV,
        "(int64_t)slice * partial.batch * partial.stride_c * 4",
        "(int64_t)slice * partial.stride_c * 4",
        "weight_two_stages",
    ),
    ConvMutant("a phase is missing", "blocks/scheduler.hpp", "first += passed * stride;", "first = 0;", "data_phases"),
    # without a product
    ConvMutant(
        "depthwise: no barrier behind the weights",
        DEPTHWISE,
        "    barrier();\n  }\n\n  using Accumulators",
        "  }\n\n  using Accumulators",
        "depthwise",
    ),
    ConvMutant(
        "depthwise: the halo is missing",
        TILE,
        "(rows - 1) * row_h + (taps_h - 1) * tap_h + 1",
        "(rows - 1) * row_h + 1",
        "depthwise",
    ),
    ConvMutant(
        "depthwise: taps are not turned round",
        DEPTHWISE,
        "Tile::is_backward ? kPlane - 1 - tap : tap",
        "tap",
        "depthwise_data",
    ),
    ConvMutant(
        "depthwise: pixels beyond the last row are stored",
        DEPTHWISE,
        "at.h + r < (int)p.axes[1].rows && at.w + s < (int)p.axes[2].rows",
        "at.w + s < (int)p.axes[2].rows",
        "depthwise",
    ),
    ConvMutant(
        "depthwise: no barrier between the sums of two taps",
        WEIGHT,
        "    use(id / kVector, id % kVector, total);\n  }\n  barrier();",
        "    use(id / kVector, id % kVector, total);\n  }",
        "depthwise_weight",
    ),
    ConvMutant(
        "groups: weights of the next output", GROUPS, "output * p.weight_n", "(output ^ 1) * p.weight_n", "groups"
    ),
    ConvMutant(
        "groups: only the first channels are gathered",
        GROUPS,
        "channel < (int)again.channels; channel += vector",
        "channel < vector; channel += vector",
        "groups",
    ),
    # pixels that quads of lanes share
    ConvMutant("lanes keep their own pixel", PIXELS, "of_quad(pixel.offset, r % 4)", "pixel.offset", "weight"),
    ConvMutant(
        "lanes look at their own pixel's place",
        PIXELS,
        "of_quad((uint32_t)pixel.at[axis], r % 4)",
        "(uint32_t)pixel.at[axis]",
        "weight_registers",
    ),
    ConvMutant(
        "a quad finds its first pixel alone",
        PIXELS,
        "thread % min_of(Base::rows, 4)",
        "0",
        "weight_registers",
        "gfx950",
    ),
    ConvMutant(
        "shared pixels beyond a slice count twice",
        PIXELS,
        "row < end ? own[i].at[2] : kFar",
        "own[i].at[2]",
        "weight_split",
    ),
    ConvMutant(
        "shared pixels: the first channel for all columns",
        PIXELS,
        "channel = column - tap * (int)p.channels;",
        "channel = 0;",
        "weight",
        "gfx90a",
    ),
    ConvMutant("groups: sums of another tap", WEIGHT, "u.tap.w + t;", "u.tap.w + (t ^ 1) % taps_w;", "groups_weight"),
]


def build_conv(mutant: ConvMutant | None, config: ConvGpuConfig, arch: str, folder: Path) -> Built:
    """Compiles a kernel from changed headers. Raises ``ValueError`` if the place to change is not there (any more)."""
    include = folder / "include"
    shutil.copytree(INCLUDE, include)
    if mutant is not None:
        header = include / "tilewright" / "gpu" / mutant.file
        text = header.read_text()
        if mutant.old not in text:
            raise ValueError(f"{mutant.kind}: {mutant.file} has no {mutant.old!r}")
        header.write_text(text.replace(mutant.old, mutant.new))
    command = compiler(folder)
    assert command is not None
    flags = [flag for flag in FLAGS if not flag.startswith(("-I", "-W"))]
    source, output = folder / "unit.hip", folder / "unit.co"
    source.write_text(unit({"kernel": config}))
    done = subprocess.run(
        [*command, *flags, f"-I{include}", f"--offload-arch={arch}", str(source), "-o", str(output)],
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[:2000])
    return Built(output)
