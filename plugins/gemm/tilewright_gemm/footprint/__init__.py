"""Resources that a GEMM kernel needs beyond those of its tiles."""
