"""A pickle interpreter that can run nothing: it knows the opcodes and no way to import, call or set anything.

Globals become inert symbols, calls become records (inert.py) or are answered by a table of pure functions that the
caller gives. What a file may cost is bounded: opcodes here, memory in deck.py.
"""

from struct import Struct
from struct import error as StructError  # noqa: N812 - a class
from typing import Any, Final

from weighbridge.adapters.formats.deck import TEXT_LIMIT, Deck
from weighbridge.adapters.formats.inert import Record, Symbol
from weighbridge.adapters.formats.opcodes import OTHER
from weighbridge.adapters.formats.protocol import FormatFault

OPERATIONS_LIMIT: Final = 4_000_000
"""Opcodes of one pickle: some 120,000 tensors."""

_SLICE: Final = 100_000
_U32: Final = Struct("<I").unpack_from
_I32: Final = Struct("<i").unpack_from


class Machine(Deck):
    """One run over one pickle; afterwards it tells what the pickle named and did."""

    end = 0
    operations = OPERATIONS_LIMIT

    def run(self, data: bytes, position: int = 0) -> Any:
        """Return the value of the pickle that begins here; `end` is then where it stops. Raises FormatFault."""
        self.data = data
        self.memo, self.stack, self.marks = {}, [], []
        where = [position]
        try:
            for start in range(0, self.operations, _SLICE):
                if self._slice(where, min(_SLICE, self.operations - start)):
                    self.end = where[0]
                    value = self.stack.pop()
                    self.memo, self.stack, self.marks = {}, [], []
                    return value
                held = (len(self.stack) + len(self.marks)) * 16 + len(self.memo) * 112
                self.charge(held)
                self.spent -= held
        except (IndexError, StructError) as error:
            if where[0] >= len(data) or isinstance(error, StructError):
                raise self.cut() from error
            raise self.damaged(where[0], "it takes from an empty stack") from error
        except KeyError as error:
            raise self.damaged(where[0], "it asks for something it never kept") from error
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise self.damaged(where[0], str(error)) from error
        raise FormatFault(
            "pickle-too-large", f"the pickle has more than {self.operations} operations", limit=self.operations
        )

    def _slice(self, where: list[int], operations: int) -> bool:
        """Run up to that many operations; True when the pickle stopped. One loop on purpose: this is the hot path."""
        data, memo, stack, marks = self.data, self.memo, self.stack, self.marks
        size, persistent, other = len(data), self.persistent or self.stray, OTHER
        push, pop, mark = stack.append, stack.pop, marks.append
        position = where[0]
        spent, beyond = 0, False
        try:
            for _ in range(operations):
                op = data[position]
                position += 1
                if op == 0x4B:  # BININT1
                    push(data[position])
                    position += 1
                elif op == 0x68:  # BINGET
                    push(memo[data[position]])
                    position += 1
                elif op == 0x28:  # MARK
                    mark(len(stack))
                elif op == 0x52:  # REDUCE
                    args = pop()
                    func = stack[-1]
                    if type(func) is Symbol and type(args) is tuple:
                        func.called = True
                        call = func.call
                        stack[-1] = made = Record(func, args) if call is None else call(args)
                        spent += 150
                    else:
                        stack[-1] = made = self.make(func, args)
                    if data[position] == 0x72:  # most values are kept at once
                        memo[_U32(data, position + 1)[0]] = made
                        position += 5
                elif op == 0x58:  # BINUNICODE
                    stop = position + 4 + _U32(data, position)[0]
                    if stop - position > TEXT_LIMIT or stop > size:
                        position = self.string(position + 4, stop - position - 4, text=True)
                    else:
                        try:
                            text = data[position + 4 : stop].decode()
                        except UnicodeDecodeError:
                            text = str(data[position + 4 : stop], "utf-8", "surrogatepass")
                        push(text)
                        spent += 50 + stop - position
                        position = stop
                        if data[position] == 0x72:  # most values are kept at once
                            memo[_U32(data, position + 1)[0]] = text
                            position += 5
                elif op == 0x74:  # TUPLE
                    start = marks.pop()
                    if start > len(stack):
                        raise IndexError
                    value = tuple(stack[start:])
                    del stack[start:]
                    push(value)
                    spent += 56 + 8 * len(value)
                    if data[position] == 0x72:  # most values are kept at once
                        memo[_U32(data, position + 1)[0]] = value
                        position += 5
                elif op == 0x86:  # TUPLE2
                    second = pop()
                    stack[-1] = value = (stack[-1], second)
                    spent += 72
                    if data[position] == 0x72:  # most values are kept at once
                        memo[_U32(data, position + 1)[0]] = value
                        position += 5
                elif op == 0x51:  # BINPERSID
                    stack[-1] = persistent(stack[-1])
                    spent += 120
                elif op == 0x89:  # NEWFALSE
                    push(False)
                elif op == 0x29:  # EMPTY_TUPLE
                    push(())
                elif op == 0x72:  # LONG_BINPUT
                    memo[_U32(data, position)[0]] = stack[-1]
                    position += 4
                elif op == 0x6A:  # LONG_BINGET
                    push(memo[_U32(data, position)[0]])
                    position += 4
                elif op == 0x71:  # BINPUT
                    memo[data[position]] = stack[-1]
                    position += 1
                elif op == 0x85:  # TUPLE1
                    stack[-1] = (stack[-1],)
                    spent += 64
                elif op == 0x4D:  # BININT2
                    push(data[position] | data[position + 1] << 8)
                    position += 2
                elif op == 0x87:  # TUPLE3
                    third, second = pop(), pop()
                    stack[-1] = (stack[-1], second, third)
                    spent += 80
                elif op == 0x94:  # MEMOIZE
                    memo[len(memo)] = stack[-1]
                    beyond = True
                elif op == 0x8C:  # SHORT_BINUNICODE
                    stop = position + 1 + data[position]
                    if stop > size:
                        raise self.cut()
                    push(str(data[position + 1 : stop], "utf-8", "surrogatepass"))
                    position = stop
                    spent += 128
                    beyond = True
                elif op == 0x4A:  # BININT
                    push(_I32(data, position)[0])
                    position += 4
                elif op == 0x7D:  # EMPTY_DICT
                    push({})
                    spent += 200
                elif op == 0x5D:  # EMPTY_LIST
                    push([])
                    spent += 200
                elif op == 0x61:  # APPEND
                    item = pop()
                    value = stack[-1]
                    if type(value) is list:
                        value.append(item)
                        spent += 32
                    else:
                        self.extend(value, [item])
                elif op == 0x4E:  # NONE
                    push(None)
                elif op == 0x88:  # NEWTRUE
                    push(True)
                elif op == 0x2E:  # STOP
                    return True
                else:
                    position = other[op](self, position)
        finally:
            where[0] = position
            self.spent += spent
            self.beyond |= beyond
        return False
