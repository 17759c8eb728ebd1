"""A compile helper that never ends with its first source: it notes its process and works on."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tilewright_server.build.workers.worker_loop import serve


class Endless:
    def identity(self) -> Mapping[str, Any]:
        return {"state": "ok"}

    def compile_source(self, text: bytes, name: str, options: Sequence[str]) -> tuple[bytes | None, str]:
        Path(name).write_text(str(os.getpid()))
        while True:
            time.sleep(600)


if __name__ == "__main__":
    sys.exit(serve(Endless(), sys.argv[1:]))
