"""Checks of one remote: that it answers, may be written, keeps its promises, and how its clock and its room are."""

import errno
import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from weighbridge.config.settings import RemoteSettings, Settings
from weighbridge.registry import layout
from weighbridge.registry.cli import context
from weighbridge.registry.cli.checks.check import FAIL, OK, WARN, Check
from weighbridge.registry.cli.checks.folders import free_bytes, nearest
from weighbridge.registry.cli.checks.leftovers import unfinished
from weighbridge.registry.cli.output import size, span
from weighbridge.registry.errors import (
    DeniedError,
    ExistsError,
    IntegrityError,
    NoRegistryError,
    UsageError,
    WeighbridgeError,
)
from weighbridge.registry.flow.clone import share_blocks
from weighbridge.registry.flow.marker import check_writer, open_registry
from weighbridge.registry.remotes.protocol import Remote
from weighbridge.registry.shell import load as attribute

PROBES: Final = "_wb/probe/"
"""Where the probe objects of `doctor` lie for a moment; names never begin with `_`."""

_SKEW: Final = 60.0


def check(settings: Settings, remote: RemoteSettings, *, write: bool) -> Iterator[Check]:
    """Yield what is found about one remote, its folder first where it is one."""
    name = f"remote-{remote.name}"
    needed = any(remote.name in (rule.home, *rule.mirrors) for rule in settings.watch)
    folder = Path(remote.url) if remote.url.startswith("/") else None
    if folder is not None and not folder.is_dir():
        yield _not_begun(name, remote, folder)
        return
    opened = context.connect(remote)
    if opened.properties.commits:
        try:
            look = attribute("weighbridge.registry.cli.checks.hub:check")
            yield from look(opened, remote, write=write, needed=needed)
        finally:
            opened.close()
        return
    try:
        began = time.monotonic()
        try:
            registry = open_registry(opened, create=False)
        except NoRegistryError:
            words = "no registry yet, the first push begins it"
            yield Check(OK, name, f"{_title(remote)} answers ({(time.monotonic() - began) * 1000:.0f} ms); {words}")
        except IntegrityError as error:
            yield Check(FAIL, name, f"{error.what}: {error.why}", error.fix)
            write = False
        else:
            taken = (time.monotonic() - began) * 1000
            found = f"registry {registry.registry}, {_names(opened)} names"
            yield Check(OK, name, f"{_title(remote)} answers ({taken:.0f} ms), {found}")
            try:
                check_writer(registry)
            except UsageError as error:
                yield Check(WARN, f"{name}-format", f"{error.what}: {error.why}; pull works", error.fix)
                write = False  # not even a probe
        if remote.url.startswith("s3://"):
            bucket = attribute("weighbridge.registry.cli.checks.s3:check")
            yield from bucket(context.patient(remote), write=write, needed=needed)
        if write:
            yield from _writing(opened, name, remote, needed=needed)
        if write or not folder:
            yield from unfinished(name, remote, opened)  # of a folder the clock is asked by a file
    finally:
        opened.close()
    if folder is not None and write:
        yield from _folder(settings, name, remote, folder)


def _title(remote: RemoteSettings) -> str:
    return f"{remote.name} {remote.url}"


def _names(remote: Remote) -> int:
    return sum(1 for _ in remote.folders(layout.MODELS))


def _not_begun(name: str, remote: RemoteSettings, folder: Path) -> Check:
    parent = nearest(folder.parent) if folder.is_absolute() else folder
    if folder.exists():
        where = f" as url of [remotes.{remote.name}]" if remote.word == remote.name else ""
        return Check(FAIL, name, f"{_title(remote)} is no folder", f"name a folder{where}")
    if os.access(parent, os.W_OK | os.X_OK):
        return Check(
            WARN,
            name,
            f"{_title(remote)} is not there yet; the first push begins it",
            "if it should be there, mount its file system",
        )
    return Check(
        FAIL,
        name,
        f"{_title(remote)} is not there and {parent} is not writable for you",
        f"mount its file system, or as root: install -d -o $(id -un) {folder}",
    )


def _writing(opened: Remote, name: str, remote: RemoteSettings, *, needed: bool) -> Iterator[Check]:
    """Create a probe once, try to create it again, read it back, remove it; look at the clock meanwhile."""
    key = f"{PROBES}{secrets.token_hex(8)}"
    body = secrets.token_bytes(32)
    try:
        opened.create(key, body)
    except DeniedError as error:
        yield Check(
            FAIL if needed else WARN,
            f"{name}-write",
            f"{_title(remote)} is read-only for you: {error.why or error.what}" + ("" if needed else "; pull works"),
            error.fix or "ask its owner for write access",
        )
        return
    try:
        yield from _promises(opened, name, remote, key, body)
        skew = opened.now() - time.time()
    finally:
        _tidy(opened, key)
    if abs(skew) > _SKEW:
        side = "ahead of" if skew > 0 else "behind"
        yield Check(
            WARN,
            f"{name}-clock",
            f"the clock of {remote.name} is {span(abs(skew))} {side} this machine's",
            "timedatectl set-ntp true (numbers and tags do not depend on it, ages do)",
        )


def _promises(opened: Remote, name: str, remote: RemoteSettings, key: str, body: bytes) -> Iterator[Check]:
    if opened.read(key) != body:
        yield Check(FAIL, f"{name}-write", f"{_title(remote)} gives other bytes back than were written", "replace it")
        return
    try:
        opened.create(key, body[::-1])
    except ExistsError:
        yield Check(OK, f"{name}-write", f"{remote.name} is writable, and nothing there can be overwritten")
    else:
        yield Check(
            WARN,
            f"{name}-write",
            f"{_title(remote)} is writable but lets a second writer overwrite: use it with one writer only",
            "use a store with conditional writes",
        )


def _tidy(opened: Remote, key: str) -> None:
    """Remove the probe; a role that may not delete leaves 32 bytes behind, which harm nobody."""
    try:
        opened.delete(key)
    except WeighbridgeError:
        return


def _folder(settings: Settings, name: str, remote: RemoteSettings, folder: Path) -> Iterator[Check]:
    """Look at a directory remote: hard links, room, and whether bundles can be cloned instead of copied."""
    if not os.access(folder, os.W_OK | os.X_OK):
        return
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder) as place:
        one, two = Path(place, "one"), Path(place, "two")
        one.write_bytes(b"probe")
        try:
            os.link(one, two)
        except OSError as error:
            yield Check(
                FAIL,
                f"{name}-links",
                f"{folder} has no hard links ({error.strerror}): versions cannot appear all at once",
                "keep the remote on a file system with hard links",
            )
        yield Check(OK, f"{name}-clone", _clones(settings, one, folder))
    with suppress(OSError):  # what the probe object lay in
        (folder / PROBES).rmdir()
    free = free_bytes(folder)
    reserve = settings.daemon.disk_reserve
    if free < reserve:
        yield Check(
            WARN,
            f"{name}-room",
            f"{folder} has {size(free)} free, below the reserve of {size(reserve)}: publishing waits",
            "free space there, or lower [daemon] disk_reserve",
        )
    else:
        yield Check(OK, f"{name}-room", f"{remote.name} has {size(free)} free")


def _clones(settings: Settings, probe: Path, folder: Path) -> str:
    """Say how bundles come into this folder: cloned from a watched root, or copied once."""
    if not _reflink(probe, probe.with_name("clone")):
        return f"{folder} cannot clone files: bundles are copied once, while they are hashed"
    roots = [Path(rule.root) for rule in settings.watch]
    same = [root for root in roots if root.is_dir() and root.stat().st_dev == folder.stat().st_dev]
    if roots and not same:
        return f"{folder} can clone files, but no watched root lies on its file system: bundles are copied once"
    return f"{folder} can clone files: bundles cost no second copy"


def _reflink(source: Path, target: Path) -> bool:
    with source.open("rb") as reading, target.open("wb") as writing:
        try:
            share_blocks(writing.fileno(), reading.fileno())
        except OSError as error:
            if error.errno in {errno.EIO, errno.ENOSPC}:
                raise
            return False
    return True
