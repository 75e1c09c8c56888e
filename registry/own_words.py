"""What people wrote into a card, told apart from what we and other tools write.

Our part stands between two marker lines. Where it stands in the middle of somebody's text, PLACE keeps the spot in the
text alone. A card that a trainer filled in from its template holds no words of a person.
"""

import re
from collections.abc import Iterator
from typing import Any, Final

from weighbridge.registry import frontmatter

BEGIN: Final = "<!-- weighbridge:begin -->"
END: Final = "<!-- weighbridge:end -->"
PLACE: Final = "<!-- weighbridge -->"
_UNREAD: Final = "yaml front-matter"
"""Heads the code block that keeps front matter which could not be read."""

_LINE_ENDS = re.compile(r"\r\n?")
_FIELDS = re.compile(r"^<!-- weighbridge:fields (?P<names>[^>\n]*) -->$", re.MULTILINE)
_BEGIN_LINE = re.compile(rf"^{re.escape(BEGIN)}$", re.MULTILINE)
_END_LINE = re.compile(rf"^{re.escape(END)}$\n?", re.MULTILINE)
_STRAY = re.compile(r"^<!-- weighbridge(?::[^>\n]*)? -->[ \t]*$\n?", re.MULTILINE)
_FENCE = re.compile(r"(`{3,}|~{3,})(.*)")

_TOOLS: Final = (
    re.compile(r"<!-- This model card has been generated automatically"),
    re.compile(r"(?:\[More Information Needed\].*?){3}", re.DOTALL),
    re.compile(r"It has been trained using \[TRL\]"),
    re.compile(r"This (?:\w+ )?model was trained 2x faster with \[Unsloth\]"),
    re.compile(r"axolotl-badge-web"),
    re.compile(r"was converted to (?:MLX|GGUF) format from"),
)
_SECTIONS = re.compile(
    r"(?:training hyperparameters|training results|framework versions|intermediate results|citations?|quick start"
    r"|use with mlx|axolotl config.*)$",
    re.IGNORECASE,
)
"""Sections of which every line comes from the tool."""

_SENTENCES = re.compile(
    r"""
    \W*+(?:
        More\ information\ needed\W*
      | This\ (?:model|is)\ (?:is\ )?a\ (?:fine-?tuned|LoRA|merge)\b.*
      | This\ model\ was\ trained\ from\ scratch\b.*
      | This\ model\ was\ trained\ with\ [\w.]+.*
      | It\ has\ been\ trained\ using\ \[TRL\].*
      | It\ achieves\ the\ following\ results\b.*
      | The\ following\ (?:bitsandbytes\ )?(?:hyperparameters|`bitsandbytes`\ quantization)\b.*
      | Users\ \(both\ direct\ and\ downstream\)\ should\ be\ made\ aware\b.*
      | Use\ the\ code\ below\ to\ get\ started\b.*
      | Carbon\ emissions\ can\ be\ estimated\ using\b.*
      | You\ should\ probably\ proofread\b.*
      | This\ (?:\w+\ )?model\ was\ trained\ 2x\ faster\b.*
      | Cite\ (?:TRL|\w+)\ as:?\W*
      | This\ modelcard\ aims\ to\ be\ a\ base\ template\b.*
      | The\ model\ .*was\ converted\ to.*
      | using\ mlx-lm\ version.*
      | Refer\ to\ the\ \[original\ model\ card\].*
    )
    | \W{0,40}(?:
        [-*]\ [\w\ /.@-]+:\ [-+\d.eE%infa]++\W*
      | [-*]\ \*\*(?:Developed\ by|License|Finetuned\ from\ model)\b.*
      | \*\*(?:BibTeX|APA):\*\*\W*
    )
    | (?>.*?\[More\ Information\ Needed\]).*
    | (?>.*?wandb\.ai).*
    | (?>.*?axolotl-badge-web).*
    | (?>.*?unsloth)(?>.*?made)(?>.*?with)(?>.*?love).*
    | .*was\ converted\ to\ (?:MLX|GGUF)\ format\b.*
    """,
    re.VERBOSE | re.IGNORECASE,
)
"""Lines that tools write. A look takes steps in proportion to the line: it may be a stranger's."""


def split_people(card: bytes | str) -> str:
    """Return what people wrote into a card: their front matter and their text, our part taken out.

    Fields that our part says it filled in are taken out too. The result can be given to `card.render` again, which
    makes the same card of the same manifest.
    """
    text = card.decode("utf-8", "replace") if isinstance(card, bytes) else card
    text = _LINE_ENDS.sub("\n", text).replace("\ufeff", "")
    ours = _ours(text)
    if ours is None:
        return text
    names = _FIELDS.search(text[ours])
    parts = frontmatter.split(text)
    front, body = fields(parts), parts.body if parts.front is not None and not parts.displaced else text
    for name in names["names"].split(", ") if names else []:
        head, _, item = name.partition("=")
        if not item:
            front.pop(head, None)
        elif isinstance(front.get(head), list):
            front[head] = [v for v in front[head] if v != item]
            if not front[head]:
                front.pop(head)
    ours = _ours(body) or slice(len(body), len(body))
    above, below = (_STRAY.sub("", part).strip("\n") for part in (body[: ours.start], body[ours.stop :]))
    words = f"{above}\n\n{PLACE}\n\n{below}\n" if below else f"{above}\n" if above else ""
    if not front:  # an empty block keeps a text that looks like front matter from being taken for it
        return words if frontmatter.split(words).front is None else f"---\n---\n\n{words}"
    return frontmatter.fenced(front) + ("\n" if words else "") + words


def fields(parts: frontmatter.Split) -> dict[str, Any]:
    """Return the readable fields of a card's front matter, wherever it stands; empty for none."""
    value = frontmatter.load(parts.front).value if parts.front is not None and parts.closed else None
    return {k: v for k, v in value.items() if isinstance(k, str)} if isinstance(value, dict) else {}


def text_of(parts: frontmatter.Split) -> tuple[str, str]:
    """Return a person's text (above, below) the place of our part; a trainer's template counts as no text.

    Front matter that cannot be read is kept as text, so that nothing a person wrote is lost.
    """
    body, ours = parts.body, _ours(parts.body)
    if ours is not None:
        body = f"{body[: ours.start]}{PLACE}\n{body[ours.stop :]}"
    if parts.front is not None and not fields(parts) and parts.front.strip():
        fence = "`" * (3 + max((len(m) for m in re.findall(r"`{3,}", parts.front)), default=0))
        body = f"{fence}{_UNREAD}\n{parts.front.strip()}\n{fence}\n\n{body}"
    elif not is_own(body):
        return "", ""
    above, _, below = body.partition(PLACE)
    return tuple(_STRAY.sub("", part).strip("\n") for part in (above, below))  # type: ignore[return-value]


def is_own(body: str) -> bool:
    """Tell whether a card's text holds words of a person: anything but what tools are known to write."""
    if not body.replace(PLACE, "").strip():
        return False
    if f"`{_UNREAD}\n" in body or not any(tool.search(body) for tool in _TOOLS):
        return True
    section = ""
    for line in _outside_fences(_without_comments(body).splitlines()):
        if line.startswith("#"):
            section = line.strip("# \t*")
        elif (
            line.strip() and not _SECTIONS.search(section) and not _SENTENCES.fullmatch(line) and re.search(r"\w", line)
        ):
            return True
    return False


def _ours(text: str) -> slice | None:
    """Return where our part stands, from the first line that begins one to the first after it that ends one."""
    begin = _BEGIN_LINE.search(text)
    end = _END_LINE.search(text, begin.end()) if begin is not None else None
    return None if begin is None or end is None else slice(begin.start(), end.end())


def _without_comments(text: str) -> str:
    """Return a text without its comments; one that nobody ends is text."""
    kept = []
    at = 0
    while (begin := text.find("<!--", at)) >= 0 and (end := text.find("-->", begin + 4)) >= 0:
        kept.append(text[at:begin])
        at = end + 3
    return "".join([*kept, text[at:]])


def _outside_fences(lines: list[str]) -> Iterator[str]:
    """Yield the lines outside blocks of code; a block that nobody ends is text."""
    fences = [_FENCE.match(line) for line in lines]
    longest = {"`": 0, "~": 0}  # of the runs below a line that could end a block, the longest of each kind
    closes = [False] * len(lines)
    for i, fence in reversed(list(enumerate(fences))):
        if fence is None:
            continue
        run = fence[1]
        closes[i] = longest[run[0]] >= len(run)
        if not fence[2].strip(" \t"):
            longest[run[0]] = max(longest[run[0]], len(run))
    inside = ""
    for line, fence, closed in zip(lines, fences, closes, strict=True):
        if inside:
            if fence is not None and fence[1].startswith(inside) and not fence[2].strip(" \t"):
                inside = ""
        elif fence is not None and closed:
            inside = fence[1]
        else:
            yield line
