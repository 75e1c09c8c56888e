"""What is put back is what the team was told of, and no fix names the sound one of two objects that differ."""

import re
from pathlib import Path

import pytest

from weighbridge.registry import layout
from weighbridge.registry.flow.decide import void
from weighbridge.registry.flow.marker import open_registry
from weighbridge_testlib.builders import lora_adapter
from weighbridge_testlib.desk import Desk

NAME = "chg"
CLAIM = layout.claim(NAME, 1)
MANIFEST = layout.manifest(NAME, 1)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """Return a desk with a mirror, and one version that was pushed from a folder."""
    desk = Desk(tmp_path, monkeypatch)
    (tmp_path / "backup").mkdir()
    with desk.config.open("a") as stream:
        stream.write(f'[remotes.backup]\nurl = "{tmp_path}/backup"\nmax_age = "1h"\n')
    monkeypatch.setenv("WEIGHBRIDGE_REMOTE", "team")
    desk.ok("push", lora_adapter(desk.folder / "source", seed=1), "--name", NAME)
    return desk


def spoil(file: Path, body: bytes) -> bytes:
    """Put other bytes into the place of an object, and return those that were there."""
    whole = file.read_bytes()
    file.chmod(0o600)
    file.write_bytes(body)
    return whole


def flip(claim: Path) -> bytes:
    """Change a bit in the text of a claim's manifest, of which no content digest knows; return what was there."""
    whole = claim.read_bytes()
    found = re.search(rb'\\"alpha\\":(\d)', whole)
    assert found is not None
    at = found.start(1)
    return spoil(claim, whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])


def fix(desk: Desk, ref: str = f"{NAME}@v1") -> str:
    """Return the one fix of what verify finds."""
    said = desk.registry("verify", ref, "--json")
    assert said.code == 5, said.err
    (found,) = [found["fix"] for found in said.json["findings"] if found["severity"] == "block"]
    return str(found)


@pytest.mark.parametrize("lost", [True, False])
@pytest.mark.parametrize("rebuilt", [True, False])
def test_a_claim_with_a_flipped_bit_is_the_damaged_one(desk: Desk, lost: bool, rebuilt: bool) -> None:
    """It is not made the decision, and no fix deletes the decision: the team knows better, or the next claim does."""
    desk.ok("push", lora_adapter(desk.folder / "more", seed=2), "--name", NAME, "--share")
    desk.ok("mirror", NAME, "--to", "backup")
    right = flip(desk.root / CLAIM)
    decision = (desk.root / MANIFEST).read_bytes()
    if lost:
        (desk.root / MANIFEST).unlink()
    if rebuilt:
        assert f"{CLAIM} is damaged" in desk.registry("rebuild").err
    said = desk.registry("verify", f"{NAME}@v1", "--mend", "--json")
    assert (said.code, said.error["message"]) == (5, f"{CLAIM} is damaged")
    assert (desk.root / MANIFEST).exists() == (not lost)
    if not lost or not rebuilt:  # else nobody knows of it
        assert fix(desk) == said.error["fix"]
    assert said.error["fix"].startswith(f"delete {CLAIM} if it is there, then: registry mirror {NAME}@v1 --remote ")
    (desk.root / CLAIM).unlink()
    desk.ok("mirror", f"{NAME}@v1", "--remote", "backup", "--to", "team")
    assert ((desk.root / CLAIM).read_bytes(), (desk.root / MANIFEST).read_bytes()) == (right, decision)
    assert desk.ok("verify", f"{NAME}@v1").out.endswith("sound\n")


def test_a_push_names_neither_of_two_that_differ(desk: Desk) -> None:
    """It knows of no announcement: the fix asks the command that does, which names the right one."""
    flip(desk.root / CLAIM)
    error = desk.registry("push", "source", "--name", NAME, "--json").error
    assert error["fix"].startswith(f"registry verify {NAME}@v1 tells which")
    assert fix(desk).startswith(f"delete {CLAIM} if it is there")


def test_of_two_that_differ_both_are_kept_where_nobody_knows(desk: Desk) -> None:
    """Without a word of the team, and without a claim that follows, no fix names one of them."""
    flip(desk.root / CLAIM)
    assert "one of them is damaged" in desk.registry("rebuild").err
    assert fix(desk) == f"keep it, and {CLAIM}: a copy of the remote has the right one"


@pytest.mark.parametrize(("before", "after"), [(b'"n":1,', b'"n":3,'), (b'"name":"chg"', b'"name":"chf"')])
def test_a_claim_speaks_of_its_own_number_alone(desk: Desk, before: bytes, after: bytes) -> None:
    """One that says another number or name decides nothing there, and is named."""
    whole = (desk.root / CLAIM).read_bytes()
    assert before in whole
    spoil(desk.root / CLAIM, whole.replace(before, after, 1))
    (desk.root / MANIFEST).unlink()
    said = desk.registry("verify", f"{NAME}@v1", "--mend")
    assert (said.code, f"{CLAIM} is damaged" in said.err) == (5, True)
    assert not list(desk.root.rglob("manifest.json"))


@pytest.mark.parametrize("squatted", [False, True])
def test_the_number_of_a_lost_claim_goes_to_nobody_else(desk: Desk, squatted: bool) -> None:
    """What was decided under it stands; where another claim got there all the same, no copy is called complete."""
    desk.ok("mirror", NAME, "--to", "backup")
    whole = (desk.root / CLAIM).read_bytes()
    (desk.root / CLAIM).unlink()
    lora_adapter(desk.folder / "more", seed=2)
    error = desk.registry("push", "more", "--name", NAME, "--json").error
    assert error["message"] == f"{CLAIM} is missing"
    assert not (desk.root / CLAIM).exists()
    back = ("mirror", f"{NAME}@v1", "--remote", "backup", "--to", "team")
    if squatted:
        other = whole.replace(b'"nonce":"', b'"nonce":"f')
        (desk.root / CLAIM).write_bytes(other)
        said = desk.registry(*back)
        assert (said.code, f"delete {CLAIM} there" in said.err) == (7, True)
        (desk.root / CLAIM).unlink()
    desk.ok(*back)
    assert (desk.root / CLAIM).read_bytes() == whole
    assert desk.ok("push", "more", "--name", NAME, "--share").out == f"{NAME}@v2\n"


def test_a_torn_claim_on_a_mirror_is_not_there_already(desk: Desk) -> None:
    """It is named with its key, and comes anew when it was deleted; one that is torn at home goes nowhere."""
    desk.ok("push", lora_adapter(desk.folder / "more", seed=2), "--name", NAME, "--share")
    desk.ok("mirror", NAME, "--to", "backup")
    copy = desk.folder / "backup" / CLAIM
    whole = spoil(copy, b"torn")
    said = desk.registry("mirror", NAME, "--to", "backup")
    assert (said.code, f"delete {CLAIM} there" in said.err) == (7, True)
    copy.unlink()
    desk.ok("mirror", NAME, "--to", "backup")
    assert copy.read_bytes() == whole
    spoil(desk.root / CLAIM, b"torn")
    (desk.folder / "second").mkdir()
    assert f"{CLAIM} is damaged" in desk.registry("mirror", f"{NAME}@v2", "--to", str(desk.folder / "second")).err
    assert not (desk.folder / "second" / CLAIM).exists()
    assert "2 there already" in desk.ok("mirror", NAME, "--to", "backup").out


def given_up(desk: Desk, *, kept: bool) -> Path:
    """Give up number 2 as a collector does, and return its void; `kept` files stay, as of one that may not delete."""
    desk.ok("push", lora_adapter(desk.folder / "more", seed=2), "--name", NAME, "--share")
    files = {path: path.read_bytes() for path in (desk.root / layout.version(NAME, 2)).iterdir()}
    decision = desk.root / layout.manifest(NAME, 2)
    decision.unlink()
    desk.registry("rebuild")
    home = open_registry(desk.remote, create=False)
    void(desk.remote, home, NAME, 2, reason="nobody finished it in time", by="c")
    for path, body in files.items():
        if kept and path != decision:
            path.write_bytes(body)
    return decision


@pytest.mark.parametrize("lost", [True, False])
@pytest.mark.parametrize("published", [True, False])
def test_a_void_never_becomes_a_version(desk: Desk, lost: bool, published: bool) -> None:
    """Where its void is lost or torn, the number stays given up: nothing is withdrawn of it, no fix publishes it."""
    decision = given_up(desk, kept=True)
    if published:
        assert desk.ok("push", "more", "--name", NAME, "--share").out == f"{NAME}@v3\n"
    desk.ok("mirror", NAME, "--to", "backup")
    whole = decision.read_bytes()
    spoil(decision, whole[:-3])
    if lost:
        decision.unlink()
    told = fix(desk, f"{NAME}@v2")
    assert ("--mend" in told, told.startswith(f"delete {layout.manifest(NAME, 2)} if it is")) == (False, True)
    said = desk.registry("withdraw", f"{NAME}@v2", "--reason", "r", "--json")
    assert (said.code, said.error["why"]) == (3, "its number was given up")
    decision.unlink(missing_ok=True)
    assert desk.registry("verify", f"{NAME}@v2", "--mend").code == 3
    assert b'"void"' in decision.read_bytes()
    rows = desk.ok("ls", NAME, "--all", "--json").json["versions"]
    assert [row["state"] for row in rows if row["version"] == 2] == ["void"]
    desk.ok("mirror", NAME, "--to", "backup")
    decision.unlink()
    desk.ok("mirror", f"{NAME}@v2", "--remote", "backup", "--to", "team")  # what the fix says
    assert decision.read_bytes() == whole


def test_one_content_gets_no_second_number(desk: Desk) -> None:
    """After a rebuild nobody knows that a number was given up: another one with its content still does."""
    decision = given_up(desk, kept=True)
    desk.ok("push", "more", "--name", NAME, "--share")
    decision.unlink()
    desk.registry("rebuild")
    error = desk.registry("verify", f"{NAME}@v2", "--mend", "--json").error
    assert (error["code"], error["message"]) == ("conflict", f"the content of {NAME}@v2 is {NAME}@v3 as well")
    assert not decision.exists()
    assert desk.ok("push", "more", "--name", NAME, "--share").out == f"{NAME}@v3\n"


def test_a_flipped_bit_in_a_schema_is_damage_and_no_later_format(desk: Desk) -> None:
    """It stops neither a mirror at its number nor a repair of the feed: both name it and go on."""
    desk.ok("push", lora_adapter(desk.folder / "more", seed=2), "--name", NAME, "--share")
    whole = (desk.root / MANIFEST).read_bytes()
    later = whole.replace(b"weighbridge/manifest/1", b"weighbridge/manifest/3")
    spoil(desk.root / MANIFEST, later)
    said = desk.registry("mirror", NAME, "--to", "backup")
    assert (said.code, f"{NAME}@v1: refused, {MANIFEST} is damaged at its home" in said.err) == (5, True)
    assert (desk.folder / "backup" / layout.manifest(NAME, 2)).exists()
    said = desk.registry("rebuild")
    assert (said.code, f"{MANIFEST} is damaged" in said.err) == (5, True)
    assert fix(desk).endswith(" --mend")
    (desk.root / MANIFEST).unlink()
    desk.ok("verify", f"{NAME}@v1", "--mend")
    assert (desk.root / MANIFEST).read_bytes() == whole
    spoil(
        desk.root / CLAIM,
        (desk.root / CLAIM).read_bytes().replace(b"weighbridge/manifest/1", b"weighbridge/manifest/3"),
    )
    said = desk.registry("rebuild")
    assert (said.code, f"{CLAIM} is damaged" in said.err) == (5, True)
    spoil(desk.root / MANIFEST, later)
    for words in (("rebuild",), ("mirror", NAME, "--to", "backup")):  # where both say so, it is true
        assert "upgrade weighbridge" in desk.registry(*words).err


def test_a_repair_names_what_only_lacks_its_decision(desk: Desk) -> None:
    """A collector leaves it for ever, and nobody else tells of it; one without its files is not named."""
    (desk.root / MANIFEST).unlink()
    told = desk.registry("rebuild").err
    assert f"{NAME}@v1 was never finished, though all its files lie there: registry verify {NAME}@v1 --mend" in told
    (desk.root / layout.version(NAME, 1, "adapter_config.json")).unlink()
    assert "never finished" not in desk.ok("rebuild").err


def test_what_was_taken_back_stays_so(desk: Desk) -> None:
    """Where decision and mark are both lost, the team still knows that the version was withdrawn: none is put back."""
    desk.ok("withdraw", f"{NAME}@v1", "--reason", "wrong data")
    (desk.root / MANIFEST).unlink()
    (desk.root / layout.withdrawn(NAME, 1)).unlink()
    said = desk.registry("verify", f"{NAME}@v1", "--mend", "--json")
    assert (said.code, said.error["code"]) == (3, "withdrawn")
    assert not (desk.root / MANIFEST).exists()


def test_a_lost_card_is_sought_on_a_copy_first(desk: Desk) -> None:
    """People's words are in no other object: the fix names a copy before the command that renders a card anew."""
    (desk.root / layout.version(NAME, 1, "README.md")).unlink()
    said = desk.registry("verify", f"{NAME}@v1", "--json")
    (found,) = [found["fix"] for found in said.json["findings"]]
    assert found.index("copy of the remote") < found.index("with people's words") < found.index("--mend")
