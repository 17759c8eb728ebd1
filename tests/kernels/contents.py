"""Contents of sources as records of passed tests know them: prose in Python's is none of them."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

__all__ = ["content"]


def content(path: Path) -> bytes:
    """Return the bytes of a file; for Python, those without comments and docstrings, whatever Python reads it."""
    if path.suffix != ".py":
        return path.read_bytes()
    text = path.read_text(encoding="utf-8")
    lines: dict[int, str] = dict(enumerate(text.split("\n"), 1))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            _keep(lines, row, lines[row][:column].rstrip())
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            assert node.end_lineno is not None
            alone = not lines[node.lineno].encode()[: node.col_offset].strip()
            if alone and not lines[node.end_lineno].encode()[node.end_col_offset :].strip():
                for row in range(node.lineno, node.end_lineno + 1):
                    lines.pop(row)
    return "\n".join(lines.values()).encode()


def _keep(lines: dict[int, str], row: int, text: str) -> None:
    """Keep ``text`` of a line; nothing of it, if nothing is left."""
    if text:
        lines[row] = text
    else:
        lines.pop(row)
