"""True if a directory is ours alone: what lies in the cache is code that the server will run."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from tilewright_kit.types.errors import AccessError
from tilewright_server.build.cache.files import io_error

__all__ = ["require_private"]


def require_private(path: Path) -> Path:
    """Create ``path`` (mode 0700) or check it; returns it without symbolic links.

    Raises ``AccessError`` if it, or a link that leads to it, belongs to another user, if others may write to it, or if
    a folder above it lets anybody replace it.
    """
    path = path.absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        link = path.lstat()
        real = path.resolve(strict=True)
        status = real.stat()
    except FileExistsError:
        raise _refusal(path, "it is not a directory", "name a directory") from None
    except OSError as error:
        raise io_error(error, "opening its directory") from error
    user = os.geteuid()
    if link.st_uid != user or status.st_uid != user:
        raise _refusal(path, "it belongs to another user", "use a directory of your own")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _refusal(path, "other users can write to it", f"chmod 700 {path}")
    for above in real.parents:
        mode = above.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise _refusal(path, "anybody can replace a folder above it", f"chmod o-w {above}")
    return real


def _refusal(path: Path, why: str, fix: str) -> AccessError:
    return AccessError(
        f"the kernel cache refuses its directory: {why}",
        field="cache_dir",
        value=str(path),
        rule="cache_private",
        fix=fix,
    )
