"""`registry show`: one version on one screen, from the cache after the first look."""

from pathlib import Path

import pytest

from weighbridge.registry import layout
from weighbridge.registry.flow import tags
from weighbridge.registry.types import BestFacts, Finding
from weighbridge_testlib.desk import Desk, conforms


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """Return a desk with a name of two versions."""
    desk = Desk(tmp_path, monkeypatch)
    warn = Finding(code="license-unknown", severity="warn", subject="README.md", message="no licence is stated")
    note = Finding(code="license-inherited", severity="note", subject="README.md", message="from the base")
    desk.shelf.publish("medical-sft", step=100)
    desk.shelf.publish(
        "medical-sft",
        step=280,
        findings=[warn, note],
        best=BestFacts(metric="eval_loss", value=0.93, step=280),
        metrics={"loss": 0.81, "eval_loss": 0.93},
        code={"remote": "git.example.org/team/train", "commit": "0123456789abcdef", "dirty": True},
        data=[{"id": "acme/notes", "revision": "v3"}],
    )
    tags.move(desk.remote, desk.shelf.registry, "medical-sft", "prod", 1, "lw")
    return desk


def test_one_screen_says_it_all(desk: Desk) -> None:
    """What it is, its digest, when and by whom, base, licence, weights, adapter, code, data, files and checks."""
    said = desk.ok("show", "medical-sft")
    lines = said.out.splitlines()
    assert lines[0] == "medical-sft@v2   adapter, committed   tags: latest"
    facts = {line[:10].strip(): line[10:] for line in lines[1:] if line[:10].strip()}
    assert facts["digest"].startswith("sha256:")
    assert "by lw" in facts["created"]
    assert "run medical/run-1, step 280" in facts["created"]
    assert facts["base"].startswith("example-org/tiny-base")
    assert facts["license"] == "apache-2.0   (card: README.md)"
    assert facts["weights"] == "1 file, 8 tensors, F32 8, 448 parameters"
    assert facts["adapter"] == "LoRA r=4 alpha=8, targets q_proj v_proj"
    assert facts["best"] == "eval_loss 0.93 at step 280"
    assert facts["code"] == "git.example.org/team/train @ 0123456789ab (with changes that are not committed)"
    assert facts["data"] == "acme/notes @ v3"
    assert facts["copies"].startswith("team   ")
    assert facts["checks"] == "1 warning, 1 note"
    assert "warn license-unknown README.md: no licence is stated" in said.out
    assert "from the base" not in said.out
    assert "adapter_model.safetensors   2.00 kB" in said.out


def test_wide_shows_whole_digests_and_every_note(desk: Desk) -> None:
    """-o wide cuts nothing."""
    said = desk.ok("show", "medical-sft", "-o", "wide")
    manifest = desk.shelf.claims["medical-sft"][1][2]
    assert manifest.content in said.out
    assert manifest.digest in said.out
    assert all(file.sha256 in said.out for file in manifest.files)
    assert "from the base" in said.out


def test_json_holds_the_row_and_the_sealed_manifest(desk: Desk) -> None:
    """--json follows its schema; the manifest in it is the sealed one."""
    document = conforms(desk.ok("show", "medical-sft:prod", "--json").json, "show")
    assert document["version"]["ref"] == "medical-sft@v1"
    assert document["manifest"] == desk.shelf.claims["medical-sft"][0][2].document


@pytest.mark.parametrize("ref", ["medical-sft@v1", "medical-sft:prod", "@sha256:"])
def test_any_reference_will_do(desk: Desk, ref: str) -> None:
    """A number, a tag, a digest."""
    if ref == "@sha256:":
        ref += desk.shelf.claims["medical-sft"][0][2].content[7:19]
    assert desk.ok("show", ref, "-q").out == "medical-sft@v1\n"
    assert desk.ok("show", "medical-sft", "--step", "100", "-q").out == "medical-sft@v1\n"


def test_after_the_first_look_the_cache_is_enough(desk: Desk) -> None:
    """The manifest is kept: the second look needs no remote."""
    first = desk.ok("show", "medical-sft@v2")
    desk.root.rename(desk.folder / "gone")
    second = desk.ok("show", "medical-sft@v2")
    assert second.out == first.out
    assert "as of" in second.err
    assert desk.ok("show", "medical-sft@v2", "--offline").out == first.out


def test_offline_without_the_manifest_shows_what_is_known(desk: Desk) -> None:
    """The row alone is shown, and a hint how to get the rest."""
    desk.ok("ls")
    said = desk.ok("show", "medical-sft@v1", "--offline")
    assert said.out.startswith("medical-sft@v1   adapter, committed   tags: prod")
    assert "without --offline" in said.err
    document = conforms(desk.ok("show", "medical-sft@v1", "--offline", "--json").json, "show")
    assert document["manifest"] is None


def test_a_version_whose_end_was_not_told_is_found(desk: Desk) -> None:
    """Its claim is in the feed, so its decision is looked at."""
    desk.shelf.publish("medical-sft", step=300, tell_version=False)
    assert desk.ok("show", "medical-sft", "-q").out == "medical-sft@v3\n"


@pytest.mark.parametrize(
    ("ref", "code", "words"),
    [
        ("medical-sft@v9", 3, "there is no medical-sft@v9"),
        ("nobody", 3, "no name 'nobody'"),
        ("medical-sft:best", 3, "no tag 'best'"),
        ("medical-sft:v1", 2, "use medical-sft@v1"),
        ("@sha256:ffffffff", 3, "nothing begins"),
        ("a b", 2, "not a valid name"),
    ],
)
def test_what_is_not_there_is_explained(desk: Desk, ref: str, code: int, words: str) -> None:
    """Each with its reason and its exit code, in words and in JSON."""
    said = desk.registry("show", ref)
    assert (said.code, said.out) == (code, "")
    assert words in said.err
    error = conforms(desk.registry("show", ref, "--json").error, "error")
    assert error["exit_code"] == code
    assert desk.registry("show", ref, "--offline").code in {code, 3}


def test_a_damaged_manifest_is_not_shown(desk: Desk) -> None:
    """What was sealed is shown as it was sealed, or not at all."""
    path = desk.root / layout.manifest("medical-sft", 2)
    path.chmod(0o600)
    path.write_bytes(path.read_bytes().replace(b'"owner":"lw"', b'"owner":"lx"'))
    said = desk.registry("show", "medical-sft@v2")
    assert said.code == 5
    assert "manifest.json is damaged" in said.err
    assert said.out == ""


def test_control_characters_are_escaped(desk: Desk) -> None:
    """Nothing in a manifest can steer a terminal."""
    desk.shelf.publish("evil", purpose="\x1b]0;owned\x07", owner="a\x1b[2Jb")
    said = desk.ok("show", "evil", "-o", "wide")
    assert "\x1b" not in said.out
    assert "\x07" not in said.out


def test_numbers_have_six_digits_and_an_allowed_finding_its_reason(desk: Desk) -> None:
    """Metrics are rounded on the screen and whole in --json; why a block was allowed is told."""
    allowed = Finding(
        code="license-unknown", severity="warn", subject="README.md", message="none", data={"allowed": "legal agreed"}
    )
    desk.shelf.publish(
        "other", best=BestFacts(metric="eval_loss", value=2 / 9, step=3), metrics={"loss": 1 / 3}, findings=[allowed]
    )
    said = desk.ok("show", "other")
    assert "best      eval_loss 0.222222 at step 3\n" in said.out
    assert "metrics   loss 0.333333\n" in said.out
    assert "allowed: legal agreed" in said.out
    assert desk.ok("show", "other", "--json").json["manifest"]["provenance"]["metrics"]["loss"] == 1 / 3
