"""Fill the disk under the remote, under the daemon's database and under its inodes, and make the state read-only.

Each time the message must be clear, nothing that is visible may be wrong, the job must be kept, and once there is room
again the version must come without hand work. Disks are small tmpfs mounts, so this needs root.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from weighbridge_testlib import mounts
from weighbridge_testlib.builders import TensorSpec, lora_adapter, trainer_checkpoint
from weighbridge_testlib.measure import noise
from weighbridge_testlib.yard import BrokenError, Yard, until

ROOM = ("no space", "space left", "no room", "disk is full", "disk full", "file system is full", "inodes")
PATIENCE = 120.0


def megabytes(seed: int = 0) -> dict[str, TensorSpec]:
    """Return the tensors of an adapter of some two megabytes."""
    raw = noise(seed, 1024 * 256)
    stem = "base_model.model.model.layers.0.self_attn.q_proj"
    shapes = {"lora_A": (4, 65536), "lora_B": (65536, 4)}
    return {f"{stem}.{part}.weight": ("F32", shape, raw) for part, shape in shapes.items()}


def refused_clearly(done: subprocess.CompletedProcess[str], words: tuple[str, ...], what: str) -> None:
    """See that a command failed with an error a person understands."""
    said = done.stdout + done.stderr
    if done.returncode == 0:
        raise BrokenError(f"{what}: the command says it succeeded")
    if done.returncode < 0 or "Traceback" in said or "error:" not in done.stderr:
        raise BrokenError(f"{what}: no clear error: {done.returncode} {said[-600:]}")
    if not any(word in said.lower() for word in words):
        raise BrokenError(f"{what}: the error does not say what is wrong: {said[-600:]}")


def fill(folder: Path, *, leave: int) -> Path:
    """Take all the room of a small disk but so many bytes; return the ballast."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as stream:
        try:
            while stream.write(bytes(4096)):
                pass
        except OSError:
            pass
        stream.truncate(max(0, stream.tell() - leave))
    return ballast


def push_to_a_full_remote(folder: Path) -> str:
    """Push more than the remote's disk can hold, then make it larger."""
    with Yard(folder) as yard, mounts.small_disk(yard.remote, kilobytes=1024):
        source = lora_adapter(yard.folder / "adapter", tensors=megabytes(), targets=["q_proj"])
        refused_clearly(yard.push(source, "demo"), ROOM, "push to a full disk")
        yard.check(contents=0)
        mounts.remount(yard.remote, "size=16m")
        done = yard.push(source, "demo")
        if done.returncode:
            raise BrokenError(f"push after there was room: {done.stderr[-400:]}")
        yard.check(contents=1, closed=True)
    return "refused, then published"


def push_without_inodes(folder: Path) -> str:
    """Push where no file can be made any more, then allow more of them."""
    with Yard(folder) as yard, mounts.small_disk(yard.remote, kilobytes=16384, inodes=9):
        source = lora_adapter(yard.folder / "adapter", tensors=megabytes(), targets=["q_proj"])
        refused_clearly(yard.push(source, "demo"), ROOM, "push without inodes")
        yard.check(contents=0)
        mounts.remount(yard.remote, "nr_inodes=1000")
        done = yard.push(source, "demo")
        if done.returncode:
            raise BrokenError(f"push after there were inodes: {done.stderr[-400:]}")
        yard.check(contents=1, closed=True)
    return "refused, then published"


def daemon_beside_a_full_remote(folder: Path) -> str:
    """Let the daemon meet a full remote; it keeps the job, goes on, and publishes as soon as there is room."""
    with Yard(folder) as yard, mounts.small_disk(yard.remote, kilobytes=1024), yard.daemon() as daemon:
        run = yard.runs / "team/run-1"
        trainer_checkpoint(run / "checkpoint-1", step=1, tensors=megabytes(), targets=["q_proj"])
        until(
            lambda: any(w in told(yard) for w in ROOM), PATIENCE, f"the daemon to tell of the full disk: {told(yard)}"
        )
        yard.check(contents=0)
        mounts.remount(yard.remote, "size=16m")
        took = wait(yard, lambda: yard.look()[0]["committed"], "the version once there was room")
        alive(daemon, yard)
        yard.check(contents=1, closed=True, state=True)
    return f"kept, then published after {took:.0f} s"


def daemon_without_room_for_its_database(folder: Path) -> str:
    """Fill the disk of the state folder under a running daemon; what it cannot record it does not lose."""
    with Yard(folder) as yard, mounts.small_disk(yard.state, kilobytes=4096), yard.daemon() as daemon:
        trainer_checkpoint(yard.runs / "team/run-1/checkpoint-1", step=1, seed=1)
        wait(yard, lambda: yard.look()[0]["committed"], "the first version")
        yard.acknowledge_all()
        ballast = fill(yard.state, leave=0)
        trainer_checkpoint(yard.runs / "team/run-1/checkpoint-2", step=2, seed=2)
        until(
            lambda: any(w in told(yard) for w in ROOM), PATIENCE, f"the daemon to tell of the full disk: {told(yard)}"
        )
        ballast.unlink()
        took = wait(yard, lambda: len(yard.look()[0]["committed"]) == 2, "the second version once there was room")
        alive(daemon, yard)
        yard.check(contents=2, closed=True, state=True)
    return f"kept, then published after {took:.0f} s"


def once_without_room_for_its_database(folder: Path) -> str:
    """Start the daemon where not even its database fits, then give it room."""
    with Yard(folder) as yard, mounts.small_disk(yard.state, kilobytes=512):
        trainer_checkpoint(yard.runs / "team/run-1/checkpoint-1", step=1)
        ballast = fill(yard.state, leave=0)
        refused_clearly(yard.daemon_once(), ROOM, "once on a full disk")
        yard.check()
        ballast.unlink()
        mounts.remount(yard.state, "size=16m")
        done = yard.daemon_once()
        if done.returncode:
            raise BrokenError(f"once after there was room: {done.stderr[-400:]}")
        yard.check(contents=1, closed=True, state=True)
    return "refused, then published"


def read_only_state(folder: Path) -> str:
    """Start the daemon on a state folder that it cannot write, then make it writable."""
    with Yard(folder) as yard, mounts.small_disk(yard.state, kilobytes=16384):
        trainer_checkpoint(yard.runs / "team/run-1/checkpoint-1", step=1, seed=1)
        first = yard.daemon_once()
        if first.returncode:
            raise BrokenError(f"once: {first.stderr[-400:]}")
        yard.acknowledge_all()
        trainer_checkpoint(yard.runs / "team/run-1/checkpoint-2", step=2, seed=2)
        mounts.remount(yard.state, "ro")
        done = yard.daemon_once()
        refused_clearly(done, ("read-only", "cannot be written", "permission"), "once on a read-only state")
        if str(yard.state) not in done.stderr:
            raise BrokenError(f"the error does not name the state folder: {done.stderr[-400:]}")
        yard.check(contents=1)
        mounts.remount(yard.state, "rw")
        last = yard.daemon_once()
        if last.returncode:
            raise BrokenError(f"once after it could be written: {last.stderr[-400:]}")
        yard.check(contents=2, closed=True, state=True)
    return "refused, then published"


def told(yard: Yard) -> str:
    """Return what a person is told now: the status, and the end of the log."""
    status = yard.registry("status")
    return f"{status.stdout} {status.stderr} {yard.log_tail(3000)}".lower()


def wait(yard: Yard, condition: Callable[[], object], what: str) -> float:
    """Wait for something and return the seconds it took; what was told meanwhile goes into the error."""
    try:
        return until(condition, PATIENCE, what, every=0.5)
    except BrokenError as error:
        raise BrokenError(f"{error}; told was: {told(yard)[-1500:]}") from None


def alive(daemon: subprocess.Popen[bytes], yard: Yard) -> None:
    """See that the daemon lived through it."""
    if daemon.poll() is not None:
        raise BrokenError(f"the daemon ended with {daemon.returncode}: {yard.log_tail()}")


PARTS: tuple[Callable[[Path], str], ...] = (
    push_to_a_full_remote,
    push_without_inodes,
    daemon_beside_a_full_remote,
    daemon_without_room_for_its_database,
    once_without_room_for_its_database,
    read_only_state,
)


def main() -> int:
    """Run all parts and print what came out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=[part.__name__ for part in PARTS], action="append")
    options = parser.parse_args()
    reason = mounts.refused()
    if reason:
        print(f"fulldisk: SKIPPED {reason}")
        return 0
    parts = [part for part in PARTS if not options.only or part.__name__ in options.only]
    violations = 0
    with tempfile.TemporaryDirectory(prefix="wb-full-") as base:
        for part in parts:
            try:
                print(f"fulldisk: {part.__name__}: {part(Path(base) / part.__name__)}")
            except BrokenError as error:
                violations += 1
                print(f"fulldisk: {part.__name__}: {error}")
    print(f"fulldisk: {len(parts)} parts, {violations} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
