"""Halves of characters, which JSON and YAML can name and nothing else can hold: found where a file is read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weighbridge.adapters import history, sidecar
from weighbridge.adapters.inspect import inspect
from weighbridge.registry.errors import half_character
from weighbridge_testlib.builders import llama_model, lora_adapter, trainer_checkpoint, write_json
from weighbridge_testlib.yard import Yard

HALF = "a/\ud800x"


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file in place."""
    document = json.loads(path.read_text())
    change(document)
    write_json(path, document)


def adapter_base(folder: Path) -> None:
    """Make an adapter whose base has half a character in its name."""
    lora_adapter(folder)
    changed(folder / "adapter_config.json", lambda config: config.update(base_model_name_or_path=HALF))


def adapter_key(folder: Path) -> None:
    """Make an adapter with a key that no program knows, of half a character."""
    lora_adapter(folder)
    changed(folder / "adapter_config.json", lambda config: config.update({HALF: [{}]}))


def model_config(folder: Path) -> None:
    """Make a model whose config holds one deep inside."""
    llama_model(folder)
    changed(folder / "config.json", lambda config: config.update(rope_scaling={"type": ["x", HALF]}))


def index(folder: Path) -> None:
    """Make shards whose index holds one."""
    llama_model(folder, shards=2)
    changed(folder / "model.safetensors.index.json", lambda index: index["metadata"].update(by=HALF))


REFUSED: dict[Callable[[Path], None], str] = {
    adapter_base: "json-damaged",
    adapter_key: "json-damaged",
    model_config: "json-damaged",
    index: "index-damaged",
}


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_a_config_with_half_a_character_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """The finding names the file and the half; no fact is taken from such a file."""
    make(tmp_path)
    found = inspect(tmp_path)
    (told,) = [f for f in found.findings if f.code == REFUSED[make]]
    assert found.outcome == "refuse"
    assert r"\ud800 is half a character" in told.message
    assert half_character(found.facts) is None


def test_the_daemon_blocks_them_and_goes_on(tmp_path: Path) -> None:
    """None of them is a failure that nobody foresaw, and a sound neighbour is published."""
    with Yard(tmp_path) as yard:
        yard.configure(daemon={"scan": "200ms", "quiet": "200ms"})
        for make in REFUSED:
            make(yard.runs / "team" / make.__name__ / "final")
        lora_adapter(yard.runs / "team/sound/final")
        done = yard.daemon_once("--json")
        assert done.returncode == 5, done.stderr
        assert [row["name"] for row in json.loads(done.stdout)["published"]] == ["team-sound"]
        told = json.loads(yard.registry("status", "--json").stdout)
        assert (told["queue"].get("blocked"), told["queue"].get("quarantined")) == (len(REFUSED), None)


def test_what_only_tells_about_a_run_is_left_unread(tmp_path: Path) -> None:
    """A trainer state or a card with half a character gives no facts and a warning; a sidecar refuses."""
    folder = trainer_checkpoint(tmp_path / "checkpoint-10", step=10)
    changed(folder / "trainer_state.json", lambda state: state["log_history"].append({"step": 10, HALF: 0.5}))
    (folder / "README.md").write_text('---\nlicense: mit\nbase_model: "a/\\ud800x"\n---\n')
    found = inspect(folder)
    assert {"trainer-state-damaged", "card-front-matter-invalid"} <= {f.code for f in found.findings}
    assert found.outcome == "warn"
    assert history.read(folder) is None
    (folder / "weighbridge.yaml").write_text('owner: "\\ud800"\n')
    assert [f.code for f in sidecar.read(folder).findings] == ["sidecar-invalid"]


def test_the_pieces_of_a_tokenizer_are_its_own(tmp_path: Path) -> None:
    """A vocabulary may cut characters in two; it is published as it is."""
    folder = llama_model(tmp_path)
    write_json(folder / "vocab.json", dict.fromkeys(["\ud800", "\udc80"], 1))
    assert inspect(folder).outcome == "accept"


@pytest.mark.parametrize("value", ["\ud800", ["x", "\udfff"], {"a": {"\ud912": 1}}, {"a": ("b", ["\udc80"])}])
def test_halves_are_found_however_deep(value: Any) -> None:
    """Keys, values, lists: whatever holds the half."""
    assert half_character(value) in {r"\ud800", r"\udfff", r"\ud912", r"\udc80"}


@pytest.mark.parametrize("value", ["", "é", "\U0001f600", {"a": [1, None, 2.5, "ü"]}, 3])
def test_whole_text_has_none(value: Any) -> None:
    """Characters beyond the basic plane are whole."""
    assert half_character(value) is None
