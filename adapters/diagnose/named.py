"""Rules of what a text names: tensors and files, looked up in these files."""

import re
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from weighbridge.adapters import layout
from weighbridge.adapters.diagnose import commands
from weighbridge.adapters.diagnose.rule import Case, Evidence, Rule
from weighbridge.adapters.diagnose.text import Text
from weighbridge.adapters.whole import some

_STAGE: Final = "keys"
_LIMIT: Final = 2000
_FEW: Final = 2
_TENSOR = re.compile(r"['\"]([\w-]{1,100}(?:\.[\w-]{1,100}){1,30})['\"]")
_MANY = re.compile(r"\{([0-9]{1,4})[^{}]{0,200}\}")
_FILE = re.compile(
    r"(?:a file named|no file named|no such file or directory:?|can't find) ['\"]?([^'\"\s,;]{1,400})", re.IGNORECASE
)


class Named(NamedTuple):
    """The tensors that a text calls unexpected, and those it calls missing."""

    unexpected: tuple[str, ...]
    missing: tuple[str, ...]


def named(text: Text) -> Named:
    """Return the tensors that torch's sentence or the report of transformers names; one of each group of layers."""
    found: dict[str, dict[str, None]] = {"unexpected": {}, "missing": {}}
    for line in text.lines:
        for kind, table in found.items():
            at = line.plain.find(f"{kind} key(s) in state_dict:")
            if at >= 0:
                table.update(dict.fromkeys(_TENSOR.findall(line.shown)))
            cells = line.shown.split("|", maxsplit=2)
            if len(cells) > 1 and cells[1].strip().lower() == kind:
                table[_MANY.sub(r"\1", cells[0]).strip()] = None
    return Named(*(tuple(table)[:_LIMIT] for table in (found["unexpected"], found["missing"])))


def exchange(unexpected: Sequence[str], missing: Sequence[str]) -> tuple[str, str] | None:
    """Return (what the names begin with, what they should begin with), None where one exchange does not explain them.

    Two names are the same tensor where they end alike; the exchange must turn most unexpected names into missing ones.
    """
    wanted = set(missing)
    if len(unexpected) < _FEW or not wanted:
        return None
    first = unexpected[0].split(".")
    for cut in range(len(first)):
        tail = ".".join(first[cut:])
        for other in sorted((name for name in wanted if name == tail or name.endswith(f".{tail}")), key=len):
            ours, theirs = unexpected[0].removesuffix(tail), other.removesuffix(tail)
            turned = sum(name.startswith(ours) and theirs + name.removeprefix(ours) in wanted for name in unexpected)
            if ours != theirs and turned >= _FEW and 2 * turned >= len(unexpected):
                return ours, theirs
    return None


def _names(case: Case) -> Iterable[Evidence]:
    """Look up the names of the text, and find the one exchange of beginnings that turns them into the model's."""
    if case.text is None or not case.tensors:
        return
    told = named(case.text)
    here = [name for name in told.unexpected if name in case.tensors]
    found = exchange(here, told.missing)
    if found is None:
        return
    ours, theirs = found
    put = f"{theirs!r} + " if theirs else ""
    new = f"{put}k.removeprefix({ours!r}) if k.startswith({ours!r}) else k"
    turned = sum(name.startswith(ours) for name in case.tensors)
    wanted = f"where the model that was built has '{theirs}'" if theirs else "which the model that was built lacks"
    yield Evidence(
        case.owners.get(here[0], case.artifact.relative),
        f"{turned} of {len(case.tensors)} names in these files begin with '{ours}', {wanted}, such as {here[0]}"
        if ours
        else f"the names in these files lack '{theirs}' in front, which the model that was built has: {here[0]}",
        (commands.extract(case.folder),)
        if case.facts.get("pickle_format")
        else (commands.rename_keys(case.folder, new),),
        data={"begins": ours, "wanted": theirs, "names": turned},
    )


def _told(case: Case, name: str) -> bool:
    """Return whether a finding, or what the folder is, says already that the file is not there."""
    if case.is_adapter and name in {layout.MODEL_CONFIG, layout.MODEL_WEIGHTS, "pytorch_model.bin"}:
        return True
    return any(
        path.rpartition("/")[2] == name
        for one in case.findings
        for path in (one.subject, *map(str, one.data.get("missing_files") or ()))
    )


def _files(case: Case) -> Iterable[Evidence]:
    """Look up the files of the text in the folder."""
    if case.text is None:
        return
    absent: dict[str, int] = {}
    for line in case.text.lines:
        for match in _FILE.finditer(line.shown):
            name = match[1].rstrip(".:)'\"").rpartition("/")[2]
            if "." in name and name not in case.names and not _told(case, name):
                absent.setdefault(name, line.number)
    for name, number in list(absent.items())[:_FEW]:
        alike = sorted(one for one in case.names if one.rpartition(".")[2] == name.rpartition(".")[2])
        yield Evidence(
            name,
            f"{name}, which line {number} asks for, is not in {case.folder}"
            + (f"; of its kind there {'is' if len(alike) == 1 else 'are'} {some(alike)}" if alike else ""),
            (commands.fetch(case.folder / name),),
            data={"file": name, "alike": alike[:20]},
        )


RULES: Final = (
    Rule(
        "names-in-text", _STAGE, "note", ("unexpected-keys", "missing-keys"),
        "the names that the text calls unexpected are in these files and begin otherwise than the ones it misses",
        "write the weights again with the names the model has, or load them with the class they were saved from",
        _names,
    ),
    Rule(
        "file-in-text", "parts", "note", ("files-missing", "adapter-config-missing", "adapter-as-model", "remote-code"),
        "a file that the text names is not in the folder",
        "fetch or copy it; or point the loader to the folder that has it",
        _files,
    ),
)  # fmt: skip
