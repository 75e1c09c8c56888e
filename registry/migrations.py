"""The catalogue's schema as named steps: one function and one transaction each, applied in order, never edited later.

The command line's cache and the daemon's database have the same tables. Rows that people are shown carry a `seal`, a
CRC of their other columns: SQLite itself would not notice a flipped bit inside a value.
"""

from weighbridge.registry.sqlite import Database, Migrations

catalog = Migrations("weighbridge-catalog")


@catalog()
def registries_names_versions(db: Database) -> None:
    """What the feed tells: one row per registry, name and version; `latest` is worked out when facts arrive."""
    db.execute("""
        CREATE TABLE registries (
            id INTEGER PRIMARY KEY,
            uuid TEXT NOT NULL UNIQUE,
            epoch INTEGER NOT NULL DEFAULT 0,
            cursor INTEGER NOT NULL DEFAULT 0,       -- the feed object up to which this is the state
            cursor_size INTEGER,                     -- that object as it was listed: if it changed, all is read anew
            cursor_modified REAL,
            refreshed_at REAL,
            names INTEGER NOT NULL DEFAULT 0,
            versions INTEGER NOT NULL DEFAULT 0,
            bytes INTEGER NOT NULL DEFAULT 0,
            seal INTEGER NOT NULL DEFAULT 0
        )""")
    db.execute("""
        CREATE TABLE names (
            registry INTEGER NOT NULL REFERENCES registries (id) ON DELETE CASCADE,
            name TEXT NOT NULL,
            kind TEXT,
            latest INTEGER,
            latest_at REAL,
            versions INTEGER NOT NULL DEFAULT 0,     -- committed and not withdrawn
            bytes INTEGER NOT NULL DEFAULT 0,
            seal INTEGER NOT NULL DEFAULT 0,
            PRIMARY KEY (registry, name)
        ) WITHOUT ROWID""")
    db.execute("CREATE INDEX names_newest ON names (registry, latest_at DESC, name) WHERE latest IS NOT NULL")
    db.execute("""
        CREATE TABLE versions (
            registry INTEGER NOT NULL,
            name TEXT NOT NULL,
            n INTEGER NOT NULL,
            state TEXT NOT NULL CHECK (state IN ('open', 'committed', 'void', 'withdrawn')),
            content TEXT,
            manifest TEXT,                           -- sha256 of manifest.json as stored
            claim TEXT,                              -- sha256 of the claim as stored
            card TEXT,                               -- sha256 of README.md as stored
            kind TEXT,
            base TEXT,
            license TEXT,
            noted_license TEXT,                      -- what people said instead
            note INTEGER,                            -- the newest note
            size INTEGER,
            parameters INTEGER,
            owner TEXT,
            step INTEGER,
            run TEXT,
            run_id TEXT,
            run_started REAL,
            worst TEXT,
            created_at REAL,
            claimed_at REAL,
            seal INTEGER NOT NULL DEFAULT 0,
            PRIMARY KEY (registry, name, n),
            FOREIGN KEY (registry, name) REFERENCES names (registry, name) ON DELETE CASCADE
        ) WITHOUT ROWID""")
    db.execute("CREATE INDEX versions_newest ON versions (registry, created_at DESC, name, n)")
    db.execute("CREATE INDEX versions_content ON versions (registry, content)")
    db.execute("CREATE INDEX versions_run ON versions (registry, name, run_id, state, step, n)")
    db.execute("CREATE INDEX versions_open ON versions (registry, name, n) WHERE state = 'open'")


@catalog()
def tags_and_their_moves(db: Database) -> None:
    """Where each tag stands, and every move that was told."""
    db.execute("""
        CREATE TABLE tags (
            registry INTEGER NOT NULL REFERENCES registries (id) ON DELETE CASCADE,
            name TEXT NOT NULL,
            tag TEXT NOT NULL,
            seq INTEGER NOT NULL,
            n INTEGER,                               -- NULL: the tag was removed
            seal INTEGER NOT NULL DEFAULT 0,
            PRIMARY KEY (registry, name, tag)
        ) WITHOUT ROWID""")
    db.execute("""
        CREATE TABLE tag_moves (
            registry INTEGER NOT NULL REFERENCES registries (id) ON DELETE CASCADE,
            name TEXT NOT NULL,
            tag TEXT NOT NULL,
            seq INTEGER NOT NULL,
            to_n INTEGER,
            from_n INTEGER,
            sha256 TEXT NOT NULL,
            PRIMARY KEY (registry, name, tag, seq)
        ) WITHOUT ROWID""")


@catalog()
def manifests_and_receipts(db: Database) -> None:
    """What was sealed and what remotes confirmed: hashes, licence, provenance, findings and lineage to be asked for."""
    db.execute("""
        CREATE TABLE manifests (
            sha256 TEXT PRIMARY KEY,
            content TEXT NOT NULL,
            kind TEXT NOT NULL,
            document TEXT NOT NULL,                  -- manifest.json as stored
            license TEXT AS (json_extract(document, '$.license')),
            provenance TEXT AS (json_extract(document, '$.provenance')),
            seal INTEGER NOT NULL DEFAULT 0
        ) WITHOUT ROWID""")
    db.execute("CREATE INDEX manifests_content ON manifests (content)")
    db.execute("""
        CREATE TABLE files (
            manifest TEXT NOT NULL REFERENCES manifests (sha256) ON DELETE CASCADE,
            path TEXT NOT NULL,
            size INTEGER NOT NULL,
            sha256 TEXT NOT NULL,
            role TEXT NOT NULL,
            PRIMARY KEY (manifest, path)
        ) WITHOUT ROWID""")
    db.execute("CREATE INDEX files_sha256 ON files (sha256)")
    db.execute("""
        CREATE TABLE findings (
            manifest TEXT NOT NULL REFERENCES manifests (sha256) ON DELETE CASCADE,
            position INTEGER NOT NULL,
            code TEXT NOT NULL,
            severity TEXT NOT NULL,
            subject TEXT NOT NULL,
            message TEXT NOT NULL,
            fix TEXT,
            data TEXT NOT NULL,
            PRIMARY KEY (manifest, position)
        ) WITHOUT ROWID""")
    db.execute("CREATE INDEX findings_code ON findings (code)")
    db.execute("""
        CREATE TABLE lineage (
            manifest TEXT NOT NULL REFERENCES manifests (sha256) ON DELETE CASCADE,
            position INTEGER NOT NULL,
            relation TEXT NOT NULL,
            ref TEXT NOT NULL,
            parent TEXT,                             -- the parent's content digest, where it is known
            PRIMARY KEY (manifest, position)
        ) WITHOUT ROWID""")
    db.execute("CREATE INDEX lineage_parent ON lineage (parent)")
    db.execute("CREATE INDEX lineage_ref ON lineage (ref)")
    db.execute("""
        CREATE TABLE receipts (
            remote TEXT NOT NULL,
            registry TEXT NOT NULL,
            name TEXT NOT NULL,
            n INTEGER NOT NULL,
            content TEXT NOT NULL,
            manifest TEXT NOT NULL REFERENCES manifests (sha256),
            location TEXT NOT NULL,
            committed_at TEXT NOT NULL,
            verified TEXT NOT NULL,
            files TEXT NOT NULL,
            joined INTEGER NOT NULL,
            PRIMARY KEY (remote, registry, name, n)
        ) WITHOUT ROWID""")
    db.execute("CREATE INDEX receipts_content ON receipts (content)")


@catalog()
def heads_of_repositories(db: Database) -> None:
    """At which commit the ledger of a name was read last, for remotes whose versions are commits."""
    db.execute("""
        CREATE TABLE heads (
            registry INTEGER NOT NULL REFERENCES registries (id) ON DELETE CASCADE,
            name TEXT NOT NULL,
            commit_id TEXT NOT NULL,
            PRIMARY KEY (registry, name)
        ) WITHOUT ROWID""")


@catalog()
def copies_that_were_verified(db: Database) -> None:
    """At which level the copy of a version on this remote was verified from here, and when."""
    db.execute("""
        CREATE TABLE copies (
            registry INTEGER NOT NULL REFERENCES registries (id) ON DELETE CASCADE,
            name TEXT NOT NULL,
            n INTEGER NOT NULL,
            level TEXT NOT NULL,
            checked_at REAL NOT NULL,
            seal INTEGER NOT NULL DEFAULT 0,
            PRIMARY KEY (registry, name, n)
        ) WITHOUT ROWID""")


@catalog()
def decisions_that_nobody_told(db: Database) -> None:
    """Decisions that were found by looking at an open claim, until the feed tells them: their writer may be dead."""
    db.execute("""
        CREATE TABLE untold (
            registry INTEGER NOT NULL REFERENCES registries (id) ON DELETE CASCADE,
            name TEXT NOT NULL,
            n INTEGER NOT NULL,
            PRIMARY KEY (registry, name, n)
        ) WITHOUT ROWID""")
