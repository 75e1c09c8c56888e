"""The jail of a child process: what a hostile input may try from inside, and that each of it is refused and told."""

import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from weighbridge.adapters import jail, landlock, limits, seccomp, worker
from weighbridge.adapters.jail import Held, Policy
from weighbridge.registry.errors import JailedError, LimitError, WeighbridgeError
from weighbridge_testlib.canary import HERE

LIB = str(Path(__file__).parent / "lib")
WHOLE = landlock.version() >= 3 and seccomp.machine() is not None
needs_all = pytest.mark.skipif(not WHOLE, reason="this kernel has no Landlock from ABI 3 on, or no known filter")
needs_filter = pytest.mark.skipif(seccomp.machine() is None, reason="the calls of this processor are not known")


@pytest.fixture(autouse=True)
def _tasks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", LIB)


def policy(tmp_path: Path, **changes: Any) -> Policy:
    """Return a policy that lets a task read `in` and write `stage`."""
    for name in ("in", "stage", "outside"):
        (tmp_path / name).mkdir(exist_ok=True)
    (tmp_path / "outside" / "id_rsa").write_text("the key")
    plain = Policy(
        reads=(str(tmp_path / "in"),),
        writes=(str(tmp_path / "stage"),),
        memory=200 << 20,
        processor=100,
        clock=100,
    )
    return msgspec.structs.replace(plain, **changes)


def run(tmp_path: Path, task: str, changes: dict[str, Any] | None = None, **request: Any) -> dict[str, Any]:
    """Run a task of the canary inside a jail."""
    ended = worker.jailed(f"{HERE}:{task}", request, policy(tmp_path, **(changes or {})))
    assert ended.held == jail.able()
    return ended.result


def test_a_task_that_behaves_runs_with_threads_and_progress(tmp_path: Path) -> None:
    """Inputs are read, results written, renamed and tidied, threads started, and progress arrives."""
    moved: list[int] = []
    rules = policy(tmp_path)
    (tmp_path / "in" / "words").write_text("hello")
    request = {"read": str(tmp_path / "in" / "words"), "write": str(tmp_path / "stage" / "out")}
    result, held, _ = worker.jailed(f"{HERE}:behave", request, rules, progress=moved.append)
    assert result == {"words": "hello", "threads": [1], "cwd": str(tmp_path / "stage"), "group": True}
    assert (held, moved) == (jail.able(), [8 << 20])
    assert (tmp_path / "stage" / "out").read_text() == "hello"


def test_the_environment_is_built_from_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret of any name is not in the child's environment, and its home is the staging folder."""
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "SOMETHING_NOBODY_KNOWS"):
        monkeypatch.setenv(name, "hush-hush")
    seen = run(tmp_path, "environment", {"variables": (("HF_HUB_OFFLINE", "1"),)})
    assert "hush-hush" not in str(seen)
    assert seen["environ"]["HOME"] == seen["environ"]["TMPDIR"] == str(tmp_path / "stage")
    assert seen["environ"]["HF_HUB_OFFLINE"] == "1"


@needs_all
def test_only_devices_that_are_named_can_be_driven(tmp_path: Path) -> None:
    """A device that the policy names may be opened to write, another one and an ordinary file beside it may not."""
    named = {"devices": ("/dev/full",)}
    with pytest.raises(WeighbridgeError, match="did not finish") as caught:  # it opens, and is always full
        run(tmp_path, "write", named, path="/dev/full")
    assert "No space left" in str(caught.value.why)
    for path in ("/dev/tty", str(tmp_path / "outside" / "id_rsa")):
        with pytest.raises(JailedError):
            run(tmp_path, "write", named, path=path)


ESCAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "a key is read": ("read", {"path": "{out}/id_rsa"}),
    "the parent's environment is read": ("read", {"path": "/proc/{parent}/environ"}),
    "a folder is listed": ("listing", {"path": "{out}"}),
    "a file is written": ("write", {"path": "{out}/canary"}),
    "an input is written": ("write", {"path": "{in}/canary"}),
    "a file is removed": ("remove", {"path": "{out}/id_rsa"}),
    "a file is cut": ("empty", {"path": "{out}/id_rsa"}),
    "a file is opened to all": ("loosen", {"path": "{out}/id_rsa"}),
    "a link leads out": ("link", {"link": "{stage}/link", "path": "{out}/canary"}),
    "processes are started": ("fork", {"count": 4}),
    "a program is run": ("execute", {"path": "{stage}/canary"}),
    "the parent is shot": ("shoot", {"process": "{parent}"}),
}


@needs_all
@pytest.mark.parametrize("name", ESCAPES)
def test_what_the_jail_forbids_is_refused_and_told(tmp_path: Path, name: str) -> None:
    """Each try ends as an error of its own kind with cause and advice, and leaves everything outside as it was."""
    task, words = ESCAPES[name]
    rules = policy(tmp_path)
    places = {"out": tmp_path / "outside", "in": tmp_path / "in", "stage": tmp_path / "stage", "parent": os.getpid()}
    request: dict[str, Any] = {key: v.format(**places) if isinstance(v, str) else v for key, v in words.items()}
    if "process" in request:
        request["process"] = int(request["process"])
    mode = (tmp_path / "outside" / "id_rsa").stat().st_mode
    with pytest.raises(JailedError) as caught:
        worker.jailed(f"{HERE}:{task}", request, rules)
    assert caught.value.why
    assert caught.value.fix
    assert {path.name for path in tmp_path.rglob("*")} == {"in", "stage", "outside", "id_rsa"}
    assert (tmp_path / "outside" / "id_rsa").read_text() == "the key"
    assert (tmp_path / "outside" / "id_rsa").stat().st_mode == mode


@contextmanager
def listener(tmp_path: Path, kind: str) -> Iterator[tuple[socket.socket, dict[str, Any]]]:
    """Listen at this machine; yield the socket and what a task needs to find it."""
    family = socket.AF_UNIX if kind == "unix" else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM if kind == "udp" else socket.SOCK_STREAM) as heard:
        where: dict[str, Any] = {"kind": kind, "path": str(tmp_path / "in" / "s"), "port": 0}
        policy(tmp_path)
        heard.bind(where["path"] if kind == "unix" else ("127.0.0.1", 0))
        if kind != "udp":
            heard.listen()
        if kind != "unix":
            where["port"] = heard.getsockname()[1]
        heard.setblocking(False)
        yield heard, where


@needs_filter
@pytest.mark.parametrize("kind", ["tcp", "udp", "unix"])
def test_no_network_reaches_even_this_machine(tmp_path: Path, kind: str) -> None:
    """Neither TCP nor UDP nor a socket in a folder that may be read can be had, and the listener hears nothing."""
    with listener(tmp_path, kind) as (heard, where):
        with pytest.raises(JailedError):
            worker.jailed(f"{HERE}:call", where, policy(tmp_path))
        with pytest.raises(BlockingIOError):
            heard.recv(10) if kind == "udp" else heard.accept()


@pytest.mark.parametrize(
    ("task", "request_", "changes", "limit"),
    [
        ("hoard", {"pieces": 60}, {"memory": 64 << 20}, "memory"),
        ("crowd", {"count": 40}, {"threads": 20}, "threads"),
        ("sleep", {}, {"clock": 1}, "clock"),
        ("spin", {}, {"processor": 1}, "processor"),
    ],
)
def test_what_uses_too_much_is_ended_and_told(
    tmp_path: Path, task: str, request_: dict[str, Any], changes: dict[str, Any], limit: str
) -> None:
    """Memory, threads, processor time and the clock each end the child, with the figure that was exceeded."""
    with pytest.raises(LimitError) as caught:
        run(tmp_path, task, changes, **request_)
    assert caught.value.data["limit"] == limit
    assert caught.value.why
    assert caught.value.fix
    assert caught.value.data["allowed"] == changes[{"crowd": "threads"}.get(task, limit)]


# ----------------------------------------------------------------------------------------------------- older kernels


def old_kernel(tmp_path: Path, task: str, request: dict[str, Any], *refused: str) -> dict[str, Any]:
    """Run a task in a jail under a kernel that refuses some calls; return what was printed."""
    rules = msgspec.json.encode(policy(tmp_path)).decode()
    done = subprocess.run(
        [sys.executable, "-m", HERE, task, json.dumps(request), rules, *refused],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": LIB},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@needs_filter
@pytest.mark.parametrize("code", ["ENOSYS", "EOPNOTSUPP"])
def test_without_landlock_the_rest_holds_and_is_told(tmp_path: Path, code: str) -> None:
    """A kernel without Landlock, or with it switched off, runs the child under all other limits; the answer says so."""
    policy(tmp_path)
    told = old_kernel(tmp_path, "read", {"path": str(tmp_path / "outside" / "id_rsa")}, f"landlock={code}")
    assert told == {"result": {"words": "the key"}, "held": {"landlock": 0, "filtered": True}}
    with listener(tmp_path, "tcp") as (_, where):
        told = old_kernel(tmp_path, "call", where, f"landlock={code}")
    assert told["error"]["code"] == "jailed"
    told = old_kernel(tmp_path, "fork", {"count": 2}, f"landlock={code}")
    assert told["error"]["code"] == "jailed"
    words = jail.finding(Held(0, True))
    assert words is not None
    assert "no Landlock" in words.message
    assert words.severity == "warn"


@needs_all
def test_without_a_filter_the_rest_holds_and_strays_are_ended(tmp_path: Path) -> None:
    """Where no filter can be put on, files stay confined, TCP is closed by Landlock, and the group ends as a whole."""
    policy(tmp_path)
    told = old_kernel(tmp_path, "read", {"path": str(tmp_path / "outside" / "id_rsa")}, "filter=EINVAL")
    assert told["error"]["code"] == "jailed"
    told = old_kernel(tmp_path, "leave", {"tell": str(tmp_path / "stage" / "pid")}, "filter=EINVAL")
    assert told["held"] == {"landlock": landlock.version(), "filtered": False}
    stray = int((tmp_path / "stage" / "pid").read_text())
    end = time.monotonic() + 20
    while limits.usage(stray)[0] and time.monotonic() < end:
        time.sleep(0.01)
    assert limits.usage(stray)[0] == 0
    if landlock.version() >= landlock.NET_FROM:
        with listener(tmp_path, "tcp") as (_, where):
            told = old_kernel(tmp_path, "call", where, "filter=EINVAL")
        assert told["error"]["code"] == "jailed"


def test_a_whole_jail_says_nothing_and_a_bare_machine_says_everything() -> None:
    """Each lack has one sentence of its own; where nothing lacks there is no finding."""
    assert jail.lacking(Held(7, True)) is None
    assert jail.finding(Held(7, True)) is None
    told = {jail.lacking(Held(abi, filtered)) for abi, filtered in ((0, True), (1, False), (4, False), (0, False))}
    assert len(told) == 4
    assert None not in told


def test_an_unforeseen_fault_inside_is_still_told_by_its_last_line(tmp_path: Path) -> None:
    """A missing input is no matter of the jail: it is told as what it is."""
    with pytest.raises(WeighbridgeError) as caught:
        run(tmp_path, "read", path=str(tmp_path / "in" / "nothing"))
    assert not isinstance(caught.value, JailedError)
    assert "FileNotFoundError" in str(caught.value.why)


@pytest.mark.parametrize("name", seccomp.MACHINES)
def test_every_jump_of_a_filter_lands_inside_it(name: str) -> None:
    """The program of each processor ends in an answer, and no jump leads beyond it; the kernel's own limit holds."""
    lines = seccomp.program(seccomp.MACHINES[name], 4711)
    assert len(lines) < 4096
    assert all(at + 1 + max(true, false) < len(lines) for at, (_, true, false, _) in enumerate(lines[:-1]))
    assert lines[-1] == (0x06, 0, 0, 0x7FFF0000)
    assert platform.machine() not in seccomp.MACHINES or seccomp.machine() is not None


def test_a_jailed_child_ends_with_its_parent(tmp_path: Path) -> None:
    """A parent that is killed takes its jailed child with it, though that leads a group of its own."""
    rules = msgspec.json.encode(policy(tmp_path)).decode()
    told = tmp_path / "stage" / "pid"
    parent = subprocess.Popen(
        [sys.executable, "-m", HERE, "sleep", json.dumps({"tell": str(told)}), rules],
        env={**os.environ, "PYTHONPATH": LIB}, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        end = time.monotonic() + 60
        while not (told.exists() and told.read_text()) and time.monotonic() < end:
            time.sleep(0.01)
        child = int(told.read_text())
        assert limits.usage(child)[0] > 0
    finally:
        parent.kill()
        parent.wait()
    end = time.monotonic() + 20
    while limits.usage(child)[0] and time.monotonic() < end:
        time.sleep(0.01)
    assert limits.usage(child)[0] == 0


@pytest.mark.parametrize("line", ["no json\n", "[1]\n", '{"progress": "much"}\n'])
def test_a_child_that_talks_nonsense_is_told_as_such(tmp_path: Path, line: str) -> None:
    """What a taken-over child writes into its pipe is an error of ours and never a fault of the parent."""
    with pytest.raises(WeighbridgeError) as caught:
        run(tmp_path, "babble", line=line)
    assert "did not answer" in caught.value.what
