"""Optional tools of development: which are there, what each enables, and how to get it. No test fails without them.

make doctor-dev
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path

from tilewright_emulator.code.compiler import compiler, have_objdump, tool

ROOT = Path(__file__).resolve().parents[1]


def have(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def programs(*names: str) -> bool:
    return all(map(shutil.which, names))


def tools(folder: Path) -> list[tuple[str, bool, str, str]]:
    """Name, whether it is there, what it enables, and how to get it."""
    venv = f"{Path(sys.executable).parent}/pip install"
    return [
        ("C compiler", shutil.which("cc") is not None, "simulated CUDA and HIP drivers", "apt-get install gcc"),
        (
            "compiler for AMD GPUs",
            compiler(folder) is not None,
            "AMD kernels, compiled and executed in the emulator",
            f"{venv} ziglang, or apt-get install clang-22 lld-22",
        ),
        (
            "llvm-objdump",
            have_objdump(),
            "gates and analysis of AMD kernels; comparison with the assembler's listing",
            "apt-get install llvm-22",
        ),
        (
            "clang of LLVM",
            tool("clang") is not None,
            "assembly of all instructions of the emulator",
            "apt-get install clang-22",
        ),
        (
            "nvrtc",
            have("cuda.bindings"),
            "kernels for NVIDIA GPUs, compiled",
            f"{venv} 'tilewright[cuda]'",
        ),
        ("buf", shutil.which("buf") is not None, "lint of the protocol's files", "npm install -g @bufbuild/buf"),
        (
            "perf_analyzer",
            (ROOT / ".tools" / "perf-analyzer" / "perf_analyzer").exists(),
            "Triton's client in C++ against the server",
            f"{sys.executable} scripts/get_perf_analyzer.py",
        ),
        (
            "gRPC for C++",
            programs("protoc", "grpc_cpp_plugin", "pkg-config", "g++"),
            "examples/grpc in C++",
            "apt-get install protobuf-compiler protobuf-compiler-grpc libgrpc++-dev pkg-config g++",
        ),
        (
            "gRPC for Go",
            programs("protoc", "go", "protoc-gen-go", "protoc-gen-go-grpc"),
            "examples/grpc in Go",
            "apt-get install golang-go golang-google-grpc-dev protoc-gen-go-grpc golang-goprotobuf-dev",
        ),
        ("Node.js and npm", programs("node", "npm"), "examples/grpc in JavaScript, and buf", "https://nodejs.org"),
        (
            "kubectl",
            programs("kubectl"),
            "what Kustomize makes of deploy/kubernetes, validated",
            "https://kubernetes.io/docs/tasks/tools, release 1.27 or later",
        ),
        ("podman", programs("podman"), "container images, built and run", "apt-get install podman"),
        ("ziglang", have("ziglang"), "CPU kernels built by a second compiler and for AArch64", f"{venv} ziglang"),
        (
            "PyTorch",
            have("torch"),
            "parity with PyTorch",
            f"{venv} torch==2.13.0+cpu --extra-index-url https://download.pytorch.org/whl/cpu",
        ),
        ("NVIDIA GPU", Path("/dev/nvidiactl").exists(), "make test-gpu", "a machine that has one"),
    ]


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        for name, there, enables, how in tools(Path(folder)):
            sys.stdout.write(f"{'ok     ' if there else 'missing'}  {name}: {enables}\n")
            if not there:
                sys.stdout.write(f"{'':9}get it: {how}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
