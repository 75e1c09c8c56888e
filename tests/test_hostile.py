"""Two hundred hostile files, read by every container reader: nothing runs, nothing escapes, nothing costs much."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weighbridge_testlib import hostile

RUNNER = Path(hostile.__file__).with_name("hostile_run.py")
SECONDS = 3.0
"""CPU of the dearest file. The promise is one second; a busy test machine gets some room."""

MEMORY = 300 << 20


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Read the whole corpus once, each file in a process of its own under the audit hook."""
    home = tmp_path_factory.mktemp("hostile")
    corpus, canary = home / "corpus", home / "canary"
    attacks = hostile.corpus(corpus, canary)
    before = {path: path.stat().st_mtime_ns for path in sorted(home.rglob("*"))}
    done = subprocess.run(
        [sys.executable, str(RUNNER), str(corpus)],
        input=json.dumps([{"label": attack.label, "reader": attack.reader} for attack in attacks]),
        capture_output=True,
        text=True,
        cwd=corpus,
        check=True,
        timeout=110,
    )
    found = {line["label"]: line for line in map(json.loads, done.stdout.splitlines())}
    for attack in attacks:
        found[attack.label]["harmless"] = attack.harmless
    after = {path: path.stat().st_mtime_ns for path in sorted(home.rglob("*"))}
    found["the folder"] = {"same": before == after, "canary": canary.exists()}
    return found


def files(verdicts: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the verdicts on files."""
    return {label: verdict for label, verdict in verdicts.items() if label != "the folder"}


def test_the_corpus_is_large(verdicts: dict[str, dict[str, Any]]) -> None:
    """There are many more attacks than the sixty that were asked for, each with its own name."""
    assert len(files(verdicts)) >= 200


def test_nothing_runs_and_nothing_is_written(verdicts: dict[str, dict[str, Any]]) -> None:
    """No import, no process, no socket, no file opened for writing; the canary is untouched."""
    assert {label: v["events"] for label, v in files(verdicts).items() if v["events"]} == {}
    assert verdicts["the folder"] == {"same": True, "canary": False}


def test_every_file_ends_as_a_list_or_a_named_refusal(verdicts: dict[str, dict[str, Any]]) -> None:
    """No traceback, no killed process: a directory or one typed fault."""
    assert {label: v for label, v in files(verdicts).items() if v["result"] not in {"directory", "fault"}} == {}


def test_every_attack_is_refused(verdicts: dict[str, dict[str, Any]]) -> None:
    """What attacks is blocked by a hazard or a fault; only bombs that turn out empty may be listed."""
    passed = [
        label
        for label, v in files(verdicts).items()
        if v["result"] == "directory" and not any(":block:" in hazard for hazard in v["hazards"]) and not v["harmless"]
    ]
    assert passed == []


def test_no_file_costs_much(verdicts: dict[str, dict[str, Any]]) -> None:
    """Time and memory of each file stay within the budget."""
    assert {label: v["seconds"] for label, v in files(verdicts).items() if v["seconds"] > SECONDS} == {}
    assert {label: v["bytes"] for label, v in files(verdicts).items() if v["bytes"] > MEMORY} == {}


@pytest.mark.parametrize("label", sorted(hostile.live("/nowhere")))
def test_the_payloads_are_live(tmp_path: Path, label: str) -> None:
    """Plain pickle, in a process of its own, does fire each payload: the canary test means something."""
    canary = tmp_path / "canary"
    hostile_folder = tmp_path / "modules"
    hostile_folder.mkdir()
    (hostile_folder / f"{hostile.CANARY_MODULE}.py").write_text(f"import os\nos.makedirs({str(canary)!r})\n")
    (tmp_path / "payload").write_bytes(hostile.live(str(canary))[label])
    program = (
        "import pickle, sys; sys.path.insert(0, 'modules')\n"
        "try: pickle.loads(open('payload', 'rb').read())\n"
        "except Exception as error: print(type(error).__name__)\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=False, capture_output=True, timeout=30)
    assert canary.exists()
