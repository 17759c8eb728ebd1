"""Programs in C++ over libtilewright, most of them built with sanitizers from the library's own sources."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tilewright_native import library_path
from tilewright_tools.cli import main

__all__ = ["NATIVE", "build", "build_plain", "gpu_bundle", "simulated_driver"]

TESTS = Path(__file__).resolve().parents[1]
NATIVE = TESTS.parent / "native"
SHAPES = "m,n,k,layout,split_k,groups\n64,64,64,rcr,,\n64,64,2048,rrr,16,\n96,64,64,rcr,,64+32+0\n"
_COMMON = ["-std=c++17", "-O1", "-g"]
_MISSING = {
    "address,undefined": "AddressSanitizer: install g++ with libasan and libubsan",
    "thread": "ThreadSanitizer: install g++ with libtsan",
}


def build(folder: Path, source: str, sanitizers: str) -> Path:
    """The program made of a file beside this one and of the library; skips where no compiler has the sanitizers."""
    flags = [*_COMMON, f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    program = folder / Path(source).stem
    runtime = [*sorted((NATIVE / "runtime").rglob("*.cpp")), NATIVE / "include" / "tilewright" / "cpu" / "runtime.cpp"]
    includes = [f"-I{NATIVE / 'include'}", f"-I{NATIVE / 'runtime'}"]
    files = [str(TESTS / "native" / source), *map(str, runtime)]
    command = [_compiler(folder, flags, sanitizers), *flags, *includes, *files, "-ldl", "-lpthread", "-o", str(program)]
    subprocess.run(command, check=True)
    return program


def build_plain(folder: Path, source: str) -> Path:
    """The same with the library as it is installed."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler: install g++")
    try:
        library = library_path()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    program = folder / Path(source).stem
    files = [str(TESTS / "native" / source), str(library), f"-Wl,-rpath,{library.parent}"]
    subprocess.run(
        [compiler, *_COMMON, f"-I{NATIVE / 'runtime'}", *files, "-ldl", "-lpthread", "-o", str(program)], check=True
    )
    return program


def _compiler(folder: Path, flags: list[str], sanitizers: str) -> str:
    """A C++ compiler whose sanitizers link and run."""
    (folder / "probe.cpp").write_text("int main() { return 0; }\n")
    probe = str(folder / "probe")
    for name in ("c++", "g++", "clang++"):
        found = shutil.which(name)
        steps = ([str(found), *flags, str(folder / "probe.cpp"), "-o", probe], [probe])
        if found and all(subprocess.run(step, capture_output=True, check=False).returncode == 0 for step in steps):
            return found
    pytest.skip(f"no C++ compiler with {_MISSING[sanitizers]}")


def simulated_driver(folder: Path) -> Path:
    """A folder with a ``libcuda.so.1`` that is simulated."""
    folder.mkdir()
    target, source = folder / "libcuda.so.1", TESTS / "client" / "client_cuda.c"
    flags = ["-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    includes = f"-I{TESTS / 'server' / 'devices' / 'cuda_simulated'}"
    subprocess.run(["cc", *flags, includes, "-o", str(target), str(source), "-lpthread", "-lrt"], check=True)
    return folder


def gpu_bundle(folder: Path, cache: Path, *more: str, arch: str = "sm_90a") -> Path:
    """A bundle for a GPU: a plain product, one with a workspace, a grouped one, and attention in parts."""
    shapes, made = folder / "shapes.csv", folder / "model.twb"
    shapes.write_text(SHAPES)
    problems = ["--gemm", str(shapes), "--attention", "1x4/1x1/4096x128", "--dtype", "bf16"]
    place = ["--cache-dir", str(cache), "-o", str(made)]
    assert main(["bundle", "build", *problems, "--arch", arch, *more, *place]) == 0
    return made
