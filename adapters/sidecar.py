"""`weighbridge.yaml`, the note that a person lays into a run; what it says wins over the watch rule.

    name: medical-sft            # the model's name
    publish: false               # never publish anything of this run
    owner: lw
    license: cc-by-nc-4.0        # license_name and license_link beside it where it is `other`
    data: acme/notes@v3          # one, or a list of ids or mappings {id, revision}
    purpose: triage of notes
    id: sft-0412                 # keeps the run's identity when its folder moves
    base: Qwen/Qwen3-8B@<commit>
    code: /home/lw/src/medical   # the folder whose Git state is recorded

A note that cannot be read blocks: it may have said `publish: false`. An unknown key is a finding with the nearest key.
"""

from pathlib import Path
from typing import Any, Final, NamedTuple

from weighbridge.adapters.formats.source import contents
from weighbridge.config.nearest import nearest
from weighbridge.registry import frontmatter
from weighbridge.registry.findings import finding
from weighbridge.registry.refs import name_fault, shown
from weighbridge.registry.types import Finding

SIDECAR: Final = "weighbridge.yaml"
SIDECAR_MAX: Final = 256 << 10
_TEXTS: Final = ("name", "owner", "license", "license_name", "license_link", "purpose", "id", "base", "code")
KEYS: Final = (*_TEXTS, "publish", "data")
_SWITCH: Final = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_TEXT_MAX: Final = 4096
_DATA_MAX: Final = 256
_DATA_KEYS: Final = ("id", "revision", "path", "sha256", "license")


class Sidecar(NamedTuple):
    """What a sidecar says; None where it says nothing. `present` is False where there is none."""

    present: bool = False
    name: str | None = None
    publish: bool | None = None
    owner: str | None = None
    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None
    data: tuple[dict[str, str], ...] = ()
    purpose: str | None = None
    id: str | None = None
    base: str | None = None
    base_revision: str | None = None
    code: str | None = None
    findings: tuple[Finding, ...] = ()


def read(path: Path) -> Sidecar:
    """Return the sidecar of a run; `path` is the file or the folder that may hold it. Never raises for its content."""
    file = path / SIDECAR if path.is_dir() else path
    try:
        raw = contents(file, SIDECAR_MAX + 1)
    except (FileNotFoundError, NotADirectoryError):
        return Sidecar()
    except OSError as error:
        return _unreadable(f"it cannot be opened: {error.strerror or error}")
    return parse(raw)


def parse(raw: bytes) -> Sidecar:
    """Return the sidecar in these bytes."""
    if len(raw) > SIDECAR_MAX:
        return _unreadable(f"it is longer than {SIDECAR_MAX} bytes")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        return _unreadable("it is not UTF-8")
    parsed = frontmatter.load(text)
    if parsed.fault is not None:
        return _unreadable(f"line {parsed.line or 1}: {parsed.fault}", line=parsed.line)
    if parsed.value is None:
        return Sidecar(present=True)
    if not isinstance(parsed.value, dict):
        return _unreadable("it is no mapping of keys to values")
    return _judged(parsed.value)


def _judged(document: dict[Any, Any]) -> Sidecar:
    said: dict[str, Any] = {}
    found: list[Finding] = []
    for key, value in document.items():
        if key not in KEYS:
            found.append(_unknown(key))
        elif value is None:
            continue
        elif key == "publish":
            meant = _SWITCH.get(str(value).lower())
            if meant is not None:
                said["publish"] = meant
            else:
                found.append(_wrong(key, value, "true or false"))
        elif key == "data":
            said["data"] = _data(value, found)
        elif not isinstance(value, (str, int, float)) or isinstance(value, bool) or not _plain(str(value)):
            found.append(_wrong(key, value, "one line of text"))
        else:
            said[key] = str(value).strip()
    fault = name_fault(said["name"]) if said.get("name") else None
    if fault:
        found.append(_wrong("name", said.pop("name"), f"a valid name; {fault}"))
    if said.get("base"):
        base, _, revision = said["base"].partition("@")
        said |= {"base": base, "base_revision": revision or None}
    return Sidecar(present=True, findings=tuple(found), **said)


def _data(value: Any, found: list[Finding]) -> tuple[dict[str, str], ...]:
    entries: list[dict[str, str]] = []
    for item in (value if isinstance(value, list) else [value])[:_DATA_MAX]:
        if isinstance(item, dict):
            known = {str(k): str(v) for k, v in item.items() if k in _DATA_KEYS and isinstance(v, (str, int, float))}
            strange = [k for k in item if k not in _DATA_KEYS]
            if strange:
                found.append(_unknown(f"data.{strange[0]}", [f"data.{k}" for k in _DATA_KEYS]))
            if known:
                entries.append(known)
        elif isinstance(item, (str, int, float)) and not isinstance(item, bool) and _plain(str(item)):
            name, _, revision = str(item).strip().partition("@")
            entries.append({"id": name} | ({"revision": revision} if revision else {}))
        else:
            found.append(_wrong("data", item, "an id such as acme/notes@v3, or a mapping with id and revision"))
    return tuple(entries)


def _plain(text: str) -> bool:
    return 0 < len(text.strip()) <= _TEXT_MAX and "\n" not in text.strip() and "\x00" not in text


def _unreadable(why: str, line: int | None = None) -> Sidecar:
    return Sidecar(
        present=True,
        findings=(
            finding(
                "sidecar-invalid",
                SIDECAR,
                f"{SIDECAR} cannot be read: {shown(why)}",
                f"mend {SIDECAR} or take it away; until then nothing of this run is published",
                line=line,
            ),
        ),
    )


def _wrong(key: str, value: Any, wanted: str) -> Finding:
    return finding(
        "sidecar-invalid",
        SIDECAR,
        f"{key} in {SIDECAR} is {shown(str(value)[:80])}, it must be {wanted}",
        f"mend {key} in {SIDECAR}",
        key=key,
    )


def _unknown(key: Any, known: list[str] | None = None) -> Finding:
    """Name the nearest key. A misspelt `publish` blocks, because ignoring it could publish what must stay."""
    near = nearest(str(key), known or KEYS)
    return finding(
        "sidecar-unknown-key",
        SIDECAR,
        f"'{shown(str(key)[:80])}' is no key of {SIDECAR}" + (f"; did you mean '{near}'?" if near else ""),
        f"write {near}" if near else f"keys are {', '.join(KEYS)}",
        severity="block" if near == "publish" else None,
        key=str(key),
        nearest=near,
    )
