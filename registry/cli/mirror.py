"""`registry mirror`: copy a name, or one of its versions, to another remote, by hand."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
import msgspec

from weighbridge.config.places import cache_dir
from weighbridge.config.settings import RemoteSettings
from weighbridge.registry.cli import context, fresh, options
from weighbridge.registry.cli.catalogue import complete
from weighbridge.registry.cli.output import Output, aimed, size
from weighbridge.registry.cli.progress import Follower, following
from weighbridge.registry.errors import DivergedError, NotFoundError, UsageError, WeighbridgeError
from weighbridge.registry.flow import follow, place, sync, unnamed
from weighbridge.registry.flow.follow import Carried, Told
from weighbridge.registry.flow.marker import check_writer
from weighbridge.registry.refs import shown, split
from weighbridge.registry.remotes.protocol import Remote
from weighbridge.registry.types import FileEntry, Registry

SCHEMA: Final = "weighbridge/mirror/1"
LEFTOVER_AFTER: Final = 7 * 86_400.0
"""Seconds after which what a cut copy left in the cache is removed."""


@click.command("mirror")
@click.argument("ref", metavar="NAME[@vN]", shell_complete=complete)
@click.option("--to", required=True, metavar="REMOTE", help="A configured remote, a URL or a folder to copy to.")
@options.remote
@options.config
@options.talking
def mirror(*, ref: str, to: str, remote: str | None, config: str | None, out: Output) -> int:
    """Copy every version of NAME, or one, to another remote: same numbers, same manifests, same digests.

    What is said of the versions (tags, withdrawals, people's notes) comes along. Each byte is hashed on its way and
    nothing is sealed anew. Doing it again copies what is new; after a cut it goes on where it stopped. What the other
    remote holds under the same number and is something else is never touched: that ends 7. Ends 5 when the other
    remote's rules refuse a version.
    """
    settings = context.settings(config)
    source, target = context.choose_remote(settings, remote), context.choose_remote(settings, to)
    name, n, tag, _ = split(ref)
    if name is None or (tag is not None and ":" in ref):
        raise UsageError(f"'{shown(ref)}' is no name", fix="registry mirror NAME --to REMOTE, or NAME@v7")
    with fresh.opened(source, out, ref=f"{name}@v{n or 1}") as home:
        receiving = context.connect(target)
        try:
            registry = fresh.registry_of(target, receiving)
            if registry.registry == home.registry.registry:
                raise UsageError(
                    f"'{source.name}' and '{target.name}' are one and the same", fix="name another remote with --to"
                )
            check_writer(registry, receiving)
            copying = _Copying(name, source, target, home, receiving, registry, out)
            known = follow.numbers(home.remote, name)
            if n is not None and n not in known:
                raise NotFoundError(f"there is no {name}@v{n} on {source.name}", fix=f"registry ls {name}")
            carried = copying.versions(known if n is None else [n])
            told = unnamed.beside(home.remote, receiving, registry, name, settings=target)
            copying.remember(carried)
        finally:
            receiving.close()
    return tell(copying, carried, told)


class _Copying(NamedTuple):
    """One name on its way from one remote to another."""

    name: str
    source: RemoteSettings
    target: RemoteSettings
    home: fresh.Opened
    receiving: Remote
    registry: Registry
    out: Output

    def versions(self, numbers: Sequence[int]) -> list[Carried]:
        """Copy these numbers in order and say what became of each. Raises what keeps one from being copied."""
        scratch = Path(cache_dir(os.environ), "mirror")
        place.sweep_scratch(scratch, LEFTOVER_AFTER)
        with following(self.out) as follower:
            return [self._one(n, scratch, follower) for n in numbers]

    def _one(self, n: int, scratch: Path, follower: Follower) -> Carried:
        ref = f"{self.name}@v{n}"

        def begin(files: Sequence[FileEntry]) -> None:
            if not self.out.as_json:
                self.out.talk(f"{ref} -> {self.target.name}, {size(sum(file.size for file in files))}")
            follower.begin(files)

        return follow.carry(
            self.home.remote,
            self.receiving,
            self.name,
            n,
            settings=self.target,
            registry=self.registry,
            scratch=scratch,
            begin=begin,
            progress=follower.moved,
        )

    def remember(self, carried: Sequence[Carried]) -> None:
        """Bring the cache of the other remote up to what was copied, with the levels at which it was verified."""
        with suppress(OSError):
            fresh.remember_registry(self.target, self.registry.registry)
        path = Path(context.catalog_path(self.registry.registry))
        with suppress(WeighbridgeError):  # the next `ls` there repeats it
            catalog, _, _ = sync.refresh(self.receiving, path, self.registry.registry)
            known = fresh.Opened(self.target, self.receiving, self.registry, catalog)
            for one in carried:
                if one.outcome == "copied" and one.verified is not None:
                    fresh.remember(known, self.name, one.n, one.verified)
            catalog.close()


def tell(copying: _Copying, carried: Sequence[Carried], told: Told) -> int:
    """Print what was copied, and return the exit code. Raises DivergedError for tags that were moved elsewhere."""
    name, source, target, out = copying.name, copying.source, copying.target, copying.out
    refused = [one for one in carried if one.outcome == "refused"]
    if out.as_json:
        out.json(
            {
                "schema": SCHEMA,
                "name": name,
                "from": source.name,
                "to": target.name,
                "registry": copying.registry.registry,
                "versions": [_version(name, one, out.remote) for one in carried],
                **msgspec.to_builtins(told),
            }
        )
    else:
        for one in carried:
            if one.outcome not in {"copied", "there"}:
                out.talk(f"{name}@v{one.n}: {one.outcome}" + (f", {one.why}" if one.why else ""), "yellow")
        for fix in dict.fromkeys(one.fix for one in refused if one.fix):
            out.talk(f"  fix: {fix}", "yellow")
        for tag in told.waiting:
            out.talk(f"{name}:{tag} waits there until its version is copied", "yellow")
        copied = [one for one in carried if one.outcome == "copied"]
        there = sum(one.outcome == "there" for one in carried)
        beside = (
            f"{_count(told.tags, 'tag move')}, {_count(told.notes, 'note')}, {_count(told.withdrawn, 'withdrawal')}"
        )
        out.say(
            f"{name}: {_count(len(copied), 'version')} copied to {target.name} ({size(sum(c.bytes for c in copied))}), "
            f"{there} there already; {beside}"
        )
    if told.diverged:
        raise DivergedError(
            f"{name}:{told.diverged[0]} was moved at {target.name} itself",
            why="its moves there are not those of the name's home",
            fix="move tags at the home only; nothing was changed there",
            tags=told.diverged,
        )
    if not carried:
        raise NotFoundError(f"there is nothing of {name} to copy", fix=f"registry ls {name}")
    return 5 if refused else 0


def _version(name: str, one: Carried, remote: str | None) -> dict[str, Any]:
    return {
        "ref": f"{name}@v{one.n}",
        "version": one.n,
        "outcome": one.outcome,
        "verified": one.verified,
        "bytes": one.bytes,
        "why": one.why,
        "fix": one.fix and aimed(one.fix, remote),
    }


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
