"""What the reading commands cost beside `python -c pass`: ls with 20 and with 100,000 versions, show, status, help.

The commands run in turns with the bare interpreter, from a filled cache; the daemon runs for `status`. What counts is
the CPU of the whole process, user and system, as the kernel counts it.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from weighbridge.registry import layout, types
from weighbridge.registry.flow import feed
from weighbridge.registry.flow.marker import open_registry
from weighbridge.registry.remotes.table import open_remote
from weighbridge_testlib import measure
from weighbridge_testlib.builders import lora_adapter
from weighbridge_testlib.yard import BIN, Yard

BAR = 5.0
NAMES = 2000


def a_team_of_twenty(yard: Yard) -> None:
    """Publish 20 versions for real and fill the cache."""
    for number in range(20):
        folder = lora_adapter(yard.folder / f"adapter-{number}", seed=number)
        done = yard.push(folder, f"model-{number % 5}")
        if done.returncode:
            raise SystemExit(f"registry push failed: {done.stderr[-1000:]}")


def a_crowd(yard: Yard, versions: int) -> None:
    """Announce so many versions in a feed of their own; their objects are never asked for."""
    remote = open_remote(str(yard.remote))
    registry = open_registry(remote, create=True)
    at: feed.Head | None = None
    entries = []
    for number in range(versions):
        name, n = f"model-{number % NAMES:04d}", number // NAMES + 1
        row = types.Row(
            kind="adapter",
            base="example-org/tiny-base",
            license="apache-2.0",
            size=162_000_000 + number,
            parameters=40_000_000,
            owner="lw",
            step=100 * n,
            run=f"team/run-{number % NAMES}",
            run_id=f"{number % NAMES:064x}",
            created_at=f"2026-{number % 11 + 1:02d}-{number % 28 + 1:02d}T{number % 24:02d}:42:10Z",
        )
        digest = f"{number:064x}"
        entries.append(
            types.FeedEntry(
                type="version",
                name=name,
                n=n,
                content=f"sha256:{digest}",
                source=layout.manifest(name, n),
                sha256=digest,
                row=row,
                stored_at=row.created_at,
            )
        )
        if len(entries) == feed.ENTRIES_MAX or number == versions - 1:
            at = feed.append(remote, registry, entries, at or feed.Head(0, 1))
            entries = []
    remote.close()


def main() -> int:
    """Measure in turns and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25, help="runs of each command (default 25)")
    parser.add_argument("--versions", type=int, default=100_000, help="in the large cache (default 100,000)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wb-startup-") as base:
        small, large = Yard(Path(base) / "small"), Yard(Path(base) / "large")
        for yard in (small, large):
            del yard.env["PYTHONDONTWRITEBYTECODE"]
            with yard:
                yard.configure(remote={"max_age": "1d"})
        a_team_of_twenty(small)
        a_crowd(large, options.versions)
        registry = str(BIN / "registry")
        commands = {
            "python": (small, [sys.executable, "-c", "pass"]),
            "ls_20": (small, [registry, "ls"]),
            "ls_100k": (large, [registry, "ls"]),
            "ls_100k_json": (large, [registry, "ls", "--json"]),
            "show": (small, [registry, "show", "model-1@v2"]),
            "status": (small, [registry, "status"]),
            "help": (small, [registry, "--help"]),
        }
        costs: dict[str, list[measure.Cost]] = {name: [] for name in commands}
        with small.daemon():
            rows = {}
            for name, (yard, command) in commands.items():  # once for warmth, and to see that it does what it should
                done = yard.run(command)
                if done.returncode:
                    raise SystemExit(f"{name} ended with {done.returncode}: {done.stderr[-1000:]}")
                rows[name] = len(done.stdout.splitlines())
            for _ in range(options.rounds):
                for name, (yard, command) in commands.items():
                    costs[name].append(measure.cost(command, env=yard.env, cwd=yard.folder))
    best = {name: min(c.cpu for c in values) for name, values in costs.items()}
    middle = {name: statistics.median(c.cpu for c in values) for name, values in costs.items()}
    bars = {name: (middle[name] / middle["python"], BAR) for name in commands if name != "python"}
    return measure.report(
        "startup",
        bars,
        rounds=options.rounds,
        cpu_ms={
            name: {"min": round(1000 * best[name], 1), "median": round(1000 * middle[name], 1)} for name in commands
        },
        ratio_of_minima={name: round(best[name] / best["python"], 2) for name in bars},
        wall_ms={name: round(1000 * min(c.wall for c in values), 1) for name, values in costs.items()},
        lines_printed=rows,
    )


if __name__ == "__main__":
    sys.exit(main())
