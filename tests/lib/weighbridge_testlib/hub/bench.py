"""A daemon's jobs and deliveries without its threads, on a real database, real folders, and a Hub."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from weighbridge.config.settings import DaemonSettings, RemoteSettings
from weighbridge.daemon.deliveries import Deliveries
from weighbridge.daemon.homes import Homes
from weighbridge.daemon.intake import Intake
from weighbridge.daemon.jobs import Runner
from weighbridge.registry.remotes.directory import open_directory
from weighbridge.registry.remotes.protocol import Remote
from weighbridge.registry.types import Owner
from weighbridge_testlib.bench import Bench
from weighbridge_testlib.builders import card, lora_adapter

HUB: Final = RemoteSettings("hub", "hf://acme", internal=False, paths="rewrite", unknown_license="block")
_open: list["HubBench"] = []


class HubBench(Bench):
    """A daemon's jobs whose remotes are a folder and the Hub."""

    def __init__(
        self, place: Path, connect: Callable[[], Remote], *, hub: RemoteSettings = HUB, **rule: object
    ) -> None:
        self._connect = connect
        self._hub = hub
        super().__init__(place, publish=("all",), **rule)
        _open.append(self)

    def open(self) -> None:
        """Start as after a restart, with the Hub among the remotes."""
        super().open()
        self.remotes = {"team": RemoteSettings("team", str(self.place / "remote")), "hub": self._hub}
        self.homes = Homes(
            self.remotes,
            self.catalog,
            self.store,
            connect=lambda r: self._connect() if r.name == "hub" else open_directory(r.url),
        )
        self.intake = Intake(
            self.store, self.homes, {str(self.runs): self.rule}, self.remotes,
            DaemonSettings(str(self.state), str(self.state / "s"), disk_reserve=0),
            host="host", mountinfo="",
            look=lambda _root, path: self.tree.look(path),
            below=lambda _root, path: [p for p in self.tree.candidates if p.startswith(path + "/")],
        )  # fmt: skip
        owner = Owner(host="host", daemon=str(self.place))
        self.runner = Runner(
            self.store, self.homes, self.intake, owner, clock=lambda: time.time() + self.waited, chance=lambda: 1.0
        )
        self.deliveries = Deliveries(
            self.store, self.homes, self.remotes, self.state / "scratch", clock=lambda: time.time() + self.waited
        )

    def deliver(self, rounds: int = 60) -> None:
        """Carry deliveries until none can go on; waits are over at once."""
        for _ in range(rounds):
            if not self.deliveries.step():
                if not self.store.deliveries("state = 'waiting'"):
                    return
                self.waited += 7200.0


def adapter(bench: HubBench, run: str, seed: int) -> Path:
    """Leave an adapter at rest in a run folder."""
    folder = lora_adapter(bench.runs / "team" / run / "final", seed=seed)
    (folder / "README.md").write_text(card())
    return folder


def close_all() -> None:
    """Close every bench that was opened."""
    for bench in _open:
        bench.homes.close()
        bench.catalog.close()
    _open.clear()
