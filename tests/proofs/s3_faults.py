"""Publish and pull through a network that breaks three requests in ten: `s3_faults.py [--rounds N] [--seed S]`.

Every round publishes a content, new or known, and pulls it. At the end each content has one version, every byte that
was pulled is right, and a sweep leaves no unfinished upload.
"""

import argparse
import sys
import time
import warnings
from collections import Counter

import pytest

from weighbridge_testlib import seaweed as servers
from weighbridge_testlib.s3_rounds import Rounds

EACH = 50
"""Rounds on one registry; then the next one begins."""


def main() -> int:
    """Run the rounds and print what came out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    try:
        servers.find("weed")
    except pytest.skip.Exception as reason:
        print(f"s3_faults: SKIPPED: {reason}")
        return 0
    # An answer so damaged that the library cannot parse it leaves its socket to the garbage collector.
    warnings.simplefilter("ignore", ResourceWarning)
    began = time.monotonic()
    with servers.alone() as (server, folder):
        found = [
            Rounds(server, folder, f"faults-{turn}", options.seed + turn).run(min(EACH, options.rounds - done))
            for turn, done in enumerate(range(0, options.rounds, EACH))
        ]
    broken, errors = Counter[str](), Counter[str]()
    for one in found:
        broken += one.broken
        errors += one.errors
    wrong, leaked = sum(one.wrong for one in found), sum(one.leaked for one in found)
    print(f"s3_faults: broken: {dict(sorted(broken.items()))}")
    print(f"s3_faults: tried again after: {dict(sorted(errors.items()))}")
    print(
        f"s3_faults: {sum(one.rounds for one in found)} rounds, {sum(one.versions for one in found)} versions, "
        f"{sum(one.requests for one in found)} requests, {sum(broken.values())} broken, {wrong} wrong, "
        f"{leaked} uploads left after sweeping {sum(one.swept for one in found)}, {time.monotonic() - began:.0f} s"
    )
    return 1 if wrong or leaked else 0


if __name__ == "__main__":
    sys.exit(main())
