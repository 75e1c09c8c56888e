"""What the settings of remotes ask of whatever is published there, as one policy."""

from collections.abc import Iterable, Sequence
from typing import Any

from weighbridge.adapters.plan import Allowed, Policy
from weighbridge.config.settings import RemoteSettings


def rules(remotes: Sequence[RemoteSettings], allowed: Iterable[tuple[str, str]] = ()) -> Policy:
    """Return the strictest of what remotes ask for; `allowed` are findings' codes that people allowed, with reasons."""
    return Policy(
        paths=_strictest((one.paths for one in remotes), ("keep", "rewrite", "block")),
        unknown_license=_strictest((one.unknown_license for one in remotes), ("note", "warn", "block")),
        deny_licenses=tuple(sorted({word for one in remotes for word in one.deny_licenses})),
        names=all(one.names for one in remotes),
        remote_code=_strictest((one.remote_code for one in remotes), ("allow", "block")),
        allowed=tuple(Allowed(code=code, reason=reason) for code, reason in allowed),
    )


def _strictest(values: Iterable[str], order: Sequence[str]) -> Any:
    return max(values, key=order.index)
