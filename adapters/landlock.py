"""Landlock by its three system calls: what a process may read, write and reach, held by the kernel, without root.

Rights that a kernel does not know yet are left out, so that the same request holds as much as that kernel can hold. The
numbers are those of `linux/landlock.h`; the calls have the same numbers on every processor.
"""

import contextlib
import ctypes
import os
import stat
import struct
import sys
from collections.abc import Iterable
from typing import Final

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_VERSION_FLAG: Final = 1
_PATH_BENEATH: Final = 1
_NO_NEW_PRIVS: Final = 38

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REG = 1 << 4, 1 << 5, 1 << 7, 1 << 8
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_RIGHTS: Final = ((1, (1 << 13) - 1), (2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEV))
"""File rights by the ABI that knows them."""

_READ: Final = _READ_FILE | _READ_DIR
_CHANGE: Final = (
    _READ | _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _REFER | _TRUNCATE
)  # neither devices, sockets and links nor programs
_DRIVE: Final = _READ | _WRITE_FILE | _IOCTL_DEV
_OF_FILES: Final = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
NET_FROM: Final = 4
"""The ABI that knows TCP."""

_NET: Final = 0b11
"""Bind and connect."""

_SCOPE_FROM, _SCOPE = 6, 0b11
"""Abstract sockets and signals of processes outside."""


def version() -> int:
    """Return the kernel's Landlock ABI, 0 where there is none."""
    if sys.platform != "linux":
        return 0
    return max(0, _call(_CREATE, None, 0, _VERSION_FLAG))


def restrict(reads: Iterable[str], writes: Iterable[str], devices: Iterable[str] = ()) -> int:
    """Confine this thread and all it will start to some folders and files, and return the ABI that holds it.

    `devices` are files of drivers, to read, write and control. Nothing is confined where the kernel has no Landlock: 0.
    What is named and not there is passed over. Raises OSError where the kernel refuses what its own version says it can
    do.
    """
    abi = version()
    if not abi:
        return 0
    handled = 0
    for since, rights in _RIGHTS:
        handled |= rights if abi >= since else 0
    attributes = struct.pack("=Q", handled)
    attributes += struct.pack("=Q", _NET) if abi >= NET_FROM else b""
    attributes += struct.pack("=Q", _SCOPE) if abi >= _SCOPE_FROM else b""
    ruleset = _checked(_CREATE, attributes, len(attributes), 0)
    try:
        for rights, paths in ((_READ, reads), (_CHANGE, writes), (_DRIVE, devices)):
            for path in paths:
                _allow(ruleset, path, rights & handled)
        if ctypes.CDLL(None, use_errno=True).prctl(_NO_NEW_PRIVS, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "no_new_privs was refused")
        _checked(_RESTRICT, ruleset, 0)
    finally:
        os.close(ruleset)
    return abi


def _allow(ruleset: int, path: str, rights: int) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
                rights &= _OF_FILES
            _checked(_ADD, ruleset, _PATH_BENEATH, struct.pack("=Qi", rights, descriptor), 0)
        finally:
            os.close(descriptor)


def _checked(number: int, *arguments: int | bytes | None) -> int:
    answer = _call(number, *arguments)
    if answer < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"landlock: {os.strerror(code)}")
    return answer


def _call(number: int, *arguments: int | bytes | None) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    held = [ctypes.c_char_p(a) if isinstance(a, bytes) or a is None else ctypes.c_long(a) for a in arguments]
    return int(libc.syscall(ctypes.c_long(number), *held))
