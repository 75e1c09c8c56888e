"""Listings in the order of keys, whichever order a server has.

Servers that keep folders inside list `b/c` before `b-c`, because `b` comes before `b-c`; S3 and our contract go by the
bytes of the whole key. Both orders agree on everything below one first segment and what begins with it, so that much
is held back and sorted; the keys of a flat folder pass at once.
"""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from weighbridge.registry.errors import IntegrityError
from weighbridge.registry.refs import shown
from weighbridge.registry.remotes.protocol import Stat

T = TypeVar("T")


def by_key(found: Iterable[Stat], base: str) -> Iterator[Stat]:
    """Yield what a server lists below the folder `base` in the order of the bytes of the keys.

    Raises IntegrityError where even that cannot be made of it: the catalogue relies on order.
    """
    last = b""
    for stat in _grouped(found, len(base)):
        place = stat.key.encode()
        if place <= last:
            raise IntegrityError(
                "the store lists its objects in no order",
                why=f"{shown(stat.key)} comes after {shown(last.decode())}",
                fix="use a bucket that lists in the order of keys (directory buckets do not)",
            )
        last = place
        yield stat


def _grouped(found: Iterable[Stat], skip: int) -> Iterator[Stat]:
    held: list[Stat] = []
    root: str | None = None
    for stat in found:
        first, nested, _ = stat.key[skip:].partition("/")
        if root is not None and not first.startswith(root):
            yield from _sorted(held)
            held, root = [], None
        if root is None and nested:
            root = first
        if root is None:
            yield stat
        else:
            held.append(stat)
    yield from _sorted(held)


def _sorted(held: list[Stat]) -> list[Stat]:
    return sorted(held, key=lambda stat: stat.key.encode())
