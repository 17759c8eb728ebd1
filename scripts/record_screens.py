"""Record the demonstration's screens in the README anew, each on a terminal of the width that stands before it:
``python scripts/record_screens.py``, on a machine that runs nothing else, in the project's environment.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"
COMMAND = ("demo", "--dtype", "fp32")
WIDTHS = (80, 120)
"""Columns of the screens, in their order."""

_SCREEN = re.compile(rf"(```console\n\$ tilewright {' '.join(COMMAND)}\n)(.*?)(```\n)", re.DOTALL)
_DATE = re.compile(r"Recorded\son\s\d{4}-\d\d-\d\d")
_STYLES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_terminal(columns: int, command: Sequence[str]) -> list[str]:
    """The lines that a command leaves on a terminal of so many columns. Raises ``CalledProcessError``."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    found = b""
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL, env={**environment, "TERM": "xterm"}
    ) as child:
        os.close(theirs)
        try:
            while part := os.read(ours, 65536):
                found += part
        except OSError:  # the end of a terminal
            pass
    os.close(ours)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command, found.decode(errors="replace"))
    return shown(found.decode())


def shown(text: str) -> list[str]:
    """Lines without styles, progress that was overwritten, and blanks at their ends."""
    lines = (line.rstrip("\r").rpartition("\r")[2].rstrip() for line in _STYLES.sub("", text).split("\n"))
    return [line for line in lines if line]


def recorded(page: str, record: Callable[[int], Sequence[str]], date: str) -> str:
    """The page with what ``record`` gives for each width in the places of its screens. Raises ``ValueError`` if it has
    another number of screens, or does not say when they were recorded.
    """
    screens = list(_SCREEN.finditer(page))
    if len(screens) != len(WIDTHS) or len(_DATE.findall(page)) != 1:
        raise ValueError(f"{len(screens)} screens of `tilewright {' '.join(COMMAND)}`, {len(WIDTHS)} expected")
    for screen, columns in reversed(list(zip(screens, WIDTHS, strict=True))):
        lines = "".join(f"{line}\n" for line in record(columns))
        page = page[: screen.start(2)] + lines + page[screen.end(2) :]
    return _DATE.sub(f"Recorded on {date}", page)


def main() -> int:
    command = [str(Path(sys.executable).with_name("tilewright")), *COMMAND]
    today = datetime.now(timezone.utc).date().isoformat()
    README.write_text(recorded(README.read_text("utf-8"), lambda columns: on_terminal(columns, command), today))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
