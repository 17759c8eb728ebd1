"""Operations for PyTorch: ``torch.ops.tilewright``, and functions by PyTorch's own names over them.

    >>> import tilewright.torch as twt  # doctest: +SKIP
    >>> y = twt.linear(x, w, bias, activation="gelu")  # doctest: +SKIP

They have gradients and go through ``torch.compile`` and ``torch.export``. Needs PyTorch (extra ``torch``).
"""

from tilewright.torch.compiler.choice import Decision, report
from tilewright.torch.connection import client, use
from tilewright.torch.functions import (
    conv1d,
    conv2d,
    conv3d,
    conv_transpose1d,
    conv_transpose2d,
    conv_transpose3d,
    linear,
    matmul,
    scaled_dot_product_attention,
)
from tilewright.torch.operations.attention import (
    attention,
    attention_backward,
    attention_paged,
    attention_varlen,
    kv_append,
)
from tilewright.torch.operations.convolution import conv, conv_backward_data, conv_backward_weight, conv_transpose
from tilewright.torch.operations.gemm import gemm, grouped_gemm
from tilewright.torch.operations.latent import attention_latent, attention_latent_paged
from tilewright.torch.operations.weights import (
    PackedWeight,
    gemm_block_scaled,
    gemm_int4,
    gemm_packed,
    moe_gemm,
    moe_gemm_quantised,
)

__all__ = [
    "Decision",
    "PackedWeight",
    "attention",
    "attention_backward",
    "attention_latent",
    "attention_latent_paged",
    "attention_paged",
    "attention_varlen",
    "client",
    "conv",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_backward_data",
    "conv_backward_weight",
    "conv_transpose",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "gemm",
    "gemm_block_scaled",
    "gemm_int4",
    "gemm_packed",
    "grouped_gemm",
    "kv_append",
    "linear",
    "matmul",
    "moe_gemm",
    "moe_gemm_quantised",
    "report",
    "scaled_dot_product_attention",
    "use",
]
