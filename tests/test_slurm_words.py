"""What Slurm says and what it means: over output of the real programs (22.05), and whatever else may come."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge.config.settings import SlurmSettings
from weighbridge.daemon.executors import slurm, slurm_words
from weighbridge.daemon.executors.protocol import Absent, Gone, Live, Unknown, Work
from weighbridge.daemon.executors.slurm import SlurmExecutor
from weighbridge.registry import errors

NAME = "wb-merge-0123456789abcdef-1"
SETTINGS = SlurmSettings(time=3600.0)
WORK = Work(key="0123456789abcdef-1", stage="/shared/x", memory=1 << 30, handle="7")

QUEUE = f"""\
2|CANCELLED|Priority||{NAME}
7|RUNNING|None|vm|{NAME}
3|FAILED|BadConstraints||wrap
6|PENDING|PartitionConfig||wrap
8|FAILED|NonZeroExitCode|vm|a|b
"""
"""`squeue -h -t all -o FORMAT` of a real cluster, with names of ours and of others."""

SHOWN = (
    "JobId=8 JobName=wrap UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901752 Nice=0 Account=(null) "
    "QOS=(null) JobState=FAILED Reason=NonZeroExitCode Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 "
    "ExitCode=7:0 RunTime=00:00:00 TimeLimit=365-00:00:00 TimeMin=N/A SubmitTime=2026-11-30T01:34:36 Partition=main"
)

AWAY = (
    "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n",
    "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)\n",
    "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n",
    "slurm_load_jobs error: Zero Bytes were transmitted or received\n",
    "sbatch: error: Batch job submission failed: Protocol authentication error\n",
    'squeue: error: Munge encode failed: Failed to access "/run/munge/munge.socket.2": No such file or directory\n',
)

PARTITION = (
    "sbatch: error: invalid partition specified: nope\n"
    "sbatch: error: Batch job submission failed: Invalid partition name specified\n"
)
REFUSALS = (
    (PARTITION, "partition"),
    ("sbatch: error: Batch job submission failed: Requested node configuration is not available\n", "gres, cpus"),
    ("sbatch: error: Invalid generic resource (gres) specification\n", "gres"),
    ("sbatch: error: Memory specification can not be satisfied\n", "memory"),
    ("sbatch: error: Invalid --time specification\n", "time"),
    (
        "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified\n",
        "partition, account",
    ),
    ("sbatch: error: Batch job submission failed: Invalid qos specification\n", "qos"),
)


def job(state: str, reason: str = "None", number: int = 7) -> slurm_words.Job:
    """Return a job of ours."""
    return slurm_words.Job(number, state, reason, "vm" if state == "RUNNING" else "", NAME)


def test_only_jobs_of_the_name_are_read() -> None:
    """Other people's jobs, torn lines and names with bars in them do not become ours."""
    found = slurm_words.jobs(QUEUE + "9|RUNNING|None|vm\n10_4|RUNNING|None|vm|" + NAME + "\n\n", NAME)
    assert [(one.number, one.state) for one in found] == [(2, "CANCELLED"), (7, "RUNNING")]
    assert slurm_words.chosen(found) == job("RUNNING")
    assert slurm_words.jobs(QUEUE, "a|b") == [slurm_words.Job(8, "FAILED", "NonZeroExitCode", "vm", "a|b")]
    assert slurm_words.chosen([]) is None


def test_a_job_that_lives_counts_before_one_that_is_over() -> None:
    """Of several with one name the newest that is not over is followed; of ended ones the newest."""
    assert slurm_words.chosen([job("PENDING", number=3), job("COMPLETED", number=9)]) == job("PENDING", number=3)
    assert slurm_words.chosen([job("FAILED", number=3), job("CANCELLED", number=9)]) == job("CANCELLED", number=9)


def test_how_a_job_ended_is_read_from_scontrol() -> None:
    """Code and signal stand in ExitCode; without it nothing is claimed."""
    assert slurm_words.exit_code(SHOWN) == (7, 0)
    assert slurm_words.exit_code(SHOWN.replace("7:0", "0:9")) == (0, 9)
    assert slurm_words.exit_code("slurm_load_jobs error: Invalid job id specified") is None


@pytest.mark.parametrize("said", AWAY)
def test_a_controller_that_is_away_means_that_nothing_is_known(said: str) -> None:
    """It is never taken for an end, and never for a refusal."""
    assert slurm_words.away(said)
    assert isinstance(slurm_words.away_or(said, "squeue cannot tell"), Unknown)
    assert isinstance(slurm_words.refusal(said, 1), errors.UnreachableError)
    assert not slurm_words.unknown_job(said)


@pytest.mark.parametrize(("said", "key"), REFUSALS)
def test_a_refusal_names_the_setting_it_is_about(said: str, key: str) -> None:
    """What sbatch refused is an error of the configuration, with the words of sbatch and the key to look at."""
    error = slurm_words.refusal(said, 1)
    assert isinstance(error, errors.UsageError)
    assert f"look at {key}" in (error.fix or "")
    assert said.rpartition("error: ")[2].strip() in (error.why or "")


def test_a_forgotten_job_is_told_apart_from_a_silent_controller() -> None:
    """Slurm forgets a job soon after its end, and says so in words of its own."""
    assert slurm_words.unknown_job("slurm_load_jobs error: Invalid job id specified\n")
    assert not slurm_words.away("slurm_load_jobs error: Invalid job id specified\n")


@pytest.mark.parametrize(
    ("state", "reason", "code", "end", "says"),
    [
        ("CANCELLED", "Priority", None, ("cancelled", False), "was cancelled in Slurm"),
        ("TIMEOUT", "TimeLimit", None, ("again", False), "time limit (60 minutes)"),
        ("DEADLINE", "None", None, ("again", False), "time limit"),
        ("OUT_OF_MEMORY", "OutOfMemory", None, ("stop", False), "out of memory"),
        ("NODE_FAIL", "NodeFail", None, ("again", True), "its node failed"),
        ("PREEMPTED", "None", None, ("again", True), "higher priority"),
        ("BOOT_FAIL", "None", None, ("again", True), "did not start"),
        ("COMPLETED", "None", None, ("again", False), "left no result"),
        ("FAILED", "BadConstraints", None, ("stop", False), "given up by Slurm"),
        ("FAILED", "NonZeroExitCode", (127, 0), ("again", False), "ended with 127"),
        ("FAILED", "RaisedSignal:9(Killed)", (0, 9), ("again", False), "by signal 9"),
        ("FAILED", "NonZeroExitCode", (75, 0), ("again", True), "another process"),
    ],
)
def test_each_end_leads_to_a_state_that_can_be_explained(
    state: str, reason: str, code: tuple[int, int] | None, end: tuple[str, bool], says: str
) -> None:
    """Node failure, preemption and limits are tried again, what cannot get better stops, a wish is obeyed."""
    found = slurm_words.judge([job(state, reason)], WORK, SETTINGS, began=True, code=code)
    assert isinstance(found, Gone)
    assert (found.do, found.fair) == end
    assert says in found.why
    assert "job 7" in found.why


@pytest.mark.parametrize(
    ("state", "reason", "says"),
    [
        ("RUNNING", "None", "running on vm"),
        ("COMPLETING", "None", "completing"),
        ("PENDING", "Resources", "waits in the queue (Resources)"),
        ("PENDING", "(Priority)", "waits in the queue"),
        ("PENDING", "BadConstraints", "look at gres, cpus and memory"),
        ("PENDING", "launch failed requeued held", "scontrol release 7"),
        ("REQUEUE_HOLD", "JobHeldUser", "scontrol release 7"),
        ("SOMETHING_NEW", "None", "something_new"),
    ],
)
def test_what_still_lives_is_waited_for_with_its_reason(state: str, reason: str, says: str) -> None:
    """A job in the queue or running is followed; reasons that do not pass by themselves say what to look at."""
    found = slurm_words.judge([job(state, reason)], WORK, SETTINGS, began=False)
    assert isinstance(found, Live)
    assert found.handle == "7"
    assert says in (found.why or "")


def test_what_is_not_listed_was_never_submitted_or_is_forgotten() -> None:
    """Without an id and without a word of the job's start nothing was submitted; otherwise it is gone."""
    never = Work(key=WORK.key, stage=WORK.stage, memory=1)
    assert slurm_words.judge([], never, SETTINGS, began=False) == Absent()
    for work, began in ((WORK, False), (never, True)):
        found = slurm_words.judge([], work, SETTINGS, began=began)
        assert isinstance(found, Gone)
        assert (found.do, found.fair) == ("again", False)


@pytest.mark.parametrize(
    ("line", "short"),
    [
        ("slurmstepd-vm: error: Exceeded job memory limit", True),
        ("slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.batch.", True),
        ("error: the work ran out of memory", True),
        ("error: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", False),
        ("slurmstepd-vm: error: *** JOB 7 ON vm CANCELLED AT 2026-11-30T09:53:41 ***", False),
    ],
)
def test_a_job_s_log_says_what_its_state_does_not(tmp_path: Path, line: str, *, short: bool) -> None:
    """A job that Slurm ends for its memory is FAILED like any other: the last words of its own log stop the tries."""
    work = Work(key="k-2", stage=str(tmp_path), memory=1)
    (tmp_path / slurm.LOG.format("k-1")).write_text("slurmstepd: error: Exceeded job memory limit\n")
    (tmp_path / slurm.LOG.format(work.key)).write_text(f"hello\n{line}\n\n")
    gone = Gone("job 7 ended by signal 9", "again", "look at the job's log")
    seen = SlurmExecutor(SETTINGS, {}, grace=0.0)._late(work, gone)
    assert isinstance(seen, Gone)
    assert (seen.do, line.rpartition("error: ")[2] in seen.why) == ("stop" if short else "again", True)
    assert (seen.fix == "raise memory in [merge.slurm]") is short
    assert ("its GPU was full" in (seen.fix or "")) is ("CUDA" in line)


def test_a_try_is_submitted_under_its_key_and_with_what_is_set() -> None:
    """Name and comment carry the key; what is not set is left to the cluster."""
    bare = slurm_words.options(SlurmSettings(), WORK, name=NAME, log="/l", folder="/f")
    assert f"--job-name={NAME}" in bare
    assert {"--requeue", "--propagate=NONE", "--dependency=singleton", "--cpus-per-task=2", "--mem=2048M"} <= set(bare)
    assert not [word for word in bare if word.startswith(("--partition", "--account", "--qos", "--gres", "--time"))]
    full = SlurmSettings("gpu", "acme", "high", "gpu:1", 61.0, 8, 3 << 30)
    given_words = slurm_words.options(full, WORK, name=NAME, log="/l", folder="/f")
    wanted = {"--partition=gpu", "--account=acme", "--qos=high", "--gres=gpu:1", "--time=2"}
    assert wanted | {"--cpus-per-task=8", "--mem=3072M"} <= set(given_words)


def test_the_job_id_is_what_sbatch_prints() -> None:
    """With --parsable that is a number, on federations followed by the cluster; anything else is none."""
    assert slurm_words.number("123\n") == "123"
    assert slurm_words.number("123;east\n") == "123"
    assert slurm_words.number("sbatch: warning: x\n45\n") == "45"
    for told in ("", "\n", "Submitted batch job 5\n", "²\n", "-1\n"):
        assert slurm_words.number(told) is None


STATES = st.sampled_from(sorted(slurm_words.WAITS | slurm_words.RUNS | slurm_words.ENDED)) | st.text(max_size=20)


@given(st.text(), st.text(max_size=30))
def test_no_output_of_squeue_is_a_surprise(text: str, name: str) -> None:
    """Whatever is printed, reading it gives jobs of that name only, or none."""
    for one in slurm_words.jobs(text, name):
        assert one.name == name
        assert one.number >= 0
    assert slurm_words.exit_code(text) is None or ":" in text
    assert len(slurm_words.words(text)) > 0


@given(st.lists(st.tuples(STATES, st.text(max_size=30), st.integers(1, 99)), max_size=5), st.booleans(), st.booleans())
def test_every_listing_has_one_meaning(rows: list[tuple[str, str, int]], known: bool, began: bool) -> None:
    """A try is given up only on a state that says so: while any job of it lives, or may, it is waited for."""
    found = [job(state, reason, number) for state, reason, number in rows]
    work = WORK if known else Work(key=WORK.key, stage=WORK.stage, memory=1)
    seen = slurm_words.judge(found, work, SETTINGS, began=began)
    if any(one.state not in slurm_words.ENDED for one in found):
        assert isinstance(seen, Live)
    elif found:
        assert isinstance(seen, Gone)
    else:
        assert isinstance(seen, Gone) == (known or began)
    assert not isinstance(seen, Unknown)
    if isinstance(seen, Gone):
        assert seen.why
        assert not (seen.fair and seen.do != "again")


@given(st.floats(0.001, 1e8))
def test_a_time_limit_is_never_shorter_than_asked(seconds: float) -> None:
    """Slurm counts whole minutes: rounded up, at least one."""
    assert slurm_words.minutes(seconds) * 60 >= seconds
    assert slurm_words.minutes(seconds) * 60 < seconds + 60 or seconds < 60


@given(st.text(alphabet=st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=12))
def test_a_state_with_an_addition_is_still_that_state(tail: str) -> None:
    """`CANCELLED by 0` and `CANCELLED+`, as accounting spells them, are cancelled."""
    for text in (f"CANCELLED by {tail.replace('|', '')}", "CANCELLED+"):
        (one,) = slurm_words.jobs(f"7|{text}|None||{NAME}", NAME)
        assert one.state == "CANCELLED"
