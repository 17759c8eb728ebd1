"""Settings: where they come from, and what becomes of bad ones."""

from __future__ import annotations

import ast
import dataclasses
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import tilewright_server
from tilewright_kit.types.errors import InvalidArgumentError, NotFoundError
from tilewright_server.settings import TABLE, Settings, default_listen, load


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('workers = 3\nqueue_limit = 4\ngrace_s = 5\nlisten = ["unix:/tmp/a/b"]\ninsecure = true\n')
    environ = {"TILEWRIGHT_QUEUE_LIMIT": "40", "TILEWRIGHT_GRACE_S": "50", "TILEWRIGHT_CONFIG": str(file)}
    settings = load({"grace_s": 500, "strategy": None}, environ=environ)
    assert (settings.workers, settings.queue_limit, settings.grace_s) == (3, 40, 500.0)
    assert settings.listen == ("unix:/tmp/a/b",)
    assert settings.insecure
    assert settings.strategy == "auto"


def test_the_defaults_are_for_the_user_alone(tmp_path: Path) -> None:
    assert default_listen({"XDG_RUNTIME_DIR": str(tmp_path)}) == f"unix:{tmp_path}/tilewright/tilewright.sock"
    assert default_listen({}).startswith("unix:/tmp/tilewright-")
    settings = load(environ={})
    assert settings.listen == (default_listen({}),)
    assert settings.cache_dir is not None
    assert settings.cache_dir.name == "tilewright"
    assert not settings.insecure


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("inline_limit", "1 MiB", 2**20),
        ("buffer_bytes", "2GiB", 2**31),
        ("cache_bytes", "12345", 12345),
        ("listen", "unix:/a, unix:/b", ("unix:/a", "unix:/b")),
        ("insecure", "no", False),
        ("plugins", "cpu,gemm", ("cpu", "gemm")),
        ("relay_connects", "5, 10", (5.0, 10.0)),
        ("relay_lists", "1 MiB, 64 KiB", (2**20, 2**16)),
        ("grace_s", "0", 0.0),
    ],
)
def test_values_are_read_from_text(name: str, text: str, value: object) -> None:
    assert getattr(load(environ={f"TILEWRIGHT_{name.upper()}": text}), name) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("workers", "many"),
        ("workers", "1"),
        ("workers", "-4"),
        ("workers", "3.5"),
        ("grace_s", "nan"),
        ("grace_s", "-1"),
        ("inline_limit", "4 parsecs"),
        ("inline_limit", "19.99MiB"),
        ("inline_limit", "500 MiB"),
        ("insecure", "maybe"),
        ("log_level", "loud"),
        ("message_limit", "1"),
        ("relay_connects", "5"),
        ("relay_connects", "5, 0"),
        ("relay_control", "1e12, 2000"),
        ("relay_lists", "1 MiB, 2 MiB, 3 MiB"),
        ("relay_list_bytes", "1 KiB"),
        ("pace_at_once", "0"),
    ],
)
def test_bad_values_are_typed_errors_that_say_what_is_expected(name: str, text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        load(environ={f"TILEWRIGHT_{name.upper()}": text})
    assert caught.value.field == name
    assert caught.value.fix


def test_files_that_are_missing_or_broken_are_typed_errors(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        load(file=tmp_path / "none.toml", environ={})
    for text in ("workers = [", "no_such_setting = 1", "workers = true", "listen = [1, 2]", "\xff"):
        file = tmp_path / "server.toml"
        file.write_bytes(text.encode("latin-1"))
        with pytest.raises(InvalidArgumentError):
            load(file=file, environ={})


def test_the_table_says_everything_about_every_setting() -> None:
    assert sorted(row.name for row in TABLE) == sorted(item.name for item in dataclasses.fields(Settings))
    for row in TABLE:
        assert row.doc.endswith("."), row.name
        assert row.env == f"TILEWRIGHT_{row.name.upper()}"
        assert row.flag.startswith("--")
        if row.default not in (None, ()):
            assert row.parse(row.default) == row.default


def test_no_other_module_of_the_server_reads_the_environment() -> None:
    root = Path(tilewright_server.__file__).parent
    own = [*root.glob("*.py"), *root.glob("memory/*.py"), *root.glob("rpc/*.py")]
    for path in own:
        names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert path.name == "settings.py" or not names & {"environ", "getenv", "environb"}, path


def test_the_version_is_that_of_the_distribution() -> None:
    try:
        assert version("tilewright") == tilewright_server.__version__
    except PackageNotFoundError:
        pytest.skip("not installed")
