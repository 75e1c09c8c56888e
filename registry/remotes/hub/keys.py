"""What a key of `layout.py` means on the Hub."""

import re
from typing import Final, Literal, NamedTuple

from weighbridge.registry import layout
from weighbridge.registry.refs import check_key, name_fault
from weighbridge.registry.remotes.ledger import SHARED

Kind = Literal["marker", "claim", "file", "shared", "nothing"]
_FILE: Final = re.compile(r"models/([^/]+)/v([1-9][0-9]{0,7})/(.+)")
_SHARED: Final = re.compile(r"models/([^/]+)/_wb/(.+)")


class Place(NamedTuple):
    """What a key stands for; `path` is the file in the tree, or the rest of a ledger object's key."""

    kind: Kind
    name: str = ""
    n: int = 0
    path: str = ""


def place_of(key: str) -> Place:
    """Return what a key stands for. Raises UsageError for one that is none."""
    check_key(key)
    if key == layout.MARKER:
        return Place("marker")
    claim = layout.claim_number(key)
    if claim is not None and name_fault(claim[0]) is None:
        return Place("claim", *claim)
    file = _FILE.fullmatch(key)
    if file and name_fault(file[1]) is None:
        return Place("file", file[1], int(file[2]), file[3])
    shared = _SHARED.fullmatch(key)
    if shared and name_fault(shared[1]) is None and shared[2].startswith(SHARED):
        return Place("shared", shared[1], 0, shared[2])
    return Place("nothing")
