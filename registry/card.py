"""The model card of a version, rendered from manifest, name and number, around what people wrote themselves.

The front matter is dumped, never pasted together, and keeps to the Hub's rules. Every value in the text is escaped, so
that a file name or a message can be no markup. What is not known is printed as unknown.
"""

import functools
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any, Final

import jinja2

from weighbridge.registry import frontmatter, hub_rules, own_words, types
from weighbridge.registry.card_code import pipeline_of, snippet
from weighbridge.registry.manifest import Manifest, canonical
from weighbridge.registry.own_words import split_people
from weighbridge.registry.refs import check_name, shown

__all__ = ["front_matter", "render", "split_people", "training"]

UNKNOWN: Final = "unknown"
_ROWS: Final = 24
"""Rows of the loss table; the whole history is in training.json."""

_FILES: Final = 400
_FINDINGS: Final = 100
_VALUE_MAX: Final = 400
_RELATION: Final = {"adapter": "adapter", "quantized": "quantized"}
_TYPE_WORDS: Final = {"LORA": "LoRA", "LOHA": "LoHa", "LOKR": "LoKr", "IA3": "(IA)³"}
_KIND_WORDS: Final = {
    "adapter": "An adapter",
    "model": "A full model",
    "quantized": "A quantized model",
    "merged": "A model with an adapter merged into its base",
}


class _Raw(str):
    """Text that is markup on purpose; all other text is escaped on its way into the card."""

    __slots__ = ()


def render(
    manifest: Manifest,
    name: str,
    n: int,
    *,
    people: str | None = None,
    license: types.LicenseFacts | None = None,  # noqa: A002 - spelled as the Hub does
) -> bytes:
    """Return the README.md of a version.

    `people` is what people wrote: their README.md with or without front matter, or the card of another version. Their
    text and their other fields are kept; a trainer's template is not their text. `license` replaces the manifest's (a
    note that somebody laid on the version). Rendering the result of `split_people` again gives the same bytes.
    """
    check_name(name)
    held = license or manifest.facts.license
    theirs = frontmatter.split(split_people(people)) if people else frontmatter.split("")
    given = own_words.fields(theirs)
    above, below = own_words.text_of(theirs)
    front, ours = _merged(manifest, held, given)
    body = _body(manifest, name, n, held, heading="##" if above or below else "#")
    marked = f"<!-- weighbridge:fields {', '.join(ours)} -->\n" if ours else ""
    parts = [above, f"{own_words.BEGIN}\n{marked}{body}{own_words.END}", below]
    text = frontmatter.fenced(front) + "\n" + "\n\n".join(part for part in parts if part) + "\n"
    return text.encode("utf-8", "replace")


def training(manifest: Manifest) -> bytes:
    """Return training.json: hyper-parameters, the history of losses and metrics, the best one; no paths, no names."""
    told = manifest.facts.provenance
    return canonical(
        {
            "schema": types.SCHEMA_TRAINING,
            "content": manifest.content,
            "step": told.step,
            "epoch": told.epoch,
            "metrics": told.metrics,
            "best": told.best,
            "training": told.training,
            "log_history": told.log_history,
        }
    )


def front_matter(manifest: Manifest, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the front matter of a version's card, `given` being the fields that people wrote."""
    return _merged(manifest, manifest.facts.license, dict(given or {}))[0]


def _merged(manifest: Manifest, held: types.LicenseFacts, given: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the fields in order, and the names of those that come from us alone."""
    theirs = _valid(given)
    facts = _license_fields(manifest, held, theirs) | _base_fields(manifest, theirs)
    library = theirs.get("library_name") or _library(manifest)
    pipeline = theirs.get("pipeline_tag") or pipeline_of(manifest)
    facts |= {k: v for k, v in (("library_name", library), ("pipeline_tag", pipeline)) if v}
    tags = [t for t in _tags(manifest) if t not in theirs.get("tags", [])]
    if tags or "tags" in theirs:
        facts["tags"] = theirs.get("tags", []) + tags
    owned = {"license", "license_name", "license_link", "base_model", "base_model_relation"}
    front = facts | {k: v for k, v in theirs.items() if k not in facts and k not in owned}
    ours = [k for k in facts if k != "tags" and facts[k] != theirs.get(k)]
    return front, ours + [f"tags={t}" for t in tags]


def _valid(given: dict[str, Any]) -> dict[str, Any]:
    """Return people's fields without what the Hub is known to refuse and a person cannot have meant."""
    kept: dict[str, Any] = {}
    for key, value in given.items():
        if isinstance(value, list):
            value = [v for v in value if v is not None]  # noqa: PLW2901 - cleaned on its way
        if value is None or value == [] or (key == "model-index" and not _has_results(value)):
            continue
        if key in {"base_model", "datasets", "language", "tags"}:
            rule = hub_rules.is_language if key == "language" else hub_rules.is_repo_id
            items = [v for v in (value if isinstance(value, list) else [value]) if key == "tags" or rule(v)]
            words = list(dict.fromkeys(str(v) for v in items))
            if not words:
                continue
            value = words if isinstance(value, list) or key == "tags" else words[0]  # noqa: PLW2901 - as above
        kept[key] = value
    refused = {one.field for one in hub_rules.refusals(kept)}
    return {key: value for key, value in kept.items() if key not in refused}


def _has_results(index: Any) -> bool:
    return isinstance(index, list) and any(isinstance(m, dict) and m.get("results") for m in index)


def _license_fields(manifest: Manifest, held: types.LicenseFacts, theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the licence as the Hub takes it: a known id, a list of them, or `other` with its name."""
    if not held.id or held.id == UNKNOWN:
        return {}
    ids = re.split(r"\s+(?:or|and)\s+", held.id)
    if held.id != "other" and all(i in hub_rules.LICENSES - hub_rules.UNNAMED for i in ids):
        same = theirs.get("license") in (ids[0], ids)
        link = held.link or (theirs.get("license_link") if same else None)
        return {"license": ids[0] if len(ids) == 1 else ids} | ({"license_link": link} if link else {})
    name = held.name or (held.id if held.id != "other" else None)
    link = held.link or next((f.path for f in manifest.files if f.role == "license"), None)
    found = {"license": "other"}
    if name:
        found["license_name"] = hub_rules.license_name(name)
    if link:
        found["license_link"] = link
    return found


def _base_fields(manifest: Manifest, theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return base and relation: the manifest's base, or people's longer list when it holds that base."""
    base = manifest.facts.base
    known = theirs.get("base_model")
    listed = known if isinstance(known, list) else [known] if known else []
    if base.id is not None and hub_rules.is_repo_id(base.id) and base.id not in listed:
        bases: Any = base.id
    else:
        bases = known
    if not bases:
        return {}
    relation = theirs.get("base_model_relation") if bases == known else None
    relation = relation if relation in hub_rules.RELATIONS else base.relation
    relation = relation if relation in hub_rules.RELATIONS else _RELATION.get(manifest.kind)
    return {"base_model": bases} | ({"base_model_relation": relation} if relation else {})


def _library(manifest: Manifest) -> str | None:
    if manifest.kind == "adapter":
        return "peft" if any(f.path == "adapter_config.json" for f in manifest.files) else None
    names = {f.path for f in manifest.files}
    if "modules.json" in names:
        return "sentence-transformers"
    return "transformers" if "config.json" in names else None


def _tags(manifest: Manifest) -> list[str]:
    adapter = manifest.facts.adapter
    if adapter is None or manifest.kind == "merged":
        return []
    words = [adapter.peft_type.lower().replace("_", "-"), *adapter.variants]
    return list(dict.fromkeys(w for w in words if re.fullmatch(r"[a-z0-9-]{1,40}", w)))


def _told(finding: types.Finding) -> str:
    """Return what a finding says and, where a person allowed it, why."""
    reason = finding.data.get("allowed")
    return f"{finding.message} (allowed: {reason})" if isinstance(reason, str) else finding.message


def _body(manifest: Manifest, name: str, n: int, held: types.LicenseFacts, heading: str) -> str:
    facts = manifest.facts
    target = f"./{name}-v{n}"
    code, hint = snippet(manifest, target)
    columns, losses = _losses(facts.provenance.log_history)
    text: str = _template().render(
        h=_Raw(heading),
        name=name,
        n=n,
        summary=_summary(manifest),
        facts=_facts(manifest, held),
        pull=_Raw(f"registry pull {name}@v{n} {target}"),
        code=_Raw(code) if code else None,
        hint=hint,
        purpose=facts.provenance.purpose,
        settings=[(k, _inline(v)) for k, v in sorted(facts.provenance.training.items())],
        columns=[_escape(c) for c in columns],
        losses=losses,
        origins=_origins(facts.provenance),
        files=[(_code(f.path), f.size, _code(f.sha256)) for f in manifest.files[:_FILES]]
        + ([("and more", len(manifest.files) - _FILES, "see manifest.json")] if len(manifest.files) > _FILES else []),
        left_out=_left_out(facts.left_out),
        findings=[(f.severity, _code(f.code), _told(f)) for f in facts.findings[:_FINDINGS]],
        footer=_Raw(
            f"Written by weighbridge from manifest `sha256:{manifest.digest}`. A fact that was not on disk is given as"
            f" {UNKNOWN}."
        ),
    )
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n"


def _summary(manifest: Manifest) -> _Raw:
    facts = manifest.facts
    words = _KIND_WORDS.get(manifest.kind, "A model")
    if facts.adapter is not None and manifest.kind != "merged":
        words = f"A {_escape(_TYPE_WORDS.get(facts.adapter.peft_type, facts.adapter.peft_type))} adapter"
    elif facts.weights.architecture:
        words += f" ({_escape(facts.weights.architecture)})"
    base = facts.base.id
    if base and hub_rules.is_repo_id(base) and "/" in base:
        return _Raw(f"{words}, base [{_escape(base)}](https://huggingface.co/{base}).")
    return _Raw(f"{words}, base {_code(base)}." if base else f"{words}; its base is {UNKNOWN}.")


def _facts(manifest: Manifest, held: types.LicenseFacts) -> list[tuple[str, Any]]:
    facts, told = manifest.facts, manifest.facts.provenance
    weights = facts.weights
    dtypes = ", ".join(f"{d} ({c.parameters:,})" for d, c in sorted(weights.dtypes.items()))
    count = UNKNOWN if weights.parameters is None else f"{weights.parameters:,}"
    base = facts.base
    rows: list[tuple[str, Any]] = [
        ("kind", manifest.kind),
        ("base", _with(_code(base.id) if base.id else UNKNOWN, f"revision {base.revision}" if base.revision else None)),
        ("base known from", base.evidence or UNKNOWN),
        ("licence", _with(_escape(_license_words(held)), held.evidence)),
        ("parameters", f"{count} in {weights.tensors:,} tensors"),
        ("stored as", f"{weights.format}, {dtypes or UNKNOWN}, {weights.bytes:,} bytes of tensors"),
    ]
    if facts.adapter is not None:
        rows += _adapter_rows(facts.adapter)
    rows += [
        ("step", _or_unknown(told.step)),
        ("epoch", _or_unknown(_number(told.epoch))),
        ("best", _best(told.best)),
        ("metrics", ", ".join(f"{k} {_number(v)}" for k, v in sorted(told.metrics.items())[:12]) or UNKNOWN),
        ("run", f"{told.run.project} / {told.run.name}"),
        ("owner", told.owner or UNKNOWN),
        ("written", told.created_at or UNKNOWN),
        ("content", _code(manifest.content)),
    ]
    return rows


def _adapter_rows(adapter: types.AdapterFacts) -> list[tuple[str, Any]]:
    targets = adapter.targets if isinstance(adapter.targets, str) else ", ".join(adapter.targets or [])
    scale = (
        f"rank {_or_unknown(adapter.rank)}, alpha {_or_unknown(adapter.alpha)}, scaling {_or_unknown(adapter.scaling)}"
    )
    return [("adapter", scale), ("targets", _code(targets) if targets else UNKNOWN)]


def _origins(told: types.Provenance) -> list[tuple[str, list[Any]]]:
    """Return the lines about data, code and packages; each says unknown where nothing is known."""
    data = [" @ ".join(str(d[k]) for k in ("id", "name", "revision") if d.get(k)) or _inline(d) for d in told.data]
    code = [str(told.code[k]) for k in ("remote", "commit") if told.code.get(k)] if told.code else []
    if told.code and told.code.get("dirty"):
        code.append("with uncommitted changes")
    packages = [f"{k} {v}" for k, v in sorted(told.packages.items())[:40]]
    return [("Data", data or [UNKNOWN]), ("Code", code or [UNKNOWN]), ("Packages", packages or [UNKNOWN])]


def _losses(entries: list[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Return the loss table: one row per step, evaluations before losses when there are too many."""
    rows: dict[Any, dict[str, Any]] = {}
    for entry in entries:
        told = {k: v for k, v in entry.items() if k in {"epoch", "loss", "learning_rate"} or k.endswith("loss")}
        told |= {k: v for k, v in entry.items() if k.startswith("eval_") and not k.endswith(("runtime", "per_second"))}
        if told.keys() - {"epoch", "learning_rate"}:
            rows.setdefault(entry.get("step"), {}).update(told)
    names = list(dict.fromkeys(k for row in rows.values() for k in row))
    order = {"epoch": 0, "loss": 1}
    columns = sorted(names, key=lambda k: (order.get(k, 3 if k == "learning_rate" else 2), k))[:8]
    steps = list(rows)
    evaluated = [i for i, s in enumerate(steps) if any(k.startswith("eval_") for k in rows[s])]
    kept = _evenly(evaluated, _ROWS)
    known = set(evaluated)
    kept += _evenly([i for i in range(len(steps)) if i not in known], _ROWS - len(kept))
    table = [[_or_unknown(steps[i]), *(_number(rows[steps[i]].get(c, "")) for c in columns)] for i in sorted(kept)]
    return (["step", *columns], table) if table else ([], [])


def _evenly(values: list[int], limit: int) -> list[int]:
    if limit <= 0 or len(values) <= limit:
        return values[: max(0, limit)]
    return [values[round(i * (len(values) - 1) / max(1, limit - 1))] for i in range(limit)]


def _left_out(items: list[types.LeftOut]) -> str | None:
    if not items:
        return None
    reasons: dict[str, int] = {}
    for item in items:
        reasons[item.reason] = reasons.get(item.reason, 0) + 1
    return ", ".join(f"{count} x {reason}" for reason, count in sorted(reasons.items()))


def _license_words(held: types.LicenseFacts) -> str:
    return f"{held.id} ({held.name})" if held.id and held.name else held.id or UNKNOWN


def _best(best: types.BestFacts | None) -> str:
    if best is None:
        return UNKNOWN
    return f"{best.metric} {_number(best.value)}" + (f" at step {best.step}" if best.step is not None else "")


def _with(first: str, second: str | None) -> _Raw:
    head = first if isinstance(first, _Raw) else _Raw(first)
    return _Raw(f"{head}; {_escape(second)}") if second else head


def _or_unknown(value: Any) -> Any:
    return UNKNOWN if value is None else value


def _number(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


def _inline(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(str(_number(v)) for v in value)
    return str(_number(value)) if isinstance(value, (str, int, float)) else canonical(value).decode()


def _code(value: Any) -> _Raw:
    """Return text as code, whatever it holds: no backtick, bar or line can end it early."""
    text = shown(_clipped(str(value))).replace("|", "&#124;")
    if re.search(r"[`&<>]", text):
        return _Raw(f"<code>{_entities(text)}</code>")
    return _Raw(f"`{text}`") if text.strip() else _Raw(UNKNOWN)


def _escape(value: Any) -> Any:
    """Return text in which nothing is markup: no HTML, no Markdown, no control character."""
    if value is None or isinstance(value, (_Raw, int, float, jinja2.Undefined)):
        return value
    text = _entities(shown(_clipped(str(value))))
    return _Raw(re.sub(r"([\\`*_{}\[\]#~!])", r"\\\1", text).replace("|", "\\|"))


def _entities(text: str) -> str:
    text = re.sub(r"&(?!#124;)", "&amp;", text)
    return text.replace("<", "&lt;").replace(">", "&gt;").replace("`", "&#96;")


def _clipped(text: str) -> str:
    return text if len(text) <= _VALUE_MAX else text[:_VALUE_MAX] + "…"


@functools.cache
def _template() -> jinja2.Template:
    source = resources.files("weighbridge.registry").joinpath("templates", "card.md.j2").read_text("utf-8")
    environment = jinja2.Environment(  # noqa: S701 - Markdown: `finalize` escapes every value
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=_escape,
        keep_trailing_newline=True,
    )
    environment.filters["raw"] = _Raw
    return environment.from_string(source)
