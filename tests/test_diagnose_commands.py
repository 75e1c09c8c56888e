"""The commands that `registry diagnose` names: each one exists, parses, and really mends what it is named for."""

import ast
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from weighbridge.adapters.diagnose import commands
from weighbridge.adapters.diagnose.answer import Diagnosis, diagnose
from weighbridge.adapters.diagnose.rule import Cause
from weighbridge.adapters.inspect import inspect
from weighbridge.registry.cli.group import registry
from weighbridge.registry.cli.main import main
from weighbridge_testlib import builders, ranks
from weighbridge_testlib.ailments import AILMENTS, Asked, Dice, making

NOWHERE = {"HOME": "/nonexistent"}
KNOWN = {"git", "rsync", "mv", "cp", "rm", "pip", "hf", "vllm", "trtexec", "diff", "grep", "python", "cat", "mkdir"}
"""Programs besides our own and Python whose commands are named."""


def ask(asked: Asked, text: str | None = None) -> Diagnosis:
    """Diagnose what an ailment's builder made."""
    return diagnose(asked.path, text, base=str(asked.base) if asked.base is not None else None, environ=NOWHERE)


def told(tmp_path: Path, name: str, seed: int) -> Iterator[Cause]:
    """Yield every cause that is told of an ailing folder."""
    asked = AILMENTS[name].sick(tmp_path, Dice(seed))
    for text in AILMENTS[name].said:
        yield from ask(asked, text).causes


@pytest.mark.parametrize("name", AILMENTS)
def test_every_command_exists_and_parses(tmp_path: Path, name: str) -> None:
    """Our commands have the options they are given, Python is Python, every other program is a known one."""
    for cause in told(tmp_path, name, 5):
        for command in cause.commands:
            words = shlex.split(command)
            if words[0] == "registry":
                context = click.Context(registry, info_name="registry")
                found = registry.get_command(context, words[1])
                assert found is not None, command
                found.make_context(words[1], words[2:], parent=context)
            elif words[0] == "python3":
                assert words[1] == "-c"
                assert len(words) == 3, command
                ast.parse(words[2])
            else:
                assert words[0] in KNOWN, command
            assert "\n" not in command


def carried_out(cause: Cause) -> None:
    """Carry out the commands of a cause that are ours or Python's, in this process."""
    for command in cause.commands:
        words = shlex.split(command)
        if words[0] == "python3":
            exec(compile(words[2], "<command>", "exec"), {})
        elif words[0] == "registry":
            assert main(words[1:]) == 0, command


MENDED = (
    "names-prefixed", "names-in-text",
    "adapter-keys-odd", "index-wrong", "vocabulary-differs", "rank-differs", "format-mark",
    "quantization-left", "sampling-conflict", "base-in-adapter", "config-of-another",
    "weights-pickled", "zero-only", "distributed-only", "read-whole", "dtype-differs", "class-of-a-package",
)  # fmt: skip
"""Rules whose commands need no word of the reader's."""

BARE = {"zero-only", "distributed-only", "read-whole", "class-of-a-package"}


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", MENDED)
def test_the_commands_mend(tmp_path: Path, name: str, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Carried out as they are printed, they leave files, here or in a new folder, without that cause."""
    asked = AILMENTS[name].sick(tmp_path, Dice(seed))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.suffix in {".safetensors", ".bin"}}
    known = set(asked.path.parent.iterdir()) | set(asked.path.iterdir())
    cause = next(c for c in ask(asked, AILMENTS[name].said[0]).causes if c.rule == name)
    assert cause.commands
    carried_out(cause)
    capsys.readouterr()
    made = [p for p in (*asked.path.parent.iterdir(), *asked.path.iterdir()) if p not in known]
    assert {path: path.stat().st_mtime_ns for path in before} == before, "weights were written over"
    if name == "format-mark":
        made[0].replace(asked.path / "model.safetensors")
        made = []
    mended = made[0] if made else asked.path
    assert name not in {c.rule for c in ask(Asked(mended, asked.base), AILMENTS[name].said[0]).causes}
    # A lone torch file or rank files never had a config beside them that could have come along.
    alone = {"config-missing"} if name in BARE else set()
    assert {f.code for f in inspect(mended).findings if f.severity == "block"} <= alone


@pytest.mark.parametrize("more", [-1, 1, 5])
def test_a_config_is_never_fitted_to_weights_that_lost_layers(tmp_path: Path, more: int) -> None:
    """Where the weights hold fewer layers than stated no edit is offered: it would make half a model look whole."""
    size = making.shape(Dice(more + 1))
    size = size._replace(layers=max(size.layers, 2))
    folder = making.model(tmp_path / "m", size, num_hidden_layers=size.layers + more)
    (cause,) = [c for c in diagnose(folder, environ=NOWHERE).causes if c.rule == "layers-differ"]
    assert cause.data == {"config": size.layers + more, "stored": size.layers}
    assert bool(cause.commands) is (more < 0)
    if more > 0:
        assert "fetch the weights again" in cause.message
        return
    carried_out(cause)
    assert diagnose(folder, environ=NOWHERE).causes == []


def test_an_index_is_written_again(tmp_path: Path) -> None:
    """A missing index is rebuilt from the headers, with the right total."""
    folder = builders.llama_model(tmp_path / "m", shards=3)
    index = folder / "model.safetensors.index.json"
    before = index.read_text()
    index.unlink()
    cause = next(c for c in diagnose(folder, environ=NOWHERE).causes if c.rule == "index-unusable")
    carried_out(cause)
    assert ast.literal_eval(index.read_text()) == ast.literal_eval(before)
    assert diagnose(folder, environ=NOWHERE).causes == []


def test_weights_come_back_out_of_the_rank_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that was saved empty beside its ZeRO state is taken out of that state."""
    folder = builders.trainer_checkpoint(tmp_path / "checkpoint-5", step=5, adapter=False)
    shapes = {name: tuple(side) for name, (_, side, _) in builders.llama_tensors().items()}
    ranks.zero_folder(folder, shapes, world=2, stage=3)
    builders.write_safetensors(folder / "model.safetensors", dict.fromkeys(shapes, ("BF16", (0,), None)))
    cause = next(c for c in diagnose(folder, environ=NOWHERE).causes if c.rule == "not-gathered")
    carried_out(cause)
    capsys.readouterr()
    out = tmp_path / "checkpoint-5-gathered"
    shutil.copy(folder / "config.json", out)  # the second command, whose star a shell fills in
    assert cause.commands[1].startswith("cp -n ")
    found = inspect(out)
    assert (found.outcome in {"accept", "warn"}, found.facts["tensor_count"]) == (True, len(shapes))


def test_an_adapter_is_merged_as_it_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The merge that is named for an adapter opened as a model makes a model."""
    base = builders.llama_model(tmp_path / "base")
    adapter = builders.lora_adapter(tmp_path / "a")
    found = diagnose(adapter, "KeyError: 'base_model_name_or_path'", base=str(base), environ=NOWHERE)
    command = found.causes[0].commands[0]
    assert main(shlex.split(command)[1:]) == 0
    capsys.readouterr()
    assert inspect(tmp_path / "a-merged").kind == "model"


def test_a_shell_reads_what_is_printed(tmp_path: Path) -> None:
    """Pasted into a shell, the command is one program with its arguments, whatever the folder is called."""
    folder = builders.llama_model(tmp_path / 'it\'s a $HOME `x` "y" !z', vocab_size=40)
    cause = next(c for c in diagnose(folder, environ=NOWHERE).causes if c.rule == "vocabulary-differs")
    command = cause.commands[0].replace("python3", shlex.quote(sys.executable), 1)
    subprocess.run(["bash", "-c", command], check=True, cwd=tmp_path)
    assert diagnose(folder, environ=NOWHERE).causes == []


def test_numbers_to_fill_in_are_not_strings() -> None:
    """A word in capitals that stands for a number is no string, so Python stops where it was forgotten."""
    code = shlex.split(commands.set_fields(Path("c.json"), {"lora_alpha": commands.Fill("ALPHA")}))[2]
    assert "{'lora_alpha': ALPHA}" in code


@pytest.mark.parametrize("path", [".", "..", "a/..", "/x/y/", "model.safetensors"])
def test_new_folders_lie_beside(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of what is made is that of the folder itself, never inside it and never the folder."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a")
    new = commands.beside(Path(path), "merged")
    assert new.name.endswith("-merged")
    assert new.name not in {".-merged", "..-merged", "-merged"}
    assert new.resolve().parent == Path(path).resolve().parent
