"""What Slurm says, and what it means for a merge: pure functions over the text of squeue, scontrol, sbatch and scancel.

The states are those of squeue(1), "JOB STATE CODES". The scheduler's word decides only whether a result is still worth
waiting for; whether there is one is told by the file that the job leaves.
"""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from weighbridge.adapters import starved
from weighbridge.adapters.merge.batch import BUSY
from weighbridge.config.settings import SlurmSettings
from weighbridge.daemon.executors.protocol import Absent, Gone, Live, Seen, Unknown, Work
from weighbridge.registry import errors
from weighbridge.registry.refs import shown

FORMAT: Final = "%i|%T|%r|%N|%j"
"""Number, state, reason, nodes and name of a job; the name comes last, as only it may hold a bar."""

MEMORY: Final = "raise memory in [merge.slurm]"
DEVICE: Final = "its GPU was full: see that gres in [merge.slurm] gives each job one of its own"

WAITS: Final = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD",
                          "SPECIAL_EXIT"})  # fmt: skip
RUNS: Final = frozenset({"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT",
                         "EXPEDITING", "POWER_UP_NODE", "UPDATE_DB"})  # fmt: skip
ENDED: Final = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL",
                          "DEADLINE", "OUT_OF_MEMORY", "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL"})  # fmt: skip

_FAIR: Final = {
    "NODE_FAIL": "its node failed",
    "BOOT_FAIL": "its node did not start",
    "PREEMPTED": "a job of higher priority took its place",
    "REVOKED": "another cluster took it",
    "LAUNCH_FAILED": "it could not be started",
    "RECONFIG_FAIL": "its node could not be prepared",
}
"""States in which the job itself was not at fault."""

_NEVER: Final = {
    "BadConstraints": "no node can ever run it: look at gres, cpus and memory in [merge.slurm]",
    "PartitionConfig": "look at partition, cpus and memory in [merge.slurm]",
    "PartitionTimeLimit": "time in [merge.slurm] is longer than the partition allows",
    "PartitionNodeLimit": "look at partition in [merge.slurm]",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is not active",
    "AccountNotAllowed": "account in [merge.slurm] may not use this partition",
    "QOSNotAllowed": "qos in [merge.slurm] may not be used here",
    "InvalidAccount": "there is no such account: look at account in [merge.slurm]",
    "InvalidQOS": "there is no such QOS: look at qos in [merge.slurm]",
    "JobHeldUser": "it is held: scontrol release {number}",
    "JobHeldAdmin": "an administrator holds it",
    "launch failed requeued held": "it could not be started and is held: scontrol release {number}",
    "JobHoldMaxRequeue": "it was requeued too often and is held: scontrol release {number}",
}
"""Reasons that do not pass by themselves, with what to look at."""

_AWAY: Final = (
    "unable to contact", "connection refused", "connect failure", "timed out", "timeout", "zero bytes", "try again",
    "temporarily", "authentication", "munge", "network is unreachable", "no route", "insane message", "in standby",
    "unexpected message", "resource temporarily", "slurm_persist", "dns", "resolve", "host name",
)  # fmt: skip
"""Words of messages that say nothing of a job: the controller is away or cannot be talked to."""

_MEMORY: Final = ("exceeded memory limit", "exceeded job memory limit", "exceeded step memory limit", "oom-kill",
                  "oom_kill", "out of memory")  # fmt: skip
"""What slurmstepd and the work itself write into a job's log when the memory did not suffice."""

_REFUSED: Final = (
    ("partition", "partition"), ("account", "account"), ("qos", "qos"), ("generic resource", "gres"), ("gres", "gres"),
    ("time limit", "time"), ("--time", "time"), ("memory", "memory"), ("--mem", "memory"), ("cpu", "cpus"),
    ("node configuration", "gres, cpus and memory"),
)  # fmt: skip
"""Words of sbatch's refusals, and the setting each one is about."""


class Job(NamedTuple):
    """One job as squeue shows it; `number` is its id."""

    number: int
    state: str
    reason: str
    nodes: str
    name: str


def jobs(text: str, name: str) -> list[Job]:
    """Return the jobs of this name in the output of `squeue --format=FORMAT`; lines that are none are passed over."""
    found = []
    for line in text.splitlines():
        parts = line.strip().split("|", 4)
        if len(parts) == 5 and parts[0].isascii() and parts[0].isdigit() and parts[4] == name:
            state = parts[1].partition(" ")[0].rstrip("+").upper()
            found.append(Job(int(parts[0]), state, parts[2], parts[3], parts[4]))
    return found


def chosen(found: Sequence[Job]) -> Job | None:
    """Return the job that counts where several have one name: one that is not over, and of those the newest."""
    return max(found, key=lambda job: (job.state not in ENDED, job.number), default=None)


def exit_code(text: str) -> tuple[int, int] | None:
    """Return code and signal of an ended job from `scontrol --oneliner show job`, None where they are not told."""
    for word in text.split():
        key, _, value = word.partition("=")
        code, colon, number = value.partition(":")
        if key == "ExitCode" and colon and code.isdigit() and number.isdigit():
            return int(code), int(number)
    return None


def away(said: str) -> bool:
    """Tell whether a failed command only means that the controller is away: nothing is known then."""
    return any(word in said.casefold() for word in _AWAY)


def unknown_job(said: str) -> bool:
    """Tell whether the controller answered that it does not know a job: it forgets them soon after their end."""
    return "invalid job id" in said.casefold()


def short_of_memory(line: str) -> bool:
    """Tell whether a line of a job's log says that it was ended for its memory.

    Where Slurm watches memory itself (OverMemoryKill) the state of such a job is FAILED; only its log says why.
    """
    return any(word in line.casefold() for word in _MEMORY) and not starved.of_device(line)


def words(said: str) -> str:
    """Return what a command of Slurm said, in one line that can be shown."""
    lines = [line.partition("error: ")[2] or line for line in said.splitlines() if line.strip()]
    return shown("; ".join(lines)[:300]) or "it said nothing"


def seen(job: Job, settings: SlurmSettings, code: tuple[int, int] | None = None) -> Seen:
    """Return what a job's state means for a merge that has left no answer yet."""
    handle = str(job.number)
    if job.state in RUNS:
        on = f" on {job.nodes}" if job.nodes else ""
        return Live(handle, f"{job.state.lower()}{on}")
    if job.state not in ENDED:  # also states that a newer Slurm may bring: nothing is given up for them
        why = job.reason if job.reason not in {"", "None"} else job.state.lower()
        hint = _NEVER.get(why) or _NEVER.get(why.partition(" ")[0].strip("()"))
        told = f": {hint.format(number=handle)}" if hint else ""
        return Live(handle, f"waits in the queue ({shown(why)}){told}")
    what = f"job {handle}"
    if job.state in _FAIR:
        return Gone(f"{what}: {_FAIR[job.state]}", "again", fair=True)
    match job.state:
        case "CANCELLED":
            return Gone(f"{what} was cancelled in Slurm", "cancelled")
        case "TIMEOUT" | "DEADLINE":
            limit = "the partition's limit" if settings.time is None else f"{minutes(settings.time)} minutes"
            return Gone(f"{what} reached its time limit ({limit})", "again", "raise time in [merge.slurm]")
        case "OUT_OF_MEMORY":
            return Gone(f"{what} ran out of memory", "stop", MEMORY)
        case "COMPLETED":
            return Gone(f"{what} ended and left no result", "again", "see that the nodes write to [merge] scratch")
    if job.reason == "BadConstraints":
        return Gone(f"{what} was given up by Slurm ({job.reason})", "stop", _NEVER[job.reason])
    if code == (BUSY, 0):
        return Gone(f"{what} found another process at this merge", "again", fair=True)
    how = "" if code is None else f" with {code[0]}" if not code[1] else f" by signal {code[1]}"
    return Gone(f"{what} ended{how} and left no result", "again", "look at the job's log")


def judge(
    found: Sequence[Job], work: Work, settings: SlurmSettings, *, began: bool, code: tuple[int, int] | None = None
) -> Seen:
    """Return how a try stands by what squeue lists under its name; `began` says that its job wrote down its start."""
    job = chosen(found)
    if job is not None:
        return seen(job, settings, code)
    if work.handle is None and not began:
        return Absent()
    number = f"job {work.handle}" if work.handle else "the job"
    return Gone(f"Slurm does not know {number} any more, and it left no result", "again")


def refusal(said: str, code: int) -> errors.WeighbridgeError:
    """Return the error of an sbatch that submitted nothing; what it says decides whether waiting alone may help."""
    if away(said):
        return errors.UnreachableError("Slurm does not answer", why=words(said), fix="it is asked again by itself")
    keys = dict.fromkeys(key for word, key in _REFUSED if word in said.casefold())
    fix = f"look at {', '.join(keys)} in [merge.slurm]" if keys else "try the same with sbatch by hand"
    return errors.UsageError("sbatch refuses the merge", why=f"{words(said)} (it ended with {code})", fix=fix)


def number(told: str) -> str | None:
    """Return the job id that `sbatch --parsable` printed, None where it is none."""
    first = told.strip().splitlines()[-1:] or [""]
    found = first[0].partition(";")[0].strip()
    return found if found.isascii() and found.isdigit() else None


def minutes(seconds: float) -> int:
    """Return a time limit as Slurm counts it."""
    return max(1, math.ceil(seconds / 60))


def options(settings: SlurmSettings, work: Work, *, name: str, log: str, folder: str) -> list[str]:
    """Return the options of sbatch for a try.

    The name is its idempotency key; should it be submitted twice, `singleton` keeps the second one back until the
    first is over, and then it finds the result.
    """
    memory = settings.memory if settings.memory is not None else work.memory + (1 << 30)
    given = {
        "job-name": name,
        "comment": name,
        "chdir": folder,
        "output": log,
        "open-mode": "append",
        "dependency": "singleton",
        "nodes": "1",
        "ntasks": "1",
        "cpus-per-task": str(settings.cpus),
        "mem": f"{math.ceil(memory / (1 << 20))}M",
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "gres": settings.gres,
        "time": None if settings.time is None else str(minutes(settings.time)),
    }
    # Limits of the daemon's own process are not those of a job.
    return [
        "--parsable",
        "--requeue",
        "--propagate=NONE",
        *(f"--{key}={value}" for key, value in given.items() if value is not None),
    ]


def away_or(said: str, else_why: str) -> Unknown:
    """Return that nothing is known, in words for the two cases: nobody answered, or the answer was none."""
    if away(said):
        return Unknown(f"Slurm does not answer ({words(said)})", "it is asked again by itself")
    return Unknown(f"{else_why} ({words(said)})", "look at Slurm's configuration on this machine")
