"""What one check of `registry doctor` found."""

from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from weighbridge.registry.shell import translate

OK: Final = "ok"
WARN: Final = "warn"
FAIL: Final = "FAIL"


class Check(NamedTuple):
    """One line of the report; `name` is stable for scripts, `fix` is what to type."""

    status: str
    name: str
    message: str
    fix: str | None = None


def guarded(name: str, look: Callable[[], Iterable[Check]]) -> Iterator[Check]:
    """Yield what a check found; one that breaks becomes a failure of its own and stops none of the others."""
    try:
        yield from look()
    except Exception as error:  # noqa: BLE001 - a report with a hole is worth more than none
        known = translate(error)
        yield Check(FAIL, name, f"{known.what}: {known.why}" if known.why else known.what, known.fix)
