"""What is said beside versions, without who said it, for a mirror that keeps no name of a person or of a machine.

Moves of tags, withdrawals and notes tell a team on purpose who did it. A mirror with other readers has everything else
of them: the field `who` says that it was somebody. What lies there with a name since before is left as it is.
"""

from collections.abc import Iterator

from weighbridge.config.settings import RemoteSettings
from weighbridge.registry import types
from weighbridge.registry.flow import follow, once
from weighbridge.registry.flow.claims import NOBODY
from weighbridge.registry.flow.publish import UNTOLD
from weighbridge.registry.manifest import canonical, parse_json
from weighbridge.registry.remotes.protocol import Remote, Stat
from weighbridge.registry.remotes.wrappers import Wrapper

_SAID = ("/_wb/tags/", "/_wb/withdrawn/", "/_wb/notes/")


def beside(
    home: Remote,
    mirror: Remote,
    registry: types.Registry,
    name: str,
    *,
    settings: RemoteSettings,
    retold: float = UNTOLD,
) -> follow.Told:
    """Bring to a mirror of these `settings` what its home says of the versions there, as `follow.beside` does."""
    told_by = home if settings.paths == "keep" else _Unnamed(home, mirror)
    return follow.beside(told_by, mirror, registry, name, retold=retold)


class _Unnamed(Wrapper):
    """A home as such a mirror may know it: what lies there already and differs in `who` alone is given as it lies."""

    def __init__(self, home: Remote, mirror: Remote) -> None:
        super().__init__(home)
        self._mirror = mirror

    def read(self, key: str) -> bytes:
        """Return an object, without who said it. Raises IntegrityError when what somebody said is damaged."""
        stored = self.inner.read(key)
        if not _is_said(key):
            return stored
        body = _without_who(stored, key)
        theirs = once.look(self._mirror, key)
        return body if theirs is None or _without_who(theirs, key) != body else theirs

    def list(self, prefix: str, *, after: str | None = None, limit: int | None = None) -> Iterator[Stat]:
        """Yield the objects; what is said has the size that it has at the mirror, where it is there."""
        there = {stat.key: stat.size for stat in self._mirror.list(prefix, after=after)} if _is_said(prefix) else {}
        for stat in self.inner.list(prefix, after=after, limit=limit):
            yield stat._replace(size=there.get(stat.key, stat.size))


def _is_said(key: str) -> bool:
    return any(folder in key for folder in _SAID)


def _without_who(stored: bytes, key: str) -> bytes:
    document = parse_json(stored, key)
    return canonical(document | {"who": NOBODY}) if isinstance(document, dict) and "who" in document else stored
