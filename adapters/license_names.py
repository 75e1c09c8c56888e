"""Licences by name: any common spelling to the id the Hub uses (lower case), and what ids mean to each other.

    named("Apache License, Version 2.0")   Name("apache-2.0")
    named("AGPL-3.0-or-later")             Name("agpl-3.0-or-later")   an SPDX id stays what it is
    named("Qwen Research License")         Name("other", "qwen-research")
    named("the usual terms")               None

license-expression knows the SPDX list; its home is here.
"""

import functools
import re
from typing import Any, Final, NamedTuple

from weighbridge.config.nearest import nearest
from weighbridge.registry.hub_rules import LICENSES, UNNAMED


class Name(NamedTuple):
    """A licence as the Hub spells it; `name` is set where the id is `other`."""

    id: str
    name: str | None = None


_VERSION = r"(?: ?(?:version|ver|v))? ?"
_NAMES: Final[tuple[tuple[str, str], ...]] = (
    (rf"apache(?: software)?{_VERSION}2(?: 0)?|asl ?2(?: 0)?|al ?2 0", "apache-2.0"),
    (r"mit(?: expat)?|expat(?: mit)?|mit x11", "mit"),
    (r"bsd ?2(?: clause)?(?: simplified)?|2 clause bsd|(?:simplified|freebsd) bsd|bsd simplified", "bsd-2-clause"),
    (r"bsd ?3(?: clause)?(?: new or revised| new| revised)?|3 clause bsd", "bsd-3-clause"),
    (r"(?:new|revised|modified|new or revised) bsd|bsd (?:new|revised)", "bsd-3-clause"),
    (r"bsd ?3 clause clear|clear bsd", "bsd-3-clause-clear"),
    (r"bsd (?:0|zero)(?: clause)?|(?:0|zero) clause bsd", "0bsd"),
    (r"isc", "isc"),
    (r"zlib(?: libpng)?", "zlib"),
    (r"(?:the )?unlicense", "unlicense"),
    (r"wtfpl(?: 2(?: 0)?)?|do what the f\w*ck you want to public", "wtfpl"),
    (r"boost software(?: 1 0)?|boost(?: 1 0)?", "bsl-1.0"),
    (rf"(?:mozilla public|mpl){_VERSION}2(?: 0)?", "mpl-2.0"),
    (rf"(?:eclipse public|epl){_VERSION}2(?: 0)?", "epl-2.0"),
    (rf"(?:eclipse public|epl){_VERSION}1(?: 0)?", "epl-1.0"),
    (rf"(?:european union public|eupl){_VERSION}1 2", "eupl-1.2"),
    (rf"(?:european union public|eupl){_VERSION}1 1", "eupl-1.1"),
    (rf"(?:sil )?open font{_VERSION}1 1|(?:sil )?ofl{_VERSION}1 1", "ofl-1.1"),
    (rf"artistic{_VERSION}2(?: 0)?", "artistic-2.0"),
    (rf"academic free{_VERSION}3(?: 0)?", "afl-3.0"),
    (rf"open software{_VERSION}3(?: 0)?", "osl-3.0"),
    (r"microsoft public|ms pl", "ms-pl"),
    (r"postgresql|postgres", "postgresql"),
    (r"(?:university of illinois )?ncsa(?: open source)?", "ncsa"),
    (r"(?:odc |open data commons )attribution(?: 1 0)?|odc by(?: 1 0)?", "odc-by"),
    (r"(?:odc )?open database(?: 1 0)?|odbl(?: 1 0)?", "odbl"),
    (r"(?:odc )?public domain dedication and|pddl(?: 1 0)?", "pddl"),
    (r"(?:creative commons )?(?:cc ?0|cc zero|zero)(?: v?1 0)?(?: universal)?", "cc0-1.0"),
    (r"creative ?ml open ?rail ?m", "creativeml-openrail-m"),
    (r"big ?science open ?rail ?m", "bigscience-openrail-m"),
    (r"big ?science (?:bloom )?rail(?: v?1 0)?", "bigscience-bloom-rail-1.0"),
    (r"big ?code open ?rail ?m(?: v?1)?", "bigcode-openrail-m"),
    (r"(?:creative ?ml )?open ?rail ?\+\+(?: ?m)?", "openrail++"),
    (r"open ?rail(?: ?m)?", "openrail"),
    (r"gemma(?: terms of use)?", "gemma"),
    (r"grok ?2 community", "grok2-community"),
    (r"deepfloyd if(?: research)?", "deepfloyd-if-license"),
    (r"fair non ?commercial research", "fair-noncommercial-research-license"),
    (r"tongyi qianwen research", "other:tongyi-qianwen-research"),
    (r"tongyi qianwen", "other:tongyi-qianwen"),
    (r"qwen research", "other:qwen-research"),
    (r"qwen", "other:qwen"),
    (r"deepseek(?: model)?", "other:deepseek"),
    (r"modified mit", "other:modified-mit"),
    (r"mistral ai research|mrl", "other:mrl"),
    (r"mistral ai non production|mnpl(?: 0 1)?", "other:mnpl-0.1"),
    (r"nvidia open model", "other:nvidia-open-model-license"),
    (r"(?:tii )?falcon(?: llm)?(?: 2)?", "other:falcon-llm-license"),
    (r"stability ai community", "other:stabilityai-ai-community"),
    (r"flux 1 dev non ?commercial", "other:flux-1-dev-non-commercial-license"),
    (r"tencent hunyuan community", "other:tencent-hunyuan-community"),
)
_PATTERNS: Final = tuple((re.compile(pattern), target) for pattern, target in _NAMES)
_GPL = re.compile(
    r"(?:gnu )?(?:(?P<kind>affero|lesser|library|agpl|lgpl|gpl|l|a) ?)?(?:general public|gpl)?"
    r"(?: ?(?:version|ver|v))? ?(?P<version>[123](?: [01])?)"
    r"(?P<rest>\+| or (?:any )?(?:later|newer)(?: version)?| only)?"
)
_LLAMA = re.compile(r"(?:meta )?(?:code )?llama ?(?P<major>[2-9])(?: ?(?P<minor>[0-9]))?(?: community)?(?: agreement)?")
_CC = re.compile(
    r"(?:creative commons |cc )?(?P<by>by|attribution)?"
    r"(?P<parts>(?: (?:nc|sa|nd|non ?commercial|share ?alike|no ?derivatives|no ?derivs|no ?derivative works))*)"
    r"(?: v(?:ersion)?)? ?(?P<version>[1-4] [05])(?: (?:international|unported|generic|deed))?(?: public)?"
)
_CC_PARTS: Final = (("nc", r"\bnc\b|non ?com"), ("nd", r"\bnd\b|no ?der"), ("sa", r"\bsa\b|share"))
"""The parts of a Creative Commons id in the order in which it names them."""

_NOISE = re.compile(r"\b(?:the|licen[sc]es?|licen[sc]ed|agreement|public licen[sc]e text)\b")


@functools.lru_cache(maxsize=4096)
def named(text: str) -> Name | None:
    """Return the licence that a short text names, or None; an id of the Hub or of SPDX is kept, in lower case."""
    plain = text.strip().strip("\"'`*_").strip()
    if not plain or len(plain) > 160:
        return None
    if plain.lower() in LICENSES:
        return Name(plain.lower())
    spdx = _spdx_id(plain)
    return Name(spdx) if spdx else _by_name(plain)


def parts(license_id: str | None) -> list[str]:
    """Return the single ids of a licence expression, so that a rule on one licence meets it inside `a OR b` too."""
    if not license_id:
        return []
    return [p for p in re.split(r"\s+(?:and|or|with)\s+|[()]", license_id.lower()) if p.strip()]


def nearest_known(text: str) -> str | None:
    """Return the id of the Hub's list that somebody probably meant, as a proposal; None rather than a bold guess."""
    found = named(text)
    if found is None:
        plain = text.strip().lower()
        if not re.fullmatch(r"[a-z][a-z0-9.+-]{2,40}", plain) or plain in _NO_NAMES:
            return None
        return nearest(plain, LICENSES - UNNAMED, cutoff=0.75)
    family = named(re.sub(r"(-or-later|-only|\+)$", "", found.id)) or found
    return family.id if family.id in LICENSES - UNNAMED else None


def same(one: Name, other: Name) -> bool:
    """Tell whether two statements can be about the same licence: a family covers its members."""
    if one == other:
        return True
    if "other" in {one.id, other.id}:
        return one.id == other.id and (one.name is None or other.name is None)
    a, b = (re.sub(r"(-or-later|-only|\+)$", "", n.id) for n in (one, other))
    short, long = sorted((a, b), key=len)
    return a == b or (short in _FAMILIES and (long.startswith((f"{short}-", f"{short}0-")) or short in long.split("-")))


def restriction(license_id: str | None, name: str | None = None) -> int | None:
    """Return how much a licence holds back, 0 (permissive) to 4 (no commercial use or no changes); None if unknown."""
    ranks = [_restriction(p, name) for p in parts(license_id)]
    known = [r for r in ranks if r is not None]
    return max(known) if known and len(known) == len(ranks) else None


_PERMISSIVE = re.compile(
    r"apache-|mit|bsd|0bsd|isc$|zlib|unlicense|cc0-|cc-by-\d|wtfpl|bsl-|afl-|artistic-|ecl-|postgresql|ncsa|odc-by|pddl"
    r"|ofl-|openmdw-|cdla-permissive|etalab-"
)
_NO_NAMES: Final = frozenset(
    {"none", "license", "licence", "free", "open", "custom", "private", "proprietary", "commercial", "public"}
)
_FAMILIES: Final = frozenset({"cc", "bsd", "gpl", "lgpl", "openrail", "gfdl"})


def _restriction(license_id: str, name: str | None) -> int | None:
    text = f"{license_id} {name or ''}"
    if license_id in UNNAMED and not name:
        return None
    if re.search(r"(?:^|[-\s])(?:nc|nd)(?:[-\s]|$)|non-?commercial|research|non-production|apple-amlr|c-uda", text):
        return 4
    if license_id.startswith("busl"):
        return 4
    if re.match(r"(?:other|.*rail|llama|gemma|grok|deepfloyd|qwen)", license_id):
        return 3
    if re.match(r"a?gpl|cc-by-sa|osl|eupl|gfdl|odbl|cdla-sharing", license_id):
        return 2
    if re.match(r"lgpl|mpl|epl|lppl|ms-pl|cecill", license_id):
        return 1
    return 0 if _PERMISSIVE.match(license_id) else None


def _by_name(text: str) -> Name | None:
    plain = re.sub(r"[^a-z0-9+]+", " ", text.lower().replace("licence", "license"))
    plain = re.sub(r"\s+", " ", _NOISE.sub(" ", plain)).strip()
    for pattern, target in _PATTERNS:
        if pattern.fullmatch(plain):
            head, _, name = target.partition(":")
            return Name(head, name or None)
    return _llama(plain) or _creative_commons(plain) or _gnu(plain)


def _llama(plain: str) -> Name | None:
    match = _LLAMA.fullmatch(plain)
    if match is None:
        return None
    found = f"llama{match['major']}" + (f".{match['minor']}" if match["minor"] not in {None, "0"} else "")
    return Name(found) if found in LICENSES else Name("other", found)


def _creative_commons(plain: str) -> Name | None:
    match = _CC.fullmatch(plain)
    if match is None or not match["by"] or not plain.startswith(("c", "attribution")):
        return None
    kinds = [kind for kind, spelled in _CC_PARTS if re.search(spelled, match["parts"])]
    found = "-".join(["cc-by", *kinds, match["version"].replace(" ", ".")])
    return Name(found) if found in LICENSES or _spdx_id(found) else None


def _gnu(plain: str) -> Name | None:
    match = _GPL.fullmatch(plain)
    if match is None or not re.search(r"gpl|general public|affero|lesser|library", plain):
        return None
    kind = {"affero": "agpl", "agpl": "agpl", "a": "agpl"}.get(match["kind"] or "", "")
    kind = kind or ("lgpl" if match["kind"] in {"lesser", "library", "lgpl", "l"} else "gpl")
    version = match["version"].replace(" ", ".")
    found = f"{kind}-{version if '.' in version else version + '.0'}"
    if match["rest"]:
        found += "-only" if "only" in match["rest"] else "-or-later"
    return Name(found) if found in LICENSES or _spdx_id(found) else None


@functools.cache
def _spdx() -> Any:
    from license_expression import get_spdx_licensing  # noqa: PLC0415 - 2,400 licences are read on first use only

    return get_spdx_licensing()


def _spdx_id(text: str) -> str | None:
    """Return the SPDX id or expression that a text is, lower case, an old spelling in today's form; else None."""
    if not re.fullmatch(r"[A-Za-z0-9.+() -]+", text):
        return None
    from license_expression import ExpressionError  # noqa: PLC0415 - as above

    try:
        parsed = _spdx().parse(text, validate=True, strict=True)
    except (ExpressionError, ValueError, RecursionError):
        return None
    return None if parsed is None else str(parsed.render()).lower()
