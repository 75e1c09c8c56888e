"""What merging and downloading tools leave beside the weights: which models a folder was made of."""

from pathlib import Path

import pytest

from weighbridge.adapters import parents
from weighbridge.adapters.inspect import inspect
from weighbridge.adapters.plan import Policy
from weighbridge.registry.flow.admit import admit
from weighbridge.registry.types import Facts, LineageEdge, RunFacts
from weighbridge_testlib.builders import llama_model

SLERP = """
slices:
  - sources:
      - model: acme/chat-3b
        layer_range: [0, 32]
      - model: example-org/base-3b@0123abc
        layer_range: [0, 32]   \n\
merge_method: slerp
base_model: acme/chat-3b
parameters:
  t:
    - value: 0.5
dtype: bfloat16
"""
LINEAR = """
models:
  - model: {model: {path: acme/one, revision: main}}
    parameters: {weight: 0.3}
  - model: acme/two+acme/two-lora
  - model: /home/lw/models/three
merge_method: linear
"""
EXPERTS = "base_model: acme/one\ngate_mode: hidden\nexperts:\n- source_model: acme/two\n- source_model: ./mine\n"
METADATA = (
    "url: https://huggingface.co/example-org/Large-8x22B\r\nbranch: gptq-4bit\r\n"
    "download date: 2026-04-15 16:48:15\r\nsha256sum:\r\n    " + "a" * 64 + " model.safetensors\r\n"
)


def facts(folder: Path) -> Facts:
    """Return what would be sealed of a folder."""
    run = RunFacts(project="p", name="r", id="run-1")
    return admit(inspect(folder).artifacts[0], name="x", run=run, policy=Policy()).facts


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("mergekit_config.yml", SLERP, ("slerp", "acme/chat-3b", ("acme/chat-3b", "example-org/base-3b"))),
        ("mergekit_config.yml", LINEAR, ("linear", None, ("acme/one", "acme/two"))),
        ("mergekit_moe_config.yml", EXPERTS, (None, "acme/one", ("acme/one", "acme/two"))),
        ("mergekit_config.yml", "merge_method: [1]\nbase_model: /home/lw/x\n", (None, None, ())),
    ],
    ids=["slices", "models", "experts", "nothing of use"],
)
def test_a_merge_recipe_names_its_parents(tmp_path: Path, name: str, text: str, told: tuple[object, ...]) -> None:
    """Every model of the Hub is named once, wherever it stands and with whatever behind it; paths are passed over."""
    (tmp_path / name).write_text(text)
    assert parents.merge(tmp_path) == (name, *told)


@pytest.mark.parametrize("stored", [b"", b"- a\n- b\n", b"\xff\xfe", b"a: &a [*a]\n", b"x: " + b"y" * (1 << 21), b"{"])
def test_what_is_no_recipe_tells_nothing(tmp_path: Path, stored: bytes) -> None:
    """Empty, damaged, endless or enormous: no fact, and nothing is raised."""
    for name in (*parents.RECIPES, parents.DOWNLOAD):
        (tmp_path / name).write_bytes(stored)
    assert parents.merge(tmp_path) is None
    assert parents.download(tmp_path) is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (METADATA, ("example-org/Large-8x22B", "gptq-4bit", "2026-04-15 16:48:15")),
        ("url: https://huggingface.co/a/b\n", ("a/b", None, None)),
        ("url: https://example.org/a/b\nbranch: main\n", None),
        ("url: https://huggingface.co/a\n", None),
        ("branch: main\n", None),
    ],
)
def test_a_download_names_its_source(tmp_path: Path, text: str, told: tuple[object, ...] | None) -> None:
    """Repository, branch and date as they are written; another host is no repository of the Hub."""
    (tmp_path / parents.DOWNLOAD).write_text(text)
    assert parents.download(tmp_path) == told


def test_the_parents_of_a_merge_are_sealed(tmp_path: Path) -> None:
    """Base, method and every parent stand in the manifest with their evidence; no parent's licence is taken for all."""
    folder = llama_model(tmp_path)
    (folder / "mergekit_config.yml").write_text(SLERP)
    told = facts(folder)
    assert (told.base.id, told.base.relation) == ("acme/chat-3b", "merge")
    assert told.base.evidence == "mergekit_config.yml:base_model"
    assert told.lineage == [
        LineageEdge("merged-from", "acme/chat-3b"),
        LineageEdge("merged-from", "example-org/base-3b"),
    ]
    assert told.provenance is not None
    assert told.provenance.training["merge_method"] == "slerp"
    assert told.license.id is None


def test_the_source_of_a_download_is_sealed(tmp_path: Path) -> None:
    """Where nothing else names a base, the repository it came from does, with branch and date."""
    folder = llama_model(tmp_path / "plain")
    (folder / parents.DOWNLOAD).write_text(METADATA)
    base = facts(folder).base
    assert (base.id, base.revision) == ("example-org/Large-8x22B", "gptq-4bit")
    assert base.evidence == "huggingface-metadata.txt:url, downloaded 2026-04-15 16:48:15"
    (folder / "README.md").write_text("---\nbase_model: acme/other\n---\n")
    assert facts(folder).base.id == "acme/other"
