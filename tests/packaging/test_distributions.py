"""What is in the distributions, and what the base installation can do."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

import pytest

from tilewright.launch.library import ABI

PACKAGES = {
    "tilewright": "client",
    "tilewright_arch": "arch",
    "tilewright_fmha": "plugins/fmha",
    "tilewright_moe": "plugins/moe",
    "tilewright_gemm": "plugins/gemm",
    "tilewright_grouped_conv": "plugins/grouped_conv",
    "tilewright_kit": "plugins/kit",
    "tilewright_native": "native",
    "tilewright_proto": "proto",
    "tilewright_server": "server",
    "tilewright_tools": "tools",
}
ROOT = Path(__file__).resolve().parents[2]
CLIENT_REQUIREMENTS = {"grpcio", "ml_dtypes", "numpy", "protobuf"}


def source_files(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".pyc", ".so", ".o")
    }


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_wheel_has_every_file_of_every_package(package: str, names: set[str], root: Path) -> None:
    folder = root / PACKAGES[package]
    wanted = {name for name in source_files(folder) if name.startswith(f"{package}/")}
    assert f"{package}/__init__.py" in wanted
    assert wanted <= names


@pytest.mark.parametrize("package", sorted(set(PACKAGES) - {"tilewright_proto"}))
def test_every_package_says_that_it_is_typed(package: str, names: set[str]) -> None:
    assert f"{package}/py.typed" in names


def test_wheel_has_every_kernel_header_where_the_native_package_looks(names: set[str], root: Path) -> None:
    headers = {f"tilewright_native/include/{name}" for name in source_files(root / "native" / "include")}
    assert any(name.endswith(".hpp") for name in headers)
    assert headers <= names


def test_wheel_has_the_protocol_files_under_their_import_path(names: set[str], root: Path) -> None:
    files = {f"tilewright_proto/include/{name}" for name in source_files(root / "proto") if name.endswith(".proto")}
    assert "tilewright_proto/include/tilewright/v1/dispatch.proto" in files
    assert files <= names


def test_wheel_has_nothing_but_packages_and_metadata(names: set[str]) -> None:
    tops = {name.split("/")[0] for name in names}
    extra = {top for top in tops if top not in PACKAGES and not top.endswith(".dist-info")}
    assert not extra


def test_wheel_loads_its_library_in_an_environment_of_its_own(wheel: Path, tmp_path: Path) -> None:
    if find_spec("ziglang") is None and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("no C++ compiler: the wheel has no library")
    assert re.fullmatch(r"tilewright-.*-py3-none-(many)?linux_\w+\.whl", wheel.name)
    venv.create(tmp_path / "env", with_pip=False)
    python = str(tmp_path / "env" / "bin" / "python")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    done = subprocess.run([*install, str(wheel)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr  # pip refuses a platform that this machine is not
    code = "import ctypes, tilewright_native as native; path = native.library_path(); print(path); "
    code += "print(ctypes.CDLL(str(path)).tw_abi_version())"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([python, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    path, abi = done.stdout.split()
    assert Path(path).is_relative_to(tmp_path) and abi == str(ABI)


@pytest.mark.extended
def test_wheel_without_a_compiler_is_for_any_platform_and_says_so(root: Path, tmp_path: Path) -> None:
    if find_spec("ziglang") is not None:
        pytest.skip("the wheel ziglang is installed, which is a compiler")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    env = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "python -m tilewright_native.build" in done.stdout + done.stderr
    (artifact,) = tmp_path.iterdir()
    assert artifact.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(artifact) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]


def test_base_requirements_are_the_clients_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    base = [text for text in metadata.get_all("Requires-Dist", []) if "extra ==" not in text]
    assert {text.split(">")[0].split("<")[0].split("=")[0].replace("-", "_") for text in base} == CLIENT_REQUIREMENTS
    assert {"server", "cuda", "hip", "dev"} <= set(metadata.get_all("Provides-Extra", []))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"


def test_wheel_declares_the_script_and_the_plugins(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt"))
        text = archive.read(name).decode()
    assert "tilewright = tilewright_tools.cli:main" in text
    assert "[tilewright.plugins]" in text
    assert "gemm = tilewright_gemm.plugin" in text
    assert "grouped_conv = tilewright_grouped_conv.plugin" in text
    assert "fmha = tilewright_fmha.plugin" in text


@pytest.mark.extended
def test_sdist_has_the_sources_and_no_leftovers(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"pyproject.toml", "README.md", "LICENSE", "Makefile", "proto/generate.py"} <= names
    assert any(name.startswith("native/include/tilewright/") for name in names)
    assert any(name.startswith("tests/") for name in names)
    leftovers = [name for name in names if name.startswith((".venv", ".tools", ".mypy_cache")) or "__pycache__" in name]
    assert not leftovers


@pytest.fixture(scope="module")
def base_install(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pip install tilewright` brings, and nothing else: the wheel, and links to the packages it needs."""
    folder = tmp_path_factory.mktemp("base")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    # typing_extensions is what grpcio itself requires.
    for name in ("grpcio", "ml_dtypes", "numpy", "protobuf", "typing_extensions"):
        found = distribution(name)
        for top in {path.parts[0] for path in found.files or () if path.parts[0] not in ("..", "__pycache__")}:
            link = folder / top
            if not link.exists():
                link.symlink_to(Path(str(found.locate_file(top))))
    return folder


@pytest.mark.extended
def test_the_steps_of_an_image_install_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """As the container's file has them; what the wheel needs lies beside it here, so that no index is asked."""
    target, needed = tmp_path / "tilewright", tmp_path / "needed"
    needed.mkdir()
    for path in Path(str(distribution("typer").locate_file(""))).iterdir():
        if not path.name.startswith(("tilewright", "_editable", "_tilewright")) and path.suffix != ".pth":
            (needed / path.name).symlink_to(path)
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(needed), "PIP_NO_INDEX": "1"}
    command = [ROOT / "deploy" / "container" / "install.sh", target, "server,metrics", wheel.parent]
    done = subprocess.run(command, env=env | {"PIP_NO_DEPS": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith(distribution("tilewright").version)
    code = "import tilewright_server; print(tilewright_server.__file__)"
    found = subprocess.run([target / "bin" / "python", "-c", code], env=env, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()).is_relative_to(target)
    served = subprocess.run(
        [target / "bin" / "tilewright", "serve", "--help"], env=env, capture_output=True, check=False
    )
    assert served.returncode == 0, served.stderr


def run_alone(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` with the standard library and ``folder`` alone in sight."""
    env = {"PYTHONPATH": str(folder), "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-S", "-c", code]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=False, timeout=60)


def test_client_imports_without_the_servers_packages(base_install: Path) -> None:
    code = "import sys, tilewright as tw; assert 'pluggy' not in sys.modules; print(tw.__version__, tw.connect)"
    done = run_alone(base_install, code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{distribution('tilewright').version} <function connect")


def test_script_without_the_servers_packages_says_how_to_get_them(base_install: Path) -> None:
    done = run_alone(base_install, "import sys; from tilewright_tools.cli import main; sys.exit(main(['--help']))")
    assert done.returncode == 2
    assert "pip install 'tilewright[server]'" in done.stderr
    assert "typer" in done.stderr
    assert "Traceback" not in done.stderr


def test_installed_headers_are_found(base_install: Path) -> None:
    code = "from tilewright_native import include_dir; print(include_dir())"
    done = run_alone(base_install, code)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == base_install / "tilewright_native" / "include"
