"""What `registry` costs before it does anything: CPU against a bare interpreter, and what stays unimported."""

import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from weighbridge.registry.cli.group import COMMANDS
from weighbridge_testlib.builders import lora_adapter
from weighbridge_testlib.measure import cost
from weighbridge_testlib.yard import Yard

SCRIPT = Path(sys.executable).parent / "registry"
BARE = (sys.executable, "-c", "pass")
LIMIT = 5.0
"""CPU of `python -c pass` that --help, ls, show and status may cost."""

HEAVY = {
    *("boto3", "botocore", "huggingface_hub", "hf_xet", "sqlite_utils", "sqlalchemy", "apscheduler", "watchdog"),
    *("torch", "numpy", "safetensors", "peft", "transformers", "jinja2", "yaml", "cryptography", "license_expression"),
    *("pydantic", "rich", "msgspec", "platformdirs", "prometheus_client", "dataclasses", "asyncio", "logging", "ssl"),
    *("pathlib", "urllib", "_strptime", "calendar"),
}
FRAME = (("--help",), ("--version",), ("nonsense",), ())
READING = (("ls",), ("show", "medical-sft"), ("status",))
PROBE = """
import atexit, sys
def told():
    sys.stderr.write("\\nMODULES " + " ".join(sorted(sys.modules)) + "\\n")
atexit.register(told)
from weighbridge.registry.cli.main import main
sys.argv = ["registry", *sys.argv[1:]]
sys.exit(main())
"""


NEEDED = ("push", *(arguments[0] for arguments in READING))
COMPLETE = all(find_spec(COMMANDS[name].target.partition(":")[0]) is not None for name in NEEDED)
needs_commands = pytest.mark.skipif(not COMPLETE, reason="this installation has no push, ls, show or status")


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    """Give a yard with one published version and a filled cache, and byte code kept as in any installation."""
    folder = tmp_path_factory.mktemp("startup")
    with Yard(folder) as made:
        made.env.pop("PYTHONDONTWRITEBYTECODE", None)
        made.env["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
        if COMPLETE:
            done = made.push(lora_adapter(folder / "adapter", seed=1), "medical-sft")
            assert done.returncode == 0, done.stderr
        yield made


def best(command: tuple[str | Path, ...], yard: Yard, rounds: int) -> float:
    """Return the least CPU seconds of several runs: what others do on the machine only ever adds."""
    return min(cost([str(word) for word in command], env=yard.env, cwd=yard.folder).cpu for _ in range(rounds))


def ratio(arguments: tuple[str, ...], yard: Yard) -> float:
    """Return the CPU of a command as a multiple of a bare interpreter's, the best of rounds taken in turns."""
    best((SCRIPT, *arguments), yard, 1)  # writes the byte code, fills what is cached
    return min(best((SCRIPT, *arguments), yard, 5) / best(BARE, yard, 5) for _ in range(4))


def imported(arguments: tuple[str, ...], yard: Yard) -> set[str]:
    """Return the modules that a command leaves in sys.modules."""
    done = yard.run([sys.executable, "-c", PROBE, *arguments])
    modules = set(done.stderr.rpartition("MODULES ")[2].split())
    assert "weighbridge.registry.cli.main" in modules, done.stderr
    return modules


def heavy(modules: set[str]) -> set[str]:
    """Return those that belong to a library which must stay out."""
    return {module.partition(".")[0] for module in modules} & HEAVY


def test_help_is_cheap(yard: Yard) -> None:
    """`registry --help` costs at most 5x the CPU of a bare interpreter."""
    assert ratio(("--help",), yard) <= LIMIT


@needs_commands
@pytest.mark.parametrize("arguments", READING, ids=" ".join)
def test_reading_is_cheap(yard: Yard, arguments: tuple[str, ...]) -> None:
    """`ls`, `show` and `status` from the cache cost at most 5x the CPU of a bare interpreter."""
    assert ratio(arguments, yard) <= LIMIT


@pytest.mark.parametrize("arguments", FRAME, ids=" ".join)
def test_the_frame_imports_nothing_heavy(yard: Yard, arguments: tuple[str, ...]) -> None:
    """Help, version and a misspelled word import none of the libraries that commands need."""
    assert heavy(imported(arguments, yard)) == set()


@needs_commands
@pytest.mark.parametrize("arguments", READING, ids=" ".join)
def test_reading_imports_nothing_heavy(yard: Yard, arguments: tuple[str, ...]) -> None:
    """From the cache, `ls`, `show` and `status` import none of them either."""
    yard.run([str(SCRIPT), *arguments])
    assert heavy(imported(arguments, yard)) == set()


def test_help_imports_no_command(yard: Yard) -> None:
    """No command's module is imported to list them all."""
    targets = {entry.target.partition(":")[0] for entry in COMMANDS.values()}
    assert targets & imported(("--help",), yard) == set()


def test_who_publishes_does_not_load_what_looks(yard: Yard) -> None:
    """A push looks at its folder in another process (ADR 25): the one that publishes loads nothing that judges."""
    probe = "import sys; import weighbridge.registry.cli.pushing; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, env=yard.env, check=True)
    judging = {"inspection", "provenance", "prove_base", "license", "paths", "plan"}
    looks = {"weighbridge.registry.flow.admit", *(f"weighbridge.adapters.{name}" for name in judging)}
    assert looks & set(done.stdout.split()) == set()


def test_the_configuration_is_light(yard: Yard) -> None:
    """Reading a whole configuration imports nothing heavy, nor what only words its faults."""
    probe = "import sys; from weighbridge.config.load import load; load(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, env=yard.env, check=True)
    modules = set(done.stdout.split())
    assert heavy(modules) == set()
    assert {"weighbridge.config.problems", "weighbridge.config.lines", "difflib"} & modules == set()


@pytest.mark.parametrize(
    ("entry", "module"),
    [
        ("weighbridge.registry.cli.main", "contextlib"),
        ("weighbridge.registry.cli.main", "click"),
        ("weighbridge.registry.cli.main", "weighbridge.registry.cli.ls"),
        ("weighbridge.daemon.cli", "weighbridge.daemon.commands"),
        ("weighbridge.daemon.cli", "weighbridge.registry.shell"),
    ],
)
def test_an_interrupt_during_the_first_imports_is_no_traceback(entry: str, module: str) -> None:
    """From the first import of either entry point on, an interrupt ends with 130 and one word."""
    probe = f"""
import os, sys, _signal
_signal.signal(2, _signal.default_int_handler)  # whoever runs the tests may ignore interrupts, and that is inherited
sys.path[:0] = {sys.path!r}
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), 2)
sys.meta_path.insert(0, Interrupting())
from {entry} import main
sys.argv = ["it", {"ls" if "registry" in entry else "once"!r}, "--help"]
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-S", "-c", probe], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
