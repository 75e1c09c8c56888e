"""What somebody asked of `registry push`, and the command that asks it again in other words."""

import shlex
from pathlib import Path
from typing import Any, NamedTuple

from weighbridge.registry.refs import shown

_FLAGS = ("share", "again", "adopt")


class Wish(NamedTuple):
    """The words of one command; `allowed` are findings' codes with the reasons to publish in spite of them."""

    path: Path
    name: str | None = None
    kind: str | None = None
    ema: str = "keep"
    allowed: tuple[tuple[str, str], ...] = ()
    share: bool = False
    again: bool = False
    adopt: bool = False
    remote: str | None = None
    config: str | None = None

    def command(self, **other: Any) -> str:
        """Return the whole command with some words changed, ready to be pasted into a shell."""
        wish = self._replace(**other)
        place = str(wish.path)
        words = ["registry", "push", f"./{place}" if place.startswith("-") else place]
        for option, value in (("--name", wish.name), ("--kind", wish.kind)):
            words += [option, value] if value is not None else []
        words += ["--ema", wish.ema] if wish.ema != "keep" else []
        words += [f"--{flag}" for flag in _FLAGS if getattr(wish, flag)]
        for code, _ in wish.allowed:
            words += ["--allow", code]
        words += ["--reason", wish.allowed[0][1]] if wish.allowed else []
        for option, value in (("--remote", wish.remote), ("--config", wish.config)):
            words += [option, value] if value is not None else []
        return shown(shlex.join(words))
