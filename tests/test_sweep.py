"""`registry sweep`: what killed publishers left goes without a daemon, and nothing that is still needed."""

import os
import time
from pathlib import Path

import pytest

from weighbridge.registry import layout
from weighbridge.registry.cli import leftovers
from weighbridge.registry.errors import DeniedError
from weighbridge.registry.remotes.directory import DirectoryRemote
from weighbridge.registry.remotes.s3.remote import S3Remote
from weighbridge.registry.remotes.s3.unfinished import unfinished
from weighbridge_testlib import seaweed as servers
from weighbridge_testlib.desk import Desk, conforms
from weighbridge_testlib.seaweed import Server

NAME = "medical-sft"
DAY = 86_400.0


def age(path: Path, days: float) -> None:
    """Let a file, or all of a folder, be this old."""
    at = time.time() - days * DAY
    for one in (*path.rglob("*"), path):
        os.utime(one, (at, at))


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """Return a desk whose remote holds a version, a dead claim, a young one, a dead stage, and one of an hour ago."""
    desk = Desk(tmp_path, monkeypatch)
    desk.shelf.publish(NAME, step=100)
    for n, days in ((2, 8.0), (3, 6.0)):
        desk.shelf.claim(NAME, step=n)
        age(desk.root / layout.claim(NAME, n), days)
    desk.remote.create(layout.version(NAME, 2, "adapter_config.json"), b"{}")
    for nonce, days in (("dead", 3.0), ("resting", 0.5)):
        stage = desk.root / f"models/{NAME}/_wb/stage/{nonce}"
        stage.mkdir(parents=True)
        (stage / "adapter_model.safetensors").write_bytes(b"x" * 1000)
        age(stage, days)
    return desk


def keys(desk: Desk) -> set[str]:
    """Return every file of the remote's models."""
    return {path.relative_to(desk.root).as_posix() for path in (desk.root / "models").rglob("*") if path.is_file()}


def test_a_team_without_a_daemon_sweeps_by_hand(desk: Desk) -> None:
    """A dry run names what goes and touches nothing; then just that goes, the team is told, and nothing is left."""
    before = keys(desk)
    told = conforms(desk.ok("sweep", "--dry-run", "--json").json, "sweep")
    assert (told["staged"], told["bytes"], told["voided"]) == (1, 1000, [f"{NAME}@v2"])
    assert keys(desk) == before
    said = desk.ok("sweep").out
    assert f"{NAME}@v2 was given up: nobody finished it in 7d" in said
    assert "1 unfinished copy, 1.00 kB removed; 1 number given up" in said
    gone = {f"models/{NAME}/_wb/stage/dead/adapter_model.safetensors", layout.version(NAME, 2, "adapter_config.json")}
    assert keys(desk) == before - gone | {layout.manifest(NAME, 2)}
    assert {row["version"]: row["state"] for row in desk.ok("ls", NAME, "--all", "--json").json["versions"]} == {
        1: "committed",
        2: "void",
        3: "open",
    }
    told = conforms(desk.ok("sweep", "--json").json, "sweep")
    assert (told["staged"], told["voided"], told["cleared"]) == (0, [], 0)
    assert conforms(desk.ok("sweep", "--older-than", "6h", "--json").json, "sweep")["staged"] == 1
    assert desk.ok("verify", f"{NAME}@v1").code == 0


def test_a_version_that_lost_its_decision_is_never_swept(desk: Desk) -> None:
    """After a rebuild it looks like a push that nobody finished; it stays, and what is told publishes it again."""
    age(desk.root / layout.claim(NAME, 1), 30.0)
    decision = desk.root / layout.manifest(NAME, 1)
    was = decision.read_bytes()
    decision.unlink()
    assert desk.registry("rebuild").code == 5
    before = keys(desk)
    told = conforms(desk.ok("sweep", "--dry-run", "--json").json, "sweep")
    assert (told["voided"], told["whole"]) == ([f"{NAME}@v2"], [f"{NAME}@v1"])
    assert conforms(desk.ok("sweep", "--json").json, "sweep")["whole"] == [f"{NAME}@v1"]
    assert before - keys(desk) == {
        f"models/{NAME}/_wb/stage/dead/adapter_model.safetensors", layout.version(NAME, 2, "adapter_config.json")
    }  # fmt: skip
    said = desk.ok("sweep").err
    assert f"fix: registry verify {NAME}@v1 --mend publishes it" in said
    desk.ok("verify", f"{NAME}@v1", "--mend")
    assert decision.read_bytes() == was
    assert desk.ok("ls", NAME, "--json").json["versions"][0]["version"] == 1


def test_what_may_be_under_way_is_not_swept(desk: Desk) -> None:
    """Less than an hour is refused, as is what is no span."""
    before = keys(desk)
    for span, words in (("10m", "may be at work"), ("soon", "is not a time")):
        said = desk.registry("sweep", "--older-than", span)
        assert (said.code, words in said.err) == (2, True)
    assert keys(desk) == before


def test_what_may_not_be_swept_keeps_nobody_from_the_rest(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers are given up all the same, and the command ends 4."""

    def sweep(*_: object) -> int:
        raise DeniedError("it may not be swept", why="read only")

    monkeypatch.setattr(DirectoryRemote, "sweep", sweep)
    said = desk.registry("sweep", "--json")
    told = conforms(said.json, "sweep")
    assert (said.code, said.error["code"], told["staged"], told["voided"]) == (4, "denied", 0, [f"{NAME}@v2"])


def test_doctor_tells_what_lies_there(desk: Desk) -> None:
    """What nobody goes on with is counted with its bytes, and the command that removes it is named, and works."""
    checks = {one["name"]: one for one in desk.registry("doctor", "team", "--json").json["checks"]}
    left = checks["remote-team-leftovers"]
    assert (left["status"], left["fix"]) == ("warn", "registry sweep --remote team")
    assert "1 unfinished copy, 1.00 kB of killed publishers, untouched for 2d" in left["message"]
    desk.ok(*left["fix"].split()[1:])
    checks = {one["name"]: one for one in desk.registry("doctor", "team", "--json").json["checks"]}
    assert "remote-team-leftovers" not in checks


def test_unfinished_uploads_are_counted_with_their_bytes(seaweed: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in no listing of a bucket is found by its parts, once it is old enough."""
    servers.credentials(monkeypatch)
    remote = S3Remote(seaweed.place("swept"))
    client = seaweed.client()
    given = {"Bucket": "registry", "Key": "swept/models/x/v1/model.safetensors"}
    upload = client.create_multipart_upload(**given)["UploadId"]
    for number in (1, 2):
        client.upload_part(**given, UploadId=upload, PartNumber=number, Body=b"x" * (5 << 20))
    assert list(unfinished(remote.link, remote.now() + 10)) == [10 << 20]
    assert list(unfinished(remote.link, remote.now() - 3600)) == []
    assert remote.sweep(-10) == 1
    assert list(unfinished(remote.link, remote.now() + 10)) == []
    remote.close()
    assert str(leftovers.Left(2, 10 << 20)) == "2 unfinished copies, 10.5 MB"
