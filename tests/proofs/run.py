"""Run the fault programs, each bounded, and count what came out: `make proofs`.

    python tests/proofs/run.py [NAME ...] [--quick] [-- ARGUMENTS for the one that is named]

Every program prints a closing line; it ends with 0 when it found nothing, prints SKIPPED with the reason where this
machine cannot run it, and ends with another code when a promise was broken. strace is installed when it is missing and
this is root on a machine with apt; nothing else is changed.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent


class Proof(NamedTuple):
    """A program, its arguments in a full and in a quick run, and the seconds it may take."""

    name: str
    full: tuple[str, ...]
    quick: tuple[str, ...]
    limit: int


PROOFS = (
    Proof("amnesia", (), (), 120),
    Proof("crash", ("--seconds", "450"), ("--points", "8"), 560),
    Proof("flip", ("--seconds", "280"), ("--seeds", "20"), 400),
    Proof("fulldisk", (), (), 240),
    Proof("hostile", (), (), 300),
    Proof(
        "hub_bad",
        ("--days", "no token", "gated", "renamed", "store blocked", "storage full", "commits used up", "cut"),
        ("--days", "gated", "storage full"),
        240,
    ),
    Proof("hub_chaos", ("--publishes", "24"), ("--publishes", "16"), 240),
    Proof("hub_daemons", (), ("--versions", "16"), 300),
    Proof("hub_kill", ("--every", "9"), ("--every", "18"), 300),
    Proof("hub_scarce", (), (), 300),
    Proof("merge", ("--kills", "12"), ("--kills", "6"), 300),
    Proof("powerloss", ("--seconds", "90"), ("--rounds", "1", "--points", "6"), 200),
    # Twice the promised five seconds: here words and codes count, as a machine may be busy with other things.
    Proof("s3_bad", ("--commands", "ls,push", "--bound", "10"), ("--commands", "push", "--bound", "10"), 300),
    Proof("s3_faults", ("--rounds", "20"), ("--rounds", "10"), 240),
    Proof("s3_kill", ("--every", "12"), ("--every", "20"), 240),
    Proof("s3_races", ("--contents", "40", "--kills", "8"), ("--contents", "24", "--kills", "5"), 240),
    Proof("slurm", ("--quick",), ("--quick",), 120),
)
TOTAL = 35 * 60


def install_strace() -> None:
    """Install strace where that needs nobody's leave."""
    if shutil.which("strace") or os.geteuid() != 0 or not shutil.which("apt-get"):
        return
    command = ["apt-get", "install", "-y", "-q", "strace"]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False, timeout=300)
    print(f"proofs: strace {'installed' if done.returncode == 0 else 'could not be installed'}", flush=True)


def run(proof: Proof, arguments: Sequence[str], seconds: float) -> str:
    """Run one program; return passed, failed or skipped."""
    command = [sys.executable, "-W", "error", str(HERE / f"{proof.name}.py"), *arguments]
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(HERE.parent / "lib"), "PYTHONSAFEPATH": "1"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    late = False
    try:
        stdout, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        late = True
        stdout = end(process)
    print(stdout, end="", flush=True)
    if late:
        print(f"{proof.name}: not done after {seconds:.0f} s", flush=True)
    if late or process.returncode != 0:
        return "failed"
    return "skipped" if f"{proof.name}: SKIPPED" in stdout else "passed"


def end(process: subprocess.Popen[str]) -> str:
    """Interrupt a program that takes too long, so that it can unmount its disks, then kill what is left of it."""
    process.send_signal(signal.SIGINT)
    try:
        stdout, _ = process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, _ = process.communicate()
    return stdout


def main() -> int:
    """Run what the command line names, all by default."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(p.name for p in PROOFS)}")
    parser.add_argument("--quick", action="store_true", help="a tenth of the kill points and seeds")
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:cut])
    unknown = set(options.names) - {proof.name for proof in PROOFS}
    if unknown:
        parser.error(f"no proof is called {', '.join(sorted(unknown))}")
    install_strace()
    begin = time.monotonic()
    outcomes: list[str] = []
    for proof in PROOFS:
        if options.names and proof.name not in options.names:
            continue
        left = TOTAL - (time.monotonic() - begin)
        started = time.monotonic()
        arguments = sys.argv[cut + 1 :] or (proof.quick if options.quick else proof.full)
        outcomes.append(run(proof, arguments, max(1.0, min(proof.limit, left))))
        print(f"{proof.name}: {outcomes[-1]} in {time.monotonic() - started:.0f} s", flush=True)
    counts = [f"{outcomes.count(word)} {word}" for word in ("passed", "failed", "skipped")]
    print(f"proofs: {', '.join(counts)}")
    return 1 if "failed" in outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
