"""What only the parts of weights can tell, found while their bytes pass: a rank's part that holds nothing but zeros.

One witness goes with all files of one bundle; two of them may be written at the same time. It reads nothing itself. NaN
and infinities are for whoever sees the file that is made (`sift`); `look` counts them where none is made.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from weighbridge.adapters import values
from weighbridge.adapters.items import Item
from weighbridge.adapters.origins import InStretches, part_of, stream
from weighbridge.adapters.whole import some
from weighbridge.registry import errors, findings
from weighbridge.registry.types import Finding


class Witness:
    """Counts over the tensors of a bundle that is being made."""

    def __init__(self, subject: str, names: Iterable[str], *, allowed: Mapping[str, str] | None = None) -> None:
        """`subject` names what the weights come from, `names` all tensors; `allowed` gives why a code may pass."""
        self._subject = subject
        self._left = set(names)
        self._allowed = dict(allowed or {})
        self._lock = threading.Lock()
        self._nan: dict[str, int] = {}
        self._inf: dict[str, int] = {}
        self._ranks: dict[str, bool] = {}
        """Rank file -> whether anything but zeros was seen in it."""

    def passing(self, item: Item) -> Iterator[bytes]:
        """Yield a tensor's bytes and take note of them. Raises OSError, FormatFault."""
        alive: dict[str, bool] = {}
        if isinstance(item.origin, InStretches):
            for stretch in item.origin.stretches:
                for part in part_of(stretch):
                    alive[stretch.path] = alive.get(stretch.path, False) or bool(part.lstrip(b"\0"))
                    yield part
        else:
            yield from stream(item.origin)
        with self._lock:
            self._left.discard(item.name)
            for path, seen in alive.items():
                self._ranks[path] = self._ranks.get(path, False) or seen

    def count(self, name: str, nan: int, inf: int) -> None:
        """Take note of how many NaN and infinities a tensor holds."""
        with self._lock:
            if nan:
                self._nan[name] = nan
            if inf:
                self._inf[name] = inf

    def findings(self) -> list[Finding]:
        """Return what was found so far; a rank's part is judged only when every tensor has passed.

        What a person has allowed is a warning that says so.
        """
        with self._lock:
            found = values.broken(self._subject, dict(self._nan), dict(self._inf))
            empty = sorted(path.rpartition("/")[2] for path, seen in self._ranks.items() if not seen)
            if not self._left and empty and len(empty) < len(self._ranks):
                found.append(_empty(empty, len(self._ranks)))
        return [self._softened(one) for one in found]

    def _softened(self, one: Finding) -> Finding:
        if one.severity != "block" or one.code not in self._allowed or not findings.may_be_allowed(one.code):
            return one
        return msgspec.structs.replace(one, severity="warn", data={**one.data, "allowed": self._allowed[one.code]})

    def stop(self) -> None:
        """Raise RefusedError where a finding forbids to publish."""
        blocking = [f for f in self.findings() if f.severity == "block"]
        if blocking:
            raise errors.RefusedError(
                f"the weights of {self._subject} cannot be published",
                why=blocking[0].message,
                fix=blocking[0].fix,
                findings=blocking,
            )


def look(items: Iterable[Item], witness: Witness) -> None:
    """Read tensors for their values alone. Raises OSError, FormatFault."""
    for item in items:
        nan = inf = 0
        for part in witness.passing(item):
            more = values.special(item.stored, part)
            nan, inf = nan + more[0], inf + more[1]
        witness.count(item.name, nan, inf)


def _empty(files: list[str], count: int) -> Finding:
    return findings.finding(
        "rank-part-zero",
        files[0],
        f"{some(files)} of {count} rank files {'holds' if len(files) == 1 else 'hold'} nothing but zeros where weights "
        "should be: the rank's part was never filled",
        "save again with all ranks; publish an earlier checkpoint",
        empty_files=files,
    )
