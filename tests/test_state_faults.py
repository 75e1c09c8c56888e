"""A state folder that is damaged, closed, elsewhere or in use: a clear word, nothing lost, recovery by itself."""

import os
import random
import shutil
import sqlite3
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from weighbridge.daemon import cli, passage, service, state
from weighbridge.daemon.folders import Known
from weighbridge.daemon.lock import StateLock
from weighbridge.registry import control
from weighbridge.registry.errors import ConflictError, UsageError, WeighbridgeError
from weighbridge_testlib.builders import lora_adapter, run_root
from weighbridge_testlib.yard import BIN, Yard, until

pytestmark = pytest.mark.long

NOBODY = 65534
assert passage, service  # a child without rights may not be able to load them any more


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    """Give a yard with three versions published by one passage."""
    with Yard(tmp_path) as found:
        found.configure(daemon={"quiet": "0.3s", "scan": "1s"})
        run_root(found.runs / "team/run", steps=(1, 2, 3), result=False)
        found.passage()
        yield found


def test_a_damaged_database_is_moved_aside_and_filled_again(yard: Yard) -> None:
    """Overwritten in the middle: the next passage goes on, publishes nothing twice, and tells of it."""
    lora_adapter(yard.runs / "team/run/checkpoint-4", seed=4)
    database = yard.state / "weighbridge.db"
    for journal in yard.state.glob("weighbridge.db-*"):
        journal.unlink()
    with database.open("r+b") as stream:
        stream.seek(4096)
        stream.write(os.urandom(20_000))
    done = yard.daemon_once()
    assert done.returncode == 0, done.stderr
    yard.check(contents=4, closed=True)
    kept = list((yard.state / "damaged").rglob("weighbridge.db"))
    assert len(kept) == 1
    opened = state.open_database(yard.state)
    try:
        assert {job.state for job in opened.store.jobs()} == {"done"}
        assert [e["event"] for e in opened.store.events()].count("database-damaged") == 1
    finally:
        opened.catalog.close()


def test_a_running_daemon_recovers_from_damage(yard: Yard) -> None:
    """A row that is not what was written is noticed under way; the daemon mends itself and goes on."""
    with yard.daemon() as process:
        link = sqlite3.connect(yard.state / "weighbridge.db", timeout=10)
        link.execute("UPDATE jobs SET receipt = replace(receipt, 'team', 'maet')")
        link.commit()
        link.close()
        lora_adapter(yard.runs / "team/run/checkpoint-4", seed=4)
        until(lambda: len(yard.look()[0]["committed"]) == 4, 30, "the next version")
        assert process.poll() is None
        until(
            lambda: any(p["code"] == "database-damaged" for p in control.ask(str(yard.socket), "status")["problems"]),
            20, "the finding",
        )  # fmt: skip
    yard.check(contents=4, closed=True)


def test_flipped_bits_in_the_schema_and_in_values_are_damage(yard: Yard) -> None:
    """What SQLite reads without a complaint is noticed all the same."""
    database = yard.state / "weighbridge.db"
    whole = database.read_bytes()
    for word in (b"fingerprint TEXT", b'"schema":"weighbridge/manifest/1"'):
        at = whole.index(word)
        database.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        for journal in yard.state.glob("weighbridge.db-*"):
            journal.unlink()
        opened = state.open_database(yard.state)
        opened.catalog.close()
        assert [f.code for f in opened.findings] == ["database-damaged"], word


SEALED = ("jobs", "versions", "names", "tags", "manifests")


@pytest.mark.parametrize("table", SEALED)
def test_a_row_of_any_table_that_is_not_what_was_written_is_mended(yard: Yard, table: str) -> None:
    """SQLite sees nothing wrong with it, whoever reads it does: the passage mends it and publishes nothing twice."""
    with closing(sqlite3.connect(yard.state / "weighbridge.db")) as link:
        link.row_factory = sqlite3.Row
        tables = {row["name"] for row in link.execute("SELECT name FROM sqlite_master WHERE sql LIKE '%seal%'")}
        link.execute(f"UPDATE {table} SET seal = seal + 1")
        link.commit()
    assert tables & set(SEALED) == set(SEALED), "a table with seals is not tested"
    again = yard.runs / "team/run/checkpoint-3"
    shutil.copytree(again, yard.folder / "copy")  # what was published is saved once more: its version is looked up
    shutil.rmtree(again)
    (yard.folder / "copy").rename(again)
    lora_adapter(yard.runs / "team/run/checkpoint-4", seed=4)
    for _ in range(2):
        yard.passage()
    yard.check(contents=4, closed=True)


@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_bit_in_the_database_never_becomes_a_wrong_version(yard: Yard, seed: int) -> None:
    """Wherever it lies: two passages later everything is right and nothing is published twice."""
    source = random.Random(seed)
    database = yard.state / "weighbridge.db"
    body = bytearray(database.read_bytes())
    at = source.randrange(len(body))
    body[at] ^= 1 << source.randrange(8)
    database.write_bytes(body)
    for _ in range(2):
        yard.passage()
    yard.check(contents=3, closed=True)


def test_what_was_set_aside_at_first_survives_a_damaged_database(tmp_path: Path) -> None:
    """The first scan is remembered beside the database, so that mending it floods nobody."""
    with Yard(tmp_path) as yard:
        yard.configure(daemon={"quiet": "0.3s", "scan": "1s"}, watch={"backfill": False})
        run_root(yard.runs / "team/old", steps=(1, 2), result=False)
        assert yard.daemon_once().returncode == 0
        yard.check(contents=0)
        lora_adapter(yard.runs / "team/new/checkpoint-1", seed=9)
        assert yard.daemon_once().returncode == 0
        (yard.state / "weighbridge.db").write_bytes(b"no database at all" * 100)
        lora_adapter(yard.runs / "team/new/checkpoint-2", seed=10)
        done = yard.daemon_once()
        assert done.returncode == 0, done.stderr
        yard.check(contents=2, closed=True)


def test_what_people_allowed_is_saved_from_a_damaged_database(tmp_path: Path) -> None:
    """Allowances are the one thing that nothing else knows."""
    state.prepare(tmp_path / "state", "")
    opened = state.open_database(tmp_path / "state")
    opened.store.allow("/runs/a", "name-taken", "on purpose", "lw")
    opened.store.baseline("/runs", {"/runs/old": (Known("f", "s:1"), 5)})
    opened.store.seen("/runs", "/runs/a")
    opened.catalog.link.execute("UPDATE jobs SET path = path || 'x'")
    opened.catalog.close()
    again = state.open_database(tmp_path / "state")
    try:
        assert [f.code for f in again.findings] == ["database-damaged"]
        assert [(row["code"], row["reason"]) for row in again.store.allows("/runs/a/b")] == [
            ("name-taken", "on purpose")
        ]
    finally:
        again.catalog.close()


def test_a_deleted_state_publishes_nothing_twice(yard: Yard) -> None:
    """The home remote is the truth: an empty state against it finds everything again."""
    before = yard.check()["claims"]
    shutil.rmtree(yard.state)
    assert yard.daemon_once().returncode == 0
    assert yard.check(contents=3, closed=True, state=True)["claims"] == before


def test_a_network_file_system_is_refused_by_name(yard: Yard) -> None:
    """Neither SQLite nor locks can be relied on there; the error names type, reason and the setting."""
    table = yard.folder / "mountinfo"
    table.write_text(f"36 25 0:32 / {yard.state} rw,relatime - nfs4 server:/state rw\n")
    yard.env["WEIGHBRIDGE_MOUNTINFO"] = str(table)
    for command in (["run"], ["once"]):
        done = yard.run([str(BIN / "registryd"), *command])
        assert done.returncode == 2
        assert "nfs4" in done.stderr
        assert "[daemon] state" in done.stderr


def test_one_lock_one_daemon(tmp_path: Path) -> None:
    """The second is refused while the first holds it, and takes it at once when that one is gone."""
    first = StateLock(tmp_path).acquire()
    with pytest.raises(ConflictError, match="another daemon"):
        StateLock(tmp_path).acquire()
    first.release()
    with StateLock(tmp_path) as second:
        assert second.path.stat().st_size == 0


def test_the_state_is_made_private(tmp_path: Path) -> None:
    """An open folder is closed; one of somebody else is not taken."""
    folder = tmp_path / "state"
    folder.mkdir(mode=0o755)
    state.prepare(folder, "")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    with pytest.raises(UsageError, match="network file system"):
        state.prepare(folder, f"36 25 0:32 / {tmp_path} rw - lustre mgs:/x rw\n")
    (tmp_path / "file").touch()
    with pytest.raises(WeighbridgeError, match="cannot be used"):
        state.prepare(tmp_path / "file", "")


def test_the_identity_is_made_once(tmp_path: Path) -> None:
    """Claims name the state folder by the same uuid for ever, and a torn file is made anew."""
    first = state.identity(tmp_path)
    assert state.identity(tmp_path) == first
    (tmp_path / "daemon.json").write_text("{")
    assert state.identity(tmp_path) != first


def unprivileged(arguments: list[str], told: Path) -> int:
    """Run `registryd` in a child that gave root's rights up, if it had any; its stderr goes to a file."""
    child = os.fork()
    if child == 0:
        try:
            with told.open("w") as sys.stderr:
                if os.geteuid() == 0:
                    os.setgroups([])
                    os.setgid(NOBODY)
                    os.setuid(NOBODY)
                code = cli.main(arguments)
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_state_that_cannot_be_written_is_a_clear_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read-only for the daemon's user: the error names the folder, nothing changes, and afterwards it goes on."""
    place = Path(tempfile.mkdtemp(prefix="wb-state-"))
    place.chmod(0o755)
    try:
        with Yard(place) as yard:
            yard.configure(daemon={"quiet": "0.3s", "scan": "1s"})
            lora_adapter(yard.runs / "team/run/checkpoint-1")
            assert yard.daemon_once().returncode == 0
            lora_adapter(yard.runs / "team/run/checkpoint-2", seed=2)
            if os.geteuid() == 0:
                for path in (yard.state, *yard.state.rglob("*")):
                    os.chown(path, NOBODY, NOBODY)
            yard.state.chmod(0o500)
            monkeypatch.setenv("WEIGHBRIDGE_CONFIG", str(yard.config))
            for command in (["once"], ["run"]):
                code = unprivileged(command, place / "told")
                told = (place / "told").read_text()
                assert code == 4, told
                assert f"the state folder {yard.state} cannot be used" in told
                assert "Traceback" not in told
            yard.check(contents=1)
            yard.state.chmod(0o700)
            done = yard.daemon_once()
            assert done.returncode == 0, done.stderr
            yard.check(contents=2, closed=True, state=True)
    finally:
        shutil.rmtree(place)


def test_a_remote_that_was_unmounted_is_not_begun_anew(yard: Yard) -> None:
    """An empty folder where the registry was: the daemon waits, and writes nothing there."""
    away = yard.remote.rename(yard.folder / "away")
    yard.remote.mkdir()
    lora_adapter(yard.runs / "team/run/checkpoint-4", seed=4)
    done = yard.daemon_once()
    assert done.returncode == 6, done.stderr
    assert "mount" in done.stderr
    assert not [path for path in yard.remote.rglob("*") if path.is_file()]
    shutil.rmtree(yard.remote)
    away.rename(yard.remote)
    assert yard.daemon_once().returncode == 0
    yard.check(contents=4, closed=True, state=True)


@pytest.mark.parametrize(
    ("text", "kind", "word"),
    [
        ("database or disk is full", "DiskFullError", "cannot grow"),
        ("attempt to write a readonly database", "DeniedError", "cannot be written"),
        ("unable to open database file", "DeniedError", "cannot be written"),
        ("disk I/O error", "WeighbridgeError", "cannot be used"),
    ],
)
def test_every_way_a_disk_fails_has_its_word(text: str, kind: str, word: str) -> None:
    """What SQLite says becomes what a person can act on, and none of it is taken for damage."""
    error = sqlite3.OperationalError(text)
    described = state.cannot_write(error, Path("/state/weighbridge.db"))
    assert type(described).__name__ == kind
    assert word in described.what
    assert not state.is_damage(error)
    assert state.is_about_the_disk(error)
    assert state.is_damage(sqlite3.DatabaseError("database disk image is malformed"))
