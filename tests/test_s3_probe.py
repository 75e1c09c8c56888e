"""What a store really does is found out by trying, kept, and believed only where it was seen."""

import json
import os
import stat
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from weighbridge.registry import errors
from weighbridge.registry.flow.claim import claim
from weighbridge.registry.flow.marker import check_writer, open_registry
from weighbridge.registry.flow.publish import publish
from weighbridge.registry.manifest import parse
from weighbridge.registry.remotes.s3 import probe
from weighbridge.registry.remotes.s3.client import Connection, Place
from weighbridge.registry.remotes.s3.probe import Capabilities, Probe
from weighbridge.registry.remotes.s3.remote import S3Remote
from weighbridge_testlib import seaweed as servers
from weighbridge_testlib.audit import audit
from weighbridge_testlib.publishing import OTHER, OWNER, candidate, rendered
from weighbridge_testlib.seaweed import Server

ALL = ("conditional_put", "conditional_complete", "sha256", "sha256_parts", "read_back", "ordered", "multipart")


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    servers.credentials(monkeypatch)
    monkeypatch.setattr(probe, "_known", {})


def left_behind(server: Server, prefix: str) -> list[str]:
    """Return what stands below a prefix, unfinished uploads included."""
    client = server.client()
    there = client.list_objects_v2(Bucket=server.bucket, Prefix=prefix).get("Contents", [])
    uploads = client.list_multipart_uploads(Bucket=server.bucket, Prefix=prefix).get("Uploads", [])
    return [entry["Key"] for entry in (*there, *uploads)]


@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
def test_a_good_store_is_found_good(seaweed: Server, tls: bool) -> None:
    """On SeaweedFS everything was seen to work, over http and https, and nothing of the probe is left."""
    found = probe.examine(Connection(seaweed.place("probe-good", tls=tls)))
    assert {name: getattr(found, name) for name in ALL} == dict.fromkeys(ALL, True)
    assert found.whole
    assert found.deletes
    assert found.trailers == ("kept" if tls else "not tried")
    assert "SeaweedFS" in found.server
    assert abs(found.skew) < 30
    assert left_behind(seaweed, "probe-good") == []


def test_a_store_without_promises_is_found_out(juicefs: Server) -> None:
    """The JuiceFS gateway answers 200 to everything: conditions and checksums are found not to work."""
    found = probe.examine(Connection(juicefs.place("probe-bad")))
    broken = {"conditional_put", "conditional_complete", "sha256", "sha256_parts"}
    assert {name for name in ALL if not getattr(found, name)} == broken
    assert not found.whole
    assert left_behind(juicefs, "probe-bad") == []


def test_such_a_store_is_not_shared(juicefs: Server, tmp_path: Path) -> None:
    """Without the setting that one machine writes there, nothing is written but the probe; reading works."""
    remote = S3Remote(juicefs.place("unshared"))
    with pytest.raises(errors.UsageError, match="cannot be shared") as caught:
        open_registry(remote, create=True)
    assert 'writers = "one"' in f"{caught.value.fix}"
    source = tmp_path / "f"
    source.write_bytes(b"x")
    with pytest.raises(errors.UsageError):
        remote.upload("a/f", source, 1, "0" * 64)
    assert list(remote.list("")) == []
    remote.close()


def test_one_writer_works_and_a_second_is_refused(juicefs: Server, tmp_path: Path) -> None:
    """Chosen by hand, one writer publishes there; another one is refused by the writer that the marker names."""
    remote = S3Remote(juicefs.place("alone", one_writer=True))
    registry = open_registry(remote, create=True, writer=OWNER.daemon)
    assert (registry.mode, registry.writer) == ("single-writer", OWNER.daemon)
    receipts = []
    for seed in (1, 2, 1):
        made = candidate(remote, tmp_path / str(seed), seed=seed)
        receipts.append(publish(remote, "home", registry, made, OWNER, render=rendered))
    assert [receipt.n for receipt in receipts] == [1, 2, 1]
    assert {receipt.verified for receipt in receipts[:2]} == {"sha256-read"}  # the server's word is worth nothing
    audit(remote, receipts)
    made = candidate(remote, tmp_path / "other", seed=9)
    with pytest.raises(errors.SplitWritersError, match="one writer"):
        publish(remote, "home", registry, made, OTHER, render=rendered)
    remote.close()


def test_a_second_writer_is_noticed(juicefs: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where somebody overwrites what was just written, publishing stops, and says why; it could not be prevented."""
    remote = S3Remote(juicefs.place("split", one_writer=True))
    registry = open_registry(remote, create=True, writer=OWNER.daemon)
    client = juicefs.client()
    ask = remote.link.ask

    def meddle(operation: str, what: str, **given: Any) -> Any:
        answer = ask(operation, what, **given)
        if operation == "put_object" and given["Key"].endswith("/claims/00000001.json"):
            client.put_object(Bucket=juicefs.bucket, Key=given["Key"], Body=b'{"owner":{"host":"x"}}')
        return answer

    monkeypatch.setattr(remote.link, "ask", meddle)
    made = candidate(remote, tmp_path / "a")
    with pytest.raises(errors.SplitWritersError, match="second writer") as caught:
        publish(remote, "home", registry, made, OWNER, render=rendered)
    assert caught.value.exit_code == 7
    monkeypatch.undo()
    remote.close()


def test_a_claim_of_somebody_else_stops_a_single_writer(juicefs: Server, tmp_path: Path) -> None:
    """A number that another writer took meanwhile is not worked around where only one may write."""
    servers_place = juicefs.place("taken", one_writer=True)
    ours, theirs = S3Remote(servers_place), S3Remote(servers_place)
    registry = open_registry(ours, create=True, writer=OWNER.daemon)
    shared = msgspec.structs.replace(registry, writer=None)
    made = candidate(ours, tmp_path / "a", seed=1)
    other = candidate(theirs, tmp_path / "b", seed=2)
    create = ours.create

    def late(key: str, body: bytes) -> None:
        if key.endswith("/claims/00000001.json"):
            claim(theirs, shared, made.name, parse(other.manifest.encode()), OTHER)
        create(key, body)

    ours.create = late  # type: ignore[method-assign]
    with pytest.raises(errors.SplitWritersError, match="second writer"):
        claim(ours, registry, made.name, parse(made.manifest.encode()), OWNER)
    ours.close()
    theirs.close()


def test_a_shared_registry_is_not_written_without_conditions(juicefs: Server, seaweed: Server) -> None:
    """A registry that was begun as shared does not become one of a single writer by a setting."""
    good = S3Remote(seaweed.place("moved"))
    registry = open_registry(good, create=True)
    bad = S3Remote(juicefs.place("moved", one_writer=True))
    with pytest.raises(errors.UsageError, match="cannot be shared"):
        check_writer(registry, bad, OWNER)
    good.close()
    bad.close()


# ----------------------------------------------------------------------------------------------------------- the record


def test_it_is_asked_once(seaweed: Server, tmp_path: Path) -> None:
    """What was found is kept in this process and in a private file; another process asks nothing."""
    record = tmp_path / "cache" / "s3" / "x.json"
    first = Connection(seaweed.place("kept"))
    found = Probe(first, record).ask()
    assert stat.S_IMODE(record.parent.stat().st_mode) == 0o700
    again = Connection(seaweed.place("kept"))
    assert Probe(again, record).known() == found
    probe.forget()
    assert Probe(again, record).known() == found
    assert Probe(again, record).ask() == found
    assert sum(again.counts.values()) == 0
    assert Probe(again, record).ask(again=True).probed_at > found.probed_at
    assert sum(again.counts.values()) > 10


@pytest.mark.parametrize("damage", ["cut", "type", "format", "bucket", "old", "field"])
def test_a_record_that_does_not_fit_says_nothing(seaweed: Server, tmp_path: Path, damage: str) -> None:
    """A damaged, foreign or old record is not believed."""
    record = tmp_path / "x.json"
    place = seaweed.place("kept")
    Probe(Connection(place), record).ask()
    document = json.loads(record.read_text())
    match damage:
        case "type":
            document["capabilities"]["conditional_put"] = 1
        case "format":
            document["format"] = 99
        case "bucket":
            document["bucket"] = "another"
        case "old":
            document["capabilities"]["probed_at"] = time.time() - 2 * probe.KEEP
        case "field":
            del document["capabilities"]["ordered"]
    record.write_text(json.dumps(document)[: 40 if damage == "cut" else None])
    probe.forget()
    assert Probe(Connection(place), record).known() is None


def test_it_is_named_after_endpoint_and_bucket(tmp_path: Path) -> None:
    """Two buckets, and one bucket behind two endpoints, have records of their own."""
    names = {
        probe.record_path(tmp_path, endpoint, bucket)
        for endpoint, bucket in ((None, "a-bucket"), ("http://x", "a-bucket"), (None, "b-bucket"))
    }
    assert len(names) == 3


def test_a_store_that_cannot_be_asked_is_not_judged(tmp_path: Path) -> None:
    """When the store does not answer, nothing was found out and nothing is kept."""
    (port,) = servers.ports(1)
    link = Connection(Place("s3://registry/x", "registry", "x/", f"http://127.0.0.1:{port}"))
    with pytest.raises(errors.UnreachableError):
        Probe(link, tmp_path / "x.json").ask()
    assert os.listdir(tmp_path) == []  # noqa: PTH208


@pytest.mark.parametrize("lack", ["read_back", "ordered"])
def test_a_store_that_cannot_hold_a_registry_is_refused(
    seaweed: Server, monkeypatch: pytest.MonkeyPatch, lack: str
) -> None:
    """Where bytes come back changed or listings are in no order, nothing can be built, with one writer or many."""
    found = probe.examine(Connection(seaweed.place("refused")))
    lacking = Capabilities(**(found._asdict() | {lack: False}))
    monkeypatch.setattr(probe, "examine", lambda _: lacking)
    for one in (False, True):
        probe.forget()
        remote = S3Remote(seaweed.place("refused", one_writer=one))
        with pytest.raises(errors.UsageError, match="cannot hold a registry"):
            remote.create("a", b"1")
        remote.close()


def test_properties_follow_what_was_found(seaweed: Server) -> None:
    """Before anything is known nothing is promised of checksums; afterwards what was seen."""
    remote = S3Remote(seaweed.place("properties"))
    before = remote.properties
    assert (before.conditional_create, before.server_sha256, before.upload_proof) == (True, False, None)
    remote.create("a", b"1")
    after = remote.properties
    assert (after.conditional_create, after.server_sha256, after.upload_proof) == (True, True, "sha256-server")
    assert S3Remote(seaweed.place("properties", bucket="other", one_writer=True)).properties.conditional_create is False
    remote.close()
    assert Capabilities.__annotations__["conditional_put"] is bool
