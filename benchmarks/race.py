"""Race a slow trainer: nothing may be visible on the remote before it is whole, and all of it soon after.

A writer makes four shards of 33 MB in steps, with one long stall in the middle of each, the index after them and, after
a pause, tokenizer.json, while the daemon watches with its default settings. A poller looks at the directory remote all
the time, as a teammate's loader might.
"""

import argparse
import json
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from weighbridge_testlib import measure
from weighbridge_testlib.builders import (
    TensorSpec,
    index_of,
    llama_config,
    safetensors_bytes,
    shard_names,
    trainer_state,
    write_json,
    write_tokenizer,
)
from weighbridge_testlib.yard import Yard, until

QUIET, SCAN = 60.0, 30.0
RESERVE = 25_000_000_000


class Writer(threading.Thread):
    """The trainer; `ended` is the moment of its last write."""

    def __init__(self, folder: Path, shards: dict[str, bytes], index: Any, options: argparse.Namespace) -> None:
        super().__init__(daemon=True)
        self.folder, self.shards, self.index, self.options = folder, shards, index, options
        self.ended = 0.0

    def run(self) -> None:
        """Write in the order of save_pretrained, tokenizer last, and the end mark after it where one is asked for."""
        self.folder.mkdir(parents=True)
        write_json(self.folder / "config.json", llama_config())
        for name, body in self.shards.items():
            self.shard(self.folder / name, body)
        write_json(self.folder / "model.safetensors.index.json", self.index)
        time.sleep(self.options.pause)
        with tempfile.TemporaryDirectory() as scratch:
            write_tokenizer(Path(scratch))
            shutil.copyfile(Path(scratch) / "tokenizer.json", self.folder / "tokenizer.json")
        if self.options.mark:
            write_json(self.folder / "trainer_state.json", trainer_state(280))
        self.ended = time.time()

    def shard(self, path: Path, body: bytes) -> None:
        """Write one shard in steps, with one stall in the middle."""
        steps = self.options.steps
        with path.open("wb", buffering=0) as stream:
            for step in range(steps):
                stream.write(body[len(body) * step // steps : len(body) * (step + 1) // steps])
                time.sleep(self.options.stall if step == steps // 2 else self.options.step_seconds)


class Poller(threading.Thread):
    """A teammate who looks all the time; counts what must never be seen."""

    def __init__(self, remote: Path, sizes: dict[str, int]) -> None:
        super().__init__(daemon=True)
        self.remote, self.sizes = remote, sizes
        self.stopped = threading.Event()
        self.truncated: set[tuple[str, int]] = set()
        self.partial, self.loadable, self.polls = 0, 0, 0
        self.published = 0.0

    def run(self) -> None:
        """Look until told to stop."""
        while not self.stopped.wait(0.01):
            self.polls += 1
            for folder in self.remote.glob("models/*/v[0-9]*"):
                self.look(folder)

    def look(self, folder: Path) -> None:
        """Judge one version folder as it is this instant; the decision is looked at before the files it speaks of."""
        decided = (folder / "manifest.json").exists()
        config = (folder / "config.json").exists()
        seen = {p.name: p.stat().st_size for p in folder.iterdir() if p.is_file()}
        wrong = {(n, size) for n, size in seen.items() if n in self.sizes and size != self.sizes[n]}
        self.truncated |= wrong
        weights = {name for name in self.sizes if name.endswith(".safetensors")}
        if decided and (wrong or set(self.sizes) - set(seen)):
            self.partial += 1
        if config and weights - set(seen):
            self.loadable += 1
        if decided and not self.published:
            self.published = (folder / "manifest.json").stat().st_mtime


def shards_of(count: int, megabytes: float) -> tuple[dict[str, bytes], Any]:
    """Return the bytes of so many shards of random BF16 weights, and their index."""
    names = shard_names(count)
    columns = 1024
    rows = int(megabytes * 1_000_000) // (2 * columns)
    parts: list[tuple[str, dict[str, TensorSpec]]] = []
    for i, name in enumerate(names):
        body = measure.noise(i, rows * columns, "BF16")
        parts.append((name, {f"model.layers.{i}.mlp.up_proj.weight": ("BF16", (rows, columns), body)}))
    return {name: safetensors_bytes(tensors) for name, tensors in parts}, index_of(parts)


def main() -> int:
    """Race once and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scan-only", action="store_true", help="no file events: the periodic scan alone")
    parser.add_argument("--mark", action="store_true", help="the writer ends with trainer_state.json, an end mark")
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--megabytes", type=float, default=33, help="of each shard")
    parser.add_argument("--steps", type=int, default=16, help="writes per shard")
    parser.add_argument("--step-seconds", type=float, default=0.12)
    parser.add_argument("--stall", type=float, default=2.5, help="seconds, once in each shard")
    parser.add_argument("--pause", type=float, default=6.0, help="seconds before tokenizer.json")
    parser.add_argument("--directory", type=Path, help="where to work (default: the temporary folder)")
    options = parser.parse_args()
    shards, index = shards_of(options.shards, options.megabytes)
    with tempfile.TemporaryDirectory(prefix="wb-race-", dir=options.directory) as base, Yard(Path(base)) as yard:
        lowered = shutil.disk_usage(base).free < RESERVE
        keys = dict.fromkeys(("scan", "quiet", "disk_reserve"))
        yard.configure(
            daemon={**keys, "disk_reserve": "100 MB" if lowered else None},
            watch=dict.fromkeys(("publish", "min_interval", "backfill", "name")),
        )
        sizes = {name: len(body) for name, body in shards.items()}
        yard.remote.mkdir()
        if options.scan_only:
            yard.without_events()
        with yard.daemon() as daemon:
            writer = Writer(yard.runs / "race/run-1/checkpoint-280", shards, index, options)
            poller = Poller(yard.remote, sizes)
            poller.start()
            writer.start()
            writer.join()
            until(lambda: poller.published, QUIET + 2 * SCAN + 60, f"the version; {yard.log_tail()}")
            time.sleep(2)
            poller.stopped.set()
            poller.join()
            written = measure.written_bytes(daemon.pid)
        manifest = json.loads(next(yard.remote.glob("models/*/v1/manifest.json")).read_text())
        final = sum(f["size"] for f in manifest["files"])
        if {f["path"] for f in manifest["files"]} < {*shards, "tokenizer.json", "config.json"}:
            poller.partial += 1
        yard.check(contents=1, closed=True, swept=0.0)
        settle = 0.0 if options.mark else QUIET
        late = poller.published - writer.ended - settle
        return measure.report(
            "race",
            {
                "truncated_files_visible": (len(poller.truncated), 0),
                "partial_moments": (poller.partial, 0),
                "loadable_before_whole_moments": (poller.loadable, 0),
                "written_ratio": (max(written.values()) / final, 1.01),
                "seconds_after_settling": (late, SCAN + 5 if options.scan_only else 10),
            },
            mode="scan-only" if options.scan_only else "events",
            end_mark=options.mark,
            final_bytes=final,
            written=written,
            polls=poller.polls,
            published_after_last_write_s=round(poller.published - writer.ended, 2),
            disk_reserve_lowered=lowered,
        )


if __name__ == "__main__":
    sys.exit(main())
