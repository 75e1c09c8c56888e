"""Cut the power of the disk that holds remote, database and staging; nothing that was acknowledged may be gone.

The disk is an ext4 in a file; its shutdown call drops everything that was not forced to it. Four ways to lose power:
the instant a push was confirmed, the instant the daemon confirmed a drain, a random moment in a push of some megabytes,
and, where strace is there, just after each of many system calls of a push.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from weighbridge_testlib import kill, mounts
from weighbridge_testlib.builders import lora_adapter, trainer_checkpoint
from weighbridge_testlib.measure import noise
from weighbridge_testlib.yard import BIN, BrokenError, Yard

BIG = 400


def big_adapter(folder: Path, seed: int) -> Path:
    """Write an adapter of some megabytes, so that there is a middle to lose power in."""
    raw = noise(seed, 1024 * BIG)
    shapes = {"lora_A": (4, 256 * BIG), "lora_B": (256 * BIG, 4)}
    stem = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{stem}.{part}.weight": ("F32", shape, raw) for part, shape in shapes.items()}
    return lora_adapter(folder, tensors=tensors, targets=["q_proj"])


def after_push(yard: Yard, disk: mounts.PowerLossDisk, turn: int) -> None:
    """Push, hear the version's number, lose power."""
    done = yard.push(lora_adapter(yard.folder / f"adapter-{turn}", seed=1000 + turn), "pushed")
    version = done.stdout.split()[-1] if done.returncode == 0 and done.stdout.split() else None
    if version is None:
        raise BrokenError(f"the push failed: {done.stderr[-800:]}")
    disk.lose_power()
    if version not in yard.check(state=True)["committed"]:
        raise BrokenError(f"{version} was printed and is lost")


def after_drain(yard: Yard, disk: mounts.PowerLossDisk, turn: int) -> None:
    """Let the daemon publish a checkpoint, hear that it is drained, lose power."""
    with yard.daemon() as daemon:
        folder = trainer_checkpoint(yard.runs / f"team/run-1/checkpoint-{turn + 10}", step=turn + 10, seed=2000 + turn)
        drained = yard.run([str(BIN / "registryd"), "drain", str(folder), "--deadline", "60s"])
        disk.cut()
        daemon.kill()
        daemon.wait()
    disk.unmount()
    disk.mount()
    if drained.returncode != 0:
        raise BrokenError(f"drain ended with {drained.returncode}: {drained.stderr[-800:]} {yard.log_tail()}")
    report = yard.check(state=True)
    runs = sum(version.startswith("team-run-1@") for version in report["committed"])
    if runs != turn // 3 + 1:
        raise BrokenError(f"{runs} versions of the run are left, {turn // 3 + 1} were drained")


def during_push(yard: Yard, disk: mounts.PowerLossDisk, turn: int) -> None:
    """Lose power somewhere in a push; what is visible verifies, and the next push of the same folder succeeds."""
    source = big_adapter(yard.folder / f"big-{turn}", seed=3000 + turn)
    command = [str(BIN / "registry"), *yard.push_arguments(source, "interrupted")]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=yard.env, cwd=yard.folder, stdout=pipe, stderr=pipe, text=True)
    time.sleep(random.Random(turn).uniform(0.1, 0.9))
    disk.cut()
    stdout, _ = process.communicate(timeout=60)
    printed = stdout.split()[-1] if process.returncode == 0 and stdout.split() else None
    disk.unmount()
    disk.mount()
    committed = yard.check(state=True)["committed"]
    if printed and printed not in committed:
        raise BrokenError(f"{printed} was printed and is lost")
    again = yard.push(source, "interrupted")
    if again.returncode != 0:
        raise BrokenError(f"the push after the power loss failed: {again.stderr[-800:]}")


def at_call(yard: Yard, disk: mounts.PowerLossDisk, turn: int, point: kill.Point) -> bool:
    """Lose power just after one call of a push; return whether the push came to it."""
    source = lora_adapter(yard.folder / f"small-{turn}", seed=4000 + turn)
    command = [str(BIN / "registry"), *yard.push_arguments(source, f"call-{turn}")]
    killed = kill.kill(command, point, env=yard.env, cwd=yard.folder, held=disk.cut)
    if killed.fired:
        disk.unmount()
        disk.mount()
    committed = yard.check(state=True)["committed"]
    printed = killed.stdout.split()
    if printed and printed[-1] not in committed:
        raise BrokenError(f"{printed[-1]} was printed and is lost")
    again = yard.push(source, f"call-{turn}")
    if again.returncode != 0:
        raise BrokenError(f"the push after the power loss failed: {again.stderr[-800:]}")
    return killed.fired


def calls_of_a_push(yard: Yard, disk: mounts.PowerLossDisk, limit: int) -> list[kill.Point]:
    """Return at most `limit` calls of a push that change the remote, each to lose power after."""
    source = lora_adapter(yard.folder / "small", seed=4000)
    command = [str(BIN / "registry"), *yard.push_arguments(source, "call")]
    found = kill.trace(command, disk.at, env=yard.env, cwd=yard.folder)
    points = [point for point in found if point.after]
    random.Random(0).shuffle(points)  # so that a run that is cut short has looked everywhere
    return points if len(points) <= limit else [points[i * len(points) // limit] for i in range(limit)]


def disk_forgets(disk: mounts.PowerLossDisk) -> None:
    """See that this disk really loses what was not forced to it, else the rest would prove nothing."""
    kept, lost = disk.at / "kept", disk.at / "lost"
    kept.write_bytes(b"kept")
    for path, flags in ((kept, os.O_RDONLY), (disk.at, os.O_RDONLY | os.O_DIRECTORY)):
        handle = os.open(path, flags)
        os.fsync(handle)
        os.close(handle)
    lost.write_bytes(b"lost")
    disk.lose_power()
    if not kept.exists() or lost.exists():
        raise BrokenError("the disk does not lose what was never forced to it")


WAYS = (after_push, after_drain, during_push)


def main() -> int:
    """Lose power so many times in each way and print what came out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=6, help="power losses in each of the first three ways (default 6)"
    )
    parser.add_argument(
        "--points", type=int, default=40, help="system calls of a push to lose power after (default 40)"
    )
    parser.add_argument("--seconds", type=float, default=180, help="lose no more power after so long (default 180)")
    options = parser.parse_args()
    reason = mounts.refused(loop=True)
    if reason:
        print(f"powerloss: SKIPPED {reason}")
        return 0
    losses, violations = 0, 0
    with (
        tempfile.TemporaryDirectory(prefix="wb-power-") as base,
        mounts.power_loss_disk(Path(base)) as disk,
        Yard(Path(base) / "yard", remote=disk.at / "remote", state=disk.at / "state") as yard,
    ):
        disk_forgets(disk)
        ways: list[tuple[str, Callable[[], bool | None]]] = [
            (f"{WAYS[turn % 3].__name__} {turn}", partial(WAYS[turn % 3], yard, disk, turn))
            for turn in range(3 * options.rounds)
        ]
        if kill.available() is None:
            points = calls_of_a_push(yard, disk, options.points)
            ways += [(f"at {p}", partial(at_call, yard, disk, turn, p)) for turn, p in enumerate(points)]
        deadline = time.monotonic() + options.seconds
        for name, way in ways:
            if time.monotonic() > deadline:
                break
            try:
                losses += way() is not False
                yard.acknowledge_all()
            except BrokenError as error:
                violations += 1
                print(f"powerloss: {name}: {error}")
    print(f"powerloss: {losses} power losses, {violations} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
