"""The conformance suite of remotes on other S3 servers than those of `make test`; run by make, not part of CI.

    make test-ceph                           Ceph's gateway, started here
    make test-s3-live URL=s3://bucket/prefix [ENDPOINT=] [REGION=] [CA=] [PROFILE=] [ADDRESSING=] [WRITERS=one]

The second one works on a bucket of your own, with your own credentials, below `weighbridge-test-<random>/` of the
prefix alone, and removes what it made there.
"""

import os
import random
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest

from weighbridge.config.load import remote_settings
from weighbridge.registry import errors
from weighbridge.registry.flow.marker import open_registry
from weighbridge.registry.flow.publish import publish
from weighbridge.registry.flow.pull import pull
from weighbridge.registry.flow.verify import verify_version
from weighbridge.registry.remotes.protocol import Remote
from weighbridge.registry.remotes.s3 import multipart
from weighbridge.registry.remotes.s3.client import Place, place_of
from weighbridge.registry.remotes.s3.remote import S3Remote
from weighbridge_testlib import ceph
from weighbridge_testlib import seaweed as servers
from weighbridge_testlib.audit import audit
from weighbridge_testlib.publishing import OWNER, candidate, rendered
from weighbridge_testlib.remote_conformance import RemoteConformance
from weighbridge_testlib.seaweed import Server
from weighbridge_testlib.shelf import payload

KEYS: Final = ("ENDPOINT", "REGION", "CA", "PROFILE", "ADDRESSING", "WRITERS")
OWN: Final = {
    name: value
    for name, value in os.environ.items()
    if name == "HOME" or name.startswith("AWS_") or name.lower().endswith("_proxy")
}
"""What the person who runs this is to the store: every test begins without it."""


class Bucket(RemoteConformance):
    """The contract of all remotes, and a day of a team, below a place that `base` gives."""

    race_rounds = 1
    base: Place

    def open(self, place: Path) -> Remote:
        """Open the remote of one test."""
        return S3Remote(servers.below(self.base, place))

    def opener(self) -> Callable[[Path], Remote]:
        """Return the function that opens it in another process."""
        return servers.open_from_environment

    def test_a_version_goes_there_and_back(self, place: Path, tmp_path: Path) -> None:
        """A version with a file in parts is published, kept apart from a second one, verified by reading and pulled."""
        remote = S3Remote(servers.below(self.base, place), single=1 << 20, part=multipart.PART_LEAST)
        registry = open_registry(remote, create=True, writer=OWNER.daemon if self.base.one_writer else None)
        size = multipart.PART_LEAST + 100_000
        bundles = [payload(n) | {"adapter_model.safetensors": random.Random(n).randbytes(size)} for n in (1, 2, 1)]
        receipts = [
            publish(
                remote, "team", registry, candidate(remote, tmp_path / str(at), files=files), OWNER, render=rendered
            )
            for at, files in enumerate(bundles)
        ]
        assert [(receipt.n, receipt.joined) for receipt in receipts] == [(1, False), (2, False), (1, True)]
        assert {receipt.verified for receipt in receipts[:2]} <= {"sha256-server", "sha256-read"}
        assert not [f for f in verify_version(remote, receipts[0].name, 1).findings if f.severity != "note"]
        pull(remote, receipts[0].name, 2, tmp_path / "pulled")
        assert all((tmp_path / "pulled" / path).read_bytes() == body for path, body in bundles[1].items())
        audit(remote, receipts[:2])
        assert remote.sweep(-60.0) == 0, "nothing is left unfinished"
        remote.close()


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Server]:
    """Run Ceph's gateway for all tests."""
    assert request.config.cache is not None
    try:
        with ceph.running(tmp_path_factory.mktemp("ceph"), request.config.cache.mkdir("ceph")) as server:
            yield server
    except RuntimeError as error:
        pytest.fail(str(error), pytrace=False)


class TestCeph(Bucket):
    """On Ceph the condition of a put holds and that of a completion is ignored; checksums are not verified."""

    @pytest.fixture(autouse=True)
    def _server(self, gateway: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        servers.credentials(monkeypatch)
        self.base = gateway.place("ceph")
        servers.lend(monkeypatch, self.base)

    def test_the_probe_finds_out(self, place: Path) -> None:
        """It can be shared; large files are looked at before their completion, and read back after."""
        remote = S3Remote(servers.below(self.base, place))
        can = remote.probe.ask(again=True)
        assert (can.conditional_put, can.conditional_complete) == (True, False)
        assert (can.sha256, can.sha256_parts) == (False, False)
        assert can.read_back
        assert can.ordered
        assert can.multipart
        remote.close()


@pytest.fixture(scope="session")
def live() -> Iterator[Place]:
    """Return a place of our own below the prefix of the person who runs this, and remove what lies there at the end."""
    url = os.environ.get("URL", "")
    given: dict[str, Any] = {key.lower(): os.environ[key] for key in KEYS if os.environ.get(key)}
    with pytest.MonkeyPatch.context() as own:
        for name, value in OWN.items():
            own.setenv(name, value)
        try:
            asked = place_of(remote_settings("live", url, given))
            prefix = f"{asked.prefix}weighbridge-test-{secrets.token_hex(4)}/"
            base = asked._replace(url=f"s3://{asked.bucket}/{prefix}".rstrip("/"), prefix=prefix)
            remote = S3Remote(base)
            list(remote.list(""))  # some servers make a bucket of any name that is written to
            can = remote.probe.ask(again=True)
        except errors.WeighbridgeError as error:
            pytest.exit(f"error: {error.what}\n  why: {error.why}\n  fix: {error.fix}", returncode=error.exit_code)
        print(f"\n{base.url}: {can}")
        yield base
        remote.sweep(-60.0)
        for left in list(remote.list("")):
            with suppress(errors.DeniedError):
                remote.delete(left.key)
        rest = sum(1 for _ in remote.list(""))
        print(f"\n{rest} objects are left below {base.url}")
        remote.close()


class TestLive(Bucket):
    """The same on the bucket that the command line names."""

    @pytest.fixture(autouse=True)
    def _server(self, live: Place, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
        for name, value in OWN.items():
            monkeypatch.setenv(name, value)
        self.base = live
        servers.lend(monkeypatch, live)
        if live.one_writer and "racing" in request.node.name:
            pytest.skip('writers = "one": nobody is protected from a second writer')
