"""`python -m tilewright_server.cli`."""

from __future__ import annotations

from tilewright_server.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
