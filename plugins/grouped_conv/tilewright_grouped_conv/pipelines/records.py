"""The pipelines of convolution, one record for each template.

A pipeline is added here, with its form in ``config.pipelines``: a record that names how its kernels are proposed,
launched and predicted, the template's header under ``native/include/tilewright``, and its tests. Archs have it by
naming it in their specs.
"""

from __future__ import annotations

from functools import partial

from tilewright_grouped_conv.candidates.cpu import cpu_loop_algorithms, cpu_product_algorithms
from tilewright_grouped_conv.candidates.direct import bulk_algorithms, loop_algorithms
from tilewright_grouped_conv.candidates.gpu import product_algorithms
from tilewright_grouped_conv.candidates.im2col import im2col_algorithms
from tilewright_grouped_conv.candidates.taps import tap_algorithms
from tilewright_grouped_conv.config import pipelines as forms
from tilewright_grouped_conv.config.config import ConvConfig
from tilewright_grouped_conv.cost.cpu import predict_cpu
from tilewright_grouped_conv.cost.gpu import bulk_parts, loop_parts, predict_gpu, product_parts
from tilewright_grouped_conv.cost.im2col import im2col_parts
from tilewright_grouped_conv.cost.taps import tap_parts
from tilewright_grouped_conv.footprint.im2col import im2col_mismatches
from tilewright_grouped_conv.launch.gpu import gpu_stages
from tilewright_grouped_conv.launch.im2col import im2col_stages
from tilewright_grouped_conv.launch.tma_groups import bulk_mismatches, bulk_stages
from tilewright_grouped_conv.pipelines.record import Pipeline
from tilewright_grouped_conv.rules.taps import taps_mismatches

__all__ = ["PIPELINES", "pipeline_of"]

PIPELINES: tuple[Pipeline, ...] = (
    Pipeline(form=forms.CPU_LOOPS, algorithms=cpu_loop_algorithms, predict=predict_cpu),
    Pipeline(form=forms.CPU_PRODUCTS, algorithms=cpu_product_algorithms, predict=predict_cpu),
    Pipeline(
        form=forms.IM2COL,
        algorithms=im2col_algorithms,
        predict=partial(predict_gpu, parts_of=im2col_parts),
        stages=im2col_stages,
        mismatches=im2col_mismatches,
    ),
    Pipeline(
        form=forms.BULK,
        algorithms=bulk_algorithms,
        predict=partial(predict_gpu, parts_of=bulk_parts),
        stages=bulk_stages,
        mismatches=bulk_mismatches,
    ),
    Pipeline(
        form=forms.GPU_LOOPS,
        algorithms=loop_algorithms,
        predict=partial(predict_gpu, parts_of=loop_parts),
        stages=gpu_stages,
    ),
    Pipeline(
        form=forms.TAPS,
        algorithms=tap_algorithms,
        predict=partial(predict_gpu, parts_of=tap_parts),
        stages=gpu_stages,
        mismatches=taps_mismatches,
    ),
    Pipeline(
        form=forms.HIP_PRODUCTS,
        algorithms=product_algorithms,
        predict=partial(predict_gpu, parts_of=product_parts),
        stages=gpu_stages,
    ),
    Pipeline(
        form=forms.CUDA_PRODUCTS,
        algorithms=product_algorithms,
        predict=partial(predict_gpu, parts_of=product_parts),
        stages=gpu_stages,
    ),
)
"""In the order in which their candidates are proposed."""


def pipeline_of(config: ConvConfig, kind: str) -> Pipeline:
    """The record of a configuration on a kind of device; of an unknown pipeline that of most kernels of the kind."""
    alike = [item for item in PIPELINES if kind in item.form.kinds and item.form.is_product == config.is_matrix]
    return next((item for item in alike if item.form.makes(config)), alike[-1])
