"""An independent reader of a daemon's state folder: every database in use is whole and agrees with the remote.

It reads copies, never the live files, and takes what the remote holds from the report of `checker.py`. What was found
damaged and put aside (`damaged/`) is not looked at:

    python state_checker.py STATE REPORT
"""

import argparse
import json
import shutil
import sqlite3
import sys
import tempfile
from pathlib import Path
from typing import Any

DECIDED = {"committed", "announced", "done"}


def is_sqlite(path: Path) -> bool:
    """Tell a database by its first bytes."""
    with path.open("rb") as stream:
        return stream.read(16) == b"SQLite format 3\0"


def check_copy(source: Path, report: dict[str, Any]) -> list[str]:
    """Return what is wrong with one database, read from a copy that includes its write-ahead log."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "copy.db"
        shutil.copyfile(source, copy)
        wal = source.with_name(source.name + "-wal")
        if wal.exists():
            shutil.copyfile(wal, copy.with_name("copy.db-wal"))
        link = sqlite3.connect(copy)
        try:
            return check_database(link, report)
        except sqlite3.DatabaseError as error:
            return [str(error)]
        finally:
            link.close()


def check_database(link: sqlite3.Connection, report: dict[str, Any]) -> list[str]:
    """Return broken pages, dangling rows, and records that claim more than the remote holds."""
    found = [str(verdict) for (verdict,) in link.execute("pragma integrity_check") if verdict != "ok"]
    found += [f"foreign key: {row}" for row in link.execute("pragma foreign_key_check")]
    for (table,) in link.execute("select name from sqlite_master where type = 'table'").fetchall():
        columns = {row[1] for row in link.execute(f'pragma table_info("{table}")')}
        if not {"name", "n", "content"} <= columns:
            continue
        state = "state" if "state" in columns else "null"
        for name, n, content, at in link.execute(f'select name, n, content, {state} from "{table}"'):
            if name is None or n is None:
                continue
            version = f"{name}@v{n}"
            if version not in report["claims"] or (content and report["claims"][version] != content):
                found.append(f"{table}: {version} has another content on the remote, or none")
            elif at in DECIDED and version not in report["committed"]:
                found.append(f"{table}: {version} is recorded as {at} and is not committed on the remote")
    return found


def main() -> int:
    """Check what the command line names and print the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("state", type=Path)
    parser.add_argument("report", type=Path)
    options = parser.parse_args()
    report = json.loads(options.report.read_text())
    databases = sorted(p for p in options.state.iterdir() if p.is_file() and is_sqlite(p))
    violations = [
        {"code": "database", "subject": path.name, "detail": detail}
        for path in databases
        for detail in check_copy(path, report)
    ]
    print(json.dumps({"databases": [str(p) for p in databases], "violations": violations}, indent=1))
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
