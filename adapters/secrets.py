"""Tokens, keys and passwords in files that would be published. What was found is named by kind and place, never shown.

Raw bytes are searched, so that a pickle, a notebook or a file in another encoding hides nothing; of weights only the
header is read. Patterns ask for the whole form of a token, and where a secret has no form of its own, for the name that
stands before it.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from weighbridge.registry.findings import finding
from weighbridge.registry.refs import shown
from weighbridge.registry.types import Finding

CHUNK: Final = 1 << 20
OVERLAP: Final = 8 << 10
"""Bytes that two reads share: longer than any secret, so that none is cut in two."""

HEADER_MAX: Final = 32 << 20
_HITS_MAX: Final = 20


class Pattern(NamedTuple):
    """One kind of secret. `keywords`, lower case, are where a match begins, after `back` bytes: the quick search."""

    kind: str
    keywords: tuple[bytes, ...]
    regex: re.Pattern[bytes]
    back: int = 0


class Hit(NamedTuple):
    """A secret by its kind and the place where it begins; its value is kept nowhere."""

    kind: str
    offset: int


def _pattern(kind: str, keywords: str, regex: str, back: int = 0) -> Pattern:
    return Pattern(kind, tuple(k.lower().encode() for k in keywords.split()), re.compile(regex.encode()), back)


def _spellings(*names: str) -> str:
    return " ".join(name.replace(" ", joint) for name in names for joint in ("_", "-", "", "."))


_NAMED: Final = _spellings(
    "api key", "secret key", "client secret", "access token", "auth token", "hub token", "hf token", "bearer token",
    "access key", "private key", "secret token", "password", "passwd",
)  # fmt: skip
_B = r"(?<![A-Za-z0-9_])"
_E = r"(?![A-Za-z0-9_-])"
_ASSIGN = r"[\"']?\s{0,4}(?:=>|:=|[:=])\s{0,4}(?:[a-z]{0,2}[\"'])?"
PATTERNS: Final = (
    _pattern("Hugging Face token", "hf_ api_org_", rf"{_B}(?:hf_|api_org_)[A-Za-z0-9]{{30,40}}{_E}"),
    _pattern(
        "OpenAI key",
        "sk-",
        rf"{_B}sk-(?:proj|svcacct|admin|None)-[A-Za-z0-9_-]{{40,200}}|{_B}sk-[A-Za-z0-9]{{32,64}}{_E}",
    ),
    _pattern("Anthropic key", "sk-ant-", rf"{_B}sk-ant-[a-z0-9]{{3,10}}-[A-Za-z0-9_-]{{60,200}}"),
    _pattern("OpenRouter key", "sk-or-", rf"{_B}sk-or-v1-[0-9a-f]{{64}}{_E}"),
    _pattern("AWS access key", "akia asia abia acca", rf"{_B}(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{{16}}{_E}"),
    _pattern(
        "AWS secret key",
        _spellings("secret access key"),
        rf"(?i:secret[_.-]?access[_.-]?key){_ASSIGN}[A-Za-z0-9/+]{{40}}(?![A-Za-z0-9/+=])",
    ),
    _pattern("GitHub token", "ghp_ gho_ ghu_ ghs_ ghr_", rf"{_B}gh[pousr]_[A-Za-z0-9]{{36,251}}{_E}"),
    _pattern("GitHub token", "github_pat_", rf"{_B}github_pat_[A-Za-z0-9_]{{50,255}}"),
    _pattern("GitLab token", "glpat- gldt- glrt- glptt-", rf"{_B}gl(?:pat|dt|rt|ptt)-[A-Za-z0-9_-]{{20,64}}"),
    _pattern("Slack token", "xox", rf"{_B}xox[abeoprs]-[A-Za-z0-9-]{{20,250}}"),
    _pattern("Slack token", "xapp-", rf"{_B}xapp-\d-[A-Z0-9]+-\d+-[a-f0-9]{{40,}}"),
    _pattern("Slack webhook", "hooks.slack.com", r"hooks\.slack\.com/[a-z]+/T[A-Z0-9]{6,}/[A-Za-z0-9/]{20,}"),
    _pattern("Discord webhook", "/api/webhooks/", r"/api/webhooks/\d{15,}/[A-Za-z0-9_-]{50,}"),
    _pattern("Google API key", "aiza", rf"{_B}AIza[A-Za-z0-9_-]{{35}}{_E}"),
    _pattern("Google OAuth token", "ya29.", rf"{_B}ya29\.[A-Za-z0-9_-]{{40,}}"),
    _pattern(
        "private key",
        "-----begin",
        r"-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----(?:\\r|\\n|[\s>#*\"'])*[A-Za-z0-9+/=:]{8,}",
    ),
    _pattern(
        "JSON web token",
        "eyj",
        rf"{_B}eyJ[A-Za-z0-9_-]{{10,2000}}\.eyJ[A-Za-z0-9_-]{{10,4000}}\.[A-Za-z0-9_-]{{16,1000}}",
    ),
    _pattern(
        "Weights & Biases key", "wandb", rf"(?i:wandb[_.-]?(?:api)?[_.-]?(?:key|token)){_ASSIGN}[0-9a-f]{{40}}{_E}"
    ),
    _pattern("Weights & Biases key", "wandb_v1_", rf"{_B}wandb_v1_[A-Za-z0-9_-]{{40,}}"),
    _pattern("Weights & Biases key", "api.wandb.ai", r"api\.wandb\.ai\s+login\s+\S+\s+password\s+[0-9a-f]{40}"),
    _pattern("npm token", "npm_", rf"{_B}npm_[A-Za-z0-9]{{36}}{_E}"),
    _pattern("PyPI token", "pypi-ag", r"pypi-Ag(?:EIcHlwaS5vcmc|ENdGVzdC5weXBpLm9yZ)[A-Za-z0-9_-]{50,}"),
    _pattern("Azure storage key", "accountkey=", r"AccountKey=[A-Za-z0-9+/]{86}=="),
    _pattern("Azure SAS token", "sig=", r"(?<=[?&])sig=[A-Za-z0-9%+/]{40,100}(?:%3[Dd]|=)"),
    _pattern("Azure client secret", "q~", rf"{_B}[A-Za-z0-9_.~-]{{3}}\dQ~[A-Za-z0-9_.~-]{{31,34}}", back=4),
    _pattern("Replicate token", "r8_", rf"{_B}r8_[A-Za-z0-9]{{37}}{_E}"),
    _pattern("Stripe key", "sk_live_ rk_live_", rf"{_B}[rs]k_live_[A-Za-z0-9]{{24,99}}"),
    _pattern("SendGrid key", "sg.", rf"{_B}SG\.[A-Za-z0-9_-]{{22}}\.[A-Za-z0-9_-]{{43}}"),
    _pattern("Telegram bot token", ":aa", rf"(?<=\d{{8}}):AA[A-Za-z0-9_-]{{33}}{_E}"),
    _pattern("Databricks token", "dapi", rf"{_B}dapi[a-f0-9]{{32}}(?:-\d)?{_E}"),
    _pattern(
        "password in an address",
        "://",
        r"://[A-Za-z0-9._~%!$&'()*+,;=-]{0,80}:(?P<value>[^\s:@/\"'<>{}$*]{4,200})@[A-Za-z0-9.\[-]",
    ),
    _pattern(
        "key or password",
        _NAMED,
        r"(?<![A-Za-z])[A-Za-z]+[_.-]?[A-Za-z]*"
        rf"{_ASSIGN}(?P<value>[A-Za-z0-9_/+=.~!@#%^&-]{{16,200}})(?=[\"'\s,;}})\]\\]|$)",
    ),
    _pattern(
        "bearer token",
        "authorization",
        r"(?i:authorization[\"']?\s*[:=]\s*[\"']?bearer)\s+(?P<value>[A-Za-z0-9_.~+/=-]{20,2000})",
    ),
)

_PLACEHOLDER = re.compile(
    rb"(?i)your|example|placeholder|change[_-]?me|redacted|dummy|\bxxx|insert|<|\{\{|\$\{?|os\.environ|getenv|process\.env"
    rb"|password|token|secret|api[_-]?key|none|null|true|false"
)
_WORDS = re.compile(rb"[A-Za-z]+(?:[_./-][A-Za-z]+)+\.?")
"""A module, a path or a constant, not a secret."""


_DIGITS: Final = b"0123456789"
_BORDER: Final = b","
_BORDERS: Final = bytes.maketrans(b" \t\r\n", _BORDER * 4)
_SHORT: Final = {keyword: keyword.translate(None, _DIGITS) for pattern in PATTERNS for keyword in pattern.keywords}
"""Keywords without digits. None holds a comma or a space, so each lies within one piece between two of them."""


def scan_bytes(raw: bytes, *, offset: int = 0) -> list[Hit]:
    """Return the secrets in some bytes, by kind and place."""
    found: set[Hit] = set()
    lower = raw.lower()
    # Headers and indexes repeat themselves but for the numbers in their names: each piece is looked at once, without.
    pieces = _BORDER.join(set(lower.translate(_BORDERS, _DIGITS).split(_BORDER)))
    for pattern in PATTERNS:
        for keyword in pattern.keywords:
            at = lower.find(keyword) if _SHORT[keyword] in pieces else -1
            while at >= 0:
                match = pattern.regex.match(raw, at - pattern.back) if at >= pattern.back else None
                if match and _real(match):
                    found.add(Hit(pattern.kind, offset + match.start()))
                at = lower.find(keyword, at + 1)
    return sorted(found, key=lambda h: (h.offset, h.kind))


def scan_stream(blocks: Iterable[bytes]) -> list[Hit]:
    """Return the secrets in a stream of blocks of any size; one that lies across a border is found once.

    UTF-16, known by its mark, is read as the letters it holds.
    """
    found: dict[Hit, None] = {}
    tail, start = b"", 0
    wide: bool | None = None
    for raw in blocks:
        wide = raw.startswith((b"\xff\xfe", b"\xfe\xff")) if wide is None else wide
        block = raw.replace(b"\0", b"") if wide else raw
        window = tail + block
        for hit in scan_bytes(window, offset=start):
            found[hit] = None
        if len(found) >= _HITS_MAX:
            break
        keep = window[-OVERLAP:]
        start += len(window) - len(keep)
        tail = keep
    return list(found)[:_HITS_MAX]


def scan_file(path: Path) -> list[Hit]:
    """Return the secrets in a file; of safetensors and GGUF weights only the header is searched. Raises OSError."""
    return scan_stream(_blocks(path))


def scan(files: Iterable[tuple[str, Path]]) -> list[Finding]:
    """Return one block per file that holds a secret; the facts name is `secret_files`. Raises OSError."""
    return [found for name, path in files if (found := of_file(name, scan_file(path))) is not None]


def of_file(name: str, hits: Iterable[Hit]) -> Finding | None:
    """Return the finding for what was found in one file, or None for nothing."""
    known = list(hits)
    if not known:
        return None
    kinds = list(dict.fromkeys(h.kind for h in known))
    places = [h.offset for h in known]
    return finding(
        "secret-in-file",
        name,
        f"{shown(name)} holds a secret ({', '.join(kinds)}) at byte {', '.join(map(str, places[:5]))}",
        "take it out of the file and revoke it: whoever could read this folder may have it",
        secret_files=[name],
        kinds=kinds,
        offsets=places,
    )


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        left: int | None = None
        if path.name.endswith(".safetensors"):
            head = stream.read(8)
            left = min(int.from_bytes(head, "little"), HEADER_MAX)
        elif path.name.endswith(".gguf"):
            left = HEADER_MAX
        while left is None or left > 0:
            block = stream.read(CHUNK if left is None else min(CHUNK, left))
            if not block:
                return
            left = None if left is None else left - len(block)
            yield block


def _real(match: re.Match[bytes]) -> bool:
    """Pass over what nobody could use: a run of one character, and for named values a word that says so."""
    value = match.groupdict().get("value")
    if value is None:
        return len(set(match[0][4:].lower())) > 3
    if _PLACEHOLDER.search(value) or len(set(value)) < 5 or _WORDS.fullmatch(value):
        return False
    mixed = value.lower() != value and value.upper() != value
    return len(value) < 16 or mixed or re.search(rb"\d", value) is not None
