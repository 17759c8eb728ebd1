"""Attention for static analysis: what a text means for a kernel, and the product that a problem is."""

from __future__ import annotations

import pytest
from fmha_configs import CPU, valid

from tilewright_fmha.commands.analysis import fmha_analysis_request, fmha_analysis_shape, fmha_product
from tilewright_fmha.problem.signature import signature_of
from tilewright_fmha.references.sample_inputs import PARSERS
from tilewright_fmha.vocabulary import Family, FmhaDType, MaskKind, Mode
from tilewright_kit.types.errors import InvalidArgumentError


@pytest.mark.parametrize("family", [Family.FWD, Family.SPLITKV, Family.DQ_DK_DV])
@pytest.mark.parametrize("mask", list(MaskKind))
def test_the_usual_problem_of_a_kernel_is_one_that_it_computes(family: Family, mask: MaskKind) -> None:
    config = valid(CPU, family, dtype=FmhaDType.BF16, hdim=(192, 128), mask=mask)
    problem = PARSERS[config.operation](fmha_analysis_request(config, fmha_analysis_shape(config)))
    wanted = signature_of(problem)
    assert all(getattr(config, name) == value for name, value in wanted.items() if name not in ("family", "hdim"))
    assert wanted["hdim"] == config.hdim


def test_a_problem_is_the_sum_of_its_products() -> None:
    config = valid(CPU, dtype=FmhaDType.FP16)
    problem = PARSERS[config.operation](fmha_analysis_request(config, "2,6,3,40,56,64,48"))
    product = fmha_product(problem)
    assert (product.m, product.n, product.k, product.batch) == (40, 56, 112, 12)
    assert 2 * product.m * product.n * product.k * product.batch == problem.flops
    assert product.bytes_in == 2 * (2 * 6 * 40 * 64 + 2 * 3 * 56 * (64 + 48))
    assert product.bytes_out == 2 * 2 * 6 * 40 * 48
    gradient = valid(CPU, Family.DQ_DK_DV)
    backward = PARSERS[gradient.operation](fmha_analysis_request(gradient, "2,6,3,40,56,64,48"))
    product = fmha_product(backward)
    assert 2 * product.m * product.n * product.k * product.batch == backward.flops


@pytest.mark.parametrize("shape", ["1,2,3", "1,4,3,8,8,64,64", "0,4,4,8,8,64,64", "a,b,c,d,e,f,g"])
def test_shapes_that_mean_nothing_are_refused(shape: str) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        fmha_analysis_request(valid(CPU), shape)
    assert error.value.rule == "analysis_shape" and error.value.fix


def test_kernels_whose_work_is_data_are_refused() -> None:
    for config in (valid(CPU, mode=Mode.GROUP), valid(CPU, Family.PAGEDKV), valid(CPU, Family.APPENDKV)):
        with pytest.raises(InvalidArgumentError) as error:
            fmha_analysis_request(config, "1,4,4,8,8,64,64")
        assert error.value.rule == "analysis_kernel"
