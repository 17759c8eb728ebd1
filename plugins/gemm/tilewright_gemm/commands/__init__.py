"""Problems of GEMM on the command line and in sweeps."""
