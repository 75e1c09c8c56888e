"""The jail of a child process that opens files nobody vouches for: what it may touch, and how much it may use.

    Landlock            files: inputs, interpreter and libraries to read, one staging folder to write; no TCP
    filter              no sockets of any kind, no other process, no signal to others (`seccomp`)
    no_new_privs        nothing it could start would have more rights
    environment         built from a list of names, so that no token is in it
    limits              memory and threads watched from outside, processor time by the kernel, a clock, no core files
    process group       ended as a whole

What the kernel lacks is left out and told (`Held`): the child runs under the rest.
"""

import os
import pwd
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import weighbridge
from weighbridge.adapters import landlock, seccomp
from weighbridge.registry import findings
from weighbridge.registry.types import Finding, Value

_PASSED: Final = frozenset(
    ["PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "PYTHONNOUSERSITE"]
)
_LIBRARIES: Final = (
    "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/etc/localtime",
    "/usr/share/zoneinfo", "/sys/devices/system/cpu", "/sys/devices/system/node", "/proc/cpuinfo", "/proc/meminfo",
    "/dev/urandom", "/dev/random", "/dev/zero",
)  # fmt: skip


class Policy(Value, frozen=True):
    """What one child may do; paths are absolute and name folders with all below them, or files."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    """The first is its home, its scratch folder and where it stands."""
    memory: int
    """Bytes of its own: pages of files that are only mapped do not count."""
    processor: int
    """Seconds of processor time, of all threads together."""
    clock: int
    """Seconds by the clock."""
    workers: int = 1
    """Threads that a numerical library should use."""
    threads: int = 512
    """Threads there may be."""
    variables: tuple[tuple[str, str], ...] = ()
    """Variables of the environment beside those that every child gets."""
    devices: tuple[str, ...] = ()
    """Files of drivers that it may open and control."""


class Held(NamedTuple):
    """What holds a child: the Landlock ABI (0: none) and whether its system calls are filtered."""

    landlock: int
    filtered: bool

    @property
    def whole(self) -> bool:
        """Nothing is missing."""
        return self.landlock > 0 and self.filtered


def able() -> Held:
    """Return what this machine can hold a child with; that it does shows in the child."""
    return Held(landlock.version(), seccomp.able())


def lacking(held: Held) -> str | None:
    """Return in one sentence what a jail lacks, None where it is whole."""
    if not held.landlock and not held.filtered:
        return "this kernel has neither Landlock nor system call filters: only time, memory and environment are bounded"
    if not held.landlock:
        return "this kernel has no Landlock: the child's files are not confined, its network and processes are"
    if not held.filtered:
        reach = "TCP is closed, other protocols are not" if held.landlock >= landlock.NET_FROM else "nor its network"
        return f"no system call filter holds here: the child's files are confined, {reach}"
    return None


def finding(held: Held) -> Finding | None:
    """Return the finding about a jail that lacks something, None where it is whole."""
    words = lacking(held)
    if words is None:
        return None
    return findings.finding(
        "jail-weak",
        "machine",
        words,
        "use a kernel from 5.13 on with landlock in its lsm= list, on x86_64 or aarch64",
        landlock=held.landlock,
        filtered=held.filtered,
    )


def environment(policy: Policy, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child: a few names are passed on, its folders are its own."""
    home = policy.writes[0]
    threads = str(policy.workers)
    return (
        {name: _passed(name, environ[name]) for name in _PASSED & environ.keys()}
        | {"HOME": home, "TMPDIR": home, "XDG_CACHE_HOME": home, "PYTHONDONTWRITEBYTECODE": "1"}
        | {"OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        | dict(policy.variables)
    )


def _passed(name: str, value: str) -> str:
    """Return a variable as it is; a list of folders so that it means the same wherever the child stands."""
    if not name.endswith("PATH"):
        return value
    return ":".join(os.path.abspath(path) for path in value.split(":") if path)  # noqa: PTH100 - links stay as they are


def enter(policy: Policy) -> Held:
    """Confine this process, before it has any thread beside the first; there is no way out. Raises OSError."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    allowed = resource.getrlimit(resource.RLIMIT_CPU)[1]
    seconds = policy.processor if allowed == resource.RLIM_INFINITY else min(policy.processor, allowed)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, allowed))
    abi = landlock.restrict([*_programs(), *policy.reads], [*policy.writes, "/dev/null"], policy.devices)
    kind = seccomp.machine()
    filtered = kind is not None and seccomp.install(seccomp.program(kind, os.getpid()))
    return Held(abi, filtered)


def _programs() -> list[str]:
    """Return where the interpreter, its modules and its libraries lie, whatever installed them."""
    folders = [*sys.path, sys.prefix, sys.base_prefix, sys.exec_prefix, *_mapped()]
    folders += os.environ.get("LD_LIBRARY_PATH", "").split(":")
    folders += [str(part.resolve()) for part in Path(weighbridge.__file__).parent.iterdir()]
    home = Path(pwd.getpwuid(os.getuid()).pw_dir).resolve() if _is_known() else Path("/")
    wide = {Path("/"), home, *home.parents}
    real = {Path(folder).resolve() for folder in folders if folder}
    return [*_LIBRARIES, f"/proc/{os.getpid()}", *sorted(str(folder) for folder in real - wide)]


def _is_known() -> bool:
    """Return whether this user has a home: the ids of containers often have none."""
    try:
        return bool(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return False


def _mapped() -> set[str]:
    """Return the folders of the libraries that are loaded already."""
    with Path("/proc/self/maps").open() as lines:
        paths = {line.split(maxsplit=5)[5].strip() for line in lines if line.count("/") > 1}
    return {os.path.dirname(path) for path in paths if path.startswith("/")}  # noqa: PTH120 - plain strings
