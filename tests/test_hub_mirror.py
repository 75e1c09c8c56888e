"""The Hub as a mirror of a folder, and a folder as a mirror of the Hub: the same numbers, claims and bytes."""

import json
from pathlib import Path

import pytest

from weighbridge.config.settings import RemoteSettings
from weighbridge.registry import errors, layout
from weighbridge.registry.flow import tags
from weighbridge.registry.flow.decision import committed
from weighbridge.registry.flow.follow import beside, carry
from weighbridge.registry.flow.marker import open_registry
from weighbridge.registry.flow.mirror import deliver
from weighbridge.registry.flow.publish import publish as flow_publish
from weighbridge.registry.flow.withdraw import withdraw
from weighbridge.registry.manifest import Manifest
from weighbridge.registry.remotes.directory import DirectoryRemote
from weighbridge.registry.remotes.ledger import LEDGER_FILE, VERSION_FILE, parse_ledger
from weighbridge_testlib.hub import Fault, TestHub
from weighbridge_testlib.hub.rig import publish, remote
from weighbridge_testlib.hub.store import Repo
from weighbridge_testlib.publishing import OWNER, candidate
from weighbridge_testlib.shelf import payload

NAME = "medical-sft"


def repo_of(hub: TestHub) -> Repo:
    """Return the repository of the tests' name."""
    return hub.store.get(f"acme/{NAME}")


def by_hand(hub: TestHub, files: dict[str, bytes], name: str = NAME) -> Repo:
    """Make a repository with files, as somebody who knows nothing of us does."""
    repo = hub.store.create("model", "acme", name, hub.store.tokens["hf_ann"])
    changes = [("file", {"path": path, "content": body}) for path, body in files.items()]
    hub.store.commit(repo, "main", title="by hand", message="", author="ann", parent=None, changes=changes)
    return repo


def _plain(manifest: Manifest, name: str, n: int) -> dict[str, bytes]:
    return {"README.md": f"# {name} v{n}\n{manifest.content}\n".encode()}


def home_with(tmp_path: Path, count: int) -> DirectoryRemote:
    """Return a folder that is the home of some versions."""
    home = DirectoryRemote(tmp_path / "home")
    registry = open_registry(home, create=True)
    for seed in range(1, count + 1):
        made = candidate(home, tmp_path / f"source-{seed}", seed=seed)
        flow_publish(home, "team", registry, made, OWNER, render=_plain)
    return home


def test_a_mirror_gets_the_homes_numbers_and_claims(hub: TestHub, tmp_path: Path) -> None:
    """Number, claim, manifest, files and papers are those of the home, to the byte; repeating changes nothing."""
    home, mirror = home_with(tmp_path, 2), remote(hub, tmp_path / "ann")
    registry = open_registry(mirror, create=True)
    begun: list[int] = []
    moved: list[int] = []
    for n in (1, 2):
        receipt = deliver(
            home, mirror, NAME, n, mirror_name="hub", registry=registry, scratch=tmp_path / "scratch",
            begin=lambda files: begun.append(sum(file.size for file in files)),
            progress=lambda _path, count: moved.append(count),
        )  # fmt: skip
        assert (receipt.n, receipt.remote) == (n, "hub")
        assert sum(moved) == sum(begun), "whoever waits is told of every byte"
        assert len(begun) == n
    commits = len(repo_of(hub).history("main"))
    deliver(home, mirror, NAME, 1, mirror_name="hub", registry=registry, scratch=tmp_path / "scratch")
    assert len(repo_of(hub).history("main")) == commits == 3
    for n in (1, 2):
        for key in (layout.claim(NAME, n), layout.manifest(NAME, n), layout.version(NAME, n, "README.md")):
            assert mirror.read(key) == home.read(key)
        for path, body in payload(n).items():
            assert b"".join(mirror.fetch(layout.version(NAME, n, path))) == body
    with pytest.raises(errors.NameTakenError, match="another registry"):
        publish(mirror, tmp_path / "own", seed=7)
    mirror.close()


def test_a_late_lower_number_goes_aside(hub: TestHub, tmp_path: Path) -> None:
    """v2 comes after v3: it gets its tag, main stays at v3, the branch is gone, and everybody finds both."""
    home, mirror = home_with(tmp_path, 3), remote(hub, tmp_path / "ann")
    registry = open_registry(mirror, create=True)
    for n in (1, 3, 2):
        deliver(home, mirror, NAME, n, mirror_name="hub", registry=registry, scratch=tmp_path / "scratch")
    repo = repo_of(hub)
    assert sorted(repo.tags) == ["v1", "v2", "v3"]
    assert list(repo.branches) == ["main"]
    assert json.loads(hub.store.body(repo.at()[VERSION_FILE]))["n"] == 3
    assert [t.n for t in parse_ledger(hub.store.body(repo.at()[LEDGER_FILE]), "x").versions] == [1, 2, 3]
    for n in (1, 2, 3):
        assert {p: hub.store.body(repo.at(f"v{n}")[p]) for p in payload(n)} == payload(n)
        assert mirror.read(layout.claim(NAME, n)) == home.read(layout.claim(NAME, n))
    mirror.close()


def test_a_late_number_whose_bringer_died_is_told_of(hub: TestHub, tmp_path: Path) -> None:
    """The tag stands and the ledger does not know it: the next delivery tells of it and changes nothing else."""
    home, mirror = home_with(tmp_path, 2), remote(hub, tmp_path / "ann")
    registry = open_registry(mirror, create=True)
    deliver(home, mirror, NAME, 2, mirror_name="hub", registry=registry, scratch=tmp_path / "scratch")
    hub.faults.add(Fault("commit", skip=1, status=403))
    with pytest.raises(errors.DeniedError):
        deliver(home, mirror, NAME, 1, mirror_name="hub", registry=registry, scratch=tmp_path / "scratch")
    tagged = repo_of(hub).tags["v1"]
    deliver(home, mirror, NAME, 1, mirror_name="hub", registry=registry, scratch=tmp_path / "scratch")
    assert repo_of(hub).tags["v1"] == tagged
    assert [t.n for t in parse_ledger(hub.store.body(repo_of(hub).at()[LEDGER_FILE]), "x").versions] == [1, 2]
    mirror.close()


def test_a_mirror_that_holds_something_else_is_left_alone(hub: TestHub, tmp_path: Path) -> None:
    """Another registry's versions, or a foreign tag of that number, are reported as diverged and not touched."""
    home, mirror = home_with(tmp_path, 1), remote(hub, tmp_path / "ann")
    registry = open_registry(mirror, create=True)
    repo = by_hand(hub, {"README.md": b"# x\n"})
    repo.tags["v1"] = repo.head.oid
    with pytest.raises(errors.DivergedError, match="something else"):
        deliver(home, mirror, NAME, 1, mirror_name="hub", registry=registry, scratch=tmp_path / "scratch")
    del hub.store.repos["model", f"acme/{NAME}"]
    publish(mirror, tmp_path / "own", seed=5)
    head = repo_of(hub).head.oid
    with pytest.raises(errors.DivergedError):
        deliver(home, mirror, NAME, 1, mirror_name="hub", registry=registry, scratch=tmp_path / "scratch")
    assert repo_of(hub).head.oid == head
    mirror.close()


def test_tags_and_withdrawals_come_along(hub: TestHub, tmp_path: Path) -> None:
    """A tag that moves at home moves on the Hub, its Git tag with it; a withdrawal comes too; repeating is harmless."""
    home, mirror = home_with(tmp_path, 2), remote(hub, tmp_path / "ann")
    registry, own = open_registry(mirror, create=True), open_registry(home, create=False)
    for outcome in ("copied", "there"):
        for n in (1, 2):
            done = carry(
                home,
                mirror,
                NAME,
                n,
                settings=RemoteSettings("hub", "hf://acme"),
                registry=registry,
                scratch=tmp_path / "scratch",
            )
            assert done.outcome == outcome
    tags.move(home, own, NAME, "prod", 1, "lw")
    tags.move(home, own, NAME, "prod", 2, "lw")
    withdraw(home, own, NAME, 1, who="lw", why="wrong data")
    told = beside(home, mirror, registry, NAME)
    assert (told.tags, told.withdrawn, told.waiting, told.diverged) == (2, 1, [], [])
    moved = tags.current(mirror, NAME, "prod")
    assert moved is not None
    assert (moved.to, moved.seq) == (2, 2)
    assert repo_of(hub).tags["prod"] == repo_of(hub).tags["v2"]
    with pytest.raises(errors.WithdrawnError):
        committed(mirror, NAME, 1)
    told = beside(home, mirror, registry, NAME)
    assert (told.tags, told.withdrawn) == (0, 0)
    mirror.close()
