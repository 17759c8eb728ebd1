"""Problems of GEMM: read from requests, described, resized."""
