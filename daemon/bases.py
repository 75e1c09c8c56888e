"""Where the base of an adapter lies: what was recorded decides.

Looked for in this order: the folder the adapter itself names, the folders of `[merge] bases`, the Hub caches, the home
registry; and fetched from the Hub where the rule says so. A base whose content was recorded is that content or it is
another one. What an adapter names is written by whoever trained it: it is read only where the configuration already
lets us read, and a folder that has the last part of a name alone is not taken for a model that it says it is not.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from weighbridge.adapters import layout, license  # noqa: A004 - the module is about licences
from weighbridge.daemon.homes import Home
from weighbridge.registry import errors
from weighbridge.registry.flow.pull import pull
from weighbridge.registry.hub_rules import is_repo_id
from weighbridge.registry.refs import shown
from weighbridge.registry.types import BaseFacts

CONFIG: Final = "adapter_config.json"


class Found(NamedTuple):
    """A base at hand; `ref` and `content` are those of a published version, None for a folder of somebody's."""

    path: Path
    ref: str | None = None
    content: str | None = None


Fetch = Callable[[str, str | None], Path]
"""Gets a model of the Hub, by its id and revision, into a folder."""


class Wanted(NamedTuple):
    """What is known of a base: id and revision, content where it was recorded, and the path the adapter was made on."""

    id: str | None
    revision: str | None = None
    content: str | None = None
    path: str | None = None

    @property
    def words(self) -> str:
        """How people are told of it."""
        name = self.id or self.path or self.content or "unknown"
        return f"{name} at {self.revision}" if self.revision and self.id else name


def wanted(facts: BaseFacts, *folders: Path) -> Wanted:
    """Return what is known of an adapter's base from its manifest and, for paths, from its own config."""
    for folder in folders:
        named = _document(folder / CONFIG).get("base_model_name_or_path")
        if isinstance(named, str) and named.startswith("/"):
            return Wanted(facts.id if facts.id != named else None, facts.revision, facts.content, named)
    return Wanted(facts.id, facts.revision, facts.content)


def find(
    want: Wanted,
    home: Home,
    *,
    folders: Sequence[Path],
    caches: Sequence[Path],
    scratch: Path,
    roots: Sequence[Path] = (),
    moved: Callable[[int], None] = lambda _count: None,
    fetch: Fetch | None = None,
) -> Found:
    """Return the base; one that is only in the registry is pulled into `scratch`, `fetch` gets it from the Hub.

    `folders` are those of `[merge] bases`, `roots` the watched ones: a path that the adapter names must lie in one of
    them or in a Hub cache.

    Raises NotFinishedError that names the base and what to do, RefusedError where no base is named, and what a pull
    and `fetch` raise.
    """
    if want.id is None and want.path is None and want.content is None:
        raise _nameless()
    outside = want.path is not None and not _below(want.path, (*folders, *caches, *roots))
    if want.path is not None and not outside and Path(want.path, layout.MODEL_CONFIG).is_file():
        return Found(Path(want.path))
    identity, others = want.id or "", []
    if is_repo_id(identity):
        for folder in folders:
            whole, last = folder / identity, folder / identity.rpartition("/")[2]
            if "/" in identity and (whole / layout.MODEL_CONFIG).is_file():
                return Found(whole)
            told = _stated(last)
            if told is not None and not _same(told, identity):
                others.append(f"{last} says it is {shown(told)}")
            elif (last / layout.MODEL_CONFIG).is_file():
                return Found(last)
        cached = license.cache_folder(identity, want.revision, caches)
        if cached is not None:
            return Found(cached)
    row = _published(want, home)
    if row is not None:
        name, n = str(row["name"]), int(row["n"])
        place = scratch / "bases" / home.name / f"{name}@v{n}"
        pull(
            home.remote, name, n, place, force=True, manifest_sha256=row["manifest"], card_sha256=row["card"],
            progress=lambda _path, count: moved(count),
        )  # fmt: skip
        return Found(place, f"{name}@v{n}", str(row["content"]))
    if fetch is not None and "/" in identity and is_repo_id(identity):
        return Found(fetch(identity, want.revision))
    if outside:
        raise _outside(want)
    raise _missing(want, [*folders, *caches], others)


def _published(want: Wanted, home: Home) -> dict[str, Any] | None:
    """Return the version of the home registry that is this base: of its content, else of its name."""
    if want.content:
        rows = home.catalog.by_content(want.content.removeprefix("sha256:"))
        return next((dict(row) for row in rows if row["state"] == "committed"), None)
    if want.id and "/" not in want.id and "@" in want.id:
        try:
            row = home.catalog.find(want.id)
        except errors.UsageError:
            return None
        return dict(row) if row is not None else None
    return None


def _below(path: str, places: Sequence[Path]) -> bool:
    real = Path(os.path.realpath(path))
    return any(real.is_relative_to(os.path.realpath(place)) for place in places)


def _stated(folder: Path) -> str | None:
    """Return the `owner/model` that a model's own config says it was loaded as, None where it says none."""
    told = _document(folder / layout.MODEL_CONFIG).get("_name_or_path")
    return told if isinstance(told, str) and "/" in told and is_repo_id(told) else None


def _same(told: str, identity: str) -> bool:
    """Tell whether two names may mean the same model; one without an owner leaves the owner open."""
    return identity.casefold() in {told.casefold(), told.rpartition("/")[2].casefold()}


def _outside(want: Wanted) -> errors.NotFinishedError:
    return errors.NotFinishedError(
        f"the base {shown(want.path or '')} is not read",
        why="the adapter names it, and it lies outside [merge] bases, the Hub caches and the watched folders",
        fix="name a folder above it in [merge] bases, if it is the right one",
        base=want.id or want.path,
        revision=want.revision,
    )


def _nameless() -> errors.RefusedError:
    """Return the refusal of an adapter that names no base: however long we wait, a published version says no more."""
    return errors.RefusedError(
        "the adapter does not say which base it belongs to",
        why="neither its config nor its card nor weighbridge.yaml names one, and a published version does not change",
        fix="merge it by hand with registry merge --base; for the next version write 'base' into the run's "
        "weighbridge.yaml",
    )


def _missing(want: Wanted, folders: Sequence[Path], others: Sequence[str]) -> errors.NotFinishedError:
    places = [str(folder) for folder in folders]
    get = f"hf download {want.id}" + (f" --revision {want.revision}" if want.revision else "")
    fix = f"{get}, or name a folder that holds it in [merge] bases" if is_repo_id(want.id) else (
        "put it there, or name a folder that holds it in [merge] bases"
    )  # fmt: skip
    return errors.NotFinishedError(
        f"the base {shown(want.words)} is not here",
        why="; ".join(
            [
                f"looked in {', '.join(places) or 'no folder'} and in the registry",
                *others,
                "nothing is fetched by itself unless the rule says merge_fetch = true",
            ]
        ),
        fix=f"{fix}; it is looked for again every few minutes",
        base=want.id or want.path,
        revision=want.revision,
    )


def _document(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
