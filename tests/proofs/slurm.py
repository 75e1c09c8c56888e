"""Merges on the real Slurm: `make test-slurm`.

    python tests/proofs/slurm.py [CASE ...] [--quick]

A cluster of one node, for one case of two, is started by tests/lib (root, Debian's slurmctld, slurmd, slurm-client and
munge; installed where that needs nobody's leave); each case is a daemon with a yard of its own. A job is held by
stopping its process, so that something can happen while it runs. The time limit takes over a minute, as Slurm counts
minutes; --quick leaves the slow cases out. Prints SKIPPED with the reason where the scheduler cannot run.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from weighbridge.daemon.executors import slurm_words
from weighbridge.registry.flow.decision import committed
from weighbridge.registry.remotes.directory import open_directory
from weighbridge_testlib import builders, slurm
from weighbridge_testlib.bench import dying
from weighbridge_testlib.merge_bench import DyingStore
from weighbridge_testlib.slurm import Cluster
from weighbridge_testlib.slurm_stand import BASE, ClusterBench, Stand, expect, stood
from weighbridge_testlib.yard import BIN, BrokenError, until

REF = "team-run-1@v1"
SECRET = "AKIA-not-for-jobs"


def success(stand: Stand) -> None:
    """A rule's merge is one job, named by its key; its result is published with its lineage; no secret passes."""
    stand.yard.env["AWS_SECRET_ACCESS_KEY"] = SECRET
    with stand.yard.daemon():
        stand.adapter()
        held = stand.hold()
        expect(SECRET.encode() not in Path(f"/proc/{held}/environ").read_bytes(), "a secret reached the job")
        told = stand.until_state("running")
        expect("running on" in told["reason"], told)
        expect(stand.slurm.jobs()[told["job"]] == "RUNNING", stand.slurm.jobs())
        listed = stand.slurm.ask("squeue", "-h", "-j", told["job"], "-o", "%j").stdout
        expect(listed.startswith("wb-merge-"), listed)
        os.kill(held, signal.SIGCONT)
        stand.until_published()
        until(lambda: stand.events()[-1] == "merge done", 20, "the end of the merge")
        expect(stand.events() == ["merge wanted", "merge begun", "merge made", "merge done"], stand.events())


def cancel(stand: Stand) -> None:
    """The daemon ends its job when it is told to, knows of an scancel by hand, and takes both up again on demand."""
    with stand.yard.daemon():
        stand.adapter()
        stand.hold()
        job = stand.until_state("running")["job"]
        expect([m["state"] for m in stand.command("--cancel", REF)] == ["cancelled"], "not cancelled")
        until(lambda: stand.slurm.jobs().get(job) == "CANCELLED", 20, "Slurm to cancel the job")
        expect(stand.merge()["state"] == "cancelled", stand.merge())
        stand.command("--retry", REF)
        stand.hold()
        job = stand.until_state("running")["job"]
        stand.slurm.ask("scancel", job)
        told = stand.until_state("cancelled")
        expect(f"job {job} was cancelled in Slurm" in told["reason"], told)
        stand.command("--retry", REF)
        stand.until_published()


def controller(stand: Stand) -> None:
    """A controller that is away is unknown, not failed: nothing is submitted again, and a result counts without it."""
    with stand.yard.daemon():
        stand.adapter()
        held = stand.hold()
        job = stand.until_state("running")["job"]
        stand.slurm.stop_controller()
        try:
            until(lambda: "does not answer" in (stand.merge().get("reason") or ""), 30, "the daemon to notice")
            told = stand.merge()
            expect((told["state"], told["job"], told["tries"]) == ("running", job, 1), told)
            expect("taken to go on" in stand.problem(), stand.problem())
            os.kill(held, signal.SIGCONT)
            stand.until_published()
        finally:
            stand.slurm.start_controller()
            stand.slurm.await_controller()


def away(stand: Stand) -> None:
    """A merge that is wanted while the controller is away waits, says so, and is submitted once when it is back."""
    stand.slurm.stop_controller()
    try:
        with stand.yard.daemon():
            stand.adapter()
            until(lambda: stand.merge().get("state") == "waiting", 40, "the wait")
            expect("Slurm does not answer" in stand.problem(), stand.problem())
            stand.slurm.start_controller()
            stand.slurm.await_controller()
            stand.command("--retry", REF)
            stand.until_published()
            expect(stand.events().count("merge begun") == 1, stand.events())
    finally:
        if stand.slurm.ask("squeue").returncode != 0:
            stand.slurm.start_controller()
            stand.slurm.await_controller()


def restart(stand: Stand) -> None:
    """A daemon that is killed and started again goes on with the same job: it is neither lost nor repeated."""
    with stand.yard.daemon() as process:
        stand.adapter()
        held = stand.hold()
        job = stand.until_state("running")["job"]
        process.send_signal(signal.SIGKILL)
        process.wait()
    expect(stand.slurm.jobs().get(job) == "RUNNING", "the job ended with the daemon")
    with stand.yard.daemon() as process:
        told = stand.until_state("running")
        expect((told["job"], told["tries"]) == (job, 1), told)
        process.send_signal(signal.SIGKILL)
        process.wait()
    os.kill(held, signal.SIGCONT)  # it ends while nobody watches
    until(lambda: stand.slurm.jobs().get(job) not in {"RUNNING", "COMPLETING"}, 30, "the job to end")
    with stand.yard.daemon():
        stand.until_published()
        until(lambda: stand.events()[-1] == "merge done", 20, "the end of the merge")
        expect(stand.events().count("merge begun") == 1, stand.events())


def unrecorded(stand: Stand) -> None:
    """A daemon that dies between sbatch and its own note of it finds the job by its name and submits no second one."""
    bench = ClusterBench(stand.yard.folder / "bench", stand)
    bench.publish(stand.adapter_at(bench.runs / "team/run-1/checkpoint-5"))
    store = DyingStore(bench.catalog)
    store.fatal = ("running", False)
    bench.merging._store = store
    with dying(bench) as died:
        bench.merging.round()
    expect(died, "it did not die")
    (merge,) = bench.merges.merges()
    expect((merge.state, merge.handle) == ("submitting", None), merge)
    name = f"wb-merge-{merge.key}"
    (number, *more) = stand.slurm.ask("squeue", "-h", "-t", "all", "-o", "%i", f"--name={name}").stdout.split()
    expect(not more, more)
    bench.merging.round()
    (merge,) = bench.merges.merges()
    expect((merge.state, merge.handle, merge.tries) == ("running", number, 1), merge)
    until(lambda: bench.merge_all(1)[0].state == "done", 60, "the merged version", every=0.3)
    expect(stand.slurm.ask("squeue", "-h", "-t", "all", "-o", "%i", f"--name={name}").stdout.split() == [number],
           "submitted twice")  # fmt: skip
    expect(sorted(bench.versions()) == ["team-run-1-merged-bf16@v1", "team-run-1@v1"], bench.versions())


def forgotten(stand: Stand) -> None:
    """A daemon that loses its database while the job runs comes to the same try again and takes its result."""
    with stand.yard.daemon() as process:
        stand.adapter()
        held = stand.hold()
        job = stand.until_state("running")["job"]
        process.send_signal(signal.SIGKILL)
        process.wait()
    for part in stand.yard.state.glob("weighbridge.db*"):
        part.unlink()
    with stand.yard.daemon():
        stand.until_state("running", 40)
        expect((stand.merge()["job"], stand.merge()["tries"]) == (job, 1), stand.merge())
        os.kill(held, signal.SIGCONT)
        stand.until_published()


def passage(stand: Stand) -> None:
    """`registryd once` submits and ends; the next one takes the result."""
    stand.adapter()
    done = stand.yard.daemon_once()
    expect(done.returncode == 0, done.stderr)
    until(lambda: set(stand.slurm.jobs().values()) <= slurm_words.ENDED, 40, "the job to end")
    done = stand.yard.daemon_once()
    expect("team-run-1-merged-bf16@v1" in done.stdout, f"{done.stdout} {done.stderr}")


def requeue(stand: Stand) -> None:
    """A job that Slurm puts back into the queue is followed there, and goes on with the files it had finished."""
    with stand.yard.daemon():
        stand.adapter()
        stand.hold()
        job = stand.until_state("running")["job"]
        stand.slurm.ask("scontrol", "requeue", job)
        until(lambda: "waits in the queue" in (stand.merge().get("reason") or ""), 30, "the queue")
        stand.until_published(60)
        expect(stand.events().count("merge begun") == 1, stand.events())


def preempt(stand: Stand) -> None:
    """A job of higher priority puts the merge back into the queue, from where it comes again."""
    stand.configure(partition="main", gres="gpu:1")
    with stand.yard.daemon():
        stand.adapter()
        stand.hold()
        stand.until_state("running")
        urgent = stand.slurm.occupy("--partition=urgent", "--gres=gpu:1", "--mem=100M")
        until(lambda: "waits in the queue" in (stand.merge().get("reason") or ""), 40, "the preemption")
        stand.slurm.ask("scancel", urgent)
        stand.until_published(60)
        expect(stand.events().count("merge begun") == 1, stand.events())


def node(stand: Stand) -> None:
    """A node that goes down takes the job with it: it is queued again, status says what for, and it ends well."""
    with stand.yard.daemon():
        stand.adapter()
        stand.hold()
        stand.until_state("running")
        stand.slurm.ask("scontrol", "update", f"nodename={stand.slurm.host}", "state=drain", "reason=test")
        stand.slurm.ask("scontrol", "update", f"nodename={stand.slurm.host}", "state=down", "reason=test")
        try:
            until(lambda: "waits in the queue" in (stand.merge().get("reason") or ""), 40, "the queue")
        finally:
            stand.slurm.ask("scontrol", "update", f"nodename={stand.slurm.host}", "state=resume")
        stand.until_published(60)


def refused(stand: Stand) -> None:
    """What sbatch refuses names the setting; when the configuration is read again, the merge is made."""
    stand.configure(partition="nope")
    with stand.yard.daemon() as process:
        stand.adapter()
        stand.until_state("waiting")
        told = stand.problem()
        expect("Invalid partition name" in told, told)
        expect("partition in [merge.slurm]" in told, told)
        checked = stand.yard.registry("doctor", "--no-write").stdout
        expect("there is no partition nope" in checked and "one of: main, urgent" in checked, checked)
        stand.configure(partition="main")
        checked = stand.yard.registry("doctor", "--no-write").stdout
        expect("the cluster answers with 2 partitions" in checked, checked)
        process.send_signal(signal.SIGHUP)
        stand.until_published()


def absent(stand: Stand) -> None:
    """Without Slurm's programs the merge waits and status says what to do; once they are there, it is made."""
    whole = stand.yard.env["PATH"]
    stand.yard.env["PATH"] = str(BIN)
    with stand.yard.daemon():
        stand.adapter()
        stand.until_state("waiting")
        told = stand.problem()
        expect("there is no Slurm on this machine" in told, told)
        expect('executor = "local"' in told, told)
    stand.yard.env["PATH"] = whole
    with stand.yard.daemon():
        stand.command("--retry", REF)
        stand.until_published()


def killed(stand: Stand) -> None:
    """A job that dies without a result is tried again, not taken for done, after its result had time to come."""
    with stand.yard.daemon():
        stand.adapter()
        os.kill(stand.hold(), signal.SIGKILL)
        until(lambda: "left no result so far" in (stand.merge().get("reason") or ""), 40, "the end to be seen")
        until(lambda: "merge again" in stand.events(), 60, "another try")
        stand.until_published(60)


def limit(stand: Stand) -> None:
    """A job that reaches its time limit is tried again with what it finished, and status says what happened."""
    stand.configure(time="1m")
    with stand.yard.daemon():
        stand.adapter()
        stand.hold()
        job = stand.until_state("running")["job"]
        until(lambda: stand.slurm.jobs().get(job) == "TIMEOUT", 150, "the time limit", every=0.5)
        until(lambda: f"job {job} reached its time limit (1 minutes)" in str(stand.merge()), 30, "the words")
        stand.until_published(90)
        expect(stand.events().count("merge begun") == 2, stand.events())


def settings(stand: Stand) -> None:
    """Partition, account, time, cpus, memory and gres reach Slurm as they are given."""
    stand.configure(partition="main", account="team-7", time="90m", gres="gpu:1", cpus=2, memory="325 MB")
    with stand.yard.daemon():
        stand.adapter()
        held = stand.hold()
        job = stand.until_state("running")["job"]
        told = dict(w.split("=", 1) for w in stand.slurm.ask("scontrol", "-o", "show", "job", job).stdout.split()
                    if "=" in w)  # fmt: skip
        given = {"Partition": "main", "Account": "team-7", "TimeLimit": "01:30:00", "TresPerNode": "gres:gpu:1",
                 "CPUs/Task": "2", "MinMemoryNode": "310M", "Requeue": "1"}  # fmt: skip
        expect({key: told.get(key) for key in given} == given, told)
        expect(b"SLURM_JOB_GPUS=0" in Path(f"/proc/{held}/environ").read_bytes(), "no GPU was given")
        os.kill(held, signal.SIGCONT)
        stand.until_published()


def lost(stand: Stand) -> None:
    """An sbatch that was carried out and whose answer was lost is found by its name: there is no second job."""
    script = stand.yard.folder / "bin" / "sbatch"
    script.parent.mkdir()
    script.write_text(
        f'#!/bin/sh\n[ -e {script}.lost ] && exec {shutil.which("sbatch")} "$@"\ntouch {script}.lost\n'
        f'{shutil.which("sbatch")} "$@" >/dev/null\necho \'sbatch: error: Batch job submission failed: '
        "Socket timed out on send/recv operation' >&2\nexit 1\n"
    )
    script.chmod(0o755)
    stand.yard.env["PATH"] = f"{script.parent}:{stand.yard.env['PATH']}"
    before = set(stand.slurm.jobs())
    with stand.yard.daemon():
        stand.adapter()
        until(lambda: "timed out" in stand.problem(), 30, "the lost answer")
        stand.command("--retry", REF)
        stand.until_published()
        expect(len(set(stand.slurm.jobs()) - before) == 1, stand.slurm.jobs())
        expect(stand.events().count("merge begun") == 1, stand.events())


def overrun(stand: Stand) -> None:
    """A job that Slurm ends for its memory blocks the merge with the setting to raise; raised, it is made."""
    stand.configure(memory="20 MB")
    with stand.yard.daemon() as process:
        stand.adapter()
        stand.swell(20 << 20)
        stand.until_state("blocked", 60)
        told = stand.problem()
        expect("memory limit" in told, told)  # one of two lines is the last
        expect("raise memory in [merge.slurm]; then: registryd merges --retry" in told, told)
        stand.configure()
        process.send_signal(signal.SIGHUP)
        time.sleep(1)
        stand.command("--retry", REF)
        stand.until_published()


def compared(stand: Stand) -> None:
    """A job asks for the memory of its comparison, runs base, adapter and result, and their distances are published."""
    stand.configure(behaviour=True, memory=None)
    base = stand.yard.folder / "models" / BASE
    shutil.rmtree(base)  # that one only looks like a model
    builders.llama_model(base, shards=2, readme=builders.card(license_id="apache-2.0"))
    with stand.yard.daemon():
        builders.trainer_checkpoint(stand.yard.runs / "team/run-1/checkpoint-5", step=5)
        held = stand.hold()
        job = stand.until_state("running")["job"]
        shown = stand.slurm.ask("scontrol", "-o", "show", "job", job).stdout
        asked = float(shown.partition("MinMemoryNode=")[2].split()[0].removesuffix("M"))
        expect(asked > 2560, shown)  # a gigabyte for the libraries, half as much to spare, another for the job
        os.kill(held, signal.SIGCONT)
        stand.until_published(90)
        found = committed(open_directory(str(stand.yard.remote)), "team-run-1-merged-bf16", 1).facts.findings
        (proven,) = [one for one in found if one.code == "merge-proven"]
        seen = proven.data["behaviour"]
        expect(seen is not None and seen["error"] < seen["distance"], found)


def nodes(stand: Stand) -> None:
    """Where a node fails with everything on it, the merge goes on on another one that sees the same folder."""
    with stand.yard.daemon():
        stand.adapter()
        held = stand.hold()
        told = stand.until_state("running")
        first = told["reason"].rpartition(" on ")[2]
        stand.slurm.lose(first, held)
        until(lambda: stand.merge().get("reason", "").endswith(tuple(set(stand.slurm.nodes) - {first}))
              or stand.merge().get("state") in {"publishing", "merged", None}, 60, "another node")  # fmt: skip
        stand.until_published(60)
        expect(stand.events().count("merge begun") == 1, stand.events())
        shown = stand.slurm.ask("scontrol", "-o", "show", "job", told["job"]).stdout
        expect("Restarts=1" in shown and f"NodeList={first} " not in shown, shown)


CASES: tuple[Callable[[Stand], None], ...] = (
    success, cancel, controller, restart, unrecorded, forgotten, passage, requeue, refused, absent, away, preempt, node,
    settings, lost, overrun, compared, nodes, killed, limit,
)  # fmt: skip
SEVERAL = frozenset({"nodes"})
"""Cases on a cluster of two nodes."""

QUICK = 4
"""How many of the cases a quick run takes."""


def main() -> int:
    """Run the cases and print a line each."""
    names = {case.__name__: case for case in CASES}
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"any of {', '.join(names)}")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    if set(given.cases) - names.keys():
        parser.error(f"no case is called {', '.join(sorted(set(given.cases) - names.keys()))}")
    slurm.install()
    why = slurm.unavailable()
    if why is not None:
        print(f"slurm: SKIPPED, {why}", flush=True)
        return 0
    wanted = [names[name] for name in given.cases] or list(CASES[: QUICK if given.quick else None])
    wrong = 0
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="wb-slurm-") as folder, ExitStack() as stack:
        clusters: dict[int, Cluster] = {}
        for case in wanted:
            count = 2 if case.__name__ in SEVERAL else 1
            if count not in clusters:
                clusters[count] = stack.enter_context(slurm.cluster(Path(folder) / f"slurm-{count}", nodes=count))
                print(f"slurm: nodes: {count}; up {time.monotonic() - begun:.1f} s after the start", flush=True)
            cluster = clusters[count]
            started = time.monotonic()
            try:
                with stood(Path(folder) / case.__name__, cluster) as stand:
                    case(stand)
                    verdict = "ok"
            except (BrokenError, AssertionError) as error:
                wrong += 1
                said = [cluster.ask(*words).stdout for words in (("squeue", "--states=all"), ("sinfo", "-R"))]
                verdict = f"WRONG: {error}\n{stand.yard.log_tail(1500)}\n{''.join(said)}"
            cluster.ask("scancel", "--user=0")  # what a case left would hold up the next one
            print(f"slurm: {case.__name__:<10} {time.monotonic() - started:5.1f} s  {verdict}", flush=True)
    print(f"slurm: {len(wanted)} cases, {wrong} wrong, {time.monotonic() - begun:.0f} s", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
