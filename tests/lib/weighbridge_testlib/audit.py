"""What must be true of a remote at any instant, however many publishers died: read with json and hashlib alone."""

import hashlib
import json
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from weighbridge.registry.remotes.protocol import Remote
from weighbridge.registry.types import Receipt

_CLAIM = re.compile(r"models/([^/]+)/_wb/claims/(\d{8})\.json")
_FILE = re.compile(r"models/([^/]+)/v(\d+)/(.+)")
_RENDERED = {"README.md", "training.json", "manifest.json", "manifest.dsse.json"}


class State(NamedTuple):
    """What stands on a remote: (name, n) -> content of the committed, and those given up, open and withdrawn."""

    committed: dict[tuple[str, int], str]
    void: set[tuple[str, int]]
    open: set[tuple[str, int]]
    withdrawn: set[tuple[str, int]]


def audit(remote: Remote, acknowledged: Iterable[Receipt] = ()) -> State:
    """Assert that nothing visible is wrong, doubled or lost, and return what stands there."""
    keys = [found.key for found in remote.list("")]
    objects = {key: remote.read(key) for key in keys}
    state = State({}, set(), set(), set())
    claims = _claims(objects)
    contents: dict[tuple[str, str], int] = {}
    for (name, n), claim in sorted(claims.items()):
        decision = objects.get(f"models/{name}/v{n}/manifest.json")
        if f"models/{name}/_wb/withdrawn/{n:08d}.json" in objects:
            state.withdrawn.add((name, n))
        if decision is None:
            state.open.add((name, n))
        elif decision == claim["manifest"].encode():
            state.committed[name, n] = claim["content"]
        else:
            assert set(json.loads(decision)) == {"void", "by"}, f"{name}@v{n}: a decision that is neither"
            state.void.add((name, n))
            continue
        if (name, n) not in state.withdrawn:
            other = contents.setdefault((name, claim["content"]), n)
            assert other == n, f"{name}: v{other} and v{n} have one content"
    for key, body in objects.items():
        match = _FILE.fullmatch(key)
        if match and match[1] != "_wb" and match[3] not in _RENDERED:
            listed = {f["path"]: f for f in json.loads(claims[match[1], int(match[2])]["manifest"])["files"]}
            assert match[3] in listed, f"{key} is in no manifest"
            assert listed[match[3]]["sha256"] == hashlib.sha256(body).hexdigest(), f"{key} is damaged"
    for name, n in state.committed:
        wanted = {f["path"] for f in json.loads(claims[name, n]["manifest"])["files"]} | {"README.md"}
        there = {key.removeprefix(f"models/{name}/v{n}/") for key in objects if key.startswith(f"models/{name}/v{n}/")}
        assert wanted <= there or (name, n) in state.withdrawn, f"{name}@v{n} lacks {wanted - there}"
    _feed(objects, state)
    for receipt in acknowledged:
        assert state.committed.get((receipt.name, receipt.n)) == receipt.content, f"lost: {receipt.name}@v{receipt.n}"
    return state


def _claims(objects: dict[str, bytes]) -> dict[tuple[str, int], dict[str, Any]]:
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for key in sorted(objects):
        match = _CLAIM.fullmatch(key)
        if match:
            name, n = match[1], int(match[2])
            claim = json.loads(objects[key])
            assert (claim["name"], claim["n"]) == (name, n)
            before = objects.get(f"models/{name}/_wb/claims/{n - 1:08d}.json")
            assert claim["prev"] == (hashlib.sha256(before).hexdigest() if before else None), f"{key}: the chain"
            assert n == 1 or before is not None, f"{key}: not dense"
            found[name, n] = claim
    folded = {name.casefold(): name for name, _ in found}
    assert all(folded[name.casefold()] == name for name, _ in found), "two spellings of one name"
    return found


def _feed(objects: dict[str, bytes], state: State) -> None:
    numbers = [int(key[len("catalog/feed/") : -5]) for key in sorted(objects) if key.startswith("catalog/feed/")]
    assert numbers == list(range(1, len(numbers) + 1)), "the feed has a hole"
    told = set()
    for seq in numbers:
        for entry in json.loads(objects[f"catalog/feed/{seq:012d}.json"])["entries"]:
            told.add((entry["type"], entry["name"], entry.get("n")))
            assert hashlib.sha256(objects[entry["source"]]).hexdigest() == entry["sha256"], f"{entry['source']}: feed"
    for name, n in state.committed:
        assert ("claim", name, n) in told, f"{name}@v{n} is committed and its claim was never announced"
