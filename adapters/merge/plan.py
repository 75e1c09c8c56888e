"""From headers to a plan: one step for every tensor of the result, in the files and at the places they will have.

Where no dtype and no shape changes, headers, shards and offsets stay as they are. Everything that stands against the
merge is a finding, never a guess.
"""

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from weighbridge.adapters.formats.safetensors import BITS, product
from weighbridge.adapters.merge.adapter import Adapter, computable
from weighbridge.adapters.merge.base import EMBEDDINGS, Base
from weighbridge.adapters.merge.place import Placed
from weighbridge.adapters.merge.values import DTYPES, WIDTH, Origin, OutFile, Plan, Source, Step
from weighbridge.adapters.reading import table_at
from weighbridge.adapters.whole import some
from weighbridge.registry import findings
from weighbridge.registry.types import Finding

_ALIGN: Final = 8


class Planned(NamedTuple):
    """A plan (None where something stands against it), its facts and findings, and what the config must say."""

    plan: Plan | None
    facts: dict[str, Any]
    findings: list[Finding]
    untied: bool = False
    vocabulary: int | None = None
    listing: dict[str, Any] | None = None
    """The index to write; None: the base's as it is, or none."""
    copies: tuple[tuple[str, Origin], ...] = ()
    """(tensor of the base, the adapter's copy of it), to be compared."""


def make(
    base: Base,
    adapters: Mapping[str, Adapter],
    placed: Placed,
    sources: tuple[Source, ...],
    *,
    dtypes: Mapping[str, str],
    subject: str,
) -> Planned:
    """Return the plan of a merge; `adapters` by their subjects, `placed` is where they land on the base.

    `sources` are the base's files and then the adapters'.
    `dtypes` are those the base's tensors get (`kept_wide`); `subject` is the base's config.
    """
    found = list(placed.found)
    facts: dict[str, Any] = {}
    if placed.mismatch:
        found.append(_misfits(base, adapters, placed, subject))
        facts["shape_mismatch"] = placed.mismatch
    _settle_heads(base, adapters, placed, found, subject)
    vocabulary = _vocabulary(base, placed, found, facts, subject)
    found += [_both(name) for name in sorted(placed.factors.keys() & (placed.whole.keys() | placed.rows.keys()))]
    for name in [*placed.factors, *placed.rows, *placed.terms, *placed.whole, *sorted(placed.computed)]:
        origin = placed.whole.get(name) or base.places[placed.new.get(name, name)]
        if not computable(base.places[placed.new.get(name, name)]) or not computable(origin):
            found.append(_not_a_number(name, origin))
    untied = bool(placed.new)
    if untied:
        facts["must_untie"] = True
        found.append(_untied(base, sorted(placed.new), subject))
    touched = {*placed.factors, *placed.rows, *placed.terms, *placed.whole, *placed.computed} - placed.new.keys()
    facts["changed_tensors"] = sorted(touched)
    if any(f.severity == "block" for f in found):
        return Planned(None, facts, found)
    files, moved = _files(base, placed, dtypes)
    plan = Plan(
        sources=sources,
        files=tuple(files),
        dtype=_main(files),
        base_files=len(base.sources),
        adapters=tuple(adapter.file for adapter in adapters.values()),
    )
    return Planned(plan, facts, found, untied, vocabulary, _index(base, files) if moved else None, tuple(placed.copies))


# ------------------------------------------------------------------------------------------------- embeddings and heads


def _settle_heads(
    base: Base, adapters: Mapping[str, Adapter], placed: Placed, found: list[Finding], subject: str
) -> None:
    """Give the head a tensor of its own where embedding and head, tied so far, part."""
    embedding = base.embedding
    if embedding is None:
        return
    if base.several_ends and embedding in placed.factors and not base.tied:
        found.append(_ends_open(base, subject))
    if not base.tied or base.head is not None:
        return
    changed = embedding in placed.factors or embedding in placed.whole or embedding in placed.computed
    if changed and not placed.new and not placed.kept_tied and not _stays_tied(adapters, placed, embedding):
        placed.new[base.parted()] = embedding
    if placed.new and not base.parts:
        found.append(_ends_open(base, subject))
    if placed.new and embedding in placed.rows:
        found.append(
            findings.finding(
                "merge-ambiguous",
                subject,
                f"the adapter trained rows of {embedding}, which the head shares, and changes one of the two as a "
                "whole: PEFT's layers lie upon each other there in an order that no file tells",
                "serve the adapter beside its base",
                mergeable=False,
            )
        )


def _ends_open(base: Base, subject: str) -> Finding:
    """Return the refusal of a family whose ends are more than one embedding and one head of a known name."""
    if base.several_ends:
        why = "encoder, decoder and head share the embedding, the adapter changes one of them, and which is not told"
    else:
        why = f"embedding and head would have to part, and what the head of {base.architecture} is called is not known"
    return findings.finding(
        "merge-ambiguous",
        subject,
        f"{why}: the result would not compute what base and adapter do",
        "train embedding and head together, or serve the adapter beside its base",
        mergeable=False,
    )


def _stays_tied(adapters: Mapping[str, Adapter], placed: Placed, embedding: str) -> bool:
    """Return whether an embedding that is replaced stands for the head, too.

    One that was saved because its vocabulary grew belongs to a model that was tied when it was saved; one that was
    trained as a saved module left the head behind, unless the tying was asked for.
    """
    if embedding not in placed.whole:
        return False
    for adapter in adapters.values():
        if adapter.config.get("ensure_weight_tying") is True:
            return True
        saved = adapter.config.get("modules_to_save")
        names = [str(name) for name in saved] if isinstance(saved, list) else []
        if any(name.rpartition(".")[2] in EMBEDDINGS for name in names):
            return False
    return True


def _vocabulary(base: Base, placed: Placed, found: list[Finding], facts: dict[str, Any], subject: str) -> int | None:
    """Return the new number of embedding rows, None where it stays; both ends must agree on it."""
    ends = {
        name: (
            placed.whole[name].shape[0] if name in placed.whole else base.places[placed.new.get(name, name)].shape[0]
        )
        for name in (base.embedding, base.head, *placed.new)
        if name is not None
    }
    resized = [
        n for n in placed.whole if n in ends and placed.whole[n].shape[0] != base.places[placed.new.get(n, n)].shape[0]
    ]
    if not resized:
        return None
    rows = placed.whole[resized[0]].shape[0]
    old = base.places[placed.new.get(resized[0], resized[0])].shape[0]
    facts |= {"adapter_vocab": rows, "base_vocab": old}
    if len(set(ends.values())) != 1:
        found.append(
            findings.finding(
                "merge-vocabulary-torn",
                subject,
                "after the merge embedding and head would have different vocabularies: "
                + ", ".join(f"{name} {count} rows" for name, count in sorted(ends.items())),
                "save the adapter with both (save_embedding_layers=True)",
                adapter_vocab=rows,
                base_vocab=old,
            )
        )
    else:
        found.append(
            findings.finding(
                "merge-vocabulary-grows" if rows > old else "merge-vocabulary-shrinks",
                subject,
                f"the adapter brings an embedding of {rows} rows, the base has {old}: the result has the adapter's",
                "serve the result with the adapter's tokenizer, which goes with it",
                adapter_vocab=rows,
                base_vocab=old,
            )
        )
    return rows


# ---------------------------------------------------------------------------------------------------- files and headers


def _files(base: Base, placed: Placed, dtypes: Mapping[str, str]) -> tuple[list[OutFile], bool]:
    """Return the files of the result, and whether any of their headers had to be written anew."""
    paths = sorted(set(base.weights.owners.values()))
    home = base.weights.owners[base.embedding] if base.embedding is not None else paths[0]
    files: list[OutFile] = []
    moved = False
    for path in paths:
        names = sorted(
            (name for name, owner in base.weights.owners.items() if owner == path),
            key=lambda name: base.places[name].at,
        )
        names += sorted(placed.new) if path == home else []
        steps = [_step(name, base, placed, dtypes) for name in names]
        header = base.headers[path]
        same = all(s.name in base.places and _size(s) == _bytes(base.places[s.name]) for s in steps) and len(
            names
        ) == _listed(header)
        same = same and all(
            s.dtype == base.places[s.name].dtype and s.shape == base.places[s.name].shape for s in steps
        )
        if not same:
            steps.sort(key=lambda s: -WIDTH.get(s.dtype, 1))
            header, steps = _header(header, steps)
            moved = True
        size = len(header) + sum(_size(s) for s in steps)
        files.append(OutFile(path=path, header=header, steps=tuple(steps), size=size))
    return files, moved


def _step(name: str, base: Base, placed: Placed, dtypes: Mapping[str, str]) -> Step:
    origin = placed.new.get(name, name)
    stored = base.places[origin]
    whole = placed.whole.get(name)
    return Step(
        name=name,
        shape=whole.shape if whole is not None else stored.shape,
        dtype=dtypes[origin],
        origin=whole or stored,
        at=stored.at,
        base=stored if whole is not None and whole.shape == stored.shape else None,
        factors=tuple(placed.factors.get(name, ())),
        magnitude=placed.magnitudes.get(name),
        rows=placed.rows.get(name),
        term=placed.terms.get(name),
        replaced=whole is not None,
        computed=name in placed.computed,
        columns=placed.columns.get(name, 0),
    )


def kept_wide(base: Base, dtype: str | None) -> dict[str, str]:
    """Return the dtype of every tensor of a merge: the wanted one, unless the base keeps it in a wider one on purpose.

    `dtype` is a name of DTYPES, None keeps every tensor's own.
    """
    main, wanted = base.main_dtype, DTYPES[dtype] if dtype else None

    def one(stored: str) -> str:
        if wanted is None or stored not in WIDTH or stored == wanted:
            return stored
        return wanted if stored == main or WIDTH[wanted] > WIDTH[stored] else stored

    return {name: one(origin.dtype) for name, origin in base.places.items()}


def precision(base: Base, dtype: str | None, written: str) -> str:
    """Return what tells the precisions of a merge from others of the same parents; `dtype` is as in `kept_wide`.

    That is `written`, which most of the result is in, where whoever asks for it gets the same; of a base that is stored
    in several precisions they may get another result, and then what was asked for counts as well.
    """
    word = next((word for word, stored in DTYPES.items() if stored == written), None)
    if kept_wide(base, word) == kept_wide(base, dtype):
        return written
    return f"{written}, asked for {dtype or 'as stored'}"


def _header(old: bytes, steps: list[Step]) -> tuple[bytes, list[Step]]:
    document: dict[str, Any] = {}
    metadata = json.loads(old[8:]).get("__metadata__")
    if metadata is not None:
        document["__metadata__"] = metadata
    at = 0
    spans: list[int] = []
    for step in steps:
        end = at + _size(step)
        document[step.name] = {"dtype": step.dtype, "shape": list(step.shape), "data_offsets": [at, end]}
        spans.append(at)
        at = end
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGN)
    header = len(text).to_bytes(8, "little") + text
    return header, [_moved(step, len(header) + at) for step, at in zip(steps, spans, strict=True)]


def _moved(step: Step, at: int) -> Step:
    return Step(**{name: getattr(step, name) for name in step.__struct_fields__ if name != "at"}, at=at)


def _listed(header: bytes) -> int:
    document = json.loads(header[8:])
    return len(document) - ("__metadata__" in document)


def _size(step: Step) -> int:
    if step.dtype in WIDTH:
        return product(step.shape) * WIDTH[step.dtype]
    return _bytes(step.origin)


def _bytes(origin: Origin) -> int:
    return origin.count * BITS[origin.dtype] // 8


def _index(base: Base, files: list[OutFile]) -> dict[str, Any] | None:
    """Return the index of the written files, None for a model in one file."""
    if base.weights.index is None:
        return None
    old = table_at(base.root / base.weights.index) or {}
    total = sum(_size(step) for file in files for step in file.steps)
    metadata = {**(old.get("metadata") or {}), "total_size": total}
    if "total_parameters" in metadata:
        metadata["total_parameters"] = sum(product(step.shape) for file in files for step in file.steps)
    weight_map = {step.name: file.path for file in files for step in file.steps}
    return {**old, "metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}


def _main(files: list[OutFile]) -> str:
    sizes: dict[str, int] = {}
    for file in files:
        for step in file.steps:
            sizes[step.dtype] = sizes.get(step.dtype, 0) + _size(step)
    return max(sizes, key=lambda dtype: sizes[dtype])


# ------------------------------------------------------------------------------------------------------------ findings


def _misfits(base: Base, adapters: Mapping[str, Adapter], placed: Placed, subject: str) -> Finding:
    named = [str(a.config.get("base_model_name_or_path")) for a in adapters.values()]
    first = next(iter(sorted(placed.mismatch)))
    needs, has = placed.mismatch[first]
    return findings.finding(
        "merge-shape-mismatch",
        subject,
        f"{first} has {has} in this base, the adapter needs {needs}"
        + (f", and {len(placed.mismatch) - 1} more do not fit" if len(placed.mismatch) > 1 else "")
        + f"; the adapter was trained on {some(named)}",
        f"merge into {named[0]}" if named[0] != "None" else "merge into the base the adapter was trained on",
        shape_mismatch=placed.mismatch,
        base_model=named[0] if named[0] != "None" else None,
        base_root=base.root.name,
    )


def _both(name: str) -> Finding:
    return findings.finding(
        "merge-ambiguous",
        name,
        f"{name} is replaced, whole or in rows, and has matrices of its own: which comes first is open",
    )


def _not_a_number(name: str, origin: Origin) -> Finding:
    return findings.finding(
        "merge-not-streamed",
        name,
        f"{name} is stored as {origin.dtype}: a delta cannot be added to it",
        mergeable=False,
    )


def _untied(base: Base, heads: list[str], subject: str) -> Finding:
    assert base.embedding is not None
    return findings.finding(
        "merge-unties",
        subject,
        f"the adapter changes one end of a tied pair ({base.embedding} and the head): the result gets "
        f"{', '.join(heads)} as a tensor of its own and tie_word_embeddings = false",
        must_untie=True,
    )
