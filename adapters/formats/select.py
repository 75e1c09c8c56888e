"""Find the model's weights in a checkpoint by content, say which rule found them, and refuse where it is ambiguous.

Nobody writes checkpoints alike: the weights are the file itself, one table in it, a table in a table, or two tables of
which one is an average of the other. What trains on (optimizer, schedulers, generators) is recognised and left aside.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from weighbridge.adapters.formats.prefixes import Stripped, strip
from weighbridge.adapters.formats.protocol import Directory, Tensor, shown

KEYS: Final = (
    "state_dict", "model_state_dict", "model_state", "model", "module", "net", "network", "weights", "params",
    "model_weights", "net_state_dict", "student", "parameters",
)  # fmt: skip
"""What people call the table that holds the model."""

_AVERAGED = re.compile(
    r"(?:^|.*[_.\-])(?:ema|ema\d+|averaged?|swa|shadow|polyak|teacher)(?:[_.\-].*|$)|ema.*", re.IGNORECASE
)
_TRAINING = re.compile(
    r"(?:.*_)?(?:optimizers?|optims?|opt|optimizer_states?|optimizer_state_dict|lr_schedulers?|schedulers?|sched|"
    r"scalers?|grad_scaler|amp|amp_scaler|rng|rng_states?|random_state|cuda_rng_states?|callbacks|loops|metrics?|"
    r"metric_tracker|histor(?:y|ies)|loss(?:es)?|criterion|training_state|dataloader|sampler|hyper_parameters|hparams|"
    r"args|config|cfg|param_groups|param_shapes|frozen_param_shapes|frozen_param_fragments|buffer_names|ds_config|"
    r"optimizer_state|trainer|trainer_state|train_state|timings?)(?:_(?:state|states|dict|state_dict|\d+|[dg]))*",
    re.IGNORECASE,
)
_SLOTS: Final = frozenset((
    "exp_avg", "exp_avg_sq", "exp_inf", "max_exp_avg_sq", "step", "momentum_buffer", "square_avg", "acc_delta",
    "grad_avg", "sum", "prev", "exp_avg_diff", "state_sum", "mu", "nu", "exp_avg_sq_row", "exp_avg_sq_col",
    "p_exp_avg_sq",
))  # fmt: skip
"""What optimizers keep per parameter."""

_HEADS: Final = ("lm_head.", "output_layer.", "embed_out.", "cls.predictions.decoder.", "proj_out.", "output.weight")
_GENERATORS: Final = frozenset(
    ("cpu", "cuda", "cuda_all", "python", "numpy", "xla", "npu", "mps", "xpu", "rng_state", "torch")
)
_DEPTH: Final = 8
_WORD: Final = 64

Path = tuple[str, ...]
Shape = tuple[int, ...]


class Selection(NamedTuple):
    """The weights of a checkpoint. `problem` says why nothing could be chosen; then `tensors` is empty."""

    rule: str
    weights_key: str | None
    tensors: tuple[Tensor, ...]
    """In the file's order, under their whole names in the chosen table, aliases and other entries included."""
    weight_sets: tuple[str, ...] = ()
    dropped_top_keys: tuple[str, ...] = ()
    stripped: Stripped = Stripped("", {}, (), (), ())
    aliases: dict[str, str] = {}  # noqa: RUF012 - never written to
    """Name after stripping -> name of the owner of the same memory."""
    problem: str | None = None
    average: str | None = None
    """The table of the average that was asked for and is not taken, for it covers only a part of the model."""
    uncovered: tuple[str, ...] = ()
    """Tensors of the model that this average lacks, or holds in another shape."""

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """What would be written: one owner per shared storage, under the names after stripping."""
        names = self.stripped.names
        return tuple(
            tensor._replace(name=names[tensor.name], group=())
            for tensor in self.tensors
            if tensor.name in names and names[tensor.name] not in self.aliases
        )

    @property
    def averaged(self) -> bool:
        """Whether these are a running average of the weights, by the name of their table."""
        return self.weights_key is not None and any(map(_is_average, self.weights_key.split("/")))

    @property
    def names_in(self) -> int:
        """Names of weights in the file, aliases counted."""
        return len(self.stripped.names)


def select(directory: Directory, *, key: str | None = None, averaged: bool = False) -> Selection:
    """Return the weights of a checkpoint; `key` names the table where a person has chosen one.

    Of raw weights and their running average the raw ones are the model, with `averaged` the average, where it holds
    every tensor of them: half an average beside half of the raw weights is no model that anybody trained.
    """
    tensors = directory.tensors
    lightning = any(entry.name == "pytorch-lightning_version" for entry in directory.entries)
    if len(tensors) == 1 and not tensors[0].name and not tensors[0].group:
        return _chosen(directory, "tensor", (), tensors, (), lightning=False)
    tables: dict[Path, list[Tensor]] = {}
    for tensor in tensors:
        tables.setdefault(tensor.group, []).append(tensor)
    optimizer = {"state", "param_groups"} <= {entry.name for entry in directory.entries}
    weights = {path: held for path, held in tables.items() if not _is_training(path, held, optimizer)}
    candidates = _candidates(weights)
    sets = tuple("/".join(path) for path in candidates)
    if key is not None:
        wanted = tuple(key.split("/")) if key else ()
        held = _beneath(weights, wanted)
        if not held:
            return Selection("named-by-caller", key, (), sets, problem=f"the file holds no weights under {shown(key)}")
        return _chosen(directory, "named-by-caller", wanted, held, sets, lightning=lightning)
    if not candidates:
        rule = "optimizer-only" if tables else "no-tensors"
        what = "only training state" if tables else "no tensors"
        return Selection(
            rule, None, (), (), tuple(entry.name for entry in directory.entries), problem=f"it holds {what}"
        )
    return _decide(directory, weights, candidates, sets, lightning=lightning, averaged=averaged)


def _decide(
    directory: Directory,
    weights: dict[Path, list[Tensor]],
    candidates: list[Path],
    sets: tuple[str, ...],
    *,
    lightning: bool,
    averaged: bool,
) -> Selection:
    def choose(rule: str, path: Path, *, alternatives: tuple[str, ...] = ()) -> Selection:
        return _chosen(directory, rule, path, _beneath(weights, path), alternatives, lightning=lightning)

    if len(candidates) == 1:
        path = candidates[0]
        return choose("flat" if not path else "lightning" if lightning else "one-table", path)
    raw = [path for path in candidates if not any(_is_average(part) for part in path)]
    averages = [path for path in candidates if path not in raw]
    if averaged and len(averages) == 1:
        average = choose("average-preferred", averages[0], alternatives=sets)
        held = _held(average)
        models = [choose("raw-before-average", path, alternatives=sets) for path in raw]
        lacking = [uncovered(held, {t.name: t.shape for t in model.weights}) for model in models]
        if not all(lacking) or not raw:
            return average
        if len(raw) == 1:
            return models[0]._replace(average=average.weights_key, uncovered=lacking[0])
    if len(raw) == 1:
        return choose("raw-before-average", raw[0], alternatives=sets)
    known = [path for path in raw if path and path[-1] in KEYS]
    if len(known) == 1:
        mine = sum(tensor.nbytes for tensor in _beneath(weights, known[0]))
        rest = sum(t.nbytes for path in raw if path != known[0] for t in _beneath(weights, path))
        if rest * 4 <= mine:
            named = tuple("/".join(p) for p in candidates if p == known[0] or p not in raw)
            return choose("known-name", known[0], alternatives=named if len(named) > 1 else ())
    listed = ", ".join(shown(name or "the file itself") for name in sets[:6])
    return Selection(
        "ambiguous",
        None,
        (),
        sets,
        tuple(entry.name for entry in directory.entries),
        problem=f"{len(sets)} tables could be the model: {listed}",
    )


def uncovered(average: Mapping[str, Shape], raw: Mapping[str, Shape]) -> tuple[str, ...]:
    """Return the tensors of some raw weights that their average lacks or holds in another shape, by name and shape.

    Where one of the two lies whole under a prefix that the other has not, the prefix tells nothing.
    """
    lacking = tuple(name for name, shape in raw.items() if average.get(name) != shape)
    if lacking:
        theirs, mine = _under(average), _under(raw)
        if all(theirs.get(name) == shape for name, shape in mine.items()):
            return ()
    return lacking


def _under(table: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return a table without the segments that begin all of its names."""
    names = list(table)
    cut = 0
    while names and (at := names[0].find(".", cut) + 1) and all(n.startswith(names[0][:at]) for n in names):
        cut = at
    return {name[cut:]: shape for name, shape in table.items()}


def _held(chosen: Selection) -> dict[str, Shape]:
    """Return every tensor of a selection by its last name, second names of one tensor included."""
    names = chosen.stripped.names
    return {names[t.name]: t.shape for t in chosen.tensors if t.name in names}


def _chosen(
    directory: Directory,
    rule: str,
    path: Path,
    held: Sequence[Tensor],
    sets: tuple[str, ...],
    *,
    lightning: bool,
) -> Selection:
    depth = len(path)
    tensors = tuple(
        tensor if len(tensor.group) == depth else tensor._replace(name=".".join((*tensor.group[depth:], tensor.name)))
        for tensor in held
    )
    top = path[0] if path else None
    kept = {top} if path else {tensor.group[0] for tensor in held if tensor.group}
    dropped = [entry.name for entry in directory.entries if entry.name not in kept]
    if path:
        dropped += [t.name for t in directory.tensors if not t.group and t.name not in dropped]
    stripped = strip([tensor.name for tensor in tensors], lightning=lightning)
    return Selection(
        rule,
        "/".join(path) or None,
        tensors,
        sets,
        tuple(dropped),
        stripped,
        aliases(tensors, stripped.names),
    )


def aliases(tensors: Sequence[Tensor], names: dict[str, str]) -> dict[str, str]:
    """Return names that share one whole tensor with another, by that owner; an output head never is the owner."""
    places: dict[tuple[str | None, int | None, tuple[int, ...], tuple[int, ...] | None, str], list[str]] = {}
    for tensor in tensors:
        if tensor.storage is not None and tensor.offset is not None and tensor.nbytes and tensor.name in names:
            place = (tensor.storage, tensor.offset, tensor.shape, tensor.stride, tensor.dtype)
            places.setdefault(place, []).append(names[tensor.name])
    found: dict[str, str] = {}
    for shared in places.values():
        if len(shared) > 1:
            owner = next((name for name in shared if not name.startswith(_HEADS)), shared[0])
            found.update({name: owner for name in shared if name != owner})
    return found


# ----------------------------------------------------------------------------------------------------------- candidates


def _is_training(path: Path, held: Sequence[Tensor], optimizer: bool) -> bool:
    if any(len(part) <= _WORD and _TRAINING.fullmatch(part) for part in path[:3]):
        return True
    if path and ((optimizer and path[0] == "state") or path[-1].isdigit()):
        return optimizer or all(tensor.name in _SLOTS for tensor in held)
    if path:
        return False
    generators = all(t.name in _GENERATORS and t.dtype == "U8" for t in held)
    return generators or all(len(t.name) <= _WORD and _TRAINING.fullmatch(t.name) for t in held)


def _candidates(weights: dict[Path, list[Tensor]]) -> list[Path]:
    """Return the places where a model could be, in the file's order."""
    if () in weights and not _hidden_below(weights):
        return [()]
    return _below((), [path for path in weights if path], 0)


def _hidden_below(weights: dict[Path, list[Tensor]]) -> bool:
    """Whether a few loose tensors stand beside a table that is called a model."""
    loose = sum(tensor.nbytes for tensor in weights[()])
    tables: dict[str, int] = {}
    for path, held in weights.items():
        if path:
            tables[path[0]] = tables.get(path[0], 0) + sum(tensor.nbytes for tensor in held)
    return any(size > loose and (name in KEYS or _is_average(name)) for name, size in tables.items())


def _below(prefix: Path, paths: list[Path], depth: int) -> list[Path]:
    if prefix in paths or depth > _DEPTH:
        return [prefix]
    parts: dict[str, list[Path]] = {}
    for path in paths:
        parts.setdefault(path[len(prefix)], []).append(path)
    named = [part for part in parts if part in KEYS or _is_average(part)]
    if prefix and not named and (len(parts) > 1 or prefix[-1] in KEYS):
        return [prefix]  # a tree of modules under one name
    found: list[Path] = []
    for part, inner in parts.items():
        deeper = _below((*prefix, part), inner, depth + 1)
        found += deeper if len(deeper) == 1 or not prefix else [(*prefix, part)]
    return found


def _is_average(part: str) -> bool:
    return len(part) <= _WORD and _AVERAGED.fullmatch(part) is not None


def _beneath(weights: dict[Path, list[Tensor]], path: Path) -> list[Tensor]:
    return [tensor for place, held in weights.items() if place[: len(path)] == path for tensor in held]
