"""What a terminal of 80, 100 or 120 columns shows, and what a pipe gets."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

import numpy as np
import pytest

import tilewright as tw
from tilewright_kit.config.naming import alias_of

NAME = "grouped_conv_bwd_weight_fp32_nhwgc_2d_compv3_cshuffle_intrawave_128x64x16_2x2x1_32x32x8_vec4x4x4"
ROWS = f"""
from tilewright_tools.cli.demo.demo import Row, _show
from tilewright_tools.cli.problems.checks import Check

check = Check(error=2e-07, tolerance=1.0, accuracy=100.0, max_error=0.0, correct=1, total=1)
long = Row("MobileNet depthwise fp32 bwd_weight", {NAME!r}, 0.0123456, 0.05, 10**10, check)
_show([long], 1024, FULL)
"""


STYLES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_terminal(columns: int, *command: str) -> list[str]:
    """Lines of a command on a terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    with subprocess.Popen(
        [sys.executable, *command], stdin=theirs, stdout=theirs, stderr=theirs, env={**environment, "TERM": "xterm"}
    ) as child:
        os.close(theirs)
        found = b""
        try:
            while part := os.read(ours, 65536):
                found += part
        except OSError:  # the end of a terminal
            pass
    os.close(ours)
    assert child.returncode == 0, found.decode()
    return [line.rstrip() for line in STYLES.sub("", found.decode()).splitlines() if line.strip()]


@pytest.mark.parametrize("columns", [80, 100, 120])
def test_the_demo_shows_problem_time_rate_ratio_and_error_beside_the_kernel(columns):
    lines = on_terminal(columns, "-c", ROWS.replace("FULL", "False"))
    assert max(map(len, lines)) <= columns
    (row,) = [line for line in lines if line.startswith("MobileNet depthwise fp32 bwd_weight")]
    assert row.split()[-4:] == ["12.3", "810", "4.05", "2e-07"]
    assert alias_of(NAME) in row
    assert NAME not in row


def test_full_names_are_shown_whole_where_they_are_wanted():
    lines = on_terminal(200, "-c", ROWS.replace("FULL", "True"))
    assert any(NAME in line for line in lines)


@pytest.mark.extended
def test_a_pipe_gets_tab_separated_values_without_boxes(cli, target):
    ran = cli("kernels", "list", "--name", "gemm_fp32_rcr*", "--limit", 2, "--target", target)
    head, *rows = ran.out.splitlines()
    assert head.split("\t") == ["kernel", "arch", "built", "registered"]
    assert len(rows) == 2
    assert all(row.startswith("gemm_fp32_rcr") and row.count("\t") == 3 for row in rows)


@pytest.mark.extended
def test_an_alias_is_taken_wherever_a_name_is(cli, target):
    (kernel,) = cli("kernels", "list", "--name", "gemm_fp32_rcr*", "--limit", 1, "--json", "--target", target).json
    name, alias = kernel["name"], alias_of(kernel["name"])
    assert cli("kernels", "show", alias, "--json", "--target", target).json["kernel"]["name"] == name
    ran = cli("run", "gemm", 40, 40, 40, "--kernel", alias, "--repeat", 1, "--json", "--target", target)
    assert ran.json["kernel"] == name, ran.err
    built = cli("kernels", "build", alias, "--json", "--target", target).json
    assert [item["name"] for item in built] == [name]
    why = cli("kernels", "explain", "gemm", 40, 40, 40, "--json", "--target", target).json
    chosen = why["candidates"][0]["kernel"]
    ran = cli("run", "gemm", 40, 40, 40, "--kernel", alias_of(chosen), "--repeat", 1, "--json", "--target", target)
    assert ran.json["kernel"] == chosen, ran.err


def test_refusals_are_grouped_by_rule_with_their_counts(cli, target):
    why = cli("kernels", "explain", "gemm", 128, 256, 512, "--json", "--target", target).json
    counts = [item["count"] for item in why["refused_by_rule"]]
    assert sum(counts) == why["refused_total"]
    assert counts == sorted(counts, reverse=True)
    told = cli("kernels", "explain", "gemm", 128, 256, 512, "--target", target).err
    first = why["refused_by_rule"][0]
    assert f"{first['count']}  {first['rule']}: {first['example']}" in told


SWEPT = f"""
from tilewright_tools.cli.console.output import table
names = ("problem", "us", "of peak", "best kernel", "tried", "failed")
rows = [("4096x4096x4096 fp8 rcr blocks 1x128", "123456.7", PEAK, {NAME!r}, "123456", "0")]
table("", names, rows, right=("us", "of peak", "tried", "failed"), spare=("tried", "of peak"))
"""


def test_a_table_that_is_too_wide_leaves_columns_out_and_says_which():
    narrow = on_terminal(80, "-c", SWEPT.replace("PEAK", "'97%'"))
    assert narrow[0].split() == ["problem", "us", "of", "peak", "best", "kernel", "failed"]
    assert narrow[1].startswith("4096x4096x4096 fp8 rcr blocks 1x128") and alias_of(NAME) in narrow[1]
    assert "no room for: tried" in " ".join(narrow[2:])
    assert max(map(len, narrow)) <= 80
    wide = on_terminal(120, "-c", SWEPT.replace("PEAK", "''"))  # nothing in that column
    assert wide[0].split() == ["problem", "us", "best", "kernel", "tried", "failed"]
    assert len(wide) == 2


def test_a_reader_that_goes_away_has_read_enough():
    listed = (
        "kernels",
        "generate",
        "--operation",
        "attention",
        "--arch",
        "gfx942",
        "--profile",
        "all",
        "--list-configs",
    )
    words = ("-m", "tilewright_tools.cli", *listed)  # more than a pipe holds
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        child.stdout.readline()
        child.stdout.close()
        told = child.stderr.read()
    assert (child.returncode, b"Traceback" in told) == (0, False), told


@pytest.mark.parametrize("columns", [80, 120])
def test_the_readme_shows_the_demo_as_it_is(columns):
    page = (Path(__file__).resolve().parents[2] / "README.md").read_text("utf-8")
    screens = re.findall(r"^\$ tilewright demo[^\n]*\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (screen,) = [text for text in screens if columns - 40 < max(map(len, text.splitlines())) <= columns]
    shown = on_terminal(columns, "-c", ROWS.replace("FULL", "False"))
    title, names, *rows, verdict = screen.splitlines()
    assert (title, names.split()) == (shown[0], shown[1].split())
    for row in rows:
        problem, kernel, *figures = re.split(r" {2,}", row.strip())
        assert re.fullmatch(r"@[0-9a-f]{8} \w+…", kernel) and problem.startswith("fp32 ")
        assert len(figures) == len(re.split(r" {2,}", names.strip())) - 2
        assert all(float(figure) > 0 for figure in figures)
    assert re.match(rf"OK: {len(rows)} of {len(rows)} results agree with float64 NumPy, in", verdict)


def test_an_explanation_is_read_at_80_columns(target):
    words = ("explain", "gemm", "128", "256", "512", "--target", target, "--top", "5")
    lines = on_terminal(80, "-m", "tilewright_tools.cli", *words)
    assert all(len(line) <= 80 for line in lines if "asking every kernel" not in line)
    told = "\n".join(lines)
    assert "gemm 128x256x512 fp32 rcr on cpu:0 (" in told
    assert re.search(r"\d+ candidates considered; \d+ kernels refused", told)
    assert re.search(r"^1 +@[0-9a-f]{8} .*\d+\.\d +(model|measured|neighbours|learned)", told, re.MULTILINE)
    assert re.search(r"^runner-up @[0-9a-f]{8}: ", told, re.MULTILINE)
    assert re.search(r"^decided by auto: ", told, re.MULTILINE)


@pytest.mark.parametrize("words", [("health", "--ready"), ("status",), ("sessions",), ("top", "--once", "-i", "0.5")])
def test_a_server_is_watched_at_80_columns(target, words):
    a = np.ones((8, 8), np.float32)
    with tw.connect(target, launch="server", name="a name of some length") as client:
        plan = client.plan_gemm(a, a)
        ended = threading.Event()

        def work() -> None:
            while not ended.wait(0.01):
                plan(a, a)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            lines = on_terminal(80, "-m", "tilewright_tools.cli", *words, "--target", target)
        finally:
            ended.set()
            thread.join()
    told = "\n".join(lines)
    assert all(len(line) <= 80 for line in lines), told
    if words[0] == "sessions":
        row = next(line.split() for line in lines if "uid:" in line)
        assert row[0] == f"uid:{os.getuid()}"
        assert row[1] == f"pid:{os.getpid()}", "words are not broken"
        assert "no room for: bindings, plans" in told
    if words[0] == "top":
        (row,) = (line.split() for line in lines if re.match("@[0-9a-f]{8} ", line))
        assert float(row[-3]) > 0 and row[-1].endswith("%"), row
    if words[0] == "status":
        assert re.search(r"^gemm +\d+ +\d+ +\d+/\d+ ", told, re.MULTILINE)


def test_an_explanation_as_json_has_sources_and_the_runner_up(cli, target):
    why = cli("explain", "gemm", 128, 256, 512, "--json", "--target", target).json
    first, second = why["candidates"][:2]
    assert first["source"] in ("model", "measured", "neighbours", "learned")
    assert first["modelled_seconds"] > 0
    assert why["runner_up"]["kernel"] == second["kernel"]
    if first["source"] == second["source"] == "model":
        slower = second["predicted_seconds"] / first["predicted_seconds"] - 1
        assert why["runner_up"]["slower_by"] == pytest.approx(slower)


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        (0, ("kernels", "list", "--sets")),
        (1, ("kernels", "validate", '{"dtype_a": "fp32", "tile": [97, 3, 7]}', "--operation", "gemm")),
        (1, ("kernels", "build", "--config", '{"dtype_a": "fp32", "tile": [97, 3, 7]}', "--operation", "gemm")),
        (2, ("run", "gemm", 8, 8, 8, "--kernel", "nobody")),
        (2, ("run", "gemm", 8, 8, 8, "--dtype", "fp7")),
        (2, ("kernels", "list", "--arch", "gfx1")),
        (2, ("perf", "best", "--arch", "gfx1")),
        (2, ("perf", "list", "--arch", "gfx1")),
        (4, ("run", "gemm", 8, 8, 8, "--device", "cuda:7")),
    ],
)
def test_exit_codes_are_those_of_the_page(code, arguments, cli, target):
    assert cli(*arguments, "--target", target).code == code


def test_no_server_is_exit_code_three(cli, tmp_path):
    assert cli("kernels", "list", "--sets", "--target", f"unix:{tmp_path}/nobody").code == 3


@pytest.mark.parametrize("columns", [80, pytest.param(120, marks=pytest.mark.extended)])
def test_an_operation_is_described_within_the_width_of_the_terminal(columns):
    lines = on_terminal(columns, "-m", "tilewright_tools.cli", "describe", "gemm")
    assert max(map(len, lines)) <= columns
    text = " ".join(" ".join(lines).split())
    assert "First factor." in text
    assert "|---" not in text
