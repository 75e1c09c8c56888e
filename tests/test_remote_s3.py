"""The remote that is a bucket, on real servers: SeaweedFS over http and over https, and one that keeps no promises."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from weighbridge.registry.remotes.protocol import Remote
from weighbridge.registry.remotes.s3.remote import S3Remote
from weighbridge_testlib import seaweed as servers
from weighbridge_testlib.remote_conformance import RemoteConformance
from weighbridge_testlib.seaweed import Server
from weighbridge_testlib.version_conformance import VersionConformance


class TestSeaweed(RemoteConformance):
    """On SeaweedFS the bucket keeps the contract of all remotes."""

    race_rounds = 1

    @pytest.fixture(autouse=True)
    def _server(self, seaweed: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        servers.credentials(monkeypatch)
        servers.lend(monkeypatch, seaweed.place("conformance"))
        self.server = seaweed

    def open(self, place: Path) -> Remote:
        """Open the remote below the prefix that belongs to a place."""
        return S3Remote(servers.below(self.server.place("conformance"), place))

    def opener(self) -> Callable[[Path], Remote]:
        """Return the function that opens it in another process."""
        return servers.open_from_environment


class TestSeaweedOverTls(TestSeaweed):
    """The same over https, with a certificate authority of our own."""

    def open(self, place: Path) -> Remote:
        """Open the remote over https."""
        return S3Remote(servers.below(self.server.place("conformance", tls=True), place))

    test_of_racing_processes_one_wins = None  # type: ignore[assignment]  # the server decides, whichever way the requests came


class TestJuicefs(RemoteConformance):
    """On a server that keeps no promises one writer can work; whoever races there is not protected, and is told so."""

    @pytest.fixture(autouse=True)
    def _server(self, juicefs: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        servers.credentials(monkeypatch)
        self.server = juicefs

    def open(self, place: Path) -> Remote:
        """Open the remote as one that only one machine writes to."""
        return S3Remote(self.server.place(servers.prefix_of(place), one_writer=True))

    test_of_racing_threads_one_wins = None  # type: ignore[assignment]
    test_of_racing_processes_one_wins = None  # type: ignore[assignment]
    test_of_racing_uploads_one_wins = None  # type: ignore[assignment]


class TestSeaweedVersions(VersionConformance):
    """The flow finds on a bucket what it needs of every remote."""

    @pytest.fixture(autouse=True)
    def _server(self, seaweed: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        servers.credentials(monkeypatch)
        self.server = seaweed

    def open(self, place: Path) -> Remote:
        """Open the remote below the prefix that belongs to a place."""
        return S3Remote(self.server.place(servers.prefix_of(place)))


def test_nobody_pays_for_a_bucket_who_has_none(tmp_path: Path) -> None:
    """A directory remote loads nothing of the S3 library; a bucket loads its core and not the transfer manager."""
    code = "import sys; from weighbridge.registry.remotes.table import open_remote as o; o({!r}); print(*sys.modules)"
    for url, loaded in ((str(tmp_path), False), ("s3://bucket/prefix", True)):
        said = subprocess.run([sys.executable, "-c", code.format(url)], capture_output=True, text=True, check=True)
        modules = set(said.stdout.split())
        assert ("botocore" in modules) is loaded
        assert modules.isdisjoint({"boto3", "s3transfer", "awscrt"})
