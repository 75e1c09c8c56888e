"""`registry status`: what the daemon is doing and what it waits for; its last word when it is down."""

import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Final

import click

from weighbridge.registry import control
from weighbridge.registry.cli import context, options
from weighbridge.registry.cli.output import Output, size, span
from weighbridge.registry.errors import UnreachableError
from weighbridge.registry.shell import load

SCHEMA: Final = "weighbridge/status/1"
EXPORT: Final = "status.json"
_LISTED: Final = 12
_BUSY: Final = ("settling", "staged", "sealed", "claimed", "uploading", "committed", "announced")
_STYLES: Final = {"block": "red", "warn": "yellow", "note": "dim"}


@click.command("status")
@options.config
@options.listing
def status(config: str | None, out: Output) -> int:
    """Show the daemon, its watch, its queue and every problem with its fix.

    While the daemon is down its last exported status is shown, with its age. Ends 0 while the daemon runs, 6 when it
    does not.
    """
    daemon = context.settings(config).daemon
    live = True
    try:
        told: Any = control.ask(daemon.socket, "status")
    except UnreachableError as error:
        told = _exported(daemon)
        live = False
        if told is None:
            raise
        told["daemon"]["state"] = "down"
        out.talk(f"the daemon is not running: {error.why}; {error.fix}", "yellow")
    if out.as_json:
        out.json(told)
    elif out.fmt == "name":
        for problem in told["problems"]:
            out.say(str(problem["path"] or problem["subject"]))
    else:
        for title, what in lines(told, wide=out.fmt == "wide"):
            out.say(f"{title:<9}{what}" if title else f"         {what}")
        _problems(told, out)
    return 0 if live else UnreachableError.exit_code


def _exported(daemon: Any) -> Any:
    """Return the newest exported status that may be read, or None."""
    found = []
    for folder in (daemon.socket.rpartition("/")[0], daemon.state):
        try:
            with open(f"{folder}/{EXPORT}", "rb") as stream:  # noqa: PTH123 - on the start-up path
                told = load("json:loads")(stream.read())
        except (OSError, ValueError):
            continue
        if isinstance(told, dict) and told.get("schema") == SCHEMA:
            found.append(told)
    return max(found, key=lambda told: str(told.get("written_at")), default=None)


def lines(told: Mapping[str, Any], *, wide: bool = False) -> Iterator[tuple[str, str]]:
    """Yield the lines of the one-screen view, each with its title."""
    about, database = told["daemon"], told["database"]
    up = span(about["uptime_seconds"])
    if about["state"] == "running":
        whole = f"running (pid {about['pid']}, up {up}, version {about['version']})"
    else:
        whole = f"down; this is how it was {_ago(told['written_at'])} ago (version {about['version']})"
    condition = "ok" if database["ok"] else f"{database['error']}"
    yield "daemon", f"{whole}   database {condition}, {size(database['bytes'])}"
    yield "watch", _watch(told)
    for root in told["watch"]:
        if wide or root["mode"] == "scan" or root["missing"]:
            how = "not there" if root["missing"] else f"{root['mode']}: {root['why']}" if root["why"] else root["mode"]
            yield "", f"{root['root']}   {root['folders']} folders, {how}"
    yield "queue", _queue(told["queue"])
    for job in [job for job in told["jobs"] if job["state"] != "waiting"][: None if wide else 6]:
        ref = f"{job['name']}@v{job['n']}" if job["n"] else job["name"] or job["path"]
        yield "", f"{job['state']:<10} {ref}   {size(job['size'])}"
    waiting = told["folders"]
    for folder in waiting[: None if wide else 6]:
        yield "", f"unfinished {folder['path']}   {folder['reason']}, {span(folder['seconds'])}"
    if len(waiting) > 6 and not wide:
        yield "", f"and {len(waiting) - 6} more (-o wide)"
    if told["skipped"]["reasons"]:
        counts = ", ".join(f"{count} {reason}" for reason, count in sorted(told["skipped"]["reasons"].items()))
        yield "set aside", f" {counts}   {size(told['skipped']['bytes'])}"
    merges = told.get("merges") or {"listed": []}
    for number, merge in enumerate(merges["listed"][: None if wide else 6]):
        yield "" if number else "merges", _merge(merge)
    if len(merges["listed"]) > 6 and not wide:
        yield "", f"and {len(merges['listed']) - 6} more (-o wide)"
    yield "remotes", "   ".join(_remote(remote) for remote in told["remotes"]) or "none"
    for delivery in told["deliveries"][: None if wide else 6]:
        why = f": {delivery['reason']}" if delivery["reason"] else ""
        yield "", f"{delivery['state']:<10} {delivery['name']}@v{delivery['n']} to {delivery['remote']}{why}"


def _watch(told: Mapping[str, Any]) -> str:
    roots = told["watch"]
    modes = sorted({root["mode"] for root in roots})
    counted = f"{len(roots)} {'root' if len(roots) == 1 else 'roots'}, {sum(r['folders'] for r in roots)} folders"
    last = max((root["last_scan_at"] for root in roots if root["last_scan_at"]), default=None)
    scan = told["scan"]
    parts = [f"{counted}, {' and '.join(modes) or 'nothing'}"]
    if last is not None:
        parts.append(f"last scan {_ago(last)} ago")
    if scan is not None:
        parts.append(f"a full one takes {scan['seconds']:.2f} s, overflows {scan['overflows']}")
    return "   ".join(parts)


def _queue(counts: Mapping[str, int]) -> str:
    busy = {state: counts[state] for state in _BUSY if counts.get(state)}
    words = [f"{count} {state}" for state, count in busy.items()]
    words += [f"{counts[state]} {state}" for state in ("waiting", "blocked", "quarantined") if counts.get(state)]
    if counts.get("unfinished"):
        words.append(f"{counts['unfinished']} waiting for files")
    return f"{', '.join(words) or 'nothing to do'}   {counts.get('done', 0)} done"


def _merge(merge: Mapping[str, Any]) -> str:
    where = f" by {merge['executor']}" if merge["executor"] else ""
    job = f" job {merge['job']}" if merge["job"] and merge["executor"] == "slurm" else ""
    why = f": {merge['reason']}" if merge["reason"] else ""
    return f"{merge['state']:<10} {merge['ref']} to {merge['dtype']}{where}{job}{why}"


def _remote(remote: Mapping[str, Any]) -> str:
    if remote["ok"] is None:
        return f"{remote['name']} not asked yet"
    if remote["ok"]:
        return f"{remote['name']} ok {remote['milliseconds']:.0f} ms"
    return f"{remote['name']} FAILS: {remote['error']}"


def _problems(told: Mapping[str, Any], out: Output) -> None:
    problems = [p for p in told["problems"] if p["severity"] != "note"]
    if not problems:
        return
    out.say("problems")
    for problem in problems[: None if out.fmt == "wide" else _LISTED]:
        ref = f"{problem['name']}@v{problem['n']}" if problem["n"] else problem["path"] or problem["subject"]
        since = f"  {_ago(problem['since'])}" if problem["since"] else ""
        state = problem.get("state") or problem["severity"]
        word = out.paint(state, _STYLES[problem["severity"]])
        out.say_painted(f"  {word}  ", f"{ref}{since}  {problem['code']}: {problem['message']}")
        if problem["fix"]:
            out.say(f"           fix: {problem['fix']}")
    if len(problems) > _LISTED and out.fmt != "wide":
        out.say(f"  and {len(problems) - _LISTED} more (-o wide)")


def _ago(moment: str) -> str:
    """Return how long ago an ISO moment of ours was."""
    return span(time.time() - datetime.fromisoformat(moment).timestamp())
