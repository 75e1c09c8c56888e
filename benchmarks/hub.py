"""Publish to the test Hub, beside `hf upload`, side by side in one run and in both transports.

Three measurements with the same client underneath. *sent*: a trainer's checkpoint of 18 files as it lies there; what
each way sends of it, counted on the server. *publish*: the slim folder, by `hf upload` and by a running publisher such
as the daemon, which also stages, hashes, checks and reads back. *push*: such a folder by `registry push`, start of
Python included on both sides. Each way has a folder of the same sizes with bytes of its own. Ratios are medians of
rounds side by side; a push works with three processes, so with fewer than two idle cores it costs more than it would.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from weighbridge_testlib import measure
from weighbridge_testlib.builders import lora_adapter, trainer_checkpoint
from weighbridge_testlib.hub import TestHub, serve
from weighbridge_testlib.hub.rig import TRANSPORTS, environ, hf, publish, remote

BAR = 1.15
RANK = 3900
"""Of the slim adapter: some 2 MB."""
REGISTRY = Path(sys.executable).with_name("registry")


def checkpoint(folder: Path) -> int:
    """Write a checkpoint of 18 files, most of its bytes for resuming; return how many bytes."""
    trainer_checkpoint(folder, step=280, deepspeed_ranks=2, rank=64, tokenizer=True)
    (folder / "global_step280" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(os.urandom(8_000_000))
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def slim(folder: Path, seed: int) -> dict[str, bytes]:
    """Write an inference set of 2 MB, an adapter with its tokenizer and card, and return its files."""
    lora_adapter(folder, seed=seed, rank=RANK, tokenizer=True)
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "README.md"}


def timed(begin: float) -> float:
    """Return the seconds since a moment."""
    return time.monotonic() - begin


def sent(hub: TestHub, place: Path, env: dict[str, str]) -> dict[str, int]:
    """Send a whole checkpoint both ways and return what arrived."""
    whole = checkpoint(place / "runs" / "sft" / "checkpoint-280")
    folder = str(place / "runs" / "sft" / "checkpoint-280")
    subprocess.run([*command("hf"), "upload", "acme/whole", folder, "."], env=env, check=True, capture_output=True)
    arrived = hub.sent()
    push = [str(REGISTRY), "push", folder, "--name", "slim", "--remote", "hf://acme"]
    subprocess.run(push, env=env, check=True, capture_output=True)
    theirs, ours = hub.store.get("acme/whole").at(), hub.store.get("acme/slim").at()
    pickles = [path for path in ours if path.endswith((".bin", ".pt", ".pth", ".pkl", ".py"))]
    planned = sum(entry.size for entry in ours.values() if entry.sha256 is not None)
    return {
        "folder_files": len([p for p in Path(folder).rglob("*") if p.is_file()]),
        "folder_bytes": whole,
        "hf_files": len(theirs) - 1,
        "hf_bytes": sum(entry.size for entry in theirs.values()),
        "our_files": len(ours) - 1,
        "our_bytes": sum(entry.size for entry in ours.values()),
        "our_pickles": len(pickles),
        "hf_sent": arrived,
        "our_sent": hub.sent() - arrived,
        "our_sent_unplanned": max(0, hub.sent() - arrived - planned),
    }


def command(name: str) -> list[str]:
    """Return a program of this environment."""
    return [str(Path(sys.executable).with_name(name))]


def main() -> int:
    """Measure and print one line of JSON; 1 when the bar is missed or a pickle was sent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    worst = 0
    for way in ("lfs", "xet"):
        theirs, ours, pushed = [], [], []
        with tempfile.TemporaryDirectory() as folder, serve() as hub:
            place = Path(folder)
            env = environ(hub, place, **TRANSPORTS[way])
            env.pop("PYTHONDONTWRITEBYTECODE", None)
            env["PYTHONPYCACHEPREFIX"] = str(place / "pyc")
            publisher = remote(hub, place, way=way)
            arrived = sent(hub, place, env)
            for turn in range(given.rounds):
                # Each way has bytes of its own: a store that knows a file from the round before would not get it again.
                files = [slim(place / f"slim-{one}" / str(turn), 3 * turn + one) for one in range(3)]
                first, second, third = (place / f"slim-{one}" / str(turn) for one in range(3))
                began = time.monotonic()
                done = hf(env, "upload", f"acme/theirs-{turn}", str(first), ".")
                theirs.append(timed(began))
                assert done.returncode == 0, done.stderr
                began = time.monotonic()
                publish(publisher, second, f"ours-{turn}", files=files[1])
                ours.append(timed(began))
                push = [str(REGISTRY), "push", str(third), "--name", f"push-{turn}", "--remote", "hf://acme"]
                began = time.monotonic()
                subprocess.run(push, env=env, check=True, capture_output=True)
                pushed.append(timed(began))
            publisher.close()
        bars = {
            "ratio": (statistics.median(one / other for one, other in zip(ours, theirs, strict=True)), BAR),
            "push_ratio": (statistics.median(one / other for one, other in zip(pushed, theirs, strict=True)), BAR),
            "our_pickles": (float(arrived["our_pickles"]), 0.0),
            "our_sent_unplanned": (float(arrived["our_sent_unplanned"]), 0.0),
        }
        worst |= measure.report(
            f"hub-{way}",
            bars,
            hf_upload_s=round(statistics.median(theirs), 3),
            publish_s=round(statistics.median(ours), 3),
            registry_push_s=round(statistics.median(pushed), 3),
            **arrived,
        )
    return worst


if __name__ == "__main__":
    sys.exit(main())
