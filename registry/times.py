"""Moments as the formats spell them: ISO 8601 in UTC with `Z`."""

from datetime import UTC, datetime


def spelled(seconds: float) -> str:
    """Return a moment (seconds since 1970) with milliseconds, such as `2026-11-29T16:42:10.000Z`."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def seconds(text: str | None) -> float | None:
    """Return seconds since 1970 of an ISO 8601 moment, or None when the text is none; without a zone it is UTC."""
    if not text:
        return None
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None
