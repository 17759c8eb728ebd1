"""Convolutions for static analysis: the problem that a kernel is judged by, as a text and as a product."""

from __future__ import annotations

import pytest

import tilewright_arch
from tilewright_kit.types.errors import InvalidArgumentError, UnsupportedError
from tilewright_server.build.toolchains.hip import HipToolchain
from tilewright_tools.analysis.kernels import analyze_config, summary
from tilewright_tools.cli.problems.loading import load_operation

OPERATIONS = ("conv", "conv_backward_data", "conv_backward_weight")
SHAPE = "32,256,128,14x14,3x3,1,1,1"
ARCH = tilewright_arch.load("gfx942")


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_shape_is_the_problem_of_a_kernel_in_its_direction(name: str) -> None:
    operation = load_operation(name)
    for config in operation.kernel_sets["tiny"].expand(ARCH, operation.rules):
        problem = operation.parse(operation.analysis_request(config, SHAPE))
        product = operation.product_of(problem)
        assert problem.flops == 2 * 32 * 128 * 14 * 14 * 256 * 9
        assert 2 * product.m * product.n * product.k * product.batch == problem.flops
        assert product.bytes_in + product.bytes_out == problem.bytes_moved
        usual = operation.parse(operation.analysis_request(config, operation.analysis_shape(config)))
        assert usual.ndim == config.ndim
        assert usual.flops > 1e9


@pytest.mark.parametrize(
    "shape",
    ["", "1,2,3", "4096,4096,4096", "32,256,128,14x14,3x3,0,1,1", "32,256,128,14,3,1,1,1", "1,2,3,4x4,9x9,1,0,1"],
)
def test_a_text_that_is_no_convolution_is_refused(shape: str) -> None:
    operation = load_operation("conv")
    config = operation.kernel_sets["tiny"].expand(ARCH, operation.rules)[0]
    with pytest.raises(InvalidArgumentError) as caught:
        operation.analysis_request(config, shape)
    assert (caught.value.field, caught.value.rule) == ("shape", "analysis_shape")
    assert "HxW" in caught.value.fix


def test_an_operation_that_has_no_product_says_so() -> None:
    operation = load_operation("conv_transform")
    with pytest.raises(UnsupportedError, match="product"):
        analyze_config(operation, operation.config_type(), ARCH, HipToolchain([]))


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_kernel_of_convolution_has_a_bound(name: str, toolchain: HipToolchain) -> None:
    operation = load_operation(name)
    config = operation.kernel_sets["tiny"].expand(ARCH, operation.rules)[0]
    found = summary(analyze_config(operation, config, ARCH, toolchain, shape=SHAPE))
    assert 0 < found["bound"]["share_of_peak"] <= 1
    assert found["loop"]["matrix_instructions"]
    assert found["problem"]["batch"] == 1
