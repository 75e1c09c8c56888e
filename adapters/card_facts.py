"""What a model card says, and what the Hub would say to it.

`read` takes any README.md: with a byte-order mark, with YAML that does not parse or stands at the wrong place, with
fields that the Hub refuses. It never raises for what people wrote; the facts carry the names of the inspect contract.
"""

import re
from pathlib import Path
from typing import Any, Final, NamedTuple

from weighbridge.adapters import license_text, paths
from weighbridge.adapters.formats.source import contents
from weighbridge.adapters.license_names import Name, named, nearest_known
from weighbridge.registry import frontmatter, hub_rules
from weighbridge.registry.findings import finding
from weighbridge.registry.hub_rules import listed, word
from weighbridge.registry.refs import shown
from weighbridge.registry.types import Finding

CARD: Final = "README.md"
CARD_MAX: Final = 4 << 20
"""Bytes of the largest card that is read."""

_LISTS: Final = ("language", "datasets", "tags", "metrics", "base_model", "license")
"""Fields that may be a list."""


class CardFacts(NamedTuple):
    """A card: its front matter (None without a readable one), its text, its facts and what is wrong with it.

    `license` is what the card declares, `stated` what only its prose says. `displaced` holds front matter that stands
    where no reader looks.
    """

    present: bool
    text: str
    front: dict[str, Any] | None
    body: str
    facts: dict[str, Any]
    findings: list[Finding]
    license: Name | None = None
    license_link: str | None = None
    stated: tuple[license_text.Statement, ...] = ()
    displaced: dict[str, Any] | None = None
    base_models: tuple[str, ...] = ()

    @property
    def hub_blocked(self) -> bool:
        """The Hub would refuse this card until somebody mends it."""
        return self.facts.get("hub_push_blocked") is True


ABSENT: Final = CardFacts(False, "", None, "", {}, [])


def read(path: Path, *, config_base: str | None = None) -> CardFacts:
    """Return the facts of a card, the ones of no card where there is none.

    `config_base` is the base that the adapter's own config names; it wins over the card. Raises OSError other than
    "no such file".
    """
    try:
        raw = contents(path, CARD_MAX + 1)
    except (FileNotFoundError, NotADirectoryError):
        return ABSENT
    except OSError:
        if path.is_file():
            raise
        return ABSENT  # a folder, a pipe or a device of that name
    return parse(raw, config_base=config_base, name=path.name)


def parse(raw: bytes, *, config_base: str | None = None, name: str = CARD) -> CardFacts:
    """Return the facts of a card's bytes."""
    found: list[Finding] = []
    text = _text(raw[:CARD_MAX], name, found)
    parts = frontmatter.split(text)
    facts: dict[str, Any] = {"bom": parts.bom}
    if parts.bom:
        found.append(
            finding(
                "card-byte-order-mark",
                name,
                f"{name} starts with a byte-order mark",
                "save it as plain UTF-8",
                bom=True,
            )
        )
    front = _front(parts, name, facts, found)
    displaced = front if parts.displaced else None
    if parts.displaced:
        front = None
    stated = _stated(parts, displaced)
    card = CardFacts(True, text, front, parts.body, facts, found, stated=stated, displaced=displaced)
    if front is not None:
        license_name, link = _license(front, name, facts, found)
        bases = _bases(front, name, config_base, facts, found)
        _values(front, name, facts, found)
        card = card._replace(license=license_name, license_link=link, base_models=bases)
    else:
        facts["base_model_in_card"] = None
    if card.license is None and stated:
        found.append(_only_stated(stated[0], name))
    found += paths.findings(paths.scan_text(name, parts.body))
    if any(f.data.get("hub_push_blocked") for f in found):
        facts["hub_push_blocked"] = True
    return card


def _text(raw: bytes, name: str, found: list[Finding]) -> str:
    for encoding, mark in (("utf-16", (b"\xff\xfe", b"\xfe\xff")), ("utf-8", b"")):
        if raw.startswith(mark):
            try:
                return raw.decode(encoding) if encoding == "utf-8" else "\ufeff" + raw.decode(encoding)
            except UnicodeDecodeError:
                break
    found.append(
        finding(
            "card-not-text", name, f"{name} is not UTF-8; what could be read was read", f"save {name} as UTF-8",
            hub_push_blocked=True,
        )
    )  # fmt: skip
    return raw.decode("utf-8", "replace")


def _front(parts: frontmatter.Split, name: str, facts: dict[str, Any], found: list[Finding]) -> dict[str, Any] | None:
    """Parse the front matter, say where it stops, and where it stands if that is the wrong place."""
    if parts.front is None:
        return None
    parsed = frontmatter.load(parts.front)
    fault, line = parsed.fault, parsed.line
    if not parts.closed:
        fault, line = "it has no closing line of three dashes", parts.front.count("\n") + 1
    elif fault is None and parsed.value is not None and not isinstance(parsed.value, dict):
        fault, line = f"it is a {_kind(parsed.value)} and no mapping of fields", 1
    facts["yaml_valid"] = fault is None and not parts.displaced
    if fault is not None:
        where = (line or 1) + parts.line - 1
        facts["yaml_error_line"] = where
        found.append(
            finding(
                "card-front-matter-invalid",
                name,
                f"the front matter of {name} stops at line {where}: {shown(fault)}",
                f"mend line {where} of {name}",
                yaml_valid=False,
                yaml_error_line=where,
                hub_push_blocked=True,
            )
        )
        return None
    if parts.displaced:
        found.append(
            finding(
                "card-front-matter-displaced",
                name,
                f"the front matter of {name} begins at line {parts.line - 1}; other text stands above it, so no reader"
                " sees it",
                f"move the block to line 1 of {name}",
                yaml_valid=False,
                front_matter_line=parts.line - 1,
            )
        )
    value: dict[str, Any] = parsed.value or {}
    return value


def _license(
    front: dict[str, Any], name: str, facts: dict[str, Any], found: list[Finding]
) -> tuple[Name | None, str | None]:
    """Read the declared licence and hold it against the Hub's list."""
    link = front.get("license_link") if isinstance(front.get("license_link"), str) else None
    entries = [v for v in listed(front.get("license")) if v is not None]
    written = [w for v in entries if (w := word(v))]
    if not written or len(written) != len(entries):
        return None, link
    names = [named(w) or Name(w.lower()) for w in written]
    own_name = front.get("license_name")
    license_id = " and ".join(n.id for n in names)
    name_of = names[0].name
    if license_id == "other" and isinstance(own_name, str) and own_name.strip():
        name_of = own_name.strip()
    declared = Name(license_id, name_of)
    facts["license"] = declared.id
    facts["license_hub_known"] = all(n.id in hub_rules.LICENSES for n in names)
    if not facts["license_hub_known"]:
        near = next((p for n in names if n.id not in hub_rules.LICENSES and (p := nearest_known(n.id))), None)
        found.append(_unknown_to_hub(name, declared.id, near))
    elif any(w.lower() != n.id for w, n in zip(written, names, strict=True)):
        found.append(
            finding(
                "card-license-spelled",
                name,
                f"{name} spells the licence '{shown(', '.join(written))}'; its id is {declared.id}",
                f"write license: {declared.id}",
                license=declared.id,
                license_as_written=", ".join(written),
            )
        )
    missing = [k for k in ("license_name", "license_link") if not _filled(front.get(k))]
    if declared.id == "other" and missing:
        facts["missing_card_fields"] = missing
        found.append(
            finding(
                "card-license-unnamed",
                name,
                f"{name} says license: other, but not which: {' and '.join(missing)} missing",
                "add license_name and license_link (a URL, or the name of the LICENSE file)",
                missing_card_fields=missing,
                hub_push_blocked=True,
            )
        )
    return declared, link


def _unknown_to_hub(name: str, license_id: str, near: str | None) -> Finding:
    choice = f"write license: {near}, or name it yourself: " if near else "name it yourself: "
    return finding(
        "card-license-unknown-to-hub",
        name,
        f"the licence '{shown(license_id)}' of {name} is none of the ids that the Hub is known to have"
        + (f" (the nearest is {near})" if near else "")
        + f": a card that we write says license: other, license_name: {hub_rules.license_name(license_id)}",
        f"{choice}license: other with license_name and license_link",
        license=license_id,
        license_hub_known=False,
        nearest=near,
        hub_push_blocked=True,
    )


def _bases(
    front: dict[str, Any], name: str, config_base: str | None, facts: dict[str, Any], found: list[Finding]
) -> tuple[str, ...]:
    """Read the bases and hold them against the one in the config."""
    bases = tuple(w for v in listed(front.get("base_model")) if v is not None and (w := word(v)))
    facts["base_models"] = list(bases)
    facts["base_model_in_card"] = bases[0] if bases else None
    relation = front.get("base_model_relation")
    if relation is not None:
        facts["base_model_relation"] = relation if isinstance(relation, str) else word(relation)
    ids = [b for b in bases if hub_rules.is_repo_id(b)]
    if not bases and config_base:
        local = paths.is_local(config_base)
        found.append(
            finding(
                "card-base-missing",
                name,
                f"{name} names no base model; the config names {'a local path' if local else shown(config_base)}",
                base_model_in_card=None,
                base_model=None if local else config_base,
            )
        )
    elif config_base and ids and not paths.is_local(config_base) and not any(_same_base(b, config_base) for b in ids):
        found.append(
            finding(
                "card-base-differs",
                name,
                f"{name} names the base {shown(', '.join(ids))}, the config {shown(config_base)}; the config wins",
                f"correct base_model in {name}",
                base_model_in_card=bases[0],
                base_model=config_base,
            )
        )
    return bases


def _values(front: dict[str, Any], name: str, facts: dict[str, Any], found: list[Finding]) -> None:
    """Check every other field against the Hub's rules."""
    if "language" in front:
        facts["language"] = [w for v in listed(front["language"]) if v is not None and (w := word(v))]
    bad_keys = list(dict.fromkeys(hub_rules.bad_keys(front)))
    facts["bad_card_keys"] = bad_keys
    if bad_keys:
        found.append(
            finding(
                "card-keys-refused",
                name,
                f"{name} has keys that the Hub cannot store: {shown(', '.join(bad_keys))}",
                "rename them without '.' and '$'",
                bad_card_keys=bad_keys,
                hub_push_blocked=True,
            )
        )
    nulls = [k for k in front if isinstance(front[k], list) and any(v is None for v in front[k])]
    facts["null_card_fields"] = nulls
    if nulls:
        found.append(
            finding(
                "card-null-entries", name, f"{name} has empty entries in {', '.join(map(shown, nulls))}",
                "take them out", null_card_fields=nulls,
            )
        )  # fmt: skip
    _local(front, name, facts, found)
    for field, value, rule in hub_rules.refusals(front):
        if field in {"base_model", "datasets"} and paths.is_local(value):
            continue  # told above
        found.append(
            finding(
                "card-value-refused",
                name,
                f"the Hub refuses {field}: {shown(value)} in {name}: {rule}",
                f"correct {field}, or take it out",
                field=field,
                value=value,
                hub_push_blocked=True,
            )
        )
    missing = list(hub_rules.missing_results(front.get("model-index")))
    if missing:
        facts["missing_card_fields"] = facts.get("missing_card_fields", []) + missing
        found.append(
            finding(
                "card-incomplete", name, f"{name} lacks {', '.join(missing[:5])}, which the Hub requires",
                "fill them in, or take model-index out", missing_card_fields=missing, hub_push_blocked=True,
            )
        )  # fmt: skip
    facts.setdefault("missing_card_fields", [])


def _local(front: dict[str, Any], name: str, facts: dict[str, Any], found: list[Finding]) -> None:
    hits = paths.scan_value(name, front)
    named_by = [h for h in hits if re.match(r"(?:base_model|datasets)(?:\[|$)", h.field)]
    if named_by:
        values = [h.value for h in named_by]
        fields = [re.sub(r"\[\d+\]$", "", h.field) for h in named_by]
        found.append(
            finding(
                "card-local-path",
                name,
                f"{name} names {' and '.join(dict.fromkeys(fields))} by a local path: {shown(', '.join(values))}",
                "write the id that the Hub knows, or take the field out",
                local_paths=values,
                fields=fields,
                hub_push_blocked=True,
            )
        )
    found += paths.findings(h for h in hits if h not in named_by)
    if hits:
        facts["local_paths"] = [h.value for h in hits]


def _stated(parts: frontmatter.Split, displaced: dict[str, Any] | None) -> tuple[license_text.Statement, ...]:
    """Return what the text says of a licence; front matter at the wrong place is text."""
    told = license_text.statements(parts.body)
    said = word(next(iter(listed((displaced or {}).get("license"))), None))
    if said:
        told.insert(0, license_text.Statement(named(said) or Name(said.lower()), parts.line, f"license: {said}"))
    return tuple(told)


def _only_stated(one: license_text.Statement, name: str) -> Finding:
    return finding(
        "card-license-in-text",
        name,
        f"a licence is stated in the text of {name} (line {one.line}: {shown(one.quote)}), but not declared",
        f"declare it: license: {one.name.id} in the front matter, or in weighbridge.yaml",
        license_in_text=one.name.name or one.name.id,
        line=one.line,
    )


def _same_base(one: str, other: str) -> bool:
    """Compare two ids without case; an old name without owner is the same model as with one."""
    a, b = one.casefold(), other.casefold()
    return a == b or ((("/" in a) != ("/" in b)) and a.rsplit("/", 1)[-1] == b.rsplit("/", 1)[-1])


def _filled(value: Any) -> bool:
    return value is not None and value != ""


def _kind(value: Any) -> str:
    return {list: "list", str: "text", bool: "truth value"}.get(type(value), "number")
