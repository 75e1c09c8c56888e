"""The small protocol every container reader keeps: read(path) -> Directory, or one FormatFault. Nothing else gets out.

A reader lists what a file holds from its headers alone. It needs the standard library only, imports nothing that a file
names, and bounds what it reads, so a hostile file costs a refusal and no more.

    FormatFault   the container itself is cut, damaged or disguised: there is no list to trust
    Hazard        the list stands, and something in it must be known: severity block, warn or note

A Directory with a blocking hazard is still a list: a refusal can say what the file was going to hold.
"""

from typing import Any, Final, Literal, NamedTuple

BITS: Final[dict[str, int]] = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
    "C32": 32, "C128": 128,
}  # fmt: skip
"""Bits of one element. C32 and C128 exist in torch files; safetensors cannot hold them."""

RANK_LIMIT: Final = 64
"""Dimensions of the widest tensor that is read; torch itself stops there."""

SIZE_LIMIT: Final = 1 << 63
"""No size, offset or element count reaches this."""


class FormatFault(Exception):  # noqa: N818 - a fault of the file; errors of weighbridge are in registry.errors
    """The file is not a sound container of its kind: a code, a sentence, and figures under their fact names."""

    def __init__(self, code: str, message: str, **data: Any) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data


class Hazard(NamedTuple):
    """Something in a readable file that a person or a rule must know; `subject` is the tensor, global or entry."""

    code: str
    severity: Literal["block", "warn", "note"]
    subject: str
    message: str
    data: dict[str, Any] = {}  # noqa: RUF012 - never written to


class Tensor(NamedTuple):
    """One tensor of a directory.

    `group` is the way from the root of the file to the table that holds it, `name` its key there. `nbytes` is the size
    of a plain copy. `offset` is where its first element lies in `file` ("" = the file that was read); None where the
    bytes are not to be had. `stride` is None for plain row order. Tensors with the same `storage` share memory.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int | None = None
    storage: str | None = None
    stride: tuple[int, ...] | None = None
    group: tuple[str, ...] = ()
    unsupported: str | None = None
    file: str = ""

    @property
    def elements(self) -> int:
        """Product of the shape; 1 for a scalar."""
        return elements(self.shape)


class Entry(NamedTuple):
    """One top-level entry of a file that is no tensor itself; `value` is kept where it is small and plain."""

    name: str
    kind: str
    tensors: int = 0
    nbytes: int = 0
    value: Any = None


class Directory(NamedTuple):
    """What a file holds. `root` is the inert tree of a pickle, for readers of its parts."""

    container: str
    tensors: tuple[Tensor, ...] = ()
    entries: tuple[Entry, ...] = ()
    hazards: tuple[Hazard, ...] = ()
    facts: dict[str, Any] = {}  # noqa: RUF012 - never written to
    root: Any = None

    @property
    def blocked(self) -> bool:
        """Whether a hazard forbids to take anything out of this file."""
        return any(hazard.severity == "block" for hazard in self.hazards)


def elements(shape: tuple[int, ...]) -> int:
    """Return the number of elements of a shape."""
    count = 1
    for side in shape:
        count *= side
    return count


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a plain copy; a part of a byte counts as one."""
    return -(-elements(shape) * BITS[dtype] // 8)


def histogram(tensors: tuple[Tensor, ...] | list[Tensor]) -> dict[str, dict[str, int]]:
    """Return tensors and elements per dtype, as the fact `dtype_histogram` wants them."""
    table: dict[str, dict[str, int]] = {}
    for tensor in tensors:
        row = table.setdefault(tensor.dtype, {"tensors": 0, "params": 0})
        row["tensors"] += 1
        row["params"] += tensor.elements
    return table


def shown(text: str, limit: int = 120) -> str:
    """Return text from a file as it may stand in a sentence: quoted, one line, bounded, nothing a terminal obeys."""
    return f"'{plain(text, limit)}'"


def plain(text: str, limit: int = 120) -> str:
    """Return the same without quotes."""
    cut = text if len(text) <= limit else text[: limit - 3] + "..."
    return cut if cut.isprintable() else cut.encode("unicode_escape", "backslashreplace").decode("ascii")
