"""Torch files from before 1.6, and plain pickles: recognised, labelled and listed by the same inert machine.

    pickle      magic number
    pickle      protocol version 1001
    pickle      about the machine: byte order, sizes of integers
    pickle      the objects; tensors are rebuilt from storages
    pickle      list of storage keys
    storages    8 bytes number of elements, then the bytes, in the order of that list

A plain pickle (pickle.dump, joblib) has only the objects. Files of torch 0.1 are tar archives: named, not read.
"""

from pathlib import Path
from typing import Any, Final

from weighbridge.adapters.formats import globals as judged
from weighbridge.adapters.formats import torch_tensors
from weighbridge.adapters.formats.inert import Blob, RawTensor, Record, Storage, Symbol, uncollected
from weighbridge.adapters.formats.machine import Machine
from weighbridge.adapters.formats.protocol import Directory, FormatFault, Hazard, shown
from weighbridge.adapters.formats.source import Source, opened
from weighbridge.adapters.formats.torch_calls import answers
from weighbridge.adapters.formats.torch_names import DTYPES, STORAGES
from weighbridge.adapters.formats.torch_zip import new_storage, odd, safe_loading, whole_object

MAGIC: Final = 0x1950A86A20F9469CFC6C
PROTOCOL: Final = 1001

HEAD: Final = b"\x80\x02\x8a\x0a" + MAGIC.to_bytes(10, "little") + b"."
"""How the file begins with the protocol that torch has always used."""

PICKLE_LIMIT: Final = 128 << 20
"""Bytes of the longest pickle that is read."""

_FIRST: Final = 1 << 20
_SIZES: Final = {name: DTYPES[dtype].size for name, dtype in STORAGES.items()}
_FEW: Final = 1000
"""Operations of a pickle that holds a number, a few facts or one storage."""

_EMBEDDED_HEAD: Final = 4096
_EMBEDDED_LIMIT: Final = 5000


def read(path: Path) -> Directory:
    """Return what an old torch file or a plain pickle holds. Raises OSError, FormatFault."""
    with opened(path) as source:
        return read_from(source)


def read_from(source: Source) -> Directory:
    """Return what an open one holds. Raises FormatFault."""
    size = min(_FIRST, source.length)
    while True:
        try:
            with uncollected():
                return _read(source, source.head(size))
        except FormatFault as fault:
            if fault.code != "pickle-cut" or size >= source.length:
                raise
            if size >= PICKLE_LIMIT:
                raise FormatFault(
                    "pickle-too-large", f"the pickle is longer than {PICKLE_LIMIT} bytes", limit=PICKLE_LIMIT
                ) from fault
        size = min(size * 16, PICKLE_LIMIT, source.length)


def _read(source: Source, data: bytes) -> Directory:
    if not data:
        raise FormatFault("file-empty", "the file is empty (0 bytes)", file_bytes=0)
    first = Machine()
    first.operations = _FEW
    try:
        value = first.run(data)
    except FormatFault:
        value = None
    if type(value) is int and value == MAGIC:
        return _torch(source, data, first.end)
    return _plain(source, data)


# ---------------------------------------------------------------------------------------------------- old torch files


def _torch(source: Source, data: bytes, position: int) -> Directory:
    machine = Machine()
    version = machine.run(data, position)
    about = machine.run(data, machine.end)
    if version != PROTOCOL or type(version) is not int:
        raise FormatFault(
            "pickle-damaged", f"the file claims version {shown(str(version), 40)} of the old torch format"
        )
    storages = _Storages()
    objects = _machine(storages, position=machine.end, data=data)
    keys_machine = Machine()
    keys = keys_machine.run(data, objects.end)
    if not isinstance(keys, list) or not all(type(key) is str for key in keys):
        raise FormatFault("pickle-damaged", "the list of storages is no list of names")
    hazards = [*storages.place(keys, source, keys_machine.end)]
    little = about.get("little_endian", True) if type(about) is dict else True
    if little is not True:
        hazards.append(Hazard("big-endian", "warn", "sys_info", "the file was written on a machine with big end first"))
    return _directory("torch-legacy", objects, hazards, storages, "little" if little is True else "big")


class _Storages:
    """The storages of an old file: named by the pickle, placed by the list after it."""

    def __init__(self) -> None:
        self.found: dict[str, Storage] = {}
        self.views: dict[str, Storage] = {}

    def answer(self, saved: Any) -> Any:
        """Answer a persistent id: ('storage', class, key, location, elements, view), ('module', class, ...)."""
        if type(saved) is not tuple or len(saved) < 2:
            raise ValueError("an outside object is no storage")
        word = saved[0].decode("ascii") if type(saved[0]) is bytes else saved[0]
        if word == "module":
            return saved[1]
        if word != "storage" or len(saved) < 5 or type(saved[2]) is not str:
            raise ValueError("an outside object is no storage")
        key = saved[2]
        storage = self.found.get(key)
        if storage is None:
            storage = self.found[key] = new_storage(saved[1], key, saved[3], saved[4])
        elif type(saved[1]) is not Symbol or storage.kind != saved[1].name or storage.count != saved[4]:
            raise ValueError(f"storage {key[:40]} is named twice, not alike")
        view = saved[5] if len(saved) > 5 else None
        return storage if view is None else self._view(storage, view)

    def _view(self, storage: Storage, view: Any) -> Storage:
        key, offset, count = view
        if type(key) is not str or type(offset) is not int or type(count) is not int:
            raise ValueError("a view of a storage has no valid numbers")
        if offset < 0 or count < 0 or offset + count > storage.count:
            raise ValueError("a view reaches out of its storage")
        found = self.views.get(key)
        if found is None:
            found = self.views[key] = Storage(storage.key, storage.kind, count, storage.location)
            found.size = offset * _SIZES[storage.kind]  # until placed: the distance from the storage's beginning
        return found

    def place(self, keys: list[str], source: Source, position: int) -> list[Hazard]:
        """Give every listed storage its place in the file. Raises FormatFault where the file ends too early."""
        hazards = []
        for key in keys:
            storage = self.found.get(key)
            if storage is None:
                raise FormatFault("pickle-damaged", f"storage {shown(key)} is listed and nothing uses it")
            if storage.start is not None:
                raise FormatFault("pickle-damaged", f"storage {shown(key)} is listed twice")
            need = storage.count * _SIZES[storage.kind]
            if position + 8 + need > source.length:
                raise FormatFault(
                    "file-short",
                    f"short by {position + 8 + need - source.length} bytes or more: storage {shown(key)} needs "
                    f"{position + 8 + need}, the file has {source.length}",
                    file_bytes=source.length,
                    expected_bytes=position + 8 + need,
                    short_by=position + 8 + need - source.length,
                )
            count = int.from_bytes(source.at(position, 8), "little")
            if count != storage.count:
                raise FormatFault(
                    "storage-mismatch", f"storage {shown(key)} has {count} elements, the pickle says {storage.count}"
                )
            storage.start, storage.size = source.base + position + 8, need
            position += 8 + need
        for key, storage in self.found.items():
            if storage.start is None and storage.count:
                hazards.append(Hazard("record-missing", "block", key, f"storage {shown(key)} is not in the file"))
        for view in self.views.values():
            begin = self.found[view.key].start
            view.start = None if begin is None else begin + view.size
        if position != source.length:
            hazards.append(Hazard("file-long", "warn", "", f"{source.length - position} bytes follow the last storage"))
        return hazards


class _Run(Machine):
    """A machine that has run, with its value."""

    root: Any = None


def _machine(storages: _Storages | None, *, data: bytes, position: int = 0) -> _Run:
    machine = _Run(storages.answer if storages else None)
    machine.calls = answers(machine)
    if storages is None:
        machine.calls["torch.storage._load_from_bytes"] = _Embedded(data, machine).storage
    machine.root = machine.run(data, position)
    return machine


# ------------------------------------------------------------------------------------------------------- plain pickles


def _plain(source: Source, data: bytes) -> Directory:
    machine = _machine(None, data=data)
    hazards = []
    if machine.end != source.length:
        hazards.append(Hazard("pickle-trailing", "warn", "", f"{source.length - machine.end} bytes follow the pickle"))
    return _directory("pickle", machine, hazards, None, "little")


class _Embedded:
    """Storages inside a plain pickle: each is a small torch file of its own, as bytes."""

    def __init__(self, data: bytes, deck: Machine) -> None:
        self.data = data
        self.deck = deck
        self.count = 0

    def storage(self, args: Any) -> Any:
        """Return the storage a call of torch.storage._load_from_bytes would give."""
        self.count += 1
        if self.count > _EMBEDDED_LIMIT or not args:
            raise ValueError("too many storages are embedded")
        held = args[0]
        if isinstance(held, Blob):
            held = self.data[held.position : held.position + min(held.size, _EMBEDDED_HEAD)]
        if not isinstance(held, bytes) or not held.startswith(HEAD):
            return Record(self.deck.symbol("torch.storage", "_load_from_bytes"), args)
        machine = Machine(_Storages().answer)
        machine.operations = _FEW
        machine.calls = answers(machine)
        for _ in range(4):
            value = machine.run(held, machine.end)
        self.deck.charge(machine.spent)
        if not isinstance(value, Storage):
            raise TypeError("an embedded torch file is no storage")
        value.key = f"embedded {self.count}"
        return value


# --------------------------------------------------------------------------------------------------------------- result


def _directory(
    container: str, machine: "_Run", hazards: list[Hazard], storages: _Storages | None, order: str
) -> Directory:
    root = machine.root
    found = torch_tensors.collect(root)
    symbols = list(machine.symbols.values())
    hazards = [*judged.hazards(symbols), *odd(machine), *found.hazards, *hazards]
    objects = found.objects
    if not found.tensors and isinstance(root, (Record, RawTensor, Symbol)) and not objects:
        objects = [root.symbol.full] if isinstance(root, Record) else []
    facts: dict[str, Any] = {
        "container": container,
        "pickle_format": True,
        "pickle_protocol": machine.protocol,
        "weights_only_loadable": storages is not None and safe_loading(machine),
        "foreign_globals": judged.foreign(symbols),
        "unsupported": {tensor.name: tensor.unsupported for tensor in found.tensors if tensor.unsupported},
        "byteorder": order,
    }
    if storages is not None:
        facts["storages"] = len(storages.found)
    if found.objects:
        facts["object_classes"] = sorted(set(found.objects))
        hazards.append(whole_object(found.objects))
    elif objects:
        facts["object_classes"] = objects
    return Directory(container, found.tensors, found.entries, tuple(hazards), facts, root)
