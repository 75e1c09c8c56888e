"""A training yard in one folder: watched runs, a directory remote, a daemon's state, a cache, and the real commands.

    with Yard(folder) as yard:
        yard.configure(scan="1s")
        lora_adapter(yard.runs / "team/run-1/checkpoint-10", seed=1)
        yard.daemon_once()
        yard.check(contents=1)

The commands run as processes of their own with an environment of their own, as a person would start them, and `passage`
in this process. The checkers of tests/proofs run as processes too: they share nothing with the product.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from weighbridge.config.load import load
from weighbridge.daemon.passage import Passage, once

REPOSITORY: Final = Path(__file__).resolve().parents[3]
BIN: Final = Path(sys.executable).parent
CHECKER: Final = REPOSITORY / "tests/proofs/checker.py"
STATE_CHECKER: Final = REPOSITORY / "tests/proofs/state_checker.py"


class BrokenError(AssertionError):
    """A promise was broken; the message says which."""


class Yard:
    """One folder that holds everything; `env` is what the commands see."""

    def __init__(self, folder: Path, *, remote: Path | None = None, state: Path | None = None) -> None:
        self.folder = folder
        self.runs = folder / "runs"
        self.remote = remote or folder / "remote"
        self.state = state or folder / "state"
        self.cache = folder / "cache"
        self.config = folder / "weighbridge.toml"
        self.ack = folder / "acknowledged.jsonl"
        self.socket = folder / "registryd.sock"
        self.env = {
            "PATH": f"{BIN}:{os.environ.get('PATH', os.defpath)}",
            "HOME": str(folder / "home"),
            "XDG_CACHE_HOME": str(self.cache),
            "XDG_RUNTIME_DIR": str(folder / "runtime"),
            "WEIGHBRIDGE_CONFIG": str(self.config),
            "PYTHONSAFEPATH": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "LC_ALL": "C.UTF-8",
            "TZ": "UTC",
        }

    def __enter__(self) -> Self:
        for folder in (self.runs, self.folder / "home", self.cache):
            folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "runtime").mkdir(mode=0o700, exist_ok=True)
        self.configure()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def configure(
        self,
        daemon: Mapping[str, Any] | None = None,
        watch: Mapping[str, Any] | None = None,
        remote: Mapping[str, Any] | None = None,
        merge: Mapping[str, Any] | None = None,
        slurm: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the configuration: a short scan, no reserve, everything published; the arguments add or replace keys.

        A value None leaves a key out, so that the product's default holds.
        """
        of_daemon: dict[str, Any] = {
            "state": str(self.state),
            "socket": str(self.socket),
            "disk_reserve": "1 MB",
            "scan": "1s",
            "quiet": "1s",
        } | dict(daemon or {})
        of_watch: dict[str, Any] = {
            "root": str(self.runs),
            "name": "{project}-{run}",
            "home": "team",
            "publish": "all",
            "min_interval": "0s",
            "backfill": True,
        } | dict(watch or {})
        of_remote: dict[str, Any] = {"url": str(self.remote)} | dict(remote or {})
        tables = {"[daemon]": of_daemon, "[[watch]]": of_watch, "[remotes.team]": of_remote}
        tables |= {title: dict(of) for title, of in (("[merge]", merge), ("[merge.slurm]", slurm)) if of is not None}
        lines = [line for table, values in tables.items() for line in (table, *_keys(values), "")]
        self.config.write_text("\n".join(lines))

    def without_events(self) -> None:
        """Let the mount table say that the runs lie on a network file system: no events, the scan alone."""
        table = self.folder / "mountinfo"
        own = f"36 25 0:32 / {self.runs} rw,relatime - nfs4 server:/runs rw\n"
        table.write_text(Path("/proc/self/mountinfo").read_text() + own)
        self.env["WEIGHBRIDGE_MOUNTINFO"] = str(table)

    # -- commands

    def registry(self, *arguments: str | Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Run `registry` and return what it printed and its exit code."""
        return self.run([str(BIN / "registry"), *map(str, arguments)], timeout=timeout)

    def daemon_once(self, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Run `registryd once` to its end."""
        return self.run([str(BIN / "registryd"), "once", *arguments], timeout=timeout)

    def passage(self) -> Passage:
        """Do here what `registryd once` does, for tests of many passages. Raises BrokenError for a problem."""
        mask = os.umask(0o077)
        try:
            done = once(load(self.config, self.env), self.env)
        finally:
            os.umask(mask)
        if done.problems:
            raise BrokenError("; ".join(str(problem) for problem in done.problems))
        return done

    def run(self, command: Sequence[str], *, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Run any command in this yard's environment."""
        return subprocess.run(
            command, env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=timeout, check=False
        )

    def push(self, source: Path, name: str) -> subprocess.CompletedProcess[str]:
        """Publish a folder by hand."""
        return self.registry(*self.push_arguments(source, name))

    def push_arguments(self, source: Path, name: str) -> list[str]:
        """Return the arguments of `registry` that publish a folder and print the version."""
        return ["push", str(source), "--name", name, "--share", "--remote", "team", "-q"]

    @contextmanager
    def daemon(self, *arguments: str, log: Path | None = None, wait: float = 20) -> Iterator[subprocess.Popen[bytes]]:
        """Run `registryd run` for as long as the block lasts; its log goes to `log`, else to `registryd.log`."""
        with (log or self.folder / "registryd.log").open("ab") as stream:
            process = subprocess.Popen(
                [str(BIN / "registryd"), "run", *arguments], env=self.env, cwd=self.folder, stdout=stream, stderr=stream
            )
        try:
            until(lambda: self._answers() or process.poll() is not None, wait, "the daemon's socket")
            if process.poll() is not None:
                raise BrokenError(f"the daemon ended with {process.returncode}: {self.log_tail()}")
            yield process
        finally:
            stop(process)

    def _answers(self) -> bool:
        """Tell whether somebody listens on the socket; the file alone may be left from a daemon that was killed."""
        with socket.socket(socket.AF_UNIX) as link:
            return link.connect_ex(str(self.socket)) == 0

    def log_tail(self, size: int = 2000) -> str:
        """Return the end of the daemon's log."""
        log = self.folder / "registryd.log"
        return log.read_text(errors="replace")[-size:] if log.exists() else ""

    # -- checks

    def check(
        self,
        *,
        contents: int | None = None,
        closed: bool = False,
        swept: float | None = None,
        state: bool = False,
        remote: Path | None = None,
    ) -> dict[str, Any]:
        """Let the independent checkers look; raise BrokenError when they find anything, else return the report."""
        report, violations = self.look(contents=contents, closed=closed, swept=swept, state=state, remote=remote)
        if violations:
            raise BrokenError("; ".join(f"{v['code']} {v['subject']}: {v['detail']}" for v in violations[:8]))
        return report

    def look(
        self,
        *,
        contents: int | None = None,
        closed: bool = False,
        swept: float | None = None,
        state: bool = False,
        remote: Path | None = None,
    ) -> tuple[dict[str, Any], list[dict[str, str]]]:
        """Return the checkers' report and every violation."""
        root = remote or self.remote
        root.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(CHECKER), str(root), "--ack", str(self.ack)]
        command += ["--closed"] if closed else []
        command += ["--swept", str(swept)] if swept is not None else []
        command += ["--contents", str(contents)] if contents is not None else []
        done = self.run(command)
        if done.returncode not in {0, 1} or not done.stdout:
            raise BrokenError(f"the checker itself failed: {done.stderr[-1500:]}")
        report: dict[str, Any] = json.loads(done.stdout)
        violations: list[dict[str, str]] = report["violations"]
        if state and self.state.exists():
            with tempfile.NamedTemporaryFile("w", suffix=".json") as saved:
                saved.write(done.stdout)
                saved.flush()
                second = self.run([sys.executable, str(STATE_CHECKER), str(self.state), saved.name])
            if second.returncode not in {0, 1} or not second.stdout:
                raise BrokenError(f"the state checker itself failed: {second.stderr[-1500:]}")
            violations = violations + json.loads(second.stdout)["violations"]
        return report, violations

    def acknowledge(self, name: str, n: int, content: str) -> None:
        """Write down that somebody was told this version exists."""
        with self.ack.open("a") as stream:
            stream.write(json.dumps({"name": name, "n": n, "content": content}) + "\n")

    def acknowledge_all(self) -> int:
        """Write down every version that is committed now; return how many there are."""
        committed = self.check()["committed"]
        for version, content in committed.items():
            name, _, n = version.rpartition("@v")
            self.acknowledge(name, int(n), content)
        return len(committed)


def _keys(values: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {json.dumps(value)}" for key, value in values.items() if value is not None]


_PATIENCE: Final = 3
"""How much slower than a quiet machine a busy one may be before a wait counts as broken."""


def until(condition: Callable[[], object], seconds: float, what: str, *, every: float = 0.05) -> float:
    """Wait until a condition holds; return the seconds it took. Raises BrokenError after `seconds`."""
    begin = time.monotonic()
    patience = seconds * _PATIENCE
    while not condition():
        if time.monotonic() - begin > patience:
            raise BrokenError(f"waited {patience:.0f} s for {what}")
        time.sleep(every)
    return time.monotonic() - begin


def stop(process: subprocess.Popen[bytes], seconds: float = 15) -> int:
    """End a daemon as systemd does, by SIGTERM and after `seconds` by SIGKILL; return its exit code."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise BrokenError(f"SIGTERM did not end the daemon within {seconds:.0f} s") from None
    return process.returncode


def restore(template: Path, folder: Path) -> None:
    """Make a folder equal to a template, times included."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(template, folder, symlinks=True)
