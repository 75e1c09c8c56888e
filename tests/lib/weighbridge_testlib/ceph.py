"""Ceph's object gateway on one node, an S3 server that is not like the others: a monitor, a store in memory, radosgw.

    with ceph.running(folder) as server: S3Remote(server.place("prefix"))

Programs of Debian's packages, from the PATH. Where they are not installed, the packages are fetched with apt and
unpacked into a cache of our own: nothing is installed, and nobody's leave is needed. All listen on loopback only.
"""

import os
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from weighbridge_testlib.seaweed import ACCESS, BUCKET, SECRET, Server, answers, ports

PACKAGES: Final = ("ceph-mon", "ceph-osd", "radosgw", "ceph-common")
PROGRAMS: Final = ("ceph", "ceph-authtool", "monmaptool", "ceph-mon", "ceph-osd", "radosgw", "radosgw-admin")
READY: Final = 60.0

_CONF: Final = """\
[global]
fsid = {fsid}
mon initial members = a
mon host = [v2:127.0.0.1:{mon2},v1:127.0.0.1:{mon1}]
public network = 127.0.0.0/8
cluster network = 127.0.0.0/8
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
auth allow insecure global id reclaim = false
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
mon allow pool size one = true
mon warn on pool no redundancy = false
mon data avail crit = 1
mon data avail warn = 1
osd crush chooseleaf type = 0
osd crush update on start = true
osd crush initial weight = 1
osd objectstore = memstore
memstore device bytes = 4294967296
osd memory target = 939524096
run dir = {base}/run
log file = {base}/log/$name.log
admin socket = {base}/run/$name.asok
pid file = {base}/run/$name.pid
keyring = {base}/keyring
setuser match path =
{libraries}
[mon.a]
mon data = {base}/mon
[osd.0]
osd data = {base}/osd
[client.rgw.a]
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw data = {base}/rgw
rgw enable ops log = false
rgw enable usage log = false
rgw crypt require ssl = false
"""

_KEYS: Final = (
    ("mon.", ("mon", "allow *")),
    ("client.admin", ("mon", "allow *", "osd", "allow *", "mgr", "allow *")),
    ("client.rgw.a", ("mon", "allow rwx", "osd", "allow rwx")),
    ("osd.0", ("mon", "allow profile osd", "osd", "allow *", "mgr", "allow profile osd")),
)


def installed(environ: Mapping[str, str]) -> bool:
    """Tell whether every program is found on a PATH."""
    return all(shutil.which(name, path=environ.get("PATH")) for name in PROGRAMS)


def unpacked(cache: Path) -> Path:
    """Return a folder that holds Debian's packages, fetched when it is not there. Raises RuntimeError without apt."""
    root = cache / "root"
    if root.is_dir():
        return root
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        raise RuntimeError(f"{', '.join(PROGRAMS)} are not installed (Debian: {' '.join(PACKAGES)})")
    archives = cache / "archives"
    (archives / "partial").mkdir(parents=True, exist_ok=True)
    options = ["-q", "-y", "--no-install-recommends", "--download-only", "-o", "Debug::NoLocking=1"]
    command = ["apt-get", *options, "-o", f"Dir::Cache::archives={archives}", "install", *PACKAGES]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        raise RuntimeError(f"apt-get cannot fetch {' '.join(PACKAGES)} (try apt-get update): {done.stderr[-500:]}")
    fresh = Path(tempfile.mkdtemp(dir=cache))
    for package in sorted(archives.glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", package, fresh], check=True)
    fresh.rename(root)
    shutil.rmtree(archives)
    return root


class Cluster:
    """A cluster of one node in a folder; its programs are ended by their process ids."""

    def __init__(self, base: Path, root: Path | None) -> None:
        self._base = base
        self._conf = base / "ceph.conf"
        self._stack = ExitStack()
        self._environ = {**os.environ, "CEPH_CONF": str(self._conf)}
        self._root = root
        if root is not None:
            self._environ |= _lent(root)

    def start(self) -> str:
        """Start everything and return the address of the gateway."""
        for name in ("mon", "osd", "rgw", "run", "log"):
            (self._base / name).mkdir(parents=True)
        mon2, mon1, port = ports(3)
        fsid = str(uuid.uuid4())
        given = {"fsid": fsid, "mon2": mon2, "mon1": mon1, "port": port, "base": self._base}
        self._conf.write_text(_CONF.format(**given, libraries=_libraries(self._root)))
        keyring = str(self._base / "keyring")
        for number, (who, caps) in enumerate(_KEYS):
            made = ["--create-keyring"] if number == 0 else []
            pairs = [word for what, may in zip(caps[::2], caps[1::2], strict=True) for word in ("--cap", what, may)]
            self._ask("ceph-authtool", *made, keyring, "--gen-key", "-n", who, *pairs)
        monmap = str(self._base / "monmap")
        address = f"[v2:127.0.0.1:{mon2},v1:127.0.0.1:{mon1}]"
        self._ask("monmaptool", "--create", "--addv", "a", address, "--fsid", fsid, monmap)
        self._ask("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
        self._run("ceph-mon", "-f", "-i", "a")
        osd = str(uuid.uuid4())
        self._ask("ceph", "osd", "new", osd)
        self._ask("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._run("ceph-osd", "-f", "-i", "0")
        self._await(lambda: '"num_up_osds":1' in self._ask("ceph", "osd", "stat", "-f", "json"), "the store")
        self._run("radosgw", "-f", "-n", "client.rgw.a")
        endpoint = f"http://127.0.0.1:{port}"
        self._await(lambda: answers(endpoint), "the gateway")
        self._ask(
            "radosgw-admin", "user", "create", "--uid", "ci", "--display-name", "ci",
            "--access-key", ACCESS, "--secret-key", SECRET,
        )  # fmt: skip
        return endpoint

    def stop(self) -> None:
        """End every program; what they hold is disposable."""
        self._stack.close()

    def _ask(self, program: str, *words: str) -> str:
        command = [program, *words]
        done = subprocess.run(command, env=self._environ, capture_output=True, text=True, check=False, timeout=READY)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-1500:]}")
        return done.stdout

    def _run(self, program: str, *words: str) -> None:
        with (self._base / "log" / f"{program}.out").open("wb") as stream:
            process = subprocess.Popen(
                [program, *words],
                env=self._environ, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream,
            )  # fmt: skip
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)

    def _await(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + READY
        while not condition():
            if time.monotonic() > end:
                said = "".join(path.read_text(errors="replace")[-600:] for path in (self._base / "log").glob("*.out"))
                raise RuntimeError(f"{what} did not come: {said}")
            time.sleep(0.1)


def _lent(root: Path) -> dict[str, str]:
    """Return the environment in which unpacked programs find each other and their libraries."""
    folders = [path for path in (root / "lib", root / "usr/lib") for path in sorted(path.glob("*-linux-*"))]
    return {
        "PATH": f"{root}/usr/bin:{root}/usr/sbin:{os.environ.get('PATH', os.defpath)}",
        "LD_LIBRARY_PATH": ":".join([*map(str, folders), *(str(folder / "ceph") for folder in folders)]),
        "PYTHONPATH": str(root / "usr/lib/python3/dist-packages"),
    }


def _libraries(root: Path | None) -> str:
    """Return the lines that say where unpacked plug-ins lie."""
    if root is None:
        return ""
    (folder,) = root.glob("usr/lib/*-linux-*/rados-classes")
    plugins = folder.parent / "ceph"
    return f"osd class dir = {folder}\nplugin dir = {plugins}\nerasure code dir = {plugins}/erasure-code\n"


@contextmanager
def running(folder: Path, cache: Path) -> Iterator[Server]:
    """Run the gateway with one bucket; `cache` keeps unpacked packages for the next time."""
    root = None if installed(os.environ) else unpacked(cache)
    cluster = Cluster(folder, root)
    try:
        server = Server(cluster.start(), BUCKET)
        server.client().create_bucket(Bucket=BUCKET)
        yield server
    finally:
        cluster.stop()
