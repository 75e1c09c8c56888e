"""Listings come in the order of keys, whichever order a server has."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge.registry import errors
from weighbridge.registry.remotes.protocol import Stat
from weighbridge.registry.remotes.s3.order import by_key

SEGMENT = st.text(alphabet="ab-.0é", min_size=1, max_size=3)
SETS = st.sets(st.lists(SEGMENT, min_size=1, max_size=4).map("/".join), max_size=40)


def stats(keys: list[str]) -> list[Stat]:
    """Return listed objects of these keys."""
    return [Stat(key, 0, None, 0.0) for key in keys]


@given(SETS, st.sampled_from(["", "models/", "p/q/"]))
def test_every_order_of_servers_becomes_the_order_of_keys(relative: set[str], base: str) -> None:
    """A server that goes by whole keys and one that goes folder by folder give the same listing."""
    keys = [f"{base}{key}" for key in relative]
    by_bytes = sorted(keys, key=str.encode)
    by_folder = sorted(keys, key=lambda key: [part.encode() for part in key.split("/")])
    assert [stat.key for stat in by_key(stats(by_bytes), base)] == by_bytes
    assert [stat.key for stat in by_key(stats(by_folder), base)] == by_bytes


def test_a_flat_folder_is_not_held_back() -> None:
    """The keys of one folder pass as they come, so that a listing of a hundred thousand needs no memory."""
    taken = []

    def server() -> object:
        for number in range(1000):
            taken.append(number)
            yield Stat(f"catalog/feed/{number:012d}.json", 0, None, 0.0)

    found = by_key(server(), "catalog/feed/")  # type: ignore[arg-type]
    next(found)
    assert len(taken) == 1


@pytest.mark.parametrize("keys", [["b", "a"], ["a", "a"], ["a/x", "b/x", "a/y"]])
def test_a_server_without_order_is_refused(keys: list[str]) -> None:
    """A listing that can not be put in order is an error, never a listing with holes."""
    with pytest.raises(errors.IntegrityError, match="no order"):
        list(by_key(stats(keys), ""))
