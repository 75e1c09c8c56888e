"""Looking at uploads in parts that nobody completed: what lies there, is paid for, and is in no listing."""

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from weighbridge.registry import errors, layout
from weighbridge.registry.refs import shown
from weighbridge.registry.remotes.s3 import multipart
from weighbridge.registry.remotes.s3.client import Connection
from weighbridge.registry.remotes.s3.probe import FOLDER

_TRIES: Final = 3


class Upload(NamedTuple):
    """An upload by the store's key and id, and the bytes of its parts."""

    key: str
    id: str
    bytes: int


def unfinished(link: Connection, before: float) -> Iterator[Upload]:
    """Yield each upload to which no part came since then, in seconds since 1970 by the store's clock.

    A large file is under way for longer than any age, and each part of it is young. What ends meanwhile is no leftover,
    nor is what others send to a bucket that is not ours alone: files of versions count, and what a probe sent.
    """
    for upload in list(multipart.uploads(link, "")):
        key = str(upload["Key"]).removeprefix(link.place.prefix)
        if upload["Initiated"].timestamp() > before or not (layout.is_in_version(key) or key.startswith(FOLDER)):
            continue
        try:
            parts = list(_parts(link, upload["Key"], upload["UploadId"]))
        except errors.MissingError:
            continue
        except errors.RetryableError as error:
            if error.data.get("kind") != "gone":
                raise
            continue
        if all(part.get("LastModified", upload["Initiated"]).timestamp() <= before for part in parts):
            yield Upload(upload["Key"], upload["UploadId"], sum(int(part.get("Size", 0)) for part in parts))


def give_up(link: Connection, upload: Upload) -> bool:
    """End an upload, so that its parts go; return whether it was still there."""
    what = f"cannot give up an unfinished upload of {shown(link.place.url)}"
    try:
        link.ask("abort_multipart_upload", what, tries=_TRIES, Key=upload.key, UploadId=upload.id)
    except (errors.MissingError, errors.RetryableError):  # somebody else was faster
        return False
    return True


def _parts(link: Connection, key: str, upload: str) -> Iterator[Mapping[str, Any]]:
    at: dict[str, Any] = {}
    while True:
        what = f"cannot list the parts of an unfinished upload of {shown(link.place.url)}"
        answer = link.ask("list_parts", what, tries=_TRIES, Key=key, UploadId=upload, **at)
        parts = answer.get("Parts", [])
        yield from parts
        if not answer.get("IsTruncated") or not parts:
            return
        at = {"PartNumberMarker": int(parts[-1]["PartNumber"])}
