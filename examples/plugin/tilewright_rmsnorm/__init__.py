"""RMS normalisation as an operation of Tilewright.

``out[i, j] = x[i, j] * weight[j] / sqrt(mean(x[i, :]**2) + epsilon)``, as transformers use it.
"""

__version__ = "0.1.0"
TILEWRIGHT_OPERATIONS = {"rmsnorm": "rmsnorm"}
"""Operations, and the first words of their kernels' names: known before the plugin is imported."""
