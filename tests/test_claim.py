"""Claims: one content has one number in one name, whoever comes and however often."""

import json
from pathlib import Path

import pytest

from weighbridge.registry import errors, layout
from weighbridge.registry.flow.claim import claim, made_before
from weighbridge.registry.flow.claims import Claimed, Known, manifest_of, read_all
from weighbridge.registry.flow.decide import void
from weighbridge.registry.flow.marker import open_registry
from weighbridge.registry.hashing import sha256_bytes
from weighbridge.registry.manifest import Manifest, canonical
from weighbridge.registry.remotes.directory import DirectoryRemote
from weighbridge.registry.remotes.memory import MemoryRemote
from weighbridge.registry.remotes.protocol import Remote
from weighbridge.registry.types import Claim, Registry
from weighbridge_testlib.faults import Call, Faulty
from weighbridge_testlib.publishing import OTHER, OWNER
from weighbridge_testlib.shelf import facts, payload
from weighbridge_testlib.shelf import manifest_of as sealed

NAME = "medical-sft"


@pytest.fixture(params=["memory", "directory"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Remote:
    """Return an empty remote of each kind."""
    return MemoryRemote() if request.param == "memory" else DirectoryRemote(tmp_path / "remote")


@pytest.fixture
def registry(remote: Remote) -> Registry:
    """Begin a registry."""
    return open_registry(remote, create=True)


def manifest(seed: int, **about: object) -> Manifest:
    """Return a manifest whose content depends on the seed alone."""
    return sealed(payload(seed), facts(**about))  # type: ignore[arg-type]


def commit(remote: Remote, claimed: Claimed) -> None:
    """Decide a claim by hand."""
    remote.create(layout.manifest(claimed.claim.name, claimed.claim.n), claimed.claim.manifest.encode())


def withdraw(remote: Remote, n: int) -> None:
    """Mark a version as withdrawn by hand."""
    remote.create(layout.withdrawn(NAME, n), b"{}")


def test_numbers_are_dense_and_chained(remote: Remote, registry: Registry) -> None:
    """Each new content gets the next number, and each claim names the sha256 of the one before as stored."""
    made = [claim(remote, registry, NAME, manifest(seed), OWNER) for seed in (1, 2, 3)]
    assert [c.claim.n for c in made] == [1, 2, 3]
    assert not any(c.joined or c.committed for c in made)
    bodies = [remote.read(f"models/{NAME}/_wb/claims/0000000{n}.json") for n in (1, 2, 3)]
    documents = [json.loads(body) for body in bodies]
    assert [d["prev"] for d in documents] == [None, sha256_bytes(bodies[0]), sha256_bytes(bodies[1])]
    assert [c.sha256 for c in made] == [sha256_bytes(body) for body in bodies]
    for document, claimed, seed in zip(documents, made, (1, 2, 3), strict=True):
        assert document["schema"] == "weighbridge/claim/1"
        assert document["registry"] == registry.registry
        assert document["content"] == manifest(seed).content
        assert document["manifest"].encode() == manifest(seed).stored == manifest_of(claimed).stored
        assert document["owner"] == {"host": "trainer-03", "daemon": "d" * 32}
        assert claimed.stored_at
        assert claimed.stored_at.endswith("Z")
    assert len({d["nonce"] for d in documents}) == 3
    assert all(body == canonical(document) for body, document in zip(bodies, documents, strict=True))


def test_the_same_content_joins(remote: Remote, registry: Registry) -> None:
    """Whoever brings a content that has a number gets that number and its manifest, open or committed."""
    claim(remote, registry, NAME, manifest(1), OWNER)
    first = claim(remote, registry, NAME, manifest(2, step=1), OWNER)
    joined = claim(remote, registry, NAME, manifest(2, step=2), OTHER)
    assert (joined.claim, joined.sha256, joined.joined, joined.committed) == (first.claim, first.sha256, True, False)
    assert manifest_of(joined).facts.provenance.step == 1
    assert joined.stored_at == first.stored_at
    commit(remote, first)
    again = claim(remote, registry, NAME, manifest(2), OTHER)
    assert (again.claim.n, again.joined, again.committed) == (2, True, True)


def test_names_are_apart(remote: Remote, registry: Registry) -> None:
    """One content may stand under two names, each with its own numbers."""
    claim(remote, registry, NAME, manifest(1), OWNER)
    other = claim(remote, registry, "other", manifest(1), OWNER)
    assert (other.claim.n, other.joined) == (1, False)


def test_void_claims_do_not_count(remote: Remote, registry: Registry) -> None:
    """A content whose number was given up gets a new one, which later comers join."""
    claim(remote, registry, NAME, manifest(1), OWNER)
    void(remote, registry, NAME, 1, reason="dead", by="collector")
    second = claim(remote, registry, NAME, manifest(1), OWNER)
    assert (second.claim.n, second.joined) == (2, False)
    assert claim(remote, registry, NAME, manifest(1), OTHER).claim.n == 2


def test_withdrawn_content_stays_away(remote: Remote, registry: Registry) -> None:
    """What was withdrawn is refused, unless asked for again: then it has a new number that everybody joins."""
    commit(remote, claim(remote, registry, NAME, manifest(1), OWNER))
    withdraw(remote, 1)
    with pytest.raises(errors.WithdrawnContentError, match="medical-sft@v1") as caught:
        claim(remote, registry, NAME, manifest(1), OWNER)
    assert "--again" in str(caught.value.fix)
    revived = claim(remote, registry, NAME, manifest(1), OWNER, again=True)
    assert (revived.claim.n, revived.joined) == (2, False)
    for again in (True, False):
        assert claim(remote, registry, NAME, manifest(1), OTHER, again=again).claim.n == 2


def test_a_derivation_is_made_once(remote: Remote, registry: Registry) -> None:
    """The same merge with other rounding joins the first result when it is there, and waits while it is open.

    What is there is known before the work; what is open is not: it may be ours to go on with.
    """
    assert made_before(remote, registry, NAME, lambda: pytest.fail("asked for what it takes to hash a model")) is None
    first = claim(remote, registry, NAME, manifest(1), OWNER, derivation="sha256:dd")
    with pytest.raises(errors.NotFinishedError, match="v1 is being published by trainer-03") as caught:
        claim(remote, registry, NAME, manifest(2), OTHER, derivation="sha256:dd")
    assert caught.value.data == {"n": 1, "host": "trainer-03"}
    same = claim(remote, registry, NAME, manifest(1), OTHER, derivation="sha256:dd")
    assert (same.claim.n, same.joined) == (1, True)
    assert made_before(remote, registry, NAME, lambda: "sha256:dd") is None
    commit(remote, first)
    there = made_before(remote, registry, NAME, lambda: "sha256:dd")
    assert (there and there.claim, made_before(remote, registry, NAME, lambda: "sha256:ee")) == (first.claim, None)
    joined = claim(remote, registry, NAME, manifest(2), OTHER, derivation="sha256:dd")
    assert (joined.claim.n, joined.joined, joined.committed) == (1, True, True)
    assert joined.claim.content == manifest(1).content
    other = claim(remote, registry, NAME, manifest(2), OTHER, derivation="sha256:ee")
    assert (other.claim.n, other.joined) == (2, False)
    assert json.loads(remote.read(layout.claim(NAME, 2)))["derivation"] == "sha256:ee"


def test_an_open_derivation_that_is_given_up_is_made_anew(remote: Remote, registry: Registry) -> None:
    """After the void of a dead merge the next one claims a number of its own."""
    claim(remote, registry, NAME, manifest(1), OWNER, derivation="sha256:dd")
    void(remote, registry, NAME, 1, reason="dead", by="collector")
    assert claim(remote, registry, NAME, manifest(2), OTHER, derivation="sha256:dd").claim.n == 2


def test_a_withdrawn_derivation_stays_away(remote: Remote, registry: Registry) -> None:
    """A merge that was withdrawn does not come back by merging again."""
    commit(remote, claim(remote, registry, NAME, manifest(1), OWNER, derivation="sha256:dd"))
    withdraw(remote, 1)
    with pytest.raises(errors.WithdrawnContentError):
        claim(remote, registry, NAME, manifest(2), OTHER, derivation="sha256:dd")
    with pytest.raises(errors.WithdrawnContentError):
        made_before(remote, registry, NAME, lambda: "sha256:dd")
    assert made_before(remote, registry, NAME, lambda: "sha256:dd", again=True) is None
    assert claim(remote, registry, NAME, manifest(2), OTHER, derivation="sha256:dd", again=True).claim.n == 2


def test_a_name_has_one_kind(remote: Remote, registry: Registry) -> None:
    """A second kind under a name is refused with the name to use instead."""
    claim(remote, registry, NAME, manifest(1), OWNER)
    with pytest.raises(errors.NameTakenError, match="adapter") as caught:
        claim(remote, registry, NAME, manifest(2, kind="model"), OWNER)
    assert "medical-sft-model" in str(caught.value.fix)
    assert len(read_all(remote, registry, NAME)) == 1


def test_a_name_belongs_to_its_run(remote: Remote, registry: Registry) -> None:
    """Another run needs a shared name; the same content joins whatever run it is from."""
    claim(remote, registry, NAME, manifest(1, run="one"), OWNER, share=False)
    claim(remote, registry, NAME, manifest(2, run="one"), OWNER, share=False)
    with pytest.raises(errors.NameTakenError, match="medical/one"):
        claim(remote, registry, NAME, manifest(3, run="two"), OWNER, share=False)
    assert claim(remote, registry, NAME, manifest(3, run="two"), OWNER, share=True).claim.n == 3
    assert claim(remote, registry, NAME, manifest(1, run="two"), OWNER, share=False).claim.n == 1


def test_names_that_differ_by_case_collide(remote: Remote, registry: Registry) -> None:
    """A name that another one equals but for case is refused; a folder without a claim does not count."""
    claim(remote, registry, "Medical-SFT", manifest(1), OWNER)
    with pytest.raises(errors.NameTakenError, match="Medical-SFT"):
        claim(remote, registry, NAME, manifest(1), OWNER)
    remote.create("models/LEFTOVER/v1/w", b"")
    assert claim(remote, registry, "leftover", manifest(1), OWNER).claim.n == 1


def test_of_two_spellings_claimed_at_once_not_both_stay(registry: Registry, remote: Remote) -> None:
    """When another spelling is claimed between our look and our claim, ours is given up."""

    def plan(call: Call) -> None:
        if call.method == "create" and call.key == layout.claim(NAME, 1):
            claim(remote, registry, "MEDICAL-sft", manifest(9), OTHER)

    with pytest.raises(errors.NameTakenError):
        claim(Faulty(remote, plan), registry, NAME, manifest(1), OWNER)
    assert b'"void"' in remote.read(layout.manifest(NAME, 1))


def test_a_spelling_that_gave_way_stays_away(registry: Registry, remote: Remote) -> None:
    """Trying again does not bring a second spelling in behind the claim that gave way."""

    def plan(call: Call) -> None:
        if call.method == "create" and call.key == layout.claim(NAME, 1):
            claim(remote, registry, "MEDICAL-sft", manifest(9), OTHER)

    with pytest.raises(errors.NameTakenError):
        claim(Faulty(remote, plan), registry, NAME, manifest(1), OWNER)
    for seed in (1, 2):
        with pytest.raises(errors.NameTakenError, match="MEDICAL-sft"):
            claim(remote, registry, NAME, manifest(seed), OWNER)
    assert len(read_all(remote, registry, NAME)) == 1
    assert claim(remote, registry, "MEDICAL-sft", manifest(10), OTHER).claim.n == 2


def test_a_name_that_nobody_finished_binds_nobody(remote: Remote, registry: Registry) -> None:
    """A claim that was given up leaves the name to another run, kind or spelling."""
    for name in (NAME, "other"):
        claim(remote, registry, name, manifest(1, run="one"), OWNER, share=False)
        void(remote, registry, name, 1, reason="dead", by="collector")
    other = claim(remote, registry, NAME, manifest(2, run="two", kind="model"), OTHER, share=False)
    assert (other.claim.n, other.joined) == (2, False)
    with pytest.raises(errors.NameTakenError, match="model"):
        claim(remote, registry, NAME, manifest(3, run="two"), OTHER, share=False)
    assert claim(remote, registry, "Other", manifest(4), OTHER).claim.n == 1


@pytest.mark.parametrize("name", ["", "a--b", "../x", "x" * 97, "_wb", "a\nb"])
def test_bad_names_are_refused(remote: Remote, registry: Registry, name: str) -> None:
    """The one validator of names stands at this door as well."""
    with pytest.raises(errors.UsageError):
        claim(remote, registry, name, manifest(1), OWNER)


def test_a_lost_race_goes_on_with_the_next_number(remote: Remote, registry: Registry) -> None:
    """When others take the number we wanted, we read what they took and take the next, or join."""
    others = iter([manifest(2), manifest(3), manifest(1)])

    def plan(call: Call) -> None:
        if call.method == "create" and call.key.startswith(layout.claims(NAME)):
            claim(remote, registry, NAME, next(others), OTHER)

    claimed = claim(Faulty(remote, plan), registry, NAME, manifest(1), OWNER)
    assert (claimed.claim.n, claimed.joined) == (3, True)
    assert [k.content for k in read_all(remote, registry, NAME).values()] == [manifest(s).content for s in (2, 3, 1)]


def test_a_lost_answer_is_our_claim(remote: Remote, registry: Registry) -> None:
    """A claim whose answer was lost is recognised by its nonce and not claimed twice."""
    for fault in ("lost", "dropped"):
        faults = iter([fault])
        faulty = Faulty(remote, lambda c, f=faults: next(f, None) if c.method == "create" else None)  # type: ignore[misc]
        claimed = claim(faulty, registry, NAME, manifest(len(fault)), OWNER)
        assert not claimed.joined
    assert len(read_all(remote, registry, NAME)) == 2


def test_what_is_not_stored_is_not_relied_on(registry: Registry, remote: Remote) -> None:
    """A store that confirms a claim and holds other bytes stops the publication."""

    class Lying(Faulty):
        def read(self, key: str) -> bytes:
            """Return one byte too many."""
            return super().read(key) + (b" " if key == layout.claim(NAME, 1) else b"")

    with pytest.raises(errors.IntegrityError, match="not what was written"):
        claim(Lying(remote), registry, NAME, manifest(1), OWNER)


def broken(body: bytes, how: str) -> bytes:
    """Return a claim with one thing wrong."""
    document = json.loads(body)
    if how == "json":
        return body[:-1]
    if how == "flip":
        return body.replace(b"trainer-03", b"trainer-13", 1)
    document |= {
        "prev": {"prev": "0" * 64},
        "n": {"n": 7},
        "name": {"name": "other"},
        "schema": {"schema": "x"},
        "content": {"content": "sha256:" + "0" * 64},
        "field": {"content": 5},
    }[how]
    return canonical(document)


@pytest.mark.parametrize("how", ["json", "flip", "prev", "n", "name", "schema", "content", "field"])
def test_a_damaged_claim_stops_publishing_and_is_named(how: str) -> None:
    """Whatever is wrong with a claim in the middle, no number is given, and the claim (or its neighbour) is named."""
    remote = MemoryRemote()
    registry = open_registry(remote, create=True)
    for seed in (1, 2, 3):
        claim(remote, registry, NAME, manifest(seed), OWNER)
    key = layout.claim(NAME, 2)
    body = remote.read(key)
    remote.delete(key)
    remote.create(key, broken(body, how))
    with pytest.raises(errors.IntegrityError, match=r"0000000[12]\.json is damaged"):
        claim(remote, registry, NAME, manifest(4), OWNER)
    assert len(list(remote.list(layout.claims(NAME)))) == 3


def test_a_missing_claim_stops_publishing() -> None:
    """A hole in the claims is damage: nobody could tell which content had that number."""
    remote = MemoryRemote()
    registry = open_registry(remote, create=True)
    for seed in (1, 2, 3):
        claim(remote, registry, NAME, manifest(seed), OWNER)
    remote.delete(layout.claim(NAME, 2))
    with pytest.raises(errors.IntegrityError, match=r"00000002\.json is damaged"):
        claim(remote, registry, NAME, manifest(4), OWNER)


def test_the_home_of_a_name_is_confirmed() -> None:
    """Claims of another registry, say in a copied folder, are never continued."""
    remote, other = MemoryRemote(), MemoryRemote()
    registry, stranger = open_registry(remote, create=True), open_registry(other, create=True)
    claim(remote, registry, NAME, manifest(1), OWNER)
    with pytest.raises(errors.NameTakenError, match="another registry"):
        claim(remote, stranger, NAME, manifest(2), OWNER)
    with pytest.raises(errors.NameTakenError, match="another registry"):
        claim(remote, stranger, NAME, manifest(1), OWNER)


def test_a_foreign_decision_is_damage(remote: Remote, registry: Registry) -> None:
    """A manifest.json that is neither the claim's nor a void is named, not joined."""
    claim(remote, registry, NAME, manifest(1), OWNER)
    remote.create(layout.manifest(NAME, 1), manifest(2).stored)
    with pytest.raises(errors.IntegrityError, match="is damaged"):
        claim(remote, registry, NAME, manifest(1), OWNER)


def test_what_is_known_is_not_read_again(registry: Registry, remote: Remote) -> None:
    """With a kept table only the last known and new claims are read; a remote that was set back is noticed."""
    known: dict[int, Known] = {}
    for seed in range(1, 21):
        claim(remote, registry, NAME, manifest(seed), OWNER, known=known)
    assert sorted(known) == list(range(1, 21))
    faulty = Faulty(remote)
    claim(faulty, registry, NAME, manifest(21), OWNER, known=known)
    assert faulty.count("read") <= 4
    assert faulty.count() <= 8  # one of them sees that the new number was never decided
    for n in (20, 21):
        remote.delete(layout.claim(NAME, n))
    claimed = claim(remote, registry, NAME, manifest(77), OWNER, known=known)
    assert claimed.claim.n == 20
    assert claimed.claim.prev == known[19].sha256
    assert len(known) == 20


def test_a_claim_of_the_example_is_read() -> None:
    """Unknown fields of a later version do not hinder reading a claim."""
    remote = MemoryRemote()
    registry = open_registry(remote, create=True)
    made = claim(remote, registry, NAME, manifest(1), OWNER).claim
    remote.delete(layout.claim(NAME, 1))
    remote.create(layout.claim(NAME, 1), canonical({**json.loads(canonical(made)), "later": [1]}))
    joined = claim(remote, registry, NAME, manifest(1), OWNER)
    assert isinstance(joined.claim, Claim)
    assert joined.joined
