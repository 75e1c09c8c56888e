"""A private copy of what is published: beside the target, else in our own staging, else none where that is enough."""

import secrets
from pathlib import Path
from typing import Final

from weighbridge.config.settings import DaemonSettings
from weighbridge.daemon.homes import Homes, keeps_out
from weighbridge.registry import errors
from weighbridge.registry.flow import stage as staging
from weighbridge.registry.flow.admission import Admission
from weighbridge.registry.remotes.protocol import Progress

STAGING: Final = "staging"
"""Our own staging folder, inside the state folder."""


def stage(
    homes: Homes, settings: DaemonSettings, admission: Admission, *, home: str, name: str, moved: Progress | None
) -> staging.Bundle:
    """Stage what is published of an artifact under a name of a home.

    Raises what staging raises, DiskFullError also where our own staging folder is at its limit.
    """
    mode, nonce = settings.staging, secrets.token_hex(16)
    place: Path | None = None
    own = always = False
    if mode != "direct":
        try:
            opened = homes.get(home)
            opened.confirm()
            always = opened.remote.properties.commits
            place = opened.remote.stage(name, nonce)
        except errors.WeighbridgeError as error:
            if not keeps_out(error):
                raise
            homes.failed(home, error)  # the bytes are kept here until it can be used again
        if place is None:
            own = True
            place = Path(settings.state, STAGING, nonce)
            if not _fits(settings, admission.size):
                if mode != "auto" or always:
                    raise errors.DiskFullError(
                        "the staging folder is at its limit",
                        why=f"staging_max is {settings.staging_max} bytes",
                        fix="raise [daemon] staging_max, or wait until what is in it is published",
                    )
                place = None
    known = homes.known(home)
    part = 0 if known is None else known.remote.properties.part
    chosen: staging.Mode = "auto" if mode == "auto" else "reflink" if mode == "reflink" else "copy"
    reserve = settings.disk_reserve
    if place is not None:
        try:
            return staging.stage(
                admission.files,
                place,
                mode=chosen,
                transform=admission.transform,
                made=admission.made,
                inputs=admission.inputs,
                reserve=reserve,
                part=part,
                progress=moved,
            )
        except errors.DiskFullError:
            if not own or always or mode != "auto" or admission.made:
                raise
    if admission.made:
        raise errors.DiskFullError(
            "there is no room to make the weights that are published",
            why="what comes out of torch pickles and rank files is written to the staging folder first",
            fix="raise [daemon] staging_max, or set staging = 'auto'",
        )
    return staging.stage(admission.files, None, mode="direct", transform=admission.transform, part=part, progress=moved)


def _fits(settings: DaemonSettings, needed: int) -> bool:
    """Tell whether our own staging folder may take so many bytes more."""
    folder = Path(settings.state, STAGING)
    used = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return used + needed <= settings.staging_max
