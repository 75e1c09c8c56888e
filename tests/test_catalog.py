"""The catalogue: what the feed tells, kept and asked for; sealed rows; one writer at a time."""

import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from weighbridge.registry import catalog_read
from weighbridge.registry.catalog import Catalog
from weighbridge.registry.flow import feed
from weighbridge.registry.remotes.memory import MemoryRemote
from weighbridge.registry.rows import row_of
from weighbridge.registry.types import FeedEntry, Finding, Receipt, TagMove
from weighbridge_testlib.shelf import Shelf, facts, manifest_of, payload


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    """Return an empty catalogue in a file."""
    opened = Catalog.open(tmp_path / "catalog.db", "r", durable=True)
    yield opened
    opened.close()


def version(name: str = "medical-sft", n: int = 1, **about: object) -> FeedEntry:
    """Return the entry of a version."""
    return feed.version_entry(name, n, manifest_of(payload(n), facts(**about)))  # type: ignore[arg-type]


def tag(to: int | None, seq: int, name: str = "medical-sft") -> FeedEntry:
    """Return the entry of a move of `prod`."""
    move = TagMove(
        schema="weighbridge/tag/1", name=name, tag="prod", seq=seq, to=to, from_=None, who="lw", when="now", why=None,
        nonce="ab",
    )  # fmt: skip
    return feed.tag_entry(move, b"stored")


def refs(rows: list[catalog_read.Row]) -> list[str]:
    """Return rows as references."""
    return [f"{row['name']}@v{row['n']}" for row in rows]


def test_the_database_is_durable_and_strict_about_foreign_keys(catalog: Catalog) -> None:
    """WAL, synchronous=FULL and foreign keys are on; the disposable cache may be lazier about fsync."""
    ask = catalog.link.execute
    assert ask("PRAGMA journal_mode").fetchone() == ("wal",)
    assert ask("PRAGMA synchronous").fetchone() == (2,)
    assert ask("PRAGMA foreign_keys").fetchone() == (1,)
    with pytest.raises(sqlite3.IntegrityError):
        ask("INSERT INTO versions (registry, name, n, state) VALUES (1, 'nobody', 1, 'open')")


def test_a_cache_on_a_network_file_system_does_without_wal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts cannot share the memory that WAL needs, so a home on NFS gets a rollback journal."""
    monkeypatch.setattr("weighbridge.config.mounts.network_filesystem", lambda _: "nfs4")
    catalog = Catalog.open(tmp_path / "catalog.db", "r", durable=False)
    assert catalog.link.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    catalog.apply(1, [version()])
    link = catalog_read.open_file(tmp_path / "catalog.db")
    assert refs(catalog_read.View(link).listing()) == ["medical-sft@v1"]
    link.close()
    catalog.close()


def test_a_catalogue_that_is_filled_at_once_is_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its indexes are made after its rows: the same rows and the same schema, and later ones find them."""
    told = [version(name, n) for n in (3, 1, 2) for name in ("b", "a")]
    dumps = []
    for many in (100, 2):
        monkeypatch.setattr("weighbridge.registry.catalog._MANY", many)
        catalog = Catalog.open(None, "r", durable=False)
        catalog.apply(1, told)
        catalog.apply(2, [version("a", 4)])
        dumps.append(sorted(line for line in catalog.link.iterdump() if "_sqlite_migrations" not in line))
        assert refs(catalog.listing(["a"])) == ["a@v4", "a@v3", "a@v2", "a@v1"]
        catalog.close()
    assert dumps[0] == dumps[1]
    assert sum(line.startswith("CREATE INDEX versions_") for line in dumps[0]) == 4


def test_a_claim_is_open_until_its_decision_is_told(catalog: Catalog) -> None:
    """A claimed version is known but not listed; the decision makes it appear."""
    shelf = Shelf(MemoryRemote())
    shelf.claim("medical-sft")
    told = [entry for part in feed.changes(shelf.remote, 0).parts for entry in part.entries]
    catalog.apply(1, told)
    assert refs(catalog.open_claims()) == ["medical-sft@v1"]
    assert catalog.listing() == []
    catalog.apply(2, [version()])
    assert catalog.open_claims() == []
    assert refs(catalog.listing()) == ["medical-sft@v1"]
    assert catalog.cursor == 2


def test_a_row_holds_what_ls_shows(catalog: Catalog) -> None:
    """Kind, base, licence, size, owner, step, run, worst finding, times and digests come from the entry's row."""
    note = Finding(code="file-extra", severity="warn", subject="a", message="b")
    catalog.apply(1, [version(findings=[note])])
    (row,) = catalog.listing()
    manifest = manifest_of(payload(1), facts(findings=[note]))
    assert row["content"] == manifest.content
    assert row["manifest"] == manifest.digest
    assert row["size"] == manifest.size
    assert (row["kind"], row["base"], row["license"]) == ("adapter", "example-org/tiny-base", "apache-2.0")
    assert (row["owner"], row["step"], row["run"], row["worst"]) == ("lw", 280, "medical/run-1", "warn")
    assert row["created_at"] == pytest.approx(1795970530)
    assert row["tags"] == ["latest"]


def test_telling_twice_or_late_changes_nothing(catalog: Catalog) -> None:
    """Entries may repeat and come late: a claim after its decision, a version after its withdrawal."""
    shelf = Shelf(MemoryRemote())
    shelf.publish("medical-sft")
    shelf.withdraw("medical-sft", 1)
    told = [entry for part in feed.changes(shelf.remote, 0).parts for entry in part.entries]
    catalog.apply(3, told)
    before = list(catalog.link.iterdump())
    catalog.apply(3, told)
    catalog.apply(2, [told[1], told[0]])
    assert list(catalog.link.iterdump()) == before
    assert catalog.listing(every=True)[0]["state"] == "withdrawn"


def test_a_void_is_listed_only_when_everything_is_asked_for(catalog: Catalog) -> None:
    """A number that was given up is no version."""
    catalog.apply(1, [version(n=1), feed.void_entry("medical-sft", 2, b"{}")])
    assert refs(catalog.listing()) == ["medical-sft@v1"]
    assert refs(catalog.listing(["medical-sft"])) == ["medical-sft@v1"]
    assert refs(catalog.listing(["medical-sft"], every=True)) == ["medical-sft@v2", "medical-sft@v1"]


def test_tags_follow_the_greatest_move_whatever_the_order(catalog: Catalog) -> None:
    """Move 2 counts although move 1 is told later; a removed tag is gone, its moves are kept."""
    catalog.apply(1, [version(n=1), version(n=2), tag(2, 2), tag(1, 1)])
    assert catalog.tag("medical-sft", "prod") == {"name": "medical-sft", "tag": "prod", "seq": 2, "n": 2}
    assert catalog.tags("medical-sft") == {2: ["latest", "prod"]}
    catalog.apply(2, [tag(None, 3)])
    assert catalog.tags("medical-sft") == {2: ["latest"]}
    assert [move["to_n"] for move in catalog.moves("medical-sft", "prod")] == [1, 2, None]


def test_a_noted_licence_wins_and_survives_a_repeated_version(catalog: Catalog) -> None:
    """What people said of the licence is shown, also after the version is told again."""
    entry = version()
    assert entry.row is not None
    row = row_of(manifest_of(payload(1), facts(license_id="mit")))
    catalog.apply(1, [entry, feed.note_entry("medical-sft", 1, 1, b"note", row=row), entry])
    (shown,) = catalog.listing()
    assert shown["license"] == "mit"
    catalog.apply(2, [version(n=2)])
    assert catalog.version("medical-sft", 1)["license"] == "mit"  # type: ignore[index]


def test_the_listing_filters_sorts_and_limits(catalog: Catalog) -> None:
    """Kind, base, licence and age choose rows; any column sorts them; the default is the newest of each name first."""
    catalog.apply(
        1,
        [
            version("old", created_at="2026-01-01T00:00:00Z", base="Qwen/Qwen3-8B"),
            version("new", created_at="2026-03-01T00:00:00Z", license_id="MIT"),
            version("mid", created_at="2026-02-01T00:00:00Z", kind="model", base=None),
            version("mid", 2, created_at="2026-02-02T00:00:00Z", kind="model", base=None),
        ],
    )
    assert refs(catalog.listing()) == ["new@v1", "mid@v2", "old@v1"]
    assert refs(catalog.listing(limit=1)) == ["new@v1"]
    assert refs(catalog.listing(ascending=True)) == ["old@v1", "mid@v2", "new@v1"]
    assert refs(catalog.listing(sort="name", ascending=True)) == ["mid@v2", "new@v1", "old@v1"]
    assert refs(catalog.listing(["mid"])) == ["mid@v2", "mid@v1"]
    assert refs(catalog.listing(["m*", "old"])) == ["mid@v2", "mid@v1", "old@v1"]
    assert refs(catalog.listing(kind="model")) == ["mid@v2"]
    assert refs(catalog.listing(base="qwen3")) == ["old@v1"]
    assert refs(catalog.listing(licensed="mit")) == ["new@v1"]
    assert refs(catalog.listing(since=catalog.listing(["mid"])[1]["created_at"])) == ["new@v1", "mid@v2"]


def test_totals_count_committed_versions(catalog: Catalog) -> None:
    """Names, versions and bytes of the registry leave out what is withdrawn, open or given up."""
    shelf = Shelf(MemoryRemote())
    shelf.publish("one")
    shelf.publish("one")
    shelf.publish("two")
    shelf.claim("three")
    shelf.withdraw("one", 1)
    catalog.apply(9, [entry for part in feed.changes(shelf.remote, 0).parts for entry in part.entries])
    row = catalog.registry()
    size = manifest_of(payload(2), facts()).size
    assert (row["names"], row["versions"], row["bytes"]) == (2, 2, 2 * size)


def test_a_content_is_found_by_the_beginning_of_its_digest(catalog: Catalog) -> None:
    """Eight digits are enough when nothing else begins with them."""
    catalog.apply(1, [version("a", 1), version("a", 2), version("b", 1)])
    content = manifest_of(payload(1), facts()).content.removeprefix("sha256:")
    assert refs(catalog.by_content(content[:8])) == ["a@v1", "b@v1"]
    assert refs(catalog.by_content(content, "b")) == ["b@v1"]
    assert catalog.by_content("ffffffff") == []


def test_a_publication_is_recorded_with_hashes_licence_and_provenance(catalog: Catalog) -> None:
    """After `record` the database answers for files, licence, provenance, lineage, findings and the receipt."""
    note = Finding(code="file-extra", severity="note", subject="a", message="b", data={"x": 1})
    manifest = manifest_of(payload(1), facts(findings=[note]))
    receipt = Receipt(
        remote="team", name="medical-sft", n=1, content=manifest.content, manifest_sha256=manifest.digest,
        location="/srv/models/medical-sft/v1", committed_at="2026-11-29T16:43:00Z", verified="sha256-read",
        files={"adapter_config.json": "sha256-read"},
    )  # fmt: skip
    for _ in range(2):
        catalog.record(manifest, receipt)
    ask = catalog.link.execute
    assert ask("SELECT path, size, sha256 FROM files ORDER BY path").fetchall() == [
        (f.path, f.size, f.sha256) for f in manifest.files
    ]
    assert ask("SELECT json_extract(license, '$.id') FROM manifests").fetchall() == [("apache-2.0",)]
    assert ask("SELECT json_extract(provenance, '$.step') FROM manifests").fetchall() == [(280,)]
    assert ask("SELECT code, severity, data FROM findings").fetchall() == [("file-extra", "note", '{"x":1}')]
    assert ask("SELECT relation, ref FROM lineage").fetchall() == [("adapter-of", "example-org/tiny-base")]
    (kept,) = catalog.receipts("medical-sft", 1)
    assert (kept["remote"], kept["verified"]) == ("team", "sha256-read")
    assert kept["files"] == {"adapter_config.json": "sha256-read"}
    assert catalog.document(manifest.digest) == manifest.stored.decode()


def test_registries_in_one_file_do_not_mix(catalog: Catalog) -> None:
    """The daemon keeps several registries: equal names in two of them stay apart."""
    other = catalog.at("other")
    catalog.apply(1, [version(n=1), version(n=2)])
    other.apply(7, [version(n=1)])
    assert (catalog.cursor, other.cursor) == (1, 7)
    assert refs(catalog.listing()) == ["medical-sft@v2"]
    assert refs(other.listing()) == ["medical-sft@v1"]
    other.forget()
    assert (catalog.cursor, other.cursor) == (1, 0)
    assert refs(catalog.listing()) == ["medical-sft@v2"]


def test_an_error_inside_a_transaction_takes_it_back_whole(catalog: Catalog) -> None:
    """Nothing of a failed block stays, inner blocks included."""

    def fail() -> None:
        with catalog.immediate():
            catalog.apply(1, [version()])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert catalog.cursor == 0
    assert catalog.listing() == []


COUNTER = """
import sys
from pathlib import Path
from weighbridge.registry.catalog import Catalog
catalog = Catalog.open(Path(sys.argv[1]), "r", durable=False)
for _ in range(100):
    with catalog.immediate():
        catalog.mark(epoch=catalog.epoch + 1)
"""


def test_reading_then_writing_is_safe_against_other_processes(catalog: Catalog) -> None:
    """Three processes that each add one a hundred times end at three hundred."""
    running = [subprocess.Popen([sys.executable, "-c", COUNTER, catalog.path]) for _ in range(3)]
    assert [process.wait(90) for process in running] == [0, 0, 0]
    assert catalog.epoch == 300


def test_a_changed_value_in_a_row_is_noticed(catalog: Catalog) -> None:
    """SQLite does not see a flipped bit inside a value; the row's seal does."""
    catalog.apply(1, [version(), tag(1, 1)])
    for change in (
        "UPDATE versions SET license = 'mit'",
        "UPDATE names SET latest_at = latest_at + 1",
        "UPDATE tags SET seq = 2",
    ):
        catalog.link.execute("BEGIN")
        catalog.link.execute(change)
        with pytest.raises(catalog_read.DamagedError):
            catalog.listing()
        catalog.link.execute("ROLLBACK")
    catalog.link.execute("UPDATE registries SET cursor = 5")
    with pytest.raises(catalog_read.DamagedError):
        catalog.registry()


def test_a_flipped_bit_in_the_file_never_shows_a_wrong_row(tmp_path: Path) -> None:
    """Whatever bit of a small cache changes, what is read is what was written, or an error."""
    path = tmp_path / "catalog.db"
    catalog = Catalog.open(path, "r", durable=False)
    catalog.apply(1, [version(f"name-{i}", n) for i in range(6) for n in (1, 2)])
    expected = catalog.listing()
    catalog.close()
    whole = path.read_bytes()
    noticed = 0
    for at in range(0, len(whole), 211):
        body = bytearray(whole)
        body[at] ^= 1 << (at % 8)
        path.write_bytes(body)
        try:
            link = catalog_read.open_file(path)
        except catalog_read.DAMAGE:
            noticed += 1
            continue
        try:
            assert catalog_read.View(link).listing() == expected
        except catalog_read.DAMAGE:
            noticed += 1
        finally:
            link.close()
    assert noticed > 0


def test_a_read_only_reader_needs_no_writer_and_writes_nothing(tmp_path: Path) -> None:
    """`ls` opens the cache read-only, while it is being written and after."""
    path = tmp_path / "a cache %41?#.db"
    catalog = Catalog.open(path, "r", durable=False)
    catalog.apply(1, [version()])
    for _ in range(2):
        link = catalog_read.open_file(path)
        assert refs(catalog_read.View(link).listing()) == ["medical-sft@v1"]
        with pytest.raises(sqlite3.OperationalError):
            link.execute("DELETE FROM names")
        link.close()
        catalog.close()


def test_a_page_of_a_hundred_thousand_versions_takes_milliseconds(tmp_path: Path) -> None:
    """Fifty rows come by an index, not by looking at everything."""
    path = tmp_path / "catalog.db"
    catalog = Catalog.open(path, "r", durable=False)
    catalog.apply(1, [version()])
    columns = ",".join(catalog_read.VERSION)
    template = catalog.link.execute(f"SELECT {columns} FROM versions").fetchone()
    row = dict(zip(catalog_read.VERSION, template, strict=True))
    name = dict(zip(catalog_read.NAME, ("medical-sft", "adapter", 1, 1.0, 1, 1), strict=True))
    with catalog.immediate() as link:
        for i in range(2000):
            name |= {"name": f"name-{i}", "latest": 50, "latest_at": float(i)}
            values = [name[c] for c in catalog_read.NAME]
            link.execute(
                f"INSERT INTO names (registry,{','.join(catalog_read.NAME)},seal) VALUES (1,?,?,?,?,?,?,?)",
                [*values, catalog_read.seal(values)],
            )
            rows = []
            for n in range(1, 51):
                row |= {"name": f"name-{i}", "n": n, "created_at": float(i)}
                values = [row[c] for c in catalog_read.VERSION]
                rows.append([*values, catalog_read.seal(values)])
            marks = ",".join("?" * (len(catalog_read.VERSION) + 1))
            link.executemany(f"INSERT INTO versions (registry,{columns},seal) VALUES (1,{marks})", rows)
    view = catalog_read.View(catalog_read.open_file(path))
    best = 1.0
    for _ in range(5):
        begin = time.process_time()
        shown = view.listing()
        best = min(best, time.process_time() - begin)
    view.link.close()
    catalog.close()
    assert len(shown) == 50
    assert best < 0.02
