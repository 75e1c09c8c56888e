"""What an inert pickle machine holds in its hands: stack, memo, budget, and the few ways to put things together.

Every copy and container is paid from the budget, so that a small file cannot ask for a large memory or a long time;
dict keys are restricted to what cannot be made to collide or to recurse.
"""

from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Mapping
from typing import Any, Final

from weighbridge.adapters.formats.inert import Blob, Call, RawTensor, Record, Storage, Symbol, TupleKey
from weighbridge.adapters.formats.protocol import FormatFault, plain, shown

MEMORY_LIMIT: Final = 192 << 20
"""Estimated bytes of everything one pickle builds."""

TEXT_LIMIT: Final = 64 << 10
"""Longer texts and byte strings stay where they are."""

GLOBAL_LIMIT: Final = 512
"""Characters of a module or name."""

SYMBOL_LIMIT: Final = 20_000

_KEY_BITS: Final = 64
_KEY_DEPTH: Final = 4
_KEY_PARTS: Final = 64
_PLAIN_KEYS: Final = frozenset(
    {str, int, float, bool, bytes, type(None), Symbol, Record, RawTensor, Storage, Blob, TupleKey}
)


class Deck:
    """The state of one run, with what it takes from a budget."""

    def __init__(self, persistent: Callable[[Any], Any] | None = None, calls: Mapping[str, Call] | None = None) -> None:
        self.calls = calls or {}
        self.persistent = persistent
        self.symbols: dict[tuple[str, str], Symbol] = {}
        self.odd: list[str] = []
        """What no honest pickle does, a sentence each."""
        self.beyond = False
        """Whether it used opcodes that torch's own safe loading does not know."""
        self.protocol = 0
        self.spent = 0
        self.data = b""
        self.memo: dict[int, Any] = {}
        self.stack: list[Any] = []
        self.marks: list[int] = []

    # ------------------------------------------------------------------------------------------------------- budget

    def charge(self, size: int) -> None:
        """Pay for work or memory that depends on the length of something. Raises FormatFault when it is used up."""
        self.spent += size
        if self.spent > MEMORY_LIMIT:
            raise FormatFault(
                "pickle-too-large", f"the pickle would take more than {MEMORY_LIMIT >> 20} MiB", limit=MEMORY_LIMIT
            )

    # ------------------------------------------------------------------------------------------------------ globals

    def symbol(self, module: str, name: str) -> Symbol:
        """Return the symbol of a global; the same one for the same name."""
        found = self.symbols.get((module, name))
        if found is None:
            if len(module) > GLOBAL_LIMIT or len(name) > GLOBAL_LIMIT or len(self.symbols) >= SYMBOL_LIMIT:
                raise FormatFault("pickle-too-large", "the pickle names too many globals, or one of an absurd length")
            full_module, full_name = module, name
            if self.protocol < 3:
                if (module, name) in NAME_MAPPING:
                    full_module, full_name = NAME_MAPPING[(module, name)]
                elif module in IMPORT_MAPPING:
                    full_module = IMPORT_MAPPING[module]
            found = Symbol(full_module, full_name, self.calls.get(f"{full_module}.{full_name}"))
            self.symbols[(module, name)] = found
        return found

    def make(self, func: Any, args: Any) -> Any:
        """Return what stands for func(*args)."""
        self.spent += 150
        if type(func) is Symbol and type(args) is tuple:
            func.called = True
            return Record(func, args) if func.call is None else func.call(args)
        if type(func) is Record and type(args) is tuple:
            self.strange(f"calls what a call of {shown(func.symbol.full)} gave")
            return Record(func.symbol, args)
        raise ValueError(f"it calls a {type(func).__name__} with a {type(args).__name__}")

    def stray(self, saved: Any) -> Record:
        """Return what stands for an outside object where the container has none."""
        self.strange("names outside objects, which only torch's own containers have")
        return Record(self.symbol("", "outside object"), (saved,))

    def strange(self, sentence: str) -> None:
        """Note what no honest pickle does."""
        if len(self.odd) < 16 and sentence not in self.odd:
            self.odd.append(sentence)

    # --------------------------------------------------------------------------------------------------- containers

    def since_mark(self) -> list[Any]:
        """Take everything above the last mark."""
        start = self.marks.pop()
        if start > len(self.stack):
            raise IndexError
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def put(self, target: Any, items: list[Any]) -> None:
        """Put keys and values, one after the other, into a dict or the record of one."""
        if len(items) % 2:
            raise ValueError("a key has no value")
        if type(target) is dict:
            keys = items[::2]
            if set(map(type, keys)) - {str}:
                keys = [self.key(key) for key in keys]
            target.update(zip(keys, items[1::2], strict=True))
        elif type(target) is Record:
            target.items.extend(zip(items[::2], items[1::2], strict=True))
        else:
            self.strange("sets items of something that is no dict")

    def key(self, key: Any, depth: int = 0) -> Any:
        """Return the key as it may stand in a dict; a tuple becomes a text."""
        kind = type(key)
        if kind is tuple and depth < _KEY_DEPTH and len(key) <= _KEY_PARTS:
            self.charge(100 * len(key) + 100)
            inner = [self.key(part, depth + 1) for part in key]
            return TupleKey("(" + ", ".join(str(part)[:GLOBAL_LIMIT] for part in inner) + ")")
        if kind not in _PLAIN_KEYS:
            raise ValueError(f"a {kind.__name__} cannot be a key")
        if kind is int and key.bit_length() > _KEY_BITS:
            raise ValueError("a number of this size cannot be a key")
        return key

    def extend(self, target: Any, items: list[Any]) -> None:
        """Append to a list or the record of one."""
        self.spent += 16 * len(items)
        if type(target) is list:
            target.extend(items)
        elif type(target) is Record:
            target.items.extend(items)
        else:
            self.strange("appends to something that is no list")

    def build(self, target: Any, state: Any) -> None:
        """Give a record its state. Attributes of dicts, lists and tensors say nothing about the weights."""
        if type(target) is Record:
            target.state = state
            target.symbol.built = True
        elif type(target) is Symbol:
            target.built = True
            self.strange(f"changes {shown(target.full)} itself")

    # -------------------------------------------------------------------------------------------------------- texts

    def line(self, position: int) -> tuple[bytes, int]:
        """Return the bytes up to the next line end, and where the next line begins."""
        stop = self.data.find(b"\n", position, position + TEXT_LIMIT)
        if stop < 0:
            if len(self.data) - position < TEXT_LIMIT:
                raise self.cut()
            raise ValueError("a line never ends")
        self.spent += stop - position + 50
        return self.data[position:stop], stop + 1

    def string(self, position: int, length: int, *, text: bool) -> int:
        """Push a text or a byte string; return where the next opcode is."""
        stop = position + length
        if stop > len(self.data):
            raise self.cut()
        if length > TEXT_LIMIT:
            self.stack.append(Blob(position, length, text=text))
        else:
            self.spent += 50 + length
            part = self.data[position:stop]
            self.stack.append(str(part, "utf-8", "surrogatepass") if text else part)
        return stop

    def old_text(self, raw: bytes) -> str | bytes:
        """Return a string of Python 2: text where it can be."""
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return raw

    # ------------------------------------------------------------------------------------------------------- faults

    def cut(self) -> FormatFault:
        """Return the fault of a pickle that ends too early."""
        size = len(self.data)
        return FormatFault("pickle-cut", f"the pickle goes on after the last of its {size} bytes", position=size)

    def damaged(self, position: int, why: str) -> FormatFault:
        """Return the fault of a pickle that is not sound."""
        return FormatFault(
            "pickle-damaged", f"the pickle is not sound near byte {position}: {plain(why, 200)}", position=position
        )
