"""Where every object of a remote lies (docs/formats.md); the only place that spells a key."""

import re
from typing import Final

from weighbridge.registry.refs import check_key, check_name, check_tag

MARKER: Final = "weighbridge.json"
FEED: Final = "catalog/feed/"
SNAPSHOTS: Final = "catalog/snap/"
MODELS: Final = "models/"
LAST: Final = 10**8 - 1
"""The last number of a version, of a move and of a note: their keys have eight digits."""
_SNAP_TOP: Final = 10**12 - 1
_FEED_KEY = re.compile(r"catalog/feed/([0-9]{12})\.json")
_CLAIM_KEY = re.compile(r"models/([^/]+)/_wb/claims/([0-9]{8})\.json")
_VERSION_KEY = re.compile(r"models/[^/]+/v[1-9][0-9]{0,7}/.+")
_SNAP_KEY = re.compile(r"catalog/snap/([0-9]{12})\.jsonl\.gz")


def claims(name: str) -> str:
    """Return the folder of a name's claims."""
    return f"{MODELS}{check_name(name)}/_wb/claims/"


def claim(name: str, n: int) -> str:
    """Return the key of claim n."""
    return f"{claims(name)}{n:08d}.json"


def claim_number(key: str) -> tuple[str, int] | None:
    """Return (name, n) of a claim's key, else None."""
    match = _CLAIM_KEY.fullmatch(key)
    return (match[1], int(match[2])) if match else None


def version(name: str, n: int, path: str = "") -> str:
    """Return the key of a version's file, or of its folder (ends with `/`)."""
    key = f"{MODELS}{check_name(name)}/v{n}/{path}"
    return check_key(key) if path else key


def is_in_version(key: str) -> bool:
    """Tell whether a key is that of a file of a version."""
    return _VERSION_KEY.fullmatch(key) is not None


def manifest(name: str, n: int) -> str:
    """Return the key of the decision."""
    return f"{MODELS}{check_name(name)}/v{n}/manifest.json"


def tags(name: str, tag: str = "") -> str:
    """Return the folder of a tag's moves, or of all tags."""
    root = f"{MODELS}{check_name(name)}/_wb/tags/"
    return f"{root}{check_tag(tag)}/" if tag else root


def tag(name: str, tag_name: str, seq: int) -> str:
    """Return the key of one move of a tag."""
    return f"{tags(name, tag_name)}{seq:08d}.json"


def withdrawn(name: str, n: int | None = None) -> str:
    """Return the key of a withdrawal, or the folder of all."""
    root = f"{MODELS}{check_name(name)}/_wb/withdrawn/"
    return root if n is None else f"{root}{n:08d}.json"


def notes(name: str, n: int, seq: int | None = None) -> str:
    """Return the key of a note on a version (licence override, people's card text), or the folder of all."""
    root = f"{MODELS}{check_name(name)}/_wb/notes/{n:08d}/"
    return root if seq is None else f"{root}{seq:08d}.json"


def stages(name: str) -> str:
    """Return the folder that holds what is not yet linked into place (directory remotes only)."""
    return f"{MODELS}{check_name(name)}/_wb/stage/"


def feed(seq: int) -> str:
    """Return the key of a feed object."""
    return f"{FEED}{seq:012d}.json"


def feed_number(key: str) -> int | None:
    """Return the sequence number of a feed object's key, else None."""
    match = _FEED_KEY.fullmatch(key)
    return int(match[1]) if match else None


def snapshot(seq: int) -> str:
    """Return the key of the snapshot that holds the state after feed object `seq`; the newest is listed first."""
    return f"{SNAPSHOTS}{_SNAP_TOP - seq:012d}.jsonl.gz"


def snapshot_number(key: str) -> int | None:
    """Return the feed sequence a snapshot stands for, else None."""
    match = _SNAP_KEY.fullmatch(key)
    return _SNAP_TOP - int(match[1]) if match else None
