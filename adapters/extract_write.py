"""Write what `extract` has planned: streamed, hashed while it is written, and visible only when it is whole."""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from weighbridge.adapters import extract, layers, layout
from weighbridge.adapters.extract import Extraction
from weighbridge.adapters.formats import safetensors_writer as writer
from weighbridge.adapters.formats.protocol import FormatFault
from weighbridge.adapters.items import Item
from weighbridge.adapters.origins import stream
from weighbridge.adapters.target import appear, free
from weighbridge.adapters.witness import Witness
from weighbridge.registry import disk, errors, shell
from weighbridge.registry.refs import shown
from weighbridge.registry.types import Finding

SHARD: Final = 5 << 30
"""Bytes of a shard unless somebody asks for another size."""

FLOATS: Final = ("F64", "F32", "F16", "BF16")
Progress = Callable[[int], None]


class Written(NamedTuple):
    """One file that was written."""

    path: str
    size: int
    sha256: str


class Report(NamedTuple):
    """What was done: files, and how dtypes were changed by class of layer."""

    files: list[Written]
    casts: dict[str, dict[str, int]]
    """Class of layer -> {"F32 to BF16": tensors}."""
    overflowed: int
    """Finite values that the new dtype cannot hold."""


class Content(NamedTuple):
    """A safetensors file that is made while it is written; a witness takes note of the parts that pass."""

    items: tuple[Item, ...]
    witness: Witness | None = None

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(_header(self.items)) + sum(item.size for item in self.items)

    def parts(self) -> Iterator[bytes]:
        """Yield the file. Raises OSError, FormatFault, and RefusedError for parts that cannot be right."""
        yield from content(self.items, witness=self.witness)
        if self.witness is not None:
            self.witness.stop()

    def told(self) -> list[Finding]:
        """Return what was found about the whole bundle, of which this is a file, when all of it was made."""
        return self.witness.findings() if self.witness is not None else []

    def digests(self) -> list[tuple[str, str, tuple[int, ...], str]]:
        """Return (name, dtype, shape, sha256 of the bytes) of every tensor. Raises OSError, FormatFault."""
        table: list[tuple[str, str, tuple[int, ...], str]] = []
        for item in self.items:
            digest = hashlib.sha256()
            for part in stream(item.origin):
                digest.update(part)
            table.append((item.name, item.dtype, item.shape, digest.hexdigest()))
        return table


def contents(
    made: Extraction, subject: str, *, allowed: Mapping[str, str] | None = None, limit: int = SHARD
) -> tuple[dict[str, Content], bytes | None]:
    """Return the weights files of an extraction by name, and the index of several; parts are looked at on the way.

    `subject` names what they are made from; `allowed` gives the reason by code why a finding stops nothing.
    """
    witness = Witness(subject, (item.name for item in made.items), allowed=allowed)
    parts = extract.shards(sorted(made.items, key=_natural), limit)
    names = extract.names_of(parts, made.stem)
    files = {name: converted(part, witness) for name, part in zip(names, parts, strict=True)}
    return files, _listing(parts, names) if len(parts) > 1 else None


def _listing(parts: Sequence[Sequence[Item]], names: Sequence[str]) -> bytes:
    return json.dumps(extract.index(parts, names), indent=2).encode() + b"\n"


def with_dtype(made: Extraction, dtype: str | None, keep: Iterable[str] = ()) -> Extraction:
    """Return the same with floating tensors in another dtype; those of the classes in `keep` become F32."""
    if dtype is None:
        return made
    classes = set(keep)
    unknown = classes - set(layers.CLASSES)
    if dtype not in FLOATS:
        raise errors.UsageError(f"'{shown(dtype)}' is no dtype to convert to", fix=f"one of {', '.join(FLOATS)}")
    if unknown:
        raise errors.UsageError(f"'{shown(min(unknown))}' is no class of layers", fix=", ".join(layers.CLASSES))
    return made._replace(
        items=tuple(
            item._replace(dtype="F32" if layers.layer_class(item.name) in classes else dtype)
            if item.stored in FLOATS
            else item
            for item in made.items
        )
    )


def write(made: Extraction, target: Path, *, shard_size: int = SHARD, progress: Progress | None = None) -> Report:
    """Write an extraction into a folder that is new or empty; it appears whole or not at all.

    Raises what `free` raises, ConflictError where something is there, UsageError where a conversion needs numpy,
    IntegrityError where the source changed under our hands, and what `disk.translate` says.
    """
    free(target)
    if target.exists() and any(target.iterdir()):
        raise errors.ConflictError(f"{shown(str(target))} is there already", fix="name a folder that is new or empty")
    counter = _cast("Counter")() if any(item.dtype != item.stored for item in made.items) else None
    order = {
        e.name: i for i, e in enumerate(writer.ordered(writer.Entry(i.name, i.dtype, i.shape) for i in made.items))
    }
    parts = extract.shards(sorted(made.items, key=_natural), shard_size)
    names = extract.names_of(parts, made.stem)
    place = target.parent / f".{target.name}.{secrets.token_hex(6)}"
    written: list[Written] = []
    try:
        with disk.speaking(f"cannot write into {shown(str(target.parent))}"):
            target.parent.mkdir(parents=True, exist_ok=True)
            place.mkdir(mode=0o777)
            for part, name in zip(parts, names, strict=True):
                ordered = sorted(part, key=lambda item: order[item.name])
                written.append(_file(place / name, content(ordered, counter), progress))
            if len(parts) > 1:
                written.append(_file(place / f"{made.stem}.safetensors.index.json", [_listing(parts, names)], None))
            for name, source in sorted(made.beside.items()):
                if not (place / name).exists() and not layout.is_weights_name(name):
                    written.append(_file(place / name, _copy(Path(source)), None))
            disk.sync_folder(place)
            appear(place, target)
            disk.sync_folder(target.parent)
    except FormatFault as fault:
        raise errors.SourceChangedError("the checkpoint could not be read to its end", why=fault.message) from fault
    finally:
        shutil.rmtree(place, ignore_errors=True)
    casts: dict[str, dict[str, int]] = {}
    for item in made.items:
        if item.dtype != item.stored:
            row = casts.setdefault(layers.layer_class(item.name), {})
            change = f"{item.stored} to {item.dtype}"
            row[change] = row.get(change, 0) + 1
    return Report(written, casts, counter.overflowed if counter is not None else 0)


def _natural(item: Item) -> list[tuple[int, str]]:
    """Sort layers by number, so that a shard holds whole layers where it can."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in item.name.split(".")]


def content(items: Sequence[Item], counter: Any = None, witness: Witness | None = None) -> Iterator[bytes]:
    """Yield a safetensors file of some tensors, which must be in their order. Raises OSError, FormatFault."""
    yield _header(items)
    for item in items:
        size = 0
        parts = stream(item.origin) if witness is None else witness.passing(item)
        if item.dtype != item.stored:
            parts = _cast("blocks")(parts, item.stored, item.dtype, counter or _cast("Counter")())
        for part in parts:
            size += len(part)
            yield part
        if size != item.size:
            raise FormatFault("tensor-incomplete", f"{item.name} gave {size} bytes of {item.size}")


def _header(items: Sequence[Item]) -> bytes:
    return writer.header([writer.Entry(item.name, item.dtype, item.shape) for item in items])


def converted(items: Iterable[Item], witness: Witness | None = None) -> Content:
    """Return some tensors as the safetensors file they are published as."""
    by_name = {item.name: item for item in items}
    ordered = writer.ordered(writer.Entry(i.name, i.dtype, i.shape) for i in by_name.values())
    return Content(tuple(by_name[entry.name] for entry in ordered), witness)


def _cast(name: str) -> Any:
    try:
        return shell.load(f"weighbridge.adapters.cast:{name}")
    except ModuleNotFoundError as error:
        raise errors.UsageError(
            "another dtype needs numpy, which is not installed", fix="pip install 'weighbridge[merge]'"
        ) from error


def _file(path: Path, parts: Iterable[bytes], progress: Progress | None) -> Written:
    digest, size = hashlib.sha256(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for part in parts:
            digest.update(part)
            disk.write_all(descriptor, part)
            size += len(part)
            if progress is not None:
                progress(len(part))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return Written(path.name, size, digest.hexdigest())


def _copy(source: Path) -> Iterator[bytes]:
    with source.open("rb") as stream_:
        while block := stream_.read(1 << 20):
            yield block
