"""The child process that uploads and commits: `python -m weighbridge.registry.remotes.hub.send`.

The library's upload can hang for an hour, and its Rust part cannot be interrupted; a process can be ended. It is told
what to do in JSON lines on its standard input and answers in JSON lines; when its input ends, so does it. The token
comes that way too: neither the command line nor the environment shows it.
"""

import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants
from huggingface_hub.utils import tqdm

from weighbridge import __version__
from weighbridge.registry import errors
from weighbridge.registry.hashing import CHUNK
from weighbridge.registry.remotes.hub import client
from weighbridge.registry.remotes.hub.errors import translate

GROUP: Final = 64 << 20
"""Bytes after which what was sent is confirmed, so that a kill costs no more than that."""

INSIDE: Final = 16 << 20
"""Bytes up to which a file may lie inside a commit instead of being an object of its own."""

_EVERY: Final = 0.2
_THREADS: Final = 4


class Sender:
    """The operations of one repository, sent and committed."""

    def __init__(self, order: dict[str, Any], say: Callable[[dict[str, Any]], None], alive: Callable[[], None]) -> None:
        self._repo = order["repo"]
        self._alive = alive
        # By xet files are hashed while they are sent; LFS has to know the hash before.
        self._hash_first = order["transport"] == "lfs"
        constants.HF_HUB_DISABLE_XET = self._hash_first
        self._say = say
        self._api = HfApi(
            endpoint=order["endpoint"],
            token=order["token"] or False,
            library_name="weighbridge",
            library_version=__version__,
        )
        self._sent: dict[str, tuple[CommitOperationAdd, str]] = {}

    def send(self, order: dict[str, Any]) -> dict[str, Any]:
        """Upload files, in groups; each is compared with its record before the next group begins."""
        group: list[tuple[CommitOperationAdd, str]] = []
        size = 0
        for path, source, expected, sha256 in order["files"]:
            found = os.stat(source).st_size  # noqa: PTH116 - text all the way
            if found != expected:
                raise _damaged(path, f"it has {found} bytes, its record says {expected}")
            one = CommitOperationAdd(path_in_repo=path, path_or_fileobj=source)
            if self._hash_first:
                one.upload_info.sha256 = bytes.fromhex(self._hashed(path, source, sha256))
            group.append((one, sha256))
            size += expected
            if size >= GROUP:
                self._send_group(group, order["base"])
                group, size = [], 0
        if group:
            self._send_group(group, order["base"])
        return {}

    def _hashed(self, path: str, source: str, expected: str) -> str:
        """Return the sha256 of a file, reporting on the way: the library would hash it without a word."""
        digest = hashlib.sha256()
        with open(source, "rb", buffering=0) as stream:  # noqa: PTH123 - text all the way
            while chunk := stream.read(CHUNK):
                digest.update(chunk)
                self._alive()
        if digest.hexdigest() != expected:
            raise _damaged(path, f"its sha256 is {digest.hexdigest()[:12]}")
        return expected

    def _send_group(self, group: list[tuple[CommitOperationAdd, str]], base: str) -> None:
        self._api.preupload_lfs_files(
            self._repo, [one for one, _ in group], num_threads=_THREADS, free_memory=False, revision="main"
        )
        for one, sha256 in group:
            # The library hashed what it read while sending; what goes inside the commit is hashed here.
            if one.upload_info.sha256.hex() != sha256:
                raise _damaged(one.path_in_repo, f"its sha256 is {one.upload_info.sha256.hex()[:12]}")
            self._sent[one.path_in_repo] = (one, base)
        self._say({"sent": [one.path_in_repo for one, _ in group]})

    def commit(self, order: dict[str, Any]) -> dict[str, Any]:
        """Make the one guarded commit."""
        operations: list[Any] = [self._addition(path, order["parent"]) for path in order["files"]]
        operations += [
            CommitOperationAdd(path_in_repo=path, path_or_fileobj=bytes.fromhex(body))
            for path, body in order["small"].items()
        ]
        operations += [CommitOperationDelete(path_in_repo=path, is_folder=False) for path in order["delete"]]
        made = self._api.create_commit(
            self._repo,
            operations,
            commit_message=order["title"],
            commit_description=order["message"],
            parent_commit=order["parent"],
            revision=order["branch"],
            num_threads=_THREADS,
        )
        return {"commit": made.oid}

    def _addition(self, path: str, parent: str) -> CommitOperationAdd:
        """Return the operation that adds a file.

        The library leaves out what was the same when it was sent. On top of another commit that need not be so; for
        files that may lie inside the commit it is asked again, stored objects are compared by us.
        """
        one, base = self._sent[path]
        if base != parent and one.upload_info.size <= INSIDE:
            one = CommitOperationAdd(path_in_repo=path, path_or_fileobj=one.path_or_fileobj)
        return one


def _damaged(path: str, why: str) -> errors.StageDamagedError:
    return errors.StageDamagedError(
        f"the staged copy of {path} is not what was hashed", why=why, fix="stage it again; look at the disk"
    )


class _Counter:
    """Counts the bytes that the library reports to its progress bars, and tells them now and then."""

    def __init__(self, say: Callable[[dict[str, Any]], None]) -> None:
        self._say = say
        self._moved = 0.0
        self._told = 0.0
        self._lock = threading.Lock()

    def attach(self) -> None:
        """Listen to every progress bar of the library."""
        counter = self
        plain = tqdm.update

        def update(bar: Any, n: float | None = 1) -> Any:
            counter.moved(n or 0)
            return plain(bar, n)

        tqdm.update = update

    def moved(self, count: float = 0) -> None:
        """Take note of bytes, or of none: anything shows that it is alive."""
        now = time.monotonic()
        with self._lock:
            self._moved += count
            if now - self._told < _EVERY:
                return
            self._told = now
            moved, self._moved = self._moved, 0.0
        self._say({"moved": int(moved)})


def main() -> None:
    """Carry out orders until there are no more."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever the library prints is no answer
    lock = threading.Lock()

    def say(line: dict[str, Any]) -> None:
        with lock:
            out.write(json.dumps(line, default=str) + "\n")
            out.flush()

    orders: Any = iter(sys.stdin.readline, "")
    first = json.loads(next(orders))
    patience = client.Patience(*first["patience"])
    client.install(patience._replace(answer=patience.commit))
    counter = _Counter(say)
    counter.attach()
    sender = Sender(first, say, counter.moved)
    waiting: list[dict[str, Any]] = []
    there = threading.Condition()

    def listen() -> None:
        for line in orders:
            with there:
                waiting.append(json.loads(line))
                there.notify()
        os._exit(0)  # whoever started us is gone, and nothing of ours may go on

    threading.Thread(target=listen, daemon=True).start()
    say({"ready": True})
    while True:
        with there:
            while not waiting:
                there.wait()
            order = waiting.pop(0)
        act = {"send": sender.send, "commit": sender.commit}[order["do"]]
        try:
            say({"done": act(order)})
        except Exception as error:  # noqa: BLE001 - told to whoever started us
            found = error if isinstance(error, errors.WeighbridgeError) else None
            found = found or translate(error, order["what"], writes=order["do"] == "commit")
            say({"error": errors.describe(found), "kind": type(found).__name__})


if __name__ == "__main__":
    main()
