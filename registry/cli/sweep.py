"""`registry sweep`: what the daemon does now and then, for a team without one."""

from typing import Final

import click
import msgspec

from weighbridge.config.values import Fault, duration
from weighbridge.registry import layout
from weighbridge.registry.cli import context, fresh, options
from weighbridge.registry.cli.leftovers import Left, left
from weighbridge.registry.cli.output import Output, span
from weighbridge.registry.errors import UsageError, WeighbridgeError
from weighbridge.registry.flow import collect
from weighbridge.registry.flow.claims import from_copy
from weighbridge.registry.flow.marker import check_writer
from weighbridge.registry.refs import shown

SCHEMA: Final = "weighbridge/sweep/1"
LEAST: Final = 86_400.0
"""Seconds: what is younger may be held by a daemon, which touches it each hour and may be down for a night."""


@click.command("sweep")
@click.option("--older-than", metavar="SPAN", help="How long nothing changed in a copy, such as 7d [default: 2d].")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed and given up.")
@options.remote
@options.config
@options.talking
def sweep(*, older_than: str | None, dry_run: bool, remote: str | None, config: str | None, out: Output) -> None:
    """Remove what killed publishers left on a remote, and end what they began; a daemon does so by itself.

    Unfinished uploads and copies go, superseded snapshots of the catalogue, and files under numbers that were given up.
    A number that was claimed seven days ago by the store's clock and never finished is given up; whoever still has the
    files publishes them under the next one. One whose files all lie there stays, and what finishes it is named. No
    version is touched, and on a mirror no number is given up. Ends 4 when the credentials do not allow all of it.
    """
    age = _age(older_than)
    chosen = context.choose_remote(context.settings(config), remote)
    failed: list[WeighbridgeError] = []
    with fresh.opened(chosen, out) as found:
        check_writer(found.registry)
        fresh.catch_up(found)
        lying = Left(0, 0)
        try:
            lying = left(found.remote, age)
        except WeighbridgeError as error:  # what is only counted to be shown keeps nobody from the work
            failed += [error] if dry_run else []
        if dry_run:
            done = collect.foreseen(found.remote, found.registry, found.catalog, failed=failed.append)
            done = msgspec.structs.replace(done, staged=lying.copies)
        else:
            done = collect.sweep(
                found.remote, found.registry, found.catalog,
                by=fresh.writer().daemon, older_than=age, failed=failed.append,
            )  # fmt: skip
            fresh.catch_up(found)
    _tell(chosen.name, lying, done, out, dry_run=dry_run)
    if failed:
        raise failed[0]


def _age(text: str | None) -> float:
    if text is None:
        return collect.LEFTOVER_AFTER
    try:
        age = duration(text)
    except Fault as fault:
        raise UsageError(f"--older-than: {fault.message}", fix=fault.fix or "write 1d or 7d") from fault
    if age < LEAST:
        raise UsageError(
            f"--older-than {shown(text)} is too short",
            why="a daemon that is down for a night still needs what it staged, and its source may be gone",
            fix="--older-than 1d",
        )
    return age


def _tell(remote: str, lying: Left, done: collect.Swept, out: Output, *, dry_run: bool) -> None:
    if out.as_json:
        out.json(
            {
                "schema": SCHEMA,
                "remote": remote,
                "dry_run": dry_run,
                "staged": done.staged,
                "bytes": lying.bytes,
                "snapshots": done.snapshots,
                "voided": [f"{name}@v{n}" for name, n in done.voided],
                "whole": [f"{name}@v{n}" for name, n in done.whole],
                "damaged": [f"{name}@v{n}" for name, n in done.damaged],
                "cleared": done.cleared,
            }
        )
        return
    for name, n in done.voided:
        verb = "would be" if dry_run else "was"
        out.say(f"{name}@v{n} {verb} given up: nobody finished it in {span(collect.DEAD_AFTER)}")
    for name, n in done.whole:
        out.talk(f"{name}@v{n} was never finished, though all its files lie there", "yellow")
        out.talk(
            f"  fix: registry verify {name}@v{n} --mend publishes it; registry withdraw takes it back then", "yellow"
        )
    for name, n in done.damaged:
        key = layout.claim(name, n)
        out.talk(f"{name}@v{n} was never finished, and {key} is damaged: nobody can tell what it lacks", "yellow")
        out.talk(f"  fix: {from_copy(key)}", "yellow")
    words = [str(lying._replace(copies=done.staged))]
    words += [f"{done.snapshots} superseded snapshots"] if done.snapshots else []
    words += [f"{done.cleared} files of numbers that were given up"] if done.cleared else []
    numbers = "1 number" if len(done.voided) == 1 else f"{len(done.voided)} numbers"
    went, given_up = ("would go", "would be given up") if dry_run else ("removed", "given up")
    out.say(f"{remote}: {', '.join(words)} {went}; {numbers} {given_up}")
