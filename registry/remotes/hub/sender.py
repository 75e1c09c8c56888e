"""The operations of one publication through the library: files are uploaded in groups, then committed at once."""

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

from weighbridge.registry import errors
from weighbridge.registry.hashing import CHUNK
from weighbridge.registry.remotes.commits import Change
from weighbridge.registry.remotes.hub.child import GROUP

INSIDE: Final = 16 << 20
"""Bytes up to which a file may lie inside a commit instead of being an object of its own."""

THREADS: Final = 4
"""Files of a group that are sent at the same time."""


class Sender:
    """The operations of one repository, sent and committed."""

    def __init__(
        self, repo: str, api: HfApi, *, xet: bool, alive: Callable[[], None], sent: Callable[[list[str]], None]
    ) -> None:
        """Take the repository; `alive` is called now and then, `sent` with the files that the Hub has confirmed."""
        self._repo = repo
        self._api = api
        self._xet = xet
        self._alive = alive
        self._tell = sent
        self._sent: dict[str, tuple[CommitOperationAdd, str]] = {}

    def send(self, files: Iterable[Sequence[Any]], base: str) -> None:
        """Upload files (path, source, size, sha256), in groups; each is compared with its record before the next.

        Raises StageDamagedError, and the library's errors.
        """
        group: list[tuple[CommitOperationAdd, str]] = []
        size = 0
        for path, source, expected, sha256 in files:
            found = os.stat(source).st_size  # noqa: PTH116 - text all the way
            if found != expected:
                raise _damaged(path, f"it has {found} bytes, its record says {expected}")
            one = CommitOperationAdd(path_in_repo=path, path_or_fileobj=source)
            if not self._xet:  # by xet a file is hashed while it is sent; LFS has to know its hash before
                one.upload_info.sha256 = bytes.fromhex(self._hashed(path, source, sha256))
            group.append((one, sha256))
            size += expected
            if size >= GROUP:
                self._send_group(group, base)
                group, size = [], 0
        if group:
            self._send_group(group, base)

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
            self._repo, [one for one, _ in group], num_threads=THREADS, free_memory=False, revision="main"
        )
        for one, sha256 in group:
            # The library hashed what it read while sending; what goes inside the commit is hashed here.
            if one.upload_info.sha256.hex() != sha256:
                raise _damaged(one.path_in_repo, f"its sha256 is {one.upload_info.sha256.hex()[:12]}")
            self._sent[one.path_in_repo] = (one, base)
        self._tell([one.path_in_repo for one, _ in group])

    def commit(self, change: Change) -> str:
        """Make the one guarded commit and return its id. Raises the library's errors."""
        operations: list[Any] = [self._addition(path, change.parent) for path in change.files]
        operations += [
            CommitOperationAdd(path_in_repo=path, path_or_fileobj=body) for path, body in change.small.items()
        ]
        operations += [CommitOperationDelete(path_in_repo=path, is_folder=False) for path in change.delete]
        made = self._api.create_commit(
            self._repo,
            operations,
            commit_message=change.title,
            commit_description=change.message,
            parent_commit=change.parent,
            revision=change.branch,
            num_threads=THREADS,
        )
        return str(made.oid)

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
