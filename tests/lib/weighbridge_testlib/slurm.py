"""The real Slurm on one machine, as root, without systemd, cgroups or a database: slurmctld, slurmd, munged of our own.

    with cluster(folder) as slurm:
        env = slurm.env          SLURM_CONF; sbatch, squeue, scontrol and scancel are the real ones

Everything lies in one folder, munge's key and socket included; nothing of the machine's own Slurm is touched. Packages:
slurmctld, slurmd, slurm-client and munge of Debian; `install()` gets them where that needs nobody's leave.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

PROGRAMS: Final = ("slurmctld", "slurmd", "munged", "sbatch", "squeue", "scontrol", "scancel")
PACKAGES: Final = ("slurmctld", "slurmd", "slurm-client", "munge")
_NODE: Final = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory={memory} Gres=gpu:1 "
    "State=UNKNOWN"
)
_SBIN: Final = "/usr/sbin:/sbin"

_CONF: Final = """\
ClusterName=yard
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={base}/munge.socket,cred_expire=5
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool/%n
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/slurmd-%n.pid
SlurmctldLogFile={base}/log/slurmctld.log
SlurmdLogFile={base}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=1
JobAcctGatherParams=OverMemoryKill
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,batch_sched_delay=0,default_queue_depth=100,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MpiDefault=none
ReturnToService=2
MinJobAge={min_job_age}
KillWait=2
InactiveLimit=0
MessageTimeout=3
SlurmctldTimeout=30
SlurmdTimeout=30
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP DefMemPerCPU=256 PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP DefMemPerCPU=256 PriorityTier=9
"""


def missing() -> list[str]:
    """Return the programs that are not installed."""
    path = f"{os.environ.get('PATH', os.defpath)}:{_SBIN}"
    return [name for name in PROGRAMS if shutil.which(name, path=path) is None]


def install() -> None:
    """Install Debian's packages where this is root on a machine with apt; fails silently, `unavailable` tells."""
    if not missing() or os.geteuid() != 0 or not shutil.which("apt-get"):
        return
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    command = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *PACKAGES]
    for words in (["apt-get", "update", "-q"], command):
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(words, env=environ, capture_output=True, check=False, timeout=120)


def unavailable() -> str | None:
    """Return why the real scheduler cannot run here, or None."""
    if os.geteuid() != 0:
        return "slurmctld and slurmd need root"
    lacking = missing()
    return f"not installed: {', '.join(lacking)} (Debian: {' '.join(PACKAGES)})" if lacking else None


class Cluster:
    """A running cluster; its programs are ended by their process ids, never by name.

    One node bears the machine's name; several are a, b, ... with a slurmd each.
    """

    def __init__(self, base: Path, *, nodes: int = 1) -> None:
        self.base = base
        self.conf = base / "slurm.conf"
        self.host = socket.gethostname().partition(".")[0]
        self.env = {"SLURM_CONF": str(self.conf)}
        self.nodes = [self.host] if nodes == 1 else [f"{self.host}-{'abcdef'[number]}" for number in range(nodes)]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Write the configuration and start everything; returns when the node is idle."""
        for name in ("state", "spool", "log"):
            (self.base / name).mkdir(parents=True, exist_ok=True)
        self.base.chmod(0o755)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (1 << 20) - 1024
        ports = _free_ports(1 + len(self.nodes))
        each = {"host": self.host, "cpus": os.cpu_count() or 1, "memory": memory // len(self.nodes)}
        lines = [_NODE.format(name=name, port=port, **each) for name, port in zip(self.nodes, ports[1:], strict=True)]
        self.conf.write_text(
            _CONF.format(
                base=self.base, host=self.host, ctld_port=ports[0], nodes="\n".join(lines), min_job_age=300
            )
        )  # fmt: skip
        devices = [f"NodeName={name} Name=gpu File=/dev/null\n" for name in self.nodes]
        (self.base / "gres.conf").write_text("".join(devices))
        key = self.base / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        self._run(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self.base}/munge.socket",
            f"--pid-file={self.base}/munged.pid", f"--log-file={self.base}/log/munged.log",
            f"--seed-file={self.base}/munge.seed", "--num-threads=2",
        )  # fmt: skip
        self._await((self.base / "munge.socket").exists, "munged")
        self.start_controller()
        for node in self.nodes:
            self._run("slurmd", "-D", "-f", str(self.conf), "-N", node, key=node)
        idle = ["idle"] * len(self.nodes)
        self._await(
            lambda: self.ask("sinfo", "-h", "-N", "-p", "main", "-o", "%T").stdout.split() == idle, "idle nodes"
        )

    def lose(self, node: str, process: int) -> None:
        """Let a node fail: its slurmd, a job's process there and who watches over that end at once, without a word."""
        self._end(node, signal.SIGKILL)
        watcher = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        for one in (watcher, process):
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        self.ask("scontrol", "update", f"nodename={node}", "state=down", "reason=test")

    def start_controller(self) -> None:
        """Start slurmctld, again perhaps."""
        self._run("slurmctld", "-D", "-f", str(self.conf))

    def stop_controller(self) -> None:
        """End slurmctld: from now on nobody answers.

        By SIGTERM: one that is killed forgets the last seconds, and then drains a node that knows more than it does.
        """
        self._end("slurmctld", signal.SIGTERM)

    def await_controller(self) -> None:
        """Wait until slurmctld answers and its node can take jobs."""
        states = {"idle", "mixed", "allocated"}
        self._await(lambda: self.ask("sinfo", "-h", "-o", "%T").stdout.strip() in states, "a usable node")

    def stop(self) -> None:
        """End every job and every program of ours."""
        with suppress(subprocess.TimeoutExpired):
            self.ask("scancel", "--user=0", timeout=5)
        time.sleep(0.2)
        for name in (*self.nodes, "slurmctld", "munged"):
            self._end(name, signal.SIGTERM)

    def ask(self, *command: str, timeout: float = 30) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands and return what it printed."""
        environ = {**os.environ, **self.env}
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=timeout, check=False)

    def occupy(self, *options: str, seconds: int = 600) -> str:
        """Submit a job that only takes up room; return its id."""
        done = self.ask("sbatch", "--parsable", "--output=/dev/null", *options, f"--wrap=sleep {seconds}")
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def jobs(self) -> dict[str, str]:
        """Return the state of every job Slurm remembers, by id."""
        lines = self.ask("squeue", "-h", "-t", "all", "-o", "%i %T").stdout.splitlines()
        return {number: state for number, _, state in (line.partition(" ") for line in lines)}

    def _run(self, name: str, *options: str, key: str | None = None) -> None:
        program = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:{_SBIN}")
        assert program is not None
        with (self.base / "log" / f"{name}.out").open("ab") as stream:
            self._processes[key or name] = subprocess.Popen(
                [program, *options], env={**os.environ, **self.env}, stdin=subprocess.DEVNULL, stdout=stream,
                stderr=stream, start_new_session=True,
            )  # fmt: skip

    def _end(self, name: str, number: signal.Signals) -> None:
        process = self._processes.pop(name, None)
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _await(self, condition: Callable[[], object], what: str, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not condition():
            dead = [name for name, process in self._processes.items() if process.poll() is not None]
            if dead or time.monotonic() > end:
                logs = "".join(path.read_text(errors="replace")[-600:] for path in (self.base / "log").iterdir())
                raise RuntimeError(f"{what} did not come ({', '.join(dead) or 'nothing'} ended): {logs[-2000:]}")
            time.sleep(0.05)


def batch_process(folder: Path) -> int | None:
    """Return the process that makes a merge under a folder as a job, None while there is none."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                line = (entry / "cmdline").read_bytes()
                if b"weighbridge.adapters.merge.batch" in line and os.fsencode(folder) in line:
                    return int(entry.name)
    return None


@contextmanager
def cluster(base: Path, *, nodes: int = 1) -> Iterator[Cluster]:
    """Run a cluster for as long as the block lasts."""
    made = Cluster(base, nodes=nodes)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def _free_ports(count: int) -> list[int]:
    links = [socket.socket() for _ in range(count)]
    try:
        for link in links:
            link.bind(("127.0.0.1", 0))
        return [int(link.getsockname()[1]) for link in links]
    finally:
        for link in links:
            link.close()
