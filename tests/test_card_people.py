"""What people wrote into a card: it survives every rendering, and what a trainer's template wrote does not."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weighbridge.registry import card, hub_rules, own_words, types
from weighbridge.registry.frontmatter import split
from weighbridge.registry.own_words import split_people
from weighbridge_testlib.cards import BASE, front, manifest

PERSON = """---
license: mit
base_model: example-org/tiny-base
language: no
datasets:
- null
- acme/notes
- /home/lw/train.jsonl
my_field: keep me
nested: {a: [1, "no"]}
widget:
- text: "hello: there"
---

# Title

A person wrote this paragraph.

---

<b>and this</b>
"""


def test_a_persons_words_and_fields_survive() -> None:
    """Text and unknown fields stay as they are; what the manifest knows wins; empty and local entries are dropped."""
    text = card.render(manifest(), "medical-sft", 7, people=PERSON)
    told = front(text)
    assert told["my_field"] == "keep me"
    assert told["nested"] == {"a": [1, "no"]}
    assert told["widget"] == [{"text": "hello: there"}]
    assert told["language"] == "no"
    assert told["datasets"] == ["acme/notes"]
    assert told["license"] == "apache-2.0"
    assert "# Title\n\nA person wrote this paragraph.\n\n---\n\n<b>and this</b>\n" in text.decode()
    assert text.decode().index("A person wrote") < text.decode().index(own_words.BEGIN)


def test_rendering_again_changes_nothing() -> None:
    """A card made of what people wrote into the last card is the same card, for as long as the manifest is."""
    for people in (None, PERSON, "# only text\n", "---\nmy: 1\n---\n", "above\n\n<!-- weighbridge -->\n\nbelow\n"):
        first = card.render(manifest(), "medical-sft", 7, people=people)
        assert card.render(manifest(), "medical-sft", 7, people=card.split_people(first)) == first
        assert card.render(manifest(), "medical-sft", 7, people=first.decode()) == first


def test_the_next_version_keeps_people_and_renews_the_rest() -> None:
    """Fields that came from the last manifest do not stick: another base and no licence are what the next card says."""
    last = card.render(manifest(), "medical-sft", 7, people=PERSON)
    later = manifest(base=types.BaseFacts(id="acme/new-base", relation="adapter"), license=types.LicenseFacts())
    text = card.render(later, "medical-sft", 8, people=card.split_people(last))
    told = front(text)
    assert told["base_model"] == "acme/new-base"
    assert "license" not in told
    assert told["my_field"] == "keep me"
    assert text.count(b"A person wrote this paragraph.") == 1
    assert text.count(own_words.BEGIN.encode()) == 1
    assert b"v7" not in text


def test_text_on_both_sides_of_our_part_stays_there() -> None:
    """Somebody who wrote above and below our part finds both where they were."""
    first = card.render(manifest(), "x", 1, people="above\n").decode()
    edited = first + "\nbelow\n"
    text = card.render(manifest(), "x", 2, people=card.split_people(edited)).decode()
    assert text.index("above") < text.index(own_words.BEGIN) < text.index(own_words.END) < text.index("below")


def test_several_bases_of_a_person_are_kept_when_they_hold_ours() -> None:
    """A merge's list of parents stays whole with its relation; a list without our base is replaced."""
    people = f"---\nbase_model: [{BASE}, acme/b]\nbase_model_relation: merge\n---\n"
    told = front(card.render(manifest(), "x", 1, people=people))
    assert (told["base_model"], told["base_model_relation"]) == ([BASE, "acme/b"], "merge")
    other = front(card.render(manifest(), "x", 1, people="---\nbase_model: [acme/a, acme/b]\n---\n"))
    assert (other["base_model"], other["base_model_relation"]) == (BASE, "adapter")


def test_broken_front_matter_is_kept_as_text() -> None:
    """YAML that cannot be read is not lost: it stands in the text until somebody mends it."""
    text = card.render(manifest(), "x", 1, people="---\nlicense: mit\n tags: [a\n---\n# mine\n")
    assert front(text)["license"] == "apache-2.0"
    assert "```yaml front-matter\nlicense: mit\n tags: [a\n```\n\n# mine\n" in text.decode()


PEFT_CARD = """# Model Card for Model ID

<!-- Provide a quick summary of what the model is/does. -->

- **Developed by:** [More Information Needed]
- **License:** [More Information Needed]
- **Hardware Type:** [More Information Needed]

Carbon emissions can be estimated using the [calculator](https://x.test) presented in [a paper](https://y.test).

### Framework versions

- PEFT 0.15.2
"""
TRAINER_CARD = """<!-- This model card has been generated automatically according to the information the Trainer had
access to. You should probably proofread and complete it, then remove this comment. -->

# run

This model is a fine-tuned version of [x](https://huggingface.co/x) on the y dataset.
It achieves the following results on the evaluation set:
- Loss: 0.5100
- Wer: 24.8782

## Model description

More information needed

### Training results

| Training Loss | Epoch |
|:---:|:---:|
| 0.1 | 1.0 |
"""
TRL_CARD = """# Model Card for x

This model is a fine-tuned version of [b](https://huggingface.co/b).
It has been trained using [TRL](https://github.com/huggingface/trl).

## Quick start

```python
from transformers import pipeline
```

## Training procedure

This model was trained with SFT.

### Framework versions

- TRL: 0.12.0

## Citations

Cite TRL as:

```bibtex
@misc{x}
```
"""


@pytest.mark.parametrize("body", [PEFT_CARD, TRAINER_CARD, TRL_CARD])
def test_a_trainers_template_is_nobodys_words(body: str) -> None:
    """Cards of PEFT, the Trainer and TRL give their fields, not their text; one sentence of a person keeps it all."""
    people = f"---\ntags:\n- generated_from_trainer\n---\n\n{body}"
    text = card.render(manifest(), "x", 1, people=people)
    assert front(text)["tags"] == ["generated_from_trainer", "lora"]
    assert split(text.decode()).body.lstrip().startswith(own_words.BEGIN)
    edited = f"{body}\n## Notes\n\nI trained this for the clinic.\n"
    assert "for the clinic" in card.render(manifest(), "x", 1, people=edited).decode()


PIECES = [
    "---",
    "license: mit",
    "base_model: a/b",
    "tags: [lora, x]",
    "tags:\n- lora\n- null",
    "language: no",
    "mine: {a: 1}",
    "pipeline_tag: [a, b]",
    "library_name: {a: 1}",
    "new_version: /home/lw/next",
    "base_model_relation: [adapter]",
    "license_name: My Own",
    "metrics:\n- {a: 1}",
    "tags:\n- {a: 1}",
    " bad: [",
    "",
    "# Title",
    "words",
    "```",
    own_words.BEGIN,
    own_words.END,
    own_words.PLACE,
    "<!-- weighbridge:fields license, tags=lora -->",
    "More information needed [More Information Needed]",
    "\ufeff",
    "a\r\nb\rc",
    "| a | b |",
]


TOOL = "<!-- This model card has been generated automatically -->\n"


@pytest.mark.parametrize(
    "text",
    [
        f"{own_words.BEGIN}\n" * 20_000,
        "<!-- weighbridge:x\n" * 20_000,
        TOOL + "!" * 500_000 + "a",
        TOOL + "- a: " + "-" * 500_000 + "x",
        TOOL + "unsloth made with " * 20_000,
        TOOL + "wandb-ai " * 50_000,
        TOOL + "<!-- x" * 100_000,
        TOOL + "~~~~x\n" * 50_000,
        TOOL + "".join(f"{'`' * k}x\n" for k in range(900, 3, -1)),
        "\n" * 500_000 + "a",
    ],
    ids=range(10),
)
def test_pages_of_one_thing_are_read_like_any_other(text: str) -> None:
    """What repeats itself for half a megabyte is a person's and kept, in time that grows with its length."""
    assert own_words.is_own(text)
    assert split_people(text) == text
    above, below = own_words.text_of(split(text))
    assert (above, below) == (own_words._STRAY.sub("", text).strip("\n"), "")


@pytest.mark.parametrize(
    ("fences", "own"),
    [("```\n{}\n```", False), ("```\n{}\n````", False), ("````\n{}\n```", True), ("~~~ x\n{}\n~~~ ", False),
     ("~~~\n{}\n```", True), ("```\n{}", True), ("<!--\n{}\n-->", False), ("<!--\n{}", True)],
)  # fmt: skip
def test_what_a_tool_quotes_is_no_word_of_a_person(fences: str, own: bool) -> None:
    """Code and comments in a tool's card are the tool's; what nobody ends is text."""
    assert own_words.is_own(TOOL + fences.format("some code") + "\n") is own


@settings(deadline=None, max_examples=200)
@given(st.text(max_size=300) | st.lists(st.sampled_from(PIECES), max_size=14).map("\n".join))
def test_no_text_of_a_person_breaks_the_card(people: str) -> None:
    """Any README gives a card with one fenced part, valid front matter, and the same card again."""
    out = card.render(manifest(), "x", 1, people=people)
    assert front(out)["base_model"]
    assert hub_rules.faults(front(out)) == []
    again = card.render(manifest(), "x", 1, people=card.split_people(out))
    assert again == out
