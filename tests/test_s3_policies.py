"""The policies of docs/policies: each role can do its work, and nothing else."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from weighbridge.registry import errors, layout
from weighbridge.registry.flow import snapshot
from weighbridge.registry.flow.collect import collect
from weighbridge.registry.flow.marker import open_registry
from weighbridge.registry.flow.publish import publish
from weighbridge.registry.flow.pull import pull
from weighbridge.registry.flow.tags import move
from weighbridge.registry.flow.verify import Checked, verify_version
from weighbridge.registry.flow.withdraw import purge, withdraw
from weighbridge.registry.remotes.s3 import multipart
from weighbridge.registry.remotes.s3.proofs import record_key
from weighbridge.registry.remotes.s3.remote import S3Remote
from weighbridge_testlib import seaweed as servers
from weighbridge_testlib.audit import audit
from weighbridge_testlib.faults import Faulty, Killed
from weighbridge_testlib.policies import FOLDER, Policies
from weighbridge_testlib.proxy import Proxy
from weighbridge_testlib.publishing import OWNER, candidate, rendered
from weighbridge_testlib.seaweed import Server
from weighbridge_testlib.shelf import payload

Open = Callable[..., tuple[S3Remote, Policies]]


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    servers.credentials(monkeypatch)


@pytest.fixture
def role(seaweed: Server, request: pytest.FixtureRequest) -> Iterator[Open]:
    """Open the remote of this test in a role."""
    opened: list[tuple[S3Remote, Proxy]] = []
    prefix = "".join(c if c.isalnum() else "-" for c in request.node.name)

    def connect(*names: str, probed: bool = True) -> tuple[S3Remote, Policies]:
        policies = Policies(names, seaweed.bucket, prefix)
        proxy = Proxy(seaweed.endpoint, policies).__enter__()
        place = seaweed.place(prefix, endpoint=proxy.endpoint)
        remote = S3Remote(place, single=1 << 20, part=multipart.PART_LEAST)
        if probed:
            remote.probe.trust(S3Remote(seaweed.place(prefix)).probe.ask())
        opened.append((remote, proxy))
        return remote, policies

    yield connect
    for remote, proxy in opened:
        remote.close()
        proxy.__exit__(None, None, None)


def files(seed: int) -> dict[str, bytes]:
    """Return files of which one goes in parts."""
    return payload(seed) | {"adapter_model.safetensors": random.Random(seed).randbytes(multipart.PART_LEAST + 9)}


def blocked(found: Checked) -> list[tuple[str, str]]:
    """Return code and subject of what differs."""
    return [(wrong.code, wrong.subject) for wrong in found.findings if wrong.severity == "block"]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_policies_are_documents(path: Path) -> None:
    """Each file is a policy with the two words that a person replaces."""
    document = json.loads(path.read_text())
    assert document["Version"] == "2012-10-17"
    assert all("BUCKET" in json.dumps(s["Resource"]) for s in document["Statement"])
    assert path.stem in (FOLDER.parent / "remotes-s3.md").read_text()


def test_a_writer_publishes_and_deletes_nothing(role: Open, seaweed: Server, tmp_path: Path) -> None:
    """A writer probes the store, publishes, tags and pulls; deleting and overwriting are refused."""
    remote, policies = role("writer", "bucket-create-only", probed=False)
    registry = open_registry(remote, create=True)
    assert remote.probe.known() is not None
    receipts = [
        publish(remote, "team", registry, candidate(remote, tmp_path / str(n), files=files(n)), OWNER, render=rendered)
        for n in (1, 2, 1)
    ]
    assert [receipt.verified for receipt in receipts[:2]] == ["sha256-server"] * 2
    move(remote, registry, receipts[0].name, "prod", 1, who="lw", why="a test")
    pull(remote, receipts[0].name, 2, tmp_path / "pulled")
    remote.sweep(3600)
    asked = {refused for refused in policies.refused if "/_wb/probe/" not in refused}
    assert asked == set()
    with pytest.raises(errors.DeniedError):
        remote.delete(layout.manifest(receipts[0].name, 1))
    client = remote.link.client(request_checksum_calculation="when_required")
    with pytest.raises(client.exceptions.ClientError, match="AccessDenied"):
        client.put_object(Bucket="registry", Key=remote.link.key(layout.manifest(receipts[0].name, 1)), Body=b"{}")
    client.close()
    left = seaweed.client().list_objects_v2(Bucket="registry", Prefix=f"{remote.link.place.prefix}_wb/")
    assert sum(entry["Size"] for entry in left.get("Contents", [])) < 1000
    audit(remote, receipts)


def test_a_writer_whose_number_was_given_up(role: Open, tmp_path: Path) -> None:
    """A writer cannot remove what lies under a number that was given up; it publishes under a new one all the same."""
    remote, _ = role("writer")
    registry = open_registry(remote, create=True)
    made = candidate(remote, tmp_path / "a", files=payload(5))
    dying = Faulty(remote, lambda call: "die-before" if call.key.endswith("/adapter_config.json") else None)
    with pytest.raises(Killed):
        publish(dying, "team", registry, made, OWNER, render=rendered)
    collector, policies = role("collector")
    collect(collector, registry, by="collector", dead_after=-60)
    assert policies.refused == []
    receipt = publish(
        remote, "team", registry, candidate(remote, tmp_path / "b", files=payload(5)), OWNER, render=rendered
    )
    assert receipt.n == 2
    assert audit(remote, [receipt]).void == {(receipt.name, 1)}


def test_a_reader_reads(role: Open, tmp_path: Path) -> None:
    """A reader lists and pulls; it writes nothing, and sees nothing outside the prefix."""
    writer, _ = role("writer")
    registry = open_registry(writer, create=True)
    made = candidate(writer, tmp_path / "a", files=files(3))
    receipt = publish(writer, "team", registry, made, OWNER, render=rendered)
    reader, policies = role("reader", probed=False)
    assert open_registry(reader, create=False) == registry
    pull(reader, receipt.name, 1, tmp_path / "pulled")
    assert [found.key for found in reader.list("models/")] == [found.key for found in writer.list("models/")]
    assert list(reader.folders("models/")) == [receipt.name]
    with pytest.raises(errors.MissingError):
        reader.read("models/none")
    reader.now()
    assert policies.refused == []
    with pytest.raises(errors.DeniedError) as caught:
        reader.create("models/x", b"")
    assert "docs/policies" in f"{caught.value.fix}"
    outside = S3Remote(reader.link.place._replace(prefix="other/"))
    with pytest.raises(errors.DeniedError):
        list(outside.list(""))
    with pytest.raises(errors.DeniedError):
        outside.read("weighbridge.json")
    outside.close()


def test_a_reader_verifies_by_what_is_told(role: Open, tmp_path: Path) -> None:
    """Who may not try the store out has its checksums and the publisher's word; who may, tries it out and has proof.

    Where only a newer version may write, nobody tries.
    """
    writer, _ = role("writer")
    registry = open_registry(writer, create=True)
    made = candidate(writer, tmp_path / "a", files=files(3))
    receipt = publish(writer, "team", registry, made, OWNER, render=rendered)
    reader, policies = role("reader", probed=False)
    newer = msgspec.structs.replace(registry, min_writer=2)
    found = verify_version(reader, receipt.name, 1, reading="nothing", registry=newer)
    assert (blocked(found), found.levels, policies.refused) == ([], {"sha256-told": 3}, [])
    found = verify_version(reader, receipt.name, 1, reading="nothing", registry=registry)
    assert (blocked(found), found.levels) == ([], {"sha256-told": 3})
    assert policies.refused
    refused = len(policies.refused)
    verify_version(reader, receipt.name, 1, reading="nothing", registry=registry)
    assert len(policies.refused) == refused, "who was denied it does not try again"
    assert reader.probe.known() is None
    assert all("/_wb/probe/" in refused for refused in policies.refused)
    assert verify_version(reader, receipt.name, 1, reading="needed").levels == {"sha256-read": 3}
    other, _ = role("writer", probed=False)
    found = verify_version(other, receipt.name, 1, reading="nothing", registry=registry)
    assert (blocked(found), found.levels) == ([], {"sha256-server": 2, "sha256-told": 1})


def test_another_word_is_settled_by_reading(role: Open, tmp_path: Path) -> None:
    """Where the store or a record tells another sha256 than the manifest, the file is read, and the bytes decide."""
    writer, _ = role("writer", "collector")
    registry = open_registry(writer, create=True)
    made = candidate(writer, tmp_path / "a", files=files(3))
    receipt = publish(writer, "team", registry, made, OWNER, render=rendered)
    weights, config = (layout.version(receipt.name, 1, f) for f in ("adapter_model.safetensors", "adapter_config.json"))
    record = json.loads(writer.read(record_key(weights)))
    writer.delete(record_key(weights))
    writer.create(record_key(weights), json.dumps(record | {"sha256": "0" * 64}).encode())
    body = writer.read(config)
    writer.delete(config)
    writer.create(config, body.replace(b"{", b" ", 1))
    reader, _ = role("reader", probed=False)
    found = verify_version(reader, receipt.name, 1, reading="nothing")
    assert blocked(found) == [("file-damaged", "adapter_config.json")]
    assert found.levels == {"sha256-read": 2, "sha256-told": 1}


def test_a_collector_clears_up(role: Open, tmp_path: Path) -> None:
    """A collector gives numbers up, purges what was withdrawn and sweeps; claims and the marker it cannot harm."""
    writer, _ = role("writer")
    registry = open_registry(writer, create=True)
    made = candidate(writer, tmp_path / "a", files=files(3))
    receipt = publish(writer, "team", registry, made, OWNER, render=rendered)
    collector, policies = role("collector")
    withdraw(collector, registry, receipt.name, 1, who="lw", why="a test")
    purge(collector, receipt.name, 1, grace=-60)
    key = f"{collector.link.place.prefix}models/m/v1/w"
    collector.link.ask("create_multipart_upload", "x", Key=key)
    assert collector.sweep(-60) == 1
    for seq in (512, 1024, 1536):
        writer.create(layout.snapshot(seq), snapshot.encode(seq, 1, []))
    assert snapshot.sweep(collector, -60) == 1
    assert policies.refused == []
    with pytest.raises(errors.DeniedError):
        collector.delete("weighbridge.json")
    assert audit(writer).withdrawn == {(receipt.name, 1)}


def test_without_listing_nothing_seems_empty(role: Open) -> None:
    """A role that may not list is told so; it never takes a registry for empty or a key for missing."""
    remote, _ = role()
    for look in (lambda: list(remote.list("")), lambda: remote.read("weighbridge.json"), lambda: remote.stat("a")):
        with pytest.raises(errors.DeniedError):
            look()
