"""Generate the Python stubs from the ``.proto`` files, reproducibly.

The compiler is pinned: its stubs ask for protobuf 6.30 and grpcio 1.72 at the least and run on protobuf 6.x and 7.x
alike. It is installed into a folder of its own, without dependencies, so that it does not meddle with the runtimes of
the environment.

    python proto/generate.py            # rewrite the stubs
    python proto/generate.py --check    # exit 1 if the checked-in stubs are not what would be generated
"""

from __future__ import annotations

import argparse
import filecmp
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

COMPILER = "grpcio-tools==1.72.2"
ROOT = Path(__file__).resolve().parent
STUBS = ROOT / "tilewright_proto" / "v1"
PACKAGE = "tilewright_proto"


def compiler_dir() -> Path:
    """Folder with the pinned compiler, installed at the first call."""
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    folder = ROOT.parent / ".tools" / f"{COMPILER.replace('==', '-')}-{python}"
    if not (folder / "grpc_tools").is_dir():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), COMPILER]
        subprocess.run(install, check=True)
    return folder


def generate(target: Path) -> None:
    """Write the stubs of all ``.proto`` files into ``target``."""
    sources = sorted(ROOT.glob("tilewright/v1/*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / PACKAGE / "v1"
        tree.mkdir(parents=True)
        for source in sources:
            # The Python package is tilewright_proto.v1, so that it cannot clash with the client's package `tilewright`.
            text = source.read_text().replace('import "tilewright/v1/', f'import "{PACKAGE}/v1/')
            (tree / source.name).write_text(text)
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{scratch}"]
        command += [f"--{kind}_out={scratch}" for kind in ("python", "pyi", "grpc_python")]
        command += [str(tree / source.name) for source in sources]
        subprocess.run(command, check=True, env={"PYTHONPATH": str(compiler_dir()), "PATH": "/usr/bin:/bin"})
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        (target / "__init__.py").write_text('"""Generated stubs of `tilewright.v1`."""\n')
        for stub in sorted([*tree.glob("*.py"), *tree.glob("*.pyi")]):
            if stub.name.endswith("_pb2_grpc.py") and "Servicer" not in stub.read_text():
                continue
            shutil.copy(stub, target / stub.name)


def stale() -> list[str]:
    """Names of stubs that differ from what would be generated."""
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch) / "v1"
        generate(fresh)
        names = sorted({path.name for folder in (fresh, STUBS) for path in folder.glob("*.py*")})
        return [name for name in names if not _same(fresh / name, STUBS / name)]


def _same(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and filecmp.cmp(one, other, shallow=False)


def main() -> int:
    parser = argparse.ArgumentParser(description="Generate the Python stubs from the .proto files.")
    parser.add_argument("--check", action="store_true", help="only say whether the checked-in stubs are up to date")
    if not parser.parse_args().check:
        generate(STUBS)
        return 0
    names = stale()
    if names:
        sys.stderr.write(f"stale stubs: {', '.join(names)}; run `make proto`\n")
    return 1 if names else 0


if __name__ == "__main__":
    raise SystemExit(main())
