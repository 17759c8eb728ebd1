"""The Open Inference Protocol (KServe version 2) with Triton's additions: operations and prepared plans as models."""
