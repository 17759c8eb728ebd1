"""`python -m tilewright_tools.cli`."""

from __future__ import annotations

from tilewright_tools.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
