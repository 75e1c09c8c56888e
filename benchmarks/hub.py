"""Publish to the test Hub, beside `hf upload`, side by side in one run and in both transports.

Three measurements with the same client underneath. *sent*: a trainer's checkpoint of 18 files as it lies there; what
each way sends of it. *publish*: the slim folder, by `hf upload` and by a running publisher such as the daemon, which
also stages, hashes, checks and reads back. *push*: the same by the command `registry push`, start of Python included.
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
from weighbridge_testlib.builders import trainer_checkpoint
from weighbridge_testlib.hub import TestHub, serve
from weighbridge_testlib.hub.rig import TRANSPORTS, environ, hf, publish, remote

BAR = 1.15
REGISTRY = Path(sys.executable).with_name("registry")


def checkpoint(folder: Path) -> int:
    """Write a checkpoint of 18 files, most of its bytes for resuming; return how many bytes."""
    trainer_checkpoint(folder, step=280, deepspeed_ranks=2, rank=64, tokenizer=True)
    (folder / "global_step280" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(os.urandom(8_000_000))
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def slim(folder: Path, seed: int) -> dict[str, bytes]:
    """Write an inference set of 2 MB and return its files."""
    files = {
        "adapter_model.safetensors": measure.noise(seed, 1_000_000, "BF16"),
        "adapter_config.json": b"{}\n" * 200,
        "tokenizer.json": b"a line of a tokenizer\n" * 3000,
        "tokenizer_config.json": b"{}",
        "special_tokens_map.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
    }
    folder.mkdir(parents=True)
    for path, body in files.items():
        (folder / path).write_bytes(body)
    return files


def timed(begin: float) -> float:
    """Return the seconds since a moment."""
    return time.monotonic() - begin


def sent(hub: TestHub, place: Path, env: dict[str, str]) -> dict[str, int]:
    """Send a whole checkpoint both ways and return what arrived."""
    whole = checkpoint(place / "runs" / "sft" / "checkpoint-280")
    folder = str(place / "runs" / "sft" / "checkpoint-280")
    subprocess.run([*command("hf"), "upload", "acme/whole", folder, "."], env=env, check=True, capture_output=True)
    push = [str(REGISTRY), "push", folder, "--name", "slim", "--remote", "hf://acme"]
    subprocess.run(push, env=env, check=True, capture_output=True)
    theirs, ours = hub.store.get("acme/whole").at(), hub.store.get("acme/slim").at()
    pickles = [path for path in ours if path.endswith((".bin", ".pt", ".pth", ".pkl", ".py"))]
    return {
        "folder_files": len([p for p in Path(folder).rglob("*") if p.is_file()]),
        "folder_bytes": whole,
        "hf_files": len(theirs) - 1,
        "hf_bytes": sum(entry.size for entry in theirs.values()),
        "our_files": len(ours) - 1,
        "our_bytes": sum(entry.size for entry in ours.values()),
        "our_pickles": len(pickles),
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
                files = slim(place / "slim" / str(turn), turn)
                began = time.monotonic()
                done = hf(env, "upload", f"acme/theirs-{turn}", str(place / "slim" / str(turn)), ".")
                theirs.append(timed(began))
                assert done.returncode == 0, done.stderr
                began = time.monotonic()
                publish(publisher, place / "slim" / str(turn), f"ours-{turn}", files=files)
                ours.append(timed(began))
                trainer_checkpoint(place / "push" / str(turn), step=1, seed=turn, rank=64, tokenizer=True)
                push = [str(REGISTRY), "push", str(place / "push" / str(turn)), "--name", f"push-{turn}"]
                began = time.monotonic()
                subprocess.run([*push, "--remote", "hf://acme"], env=env, check=True, capture_output=True)
                pushed.append(timed(began))
            publisher.close()
        ratio = statistics.median(ours) / statistics.median(theirs)
        bars = {"ratio": (round(ratio, 3), BAR), "our_pickles": (float(arrived["our_pickles"]), 0.0)}
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
