"""The place that a result is to appear at: judged before any work is done for it, filled by one rename."""

import errno
import os
from pathlib import Path

from weighbridge.registry import errors
from weighbridge.registry.disk import translate
from weighbridge.registry.refs import shown


def free(target: Path) -> None:
    """See that a folder can appear here; one that is here already is not looked into.

    Raises ConflictError where a link or a file stands here or in the way, DeniedError where nothing may be made.
    """
    target = Path(os.path.abspath(target))  # noqa: PTH100 - a link stays as it is named
    if target.is_symlink():
        raise errors.ConflictError(
            f"{shown(str(target))} is a link", why="a result is a folder of its own", fix="name another target"
        )
    if target.is_dir():
        return
    if os.path.lexists(target):
        raise errors.ConflictError(f"{shown(str(target))} is a file", fix="name a folder that is not there yet")
    above = next(one for one in target.parents if os.path.lexists(one))
    if not above.is_dir():
        code = errno.ENOTDIR
    elif not os.access(above, os.W_OK | os.X_OK):
        code = errno.EROFS if os.statvfs(above).f_flag & os.ST_RDONLY else errno.EACCES
    else:
        return
    what = f"{shown(str(target))} cannot be written"
    raise translate(OSError(code, os.strerror(code), os.fspath(above)), what)


def appear(made: Path, target: Path) -> None:
    """Let a finished folder appear under its name, which is free or an empty folder. Raises ConflictError, OSError."""
    try:
        made.rename(target)
    except OSError as error:
        if error.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
            raise
        raise errors.ConflictError(
            f"{shown(str(target))} was made by somebody else in the meantime", fix="name another folder, or remove it"
        ) from error
