"""The header of a safetensors file, read with bounds and judged against the file's length; no tensor is loaded.

    8 bytes    length N of the header, unsigned, little-endian
    N bytes    JSON: {name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {text: text}}
    the rest   the tensors' bytes, offsets counted from here, without hole and without overlap

A damaged file gives a Header whose `faults` say what is wrong, never a traceback; what could be read is kept, so that a
refusal can still say what the file was going to hold.
"""

import io
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from weighbridge.adapters.formats.inert import uncollected

HEADER_LIMIT: Final = 32 << 20
"""Bytes of the longest header that is read: 200,000 tensors with long names fit."""

TENSOR_LIMIT: Final = 200_000
RANK_LIMIT: Final = 64
NAME_LIMIT: Final = 1024
FAULTS_MAX: Final = 1000
"""Invalid entries after which a header is not read on."""

_INT_LIMIT: Final = 1 << 63

BITS: Final[dict[str, int]] = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}
"""Bits of one element of every dtype the format knows."""


class Tensor(NamedTuple):
    """One entry of a header; `begin` and `end` count from the first byte after the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.end - self.begin

    @property
    def elements(self) -> int:
        """Product of the shape; 1 for a scalar."""
        return product(self.shape)


class Fault(NamedTuple):
    """One thing that is wrong with a file: a code of FAULTS, a sentence, and figures under their fact names."""

    code: str
    message: str
    data: dict[str, Any]


FAULTS: Final = (
    "file-empty",
    "header-cut",
    "header-too-large",
    "header-damaged",
    "tensor-invalid",
    "tensors-overlap",
    "data-hole",
    "file-short",
    "file-long",
)
"""Every fault, in the order in which they are reported."""


class Header(NamedTuple):
    """What the first bytes of a file say; sound exactly when `faults` is empty."""

    file_bytes: int
    data_start: int
    tensors: dict[str, Tensor]
    metadata: dict[str, str] | None
    faults: tuple[Fault, ...] = ()

    @property
    def payload_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.end - t.begin for t in self.tensors.values())

    @property
    def empty_tensors(self) -> list[str]:
        """Tensors whose shape holds a zero."""
        return [t.name for t in self.tensors.values() if 0 in t.shape]


class _DamagedError(ValueError):
    """The header's text is not what the format asks for."""


def product(shape: tuple[int, ...]) -> int:
    """Return the number of elements of a shape."""
    count = 1
    for side in shape:
        count *= side
    return count


def read(path: Path) -> Header:
    """Return the header of a file, sound or with its faults. Raises OSError."""
    with path.open("rb") as stream:
        return read_from(stream, path.stat().st_size)


def read_from(stream: BinaryIO, file_bytes: int) -> Header:
    """Return the header of an open file of this length, sound or with its faults. Raises OSError."""
    first = stream.read(8)
    if not first:
        fault = Fault("file-empty", "the file is empty (0 bytes)", {"file_bytes": 0})
        return Header(0, 0, {}, None, (fault,))
    if len(first) < 8:
        fault = Fault(
            "header-cut",
            f"the file has {len(first)} bytes, a header alone needs 8 and more",
            {"file_bytes": file_bytes},
        )
        return Header(file_bytes, 0, {}, None, (fault,))
    declared = int.from_bytes(first, "little")
    figures = {"declared_header_bytes": declared, "file_bytes": file_bytes}
    if declared > HEADER_LIMIT:
        fault = Fault(
            "header-too-large",
            f"the header claims {declared} bytes, the limit is {HEADER_LIMIT} and the file has {file_bytes}",
            figures,
        )
        return Header(file_bytes, 0, {}, None, (fault,))
    text = stream.read(declared)
    if len(text) < declared:
        fault = Fault(
            "header-cut",
            f"the header claims {declared} bytes, the file ends after {len(text)} of them",
            {**figures, "header_short_by": declared - len(text)},
        )
        return Header(file_bytes, 0, {}, None, (fault,))
    return _judge(text, 8 + declared, file_bytes)


def parse(stored: bytes, file_bytes: int | None = None) -> Header:
    """Return the header at the start of some bytes; `file_bytes` is the whole file's length where it is longer."""
    return read_from(io.BytesIO(stored), len(stored) if file_bytes is None else file_bytes)


@uncollected()
def _judge(text: bytes, data_start: int, file_bytes: int) -> Header:
    try:
        document = _load(text)
        metadata = _metadata(document.pop("__metadata__", None))
    except _DamagedError as error:
        fault = Fault(
            "header-damaged",
            f"the header is not valid: {error}",
            {"declared_header_bytes": len(text), "file_bytes": file_bytes},
        )
        return Header(file_bytes, data_start, {}, None, (fault,))
    if len(document) > TENSOR_LIMIT:
        fault = Fault(
            "header-too-large",
            f"the header lists {len(document)} tensors, the limit is {TENSOR_LIMIT}",
            {"file_bytes": file_bytes},
        )
        return Header(file_bytes, data_start, {}, metadata, (fault,))
    tensors: dict[str, Tensor] = {}
    faults: list[Fault] = []
    for name, entry in document.items():
        tensor = _tensor(name, entry)
        if isinstance(tensor, Tensor):
            tensors[name] = tensor
        else:
            faults.append(
                Fault("tensor-invalid", f"{_quoted(name)}: {tensor}", {"bad_tensor": name, "problem": tensor})
            )
            if len(faults) == FAULTS_MAX:
                break
    faults.extend(_layout_faults(tensors, file_bytes - data_start, data_start, file_bytes, whole=not faults))
    return Header(file_bytes, data_start, tensors, metadata, tuple(faults))


def _load(text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key, count in Counter(keys).items() if count > 1)
            raise _DamagedError(f"the key {_quoted(twice)} appears twice")
        return table

    def constant(word: str) -> Any:
        raise _DamagedError(f"{word} is no JSON")

    if not text.startswith(b"{"):
        raise _DamagedError("it does not begin with '{'")
    try:
        document = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant)
    except UnicodeDecodeError as error:
        raise _DamagedError(f"byte {error.start} is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise _DamagedError(f"not JSON at byte {error.pos}: {error.msg}") from error
    except RecursionError as error:
        raise _DamagedError("the JSON is nested too deep") from error
    except _DamagedError:
        raise
    except ValueError as error:
        raise _DamagedError(str(error)) from error
    if not isinstance(document, dict):
        raise _DamagedError("it is no JSON object")
    return document


def _metadata(value: Any) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise _DamagedError("__metadata__ must map texts to texts")
    return value


def _tensor(name: str, entry: Any) -> Tensor | str:
    """Return the entry as a tensor, or what is wrong with it."""
    if not name or len(name) > NAME_LIMIT or not name.isprintable():
        return "its name is empty, too long or holds characters that cannot be printed"
    if not isinstance(entry, dict):
        return "its entry is no object"
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if dtype == "":
        return "empty dtype" + (" and empty shape" if not shape else "")
    if not isinstance(dtype, str) or dtype not in BITS:
        return f"unknown dtype {_quoted(str(dtype))}"
    if not isinstance(shape, list) or len(shape) > RANK_LIMIT or not _counts(shape):
        return "its shape is no list of sizes"
    if not isinstance(offsets, list) or len(offsets) != 2:
        return "its data_offsets are not two positions"
    begin, end = offsets
    if type(begin) is not int or type(end) is not int or not (0 <= begin < _INT_LIMIT and 0 <= end < _INT_LIMIT):
        return "its data_offsets are not two positions"
    if len(entry) > 3:
        return f"unknown field {_quoted(min(entry.keys() - {'dtype', 'shape', 'data_offsets'}))}"
    bits = BITS[dtype]
    for side in shape:
        bits *= side
    if end < begin:
        return f"it ends at {end}, before it begins at {begin}"
    if bits % 8 or bits // 8 != end - begin:
        return f"dtype {dtype} and shape {shape} need {-(-bits // 8)} bytes, its offsets span {end - begin}"
    return Tensor(name, dtype, tuple(shape), begin, end)


def _counts(values: list[Any]) -> bool:
    for value in values:  # noqa: SIM110 - a plain loop: a header holds two hundred thousand of these lists
        if type(value) is not int or not 0 <= value < _INT_LIMIT:
            return False
    return True


def _layout_faults(
    tensors: dict[str, Tensor], available: int, data_start: int, file_bytes: int, *, whole: bool
) -> Iterator[Fault]:
    """Yield what is wrong with the places of the tensors; holes are only told where every entry could be read."""
    overlapping: set[str] = set()
    hole: Fault | None = None
    reach, owner = 0, ""
    for tensor in sorted(tensors.values(), key=lambda t: (t.begin, t.end)):
        if tensor.begin < reach and tensor.size:
            overlapping |= {owner, tensor.name}
        elif tensor.begin > reach and hole is None and whole:
            hole = Fault(
                "data-hole",
                f"no tensor owns the bytes {reach} to {tensor.begin} before {_quoted(tensor.name)}",
                {"hole": [reach, tensor.begin]},
            )
        if tensor.end > reach:
            reach, owner = tensor.end, tensor.name
    if overlapping:
        names = sorted(overlapping)
        yield Fault(
            "tensors-overlap",
            f"{len(names)} tensors share bytes: {', '.join(map(_quoted, names[:4]))}{' ...' if len(names) > 4 else ''}",
            {"overlapping": names},
        )
    if hole:
        yield hole
    figures: dict[str, Any] = {"file_bytes": file_bytes, "expected_bytes": data_start + reach}
    if reach > available:
        outside = sorted(t.name for t in tensors.values() if t.end > available)
        yield Fault(
            "file-short",
            f"short by {reach - available} bytes: its header asks for {data_start + reach}, it has {file_bytes}",
            {**figures, "short_by": reach - available, "tensors_outside": outside},
        )
    elif reach < available and whole:
        yield Fault(
            "file-long",
            f"longer by {available - reach} bytes: its header asks for {data_start + reach}, it has {file_bytes}",
            {**figures, "longer_by": available - reach},
        )


def _quoted(text: str) -> str:
    cut = text if len(text) <= 120 else text[:117] + "..."
    return "'" + cut.encode("unicode_escape").decode() + "'" if not cut.isprintable() else f"'{cut}'"
