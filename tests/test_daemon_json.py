"""The daemon's JSON is a contract: real output of every command is valid by its published schema."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from weighbridge.registry import control
from weighbridge_testlib.builders import llama_model, lora_adapter, run_root
from weighbridge_testlib.yard import BIN, Yard, until

SCHEMAS = Path(__file__).parents[1] / "docs" / "schemas"


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    """Give a yard where something is published, something blocked, something unfinished and something set aside."""
    with Yard(tmp_path) as found:
        found.configure(daemon={"quiet": "0.3s", "scan": "1s"}, watch={"publish": None})
        found.config.write_text(found.config.read_text() + 'paths = "block"\n')
        run_root(found.runs / "team/good", steps=(1, 2), result=False)
        lora_adapter(found.runs / "team/private/checkpoint-1", base="/home/lw/base")
        llama_model(found.runs / "team/old/checkpoint-1", seed=1)
        llama_model(found.runs / "team/old/checkpoint-2", seed=2)
        (lora_adapter(found.runs / "team/half/checkpoint-1") / "adapter_config.json").unlink()
        yield found


def valid(name: str, text: str) -> Any:
    """Return the object in a text, checked against its schema."""
    document = json.loads(text)
    jsonschema.validate(document, json.loads((SCHEMAS / f"{name}.schema.json").read_text()))
    return document


def test_what_the_commands_print_is_valid(yard: Yard) -> None:
    """Status with everything in it, log, allow, drain, and the status of a daemon that is down."""
    with yard.daemon():

        def settled() -> bool:
            queue = control.ask(str(yard.socket), "status")["queue"]
            return (queue.get("done"), queue.get("blocked"), queue["skipped"]) == (3, 1, 1)

        until(settled, 30, "everything to end")
        told = valid("status", yard.registry("status", "--json").stdout)
        assert told["queue"]["unfinished"] == 1
        assert told["folders"][0]["reason"].startswith("adapter_config.json")
        assert {p["code"] for p in told["problems"] if p["severity"] == "block"} & {"base-local-path", "private-path"}
        assert told["skipped"]["reasons"] == {"not-chosen": 1}
        wide = yard.registry("status", "-o", "wide")
        assert "1 not-chosen" in wide.stdout
        names = yard.registry("status", "-q")
        assert str(yard.runs / "team/private/checkpoint-1") in names.stdout.split()
        events = valid("log", yard.registry("log", "--json").stdout)["events"]
        assert {"staged", "claimed", "committed", "done", "blocked", "skipped"} <= {e["event"] for e in events}
        table = yard.registry("log", "team-good", "-n", "2")
        assert table.stdout.splitlines()[0].split() == ["AT", "EVENT", "VERSION", "DETAIL"]
        assert len(table.stdout.splitlines()) == 3
        assert str(yard.runs / "team/good") in table.stdout
        code = next(p["code"] for p in told["problems"] if p["severity"] == "block")
        given = ["--code", code, "--reason", "a test", "--json"]
        allowed = yard.registry("allow", yard.runs / "team/private", *given)
        assert valid("allow", allowed.stdout)["retried"] == 1
        drained = yard.run([str(BIN / "registryd"), "drain", str(yard.runs / "team/good"), "--json"])
        assert valid("drain", drained.stdout)["published"] == ["team-good@v1", "team-good@v2"]
        half = yard.run([str(BIN / "registryd"), "drain", str(yard.runs / "team/half"), "--deadline", "1s", "--json"])
        assert valid("drain", half.stdout)["done"] is False
    assert valid("status", yard.registry("status", "--json").stdout)["daemon"]["state"] == "down"


def test_a_passage_and_its_preview_are_valid(yard: Yard) -> None:
    """`once` and `once --dry-run` print objects, also when something is blocked or not finished."""
    preview = yard.daemon_once("--dry-run", "--json")
    told = valid("preview", preview.stdout)
    assert told["count"] == sum(row["publish"] for row in told["artifacts"])
    reasons = {Path(row["path"]).parent.name: row["reason"] for row in told["artifacts"] if not row["publish"]}
    assert "adapter_config.json" in reasons["half"]
    assert "neither the best nor the last" in reasons["old"]
    done = yard.daemon_once("--json")
    assert done.returncode == 5
    published = valid("once", done.stdout)["published"]
    assert {row["name"] for row in published} == {"team-good", "team-old"}
    assert len(published) == 3


def test_once_says_what_its_warnings_are_about(yard: Yard) -> None:
    """Those without a daemon read stderr: a blocked folder and a root that is gone are named, with the reason."""
    folder = lora_adapter(yard.runs / "team/bad/final")
    config = folder / "adapter_config.json"
    config.write_text(config.read_text().replace('"r": 4', '"r": 16'))
    done = yard.daemon_once()
    assert done.returncode == 5
    blocked = [text for text in done.stderr.splitlines() if "a job is blocked" in text]
    (line,) = [text for text in blocked if f"path={folder}" in text]
    assert "the config says rank 16" in line
    shown = yard.registry("status").stdout
    assert f"{folder}" in shown
    assert f"registry allow {folder}" not in shown, "integrity is not for people to allow"
    yard.configure(watch={"root": f"{yard.folder}/gone"})
    assert f"root={yard.folder}/gone" in yard.daemon_once().stderr
