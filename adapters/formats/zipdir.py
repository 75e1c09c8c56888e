"""The directory of a zip archive, read strictly: what two readers could understand differently is refused.

    local header, bytes of a member    in any order, none over another
    central directory                  one record per member: the only list that counts
    end records                        the last bytes of the file

Checkpoints are read by member name, never extracted, so no name can leave a folder. Every local header is compared with
its record. Names are compared without regard to case, because torch's own reader looks them up that way.
"""

from struct import Struct
from typing import Any, Final, NamedTuple

from weighbridge.adapters.formats.protocol import FormatFault, shown
from weighbridge.adapters.formats.source import Source

STORED: Final = 0
DEFLATED: Final = 8

MEMBER_LIMIT: Final = 400_000
DIRECTORY_LIMIT: Final = 64 << 20
NAME_LIMIT: Final = 1024

_END: Final = Struct("<4sHHHHIIH")
_END_64: Final = Struct("<4sQHHIIQQQQ")
_LOCATOR_64: Final = Struct("<4sIQI")
_RECORD: Final = Struct("<IHHHHHHIIIHHHHHII")
_LOCAL: Final = Struct("<IHHHHHIIIHH")
_RECORD_MARK: Final = 0x02014B50
_LOCAL_MARK: Final = 0x04034B50
_MANY: Final = 0xFFFFFFFF
_ENCRYPTED: Final = 0x2041
_BLOCK: Final = 32 << 10


class Member(NamedTuple):
    """One member: `start` is where its bytes begin in the archive, `stored` how many there are, `size` unpacked."""

    name: str
    start: int
    stored: int
    size: int
    crc: int
    method: int


def damaged(message: str, source: Source, **data: Any) -> FormatFault:
    """Return the fault of an archive that is not sound."""
    return FormatFault("zip-damaged", message, file_bytes=source.length, **data)


_Row = tuple[int, int, int, int, int, bytes]
"""Where the local header lies, stored and unpacked bytes, checksum, method, name."""


def read(source: Source) -> dict[str, Member]:
    """Return the members by name, in the order of the central directory. Raises FormatFault."""
    start, size, count = _end(source)
    names, rows = _rows(source, start, size, count)
    starts = _starts(rows, source, start)
    new = tuple.__new__  # half the cost of calling the class, a hundred thousand times
    return {
        name: new(Member, (name, begin, row[1], row[2], row[3], row[4]))
        for name, row, begin in zip(names, rows, starts, strict=True)
    }


def names(source: Source) -> list[str]:
    """Return the names of the members, whose local headers are not looked at. Raises FormatFault."""
    return _rows(source, *_end(source))[0]


def _rows(source: Source, start: int, size: int, count: int) -> tuple[list[str], list[_Row]]:
    if size > DIRECTORY_LIMIT or count > MEMBER_LIMIT:
        raise FormatFault(
            "zip-too-large",
            f"the archive lists {count} members in {size} bytes, the limits are {MEMBER_LIMIT} and {DIRECTORY_LIMIT}",
            members=count,
        )
    directory = source.at(start, size)
    rows: list[_Row] = []
    found: list[str] = []
    position = 0
    unpack = _RECORD.unpack_from
    for _ in range(count):
        if position + 46 > size:
            raise damaged(f"the directory ends in the middle of member {len(rows) + 1} of {count}", source)
        (mark, _, _, flags, method, _, _, crc, stored, full, n_name, n_extra, n_comment, disk, _, _, header) = unpack(
            directory, position
        )
        if mark != _RECORD_MARK:
            raise damaged(f"member {len(rows) + 1} of {count} has no valid record", source)
        after = position + 46 + n_name
        raw = directory[position + 46 : after]
        if _MANY in {stored, full, header}:
            stored, full, header = _wide(directory[after : after + n_extra], stored, full, header, source)
        position = after + n_extra + n_comment
        if flags & _ENCRYPTED:
            raise FormatFault("zip-encrypted", "the archive holds encrypted members")
        if disk or not 0 < n_name <= NAME_LIMIT:
            raise damaged(f"member {len(rows) + 1} of {count} lies on another disk or has no valid name", source)
        if method == STORED and stored != full:
            raise damaged(f"a stored member claims {full} bytes and has {stored}", source)
        found.append(raw.decode("utf-8", "surrogateescape"))
        rows.append((header, stored, full, crc, method, raw))
    if position != size:
        raise damaged(f"the directory has {size} bytes, its {count} records take {position}", source)
    _unique(found)
    return found, rows


def _end(source: Source) -> tuple[int, int, int]:
    """Return where the central directory begins, its bytes and its members, as the end records say."""
    tail_size = min(source.length, 22 + 0xFFFF)
    tail_start = source.length - tail_size
    tail = source.at(tail_start, tail_size)
    found = [
        place
        for place in _places(tail, b"PK\5\6")
        if place + 22 + int.from_bytes(tail[place + 20 : place + 22], "little") == tail_size
    ]
    if not found:
        raise FormatFault(
            "zip-cut",
            f"the zip container is cut short or overwritten: no end record in the last of its {source.length} bytes",
            file_bytes=source.length,
        )
    if len(found) > 1:
        raise damaged("two end records fit: readers would disagree about the content", source)
    end = tail_start + found[0]
    _, disk, first_disk, here, count, size, start, _ = _END.unpack_from(tail, found[0])
    if end >= 20 and source.at(end - 20, 4) == b"PK\6\7":
        _, disk_64, place, disks = _LOCATOR_64.unpack(source.at(end - 20, 20))
        record = source.at(place, 56) if place + 56 <= end - 20 else b""
        if record[:4] != b"PK\6\6" or disk_64 or disks > 1:
            raise damaged("the large-file end record is not where its locator points", source)
        _, extent, _, _, disk, first_disk, here_64, count_64, size_64, start_64 = _END_64.unpack(record)
        pairs = ((here, here_64, 0xFFFF), (count, count_64, 0xFFFF), (size, size_64, _MANY), (start, start_64, _MANY))
        if any(small not in {large, limit} for small, large, limit in pairs):
            raise damaged("the two end records disagree", source)
        if place + 12 + extent != end - 20:
            raise damaged("the large-file end record has no valid length", source)
        here, count, size, start, end = here_64, count_64, size_64, start_64, place
    if disk or first_disk or here != count:
        raise damaged("the archive is one part of several", source)
    if start + size != end:
        raise damaged(
            f"the directory should end at {end} and ends at {start + size}: bytes were put in or taken out", source
        )
    return start, size, count


def _places(data: bytes, mark: bytes) -> list[int]:
    places: list[int] = []
    place = data.rfind(mark)
    while place >= 0 and len(places) < 64:
        places.append(place)
        place = data.rfind(mark, 0, place)
    return places


def _wide(extra: bytes, stored: int, full: int, header: int, source: Source) -> tuple[int, int, int]:
    """Return the three numbers of a large member from its extra field."""
    position = 0
    while position + 4 <= len(extra):
        kind = int.from_bytes(extra[position : position + 2], "little")
        length = int.from_bytes(extra[position + 2 : position + 4], "little")
        if kind == 1:
            field = extra[position + 4 : position + 4 + length]
            wanted = [
                name for name, value in (("full", full), ("stored", stored), ("header", header)) if value == _MANY
            ]
            if len(field) < 8 * len(wanted):
                break
            values = {name: int.from_bytes(field[8 * i : 8 * i + 8], "little") for i, name in enumerate(wanted)}
            return values.get("stored", stored), values.get("full", full), values.get("header", header)
        position += 4 + length
    raise damaged("a large member lacks its sizes", source)


def _unique(names: list[str]) -> None:
    folded = [name.casefold() for name in names]
    if len(set(folded)) != len(folded):
        seen: set[str] = set()
        for name, fold in zip(names, folded, strict=True):
            if fold in seen:
                raise FormatFault(
                    "zip-duplicate", f"the archive holds {shown(name)} twice: readers would disagree", member=name
                )
            seen.add(fold)


def _starts(rows: list[_Row], source: Source, limit: int) -> list[int]:
    """Return where each member's bytes begin, after its local header was compared with its record."""
    order = sorted(range(len(rows)), key=rows.__getitem__)
    near = limit < 4096 * max(1, len(rows))
    block, block_start, block_end = b"", 0, 0
    starts = [0] * len(rows)
    unpack = _LOCAL.unpack_from
    reach = 0
    for index in order:
        header, stored, _, _, method, raw = rows[index]
        n_raw = len(raw)
        if header < reach:
            raise damaged(f"members overlap at byte {header}", source)
        if header + 30 + n_raw + stored > limit:
            raise damaged(f"{shown(raw.decode('utf-8', 'replace'))} reaches into the directory", source)
        if header + 30 + n_raw > block_end:
            block_start = header
            block_end = min(header + (_BLOCK if near else 30 + n_raw), limit)
            block = source.at(block_start, block_end - block_start)
        place = header - block_start
        mark, _, flags, local_method, _, _, _, _, _, n_name, n_extra = unpack(block, place)
        if (
            mark != _LOCAL_MARK
            or n_name != n_raw
            or local_method != method
            or flags & _ENCRYPTED
            or block[place + 30 : place + 30 + n_raw] != raw
        ):
            raise damaged(
                f"the member at byte {header} is not {shown(raw.decode('utf-8', 'replace'))}, as the directory says",
                source,
            )
        begin = header + 30 + n_raw + n_extra
        reach = begin + stored
        if reach > limit:
            raise damaged(f"{shown(raw.decode('utf-8', 'replace'))} reaches into the directory", source)
        starts[index] = begin
    return starts
