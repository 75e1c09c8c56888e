"""`registry doctor`: what it finds, what it says to type, and how it ends."""

import errno
import json
import os
import socket
import sqlite3
import stat
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from weighbridge.adapters import jail
from weighbridge.config.load import load
from weighbridge.config.settings import Settings
from weighbridge.registry.cli import context
from weighbridge.registry.cli.checks import folders, machine, remotes
from weighbridge.registry.cli.checks.check import FAIL, OK, WARN, Check, guarded
from weighbridge.registry.cli.main import main
from weighbridge.registry.errors import DeniedError
from weighbridge.registry.remotes.memory import open_memory
from weighbridge.registry.remotes.protocol import Remote
from weighbridge.registry.remotes.wrappers import Wrapper

SHAPE = {
    "type": "object",
    "required": ["schema", "checks", "counts"],
    "properties": {
        "schema": {"const": "weighbridge/doctor/1"},
        "checks": {
            "type": "array",
            "minItems": 3,
            "items": {
                "required": ["status", "name", "message", "fix"],
                "properties": {
                    "status": {"enum": [OK, WARN, FAIL]},
                    "name": {"type": "string", "pattern": "^[a-z][a-zA-Z0-9_-]*$"},
                    "message": {"type": "string", "minLength": 1},
                    "fix": {"type": ["string", "null"]},
                },
            },
        },
        "counts": {"type": "object", "required": [OK, WARN, FAIL]},
    },
}


def configured(folder: Path, *, daemon: str = "", watch: str = "", remotes_: str = "") -> Path:
    """Write a configuration with a state folder, a watched folder and a directory remote of its own."""
    for name in ("state", "runs", "store"):
        (folder / name).mkdir(exist_ok=True, mode=0o700)
    path = folder / "weighbridge.toml"
    path.write_text(
        f'[daemon]\nstate = "{folder}/state"\nsocket = "{folder}/s.sock"\ndisk_reserve = "1 B"\n{daemon}'
        f'[[watch]]\nroot = "{folder}/runs"\nhome = "local"\n{watch}'
        f'[remotes.local]\nurl = "{folder}/store"\n{remotes_}'
    )
    path.chmod(0o600)
    return path


def settings(folder: Path, **parts: str) -> Settings:
    """Return the settings of `configured`."""
    return load(configured(folder, **parts), {})


def by_name(checks: Iterable[Check]) -> dict[str, Check]:
    """Return checks by their names."""
    return {check.name: check for check in checks}


def test_a_healthy_machine_ends_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where nothing fails the exit code is 0, warnings or not, and totals go to stderr."""
    assert main(["doctor", "--config", str(configured(tmp_path))]) == 0
    captured = capsys.readouterr()
    assert FAIL not in captured.out
    assert "ok    local is writable, and nothing there can be overwritten\n" in captured.out
    assert captured.err.rstrip().endswith("0 failures")
    assert all(line.startswith(("ok    ", "warn  ", "      fix: ")) for line in captured.out.splitlines())


def test_json_is_the_same_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints one object with every check and the counts, and nothing else."""
    assert main(["doctor", "--config", str(configured(tmp_path)), "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    jsonschema.validate(found, SHAPE)
    assert captured.err == ""
    assert sum(found["counts"].values()) == len(found["checks"])


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """The probes are gone afterwards; with --no-write there never were any."""
    path = configured(tmp_path)
    main(["doctor", "--config", str(path), "--no-write"])
    assert list((tmp_path / "store").iterdir()) == []
    main(["doctor", "--config", str(path)])
    assert [entry for entry in tmp_path.rglob("*") if entry.is_file()] == [path]
    assert not (tmp_path / "store" / "_wb" / "probe").exists()


def test_a_faulty_configuration_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Faults of the configuration are told with their lines, and end the report with 1."""
    path = configured(tmp_path, daemon='scann = "1s"\n', watch='publsh = "all"\n')
    assert main(["doctor", "--config", str(path)]) == 1
    text = capsys.readouterr().out
    assert "FAIL  " in text
    assert "line 5: [daemon] scann: unknown key; did you mean 'scan'?" in text
    assert "line 9: [[watch]] publsh" in text


def test_one_remote_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`registry doctor NAME` looks at that remote only; an unknown one is a usage error."""
    path = configured(tmp_path)
    assert main(["doctor", "local", "--config", str(path)]) == 0
    assert "python" not in capsys.readouterr().out
    assert main(["doctor", "loacl", "--config", str(path)]) == 2
    assert "did you mean 'local'?" in capsys.readouterr().err


def test_remotes_that_cannot_be_used_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A remote that is no folder fails, names the key, and stops none of the other checks."""
    (tmp_path / "file").write_text("x")
    path = configured(
        tmp_path, remotes_=f'[remotes.odd]\nurl = "{tmp_path}/file"\n[remotes.gone]\nurl = "{tmp_path}/gone"\n'
    )
    assert main(["doctor", "--config", str(path), "--json"]) == 1
    found = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert found["remote-odd"]["status"] == FAIL
    assert found["remote-local"]["status"] == OK
    assert found["remote-gone"]["status"] == WARN
    assert "not there yet" in found["remote-gone"]["message"]


def test_every_line_of_a_remote_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two remotes of one URL can be told apart, whatever fails there."""
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "weighbridge.json").write_text("torn")
    two = "".join(f'[remotes.{name}]\nurl = "{tmp_path}/one"\n' for name in ("odd", "even"))
    assert main(["doctor", "--config", str(configured(tmp_path, remotes_=two)), "--json"]) == 1
    found = [check for check in json.loads(capsys.readouterr().out)["checks"] if check["status"] == FAIL]
    assert [check["message"].partition(":")[0] for check in found] == ["odd", "even"]


def test_state_on_a_network_file_system_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The mount table decides: state on NFS fails, a watched root on NFS is scanned only."""
    table = tmp_path / "mountinfo"
    table.write_text(f"1 0 0:1 / / rw - ext4 /dev/vda rw\n2 1 0:2 / {tmp_path} rw - nfs4 filer:/x rw\n")
    monkeypatch.setenv("WEIGHBRIDGE_MOUNTINFO", str(table))
    assert main(["doctor", "--config", str(configured(tmp_path))]) == 1
    text = capsys.readouterr().out
    assert "lies on a network file system (nfs4)" in text
    assert "scanned only, it lies on nfs4" in text


def test_state_must_be_private_and_writable(tmp_path: Path) -> None:
    """A state folder that others can enter fails with its chmod; one that is missing is fine where it can be made."""
    found = settings(tmp_path)
    assert by_name(folders.state(found.daemon, ""))["state"].status == OK
    Path(found.daemon.state).chmod(0o750)
    check = by_name(folders.state(found.daemon, ""))["state-mode"]
    assert (check.status, check.fix) == (FAIL, f"chmod 700 {found.daemon.state}")
    missing = found.daemon._replace(state=str(tmp_path / "deep" / "er"))
    assert by_name(folders.state(missing, ""))["state"].status == OK
    full = found.daemon._replace(disk_reserve=1 << 62)
    assert by_name(folders.state(full, ""))["state"].status == WARN


def test_watched_folders(tmp_path: Path) -> None:
    """A watched folder that is missing or open to everybody is a warning; one in order says how it is watched."""
    found = settings(tmp_path)
    (check,) = folders.roots(found, "")
    assert (check.status, check.message) == (OK, f"watched {tmp_path}/runs: inotify and scan")
    (tmp_path / "runs").chmod(0o777)
    (check,) = folders.roots(found, "")
    assert (check.status, check.name) == (WARN, "watch-mode")
    (tmp_path / "runs").chmod(0o777 | stat.S_ISVTX)
    assert next(iter(folders.roots(found, ""))).status == OK
    (tmp_path / "runs").rmdir()
    (check,) = folders.roots(found, "")
    assert (check.status, check.fix) == (WARN, f"mkdir -p {tmp_path}/runs, or mend root in {found.source}")


@contextmanager
def answering(path: Path, answer: dict[str, Any]) -> Iterator[None]:
    """Answer one request on a socket."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(1)

        def serve() -> None:
            link, _ = server.accept()
            with link:
                link.recv(65536)
                link.sendall(json.dumps({"v": 1, **answer}).encode() + b"\n")

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        thread.join(10)


def test_the_daemon_is_asked(tmp_path: Path) -> None:
    """A daemon that answers is named; one that does not is a warning with the command that starts it."""
    found = settings(tmp_path)
    (check,) = folders.daemon(found)
    assert check.status == WARN
    assert "registryd run" in (check.fix or "")
    answer = {"ok": True, "result": {"daemon": {"pid": 4121, "uptime_seconds": 7200}}}
    with answering(Path(found.daemon.socket), answer):
        (check,) = folders.daemon(found)
    assert (check.status, check.message) == (OK, "daemon running, pid 4121, up 2h")


class Closed(Wrapper):
    """A remote that may be read only."""

    def create(self, key: str, body: bytes) -> None:  # noqa: ARG002 - the protocol's interface
        """Refuse."""
        raise DeniedError("PutObject denied", why="no such right", fix="grant it")


class Forgetful(Wrapper):
    """A store that lets a second writer overwrite."""

    def create(self, key: str, body: bytes) -> None:
        """Overwrite."""
        self.inner.delete(key)
        self.inner.create(key, body)


class Late(Wrapper):
    """A store whose clock is half an hour behind."""

    def now(self) -> float:
        """Return its clock."""
        return self.inner.now() - 1800


class Lying(Wrapper):
    """A store that gives other bytes back."""

    def read(self, key: str) -> bytes:
        """Return other bytes."""
        return self.inner.read(key)[::-1]


def checked(
    folder: Path, remote: Remote, monkeypatch: pytest.MonkeyPatch, url: str = "memory://probe"
) -> dict[str, Check]:
    """Return the checks of one remote that stands behind the home of a rule."""
    found = settings(folder, remotes_='[remotes.other]\nurl = "memory://other"\n')
    monkeypatch.setattr(context, "connect", lambda _: remote)
    return by_name(remotes.check(found, found.remotes["local"]._replace(url=url), write=True))


def test_a_remote_without_write_access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the daemon must publish, a missing right fails; for a remote that no rule needs it is a warning."""
    closed = Closed(open_memory("memory://closed", None))
    check = checked(tmp_path, closed, monkeypatch)["remote-local-write"]
    assert (check.status, check.fix) == (FAIL, "grant it")
    found = settings(tmp_path, remotes_='[remotes.other]\nurl = "memory://other"\n')
    other = by_name(remotes.check(found, found.remotes["other"], write=True))["remote-other-write"]
    assert other.status == WARN
    assert "pull works" in other.message


def test_a_store_without_conditional_writes_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second create of the probe must be refused; 200 alone proves nothing."""
    check = checked(tmp_path, Forgetful(open_memory("memory://f", None)), monkeypatch)["remote-local-write"]
    assert check.status == WARN
    assert "one writer only" in check.message


def test_a_clock_that_differs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a minute between the store's clock and ours is a warning."""
    check = checked(tmp_path, Late(open_memory("memory://l", None)), monkeypatch)["remote-local-clock"]
    assert check.status == WARN
    assert "30m behind" in check.message or "29m behind" in check.message


def test_a_store_that_changes_bytes_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other bytes than were written are a failure, and the probe is removed all the same."""
    inner = open_memory("memory://y", None)
    assert checked(tmp_path, Lying(inner), monkeypatch)["remote-local-write"].status == FAIL
    assert list(inner.list(remotes.PROBES)) == []


def test_a_folder_without_hard_links_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions appear by links, so a file system without them cannot be a remote."""
    found = settings(tmp_path)

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    found_checks = by_name(remotes._folder(found, "remote-local", found.remotes["local"], tmp_path / "store"))
    assert found_checks["remote-local-links"].status == FAIL


def test_room_below_the_reserve_is_told(tmp_path: Path) -> None:
    """A directory remote with less room than the reserve makes publishing wait, and doctor says so."""
    found = settings(tmp_path)
    tight = found._replace(daemon=found.daemon._replace(disk_reserve=1 << 62))
    checks = by_name(remotes.check(tight, found.remotes["local"], write=True))
    assert checks["remote-local-room"].status == WARN


def test_inotify_limits(tmp_path: Path) -> None:
    """Small limits are warnings with their sysctl, large ones are fine, none means scanning only."""
    folder = f"{tmp_path}/"
    assert [check.status for check in machine.inotify(folder)] == [WARN]
    for name, value in (("max_queued_events", 16384), ("max_user_watches", 8192), ("max_user_instances", 128)):
        (tmp_path / name).write_text(f"{value}\n")
    found = by_name(machine.inotify(folder))
    assert found["inotify-queue"].fix == "sysctl fs.inotify.max_queued_events=131072"
    assert found["inotify-watches"].status == WARN
    for name in ("max_queued_events", "max_user_watches"):
        (tmp_path / name).write_text("1048576\n")
    assert [check.status for check in machine.inotify(folder)] == [OK]


def test_another_registry_on_the_path(tmp_path: Path) -> None:
    """A foreign `registry` that comes first is named, with the twin to type; ours is recognised wherever it lies."""
    script = tmp_path / "registry"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    (check,) = machine.command(str(tmp_path))
    assert (check.status, check.fix) == (WARN, "type weighbridge instead")
    script.write_text("#!/usr/bin/python3\nfrom weighbridge.registry.cli.main import main\n")
    (check,) = machine.command(str(tmp_path))
    assert check.status == OK
    (check,) = machine.command(str(Path(sys.executable).parent))
    assert (check.status, "another" in check.message) == (OK, False)
    (check,) = machine.command(str(tmp_path / "empty"))
    assert check.status == WARN


def test_extras_matter_only_where_a_rule_needs_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing merge extra is a warning for a rule that merges, and torch for one whose merges are to be compared."""
    monkeypatch.setattr(machine, "find_spec", lambda _: None)
    assert {check.status for check in machine.extras(settings(tmp_path))} == {OK}
    merging = by_name(machine.extras(settings(tmp_path, watch='merge = "best"\n')))
    assert merging["extra-merge"].status == WARN
    assert merging["extra-merge"].fix == "pip install 'weighbridge[merge]'"
    given = settings(tmp_path, watch='merge = "best"\n')
    given = given._replace(merge=given.merge._replace(behaviour=True))
    torch = by_name(machine.extras(given))["extra-torch"]
    assert (torch.status, "merges will not be compared here" in torch.message) == (WARN, True)
    assert merging["extra-torch"].status == OK


def test_what_the_jail_lacks_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's answer decides; what it cannot hold is a warning in one sentence."""
    assert [check.name for check in machine.jailed()] == ["jail"]
    monkeypatch.setattr(jail, "able", lambda: jail.Held(0, True))
    (check,) = machine.jailed()
    assert (check.status, "no Landlock" in check.message) == (WARN, True)
    monkeypatch.setattr(jail, "able", lambda: jail.Held(4, True))
    assert [check.status for check in machine.jailed()] == [OK]


def test_an_old_sqlite_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions too old to use fail, those with the reset bug are noted, newer ones are plain."""
    for version, status, says in (
        ((3, 30, 0), FAIL, "too old"),
        ((3, 40, 1), OK, "WAL-reset"),
        ((3, 51, 3), OK, "sqlite"),
    ):
        monkeypatch.setattr(sqlite3, "sqlite_version_info", version)
        (check,) = machine.interpreter()
        assert check.status == status
        assert says in check.message


def test_the_environment_is_named_without_values() -> None:
    """Variables of ours are named; what is in them may be a secret."""
    found = by_name(machine.runtime({"WEIGHBRIDGE_CONFIG": "/x/canary", "PATH": "/bin"}))
    assert "WEIGHBRIDGE_CONFIG" in found["environment"].message
    assert "canary" not in found["environment"].message


def test_a_check_that_breaks_is_a_failure_of_its_own() -> None:
    """An exception inside a check becomes one failed line, and the report goes on."""

    def broken() -> Iterator[Check]:
        yield Check(OK, "first", "fine")
        raise ZeroDivisionError

    found = list(guarded("second", broken))
    assert [check.status for check in found] == [OK, FAIL]
    assert "this is a bug" in found[1].message


def test_the_remote_of_the_environment_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A teammate with nothing but WEIGHBRIDGE_REMOTE is told about that remote, not about the built-in one."""
    (tmp_path / "theirs").mkdir()
    for name in ("WEIGHBRIDGE_CONFIG", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WEIGHBRIDGE_REMOTE", str(tmp_path / "theirs"))
    assert main(["doctor", "--json"]) == 0
    names = [check["name"] for check in json.loads(capsys.readouterr().out)["checks"]]
    assert any(name.startswith("remote-theirs") for name in names)
    assert not any(name.startswith("remote-local") for name in names)


def test_a_read_only_disk_is_named_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a read-only mount neither mode nor user is to blame."""
    found = settings(tmp_path)
    Path(found.daemon.state).mkdir(parents=True, exist_ok=True)
    values = list(os.statvfs(found.daemon.state))
    values[8] |= os.ST_RDONLY
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(values))
    (check,) = folders.state(found.daemon, "")
    assert check.status == FAIL
    assert "read-only" in check.message
