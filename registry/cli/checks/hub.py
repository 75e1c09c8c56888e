"""Checks of a Hub: that it answers, who we are there, what the token may do, and how large files would travel."""

import time
from collections.abc import Iterator
from typing import Final

from weighbridge.config.settings import RemoteSettings
from weighbridge.registry.cli.checks.check import FAIL, OK, WARN, Check
from weighbridge.registry.cli.output import span
from weighbridge.registry.errors import DeniedError, WeighbridgeError
from weighbridge.registry.remotes import commits
from weighbridge.registry.remotes.protocol import Remote

_SKEW: Final = 60.0


def check(opened: Remote, remote: RemoteSettings, *, write: bool, needed: bool) -> Iterator[Check]:
    """Yield what is found about a Hub. Raises what the Hub raises when it does not answer at all."""
    name, title = f"remote-{remote.name}", f"{remote.name} {remote.url}"
    hub = commits.of(opened)
    assert hub is not None
    began = time.monotonic()
    names = hub.catalogue({}).heads
    taken = (time.monotonic() - began) * 1000
    yield Check(OK, name, f"{title} answers ({taken:.0f} ms), {len(names)} names")
    renamed = [f"{one} in {hub.called(one)}" for one in sorted(names) if hub.called(one) != one]
    if renamed:
        words = f"{title} has repositories that were renamed: {', '.join(renamed[:5])}; their versions keep their names"
        yield Check(OK, f"{name}-renamed", words)
    if write:
        yield _writing(hub, name, title, next(iter(names), None), needed=needed)
    skew = hub.now() - time.time()
    if abs(skew) > _SKEW:
        side = "ahead of" if skew > 0 else "behind"
        words = f"the clock of {remote.name} is {span(abs(skew))} {side} this machine's"
        yield Check(WARN, f"{name}-clock", words, "timedatectl set-ntp true")


def _writing(hub: commits.CommitRemote, name: str, title: str, sample: str | None, *, needed: bool) -> Check:
    """Say whether the token may write, and how; nothing is written for it."""
    try:
        words = hub.may_write(sample)
    except DeniedError as error:
        told = f"{title} is read-only for you: {error.why or error.what}" + ("" if needed else "; pull works")
        return Check(FAIL if needed else WARN, f"{name}-write", told, error.fix or "use a token with write access")
    except WeighbridgeError as error:
        return Check(FAIL if needed else WARN, f"{name}-write", f"{error.what}: {error.why}", error.fix or "")
    return Check(OK, f"{name}-write", f"{title} is writable for you ({words})")
