"""From the measurements of ``cuda_groups.py`` to the selections that the plugin ships.

    python bench/lab/ship_groups.py groups.jsonl

Of every problem that was measured the rows are replaced; those of other problems stay as they are.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tilewright_kit.loading.loader import PluginManager
from tilewright_kit.selection.measurements import Measurement
from tilewright_server.engine.measurements.exchange import read_file
from tilewright_tools.tuning.export import shipped_lines

FOLDER = Path(__file__).resolve().parents[2] / "plugins" / "grouped_conv" / "tilewright_grouped_conv" / "measured"
OPERATIONS = ("conv", "conv_backward_data", "conv_backward_weight")


def replaced(known: Path, rows: Sequence[Measurement]) -> tuple[list[str], int]:
    """The lines of a file of measurements, those of the rows' problems replaced by the rows'; and how many are new."""
    plugins = PluginManager()
    plugins.load_entry_points()
    new, refused = shipped_lines(rows, plugins.operations)
    if refused:
        print(f"{refused} measurements are of kernels that today's rules refuse")
    measured = {row.point for row in rows}
    lines = zip(known.read_text("utf-8").splitlines(), read_file(known), strict=True)
    return [*(line for line, row in lines if row.point not in measured), *new], len(new)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurements", type=Path, help="what cuda_groups.py has written")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the selections to change")
    given = parser.parse_args()
    found = read_file(given.measurements)
    for operation in OPERATIONS:
        file = given.folder / f"h200_{operation}.jsonl"
        rows = [row for row in found if row.operation == operation]
        if rows:
            lines, new = replaced(file, rows)
            file.write_text("".join(f"{line}\n" for line in lines), "utf-8")
            print(f"{file.name}: {new} lines are new, {len(lines) - new} stay")


if __name__ == "__main__":
    main()
