"""Merges as jobs of a Slurm cluster: sbatch, squeue, scontrol and scancel, each for one short question.

A job's name carries the key of its try, so that a try whose submission was cut short is found again; the job writes
its own result, as Slurm forgets jobs within minutes. A controller that does not answer means that nothing is known.
"""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from weighbridge.adapters import starved
from weighbridge.adapters.merge import batch
from weighbridge.config.settings import SlurmSettings
from weighbridge.daemon.executors import slurm_words
from weighbridge.daemon.executors.protocol import Gone, Seen, Unknown, Work
from weighbridge.registry import errors

LOG: Final = "slurm-{}.log"
"""What a job of a try prints, in its staging folder; tries have each their own, as the last words of one count."""

GRACE: Final = 30.0
"""Seconds for which a job that is over may still leave its result: network file systems show files late."""

_PASSED: Final = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "SLURM_CONF", "LD_LIBRARY_PATH")
_PYTHON: Final = ("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")
_PATIENCE: Final = 30.0
_TAIL: Final = 4096
_LINES: Final = 8


class SlurmExecutor:
    """Submits and follows tries; holds nothing that a restart could lose."""

    def __init__(self, settings: SlurmSettings, environ: Mapping[str, str], *, grace: float = GRACE) -> None:
        self._settings = settings
        self._environ = {name: environ[name] for name in (*_PASSED, *_PYTHON) if name in environ}
        self._grace = grace
        self._over: dict[str, float] = {}

    @property
    def pause(self) -> float:
        """Seconds between two looks at the same try."""
        return self._settings.poll

    @property
    def workers(self) -> int | None:
        """Files a try writes at once."""
        return self._settings.cpus

    def room(self) -> bool:
        """Tell whether another try may be submitted: the queue is Slurm's business."""
        return True

    def submit(self, work: Work) -> str:
        """Submit a try and return its job id.

        Raises UnreachableError where nobody knows whether it was taken, UsageError with the setting that was refused.
        """
        python = [sys.executable, "-m", "weighbridge.adapters.merge.batch", work.stage]
        script = f"#!/bin/sh\nexec {shlex.join(python)}\n"
        given = slurm_words.options(self._settings, work, name=name(work), log=str(_log(work)), folder=work.stage)
        done = self._run("sbatch", *given, script=script)
        found = slurm_words.number(done.stdout) if done.returncode == 0 else None
        if found is not None:
            return found
        if done.returncode == 0:
            raise errors.UnreachableError("sbatch told no job id", why=slurm_words.words(done.stdout + done.stderr))
        raise slurm_words.refusal(done.stderr or done.stdout, done.returncode)

    def look(self, work: Work) -> Seen:
        """Return how a try stands."""
        asked = [f"--name={name(work)}", f"--user={os.geteuid()}", "--states=all", "--noheader"]
        try:
            done = self._run("squeue", *asked, f"--format={slurm_words.FORMAT}")
        except errors.WeighbridgeError as error:
            return Unknown(f"{error.what} ({error.why})", error.fix)
        if done.returncode != 0:
            return slurm_words.away_or(done.stderr or done.stdout, "squeue cannot tell")
        found = slurm_words.jobs(done.stdout, name(work))
        job = slurm_words.chosen(found)
        code = self._code(str(job.number)) if job is not None and job.state == "FAILED" else None
        began = batch.started(Path(work.stage), work.key) is not None
        seen = slurm_words.judge(found, work, self._settings, began=began, code=code)
        return self._late(work, seen) if isinstance(seen, Gone) else seen

    def starved(self, why: str) -> Gone:
        """Stop: the job would get the same memory again."""
        return Gone(why, "stop", slurm_words.MEMORY)

    def cancel(self, work: Work) -> None:
        """End every job of a try. Raises UnreachableError when Slurm cannot be told to."""
        done = self._run("scancel", f"--name={name(work)}", f"--user={os.geteuid()}")
        if done.returncode != 0 and not slurm_words.unknown_job(done.stderr):
            raise errors.UnreachableError(
                "the merge's job cannot be cancelled", why=slurm_words.words(done.stderr), fix="try again"
            )

    def _late(self, work: Work, seen: Gone) -> Seen:
        """Return that a job is gone, once its result had time to be seen; with the last line of its log."""
        if seen.do == "again" and not seen.fair:
            since = self._over.setdefault(work.key, time.monotonic())
            if time.monotonic() - since < self._grace:
                return Unknown(f"{seen.why} so far", None)
        self._over.pop(work.key, None)
        said = [] if seen.fair else _last_lines(_log(work))
        if not said:
            return seen
        seen = seen._replace(why=f"{seen.why}; its log ends with: {slurm_words.words(said[-1])}")
        if seen.do != "again":
            return seen
        if any(slurm_words.short_of_memory(line) for line in said):
            return self.starved(seen.why)
        return seen._replace(fix=slurm_words.DEVICE) if any(starved.of_device(line) for line in said) else seen

    def _code(self, number: str) -> tuple[int, int] | None:
        try:
            return slurm_words.exit_code(self._run("scontrol", "--oneliner", "show", "job", number).stdout)
        except errors.WeighbridgeError:
            return None

    def _run(self, program: str, *arguments: str, script: str = "") -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands; secrets of our environment do not pass into the job."""
        try:
            return subprocess.run(
                [program, *arguments], env=self._environ, input=script, capture_output=True, text=True,
                errors="replace", timeout=_PATIENCE, check=False,
            )  # fmt: skip
        except (FileNotFoundError, PermissionError) as error:
            raise errors.UnreachableError(
                "there is no Slurm on this machine",
                why=f"{program} cannot be started: {error.strerror}",
                fix='install Slurm\'s client programs, or set [merge] executor = "local"',
            ) from error
        except subprocess.TimeoutExpired as error:
            raise errors.UnreachableError(
                "Slurm does not answer", why=f"{program} took longer than {_PATIENCE:.0f} s", fix="it is asked again"
            ) from error


def name(work: Work) -> str:
    """Return the name of a try's job: whoever submits it again can find it."""
    return f"wb-merge-{work.key}"


def _log(work: Work) -> Path:
    return Path(work.stage) / LOG.format(work.key)


def _last_lines(path: Path) -> list[str]:
    """Return the last lines of a job's log, without empty ones."""
    try:
        with path.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - _TAIL))
            lines = stream.read().decode("utf-8", "replace").split("\n")
    except OSError:
        return []
    return [line for line in lines if line.strip()][-_LINES:]
