"""The wire format of protocol buffers, walked over an open file: numbers and places, no message classes, no copies."""

from collections.abc import Iterator
from typing import Final, NamedTuple

from weighbridge.adapters.formats.protocol import FormatFault
from weighbridge.adapters.formats.source import Source

VARINT: Final = 0
FIXED_64: Final = 1
BYTES: Final = 2
FIXED_32: Final = 5

FIELD_LIMIT: Final = 1_000_000
"""Fields of one file, all levels together."""

_WINDOW: Final = 64 << 10


class Field(NamedTuple):
    """One field: a varint's value, or where the bytes of anything else begin and how many they are."""

    number: int
    kind: int
    value: int
    start: int
    size: int


class Walk:
    """Fields of the messages of one file, with a budget. Every fault is a FormatFault."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.budget = FIELD_LIMIT
        self._data = b""
        self._from = 0

    def fields(self, start: int, stop: int) -> Iterator[Field]:
        """Yield the fields of the message in these bytes."""
        at = start
        while at < stop:
            self.budget -= 1
            if self.budget < 0:
                raise FormatFault("header-too-large", f"the file holds more than {FIELD_LIMIT} fields")
            place = at - self._from
            if 0 <= place < len(self._data) and self._data[place] < 0x80:
                key, at = self._data[place], at + 1
            else:
                key, at = self._varint(at, stop)
            number, kind = key >> 3, key & 7
            if not number:
                raise self._damaged(at, "a field has the number 0")
            if kind == VARINT:
                value, at = self._varint(at, stop)
                yield Field(number, kind, value, at, 0)
                continue
            if kind == BYTES:
                size, at = self._varint(at, stop)
            elif kind in {FIXED_32, FIXED_64}:
                size = 4 if kind == FIXED_32 else 8
            else:
                raise self._damaged(at, f"a field has the unknown kind {kind}")
            if at + size > stop:
                raise self._short(at, size, stop)
            yield Field(number, kind, 0, at, size)
            at += size

    def _short(self, at: int, size: int, stop: int) -> FormatFault:
        if stop != self.source.length:
            return self._damaged(at, "a field is longer than the message around it")
        return FormatFault(
            "file-short",
            f"short by {at + size - stop} bytes: a field asks for {at + size}, the file has {stop}",
            file_bytes=self.source.length,
            expected_bytes=at + size,
            short_by=at + size - stop,
        )

    def text(self, field: Field, limit: int = 1024) -> str:
        """Return a field's bytes as text, cut to a limit."""
        return self.bytes(field, limit).decode("utf-8", "replace")

    def bytes(self, field: Field, limit: int) -> bytes:
        """Return the first bytes of a field."""
        if field.kind != BYTES:
            raise self._damaged(field.start, "a number stands where a text belongs")
        size = min(field.size, limit)
        self._hold(field.start, size)
        return self._data[field.start - self._from : field.start - self._from + size]

    def numbers(self, field: Field, limit: int) -> list[int]:
        """Return a repeated number, packed or single."""
        if field.kind == VARINT:
            return [field.value]
        if field.kind != BYTES:
            raise self._damaged(field.start, "a list of numbers is none")
        values: list[int] = []
        at, stop = field.start, field.start + field.size
        while at < stop:
            if len(values) >= limit:
                raise self._damaged(at, f"a list has more than {limit} numbers")
            value, at = self._varint(at, stop)
            values.append(value)
        return values

    def _varint(self, at: int, stop: int) -> tuple[int, int]:
        if at >= stop:
            raise self._damaged(at, "a number is missing")
        place = at - self._from
        if not 0 <= place <= len(self._data) - 10:
            self._hold(at, min(10, stop - at))
            place = at - self._from
        data = self._data
        byte = data[place]
        if byte < 0x80:
            return byte, at + 1
        value, shift = byte & 0x7F, 7
        for index in range(1, min(10, stop - at)):
            byte = data[place + index]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at + index + 1
            shift += 7
        raise self._damaged(at, "a number does not end")

    def _hold(self, at: int, size: int) -> None:
        if at < self._from or at + size > self._from + len(self._data):
            self._from = at
            self._data = self.source.at(at, min(max(size, _WINDOW), self.source.length - at))

    def _damaged(self, at: int, why: str) -> FormatFault:
        return FormatFault("header-damaged", f"the file is no sound message near byte {at}: {why}", position=at)
