"""Clients in other languages, made from the protocol's files alone: examples/grpc, with Debian's and npm's packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "grpc"
PROTOS = sorted((ROOT / "proto" / "tilewright" / "v1").glob("*.proto"))
DEBIAN_GO = Path("/usr/share/gocode")
Client = Callable[[str], str]
"""Runs a client against a server's address."""

pytestmark = [pytest.mark.extended, pytest.mark.slow]


def need(hint: str, *programs: str) -> None:
    missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed ({hint})")


def run(*command: object, cwd: Path = ROOT, **env: str) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, f"{' '.join(words[:3])}: {done.stdout}{done.stderr}"
    return done.stdout


def cpp(folder: Path) -> Client:
    packages = "apt-get install libgrpc++-dev protobuf-compiler-grpc protobuf-compiler pkg-config g++"
    need(packages, "protoc", "grpc_cpp_plugin", "pkg-config", "g++")
    if subprocess.run(["pkg-config", "--exists", "grpc++"], check=False).returncode:
        pytest.skip(f"the headers of gRPC for C++ are not installed ({packages})")
    plugin = f"--plugin=protoc-gen-grpc={shutil.which('grpc_cpp_plugin')}"
    run("protoc", f"-I{ROOT / 'proto'}", f"--cpp_out={folder}", f"--grpc_out={folder}", plugin, *PROTOS)
    flags = run("pkg-config", "--cflags", "--libs", "grpc++", "protobuf").split()
    # The headers of gRPC and protobuf take longest: one unit has all that includes them.
    stubs = folder / "tilewright" / "v1"
    lines = [f'#include "{EXAMPLES / "cpp" / "main.cpp"}"']
    for name in ("dispatch", "memory", "operations", "tensor", "error"):
        if (calls := stubs / f"{name}.grpc.pb.cc").exists():
            lines.append(f'#include "{calls}"')
        tables = ("schemas", "file_default_instances")  # each file of stubs has its own
        lines += [f"#define {table} {table}_of_{name}" for table in tables]
        lines.append(f'#include "{stubs / f"{name}.pb.cc"}"')
        lines += [f"#undef {table}" for table in tables]
    unit = folder / "all.cc"
    unit.write_text("\n".join(lines) + "\n")
    compiler = next(filter(shutil.which, (*(f"clang++-{release}" for release in (22, 21, 20, 19)), "g++")))
    program = folder / "product"
    run(compiler, "-std=c++17", "-O0", "-w", f"-I{folder}", unit, *flags, "-o", program)
    return lambda address: run(program, address)


def go(folder: Path) -> Client:
    packages = (
        "apt-get install golang-go golang-google-grpc-dev protoc-gen-go-grpc golang-goprotobuf-dev protobuf-compiler"
    )
    need(packages, "go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc")
    if not (DEBIAN_GO / "src" / "google.golang.org" / "grpc").is_dir():
        pytest.skip(f"gRPC for Go is not installed ({packages})")
    source = folder / "src"
    source.mkdir()
    run("protoc", f"-I{ROOT / 'proto'}", f"--go_out={source}", f"--go-grpc_out={source}", *PROTOS)
    env = {"GO111MODULE": "off", "GOPATH": f"{folder}:{DEBIAN_GO}", "GOCACHE": str(folder / "cache"), "GOFLAGS": ""}
    program = folder / "product"
    run("go", "build", "-o", program, EXAMPLES / "go" / "main.go", **env)
    return lambda address: run(program, address)


def node(folder: Path) -> Client:
    need("https://nodejs.org", "node", "npm")
    modules = Path(os.environ["NODE_PATH"]) if "NODE_PATH" in os.environ else folder / "node_modules"
    if not (modules / "@grpc" / "grpc-js").is_dir():
        install = ["npm", "install", "--no-audit", "--no-fund", "--fetch-retries=0", "--fetch-timeout=20000"]
        install += ["--prefix", str(folder), "@grpc/grpc-js@1", "@grpc/proto-loader@0.8"]
        try:
            subprocess.run(install, capture_output=True, check=True, timeout=100)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            pytest.skip("@grpc/grpc-js is not installed (set NODE_PATH) and npm does not fetch it")
    return lambda address: run("node", EXAMPLES / "node" / "main.js", address, NODE_PATH=str(modules))


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """A server on a Unix socket, and one on TCP."""
    folder = tmp_path_factory.mktemp("grpc")
    env = {key: value for key, value in os.environ.items() if not key.startswith("TILEWRIGHT_")}
    serve = [sys.executable, "-m", "tilewright_tools.cli", "serve", "--cache-dir", str(folder / "cache")]
    found = []
    with ExitStack() as servers:
        for listen in (["--listen", f"unix:{folder / 's.sock'}"], ["--listen", "127.0.0.1:0", "--insecure"]):
            process = servers.enter_context(
                subprocess.Popen([*serve, *listen], env=env, stdout=subprocess.PIPE, text=True)
            )
            servers.callback(process.terminate)
            assert process.stdout is not None
            ready = process.stdout.readline()
            assert ready.startswith("ready: ")
            found.append(ready.split()[1])
        yield found


@pytest.mark.parametrize("language", [cpp, go, node], ids=lambda language: language.__name__)
def test_a_product_is_right_over_both_kinds_of_socket(
    language: Callable[[Path], Client], addresses: list[str], tmp_path: Path
) -> None:
    client = language(tmp_path)
    for address in addresses:
        assert "5 x 7 is right" in client(address)


def test_a_client_without_a_server_says_so(tmp_path: Path) -> None:
    client = node(tmp_path)
    with pytest.raises(AssertionError, match="no session"):
        client(f"unix:{tmp_path / 'nobody.sock'}")
