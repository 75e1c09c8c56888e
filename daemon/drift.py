"""A published folder in which only change times differ: somebody touched it, or its bytes changed in silence."""

from pathlib import Path

import msgspec

from weighbridge.daemon.jobstore import Job, JobStore
from weighbridge.daemon.records import encode
from weighbridge.registry.errors import VanishedError
from weighbridge.registry.flow.verify import verify_source
from weighbridge.registry.manifest import Manifest, parse
from weighbridge.registry.types import Finding


def recheck(store: JobStore, job: Job) -> Job | None:
    """Compare a folder with what was published from it; equal or not, nothing is published.

    Trainers do not set times back, so a change under the same names, sizes and times is damage and is told as such.
    Raises VanishedError.
    """
    published = store.job(job.recheck or 0)
    sealed = store.manifest_of(published) if published is not None else None
    if published is None or sealed is None:
        return store.advance(job, recheck=None)
    found = differences(published, parse(sealed.encode()), Path(job.path))
    if not found:
        ref = f"{published.name}@v{published.n}"
        return store.advance(job, "superseded", reason=f"only change times differ from {ref}")
    with store.transaction():
        kept = [f for f in published.findings_list if f.code != "source-drift"]
        store.advance(published, "done", event="source-drift", findings=encode([*kept, *found]))
        return store.advance(job, "superseded", reason=found[0].message)


def differences(published: Job, sealed: Manifest, folder: Path) -> list[Finding]:
    """Return a finding for each file whose bytes are no longer those that were published. Raises VanishedError."""
    if not folder.exists():
        raise VanishedError(f"{folder} is gone")
    ref = f"{published.name}@v{published.n}"
    return [
        msgspec.structs.replace(found, fix=f"registry verify {folder} compares; registry pull {ref} has the original")
        for found in verify_source(folder if folder.is_dir() else folder.parent, sealed).findings
    ]
