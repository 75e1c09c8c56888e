"""What a merge will do, as frozen values: the plan crosses to the child process and is the identity of its staging."""

from typing import Any, Final

import msgspec

from weighbridge.adapters.formats.safetensors import product
from weighbridge.registry.types import Value

DTYPES: Final = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
"""Names of the precisions a result can be asked for."""

WIDTH: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes of an element of every dtype the arithmetic handles."""


class Origin(Value, frozen=True):
    """Stored bytes: `file` indexes `Plan.sources`, `at` counts from the start of the file."""

    file: int
    at: int
    dtype: str
    shape: tuple[int, ...]
    name: str = ""

    @property
    def count(self) -> int:
        """Elements."""
        return product(self.shape)


class Factor(Value, frozen=True):
    """One low-rank product that lands on the rows `at` to `at + rows` of a tensor seen as a matrix.

    The left matrix is B, the right one A; with `swap` they are A and B transposed, as for Conv1D and embeddings. With
    `experts` above 1 the two hold all experts and `expert` is the one that is meant. The left matrix's rows from `skip`
    on are used.
    """

    a: Origin
    b: Origin
    scale: float
    rows: int
    at: int = 0
    skip: int = 0
    swap: bool = False
    expert: int = 0
    experts: int = 1


class Magnitude(Value, frozen=True):
    """The magnitudes of DoRA: one for each row of the tensor, or for each column where it is stored transposed."""

    origin: Origin
    columns: bool = False


class Rows(Value, frozen=True):
    """Rows that are replaced by trained ones."""

    origin: Origin
    indices: tuple[int, ...]


class Term(Value, frozen=True):
    """A vector that is scaled and added: the bias of lora_B."""

    origin: Origin
    scale: float


class Step(Value, frozen=True):
    """How one tensor of the result comes to be: its origin's values, changed, rounded once to `dtype`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    origin: Origin
    at: int
    """Where it begins in the written file."""
    base: Origin | None = None
    """The base's tensor, where the origin is another: what the result is compared with."""
    factors: tuple[Factor, ...] = ()
    magnitude: Magnitude | None = None
    rows: Rows | None = None
    term: Term | None = None
    replaced: bool = False
    computed: bool = False
    """Its values come from PEFT's own merge: `origin` is the base's until they are there, `base` from then on."""
    columns: int = 0
    """Its width seen as a matrix, where that is not the product of all sides but the first: experts in one tensor."""

    @property
    def touched(self) -> bool:
        """The adapter changes it; a change of dtype alone does not count."""
        return bool(self.factors or self.rows or self.term or self.replaced or self.computed)

    @property
    def verbatim(self) -> bool:
        """Its bytes are those of its origin."""
        return not (self.factors or self.rows or self.term or self.computed) and self.origin.dtype == self.dtype

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of the tensor seen as a matrix; experts in one tensor are stacked."""
        if len(self.shape) < 2:
            return (1, self.shape[0]) if self.shape else (1, 1)
        columns = self.columns or product(self.shape[1:])
        return (product(self.shape) // columns if columns else 0), columns


class OutFile(Value, frozen=True):
    """One file of the result: its header as it will stand there and its steps in the order of the bytes."""

    path: str
    header: bytes
    steps: tuple[Step, ...]
    size: int


class Source(Value, frozen=True):
    """A file that is read, as it was when the plan was made."""

    path: str
    size: int
    mtime_ns: int
    ino: int


class Plan(Value, frozen=True):
    """Everything the child process needs to write the weights and to prove them."""

    sources: tuple[Source, ...]
    files: tuple[OutFile, ...]
    dtype: str
    """The dtype most of the result is in."""
    base_files: int
    """How many of the sources are the base's; the others are the adapters'."""
    adapters: tuple[str, ...] = ()

    @property
    def steps(self) -> list[Step]:
        """The steps of all files."""
        return [step for file in self.files for step in file.steps]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


class Bundle(Value, frozen=True):
    """The files beside the weights: copied from a folder, or written with these bytes."""

    copies: dict[str, str]
    written: dict[str, bytes]
    facts: dict[str, Any] = msgspec.field(default_factory=dict)
