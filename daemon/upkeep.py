"""What is done now and then: looking again at what was published, sweeping, keeping up with the feed."""

import logging
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from weighbridge.daemon.copying import STAGING
from weighbridge.daemon.homes import Homes
from weighbridge.daemon.jobstore import ACTIVE, JobStore
from weighbridge.registry import findings, layout
from weighbridge.registry.errors import (
    DeniedError,
    IntegrityError,
    NotFoundError,
    UnreachableError,
    UsageError,
    WeighbridgeError,
    WithdrawnError,
)
from weighbridge.registry.flow.claims import from_copy, told_of
from weighbridge.registry.flow.collect import sweep, sweep_staged
from weighbridge.registry.flow.stage import Bundle
from weighbridge.registry.flow.verify import Reading, at_remote, verify_version
from weighbridge.registry.types import Finding

FORGOTTEN_AFTER: Final = 30 * 86_400.0
"""Seconds after which a job that ended without a version is forgotten."""

VERIFY_AGAIN_AFTER: Final = 7 * 86_400.0
"""Seconds after which a published version is looked at again."""

UNPROVEN: Final = "copy-unproven"
"""The finding of a look that proved nothing: a store without checksums, and files too large to fetch for a look."""

_log = logging.getLogger(__name__)


class Upkeep:
    """The scheduled tasks; each may fail and is tried again by the next turn."""

    def __init__(self, store: JobStore, homes: Homes, names: frozenset[str], state: Path, who: str) -> None:
        self._store = store
        self._homes = homes
        self._names = names
        self._state = state
        self._who = who

    def sync(self) -> None:
        """Bring what we know of every home up to its feed."""
        for name in sorted(self._names):
            with suppress(WeighbridgeError):
                self._homes.watched(name, self._homes.get(name).sync)

    def verify(self) -> None:
        """Look again at the version that was looked at the longest ago, and tell what is wrong with it."""
        looked = {(row["home"], row["name"], row["n"]): row["at"] for row in self._store.verifications()}
        done = {(made.home, made.name, made.n): made.at for made in self._store.made()}
        waiting = sorted((looked.get(key, at), key) for key, at in done.items())
        for at, (home, name, n) in waiting[:1]:
            if time.time() - at < VERIFY_AGAIN_AFTER:
                return
            with suppress(UnreachableError, DeniedError):
                found = self._look_at(home, name, n)
                self._store.verified(home, name, n, found)
                for finding in (one for one in found if one.code != UNPROVEN):
                    _log.error("a published version is damaged", extra={"ref": f"{name}@v{n}", "why": finding.message})
                    self._store.event("damaged", name=name, n=n, detail=finding.message)

    def _look_at(self, home: str, name: str, n: int) -> list[Finding]:
        """Return what is wrong with a version that was published; nothing is wrong with one that was taken back.

        In a folder every byte is read. A server has its own checksums, and to read all it holds again would cost the
        trainer's line, and money: where it has none, it is told that sizes alone were compared.
        """
        place = self._homes.get(home)
        remote = place.remote
        try:
            reading: Reading = "all" if remote.properties.hashes_stored else "nothing"
            with suppress(UsageError, IntegrityError):
                place.confirm()  # whether the store may be tried out
            told = told_of(place.catalog, name, n)
            checked = verify_version(
                remote, name, n,
                manifest_sha256=self._store.recorded(home, name, n) or told.manifest,
                claim_sha256=told.claim,
                reading=reading,
                registry=place.registry,
            )  # fmt: skip
            checked = at_remote(checked, home)
            count = checked.levels.get("size", 0)
            if count == 0:
                return checked.findings
            why = f"{count} of its {checked.files} files have no checksum there, and only their sizes were compared"
            ref = f"{name}@v{n}"
            fix = f"registry verify {ref} --remote {home} --quick reads them"
            return [*checked.findings, findings.finding(UNPROVEN, ref, why, fix)]
        except WithdrawnError:
            return []
        except NotFoundError as error:
            why = f"{error.what}, though it was committed"
            return [findings.finding("manifest-damaged", f"{name}@v{n}", why, "restore it from a copy of the remote")]

    def sweep(self) -> None:
        """Remove what dead publishers left: our own stages nobody refers to, theirs by age, claims by the rule."""
        self.sweep_own()
        self.hold()
        for name in sorted(self._homes.health):
            if name in self._names or self._homes.known(name) is not None:  # mirrors that get deliveries are open
                self._sweep(name)

    def _sweep(self, name: str) -> None:
        """Sweep one remote. A mirror decides nothing: what is open there ends with its home."""
        with suppress(WeighbridgeError):
            place = self._homes.get(name)
            place.confirm()
            if place.name not in self._names:
                sweep_staged(place.remote)
                return
            swept = sweep(place.remote, place.registry, place.catalog, by=self._who)
            for gone, n in swept.voided:
                self._store.event("voided", name=gone, n=n, detail="nobody finished it in time")
            for open_, n in swept.whole:
                ref = f"{open_}@v{n}"
                why = f"all its files lie there: registry verify {ref} --remote {name} --mend publishes it"
                _log.warning("a number was never finished", extra={"ref": ref, "why": why})
            for open_, n in swept.damaged:
                key = layout.claim(open_, n)
                extra = {"ref": f"{open_}@v{n}", "why": f"{key} is damaged", "fix": from_copy(key)}
                _log.warning("a number was never finished", extra=extra)

    def hold(self) -> None:
        """Touch the stages that jobs of ours wait with: they are no leftovers, however long a job waits."""
        for place in self._needed():
            with suppress(OSError):
                os.utime(place)

    def sweep_own(self) -> None:
        """Remove stages in our own folder that no job refers to."""
        kept = self._needed()
        with suppress(FileNotFoundError):
            for folder in (self._state / STAGING).iterdir():
                if str(folder) not in kept and time.time() - folder.stat().st_mtime > 3600:
                    shutil.rmtree(folder, ignore_errors=True)

    def _needed(self) -> set[str]:
        """Return the stage folders that jobs still need, wherever they lie."""
        waiting = self._store.jobs(f"state IN {(*ACTIVE, 'blocked', 'quarantined')} AND bundle IS NOT NULL")
        bundles = (msgspec.json.decode((job.bundle or "").encode(), type=Bundle) for job in waiting)
        return {bundle.place for bundle in bundles if bundle.place is not None}
