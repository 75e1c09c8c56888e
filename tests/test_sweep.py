"""`registry sweep`: what killed publishers left goes without a daemon, and nothing that is still needed."""

import os
import secrets
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from weighbridge.registry import layout, stages
from weighbridge.registry.cli import leftovers
from weighbridge.registry.errors import DeniedError, UnreachableError
from weighbridge.registry.remotes import directory
from weighbridge.registry.remotes.directory import DirectoryRemote
from weighbridge.registry.remotes.s3 import multipart
from weighbridge.registry.remotes.s3.remote import S3Remote
from weighbridge.registry.remotes.wrappers import RateLimited, Retrying
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


def refused(*_: object) -> None:
    """Refuse to remove something."""
    raise DeniedError("it may not be removed", why="it is somebody else's")


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """Return a desk whose remote holds a version, a dead claim, a young one, a dead stage, and one of an hour ago."""
    desk = Desk(tmp_path, monkeypatch)
    desk.shelf.publish(NAME, step=100)
    for n, days in ((2, 8.0), (3, 6.0)):
        desk.shelf.claim(NAME, step=n)
        age(desk.root / layout.claim(NAME, n), days)
    desk.remote.create(layout.version(NAME, 2, "adapter_config.json"), b"{}")
    for nonce, days in (("dead", 3.0), ("resting", 1.5)):
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
    said = desk.ok("sweep", "--dry-run").out
    assert f"{NAME}@v2 would be given up: nobody finished it in 7d" in said
    assert "1 unfinished copy, 1.00 kB would go; 1 number would be given up" in said
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
    assert conforms(desk.ok("sweep", "--older-than", "1d", "--json").json, "sweep")["staged"] == 1
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
    """Less than a day is refused, as is what is no span: a daemon holds what it touched an hour ago, or yesterday."""
    before = keys(desk)
    for span, words in (("12h", "still needs what it staged"), ("soon", "is not a time")):
        said = desk.registry("sweep", "--older-than", span)
        assert (said.code, words in said.err) == (2, True)
    assert keys(desk) == before


def test_what_may_not_be_swept_keeps_nobody_from_the_rest(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers are given up all the same, and the command ends 4."""

    def sweep(*_: object, **__: object) -> int:
        raise DeniedError("it may not be swept", why="read only")

    monkeypatch.setattr(DirectoryRemote, "sweep", sweep)
    said = desk.registry("sweep", "--json")
    told = conforms(said.json, "sweep")
    assert (said.code, said.error["code"], told["staged"], told["voided"]) == (4, "denied", 0, [f"{NAME}@v2"])


def test_a_number_whose_claim_is_damaged_is_named_with_a_fix(desk: Desk) -> None:
    """A mirror whose copy lost claim and decision keeps the weights; what is told brings both back from its home."""
    (desk.folder / "backup").mkdir()
    with desk.config.open("a") as stream:
        stream.write(f'[remotes.backup]\nurl = "{desk.folder}/backup"\nmax_age = "1h"\n')
    desk.shelf.publish(NAME, step=400)
    desk.ok("mirror", NAME, "--remote", "team", "--to", "backup")
    backup = desk.folder / "backup"
    claim, decision = backup / layout.claim(NAME, 1), backup / layout.manifest(NAME, 1)
    claim.chmod(0o600)
    claim.write_bytes(b"torn")
    age(claim, 30.0)
    decision.unlink()
    assert desk.registry("rebuild", "--remote", "backup").code == 5
    before = sorted((backup / "models").rglob("*"))
    for words in (["--dry-run"], []):
        told = conforms(desk.ok("sweep", "--remote", "backup", "--json", *words).json, "sweep")
        assert (told["voided"], told["whole"], told["damaged"]) == ([], [], [f"{NAME}@v1"])
    assert sorted((backup / "models").rglob("*")) == before
    said = desk.ok("sweep", "--remote", "backup").err
    key = layout.claim(NAME, 1)
    assert f"fix: delete {key} if it is there, then: registry mirror {NAME}@v1 --remote MIRROR --to REMOTE" in said
    claim.unlink()
    desk.ok("mirror", f"{NAME}@v1", "--remote", "team", "--to", "backup")
    assert decision.read_bytes() == (desk.root / layout.manifest(NAME, 1)).read_bytes()
    assert desk.ok("verify", f"{NAME}@v1", "--remote", "backup").code == 0


def test_what_may_not_be_deleted_is_told_as_often_as_it_is_tried(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files under a void, and a stage of somebody else: the number is given up once, and each sweep ends 4."""
    with monkeypatch.context() as patched:
        patched.setattr(DirectoryRemote, "delete", refused)
        patched.setattr(directory, "_remove", refused)
        for voided in ([f"{NAME}@v2"], []):
            said = desk.registry("sweep", "--json")
            told = conforms(said.json, "sweep")
            assert (said.code, said.error["code"]) == (4, "denied")
            assert (told["voided"], told["cleared"], told["staged"]) == (voided, 0, 0)
    told = conforms(desk.ok("sweep", "--json").json, "sweep")
    assert (told["cleared"], told["staged"]) == (1, 1)


def test_what_was_given_up_is_told_whatever_fails_then(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The remote goes away while files are cleared: the number stays given up, is named, and the command ends 6."""

    def gone(*_: object) -> None:
        raise UnreachableError("the remote is gone", why="a mount went away")

    with monkeypatch.context() as patched:
        patched.setattr(DirectoryRemote, "delete", gone)
        said = desk.registry("sweep", "--json")
        told = conforms(said.json, "sweep")
        assert (said.code, told["voided"], told["staged"]) == (6, [f"{NAME}@v2"], 1)
    rows = desk.ok("ls", NAME, "--all", "--json").json["versions"]
    assert {row["version"]: row["state"] for row in rows}[2] == "void"
    assert conforms(desk.ok("sweep", "--json").json, "sweep")["cleared"] == 1


def test_a_damaged_void_keeps_nobody_from_the_rest(desk: Desk) -> None:
    """It gives nothing up and nothing below it is touched; the sweep goes on, and `verify` names it."""
    desk.ok("sweep")
    decision = desk.root / layout.manifest(NAME, 2)
    decision.chmod(0o600)
    decision.write_bytes(decision.read_bytes()[:-3])
    late = layout.version(NAME, 2, "adapter_config.json")
    desk.remote.create(late, b"{}")
    assert conforms(desk.ok("sweep", "--older-than", "1d", "--json").json, "sweep")["staged"] == 1
    assert late in keys(desk)
    assert desk.registry("verify", f"{NAME}@v2").code == 5


@pytest.mark.parametrize("ahead", [400 * DAY, -400 * DAY])
def test_ages_are_told_by_the_store_alone(desk: Desk, monkeypatch: pytest.MonkeyPatch, ahead: float) -> None:
    """A machine whose clock is a year off sweeps, and counts, what any other does."""
    copies = desk.cache / "stage"
    for copy, days in (("dead", 3.0), ("resting", 0.5)):
        (copies / copy).mkdir(parents=True)
        (copies / copy / "model.safetensors").write_bytes(b"x" * 10)
        age(copies / copy, days)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + ahead)
    told = conforms(desk.ok("sweep", "--dry-run", "--json").json, "sweep")
    assert (told["staged"], told["voided"]) == (1, [f"{NAME}@v2"])
    told = conforms(desk.ok("sweep", "--json").json, "sweep")
    assert (told["staged"], told["voided"]) == (1, [f"{NAME}@v2"])
    assert f"models/{NAME}/_wb/stage/resting/adapter_model.safetensors" in keys(desk)
    assert [stages.size_of(one) for one in stages.leftovers(copies, stages.LEFTOVER_AFTER)] == [10]
    assert stages.sweep(copies, stages.LEFTOVER_AFTER) == 1
    assert [one.name for one in copies.iterdir()] == ["resting"]


def test_doctor_tells_what_lies_there(desk: Desk) -> None:
    """What nobody goes on with is counted with its bytes, and the command that removes it is named, and works."""
    checks = {one["name"]: one for one in desk.registry("doctor", "team", "--json").json["checks"]}
    left = checks["remote-team-leftovers"]
    assert (left["status"], left["fix"]) == ("warn", "registry sweep --remote team")
    assert "1 unfinished copy, 1.00 kB of killed publishers, untouched for 2d" in left["message"]
    desk.ok(*left["fix"].split()[1:])
    checks = {one["name"]: one for one in desk.registry("doctor", "team", "--json").json["checks"]}
    assert "remote-team-leftovers" not in checks


@pytest.fixture
def bucket(seaweed: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[S3Remote, list[str]]]:
    """Return a bucket with two unfinished uploads, of two parts and of one, and their ids."""
    servers.credentials(monkeypatch)
    remote = S3Remote(seaweed.place(f"swept-{secrets.token_hex(4)}"))
    ids = []
    for n, parts in ((1, 2), (2, 1)):
        key = f"{remote.link.place.prefix}models/x/v{n}/model.safetensors"
        ids.append(remote.link.ask("create_multipart_upload", "x", Key=key)["UploadId"])
        for number in range(1, parts + 1):
            remote.link.ask("upload_part", "x", Key=key, UploadId=ids[-1], PartNumber=number, Body=b"x" * 1000)
    yield remote, ids
    remote.close()


@pytest.mark.parametrize("prefix", ["", "shared/"])
def test_uploads_of_others_stay(seaweed: Server, monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    """In a bucket that is not ours alone only files of versions, and what a probe sent, are given up and counted."""
    servers.credentials(monkeypatch)
    place = seaweed.place("shared")._replace(prefix=prefix, bucket=f"mixed-{len(prefix)}")
    client = seaweed.client()
    client.create_bucket(Bucket=place.bucket)
    others = ["backup.tar", "models/llama.bin", "models/x/v0/a", "models/x/vision/a", "models/x/_wb/a", "_wb/other"]
    ours = ["models/x/v1/model.safetensors", "models/x/v12/tokenizer/t.json", "_wb/probe/0/multipart"]
    for key in (*others, *ours):
        client.create_multipart_upload(Bucket=place.bucket, Key=f"{prefix}{key}")
    remote = S3Remote(place)
    assert len(list(remote.unfinished(-10))) == len(ours)
    assert remote.sweep(-10) == len(ours)
    left = client.list_multipart_uploads(Bucket=place.bucket)["Uploads"]
    assert sorted(upload["Key"] for upload in left) == sorted(f"{prefix}{key}" for key in others)
    remote.close()


def test_unfinished_uploads_are_counted_with_their_bytes(bucket: tuple[S3Remote, list[str]]) -> None:
    """What is in no listing of a bucket is found by its parts, once it is old enough, through every wrapper."""
    remote, _ = bucket
    for one in (remote, Retrying(remote), RateLimited(remote, requests=1000.0)):
        assert sorted(one.unfinished(-10)) == [1000, 2000]
        assert list(one.unfinished(3600)) == []
    assert remote.sweep(3600) == 0
    assert remote.sweep(-10) == 2
    assert leftovers.left(remote, -10) == leftovers.Left(0, 0)
    assert str(leftovers.Left(2, 10 << 20)) == "2 unfinished copies, 10.5 MB"


def test_an_upload_that_ends_while_it_is_counted_does_not_count(bucket: tuple[S3Remote, list[str]]) -> None:
    """Of two sweepers the slower one finds what the other left of the list that it holds."""
    remote, _ = bucket
    counting = remote.unfinished(-10)
    first = next(counting)
    assert remote.sweep(-10) == 2
    assert (first in {1000, 2000}, list(counting), remote.sweep(-10)) == (True, [], 0)


def test_an_upload_is_as_old_as_its_youngest_part(
    bucket: tuple[S3Remote, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large file is under way for longer than any age: what got a part a moment ago is neither counted nor ended."""
    remote, ids = bucket
    listed = multipart.uploads

    def begun_long_ago(*about: Any, **more: Any) -> Iterator[Mapping[str, Any]]:
        for upload in listed(*about, **more):
            yield {**upload, "Initiated": upload["Initiated"] - timedelta(days=9)}

    monkeypatch.setattr(multipart, "uploads", begun_long_ago)
    assert list(remote.unfinished(2 * DAY)) == []
    assert remote.sweep(2 * DAY) == 0
    assert {upload["UploadId"] for upload in listed(remote.link, "")} == set(ids)
    assert remote.sweep(-10) == 2


def test_a_fault_of_counting_keeps_nobody_from_sweeping(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is counted to be shown is not needed for the work; a dry run, which is nothing else, ends as it has to."""

    def fails(*_: object) -> Iterator[int]:
        raise UnreachableError("it does not answer", why="a network")

    monkeypatch.setattr(DirectoryRemote, "unfinished", fails)
    said = desk.registry("sweep", "--dry-run", "--json")
    assert (said.code, conforms(said.json, "sweep")["voided"]) == (6, [f"{NAME}@v2"])
    told = conforms(desk.ok("sweep", "--json").json, "sweep")
    assert (told["staged"], told["voided"]) == (1, [f"{NAME}@v2"])
