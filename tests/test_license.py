"""Whose licence a model is under, with the evidence, and what contradicts it."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import weighbridge_testlib.builders as build
from weighbridge.adapters import license as licence
from weighbridge.adapters import license_names, license_text, sidecar
from weighbridge.adapters.license_names import Name
from weighbridge.registry.types import LicenseFacts

MIT = """MIT License

Copyright (c) 2026 Example Org

Permission is hereby granted, free of charge, to any person obtaining a copy
of this software and associated documentation files (the "Software"), to deal
in the Software without restriction, including without limitation the rights
to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
copies of the Software, and to permit persons to whom the Software is
furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all
copies or substantial portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
SOFTWARE.
"""
BSD = (
    "Copyright 2026 X. All rights reserved.\n\nRedistribution and use in source and binary forms, with or without\n"
    "modification, are permitted provided that the following conditions are met:\n\n1. Redistributions of source code"
    " must retain the above copyright notice.\n2. Redistributions in binary form must reproduce the above notice.\n"
)
APACHE = (
    "                                 Apache License\n                           Version 2.0, January 2004\n"
    + "x " * 900
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Apache License 2.0", "apache-2.0"),
        ("Apache-2.0", "apache-2.0"),
        ("the Apache License, Version 2.0", "apache-2.0"),
        ("MIT licence", "mit"),
        ("GNU General Public License v3.0", "gpl-3.0"),
        ("GNU GPL v2 or later", "gpl-2.0-or-later"),
        ("AGPLv3", "agpl-3.0"),
        ("LGPL v2.1", "lgpl-2.1"),
        ("New BSD License", "bsd-3-clause"),
        ("Creative Commons Attribution-NonCommercial-ShareAlike 4.0 International", "cc-by-nc-sa-4.0"),
        ("CC BY-ND 4.0", "cc-by-nd-4.0"),
        ("META LLAMA 3 COMMUNITY LICENSE AGREEMENT", "llama3"),
        ("Llama 3.3 Community License", "llama3.3"),
        ("Gemma Terms of Use", "gemma"),
        ("CreativeML Open RAIL-M", "creativeml-openrail-m"),
        ("apache-2.0 OR mit", "apache-2.0 or mit"),
    ],
)
def test_names_in_any_spelling_become_ids(text: str, expected: str) -> None:
    """Common names of a licence are the id that the Hub uses."""
    assert license_names.named(text) == Name(expected)


@pytest.mark.parametrize(
    "text", ["proprietary", "see LICENSE", "3.0", "apache", "cc by", "", "x" * 500, "MIT or similar"]
)
def test_names_of_no_licence_name_none(text: str) -> None:
    """Words that leave the licence open are not rounded to one."""
    assert license_names.named(text) is None


@given(st.text(max_size=120))
def test_no_text_makes_the_names_fail(text: str) -> None:
    """Any text names a licence or none, as a name, as a proposal and as a file."""
    license_names.named(text)
    license_names.nearest_known(text)
    license_text.recognise(text)
    license_text.statements(text)


class Searched(str):
    """A line of a card that counts the characters its searches pass."""

    __slots__ = ("passed",)
    passed: int

    def find(self, *given: Any) -> int:
        """Search as text does, and count from where it began to where it ended."""
        found = super().find(*given)
        self.passed += (len(self) if found < 0 else found + 1) - int(given[1])
        return found


@given(st.text(alphabet="[]()<>/a*#_ b\u8bb8", max_size=30))
def test_a_line_is_its_text_without_marks(line: str) -> None:
    """Of links their text stays, tags go, and so do the marks outside of both: as one pattern says it, slowly."""
    marks = re.compile(r"\[([^\]]*)\]\([^)]*\)|[*_`>#|]|</?[a-zA-Z][^>]*>")
    assert license_text.unmarked(line) == marks.sub(r"\1", line)


@pytest.mark.parametrize("unit", ["[", "<a", "[a](", "[a]", "<a>", "#", "[<a"])
def test_a_line_is_searched_once(unit: str) -> None:
    """However many links and tags a line begins and never ends, no stretch of it is searched twice for one mark."""
    line = Searched(unit * 2000 + "](>")
    line.passed = 0
    license_text.unmarked(line)
    assert line.passed <= 3 * len(line)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (MIT, "mit"),
        (MIT.replace("\n", "\r\n").upper(), "mit"),
        (BSD, "bsd-2-clause"),
        (
            BSD + "3. Neither the name of X may be used to endorse or promote products derived from this software.",
            "bsd-3-clause",
        ),
        (APACHE, "apache-2.0"),
        ("SPDX-License-Identifier: MPL-2.0\n\nwhatever", "mpl-2.0"),
        (
            "Attribution-NonCommercial-NoDerivatives 4.0 International\n\n====\n\nCreative Commons Corporation",
            "cc-by-nc-nd-4.0",
        ),
        ("This work: https://creativecommons.org/licenses/by-sa/4.0/legalcode", "cc-by-sa-4.0"),
        ("CC0 1.0 Universal\n\nStatement of Purpose", "cc0-1.0"),
        (
            "GNU AFFERO GENERAL PUBLIC LICENSE\n   Version 3, 19 November 2007\n ... GNU General Public License ...",
            "agpl-3.0",
        ),
        ("GNU LESSER GENERAL PUBLIC LICENSE\nVersion 3, 29 June 2007", "lgpl-3.0"),
        ("Mozilla Public License Version 2.0\n====\n", "mpl-2.0"),
        ("LLAMA 3.1 COMMUNITY LICENSE AGREEMENT\nLlama 3.1 Version Release Date: July 23, 2024", "llama3.1"),
        ("META LLAMA 3 COMMUNITY LICENSE AGREEMENT", "llama3"),
        ("LLAMA 4 COMMUNITY LICENSE AGREEMENT", "llama4"),
        ("Gemma Terms of Use\n\nLast modified: April 1, 2024", "gemma"),
        ("BigScience OpenRAIL-M License\nSection I: PREAMBLE", "bigscience-openrail-m"),
        ("This is free and unencumbered software released into the public domain.", "unlicense"),
        ("MIT License\n\nCopyright (c) 2025\n\nPermission is hereby granted, free of charge...", "mit"),
    ],
)
def test_texts_are_known_by_their_words(text: str, expected: str) -> None:
    """A LICENSE file is recognised whatever its case, breaks and header."""
    found = license_text.recognise(text)
    assert found.name == Name(expected)
    assert found.why


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Tongyi Qianwen LICENSE AGREEMENT\n\nTongyi Qianwen Release Date: August 3, 2023", "tongyi-qianwen"),
        ("Qwen RESEARCH LICENSE AGREEMENT\n", "qwen-research"),
        ("DEEPSEEK LICENSE AGREEMENT\nVersion 1.0, 23 October 2023", "deepseek"),
        ("Acme Model License Agreement\n\nYou may ...", "acme-model"),
    ],
)
def test_licences_outside_the_list_are_other_with_their_name(text: str, name: str) -> None:
    """A licence the Hub has no id for is `other`, named by its own title."""
    assert license_text.recognise(text).name == Name("other", name)


@pytest.mark.parametrize(
    "text",
    [
        MIT + "\nThe model weights may not be used commercially. " + "More terms follow here. " * 20,
        MIT.replace("MIT License", "") + "\n" + APACHE,
        "MIT License\n\n" + "All rights are reserved by the owner of this text. " * 30,
        "Do as you like.",
        "",
    ],
)
def test_changed_and_mixed_texts_are_no_licence(text: str) -> None:
    """A known text with more terms, or two texts at once, is not rounded to the nearer one."""
    assert license_text.recognise(text).name is None


def test_nearest_statement_wins(tmp_path: Path) -> None:
    """Sidecar before card before config before LICENSE file; each with the evidence that names it."""
    folder = build.lora_adapter(tmp_path / "a", readme="---\nlicense: mit\n---\n")
    (folder / "LICENSE").write_text(MIT)
    note = sidecar.parse(b"license: cc-by-nc-4.0\n")
    config = {"license": "bsd-3-clause"}
    told = [licence.find(folder, config, None, note)]
    told.append(licence.find(folder, config))
    (folder / "README.md").unlink()
    told += [licence.find(folder, config), licence.find(folder)]
    (folder / "LICENSE").unlink()
    told.append(licence.find(folder))
    assert [(t.license.id, t.license.source) for t in told] == [
        ("cc-by-nc-4.0", "sidecar"),
        ("mit", "card"),
        ("bsd-3-clause", "config"),
        ("mit", "file"),
        (None, None),
    ]
    assert all(t.license.evidence for t in told)
    assert [f.code for f in told[-1].findings] == ["license-unknown"]


def test_card_and_file_that_disagree_are_both_told(tmp_path: Path) -> None:
    """A conflict is a warning with both ids; a family and its member agree."""
    folder = build.lora_adapter(tmp_path / "a", readme="---\nlicense: cc-by-4.0\n---\n")
    (folder / "LICENSE").write_text("Attribution-NonCommercial-NoDerivatives 4.0 International\n")
    found = licence.find(folder)
    assert found.facts == {"license_in_card": "cc-by-4.0", "license_in_file": "cc-by-nc-nd-4.0"}
    assert [f.code for f in found.findings] == ["license-conflict"]
    (folder / "README.md").write_text("---\nlicense: cc\n---\n")
    assert licence.find(folder).findings == []


def test_a_card_that_says_other_contradicts_a_known_text(tmp_path: Path) -> None:
    """`other` above the text of Apache is shown, even where the block stands at the wrong place."""
    folder = build.lora_adapter(tmp_path / "a", readme="note\n\n---\nlicense: other\n---\n")
    (folder / "LICENSE.txt").write_text(APACHE)
    found = licence.find(folder)
    assert found.license.id == "apache-2.0"
    assert found.facts == {"license_in_card": "other", "license_in_file": "apache-2.0"}


def test_a_stated_name_agrees_with_its_file(tmp_path: Path) -> None:
    """`other` with a name is the licence whose text lies beside it."""
    readme = "---\nlicense: other\nlicense_name: qwen-research\nlicense_link: LICENSE\n---\n"
    folder = build.lora_adapter(tmp_path / "a", readme=readme)
    (folder / "LICENSE").write_text("Qwen RESEARCH LICENSE AGREEMENT\n")
    found = licence.find(folder)
    assert (found.license.id, found.license.name, found.license.link) == ("other", "qwen-research", "LICENSE")
    assert found.findings == []


def test_alternative_texts_are_a_choice(tmp_path: Path) -> None:
    """LICENSE-APACHE beside LICENSE-MIT offers both; a notice about other people's code is not ours."""
    folder = build.lora_adapter(tmp_path / "a", readme=None)
    (folder / "LICENSE-APACHE").write_text(APACHE)
    (folder / "LICENSE-MIT").write_text(MIT)
    assert licence.find(folder).license.id == "apache-2.0 or mit"
    other = build.lora_adapter(tmp_path / "b", readme=None)
    (other / "LICENSE-THIRD-PARTY.txt").write_text(APACHE)
    (other / "LICENSE").write_text(MIT)
    assert licence.find(other).license.id == "mit"


def test_an_unclear_text_is_told_and_claims_nothing(tmp_path: Path) -> None:
    """A LICENSE file that is no known text leaves the licence unknown, with a finding that names the file."""
    folder = build.lora_adapter(tmp_path / "a", readme=None)
    (folder / "LICENSE").write_text("Ask Bob.")
    found = licence.find(folder)
    assert found.license.id is None
    assert [f.code for f in found.findings] == ["license-text-unclear", "license-unknown"]


def test_the_run_speaks_for_its_checkpoints(tmp_path: Path) -> None:
    """A checkpoint without a statement of its own is under the licence of its run."""
    run = build.run_root(tmp_path / "run", steps=(100,))
    (run / "LICENSE").write_text(MIT)
    step = run / "checkpoint-100"
    (step / "README.md").unlink(missing_ok=True)
    found = licence.find(step, above=[run])
    assert found.license.source in {"card", "file"}
    assert "run" in (found.license.evidence or "")


def test_the_base_speaks_last(tmp_path: Path) -> None:
    """Without a statement of its own a model inherits: from the base's folder, the Hub cache, or a registry."""
    folder = build.lora_adapter(tmp_path / "a", readme=None, base="acme/base")
    base = build.llama_model(tmp_path / "base", readme="---\nlicense: llama3.1\n---\n")
    local = licence.find(folder, None, base)
    assert (local.license.id, local.license.source) == ("llama3.1", "base")
    assert [f.code for f in local.findings] == ["license-inherited"]
    cache = tmp_path / "hub"
    snapshot = cache / "models--acme--base" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "LICENSE").write_text(APACHE)
    (cache / "models--acme--base" / "refs").mkdir()
    (cache / "models--acme--base" / "refs" / "main").write_text("a" * 40)
    cached = licence.find(folder, base_id="acme/base", caches=[cache])
    assert cached.license.id == "apache-2.0"
    assert "Hub cache" in (cached.license.evidence or "")
    asked: list[tuple[str, str | None]] = []

    def lookup(base_id: str, revision: str | None) -> LicenseFacts | None:
        asked.append((base_id, revision))
        return LicenseFacts(id="gemma", evidence="base@v1")

    told = licence.find(folder, base_id="acme/base", base_revision="v1", lookup=lookup)
    assert (told.license.id, told.license.source, told.license.evidence) == ("gemma", "base", "base@v1")
    assert asked == [("acme/base", "v1")]
    assert licence.find(folder, base_id="acme/base").license.id is None


@pytest.mark.parametrize("base_id", ["../../etc", "/etc/passwd", "a/b/c", "models--x--y"])
def test_odd_base_ids_never_leave_the_cache(tmp_path: Path, base_id: str) -> None:
    """An id that is none is not looked up in a cache."""
    assert licence.cache_folder(base_id, "../x", [tmp_path]) is None


def test_a_looser_licence_than_the_base_is_warned_of(tmp_path: Path) -> None:
    """MIT over a base that forbids commerce is a warning that records both; the other way round is none."""
    base = build.llama_model(tmp_path / "base", readme="---\nlicense: cc-by-nc-4.0\n---\n")
    folder = build.lora_adapter(tmp_path / "a", readme="---\nlicense: mit\n---\n")
    found = licence.find(folder, None, base)
    assert found.license.id == "mit"
    [finding] = found.findings
    assert finding.code == "license-looser-than-base"
    assert finding.data["adapter_license"] == "mit"
    assert finding.data["base_license"] == "cc-by-nc-4.0"
    assert licence.compare(LicenseFacts(id="cc-by-nc-4.0"), LicenseFacts(id="mit")) is None
    assert licence.compare(LicenseFacts(id="mit"), LicenseFacts()) is None


def test_prose_alone_is_evidence_but_no_licence(tmp_path: Path) -> None:
    """A licence that only the text states stays unknown, and the evidence quotes it."""
    folder = build.lora_adapter(tmp_path / "a", readme="# x\n\nThis project is licensed under the MIT License.\n")
    found = licence.find(folder).license
    assert found.id is None
    assert "not declared: mit" in (found.evidence or "")


def test_cache_roots_follow_the_environment(tmp_path: Path) -> None:
    """The Hub's variables are honoured in its own order; nothing is read at import."""
    roots = licence.cache_roots({"HOME": "/h", "HF_HOME": "/x", "HF_HUB_CACHE": "/y"})
    assert roots[:2] == [Path("/y"), Path("/x/hub")]
    assert licence.cache_roots({"HOME": str(tmp_path)}) == [tmp_path / ".cache/huggingface/hub"]
