"""`registry pull` and `push`: a folder becomes a version, and a version a folder."""

import json
from pathlib import Path

import pytest

from weighbridge.registry import layout
from weighbridge.registry.cli import context
from weighbridge.registry.remotes.directory import open_directory
from weighbridge_testlib.builders import llama_model, lora_adapter, trainer_checkpoint, write_json
from weighbridge_testlib.desk import Desk, conforms
from weighbridge_testlib.faults import Call, Fault, Faulty
from weighbridge_testlib.shelf import payload


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """Return a desk with a name of one version."""
    desk = Desk(tmp_path, monkeypatch)
    desk.shelf.publish("medical-sft", step=280)
    return desk


def test_pull_prints_the_target_and_talks_on_stderr(desk: Desk) -> None:
    """Stdout is the path alone; what is fetched, file by file, and that it was verified stands on stderr."""
    said = desk.ok("pull", "medical-sft:latest", "model")
    assert said.out == "model\n"
    lines = said.err.splitlines()
    assert lines[0].startswith("medical-sft:latest -> v1 (")
    assert lines[0].endswith("from team, 3 files, 2.03 kB")
    assert {line.split()[0] for line in lines[1:4]} == set(payload(1))
    assert lines[-1].startswith("verified 3/3 sha256   2.03 kB in ")
    assert (desk.folder / "model" / "adapter_model.safetensors").read_bytes() == payload(1)["adapter_model.safetensors"]


def test_pull_without_a_target_makes_a_folder_of_the_name(desk: Desk) -> None:
    """The name is the default target."""
    assert desk.ok("pull", "medical-sft").out == "medical-sft\n"
    assert (desk.folder / "medical-sft" / "manifest.json").is_file()


def test_pull_json_is_the_documented_contract(desk: Desk) -> None:
    """--json follows its schema, for a fetch and for a target that is there already."""
    first = conforms(desk.ok("pull", "medical-sft", "model", "--json").json, "pull")
    assert (first["ref"], first["fetched"], first["already"]) == ("medical-sft@v1", first["bytes"], False)
    assert first["path"] == str(desk.folder / "model")
    again = conforms(desk.ok("pull", "medical-sft", "model", "--json").json, "pull")
    assert (again["fetched"], again["already"]) == (0, True)
    part = conforms(desk.ok("pull", "medical-sft", "part", "--include", "*.json", "--json").json, "pull")
    assert (part["partial"], part["files"]) == (True, ["adapter_config.json", "tokenizer/tokenizer.json"])


def standing(desk: Desk) -> list[Path]:
    """Return everything on the desk but the cache."""
    return sorted(path for path in desk.folder.rglob("*") if desk.cache not in {path, *path.parents})


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("medical-sft@v7",), 3),
        (("nobody",), 3),
        (("medical-sft", "taken"), 7),
        (("medical-sft", "--include", "*.gguf"), 2),
        (("medical-sft", "--step", "1"), 3),
    ],
)
def test_pull_says_why_not(desk: Desk, words: tuple[str, ...], code: int) -> None:
    """Each failure has its exit code and leaves everything as it was."""
    (desk.folder / "taken").mkdir()
    (desk.folder / "taken" / "mine.txt").write_text("mine")
    before = standing(desk)
    said = desk.registry("pull", *words, "--json")
    assert said.code == code
    conforms(said.error, "error")
    assert standing(desk) == before


def test_a_damaged_byte_ends_with_5_and_the_name_of_the_file(desk: Desk) -> None:
    """Nothing is delivered, and the error names the file."""
    path = desk.root / layout.version("medical-sft", 1, "adapter_model.safetensors")
    body = bytearray(path.read_bytes())
    body[77] ^= 8
    path.chmod(0o600)
    path.write_bytes(body)
    said = desk.registry("pull", "medical-sft", "model", "--json")
    assert said.code == 5
    assert said.error["data"]["file"] == "adapter_model.safetensors"
    assert not (desk.folder / "model").exists()


def test_a_numbered_version_comes_through_a_damaged_catalogue(desk: Desk) -> None:
    """name@v1 needs no feed; `latest` does, and says so."""
    (desk.root / layout.feed(1)).unlink()
    said = desk.ok("pull", "medical-sft@v1", "model")
    assert "warning: the team's catalogue is damaged" in said.err
    assert desk.registry("pull", "medical-sft", "other").code == 5


def test_a_checkpoint_becomes_a_version(desk: Desk) -> None:
    """Push prints the version, the next `ls` shows it, and a pull brings back the very bytes."""
    folder = trainer_checkpoint(desk.folder / "runs" / "sft-1" / "checkpoint-300", step=300, seed=5)
    said = desk.ok("push", folder, "--name", "counting")
    assert said.out == "counting@v1\n"
    assert "sha256-read on team" in said.err
    row = desk.ok("ls", "counting", "--json").json["versions"][0]
    assert (row["step"], row["kind"], row["base"]) == (300, "adapter", "example-org/tiny-base")
    desk.ok("pull", "counting", "model")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (desk.folder / "model" / name).read_bytes() == (folder / name).read_bytes()
    assert not (desk.folder / "model" / "trainer_state.json").exists()
    assert "registry pull counting@v1" in (desk.folder / "model" / "README.md").read_text()
    assert json.loads((desk.folder / "model" / "training.json").read_text())["step"] == 300


def test_the_same_bytes_keep_their_number(desk: Desk) -> None:
    """Pushing twice, or a copy from elsewhere, gives the version that is there."""
    folder = lora_adapter(desk.folder / "one", seed=1)
    assert desk.ok("push", folder, "--name", "twice").out == "twice@v1\n"
    said = desk.ok("push", lora_adapter(desk.folder / "two", seed=1), "--name", "twice")
    assert said.out == "twice@v1\n"
    assert "there already" in said.err
    assert (
        desk.ok("push", lora_adapter(desk.folder / "three", seed=2), "--name", "twice", "--share").out == "twice@v2\n"
    )


def test_push_json_is_the_documented_contract(desk: Desk) -> None:
    """--json follows its schema, with --dry-run too."""
    folder = llama_model(desk.folder / "full", shards=2)
    dry = conforms(desk.ok("push", folder, "--name", "full", "--dry-run", "--json").json, "push")
    assert (dry["dry_run"], dry["version"], dry["kind"]) == (True, None, "model")
    document = conforms(desk.ok("push", folder, "--name", "full", "--json").json, "push")
    assert (document["ref"], document["joined"], document["remote"]) == ("full@v1", False, "team")
    assert [file["path"] for file in document["files"]] == [file["path"] for file in dry["files"]]
    assert "license-unknown" in {finding["code"] for finding in document["findings"]}


def test_a_dry_run_writes_nothing(desk: Desk) -> None:
    """--dry-run says what would go and what would stay, and leaves the remote as it was."""
    folder = trainer_checkpoint(desk.folder / "runs" / "sft-1" / "checkpoint-300", step=300, seed=5)
    before = sorted(desk.root.rglob("*"))
    said = desk.ok("push", folder, "--name", "counting", "--dry-run")
    assert "would be published" in said.out
    assert "left out: optimizer.pt" in said.out
    assert sorted(desk.root.rglob("*")) == before


def test_what_is_not_whole_is_refused_with_its_reason(desk: Desk) -> None:
    """A missing shard ends with 5, names the shard, and publishes nothing."""
    folder = llama_model(desk.folder / "full", shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    said = desk.registry("push", folder, "--name", "full", "--json")
    assert said.code == 5
    error = conforms(said.error, "error")
    assert "model-00002-of-00003" in json.dumps(error)
    assert not (desk.root / "models" / "full").exists()


def test_an_allowed_finding_needs_a_reason(desk: Desk, tmp_path: Path) -> None:
    """What the remote's rules block is published when a person says why; integrity is never allowed."""
    with desk.config.open("a") as stream:
        stream.write('unknown_license = "block"\n')
    folder = llama_model(tmp_path / "full", readme="# no licence here\n")
    assert desk.registry("push", folder, "--name", "full").code == 5
    assert desk.registry("push", folder, "--name", "full", "--allow", "license-unknown").code == 2
    said = desk.ok("push", folder, "--name", "full", "--allow", "license-unknown", "--reason", "internal test")
    assert said.out == "full@v1\n"
    assert "internal test" in json.dumps(desk.ok("show", "full", "--json").json["manifest"]["findings"])


def test_the_name_comes_from_the_sidecar_when_none_is_given(desk: Desk) -> None:
    """A run that names itself needs no --name; one that does not is asked for it."""
    folder = lora_adapter(desk.folder / "run", seed=9)
    assert desk.registry("push", folder).code == 2
    (folder / "weighbridge.yaml").write_text("name: from-the-run\nowner: mina\n")
    assert desk.ok("push", folder).out == "from-the-run@v1\n"
    assert desk.ok("ls", "from-the-run", "--json").json["versions"][0]["owner"] == "mina"


@pytest.mark.parametrize(
    ("make", "code"),
    [("nothing", 3), ("empty", 5), ("config only", 5)],
)
def test_push_says_why_not(desk: Desk, make: str, code: int) -> None:
    """A folder that is not there, an empty one, a config without weights."""
    folder = desk.folder / "run"
    if make != "nothing":
        folder.mkdir()
    if make == "config only":
        write_json(folder / "adapter_config.json", {"peft_type": "LORA"})
    said = desk.registry("push", folder, "--name", "x", "--json")
    assert said.code == code
    conforms(said.error, "error")


def test_one_name_has_one_kind(desk: Desk) -> None:
    """A full model under an adapter's name is refused, with the name it should take."""
    said = desk.registry("push", llama_model(desk.folder / "full"), "--name", "medical-sft")
    assert said.code == 7
    assert "medical-sft-model" in said.err


def test_a_failed_push_leaves_no_copy_behind(desk: Desk) -> None:
    """After an error nothing waits in the remote's stage."""
    desk.registry("push", llama_model(desk.folder / "full"), "--name", "medical-sft")
    assert not [path for path in desk.root.rglob("_wb/stage/*") if path.is_dir()]


def test_a_version_the_team_was_not_told_of_is_no_failure(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up after the decision is a warning with its fix; the version is printed, and ls shows it."""

    def after_the_decision(call: Call) -> Fault | None:
        decided = desk.root.joinpath("models/sft/v1/manifest.json").exists()
        return "full" if decided and call.method == "create" else None

    monkeypatch.setattr(context, "connect", lambda remote: Faulty(open_directory(remote.url), after_the_decision))
    done = desk.ok("push", lora_adapter(desk.folder / "run"), "--name", "sft")
    assert done.out == "sft@v1\n"
    assert "warning: sft@v1 is published; telling the team failed: no room" in done.err
    assert desk.ok("ls", "--json").json["versions"][0]["ref"] == "sft@v1"


def test_a_second_run_needs_a_word_to_share_a_name(desk: Desk) -> None:
    """Checkpoints of one run share a name; another run is refused until the command is pasted that says --share."""
    for step in (10, 20):
        trainer_checkpoint(desk.folder / "runs" / "one" / f"checkpoint-{step}", step=step, seed=step)
        desk.ok("push", f"runs/one/checkpoint-{step}", "--name", "sft")
    trainer_checkpoint(desk.folder / "runs" / "two" / "checkpoint-10", step=10, seed=3)
    refused = desk.registry("push", "runs/two/checkpoint-10", "--name", "sft")
    assert refused.code == 7
    assert "registry push runs/two/checkpoint-10 --name sft --share\n" in refused.err
    assert desk.ok("push", "runs/two/checkpoint-10", "--name", "sft", "--share").out == "sft@v3\n"
