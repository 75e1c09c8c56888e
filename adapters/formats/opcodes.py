"""The pickle opcodes outside the hot loop of machine.py: each takes a deck and a position and returns the next one."""

import codecs
from collections.abc import Callable
from struct import Struct
from typing import Any, Final

from weighbridge.adapters.formats.deck import GLOBAL_LIMIT, Deck
from weighbridge.adapters.formats.inert import Record, Symbol
from weighbridge.adapters.formats.protocol import FormatFault

Operation = Callable[[Deck, int], int]

_RAW_UNICODE: Final = codecs.lookup("raw-unicode-escape")
"""Looked up now: a file that needs it must not make the reader import anything."""

_U32: Final = Struct("<I").unpack_from
_U64: Final = Struct("<Q").unpack_from
_F64: Final = Struct(">d").unpack_from
_DIGITS_LIMIT: Final = 4000
_LONG_LIMIT: Final = 1 << 16


class _Table(dict[int, Operation]):
    def __missing__(self, op: int) -> Operation:
        raise ValueError(f"0x{op:02x} is no opcode")


OTHER: Final = _Table()
"""Operation by opcode; what neither this nor the hot loop knows is no opcode."""


def _on(op: int) -> Callable[[Operation], Operation]:
    def keep(operation: Operation) -> Operation:
        OTHER[op] = operation
        return operation

    return keep


@_on(0x80)  # PROTO
def _proto(deck: Deck, position: int) -> int:
    protocol = deck.data[position]
    if protocol > 5:
        raise ValueError(f"protocol {protocol} does not exist")
    deck.protocol = protocol
    return position + 1


@_on(0x63)  # GLOBAL
def _global(deck: Deck, position: int) -> int:
    module, position = deck.line(position)
    name, position = deck.line(position)
    deck.stack.append(deck.symbol(module.decode(), name.decode()))
    return position


@_on(0x93)  # STACK_GLOBAL
def _stack_global(deck: Deck, position: int) -> int:
    name, module = deck.stack.pop(), deck.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise ValueError("a global is named by something that is no text")
    deck.beyond = True
    deck.stack.append(deck.symbol(module, name))
    return position


@_on(0x69)  # INST
def _inst(deck: Deck, position: int) -> int:
    position = _global(deck, position)
    symbol = deck.stack.pop()
    deck.beyond = True
    deck.stack.append(deck.make(symbol, tuple(deck.since_mark())))
    return position


@_on(0x6F)  # OBJ
def _obj(deck: Deck, position: int) -> int:
    items = deck.since_mark()
    deck.beyond = True
    deck.stack.append(deck.make(items[0], tuple(items[1:])))
    return position


@_on(0x81)  # NEWOBJ
def _newobj(deck: Deck, position: int) -> int:
    args = deck.stack.pop()
    deck.stack[-1] = deck.make(deck.stack[-1], args)
    return position


@_on(0x92)  # NEWOBJ_EX
def _newobj_ex(deck: Deck, position: int) -> int:
    named, args = deck.stack.pop(), deck.stack.pop()
    deck.beyond = True
    made = deck.make(deck.stack[-1], args)
    if type(made) is Record and named:
        made.items.append(named)
    deck.stack[-1] = made
    return position


def _extension(size: int) -> Operation:
    def push(deck: Deck, position: int) -> int:
        code = int.from_bytes(deck.data[position : position + size], "little")
        deck.beyond = True
        deck.strange("uses extension codes, which stand for globals that only the reader's process knows")
        deck.stack.append(deck.symbol("copyreg", f"extension {code}"))
        return position + size

    return push


for _op, _size in ((0x82, 1), (0x83, 2), (0x84, 4)):
    OTHER[_op] = _extension(_size)


@_on(0x62)  # BUILD
def _build(deck: Deck, position: int) -> int:
    state = deck.stack.pop()
    deck.build(deck.stack[-1], state)
    return position


@_on(0x75)  # SETITEMS
def _setitems(deck: Deck, position: int) -> int:
    items = deck.since_mark()
    deck.spent += 60 * len(items)
    deck.put(deck.stack[-1], items)
    return position


@_on(0x73)  # SETITEM
def _setitem(deck: Deck, position: int) -> int:
    value, key = deck.stack.pop(), deck.stack.pop()
    deck.spent += 120
    deck.put(deck.stack[-1], [key, value])
    return position


@_on(0x65)  # APPENDS
def _appends(deck: Deck, position: int) -> int:
    items = deck.since_mark()
    deck.extend(deck.stack[-1], items)
    return position


@_on(0x90)  # ADDITEMS
def _additems(deck: Deck, position: int) -> int:
    deck.beyond = True
    return _appends(deck, position)


@_on(0x8F)  # EMPTY_SET
def _empty_set(deck: Deck, position: int) -> int:
    deck.spent += 150
    deck.stack.append(Record(Symbol("builtins", "set"), ()))
    return position


@_on(0x91)  # FROZENSET
def _frozenset(deck: Deck, position: int) -> int:
    record = Record(Symbol("builtins", "frozenset"), ())
    record.items = deck.since_mark()
    deck.spent += 150 + 8 * len(record.items)
    deck.beyond = True
    deck.stack.append(record)
    return position


@_on(0x6C)  # LIST
def _list(deck: Deck, position: int) -> int:
    items = deck.since_mark()
    deck.spent += 80 + 8 * len(items)
    deck.beyond = True
    deck.stack.append(items)
    return position


@_on(0x64)  # DICT
def _dict(deck: Deck, position: int) -> int:
    items = deck.since_mark()
    deck.spent += 80 + 60 * len(items)
    deck.beyond = True
    table: dict[Any, Any] = {}
    deck.put(table, items)
    deck.stack.append(table)
    return position


@_on(0x30)  # POP
def _pop(deck: Deck, position: int) -> int:
    deck.beyond = True
    if deck.marks and deck.marks[-1] == len(deck.stack):
        deck.marks.pop()  # as pickle does: a mark with nothing above it is popped itself
    else:
        deck.stack.pop()
    return position


@_on(0x31)  # POP_MARK
def _pop_mark(deck: Deck, position: int) -> int:
    deck.beyond = True
    deck.since_mark()
    return position


@_on(0x32)  # DUP
def _dup(deck: Deck, position: int) -> int:
    deck.beyond = True
    deck.stack.append(deck.stack[-1])
    return position


# ------------------------------------------------------------------------------------------------------------- memo


@_on(0x67)  # GET
def _get(deck: Deck, position: int) -> int:
    raw, position = deck.line(position)
    deck.beyond = True
    deck.stack.append(deck.memo[_number(raw)])
    return position


@_on(0x70)  # PUT
def _put(deck: Deck, position: int) -> int:
    raw, position = deck.line(position)
    deck.beyond = True
    index = _number(raw)
    if not 0 <= index < 1 << 32:
        raise ValueError("a memo number is out of range")
    deck.memo[index] = deck.stack[-1]
    return position


# ---------------------------------------------------------------------------------------------------------- numbers


def _number(raw: bytes) -> int:
    if len(raw) > _DIGITS_LIMIT:
        raise ValueError("a number has thousands of digits")
    return int(raw)


@_on(0x49)  # INT
def _int(deck: Deck, position: int) -> int:
    raw, position = deck.line(position)
    deck.beyond = True
    deck.stack.append({b"00": False, b"01": True}.get(raw) if raw in {b"00", b"01"} else _number(raw))
    return position


@_on(0x4C)  # LONG
def _long(deck: Deck, position: int) -> int:
    raw, position = deck.line(position)
    deck.beyond = True
    deck.stack.append(_number(raw.removesuffix(b"L")))
    return position


@_on(0x8A)  # LONG1
def _long1(deck: Deck, position: int) -> int:
    return _long_bytes(deck, position + 1, deck.data[position])


@_on(0x8B)  # LONG4
def _long4(deck: Deck, position: int) -> int:
    deck.beyond = True
    return _long_bytes(deck, position + 4, _U32(deck.data, position)[0])


def _long_bytes(deck: Deck, position: int, length: int) -> int:
    if length > _LONG_LIMIT:
        raise FormatFault("pickle-too-large", f"the pickle holds a number of {length} bytes")
    if position + length > len(deck.data):
        raise deck.cut()
    deck.spent += length
    deck.stack.append(int.from_bytes(deck.data[position : position + length], "little", signed=True))
    return position + length


@_on(0x46)  # FLOAT
def _float(deck: Deck, position: int) -> int:
    raw, position = deck.line(position)
    deck.beyond = True
    deck.stack.append(float(raw))
    return position


@_on(0x47)  # BINFLOAT
def _binfloat(deck: Deck, position: int) -> int:
    deck.stack.append(_F64(deck.data, position)[0])
    return position + 8


# ------------------------------------------------------------------------------------------------------------ texts


@_on(0x8D)  # BINUNICODE8
def _binunicode8(deck: Deck, position: int) -> int:
    deck.beyond = True
    return deck.string(position + 8, _U64(deck.data, position)[0], text=True)


@_on(0x56)  # UNICODE
def _unicode(deck: Deck, position: int) -> int:
    raw, position = deck.line(position)
    deck.beyond = True
    deck.stack.append(_RAW_UNICODE.decode(raw)[0])
    return position


@_on(0x55)  # SHORT_BINSTRING
def _short_binstring(deck: Deck, position: int) -> int:
    return _old_string(deck, position + 1, deck.data[position])


@_on(0x54)  # BINSTRING
def _binstring(deck: Deck, position: int) -> int:
    deck.beyond = True
    return _old_string(deck, position + 4, _U32(deck.data, position)[0])


def _old_string(deck: Deck, position: int, length: int) -> int:
    position = deck.string(position, length, text=False)
    if type(deck.stack[-1]) is bytes:
        deck.stack[-1] = deck.old_text(deck.stack[-1])
    return position


@_on(0x53)  # STRING
def _string(deck: Deck, position: int) -> int:
    raw, position = deck.line(position)
    deck.beyond = True
    if len(raw) < 2 or raw[:1] != raw[-1:] or raw[:1] not in {b"'", b'"'}:
        raise ValueError("a text has no quotes")
    deck.stack.append(deck.old_text(raw[1:-1]))
    return position


def _bytes(size: int) -> Operation:
    def push(deck: Deck, position: int) -> int:
        deck.beyond = True
        length = int.from_bytes(deck.data[position : position + size], "little")
        return deck.string(position + size, length, text=False)

    return push


for _op, _size in ((0x43, 1), (0x42, 4), (0x8E, 8), (0x96, 8)):  # SHORT_BINBYTES BINBYTES BINBYTES8 BYTEARRAY8
    OTHER[_op] = _bytes(_size)


@_on(0x95)  # FRAME
def _frame(deck: Deck, position: int) -> int:
    deck.beyond = True
    return position + 8


@_on(0x50)  # PERSID
def _persid(deck: Deck, position: int) -> int:
    raw, position = deck.line(position)
    deck.beyond = True
    deck.stack.append(deck.stray(raw.decode("ascii")[:GLOBAL_LIMIT]))
    return position
