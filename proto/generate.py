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
PACKAGE = "tilewright_proto"
STUBS = ROOT / PACKAGE
FOLDERS = {"v1": "tilewright/v1", "inference": "inference"}
"""Folders of stubs, and of the files that they are made from."""
SHARED_POOL = "_descriptor_pool.Default()"
OWN_POOL = "_descriptor_pool.DescriptorPool()"
"""Other libraries bring messages of the package ``inference`` too: ours must not meet theirs in one process."""


def compiler_dir() -> Path:
    """Folder with the pinned compiler, installed at the first call."""
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    folder = ROOT.parent / ".tools" / f"{COMPILER.replace('==', '-')}-{python}"
    if not (folder / "grpc_tools").is_dir():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), COMPILER]
        subprocess.run(install, check=True)
    return folder


def generate(target: Path) -> None:
    """Write the stubs of all ``.proto`` files into ``target``, a folder for each folder of them."""
    with tempfile.TemporaryDirectory() as scratch:
        for name, folder in FOLDERS.items():
            tree = Path(scratch) / PACKAGE / name
            tree.mkdir(parents=True)
            for source in sorted((ROOT / folder).glob("*.proto")):
                # The Python package is tilewright_proto.v1, so that it cannot clash with the client's package
                # `tilewright`.
                text = source.read_text().replace('import "tilewright/v1/', f'import "{PACKAGE}/v1/')
                (tree / source.name).write_text(text)
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{scratch}"]
        command += [f"--{kind}_out={scratch}" for kind in ("python", "pyi", "grpc_python")]
        command += [str(path) for path in sorted(Path(scratch).rglob("*.proto"))]
        subprocess.run(command, check=True, env={"PYTHONPATH": str(compiler_dir()), "PATH": "/usr/bin:/bin"})
        for name, folder in FOLDERS.items():
            _take(Path(scratch) / PACKAGE / name, target / name, folder.replace("/", "."))


def _take(made: Path, target: Path, package: str) -> None:
    """Replace the folder ``target`` by stubs that were made of the files of ``package``."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    (target / "__init__.py").write_text(f'"""Generated stubs of `{package}`."""\n')
    own = package == "inference"
    for stub in sorted([*made.glob("*.py"), *made.glob("*.pyi")]):
        if stub.name.endswith("_pb2_grpc.py") and (own or "Servicer" not in stub.read_text()):
            continue
        text = stub.read_text()
        (target / stub.name).write_text(text.replace(SHARED_POOL, OWN_POOL) if own else text)


def stale() -> list[str]:
    """Names of stubs that differ from what would be generated."""
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch)
        generate(fresh)
        stubs = [
            (folder, path) for folder in (fresh, STUBS) for name in FOLDERS for path in (folder / name).glob("*.py*")
        ]
        names = sorted({str(path.relative_to(folder)) for folder, path in stubs})
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
