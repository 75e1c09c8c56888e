"""What a child that uses a GPU may touch beside what every jailed child may: the driver's files, and its locks.

The files are those that NVIDIA's driver and CUDA's libraries are known to open. They were not tried on a GPU; what a
jail keeps from a driver shows as a GPU that torch does not see, which is told.
"""

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from weighbridge.adapters.jail import Policy
from weighbridge.adapters.merge import pays
from weighbridge.registry import errors
from weighbridge.registry.disk import speaking

HOST: Final = 8 << 30
"""Bytes that CUDA's context, its libraries and pinned memory may take on this side."""

SHARED: Final = Path("/tmp")  # noqa: S108 - what lies there is looked at before it is used
"""The folder that everybody on a machine has, whatever the environment says."""

_DRIVER: Final = (
    "/proc/driver/nvidia", "/proc/devices", "/proc/modules", "/proc/sys/vm", "/sys/bus/pci", "/sys/module/nvidia",
    "/sys/module/nvidia_uvm", "/sys/devices/system", "/sys/class/drm", "/usr/local/cuda", "/usr/local/nvidia",
    "/etc/nvidia", "/usr/share/nvidia",
)  # fmt: skip
_CHOSEN: Final = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
"""Which GPUs are ours to use: a scheduler says so by the environment."""


def let_in(request: dict[str, Any], policy: Policy, environ: Mapping[str, str]) -> tuple[dict[str, Any], Policy]:
    """Return what a child is asked and its policy, with what a GPU takes where one is asked for.

    Raises DeniedError where it must be a GPU, and its locks cannot be had.
    """
    wanted = request["device"]
    if wanted not in {"cuda", "cuda-if-free"}:
        return request, policy
    try:
        with speaking("a GPU cannot be held against other merges"):
            place = locks()
    except errors.WeighbridgeError as error:
        if wanted == "cuda":
            raise
        return request | {"device": None, "device_why": error.what}, policy
    return request | {"locks": str(place)}, with_gpu(policy, place, environ)


def with_gpu(policy: Policy, locks: Path, environ: Mapping[str, str]) -> Policy:
    """Return a policy with the files of every NVIDIA device, the folder of their locks, and memory for CUDA's side."""
    roots = [str(path) for path in Path("/sys/devices").glob("pci*")]
    return msgspec.structs.replace(
        policy,
        reads=(*policy.reads, *_DRIVER, *roots),
        writes=(*policy.writes, str(locks)),
        devices=tuple(str(path) for path in sorted(pays.DEV.glob("nvidia*"))),
        memory=policy.memory + HOST,
        variables=(*policy.variables, *((name, environ[name]) for name in _CHOSEN if name in environ)),
    )


def locks() -> Path:
    """Return the folder where this user's merges hold their GPUs, made where it is not there yet.

    One place for all of them: TMPDIR differs from job to job, and a user has /run/user only while somebody is logged in
    as such. Raises DeniedError where its name is taken by somebody else, OSError.
    """
    place = SHARED / f"weighbridge-gpu-{os.geteuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise errors.DeniedError(
            f"{place} is not ours", why="merges hold their GPU by a lock in it", fix="remove it, or use --device cpu"
        )
    return place
