"""An independent reader of a directory remote: it shares no code with the product.

It knows docs/formats.md only. It walks every object, computes every digest again and prints one JSON report on stdout;
the exit code is 1 when anything is wrong. It uses the standard library alone, so it can be read in one sitting:

    python checker.py REMOTE [--ack FILE] [--closed] [--swept SECONDS] [--contents N]

`state_checker.py` compares a daemon's database with such a report.
"""

import argparse
import gzip
import hashlib
import json
import re
import sys
import time
import unicodedata
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

RENDERED = {"README.md", "training.json", "manifest.json", "manifest.dsse.json"}
KINDS = {"adapter", "model", "quantized", "merged"}
HEX64 = re.compile(r"[0-9a-f]{64}")
CLAIM = re.compile(r"models/([^/]+)/_wb/claims/([0-9]{8})\.json")
PAYLOAD = re.compile(r"models/([^/]+)/v([1-9][0-9]*)/(.+)")
TAG = re.compile(r"models/([^/]+)/_wb/tags/([^/]+)/([0-9]{8})\.json")
WITHDRAWN = re.compile(r"models/([^/]+)/_wb/withdrawn/([0-9]{8})\.json")
NOTE = re.compile(r"models/([^/]+)/_wb/notes/([0-9]{8})/([0-9]{8})\.json")
STAGE = re.compile(r"(?:models/[^/]+/)?_wb/stage/.+")
FEED = re.compile(r"catalog/feed/([0-9]{12})\.json")
SNAPSHOT = re.compile(r"catalog/snap/([0-9]{12})\.jsonl\.gz")
SNAPSHOT_TOP = 10**12 - 1


class Violation(NamedTuple):
    """One thing that must not be: a code, the object it is about, and what was found."""

    code: str
    subject: str
    detail: str


class Claimed(NamedTuple):
    """A claim as it stands on the remote."""

    content: str
    manifest: bytes
    document: dict[str, Any]
    stored_sha256: str


class Damaged(Exception):  # noqa: N818  it is a state of the object, raised and caught in this file only
    """Bytes that are not what the format says."""


def sha256(stored: bytes) -> str:
    """Return the hex sha256 of bytes as stored."""
    return hashlib.sha256(stored).hexdigest()


def sha256_of(path: Path) -> str:
    """Return the hex sha256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def strict(stored: bytes) -> dict[str, Any]:
    """Return the object in these bytes; duplicate keys, bare NaN, bad UTF-8 and anything but an object are damage."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in items}) != len(items):
            raise ValueError("a key stands twice")
        return dict(items)

    def constant(name: str) -> Any:
        raise ValueError(f"bare {name}")

    try:
        value = json.loads(stored.decode("utf-8"), object_pairs_hook=pairs, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise Damaged(str(error)) from error
    if not isinstance(value, dict):
        raise Damaged("it is no object")
    return value


def content_of(files: list[dict[str, Any]]) -> str:
    """Compute the content digest of a manifest's file list, from the wording of the format alone."""
    digest = hashlib.sha256(b"weighbridge-content-v1\n")
    for f in sorted(files, key=lambda f: str(f["path"]).encode()):
        digest.update(f"{f['path']}\0{int(f['size'])}\0{f['sha256']}\n".encode())
    return "sha256:" + digest.hexdigest()


def manifest_of(stored: bytes) -> dict[str, Any]:
    """Return a manifest whose content digest follows from its files and whose paths are safe."""
    document = strict(stored)
    if document.get("schema") != "weighbridge/manifest/1":
        raise Damaged(f"schema is {document.get('schema')!r}")
    if document.get("kind") not in KINDS:
        raise Damaged(f"kind is {document.get('kind')!r}")
    files = document.get("files")
    if not isinstance(files, list) or not files:
        raise Damaged("it lists no files")
    seen: set[str] = set()
    for entry in files:
        path = entry.get("path")
        if not isinstance(path, str) or not path_is_safe(path):
            raise Damaged(f"path {path!r} is not safe")
        if path in RENDERED or path.casefold() in seen:
            raise Damaged(f"path {path!r} is rendered or stands twice")
        seen.add(path.casefold())
        if not HEX64.fullmatch(str(entry.get("sha256"))) or not isinstance(entry.get("size"), int) or entry["size"] < 0:
            raise Damaged(f"entry of {path!r} is not valid")
    if document.get("content") != content_of(files):
        raise Damaged("its content digest does not follow from its files")
    return document


def path_is_safe(path: str) -> bool:
    """Tell whether a payload path is relative, plain, printable and in NFC."""
    segments = path.split("/")
    return (
        path.isprintable()
        and "\\" not in path
        and unicodedata.normalize("NFC", path) == path
        and all(s and not s.startswith(".") for s in segments)
    )


class Check:
    """One walk over one remote; `violations` fills up, nothing is ever changed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.violations: list[Violation] = []
        self.registry: str | None = None
        self.claims: dict[str, dict[int, Claimed]] = {}
        self.committed: dict[tuple[str, int], str] = {}
        self.void: set[tuple[str, int]] = set()
        self.withdrawn: set[tuple[str, int]] = set()
        self.announced: set[tuple[str, str, int]] = set()
        self.leftovers: list[str] = []
        self.keys: dict[str, Path] = {}
        self.counts: Counter[str] = Counter()

    def bad(self, code: str, subject: str, detail: str) -> None:
        """Note a violation."""
        self.violations.append(Violation(code, subject, detail))

    def document(self, key: str, schema: str) -> tuple[bytes, dict[str, Any]] | None:
        """Return an object of the remote as bytes and value, or report it."""
        stored = self.keys[key].read_bytes()
        try:
            value = strict(stored)
        except Damaged as error:
            self.bad("damaged", key, str(error))
            return None
        if value.get("schema") != schema:
            self.bad("schema", key, f"{value.get('schema')!r} is not {schema}")
            return None
        return stored, value

    # -- the walk

    def list(self) -> None:
        """Find every object and every leftover; anything else is a stray."""
        for path in walk(self.root):
            key = path.relative_to(self.root).as_posix()
            if path.is_symlink() or not path.is_file():
                self.bad("not-a-file", key, "a link or a special file")
            elif STAGE.fullmatch(key) or any(s.startswith(".") for s in key.split("/")):
                self.leftovers.append(key)
            else:
                self.keys[key] = path
        for key in self.keys:
            known = key == "weighbridge.json" or any(
                p.fullmatch(key) for p in (CLAIM, PAYLOAD, TAG, WITHDRAWN, NOTE, FEED, SNAPSHOT)
            )
            if not known:
                self.bad("stray", key, "no key of the format")

    def marker(self) -> None:
        """Read the marker of the remote."""
        if "weighbridge.json" not in self.keys:
            if self.keys:
                self.bad("marker-missing", "weighbridge.json", "objects without a marker")
            return
        found = self.document("weighbridge.json", "weighbridge/registry/1")
        if found is None:
            return
        _, value = found
        try:
            self.registry = str(uuid.UUID(str(value["registry"])))
        except (KeyError, ValueError) as error:
            self.bad("marker", "weighbridge.json", f"no registry uuid: {error}")
        if value.get("mode") not in {"shared", "single-writer"} or not isinstance(value.get("format"), int):
            self.bad("marker", "weighbridge.json", "mode or format is not valid")

    def read_claims(self) -> None:
        """Read every claim: its fields, its manifest, its place in the chain."""
        nonces: dict[str, str] = {}
        for key in sorted(self.keys):
            match = CLAIM.fullmatch(key)
            if not match:
                continue
            name, n = match[1], int(match[2])
            found = self.document(key, "weighbridge/claim/1")
            if found is None:
                continue
            stored, value = found
            for field, want in (("registry", self.registry), ("name", name), ("n", n)):
                if value.get(field) != want:
                    self.bad("claim-field", key, f"{field} is {value.get(field)!r}, not {want!r}")
            owner = value.get("owner")
            if not isinstance(owner, dict) or not owner.get("host") or not owner.get("daemon"):
                self.bad("claim-field", key, "owner is not complete")
            nonce = str(value.get("nonce"))
            if not re.fullmatch(r"[0-9a-f]{8,}", nonce) or nonces.setdefault(nonce, key) != key:
                self.bad("claim-field", key, f"nonce {nonce!r} is not hex or stands twice")
            text = value.get("manifest")
            try:
                manifest = text.encode() if isinstance(text, str) else b""
                document = manifest_of(manifest)
            except Damaged as error:
                self.bad("claim-manifest", key, str(error))
                continue
            if value.get("content") != document["content"]:
                self.bad("claim-content", key, "its content is not its manifest's")
            self.claims.setdefault(name, {})[n] = Claimed(document["content"], manifest, document, sha256(stored))
            self.counts["claims"] += 1
            before = self.claims[name].get(n - 1)
            want_prev = None if n == 1 else before.stored_sha256 if before else "?"
            if value.get("prev") != want_prev:
                self.bad("claim-chain", key, f"prev is {value.get('prev')!r}, the claim before has {want_prev!r}")
        folded: dict[str, str] = {}
        for name, claims in self.claims.items():
            if sorted(claims) != list(range(1, len(claims) + 1)):
                self.bad("claims-not-dense", name, str(sorted(claims)))
            if len({c.document["kind"] for c in claims.values()}) > 1:
                self.bad("kind-changes", name, "one name, several kinds")
            if folded.setdefault(name.casefold(), name) != name:
                self.bad("name-collides", name, f"differs from {folded[name.casefold()]} by case alone")

    def decisions(self) -> None:
        """Read every version folder and see that no content has two numbers under one name."""
        payload: dict[tuple[str, int], dict[str, Path]] = {}
        for key, path in self.keys.items():
            match = PAYLOAD.fullmatch(key)
            if match and match[1] != "_wb":
                payload.setdefault((match[1], int(match[2])), {})[match[3]] = path
        for (name, n), files in sorted(payload.items()):
            where = f"{name}@v{n}"
            claimed = self.claims.get(name, {}).get(n)
            if claimed is None:
                self.bad("unclaimed", where, "a version folder without a claim")
                continue
            decision = files.get("manifest.json")
            if decision is not None:
                self.decide(name, n, claimed, decision.read_bytes())
            self.compare(name, n, claimed, files)
        live: dict[tuple[str, str], int] = {}
        for name, claims in self.claims.items():
            for n, claimed in claims.items():
                if (name, n) not in self.void and live.setdefault((name, claimed.content), n) != n:
                    self.bad("content-twice", f"{name}@v{n}", f"also v{live[name, claimed.content]}")

    def decide(self, name: str, n: int, claimed: Claimed, stored: bytes) -> None:
        """Sort a decision: the claim's manifest to the byte, or a void."""
        where = f"{name}@v{n}"
        if stored == claimed.manifest:
            self.committed[name, n] = claimed.content
            self.counts["committed"] += 1
            return
        try:
            value = strict(stored)
        except Damaged as error:
            self.bad("decision-damaged", where, str(error))
            return
        if isinstance(value.get("void"), str) and value.get("by"):
            self.void.add((name, n))
            self.counts["void"] += 1
        else:
            self.bad("decision-differs", where, "manifest.json is neither the claim's manifest nor a void")

    def compare(self, name: str, n: int, claimed: Claimed, files: dict[str, Path]) -> None:
        """Compare files with the manifest: all that is there is whole and listed, a committed version lacks none."""
        where = f"{name}@v{n}"
        listed = {f["path"]: f for f in claimed.document["files"]}
        for path in sorted(set(files) - set(listed) - RENDERED):
            self.bad("file-extra", f"{where}/{path}", "not in the manifest")
        for path, entry in listed.items():
            if path not in files:
                if (name, n) in self.committed and (name, n) not in self.withdrawn:
                    self.bad("file-missing", f"{where}/{path}", "the version is committed")
                continue
            size = files[path].stat().st_size
            if size != entry["size"]:
                self.bad("file-size", f"{where}/{path}", f"{size} bytes, not {entry['size']}")
            elif sha256_of(files[path]) != entry["sha256"]:
                self.bad("file-damaged", f"{where}/{path}", "sha256 differs")
            self.counts["files"] += 1
        if (name, n) in self.committed and "README.md" not in files:
            self.bad("card-missing", where, "committed before its card was there")
        training = files.get("training.json")
        if training is not None:
            try:
                strict(training.read_bytes())
            except Damaged as error:
                self.bad("damaged", f"{where}/training.json", str(error))

    def tags(self) -> None:
        """Follow every tag from its first move to its last."""
        chains: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
        for key in sorted(self.keys):
            match = TAG.fullmatch(key)
            found = self.document(key, "weighbridge/tag/1") if match else None
            if match and found:
                chains.setdefault((match[1], match[2]), {})[int(match[3])] = found[1]
        for (name, tag), chain in chains.items():
            where = f"{name}:{tag}"
            if re.fullmatch(r"v[0-9]+|latest", tag):
                self.bad("tag-reserved", where, "this tag cannot be moved")
            if sorted(chain) != list(range(1, len(chain) + 1)):
                self.bad("tag-not-dense", where, str(sorted(chain)))
            at: int | None = None
            for seq in sorted(chain):
                move = chain[seq]
                to = move.get("to")
                if move.get("from") != at:
                    self.bad("tag-chain", f"{where}#{seq}", f"from {move.get('from')}, the tag stood at {at}")
                if to is not None and (name, to) not in self.committed:
                    self.bad("tag-uncommitted", f"{where}#{seq}", f"v{to} is not committed")
                at = to
            self.counts["tags"] += 1

    def marks(self) -> None:
        """Read withdrawals and notes."""
        for key in self.keys:
            match = WITHDRAWN.fullmatch(key)
            if match:
                self.withdrawn.add((match[1], int(match[2])))
                self.document(key, "weighbridge/withdrawn/1")
            note = NOTE.fullmatch(key)
            if note:
                self.document(key, "weighbridge/note/1")

    def feed(self) -> None:
        """Read the feed: dense, true to its sources, and no committed version without its claim."""
        numbers = []
        first: dict[tuple[str, str, int], int] = {}
        for key in sorted(self.keys):
            match = FEED.fullmatch(key)
            if not match:
                continue
            seq = int(match[1])
            numbers.append(seq)
            found = self.document(key, "weighbridge/feed/1")
            if found is None:
                continue
            _, value = found
            entries = value.get("entries")
            if value.get("seq") != seq or not isinstance(entries, list) or not 1 <= len(entries) <= 256:
                self.bad("feed-object", key, f"seq {value.get('seq')!r}, entries {type(entries).__name__}")
                continue
            rest = {field: value[field] for field in value if field != "sha256"}
            canonical = json.dumps(rest, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()
            if "sha256" in value and value["sha256"] != sha256(canonical):
                self.bad("feed-sha256", key, "the object is not what was written")
            for entry in entries:
                self.feed_entry(key, seq, entry, first)
        if numbers and (numbers[0] > 1 or numbers != list(range(numbers[0], numbers[0] + len(numbers)))):
            self.bad("feed-hole", "catalog/feed", f"{numbers[0]} to {numbers[-1]} in {len(numbers)} objects")
        self.counts["feed"] = len(numbers)
        for name, n in self.committed:
            claimed_at = first.get(("claim", name, n))
            decided_at = first.get(("version", name, n))
            if claimed_at is None:
                self.bad("not-announced", f"{name}@v{n}", "committed, but its claim is not in the feed")
            elif decided_at is not None and decided_at < claimed_at:
                self.bad("announced-late", f"{name}@v{n}", "its version stands before its claim in the feed")
        self.announced = set(first)

    def feed_entry(self, key: str, seq: int, entry: dict[str, Any], first: dict[tuple[str, str, int], int]) -> None:
        """Compare one entry of the feed with the object it stands for."""
        kind, name, n, source = (entry.get(k) for k in ("type", "name", "n", "source"))
        if kind not in {"claim", "version", "void", "tag", "withdrawn", "note"} or not isinstance(name, str):
            self.bad("feed-entry", key, f"type {kind!r}, name {name!r}")
            return
        path = self.keys.get(str(source))
        if path is None:
            self.bad("feed-source", key, f"{source} is not there")
        elif sha256(path.read_bytes()) != entry.get("sha256"):
            self.bad("feed-sha256", key, f"{source} is not what was announced")
        if isinstance(n, int):
            first.setdefault((str(kind), name, n), seq)
            claimed = self.claims.get(name, {}).get(n)
            if kind in {"claim", "version"} and (claimed is None or claimed.content != entry.get("content")):
                self.bad("feed-content", key, f"{name}@v{n} has another content")
            if kind == "version" and (name, n) not in self.committed:
                self.bad("feed-version", key, f"{name}@v{n} is announced and not committed")
        card = entry.get("card_sha256")
        if kind == "version" and card and (name, n) not in self.withdrawn:
            stored = self.keys.get(f"models/{name}/v{n}/README.md")
            if stored is None or sha256(stored.read_bytes()) != card:
                self.bad("feed-card", key, f"the card of {name}@v{n} is not what was announced")

    def snapshots(self) -> None:
        """See that snapshots unpack into JSON lines and stand for feed objects that exist."""
        for key in self.keys:
            match = SNAPSHOT.fullmatch(key)
            if not match:
                continue
            self.counts["snapshots"] += 1
            if SNAPSHOT_TOP - int(match[1]) > self.counts["feed"]:
                self.bad("snapshot-ahead", key, "it stands for a feed object that is not there")
            try:
                first, _, body = gzip.decompress(self.keys[key].read_bytes()).partition(b"\n")
                header, rows = strict(first), [strict(line) for line in body.splitlines()]
            except (OSError, EOFError, Damaged) as error:
                self.bad("snapshot-damaged", key, str(error))
                continue
            if header.get("sha256") != sha256(body) or header.get("rows") != len(rows):
                self.bad("snapshot-damaged", key, "its rows or their sha256 are not what its first line says")

    # -- what the caller knows

    def acknowledged(self, file: Path) -> None:
        """See that each version that was acknowledged, one JSON object a line, is committed with that content."""
        for line in file.read_text().splitlines():
            record = json.loads(line)
            key = (record["name"], record["n"])
            self.counts["acknowledged"] += 1
            if self.committed.get(key) != record["content"]:
                self.bad("acknowledged-lost", f"{key[0]}@v{key[1]}", f"now {self.committed.get(key)}")

    def closed(self) -> None:
        """See that every claim has ended, committed or void."""
        for name, claims in self.claims.items():
            for n in claims:
                if (name, n) not in self.committed and (name, n) not in self.void:
                    self.bad("claim-open", f"{name}@v{n}", "nobody finished it")

    def swept(self, seconds: float) -> None:
        """See that no leftover is so old."""
        now = time.time()
        for key in self.leftovers:
            age = now - (self.root / key).lstat().st_mtime
            if age >= seconds:
                self.bad("leftover", key, f"{age:.0f} s old")


def walk(folder: Path) -> Iterator[Path]:
    """Yield everything under a folder that is no folder."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            yield from walk(path)
        else:
            yield path


def main() -> int:
    """Check what the command line names and print the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("remote", type=Path)
    parser.add_argument("--ack", type=Path, help="JSON lines {name, n, content} of acknowledged versions")
    parser.add_argument("--closed", action="store_true", help="open claims are violations too")
    parser.add_argument("--swept", type=float, metavar="SECONDS", help="leftovers of this age or more are violations")
    parser.add_argument("--contents", type=int, help="exactly so many committed versions must be there")
    options = parser.parse_args()
    check = Check(options.remote)
    for part in (check.list, check.marker, check.read_claims, check.marks, check.decisions, check.tags, check.feed):
        part()
    check.snapshots()
    if options.ack and options.ack.exists():
        check.acknowledged(options.ack)
    if options.closed:
        check.closed()
    if options.swept is not None:
        check.swept(options.swept)
    if options.contents is not None and len(check.committed) != options.contents:
        check.bad("count", "committed versions", f"{len(check.committed)}, not {options.contents}")
    report = {
        "remote": str(options.remote),
        "counts": dict(check.counts),
        "claims": {f"{name}@v{n}": c.content for name, claims in check.claims.items() for n, c in claims.items()},
        "committed": {f"{name}@v{n}": content for (name, n), content in sorted(check.committed.items())},
        "leftovers": check.leftovers,
        "violations": [v._asdict() for v in check.violations],
    }
    print(json.dumps(report, indent=1))
    return 1 if check.violations else 0


if __name__ == "__main__":
    sys.exit(main())
