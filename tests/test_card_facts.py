"""What a model card says, and what the Hub would say to it."""

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import EvalResult, ModelCardData
from hypothesis import given
from hypothesis import strategies as st

from weighbridge.adapters import card_facts
from weighbridge.adapters.card_facts import CardFacts
from weighbridge.registry import hub_rules
from weighbridge.registry.findings import CODES, outcome

BASE = "example-org/tiny-base"


def card(front: str, body: str = "# x\n", base: str | None = BASE) -> CardFacts:
    """Return the facts of a card with this front matter."""
    return card_facts.parse(f"---\n{front}\n---\n{body}".encode(), config_base=base)


def codes(facts: CardFacts) -> list[str]:
    """Return the codes of all findings."""
    return [f.code for f in facts.findings]


@given(st.binary(max_size=600))
def test_no_bytes_make_a_card_fail(raw: bytes) -> None:
    """Any bytes give facts that can be written as JSON, and findings of listed codes."""
    facts = card_facts.parse(raw, config_base=BASE)
    json.dumps(facts.facts)
    assert all(f.code in CODES for f in facts.findings)


@given(
    st.dictionaries(
        st.sampled_from(
            ["license", "language", "datasets", "base_model", "tags", "model-index", "license_name", "a.b"]
        ),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=12),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
            max_leaves=6,
        ),
        max_size=5,
    )
)
def test_no_field_of_any_type_makes_a_card_fail(front: dict[str, Any]) -> None:
    """A field of a type that nobody expects is a finding or nothing, never an exception."""
    facts = card_facts.parse(f"---\n{json.dumps(front)}\n---\n".encode(), config_base=BASE)
    json.dumps(facts.facts)


def test_a_folder_without_a_card_has_no_findings(tmp_path: Path) -> None:
    """No card is no fault; the facts are empty."""
    assert card_facts.read(tmp_path / "README.md", config_base=BASE) == card_facts.ABSENT


def test_a_plain_card_has_no_findings() -> None:
    """A card that the Hub takes as it is gives facts and nothing else."""
    facts = card(f"license: apache-2.0\nbase_model: {BASE}\nlanguage: en\ntags:\n- lora")
    assert codes(facts) == []
    assert facts.facts["license"] == "apache-2.0"
    assert facts.facts["license_hub_known"] is True
    assert facts.facts["language"] == ["en"]
    assert not facts.hub_blocked


@pytest.mark.parametrize(
    ("front", "line"),
    [
        ("license: mit\n tags: [a, b", 3),
        ("license: mit\nlicense: apache-2.0", 3),
        ("- a\n- b", 2),
        ("just words", 2),
        ("a: 'x", 2),
        ("\n\ntags: [a", 4),
    ],
)
def test_broken_front_matter_names_the_line_of_the_file(front: str, line: int) -> None:
    """YAML that does not parse, or is no mapping, blocks the Hub alone and names the line a person has to mend."""
    facts = card(front)
    assert codes(facts) == ["card-front-matter-invalid"]
    assert facts.facts["yaml_valid"] is False
    assert facts.facts["yaml_error_line"] == line
    assert facts.facts["hub_push_blocked"] is True
    assert outcome(facts.findings) == "warn"


def test_front_matter_without_an_end_is_a_fault() -> None:
    """A block that is never closed names the last line of the file."""
    facts = card_facts.parse(b"---\nlicense: mit\ntags:\n- a\n")
    assert facts.facts["yaml_error_line"] == 4
    assert facts.license is None


def test_front_matter_below_other_text_is_no_front_matter() -> None:
    """What stands above the block hides it from every reader: its licence is only stated in text."""
    facts = card_facts.parse(b"**Moved!**\n\n---\nlicense: other\n---\nbody\n", config_base=BASE)
    assert "card-front-matter-displaced" in codes(facts)
    assert facts.front is None
    assert facts.license is None
    assert facts.displaced == {"license": "other"}
    assert not facts.hub_blocked


def test_blank_lines_above_the_block_are_allowed() -> None:
    """The Hub's own pattern skips white space, so lines are counted with it."""
    facts = card_facts.parse(b"\n\n---\nlicense: mit\n x: [\n---\n")
    assert facts.facts["yaml_error_line"] == 5


@pytest.mark.parametrize("mark", [b"\xef\xbb\xbf", b"\xff\xfe"])
def test_a_byte_order_mark_hides_nothing(mark: bytes) -> None:
    """A mark, UTF-16 too, is noted and the card read; the outcome is not raised by it."""
    text = "---\nlicense: mit\nlanguage: no\n---\n"
    raw = text.encode("utf-16-le") if mark == b"\xff\xfe" else text.encode()
    facts = card_facts.parse(mark + raw)
    assert facts.facts["bom"] is True
    assert facts.facts["license"] == "mit"
    assert facts.facts["language"] == ["no"]
    assert outcome(facts.findings) == "accept"


def test_text_of_another_encoding_is_read_as_far_as_it_goes() -> None:
    """A card in Latin-1 keeps its facts and blocks the Hub."""
    facts = card_facts.parse("---\nlicense: mit\nauthor: Jörg\n---\n".encode("latin-1"))
    assert facts.facts["license"] == "mit"
    assert codes(facts)[0] == "card-not-text"
    assert facts.hub_blocked


@pytest.mark.parametrize(
    ("written", "told", "near"),
    [
        ("agpl-3.0-or-later", "agpl-3.0-or-later", "agpl-3.0"),
        ("GPL-2.0-only", "gpl-2.0-only", "gpl-2.0"),
        ("apache2", "apache-2.0", None),
        ("apache", "apache", "apache-2.0"),
        ("lama3.1", "lama3.1", "llama3.1"),
        ("proprietary", "proprietary", None),
        ("no", "no", None),
        ("busl-1.1", "busl-1.1", None),
    ],
)
def test_licences_the_hub_does_not_know_get_a_proposal(written: str, told: str, near: str | None) -> None:
    """An id outside the Hub's list blocks the Hub and proposes the nearest one, never another licence."""
    facts = card(f"license: {written}")
    assert facts.facts["license"] == told
    if told in hub_rules.LICENSES:
        assert codes(facts)[0] == "card-license-spelled"
        return
    found = facts.findings[0]
    assert found.code == "card-license-unknown-to-hub"
    assert found.data["nearest"] == near
    assert facts.facts["license_hub_known"] is False
    assert facts.hub_blocked


@pytest.mark.parametrize(
    "license_id", ["llama3.1", "gemma", "openrail", "openrail++", "cc-by-nc-sa-4.0", "grok2-community"]
)
def test_licences_of_the_hub_that_are_no_spdx_ids_are_known(license_id: str) -> None:
    """The Hub's own ids pass."""
    facts = card(f"license: {license_id}\nbase_model: {BASE}")
    assert facts.facts["license"] == license_id
    assert codes(facts) == []


@pytest.mark.parametrize(
    ("written", "told"), [("Apache License 2.0", "apache-2.0"), ("MIT", "mit"), ("The MIT License", "mit")]
)
def test_a_licence_written_as_a_name_is_its_id(written: str, told: str) -> None:
    """A name in words is normalised; that needs no person."""
    facts = card(f"license: {written}\nbase_model: {BASE}")
    assert facts.facts["license"] == told
    assert outcome(facts.findings) == "accept"


def test_several_licences_are_all_told() -> None:
    """A list of one is that licence, a list of two is both."""
    assert card("license:\n- bsd-3-clause").facts["license"] == "bsd-3-clause"
    assert card("license: [mit, apache-2.0]").facts["license"] == "mit and apache-2.0"
    assert card("license: []").license is None


@pytest.mark.parametrize(
    ("front", "missing"),
    [
        ("license: other", ["license_name", "license_link"]),
        ("license: other\nlicense_name: acme-1.0", ["license_link"]),
        ("license: other\nlicense_name: acme-1.0\nlicense_link: LICENSE", []),
    ],
)
def test_other_needs_a_name_and_a_link(front: str, missing: list[str]) -> None:
    """`license: other` without saying which blocks the Hub."""
    facts = card(front)
    assert facts.facts["missing_card_fields"] == missing
    assert facts.hub_blocked is bool(missing)


def test_local_paths_are_named_by_field() -> None:
    """A path as base or data set blocks the Hub until evidence or a person replaces it."""
    facts = card("base_model: /data/models/Tiny\ndatasets:\n- /home/lw/train.jsonl\n- acme/notes\nlicense: mit")
    assert facts.facts["local_paths"] == ["/data/models/Tiny", "/home/lw/train.jsonl"]
    found = next(f for f in facts.findings if f.code == "card-local-path")
    assert found.data["fields"] == ["base_model", "datasets"]
    assert facts.hub_blocked


@pytest.mark.parametrize(
    "value", ["./models/x", "../x", "C:\\Users\\lw\\x", "~/x", "file:///x/y", "checkpoints/step-1", "a/b/c"]
)
def test_every_form_of_a_local_base_is_seen(value: str) -> None:
    """Relative, Windows, home and file paths are no ids."""
    assert "card-local-path" in codes(card(f"base_model: '{value}'"))


@pytest.mark.parametrize(
    ("front", "expected"),
    [
        ("base_model: example-org/other-base", "card-base-differs"),
        ("base_model: [a/b, c/d]", "card-base-differs"),
        ("license: mit", "card-base-missing"),
        (f"base_model: {BASE}", None),
        (f"base_model: [x/y, {BASE}]", None),
        ("base_model: Example-Org/Tiny-Base", None),
        ("base_model: tiny-base", None),
    ],
)
def test_card_and_config_are_held_against_each_other(front: str, expected: str | None) -> None:
    """Another base is a warning that names both, none is a note, a list that holds it is fine."""
    facts = card(front)
    assert codes(facts) == ([expected] if expected else [])


def test_a_local_base_in_the_config_is_no_conflict() -> None:
    """A card that names the id behind a local path is evidence, not a contradiction."""
    assert codes(card("base_model: Qwen/Qwen2.5-7B", base="./Qwen2.5-7B")) == []


def test_lists_with_empty_entries_are_named() -> None:
    """Null in a list is a warning that blocks nothing; the field with it is named."""
    facts = card(f"datasets:\n- null\ntags:\n-\nlanguage: [en, ~]\nbase_model: {BASE}")
    assert facts.facts["null_card_fields"] == ["datasets", "tags", "language"]
    assert facts.facts["language"] == ["en"]
    assert outcome(facts.findings) == "warn"
    assert not facts.hub_blocked


def test_keys_the_hub_cannot_store_are_named() -> None:
    """Dots and dollars in keys, at any depth, block the Hub."""
    facts = card("a.b: 1\nnested:\n  $set: 1\nfine: 2\n1.5: x")
    assert facts.facts["bad_card_keys"] == ["a.b", "$set", "1.5"]
    assert facts.hub_blocked


@pytest.mark.parametrize(
    ("front", "refused"),
    [
        ("language: zh-CN", "zh-CN"),
        ("language: English", "English"),
        ("datasets: [librispeech 960h]", "librispeech 960h"),
        ("base_model: Kokoro 82M", "Kokoro 82M"),
        ("base_model: https://huggingface.co/a/b", "https://huggingface.co/a/b"),
        ("base_model_relation: child", "child"),
    ],
)
def test_values_the_hub_refuses_are_named(front: str, refused: str) -> None:
    """A value outside the Hub's grammar blocks the Hub, with field and value."""
    facts = card(front, base=None)
    assert [f.data["value"] for f in facts.findings if f.code == "card-value-refused"] == [refused]
    assert facts.hub_blocked


def test_evaluation_results_without_their_required_fields_are_named() -> None:
    """A model-index lacks what it lacks, by path; a complete one and an empty one pass."""
    result = EvalResult(
        task_type="text-generation",
        dataset_type="acme/notes",
        dataset_name="Notes",
        metric_type="wer",
        metric_value=0.2,
    )
    whole = ModelCardData(model_name="m", eval_results=[result])
    assert codes(card(str(whole), base=None)) == []
    facts = card("model-index:\n- results:\n  - task: {type: x}\n    metrics:\n    - type: wer", base=None)
    assert facts.facts["missing_card_fields"] == [
        "model-index[0].name",
        "model-index[0].results[0].dataset",
        "model-index[0].results[0].metrics[0].value",
    ]
    assert codes(card("model-index:\n- name: m\n  results: []", base=None)) == []


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("## License\n\nThis project is licensed under the MIT License - see the LICENSE file.\n", "mit"),
        ("**License:** Apache License 2.0\n", "apache-2.0"),
        ("## Licence\nCC BY-NC 4.0\n", "cc-by-nc-4.0"),
        ("Weights are released under the [Llama 3.1 Community License](https://x.test).\n", "llama3.1"),
        ("![x](https://img.shields.io/badge/License-Apache%202.0-blue.svg)\n", "apache-2.0"),
        ("许可证: MIT\n", "mit"),
    ],
)
def test_a_licence_in_prose_is_stated_but_not_declared(body: str, told: str) -> None:
    """What only the text says is told with its line, and declares nothing."""
    facts = card_facts.parse(body.encode())
    assert facts.license is None
    assert "license" not in facts.facts
    found = next(f for f in facts.findings if f.code == "card-license-in-text")
    assert found.data["license_in_text"] == told
    assert outcome(facts.findings) == "accept"


@pytest.mark.parametrize(
    "body",
    [
        "- **License:** [More Information Needed]\n",
        "The license plate reader model.\n",
        "Released under pressure of time.\n",
        "# MIT notes\nwe met at MIT\n",
    ],
)
def test_prose_without_a_licence_states_none(body: str) -> None:
    """Empty template fields and words that look like a licence state nothing."""
    assert card_facts.parse(body.encode()).stated == ()


def test_a_home_path_in_the_text_is_a_private_path() -> None:
    """The text of a card is published too; examples are passed over."""
    facts = card_facts.parse(b"trained with /home/lw/src/train.py, see /home/user/x and /path/to/model\n")
    assert [f.data["local_paths"] for f in facts.findings if f.code == "private-path"] == [["/home/lw/src/train.py"]]
