"""Whose licence a model is under, and how we know: sidecar, card, config, LICENSE file, base, else unknown.

What is stated nearest to the weights wins; a base's licence counts only where the base is at hand, as a folder, in a
Hub cache, or in a registry that the caller can ask. The evidence is always a sentence that names a file.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from weighbridge.adapters import card_facts, license_text
from weighbridge.adapters.card_facts import CardFacts
from weighbridge.adapters.formats.source import contents
from weighbridge.adapters.license_names import Name, named, nearest_known, parts, restriction, same
from weighbridge.adapters.sidecar import SIDECAR, Sidecar
from weighbridge.registry.findings import finding
from weighbridge.registry.hub_rules import is_repo_id
from weighbridge.registry.types import Finding, LicenseFacts

__all__ = ["Found", "cache_folder", "cache_roots", "compare", "find", "license_files", "nearest_known", "parts"]

_FILE = re.compile(r"(?:un)?licen[sc]e(?:[-_. ].*)?|copying(?:[-_.].*)?|[\w. ]+[-_ ]licen[sc]e", re.IGNORECASE)
_FILE_ENDS: Final = frozenset({"", ".txt", ".md", ".rst", ".model", ".weights"})
_NOT_OURS = re.compile(r"third|notice|code|data(?:set)?s?\b|use[_-]?policy", re.IGNORECASE)
_ALTERNATIVE = re.compile(r"(?:licen[sc]e|copying)[-_.](?:apache|mit|bsd|gpl|lgpl|mpl|isc|zlib)", re.IGNORECASE)

Lookup = Callable[[str, str | None], LicenseFacts | None]
"""Asks a registry for the licence of a base by id and revision."""


class Found(NamedTuple):
    """A licence with its findings and the facts of the inspect contract."""

    license: LicenseFacts
    findings: list[Finding]
    facts: dict[str, Any]


class _Stated(NamedTuple):
    name: Name
    source: str
    evidence: str
    link: str | None = None


def find(
    folder: Path,
    config: Mapping[str, Any] | None = None,
    base_folder: Path | None = None,
    sidecar: Sidecar | None = None,
    *,
    card: CardFacts | None = None,
    base_id: str | None = None,
    base_revision: str | None = None,
    above: Sequence[Path] = (),
    caches: Sequence[Path] = (),
    lookup: Lookup | None = None,
) -> Found:
    """Return the licence of the model in a folder.

    `config` is its config.json or adapter_config.json. `above` are folders of the run whose own statement holds for its
    checkpoints, nearest first. `caches` are Hub caches that may hold the base. Raises OSError for an unreadable folder.
    """
    findings: list[Finding] = []
    facts: dict[str, Any] = {}
    card = card if card is not None else card_facts.read(folder / card_facts.CARD)
    own = _of_folder(folder, card, config=config, sidecar=sidecar, findings=findings, facts=facts)
    for parent in above if own is None else ():
        outer = card_facts.read(parent / card_facts.CARD)
        own = _of_folder(parent, outer, where=f" in {parent.name}", findings=findings, facts=facts)
        if own is not None:
            break
    base = _of_base(base_folder, base_id, base_revision, caches, lookup)
    if own is not None:
        found = _license(own)
        looser = compare(found, base.license) if base else None
        return Found(found, findings + ([looser] if looser else []), facts)
    if base is not None and base.license.id is not None:
        inherited = base.license
        findings.append(
            finding(
                "license-inherited",
                card_facts.CARD,
                f"no licence is stated here; the base's is {inherited.name or inherited.id}: {inherited.evidence}",
                license=inherited.id,
            )
        )
        return Found(inherited, findings, facts)
    return Found(_unknown(card, findings), findings, facts)


def compare(own: LicenseFacts, base: LicenseFacts) -> Finding | None:
    """Return a finding when a model claims more freedom than its base gives, else None."""
    ours, theirs = restriction(own.id, own.name), restriction(base.id, base.name)
    if own.id is None or base.id is None or ours is None or theirs is None or theirs <= ours:
        return None
    return finding(
        "license-looser-than-base",
        card_facts.CARD,
        f"the licence here is {own.name or own.id}, that of the base is {base.name or base.id}, which holds back more",
        "state a licence that the base's allows; a merged model is under the base's terms",
        license=own.id,
        adapter_license=own.name if own.id == "other" and own.name else own.id,
        base_license=base.name if base.id == "other" and base.name else base.id,
    )


def license_files(folder: Path) -> list[Path]:
    """Return the licence files of a folder, the ones about the weights first. Raises OSError."""
    known = []
    for entry in os.scandir(folder):
        path = Path(entry.path)
        plain = path.suffix.lower() in _FILE_ENDS and _FILE.fullmatch(path.stem)
        if (plain or _ALTERNATIVE.match(entry.name)) and path.is_file():  # an entry's own raises for a circular link
            known.append(path)
    return sorted(known, key=lambda p: (_NOT_OURS.search(p.name) is not None, "model" not in p.name.lower(), p.name))


def cache_roots(environ: Mapping[str, str]) -> list[Path]:
    """Return the Hub caches that a user's environment names, in the order in which the Hub's client looks."""
    home = Path(environ.get("HOME") or "/")
    roots = [environ.get("HF_HUB_CACHE"), environ.get("HUGGINGFACE_HUB_CACHE")]
    hf_home = environ.get("HF_HOME")
    cache = environ.get("XDG_CACHE_HOME")
    roots.append(f"{hf_home}/hub" if hf_home else None)
    roots.append(f"{cache}/huggingface/hub" if cache else str(home / ".cache/huggingface/hub"))
    return [Path(r).expanduser() for r in dict.fromkeys(roots) if r]


def cache_folder(base_id: str, revision: str | None, caches: Sequence[Path]) -> Path | None:
    """Return the snapshot of a model in a Hub cache: of the revision, else of `main`, else the only one there."""
    if not is_repo_id(base_id):
        return None
    for root in caches:
        repo = root / ("models--" + base_id.replace("/", "--"))
        snapshots = repo / "snapshots"
        if not snapshots.is_dir():
            continue
        commit = _ref(repo, revision or "main") or revision
        if commit and re.fullmatch(r"[0-9a-f]{7,40}", commit) and (snapshots / commit).is_dir():
            return snapshots / commit
        known = sorted(p for p in snapshots.iterdir() if p.is_dir() and not p.name.startswith("."))  # whole ones
        if revision is None and len(known) == 1:
            return known[0]
    return None


def _ref(repo: Path, revision: str) -> str | None:
    if not re.fullmatch(r"[\w.-]+(?:/[\w.-]+)*", revision) or ".." in revision:
        return None
    try:
        return contents(repo / "refs" / revision, 128).decode("ascii").strip()[:64]
    except (OSError, UnicodeDecodeError):
        return None


def _of_folder(
    folder: Path,
    card: CardFacts,
    *,
    findings: list[Finding],
    facts: dict[str, Any],
    config: Mapping[str, Any] | None = None,
    sidecar: Sidecar | None = None,
    where: str = "",
) -> _Stated | None:
    """Return what a folder itself states, nearest first; card and file are held against each other."""
    text = _from_files(folder, where, findings)
    declared = _from_card(card, where)
    _conflict(card, declared, text, facts, findings)
    stated = (_from_sidecar(sidecar), declared, _from_config(config), text)
    return next((s for s in stated if s is not None), None)


def _from_sidecar(sidecar: Sidecar | None) -> _Stated | None:
    if sidecar is None or not sidecar.license:
        return None
    name = named(sidecar.license) or Name(sidecar.license.lower())
    if name.id == "other":
        name = Name("other", sidecar.license_name or name.name)
    return None if name.id == "unknown" else _Stated(name, "sidecar", f"{SIDECAR} states it", sidecar.license_link)


def _from_card(card: CardFacts, where: str) -> _Stated | None:
    if card.license is None or card.license.id == "unknown":
        return None
    return _Stated(card.license, "card", f"{card_facts.CARD}{where} declares it", card.license_link)


def _from_config(config: Mapping[str, Any] | None) -> _Stated | None:
    value = (config or {}).get("license")
    if not isinstance(value, str) or not value.strip() or value.strip().lower() == "unknown":
        return None
    return _Stated(named(value) or Name(value.strip().lower()), "config", "the config has it as license")


def _from_files(folder: Path, where: str, findings: list[Finding]) -> _Stated | None:
    told: list[tuple[Path, license_text.Recognised]] = []
    for path in license_files(folder):
        text = contents(path, license_text.TEXT_MAX).decode("utf-8", "replace")
        told.append((path, license_text.recognise(text)))
    if not told:
        return None
    alternatives = [(p, r) for p, r in told if r.name and _ALTERNATIVE.match(p.name)]
    if len(alternatives) > 1 and len(alternatives) == len(told):
        ids = list(dict.fromkeys(r.name.id for _, r in alternatives if r.name))
        names = ", ".join(p.name for p, _ in alternatives)
        return _Stated(Name(" or ".join(ids)), "file", f"{names}{where}: one text each")
    path, first = told[0]
    if first.name is None:
        findings.append(
            finding(
                "license-text-unclear",
                path.name,
                f"{path.name} is not the text of one known licence: {first.why}",
                f"state the licence in the card or in {SIDECAR}",
            )
        )
        return None
    link = path.name if first.name.id == "other" else None
    return _Stated(first.name, "file", f"{path.name}{where}: {first.why}", link)


def _conflict(
    card: CardFacts,
    declared: _Stated | None,
    text: _Stated | None,
    facts: dict[str, Any],
    findings: list[Finding],
) -> None:
    """Warn when the card, valid or at the wrong place, and the LICENSE file name different licences."""
    in_card = declared.name if declared else None
    if in_card is None and card.displaced is not None and card.stated:
        in_card = card.stated[0].name
    if in_card is None or text is None or _agree(in_card, text.name):
        return
    facts.update(license_in_card=in_card.id, license_in_file=text.name.id)
    findings.append(
        finding(
            "license-conflict",
            card_facts.CARD,
            f"the card says {in_card.name or in_card.id}, the file says {text.name.name or text.name.id}"
            f" ({text.evidence})",
            "make card and LICENSE file say the same",
            license_in_card=in_card.id,
            license_in_file=text.name.id,
        )
    )


def _agree(one: Name, other: Name) -> bool:
    """Tell whether a card can mean the file: the same licence, or one of the alternatives that the other lists."""
    if one.id == "other" and other.id == "other" and one.name and other.name:
        words = [set(re.findall(r"[a-z0-9]+", n.name.lower())) - {"license", "v1"} for n in (one, other) if n.name]
        return bool(words[0] & words[1])
    return any(same(Name(a, one.name), Name(b, other.name)) for a in parts(one.id) for b in parts(other.id))


def local_base(named: object) -> Path | None:
    """Return the folder of a base that a config names by an absolute path of this machine, where it is there."""
    if not isinstance(named, str) or not named.startswith("/") or "\0" in named:
        return None
    folder = Path(named)
    try:
        return folder if folder.is_dir() else None
    except OSError:
        return None


def _of_base(
    folder: Path | None,
    base_id: str | None,
    revision: str | None,
    caches: Sequence[Path],
    lookup: Lookup | None,
) -> Found | None:
    """Return the base's own licence where the base is at hand."""
    where = "the base's folder"
    if folder is None or not folder.is_dir():
        folder = cache_folder(base_id, revision, caches) if base_id else None
        where = f"{base_id} in the Hub cache"
    if folder is not None:
        findings: list[Finding] = []
        try:
            card = card_facts.read(folder / card_facts.CARD)
            stated = _of_folder(folder, card, config=_config(folder), findings=findings, facts={})
        except OSError:
            stated = None
        if stated is not None:
            facts = _license(stated)
            return Found(
                LicenseFacts(
                    id=facts.id,
                    source="base",
                    evidence=f"{stated.evidence}, in {where}",
                    name=facts.name,
                    link=facts.link,
                ),
                findings,
                {},
            )
    asked = lookup(base_id, revision) if lookup is not None and base_id else None
    if asked is None or asked.id is None:
        return None
    return Found(
        LicenseFacts(
            id=asked.id,
            source="base",
            evidence=asked.evidence or f"{base_id} in the registry",
            name=asked.name,
            link=asked.link,
        ),
        [],
        {},
    )


_CONFIG_MAX: Final = 16 << 20


def _config(folder: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(contents(folder / "config.json", _CONFIG_MAX))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _license(stated: _Stated) -> LicenseFacts:
    return LicenseFacts(
        id=stated.name.id, source=stated.source, evidence=stated.evidence, name=stated.name.name, link=stated.link
    )


def _unknown(card: CardFacts, findings: list[Finding]) -> LicenseFacts:
    evidence = "no card, config or LICENSE file states one, and no base is at hand"
    line = card.facts.get("yaml_error_line")
    if line is not None:
        evidence = f"the front matter of {card_facts.CARD} stops at line {line}, and nothing else states one"
    if card.stated:
        one = card.stated[0]
        evidence = (
            f"stated in the text of {card_facts.CARD} (line {one.line}: {one.quote}), not declared: "
            f"{one.name.name or one.name.id}"
        )
    findings.append(
        finding(
            "license-unknown",
            card_facts.CARD if card.present else ".",
            f"the licence is unknown: {evidence}",
            f"declare it in the card, or write license: <id> into {SIDECAR}",
        )
    )
    return LicenseFacts(evidence=evidence)
