"""Merges of the running daemon: what `status`, `log` and `registryd merges` tell, and what they can be told."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from weighbridge.registry import control
from weighbridge_testlib import builders
from weighbridge_testlib.yard import BIN, Yard, until

SCHEMAS = Path(__file__).parents[1] / "docs" / "schemas"
REF = "team-run-1@v1"


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    """Give a yard whose rule merges all, with an adapter whose base is not there."""
    with Yard(tmp_path) as found:
        found.configure(daemon={"quiet": "0.2s"}, watch={"merge": "all"}, merge={"bases": [str(tmp_path / "models")]})
        builders.trainer_checkpoint(found.runs / "team/run-1/checkpoint-5", step=5)
        yield found


def merges(yard: Yard, *arguments: str) -> Any:
    """Return what `registryd merges --json` prints, checked against its schema."""
    done = yard.run([str(BIN / "registryd"), "merges", *arguments, "--json"])
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    jsonschema.validate(document, json.loads((SCHEMAS / "merges.schema.json").read_text()))
    return document["merges"]


def test_a_waiting_merge_is_shown_cancelled_and_tried_again(yard: Yard) -> None:
    """Status names base and cure, cancel and retry do as they say, the log tells each step, the version comes."""
    with yard.daemon():
        until(lambda: merging(yard)["listed"], 30, "the merge")
        until(lambda: merging(yard)["listed"][0]["state"] == "waiting", 30, "the wait")
        told = json.loads(yard.registry("status", "--json").stdout)
        jsonschema.validate(told, json.loads((SCHEMAS / "status.schema.json").read_text()))
        assert [p["code"] for p in told["problems"]] == ["merge-waits"]
        shown = yard.registry("status").stdout
        assert f"merges   waiting    {REF} to bf16" in shown
        assert "hf download example-org/tiny-base" in shown
        assert [m["state"] for m in merges(yard, "--cancel", REF)] == ["cancelled"]
        builders.llama_model(yard.folder / "models/example-org/tiny-base")
        assert [m["state"] for m in merges(yard, "--retry", REF)] == ["wanted"]
        until(lambda: merging(yard)["counts"] == {"done": 1}, 60, "the merged version")
        events = [e["event"] for e in control.ask(str(yard.socket), "log", {"name": "team-run-1"})]
        assert [e for e in events if e.startswith("merge")] == [
            "merge wanted", "merge waits", "merge cancelled", "merge wanted", "merge begun", "merge made", "merge done",
        ]  # fmt: skip
        unknown = yard.run([str(BIN / "registryd"), "merges", "--cancel", "nobody@v9"])
        assert unknown.returncode == 3
        nothing = yard.run([str(BIN / "registryd"), "merges"])
        assert (nothing.returncode, nothing.stdout, "no merge waits" in nothing.stderr) == (0, "", True)


def merging(yard: Yard) -> Any:
    """Return what status says of merges."""
    return control.ask(str(yard.socket), "status")["merges"]


def test_a_passage_carries_merges_to_their_end(yard: Yard) -> None:
    """`registryd once` ends 8 while the base is missing; without a daemon the merge is given up and taken up again."""
    assert yard.run([str(BIN / "registryd"), "merges"]).returncode == 6
    waiting = yard.daemon_once()
    assert waiting.returncode == 8
    assert "the base example-org/tiny-base is not here" in waiting.stderr
    assert [m["state"] for m in merges(yard, "--cancel", "team-run-1")] == ["cancelled"]
    assert yard.daemon_once().returncode == 0
    builders.llama_model(yard.folder / "models/example-org/tiny-base")
    assert [m["state"] for m in merges(yard, "--retry", REF)] == ["wanted"]
    done = yard.daemon_once()
    assert done.returncode == 0, done.stderr
    assert "team-run-1-merged-bf16@v1" in done.stdout
