"""Who did something: told to a team on purpose, and to no remote that keeps no names of people and machines."""

import getpass
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from weighbridge.config.settings import RemoteSettings
from weighbridge.registry import layout, types
from weighbridge.registry.flow import follow, notes, tags
from weighbridge.registry.flow.feed import changes
from weighbridge.registry.flow.marker import open_registry
from weighbridge.registry.flow.unnamed import beside
from weighbridge.registry.flow.withdraw import withdraw
from weighbridge.registry.hashing import sha256_bytes
from weighbridge.registry.remotes.memory import MemoryRemote
from weighbridge.registry.remotes.protocol import Remote
from weighbridge_testlib.bench import Bench
from weighbridge_testlib.builders import trainer_checkpoint
from weighbridge_testlib.desk import Desk
from weighbridge_testlib.shelf import Shelf

NAME = "medical-sft"
WHO = "ann@trainer-77"
STRICT = RemoteSettings("strict", "memory:", paths="rewrite")


class Pair:
    """A home of two versions of which one was withdrawn and one tagged and noted, and a mirror that has both."""

    def __init__(self) -> None:
        self.shelf = Shelf(MemoryRemote())
        for step in (1, 2):
            self.shelf.publish(NAME, step=step)
        self.home, self.registry = self.shelf.remote, self.shelf.registry
        self.mirror: Remote = MemoryRemote()
        self.theirs: types.Registry = open_registry(self.mirror, create=True)
        for found in self.home.list(layout.MODELS):
            self.mirror.create(found.key, self.home.read(found.key))
        tags.move(self.home, self.registry, NAME, "prod", 2, WHO, "the best")
        notes.add(self.home, self.registry, NAME, 2, "card", text="good", who=WHO)
        withdraw(self.home, self.registry, NAME, 1, who=WHO, why="bad data")

    def said(self, remote: Remote) -> dict[str, bytes]:
        """Return what is said of the versions at a remote."""
        parts = ("/_wb/tags/", "/_wb/notes/", "/_wb/withdrawn/")
        return {s.key: remote.read(s.key) for s in remote.list(layout.MODELS) if any(part in s.key for part in parts)}

    def bring(self, settings: RemoteSettings = STRICT) -> follow.Told:
        """Bring it to the mirror."""
        return beside(self.home, self.mirror, self.theirs, NAME, settings=settings)


def test_a_mirror_that_keeps_no_names_gets_none(pair: Pair) -> None:
    """All else comes along, is told to its readers with the right sha256, and a second time nothing is new."""
    told = pair.bring()
    assert (told.tags, told.notes, told.withdrawn, told.diverged) == (1, 1, 1, [])
    ours, theirs = pair.said(pair.home), pair.said(pair.mirror)
    assert {key: body.replace(WHO.encode(), b"somebody") for key, body in ours.items()} == theirs
    told = pair.bring()
    assert (told.tags, told.notes, told.withdrawn, told.diverged) == (0, 0, 0, [])
    entries = [entry for part in changes(pair.mirror, 0).parts for entry in part.entries]
    assert {entry.source: entry.sha256 for entry in entries} == {k: sha256_bytes(body) for k, body in theirs.items()}


@pytest.mark.parametrize("later", [STRICT, RemoteSettings("mirror", "memory:")])
def test_what_lies_there_with_a_name_is_left_and_followed(pair: Pair, later: RemoteSettings) -> None:
    """A mirror that became strict, or was always there: the moves that come later follow, without a name or with it."""
    pair.bring(RemoteSettings("mirror", "memory:"))
    before = pair.said(pair.mirror)
    assert before == pair.said(pair.home)
    tags.move(pair.home, pair.registry, NAME, "prod", None, WHO, "not any more")
    told = pair.bring(later)
    assert (told.tags, told.diverged) == (1, [])
    after = pair.said(pair.mirror)
    assert before.items() <= after.items()
    assert (WHO.encode() in after[layout.tag(NAME, "prod", 2)]) == (later is not STRICT)
    entries = [entry for part in changes(pair.mirror, 0).parts for entry in part.entries]
    assert {entry.sha256 for entry in entries} == {sha256_bytes(body) for body in after.values()}


def test_another_move_is_another_one_without_its_name_too(pair: Pair) -> None:
    """What differs in more than who did it is named as diverged, and nothing is touched."""
    tags.move(pair.mirror, pair.theirs, NAME, "prod", 2, "bob@laptop", "mine")
    before = pair.said(pair.mirror)[layout.tag(NAME, "prod", 1)]
    assert pair.bring().diverged == ["prod"]
    assert pair.said(pair.mirror)[layout.tag(NAME, "prod", 1)] == before


@pytest.mark.parametrize("paths", ["keep", "rewrite"])
def test_commands_name_people_where_names_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paths: str) -> None:
    """A tag, a note and a withdrawal say who did it, by a digest where no name is kept; a void names nobody."""
    monkeypatch.setattr(socket, "gethostname", lambda: "trainer-77")
    monkeypatch.setattr(getpass, "getuser", lambda: "ann-smith")
    desk = Desk(tmp_path, monkeypatch)
    with desk.config.open("a") as stream:
        stream.write(f'paths = "{paths}"\n')
    for step in (1, 2):
        desk.shelf.publish(NAME, step=step)
    desk.shelf.claim(NAME, step=3)
    long_ago = time.time() - 9 * 86_400
    os.utime(desk.root / layout.claim(NAME, 3), (long_ago, long_ago))
    desk.ok("tag", f"{NAME}@v2", "prod")
    desk.ok("card", f"{NAME}@v2", "--file", "-", stdin="Good.\n")
    desk.ok("withdraw", f"{NAME}@v1", "--reason", "bad data")
    desk.ok("sweep")
    said: dict[str, Any] = {
        path.relative_to(desk.root).as_posix(): path.read_bytes() for path in desk.root.rglob("*") if path.is_file()
    }
    named = {key for key, body in said.items() if b"trainer-77" in body or b"ann-smith" in body}
    marks = {layout.tag(NAME, "prod", 1), layout.notes(NAME, 2, 1), layout.withdrawn(NAME, 1)}
    assert {key for key in named if key.startswith("models/")} == (marks if paths == "keep" else set())
    assert paths == "keep" or not named
    assert layout.manifest(NAME, 3) in said
    digests = {said[key].partition(b'"push-')[2][:32] for key in {*marks, layout.manifest(NAME, 3)}}
    assert len(digests - {b""}) == 1


@pytest.fixture
def pair() -> Pair:
    """Return a home and a mirror."""
    return Pair()


@pytest.mark.parametrize(("paths", "who"), [("keep", "weighbridge on host"), ("rewrite", "weighbridge")])
def test_a_daemon_names_its_machine_where_names_are_kept(tmp_path: Path, paths: str, who: str) -> None:
    """Its tag says that it moved it, and a later best follows all the same."""
    bench = Bench(tmp_path, publish=("all",), best="eval_loss:min")
    bench.remotes["team"] = bench.remotes["team"]._replace(paths=paths)
    bench.open()
    for step in (1, 2):
        told = [{"step": step, "eval_loss": 1.0 / step}]
        trainer_checkpoint(bench.runs / f"team/run/checkpoint-{step}", step=step, seed=step, log_history=told)
    bench.settle()
    bench.work()
    moves = tags.history(bench.homes.get("team").remote, "team-run", "best")
    assert [(move.to, move.who) for move in moves] == [(1, who), (2, who)]
    bench.catalog.close()
