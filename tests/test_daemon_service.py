"""The daemon as a process: it publishes, answers, stops, reloads, and tells its service manager how it is."""

import json
import os
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from weighbridge.daemon import logs, notify
from weighbridge.daemon.control import answer
from weighbridge.registry import control, errors
from weighbridge_testlib.builders import llama_model, lora_adapter, trainer_checkpoint, write_safetensors
from weighbridge_testlib.yard import BIN, Yard, stop, until

pytestmark = pytest.mark.long


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    """Give a yard with a short quiet time."""
    with Yard(tmp_path) as found:
        found.configure(daemon={"quiet": "0.3s", "scan": "1s"})
        yield found


def committed(yard: Yard) -> list[str]:
    """Return the versions that are committed now."""
    return sorted(yard.check()["committed"])


def status(yard: Yard) -> Any:
    """Return what the running daemon says of itself."""
    return control.ask(str(yard.socket), "status")


def test_it_publishes_what_is_finished_and_says_so(yard: Yard) -> None:
    """From a folder to a version, to the status, to the log."""
    with yard.daemon():
        trainer_checkpoint(yard.runs / "team/run-1/checkpoint-5", step=5)
        until(lambda: committed(yard), 20, "the version")
        until(lambda: status(yard)["queue"].get("done") == 1, 10, "the job to end")
        told = yard.registry("status", "--json")
        assert told.returncode == 0
        document = json.loads(told.stdout)
        assert document["daemon"]["state"] == "running"
        assert document["problems"] == []
        assert [r["name"] for r in document["remotes"] if r["ok"]] == ["team"]
        shown = yard.registry("status")
        assert "1 done" in shown.stdout
        events = json.loads(yard.registry("log", "--json").stdout)["events"]
        assert [e["event"] for e in events] == ["staged", "claimed", "committed", "done"]
        assert events[-1]["ref"] == "team-run-1@v1"
        one = yard.registry("log", "nobody", "--json")
        assert json.loads(one.stdout)["events"] == []
    assert committed(yard) == ["team-run-1@v1"]


def test_it_stops_cleanly_and_leaves_its_last_word(yard: Yard) -> None:
    """SIGTERM ends it with 0 in time; status then shows how it was, and that it is down."""
    with yard.daemon() as process:
        begun = time.monotonic()
        assert stop(process) == 0
        assert time.monotonic() - begun < 10
    assert not yard.socket.exists()
    told = yard.registry("status")
    assert told.returncode == 6
    assert "down; this is how it was" in told.stdout
    assert "not running" in told.stderr
    assert json.loads(yard.registry("status", "--json").stdout)["daemon"]["state"] == "down"


def test_status_without_any_daemon_says_how_to_start_one(yard: Yard) -> None:
    """Where nothing was ever exported the error names the cause and the command."""
    told = yard.registry("status")
    assert told.returncode == 6
    assert "registryd run" in told.stderr


def test_a_stop_in_the_middle_of_a_copy_is_quick_and_loses_nothing(yard: Yard) -> None:
    """What was cut is repeated by the next start."""
    big = {"w": ("F32", (64, 1 << 18), None), "v": ("F32", (64, 1 << 18), 1.0)}
    folder = llama_model(yard.runs / "team/run-1/final", tokenizer=False)
    write_safetensors(folder / "model.safetensors", big)
    with yard.daemon() as process:
        until(
            lambda: "stage" in "".join(str(p) for p in yard.remote.rglob("*/_wb/stage/*/*")),
            30,
            "the copy",
            every=0.001,
        )
        begun = time.monotonic()
        assert stop(process) == 0
        assert time.monotonic() - begun < 10
    with yard.daemon():
        until(lambda: committed(yard) or blocked(yard), 60, "an end")
    yard.check(closed=True, state=True)


def blocked(yard: Yard) -> list[Any]:
    """Return the problems that block."""
    return [p for p in status(yard)["problems"] if p["severity"] == "block"]


def test_a_killed_daemon_starts_again_at_once(yard: Yard) -> None:
    """The lock dies with the process; nothing is published twice."""
    with yard.daemon() as process:
        lora_adapter(yard.runs / "team/run-1/checkpoint-1")
        until(lambda: committed(yard), 20, "the version")
        process.kill()
        process.wait()
    with yard.daemon():
        time.sleep(1.5)
        assert committed(yard) == ["team-run-1@v1"]
    yard.check(contents=1, state=True)


def test_a_second_daemon_on_the_same_state_is_refused(yard: Yard) -> None:
    """It ends with 7 and a sentence; the first one goes on."""
    with yard.daemon() as process:
        second = yard.run([str(BIN / "registryd"), "run"])
        assert second.returncode == 7
        assert "another daemon works on" in second.stderr
        assert str(yard.state) in second.stderr
        once = yard.daemon_once("--json")
        assert once.returncode == 7
        assert json.loads(once.stderr.splitlines()[-1])["code"] == "state-held"
        assert process.poll() is None
        assert status(yard)["daemon"]["pid"] == process.pid


def test_a_reload_takes_new_rules_and_refuses_bad_ones(yard: Yard) -> None:
    """SIGHUP with a fault is logged and changes nothing; a good one is taken over."""
    other = yard.folder / "other"
    lora_adapter(other / "a/run/checkpoint-1", seed=1)
    good = yard.config.read_text()
    with yard.daemon() as process:
        yard.config.write_text(good.replace("quiet", "quite"))
        process.send_signal(signal.SIGHUP)
        until(lambda: "the old one stays" in yard.log_tail(), 10, "the refusal")
        lora_adapter(yard.runs / "team/run-1/checkpoint-1", seed=2)
        until(lambda: committed(yard), 20, "the version")
        yard.config.write_text(good.replace(str(yard.runs), str(other)))
        process.send_signal(signal.SIGHUP)
        until(lambda: [w["root"] for w in status(yard)["watch"]] == [str(other)], 10, "the new root")
        until(lambda: len(committed(yard)) == 2, 20, "what the new root holds")
        assert process.poll() is None


def test_the_service_manager_is_told(yard: Yard, tmp_path: Path) -> None:
    """READY after the start, WATCHDOG while the watch goes round, STOPPING at the end."""
    address = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(str(address))
        ear.settimeout(10)
        yard.env |= {"NOTIFY_SOCKET": str(address), "WATCHDOG_USEC": "900000"}
        with yard.daemon() as process:
            assert ear.recv(4096).startswith(b"READY=1")
            assert ear.recv(4096) == b"WATCHDOG=1"
            process.send_signal(signal.SIGHUP)
            seen = {ear.recv(4096) for _ in range(4)}
            assert b"RELOADING=1" in {message.partition(b"\n")[0] for message in seen}
            process.send_signal(signal.SIGTERM)
            while ear.recv(4096) != b"STOPPING=1":
                pass


def test_nobody_is_told_without_a_service_manager() -> None:
    """Outside systemd nothing is sent and nothing fails; another process's watchdog is not ours."""
    assert not notify.notify("READY=1", environ={})
    assert not notify.notify("READY=1", environ={"NOTIFY_SOCKET": "/nonexistent/socket"})
    assert notify.watchdog_seconds({"WATCHDOG_USEC": "2000000"}) == 2.0
    assert notify.watchdog_seconds({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "1"}) is None
    assert notify.watchdog_seconds({}) is None


def test_state_and_socket_are_private(yard: Yard) -> None:
    """The state is ours alone, the socket ours and our group's, and so is the exported status."""
    with yard.daemon():
        assert stat.S_IMODE(yard.state.stat().st_mode) == 0o700
        assert stat.S_IMODE(yard.socket.stat().st_mode) == 0o660
        for path in yard.state.rglob("*"):
            assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path
    assert stat.S_IMODE((yard.socket.parent / "status.json").stat().st_mode) == 0o640


def test_what_is_refused_is_visible_and_others_go_on(yard: Yard) -> None:
    """A damaged model blocks with file and number in the status; the healthy run beside it is published."""
    broken = llama_model(yard.runs / "team/broken/final")
    (broken / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "vocab_size": 32,
                "hidden_size": 16,
                "auto_map": {"AutoModel": "modeling.X"},
            }
        )
    )
    with yard.daemon():
        lora_adapter(yard.runs / "team/healthy/checkpoint-1")
        until(lambda: blocked(yard) and committed(yard), 30, "both ends")
        (problem, *_) = blocked(yard)
        assert problem["path"] == str(broken)
        shown = yard.registry("status")
        assert str(broken) in shown.stdout
        assert "fix:" in shown.stdout
        assert f"or: registry allow {broken} --code remote-code --reason TEXT" in shown.stdout
        assert committed(yard) == ["team-healthy@v1"]


def test_what_is_incomplete_waits_visibly(yard: Yard) -> None:
    """A header longer than its file is a reason to wait, named with file and numbers."""
    folder = lora_adapter(yard.runs / "team/run-1/checkpoint-1")
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with yard.daemon():
        until(lambda: any("adapter_model" in f["reason"] for f in status(yard)["folders"]), 20, "the reason")
        shown = yard.registry("status")
        assert "1 waiting for files" in shown.stdout
        assert "adapter_model.safetensors" in shown.stdout
    assert committed(yard) == []


def test_a_finding_can_be_allowed_with_a_reason(yard: Yard) -> None:
    """A private path blocks where the remote blocks them; allowed, the version carries the reason."""
    text = yard.config.read_text()
    yard.config.write_text(text + 'paths = "block"\n')
    lora_adapter(yard.runs / "team/run-1/checkpoint-1", base="/home/lw/models/base")
    with yard.daemon():
        until(lambda: blocked(yard), 20, "the refusal")
        codes = {p["code"] for p in blocked(yard)}
        path = str(yard.runs / "team/run-1")
        offered = f"or: registry allow {path}/checkpoint-1 --code private-path --reason TEXT"
        assert offered in yard.registry("status").stdout
        assert yard.registry("allow", f"{path}-typo", "--code", "private-path", "--reason", "x").returncode == 3
        refused = yard.registry("allow", path, "--code", "file-short", "--reason", "x")
        assert refused.returncode == 4
        assert "cannot be allowed" in refused.stderr
        unknown = yard.registry("allow", path, "--code", "no-such", "--reason", "x")
        assert unknown.returncode == 2
        for code in codes:
            allowed = yard.registry("allow", path, "--code", code, "--reason", "an internal remote", "--json")
            assert allowed.returncode == 0, allowed.stderr
        until(lambda: committed(yard), 20, "the version")
    manifest = json.loads((yard.remote / "models/team-run-1/v1/manifest.json").read_text())
    assert "an internal remote" in json.dumps(manifest["findings"])


def test_recorded_tells_what_was_published_from_a_folder(yard: Yard) -> None:
    """`registry verify PATH` compares a source folder with its record."""
    folder = lora_adapter(yard.runs / "team/run-1/checkpoint-1")
    with yard.daemon():
        until(lambda: status(yard)["queue"].get("done") == 1, 20, "the job to end")
        assert yard.registry("verify", folder).returncode == 0
        told = control.ask(str(yard.socket), "recorded", {"path": str(folder)})
        assert (told["name"], told["n"]) == ("team-run-1", 1)
        with pytest.raises(errors.NotFoundError):
            control.ask(str(yard.socket), "recorded", {"path": "/nowhere"})


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b"nonsense\n", "not JSON"),
        (b"[1]\n", "no object"),
        (b'{"v": 99, "op": "status"}\n', "version 1"),
        (b'{"v": 1, "op": "format-disk"}\n', "does not know"),
        (b'{"v": 1, "op": "fails"}\n', "failed to answer"),
        (b"{" * 100_000 + b"\n", "not JSON"),
    ],
)
def test_every_request_gets_an_answer(line: bytes, what: str) -> None:
    """Whatever comes in, one object goes out and the daemon goes on."""

    def fails(_args: Any) -> None:
        raise ZeroDivisionError

    told = answer(line, {"fails": fails})
    assert told["ok"] is False
    assert what in told["error"]["message"]


def test_the_log_is_json_and_masks_secrets(yard: Yard) -> None:
    """Every line is an object; no token shape and no secret of the environment gets through."""
    yard.env["HF_TOKEN"] = "plain-secret-of-mine"
    with yard.daemon():
        pass
    lines = (yard.folder / "registryd.log").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines][:1] == ["ready"]
    known = logs.secrets(yard.env)
    hidden = "x plain-secret-of-mine https://lw:pa55word@host/ hf_" + "a" * 30 + " Bearer abcdefghijkl"
    masked = logs.masked(hidden, known)
    for secret in ("plain-secret-of-mine", "pa55word", "hf_aaa", "abcdefghijkl"):
        assert secret not in masked


def test_nothing_to_watch_is_an_error(yard: Yard) -> None:
    """A daemon without a rule does not start, and says what to do."""
    yard.config.write_text(f'[remotes.team]\nurl = "{yard.remote}"\n')
    done = yard.run([str(BIN / "registryd"), "run"])
    assert done.returncode == 2
    assert "registry init" in done.stderr


def test_help_costs_no_daemon(yard: Yard) -> None:
    """The help of every command comes without importing the watch or the database."""
    script = (
        "import sys; from weighbridge.daemon import cli; cli.main(['--help']); print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [str(BIN / "python"), "-c", script], env=yard.env, capture_output=True, text=True, timeout=60, check=True
    )
    for heavy in ("watchdog", "apscheduler", "sqlite_utils", "msgspec"):
        assert heavy not in done.stderr.split()
    for command in ("run", "once", "drain", "install-unit"):
        assert command in done.stdout
        assert yard.run([str(BIN / "registryd"), command, "--help"]).returncode == 0


def test_the_listening_process_does_not_keep_the_lock_alive(yard: Yard) -> None:
    """The lock file is closed on exec, so a child of the daemon cannot hold it."""
    with yard.daemon() as process:
        held = []
        for path in Path(f"/proc/{process.pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                if path.readlink() == yard.state / "daemon.lock":
                    held.append(path.name)
        (number,) = held
        told = Path(f"/proc/{process.pid}/fdinfo/{number}").read_text()
        assert int(told.split("flags:")[1].split()[0], 8) & os.O_CLOEXEC
