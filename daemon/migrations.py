"""The schema of the daemon's own tables: named steps, one transaction each, applied in order, never edited later.

They stand beside the catalogue's tables in one file (`registry.migrations`).
"""

from weighbridge.registry.sqlite import Database, Migrations

schema = Migrations("weighbridge-daemon")


@schema()
def jobs_folders_skipped(db: Database) -> None:
    """Keep what is under way, what was last seen at rest, and what was set aside."""
    db.execute("""
        CREATE TABLE jobs (
            id INTEGER PRIMARY KEY,
            root TEXT NOT NULL,
            path TEXT NOT NULL,
            part TEXT NOT NULL,
            fingerprint TEXT NOT NULL,
            shape TEXT NOT NULL,
            state TEXT NOT NULL,
            was TEXT,
            run_path TEXT, run_id TEXT, project TEXT, run TEXT, home TEXT, name TEXT, kind TEXT,
            step INTEGER, metric REAL, best_hint INTEGER NOT NULL, size INTEGER,
            content TEXT, bundle TEXT, facts TEXT, people TEXT, manifest TEXT, n INTEGER, claim TEXT, receipt TEXT,
            reason TEXT, until REAL, attempts INTEGER NOT NULL, unexpected INTEGER NOT NULL, error TEXT,
            findings TEXT NOT NULL, recheck INTEGER, late TEXT,
            created_at REAL NOT NULL, updated_at REAL NOT NULL, settled_at REAL,
            seal INTEGER NOT NULL,
            UNIQUE (path, part, fingerprint)
        )""")
    db.execute("CREATE INDEX jobs_state ON jobs (state, until)")
    db.execute("CREATE INDEX jobs_name ON jobs (name, n)")
    db.execute("CREATE INDEX jobs_run ON jobs (run_path)")
    db.execute("""
        CREATE TABLE roots (
            root TEXT PRIMARY KEY,
            since REAL NOT NULL
        ) WITHOUT ROWID""")
    db.execute("""
        CREATE TABLE folders (
            path TEXT PRIMARY KEY,
            root TEXT NOT NULL,
            fingerprint TEXT NOT NULL,
            shape TEXT NOT NULL,
            size INTEGER NOT NULL,
            at REAL NOT NULL
        ) WITHOUT ROWID""")
    db.execute("""
        CREATE TABLE skipped (
            path TEXT NOT NULL,
            part TEXT NOT NULL,
            root TEXT NOT NULL,
            fingerprint TEXT NOT NULL,
            shape TEXT NOT NULL,
            reason TEXT NOT NULL,
            why TEXT NOT NULL,
            run_path TEXT, kind TEXT, step INTEGER, metric REAL, best_hint INTEGER NOT NULL,
            size INTEGER NOT NULL,
            at REAL NOT NULL,
            PRIMARY KEY (path, part)
        ) WITHOUT ROWID""")
    db.execute("CREATE INDEX skipped_run ON skipped (run_path)")


@schema()
def runs_names_allows(db: Database) -> None:
    """Keep which run is which, which name belongs to whom, and what people allowed."""
    db.execute("""
        CREATE TABLE runs (
            path TEXT PRIMARY KEY,
            id TEXT NOT NULL,
            key TEXT NOT NULL,
            first_seen REAL NOT NULL
        ) WITHOUT ROWID""")
    db.execute("""
        CREATE TABLE bound (
            home TEXT NOT NULL,
            name TEXT NOT NULL COLLATE NOCASE,
            kind TEXT NOT NULL,
            run_id TEXT NOT NULL,
            published_at REAL,
            PRIMARY KEY (home, name)
        ) WITHOUT ROWID""")
    db.execute("""
        CREATE TABLE allows (
            path TEXT NOT NULL,
            code TEXT NOT NULL,
            reason TEXT NOT NULL,
            who TEXT NOT NULL,
            at REAL NOT NULL,
            PRIMARY KEY (path, code)
        ) WITHOUT ROWID""")


@schema()
def deliveries_and_events(db: Database) -> None:
    """Keep what every mirror still has to get, what was looked at again, and the log people read."""
    db.execute("""
        CREATE TABLE deliveries (
            remote TEXT NOT NULL,
            home TEXT NOT NULL,
            name TEXT NOT NULL,
            n INTEGER NOT NULL,
            state TEXT NOT NULL,
            reason TEXT, until REAL, attempts INTEGER NOT NULL, receipt TEXT,
            created_at REAL NOT NULL, updated_at REAL NOT NULL,
            PRIMARY KEY (remote, name, n)
        ) WITHOUT ROWID""")
    db.execute("""
        CREATE TABLE verifications (
            home TEXT NOT NULL,
            name TEXT NOT NULL,
            n INTEGER NOT NULL,
            at REAL NOT NULL,
            findings TEXT NOT NULL,
            PRIMARY KEY (home, name, n)
        ) WITHOUT ROWID""")
    db.execute("""
        CREATE TABLE events (
            id INTEGER PRIMARY KEY,
            at REAL NOT NULL,
            name TEXT, n INTEGER, path TEXT,
            event TEXT NOT NULL,
            detail TEXT
        )""")
    db.execute("CREATE INDEX events_name ON events (name, id)")


@schema()
def registries_seen(db: Database) -> None:
    """Keep which registry was seen at a URL: an unmounted folder must not become a new one."""
    db.execute("""
        CREATE TABLE seen_registries (
            url TEXT PRIMARY KEY,
            uuid TEXT NOT NULL,
            at REAL NOT NULL
        ) WITHOUT ROWID""")


@schema()
def merges(db: Database) -> None:
    """Keep the merges that rules chose, and the content of bases that were hashed once."""
    db.execute("""
        CREATE TABLE merges (
            id INTEGER PRIMARY KEY,
            home TEXT NOT NULL,
            name TEXT NOT NULL,
            n INTEGER NOT NULL,
            root TEXT NOT NULL,
            path TEXT NOT NULL,
            run_path TEXT, run_id TEXT, project TEXT, run TEXT, step INTEGER, metric REAL, best_hint INTEGER NOT NULL,
            choice TEXT NOT NULL,
            dtype TEXT NOT NULL,
            retry TEXT NOT NULL,
            state TEXT NOT NULL,
            was TEXT,
            base_id TEXT, base_revision TEXT, base_path TEXT, base_ref TEXT, base_content TEXT, derivation TEXT,
            plan TEXT, stage TEXT, executor TEXT, tries INTEGER NOT NULL, handle TEXT, host TEXT, submitted_at REAL,
            finished INTEGER NOT NULL, barren INTEGER NOT NULL,
            job INTEGER, merged_name TEXT, merged_n INTEGER,
            reason TEXT, until REAL, attempts INTEGER NOT NULL, unexpected INTEGER NOT NULL, error TEXT,
            findings TEXT NOT NULL,
            created_at REAL NOT NULL, updated_at REAL NOT NULL,
            seal INTEGER NOT NULL,
            UNIQUE (home, name, n)
        )""")
    db.execute("CREATE INDEX merges_state ON merges (state, until)")
    db.execute("CREATE INDEX merges_job ON merges (job)")
    db.execute("""
        CREATE TABLE bases (
            path TEXT PRIMARY KEY,
            stamp TEXT NOT NULL,
            content TEXT NOT NULL
        ) WITHOUT ROWID""")


@schema()
def what_mirrors_were_told(db: Database) -> None:
    """Keep what was said of a name's versions when a mirror was told last."""
    db.execute("""
        CREATE TABLE followed (
            remote TEXT NOT NULL,
            name TEXT NOT NULL,
            said TEXT NOT NULL,
            PRIMARY KEY (remote, name)
        ) WITHOUT ROWID""")
