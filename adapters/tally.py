"""What the values of weights are, found while their bytes pass: NaN, infinities, a rank's part that holds only zeros.

One tally goes with all files of one bundle; two of them may be written at the same time. It reads nothing itself.
"""

import threading
from collections.abc import Iterable, Iterator

from weighbridge.adapters import values
from weighbridge.adapters.items import Item
from weighbridge.adapters.origins import InStretches, part_of, stream
from weighbridge.adapters.whole import some
from weighbridge.registry import errors, findings
from weighbridge.registry.types import Finding


class Tally:
    """Counts over the tensors of a bundle that is being made."""

    def __init__(self, subject: str, names: Iterable[str], *, allowed: Iterable[str] = ()) -> None:
        """`subject` names what the weights come from, `names` all tensors; codes in `allowed` are no reason to stop."""
        self._subject = subject
        self._left = set(names)
        self._allowed = frozenset(allowed)
        self._lock = threading.Lock()
        self._nan: dict[str, int] = {}
        self._inf: dict[str, int] = {}
        self._ranks: dict[str, bool] = {}
        """Rank file -> whether anything but zeros was seen in it."""

    def passing(self, item: Item) -> Iterator[bytes]:
        """Yield a tensor's bytes and take note of them. Raises OSError, FormatFault."""
        nan = inf = 0
        if isinstance(item.origin, InStretches):
            alive: dict[str, bool] = {}
            for stretch in item.origin.stretches:
                for part in part_of(stretch):
                    more = values.special(item.stored, part)
                    nan, inf = nan + more[0], inf + more[1]
                    alive[stretch.path] = alive.get(stretch.path, False) or bool(part.lstrip(b"\0"))
                    yield part
        else:
            alive = {}
            for part in stream(item.origin):
                more = values.special(item.stored, part)
                nan, inf = nan + more[0], inf + more[1]
                yield part
        with self._lock:
            self._left.discard(item.name)
            if nan:
                self._nan[item.name] = nan
            if inf:
                self._inf[item.name] = inf
            for path, seen in alive.items():
                self._ranks[path] = self._ranks.get(path, False) or seen

    def findings(self) -> list[Finding]:
        """Return what was found so far; a rank's part is judged only when every tensor has passed."""
        with self._lock:
            found = values.broken(self._subject, dict(self._nan), dict(self._inf))
            empty = sorted(path.rpartition("/")[2] for path, seen in self._ranks.items() if not seen)
            if not self._left and empty and len(empty) < len(self._ranks):
                found.append(_empty(empty, len(self._ranks)))
        return found

    def stop(self) -> None:
        """Raise RefusedError where a finding forbids to publish."""
        blocking = [f for f in self.findings() if f.severity == "block" and f.code not in self._allowed]
        if blocking:
            raise errors.RefusedError(
                f"the weights of {self._subject} cannot be published",
                why=blocking[0].message,
                fix=blocking[0].fix,
                findings=blocking,
            )


def look(items: Iterable[Item], tally: Tally) -> None:
    """Read tensors for their values alone. Raises OSError, FormatFault."""
    for item in items:
        for _ in tally.passing(item):
            pass


def _empty(files: list[str], count: int) -> Finding:
    return findings.finding(
        "rank-part-zero",
        files[0],
        f"{some(files)} of {count} rank files {'holds' if len(files) == 1 else 'hold'} nothing but zeros where weights "
        "should be: the rank's part was never filled",
        "save again with all ranks; publish an earlier checkpoint",
        empty_files=files,
    )
