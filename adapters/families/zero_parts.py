"""How the tensors of a DeepSpeed ZeRO checkpoint are made up of stretches of its rank files; no bytes are read here.

Under ZeRO-1 and 2 the ranks' parts of a group, one after the other, are the group. Under ZeRO-3 every tensor is cut
into equal parts, one per rank, the last one padded.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from weighbridge.adapters.formats.inert import RawTensor
from weighbridge.adapters.formats.protocol import BITS, Directory, Tensor, elements

STATE: Final = "optimizer_state_dict"
_FLAT: Final = ("single_partition_of_fp32_groups", "fp32_flat_groups")
_SHAPES_LIMIT: Final = 500_000


class Stretch(NamedTuple):
    """Some bytes of one rank file; `big_endian` where they must be turned."""

    file: str
    offset: int
    length: int
    big_endian: bool = False


class Planned(NamedTuple):
    """A tensor as the stretches that make it up, in row order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stretches: tuple[Stretch, ...]


class Rebuilt(NamedTuple):
    """What the rank files of one tag amount to; `problem` says why they cannot be put together."""

    tensors: tuple[Planned, ...]
    aliases: dict[str, str]
    problem: str | None = None


class Part(NamedTuple):
    """One rank file and what it holds."""

    path: str
    directory: Directory


class Rank(NamedTuple):
    """One rank's flat fp32 groups."""

    path: str
    big_endian: bool
    flat: list[Tensor]


def rebuild(states: Mapping[int, Part], optims: Mapping[int, Part], *, stage: int) -> Rebuilt:
    """Return the fp32 tensors of some rank files, as stretches; buffers and frozen weights as they are stored."""
    ranks = [Rank(part.path, big(part), _flat(part.directory)) for _, part in sorted(optims.items())]
    if not states or not ranks or any(not rank.flat for rank in ranks):
        return Rebuilt((), {}, "the optimizer files hold no fp32 weights")
    first = root(states[min(states)].directory)
    shapes = _shapes(first.get("param_shapes"))
    if shapes is None:
        return Rebuilt((), {}, "the model states do not list the shapes of the weights")
    planned: dict[str, Planned] = {}
    problem = (_third if stage == 3 else _second)(planned, shapes, ranks)
    problem = problem or _beside(planned, first, states, split=stage == 3)
    shared = first.get("shared_params")
    aliases = {
        str(name): str(owner)
        for name, owner in (shared.items() if isinstance(shared, dict) else [])
        if owner in planned and name not in planned
    }
    return Rebuilt(tuple(planned.values()), aliases, problem)


def _flat(directory: Directory) -> list[Tensor]:
    """Return the flat fp32 groups of one optimizer file, in their order."""
    found = [t for t in directory.tensors if len(t.group) == 2 and t.group[0] == STATE and t.group[1] in _FLAT]
    alone = [t for t in directory.tensors if t.group == (STATE,) and t.name in _FLAT]
    return sorted((t for t in found if t.name.isdigit()), key=lambda t: int(t.name)) or alone


def root(directory: Directory) -> dict[Any, Any]:
    """Return the table that a rank file is."""
    return directory.root if isinstance(directory.root, dict) else {}


def whole(value: Any) -> int | None:
    """Return a number that counts something, None for anything else."""
    return value if type(value) is int and 0 <= value < 1 << 62 else None


def big(part: Part) -> bool:
    """Return whether a rank file was written big end first."""
    return part.directory.facts.get("byteorder") == "big"


def _shapes(listed: Any) -> list[dict[str, tuple[int, ...]]] | None:
    groups = listed if isinstance(listed, (list, tuple)) else [listed]
    found: list[dict[str, tuple[int, ...]]] = []
    for group in groups:
        if not isinstance(group, dict) or len(group) > _SHAPES_LIMIT:
            return None
        table: dict[str, tuple[int, ...]] = {}
        for name, shape in group.items():
            if not isinstance(shape, (tuple, list)) or any(whole(side) is None for side in shape):
                return None
            table[str(name)] = tuple(shape)
        found.append(table)
    return found


def _second(
    planned: dict[str, Planned], shapes: Sequence[Mapping[str, tuple[int, ...]]], ranks: Sequence[Rank]
) -> str | None:
    """Cut each group, the ranks' parts one after the other, at its tensors' lengths."""
    for index, group in enumerate(shapes):
        if any(len(rank.flat) <= index for rank in ranks):
            return f"a rank file has no part of group {index}"
        pieces = [(rank, rank.flat[index]) for rank in ranks]
        at = 0
        for name, shape in group.items():
            count = elements(shape)
            stretches, got = _range(pieces, at, count)
            if got != count:
                return f"the ranks' parts end inside {name}"
            planned[name] = Planned(name, pieces[0][1].dtype, shape, stretches)
            at += count
    return None


def _range(pieces: Sequence[tuple[Rank, Tensor]], at: int, count: int) -> tuple[tuple[Stretch, ...], int]:
    """Return the elements `at` to `at + count` of some flat tensors in a row."""
    found: list[Stretch] = []
    got = begin = 0
    for rank, piece in pieces:
        end = begin + piece.elements
        low, high = max(at, begin), min(at + count, end)
        if low < high and piece.offset is not None and piece.stride is None:
            size = BITS[piece.dtype] // 8
            found.append(Stretch(rank.path, piece.offset + (low - begin) * size, (high - low) * size, rank.big_endian))
            got += high - low
        begin = end
    return tuple(found), got


def _third(
    planned: dict[str, Planned], shapes: Sequence[Mapping[str, tuple[int, ...]]], ranks: Sequence[Rank]
) -> str | None:
    """Take an equal part of every tensor from each rank; the last one is padded."""
    at = 0
    for group in shapes:
        for name, shape in group.items():
            count = elements(shape)
            part = -(-count // len(ranks))
            stretches: list[Stretch] = []
            left = count
            for rank in ranks:
                wanted = min(part, left)
                rows, got = _range([(rank, flat) for flat in rank.flat], at, wanted)
                if got != wanted:
                    return f"the part in {rank.path} ends inside {name}"
                stretches += rows
                left -= wanted
            planned[name] = Planned(name, ranks[0].flat[0].dtype, shape, tuple(stretches))
            at += part
    return None


def _beside(
    planned: dict[str, Planned], first: Mapping[Any, Any], states: Mapping[int, Part], *, split: bool
) -> str | None:
    """Add the frozen weights and the buffers, which the model states hold."""
    tables = {
        rank: {(t.group[0], ".".join((*t.group[1:], t.name))): t for t in part.directory.tensors if t.group}
        for rank, part in states.items()
    }
    frozen = _shapes(first.get("frozen_param_shapes") or {}) or [{}]
    fragments = first.get("frozen_param_fragments")
    if not any(frozen) and isinstance(fragments, dict):
        frozen = [{str(n): tuple(v.shape) for n, v in fragments.items() if isinstance(v, RawTensor)}]
    for name, shape in frozen[0].items():
        stretches: list[Stretch] = []
        left, dtype = elements(shape), "F32"
        for rank in sorted(tables) if split else [min(tables)]:
            piece = tables[rank].get(("frozen_param_fragments", name))
            if piece is None or piece.offset is None or piece.stride is not None:
                return f"the frozen weight {name} is in no model state"
            dtype = piece.dtype
            wanted = min(left, piece.elements)
            size = wanted * BITS[dtype] // 8
            stretches.append(Stretch(states[rank].path, piece.offset, size, big(states[rank])))
            left -= wanted
        if left:
            return f"the parts of the frozen weight {name} do not cover it"
        planned.setdefault(name, Planned(name, dtype, shape, tuple(s for s in stretches if s.length)))
    names = first.get("buffer_names")
    rank = min(tables)
    for name in map(str, names if isinstance(names, list) else []):
        buffer = tables[rank].get(("module", name))
        if buffer is not None and buffer.unsupported is None and buffer.offset is not None and buffer.stride is None:
            place = Stretch(states[rank].path, buffer.offset, buffer.nbytes, big(states[rank]))
            planned.setdefault(name, Planned(name, buffer.dtype, buffer.shape, (place,)))
    return None
