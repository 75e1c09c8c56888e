"""What every remote has to do for versions, whether it is made of keys or of commits, as tests.

`remote_conformance` is the contract of remotes that are made of keys; this is the one that the flow needs of all of
them. A remote's test file inherits `VersionConformance` and says how to open it:

    class TestFolder(VersionConformance):
        def open(self, place: Path) -> Remote: ...

Two versions are published once for all tests of a class; whoever changes something does so under a name of its own.
"""

import random
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from weighbridge.registry import errors, layout
from weighbridge.registry.catalog import Catalog
from weighbridge.registry.flow import sync, tags
from weighbridge.registry.flow.marker import open_registry
from weighbridge.registry.flow.mirror import deliver
from weighbridge.registry.flow.publish import publish
from weighbridge.registry.flow.pull import pull
from weighbridge.registry.flow.resolve import resolve
from weighbridge.registry.flow.verify import verify_version
from weighbridge.registry.flow.withdraw import withdraw
from weighbridge.registry.hashing import sha256_bytes
from weighbridge.registry.manifest import Manifest
from weighbridge.registry.remotes.directory import DirectoryRemote
from weighbridge.registry.remotes.protocol import Progress, Remote
from weighbridge.registry.types import Receipt, Registry
from weighbridge_testlib.publishing import OTHER, OWNER, candidate
from weighbridge_testlib.shelf import facts

WEIGHTS: Final = "adapter_model.safetensors"
PAPERS: Final = {"README.md", "training.json", "manifest.json"}


def bundle(seed: int, *, rest: bool = True) -> dict[str, bytes]:
    """Return the files of a version: weights that lie apart on every remote, and with `rest` names of every script."""
    files = {
        "adapter_config.json": b'{"peft_type":"LORA","r":%d}\n' % seed,
        WEIGHTS: random.Random(seed).randbytes(30_000 + seed),
    }
    if rest:
        files |= {"tokenizer/tokenizer.json": b"{}", "tokenizer/empty.txt": b"", "notes/é 名 #1?&%.txt": b"words\n"}
    return files


def render(manifest: Manifest, name: str, n: int) -> dict[str, bytes]:
    """Return papers that depend on name, number and content."""
    return {"README.md": f"# {name}@v{n}\n{manifest.content}\n".encode(), "training.json": b"{}"}


class Published(NamedTuple):
    """The two versions that all tests of a class read."""

    name: str
    files: dict[int, dict[str, bytes]]
    receipts: dict[int, Receipt]


_SHELVES: Final[dict[type, tuple[Path, Published]]] = {}
"""What was published for each class."""


class Stopped(BaseException):
    """The publisher is told to stop, in the middle."""


class VersionConformance(ABC):
    """The contract between a remote and the flow."""

    @abstractmethod
    def open(self, place: Path) -> Remote:
        """Open the remote that belongs to a place; opened twice, both see the same versions."""

    def name(self) -> str:
        """Return a name that nobody has yet."""
        return f"conforming-{secrets.token_hex(4)}"

    @pytest.fixture
    def place(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Return the place of the remote of this class."""
        return self._shelf(tmp_path_factory)[0]

    @pytest.fixture
    def there(self, tmp_path_factory: pytest.TempPathFactory) -> Published:
        """Return the two versions that are there."""
        return self._shelf(tmp_path_factory)[1]

    @pytest.fixture
    def remote(self, place: Path) -> Iterator[Remote]:
        """Open the remote of this class."""
        remote = self.open(place)
        yield remote
        remote.close()

    @pytest.fixture
    def registry(self, remote: Remote) -> Registry:
        """Return the registry that the remote holds."""
        return open_registry(remote, create=False)

    def _shelf(self, factory: pytest.TempPathFactory) -> tuple[Path, Published]:
        if type(self) not in _SHELVES:
            place = factory.mktemp("remote")
            remote = self.open(place)
            open_registry(remote, create=True)
            name, files = self.name(), {1: bundle(1), 2: bundle(2) | {"added.txt": b"new"}}
            del files[2]["tokenizer/empty.txt"]
            receipts = {n: self.bring(remote, factory.mktemp("v"), name, files[n], step=n) for n in files}
            remote.close()
            _SHELVES[type(self)] = place, Published(name, files, receipts)
        return _SHELVES[type(self)]

    def bring(
        self,
        remote: Remote,
        folder: Path,
        name: str,
        files: Mapping[str, bytes],
        *,
        step: int = 1,
        again: bool = False,
        progress: Progress | None = None,
    ) -> Receipt:
        """Publish some files as a version of a name."""
        made = candidate(remote, folder, name, files=files, about=facts(step=step))
        registry = open_registry(remote, create=True)
        return publish(remote, "it", registry, made, OWNER, render=render, again=again, progress=progress)

    # -------------------------------------------------------------------------------------------------------- versions

    def test_versions_are_counted_and_confirmed(self, there: Published) -> None:
        """Each new content gets the next number, and a receipt that says where it lies and how it was verified."""
        for n, receipt in there.receipts.items():
            assert (receipt.n, receipt.joined, receipt.name) == (n, False, there.name)
            assert receipt.verified in {"sha256-server", "sha256-read"}
            assert receipt.files == {path: sha256_bytes(body) for path, body in there.files[n].items()}
            assert there.name in receipt.location
        assert there.receipts[1].content != there.receipts[2].content

    def test_what_was_published_is_pulled(self, remote: Remote, there: Published, tmp_path: Path) -> None:
        """Every version comes as exactly its files and papers, also after a later one."""
        for n, files in there.files.items():
            pull(remote, there.name, n, tmp_path / str(n))
            found = {p.relative_to(tmp_path / str(n)).as_posix() for p in (tmp_path / str(n)).rglob("*") if p.is_file()}
            assert found == files.keys() | PAPERS
            assert {path: (tmp_path / str(n) / path).read_bytes() for path in files} == files

    def test_versions_are_read_by_their_keys(self, remote: Remote, there: Published) -> None:
        """Listings are in the order of bytes; sizes, checksums and bytes from any offset are those of the files."""
        for n, files in there.files.items():
            folder = layout.version(there.name, n)
            listed = [stat.key.removeprefix(folder) for stat in remote.list(folder)]
            assert listed == sorted(listed, key=str.encode)
            assert files.keys() | PAPERS <= set(listed)
            for path, body in files.items():
                stat = remote.stat(folder + path)
                assert stat.size == len(body)
                assert stat.sha256 in {None, sha256_bytes(body)}
                assert remote.read(folder + path) == body
            assert (remote.stat(folder + WEIGHTS).sha256 is not None) is remote.properties.server_sha256
            for offset in (1, 29_999, len(files[WEIGHTS]), len(files[WEIGHTS]) + 1):
                assert b"".join(remote.fetch(folder + WEIGHTS, offset)) == files[WEIGHTS][offset:]
        assert {"v1", "v2"} <= set(remote.folders(layout.MODELS + there.name + "/"))
        assert there.name in list(remote.folders(layout.MODELS))

    def test_what_is_not_there_is_said(self, remote: Remote, there: Published, tmp_path: Path) -> None:
        """A number, a name and a file that nobody published, and keys that are none."""
        for name, n in ((there.name, 9), (self.name(), 1)):
            with pytest.raises(errors.NotFoundError):
                pull(remote, name, n, tmp_path / "there")
        assert not (tmp_path / "there").exists()
        for key in (layout.version(there.name, 1, "nothing"), layout.claim(there.name, 9), "models/none/v1/x"):
            with pytest.raises(errors.MissingError):
                remote.read(key)
            with pytest.raises(errors.MissingError):
                remote.stat(key)
        for key in ("", "/a", "a//b", "../a", "a/", "a\nb"):
            with pytest.raises(errors.UsageError):
                remote.read(key)

    def test_the_same_bytes_keep_their_number(self, place: Path, there: Published, tmp_path: Path) -> None:
        """Whoever brings a content that is there gets its number, and nothing is published."""
        other = self.open(place)
        receipt = self.bring(other, tmp_path, there.name, there.files[1])
        assert (receipt.n, receipt.content, receipt.joined) == (1, there.receipts[1].content, True)
        with pytest.raises(errors.MissingError):
            other.read(layout.claim(there.name, 3))
        other.close()

    def test_nothing_is_overwritten(self, remote: Remote, there: Published, tmp_path: Path) -> None:
        """Neither a claim nor a decision nor a file of a version takes other bytes."""
        source = tmp_path / "other"
        source.write_bytes(b"other")
        for key in (
            layout.claim(there.name, 1),
            layout.manifest(there.name, 1),
            layout.version(there.name, 1, WEIGHTS),
        ):
            before = remote.read(key)
            with pytest.raises((errors.ExistsError, errors.UsageError)):
                remote.create(key, b"other")
            with pytest.raises((errors.ExistsError, errors.UsageError)):
                remote.upload(key, source, 5, sha256_bytes(b"other"))
            assert remote.read(key) == before

    def test_the_catalogue_tells_of_it(self, remote: Remote, registry: Registry, there: Published) -> None:
        """`latest`, a number and a content digest mean the same version for everybody."""
        catalog = Catalog.open(None, registry.registry, durable=False)
        assert sync.sync(remote, catalog).problems == []
        assert there.name in catalog.names()
        assert resolve(remote, catalog, there.name).n == 2
        assert resolve(remote, catalog, f"{there.name}@v1").n == 1
        assert resolve(remote, catalog, f"{there.name}@{there.receipts[1].content}").n == 1
        catalog.close()

    def test_it_verifies(self, remote: Remote, there: Published) -> None:
        """Claims, manifests and every byte of a version are compared, and fit."""
        for n in there.files:
            found = verify_version(remote, there.name, n)
            assert [finding.code for finding in found.findings if finding.severity == "block"] == []

    # ---------------------------------------------------------------------------------------------- tags, withdrawals

    def test_tags_move_once_at_a_time(
        self, remote: Remote, place: Path, registry: Registry, there: Published, tmp_path: Path
    ) -> None:
        """A tag means what it was moved to last, a move that is taken stays, and only versions can be tagged."""
        tags.move(remote, registry, there.name, "prod", 1, "lw")
        tags.move(remote, registry, there.name, "prod", 2, "lw", "better")
        other = self.open(place)
        with pytest.raises(errors.ExistsError):
            other.create(layout.tag(there.name, "prod", 2), b"{}")
        assert [(m.seq, m.to, m.why) for m in tags.history(other, there.name, "prod")] == [
            (1, 1, None), (2, 2, "better")
        ]  # fmt: skip
        with pytest.raises(errors.NotFoundError):
            tags.move(other, registry, there.name, "prod", 9, "lw")
        assert resolve(other, None, f"{there.name}:prod").n == 2
        pull(other, there.name, 2, tmp_path / "there")
        other.close()

    def test_what_was_withdrawn_comes_back_only_when_asked(
        self, remote: Remote, registry: Registry, tmp_path: Path
    ) -> None:
        """A withdrawn version is refused to readers, its content to publishers, and gets a new number on demand."""
        name, files = self.name(), bundle(3, rest=False)
        self.bring(remote, tmp_path / "1", name, files)
        assert withdraw(remote, registry, name, 1, who="lw", why="wrong data")
        with pytest.raises(errors.WithdrawnError):
            pull(remote, name, 1, tmp_path / "there")
        with pytest.raises(errors.WithdrawnContentError):
            self.bring(remote, tmp_path / "2", name, files)
        assert self.bring(remote, tmp_path / "3", name, files, again=True).n == 2
        pull(remote, name, 2, tmp_path / "there")

    # -------------------------------------------------------------------------------------- others, and what breaks off

    def test_publishers_that_race_all_land(self, place: Path, tmp_path: Path) -> None:
        """Three at once with three contents among them: each content lands once, numbers are dense and unique."""
        name, gate = self.name(), threading.Barrier(3)
        landed: dict[str, set[int]] = {}
        failures: list[BaseException] = []

        def work(who: int) -> None:
            remote = self.open(place)
            try:
                gate.wait()
                for seed in (who, (who + 1) % 3):
                    receipt = self.bring(remote, tmp_path / f"{who}-{seed}", name, bundle(10 + seed, rest=False))
                    landed.setdefault(receipt.content, set()).add(receipt.n)
            except BaseException as error:  # noqa: BLE001 - shown by the test
                failures.append(error)
            finally:
                remote.close()

        threads = [threading.Thread(target=work, args=(who,)) for who in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert sorted(n for numbers in landed.values() for n in numbers) == [1, 2, 3]

    def test_a_publication_that_breaks_off_is_taken_up_again(self, remote: Remote, place: Path, tmp_path: Path) -> None:
        """Whoever is stopped in the middle leaves no version; the next one lands under the first number."""
        name, files, other = self.name(), bundle(5, rest=False), self.open(place)
        seen: list[bool] = []

        def stop(_: int) -> None:
            try:
                pull(other, name, 1, tmp_path / "early")
            except errors.NotFoundError:
                seen.append(False)
            raise Stopped

        with pytest.raises(Stopped):
            self.bring(remote, tmp_path / "1", name, files, progress=stop)
        assert seen
        assert not (tmp_path / "early").exists()
        assert self.bring(other, tmp_path / "2", name, files).n == 1
        pull(other, name, 1, tmp_path / "there")
        assert (tmp_path / "there" / WEIGHTS).read_bytes() == files[WEIGHTS]
        other.close()

    # ---------------------------------------------------------------------------------------------------------- mirrors

    def test_a_folder_mirrors_it(self, remote: Remote, there: Published, tmp_path: Path) -> None:
        """Claims, decisions, papers and files arrive at a mirror as they are here, to the byte."""
        mirror = DirectoryRemote(tmp_path)
        registry = open_registry(mirror, create=True)
        for n, files in there.files.items():
            deliver(remote, mirror, there.name, n, mirror_name="m", registry=registry, scratch=tmp_path / "scratch")
            for key in (layout.claim(there.name, n), layout.manifest(there.name, n)):
                assert mirror.read(key) == remote.read(key)
            for path in (*files, "README.md"):
                assert mirror.read(layout.version(there.name, n, path)) == remote.read(
                    layout.version(there.name, n, path)
                )

    def test_it_mirrors_a_folder(self, remote: Remote, registry: Registry, tmp_path: Path) -> None:
        """It takes the number, claim, decision and bytes of another home, and repeating changes nothing."""
        home, name = DirectoryRemote(tmp_path), self.name()
        made = candidate(home, tmp_path / "source", name, files=bundle(6, rest=False))
        publish(home, "home", open_registry(home, create=True), made, OTHER, render=render)
        for _ in range(2):
            receipt = deliver(home, remote, name, 1, mirror_name="it", registry=registry, scratch=tmp_path / "scratch")
            assert (receipt.n, receipt.name) == (1, name)
        for key in (layout.claim(name, 1), layout.manifest(name, 1), layout.version(name, 1, WEIGHTS)):
            assert remote.read(key) == home.read(key)

    def test_the_clock_is_that_of_the_remote(self, remote: Remote) -> None:
        """`now` tells the time by which versions are dated."""
        assert abs(remote.now() - time.time()) < 300
