"""Files in their order, each compared; then the decision, which comes last and is made once."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from weighbridge.registry import disk, errors, layout
from weighbridge.registry.flow.claim import claim
from weighbridge.registry.flow.claims import Claimed, manifest_of
from weighbridge.registry.flow.decide import clear_void, decide, receipt, void
from weighbridge.registry.flow.feed import changes
from weighbridge.registry.flow.marker import open_registry
from weighbridge.registry.flow.publish import Candidate, prepare, sealed
from weighbridge.registry.flow.upload import order, upload
from weighbridge.registry.hashing import sha256_bytes
from weighbridge.registry.remotes.directory import DirectoryRemote
from weighbridge.registry.remotes.memory import MemoryRemote
from weighbridge.registry.remotes.protocol import Progress, Properties, Remote, Stat
from weighbridge.registry.types import FileEntry, Registry
from weighbridge_testlib.faults import Faulty
from weighbridge_testlib.publishing import OTHER, OWNER, candidate, rendered, write_files
from weighbridge_testlib.shelf import facts, payload

NAME = "medical-sft"
MODEL = {
    "config.json": b"{}",
    "generation_config.json": b"{}",
    "model-00001-of-00002.safetensors": b"one" * 100,
    "model-00002-of-00002.safetensors": b"two" * 200,
    "model.safetensors.index.json": b'{"weight_map":{}}',
    "tokenizer.json": b"[]",
    "tokenizer_config.json": b"{}",
    "LICENSE": b"free",
    "sub/adapter_config.json": b"{}",
}


@pytest.fixture(params=["memory", "directory"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Remote:
    """Return an empty remote of each kind."""
    return MemoryRemote("memory://shelf") if request.param == "memory" else DirectoryRemote(tmp_path / "remote")


@pytest.fixture
def registry(remote: Remote) -> Registry:
    """Begin a registry."""
    return open_registry(remote, create=True)


def claimed_by(remote: Remote, registry: Registry, made: Candidate) -> Claimed:
    """Claim a number for a candidate."""
    return claim(remote, registry, made.name, sealed(made), OWNER)


def cards(claimed: Claimed) -> dict[str, bytes]:
    """Return the rendered files of a claimed version."""
    return rendered(manifest_of(claimed), claimed.claim.name, claimed.claim.n)


def replace(remote: Remote, key: str, body: bytes) -> None:
    """Damage an object behind the product's back."""
    remote.delete(key)
    remote.create(key, body)


def test_files_go_in_the_order_that_fails_loaders_safely(remote: Remote, registry: Registry, tmp_path: Path) -> None:
    """Weights, tokenizer, index, the rest, the config that loaders look for, the card, and the decision last."""
    faulty = Faulty(remote)
    made = candidate(faulty, tmp_path / "run", files=MODEL)
    claimed = claimed_by(remote, registry, made)
    faulty.calls.clear()
    verified = upload(faulty, claimed, made.bundle, cards(claimed) | {"manifest.dsse.json": b"{}"})
    decide(faulty, "home", claimed, verified)
    root = layout.version(NAME, 1)
    written = [c.key.removeprefix(root) for c in faulty.calls if c.method in {"upload", "create"}]
    ranks = [
        {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"},
        {"tokenizer.json", "tokenizer_config.json"},
        {"model.safetensors.index.json"},
        {"generation_config.json", "LICENSE"},
        {"config.json", "sub/adapter_config.json"},
        {"README.md"},
        {"training.json"},
        {"manifest.dsse.json"},
        {"manifest.json"},
    ]
    assert len(written) == sum(map(len, ranks))
    for rank in ranks:
        assert set(written[: len(rank)]) == rank
        written = written[len(rank) :]


def test_roles_decide_the_order() -> None:
    """Groups come in order, large files first within a group; empty groups are left out."""
    entries = [
        FileEntry(path=p, size=s, sha256="0" * 64, role=r)
        for p, s, r in [("config.json", 1, "config"), ("b", 2, "weights"), ("a", 1, "weights"), ("t.py", 1, "code")]
    ]
    assert [[e.path for e in group] for group in order(entries)] == [["b", "a"], ["t.py"], ["config.json"]]


def test_a_version_is_whole_when_it_is_decided(remote: Remote, registry: Registry, tmp_path: Path) -> None:
    """After the decision every file lies there with its bytes, the card beside them, and the receipt tells it."""
    made = candidate(remote, tmp_path / "run", files=MODEL)
    claimed = claimed_by(remote, registry, made)
    moved: list[int] = []
    verified = upload(remote, claimed, made.bundle, cards(claimed), moved.append)
    level = "sha256-server" if remote.properties.server_sha256 else "sha256-read"
    assert verified == dict.fromkeys(MODEL, level)
    assert sum(moved) == sum(map(len, MODEL.values()))
    got = decide(remote, "home", claimed, verified)
    for path, body in MODEL.items():
        assert remote.read(layout.version(NAME, 1, path)) == body
    assert remote.read(layout.version(NAME, 1, "README.md")) == cards(claimed)["README.md"]
    assert remote.read(layout.manifest(NAME, 1)) == made.manifest.encode()
    assert (got.remote, got.name, got.n, got.content, got.verified, got.joined) == (
        "home", NAME, 1, made.content, level, False,
    )  # fmt: skip
    assert got.manifest_sha256 == sha256_bytes(made.manifest.encode())
    assert got.files == {path: sha256_bytes(body) for path, body in MODEL.items()}
    assert got.location == f"{remote.url}/models/{NAME}/v1/"
    assert got.committed_at.endswith("Z")


def test_everything_can_be_done_again(remote: Remote, registry: Registry, tmp_path: Path) -> None:
    """Uploading and deciding a second time, by somebody who joined, changes nothing and gives the same receipt."""
    made = candidate(remote, tmp_path / "run", files=MODEL)
    claimed = claimed_by(remote, registry, made)
    first = decide(remote, "home", claimed, upload(remote, claimed, made.bundle, cards(claimed)))
    listed = list(remote.list(""))
    other = candidate(remote, tmp_path / "copy", files=MODEL)
    joined = claim(remote, registry, NAME, sealed(other), OTHER)
    verified = upload(remote, joined, other.bundle, {"README.md": b"another card"})
    second = decide(remote, "home", joined, verified)
    assert second == msgspec.structs.replace(first, joined=True)
    assert list(remote.list("")) == listed


def test_a_committed_version_is_compared_by_size(remote: Remote, registry: Registry, tmp_path: Path) -> None:
    """The receipt of a version that somebody else committed says that only sizes were compared."""
    made = candidate(remote, tmp_path / "run")
    claimed = claimed_by(remote, registry, made)
    decide(remote, "home", claimed, upload(remote, claimed, made.bundle, cards(claimed)))
    joined = claimed_by(remote, registry, made)
    assert receipt(remote, "home", joined).verified == "size"
    remote.delete(layout.version(NAME, 1, "adapter_model.safetensors"))
    with pytest.raises(errors.IntegrityError, match="missing"):
        receipt(remote, "home", joined)


@pytest.mark.parametrize("foreign", [b"{}", b"[0]", b"longer than before"])
@pytest.mark.parametrize("joined", [False, True])
def test_foreign_bytes_stop_the_job(
    remote: Remote, registry: Registry, tmp_path: Path, foreign: bytes, joined: bool
) -> None:
    """A payload file with other bytes, of the same size or not, is named and left as it is; nothing is decided."""
    made = candidate(remote, tmp_path / "run", files=MODEL)
    claimed = claimed_by(remote, registry, made)
    if joined:
        claimed = claimed_by(remote, registry, made)
    key = layout.version(NAME, 1, "tokenizer.json")
    remote.create(key, foreign)
    with pytest.raises(errors.ForeignBytesError, match=r"tokenizer\.json holds other bytes"):
        upload(remote, claimed, made.bundle, cards(claimed))
    assert remote.read(key) == foreign
    with pytest.raises(errors.MissingError):
        remote.stat(layout.manifest(NAME, 1))
    with pytest.raises(errors.MissingError):
        remote.stat(layout.version(NAME, 1, "config.json"))


class Flipping(MemoryRemote):
    """A remote whose answers about weights have one wrong bit: at first, or each time another one."""

    def __init__(self, lies: int) -> None:
        super().__init__()
        self.lies = lies
        self.listings = 0

    def stat(self, key: str) -> Stat:
        """Tell another size."""
        found = super().stat(key)
        if self.lies and key.endswith(".safetensors"):
            self.lies -= 1
            return found._replace(size=found.size ^ (1 << self.lies))
        return found

    def list(self, prefix: str, *, after: str | None = None, limit: int | None = None) -> Iterator[Stat]:
        """List a name that is none at first."""
        self.listings += prefix.endswith("/v1/")
        for found in super().list(prefix, after=after, limit=limit):
            flipped = self.listings == 1 and found.key.endswith(".safetensors")
            yield found._replace(key=found.key[:-1] + "r") if flipped else found


def test_a_bit_that_flips_on_its_way_accuses_nobody(tmp_path: Path) -> None:
    """What differs is looked at twice: the right answer counts, and of two wrong ones nobody knows what is there."""
    remote = Flipping(1)
    registry = open_registry(remote, create=True)
    made = candidate(remote, tmp_path / "run")
    claimed = claimed_by(remote, registry, made)
    verified = upload(remote, claimed, made.bundle, cards(claimed))
    assert decide(remote, "home", claimed, verified).n == 1
    assert (remote.lies, remote.listings) == (0, 2)
    other = Flipping(2)
    claimed = claimed_by(other, open_registry(other, create=True), made)
    with pytest.raises(errors.RetryableError, match="nobody can tell") as caught:
        upload(other, claimed, made.bundle, cards(claimed))
    assert "damaged on its way" in f"{caught.value.why}"
    assert upload(other, claimed, made.bundle, cards(claimed))


def test_a_strange_file_stops_the_decision(remote: Remote, registry: Registry, tmp_path: Path) -> None:
    """A file that the manifest does not list would break the exact set, so nothing is decided."""
    made = candidate(remote, tmp_path / "run")
    claimed = claimed_by(remote, registry, made)
    verified = upload(remote, claimed, made.bundle, cards(claimed))
    remote.create(layout.version(NAME, 1, "sub/evil.py"), b"import os")
    with pytest.raises(errors.ForeignBytesError, match=r"sub/evil\.py"):
        decide(remote, "home", claimed, verified)


@pytest.mark.parametrize("lost", [None, b"short"])
def test_a_file_that_is_gone_stops_the_decision(
    remote: Remote, registry: Registry, tmp_path: Path, lost: bytes | None
) -> None:
    """A file that was deleted or exchanged after its upload is noticed before the decision."""
    made = candidate(remote, tmp_path / "run")
    claimed = claimed_by(remote, registry, made)
    verified = upload(remote, claimed, made.bundle, cards(claimed))
    key = layout.version(NAME, 1, "adapter_model.safetensors")
    remote.delete(key)
    if lost is not None:
        remote.create(key, lost)
    with pytest.raises(errors.IntegrityError, match=r"adapter_model\.safetensors"):
        decide(remote, "home", claimed, verified)


def test_size_is_no_proof(remote: Remote, registry: Registry, tmp_path: Path) -> None:
    """A file that was compared by size, or not at all, cannot be decided."""
    made = candidate(remote, tmp_path / "run")
    claimed = claimed_by(remote, registry, made)
    verified = upload(remote, claimed, made.bundle, cards(claimed))
    for wrong in (verified | {"adapter_config.json": "size"}, {}):
        with pytest.raises(errors.IntegrityError, match="not compared"):
            decide(remote, "home", claimed, wrong)


def test_an_existing_card_is_kept(remote: Remote, registry: Registry, tmp_path: Path) -> None:
    """Card, history and signature are created once; whoever comes second leaves them."""
    made = candidate(remote, tmp_path / "run")
    claimed = claimed_by(remote, registry, made)
    for path in ("README.md", "training.json", "manifest.dsse.json"):
        remote.create(layout.version(NAME, 1, path), b"first")
    upload(remote, claimed, made.bundle, cards(claimed) | {"manifest.dsse.json": b"{}"})
    for path in ("README.md", "training.json", "manifest.dsse.json"):
        assert remote.read(layout.version(NAME, 1, path)) == b"first"


def test_a_bundle_of_another_content_is_refused(remote: Remote, registry: Registry, tmp_path: Path) -> None:
    """A claim is never filled with files of another content."""
    claimed = claimed_by(remote, registry, candidate(remote, tmp_path / "one", seed=1))
    other = candidate(remote, tmp_path / "two", seed=2)
    with pytest.raises(errors.IntegrityError, match="not in the bundle"):
        upload(remote, claimed, other.bundle, {})


def test_a_server_that_stores_other_bytes_is_caught(tmp_path: Path) -> None:
    """The server's own checksum is compared after each upload."""

    class Rotting(MemoryRemote):
        def upload(
            self,
            key: str,
            source: Path,
            size: int,
            sha256: str,
            progress: Progress | None = None,
            *,
            parts: Sequence[bytes] = (),
        ) -> None:
            """Store one wrong byte."""
            super().upload(key, source, size, sha256, progress, parts=parts)
            body = bytearray(self.read(key))
            body[0] ^= 1
            replace(self, key, bytes(body))

    remote = Rotting()
    registry = open_registry(remote, create=True)
    made = candidate(remote, tmp_path / "run")
    claimed = claimed_by(remote, registry, made)
    with pytest.raises(errors.ForeignBytesError):
        upload(remote, claimed, made.bundle, {})


def test_without_a_checksum_what_was_stored_is_read(tmp_path: Path) -> None:
    """A server that tells no checksum is read back."""

    class Silent(MemoryRemote):
        @property
        def properties(self) -> Properties:
            """Promise no checksum."""
            return super().properties._replace(server_sha256=False)

        def stat(self, key: str) -> Stat:
            """Tell no checksum."""
            return super().stat(key)._replace(sha256=None)

    remote = Faulty(Silent())
    registry = open_registry(remote, create=True)
    made = candidate(remote, tmp_path / "run")
    claimed = claimed_by(remote, registry, made)
    assert set(upload(remote, claimed, made.bundle, {}).values()) == {"sha256-read"}
    assert remote.count("fetch") == 3


def test_replaced_files_are_sent_from_the_record(remote: Remote, registry: Registry, tmp_path: Path) -> None:
    """In direct mode a rewritten config is stored as it was sealed; the source keeps its own."""
    written = write_files(tmp_path / "run", payload(1))
    made = prepare(
        remote, NAME, written, facts(), mode="direct", transform={"adapter_config.json": b'{"rewritten":true}'}
    )
    claimed = claimed_by(remote, registry, made)
    decide(remote, "home", claimed, upload(remote, claimed, made.bundle, cards(claimed)))
    assert remote.read(layout.version(NAME, 1, "adapter_config.json")) == b'{"rewritten":true}'
    again = claimed_by(remote, registry, made)
    assert set(upload(remote, again, made.bundle, {})) == set(payload(1))
    replace(remote, layout.version(NAME, 1, "adapter_config.json"), b'{"rewritten":fals}')
    with pytest.raises(errors.ForeignBytesError):
        upload(remote, again, made.bundle, {})


def test_a_damaged_stage_is_never_visible(registry: Registry, remote: Remote, tmp_path: Path) -> None:
    """A bit that flips in the stage between hash and upload stops the job before the file is there."""
    if not isinstance(remote, DirectoryRemote):
        return
    made = candidate(remote, tmp_path / "run")
    claimed = claimed_by(remote, registry, made)
    assert made.bundle.place
    victim = Path(made.bundle.place, "adapter_model.safetensors")
    body = bytearray(victim.read_bytes())
    body[7] ^= 16
    victim.chmod(0o600)
    victim.write_bytes(body)
    with pytest.raises(errors.StageDamagedError):
        upload(remote, claimed, made.bundle, {})
    assert list(remote.list(layout.version(NAME, 1))) == []


def test_a_staged_version_costs_no_second_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From source to version the bytes are written once: the upload copies nothing and hashes nothing again."""
    remote = DirectoryRemote(tmp_path / "remote")
    registry = open_registry(remote, create=True)
    made = candidate(remote, tmp_path / "run", files=MODEL)
    claimed = claimed_by(remote, registry, made)

    def refuse(*_: object) -> None:
        raise AssertionError("the bytes were read again")

    monkeypatch.setattr(disk, "_pass", refuse)
    decide(remote, "home", claimed, upload(remote, claimed, made.bundle, cards(claimed)))


# ----------------------------------------------------------------------------------------------------------------- void


def test_a_number_that_was_given_up_cannot_be_decided(remote: Remote, registry: Registry, tmp_path: Path) -> None:
    """The decision of a voided claim is refused with the reason, and its files can be cleared away."""
    made = candidate(remote, tmp_path / "run")
    claimed = claimed_by(remote, registry, made)
    verified = upload(remote, claimed, made.bundle, cards(claimed))
    remote.create(layout.manifest(NAME, 1), b'{"by":"collector","void":"too slow"}')
    with pytest.raises(errors.VoidedError) as caught:
        decide(remote, "home", claimed, verified)
    assert "too slow" in str(caught.value.why)
    assert clear_void(remote, NAME, 1) == 5
    assert [s.key for s in remote.list(layout.version(NAME, 1))] == [layout.manifest(NAME, 1)]


def test_voiding_tells_the_team_and_clears(remote: Remote, registry: Registry, tmp_path: Path) -> None:
    """A void is one small object; half an upload under its number is removed, and the feed says so, also twice."""
    made = candidate(remote, tmp_path / "run")
    claimed = claimed_by(remote, registry, made)
    remote.create(layout.version(NAME, 1, "adapter_model.safetensors"), b"half")
    for _ in range(2):
        void(remote, registry, NAME, claimed.claim.n, reason="nobody came", by="collector")
        clear_void(remote, NAME, claimed.claim.n)
    assert json.loads(remote.read(layout.manifest(NAME, 1))) == {"void": "nobody came", "by": "collector"}
    assert [s.key for s in remote.list(layout.version(NAME, 1))] == [layout.manifest(NAME, 1)]
    told = [entry for part in changes(remote, 0).parts for entry in part.entries]
    assert {(e.type, e.n, e.source) for e in told} == {("void", 1, layout.manifest(NAME, 1))}
    assert told[0].sha256 == sha256_bytes(remote.read(layout.manifest(NAME, 1)))


def test_what_is_committed_cannot_be_voided_or_cleared(remote: Remote, registry: Registry, tmp_path: Path) -> None:
    """The void comes too late once a version is decided, and without a claim there is nothing to void."""
    made = candidate(remote, tmp_path / "run")
    claimed = claimed_by(remote, registry, made)
    decide(remote, "home", claimed, upload(remote, claimed, made.bundle, cards(claimed)))
    before = list(remote.list(""))
    with pytest.raises(errors.ConflictError, match="is committed"):
        void(remote, registry, NAME, 1, reason="x", by="y")
    with pytest.raises(errors.ConflictError, match="is committed"):
        clear_void(remote, NAME, 1)
    with pytest.raises(errors.MissingError):
        void(remote, registry, NAME, 2, reason="x", by="y")
    assert list(remote.list("")) == before
