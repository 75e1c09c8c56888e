"""Look at every value of a model while its bytes pass on their way into staging: no byte is read for this alone.

The directory of a safetensors file comes first in it, so the file tells itself what follows. A float is NaN or infinite
only when its exponent is all ones, and that shows in its high byte: a stride over the buffer and a search settle nearly
every block at the speed of memory. Where such a byte is seen, all exponents of a small block are tested at once, as one
large number; values are decoded one by one only to count what is certainly there.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from weighbridge.adapters import keys, lora_zeros, values
from weighbridge.adapters.formats import safetensors
from weighbridge.adapters.formats.safetensors import Tensor
from weighbridge.adapters.weights import FLOATS
from weighbridge.adapters.whole import counted, some
from weighbridge.registry import errors
from weighbridge.registry.findings import finding
from weighbridge.registry.refs import shown
from weighbridge.registry.types import Finding

Block = bytes | bytearray
See = Callable[[Block], None]
"""Takes the next bytes of a file, of any number; they may be overwritten afterwards."""

TOLD_MAX: Final = 1000
"""Broken tensors of a file after which no more are looked for: it is refused anyway."""

_SMALL: Final = 64 << 10
_EXPONENTS: Final = {
    "BF16": (2, 0x7F80),
    "F16": (2, 0x7C00),
    "F32": (4, 0x7F80 << 16),
    "C64": (4, 0x7F80 << 16),
    "F64": (8, 0x7FF0 << 48),
}
"""By dtype: bytes of a number, and the bits of its exponent. What is not here shows NaN by its high byte alone."""


def _lanes(width: int, value: int) -> int:
    return int.from_bytes(value.to_bytes(width, "little") * (_SMALL // width), "little")


_TESTS: Final = {
    dtype: (_lanes(width, mask), _lanes(width, mask & -mask), _lanes(width, 1 << (8 * width - 1)))
    for dtype, (width, mask) in _EXPONENTS.items()
}
"""By dtype, repeated over a small block: the exponent's bits, the lowest of them, and the bit above, which is the sign.
Exponents alone plus the lowest bit carry into the sign exactly where all ones were."""


class Sieve:
    """The values of one safetensors file; give it the whole file in order, then ask."""

    def __init__(self) -> None:
        self.nan: dict[str, int] = {}
        self.inf: dict[str, int] = {}
        self.zero: list[str] = []
        self.seconds = lora_zeros.Seconds()
        self._zero_tail: int | None = None
        """Zero bytes at the end of what has passed of a LoRA's second half."""
        self._head: bytearray | None = bytearray()
        self._problem = ""
        self._left: Iterator[Tensor] = iter(())
        self._tensor: Tensor | None = None
        self._at = 0
        self._is_zero = self._is_broken = False
        self._carry = b""

    @property
    def problem(self) -> str:
        """Why the values were not looked at, or not all of them; empty where each one was."""
        if self._problem:
            return self._problem
        return "the file ended before its tensors did" if self._head is not None or self._tensor is not None else ""

    def see(self, block: Block) -> None:
        """Take the next bytes."""
        start = 0
        if self._head is not None:
            start = self._header(self._head, block)
        size = len(block)
        while self._tensor is not None and start < size:
            stop = min(size, start + self._tensor.end - self._at)
            self._piece(self._tensor, block, start, stop)
            self._at += stop - start
            start = stop
            if self._at == self._tensor.end:
                self._ended(self._tensor)

    def _header(self, head: bytearray, block: Block) -> int:
        """Gather the header and return where the tensors begin in this block, its length where they do not yet."""
        start = max(0, 8 - len(head))
        head += block[:start]
        if len(head) < 8:
            return len(block)
        missing = 8 + min(int.from_bytes(head[:8], "little"), safetensors.HEADER_LIMIT) - len(head)
        head += block[start : start + missing]
        if len(block) - start < missing:
            return len(block)
        start += missing
        header = safetensors.parse(bytes(head))
        faults = [fault for fault in header.faults if fault.code != "file-short"]  # what is missing is still to come
        if faults:
            self._problem = faults[0].message
        else:
            self._left = iter(sorted((t for t in header.tensors.values() if t.size), key=lambda t: t.begin))
        self._head = None
        self._next()
        return start

    def _next(self) -> None:
        self._tensor = next(self._left, None)
        self._carry = b""
        self._is_broken = len(self.nan) + len(self.inf) >= TOLD_MAX
        self._is_zero = self._tensor is not None and _is_matrix(self._tensor)
        self._zero_tail = 0 if self._tensor is not None and lora_zeros.is_second(self._tensor) else None

    def _ended(self, tensor: Tensor) -> None:
        if self._is_zero:
            self.zero.append(tensor.name)
        if self._zero_tail is not None:
            self.seconds.add(tensor, zero_tail=self._zero_tail)
        self._next()

    def _piece(self, tensor: Tensor, block: Block, start: int, stop: int) -> None:
        """Look at the bytes of one tensor that lie in a block; an element across a border is put together again."""
        if self._is_zero:
            self._is_zero = not (block[start] or block[stop - 1]) and block[start:stop] == bytes(stop - start)
        if self._zero_tail is not None:
            alive = len(block[start:stop].rstrip(b"\0"))
            self._zero_tail = stop - start - alive + (0 if alive else self._zero_tail)
        width = values.WIDTH.get(tensor.dtype)
        if width is None or self._is_broken:
            return
        if self._carry:
            taken = min(stop, start + width - len(self._carry))
            self._carry += block[start:taken]
            start = taken
            if len(self._carry) < width:
                return
            self._test(tensor, self._carry)
            self._carry = b""
        last = stop - (stop - start) % width
        if values.suspect(tensor.dtype, block[start + width - 1 : last : width]):
            self._test(tensor, block[start:last])
        self._carry = bytes(block[last:stop])

    def _test(self, tensor: Tensor, elements: Block) -> None:
        """Find the first small block that certainly holds NaN or infinities, and count those in it."""
        width, test = values.WIDTH[tensor.dtype], _TESTS.get(tensor.dtype)
        for at in range(0, len(elements), _SMALL):
            part = elements[at : at + _SMALL]
            if not values.suspect(tensor.dtype, part[width - 1 :: width]):
                continue
            if test is not None:
                mask, lowest, sign = test
                if not ((int.from_bytes(part, "little") & mask) + lowest) & sign:
                    continue
            nan, inf = values.special(tensor.dtype, bytes(part))
            if nan:
                self.nan[tensor.name] = nan
            if inf:
                self.inf[tensor.name] = inf
            self._is_broken = bool(nan or inf)
            if self._is_broken:
                return


def _is_matrix(tensor: Tensor) -> bool:
    """Tell whether zeros alone would be odd: a LoRA's matrices have a check of their own, vectors may be zero."""
    floats = tensor.dtype in FLOATS or tensor.dtype.startswith("F8_E")
    known = bool(keys.parse(tensor.name).part) or lora_zeros.is_second(tensor)
    return floats and len(tensor.shape) > 1 and not known


class Sieves:
    """The sieves of one bundle, one for each of its weight files, made when the file is about to pass."""

    def __init__(self) -> None:
        self._sieves: dict[str, Sieve] = {}
        self._unread: list[str] = []

    def over(self, path: str, role: str) -> See | None:
        """Return what must see every byte of a file of the bundle; None for a file whose values cannot be judged."""
        if role != "weights":
            return None
        if not path.endswith(".safetensors"):
            self._unread.append(path)
            return None
        self._sieves[path] = sieve = Sieve()
        return sieve.see

    def findings(self) -> list[Finding]:
        """Return what was seen, when every file has passed, and whose values were not looked at.

        Raises RefusedError where values forbid to publish; the finding names every broken file, not the first alone.
        """
        broken = _broken(self._sieves)
        if broken is not None:
            raise errors.RefusedError(
                f"{shown(broken.subject)} cannot be published", why=broken.message, fix=broken.fix, findings=[broken]
            )
        return [*_zero(self._sieves), *_flat(self._sieves), *_unread(self._unread, self._sieves)]


def _broken(sieves: dict[str, Sieve]) -> Finding | None:
    names = {path: sorted({*sieve.nan, *sieve.inf}) for path, sieve in sorted(sieves.items())}
    files = [path for path, held in names.items() if held]
    if not files:
        return None
    every = sum(map(len, names.values()))
    many = f" in {len(files)} of {len(sieves)} files" if len(sieves) > 1 else ""
    each = some((f"{path}: {some(names[path])}" for path in files), between="; ")
    return finding(
        "values-nan",
        files[0],
        f"{counted(every, 'tensor')}{many} with NaN or infinities ({each})",
        "publish an earlier checkpoint; the training has diverged",
        nan={name: count for path in files for name, count in sieves[path].nan.items()},
        inf={name: count for path in files for name, count in sieves[path].inf.items()},
        broken_files=files,
    )


def _zero(sieves: dict[str, Sieve]) -> Iterable[Finding]:
    names = {name: path for path, sieve in sorted(sieves.items()) for name in sieve.zero}
    if names:
        yield finding(
            "values-zero",
            next(iter(names.values())),
            f"{len(names)} matrices hold nothing but zeros ({some(names)})",
            "check that the trained weights were saved",
            zero_tensors=sorted(names)[:TOLD_MAX],
        )


def _flat(sieves: dict[str, Sieve]) -> list[Finding]:
    """Return what the second halves of an adapter tell."""
    seconds = lora_zeros.Seconds()
    files = [path for path, sieve in sorted(sieves.items()) if sieve.seconds.zero or sieve.seconds.tails]
    for path in files:
        seconds.take(sieves[path].seconds)
    return lora_zeros.judge(files[0], seconds)[1] if files else []


def _unread(paths: Sequence[str], sieves: dict[str, Sieve]) -> Iterable[Finding]:
    why = dict.fromkeys(sorted(paths), "no safetensors")
    why |= {path: sieve.problem for path, sieve in sorted(sieves.items()) if sieve.problem}
    if why:
        first, reason = next(iter(why.items()))
        yield finding(
            "values-unread",
            first,
            f"the values of {some(why)} were not looked at ({reason}): whether they are numbers is not known",
            unread_files=list(why),
        )
