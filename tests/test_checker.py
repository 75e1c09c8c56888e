"""The independent checker of the fault runs: it passes a sound remote and names every kind of damage."""

import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weighbridge.registry import hashing, layout, types
from weighbridge.registry.manifest import Manifest, canonical, seal
from weighbridge_testlib.yard import CHECKER, STATE_CHECKER

NAME = "demo"
REGISTRY = "9d6f1c1e-7a53-4b1e-9a0e-3f4f0f1b2c3d"


def sealed(payload: dict[str, bytes]) -> Manifest:
    """Seal some files."""
    files = [
        types.FileEntry(path=path, size=len(body), sha256=hashing.sha256_bytes(body), role="weights")
        for path, body in payload.items()
    ]
    weights = types.WeightsFacts(format="safetensors", shards=1, tensors=1, parameters=1, bytes=1, dtypes={})
    run = types.RunFacts(project="p", name="r", id="x")
    facts = types.Facts(
        kind="adapter",
        weights=weights,
        base=types.BaseFacts(),
        license=types.LicenseFacts(),
        provenance=types.Provenance(run=run),
    )
    return seal(files, facts)


def store(root: Path, key: str, value: Any) -> bytes:
    """Write an object and return its bytes."""
    body = value if isinstance(value, bytes) else canonical(value)
    (root / key).parent.mkdir(parents=True, exist_ok=True)
    (root / key).write_bytes(body)
    return body


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    """Build a remote with two committed versions, one tag and a feed, from the format's words alone."""
    root = tmp_path / "remote"
    marker: dict[str, Any] = {
        "schema": types.SCHEMA_REGISTRY,
        "registry": REGISTRY,
        "format": 1,
        "min_reader": 1,
        "min_writer": 1,
    }
    store(root, layout.MARKER, marker | {"mode": "shared", "epoch": 1})
    prev = None
    for n in (1, 2):
        payload = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights %d" % n}
        manifest = sealed(payload)
        owner = {"host": "here", "daemon": "d"}
        claim: dict[str, Any] = {
            "schema": types.SCHEMA_CLAIM,
            "registry": REGISTRY,
            "name": NAME,
            "n": n,
            "content": manifest.content,
        }
        claim |= {"manifest": manifest.stored.decode(), "owner": owner, "nonce": f"{n:032x}", "prev": prev}
        claimed = store(root, layout.claim(NAME, n), claim)
        prev = hashing.sha256_bytes(claimed)
        for path, body in payload.items():
            store(root, layout.version(NAME, n, path), body)
        card = store(root, layout.version(NAME, n, "README.md"), b"card")
        store(root, layout.manifest(NAME, n), manifest.stored)
        common = {"name": NAME, "n": n, "content": manifest.content}
        announced = common | {"type": "claim", "source": layout.claim(NAME, n), "sha256": prev}
        decided = common | {"type": "version", "source": layout.manifest(NAME, n), "sha256": manifest.digest}
        decided |= {"card_sha256": hashing.sha256_bytes(card)}
        for seq, entry in ((2 * n - 1, announced), (2 * n, decided)):
            part = {"schema": types.SCHEMA_FEED, "seq": seq, "epoch": 1, "nonce": f"{seq:032x}", "entries": [entry]}
            store(root, layout.feed(seq), part | {"sha256": hashing.sha256_bytes(canonical(part))})
    move: dict[str, Any] = {
        "schema": types.SCHEMA_TAG,
        "name": NAME,
        "tag": "prod",
        "seq": 1,
        "to": 1,
        "from": None,
        "who": "me",
    }
    store(root, layout.tag(NAME, "prod", 1), move | {"when": "2026-11-29T16:42:10Z", "why": None, "nonce": "00"})
    return root


def check(remote: Path, *arguments: str) -> tuple[dict[str, Any], set[str]]:
    """Run the checker; return its report and the codes it found, which its exit code must agree with."""
    command = [sys.executable, str(CHECKER), str(remote), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == bool(report["violations"])
    return report, {v["code"] for v in report["violations"]}


def edit(root: Path, key: str, **fields: Any) -> None:
    """Change fields of a JSON object in place."""
    store(root, key, json.loads((root / key).read_bytes()) | fields)


def test_a_sound_remote_passes(remote: Path) -> None:
    """Two committed versions, their claims, a tag and the feed give no violation and are all counted."""
    report, codes = check(remote, "--closed", "--swept", "0", "--contents", "2")
    assert codes == set()
    assert set(report["committed"]) == {"demo@v1", "demo@v2"}
    assert report["counts"] == {"claims": 2, "committed": 2, "files": 4, "tags": 1, "feed": 4}


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "file-damaged": lambda r: (r / "models/demo/v1/adapter_model.safetensors").write_bytes(b"Weights 1"),
    "file-size": lambda r: (r / "models/demo/v1/adapter_model.safetensors").write_bytes(b"weights"),
    "file-missing": lambda r: (r / "models/demo/v1/adapter_config.json").unlink(),
    "file-extra": lambda r: (r / "models/demo/v1/optimizer.pt").write_bytes(b"x"),
    "card-missing": lambda r: (r / "models/demo/v1/README.md").unlink(),
    "decision-differs": lambda r: edit(r, layout.manifest(NAME, 2), kind="model"),
    "decision-damaged": lambda r: (r / layout.manifest(NAME, 2)).write_bytes(b'{"a":1,"a":2}'),
    "claim-chain": lambda r: edit(r, layout.claim(NAME, 1), nonce="ab" * 16),
    "claim-content": lambda r: edit(r, layout.claim(NAME, 2), content="sha256:" + "0" * 64),
    "claim-manifest": lambda r: edit(r, layout.claim(NAME, 2), manifest="{}"),
    "claim-field": lambda r: edit(r, layout.claim(NAME, 2), n=3),
    "claims-not-dense": lambda r: (r / layout.claim(NAME, 1)).unlink(),
    "content-twice": lambda r: shutil.copyfile(r / layout.claim(NAME, 2), r / layout.claim(NAME, 3)),
    "unclaimed": lambda r: shutil.copytree(r / "models/demo/v2", r / "models/demo/v9"),
    "tag-uncommitted": lambda r: edit(r, layout.tag(NAME, "prod", 1), to=3),
    "tag-not-dense": lambda r: shutil.copyfile(r / layout.tag(NAME, "prod", 1), r / layout.tag(NAME, "prod", 3)),
    "feed-hole": lambda r: (r / layout.feed(2)).unlink(),
    "feed-sha256": lambda r: edit(r, layout.feed(2), nonce="00"),
    "not-announced": lambda r: shutil.rmtree(r / layout.FEED),
    "damaged": lambda r: (r / layout.feed(2)).write_bytes(b"{"),
    "stray": lambda r: (r / "models/demo/v1.bak").write_bytes(b""),
    "not-a-file": lambda r: (r / "models/demo/v1/link").symlink_to("README.md"),
    "marker-missing": lambda r: (r / layout.MARKER).unlink(),
}


@pytest.mark.parametrize("code", sorted(DAMAGES))
def test_each_damage_is_named(remote: Path, code: str) -> None:
    """One change to a sound remote is found under its own code."""
    DAMAGES[code](remote)
    assert code in check(remote)[1]


def test_what_the_caller_knows_is_held_against_the_remote(remote: Path, tmp_path: Path) -> None:
    """A lost acknowledgement, an open claim, a leftover and a wrong count are violations only when asked for."""
    content = json.loads((remote / layout.claim(NAME, 2)).read_bytes())["content"]
    ack = tmp_path / "ack"
    ack.write_text(json.dumps({"name": NAME, "n": 2, "content": content}) + "\n")
    (remote / layout.manifest(NAME, 2)).unlink()
    for seq in (3, 4):
        (remote / layout.feed(seq)).unlink()
    store(remote, "models/demo/_wb/stage/abc/part", b"x")
    assert check(remote)[1] == set()
    found = check(remote, "--ack", str(ack), "--closed", "--swept", "0", "--contents", "2")[1]
    assert found == {"acknowledged-lost", "claim-open", "leftover", "count"}


def test_a_database_may_not_claim_more_than_the_remote_holds(remote: Path, tmp_path: Path) -> None:
    """The state checker names a record without its version, and a file that is no database any more."""
    report = tmp_path / "report.json"
    report.write_text(json.dumps(check(remote)[0]))
    state = tmp_path / "state"
    state.mkdir()
    link = sqlite3.connect(state / "daemon.db")
    link.execute("create table jobs (name text, n integer, content text, state text)")
    link.execute("insert into jobs values ('demo', 1, null, 'done')")
    link.commit()
    command = [sys.executable, str(STATE_CHECKER), str(state), str(report)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    link.execute("insert into jobs values ('demo', 7, null, 'done')")
    link.commit()
    link.close()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "demo@v7" in done.stdout
    body = bytearray((state / "daemon.db").read_bytes())
    body[4096:4200] = b"\xff" * 104
    (state / "daemon.db").write_bytes(body)
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1
