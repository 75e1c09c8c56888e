"""Rounds of publishing and pulling through a network that breaks: what comes out is counted and compared."""

import random
import shutil
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from weighbridge.registry import errors
from weighbridge.registry.flow import stage as staging
from weighbridge.registry.flow.marker import open_registry
from weighbridge.registry.flow.publish import publish
from weighbridge.registry.flow.pull import pull
from weighbridge.registry.remotes.s3 import multipart
from weighbridge.registry.remotes.s3.remote import S3Remote
from weighbridge.registry.remotes.wrappers import Retrying
from weighbridge.registry.types import Receipt, Registry
from weighbridge_testlib.audit import audit
from weighbridge_testlib.proxy import KINDS, Fault, Proxy, Request
from weighbridge_testlib.publishing import OWNER, candidate, rendered
from weighbridge_testlib.seaweed import Server
from weighbridge_testlib.shelf import payload

NAMES = ("medical-sft", "legal-dpo")
TRIES = 40
LARGE = multipart.PART_LEAST + 300_000


class Outcome(NamedTuple):
    """What some rounds led to."""

    rounds: int
    versions: int
    requests: int
    broken: Counter[str]
    errors: Counter[str]
    wrong: int
    leaked: int
    swept: int


class Weather:
    """Breaks each request by chance; now and then a storm refuses everything for a while."""

    def __init__(self, seed: int, share: float) -> None:
        self._chance = random.Random(seed)
        self._share = share
        self._storm = 0

    def __call__(self, _: Request) -> Fault | None:
        """Decide what happens to a request."""
        if self._storm:
            self._storm -= 1
            return Fault("busy")
        if self._chance.random() < self._share / 60:
            self._storm = self._chance.randrange(3, 9)
        if self._chance.random() >= self._share:
            return None
        kinds = [kind for kind in KINDS if kind != "stall" or self._chance.random() < 0.2]
        return Fault(self._chance.choice(kinds), self._chance.randrange(1 << 30))


class Rounds:
    """Publishes and pulls below one prefix of a server, through a proxy."""

    def __init__(self, server: Server, folder: Path, prefix: str, seed: int, *, share: float = 0.3) -> None:
        self._server = server
        self._folder = folder
        self._prefix = prefix
        self._chance = random.Random(seed)
        self._share = share
        self.receipts: list[Receipt] = []
        self.errors: Counter[str] = Counter()
        self.broken: Counter[str] = Counter()
        self.requests = 0
        self.wrong = 0

    def run(self, count: int) -> Outcome:
        """Do so many rounds, then look at everything without the proxy."""
        direct = S3Remote(self._server.place(self._prefix), single=1 << 20, part=multipart.PART_LEAST)
        registry = open_registry(direct, create=True)
        for number in range(count):
            self._round(registry, number)
        state = audit(direct, self.receipts)
        versions = len(state.committed)
        published = {(receipt.name, receipt.content) for receipt in self.receipts}
        assert versions == len(published), f"{versions} versions of {len(published)} contents"
        assert not state.open
        swept = direct.sweep(-60)
        client = self._server.client()
        left = client.list_multipart_uploads(Bucket=self._server.bucket, Prefix=f"{self._prefix}/").get("Uploads", [])
        direct.close()
        return Outcome(count, versions, self.requests, self.broken, self.errors, self.wrong, len(left), swept)

    def _round(self, registry: Registry, number: int) -> None:
        name = self._chance.choice(NAMES)
        seed = self._chance.randrange(max(4, number))  # some contents come again
        files = payload(seed)
        if seed % 5 == 0:
            files["adapter_model.safetensors"] = random.Random(seed).randbytes(LARGE)
        weather = Weather(self._chance.randrange(1 << 30), self._share)
        with Proxy(self._server.endpoint, weather, stall=3.0) as proxy:
            receipt = self._publish(proxy, registry, name, files, number)
            self.receipts.append(receipt)
            self._pull(proxy, receipt, files, number)
            self.requests += len(proxy.requests)
            self.broken += Counter(fault.kind for _, fault in proxy.broken)

    def _connect(self, proxy: Proxy) -> tuple[S3Remote, Retrying]:
        place = self._server.place(self._prefix, read_timeout=0.5, endpoint=proxy.endpoint)
        remote = S3Remote(place, single=1 << 20, part=multipart.PART_LEAST)
        remote.link.patience = 0.002
        remote.link.pace.most = 0.004
        # The server behind the proxy was asked already; asking it through the proxy is tested elsewhere.
        remote.probe.trust(S3Remote(self._server.place(self._prefix)).probe.ask())
        return remote, Retrying(remote, attempts=5, base=0.002, cap=0.02)

    def _publish(self, proxy: Proxy, registry: Registry, name: str, files: dict[str, bytes], number: int) -> Receipt:
        """Publish like a daemon does: what fails for a while is begun anew, with nothing remembered."""
        folder = self._folder / f"{number}-source"
        for attempt in range(TRIES):
            remote, careful = self._connect(proxy)
            made = candidate(careful, folder / str(attempt), name, files=files)
            try:
                return publish(careful, "home", registry, made, OWNER, render=rendered)
            except errors.BugError:
                raise
            except errors.WeighbridgeError as error:
                self.errors[f"publish {type(error).__name__}"] += 1
                last = error
            finally:
                staging.discard(made.bundle)
                remote.close()
                shutil.rmtree(folder / str(attempt), ignore_errors=True)
        raise AssertionError(f"round {number} never published") from last

    def _pull(self, proxy: Proxy, receipt: Receipt, files: dict[str, bytes], number: int) -> None:
        target = self._folder / f"{number}-target"
        for _ in range(TRIES):
            remote, careful = self._connect(proxy)
            try:
                pull(careful, receipt.name, receipt.n, target)
            except errors.BugError:
                raise
            except errors.WeighbridgeError as error:
                self.errors[f"pull {type(error).__name__}"] += 1
                last = error
                assert not target.exists()
            else:
                self.wrong += any((target / path).read_bytes() != body for path, body in files.items())
                shutil.rmtree(target)
                return
            finally:
                remote.close()
        raise AssertionError(f"round {number} was never pulled") from last
