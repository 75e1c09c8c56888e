"""The YAML block at the top of a card, and strict YAML for everything else people write by hand.

The only home of PyYAML. Words are read as the Hub reads them (YAML 1.2: `no`, `on` and dates are text), keys may stand
once, and a document that grows when its aliases are followed is refused. Text is never pasted into YAML: `dump` quotes.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import yaml

from weighbridge.registry.errors import half_character

EXPANDED_MAX: Final = 200_000
"""Nodes of the largest document, aliases followed: the longest real card (hundreds of results) has about a tenth."""

SMALL: Final = 100_000
"""Characters of text up to which a fault is worth a second reading, a hundred times slower, for its exact place."""

_TOO_LARGE: Final = "it holds too many values"
_FAULTS: Final = (yaml.YAMLError, RecursionError, ValueError, OverflowError)
_CARD_KEYS: Final = frozenset({
    "license", "license_name", "base_model", "library_name", "pipeline_tag", "tags", "language", "datasets",
    "metrics", "model-index",
})  # fmt: skip
_CARD_KEY = re.compile("|".join(map(re.escape, sorted(_CARD_KEYS))) + r"|\\")
"""Stands in every block that holds a card key, which only an escape could spell otherwise; others need no reading."""
_LINE_END = re.compile(r"\r\n|\r|\n")
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|$)")
_WORDS = re.compile(r"(?:[^\S\r\n]*+[\r\n])*+([^\r\n]*+)(?:\r\n|\r|\n|\Z)")
"""Blank lines, and the first line that is none."""
_RULER = re.compile(r"(?<![^\r\n])---[^\S\r\n]*+(?:\r\n|\r|\n|\Z)")
_KEY_LINE = re.compile(r"[\"']?[A-Za-z_][\w. -]*+[\"']?[ \t]*+:(?:\s|$)")
_KEY_SOON = re.compile(rf"(?:[^\r\n]*+(?:\r\n|\r|\n))?{_KEY_LINE.pattern}")
_FENCE = re.compile(r" {0,3}(```|~~~)")


class Parsed(NamedTuple):
    """A YAML value, or what is wrong with the text and on which of its lines (from 1) it stops."""

    value: Any
    fault: str | None = None
    line: int | None = None


class Split(NamedTuple):
    """A card in its parts. `line` is the line of the file on which the YAML begins, from 1."""

    bom: bool
    front: str | None
    line: int
    body: str
    closed: bool = True
    displaced: bool = False
    """The block does not begin at the top, so no reader sees it."""


def split(text: str) -> Split:
    """Return the front matter and the body of a card; blank lines above it are allowed, other text is not."""
    bom = text.startswith("\ufeff")
    text = text.removeprefix("\ufeff")
    first = _WORDS.match(text)
    if first is not None and first[1].strip() == "---":
        line = len(_LINE_END.findall(text, 0, first.start(1))) + 2
        end = _RULER.search(text, first.end())
        if end is not None:
            return Split(bom, _trimmed(text[first.end() : end.start()]), line, text[end.end() :])
        if _KEY_SOON.match(text, first.end()):
            return Split(bom, _trimmed(text[first.end() :]), line, "", closed=False)
        return Split(bom, None, 1, text)
    lines = _lines(text) if "---" in text else []
    found = _displaced(lines)
    if found is not None:
        above, below = found
        body = "".join(lines[:above] + lines[below + 1 :])
        return Split(bom, _trimmed("".join(lines[above + 1 : below])), above + 2, body, displaced=True)
    return Split(bom, None, 1, text)


def load(text: str) -> Parsed:
    """Return the value of one YAML document; nothing is raised and no object but plain data is ever built."""
    try:
        return _whole(_construct(text, _FastLoader))
    except _FAULTS as error:
        if len(text) > SMALL:
            return _fault(error, text)
    try:  # once more in Python, whose errors name the same place on every machine
        return _whole(_construct(text, _Loader))
    except _FAULTS as error:
        return _fault(error, text)


def _fault(error: Exception, text: str) -> Parsed:
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        return Parsed(None, error.problem or error.context or "it is not valid YAML", mark.line + 1 if mark else None)
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return Parsed(None, f"character #x{_code(error.character):04x} is not allowed", line)
    if isinstance(error, RecursionError):
        return Parsed(None, "it is nested too deeply", 1)
    return Parsed(None, str(error).split("\n", 1)[0] or "it is not valid YAML", 1)


def _whole(value: Any) -> Parsed:
    half = half_character(value)
    return Parsed(value) if half is None else Parsed(None, f"{half} is half a character")


def dump(front: Mapping[str, Any]) -> str:
    """Return a mapping as YAML that reads back equal in YAML 1.1 and 1.2, keys in the order given."""
    text: str = yaml.dump(
        _plain(front),
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=False,
        width=math.inf,
    )
    return text


def fenced(front: Mapping[str, Any]) -> str:
    """Return a mapping as the front matter of a card, between its two lines of dashes."""
    return f"---\n{dump(front)}---\n"


def _lines(text: str) -> list[str]:
    return [line for line in _LINE.findall(text) if line]


def _trimmed(block: str) -> str:
    """Return a block without its last line ends, so that a fault at the end names its last line."""
    return block.rstrip("\r\n")


def _closing(lines: list[str], start: int) -> int | None:
    return next((i for i in range(start, len(lines)) if lines[i].rstrip() == "---"), None)


def _displaced(lines: list[str]) -> tuple[int, int] | None:
    """Find a block of card keys further down; two rulers around prose are no block."""
    for begin in _outside_code(lines):
        if lines[begin].rstrip() != "---" or begin + 1 >= len(lines) or not _KEY_LINE.match(lines[begin + 1]):
            continue
        end = _closing(lines, begin + 1)
        block = "" if end is None else _trimmed("".join(lines[begin + 1 : end]))
        if end is None or not _CARD_KEY.search(block):
            continue
        value = load(block).value
        if isinstance(value, dict) and _CARD_KEYS & value.keys():
            return begin, end
    return None


def _outside_code(lines: list[str]) -> Iterator[int]:
    inside = None
    for i, line in enumerate(lines):
        fence = _FENCE.match(line)
        if fence and inside in {None, fence[1]}:
            inside = None if inside else fence[1]
        elif inside is None:
            yield i


def _code(character: Any) -> int:
    return ord(character) if isinstance(character, str) else int(character)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_plain(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    return value


class _Words:
    """What both loaders share: YAML 1.2 words, keys that stand once, a bound on nodes."""

    nodes = 0

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        """Count a node while it is read, so that no time goes into a document of which nothing will be built."""
        self.nodes += 1
        if self.nodes > EXPANDED_MAX:
            raise ValueError(_TOO_LARGE)
        return super().resolve(kind, value, implicit)  # type: ignore[misc]

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key is not a word", key_node.start_mark)
            if (key_node.tag, key_node.value) in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key '{key_node.value}' stands twice", key_node.start_mark
                )
            seen.add((key_node.tag, key_node.value))
        return super().construct_mapping(node, deep=deep)  # type: ignore[misc]


class _Loader(_Words, yaml.SafeLoader):
    pass


class _FastLoader(_Words, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    pass


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the name is the library's
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Quote what either version of YAML takes for something else than these characters."""
        style = '"' if not data.isprintable() else "'" if _NO_TEXT.fullmatch(data) else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)


_DIGITS_MAX: Final = 400


def _integer(loader: Any, node: Any) -> int:
    value = loader.construct_scalar(node)
    if len(value) > _DIGITS_MAX:
        raise yaml.constructor.ConstructorError(None, None, "a number has hundreds of digits", node.start_mark)
    for base, prefix in ((16, "0x"), (8, "0o")):
        if value.startswith(prefix):
            return int(value[2:], base)
    return int(value)


def _real(loader: Any, node: Any) -> float:
    value = loader.construct_scalar(node).lower()
    return float(value.replace(".", "") if value.endswith((".inf", ".nan")) else value)


_RESOLVERS: Final = (
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("merge", r"<<", "<"),
)
_NO_TEXT = re.compile("|".join(f"(?:{pattern})" for _, pattern, _ in _RESOLVERS))
for _class in (_Loader, _FastLoader):
    _class.yaml_implicit_resolvers = {}
    for _tag, _pattern, _starts in _RESOLVERS:
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), ["" if c == "\0" else c for c in _starts]
        )
    _class.add_constructor("tag:yaml.org,2002:int", _integer)
    _class.add_constructor("tag:yaml.org,2002:float", _real)


def _construct(text: str, loader_class: Any) -> Any:
    loader = loader_class(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _size(node, {}) > EXPANDED_MAX:
            raise yaml.constructor.ConstructorError(None, None, "its aliases make it too large", node.start_mark)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _size(node: Any, known: dict[int, int | None]) -> int:
    """Count nodes with aliases followed; a node inside itself counts as too many."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) in known:
        size = known[id(node)]
        return EXPANDED_MAX + 1 if size is None else size
    known[id(node)] = None
    children = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
    size = 1 + sum(_size(child, known) for child in children)
    known[id(node)] = size
    return size
