"""`registry inspect` on the whole hostile corpus, files and folders: what each costs, and that nothing ran or got out.

Every entry is looked at twice in a process of its own under an audit hook (weighbridge_testlib.hostile_look), with
hard limits of CPU and memory. It must end in words within one second of CPU and 300 MB, whatever it is.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from weighbridge_testlib import hostile, hostile_folders, hostile_look

SECONDS = 1.0
MEMORY = 300 << 20


def judged(corpus: Path, labels: list[str]) -> list[dict[str, Any]]:
    """Look at entries of a corpus and return what came of each."""
    done = subprocess.run(
        [sys.executable, "-m", "weighbridge_testlib.hostile_look", str(corpus)],
        input=json.dumps(labels),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(hostile_look.__file__).parents[1])},
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def broken(one: dict[str, Any], *, harmless: bool) -> list[str]:
    """Return every promise that one entry broke."""
    if one.get("code") not in {0, 5, 8}:
        return [f"ended with {one.get('code')} {one.get('died', '')} {one.get('err', '')[:200]}"]
    found = [f"{one['seconds']:.2f} s of CPU"] if one["seconds"] > SECONDS else []
    found += [f"{one['bytes'] >> 20} MiB"] if one["bytes"] > MEMORY else []
    found += [f"did {one['events']}"] if one["events"] else []
    found += [f"prints {one['steering']}"] if one["steering"] else []
    found += ["JSON is broken"] if "broken_json" in one or one["json_code"] != one["code"] else []
    if one["code"] == 0 and not harmless:
        found.append("was accepted")
    return found


def main() -> int:
    """Look at everything; 1 when a promise was broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--whole", action="store_true", help="the folders of sheer size, too")
    options = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="wb-hostile-") as base:
        home, canary = Path(base), Path(base) / "canary"
        folders = hostile_folders.folders(home / "folders", canary, light=not options.whole)
        files = hostile.corpus(home / "files", canary)
        seen: list[dict[str, Any]] = []
        for place, attacks in (("folders", folders), ("files", files)):
            harmless = {attack.label: attack.harmless for attack in attacks}
            for one in judged(home / place, [attack.label for attack in attacks]):
                seen.append(one)
                for promise in broken(one, harmless=harmless[one["label"]]):
                    failed += 1
                    print(f"hostile: {one['label']}: {promise}")
        failed += len(folders) + len(files) - len(seen)
        if canary.exists():
            failed += 1
            print("hostile: something ran: the canary is there")
    worst = max(seen, key=lambda one: one.get("seconds", 0.0))
    largest = max(seen, key=lambda one: one.get("bytes", 0))
    print(
        f"hostile: {len(seen)} entries, {failed} broken promises; dearest {worst['label']} {worst['seconds']:.2f} s, "
        f"largest {largest['label']} {largest['bytes'] >> 20} MiB"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
