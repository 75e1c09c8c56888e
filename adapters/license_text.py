"""Licences by their text: a LICENSE file to the id the Hub uses, and what prose says about a licence.

A text is compared word by word, without case, punctuation and line breaks. A licence is named only when its own title
or its operative sentences stand there, and for short licences only when little else does: a changed MIT text is no MIT.
"""

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from weighbridge.adapters.license_names import Name, named
from weighbridge.registry.hub_rules import license_name

TEXT_MAX: Final = 1 << 20
"""Bytes of the longest licence text that is read."""

_TITLE_WITHIN: Final = 700
"""Characters, of words only, in which a title must begin: below it stands at most a copyright line or a ruler."""

_TITLES: Final[tuple[tuple[str, str], ...]] = (
    (r"apache license version 2 0 january 2004", "apache-2.0"),
    (r"gnu affero general public license version 3 19 november 2007", "agpl-3.0"),
    (r"gnu lesser general public license version 3 29 june 2007", "lgpl-3.0"),
    (r"gnu lesser general public license version 2 1 february 1999", "lgpl-2.1"),
    (r"gnu library general public license version 2 june 1991", "lgpl"),
    (r"gnu general public license version 3 29 june 2007", "gpl-3.0"),
    (r"gnu general public license version 2 june 1991", "gpl-2.0"),
    (r"gnu free documentation license version", "gfdl"),
    (r"mozilla public license version 2 0", "mpl-2.0"),
    (r"eclipse public license v(?:ersion)? ?2 0", "epl-2.0"),
    (r"eclipse public license v(?:ersion)? ?1 0", "epl-1.0"),
    (r"european union public licen[sc]e v ?1 2", "eupl-1.2"),
    (r"european union public licen[sc]e v ?1 1", "eupl-1.1"),
    (r"boost software license version 1 0", "bsl-1.0"),
    (r"business source license 1 1", "busl-1.1"),
    (r"sil open font license version 1 1", "ofl-1.1"),
    (r"the artistic license 2 0", "artistic-2.0"),
    (r"academic free license afl v ?3 0|academic free license version 3 0", "afl-3.0"),
    (r"open software license osl v ?3 0|open software license version 3 0", "osl-3.0"),
    (r"educational community license version 2 0", "ecl-2.0"),
    (r"microsoft public license ms pl", "ms-pl"),
    (r"do what the f\w+ you want to public license", "wtfpl"),
    (r"the unlicense|this is free and unencumbered software released into the public domain", "unlicense"),
    (r"cc0 1 0 universal", "cc0-1.0"),
    (r"odc open database license|open database license odbl", "odbl"),
    (r"odc public domain dedication and licen[sc]e", "pddl"),
    (r"odc attribution license|open data commons attribution license", "odc-by"),
    (r"community data license agreement permissive version 2 0", "cdla-permissive-2.0"),
    (r"community data license agreement permissive version 1 0", "cdla-permissive-1.0"),
    (r"community data license agreement sharing version 1 0", "cdla-sharing-1.0"),
    (r"creative ?ml open ?rail\+\+ ?m", "openrail++"),
    (r"creative ?ml open ?rail ?m", "creativeml-openrail-m"),
    (r"big ?science open ?rail ?m", "bigscience-openrail-m"),
    (r"big ?science rail license v1 0", "bigscience-bloom-rail-1.0"),
    (r"big ?code open ?rail ?m v ?1", "bigcode-openrail-m"),
    (r"open ?rail ?m license|responsible ai license", "openrail"),
    (r"gemma terms of use", "gemma"),
    (r"grok 2 community license", "grok2-community"),
    (r"deepfloyd if license agreement", "deepfloyd-if-license"),
    (r"fair non ?commercial research license", "fair-noncommercial-research-license"),
    (r"apple machine learning research model license", "apple-amlr"),
    (r"apple sample code license", "apple-ascl"),
    (r"open ?mdw license(?: agreement)? version 1 0|openmdw 1 0", "openmdw-1.0"),
    (r"tongyi qianwen research license", "other:tongyi-qianwen-research"),
    (r"tongyi qianwen license", "other:tongyi-qianwen"),
    (r"qwen research license", "other:qwen-research"),
    (r"qwen license", "other:qwen"),
    (r"deepseek license", "other:deepseek"),
    (r"modified mit license", "other:modified-mit"),
    (r"mistral ai research license", "other:mrl"),
    (r"mistral ai non production license", "other:mnpl-0.1"),
    (r"nvidia open model license", "other:nvidia-open-model-license"),
    (r"stability ai community license", "other:stabilityai-ai-community"),
    (r"flux 1 dev non commercial license", "other:flux-1-dev-non-commercial-license"),
    (r"tencent hunyuan community license", "other:tencent-hunyuan-community"),
    (r"falcon (?:llm|\d+b tii) license", "other:falcon-llm-license"),
)
_TITLE_PATTERNS: Final = tuple((re.compile(pattern), target) for pattern, target in _TITLES)
_LLAMA = re.compile(r"(?:meta )?llama ([2-9])(?: ([0-9]))? community license agreement")
_CC = re.compile(
    r"\battribution(?P<parts>(?: (?:non ?commercial|share ?alike|no ?derivatives|no ?derivs))*)"
    r" (?P<version>[1-4] [05])\b"
    r"|creativecommons org licenses (?P<code>by(?: (?:nc|nd|sa))*) (?P<coded>[1-4] [05])"
)
_MIT = (
    "permission is hereby granted free of charge to any person obtaining a copy of this software and associated"
    " documentation files the software to deal in the software without restriction"
)
_BSD = "redistribution and use in source and binary forms with or without modification are permitted"
_SHORT: Final[tuple[tuple[str, tuple[str, ...], int], ...]] = (
    ("mit", (_MIT, "permission notice shall be included in all copies"), 165),
    (
        "isc",
        (
            "permission to use copy modify and or distribute this software for any purpose with or without fee is",
            "this permission notice appear in all copies",
        ),
        120,
    ),
    ("bsd-3-clause-clear", (_BSD, "no express or implied licenses to any party s patent rights"), 240),
    ("bsd-3-clause", (_BSD, "endorse or promote products derived from this software"), 215),
    ("bsd-2-clause", (_BSD, "redistributions in binary form must reproduce"), 180),
    (
        "zlib",
        ("as is without any express or implied warranty", "altered source versions must be plainly marked as such"),
        130,
    ),
)
"""Licences without a reliable title: the sentences that make them, and how many words they have."""

_EXTRA_WORDS: Final = 45
"""Words that may stand beside a short licence and its copyright lines: its name, an address."""

_CUT_SHORT: Final = 80
"""Words of a file that only points at a licence or quotes its beginning."""

_COPYRIGHT = re.compile(r"^\W*(?:\(c\) ?)?copyright\b.*$", re.IGNORECASE | re.MULTILINE)
_TITLED = re.compile(
    r"[\w .,()'&+/:-]{1,70}\b(?:licen[sc]e|agreement|terms of use)(?: agreement)?(?:,? (?:version|v)?\.? ?[\d.]+)?",
    re.IGNORECASE,
)
_SPDX = re.compile(r"SPDX-License-Identifier:[ \t]*([A-Za-z0-9.+() -]+)")
_GRANT = re.compile(r"licensed under the apache license version 2 0")
_MARKUP = re.compile(r"\[([^\[\]]{0,300})\]\([^)]{0,500}\)|[*_`>#|]|</?[a-zA-Z][^>]{0,500}>")
"""Bounded, as a line of 100,000 brackets would be searched to its end from each of them."""

_STATED: Final = (
    re.compile(
        r"\b(?:licen[sc]ed|released|distributed|available|published|covered|provided|shared|governed)\s+(?:under|by)\s+"
        r"(?:the\s+)?(?:terms\s+(?:of|and conditions of)\s+)?(?:the\s+)?(?P<name>[^\n]{2,120})",
        re.IGNORECASE,
    ),
    re.compile(r"\blicen[sc]e\s*(?:\(s\))?\s*[:\uff1a=]\s*(?P<name>[^\n]{2,120})", re.IGNORECASE),
    re.compile(r"许可(?:证|协议)\s*[:\uff1a]\s*(?P<name>[^\n]{2,120})"),
    re.compile(r"img\.shields\.io/badge/licen[sc]e-(?P<name>[^-\s)]+(?:--[^-\s)]+)*)-", re.IGNORECASE),
)
_HEADING = re.compile(r"^(?:#+\s*|\W*)(?:licen[sc]e|licensing|许可证|许可协议)\W*$", re.IGNORECASE)


class Recognised(NamedTuple):
    """The licence of a text; `name` None when the text could not be told, `why` says in words how it was judged."""

    name: Name | None
    why: str


class Statement(NamedTuple):
    """A sentence of prose that names a licence; `line` counts from 1."""

    name: Name
    line: int
    quote: str


def recognise(text: str) -> Recognised:
    """Return the licence whose text this is."""
    spdx = {found.id: found for line in _SPDX.findall(text) if (found := named(line.strip()))}
    if len(spdx) == 1:
        found = next(iter(spdx.values()))
        return Recognised(found, f"SPDX-License-Identifier: {found.id}")
    plain = re.sub(r"[^a-z0-9+]+", " ", text[:TEXT_MAX].lower()).strip()
    title = _title(plain)
    full = _short(plain, text)
    if title is not None and full is not None and full[0] != title and "mit" not in (title.name or ""):
        return Recognised(None, f"it holds the texts of {title.name or title.id} and of {full[0].id}")
    if title is not None:
        return Recognised(title, f"the text of {title.name or title.id}")
    if full is not None:
        name, extra = full
        if extra <= _EXTRA_WORDS:
            return Recognised(name, f"the text of {name.id}")
        return Recognised(None, f"the text of {name.id} with {extra} more words")
    if _GRANT.search(plain):
        return Recognised(Name("apache-2.0"), "it says: licensed under the Apache License, Version 2.0")
    short = named(plain) if len(plain) < 160 else None
    if short is not None:
        return Recognised(short, f"it says: {plain}")
    return _other(text, plain)


def statements(body: str) -> list[Statement]:
    """Return what the prose of a card says about its licence; a template's empty fields say nothing."""
    found: list[Statement] = []
    for line, text in _sentences(body):
        name = _named_in(text)
        if name is not None:
            found.append(Statement(name, line, " ".join(text.split())[:160]))
    return found


def _title(plain: str) -> Name | None:
    head = plain[:_TITLE_WITHIN]
    found: list[tuple[int, int, Name]] = []
    for pattern, target in _TITLE_PATTERNS:
        match = pattern.search(head)
        if match:
            license_id, _, name = target.partition(":")
            found.append((match.start(), -len(match[0]), Name(license_id, name or None)))
    for match in (_LLAMA.search(head), _CC.search(head)):
        name_of = match and named(_spelled(match))
        if match and name_of:
            found.append((match.start(), -len(match[0]), name_of))
    return min(found)[2] if found else None


def _spelled(match: re.Match[str]) -> str:
    groups = match.groupdict()
    if "version" not in groups:
        return match[0]
    if groups["code"]:
        return f"cc {groups['code']} {groups['coded']}"
    return f"cc by{groups['parts']} {groups['version']}"


def _short(plain: str, text: str) -> tuple[Name, int] | None:
    for license_id, sentences, words in _SHORT:
        if all(sentence in plain for sentence in sentences):
            owners = sum(len(re.findall(r"\w+", line)) for line in _COPYRIGHT.findall(text))
            return Name(license_id), max(0, len(plain.split()) - owners - words)
    return None


def _other(text: str, plain: str) -> Recognised:
    """Judge by the first line: a known name above few words, or the title of a licence that is in no list."""
    first = next((line.strip(" #*=-\t\ufeff") for line in text.splitlines() if line.strip(" #*=-\t\ufeff")), "")
    known = named(first)
    if known is not None and known.id != "unknown":
        if len(plain.split()) <= _CUT_SHORT:
            return Recognised(known, f"it is headed {first!r}; the text is not given in full")
        return Recognised(None, f"it is headed {first!r}, but holds another text")
    if _TITLED.fullmatch(first):
        name = license_name(re.sub(r"\b(?:licen[sc]e|agreement|the)\b", " ", first, flags=re.IGNORECASE))
        if name != "custom":
            return Recognised(Name("other", name), f"it is headed {first!r}")
    return Recognised(None, "no known licence text")


def _sentences(body: str) -> Iterator[tuple[int, str]]:
    """Yield the text after each statement of a licence, and the lines right below a heading that says License."""
    below = 0
    for number, raw in enumerate(body.splitlines(), 1):
        line = _MARKUP.sub(r"\1", raw).strip()
        badge = _STATED[3].search(raw)
        if badge:
            yield number, badge["name"].replace("--", "-").replace("%20", " ").replace("_", " ")
        if _HEADING.match(line):
            below = 3
            continue
        stated = next((m for p in _STATED[:3] if (m := p.search(line))), None)
        if stated:
            yield number, stated["name"]
        elif below and line:
            yield number, line
        below = max(0, below - 1) if line else below


def _named_in(text: str) -> Name | None:
    """Return the licence that the first words name, the longest name first."""
    quotes = "\"'([\u2018\u201c"
    plain = re.split(r"[;\n\u3002\uff1b]|\s[-\u2013\u2014]\s|\. ", text.strip().lstrip(quotes), maxsplit=1)[0]
    words = re.sub(r"[()\[\]\"\u201c\u201d]", " ", plain).split()[:12]
    for count in range(len(words), 0, -1):
        found = named(" ".join(words[:count]).strip(" .,:"))
        if found is not None and found.id not in {"other", "unknown"} | _TOO_SHORT:
            return found
        if found is not None and found.name:
            return found
    return None


_TOO_SHORT: Final = frozenset({"cc", "isc", "zlib", "ncsa"})
"""Ids that also stand in prose as words or parts of words."""
