"""Float64 references and sample requests of GEMM."""
