"""The papers of one artifact: card, licence, private paths and secrets in the files that would be published."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from weighbridge.adapters import card_facts, paths, secrets, sidecar
from weighbridge.adapters import license as licences
from weighbridge.adapters.draft import Draft, joined
from weighbridge.adapters.formats.source import contents
from weighbridge.adapters.listing import File
from weighbridge.adapters.plan import CARD_ROLE, JudgedFile
from weighbridge.registry import findings
from weighbridge.registry.types import Finding, LicenseFacts

TEXT_LIMIT: Final = 32 << 20
"""Bytes of the largest text file that is searched for private paths."""


SECRETS_LIMIT: Final = 64 << 20
"""Bytes of the largest file besides weights that is published: more than any tokenizer has, and searched whole."""

PROSE_LIMIT: Final = 4 << 20
"""Bytes of the largest text that people wrote and that is published: searched word by word for private paths."""


class Papers(NamedTuple):
    """What the papers say, what is wrong with them, and the licence with its evidence."""

    facts: dict[str, Any]
    findings: list[Finding]
    license: LicenseFacts


def read(draft: Draft, files: Iterable[JudgedFile], above: Sequence[Path], caches: Sequence[Path]) -> Papers:
    """Return the papers of an artifact; `files` are those that would be published, by path from the inspected root."""
    place = draft.place
    tree = place.reader.tree
    folder = Path(tree.folders[place.folder].path)
    published = [tree.files[f.path] for f in files if f.publish and f.path in tree.files]
    cards = [f for f in files if f.publish and f.role == CARD_ROLE]
    base = draft.facts.get("base_model")
    named = base if isinstance(base, str) and not paths.is_local(base) else draft.base.id
    source = Path(tree.files[cards[0].path].source) if cards else folder / card_facts.CARD
    card = card_facts.read(source, config_base=base if isinstance(base, str) else None)
    found = licences.find(
        folder,
        draft.config,
        licences.local_base(base),
        sidecar.read(folder),
        card=card,
        base_id=named,
        base_revision=draft.base.revision,
        above=above,
        caches=caches,
    )
    facts = {**card.facts, **found.facts}
    facts.setdefault("license", card.license.id if card.license else None)
    told = [_placed(draft, f) for f in (*card.findings, *found.findings)]
    told += _private(published, cards)
    # Of a pickle that is converted only the tensors go out; what else it holds stays where it is.
    kept = set(draft.convert)
    weights = {f.path for f in files if f.role == "weights"}
    large = [f for f in published if f.size > _limit(f) and f.path not in weights]
    told += [_unsearched(f) for f in large]
    kept |= {f.path for f in large}
    told += secrets.scan((f.path, Path(f.source)) for f in published if f.link is None and f.path not in kept)
    _collect(facts, told, "local_paths")
    _collect(facts, told, "secret_files")
    facts.setdefault("hub_push_blocked", any(f.data.get("hub_push_blocked") for f in told))
    return Papers(facts, told, found.license)


def _placed(draft: Draft, one: Finding) -> Finding:
    """Return a finding with the path of its file or folder from the inspected root."""
    if draft.place.folder == ".":
        return one
    if one.subject == ".":
        return msgspec.structs.replace(one, subject=draft.place.folder)
    if one.subject in draft.place.names:
        return msgspec.structs.replace(one, subject=draft.place.path(one.subject))
    return one


def _private(published: Sequence[File], cards: Sequence[JudgedFile]) -> list[Finding]:
    """Find private paths in the texts and weight headers that would be published; the card has its own check."""
    own = {f.path for f in cards}
    bundle = {f.name for f in published}
    hits: list[paths.Hit] = []
    told: list[Finding] = []
    for file in published:
        if file.path in own or file.link is not None or file.size > TEXT_LIMIT:
            continue
        if file.name.endswith((".json", *_PROSE)):
            try:
                raw = contents(Path(file.source), TEXT_LIMIT)
            except OSError:
                continue
            hits += paths.scan(file.path, raw)
            if file.name == "tokenizer_config.json":
                told += paths.outside_bundle(file.path, raw, bundle)
    return told + [
        msgspec.structs.replace(one, data={**one.data, "hub_push_blocked": True}) for one in paths.findings(hits)
    ]


def metadata(draft: Draft, subject: str) -> list[Finding]:
    """Find what of a safetensors header's metadata is private: paths, captions, comments."""
    private = sorted(
        key for key, value in (draft.metadata or {}).items() if key in _CAPTIONS or paths.scan_text(subject, value)
    )
    if not private:
        return []
    return [
        findings.finding(
            "private-metadata",
            subject,
            f"the header of {subject} carries {', '.join(private[:6])}: paths, captions or comments of the training",
            "save the file again without these metadata",
            private_metadata=private,
            hub_push_blocked=True,
        )
    ]


_CAPTIONS: Final = frozenset(
    {
        "ss_dataset_dirs",
        "ss_tag_frequency",
        "ss_training_comment",
        "ss_output_name",
        "ss_reg_dataset_dirs",
        "ss_datasets",
    }
)


def _limit(file: File) -> int:
    return PROSE_LIMIT if file.name.endswith(_PROSE) and not paths.is_vocabulary(file.path) else SECRETS_LIMIT


_PROSE: Final = (".jinja", ".txt", ".yml", ".yaml", ".py", ".md")


def _unsearched(file: File) -> Finding:
    return findings.finding(
        "file-unsearched",
        file.path,
        f"{file.path} has {file.size} bytes and is no weights file: that is more than is searched for secrets",
        "take it out of the folder, or split it",
        file=file.path,
        file_bytes=file.size,
    )


def _collect(facts: dict[str, Any], told: Iterable[Finding], name: str) -> None:
    """Gather one list fact over all findings."""
    every = list(facts.get(name) or [])
    for one in told:
        every = joined(every, one.data.get(name, []))
    if every:
        facts[name] = every
