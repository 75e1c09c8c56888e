"""`registry inspect`: exit codes, the JSON contract, the one-screen view, and answers to hostile folders."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weighbridge.adapters import listing
from weighbridge.adapters.draft import Draft
from weighbridge.adapters.inspect import inspect
from weighbridge.adapters.plan import Named
from weighbridge.adapters.reading import Place, Reader
from weighbridge.registry import findings
from weighbridge.registry.cli import main as entry
from weighbridge_testlib import builders

SCHEMA = json.loads((Path(__file__).parents[1] / "docs" / "schemas" / "inspect.schema.json").read_text())


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run one command in this process; return exit code, stdout, stderr."""
    code = entry.main(["inspect", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def make(folder: Path, kind: str) -> Path:
    """Build one folder of each outcome and layout."""
    if kind == "adapter":
        return builders.lora_adapter(folder)
    if kind == "sharded":
        return builders.llama_model(folder, shards=3)
    if kind == "run":
        return builders.run_root(folder)
    if kind == "warn":
        return builders.lora_adapter(folder, base=None, readme=None)
    if kind == "refuse":
        built = builders.lora_adapter(folder)
        (built / "adapter_config.json").unlink()
        return built
    if kind == "wait":
        return builders.trainer_checkpoint(folder / "checkpoint-3", step=3, ended=False).parent
    folder.mkdir()
    return folder


KINDS = {"adapter": 0, "sharded": 0, "run": 0, "warn": 0, "refuse": 5, "wait": 8, "empty": 5}


@pytest.mark.parametrize("kind", KINDS)
def test_json_contract_and_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    """The JSON answer keeps to the published schema, its codes are listed, the exit code follows the outcome."""
    code, out, err = run(capsys, str(make(tmp_path / "x", kind)), "--json")
    assert (code, err) == (KINDS[kind], "")
    document = json.loads(out)
    jsonschema.validate(document, SCHEMA)
    assert {f["code"] for f in document["findings"]} <= set(findings.CODES)
    assert document["path"] == str(tmp_path / "x")


@pytest.mark.parametrize("kind", KINDS)
def test_view_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    """The view fits a screen, begins with the verdict, and gives the fix of every finding that has one."""
    folder = make(tmp_path / "x", kind)
    _, out, err = run(capsys, str(folder))
    found = inspect(folder)
    assert err == ""
    assert out.startswith(found.outcome)
    assert len(out.splitlines()) <= 40
    assert all(f"fix: {f.fix}" in out for f in found.findings if f.fix)


def test_view_answers_the_questions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is it, full or delta, safe or pickle, training state, missing, published, left out: all on the screen."""
    builders.trainer_checkpoint(tmp_path / "checkpoint-9", step=9, deepspeed_ranks=2)
    _, out, _ = run(capsys, str(tmp_path))
    for words in (
        "trainer-checkpoint+adapter in checkpoint-9",
        "a delta: LORA adapter, rank 4",
        "base example-org/tiny-base",
        "safetensors: 8 tensors, 448 parameters",
        "step 9; training can go on from here",
        "missing   nothing",
        "apache-2.0",
        "3 files",
        "resume-only: 10 files",
    ):
        assert words in out, words


def test_other_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names, lines and the wide table are there as for every other command."""
    builders.run_root(tmp_path)
    assert run(capsys, str(tmp_path), "-q")[1].split() == [".", "checkpoint-100", "checkpoint-200"]
    rows = [json.loads(text) for text in run(capsys, str(tmp_path), "-o", "jsonl")[1].splitlines()]
    assert [row["relative"] for row in rows] == [".", "checkpoint-100", "checkpoint-200"]
    assert "resume-only" in run(capsys, str(tmp_path), "-o", "wide")[1]


def test_path_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A path that does not exist is not found, exit 3."""
    code, out, err = run(capsys, str(tmp_path / "gone"))
    assert (code, out) == (3, "")
    assert "there is no" in err


def test_single_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A single file can be asked about; it is judged with the papers beside it, and nothing else of the folder."""
    folder = builders.lora_adapter(tmp_path / "whole")
    (folder / "optimizer.pt").write_bytes(b"state")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        code, out, _ = run(capsys, str(folder / name), "--json")
        document = json.loads(out)
        assert code == 0
        assert {f["path"] for f in document["files"]} == {
            "README.md",
            "adapter_config.json",
            "adapter_model.safetensors",
        }
    alone = tmp_path / "alone"
    alone.mkdir()
    (folder / "adapter_model.safetensors").rename(alone / "adapter_model.safetensors")
    code, out, _ = run(capsys, str(alone / "adapter_model.safetensors"), "--json")
    document = json.loads(out)
    assert code == 5
    assert document["facts"]["missing_files"] == ["adapter_config.json"]
    assert [f["path"] for f in document["files"]] == ["adapter_model.safetensors"]


def test_names_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Control characters in file names and configs are escaped in the view and never raw in JSON."""
    folder = builders.lora_adapter(tmp_path, base="org/\x1b[31mred")
    (folder / "bad\x1b[2Jname.txt").write_text("x")
    for arguments in ([], ["-o", "wide"], ["--json"], ["-q"]):
        _, out, err = run(capsys, str(folder), *arguments)
        assert "\x1b" not in out + err


def test_name_that_is_no_utf8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file name of undecodable bytes is shown by their numbers and is never published; as weights it blocks."""
    folder = builders.lora_adapter(tmp_path / "a")
    os.close(os.open(os.fsencode(folder) + b"/LICENSE-\xff", os.O_CREAT | os.O_WRONLY))
    code, out, _ = run(capsys, str(folder), "--json")
    assert (code, out.isascii()) == (0, True)
    assert r"LICENSE-\xff" in json.loads(out)["facts"]["left_out"]
    model = builders.llama_model(tmp_path / "b")
    (model / "model.safetensors").rename(model / os.fsdecode(b"m\xff.safetensors"))
    assert "file-name-unsafe" in {f.code for f in inspect(model).findings}
    assert r"m\xff.safetensors" in {f.subject for f in inspect(model).findings}


def test_a_single_file_is_spoken_of_as_one(tmp_path: Path) -> None:
    """A file that holds no weights is not "1 file in itself"; a folder is counted."""
    (tmp_path / "notes.txt").write_text("hello")
    (of_file,) = inspect(tmp_path / "notes.txt").findings
    assert of_file.message == "notes.txt holds no weights of a known kind: nothing of it can be published"
    (of_folder,) = inspect(tmp_path).findings
    assert of_folder.message == f"1 file in {tmp_path.name}: nothing here can be published"
    assert of_file.code == of_folder.code == "no-artifact"


def test_what_is_said_of_every_checkpoint_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A fault of each of 20 checkpoints is one entry with the list of them; -o wide names them all."""
    builders.run_root(tmp_path, steps=range(10, 210, 10), result=False, readme=None)
    for folder in tmp_path.iterdir():
        config = json.loads((folder / "adapter_config.json").read_text())
        builders.write_json(folder / "adapter_config.json", config | {"r": 16})
    code, out, _ = run(capsys, str(tmp_path))
    assert (code, out.count("block  rank-mismatch"), out.count("license-unknown")) == (5, 1, 1)
    assert "license-unknown  20 times: checkpoint-10, checkpoint-20, checkpoint-30" in out
    assert "refuse 20 x trainer-checkpoint+adapter: checkpoint-10, checkpoint-20 ... checkpoint-200" in out
    assert "publish   nothing as it stands: none of the 20 artifacts is fit" in out
    assert "resume-only: 100 files" in out
    assert "optimizer.pt x20" in out
    assert len(out.splitlines()) <= 20
    assert "checkpoint-200/adapter_model.safetensors" in run(capsys, str(tmp_path), "-o", "wide")[1].split("PUBLISH")[0]


def test_several_artifacts_are_counted_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is fit would be published though another checkpoint is refused, and how many files each has is told."""
    builders.run_root(tmp_path, steps=(5, 10), result=False)
    assert "2 artifacts, together 6 files, 6.92 kB: checkpoint-5 (3 files, 3.46 kB), checkpoint-10 (" in run(
        capsys, str(tmp_path)
    )[1].replace("6.91", "6.92")
    (tmp_path / "checkpoint-10" / "adapter_config.json").unlink()
    code, out, _ = run(capsys, str(tmp_path))
    assert code == 5
    assert "publish   1 of 2 artifacts, together 3 files, 3.46 kB: checkpoint-5 (3 files, 3.46 kB)" in out


def test_different_faults_stay_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two shards that are short by different numbers of bytes are two entries, each with its number."""
    folder = builders.llama_model(tmp_path, shards=3)
    for count, shard in enumerate(sorted(folder.glob("*.safetensors"))[:2], start=1):
        shard.write_bytes(shard.read_bytes()[: -10 * count])
    out = run(capsys, str(folder))[1]
    assert "short by 10 bytes" in out
    assert "short by 20 bytes" in out


def test_no_pickle_is_opened_and_no_heavy_library_is_loaded(tmp_path: Path) -> None:
    """A look imports neither torch nor numpy, and a pickle that would run code runs nothing."""
    folder = builders.trainer_checkpoint(tmp_path / "checkpoint-1", step=1)
    canary = tmp_path / "canary"
    payload = f"cos\nsystem\n(S'touch {canary}'\ntR.".encode()
    for name in ("optimizer.pt", "training_args.bin", "adapter_model.bin", "rng_state.pth", "pytorch_model.bin"):
        (folder / name).write_bytes(payload)
    program = (
        "import sys\nfrom pathlib import Path\nfrom weighbridge.adapters.inspect import inspect\n"
        "inspect(Path(sys.argv[1]))\n"
        "bad = {'torch', 'numpy', 'safetensors', 'transformers', 'peft', 'pickle'} & set(sys.modules)\n"
        "sys.exit(f'loaded {bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not canary.exists()


def test_nothing_is_written(tmp_path: Path) -> None:
    """A look changes nothing: no file, no time, no name."""
    builders.run_root(tmp_path)
    before = {p: (p.lstat().st_mtime_ns, p.lstat().st_ctime_ns) for p in tmp_path.rglob("*")}
    inspect(tmp_path)
    assert {p: (p.lstat().st_mtime_ns, p.lstat().st_ctime_ns) for p in tmp_path.rglob("*")} == before


def test_secret_in_a_file_that_would_leave(tmp_path: Path) -> None:
    """A secret in a published file blocks by file name; its value is nowhere in the answer."""
    folder = builders.llama_model(tmp_path)
    secret = "hf_" + "AbCdEfGhIj" * 4
    config = json.loads((folder / "tokenizer_config.json").read_text())
    builders.write_json(folder / "tokenizer_config.json", {**config, "token": secret[:37]})
    found = inspect(folder)
    assert found.outcome == "refuse"
    assert found.facts["secret_files"] == ["tokenizer_config.json"]
    assert secret[:37] not in repr(found)


def test_private_path_in_a_file_that_would_leave(tmp_path: Path) -> None:
    """A private path in a published file warns with the path and blocks only the Hub."""
    found = inspect(builders.llama_model(tmp_path, _name_or_path="/home/lw/models/tiny"))
    assert found.outcome == "warn"
    assert found.facts["local_paths"] == ["/home/lw/models/tiny"]
    assert found.facts["hub_push_blocked"] is True


def test_paths_are_from_the_inspected_folder(tmp_path: Path) -> None:
    """Whatever depth an artifact lies at, its paths are told from the folder that was asked about."""
    folder = builders.llama_model(tmp_path / "a" / "b", shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    found = inspect(tmp_path)
    assert found.facts["missing_files"] == ["a/b/model-00002-of-00002.safetensors"]
    assert all(f.subject.startswith("a/b/") for f in found.findings if f.code == "shard-missing")


JSON_TEXT = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
FIELDS = [
    "peft_type", "r", "lora_alpha", "target_modules", "modules_to_save", "base_model_name_or_path", "rank_pattern",
    "architectures", "dtype", "vocab_size", "num_hidden_layers", "tie_word_embeddings", "quantization_config",
    "auto_map", "text_config", "model_type", "metadata", "weight_map", "global_step", "log_history", "added_tokens",
    "best_model_checkpoint", "model", "_class_name",
]  # fmt: skip
NAMES = [
    "adapter_config.json", "config.json", "model.safetensors.index.json", "trainer_state.json", "tokenizer.json",
    "generation_config.json", "tokenizer_config.json", "quantize_config.json", "model_index.json", "README.md",
]  # fmt: skip


@settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    documents=st.dictionaries(
        st.sampled_from(NAMES), st.dictionaries(st.sampled_from(FIELDS), JSON_TEXT, max_size=8) | JSON_TEXT, max_size=5
    ),
    base=st.sampled_from(["adapter", "model", "checkpoint"]),
)
def test_any_json_gives_an_answer(
    tmp_path_factory: pytest.TempPathFactory, documents: dict[str, Any], base: str
) -> None:
    """Whatever the JSON files of a folder say, the answer is one of the four outcomes with listed codes."""
    folder = tmp_path_factory.mktemp("fuzz")
    if base == "adapter":
        builders.lora_adapter(folder)
    elif base == "model":
        builders.llama_model(folder, shards=2)
    else:
        builders.trainer_checkpoint(folder, step=3)
    for name, value in documents.items():
        (folder / name).write_text(json.dumps(value))
    found = inspect(folder)
    assert found.outcome in {"accept", "warn", "refuse", "wait"}
    assert {f.code for f in found.findings} <= set(findings.CODES)


@pytest.mark.parametrize("kind", [*KINDS, "quantized", "broken", "rival"])
def test_every_fact_is_documented(tmp_path: Path, kind: str) -> None:
    """A fact that comes out has its line in docs/facts.md."""
    text = (Path(__file__).parents[1] / "docs" / "facts.md").read_text()
    if kind == "quantized":
        folder = builders.llama_model(tmp_path / "x", quantization_config={"quant_method": "gptq", "bits": 4})
    elif kind == "broken":
        folder = builders.llama_model(tmp_path / "x", shards=3, vocab_size=99, auto_map={"AutoModel": "m.M"})
        (folder / "model-00002-of-00003.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    elif kind == "rival":
        folder = builders.llama_model(tmp_path / "x", shards=2)
        builders.write_safetensors(folder / "model.safetensors", builders.llama_tensors(seed=2))
        builders.lora_adapter(folder, base="/home/lw/x-bnb-4bit", init_lora_weights="pissa", more=1)
    else:
        folder = make(tmp_path / "x", kind)
    found = inspect(folder)
    names = {name for facts in (found.facts, *(a.facts for a in found.artifacts)) for name in facts}
    assert {name for name in names if f"`{name}`" not in text} == set()


def test_the_licence_of_a_base_in_a_local_folder_is_inherited(tmp_path: Path) -> None:
    """An adapter that names its base by an absolute path takes the licence that the base's own card states."""
    base = builders.llama_model(tmp_path / "base")
    (base / "README.md").write_text("---\nlicense: mit\n---\n")
    folder = builders.lora_adapter(tmp_path / "run", base=str(base), readme=None)
    found = inspect(folder)
    assert found.artifacts[0].license.id == "mit"
    assert found.artifacts[0].license.source == "base"
    assert "license-inherited" in {f.code for f in found.findings}


def test_long_lists_of_facts_are_joined_in_one_pass(tmp_path: Path) -> None:
    """A file may name hundreds of thousands of things; what two checks list is joined without comparing each pair."""
    draft = Draft(Place(Reader(listing.read_tree(tmp_path)), "."), "ckpt", None, Named(root="."))
    names = [f"key-{i}" for i in range(150_000)]
    draft.add({"dropped_top_keys": names}, [])
    draft.add({"dropped_top_keys": [*names, "one more", ["of", "another kind"]]}, [])
    assert draft.facts["dropped_top_keys"] == [*names, "one more", ["of", "another kind"]]


def test_weights_that_are_not_there_have_no_values_to_look_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty file, or a pointer that was not fetched, is told as that alone."""
    folder = builders.llama_model(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(b"")
    code, out, _ = run(capsys, str(folder))
    assert code == 5
    assert "looked at" not in out
