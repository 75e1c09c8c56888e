"""A team on a bucket: publish, list, pull, tag and verify, with daemons that race and die in between."""

import hashlib
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from weighbridge.registry import errors, layout
from weighbridge.registry.catalog import Catalog
from weighbridge.registry.flow import stage as staging
from weighbridge.registry.flow.collect import collect
from weighbridge.registry.flow.marker import open_registry
from weighbridge.registry.flow.publish import publish
from weighbridge.registry.flow.pull import pull
from weighbridge.registry.flow.sync import sync
from weighbridge.registry.flow.verify import verify_version
from weighbridge.registry.remotes.protocol import Remote
from weighbridge.registry.remotes.s3 import multipart
from weighbridge.registry.remotes.s3.remote import S3Remote
from weighbridge.registry.remotes.wrappers import Retrying
from weighbridge.registry.types import Owner, Receipt
from weighbridge_testlib import seaweed as servers
from weighbridge_testlib.audit import audit
from weighbridge_testlib.desk import Desk
from weighbridge_testlib.faults import Call, Fault, Faulty, Killed
from weighbridge_testlib.publishing import OWNER, candidate, rendered
from weighbridge_testlib.seaweed import Server
from weighbridge_testlib.shelf import payload

MIB = 1 << 20
NAME = "medical-sft"


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    servers.credentials(monkeypatch)


def remote_at(server: Server, prefix: str, **changes: Any) -> S3Remote:
    """Open a remote that sends small parts."""
    return S3Remote(server.place(prefix, **changes), single=MIB, part=multipart.PART_LEAST)


def large(seed: int) -> dict[str, bytes]:
    """Return the files of an adapter whose weights go in two parts."""
    weights = random.Random(seed).randbytes(multipart.PART_LEAST + 100_000)
    return payload(seed) | {"adapter_model.safetensors": weights}


def test_publish_list_and_pull(seaweed: Server, tmp_path: Path) -> None:
    """Small and large files are published, proven by the server, found through the feed, and pulled as they were."""
    remote = remote_at(seaweed, "flow")
    registry = open_registry(remote, create=True)
    assert (registry.mode, registry.writer) == ("shared", None)
    receipts = []
    for seed in (1, 2):
        made = candidate(remote, tmp_path / str(seed), files=large(seed))
        receipts.append(publish(remote, "team", registry, made, OWNER, render=rendered))
    assert [receipt.verified for receipt in receipts] == ["sha256-server"] * 2
    assert receipts[0].location == f"s3://registry/flow/models/{NAME}/v1/"
    again = candidate(remote, tmp_path / "again", files=large(1))
    assert publish(remote, "team", registry, again, OWNER, render=rendered).n == 1
    catalog = Catalog.open(tmp_path / "cache.db", durable=False).at(registry.registry)
    told = sync(remote, catalog)
    assert (told.open, told.problems) == (0, [])
    reader = remote_at(seaweed, "flow")
    pulled = pull(reader, NAME, 2, tmp_path / "pulled")
    assert pulled.bytes == sum(map(len, large(2).values()))
    for path, body in large(2).items():
        assert (tmp_path / "pulled" / path).read_bytes() == body
    assert [found for found in verify_version(reader, NAME, 1).findings if found.severity != "note"] == []
    audit(remote, receipts)
    plain = seaweed.client().get_object(Bucket="registry", Key=f"flow/models/{NAME}/v2/adapter_config.json")
    assert plain["Body"].read() == large(2)["adapter_config.json"]
    remote.close()
    reader.close()


def test_a_joined_version_costs_no_transfer(seaweed: Server, tmp_path: Path) -> None:
    """Files that are there already are compared by the server's hash; nothing is sent or read again."""
    first = remote_at(seaweed, "joined")
    registry = open_registry(first, create=True)
    decisions = Faulty(first, lambda call: "die-before" if call[1:] == ("create", layout.manifest(NAME, 1)) else None)
    made = candidate(first, tmp_path / "first", files=large(3))
    with pytest.raises(Killed):
        publish(decisions, "team", registry, made, OWNER, render=rendered)
    second = remote_at(seaweed, "joined")
    made = candidate(second, tmp_path / "second", files=large(3))
    key = second.link.key(layout.version(NAME, 1, "adapter_model.safetensors"))
    read: list[Any] = []
    ask = second.link.ask
    second.link.ask = lambda op, what, **given: read.append((op, given.get("Key"))) or ask(op, what, **given)  # type: ignore[method-assign,func-returns-value]
    receipt = publish(second, "team", registry, made, Owner(host="other", daemon="x"), render=rendered)
    assert (receipt.n, receipt.joined, receipt.verified) == (1, True, "sha256-server")
    assert {op for op, where in read if where == key} == {"head_object"}
    audit(second, [receipt])
    first.close()
    second.close()


def test_other_bytes_in_a_versions_folder_stop_it(seaweed: Server, tmp_path: Path) -> None:
    """A large file of the same name and size that somebody else put there is foreign bytes, and stays as it is."""
    remote = remote_at(seaweed, "foreign")
    registry = open_registry(remote, create=True)
    files = large(4)
    size = len(files["adapter_model.safetensors"])
    key = f"foreign/{layout.version(NAME, 1, 'adapter_model.safetensors')}"
    seaweed.client().put_object(Bucket="registry", Key=key, Body=b"x" * size)
    with pytest.raises(errors.ForeignBytesError):
        publish(remote, "team", registry, candidate(remote, tmp_path / "a", files=files), OWNER, render=rendered)
    assert seaweed.client().get_object(Bucket="registry", Key=key)["Body"].read() == b"x" * size
    remote.close()


def test_eight_publishers_race(seaweed: Server, tmp_path: Path) -> None:
    """Eight publishers, two names, contents in common, in any order: one number for each content, all agree on it."""
    registry = open_registry(remote_at(seaweed, "races"), create=True)
    gate = threading.Barrier(8)
    receipts: list[Receipt] = []
    failed: list[BaseException] = []

    def run(number: int) -> None:
        remote = Retrying(remote_at(seaweed, "races"))
        jobs = [(name, seed) for name in (NAME, "legal-dpo") for seed in (1, 2)]
        random.Random(number).shuffle(jobs)
        owner = Owner(host=f"host-{number}", daemon=str(number))
        gate.wait()
        try:
            for name, seed in jobs:
                made = candidate(remote, tmp_path / f"{number}-{name}-{seed}", name, seed=seed)
                receipts.append(publish(remote, "team", registry, made, owner, render=rendered))
        except BaseException as error:  # noqa: BLE001 - reported by the test itself
            failed.append(error)
        remote.close()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert len(receipts) == 32
    remote = remote_at(seaweed, "races")
    state = audit(remote, receipts)
    assert sorted(state.committed) == [("legal-dpo", 1), ("legal-dpo", 2), (NAME, 1), (NAME, 2)]
    assert remote.sweep(-60) == 0
    remote.close()


class Dies:
    """Kills a publisher at one of its calls, before or after the store has done it."""

    def __init__(self, at: int, fault: Fault) -> None:
        self.at = at
        self.fault = fault

    def __call__(self, call: Call) -> Fault | None:
        """Die at the chosen call."""
        return self.fault if call.number == self.at else None


def test_publishers_that_die_and_a_collector_that_errs(seaweed: Server, tmp_path: Path) -> None:
    """Publishers die anywhere and forget all, a collector gives their numbers up: every content has one number."""
    chance = random.Random(11)
    registry = open_registry(remote_at(seaweed, "deaths"), create=True)
    receipts: list[Receipt] = []

    def attempt(remote: Remote, seed: int, number: int) -> None:
        made = candidate(remote, tmp_path / f"{number}", seed=seed)
        try:
            receipts.append(publish(remote, "team", registry, made, OWNER, render=rendered))
        except Killed:
            staging.discard(made.bundle)

    for number in range(12):
        remote = remote_at(seaweed, "deaths")
        fault: Fault = chance.choice(["die-before", "die-after"])
        attempt(Faulty(remote, Dies(chance.randrange(3, 30), fault)), number % 5, number)
        audit(remote, receipts)
        if number % 4 == 3:
            collect(remote, registry, by="collector", dead_after=-60)
        remote.close()
    remote = remote_at(seaweed, "deaths")
    for seed in range(5):
        attempt(remote, seed, 100 + seed)
    state = audit(remote, receipts)
    assert len(state.committed) == 5
    assert state.open == set()
    numbers = sorted(n for _, n in (*state.committed, *state.void))
    assert numbers == list(range(1, len(numbers) + 1))
    remote.close()


@pytest.mark.parametrize("at", range(4, 28, 4))
def test_a_publisher_that_dies_leaves_nothing_visible(seaweed: Server, tmp_path: Path, at: int) -> None:
    """Whenever a publisher dies, a version is there whole or not at all, and the next one finishes it."""
    prefix = f"dies-{at}"
    remote = remote_at(seaweed, prefix)
    registry = open_registry(remote, create=True)
    made = candidate(remote, tmp_path / "a", files=large(at))
    dying = Faulty(remote, Dies(at, "die-after"))
    try:
        publish(dying, "team", registry, made, OWNER, render=rendered)
    except Killed:
        state = audit(remote)
        assert len(state.committed) + len(state.open) <= 1
    other = remote_at(seaweed, prefix)
    receipt = publish(
        other, "team", registry, candidate(other, tmp_path / "b", files=large(at)), OWNER, render=rendered
    )
    assert receipt.n == 1
    audit(other, [receipt])
    for one in (remote, other):
        one.close()


# --------------------------------------------------------------------------------------------------------- the commands


def test_a_team_at_the_command_line(seaweed: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the URL and the endpoint in the configuration, ls, show, pull, tag and verify work as on any remote."""
    desk = Desk(tmp_path / "desk", monkeypatch, max_age="0s")
    desk.config.write_text(
        f'[remotes.team]\nurl = "s3://registry/desk"\nendpoint = "{seaweed.endpoint}"\n'
        'patience = "1m"\nmax_age = "0s"\n'
    )
    remote = remote_at(seaweed, "desk")
    registry = open_registry(remote, create=True)
    made = candidate(remote, tmp_path / "a", files=large(7))
    publish(remote, "team", registry, made, OWNER, render=rendered)
    listed = desk.ok("ls", "--json").json
    assert [row["name"] for row in listed["versions"]] == [NAME]
    desk.ok("pull", NAME, tmp_path / "pulled")
    body = (tmp_path / "pulled" / "adapter_model.safetensors").read_bytes()
    assert hashlib.sha256(body).digest() == hashlib.sha256(large(7)["adapter_model.safetensors"]).digest()
    desk.ok("tag", f"{NAME}@v1", "prod")
    assert f"{NAME}@v1" in desk.ok("show", f"{NAME}:prod").out
    desk.ok("verify", tmp_path / "pulled")
    remote.close()


@pytest.mark.parametrize(("bucket", "code"), [("no-such-bucket", 3), ("ab", 2)])
def test_errors_reach_the_command_line(
    seaweed: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket: str, code: int
) -> None:
    """A wrong bucket ends a command with its exit code and three lines, and no traceback."""
    desk = Desk(tmp_path / "desk", monkeypatch)
    desk.config.write_text(
        f'[remotes.team]\nurl = "s3://{bucket}/x"\nendpoint = "{seaweed.endpoint}"\npatience = "1m"\n'
    )
    said = desk.registry("ls")
    assert said.code == code
    assert said.err.startswith("error: ")
    assert "\n  fix: " in said.err
    assert "Traceback" not in said.err
