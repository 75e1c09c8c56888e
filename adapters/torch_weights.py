"""What comes out of one torch file: its weights under their final names, what is left behind, what is wrong with it.

The file's pickle is read by a machine that runs nothing (`formats.torch_zip`, `formats.torch_legacy`); which table is
the model says `formats.select`; wrappers are taken off by `formats.prefixes`.
"""

import hashlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from weighbridge.adapters import keys, values
from weighbridge.adapters.formats import readers, safetensors
from weighbridge.adapters.formats.prefixes import Stripped
from weighbridge.adapters.formats.protocol import Directory, FormatFault, Tensor
from weighbridge.adapters.formats.select import Selection, aliases, select
from weighbridge.adapters.formats.source import opened
from weighbridge.adapters.formats.torch_bytes import blocks
from weighbridge.adapters.listing import File
from weighbridge.adapters.reading import Reader
from weighbridge.adapters.whole import some
from weighbridge.registry import findings
from weighbridge.registry.types import Finding

KEYS_TOLD: Final = 2000
"""Names after extraction that are listed one by one."""


class Held(NamedTuple):
    """The weights of one torch file. `sound` says that all of them can be written as safetensors."""

    directory: Directory | None
    selection: Selection | None
    tensors: dict[str, safetensors.Tensor]
    facts: dict[str, Any]
    findings: list[Finding]
    sound: bool

    @property
    def places(self) -> tuple[Tensor, ...]:
        """The tensors with their places in the file, under their final names."""
        return self.selection.weights if self.selection is not None else ()

    @property
    def big_endian(self) -> bool:
        """Whether the file was written big end first."""
        return self.directory is not None and self.directory.facts.get("byteorder") == "big"


def read(file: File, reader: Reader, *, key: str | None = None, whole_names: bool = False) -> Held:
    """Return what one torch file holds; `key` names the table where a person has chosen one.

    With `whole_names` every tensor of the table keeps its name: a loader that goes by name will look for it.
    """
    directory = reader.directory(file)
    if isinstance(directory, FormatFault):
        fault = readers.fault(directory, file.path)
        return Held(None, None, {}, {"file": file.path, "file_bytes": file.size}, [fault], sound=False)
    found = readers.findings(directory, file.path)
    facts = {k: v for k, v in directory.facts.items() if k not in {"unsupported", "code_files"}}
    facts["container"] = directory.container
    facts["pickle_format"] = True
    if directory.container == "torchscript" or "object_classes" in directory.facts:
        facts["tensor_count"] = len(directory.tensors)
        return Held(directory, None, {}, facts, found, sound=False)
    chosen = select(directory, key=key, averaged=reader.averaged)
    sound = not directory.blocked
    if chosen.problem is not None:
        found.append(_unselected(file, chosen))
        facts["dropped_top_keys"] = list(chosen.dropped_top_keys)
        if chosen.weight_sets:
            facts["weight_sets"] = list(chosen.weight_sets)
        return Held(directory, chosen, {}, facts, found, sound=False)
    if whole_names:
        found += _wrapped(file, chosen)
        same = {t.name: t.name for t in chosen.tensors}
        chosen = chosen._replace(stripped=Stripped("", same, (), (), ()), aliases=aliases(chosen.tensors, same))
        sound = sound and not any(f.code == "keys-wrapped" for f in found)
    placed = chosen.weights
    facts |= _facts(directory, chosen)
    for more in (
        _sets(file, chosen),
        partly_averaged(file.path, chosen),
        collisions(file.path, chosen),
        unstorable(file.path, placed),
    ):
        found += more
        sound = sound and not any(f.severity == "block" for f in more)
    if facts.get("collisions"):
        placed = ()
    unsupported = {t.name: t.unsupported for t in placed if t.unsupported}
    if unsupported:
        facts["unsupported"] = unsupported
        dense = sum(t.nbytes for t in placed if t.unsupported and t.unsupported.startswith("sparse"))
        if dense:
            facts["dense_bytes"] = dense
    return Held(directory, chosen, header_tensors(placed), facts, found, sound)


def header_tensors(placed: Collection[Tensor]) -> dict[str, safetensors.Tensor]:
    """Return tensors as a safetensors header would list them; their offsets mean nothing."""
    return {t.name: safetensors.Tensor(t.name, t.dtype, t.shape, 0, t.nbytes) for t in placed}


def _facts(directory: Directory, chosen: Selection) -> dict[str, Any]:
    stripped = chosen.stripped
    names = [stripped.names[t.name] for t in chosen.tensors if t.name in stripped.names]
    dropped = set(chosen.dropped_top_keys)
    sizes = {entry.name: entry.nbytes for entry in directory.entries if entry.name in dropped and entry.nbytes}
    facts: dict[str, Any] = {
        "weights_rule": chosen.rule,
        "weights_key": chosen.weights_key,
        "stripped_prefix": stripped.prefix,
        "stripped_inner": list(stripped.inner),
        "dropped_top_keys": list(chosen.dropped_top_keys),
        "dropped_bytes": sizes,
        "other_entries": list(stripped.others),
        "names_in": chosen.names_in,
        "aliases": dict(chosen.aliases),
    }
    if chosen.weight_sets:
        facts["weight_sets"] = list(chosen.weight_sets)
    if chosen.averaged:
        facts["averaged"] = True
    if stripped.collisions:
        facts["collisions"] = list(stripped.collisions)
    if len(names) <= KEYS_TOLD:
        facts["keys"] = [name for name in names if name not in chosen.aliases]
    return facts


# ---------------------------------------------------------------------------------------------------------- findings


def _unselected(file: File, chosen: Selection) -> Finding:
    if chosen.weight_sets:
        return findings.finding(
            "weights-ambiguous",
            file.path,
            f"{file.path}: {chosen.problem}",
            "say which one: registry extract --key NAME",
            weight_sets=list(chosen.weight_sets),
        )
    return findings.finding(
        "weights-none",
        file.path,
        f"{file.path} holds no weights: {chosen.problem}",
        "save the model's state_dict()",
        dropped_top_keys=list(chosen.dropped_top_keys),
    )


def _wrapped(file: File, chosen: Selection) -> list[Finding]:
    segments = [s for s in (chosen.stripped.prefix, *chosen.stripped.inner) if s]
    if not segments or any(keys.parse(t.name).part for t in chosen.tensors[:64]):
        return []  # an adapter's names are judged as an adapter's
    return [
        findings.finding(
            "keys-wrapped",
            file.path,
            f"the names in {file.path} hold the segment of a wrapper ({some(segments)}): a loader that goes by name "
            "finds none of them and fills the model with random weights",
            "take it off: registry extract",
            bad_segment=segments[0],
        )
    ]


def _sets(file: File, chosen: Selection) -> list[Finding]:
    if len(chosen.weight_sets) < 2:
        return []
    return [
        findings.finding(
            "weight-sets",
            file.path,
            f"{file.path} holds {len(chosen.weight_sets)} sets of weights ({some(chosen.weight_sets)}); "
            f"{chosen.weights_key or 'the file itself'} is taken",
            "name another one with registry extract --key NAME",
            weight_sets=list(chosen.weight_sets),
            weights_key=chosen.weights_key,
        )
    ]


def partly_averaged(subject: str, chosen: Selection) -> list[Finding]:
    """Return the finding for an average that was asked for and that lacks tensors of the model."""
    if not chosen.uncovered:
        return []
    return [
        findings.finding(
            "average-partial",
            subject,
            f"{chosen.average} in {subject} is an average of a part of the model only, without {some(chosen.uncovered)}"
            f": the raw weights, {chosen.weights_key or 'the file itself'}, are taken",
            "let the trainer average every tensor, buffers included; registry extract --key takes it as it is",
            uncovered=list(chosen.uncovered),
            weights_key=chosen.weights_key,
        )
    ]


def collisions(subject: str, chosen: Selection) -> list[Finding]:
    """Return the finding for names that would be the same without the wrappers' segments."""
    names = list(chosen.stripped.collisions)
    if not names:
        return []
    return [
        findings.finding(
            "names-collide",
            subject,
            f"{subject}: without the wrappers' segments two keys would both be {some(names)}; none may overwrite the "
            "other",
            "save one of the two models alone",
            collisions=names,
        )
    ]


def unstorable(subject: str, placed: Collection[Tensor]) -> list[Finding]:
    """Return the finding for tensors that safetensors cannot hold."""
    bad = {t.name: t.unsupported for t in placed if t.unsupported}
    if not bad:
        return []
    listed = some(f"{name} ({what})" for name, what in sorted(bad.items()))
    return [
        findings.finding(
            "tensor-unstorable",
            subject,
            f"{subject}: safetensors cannot hold {listed}; without {'it' if len(bad) == 1 else 'them'} the model "
            "would not be whole",
            "save it in a dtype and layout that safetensors knows",
            unsupported=bad,
        )
    ]


# -------------------------------------------------------------------------------------------------------------- values


def streams(file: File, held: Held) -> Iterator[tuple[Tensor, Iterator[bytes]]]:
    """Yield every tensor with its bytes, in the file's order. Raises OSError, FormatFault."""
    with opened(Path(file.source)) as source:
        for tensor in sorted(held.places, key=lambda t: t.offset or 0):
            yield tensor, blocks(source, tensor, big_endian=held.big_endian)


def numbers(file: File, held: Held) -> Iterator[tuple[str, values.Numbers]]:
    """Yield what the values of every tensor are. Raises OSError, FormatFault."""
    for tensor, parts in streams(file, held):
        yield tensor.name, values.numbers_of(tensor.dtype, parts)


def digests(file: File, held: Held) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Return (dtype, shape, digest of the bytes) of every tensor. Raises OSError, FormatFault."""
    table: dict[str, tuple[str, tuple[int, ...], str]] = {}
    for tensor, parts in streams(file, held):
        digest = hashlib.blake2b(digest_size=16)
        for part in parts:
            digest.update(part)
        table[tensor.name] = (tensor.dtype, tensor.shape, digest.hexdigest())
    return table


def lora_split(names: Collection[str]) -> tuple[list[str], list[str]]:
    """Return (LoRA names, other names) of some tensors."""
    lora = [name for name in names if keys.parse(name).part.startswith("lora_")]
    taken = set(lora)
    return lora, [name for name in names if name not in taken]


def same_values(file: File, held: Held, other: Mapping[str, tuple[str, tuple[int, ...], str]]) -> bool:
    """Return whether a torch file holds these tensors, by their digests. Raises OSError, FormatFault."""
    mine = digests(file, held)
    shared = held.selection.aliases if held.selection is not None else {}
    everything = {**mine, **{name: mine[owner] for name, owner in shared.items() if owner in mine}}
    return mine.keys() <= other.keys() <= everything.keys() and all(everything[n] == v for n, v in other.items())
