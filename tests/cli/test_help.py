"""Every command explains itself, and quickly."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest
from typer.main import get_command

from tilewright_tools.cli.app import app


def words(command, path=()):
    """The words of every command, groups of commands included; those of earlier names are not shown."""
    yield path
    for name, part in getattr(command, "commands", {}).items():
        if not part.hidden:
            yield from words(part, (*path, name))


COMMANDS = list(words(get_command(app)))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_says_what_a_command_does_and_gives_examples(command, cli):
    ran = cli(*command, "--help")
    assert ran.code == 0
    assert "Usage: tilewright" in ran.out
    assert "Examples:" in ran.out
    assert " ".join(("tilewright", *command)) in ran.out.partition("Examples:")[2]


def test_exit_codes_are_documented(cli):
    ran = cli("--help")
    for part in ("0 done", "1 the answer is no", "2 the request is wrong", "3 no server", "4 this machine lacks"):
        assert part in " ".join(ran.out.replace("│", " ").split())


def test_version_is_that_of_the_distribution(cli):
    assert cli("--version").out == f"tilewright {version('tilewright')}\n"


@pytest.mark.extended
def test_help_loads_nothing_heavy():
    code = (
        "import sys; from tilewright_tools.cli import main; main(['--help']);"
        "heavy = {'numpy', 'grpc', 'pluggy', 'google.protobuf', 'ml_dtypes'} & set(sys.modules);"
        "sys.exit(', '.join(sorted(heavy)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"tilewright --help imports {done.stderr}"


def test_completion_can_be_shown_for_a_shell(process):
    ran = process("--show-completion", "bash")
    assert ran.code in (0, 1, 2)
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("run c", {"conv"}),
        ("run conv --direction bwd", {"bwd_data", "bwd_weight"}),
        ("explain conv --direction f", {"fwd"}),
        ("kernels generate --rule-set t", {"tests", "tiny"}),
    ],
)
@pytest.mark.extended
def test_the_shell_completes_commands_and_their_words(words, wanted, monkeypatch):
    line = f"tilewright {words}"
    monkeypatch.setenv("_TILEWRIGHT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
    command = [sys.executable, "-m", "tilewright_tools.cli"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == wanted


def test_unknown_command_is_a_usage_error(cli):
    ran = cli("serv")
    assert ran.code == 2
    assert "serv" in ran.err
