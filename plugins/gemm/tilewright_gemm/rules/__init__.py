"""Rules on configurations of GEMM."""
