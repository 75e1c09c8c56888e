"""A person's desk: a configuration with one directory remote, and `registry` called in this process.

desk = Desk(folder, monkeypatch)
desk.shelf.publish("medical-sft")
said = desk.registry("ls", "--json")      said.code, said.out, said.err, said.json
"""

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest

from weighbridge.registry.cli.main import main
from weighbridge.registry.remotes.directory import DirectoryRemote
from weighbridge_testlib.shelf import Shelf

SCHEMAS = Path(__file__).resolve().parents[3] / "docs" / "schemas"


class Said(NamedTuple):
    """What a command answered."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON object on stdout."""
        return json.loads(self.out)

    @property
    def error(self) -> Any:
        """The one JSON object on stderr."""
        return json.loads(self.err)


class Desk:
    """A remote, a configuration and a cache of their own under one folder."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, *, max_age: str = "1h") -> None:
        self.folder = folder
        self.root = folder / "remote"
        self.cache = folder / "cache"
        self.config = folder / "weighbridge.toml"
        self.root.mkdir(parents=True)
        self.config.write_text(
            f'[daemon]\nsocket = "{folder}/registryd.sock"\nstate = "{folder}/state"\n'
            f'[remotes.team]\nurl = "{self.root}"\nmax_age = "{max_age}"\n'
        )
        self.config.chmod(0o600)
        self.remote = DirectoryRemote(self.root)
        self.shelf = Shelf(self.remote)
        patch.setenv("WEIGHBRIDGE_CONFIG", str(self.config))
        patch.setenv("WEIGHBRIDGE_CACHE", str(self.cache))
        patch.chdir(folder)

    def registry(self, *words: str | Path, stdin: str | None = None) -> Said:
        """Run `registry` and return its exit code and what it wrote."""
        out, err = io.StringIO(), io.StringIO()
        before = sys.stdin
        sys.stdin = io.StringIO(stdin) if stdin is not None else io.StringIO()
        try:
            with redirect_stdout(out), redirect_stderr(err):
                code = main([str(word) for word in words])
        finally:
            sys.stdin = before
        return Said(code, out.getvalue(), err.getvalue())

    def ok(self, *words: str | Path, stdin: str | None = None) -> Said:
        """Run `registry` and see that it ends well."""
        said = self.registry(*words, stdin=stdin)
        assert said.code == 0, said.err
        return said


def conforms(document: Any, schema: str) -> Any:
    """See that a document follows a published schema, and return it."""
    jsonschema.validate(document, json.loads((SCHEMAS / f"{schema}.schema.json").read_text()))
    return document
