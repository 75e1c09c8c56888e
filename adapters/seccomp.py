"""A filter of system calls for a process that only reads, computes and writes: no network, no other processes.

    socket, connect, bind, io_uring                no network, whatever the protocol
    fork, exec, clone without CLONE_THREAD         no other program and no second process; threads are free
    kill and its kin                               no signal to anybody else
    ptrace, process_vm_*, pidfd_getfd              no look into other processes
    chmod, chown, xattr, utime, truncate           what Landlock does not (always) hold
    mount, namespaces, keys, bpf, modules, clocks  what only an administrator needs

A filter needs neither root nor a namespace, and no kernel option beside one that every distribution sets. It is a list
of what is denied: a list of what a numerical library may call would break with its next release.
"""

import ctypes
import errno
import platform
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

_NO_NEW_PRIVS, _GET_SECCOMP, _SET_SECCOMP, _MODE_FILTER = 38, 21, 22, 2
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_X32: Final = 0x40000000
_THREAD: Final = 0x10000


class Machine(NamedTuple):
    """A processor as the kernel names it, and the numbers of the calls that are denied or looked into."""

    arch: int
    denied: tuple[int, ...]
    clone: int
    to_self: tuple[int, ...]
    """Calls whose first argument must be this process: signals to its own threads."""
    limits: int
    """prlimit64, whose first argument must be 0."""


_COMMON: Final = (
    424, 425, 426, 427, 428, 429, 430, 432, 438, 442,  # pidfd_send_signal, io_uring, mounts, pidfd_getfd
    452, 463, 466,  # fchmodat2, setxattrat, removexattrat
)  # fmt: skip
_CLONE3: Final = 435
"""Its flags lie in memory, where a filter cannot look: it does not exist, and the C library then takes clone."""

MACHINES: Final[Mapping[str, Machine]] = {
    "x86_64": Machine(
        0xC000003E,
        (
            41, 42, 49, 57, 58, 59, 322,  # socket, connect, bind, fork, vfork, execve, execveat
            101, 310, 311, 109, 112, 200, 129, 297,  # ptrace, process_vm_*, setpgid, setsid, tkill, *sigqueueinfo
            90, 91, 268, 92, 93, 94, 260, 188, 189, 190, 197, 198, 199,  # chmod, chown, xattr
            132, 235, 261, 280, 76,  # utime, truncate
            165, 166, 155, 161, 272, 308, 304,  # mount, umount2, pivot_root, chroot, unshare, setns, open_by_handle_at
            248, 249, 250, 321, 298, 323, 319,  # keys, bpf, perf_event_open, userfaultfd, memfd_create
            175, 313, 176, 246, 320, 169, 167, 168, 163, 164, 170, 171, 172, 173, 227, 305,  # administrator
        ),
        56,
        (62, 234),
        302,
    ),
    "aarch64": Machine(
        0xC00000B7,
        (
            198, 203, 200, 221, 281,  # socket, connect, bind, execve, execveat
            117, 270, 271, 154, 157, 130, 138, 240,  # ptrace, process_vm_*, setpgid, setsid, tkill, *sigqueueinfo
            52, 53, 54, 55, 5, 6, 7, 14, 15, 16,  # chmod, chown, xattr
            88, 45,  # utimensat, truncate
            40, 39, 41, 51, 97, 268, 265,  # mount, umount2, pivot_root, chroot, unshare, setns, open_by_handle_at
            217, 218, 219, 280, 241, 282, 279,  # keys, bpf, perf_event_open, userfaultfd, memfd_create
            105, 273, 106, 104, 294, 142, 224, 225, 89, 170, 161, 162, 112, 266,  # administrator
        ),
        220,
        (129, 131),
        261,
    ),
}  # fmt: skip
"""The processors whose calls are known, by the name that `uname -m` gives."""


def machine() -> Machine | None:
    """Return this processor, None where its calls are not known here."""
    if sys.platform != "linux" or sys.maxsize < 1 << 32 or sys.byteorder != "little":
        return None
    return MACHINES.get(platform.machine())


def able() -> bool:
    """Return whether the kernel has filters at all, and one for this processor is known."""
    return machine() is not None and ctypes.CDLL(None, use_errno=True).prctl(_GET_SECCOMP, 0, 0, 0, 0) >= 0


def program(kind: Machine, process: int) -> list[tuple[int, int, int, int]]:
    """Return the filter of one process as (code, jump if true, jump if false, value)."""
    denied = _ERROR | errno.EPERM
    lines = [
        (_LOAD, 0, 0, _ARCH_AT),
        (_EQUAL, 1, 0, kind.arch),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, denied),
        (_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _ERROR | errno.ENOSYS),
    ]
    for number in (*kind.denied, *_COMMON):
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, denied)]
    for number, test, value in (
        (kind.clone, _ANY_BIT, _THREAD),
        (kind.limits, _EQUAL, 0),
        *((number, _EQUAL, process) for number in kind.to_self),
    ):
        lines += [
            (_EQUAL, 0, 4, number),
            (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
            (test, 0, 1, value),
            (_RETURN, 0, 0, _ALLOW),
            (_RETURN, 0, 0, denied),
        ]
    lines.append((_RETURN, 0, 0, _ALLOW))
    return lines


def install(lines: Sequence[tuple[int, int, int, int]]) -> bool:
    """Put a filter on this thread and all it will start; False where the kernel takes none."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0):
        return False
    code = b"".join(struct.pack("=HBBI", *line) for line in lines)
    held = ctypes.create_string_buffer(code, len(code))
    whole = struct.pack("@HP", len(lines), ctypes.addressof(held))
    return not libc.prctl(_SET_SECCOMP, _MODE_FILTER, ctypes.c_char_p(whole), 0, 0)
