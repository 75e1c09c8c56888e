"""Looking at uploads in parts that nobody completed: what lies there, is paid for, and is in no listing."""

from collections.abc import Iterator
from typing import Any

from weighbridge.registry.refs import shown
from weighbridge.registry.remotes.s3 import multipart
from weighbridge.registry.remotes.s3.client import Connection


def unfinished(link: Connection, before: float) -> Iterator[int]:
    """Yield the bytes of each upload that was begun before then, in seconds since 1970 by the store's clock."""
    for upload in multipart.uploads(link, ""):
        if upload["Initiated"].timestamp() <= before:
            yield sum(_sizes(link, upload["Key"], upload["UploadId"]))


def _sizes(link: Connection, key: str, upload: str) -> Iterator[int]:
    at: dict[str, Any] = {}
    while True:
        what = f"cannot list the parts of an unfinished upload of {shown(link.place.url)}"
        answer = link.ask("list_parts", what, tries=1, Key=key, UploadId=upload, **at)
        parts = answer.get("Parts", [])
        yield from (int(part["Size"]) for part in parts)
        if not answer.get("IsTruncated") or not parts:
            return
        at = {"PartNumberMarker": int(parts[-1]["PartNumber"])}
