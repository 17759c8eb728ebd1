"""The closing lines of pytest's runs in a log, then one line in the same form that sums them up.

python scripts/closing_line.py LOG
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

CLOSING = re.compile(r"^(?:=+ )?(\d+ \w+.*) in ([0-9.]+)s")
COUNT = re.compile(r"(\d+) (\w+)")


def main(log: Path) -> int:
    runs = [match for line in log.read_text(errors="replace").splitlines() if (match := CLOSING.match(line))]
    if not runs:
        sys.stdout.write("ci: pytest printed no closing line\n")
        return 1
    total: Counter[str] = Counter()
    for run in runs:
        sys.stdout.write(run.string + "\n")
        for count, outcome in COUNT.findall(run[1]):
            total[{"error": "errors", "warning": "warnings"}.get(outcome, outcome)] += int(count)
    total.pop("deselected", None)  # each run leaves out what the other has
    seconds = sum(float(run[2]) for run in runs)
    sys.stdout.write(f"{', '.join(f'{count} {outcome}' for outcome, count in total.items())} in {seconds:.2f}s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
