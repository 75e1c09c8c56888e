"""`registry merge`: the answer before, the folder and the version after, and exit codes between."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from weighbridge.registry.manifest import parse
from weighbridge_testlib import builders, merging
from weighbridge_testlib.desk import Desk, conforms


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """Return a desk with an adapter, whose licence is looser than its base's, and the base, as folders."""
    desk = Desk(tmp_path, monkeypatch)
    builders.lora_adapter(tmp_path / "adapter", readme=builders.card(license_id="mit"))
    builders.llama_model(tmp_path / "base", readme=builders.card(None, "cc-by-nc-4.0"))
    return desk


def dry(desk: Desk, *more: str) -> Any:
    """Return the answer of a dry run."""
    return conforms(desk.registry("merge", "adapter", "--base", "base", "--dry-run", "--json", *more).json, "merge")


def test_a_dry_run_answers_and_writes_nothing(desk: Desk) -> None:
    """--dry-run prints outcome, facts, findings and the files there would be, and leaves no file."""
    before = sorted(desk.folder.rglob("*"))
    told = dry(desk)
    assert (told["outcome"], told["artifact"], told["dry_run"]) == ("warn", "base+adapter", True)
    assert told["facts"]["mergeable"] is True
    assert {file["path"] for file in told["files"]} >= {"model.safetensors", "config.json", "tokenizer.json"}
    assert [one["code"] for one in told["findings"]] == ["license-looser-than-base"]
    after = [path for path in sorted(desk.folder.rglob("*")) if desk.cache not in {path, *path.parents}]
    assert after == [path for path in before if desk.cache not in {path, *path.parents}]


def test_exit_codes_are_those_of_inspect(desk: Desk) -> None:
    """0 for what can be merged, 5 for what is refused, 8 for what is not finished, 2 and 3 for a wrong command."""
    words = ("merge", "adapter", "--base", "base", "--dry-run")
    assert desk.registry(*words).code == 0
    (desk.folder / "base" / "model.safetensors.tmp").write_bytes(b"x")
    raw = (desk.folder / "base" / "model.safetensors").read_bytes()
    (desk.folder / "base" / "model.safetensors").write_bytes(raw[:-8])
    assert desk.registry(*words).code == 8
    (desk.folder / "base" / "model.safetensors.tmp").unlink()
    assert desk.registry(*words).code == 5
    assert desk.registry("merge", "adapter", "--base", "base", "--to", "out").code == 5
    assert desk.registry("merge", "adapter", "--base", "base").code == 2
    assert desk.registry("merge", "./nothing", "--base", "base", "--dry-run").code == 3
    assert desk.registry("merge", "adapter", "--base", "./nothing", "--dry-run").code == 3
    assert desk.registry("merge", "adapter", "--base", "base", "--dtype", "int8", "--dry-run").code == 2


def test_a_dry_run_is_readable_on_a_screen(desk: Desk) -> None:
    """Without --json the verdict, the figures and every finding with its cure are lines of text."""
    said = desk.ok("merge", "adapter", "--base", "base", "--dry-run").out
    assert said.startswith("warn: LORA adapter into LlamaForCausalLM\n")
    assert "4 of 21 tensors change" in said
    assert "nothing in the adapter tells whether this base is the one it was trained on" in said
    assert "license-looser-than-base" in said


def test_a_merge_gives_a_folder_and_its_proof(desk: Desk) -> None:
    """--to makes a folder whose files are listed with size and digest, with what was proven."""
    said = desk.ok("merge", "adapter", "--base", "base", "--to", "out", "--dtype", "fp32", "--json")
    told = conforms(said.json, "merge")
    assert (told["path"], told["ref"], told["joined"]) == (str(desk.folder / "out"), None, False)
    proof = told["facts"]["proof"]
    assert (proof["passed"], proof["tensors_changed"], proof["tensors_cast"]) == (True, 4, 17)
    assert told["facts"]["written_dtype"] == "F32"
    listed = {file["path"] for file in told["files"]}
    assert {path.name for path in (desk.folder / "out").iterdir()} == listed | {"merge.json"}
    seen = conforms(desk.ok("inspect", "out", "--json").json, "inspect")
    assert (seen["outcome"], seen["facts"]["config_dtype"]) == ("accept", "float32")
    again = conforms(
        desk.ok("merge", "adapter", "--base", "base", "--to", "out", "--dtype", "fp32", "--json").json, "merge"
    )
    assert again["joined"] is True


def test_the_sum_is_right(desk: Desk) -> None:
    """The merged layer is W + s·(B·A), and all others are the base's."""
    desk.ok("merge", "adapter", "--base", "base", "--to", "out", "--dtype", "fp32")
    base, ours = merging.numbers(desk.folder / "base"), merging.numbers(desk.folder / "out")
    factors = merging.numbers(desk.folder / "adapter")
    for name, values in base.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        adapted = f"{stem}.lora_A.weight" in factors
        added = 2.0 * factors[f"{stem}.lora_B.weight"] @ factors[f"{stem}.lora_A.weight"] if adapted else 0.0
        assert abs(ours[name] - (values + added)).max() < 1e-6


def test_the_record_names_no_place_of_this_machine(desk: Desk) -> None:
    """merge.json holds formula, digests, facts and findings, and no path."""
    desk.ok("merge", "adapter", "--base", "base", "--to", "out")
    text = (desk.folder / "out" / "merge.json").read_text()
    assert str(desk.folder) not in text
    record = json.loads(text)
    assert record["formula"].startswith("round(W + (B @ A) * s)")
    assert record["facts"]["proof"]["bound_violations"] == 0


def test_two_adapters_are_summed_before_the_one_rounding(desk: Desk) -> None:
    """--and adds another adapter: the result is the rounded sum of both, not a rounding of a rounding."""
    builders.lora_adapter(desk.folder / "second", seed=5, alpha=4)
    desk.ok("merge", "adapter", "--and", "second", "--base", "base", "--to", "out")
    base, ours = merging.numbers(desk.folder / "base"), merging.numbers(desk.folder / "out")
    name = "model.layers.1.self_attn.v_proj.weight"
    total = base[name]
    for folder, scale in (("adapter", 2.0), ("second", 1.0)):
        factors = merging.numbers(desk.folder / folder)
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        total = total + scale * factors[f"{stem}.lora_B.weight"] @ factors[f"{stem}.lora_A.weight"]
    right = total.astype("f4").astype(merging.KINDS["BF16"]).astype("f8")
    assert (ours[name] == right).mean() > 0.98


def test_an_adapter_never_counts_twice(desk: Desk) -> None:
    """The same adapter given twice, or one that is in the base already, is refused; another one is merged on top."""
    desk.ok("merge", "adapter", "--base", "base", "--to", "out", "--name", "sft")
    for words in (("--and", "adapter/", "--base", "base"), ("--base", "out"), ("--base", "sft-merged-bf16")):
        said = desk.registry("merge", "adapter", *words, "--to", "more")
        assert (said.code, "count twice" in said.err) == (5, True), said.err
    builders.lora_adapter(desk.folder / "second", seed=5)
    assert desk.ok("merge", "second", "--base", "out", "--dry-run").code == 0


def test_no_later_command_makes_a_merge_forget_what_is_in_it(desk: Desk) -> None:
    """Cast, pushed by hand, pulled, and below another merge, as folder and as version, a model tells its adapters."""
    builders.lora_adapter(desk.folder / "second", seed=5)
    desk.ok("merge", "adapter", "--base", "base", "--to", "out")
    desk.ok("merge", "second", "--base", "out", "--to", "both")
    desk.ok("cast", "both", "--dtype", "fp32", "--to", "wide", "--name", "both")
    desk.ok("push", "wide", "--name", "by-hand")
    desk.ok("pull", "by-hand@v1", "pulled")
    desk.ok("push", "pulled", "--name", "again")
    for base in ("both", "wide", "both-fp32", "by-hand", "pulled", "again"):
        for adapter in ("adapter", "second"):
            said = desk.registry("merge", adapter, "--base", base, "--dry-run")
            assert (said.code, "count twice" in said.out) == (5, True), (base, adapter, said.out)
    told = parse((desk.root / "models" / "by-hand" / "v1" / "manifest.json").read_bytes()).facts.findings
    (inside,) = [one for one in told if one.code == "merge-inside"]
    assert len(inside.data["adapter_weights"]) == 2


def test_a_version_is_merged_and_published_with_its_lineage(desk: Desk) -> None:
    """A merged version has a name of its own, its parents with their digests, the base's licence, and its proof."""
    pushed = desk.ok("push", "adapter", "--name", "sft", "--json").json
    said = desk.ok("merge", "sft@v1", "--base", "base", "--json")
    told = conforms(said.json, "merge")
    assert told["ref"] == "sft-merged-bf16@v1"
    stored = (desk.root / "models" / "sft-merged-bf16" / "v1" / "manifest.json").read_bytes()
    facts = parse(stored).facts
    assert facts.kind == "merged"
    first = facts.lineage[0]
    assert (first.relation, first.ref, first.content) == ("merged-from", "sft@v1", pushed["content"])
    assert facts.lineage[1].ref == "example-org/tiny-base"
    assert facts.lineage[1].content == facts.base.content
    assert facts.license.id == "cc-by-nc-4.0"
    codes = {one.code for one in facts.findings}
    assert {"merge-proven", "license-looser-than-base"} <= codes
    card = desk.ok("card", "sft-merged-bf16@v1").out
    assert "nothing in the adapter tells whether this base is the one it was trained on" in " ".join(card.split())
    words = "what it computes was not compared with base and adapter"
    assert (words in " ".join(card.split()), words in desk.ok("show", "sft-merged-bf16@v1").out) == (True, True)
    assert "license: cc-by-nc-4.0" in card
    assert "A model with an adapter merged into its base" in card
    assert "AutoModelForCausalLM.from_pretrained" in card
    rows = desk.ok("ls", "--json").json["versions"]
    assert {(row["name"], row["kind"]) for row in rows} == {("sft", "adapter"), ("sft-merged-bf16", "merged")}
    assert desk.ok("verify", "sft-merged-bf16@v1").code == 0


def test_the_same_merge_published_twice_is_made_once(desk: Desk) -> None:
    """A second merge of the same parents ends with the first before any work; another precision is another merge."""
    words = ("merge", "adapter", "--base", "base", "--name", "sft")
    first = conforms(desk.ok(*words, "--json").json, "merge")
    again = conforms(desk.ok(*words, "--json").json, "merge")
    assert (first["ref"], first["joined"], first["path"]) == ("sft-merged-bf16@v1", False, None)
    assert (again["ref"], again["joined"], again["facts"]["proof"]) == (first["ref"], True, first["facts"]["proof"])
    said = desk.ok(*words)
    assert "it is there already, as sft-merged-bf16@v1" in said.err
    assert ("tensors copied" in said.err, said.out) == (False, "sft-merged-bf16@v1\n")
    other = desk.ok("merge", "adapter", "--base", "base", "--name", "sft", "--dtype", "fp16", "--json").json
    assert other["ref"] == "sft-merged-fp16@v1"
    assert list((desk.cache / "merge").iterdir()) == []


def test_a_merge_that_was_lost_or_withdrawn_is_no_merge_that_is_there(desk: Desk) -> None:
    """A version that has lost a file gets it back from the work; one that was withdrawn comes again where asked for.

    One that was found damaged is read again and refused until its fix is followed, which is what makes it whole.
    """
    words = ("merge", "adapter", "--base", "base", "--name", "sft")
    ref = desk.ok(*words).out.strip()
    lost = desk.root / "models" / "sft-merged-bf16" / "v1" / "model.safetensors"
    sound = lost.read_bytes()
    lost.chmod(0o600)
    lost.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    assert f"compared by size alone: registry verify {ref} reads it" in desk.ok(*words).err
    assert desk.registry("verify", ref).code == 5
    for more in ((), ("--to", "out")):  # a folder is wanted as well, and is not made in vain
        said = desk.registry(*words, *more, "--json")
        assert (said.code, "model.safetensors has sha256" in said.error["why"]) == (5, True), said.err
        assert (said.error["fix"].count("registry merge ... --again"), [*desk.folder.glob("*out*")]) == (1, [])
    lost.write_bytes(sound[:-1])
    short = desk.registry(*words, "--json")
    assert (short.code, "bytes long" in short.error["message"], short.error["fix"]) == (5, True, said.error["fix"])
    (key,) = re.findall(r"delete (\S+) on the remote and repeat", said.error["fix"])
    (desk.root / key).unlink()
    said = desk.ok(*words)
    assert ("tensors copied" in said.err, "put back" in said.err, lost.read_bytes() == sound) == (True, True, True)
    assert ("it is there already" in desk.ok(*words).err, desk.ok("verify", ref).code) == (True, 0)
    desk.ok("withdraw", ref, "--reason", "wrong data")
    said = desk.registry(*words)
    assert (said.code, "registry merge ... --again" in said.err, "tensors copied" in said.err) == (7, True, False)
    said = desk.registry(*words, "--to", "out")  # a folder is wanted as well, and is not made in vain
    assert (said.code, list(desk.folder.glob("*out*"))) == (7, [])
    assert desk.ok(*words, "--again").out == "sft-merged-bf16@v2\n"
    assert list((desk.cache / "merge").iterdir()) == []


def test_a_base_can_be_a_version_or_lie_in_the_hub_cache(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base is found by name and number in the registry, and by its id in a Hub cache; elsewhere it is not found."""
    desk.ok("push", "base", "--name", "tiny-base")
    told = desk.ok("merge", "adapter", "--base", "tiny-base@v1", "--name", "one", "--json").json
    desk.ok("push", "adapter", "--name", "one")
    (desk.root / "models" / "one" / "v1" / "adapter_model.safetensors").unlink()
    for more in (
        (),
        ("--dtype", "bf16"),
    ):  # nothing is fetched where the numbers tell that it is there
        again = conforms(desk.ok("merge", "one@v1", "--base", "tiny-base@v1", *more, "--json").json, "merge")
        assert (again["ref"], again["joined"]) == ("one-merged-bf16@v1", True)
    stored = (desk.root / "models" / "one-merged-bf16" / "v1" / "manifest.json").read_bytes()
    assert parse(stored).facts.lineage[1].ref == "tiny-base@v1"
    assert told["facts"]["proof"]["passed"]
    hub = desk.folder / "hub"
    snapshot = hub / "models--example-org--tiny-base" / "snapshots" / ("a" * 40)
    builders.llama_model(snapshot)
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    desk.ok("merge", "adapter", "--base", "example-org/tiny-base", "--to", "out")
    assert desk.registry("merge", "adapter", "--base", "example-org/other", "--to", "more").code == 3


def test_a_refused_merge_publishes_nothing(desk: Desk) -> None:
    """What is refused leaves the registry as it was."""
    builders.lora_adapter(desk.folder / "adapter", tensors=builders.lora_tensors(hidden=24))
    said = desk.registry("merge", "adapter", "--base", "base", "--name", "sft", "--json")
    assert said.code == 5
    assert "[16, 16]" in said.error["why"]
    assert not (desk.root / "models").exists()
