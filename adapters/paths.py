"""Paths of somebody's machine in files that would be published: found, named by field, rewritten where evidence allows.

    scan(name, raw)                what a JSON, YAML or text file holds
    rewrite(name, raw, evidence)   new bytes in which a base is named by its id, with both hashes in a finding

A value is rewritten only to something that stands on disk elsewhere: the snapshot path of the Hub cache, the sidecar,
the card, another file of the same run, or a file of the bundle itself. Nothing is guessed from a folder's name.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Final, NamedTuple

from weighbridge.registry.findings import finding
from weighbridge.registry.hashing import sha256_bytes
from weighbridge.registry.hub_rules import is_repo_id
from weighbridge.registry.types import Finding

SCAN_MAX: Final = 32 << 20
"""Bytes of the largest text file that is scanned whole for paths."""

BASE_FIELDS: Final = frozenset({
    "base_model_name_or_path", "_name_or_path", "name_or_path", "base_model", "model_name_or_path",
    "tokenizer_name_or_path", "parent_library_model", "_base_model_name_or_path",
})  # fmt: skip
"""Fields that name a model, so that a relative path in them is one as well."""

_VOCABULARY = re.compile(
    r"(?:^|/)(?:tokenizer|vocab|added_tokens|special_tokens_map|merges|spiece|bpe)[^/]*\.(?:json|txt|model|tiktoken|bpe)$"
)
_PROMPTS: Final = frozenset({"chat_template", "chat_templates", "template", "system_prompt", "prompt"})
_HOMES = r"home|Users|root"
_MOUNTS = (
    r"mnt|data\d*|scratch\w*|workspace|workdir|lustre\w*|gpfs\w*|fsx|nfs\w*|efs|storage\w*|projects?|gscratch|media|export"
    r"|shared?|cluster|work|vol\d*|volumes?|Volumes|dbfs|kaggle|content|autodl-\w+|raid\w*|ssd\w*|disk\w*|opt|srv|tmp|var"
)
_BEGIN = r"(?<![\w./:~-])(?:file:(?://)?)?"
_SEGMENT = r"[^\s/\"'`<>|*?,;:()\[\]{}\\]+"
_EMBEDDED = re.compile(
    rf"{_BEGIN}/(?:{_HOMES})(?:/{_SEGMENT})+/?"
    rf"|{_BEGIN}/(?:{_MOUNTS})(?:/{_SEGMENT}){{2,}}/?"
    rf"|(?<![\w./:])~/(?:{_SEGMENT}/)*{_SEGMENT}"
    r"|(?<![A-Za-z])[A-Za-z]:[\\/](?:Users|Documents and Settings|home)[\\/][^\s\"'`<>|*?]+"
)
_SLASH = re.compile(r"[/\\]")
_WHOLE = re.compile(
    r"file:/.+|~[\w.-]*[\\/].+|[A-Za-z]:[\\/](?![\\/]).+|\\\\[\w.-]+\\.+"
    rf"|/(?:{_HOMES}|{_MOUNTS})/[^\n]+"
    r"|(?:/[\w.@+=,~ -]+){3,}/?"
)
_ABSOLUTE = re.compile(r"(?:/[\w.@+=,~ -]+){2,}/?")
_PATH_FIELD = re.compile(
    r"path|dir|file|folder|root|location|cache|checkpoint|dataset|output|_home$|model|tokenizer", re.IGNORECASE
)
_PLACEHOLDER = re.compile(
    r"/(?:home|Users)/(?:user(?:name)?|you(?:r[\w-]*)?|me|name|xxx+|\.\.\.|\$\w+|\{\w+\})(?:/|$)|/path/to/|\.\.\.",
    re.IGNORECASE,
)
_CACHE = re.compile(r"(?:^|[/\\])models--(?P<id>[^/\\]+)(?:[/\\](?:snapshots|refs|blobs)[/\\](?P<revision>[^/\\]+))?")
_CACHE_ROOT = re.compile(r"models--[^/\\]+(?:[/\\]snapshots[/\\][^/\\]+)?[/\\]*$")
_HIDDEN: Final = "<path>"
_COMMIT = re.compile(r"[0-9a-f]{40}")


class Hit(NamedTuple):
    """A private path and where it stands: file, field (or line), and the path as written."""

    file: str
    field: str
    value: str


class Evidence(NamedTuple):
    """What a path may be replaced with, and what says so."""

    value: str
    why: str
    revision: str | None = None


class Rewritten(NamedTuple):
    """New bytes, or None when nothing changed; a note for each change, and the hits that no evidence covers."""

    raw: bytes | None
    findings: list[Finding]
    left: list[Hit]


def is_local(value: Any) -> bool:
    """Tell whether a value that names a model or a data set is a path of some machine and no id."""
    if not isinstance(value, str) or is_repo_id(value):
        return False
    if re.match(r"(?!file:)[a-z][a-z0-9+.-]+://", value):
        return False
    return bool(re.match(r"file:|[~.]{1,2}[\\/]|[A-Za-z]:[\\/]|[\\/]", value)) or _relative(value)


def from_cache(value: str) -> Evidence | None:
    """Return the id and commit that a path inside a Hub cache states (`models--owner--name/snapshots/<commit>`)."""
    found = list(_CACHE.finditer(value))
    if not found:
        return None
    match = found[-1]
    repo = match["id"].replace("--", "/", 1)
    if not is_repo_id(repo):
        return None
    commit = match["revision"] if match["revision"] and _COMMIT.fullmatch(match["revision"]) else None
    return Evidence(repo, "a Hub cache path names it" + (" with its commit" if commit else ""), commit)


def base_evidence(
    value: str, *, sidecar: str | None = None, card: Iterable[str] = (), siblings: Iterable[tuple[str, str]] = ()
) -> Evidence | None:
    """Return the id that a local base stands for, or None when nothing on disk says it.

    `siblings` are (id, where) pairs of other files of the run. Several different ids are no evidence, unless just one
    of them ends in the folder's own name.
    """
    if sidecar and is_repo_id(sidecar):
        return Evidence(sidecar, "weighbridge.yaml names the base")
    cached = from_cache(value)
    if cached and _CACHE_ROOT.search(value):
        return cached
    for source, ids in (("the card names it as base_model", list(card)), *_by_source(siblings)):
        known = list(dict.fromkeys(i for i in ids if is_repo_id(i)))
        if len(known) > 1:
            known = [i for i in known if i.rsplit("/", 1)[-1].casefold() == _last(value).casefold()]
        if len(known) == 1:
            return Evidence(known[0], source)
    return None


def scan(name: str, raw: bytes) -> list[Hit]:
    """Return the private paths in one file of a bundle, in the order in which they stand."""
    if is_vocabulary(name):
        return []
    if name.endswith(".json") and len(raw) <= SCAN_MAX:
        return _scan_json(name, raw)
    return scan_text(name, raw[:SCAN_MAX].decode("utf-8", "replace"))


def is_vocabulary(name: str) -> bool:
    """Tell whether a file is a tokenizer's table, in which anything may look like a path."""
    return _VOCABULARY.search(name) is not None and not name.endswith("_config.json")


def scan_text(name: str, text: str) -> list[Hit]:
    """Return the private paths in prose, YAML or a template; examples such as `/home/user` are passed over."""
    found: list[Hit] = []
    for number, line in enumerate(text.splitlines() if _SLASH.search(text) else (), 1):
        found += [Hit(name, f"line {number}", path) for path in _embedded(line) if not _PLACEHOLDER.search(path)]
    return _once(found)


def scan_value(name: str, value: Any, *, field: str = "") -> list[Hit]:
    """Return the private paths in a parsed JSON or YAML value, each with its field."""
    return _once(Hit(name, where, path) for where, text in _strings(value, field) for path in _in_string(where, text))


def findings(hits: Iterable[Hit]) -> list[Finding]:
    """Return one finding per file that holds private paths."""
    by_file: dict[str, list[Hit]] = {}
    for hit in hits:
        by_file.setdefault(hit.file, []).append(hit)
    return [
        finding(
            "private-path",
            file,
            f"{file} holds a path of a machine in {_listed(h.field for h in found)}: {_listed(h.value for h in found)}",
            "name the base by its id in weighbridge.yaml or the card, or take the path out of the file",
            local_paths=[h.value for h in found],
            fields=[h.field for h in found],
            hub_push_blocked=True,
        )
        for file, found in by_file.items()
    ]


def redacted(one: Finding) -> Finding:
    """Return a finding without any path of a machine, for places where paths may not go."""
    listed = [v for v in one.data.get("local_paths", []) if isinstance(v, str)]
    hits = [h.value for h in scan_value("", {k: v for k, v in one.data.items() if k != "local_paths"}, field="path")]
    message, fix = one.message, one.fix
    for value in sorted({*listed, *hits, *_embedded(message), *_embedded(fix or "")}, key=len, reverse=True):
        message = message.replace(value, _HIDDEN)
        fix = fix.replace(value, _HIDDEN) if fix else fix
    data = {k: v for k, v in one.data.items() if k != "local_paths" and not scan_value("", {k: v}, field="path")}
    return Finding(code=one.code, severity=one.severity, subject=one.subject, message=message, fix=fix, data=data)


def rewrite(
    name: str, raw: bytes, evidence: Callable[[str, str], Evidence | None], bundle: Collection[str] = ()
) -> Rewritten:
    """Replace private paths in a JSON file by what evidence states.

    `evidence(field, value)` is asked for fields that name a base; a `*_file` field becomes the plain name of a file
    that the bundle holds. Where a base has an empty `revision` beside it, the commit of the evidence is filled in.
    """
    hits = scan(name, raw)
    document = _json(raw) if name.endswith(".json") else None
    if not hits or not isinstance(document, dict):
        return Rewritten(None, [], hits)
    notes: list[tuple[Hit, Evidence]] = []
    left: list[Hit] = []
    text = raw.decode("utf-8")
    for hit in hits:
        found = _evidence_for(hit, document, evidence, bundle)
        changed = found and _replaced(text, document, hit, found)
        if found is None or changed is None:
            left.append(hit)
            continue
        text, document = changed
        notes.append((hit, found))
    if not notes:
        return Rewritten(None, [], left)
    new = text.encode()
    told = [
        finding(
            "private-path-rewritten",
            name,
            f"{hit.field} in {name} was a path of a machine and now reads {found.value}: {found.why}",
            field=hit.field,
            value=found.value,
            evidence=found.why,
            sha256_before=sha256_bytes(raw),
            sha256_after=sha256_bytes(new),
        )
        for hit, found in notes
    ]
    return Rewritten(new, told, left)


def outside_bundle(name: str, raw: bytes, bundle: Collection[str]) -> list[Finding]:
    """Return a block for each file that a tokenizer's config names outside its own folder, hidden files included."""
    document = _json(raw)
    found = []
    for field, value in document.items() if isinstance(document, dict) else ():
        if not field.endswith("_file") or not isinstance(value, str) or value in bundle or _WHOLE.fullmatch(value):
            continue
        if value.startswith(".") or "/.." in value or "\\" in value:
            found.append(
                finding(
                    "path-outside-bundle",
                    name,
                    f"{field} in {name} names {value}, which is no file of this model",
                    f"take {field} out of {name}",
                    field=field,
                )
            )
    return found


def _evidence_for(
    hit: Hit, document: dict[str, Any], evidence: Callable[[str, str], Evidence | None], bundle: Collection[str]
) -> Evidence | None:
    if document.get(hit.field) != hit.value:
        return None
    if hit.field in BASE_FIELDS:
        return evidence(hit.field, hit.value)
    if hit.field.endswith("_file") and _last(hit.value) in bundle:
        return Evidence(_last(hit.value), "the bundle holds this file")
    return None


def _replaced(text: str, document: dict[str, Any], hit: Hit, found: Evidence) -> tuple[str, dict[str, Any]] | None:
    """Change one field in place, leaving every other byte as it is; the result must parse to just that change."""
    changes: list[tuple[str, Any, Any]] = [(hit.field, hit.value, found.value)]
    if found.revision and hit.field == "base_model_name_or_path" and document.get("revision", 0) is None:
        changes.append(("revision", None, found.revision))
    wanted = dict(document)
    for field, old, new in changes:
        wanted[field] = new
        text = _field_replaced(text, field, old, new)
    try:
        parsed = json.loads(text)
    except ValueError:
        return None
    return (text, parsed) if parsed == wanted else None


def _field_replaced(text: str, field: str, old: Any, new: Any) -> str:
    """Replace the value behind a key in JSON text, in whichever way the old one was escaped."""
    written = json.dumps(new, ensure_ascii=False)
    for spelled in (json.dumps(old), json.dumps(old, ensure_ascii=False), json.dumps(old).replace("/", "\\/")):
        found = re.search(rf"{re.escape(json.dumps(field))}\s*:\s*(?P<value>{re.escape(spelled)})", text)
        if found:
            return text[: found.start("value")] + written + text[found.end("value") :]
    return text


def _scan_json(name: str, raw: bytes) -> list[Hit]:
    document = _json(raw)
    if document is None:
        return scan_text(name, raw.decode("utf-8", "replace"))
    return scan_value(name, document)


def _json(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def _strings(value: Any, field: str) -> Iterator[tuple[str, str]]:
    """Yield (field, text) of every string that may hold a path, in document order, without recursion.

    Prompts are no paths. An index holds a hundred thousand plain names: what has no slash costs next to nothing.
    """
    waiting = [(field, value)]
    while waiting:
        where, item = waiting.pop()
        if isinstance(item, str):
            if _may_be_path(item):
                yield where, item
        elif isinstance(item, dict):
            children = [(k, v) for k, v in item.items() if not isinstance(v, str) or _may_be_path(v)]
            waiting += [(f"{where}.{k}" if where else str(k), v) for k, v in reversed(children) if k not in _PROMPTS]
        elif isinstance(item, (list, tuple)):
            waiting += reversed([(f"{where}[{i}]", v) for i, v in enumerate(item)])


def _may_be_path(text: str) -> bool:
    """Tell whether any of the patterns could match; all but `file:` ask for a slash of either kind."""
    return "/" in text or "\\" in text or text.startswith("file:")


def _in_string(field: str, text: str) -> list[str]:
    key = re.sub(r"\[\d+\]$", "", field.rsplit(".", 1)[-1])
    if len(text) < 4096 and "\n" not in text:
        names_model = key in BASE_FIELDS or key == "datasets"
        if names_model and is_local(text):
            return [text]
        if _WHOLE.fullmatch(text) or (_PATH_FIELD.search(key) and _ABSOLUTE.fullmatch(text)):
            return [text]
    return _embedded(text)


def _embedded(text: str) -> list[str]:
    """Return the paths in a text, looked for around its slashes alone: a template of megabytes has few of them."""
    found: list[str] = []
    end = 0
    for slash in _SLASH.finditer(text):
        at = slash.start()
        if at < end:
            continue
        before = text[max(0, at - 5) : at]
        backs = (5,) if before == "file:" else (2,) if before[-1:] == ":" else (1,) if before[-1:] == "~" else ()
        for back in (*backs, 0):
            match = _EMBEDDED.match(text, at - back) if at - back >= end else None
            if match:
                found.append(match[0].rstrip(".,:!"))
                end = match.end()
                break
    return found


def _relative(value: str) -> bool:
    return ("/" in value or "\\" in value) and not re.search(r"\s{2}|\n", value)


def _last(value: str) -> str:
    return re.split(r"[\\/]", value.rstrip("\\/"))[-1]


def _by_source(siblings: Iterable[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    pairs = list(siblings)
    return [(f"{pairs[0][1]} names it", [i for i, _ in pairs])] if pairs else []


def _once(hits: Iterable[Hit]) -> list[Hit]:
    return list(dict.fromkeys(hits))


def _listed(values: Iterable[str]) -> str:
    known = list(dict.fromkeys(values))
    return ", ".join(known[:5]) + (f" and {len(known) - 5} more" if len(known) > 5 else "")
