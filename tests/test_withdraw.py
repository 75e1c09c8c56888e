"""Taking versions back, and giving up numbers that nobody finished."""

import json
from pathlib import Path

import pytest

from weighbridge.registry import errors, layout
from weighbridge.registry.catalog import Catalog
from weighbridge.registry.flow import tags
from weighbridge.registry.flow.claim import claim
from weighbridge.registry.flow.collect import DEAD_AFTER, clear, collect
from weighbridge.registry.flow.feed import announce, changes, void_entry
from weighbridge.registry.flow.marker import open_registry
from weighbridge.registry.flow.publish import publish, sealed
from weighbridge.registry.flow.sync import sync
from weighbridge.registry.flow.withdraw import GRACE, purge, withdraw
from weighbridge.registry.hashing import sha256_bytes
from weighbridge.registry.remotes.memory import MemoryRemote
from weighbridge.registry.types import Receipt
from weighbridge_testlib.audit import audit
from weighbridge_testlib.faults import Call, Fault, Faulty, Killed
from weighbridge_testlib.publishing import OTHER, OWNER, candidate, rendered
from weighbridge_testlib.shelf import payload

NAME = "medical-sft"


class Place:
    """A registry in memory with a clock that the test sets."""

    def __init__(self, folder: Path) -> None:
        self.time = 1_800_000_000.0
        self.remote = MemoryRemote(clock=lambda: self.time)
        self.registry = open_registry(self.remote, create=True)
        self.folder = folder

    def publish(self, seed: int) -> Receipt:
        """Publish a content."""
        made = candidate(self.remote, self.folder / str(seed), seed=seed)
        return publish(self.remote, "home", self.registry, made, OWNER, render=rendered)

    def withdraw(self, n: int) -> bool:
        """Take a version back."""
        return withdraw(self.remote, self.registry, NAME, n, who="lw", why="wrong data")

    def open(self, seed: int) -> int:
        """Claim a number and leave it open."""
        made = candidate(self.remote, self.folder / str(seed), seed=seed)
        return claim(self.remote, self.registry, NAME, sealed(made), OTHER).claim.n

    def claim_and_tell(self, seed: int) -> None:
        """Claim a number, tell the team, and die."""
        made = candidate(self.remote, self.folder / str(seed), seed=seed)
        files = layout.version(NAME, 2)
        dying = Faulty(
            self.remote, lambda call: "die-before" if call.key.startswith(files) and call.method != "stat" else None
        )
        with pytest.raises(Killed):
            publish(dying, "home", self.registry, made, OTHER, render=rendered)

    def told(self, kind: str) -> list[int | None]:
        """Return the numbers the feed told of."""
        return [e.n for part in changes(self.remote, 0).parts for e in part.entries if e.type == kind]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Return a registry with one version."""
    place = Place(tmp_path)
    place.publish(1)
    return place


def test_a_withdrawal_is_a_mark_that_the_team_hears_of(place: Place) -> None:
    """The mark says who, when and why; files stay; the feed tells it; repeating it changes nothing."""
    before = {s.key for s in place.remote.list("models/")}
    assert place.withdraw(1) is True
    assert place.withdraw(1) is False
    key = layout.withdrawn(NAME, 1)
    assert {s.key for s in place.remote.list("models/")} == before | {key}
    mark = json.loads(place.remote.read(key))
    assert {k: mark[k] for k in ("schema", "name", "n", "who", "why")} == {
        "schema": "weighbridge/withdrawn/1", "name": NAME, "n": 1, "who": "lw", "why": "wrong data",
    }  # fmt: skip
    assert mark["registry"] == place.registry.registry
    assert mark["when"] == "2027-01-15T08:00:00.000Z"
    assert place.told("withdrawn") == [1, 1]
    (entry, _) = [e for p in changes(place.remote, 0).parts for e in p.entries if e.type == "withdrawn"]
    assert entry.sha256 == sha256_bytes(place.remote.read(key))


def test_the_payload_goes_after_the_grace(place: Place) -> None:
    """Deletion needs a mark and patience; card, manifest, claim and mark stay for ever, and the config goes first."""
    with pytest.raises(errors.NotFoundError, match="not withdrawn"):
        purge(place.remote, NAME, 1)
    place.withdraw(1)
    with pytest.raises(errors.NotFinishedError) as caught:
        purge(place.remote, NAME, 1)
    assert caught.value.data["wait"] == pytest.approx(GRACE)
    place.time += GRACE
    faulty = Faulty(place.remote)
    assert purge(faulty, NAME, 1) == sum(map(len, payload(1).values()))
    deleted = [c.key.rpartition("/")[2] for c in faulty.calls if c.method == "delete"]
    assert deleted == ["adapter_config.json", "tokenizer.json", "adapter_model.safetensors"]
    assert [s.key for s in place.remote.list(layout.version(NAME, 1))] == [
        layout.version(NAME, 1, path) for path in ("README.md", "manifest.json", "training.json")
    ]
    assert purge(place.remote, NAME, 1) == 0
    audit(place.remote)


def test_what_was_taken_back_is_purged_without_its_decision(place: Place) -> None:
    """The mark says that it was committed, and the claim which files it has."""
    place.withdraw(1)
    place.remote.delete(layout.manifest(NAME, 1))
    place.time += GRACE
    assert purge(place.remote, NAME, 1) == sum(map(len, payload(1).values()))
    assert {s.key.rpartition("/")[2] for s in place.remote.list(layout.version(NAME, 1))} <= {
        "README.md",
        "training.json",
    }


def test_a_withdrawn_content_does_not_rise_again(place: Place) -> None:
    """The folder that still stands is refused; asked for again it gets a new number, which is whole."""
    place.withdraw(1)
    place.time += GRACE
    purge(place.remote, NAME, 1)
    with pytest.raises(errors.WithdrawnContentError):
        place.publish(1)
    made = candidate(place.remote, place.folder / "1")
    receipt = publish(place.remote, "home", place.registry, made, OWNER, render=rendered, again=True)
    assert receipt.n == 2
    assert place.publish(1).n == 2
    audit(place.remote, [receipt])


def test_a_tag_wins(place: Place) -> None:
    """A tagged version is not withdrawn, and one that was tagged during the grace keeps its files."""
    tags.move(place.remote, place.registry, NAME, "prod", 1, who="lw", why=None)
    with pytest.raises(errors.ConflictError, match="tagged 'prod'"):
        place.withdraw(1)
    place.publish(2)
    tags.move(place.remote, place.registry, NAME, "prod", 2, who="lw", why=None)
    place.withdraw(1)
    place.time += GRACE
    body = place.remote.read(layout.tag(NAME, "prod", 2)).replace(b'"to":2', b'"to":1')
    place.remote.create(layout.tag(NAME, "prod", 3), body.replace(b'"seq":2', b'"seq":3'))
    with pytest.raises(errors.ConflictError, match="tagged 'prod'"):
        purge(place.remote, NAME, 1)
    assert place.remote.stat(layout.version(NAME, 1, "adapter_model.safetensors")).size


def test_only_versions_can_be_withdrawn(place: Place) -> None:
    """What is open, given up or not there cannot be taken back."""
    n = place.open(2)
    for number in (n, 77):
        with pytest.raises(errors.NotFoundError, match="there is no version"):
            place.withdraw(number)
    place.time += 2 * DEAD_AFTER
    assert collect(place.remote, place.registry, by="collector") == [(NAME, n)]
    with pytest.raises(errors.NotFoundError) as caught:
        place.withdraw(n)
    assert "given up" in str(caught.value.why)


def test_a_damaged_mark_deletes_nothing(place: Place) -> None:
    """A mark that is not this version's is no proof."""
    place.remote.create(layout.withdrawn(NAME, 1), b'{"schema":"weighbridge/withdrawn/1","name":"other","n":1}')
    place.time += GRACE
    with pytest.raises(errors.IntegrityError):
        purge(place.remote, NAME, 1)


@pytest.mark.parametrize("foreign", [False, True])
def test_a_claim_whose_files_are_all_there_is_not_given_up(place: Place, foreign: bool) -> None:
    """Only the decision is missing: nothing is voided or removed, it is told, and any publisher of it still joins."""
    n = place.open(2)
    for path, body in payload(2).items():
        place.remote.create(layout.version(NAME, n, path), body)
    if foreign:
        place.remote.create(layout.version(NAME, n, "notes.txt"), b"?")
    place.time += 2 * DEAD_AFTER
    before = sorted(found.key for found in place.remote.list(""))
    told: list[tuple[str, int, str]] = []
    tell = lambda *end: told.append(end)  # noqa: E731
    assert collect(place.remote, place.registry, by="collector", tell=tell) == []
    assert told == [(NAME, n, "whole")]
    assert sorted(found.key for found in place.remote.list("")) == before
    if not foreign:
        assert place.publish(2).n == n
        audit(place.remote)


@pytest.mark.parametrize("damage", ["torn", "another content", "a later format", "empty"])
@pytest.mark.parametrize("where", ["home", "mirror"])
def test_a_claim_that_cannot_be_read_gives_nothing_up(place: Place, where: str, damage: str) -> None:
    """Whose it is and what it lacks nobody can tell, at a home or on a mirror: all stays, and it is told."""
    n = place.open(2)
    for path, body in payload(2).items():
        place.remote.create(layout.version(NAME, n, path), body)
    remote, registry = place.remote, place.registry
    if where == "mirror":
        remote = MemoryRemote(clock=lambda: place.time)
        registry = open_registry(remote, create=True)
        for found in place.remote.list(layout.MODELS):
            remote.create(found.key, place.remote.read(found.key))
    key = layout.claim(NAME, n)
    whole = remote.read(key)
    bodies = {
        "torn": whole[:-9],
        "another content": whole.replace(b'"content":"sha256:', b'"content":"sha256:00', 1),
        "a later format": whole.replace(b"weighbridge/manifest/1", b"weighbridge/manifest/3"),
        "empty": b"",
    }
    remote.delete(key)
    remote.create(key, bodies[damage])
    place.time += 2 * DEAD_AFTER
    before = sorted(found.key for found in remote.list(""))
    told: list[tuple[str, int, str]] = []
    for loose_ends in (None, [(NAME, n)]):
        assert collect(remote, registry, by="c", loose_ends=loose_ends, tell=lambda *end: told.append(end)) == []
    assert told == [(NAME, n, "damaged")] * 2
    assert sorted(found.key for found in remote.list("")) == before


@pytest.mark.parametrize("left", ["a file less", "a byte less"])
def test_a_claim_that_lacks_something_is_given_up(place: Place, left: str) -> None:
    """One file that is missing or too short is enough: nobody can finish it from what lies there."""
    n = place.open(2)
    files = dict(payload(2))
    path = max(files, key=lambda one: len(files[one]))
    body = files.pop(path)
    if left == "a byte less":
        files[path] = body[:-1]
    for one, there in files.items():
        place.remote.create(layout.version(NAME, n, one), there)
    place.time += 2 * DEAD_AFTER
    assert collect(place.remote, place.registry, by="collector") == [(NAME, n)]
    assert [found.key for found in place.remote.list(layout.version(NAME, n))] == [layout.manifest(NAME, n)]


def test_open_claims_are_given_up_after_seven_days(place: Place) -> None:
    """By the store's clock an open claim of a dead owner is voided, its half upload removed, the team told."""
    n = place.open(2)
    place.remote.create(layout.version(NAME, n, "adapter_model.safetensors"), b"half")
    place.time += DEAD_AFTER - 1
    assert collect(place.remote, place.registry, by="collector") == []
    young = place.open(3)
    place.time += 1
    assert collect(place.remote, place.registry, by="collector") == [(NAME, n)]
    assert collect(place.remote, place.registry, by="collector") == []
    assert place.told("void") == [n]
    state = audit(place.remote)
    assert (state.void, state.open) == ({(NAME, n)}, {(NAME, young)})
    assert json.loads(place.remote.read(layout.manifest(NAME, n)))["by"] == "collector"
    assert place.publish(2).n == young + 1


def test_a_catalogue_saves_the_walk(place: Place) -> None:
    """With the loose ends of a catalogue nothing else is looked at; stale ones do no harm."""
    n = place.open(2)
    place.time += DEAD_AFTER
    faulty = Faulty(place.remote)
    voided = collect(faulty, place.registry, by="c", loose_ends=[(NAME, n), (NAME, 9), ("none", 1)])
    assert voided == [(NAME, n)]
    assert faulty.count("folders") == 0


def test_a_claim_that_is_finished_at_the_last_moment_stays(place: Place) -> None:
    """When the owner decides between the collector's look and its void, the version wins."""
    n = place.open(2)
    place.time += DEAD_AFTER

    def plan(call: Call) -> Fault | None:
        if call.method == "create" and call.key == layout.manifest(NAME, n):
            place.publish(2)
        return None

    assert collect(Faulty(place.remote, plan), place.registry, by="collector") == []
    assert audit(place.remote).committed.keys() == {(NAME, 1), (NAME, n)}


@pytest.mark.parametrize("kind", ["void", "version"])
def test_a_decision_whose_writer_died_is_told_by_the_collector(place: Place, kind: str) -> None:
    """Readers find it by its claim; the feed learns of it once, and no catalogue looks at the claim any more."""
    decision = layout.manifest(NAME, 2)
    if kind == "version":
        made = candidate(place.remote, place.folder / "2", seed=2)
        dying = Faulty(place.remote, lambda call: "die-after" if call[1:] == ("create", decision) else None)
        with pytest.raises(Killed):
            publish(dying, "home", place.registry, made, OWNER, render=rendered)
    else:
        place.claim_and_tell(2)
        place.remote.create(layout.version(NAME, 2, "adapter_model.safetensors"), b"half")
        place.time += DEAD_AFTER
        dying = Faulty(place.remote, lambda call: "die-after" if call[1:] == ("create", decision) else None)
        with pytest.raises(Killed):
            collect(dying, place.registry, by="collector")
    assert 2 not in place.told(kind)
    catalog = Catalog.open(None, place.registry.registry, durable=False)
    sync(place.remote, catalog)
    assert catalog.loose_ends() == [(NAME, 2)]
    place.time += DEAD_AFTER
    assert collect(place.remote, place.registry, by="next", loose_ends=catalog.loose_ends()) == []
    assert place.told(kind).count(2) == 1
    sync(place.remote, catalog)
    assert (catalog.loose_ends(), catalog.open_claims()) == ([], [])
    left = {stat.key.rpartition("/")[2] for stat in place.remote.list(layout.version(NAME, 2))}
    assert (left == {"manifest.json"}) == (kind == "void")
    catalog.close()
    audit(place.remote)


@pytest.mark.parametrize("damage", [b"weighbridge/manifest/3", b"weighbridge/manifest/1\\"])
def test_a_damaged_decision_keeps_no_collector_from_the_rest(place: Place, damage: bytes) -> None:
    """It is told to nobody and stays as it is, for `verify` to name; the next number is given up all the same."""
    n = place.open(2)
    key = layout.manifest(NAME, 1)
    body = place.remote.read(key).replace(b"weighbridge/manifest/1", damage)
    place.remote.delete(key)
    place.remote.create(key, body)
    place.time += DEAD_AFTER
    assert collect(place.remote, place.registry, by="c", loose_ends=[(NAME, 1), (NAME, n)]) == [(NAME, n)]
    assert place.remote.read(key) == body


def test_a_claim_that_was_never_told_is_given_up_once_it_is_a_gap(place: Place) -> None:
    """Its owner died before the announcement; the next number shows that one is missing, and a void ends it."""
    n = place.open(2)
    place.publish(3)
    catalog = Catalog.open(None, place.registry.registry, durable=False)
    sync(place.remote, catalog)
    assert (catalog.loose_ends(), catalog.gaps()) == ([], {NAME: [(n, n)]})
    place.time += DEAD_AFTER
    assert collect(place.remote, place.registry, by="c", loose_ends=(), gaps=catalog.gaps()) == [(NAME, n)]
    sync(place.remote, catalog)
    assert (catalog.loose_ends(), catalog.gaps(), catalog.given_up(0)) == ([], {}, [(NAME, n)])
    catalog.close()


def test_a_number_far_beyond_the_others_costs_nothing(place: Place) -> None:
    """However far somebody's word goes, a sweep lists what is claimed, once a name, and asks for nothing else."""
    n = place.open(2)
    place.publish(3)
    far = void_entry(NAME, layout.LAST, b"{}")
    announce(place.remote, place.registry, [far])
    catalog = Catalog.open(None, place.registry.registry, durable=False)
    sync(place.remote, catalog)
    assert catalog.gaps() == {NAME: [(n, n), (4, layout.LAST - 1)]}
    place.time += DEAD_AFTER
    faulty = Faulty(place.remote)
    assert collect(faulty, place.registry, by="c", loose_ends=(), gaps=catalog.gaps()) == [(NAME, n)]
    assert [call.key for call in faulty.calls if call.method == "list"].count(layout.claims(NAME)) == 1
    assert {call.key for call in faulty.calls if call.method == "stat"} == {layout.claim(NAME, n)}
    catalog.close()


def test_what_a_late_writer_leaves_under_a_void_is_cleared(place: Place) -> None:
    """A publisher that came back after its number was given up and may not delete leaves files; they go."""
    n = place.open(2)
    place.time += DEAD_AFTER
    collect(place.remote, place.registry, by="collector")
    place.remote.create(layout.version(NAME, n, "adapter_model.safetensors"), b"late")
    assert clear(place.remote, [(NAME, n), (NAME, 1), (NAME, 9)]) == 1
    audit(place.remote)


def test_a_mirror_gives_up_nothing_of_another_home(place: Place) -> None:
    """A claim that came from another registry waits for its home, however long it lies open here."""
    mirror = MemoryRemote(clock=lambda: place.time)
    registry = open_registry(mirror, create=True)
    n = place.open(2)
    mirror.create(layout.claim(NAME, n), place.remote.read(layout.claim(NAME, n)))
    place.time += 2 * DEAD_AFTER
    for loose_ends in (None, [(NAME, n)]):
        assert collect(mirror, registry, by="c", loose_ends=loose_ends) == []
