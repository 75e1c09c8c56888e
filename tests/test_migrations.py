"""The catalogue's schema: named steps, each applied once, whoever opens the file first."""

import sqlite3
import threading
from pathlib import Path

import pytest
from sqlite_utils import Database

from weighbridge.registry import catalog_read, migrations
from weighbridge.registry.catalog import Catalog
from weighbridge.registry.errors import UsageError

NAMES = [
    "registries_names_versions",
    "tags_and_their_moves",
    "manifests_and_receipts",
    "heads_of_repositories",
    "copies_that_were_verified",
    "decisions_that_nobody_told",
]


def applied(path: Path) -> list[str]:
    """Return the steps a file records."""
    db = Database(sqlite3.connect(path))
    try:
        return [step.name for step in migrations.catalog.applied(db)]
    finally:
        db.close()


def test_a_new_file_gets_every_step_by_name(tmp_path: Path) -> None:
    """Opening creates the file, applies each step once and records it under its name."""
    path = tmp_path / "catalog.db"
    for _ in range(2):
        Catalog.open(path, "r", durable=True).close()
    assert applied(path) == NAMES
    assert len(NAMES) == catalog_read.SCHEMA


def test_an_older_file_gets_what_it_lacks(tmp_path: Path) -> None:
    """A file of an earlier release keeps its rows and gets the missing steps."""
    path = tmp_path / "catalog.db"
    link = sqlite3.connect(path, isolation_level=None)
    db = Database(link)
    migrations.catalog.apply(db, stop_before=NAMES[1])
    link.execute("INSERT INTO registries (uuid) VALUES ('r')")
    link.close()
    Catalog.open(path, "s", durable=True).close()
    assert applied(path) == NAMES
    with sqlite3.connect(path) as again:
        assert [uuid for (uuid,) in again.execute("SELECT uuid FROM registries ORDER BY id")] == ["r", "s"]
    again.close()


def test_a_step_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    """A step and its record are one transaction."""
    path = tmp_path / "catalog.db"
    link = sqlite3.connect(path, isolation_level=None)
    link.execute("CREATE TABLE tag_moves (in_the_way)")
    link.close()
    with pytest.raises(sqlite3.OperationalError):
        Catalog.open(path, "r", durable=True)
    assert applied(path) == NAMES[:1]
    with sqlite3.connect(path) as again:
        assert not again.execute("SELECT 1 FROM sqlite_master WHERE name = 'tags'").fetchone()
    again.close()


def test_a_file_of_a_newer_release_is_refused(tmp_path: Path) -> None:
    """Nobody writes into a schema it does not know."""
    path = tmp_path / "catalog.db"
    Catalog.open(path, "r", durable=True).close()
    with sqlite3.connect(path) as link:
        link.execute(f"PRAGMA user_version = {catalog_read.SCHEMA + 1}")
    link.close()
    with pytest.raises(UsageError, match="newer release"):
        Catalog.open(path, "r", durable=True)


def test_two_that_open_a_new_file_at_once_both_succeed(tmp_path: Path) -> None:
    """The first start of two programs at the same moment gives one schema."""
    path = tmp_path / "catalog.db"
    failures: list[BaseException] = []

    def work() -> None:
        try:
            Catalog.open(path, "r", durable=False).close()
        except BaseException as error:  # noqa: BLE001 - reported below
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert applied(path) == NAMES
