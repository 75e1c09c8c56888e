"""What a pickle becomes when nothing is ever run: names stay names, calls become records of the call.

Plain data (texts, numbers, lists, dicts, tuples) is itself. Everything else is one of these.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Call = Callable[[Any], Any]
"""How an inert machine answers a call of a known global, given the argument tuple."""


class Symbol:
    """A global that a pickle names: a class or function that was never looked up."""

    __slots__ = ("built", "call", "called", "full", "module", "name")

    def __init__(self, module: str, name: str, call: Call | None = None) -> None:
        self.module = module
        self.name = name
        self.full = f"{module}.{name}"
        self.call = call
        self.called = False
        self.built = False

    def __repr__(self) -> str:
        return f"<{self.full}>"


class Record:
    """The object that a call of a global would have made: what was called, with what, and the state given to it."""

    __slots__ = ("args", "items", "state", "symbol")

    def __init__(self, symbol: Symbol, args: Any) -> None:
        self.symbol = symbol
        self.args = args
        self.state: Any = None
        self.items: list[Any] = []

    def __repr__(self) -> str:
        return f"<{self.symbol.full} record>"


class Blob:
    """A long text or byte string, left where it lies in the pickle."""

    __slots__ = ("position", "size", "text")

    def __init__(self, position: int, size: int, *, text: bool) -> None:
        self.position = position
        self.size = size
        self.text = text

    def __repr__(self) -> str:
        return f"<{self.size} bytes of {'text' if self.text else 'data'}>"


class TupleKey(str):
    """A tuple that was a key of a dict, as text: tuples from a file can be made to collide, texts cannot."""

    __slots__ = ()


class Storage:
    """The memory behind tensors: `kind` is torch's name of the storage class, `count` its elements of that kind."""

    __slots__ = ("count", "key", "kind", "location", "size", "start")

    def __init__(self, key: str, kind: str, count: int, location: str) -> None:
        self.key = key
        self.kind = kind
        self.count = count
        self.location = location
        self.start: int | None = None
        self.size = 0

    def __repr__(self) -> str:
        return f"<storage {self.key}: {self.count} of {self.kind}>"


class RawTensor:
    """A tensor as a rebuild call described it; nothing is checked yet."""

    __slots__ = ("dtype", "offset", "shape", "special", "storage", "stride")

    def __init__(  # noqa: PLR0917 - positional on purpose: one is made for every tensor
        self,
        storage: Any,
        offset: Any,
        shape: Any,
        stride: Any,
        dtype: Any = None,
        special: str | None = None,
    ) -> None:
        self.storage = storage
        self.offset = offset
        self.shape = shape
        self.stride = stride
        self.dtype = dtype
        self.special = special

    def __repr__(self) -> str:
        return "<tensor>"


@contextmanager
def uncollected() -> Iterator[None]:
    """Build a tree without the collector of cycles, which would walk the growing tree again and again for nothing.

    What is built here is bounded by a budget. Whoever paused the collector before keeps it paused.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()
