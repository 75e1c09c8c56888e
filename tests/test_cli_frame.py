"""The frame of the command line: help, unknown words, errors in words and JSON, exit codes, pipes, interrupts."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest

from weighbridge import __version__
from weighbridge.config.load import load
from weighbridge.config.settings import Settings
from weighbridge.registry import errors, shell
from weighbridge.registry.cli import context, fresh, options
from weighbridge.registry.cli.group import COMMANDS, registry
from weighbridge.registry.cli.main import main
from weighbridge.registry.cli.output import Output

SCHEMA = json.loads(Path(__file__).parent.parent.joinpath("docs/schemas/error.schema.json").read_text())
SCRIPTS = Path(sys.executable).parent


def command(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the real `registry`."""
    world = {**os.environ, **(env or {})}
    return subprocess.run([SCRIPTS / "registry", *arguments], capture_output=True, text=True, env=world, check=False)


def sample(body: Callable[..., Any]) -> click.Group:
    """Return a group with one command `run` of the given body."""
    group = click.Group("sample")
    group.add_command(click.command("run")(options.talking(body)))
    return group


def failing(error: BaseException) -> click.Group:
    """Return a group whose command `run` raises an error."""

    def body(*, out: Output) -> None:
        assert out
        raise error

    return sample(body)


def test_help_lists_every_command() -> None:
    """`registry --help` names each command with one line, also those whose module is missing or broken."""
    done = command("--help")
    assert (done.returncode, done.stderr) == (0, "")
    for name, entry in COMMANDS.items():
        assert any(line.split() == [name, *entry.help.split()] for line in done.stdout.splitlines())
    assert "Exit codes" in done.stdout


def test_the_twin_is_the_same_program() -> None:
    """`weighbridge` is there for machines where another `registry` comes first."""
    done = subprocess.run([SCRIPTS / "weighbridge", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"registry {__version__}\n"


def test_no_words_show_the_help() -> None:
    """Without a command the help comes on stderr and the exit code says usage."""
    done = command()
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Commands:" in done.stderr


def test_every_command_that_is_there_loads() -> None:
    """The table names modules and attributes that exist, each a command of that name with help and --json."""
    for name, entry in COMMANDS.items():
        found = shell.load(entry.target)
        assert isinstance(found, click.Command)
        assert found.name == name
        assert found.help
        assert "json_" in {option.name for option in found.params}


def test_unknown_commands_name_the_nearest() -> None:
    """A misspelled command ends with 2 and names the word that was meant."""
    done = command("pul")
    assert done.returncode == 2
    assert done.stderr == "error: there is no command 'pul'\n  why: did you mean 'pull'?\n  fix: registry pull\n"
    assert command("xyzzy").stderr == "error: there is no command 'xyzzy'\n  fix: registry --help\n"


def test_unknown_options_name_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelled option ends with 2, in our words, and points at the help of its command."""
    assert shell.run(failing(KeyError()), "sample", ["run", "--colour", "never"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: No such option '--colour'")
    assert "--color" in text
    assert text.endswith("fix: sample run --help\n")


def test_a_missing_module_is_an_incomplete_installation() -> None:
    """A command whose module is not installed says so; a module that misses something else is not mistaken for it."""
    with pytest.raises(errors.NotFoundError, match="not complete"):
        shell.load("weighbridge.registry.cli.nothing:nothing")


@pytest.mark.parametrize("kind", errors.kinds(), ids=lambda kind: kind.__name__)
def test_errors_end_with_their_exit_code(
    kind: type[errors.WeighbridgeError], capsys: pytest.CaptureFixture[str]
) -> None:
    """Every error of ours is told on stderr in three lines and ends with the exit code of its class."""
    assert shell.run(failing(kind("it broke", why="rust", fix="oil")), "sample", ["run"]) == kind.exit_code
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "error: it broke\n  why: rust\n  fix: oil\n")


@pytest.mark.parametrize("arguments", [["run", "--json"], ["run", "--json", "--nonsense"]])
def test_json_errors_are_objects(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """With --json an error is one object on stderr that fits the schema, also where the options are wrong."""
    code = shell.run(failing(errors.ConflictError("taken", n=7)), "sample", arguments)
    described = json.loads(capsys.readouterr().err)
    jsonschema.validate(described, SCHEMA)
    assert described["exit_code"] == code


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["ls", "--json"], True),
        (["ls", "-o", "json"], True),
        (["ls", "-ojson"], True),
        (["ls", "--output=jsonl"], True),
        (["ls", "--output", "jsonl"], True),
        (["ls", "-o", "table"], False),
        (["ls", "-o"], False),
        (["inspect", "--", "--json"], False),
        ([], False),
    ],
)
def test_json_is_recognised_before_parsing(arguments: list[str], wanted: bool) -> None:
    """Whether an error is JSON is decided by the words themselves, not by options that may not parse."""
    assert shell.wants_json(arguments) is wanted


def test_surprises_are_bugs_without_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unforeseen exception is called a bug in one sentence; the traceback comes with WEIGHBRIDGE_DEBUG=1 only."""
    group = failing(ZeroDivisionError("division by zero"))
    assert shell.run(group, "sample", ["run"]) == 1
    text = capsys.readouterr().err
    assert text.startswith("error: this is a bug in weighbridge: ZeroDivisionError: division by zero\n")
    assert "Traceback" not in text
    monkeypatch.setenv("WEIGHBRIDGE_DEBUG", "1")
    assert shell.run(group, "sample", ["run"]) == 1
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("WEIGHBRIDGE_DEBUG", "0")
    shell.run(group, "sample", ["run"])
    assert "Traceback" not in capsys.readouterr().err


def test_commands_choose_their_exit_code() -> None:
    """A command's returned integer is the exit code; nothing returned is success."""
    assert shell.run(sample(lambda *, out: 8 if out else 0), "sample", ["run"]) == 8
    assert shell.run(sample(lambda *, out: None if out else 1), "sample", ["run"]) == 0
    assert shell.run(failing(click.exceptions.Exit(5)), "sample", ["run"]) == 5


def test_interrupts_end_with_130(capsys: pytest.CaptureFixture[str]) -> None:
    """An interrupt is no error: one word, exit code 130."""
    assert shell.run(failing(KeyboardInterrupt()), "sample", ["run"]) == 130
    assert capsys.readouterr().err.strip() == "interrupted"


def test_a_question_without_an_answer_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Where the input ends before a question is answered, the option to use is what is missing."""
    assert shell.run(failing(click.Abort()), "sample", ["run"]) == 2
    assert "the input ended" in capsys.readouterr().err


SCRIPT = """
import sys, time, click
from weighbridge.registry import shell
@click.group()
def top(): pass
@top.command()
def flood():
    while True: sys.stdout.write("line\\n" * 1000)
@top.command()
def once():
    sys.stdout.write("line\\n")
@top.command()
def sleep():
    sys.stderr.write("ready\\n"); sys.stderr.flush(); time.sleep(60)
@top.command()
def odd():
    sys.stdout.write("\\u2192 \\ud800\\n")
sys.exit(shell.run(top, "top"))
"""


def test_a_closed_pipe_ends_quietly() -> None:
    """A reader that goes away (`| head`) ends the command without a word, amid the data or at the last flush."""
    for word in ("flood", "once"):
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, word], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stderr is not None
        if word == "flood":
            assert process.stdout.readline() == "line\n"
        process.stdout.close()
        assert process.stderr.read() == ""
        process.stderr.close()
        assert process.wait(30) == 141


def test_a_real_interrupt_ends_with_130() -> None:
    """Ctrl-C while a command works ends it with one word and 130."""
    # What was started in the background ignores SIGINT, and so would its children.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, "sleep"], stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, before)
    assert process.stderr is not None
    assert process.stderr.readline() == "ready\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.stderr.read().split() == ["interrupted"]
    process.stderr.close()
    assert process.wait(30) == 130


def test_no_encoding_breaks_a_command() -> None:
    """Characters that the terminal's encoding lacks are escaped, never an error."""
    for encoding in ("ascii", "latin-1", "utf-8"):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, "odd"],
            capture_output=True,
            env={**os.environ, "PYTHONIOENCODING": encoding},
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, b"")


def test_closed_streams_break_nothing() -> None:
    """A command whose stdout and stderr were closed before it began still ends with its exit code."""
    done = subprocess.run(["sh", "-c", f"{SCRIPTS}/registry --version >&- 2>&-"], check=False)
    assert done.returncode == 0


def test_completion_imports_no_command() -> None:
    """Completing a command's name answers from the table."""
    done = command(env={"_REGISTRY_COMPLETE": "bash_complete", "COMP_WORDS": "registry pu", "COMP_CWORD": "1"})
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["plain,pull", "plain,push", "plain,purge"], "")


def test_one_path_for_all() -> None:
    """`main` gives what the process gives: the same group, the same codes."""
    assert main(["--version"]) == 0
    assert main(["nonsense"]) == 2
    assert registry.name == "registry"


def settings(folder: Path, text: str) -> Settings:
    """Return the settings of a text."""
    path = folder / "weighbridge.toml"
    path.write_text(text)
    path.chmod(0o600)
    return load(path, {})


TWO = '[remotes.team]\nurl = "/srv/a"\n[remotes.hub]\nurl = "hf://acme"\n'


def test_the_remote_is_chosen_by_name_url_environment_or_home(tmp_path: Path) -> None:
    """--remote takes a name, a URL or a folder; else WEIGHBRIDGE_REMOTE counts, the home of all rules, the only one."""
    two = settings(tmp_path, TWO)
    assert context.choose_remote(two, "hub", {}).url == "hf://acme"
    assert context.choose_remote(two, "s3://b/p", {}).url == "s3://b/p"
    assert context.choose_remote(two, "hf://x", {}).unknown_license == "block"
    assert context.choose_remote(two, "./models", {}).url == f"{Path.cwd()}/models"
    assert [context.choose_remote(two, u, {}).name for u in ("./a/models/", "s3://b/p", "hf://x")] == [
        "models",
        "p",
        "x",
    ]
    assert context.choose_remote(two, None, {"WEIGHBRIDGE_REMOTE": "team"}).name == "team"
    ruled = settings(tmp_path, '[[watch]]\nroot = "/runs"\nhome = "team"\n' + TWO)
    assert context.choose_remote(ruled, None, {}).name == "team"
    assert context.choose_remote(load(None, {"HOME": "/h"}), None, {}).name == "local"


def test_an_unclear_remote_lists_what_there_is(tmp_path: Path) -> None:
    """An unknown remote names the nearest one; several possible ones are listed, never guessed."""
    two = settings(tmp_path, TWO)
    with pytest.raises(errors.UsageError) as caught:
        context.choose_remote(two, "hbu", {})
    assert caught.value.why == "did you mean 'hub'?"
    with pytest.raises(errors.UsageError) as caught:
        context.choose_remote(two, "x", {})
    assert "team, hub" in (caught.value.fix or "")
    with pytest.raises(errors.UsageError, match="several remotes"):
        context.choose_remote(two, None, {})
    with pytest.raises(errors.UsageError, match="--remote:"):
        context.choose_remote(two, "s3://k:secret@b/x", {})


def test_the_cache_is_kept_by_registry(tmp_path: Path) -> None:
    """The uuid seen behind a URL is remembered, so that reading the cache needs no request; another URL has another."""
    environ = {"WEIGHBRIDGE_CACHE": str(tmp_path / "cache")}
    team = context.choose_remote(settings(tmp_path, TWO), "team", {})
    uuid = "0f8b7c1e-4d3f-4a7e-9d2b-1d6b6f0e2a11"
    assert context.known_registry(team, environ) is None
    fresh.remember_registry(team, uuid, environ)
    fresh.remember_registry(team, uuid, environ)
    assert context.known_registry(team, environ) == uuid
    assert context.known_registry(team._replace(name="other"), environ) == uuid
    assert context.known_registry(team._replace(url="/srv/b"), environ) is None
    assert context.catalog_path(uuid, environ) == f"{tmp_path}/cache/catalog/{uuid}.db"


def test_a_damaged_memory_is_no_memory(tmp_path: Path) -> None:
    """What is not a uuid, or stands for another URL, is forgotten, never used as a path."""
    environ = {"WEIGHBRIDGE_CACHE": str(tmp_path / "cache")}
    team = context.choose_remote(settings(tmp_path, TWO), "team", {})
    fresh.remember_registry(team, "abc", environ)
    (place,) = (tmp_path / "cache" / "remotes").iterdir()
    for text in ("", "/srv/a\n../../etc/passwd\n", "/srv/b\nabc\n", "\xff"):
        place.write_bytes(text.encode("latin-1"))
        assert context.known_registry(team, environ) is None


def test_a_teammate_without_a_configuration_is_told_how_to_name_the_remote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody's own empty registry is meant by somebody who has just come; begin one is the second advice."""
    for name in ("WEIGHBRIDGE_CONFIG", "WEIGHBRIDGE_REMOTE", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["ls"]) == 3
    assert (
        "fix: name the team's remote with --remote URL or WEIGHBRIDGE_REMOTE, or begin one" in capsys.readouterr().err
    )
    assert main(["ls", "--remote", str(tmp_path / "gone")]) == 3
    assert "the first push or copy to it begins a registry there" in capsys.readouterr().err
