"""Products of mixtures of experts as an operation: rows sorted by expert, each times its expert's weights.

Candidates, rules, times and the blocks of the kernels are GEMM's; how many rows an expert has is data on the device.
"""

__version__ = "0.1.0"
TILEWRIGHT_OPERATIONS = {"moe_gemm": "moe_gemm"}
"""Operations, and the first words of their kernels' names: known before the plugin is imported."""
