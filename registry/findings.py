"""Every finding code in one table, from which docs/findings.md is printed, and what findings add up to."""

from collections.abc import Iterable
from typing import Final, NamedTuple

from weighbridge.registry.types import Finding, Outcome, Severity


class Code(NamedTuple):
    """One code: its usual severity, what it means, and how it may be treated."""

    severity: Severity
    meaning: str
    waits: bool = False
    """The folder is not finished: the outcome is `wait`, not `refuse`."""
    integrity: bool = False
    """Bytes or structure are wrong; `registry allow` cannot allow it."""


CODES: Final[dict[str, Code]] = {
    "file-extra": Code("block", "a file that the manifest does not list", integrity=True),
    "file-missing": Code("block", "a file that the manifest lists is not there", integrity=True),
    "file-size": Code("block", "a file is longer or shorter than the manifest says", integrity=True),
    "file-damaged": Code("block", "a file's sha256 is not the manifest's", integrity=True),
}

_ORDER: Final[tuple[Outcome, ...]] = ("accept", "warn", "wait", "refuse")


def outcome(findings: Iterable[Finding]) -> Outcome:
    """Return the strictest outcome of some findings, in the order refuse, wait, warn, accept."""
    worst = 0
    for finding in findings:
        code = CODES[finding.code]
        if code.waits:
            worst = max(worst, 2)
        elif finding.severity == "block":
            worst = 3
        elif finding.severity == "warn":
            worst = max(worst, 1)
    return _ORDER[worst]


def strictest(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the strictest of several outcomes; accept for none."""
    return max(outcomes, key=_ORDER.index, default="accept")


def finding(
    code: str, subject: str, message: str, fix: str | None = None, *, severity: Severity | None = None, **data: object
) -> Finding:
    """Return a finding of a listed code with that code's usual severity. Raises KeyError for an unlisted code."""
    return Finding(
        code=code, severity=severity or CODES[code].severity, subject=subject, message=message, fix=fix, data=dict(data)
    )
