"""Run the measuring programs one after the other: `make bench`. Each prints one line of JSON.

python benchmarks/run.py [NAME ...] [-- ARGUMENTS for the one that is named]
"""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
RUNS = {
    "race": ((), ("--mark",), ("--scan-only",)),
    "startup": ((),),
    "idle": ((),),
    "ingest": ((),),
    "inspection": ((),),
    "merge": ((),),
    "hub": ((),),
    "s3": ((),),
    "catalogue": ((),),
}


def main() -> int:
    """Run what the command line names, all by default; 1 when a bar was missed."""
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    names, arguments = sys.argv[1:cut], sys.argv[cut + 1 :]
    unknown = set(names) - RUNS.keys()
    if unknown:
        print(f"benchmarks are: {', '.join(RUNS)}", file=sys.stderr)
        return 2
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent / "tests/lib"), "PYTHONSAFEPATH": "1"}
    worst = 0
    for name, variants in RUNS.items():
        if names and name not in names:
            continue
        for variant in [tuple(arguments)] if arguments else variants:
            command = [sys.executable, str(HERE / f"{name}.py"), *variant]
            worst = max(worst, abs(subprocess.run(command, env=environment, check=False).returncode))
    return min(worst, 1)


if __name__ == "__main__":
    sys.exit(main())
