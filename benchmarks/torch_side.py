"""Torch's side of the benchmark `inspection`: makes a torch file, and reads its list beside our reader.

    torch_side.py FILE MATRICES ROWS ROUNDS

Writes so many matrices of ROWS x 2048 in BF16, lists them so many times in turns, and prints the CPU seconds as JSON.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from weighbridge.adapters.formats import readers


def make(file: Path, count: int, rows: int) -> None:
    """Save random matrices under the names of a model."""
    source = torch.Generator().manual_seed(count)
    table = {
        f"model.layers.{i // 7}.mlp.part_{i % 7}.weight": torch.randn((rows, 2048), generator=source).bfloat16()
        for i in range(count)
    }
    torch.save(table, file)


def race(file: Path, rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds of our reader and of torch's, in turns, each once unmeasured before."""
    ways: dict[str, Callable[[], object]] = {
        "weighbridge": lambda: readers.read(file),
        "torch_load_mmap": lambda: torch.load(file, mmap=True, map_location="cpu"),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1 if rounds else 0):
        for name, way in ways.items():
            begin = time.process_time()
            way()
            if turn:
                times[name].append(time.process_time() - begin)
    return times


def main() -> int:
    """Make the file, race, and print the seconds."""
    file, count, rows, rounds = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    make(file, count, rows)
    print(json.dumps(race(file, rounds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
