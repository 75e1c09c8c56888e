"""The card of a version: valid for the Hub, true to the manifest, and never at the cost of what people wrote."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from huggingface_hub import ModelCard
from hypothesis import given, settings
from hypothesis import strategies as st

import weighbridge_testlib.builders as build
from weighbridge.adapters import card_facts
from weighbridge.registry import card, hub_rules, own_words, types
from weighbridge.registry.errors import UsageError
from weighbridge.registry.frontmatter import split
from weighbridge_testlib.cards import BASE, REVISION, entry, front, manifest


def test_the_hub_takes_the_card_as_it_is() -> None:
    """The Hub's own client reads the front matter, and our rules find nothing to refuse."""
    text = card.render(manifest(), "medical-sft", 7)
    assert yaml.safe_load(str(ModelCard(text.decode()).data)) == {
        "license": "apache-2.0",
        "base_model": BASE,
        "base_model_relation": "adapter",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["lora"],
    }
    facts = card_facts.parse(text, config_base=BASE)
    assert facts.findings == []
    assert not facts.hub_blocked


def test_the_card_tells_the_manifest() -> None:
    """Name, base, evidence, numbers, losses, files with their hashes and the digest of the manifest are there."""
    sealed = manifest()
    text = card.render(sealed, "medical-sft", 7).decode()
    for word in (
        "# medical-sft v7",
        f"`{BASE}`; revision {REVISION}",
        "apache-2.0; README.md declares it",
        "registry pull medical-sft@v7 ./medical-sft-v7",
        "rank 4, alpha 8, scaling 2.0",
        "| learning\\_rate | 0.0002 |",
        "| 280 | 1 |  | 0.9 |",
        sealed.files[1].sha256,
        f"sha256:{sealed.digest}",
        "Packages: peft 0.17.1",
        "Code: unknown",
        "Data: unknown",
    ):
        assert word in text


def test_unknown_facts_are_unknown_and_no_field_is_invented() -> None:
    """Without licence, base, task and history the card says unknown and its front matter leaves the fields out."""
    told = types.Provenance(run=types.RunFacts(project="p", name="r", id="1"))
    sealed = manifest(
        base=types.BaseFacts(),
        license=types.LicenseFacts(),
        adapter=types.AdapterFacts(peft_type="LORA"),
        provenance=told,
    )
    text = card.render(sealed, "x", 1)
    assert front(text) == {"library_name": "peft", "tags": ["lora"]}
    for row in (
        "| base | unknown |",
        "| licence | unknown |",
        "| step | unknown |",
        "| best | unknown |",
        "Hyper-parameters: unknown.",
    ):
        assert row in text.decode()


@pytest.mark.parametrize(
    ("held", "fields"),
    [
        (types.LicenseFacts(id="llama3.1"), {"license": "llama3.1"}),
        (
            types.LicenseFacts(id="other", name="Qwen Research", link="LICENSE"),
            {"license": "other", "license_name": "qwen-research", "license_link": "LICENSE"},
        ),
        (types.LicenseFacts(id="agpl-3.0-or-later"), {"license": "other", "license_name": "agpl-3.0-or-later"}),
        (types.LicenseFacts(id="apache-2.0 or mit"), {"license": ["apache-2.0", "mit"]}),
        (types.LicenseFacts(id="unknown"), {}),
        (types.LicenseFacts(), {}),
    ],
)
def test_licences_are_written_as_the_hub_takes_them(held: types.LicenseFacts, fields: dict[str, Any]) -> None:
    """A known id, a list, or `other` with its name; nothing where nothing is known."""
    told = front(card.render(manifest(license=held), "x", 1))
    assert {k: v for k, v in told.items() if k.startswith("license")} == fields


def test_a_license_file_is_the_link_of_other() -> None:
    """`other` points at the licence text in the bundle."""
    files = [entry("adapter_config.json", "config"), entry("LICENSE", "license"), entry("a.safetensors", "weights")]
    told = front(card.render(manifest(files=files, license=types.LicenseFacts(id="other", name="acme")), "x", 1))
    assert told["license_link"] == "LICENSE"


def test_a_note_on_the_licence_replaces_the_manifests() -> None:
    """What somebody recorded later is printed, with its evidence."""
    note = types.LicenseFacts(id="cc-by-nc-4.0", source="note", evidence="legal, 2026-11-29")
    text = card.render(manifest(), "x", 1, license=note)
    assert front(text)["license"] == "cc-by-nc-4.0"
    assert "legal, 2026-11-29" in text.decode()


def test_a_local_base_is_no_base_model() -> None:
    """A path stands in the text where the policy let it into the manifest, never in the front matter."""
    text = card.render(manifest(base=types.BaseFacts(id="/data/models/Tiny")), "x", 1)
    assert "base_model" not in front(text)
    assert "`/data/models/Tiny`" in text.decode()


HOSTILE = st.text(max_size=60) | st.sampled_from(
    [
        "<!-- weighbridge:end -->",
        "a\n<!-- weighbridge:end -->\nb",
        "<script>alert(1)</script>",
        "| x | y |\n|---|---|",
        "```\n# out",
        "\x1b[31mred\u202e",
        "x: y\n---\nlicense: mit",
        "[a](javascript:b)",
        "`a` | `b`",
        "{{ 7 * 7 }}",
        "&#60;b&#62;",
    ]
)


@settings(deadline=None, max_examples=150)
@given(text=HOSTILE, key=HOSTILE)
def test_no_value_of_a_manifest_is_markup(text: str, key: str) -> None:
    """Whatever stands in names, messages and values, the card's structure and front matter stay the same."""
    told = types.Provenance(
        run=types.RunFacts(project=text, name=text, id="1"),
        owner=text,
        purpose=text,
        training={key: text},
        metrics={"eval_a": text},
        code={"remote": text, "commit": text},
        data=[{"id": text}],
        packages={"peft": text},
        log_history=[{"loss": text, "step": 1}],
    )
    sealed = manifest(
        provenance=told,
        base=types.BaseFacts(id=text, revision=text, evidence=text),
        license=types.LicenseFacts(id=text, name=text, evidence=text),
        findings=[types.Finding(code="values-nan", severity="warn", subject=text, message=text)],
        left_out=[types.LeftOut(path=text, size=1, reason=text)],
        adapter=types.AdapterFacts(peft_type=text, targets=text, task_type="CAUSAL_LM", variants=[text]),
    )
    out = card.render(sealed, "x", 1)
    body = split(out.decode()).body
    assert [body.splitlines().count(mark) for mark in (own_words.BEGIN, own_words.END)] == [1, 1]
    assert [line for line in body.splitlines() if line.startswith("#")] == [
        "# x v1",
        "## Use",
        "## Training",
        "## Files",
        "## Checks",
    ]
    fences = [line for line in body.splitlines() if line.startswith("```")]
    assert len(fences) in {2, 4}
    assert "<script" not in body
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e]", body)
    assert card_facts.parse(out).facts["yaml_valid"] is True
    front(out)
    assert card.render(sealed, "x", 1, people=card.split_people(out)) == out


def test_names_go_through_the_one_validator() -> None:
    """A name that is none makes no card."""
    with pytest.raises(UsageError):
        card.render(manifest(), "../x", 1)


def test_training_json_is_canonical_and_without_names() -> None:
    """Hyper-parameters, history and the best metric; no run, no host, no owner."""
    raw = card.training(manifest())
    told = json.loads(raw)
    assert told["schema"] == "weighbridge/training/1"
    assert told["training"] == {"learning_rate": 0.0002, "lora_rank": 4}
    assert len(told["log_history"]) == 2
    assert "medical" not in raw.decode()
    assert raw == json.dumps(told, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def test_a_long_history_becomes_a_short_table() -> None:
    """Evaluations stay in the table before losses; training.json has them all."""
    log = [{"loss": 1.0, "step": i} for i in range(200)] + [{"eval_loss": 0.5, "step": i} for i in range(0, 200, 20)]
    told = types.Provenance(run=types.RunFacts(project="p", name="r", id="1"), log_history=log)
    text = card.render(manifest(provenance=told), "x", 1).decode()
    rows = re.findall(r"^\| (\d+) \| 1 \|", text, re.MULTILINE)
    assert 10 < len(rows) <= 24
    assert {str(i) for i in range(0, 200, 20)} <= set(rows)


MODEL_FILES = [
    entry("config.json", "config"),
    entry("model.safetensors", "weights"),
    entry("tokenizer.json", "tokenizer"),
]


@pytest.mark.parametrize(
    ("architecture", "loader", "pipeline"),
    [
        ("LlamaForCausalLM", "AutoModelForCausalLM.from_pretrained('./m-v3')", "text-generation"),
        (
            "BertForTokenClassification",
            "AutoModelForTokenClassification.from_pretrained('./m-v3')",
            "token-classification",
        ),
        (
            "WhisperForConditionalGeneration",
            "AutoModelForSpeechSeq2Seq.from_pretrained('./m-v3')",
            "automatic-speech-recognition",
        ),
        ("T5ForConditionalGeneration", "load_file('./m-v3/model.safetensors')", None),
        (None, "load_file('./m-v3/model.safetensors')", None),
    ],
)
def test_the_code_uses_only_classes_that_are_known(architecture: str | None, loader: str, pipeline: str | None) -> None:
    """A model loads by the class its architecture names, else as plain tensors; the code compiles."""
    weights = msgspec.structs.replace(manifest().facts.weights, architecture=architecture)
    sealed = manifest(files=MODEL_FILES, kind="model", adapter=None, weights=weights, base=types.BaseFacts())
    text = card.render(sealed, "m", 3)
    block = re.search(r"```python\n(.*?)\n```", text.decode(), re.DOTALL)
    assert block is not None
    compile(block[1], "card", "exec")
    assert loader in block[1]
    assert front(text).get("pipeline_tag") == pipeline
    assert front(text)["library_name"] == "transformers"


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_the_code_of_an_adapter_card_loads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The printed lines, run as they are, load base and adapter with transformers and PEFT, offline."""
    pytest.importorskip("peft")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    base = build.llama_model(tmp_path / "base", dtype="F32", tokenizer=False)
    build.lora_adapter(tmp_path / "tiny-v1", base=str(base))
    files = [entry("adapter_config.json", "config"), entry("adapter_model.safetensors", "weights")]
    text = card.render(manifest(files=files, base=types.BaseFacts(id="./base")), "tiny", 1).decode()
    block = re.search(r"```python\n(.*?)\n```", text, re.DOTALL)
    assert block is not None
    names: dict[str, Any] = {}
    exec(compile(block[1], "card", "exec"), names)
    assert type(names["model"]).__name__ == "PeftModelForCausalLM"
    assert names["model"].peft_config["default"].r == 4


def test_every_license_of_the_hub_is_written_as_it_is() -> None:
    """No id of the Hub's list turns into something else on its way through a card."""
    for license_id in sorted(hub_rules.LICENSES - hub_rules.UNNAMED):
        text = card.render(manifest(license=types.LicenseFacts(id=license_id)), "x", 1)
        assert front(text)["license"] == license_id
        assert card_facts.parse(text, config_base=BASE).facts["license"] == license_id


def test_the_reason_of_an_allowed_finding_stands_on_the_card() -> None:
    """Who reads the card learns that a block was allowed, and why."""
    found = types.Finding(
        code="license-unknown",
        severity="warn",
        subject="README.md",
        message="no licence",
        data={"allowed": "legal agreed"},
    )
    assert (
        "| warn | `license-unknown` | no licence (allowed: legal agreed) |"
        in card.render(manifest(findings=[found]), "sft", 1).decode()
    )
