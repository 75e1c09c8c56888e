"""The marker `weighbridge.json`: what makes a place a registry, and who may read and write it."""

import uuid
from typing import Final, Literal

import msgspec

from weighbridge.registry import layout, types
from weighbridge.registry.errors import IntegrityError, NoRegistryError, SplitWritersError, UsageError
from weighbridge.registry.flow import once
from weighbridge.registry.manifest import canonical, parse_json
from weighbridge.registry.refs import shown
from weighbridge.registry.remotes.protocol import Remote

FORMAT: Final = 1
"""The format that this version of weighbridge reads and writes."""


def open_registry(
    remote: Remote, *, create: bool, mode: Literal["shared", "single-writer"] = "shared", writer: str | None = None
) -> types.Registry:
    """Return the registry of a remote; `create` begins one where there is none. Of two that begin it, one does.

    Where the remote cannot refuse a taken key, the registry that begins belongs to `writer` alone. Raises
    NoRegistryError where there is none and `create` is False, UsageError when a newer format must be understood to read
    it or it cannot be shared, and IntegrityError when the marker is damaged.
    """
    stored = once.look(remote, layout.MARKER)
    if stored is None:
        if not create:
            raise NoRegistryError(
                f"there is no registry at {shown(remote.url)}",
                why=f"it holds no {layout.MARKER}",
                fix="correct the URL; the first push or copy to it begins a registry there",
                registry=remote.url,
            )
        if not remote.properties.conditional_create and writer is not None:
            mode = "single-writer"
        _check_shared(remote, mode)
        made = types.Registry(
            schema=types.SCHEMA_REGISTRY,
            registry=str(uuid.uuid4()),
            format=FORMAT,
            min_reader=FORMAT,
            min_writer=FORMAT,
            mode=mode,
            writer=writer if mode == "single-writer" else None,
        )
        document = {key: value for key, value in msgspec.to_builtins(made).items() if value is not None}
        begun = canonical(document)
        stored = once.create(remote, layout.MARKER, begun) or begun
    return _parse(stored, remote.url)


def check_writer(registry: types.Registry, remote: Remote | None = None, owner: types.Owner | None = None) -> None:
    """Raise UsageError when the registry may only be written by a newer version, or by nobody on such a remote.

    Raises SplitWritersError when it belongs to another writer than `owner`.
    """
    if registry.min_writer > FORMAT:
        raise _newer("write", registry.min_writer, registry.registry)
    if remote is not None:
        _check_shared(remote, registry.mode)
    if owner is not None and registry.mode == "single-writer" and registry.writer not in {None, owner.daemon}:
        raise SplitWritersError(
            "this registry has one writer, and it is another",
            why=f"it belongs to {shown(str(registry.writer))}, because its store cannot refuse a key that is taken",
            fix="publish from there, or into another remote",
            writer=registry.writer,
        )


def _check_shared(remote: Remote, mode: str) -> None:
    if mode == "shared" and not remote.properties.conditional_create:
        raise UsageError(
            f"{shown(remote.url)} cannot be shared",
            why="the store does not refuse a key that is taken, so two writers could overwrite each other",
            fix='use another store, or begin a registry of one writer there: writers = "one", then registry push',
        )


def _parse(stored: bytes, url: str) -> types.Registry:
    what = f"{layout.MARKER} of {url}"
    document = parse_json(stored, what)
    # A newer format may have fields of other types: its version is judged before its shape.
    minimum = document.get("min_reader") if isinstance(document, dict) else None
    if isinstance(minimum, int) and minimum > FORMAT:
        raise _newer("read", minimum, url)
    try:
        registry = msgspec.convert(document, types.Registry)
        uuid.UUID(registry.registry)
    except (msgspec.ValidationError, ValueError) as error:
        raise IntegrityError(
            f"{shown(what)} is damaged", why=str(error), fix="restore it from a claim's `registry` field"
        ) from error
    if registry.schema != types.SCHEMA_REGISTRY:
        raise IntegrityError(f"{shown(what)} is no registry marker", why=f"its schema is {shown(registry.schema)}")
    return registry


def _newer(verb: str, minimum: int, url: str) -> UsageError:
    return UsageError(
        f"this registry needs a newer weighbridge to {verb} it",
        why=f"format {minimum} is needed, this version knows format {FORMAT}",
        fix="upgrade weighbridge",
        remote=url,
    )
