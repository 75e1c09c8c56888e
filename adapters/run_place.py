"""Whether two runs are the same: the part of a run's identity that asks no disk."""

from typing import Final

PLACE: Final = 32
"""Hex digits of the part of an identity that stays when a folder is made anew."""


def same_place(one: str, other: str) -> bool:
    """Tell whether two identities are of the same place, whatever their starts; ids that people chose must be equal."""
    first, second = one.partition("-"), other.partition("-")
    if len(first[0]) == len(second[0]) == PLACE and first[1] and second[1]:
        return first[0] == second[0]
    return one == other
