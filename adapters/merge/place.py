"""Where every tensor of an adapter lands on the base: products, magnitudes, biases, whole tensors, rows.

A tensor that lands nowhere, or does not fit where it lands, is a finding and never passed over.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from weighbridge.adapters.merge import experts
from weighbridge.adapters.merge.adapter import Adapter, Part, computable, scale_of, token_indices
from weighbridge.adapters.merge.base import EMBEDDINGS, HEADS, Base
from weighbridge.adapters.merge.names import Names
from weighbridge.adapters.merge.values import Factor, Magnitude, Origin, Rows, Term
from weighbridge.registry import findings
from weighbridge.registry.types import Finding

_CONV1D_FAMILIES: Final = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp"})
_CONV1D_LAYERS: Final = frozenset({"c_attn", "q_attn", "c_proj", "c_fc"})


@dataclass
class Placed:
    """What is done to each tensor of the base, by its name in the files."""

    factors: dict[str, list[Factor]] = field(default_factory=dict)
    columns: dict[str, int] = field(default_factory=dict)
    """Width of tensors that hold all experts, seen as matrices."""
    magnitudes: dict[str, Magnitude] = field(default_factory=dict)
    terms: dict[str, Term] = field(default_factory=dict)
    whole: dict[str, Origin] = field(default_factory=dict)
    rows: dict[str, Rows] = field(default_factory=dict)
    copies: list[tuple[str, Origin]] = field(default_factory=list)
    """(tensor of the base, the adapter's copy of it)."""
    new: dict[str, str] = field(default_factory=dict)
    """Tensors the base does not hold: a head that was tied, by the tensor it starts from."""
    mismatch: dict[str, list[list[int]]] = field(default_factory=dict)
    computed: set[str] = field(default_factory=set)
    """Tensors whose values come from PEFT's own merge."""
    found: list[Finding] = field(default_factory=list)
    kept_tied: bool = False
    """Embedding and head change together and stay one tensor."""

    def refuse(self, code: str, subject: str, message: str, fix: str | None = None, **data: Any) -> None:
        """Take note of a refusal."""
        self.found.append(findings.finding(code, subject, message, fix, **data))


class Placing:
    """One adapter on its way onto a base."""

    def __init__(self, base: Base, adapter: Adapter, names: Names, placed: Placed, subject: str) -> None:
        self.base = base
        self.adapter = adapter
        self.names = names
        self.placed = placed
        self.subject = subject
        self.model_type = str(base.config.get("model_type") or base.text.get("model_type") or "")
        self.conv1d = self._stored_transposed()

    def run(self) -> None:
        """Place every tensor."""
        layers: dict[str, int] = {}
        for module, _ in self.adapter.parts:
            layers[module] = layers.get(module, 0) + 1
        for part in self.adapter.parts.values():
            self._part(part, layers[part.module])
        for name, origin in self.adapter.whole.items():
            self._whole(name, origin)
        for module, origin in self.adapter.rows.items():
            self._rows(module, origin)
        for name, origin in self.adapter.copies.items():
            target = self._target(name)
            if self._is_saved_head(name, origin):
                self.placed.refuse(
                    "merge-ambiguous",
                    self.subject,
                    f"{origin.name} is the tied head as modules_to_save trained it, and the rows of "
                    "trainable_token_indices reach into it through the embedding: PEFT lays one upon the other, and "
                    "cannot run what it makes of it",
                    "train again with embedding and head in modules_to_save, or with trainable_token_indices alone",
                    mergeable=False,
                )
            elif target is not None:
                self.placed.copies.append((target, origin))

    # ------------------------------------------------------------------------------------------------------ modules

    def _part(self, part: Part, layers: int) -> None:
        if part.a is None or part.b is None:
            return  # one half without the other: told by the checks of the adapter
        for kind in part.tensors.keys() - _KNOWN:
            self._unused(part.tensors[kind])
        target = self.names.find(f"{part.module}.weight")
        if target.several:
            self._several(part.a, target.several)
            return
        if self._is_tied_twin(part.module, target.name):
            self.placed.kept_tied = True
            return
        name = target.name or self._untied_head(part.module)
        if name is None:
            self._experts(part, layers)
            return
        scale = self._scale(part.module, f"{part.module}.weight")
        if scale is not None:
            self._on_weight(part, name, *scale)
            self._bias(part, name, scale[0])

    def _on_weight(self, part: Part, name: str, scale: float, rank: int) -> None:
        """Place the matrices of an ordinary layer, a convolution or an embedding on its weight."""
        assert part.a is not None
        assert part.b is not None
        a, b = part.a, part.b
        shape = self._shape(name)
        if part.embedding:
            swap = True
            needs: tuple[int, ...] = (a.shape[1], b.shape[0]) if len(a.shape) == len(b.shape) == 2 else ()
        elif len(a.shape) == 2:
            swap = self._is_conv1d(part, shape)
            needs = (a.shape[1], b.shape[0]) if swap else (b.shape[0], a.shape[1])
        else:  # a convolution: lora_A holds the kernel, lora_B is 1x1
            swap = False
            needs = (b.shape[0], *a.shape[1:])
            if any(side != 1 for side in b.shape[2:]):
                needs = ()
        if needs != shape or len(b.shape) < 2 or a.shape[0] != b.shape[1]:
            self._misfit(name, needs, shape)
            return
        if a.shape[0] != rank:
            self.placed.refuse(
                "merge-shape-mismatch",
                self.subject,
                f"{part.module}: the config says rank {rank}, its matrices have rank {a.shape[0]}",
            )
            return
        self._add(name, Factor(a=a, b=b, scale=scale, rows=shape[0], swap=swap))
        magnitude = part.tensors.get("magnitude")
        if magnitude is None:
            return
        sides = max(magnitude.shape, default=1)
        if magnitude.count != sides or sides != (shape[1] if swap else shape[0]):
            self._misfit(f"{name}:magnitude", (shape[1] if swap else shape[0],), magnitude.shape)
            return
        self.placed.magnitudes[name] = Magnitude(origin=magnitude, columns=swap)

    def _bias(self, part: Part, weight: str, scale: float) -> None:
        term = part.tensors.get("lora_B.bias")
        if term is None:
            return
        name = weight.removesuffix("weight") + "bias"
        if name not in self.base.places:
            if any(f.code == "merge-bias-homeless" for f in self.placed.found):
                return  # told once, with their number
            homeless = sum(1 for p in self.adapter.parts.values() if "lora_B.bias" in p.tensors)
            self.placed.refuse(
                "merge-bias-homeless",
                self.subject,
                f"lora_bias: {part.module} of the base has no bias that could take the adapter's ({homeless} of them); "
                "it runs beside the base, but cannot be merged",
                "train without lora_bias, or serve the adapter beside its base",
                bias_tensors=homeless,
                mergeable=False,
            )
        elif self.base.places[name].shape != term.shape:
            self._misfit(name, term.shape, self.base.places[name].shape)
        else:
            self.placed.terms[name] = Term(origin=term, scale=scale)

    def _experts(self, part: Part, layers: int) -> None:
        """Place matrices for which the base has no weight of that name: experts in one of their layouts."""
        assert part.a is not None
        model_type = str(self.base.text.get("model_type") or self.model_type)
        onto = experts.Onto(self.names, self.base.places, self.adapter.config, model_type)
        result: Any = None
        if part.module.rpartition(".")[2] == "experts" or self.adapter.config.get("target_parameters"):
            leaf = experts.parameter_of(part, layers, self.adapter.config)
            if isinstance(leaf, str):
                scale = self._scale(f"{part.module}.{leaf}")
                if scale is None:
                    return
                result = experts.stacked(part, leaf, *scale, onto)
            else:
                result = leaf
        else:
            scale = self._scale(part.module)
            if scale is None:
                return
            result = experts.single(part, scale[0], onto)
        if isinstance(result, list):
            if part.tensors.keys() & {"magnitude", "lora_B.bias"}:
                self.placed.refuse(
                    "merge-not-streamed", self.subject, f"{part.module}: DoRA or bias on experts in one tensor"
                )
                return
            for landing in result:
                if len(self.base.places[landing.target].shape) == 3:
                    self.placed.columns[landing.target] = landing.columns
                self._add(landing.target, landing.factor)
        elif isinstance(result, experts.Refusal) and result.code != "merge-target-missing":
            self.placed.refuse(result.code, self.subject, result.message, **result.data)
        else:
            self._missing(part)

    def _add(self, name: str, factor: Factor) -> None:
        if not computable(factor.a) or not computable(factor.b):
            self.placed.refuse(
                "merge-not-streamed", self.subject, f"{factor.a.name} is {factor.a.dtype}: no matrix to multiply with"
            )
            return
        self.placed.factors.setdefault(name, []).append(factor)

    # ------------------------------------------------------------------------------------- whole tensors, token rows

    def _whole(self, name: str, origin: Origin) -> None:
        module = name.rpartition(".")[0]
        if (module, 0) in self.adapter.parts and name.endswith(".weight"):
            target = self._target(name)
            if target is not None:
                self.placed.copies.append((target, origin))  # the loader passes it over: its layer has matrices
            return
        found = self.names.find(name)
        if found.several:
            self._several(origin, found.several)
            return
        target = found.name or self._untied_head(module) if name.endswith(".weight") else found.name
        if target is None:
            self._unused(origin)
        elif target in self.placed.whole:
            self.placed.refuse("merge-ambiguous", self.subject, f"{origin.name}: another adapter replaces it, too")
        elif self._shape(target) != origin.shape and not self._resizes(target, origin):
            self._misfit(target, origin.shape, self._shape(target))
        else:
            self.placed.whole[target] = origin

    def _resizes(self, target: str, origin: Origin) -> bool:
        """Return whether a tensor is an embedding or a head with another number of rows."""
        has = self._shape(target)
        leaf = target.removesuffix(".weight").rpartition(".")[2]
        return leaf in (*EMBEDDINGS, *HEADS) and len(has) == 2 == len(origin.shape) and has[1] == origin.shape[1]

    def _rows(self, module: str, origin: Origin) -> None:
        found = self.names.find(f"{module}.weight")
        name = found.name
        if name is None and self.base.tied and module.rpartition(".")[2] in HEADS:
            return  # a tied head has no tensor of its own: its rows are the embedding's, which ride along
        if name is None:
            self._unused(origin)
            return
        indices = token_indices(self.adapter.config, module)
        shape = self._shape(name)
        if indices is None or len(indices) != origin.shape[0] or len(set(indices)) != len(indices):
            self.placed.refuse(
                "merge-ambiguous",
                self.subject,
                f"{origin.name} holds {origin.shape[0]} trained rows; trainable_token_indices does not name as many",
            )
        elif origin.shape[1:] != shape[1:] or max(indices) >= shape[0]:
            self._misfit(name, (max(indices) + 1, *origin.shape[1:]), shape)
        elif name in self.placed.rows:
            self.placed.refuse("merge-ambiguous", self.subject, f"{origin.name}: another adapter has rows for it, too")
        else:
            self.placed.rows[name] = Rows(origin=origin, indices=tuple(indices))

    # ---------------------------------------------------------------------------------------------------- small things

    def _shape(self, name: str) -> tuple[int, ...]:
        return self.base.places[self.placed.new.get(name, name)].shape

    def _scale(self, module: str, alias: str | None = None) -> tuple[float, int] | None:
        listed = self.adapter.config.get("target_parameters")
        parameters = listed if isinstance(listed, list) else []
        key = alias if alias is not None and any(alias.endswith(str(p)) for p in parameters) else module
        try:
            return scale_of(self.adapter.config, key)
        except ValueError as error:
            self.placed.refuse("merge-ambiguous", self.subject, str(error), "write it into adapter_config.json")
            return None

    def _target(self, name: str) -> str | None:
        found = self.names.find(name).name
        if found is None and self.base.tied and name.removesuffix(".weight").rpartition(".")[2] in HEADS:
            return self.base.embedding
        return found

    def _is_tied_twin(self, module: str, name: str | None) -> bool:
        """Return whether a module is the head of a pair whose adapters were tied: the embedding speaks for both."""
        return (
            name is None
            and self.base.tied
            and module.rpartition(".")[2] in HEADS
            and self.adapter.config.get("ensure_weight_tying") is True
            and any(m.rpartition(".")[2] in EMBEDDINGS for m, _ in self.adapter.parts)
        )

    def _is_saved_head(self, name: str, origin: Origin) -> bool:
        """Return whether what looks like a copy of a tied head is the trained one: rows wrap it, and it was saved."""
        leaf = name.removesuffix(".weight").rpartition(".")[2]
        saved = self.adapter.config.get("modules_to_save")
        names = {str(one).rpartition(".")[2] for one in saved} if isinstance(saved, list) else set()
        return self.base.tied and leaf in HEADS and leaf in names and ".token_adapter." in origin.name

    def _untied_head(self, module: str) -> str | None:
        """Return the name of a head that the base shares with its embedding, to be written as a tensor of its own."""
        if not self.base.tied or self.base.embedding is None or self.base.head is not None:
            return None
        if module.rpartition(".")[2] not in HEADS:
            return None
        name = self.base.parted(module)
        self.placed.new[name] = self.base.embedding
        return name

    def _stored_transposed(self) -> bool | None:
        """Return what the layers that are not square say about fan_in_fan_out, None where they say nothing."""
        votes: set[bool] = set()
        for part in self.adapter.parts.values():
            name = self.names.find(f"{part.module}.weight").name
            if name is None or part.embedding or part.a is None or part.b is None or len(part.a.shape) != 2:
                continue
            shape, straight = self.base.places[name].shape, (part.b.shape[0], part.a.shape[1])
            if straight[0] != straight[1] and part.module.rpartition(".")[2] not in HEADS:
                votes |= {False} if shape == straight else {True} if shape == straight[::-1] else set()
        return votes.pop() if len(votes) == 1 else None

    def _is_conv1d(self, part: Part, shape: tuple[int, ...]) -> bool:
        """Return whether a layer stores its weight [in, out].

        A square one does not show it: the family tells, else the other layers of this adapter, else the config, whose
        flag PEFT sets by the last layer it wrapped.
        """
        assert part.a is not None
        assert part.b is not None
        leaf = part.module.rpartition(".")[2]
        if self.model_type in _CONV1D_FAMILIES:
            return leaf in _CONV1D_LAYERS
        if leaf in HEADS or not self.adapter.flag("fan_in_fan_out"):
            return False
        if part.b.shape[0] != part.a.shape[1]:
            return shape == (part.a.shape[1], part.b.shape[0])
        return self.conv1d is not False

    def _misfit(self, name: str, needs: tuple[int, ...], has: tuple[int, ...]) -> None:
        self.placed.mismatch[name] = [list(needs), list(has)]

    def _several(self, origin: Origin, several: tuple[str, ...]) -> None:
        self.placed.refuse("merge-ambiguous", self.subject, f"{origin.name} could mean {' or '.join(several[:4])}")

    def _missing(self, part: Part) -> None:
        assert part.a is not None
        wanted = f"{part.module}.weight"
        near = self.names.nearest(wanted)
        self.placed.refuse(
            "merge-target-missing",
            self.subject,
            f"the base has no {wanted}, which {part.a.name} is for; the nearest names are {', '.join(near) or 'none'}",
            "merge into the base the adapter was trained on",
            unmatched_module=part.module,
            nearest=near,
        )

    def _unused(self, origin: Origin) -> None:
        near = self.names.nearest(origin.name.removeprefix("base_model.model."))
        self.placed.refuse(
            "merge-tensor-unused",
            self.subject,
            f"nothing in the base takes {origin.name}; the nearest names are {', '.join(near) or 'none'}",
            "merge into the base the adapter was trained on, with the head that it was trained with",
            unused_tensor=origin.name,
            nearest=near,
        )


_KNOWN: Final = frozenset({"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "magnitude", "lora_B.bias"})


def place(base: Base, adapters: Mapping[str, Adapter]) -> Placed:
    """Return where the tensors of some adapters land; `adapters` by the subject of their findings."""
    placed = Placed()
    names = Names(base.places)
    for subject, adapter in adapters.items():
        Placing(base, adapter, names, placed, subject).run()
    return placed
