"""ONNX models: versions, operators and the tensor directory, with external data checked against the folder.

An ONNX file has no magic. It is one protocol buffer whose field 7 is the graph; a `.pb` file beside it is usually a
single test tensor, which is no model.
"""

import stat
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple

from weighbridge.adapters.formats.protocol import (
    BITS,
    RANK_LIMIT,
    SIZE_LIMIT,
    Directory,
    FormatFault,
    Hazard,
    Tensor,
    elements,
    nbytes,
    shown,
)
from weighbridge.adapters.formats.source import Source, opened
from weighbridge.adapters.formats.wire import BYTES, VARINT, Field, Walk

TENSOR_LIMIT: Final = 200_000
NODE_LIMIT: Final = 1_000_000
NAME_LIMIT: Final = 1024
DEPTH_LIMIT: Final = 8
LISTED: Final = 256

DTYPES: Final[dict[int, str]] = {
    1: "F32", 2: "U8", 3: "I8", 4: "U16", 5: "I16", 6: "I32", 7: "I64", 8: "STRING", 9: "BOOL", 10: "F16", 11: "F64",
    12: "U32", 13: "U64", 14: "C64", 15: "C128", 16: "BF16", 17: "F8_E4M3", 18: "F8_E4M3FNUZ", 19: "F8_E5M2",
    20: "F8_E5M2FNUZ", 21: "U4", 22: "I4", 23: "F4", 24: "F8_E8M0", 25: "U2", 26: "I2",
    27: "F6_E2M3", 28: "F6_E3M2",
}  # fmt: skip
"""TensorProto.DataType, as of onnx 1.23."""

_SMALL_BITS: Final = {"U4": 4, "I4": 4, "U2": 2, "I2": 2, "STRING": 0}
_TYPED_DATA: Final = frozenset({4, 5, 6, 7, 10, 11})
_COREML_FIELDS: Final = 200


class _Outside(NamedTuple):
    """Where external data lies, as the file says."""

    location: str
    offset: int
    length: int | None


def read(path: Path) -> Directory:
    """Return what an ONNX model, or a single tensor message, holds. Raises OSError, FormatFault."""
    with opened(path) as source:
        return read_from(source, path.parent)


def read_from(source: Source, folder: Path | None = None) -> Directory:
    """Return what an open one holds; external data is looked for in `folder`. Raises FormatFault."""
    if not source.length:
        raise FormatFault("file-empty", "the file is empty (0 bytes)", file_bytes=0)
    walk = Walk(source)
    reading = _Reading(walk, folder)
    fields: list[Field] = []
    for field in walk.fields(0, source.length):
        if field.number >= _COREML_FIELDS:
            raise FormatFault("not-onnx", "the message has fields of a Core ML model", container="coreml")
        if len(fields) >= LISTED:
            raise FormatFault("not-onnx", "the message has too many fields at its top for an ONNX model")
        fields.append(field)
    graphs = [field for field in fields if field.number == 7 and field.kind == BYTES]
    if len(graphs) == 1 and any(f.number == 1 and f.kind == VARINT for f in fields):
        return reading.model(fields, graphs[0])
    if any(f.number == 2 and f.kind == VARINT for f in fields):
        return reading.lone_tensor(source)
    raise FormatFault("not-onnx", "the message holds no graph: it is no ONNX model")


class _Reading:
    """One pass over a model."""

    def __init__(self, walk: Walk, folder: Path | None) -> None:
        self.walk = walk
        self.folder = folder
        self.tensors: list[Tensor] = []
        self.hazards: list[Hazard] = []
        self.external: dict[str, int | None] = {}
        self.missing: dict[str, list[str]] = {}
        self.domains: set[str] = set()
        self.nodes = 0

    def model(self, fields: list[Field], graph: Field) -> Directory:
        """Return the directory of a whole model."""
        facts: dict[str, Any] = {"container": "onnx", "opsets": {}, "producer": None, "producer_version": None}
        for field in fields:
            if field.number == 1 and field.kind == VARINT:
                facts["ir_version"] = field.value
            elif field.number in _TEXTS and field.kind == BYTES:
                facts[_TEXTS[field.number]] = self.walk.text(field, 200)
            elif field.number == 8 and field.kind == BYTES:
                domain, version = self._opset(field)
                facts["opsets"][domain or "ai.onnx"] = version
            elif field.number == 25 and field.kind == BYTES:
                self.domains.add("local functions")
        facts |= self._graph(graph, 0, top=True)
        for name in sorted(self.missing):
            names = self.missing[name]
            text = f"{shown(name)} is not there; tensors in it: {', '.join(map(shown, names[:8]))}"
            self.hazards.append(Hazard("data-missing", "block", name, text, {"file": name, "missing_tensors": names}))
        facts["external_data"] = sorted(self.external)
        facts["missing_files"] = sorted(self.missing)
        facts["custom_domains"] = sorted(d for d in self.domains if d and not d.startswith("ai.onnx"))
        return Directory("onnx", tuple(self.tensors), (), tuple(self.hazards), facts)

    def lone_tensor(self, source: Source) -> Directory:
        """Return the directory of a single tensor message."""
        self._tensor(Field(0, BYTES, 0, 0, source.length), "")
        note = Hazard("not-a-model", "note", "", "this is a single tensor, as ONNX tests have them, not a model")
        return Directory("onnx-tensor", tuple(self.tensors), (), (*self.hazards, note), {"container": "onnx-tensor"})

    def _opset(self, field: Field) -> tuple[str, int]:
        domain, version = "", 0
        for part in self._inside(field):
            if part.number == 1 and part.kind == BYTES:
                domain = self.walk.text(part, 200)
            elif part.number == 2:
                version = part.value
        return domain, version

    def _inside(self, field: Field) -> Any:
        return self.walk.fields(field.start, field.start + field.size)

    # ---------------------------------------------------------------------------------------------------------- graph

    def _graph(self, graph: Field, depth: int, *, top: bool = False) -> dict[str, Any]:
        facts: dict[str, Any] = {"nodes": 0, "initializers": 0, "inputs": {}, "outputs": {}, "graph": None}
        for field in self._inside(graph):
            if field.kind != BYTES:
                continue
            if field.number == 1:
                facts["nodes"] += 1
                self._node(field, depth)
            elif field.number == 2 and top:
                facts["graph"] = self.walk.text(field, 200)
            elif field.number == 5:
                facts["initializers"] += 1
                self._tensor(field, "")
            elif field.number == 15:
                facts["initializers"] += 1
                self._sparse(field)
            elif field.number in {11, 12} and top:
                table = facts["inputs" if field.number == 11 else "outputs"]
                if len(table) < LISTED:
                    name, shape = self._value_info(field)
                    table[name] = shape
        if top:
            names = {tensor.name for tensor in self.tensors}
            facts["inputs"] = {name: shape for name, shape in facts["inputs"].items() if name not in names}
            facts["dynamic_axes"] = any(
                not isinstance(side, int) for shape in facts["inputs"].values() for side in shape
            )
        return facts

    def _node(self, node: Field, depth: int) -> None:
        self.nodes += 1
        if self.nodes > NODE_LIMIT:
            raise FormatFault("header-too-large", f"the graph has more than {NODE_LIMIT} nodes")
        for field in self._inside(node):
            if field.number == 7 and field.kind == BYTES and len(self.domains) < LISTED:
                self.domains.add(self.walk.text(field, 100))
            elif field.number == 5 and field.kind == BYTES:
                self._attribute(field, depth)

    def _attribute(self, attribute: Field, depth: int) -> None:
        name = ""
        for field in self._inside(attribute):
            if field.kind != BYTES:
                continue
            if field.number == 1:
                name = self.walk.text(field, 200)
            elif field.number in {5, 10}:
                self._tensor(field, name, inline=True)
            elif field.number in {6, 11}:
                if depth >= DEPTH_LIMIT:
                    raise FormatFault("header-damaged", f"graphs are nested deeper than {DEPTH_LIMIT}")
                self._graph(field, depth + 1)

    def _value_info(self, info: Field) -> tuple[str, list[int | str | None]]:
        name, shape = "", list[int | str | None]()
        for field in self._inside(info):
            if field.number == 1 and field.kind == BYTES:
                name = self.walk.text(field, 200)
            elif field.number == 2 and field.kind == BYTES:
                for kind in self._inside(field):
                    if kind.number == 1 and kind.kind == BYTES:
                        shape = self._shape(kind)
        return name, shape

    def _shape(self, tensor_type: Field) -> list[int | str | None]:
        sides: list[int | str | None] = []
        for field in self._inside(tensor_type):
            if field.number != 2 or field.kind != BYTES:
                continue
            for dimension in self._inside(field):
                side: int | str | None = None
                for part in self._inside(dimension) if dimension.kind == BYTES else ():
                    side = part.value if part.number == 1 else self.walk.text(part, 100) if part.kind == BYTES else None
                sides.append(side)
                if len(sides) > RANK_LIMIT:
                    raise FormatFault("header-damaged", f"an input has more than {RANK_LIMIT} dimensions")
        return sides

    # --------------------------------------------------------------------------------------------------------- tensors

    def _sparse(self, field: Field) -> None:
        for part in self._inside(field):
            if part.number in {1, 2} and part.kind == BYTES:
                self._tensor(part, "")

    def _tensor(self, field: Field, owner: str, *, inline: bool = False) -> None:
        name, dims, code = "", list[int](), 0
        raw: Field | None = None
        typed = outside = False
        pairs: dict[str, str] = {}
        for part in self._inside(field):
            if part.number == 1:
                dims += self.walk.numbers(part, RANK_LIMIT)
            elif part.number == 2 and part.kind == VARINT:
                code = part.value
            elif part.number == 8 and part.kind == BYTES:
                name = self.walk.text(part, NAME_LIMIT)
            elif part.number == 9 and part.kind == BYTES:
                raw = part
            elif part.number in _TYPED_DATA:
                typed = True
            elif part.number == 13 and part.kind == BYTES:
                self._pair(part, pairs)
            elif part.number == 14:
                outside = part.value == 1
        if inline and not outside:
            return
        if len(self.tensors) >= TENSOR_LIMIT:
            raise FormatFault("header-too-large", f"the file lists more than {TENSOR_LIMIT} tensors")
        self._add(name or owner, tuple(dims), code, raw, typed=typed, pairs=pairs if outside else None)

    def _pair(self, field: Field, pairs: dict[str, str]) -> None:
        key, value = "", ""
        for part in self._inside(field):
            if part.number == 1 and part.kind == BYTES:
                key = self.walk.text(part, 100)
            elif part.number == 2 and part.kind == BYTES:
                value = self.walk.text(part, NAME_LIMIT + 1)
        if len(pairs) < 16:
            pairs[key] = value

    def _add(
        self,
        name: str,
        shape: tuple[int, ...],
        code: int,
        raw: Field | None,
        *,
        typed: bool,
        pairs: dict[str, str] | None,
    ) -> None:
        dtype = DTYPES.get(code)
        if dtype is None or len(shape) > RANK_LIMIT or any(not 0 <= side < SIZE_LIMIT for side in shape):
            return self._block("tensor-invalid", name, "its dtype or shape is not valid")
        if elements(shape) >= SIZE_LIMIT:
            return self._block("tensor-invalid", name, f"its shape asks for {elements(shape)} elements")
        size = nbytes(dtype, shape) if dtype in BITS else -(-elements(shape) * _SMALL_BITS[dtype] // 8)
        offset, file = None, ""
        if pairs is not None:
            place = self._outside(name, pairs, size)
            if place is not None:
                offset, file = place.offset, place.location
        elif raw is not None:
            offset = self.walk.source.base + raw.start
            if raw.size != size and dtype != "STRING":
                self._block(
                    "tensor-invalid",
                    name,
                    f"dtype {dtype} and shape {list(shape)} need {size} bytes, it has {raw.size}",
                )
        elif not typed and size:
            self._block("tensor-missing", name, f"it needs {size} bytes and holds none")
        unsupported = None if dtype in BITS else dtype.lower()
        self.tensors.append(Tensor(name, dtype, shape, size, offset, None, None, (), unsupported, file))
        return None

    def _outside(self, name: str, pairs: dict[str, str], size: int) -> _Outside | None:
        location = pairs.get("location", "")
        numbers = [pairs.get("offset", "0") or "0", pairs.get("length", "") or str(size)]
        if not all(text.isascii() and text.isdigit() and len(text) < 19 for text in numbers):
            self._block("tensor-invalid", name, "its external data has no valid place")
            return None
        offset, length = int(numbers[0]), int(numbers[1])
        if not is_inside(location):
            data = {"unsafe_paths": [location]}
            text = f"the external data of {shown(name)} is {shown(location)}, which leads out of the folder"
            self.hazards.append(Hazard("path-unsafe", "block", location, text, data))
            return None
        if length != size:
            self._block("tensor-invalid", name, f"it needs {size} bytes, its external data has {length}")
        if location not in self.external:
            self.external[location] = _size(self.folder / location) if self.folder else None
        held = self.external[location]
        if held is None:
            if self.folder is not None:
                self.missing.setdefault(location, []).append(name)
        elif offset + length > held:
            data_short = {"file": location, "file_bytes": held, "expected_bytes": offset + length}
            text = f"{shown(location)} ends at {held}, {shown(name)} needs {offset + length}"
            self.hazards.append(Hazard("file-short", "block", name, text, data_short))
        return _Outside(location, offset, length)

    def _block(self, code: str, name: str, problem: str) -> None:
        if len(self.hazards) < 1000:
            self.hazards.append(Hazard(code, "block", name, f"{shown(name)}: {problem}", {"bad_tensor": name}))


_TEXTS: Final = {2: "producer", 3: "producer_version", 4: "domain"}


def is_inside(location: str) -> bool:
    """Return whether a relative path, as written in a file, stays in its folder."""
    parts = PurePosixPath(location).parts
    return (
        bool(parts)
        and len(location) <= NAME_LIMIT
        and not location.startswith("/")
        and ".." not in parts
        and (location.isprintable() and "\\" not in location)
    )


def _size(path: Path) -> int | None:
    try:
        state = path.stat()
    except (OSError, ValueError):
        return None
    return state.st_size if stat.S_ISREG(state.st_mode) else None
