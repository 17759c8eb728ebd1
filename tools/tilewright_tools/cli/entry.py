"""Runs one command line: errors become text and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tilewright_tools.cli.console.exits import Exit, exit_for
from tilewright_tools.cli.console.output import note, print_error

__all__ = ["run"]


def run(arguments: Sequence[str]) -> int:
    """Run the command that ``arguments`` name and return its exit code."""
    try:
        if (served := _served(arguments)) is not None:
            return served
        from tilewright_tools.cli.app import app

        app(list(arguments), prog_name="tilewright")
    except SystemExit as stop:
        # The parser ends so, with 1, when the reader of a pipe goes away: what that read was enough for it.
        return Exit.OK if isinstance(stop.__context__, BrokenPipeError) else _code(stop)
    except KeyboardInterrupt:
        note("interrupted")
        return Exit.INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return Exit.OK
    except Exception as error:
        code = _stable_code(error)
        if code is None:
            raise
        print_error(error)
        return exit_for(code, str(getattr(error, "rule", "")))
    return Exit.OK


def _served(arguments: Sequence[str]) -> int | None:
    """Exit code of a server, if the arguments are `serve` and flags that need no parser."""
    if arguments[:1] != ["serve"]:
        return None
    from tilewright_tools.cli.service.starting import plain_flags, run_server

    flags = plain_flags(arguments[1:])
    return None if flags is None else run_server(flags)


def _code(stop: SystemExit) -> int:
    if stop.code is None:
        return Exit.OK
    return stop.code if isinstance(stop.code, int) else Exit.FAILED


def _stable_code(error: Exception) -> str | None:
    """The stable code of an error meant for the user; None for a fault of the program, whose traceback then helps."""
    code = getattr(error, "code", None)
    if isinstance(code, str):
        return code
    from tilewright_arch import ArchError

    return "invalid_argument" if isinstance(error, ArchError) else None
