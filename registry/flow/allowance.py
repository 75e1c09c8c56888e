"""Which findings people may allow: a word that is no code is answered with the code that was probably meant."""

from typing import Final

from weighbridge.config.nearest import nearest
from weighbridge.registry import errors, findings
from weighbridge.registry.refs import shown

QUARANTINE: Final = ("job-quarantined",)
"""What the daemon lifts besides: a job that failed again and again is tried once more."""


def check_code(code: str, also: tuple[str, ...] = ()) -> None:
    """Check that a person may allow findings of this code; `also` are codes that the caller can lift besides.

    Raises UsageError for what is no code, DeniedError for a code that stands for broken bytes, secrets or a folder that
    is not finished.
    """
    known = findings.CODES.get(code)
    if known is None:
        near = nearest(code, findings.CODES)
        raise errors.UsageError(
            f"'{shown(code)}' is no finding",
            why="an allowance names a code as `registry inspect` and `registry status` print it",
            fix=f"did you mean {near}?" if near else "docs/findings.md lists the codes",
        )
    if code not in also and not findings.may_be_allowed(code):
        raise errors.DeniedError(
            f"{code} cannot be allowed",
            why=f"it means: {known.meaning}",
            fix="mend the artifact and save it again" if not known.waits else "wait until it is finished",
        )
