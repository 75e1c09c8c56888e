"""Torch zip files (.bin .pt .pth .ckpt since torch 1.6) and TorchScript archives: listed straight from the zip.

    NAME/data.pkl       the objects; tensors are rebuilt from storages
    NAME/data/0 ...     the storages' bytes, stored
    NAME/byteorder      little or big
    NAME/constants.pkl  only in TorchScript, with the program under NAME/code/

The pickle goes through a machine that can run nothing, and every storage must lie in a stored record of its size.
"""

import zlib
from pathlib import Path
from typing import Any, Final

from weighbridge.adapters.formats import globals as judged
from weighbridge.adapters.formats import torch_tensors, zipdir
from weighbridge.adapters.formats.inert import Storage, Symbol, uncollected
from weighbridge.adapters.formats.machine import Machine
from weighbridge.adapters.formats.protocol import Directory, FormatFault, Hazard, shown
from weighbridge.adapters.formats.source import Source, opened
from weighbridge.adapters.formats.torch_calls import answers
from weighbridge.adapters.formats.torch_names import DTYPES, STORAGE_MODULES, STORAGES
from weighbridge.adapters.formats.zipdir import Member

PICKLE_LIMIT: Final = 128 << 20
"""Bytes of the longest pickle that is read."""

_SIZES: Final = {name: DTYPES[dtype].size for name, dtype in STORAGES.items()}
_SMALL: Final = 64


def read(path: Path) -> Directory:
    """Return what a torch zip file or TorchScript archive holds. Raises OSError, FormatFault."""
    with opened(path) as source:
        return read_from(source)


def read_from(source: Source) -> Directory:
    """Return what an open one holds; it may be a stretch of a larger file. Raises FormatFault."""
    with uncollected():
        return _read(source)


def _read(source: Source) -> Directory:
    if source.head(4) != b"PK\3\4":
        raise FormatFault("not-zip", "the file does not begin as a zip archive", file_bytes=source.length)
    members = zipdir.read(source)
    prefix = next(iter(members), "").partition("/")[0]
    script = f"{prefix}/constants.pkl" in members or f"{prefix}/model.json" in members
    record = members.get(f"{prefix}/data.pkl")
    if record is None:
        if script:
            return Directory("torchscript", facts=_script_facts(members, prefix), hazards=(_PROGRAM,))
        raise FormatFault("not-torch", "the zip archive holds no data.pkl: it is no torch file", members=len(members))
    reader = _Reader(source, members, prefix)
    machine = Machine(reader.storage)
    machine.calls = answers(machine)
    data = reader.bytes_of(record, PICKLE_LIMIT)
    root = machine.run(data)
    found = torch_tensors.collect(root)
    symbols = [s for s in machine.symbols.values() if not (script and s.module.startswith("__torch__"))]
    hazards = [*judged.hazards(symbols), *odd(machine), *found.hazards, *reader.hazards]
    if machine.end != len(data):
        hazards.append(
            Hazard("pickle-trailing", "warn", record.name, f"{len(data) - machine.end} bytes follow the pickle")
        )
    facts: dict[str, Any] = {
        "container": "torchscript" if script else "torch-zip",
        "pickle_format": True,
        "pickle_protocol": machine.protocol,
        "storages": len(reader.storages),
        "weights_only_loadable": not script and safe_loading(machine),
        "foreign_globals": judged.foreign(symbols),
        "unsupported": {tensor.name: tensor.unsupported for tensor in found.tensors if tensor.unsupported},
    }
    order = members.get(f"{prefix}/byteorder")
    facts["byteorder"] = reader.bytes_of(order, _SMALL).decode("ascii", "replace").strip() if order else None
    hazards.extend(_byteorder(facts["byteorder"]))
    if script:
        facts.update(_script_facts(members, prefix))
        hazards.insert(0, _PROGRAM)
    elif found.objects:
        facts["object_classes"] = sorted(set(found.objects))
        hazards.append(whole_object(found.objects))
    return Directory(facts["container"], found.tensors, found.entries, tuple(hazards), facts, root)


class _Reader:
    """The storages of one archive, found as the pickle names them."""

    def __init__(self, source: Source, members: dict[str, Member], prefix: str) -> None:
        self.source = source
        self.members = members
        self.storages: dict[str, Storage] = {}
        self.hazards: list[Hazard] = []
        self._data = f"{prefix}/data/"

    def bytes_of(self, member: Member, limit: int) -> bytes:
        """Return a stored member whole. Raises FormatFault where it is packed, too large or damaged."""
        if member.method != zipdir.STORED:
            raise FormatFault(
                "record-compressed", f"{shown(member.name)} is compressed: torch stores, only an attack packs"
            )
        if member.size > limit:
            raise FormatFault("pickle-too-large", f"{shown(member.name)} has {member.size} bytes, the limit is {limit}")
        data = self.source.at(member.start, member.size)
        if member.crc and zlib.crc32(data) != member.crc:
            raise FormatFault("record-damaged", f"{shown(member.name)} does not match its checksum", member=member.name)
        return data

    def storage(self, saved: Any) -> Storage:
        """Answer a persistent id: ('storage', class, key, location, elements)."""
        if type(saved) is not tuple or len(saved) < 5 or type(saved[2]) is not str:
            raise ValueError("an outside object is no storage")
        key = saved[2]
        found = self.storages.get(key)
        if found is None:
            found = self.storages[key] = self._new(saved)
        elif type(saved[1]) is not Symbol or found.kind != saved[1].name or found.count != saved[4]:
            raise ValueError(f"storage {key[:40]} is named twice, not alike")
        return found

    def _new(self, saved: tuple[Any, ...]) -> Storage:
        storage = new_storage(saved[1], saved[2], saved[3], saved[4])
        member = self.members.get(self._data + storage.key)
        need = storage.count * _SIZES[storage.kind]
        if member is not None and member.size >= need and not member.method:
            storage.start, storage.size = self.source.base + member.start, member.size
        elif member is None:
            if need:
                self._block("record-missing", storage, "the archive has no such record")
        elif member.method != zipdir.STORED:
            self._block(
                "record-compressed", storage, f"its record is compressed ({member.stored} to {member.size} bytes)"
            )
        else:
            self._block("record-short", storage, f"it needs {need} bytes and its record has {member.size}")
        return storage

    def _block(self, code: str, storage: Storage, problem: str) -> None:
        if len(self.hazards) < 100:
            name = f"data/{storage.key}"
            self.hazards.append(Hazard(code, "block", name, f"{shown(name)}: {problem}"))


def new_storage(kind: Any, key: str, location: Any, count: Any) -> Storage:
    """Return a storage as a persistent id describes it. Raises ValueError where it describes none."""
    name = kind.name if type(kind) is Symbol and kind.module in STORAGE_MODULES else None
    if name not in _SIZES or type(count) is not int or not 0 <= count < 1 << 60:
        raise ValueError("an outside object is no storage of a known class")
    return Storage(key, name, count, location[:_SMALL] if type(location) is str else "")


def safe_loading(machine: Machine) -> bool:
    """Return whether torch's own safe loading reads this pickle."""
    return judged.safe(machine.symbols.values()) and not machine.beyond and not machine.odd


def whole_object(classes: list[str]) -> Hazard:
    """Return the hazard of a module pickled whole: it needs its classes, and loading it runs them."""
    return Hazard(
        "whole-object",
        "block",
        classes[0],
        f"a whole {shown(classes[0])} is pickled: it opens only where that class is; save its state_dict() instead",
        {"object_classes": sorted(set(classes))},
    )


def odd(machine: Machine) -> list[Hazard]:
    """Return what a pickle did that no honest one does."""
    return [Hazard("runs-code", "block", "pickle", f"the pickle {sentence}") for sentence in machine.odd]


def _byteorder(order: str | None) -> list[Hazard]:
    if order in {None, "little"}:
        return []
    if order == "big":
        return [Hazard("big-endian", "warn", "byteorder", "the numbers are stored big end first and must be turned")]
    return [Hazard("byteorder-unknown", "block", "byteorder", f"the byte order is {shown(order or '')}")]


_PROGRAM: Final = Hazard(
    "torchscript", "block", "constants.pkl", "this is a TorchScript program: code and weights in one, not a checkpoint"
)


def _script_facts(members: dict[str, Member], prefix: str) -> dict[str, Any]:
    code = [name for name in members if name.startswith(f"{prefix}/code/") and name.endswith(".py")]
    return {"container": "torchscript", "code_files": len(code)}
