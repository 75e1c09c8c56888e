"""`registry diagnose`: texts of any size and shape, the contract, the view, exit codes, bases, and hostile words."""

import ast
import json
import shlex
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weighbridge.adapters.diagnose import named
from weighbridge.adapters.diagnose import text as texts
from weighbridge.adapters.diagnose.answer import COMPARED, Diagnosis, diagnose
from weighbridge.adapters.diagnose.symptoms import SYMPTOMS
from weighbridge_testlib import builders
from weighbridge_testlib.ailments import AILMENTS, Dice
from weighbridge_testlib.desk import Desk, Said, conforms

NOWHERE = {"HOME": "/nonexistent"}
MISMATCH = (
    "size mismatch for base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight: copying a param with "
    "shape torch.Size([8, 16]) from checkpoint, the shape in current model is torch.Size([4, 16])."
)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """Return a desk whose Hub cache is empty."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return Desk(tmp_path / "desk", monkeypatch)


def wrong_rank(folder: Path) -> Path:
    """Return an adapter whose config says rank 4 and whose matrices have 8."""
    return builders.lora_adapter(folder, tensors=builders.lora_tensors(rank=8))


def ask(path: Path, text: str | None = None) -> Diagnosis:
    """Diagnose with no Hub cache in sight."""
    return diagnose(path, text, environ=NOWHERE)


# ------------------------------------------------------------------------------------------------------------ the text


def log(*lines: str, before: int = 150, after: int = 60) -> str:
    """Return a long log with some lines in it."""
    noise = [f"INFO 07-24 13:45:{i % 60:02d} [core.py:{i}] step {i} loss {i / 7:.3f}" for i in range(before + after)]
    return "\n".join([*noise[:before], *lines, *noise[before:]])


def test_the_line_that_matters_is_found_in_a_long_log(tmp_path: Path) -> None:
    """In 200 lines of a server's log the one that counts is named with its number."""
    found = ask(wrong_rank(tmp_path), log(f"(EngineCore pid=7) ERROR 07-24 [core.py:517] RuntimeError: {MISMATCH}"))
    assert found.said is not None
    assert [(said.symptom, said.line, said.explained) for said in found.said] == [("size-mismatch", 151, True)]
    assert found.causes[0].rule == "rank-differs"
    assert found.causes[0].explains == ["size-mismatch"]


@pytest.mark.parametrize(
    "text",
    [
        MISMATCH,
        MISMATCH.upper(),
        f"\x1b[1m\x1b[31m{MISMATCH}\x1b[0m",
        MISMATCH.replace("size mismatch for", "size   mismatch\tfor"),
        f"\r\n{MISMATCH}\r\n",
        MISMATCH.replace("size mismatch", "size\nmismatch"),
        f"rank0: {MISMATCH}",
        f"Loading: 10%|#   |\rLoading: 100%|####|\r{MISMATCH}\r",
    ],
    ids=["plain", "shouted", "coloured", "spaced", "windows", "wrapped", "prefixed", "progress"],
)
def test_one_text_in_many_forms(tmp_path: Path, text: str) -> None:
    """Case, colours, white space, line ends, a wrap and what stands before a message do not matter."""
    said = ask(wrong_rank(tmp_path), text).said
    assert said is not None
    assert "size-mismatch" in {one.symptom for one in said if one.explained}


def test_the_last_such_line_is_told() -> None:
    """A log that repeats a message has its last word named."""
    read = texts.read(log("CUDA out of memory", "x", "CUDA out of memory"))
    line = texts.find(read, SYMPTOMS["memory-blow-up"].says)
    assert line is not None
    assert line.number == 153


def test_an_ordinary_log_says_nothing(tmp_path: Path) -> None:
    """What a run prints when all is well, people's words for trouble included, is no symptom."""
    usual = [
        "You are using a slow image processor; garbage collection of 12 objects; room for 3 more, bloom filter on",
        "Setting `pad_token_id` to `eos_token_id`:2 for open-end generation.",
        "{'loss': 1.234, 'grad_norm': 0.51, 'learning_rate': 2e-05, 'epoch': 0.3}",
        "Saving model checkpoint to out/checkpoint-280; tokenizer config file saved in out/tokenizer_config.json",
        "throughput 1234 tokens/s, memory 12.3 GB, resident 14 GB, high water 15 GB",
        "Loading checkpoint shards: 100%|##########| 3/3 [00:01<00:00,  2.1it/s]",
        "after epoch 3 the merged metrics are the same as before; the adapter repeats its chat template",
        "trainable params: 4,194,304 || all params: 6,742,609,920 || trainable%: 0.0622",
    ]
    found = ask(builders.llama_model(tmp_path), log(*usual))
    assert found.said == []
    assert found.outcome == "nothing"


def test_fragments_keep_to_their_order_and_line() -> None:
    """Words that stand in another order, or lines apart, are no match."""
    pattern = (("after", "merg"),)
    assert texts.find(texts.read("nonsense after the merge"), pattern) is not None
    assert texts.find(texts.read("merged, and nonsense after that"), pattern) is None
    assert texts.find(texts.read("after\nsomething else\nmerged"), pattern) is None


def test_shapes_in_a_text_are_taken_apart() -> None:
    """Shapes are read from torch's sentence and from the report of transformers, each tensor once."""
    report = (
        "lm_head.weight            | MISMATCH | Reinit due to size mismatch - ckpt: torch.Size([32, 16]) vs "
        "model:torch.Size([40, 16])"
    )
    found = texts.mismatches(texts.read(f"{MISMATCH}\n{report}\n{MISMATCH}"))
    assert [(one.name.rpartition(".")[2], one.stored, one.wanted) for one in found] == [
        ("weight", (8, 16), (4, 16)),
        ("weight", (32, 16), (40, 16)),
    ]
    assert found[1].name == "lm_head.weight"


PREFIXES = st.sampled_from(
    ["", "model.", "module.", "model.language_model.", "language_model.model.", "base_model.model."]
)
ENDS = st.lists(
    st.sampled_from(["norm.weight", "embed_tokens.weight", "layers.0.mlp.up_proj.weight", "layers.1.attn.q.bias"]),
    min_size=2,
    unique=True,
)


@given(ours=PREFIXES, theirs=PREFIXES, ends=ENDS, others=st.lists(st.just("score.weight"), max_size=1))
@settings(deadline=None, suppress_health_check=list(HealthCheck))
def test_the_exchange_of_beginnings_is_found(ours: str, theirs: str, ends: list[str], others: list[str]) -> None:
    """Whatever stands in front of the names on either side, the exchange turns the ones into the others."""
    unexpected, missing = [ours + end for end in ends], [theirs + end for end in ends] + others
    found = named.exchange(unexpected, missing)
    if ours == theirs:
        assert found is None
        return
    assert found is not None
    assert {found[1] + name.removeprefix(found[0]) for name in unexpected} <= set(missing)


def test_names_without_a_counterpart_are_not_explained() -> None:
    """Two names that have nothing in common with what is missed give no exchange."""
    assert named.exchange(["a.x.weight", "a.y.weight"], ["b.z.weight", "b.w.bias"]) is None
    assert named.exchange(["a.x.weight"], ["b.x.weight"]) is None
    assert named.exchange([], ["b.x.weight"]) is None


def test_a_text_about_other_files_is_not_believed(tmp_path: Path) -> None:
    """A tensor whose shape is not the one in the text is not put forward as the one that was meant."""
    folder = builders.llama_model(tmp_path)
    text = (
        "size mismatch for model.embed_tokens.weight: copying a param with shape torch.Size([{rows}, 16]) from "
        "checkpoint, the shape in current model is torch.Size([64, 16])."
    )
    rules = {rows: {c.rule for c in ask(folder, text.format(rows=rows)).causes} for rows in (32, 48)}
    assert "shape-in-text" in rules[32]
    assert "shape-in-text" not in rules[48]


def test_what_is_not_found_is_said_to_be_unknown(tmp_path: Path) -> None:
    """A known text over sound files names what it usually means, and no cause."""
    found = ask(builders.llama_model(tmp_path), MISMATCH)
    assert (found.outcome, found.causes) == ("nothing", [])
    assert found.said is not None
    assert [(said.symptom, said.explained) for said in found.said] == [("size-mismatch", False)]
    assert found.said[0].means == SYMPTOMS["size-mismatch"].means


def test_a_text_that_nobody_knows(tmp_path: Path, desk: Desk) -> None:
    """An unknown text is said to be unknown; what is wrong with the files is told all the same."""
    folder = wrong_rank(tmp_path / "a")
    said = desk.registry("diagnose", folder, "--error", "the flux capacitor is cold")
    assert said.code == 5
    assert "says nothing that is known here" in said.out
    assert "rank-differs" in said.out
    assert "none of them explain the text" in said.out


# ------------------------------------------------------------------------------------------------------- hostile texts


@given(st.text(max_size=3000))
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_text_is_harmless(text: str) -> None:
    """Whatever is pasted, lines are found or not, and nothing else happens."""
    read = texts.read(text)
    assert all(line.shown.isprintable() and len(line.shown) <= texts.LINE for line in read.lines)
    for symptom in SYMPTOMS.values():
        line = texts.find(read, symptom.says)
        assert line is None or line in read.lines
    assert all(one.stored or one.name for one in texts.mismatches(read))


@given(name=st.sampled_from(sorted(SYMPTOMS)), seed=st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_pattern_is_found_where_it_stands(name: str, seed: object) -> None:
    """Each pattern matches its own fragments, whatever stands around and between them."""
    for says in (*SYMPTOMS[name].says, *SYMPTOMS[name].words):
        middle = "".join(getattr(seed, "choice")("xyz 19:[]") for _ in range(5))  # noqa: B009 - hypothesis' own Random
        text = f"first\nRank 0] {middle.join(says)} tail\nlast"
        line = texts.find(texts.read(text), (says,))
        assert line is not None, says
        assert line.number == 2


def test_of_a_huge_text_both_ends_are_kept(tmp_path: Path) -> None:
    """Megabytes are cut to their beginning and end, line numbers stay true, and the answer says so."""
    count = 200_000
    text = "\n".join([*("padding " + "x" * 20 for _ in range(count)), MISMATCH])
    found = ask(wrong_rank(tmp_path), text)
    assert (found.cut, found.lines) == (True, count + 1)
    assert found.said is not None
    assert found.said[0].line == count + 1
    read = texts.read(text)
    assert sum(len(line.shown) for line in read.lines) <= texts.HEAD + texts.TAIL


@pytest.mark.parametrize(
    "line",
    [
        "size mismatch for " + "a" * 200_000,
        "size mismatch for a: copying a param with shape torch.Size([" + "1, " * 60_000,
        "after " * 40_000,
        "\x1b[" * 100_000,
        "expected but found " * 20_000,
        "|" * 200_000 + " MISMATCH | ckpt: torch.Size([" * 2000,
        "\0" * 200_000,
        "\u202e\ud800" * 50_000,
    ],
    ids=["name", "shape", "words", "escapes", "pairs", "cells", "zeros", "marks"],
)
def test_lines_made_to_be_slow_are_cut(tmp_path: Path, line: str) -> None:
    """One endless line is looked at up to a limit, and is answered."""
    read = texts.read(line)
    assert all(len(one.plain) <= 2 * texts.LINE for one in read.lines)
    assert ask(builders.lora_adapter(tmp_path), line).outcome in {"nothing", "found"}


def test_no_words_can_steer_the_terminal(tmp_path: Path, desk: Desk) -> None:
    """Control characters in the text, in names and in configs come out as marks, in the view and in JSON."""
    folder = tmp_path / "red\x1b[31mfolder"
    builders.lora_adapter(folder, tensors=builders.lora_tensors(rank=8), base="org/\x1b[2Jbase\u202e")
    text = f"\x1b]0;owned\x07 {MISMATCH} \x9b2J \u202e"
    for more in ((), ("--json",)):
        said = desk.registry("diagnose", folder, "--error", text, *more)
        assert said.code == 5
        assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(said.out + said.err)


def test_commands_take_any_path_as_one_word(tmp_path: Path) -> None:
    """Spaces, quotes, dollars and dashes in a path cannot become commands of their own."""
    folder = wrong_rank(tmp_path / "a b'c\"d$(touch x)`y`;-e")
    causes = ask(folder, "KeyError: 'base_model_name_or_path'").causes
    told = [command for cause in causes for command in cause.commands]
    assert {shlex.split(command)[0] for command in told} == {"registry", "python3"}
    for cause in causes:
        for command in cause.commands:
            words = shlex.split(command)
            assert words[0] in {"registry", "python3", "hf"}
            assert not {";", "`y`;-e", "x)"} & set(words)
            if words[0] == "python3":
                values = [n.value for n in ast.walk(ast.parse(words[2])) if isinstance(n, ast.Constant)]
                assert any(isinstance(value, str) and value.startswith(str(folder)) for value in values)
            else:
                assert any(word.startswith(str(folder)) for word in words)


# ------------------------------------------------------------------------------------------------- contract, view, exit


def kinds(desk: Desk, folder: Path) -> dict[str, tuple[Said, int]]:
    """Return answers of each outcome with the exit code each must have."""
    fine = builders.llama_model(folder / "fine")
    rank = wrong_rank(folder / "rank")
    unfinished = builders.trainer_checkpoint(folder / "checkpoint-3", step=3, ended=False)
    (folder / "nothing").mkdir()
    asked = {
        "nothing": (("diagnose", fine), 0),
        "found": (("diagnose", rank), 5),
        "wait": (("diagnose", unfinished), 8),
        "explained": (("diagnose", rank, "--error", MISMATCH), 5),
        "unexplained": (("diagnose", fine, "--error", MISMATCH), 0),
        "an explanation that is no fault": (("diagnose", fine, "--error", "memory is high: RSS 20 GB"), 5),
        "empty folder": (("diagnose", folder / "nothing"), 5),
        "one file": (("diagnose", rank / "adapter_model.safetensors"), 5),
    }
    return {name: (desk.registry(*words, "--json"), code) for name, (words, code) in asked.items()}


def test_json_contract_and_exit_codes(tmp_path: Path, desk: Desk) -> None:
    """Every answer keeps to the published schema, and its exit code follows its outcome."""
    for name, (said, code) in kinds(desk, tmp_path).items():
        document = conforms(said.json, "diagnose")
        assert (said.code, said.err) == (code, ""), name
        assert document["outcome"] == {0: "nothing", 5: "found", 8: "wait"}[code], name
        assert (document["error"] is not None) == ("expla" in name), name


def test_what_explains_the_text_comes_first(tmp_path: Path, desk: Desk) -> None:
    """Graver causes that do not explain the text come after milder ones that do."""
    folder = builders.llama_model(tmp_path / "m", vocab_size=40, tokenizer=False)
    plain = [cause["rule"] for cause in desk.registry("diagnose", folder, "--json").json["causes"]]
    assert plain == ["vocabulary-differs", "tokenizer-lost"]
    text = "OSError: Can't load tokenizer for '/x'"
    causes = desk.registry("diagnose", folder, "--error", text, "--json").json["causes"]
    assert [(cause["rule"], bool(cause["explains"])) for cause in causes] == [
        ("tokenizer-lost", True),
        ("vocabulary-differs", False),
    ]


def test_the_view_for_people(tmp_path: Path, desk: Desk) -> None:
    """The view names the line, the cause with its figures, the fix and the command, and fits a screen."""
    said = desk.registry("diagnose", wrong_rank(tmp_path / "a"), "--error", "-", stdin=log(MISMATCH))
    assert said.code == 5
    assert said.out.startswith("found  ")
    for words in (
        "line 151  size mismatch for base_model",
        "rank-differs  adapter_model.safetensors  explains the text",
        "the config says rank 4, the matrices of 4 modules have rank 8",
        "    fix: put the adapter_config.json of the same save beside the weights",
        "$ python3 -c",
        "not looked at: the base",
    ):
        assert words in said.out, words
    assert len(said.out.splitlines()) <= 24


def test_many_checkpoints_are_told_once(tmp_path: Path, desk: Desk) -> None:
    """What is said of each checkpoint of a run is one entry with all of them."""
    for step in range(10, 210, 10):
        folder = builders.trainer_checkpoint(tmp_path / f"checkpoint-{step}", step=step)
        builders.write_json(folder / "adapter_config.json", builders.lora_config(rank=16))
    said = desk.registry("diagnose", tmp_path)
    assert said.out.count("block  rank-differs") == 1
    assert "and 14 more" in said.out


def test_standard_input_of_any_bytes(tmp_path: Path, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log with bytes that are no text, and one beyond the limit, are read as far as they matter."""
    import io  # noqa: PLC0415 - this test alone
    import sys  # noqa: PLC0415

    folder = wrong_rank(tmp_path / "a")
    raw = b"\xff\xfe\x00 junk\n" * 40_000 + MISMATCH.encode()
    stream = io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", stream)
    from weighbridge.registry.cli import diagnose as command  # noqa: PLC0415

    text = command._standard_input()
    assert text.endswith(MISMATCH)
    assert len(text) < len(raw)
    assert ask(folder, text).causes[0].explains == ["size-mismatch"]
    assert desk.registry("diagnose", folder, "--error", "-", stdin="").code == 5


def test_what_is_not_there(tmp_path: Path, desk: Desk) -> None:
    """A path or a base that is nowhere is not found, with what to do."""
    for words in ((tmp_path / "gone",), (builders.lora_adapter(tmp_path / "a"), "--base", "acme/nowhere")):
        said = desk.registry("diagnose", *words)
        assert (said.code, said.out) == (3, "")
        assert "there is no" in said.err
    assert "--base FOLDER" in desk.registry("diagnose", tmp_path / "a", "--base", "acme/nowhere").err


# ------------------------------------------------------------------------------------------------------------ the base


def cached(home: Path, owner: str, name: str, **model: object) -> Path:
    """Put a base into a Hub cache under a home folder."""
    snapshots = home / ".cache/huggingface/hub" / f"models--{owner}--{name}" / "snapshots"
    commit = "0123456789abcdef0123456789abcdef01234567"
    folder = builders.llama_model(snapshots / commit, **model)  # type: ignore[arg-type]
    refs = snapshots.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text(commit)
    return folder


def test_the_base_is_found_in_the_hub_cache(tmp_path: Path) -> None:
    """An adapter's own base is compared where the Hub cache has it, without being named."""
    tensors = builders.lora_tensors(hidden=24)
    adapter = builders.lora_adapter(tmp_path / "a", tensors=tensors, base="acme/tiny")
    assert diagnose(adapter, environ={"HOME": str(tmp_path / "home")}).base is None
    base = cached(tmp_path / "home", "acme", "tiny")
    found = diagnose(adapter, environ={"HOME": str(tmp_path / "home")})
    assert found.base == str(base)
    assert {cause.rule for cause in found.causes} == {"base-shapes"}
    assert "the Hub cache has it" in found.causes[0].message
    named = diagnose(adapter, base="acme/tiny", environ={"HOME": str(tmp_path / "home")})
    assert named.base == str(base)


def test_of_many_checkpoints_some_are_compared(tmp_path: Path) -> None:
    """A run of many checkpoints is compared with its base for the first few, and what was left out is said."""
    base = builders.llama_model(tmp_path / "base")
    builders.run_root(
        tmp_path / "run", steps=range(10, 130, 10), result=False, tensors=builders.lora_tensors(hidden=24)
    )
    found = diagnose(tmp_path / "run", base=str(base), environ=NOWHERE)
    assert len([c for c in found.causes if c.rule == "base-shapes"]) == COMPARED
    assert [one for one in found.unsure if "all but 8" in one]


def test_a_base_by_its_path_is_found(tmp_path: Path) -> None:
    """An adapter that names its base by a path of this machine is compared with what lies there."""
    base = builders.llama_model(tmp_path / "base")
    adapter = builders.lora_adapter(tmp_path / "a", base=str(base))
    found = diagnose(adapter, environ=NOWHERE)
    assert found.base == str(base)
    assert {cause.rule for cause in found.causes} == {"base-is-path"}


def test_a_base_that_cannot_be_read_is_not_looked_at(tmp_path: Path) -> None:
    """A damaged base is named among what was not looked at, and the adapter is judged alone."""
    base = builders.llama_model(tmp_path / "base")
    (base / "model.safetensors").write_bytes(b"")
    model = builders.llama_model(tmp_path / "m")
    found = diagnose(model, base=str(base), environ=NOWHERE)
    assert (found.outcome, found.base) == ("nothing", None)
    assert any(str(base) in one and "the file is empty" in one for one in found.unsure)


def test_each_checkpoint_of_a_run_has_its_own_causes(tmp_path: Path) -> None:
    """In a run with one bad checkpoint the cause names that one and no other."""
    builders.run_root(tmp_path, steps=(100, 200, 300))
    (tmp_path / "checkpoint-200" / "adapter_config.json").unlink()
    found = ask(tmp_path, "ValueError: Can't find 'adapter_config.json' at 'checkpoint-200'")
    assert [(cause.rule, cause.artifact_root) for cause in found.causes] == [
        ("adapter-without-config", "checkpoint-200")
    ]


def test_causes_point_at_their_findings(tmp_path: Path) -> None:
    """A cause that inspect tells as a finding carries its code, sentence and fix; one found here carries none."""
    found = ask(AILMENTS["rank-differs"].sick(tmp_path / "a", Dice(1)).path)
    assert [(cause.rule, cause.finding) for cause in found.causes] == [("rank-differs", "rank-mismatch")]
    found = ask(AILMENTS["names-prefixed"].sick(tmp_path / "b", Dice(1)).path)
    assert [(cause.rule, cause.finding) for cause in found.causes] == [("names-prefixed", None)]


def test_the_answer_can_be_read_by_any_json_reader(tmp_path: Path, desk: Desk) -> None:
    """JSON is ASCII whatever the names, and round-trips."""
    folder = builders.lora_adapter(tmp_path / "ü\udcff", tensors=builders.lora_tensors(rank=8))
    said = desk.registry("diagnose", folder, "--json")
    assert said.out.isascii()
    assert json.loads(said.out)["causes"][0]["rule"] == "rank-differs"
