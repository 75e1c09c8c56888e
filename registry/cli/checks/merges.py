"""Checks of what merges by rule need: a place to make them, folders of bases, and Slurm where jobs are to make them."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from weighbridge.config.settings import MergeSettings, Settings
from weighbridge.registry.cli.checks.check import FAIL, OK, WARN, Check
from weighbridge.registry.cli.checks.folders import nearest
from weighbridge.registry.refs import shown

_PROGRAMS = ("sbatch", "squeue", "scontrol", "scancel")
_PATIENCE = 10.0
_PASSED = ("PATH", "HOME", "USER", "LANG", "SLURM_CONF", "SLURM_CONF_SERVER")
"""What Slurm's client needs of our environment; secrets are not its business."""


def merges(settings: Settings) -> Iterator[Check]:
    """Look at what the rules with `merge` need; nothing is told where there is none."""
    if all(rule.merge == "never" for rule in settings.watch):
        return
    merge = settings.merge
    scratch = merge.scratch
    if scratch is not None and not os.access(nearest(Path(scratch)), os.W_OK | os.X_OK):
        fix = f"install -d -m 0700 -o $(id -un) {scratch}   (as root)"
        yield Check(FAIL, "merge-scratch", f"merges are made in {scratch}, which is not writable for you", fix)
    for folder in merge.bases:
        if not Path(folder).is_dir():
            yield Check(WARN, "merge-bases", f"{folder} is not there: no base is found in it", f"mkdir -p {folder}")
    if merge.executor == "slurm":
        yield from _slurm(merge)
    else:
        yield Check(OK, "merge", "merges are made on this machine, one at a time")


def _slurm(merge: MergeSettings) -> Iterator[Check]:
    lacking = [name for name in _PROGRAMS if shutil.which(name) is None]
    if lacking:
        yield Check(
            FAIL,
            "merge-slurm",
            f"merges are to be Slurm jobs, and {', '.join(lacking)} cannot be found",
            'install Slurm\'s client programs, or set [merge] executor = "local"',
        )
        return
    try:
        done = subprocess.run(
            ["sinfo", "--noheader", "--format=%R"],
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
            env={name: os.environ[name] for name in _PASSED if name in os.environ},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Check(WARN, "merge-slurm", f"Slurm does not answer: {error}", "look at its controller (scontrol ping)")
        return
    if done.returncode != 0:
        said = shown(done.stderr.strip()[:200])
        yield Check(WARN, "merge-slurm", f"Slurm does not answer: {said}", "look at its controller (scontrol ping)")
        return
    known = sorted(set(done.stdout.split()))
    wanted = merge.slurm.partition
    missing = [part for part in (wanted or "").split(",") if part and part not in known]
    if missing:
        yield Check(
            FAIL,
            "merge-slurm",
            f"there is no partition {shown(', '.join(missing))} in this cluster",
            f"set partition in [merge.slurm] to one of: {shown(', '.join(known))}",
        )
        return
    yield Check(OK, "merge", f"merges are Slurm jobs; the cluster answers with {len(known)} partitions")
