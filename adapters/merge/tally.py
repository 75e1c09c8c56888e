"""How much of the intended change a stored tensor holds: elements that stayed, the angle between wish and result."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass
class Tally:
    """Counts over the blocks of one tensor that were looked at; `changed` holds for all of them."""

    elements: int = 0
    unchanged: int = 0
    both: float = 0.0
    applied: float = 0.0
    intended: float = 0.0
    changed: bool = False

    def add(self, before: Array, wanted: Array, after: Array) -> None:
        """Take in one block: the base's values, the exact ones, the stored ones; all in the arithmetic's dtype.

        The first two arrays are used up.
        """
        applied = np.subtract(after, before).ravel()
        intended = np.subtract(wanted, before, out=before).ravel()
        moved = int(np.count_nonzero(applied))
        self.elements += applied.size
        self.unchanged += applied.size - moved
        self.both += float(np.dot(applied, intended))
        self.applied += float(np.dot(applied, applied))
        self.intended += float(np.dot(intended, intended))
        self.changed = self.changed or moved > 0

    def join(self, other: "Tally") -> None:
        """Take in the counts of another tensor."""
        self.elements += other.elements
        self.unchanged += other.unchanged
        self.both += other.both
        self.applied += other.applied
        self.intended += other.intended
        self.changed = self.changed or other.changed

    @property
    def share(self) -> float | None:
        """The share of elements that stayed, None where none was looked at."""
        return self.unchanged / self.elements if self.elements else None

    @property
    def cosine(self) -> float | None:
        """The cosine of the applied and the intended change; 1 where none was intended, 0 where nothing came of it."""
        if not self.elements:
            return None
        if self.intended == 0.0:
            return 1.0
        return self.both / math.sqrt(self.applied * self.intended) if self.applied else 0.0

    def facts(self) -> dict[str, Any]:
        """Return the counts as JSON."""
        return {
            "elements": self.elements,
            "unchanged": self.unchanged,
            "both": self.both,
            "applied": self.applied,
            "intended": self.intended,
            "changed": self.changed,
        }
