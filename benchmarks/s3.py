"""Publish to and pull from a local S3 server, beside boto3's transfer manager and command lines, in one run.

Ours hashes, verifies and refuses to overwrite; the others do not. Each measurement is a process of its own, in turns,
so that the machine's mood meets all alike; a library's time begins when it is imported, a command's when it starts.
"""

import argparse
import filecmp
import gc
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import boto3

from weighbridge.registry.flow.marker import open_registry
from weighbridge.registry.flow.publish import prepare, publish
from weighbridge.registry.flow.pull import pull
from weighbridge.registry.flow.sources import SourceFile
from weighbridge.registry.hashing import sha256_file
from weighbridge.registry.remotes.s3.probe import record_path
from weighbridge.registry.remotes.s3.remote import S3Remote
from weighbridge_testlib import measure, seaweed
from weighbridge_testlib.publishing import OWNER
from weighbridge_testlib.seaweed import ACCESS, BUCKET, SECRET, Server
from weighbridge_testlib.shelf import facts

MIB: Final = 1 << 20
SETS: Final = {"large": (1, 512 * MIB), "many": (8, 128 * MIB), "small": (500, 20_000)}
"""How many files of which size."""

BARS: Final = {"publish": {"large": 1.2, "many": 1.2, "small": 0.5}, "pull": {"large": 0.6, "many": 0.6, "small": 0.5}}
"""At most so many times the time of boto3's transfer manager."""

TOOLS: Final = ("aws", "rclone", "s5cmd")
"""Command lines that are compared where they are on the PATH; they are no dependencies."""

MEMORY: Final = 200 * MIB
NAME: Final = "bench"


# ---------------------------------------------------------------------------------------------- one way, in one process


def opened(endpoint: str, prefix: str) -> S3Remote:
    """Open the remote as commands do: what was found out of a store is believed for 30 days, not asked each time."""
    place = Server(endpoint, BUCKET).place(prefix)
    return S3Remote(place, record=record_path(Path(os.environ["WEIGHBRIDGE_CACHE"]), endpoint, BUCKET))


def ours_publish(endpoint: str, prefix: str, folder: Path) -> None:
    """Publish a folder as the next version, without a copy: hashed, claimed, sent, verified, decided, announced."""
    gc.freeze()  # as `shell.warmed_up` does in every command
    remote = opened(endpoint, prefix)
    registry = open_registry(remote, create=True)
    files = [
        SourceFile(path=path.name, source=str(path), size=path.stat().st_size, role="weights")
        for path in sorted(folder.iterdir())
    ]
    made = prepare(remote, NAME, files, facts(), mode="direct")
    publish(remote, "bench", registry, made, OWNER, render=lambda *_: {"README.md": b"# bench\n"})
    remote.close()


def ours_pull(endpoint: str, prefix: str, folder: Path) -> None:
    """Pull the version into a folder that is not there yet, every byte hashed."""
    gc.freeze()
    remote = opened(endpoint, prefix)
    pull(remote, NAME, 1, folder)
    remote.close()


def boto3_publish(endpoint: str, prefix: str, folder: Path) -> None:
    """Upload a folder with the transfer manager, one file after the other as its users do, parts in parallel."""
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
    for path in sorted(folder.iterdir()):
        client.upload_file(str(path), BUCKET, f"{prefix}/{path.name}")


def boto3_pull(endpoint: str, prefix: str, folder: Path) -> None:
    """Download what is below a prefix with the transfer manager."""
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
    folder.mkdir(parents=True)
    for entry in client.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/")["Contents"]:
        client.download_file(BUCKET, entry["Key"], str(folder / entry["Key"].rpartition("/")[2]))


PASSES: Final = {"ours-publish": 2, "ours-pull": 1, "boto3-publish": 1, "boto3-pull": 0}
"""How often the bytes are hashed with SHA-256: by ours for the file and, before the claim or while it is sent, for what
goes in one request; by the library for its signature."""

WAYS: Final[dict[str, Callable[[str, str, Path], None]]] = {
    "ours-publish": ours_publish,
    "ours-pull": ours_pull,
    "boto3-publish": boto3_publish,
    "boto3-pull": boto3_pull,
}


def child(way: str, endpoint: str, prefix: str, folder: Path) -> int:
    """Carry out one way and print its seconds, its CPU seconds, the kernel's of these, and peak memory; no imports."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    begun = time.monotonic()
    WAYS[way](endpoint, prefix, folder)
    seconds = time.monotonic() - begun
    used = resource.getrusage(resource.RUSAGE_SELF)
    status = Path("/proc/self/status").read_text()  # ru_maxrss is that of the parent at first
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
    kernel = used.ru_stime - before.ru_stime
    print(json.dumps([seconds, used.ru_utime - before.ru_utime + kernel, kernel, peak * 1024]))
    return 0


# ---------------------------------------------------------------------------------------------------------- all of them


def transfer(server: Server, place: Path, kinds: list[str], rounds: int) -> int:
    """Measure every way on every set of files and print one line for each set; 1 when a bar was missed."""
    worst = 0
    servers = measure.children(os.getpid())
    for kind in kinds:
        count, size = SETS[kind]
        source = place / kind
        source.mkdir()
        for number in range(count):
            (source / f"part-{number:03}.bin").write_bytes(os.urandom(size))
        found: dict[str, list[list[float]]] = {}
        for turn in range(rounds):
            for way in WAYS:
                prefix = f"{way.partition('-')[0]}-{kind}-{turn}"
                target = place / "pulled"
                served = sum(map(measure.processor_seconds, servers))
                run = _run(way, server, prefix, source if "publish" in way else target)
                served = sum(map(measure.processor_seconds, servers)) - served
                found.setdefault(way, []).append([*run, served])
                if "pull" in way:
                    _same(source, target)
                    shutil.rmtree(target)
            for way, command in _commands(server, f"tool-{kind}-{turn}", source, place / "pulled").items():
                cost = measure.cost(command, env=_environ(place), cwd=place)
                assert cost.code == 0, command
                found.setdefault(way, []).append([cost.wall, cost.cpu])
                shutil.rmtree(place / "pulled", ignore_errors=True)
        hashed = _hash_seconds(source)
        shutil.rmtree(source)
        middle = {way: [statistics.median(column) for column in zip(*runs, strict=True)] for way, runs in found.items()}
        bars = {
            f"{what}_ratio": (middle[f"ours-{what}"][0] / middle[f"boto3-{what}"][0], bar[kind])
            for what, bar in BARS.items()
        }
        bars |= {f"{what}_memory_mib": (middle[f"ours-{what}"][3] / MIB, MEMORY / MIB) for what in BARS}
        worst |= measure.report(
            f"s3-{kind}",
            bars,
            files=count,
            bytes=count * size,
            seconds={way: round(middle[way][0], 2) for way in middle},
            cpu={way: round(middle[way][1], 2) for way in middle},
            profile={way: _profile(middle[way], PASSES[way] * hashed) for way in WAYS},
            absent=[tool for tool in TOOLS if shutil.which(tool) is None],
        )
    return worst


def _run(way: str, server: Server, prefix: str, folder: Path) -> list[float]:
    command = [sys.executable, str(Path(__file__).resolve()), "--child", way, server.endpoint, prefix, str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: list[float] = json.loads(done.stdout)
    return found


def _hash_seconds(folder: Path) -> float:
    """Return the CPU seconds of hashing every file of a folder once."""
    before = time.process_time()
    for path in folder.iterdir():
        sha256_file(path)
    return time.process_time() - before


def _profile(run: list[float], hashed: float) -> dict[str, float]:
    """Say where a way's time goes: CPU seconds by what needs them, and the seconds these need at the least.

    `kernel` is sockets and files, `rest` the interpreter and its libraries, `server` the other end, on the same cores.
    """
    _, cpu, kernel, _, served = run
    rest = max(0.0, cpu - kernel - hashed)
    least = (cpu + served) / (os.cpu_count() or 1)
    parts = {"hash": hashed, "kernel": kernel, "rest": rest, "server": served, "least_seconds": least}
    return {name: round(seconds, 2) for name, seconds in parts.items()}


def _same(source: Path, target: Path) -> None:
    for path in source.iterdir():
        assert filecmp.cmp(path, target / path.name, shallow=False), path.name


def _commands(server: Server, prefix: str, source: Path, target: Path) -> Mapping[str, list[str]]:
    """Return the command lines of other tools, those that are installed."""
    found = {}
    there = f"{BUCKET}/{prefix}"
    aws, rclone, s5cmd = (shutil.which(tool) for tool in TOOLS)
    if aws:
        base = [aws, "--endpoint-url", server.endpoint, "--region", "us-east-1", "s3", "cp", "--recursive", "--quiet"]
        found["aws-publish"] = [*base, str(source), f"s3://{there}"]
        found["aws-pull"] = [*base, f"s3://{there}", str(target)]
    if rclone:
        remote = f":s3,provider=Other,env_auth=true,force_path_style=true,endpoint='{server.endpoint}':{there}"
        found["rclone-publish"] = [rclone, "copy", str(source), remote]
        found["rclone-pull"] = [rclone, "copy", remote, str(target)]
    if s5cmd:
        base = [s5cmd, "--log", "error", "--endpoint-url", server.endpoint, "cp"]
        found["s5cmd-publish"] = [*base, f"{source}/", f"s3://{there}/"]
        found["s5cmd-pull"] = [*base, f"s3://{there}/*", f"{target}/"]
    return found


def _environ(place: Path) -> dict[str, str]:
    return {**os.environ, "HOME": str(place), "RCLONE_CONFIG": str(place / "rclone.conf"), "AWS_REGION": "us-east-1"}


def main() -> int:
    """Measure and print one line of JSON for each set of files; 1 when a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sets", nargs="*", default=list(SETS), choices=list(SETS))
    parser.add_argument("--directory", type=Path, help="where the server and the files lie")
    parser.add_argument("--child", nargs=4, metavar="WORD", help=argparse.SUPPRESS)
    given = parser.parse_args()
    os.environ |= {"AWS_ACCESS_KEY_ID": ACCESS, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_EC2_METADATA_DISABLED": "true"}
    if given.child:
        way, endpoint, prefix, folder = given.child
        return child(way, endpoint, prefix, Path(folder))
    with tempfile.TemporaryDirectory(dir=given.directory) as folder:
        place = Path(folder)
        os.environ["WEIGHBRIDGE_CACHE"] = str(place / "cache")
        (place / "server").mkdir()
        with seaweed.running(place / "server") as server:
            return transfer(server, place, given.sets, given.rounds)


if __name__ == "__main__":
    sys.exit(main())
