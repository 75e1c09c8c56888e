"""From files to a committed version in one call: what comes out, what repeating does, and how few requests it takes."""

import json
import os
import time
from pathlib import Path

import msgspec
import pytest

from weighbridge.registry import disk, errors, layout, stages
from weighbridge.registry.flow import stage as staging
from weighbridge.registry.flow.claim import claim
from weighbridge.registry.flow.decide import void
from weighbridge.registry.flow.feed import changes
from weighbridge.registry.flow.marker import open_registry
from weighbridge.registry.flow.publish import Candidate, prepare, publish, sealed
from weighbridge.registry.hashing import sha256_bytes
from weighbridge.registry.remotes.directory import DirectoryRemote
from weighbridge.registry.remotes.memory import MemoryRemote
from weighbridge.registry.remotes.protocol import Remote
from weighbridge.registry.types import FeedEntry, Receipt, Registry
from weighbridge_testlib.audit import audit
from weighbridge_testlib.faults import Call, Fault, Faulty
from weighbridge_testlib.publishing import OTHER, OWNER, candidate, rendered, write_files
from weighbridge_testlib.shelf import facts, payload

NAME = "medical-sft"


@pytest.fixture(params=["memory", "directory"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Remote:
    """Return an empty remote of each kind."""
    return MemoryRemote("memory://shelf") if request.param == "memory" else DirectoryRemote(tmp_path / "remote")


@pytest.fixture
def registry(remote: Remote) -> Registry:
    """Begin a registry."""
    return open_registry(remote, create=True)


def send(remote: Remote, registry: Registry, made: Candidate, *, keep_stage: bool = False) -> Receipt:
    """Publish a candidate with the test's card."""
    return publish(remote, "home", registry, made, OWNER, render=rendered, keep_stage=keep_stage)


def told(remote: Remote) -> list[FeedEntry]:
    """Return everything the feed says."""
    return [entry for part in changes(remote, 0).parts for entry in part.entries]


def test_a_version_comes_out(remote: Remote, registry: Registry, tmp_path: Path) -> None:
    """One call stages, claims, announces, uploads, decides, announces and tidies up."""
    made = candidate(remote, tmp_path / "run")
    receipt = send(remote, registry, made)
    assert (receipt.name, receipt.n, receipt.content, receipt.joined) == (NAME, 1, made.content, False)
    state = audit(remote, [receipt])
    assert state.committed == {(NAME, 1): made.content}
    entries = told(remote)
    assert [(e.type, e.n) for e in entries] == [("claim", 1), ("version", 1)]
    assert entries[1].card_sha256 == sha256_bytes(remote.read(layout.version(NAME, 1, "README.md")))
    assert entries[0].stored_at == entries[1].stored_at
    assert made.bundle.place is None or not Path(made.bundle.place).exists()
    assert remote.sweep(-100) == 0


def test_copies_that_killed_commands_left_go(tmp_path: Path) -> None:
    """Whoever stages in the user's cache removes what nobody holds any more; what is being sent is held.

    Of this machine that shows within seconds; a copy of another one, whose lock is not seen here, is left for two days.
    """
    root = stages.root(os.environ)
    ours = {name: stages.place_of(os.environ, name) for name in ("retried", "held", "begun")}
    ages: dict[Path, float] = {ours["retried"]: 61, ours["held"]: 61, ours["begun"]: -60, root / "other": 3601}
    ages[root / "dead"] = stages.LEFTOVER_AFTER + 1
    for place in ages:
        (place / "sub").mkdir(parents=True)
        (place / "sub" / "weights").write_bytes(b"x")
    for place, age in ages.items():
        then = time.time() - age
        for path in (*place.rglob("*"), place):
            os.utime(path, (then, then))
    remote = MemoryRemote("memory://shelf")
    written = write_files(tmp_path / "run", payload(1))
    with stages.held(ours["held"]):
        made = prepare(remote, NAME, written, facts(), staging_folder=root)
        assert set(root.iterdir()) == {ours["held"], ours["begun"], root / "other", root / made.nonce}
    swept = []

    def plan(call: Call) -> None:
        if call.method == "upload":
            swept.append(stages.sweep(root, -100))

    send(Faulty(remote, plan), open_registry(remote, create=True), made, keep_stage=True)
    assert swept[0] == 3
    assert set(swept[1:]) == {0}
    assert stages.sweep(root, -100) == 1
    filling: list[int] = []
    prepare(
        remote, NAME, written, facts(), staging_folder=root, progress=lambda _: filling.append(stages.sweep(root, -100))
    )
    assert set(filling) == {0}


def test_the_card_is_rendered_around_what_people_wrote(remote: Remote, registry: Registry, tmp_path: Path) -> None:
    """Without a renderer of its own a publication carries the real card and, with a history, training.json."""
    about = facts(history="training.json", log_history=[{"step": 1, "loss": 2.5}])
    made = candidate(remote, tmp_path / "run", about=about)
    receipt = publish(remote, "home", registry, made, OWNER, people="Trained on a rainy day.\n")
    card = remote.read(layout.version(NAME, 1, "README.md")).decode()
    assert "Trained on a rainy day." in card
    assert "medical-sft" in card
    assert json.loads(remote.read(layout.version(NAME, 1, "training.json")))["schema"] == "weighbridge/training/1"
    audit(remote, [receipt])


def test_publishing_again_gives_the_same_version(remote: Remote, registry: Registry, tmp_path: Path) -> None:
    """The same bytes from another folder, with other facts, get the number they have; no object is added for them."""
    first = send(remote, registry, candidate(remote, tmp_path / "one"))
    other = candidate(remote, tmp_path / "two", about=facts(step=999, run="other"))
    before = [s.key for s in remote.list("models/")]
    second = send(remote, registry, other)
    assert (second.n, second.content, second.joined) == (first.n, first.content, True)
    assert second.manifest_sha256 == first.manifest_sha256
    assert [s.key for s in remote.list("models/")] == before
    assert {(e.type, e.n) for e in told(remote)} == {("claim", 1), ("version", 1)}


def test_what_was_lost_is_put_back_by_the_same_bytes(remote: Remote, registry: Registry, tmp_path: Path) -> None:
    """Nothing is overwritten and no number is given; where the store tells a sha256, other bytes are noticed, too."""
    first = send(remote, registry, candidate(remote, tmp_path / "one"))
    key = layout.version(NAME, 1, "adapter_config.json")
    whole = remote.read(key)
    remote.delete(key)
    mended: list[errors.WeighbridgeError] = []
    made = candidate(remote, tmp_path / "two")
    second = publish(remote, "home", registry, made, OWNER, render=rendered, mended=mended.append)
    assert (second.n, second.verified in {"sha256-server", "sha256-read"}) == (1, True)
    assert ["adapter_config.json" in error.what for error in mended] == [True]
    assert remote.read(key) == whole
    audit(remote, [first, second])
    remote.delete(key)
    remote.create(key, whole.swapcase())
    again = candidate(remote, tmp_path / "three")
    if not remote.properties.server_sha256:
        assert send(remote, registry, again).verified == "size"
        return
    with pytest.raises(errors.ForeignBytesError) as caught:
        send(remote, registry, again)
    assert str(caught.value.fix).startswith(f"registry withdraw {NAME}@v1")
    assert remote.read(key) == whole.swapcase()


def test_what_was_made_in_the_same_way_puts_nothing_back(remote: Remote, registry: Registry, tmp_path: Path) -> None:
    """Other bytes of the same derivation join a version, but they are not what it has lost."""
    send(remote, registry, candidate(remote, tmp_path / "one", derivation="d" * 64))
    remote.delete(layout.version(NAME, 1, "adapter_config.json"))
    with pytest.raises(errors.IntegrityError, match="is missing"):
        send(remote, registry, candidate(remote, tmp_path / "two", seed=2, derivation="d" * 64))
    assert layout.version(NAME, 1, "adapter_config.json") not in {found.key for found in remote.list("models/")}


@pytest.mark.parametrize("fault", ["full", "busy", "dropped"])
def test_a_version_that_cannot_be_announced_is_published(remote: Remote, tmp_path: Path, fault: Fault) -> None:
    """Whatever fails after the decision makes nothing undone; a repetition keeps the number and tells the team."""
    faulty = Faulty(remote)
    registry = open_registry(faulty, create=True)

    def after_the_decision(call: Call) -> Fault | None:
        decided = any(c.method == "create" and c.key == layout.manifest(NAME, 1) for c in faulty.calls)
        return fault if decided and call.method == "create" and call.key.startswith("catalog/feed/") else None

    untold: list[errors.WeighbridgeError] = []
    faulty.plan = after_the_decision
    made = candidate(faulty, tmp_path / "run")
    receipt = publish(faulty, "home", registry, made, OWNER, render=rendered, untold=untold.append)
    (why,) = untold
    assert isinstance(why, errors.DiskFullError if fault == "full" else errors.UnreachableError)
    assert audit(remote, [receipt]).committed == {(NAME, 1): made.content}
    assert [entry.type for entry in told(remote)] == ["claim"]
    faulty.plan = lambda _: None
    again = send(faulty, registry, candidate(faulty, tmp_path / "run"))
    assert (again.n, again.joined) == (1, True)
    assert [entry.type for entry in told(remote)] == ["claim", "version"]


def test_an_old_version_is_not_announced_again(tmp_path: Path) -> None:
    """Joining what was committed long ago tells the team nothing: the feed does not grow by repetition."""
    now = [1_000_000.0]
    remote = MemoryRemote(clock=lambda: now[0])
    registry = open_registry(remote, create=True)
    send(remote, registry, candidate(remote, tmp_path / "run"))
    assert len(told(remote)) == 2
    send(remote, registry, candidate(remote, tmp_path / "run"))
    assert len(told(remote)) == 3
    now[0] += 100_000
    send(remote, registry, candidate(remote, tmp_path / "run"))
    assert len(told(remote)) == 3


def test_a_dead_publisher_is_finished_by_whoever_has_the_bytes(
    remote: Remote, registry: Registry, tmp_path: Path
) -> None:
    """A claim whose owner died half-way through its upload is joined, announced, filled and decided at once."""
    made = candidate(remote, tmp_path / "dead")
    claim(remote, registry, NAME, sealed(made), OTHER)
    remote.create(layout.version(NAME, 1, "adapter_model.safetensors"), payload(1)["adapter_model.safetensors"])
    receipt = send(remote, registry, candidate(remote, tmp_path / "run"))
    assert (receipt.n, receipt.joined) == (1, True)
    audit(remote, [receipt])
    assert {(e.type, e.n) for e in told(remote)} == {("claim", 1), ("version", 1)}


def test_a_number_given_up_under_our_hands_is_replaced(remote: Remote, registry: Registry, tmp_path: Path) -> None:
    """When a collector voids the claim during the upload, the content gets a new number and the old one is cleared."""

    def plan(call: Call) -> Fault | None:
        if call.method in {"upload", "create"} and call.key == layout.version(NAME, 1, "adapter_config.json"):
            void(remote, registry, NAME, 1, reason="too slow", by="collector")
        return None

    receipt = send(Faulty(remote, plan), registry, candidate(remote, tmp_path / "run"))
    assert receipt.n == 2
    state = audit(remote, [receipt])
    assert state.void == {(NAME, 1)}
    assert [s.key for s in remote.list(layout.version(NAME, 1))] == [layout.manifest(NAME, 1)]


def test_endless_voids_end(remote: Remote, registry: Registry, tmp_path: Path) -> None:
    """Somebody who voids every number stops the publication with a clear error instead of a loop."""

    def plan(call: Call) -> Fault | None:
        if call.method == "create" and call.key.endswith("README.md"):
            n = int(call.key.split("/")[2].removeprefix("v"))
            void(remote, registry, NAME, n, reason="no", by="nobody")
        return None

    with pytest.raises(errors.VoidedError, match="could not be published"):
        send(Faulty(remote, plan), registry, candidate(remote, tmp_path / "run"))
    assert len(audit(remote).void) == 5


def test_a_source_that_changes_before_the_decision_is_not_published(tmp_path: Path) -> None:
    """In direct mode a late change of any file, already sent or not, stops the job before the decision."""
    remote = MemoryRemote()
    registry = open_registry(remote, create=True)
    made = candidate(remote, tmp_path / "run")
    assert made.bundle.mode == "direct"

    def plan(call: Call) -> Fault | None:
        if call.method == "create" and call.key.endswith("README.md"):
            (tmp_path / "run" / "adapter_model.safetensors").write_bytes(b"next checkpoint")
        return None

    with pytest.raises(errors.SourceChangedError, match=r"adapter_model\.safetensors"):
        send(Faulty(remote, plan), registry, made)
    assert audit(remote).open == {(NAME, 1)}


def test_a_stage_is_kept_on_request(remote: Remote, registry: Registry, tmp_path: Path) -> None:
    """Mirrors need the bytes later; after an error they stay for the next try."""
    written = write_files(tmp_path / "run", payload(1))
    made = prepare(remote, NAME, written, facts(), staging_folder=tmp_path / "staging")
    assert made.bundle.place
    place = Path(made.bundle.place)
    full = Faulty(remote, lambda call: "full" if call.key.endswith("adapter_config.json") else None)
    with pytest.raises(errors.DiskFullError):
        send(full, registry, made)
    assert place.is_dir()
    send(remote, registry, made, keep_stage=True)
    assert place.is_dir()
    send(remote, registry, made)
    assert not place.exists()


def test_where_the_copy_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder stages beside its versions; others in the staging folder, or not at all when there is no room."""
    written = write_files(tmp_path / "run", payload(1))
    folder = DirectoryRemote(tmp_path / "remote")
    open_registry(folder, create=True)
    inside = prepare(folder, NAME, written, facts(), staging_folder=tmp_path / "staging")
    assert inside.bundle.place == str(tmp_path / "remote/models/medical-sft/_wb/stage" / inside.nonce)
    memory = MemoryRemote()
    beside = prepare(memory, NAME, written, facts(), staging_folder=tmp_path / "staging")
    assert beside.bundle.place == str(tmp_path / "staging" / beside.nonce)
    assert prepare(memory, NAME, written, facts()).bundle.mode == "direct"
    assert prepare(folder, NAME, written, facts(), mode="direct").bundle.mode == "direct"
    monkeypatch.setattr(disk, "free_bytes", lambda _: 100)
    monkeypatch.setattr(staging, "_can_clone", lambda *_: False)
    assert prepare(memory, NAME, written, facts(), staging_folder=tmp_path / "staging").bundle.mode == "direct"
    with pytest.raises(errors.DiskFullError):
        prepare(memory, NAME, written, facts(), staging_folder=tmp_path / "staging", mode="copy")
    with pytest.raises(errors.DiskFullError):
        prepare(folder, NAME, written, facts())


def test_what_cannot_be_sealed_leaves_no_stage(tmp_path: Path) -> None:
    """An unknown kind or a rendered file among the payload is refused and the stage removed."""
    remote = DirectoryRemote(tmp_path / "remote")
    open_registry(remote, create=True)
    with pytest.raises(errors.UsageError):
        prepare(remote, NAME, write_files(tmp_path / "run", payload(1)), facts(kind="poem"))
    with pytest.raises(errors.UsageError):
        prepare(remote, NAME, write_files(tmp_path / "run", payload(1) | {"README.md": b""}), facts())
    with pytest.raises(errors.UsageError):
        prepare(remote, "a--b", [], facts())
    assert list((tmp_path / "remote/models/medical-sft/_wb/stage").iterdir()) == []


def test_a_candidate_survives_a_restart(tmp_path: Path) -> None:
    """What `prepare` returns can be stored as JSON and published by another process."""
    remote = DirectoryRemote(tmp_path / "remote")
    registry = open_registry(remote, create=True)
    made = candidate(remote, tmp_path / "run")
    again = msgspec.convert(json.loads(json.dumps(msgspec.to_builtins(made))), Candidate)
    assert again == made
    assert send(DirectoryRemote(tmp_path / "remote"), registry, again).n == 1


@pytest.mark.parametrize("versions", [0, 1, 50])
def test_a_small_thing_takes_few_requests(tmp_path: Path, versions: int) -> None:
    """A publication of three files takes some 20 requests, besides one for each earlier claim."""
    inner = MemoryRemote()
    registry = open_registry(inner, create=True)
    for seed in range(versions):
        send(inner, registry, candidate(inner, tmp_path / "run", seed=seed + 100))
    remote = Faulty(inner)
    send(remote, registry, candidate(remote, tmp_path / "new"))
    assert remote.count() - versions <= 24, [f"{c.method} {c.key}" for c in remote.calls]
    remote.calls.clear()
    send(remote, registry, candidate(remote, tmp_path / "new"))
    assert remote.count("create", "upload") <= 1
