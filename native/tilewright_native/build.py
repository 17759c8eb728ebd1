"""Build of libtilewright, the library that launches plans in the process of a caller.

    python -m tilewright_native.build

Puts ``libtilewright.so`` into this package, where ``library_path`` finds it. Needs a C++ compiler: ``c++``, ``g++``,
``clang++``, or the wheel ``ziglang``.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tilewright_native import LIBRARY, include_dir

__all__ = ["build_library"]

_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics")
_WITHOUT_CXX_LIBRARY = (("-nodefaultlibs", "-lc", "-lgcc"), ())
"""Libraries that are linked: first without the C++ library, which the sources do not use."""


def build_library(target: Path) -> None:
    """Compile the sources to ``target``, which is replaced as a whole.

    Raises ``FileNotFoundError`` where sources or compilers are missing, ``RuntimeError`` with the last compiler's
    message where none of them succeeds.
    """
    package = Path(__file__).resolve().parent
    folders = [folder for folder in (package / "runtime", package.parent / "runtime") if folder.is_dir()]
    if not folders:
        raise FileNotFoundError(
            f"the sources of libtilewright are missing: no runtime in {package} or {package.parent}"
        )
    runtime, include = folders[0], include_dir()
    sources = [*sorted(runtime.rglob("*.cpp")), include / "tilewright" / "cpu" / "runtime.cpp"]
    message = ""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        for compiler in _compilers():
            for libraries in _WITHOUT_CXX_LIBRARY:
                command = [
                    *compiler, *_FLAGS, f"-I{include}", f"-I{runtime}", *map(str, sources),
                    f"-Wl,--version-script={runtime / 'exports.map'}", "-ldl", "-lpthread", *libraries,
                    "-o", str(made),
                ]  # fmt: skip
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode == 0 and made.is_file():
                    made.replace(target)
                    return
                message = done.stderr
    if not message:
        raise FileNotFoundError("no C++ compiler: install g++, or `pip install ziglang`")
    raise RuntimeError(message)


def _compilers() -> Iterator[tuple[str, ...]]:
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            yield (found,)
    if importlib.util.find_spec("ziglang") is not None:
        yield (sys.executable, "-m", "ziglang", "c++")


if __name__ == "__main__":
    try:
        build_library(LIBRARY)
    except (OSError, RuntimeError) as error:
        sys.stderr.write(f"warning: libtilewright was not built: {error}\n")
        raise SystemExit(1) from None
