"""Admission: what is published of a judged artifact, under which rules, with which facts."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from weighbridge.adapters import code_files
from weighbridge.adapters.inspect import inspect
from weighbridge.adapters.inspection import Artifact
from weighbridge.adapters.plan import Allowed, Policy
from weighbridge.adapters.sidecar import Sidecar
from weighbridge.registry import findings
from weighbridge.registry.errors import NotFinishedError, RefusedError
from weighbridge.registry.flow.admission import Admission
from weighbridge.registry.flow.admit import admit
from weighbridge.registry.hashing import tensor_digest
from weighbridge.registry.types import RunFacts
from weighbridge_testlib import builders

RUN = RunFacts(project="medical", name="sft", id="run-1")
COMMIT = "a" * 40


def result(folder: Path) -> Artifact:
    """Return the result that a folder holds."""
    found = inspect(folder)
    return next(a for a in found.artifacts if a.relative == found.artifact_root)


def take(folder: Path, policy: Policy | None = None, **options: Any) -> Admission:
    """Admit the result that a folder holds."""
    return admit(result(folder), name="medical-sft", run=RUN, policy=policy or Policy(), **options)


def codes(admission: Admission) -> dict[str, str]:
    """Return {code: severity}."""
    return {f.code: f.severity for f in admission.findings}


def test_adapter_in_a_checkpoint(tmp_path: Path) -> None:
    """Of a checkpoint the payload goes with its roles, the card's text apart, and every other file is told."""
    builders.trainer_checkpoint(tmp_path / "checkpoint-5", step=5, deepspeed_ranks=2, tokenizer=True)
    done = take(tmp_path)
    assert {f.path: f.role for f in done.files} == {
        "adapter_config.json": "config", "adapter_model.safetensors": "weights", "chat_template.jinja": "tokenizer",
        "special_tokens_map.json": "tokenizer", "tokenizer.json": "tokenizer", "tokenizer_config.json": "tokenizer",
    }  # fmt: skip
    assert all(Path(f.source).stat().st_size == f.size and Path(f.source).is_absolute() for f in done.files)
    assert done.people == builders.card()
    assert {entry.path: entry.reason for entry in done.facts.left_out}[
        "global_step5/mp_rank_00_model_states.pt"
    ] == "resume-only"
    assert done.transform == {}
    facts = done.facts
    assert (facts.kind, facts.provenance.step, facts.provenance.run) == ("adapter", 5, RUN)
    assert facts.adapter is not None
    assert (facts.adapter.rank, facts.adapter.scaling) == (4, 2.0)
    assert (facts.base.id, facts.base.relation) == ("example-org/tiny-base", "adapter")
    assert (facts.license.id, facts.license.source) == ("apache-2.0", "card")
    assert [(e.relation, e.ref) for e in facts.lineage] == [("adapter-of", "example-org/tiny-base")]


def test_tensor_digest_of_an_adapter(tmp_path: Path) -> None:
    """The tensor digest follows the specification, whatever the header's order; full models carry none."""
    tensors = builders.lora_tensors()
    lines = [
        (name, dtype, shape, hashlib.sha256(builders.pack(dtype, shape, data)).hexdigest())
        for name, (dtype, shape, data) in tensors.items()
    ]
    one = take(builders.lora_adapter(tmp_path / "a", tensors=tensors)).facts.weights
    two = take(builders.lora_adapter(tmp_path / "b", tensors=dict(reversed(tensors.items())))).facts.weights
    assert one.tensor_digest == two.tensor_digest == tensor_digest(lines)
    model = take(builders.llama_model(tmp_path / "m", readme=builders.card(None))).facts
    assert (model.kind, model.weights.tensor_digest, model.weights.architecture) == ("model", None, "LlamaForCausalLM")


def test_refused_and_unfinished(tmp_path: Path) -> None:
    """What is refused or unfinished is not admitted, and the error carries the findings."""
    folder = builders.lora_adapter(tmp_path / "a", rank=8, tensors=builders.lora_tensors(rank=4))
    with pytest.raises(RefusedError) as refused:
        take(folder)
    assert [f.code for f in refused.value.data["findings"]] == ["rank-mismatch"]
    builders.trainer_checkpoint(tmp_path / "checkpoint-3", step=3, ended=False)
    with pytest.raises(NotFinishedError):
        take(tmp_path / "checkpoint-3")
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(28))
    with pytest.raises(RefusedError):
        admit(inspect(tmp_path / "x.gguf").artifacts[0], name="x", run=RUN, policy=Policy())


@pytest.mark.parametrize("name", ["mod\u202eel.safetensors", "a\\b.safetensors", os.fsdecode(b"m\xff.safetensors")])
def test_a_name_that_nothing_can_hold_is_told_once(tmp_path: Path, name: str) -> None:
    """What the inspection found is not found again: one file, one finding."""
    model = builders.llama_model(tmp_path / "model")
    (model / "model.safetensors").rename(model / name)
    with pytest.raises(RefusedError) as caught:
        take(model)
    assert [f.code for f in caught.value.data["findings"]].count("file-name-unsafe") == 1


def test_a_missing_licence_is_about_the_card_where_there_is_one(tmp_path: Path) -> None:
    """Nobody is sent to a README.md that is not there: the subject is the card, else the folder itself."""
    for name, card, subject in (("bare", None, "."), ("carded", "# nothing stated\n", "README.md")):
        told = take(builders.lora_adapter(tmp_path / name, readme=card)).facts.findings
        assert [f.subject for f in told if f.code == "license-unknown"] == [subject]
    seen = inspect(tmp_path).artifacts
    assert {f.subject for one in seen for f in one.findings if f.code == "license-unknown"} == {
        "bare",
        "carded/README.md",
    }


@pytest.mark.parametrize("level", ["note", "warn", "block"])
def test_unknown_licence_by_policy(tmp_path: Path, level: Any) -> None:
    """An unknown licence is what the remotes' policy says: a note, a warning, or a block that can be allowed."""
    folder = builders.lora_adapter(tmp_path, readme=None)
    policy = Policy(unknown_license=level)
    if level != "block":
        assert codes(take(folder, policy))["license-unknown"] == level
        return
    with pytest.raises(RefusedError):
        take(folder, policy)
    done = take(folder, Policy(unknown_license="block", allowed=(Allowed(code="license-unknown", reason="ours"),)))
    told = next(f for f in done.facts.findings if f.code == "license-unknown")
    assert (told.severity, told.data["allowed"]) == ("warn", "ours")


@pytest.mark.parametrize(
    ("front", "blocked"),
    [
        ("license: other", True),
        ("license: other\nlicense_name: our-own", False),
        ("license: other\nlicense_link: https://example.org/terms", False),
        ("license: a-licence-of-next-year", False),
    ],
)
def test_other_that_nothing_names_is_an_unknown_licence(tmp_path: Path, front: str, *, blocked: bool) -> None:
    """Where unknown licences are not published, `other` needs a name or a link; an id that nobody knows has one."""
    folder = builders.lora_adapter(tmp_path, readme=f"---\n{front}\n---\n# x\n")
    take(folder, Policy(unknown_license="warn"))
    if not blocked:
        assert take(folder, Policy(unknown_license="block")).facts.license.id
        return
    with pytest.raises(RefusedError) as caught:
        take(folder, Policy(unknown_license="block"))
    assert [f.code for f in caught.value.data["findings"]] == ["card-license-unnamed"]


def test_denied_licence(tmp_path: Path) -> None:
    """A licence that a remote denies blocks, also as part of an expression."""
    folder = builders.lora_adapter(tmp_path, readme=builders.card(license_id="cc-by-nc-4.0"))
    assert take(folder, Policy(deny_licenses=("agpl-3.0",))).facts.license.id == "cc-by-nc-4.0"
    with pytest.raises(RefusedError) as refused:
        take(folder, Policy(deny_licenses=("cc-by-nc-4.0",)))
    assert "license-denied" in {f.code for f in refused.value.data["findings"]}


def test_what_cannot_be_allowed(tmp_path: Path) -> None:
    """Integrity findings and secrets stay blocks, whoever allows them."""
    folder = builders.lora_adapter(tmp_path / "a")
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(RefusedError):
        take(folder, Policy(allowed=(Allowed(code="file-short", reason="please"),)))
    secret = builders.lora_adapter(tmp_path / "b", note="hf_" + "aB3dE6gH9k" * 3 + "LmNp")
    with pytest.raises(RefusedError):
        take(secret, Policy(allowed=(Allowed(code="secret-in-file", reason="please"),)))
    assert findings.CODES["file-short"].integrity


def test_allowed_finding_is_kept(tmp_path: Path) -> None:
    """A block that a person allowed is published with the finding and the reason."""
    tensors = builders.lora_tensors(targets=("q_proj", "v_proj", "k_proj"))
    folder = builders.lora_adapter(tmp_path, tensors=tensors)
    with pytest.raises(RefusedError):
        take(folder)
    done = take(folder, Policy(allowed=(Allowed(code="target-stray", reason="checked by hand"),)))
    told = next(f for f in done.facts.findings if f.code == "target-stray")
    assert (told.severity, told.data["allowed"]) == ("warn", "checked by hand")


@pytest.mark.parametrize("base", ["/data/models--org--base/snapshots/" + COMMIT, "/home/lw/models/base"])
def test_private_paths_by_policy(tmp_path: Path, base: str) -> None:
    """A private path is kept with a note, rewritten where something on disk says what it stands for, or blocks."""
    folder = builders.lora_adapter(tmp_path, base=base, readme=builders.card(None))
    kept = take(folder, Policy(paths="keep"))
    assert kept.transform == {}
    assert codes(kept)["private-path"] == "note"
    with pytest.raises(RefusedError):
        take(folder, Policy(paths="block"))
    if "snapshots" not in base:
        assert kept.facts.base.id is None
        with pytest.raises(RefusedError):
            take(folder, Policy(paths="rewrite"))
        return
    done = take(folder, Policy(paths="rewrite"))
    config = json.loads(done.transform["adapter_config.json"])
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/base", COMMIT)
    assert (done.facts.base.id, done.facts.base.revision) == ("org/base", COMMIT)
    assert codes(done)["private-path-rewritten"] == "note"
    assert base not in repr(done.facts)
    assert "base_model_name_or_path" in (folder / "adapter_config.json").read_text()
    assert base in (folder / "adapter_config.json").read_text()


def test_sidecar_names_the_base(tmp_path: Path) -> None:
    """The base that a person wrote down wins and is evidence for a rewrite."""
    folder = builders.lora_adapter(tmp_path, base="/home/lw/base", readme=builders.card(None))
    done = take(folder, Policy(paths="rewrite"), sidecar=Sidecar(present=True, base="org/real", base_revision=COMMIT))
    assert (done.facts.base.id, done.facts.base.revision) == ("org/real", COMMIT)
    assert json.loads(done.transform["adapter_config.json"])["base_model_name_or_path"] == "org/real"


def test_licence_of_the_run(tmp_path: Path) -> None:
    """A checkpoint without papers of its own takes the licence that the run's root or its sidecar states."""
    builders.run_root(tmp_path / "run", steps=(5,))
    checkpoint = tmp_path / "run" / "checkpoint-5"
    (checkpoint / "README.md").unlink()
    done = take(checkpoint, run_root=tmp_path / "run")
    assert done.facts.license.id == "apache-2.0"
    done = take(checkpoint, run_root=tmp_path / "run", sidecar=Sidecar(present=True, license="mit"))
    assert (done.facts.license.id, done.facts.license.source) == ("mit", "sidecar")


def test_remote_code(tmp_path: Path) -> None:
    """A model that needs code blocks unless allowed, and is never published without all of it."""
    folder = builders.llama_model(
        tmp_path, auto_map={"AutoConfig": "configuration_x.XConfig", "AutoModel": "modeling_x.XModel"}
    )
    (folder / "configuration_x.py").write_text("class XConfig: ...\n")
    (folder / "modeling_x.py").write_text("from .helpers_x import f\nfrom .configuration_x import XConfig\n")
    (folder / "unrelated.py").write_text("x = 1\n")
    with pytest.raises(RefusedError):
        take(folder)
    allow = Policy(remote_code="allow")
    with pytest.raises(RefusedError) as refused:
        take(folder, allow)
    assert [f.code for f in refused.value.data["findings"]] == ["code-missing"]
    (folder / "helpers_x.py").write_text("def f(): ...\n")
    done = take(folder, allow)
    assert sorted(f.path for f in done.files if f.role == "code") == [
        "configuration_x.py",
        "helpers_x.py",
        "modeling_x.py",
    ]
    assert "unrelated.py" in {entry.path for entry in done.facts.left_out}
    assert codes(done)["remote-code"] == "warn"


@pytest.mark.parametrize(
    ("auto_map", "wanted"),
    [
        ({"AutoModel": "m.M"}, {"m.py"}),
        ({"AutoTokenizer": ["t.T", None]}, {"t.py"}),
        ({"AutoModel": "org/other--m.M"}, {"org/other--m.py"}),
        ({}, set()),
        ("x", set()),
        (None, set()),
        ([1, {"a": 2}], set()),
    ],
)
def test_files_that_an_auto_map_needs(tmp_path: Path, auto_map: Any, wanted: set[str]) -> None:
    """Every module of an auto_map is needed; code in another repository can never be here."""
    config = builders.write_json(tmp_path / "config.json", {"auto_map": auto_map})
    assert code_files.needed(config) == wanted


def test_snapshot_of_a_hub_cache(tmp_path: Path) -> None:
    """The sources of a snapshot are the blobs themselves, once each."""
    source = builders.llama_model(tmp_path / "source", readme=builders.card(None))
    cache = tmp_path / "models--org--m"
    snapshot = cache / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for number, file in enumerate(sorted(source.iterdir())):
        file.rename(cache / "blobs" / f"{number:064x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:064x}")
    done = take(cache)
    assert all("/blobs/" in f.source for f in done.files)
    assert {f.path for f in done.files} >= {"config.json", "model.safetensors"}


def test_findings_of_the_caller_and_of_the_sidecar(tmp_path: Path) -> None:
    """Findings that come from outside are judged and kept like the others."""
    late = findings.finding("runs-mixed", ".", "said by the caller")
    done = take(builders.lora_adapter(tmp_path), extra=[late])
    assert late in done.facts.findings
