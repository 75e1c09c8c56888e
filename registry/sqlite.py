"""The home of sqlite_utils: it is loaded without numpy and pandas.

sqlite_utils imports both where they are installed, to know their types as columns. We hand it plain values, and numpy
alone costs as much processor time as all else that a command of ours imports.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def _absent(*names: str) -> Iterator[None]:
    """Let modules that are not loaded yet look as if they were not installed."""
    hidden = [name for name in names if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # what the import system itself stores for "not there"
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


with _absent("numpy", "pandas"):
    from sqlite_utils import Database
    from sqlite_utils.migrations import Migrations

__all__ = ["Database", "Migrations"]
