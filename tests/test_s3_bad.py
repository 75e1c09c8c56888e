"""Remotes on S3 that cannot be used: each is told with its cause, what to do and an exit code; nothing is half done."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weighbridge.config.load import remote_settings
from weighbridge.config.settings import RemoteSettings
from weighbridge.daemon.report import held_up
from weighbridge.registry.remotes.protocol import Remote
from weighbridge.registry.remotes.s3 import probe
from weighbridge.registry.remotes.table import open_remote
from weighbridge_testlib.bench import Bench
from weighbridge_testlib.builders import lora_adapter
from weighbridge_testlib.desk import Desk, conforms
from weighbridge_testlib.s3_bad import CASES, KEYS, Case, World, arguments, written
from weighbridge_testlib.seaweed import Server

COMMANDS = ("ls", "push", "doctor")
LATE = {"weights denied", "a session that ends before the decision"}
"""What is only found out when a number was claimed."""


@pytest.fixture(scope="module")
def world(seaweed: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Run every bad server of this module."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in KEYS.items():
            patch.setenv(name, value)
        with World(seaweed, tmp_path_factory.mktemp("world")) as world:
            yield world


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(probe, "_known", {})


def patience(case: Case) -> str:
    """Return how long a test waits: hardly for what never comes, and long for a sound server of a busy machine."""
    return "0.3s" if case.soon else "60s"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_a_command_says_what_why_and_what_to_do(
    case: Case, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ls`, `push` and `doctor` end with the code of the case and three sentences, and the bucket is as it was."""
    desk = Desk(tmp_path / "desk", monkeypatch)
    written(desk.folder, case.remote(world), patience(case))
    for name, value in case.env.items():
        monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name)
    model = lora_adapter(tmp_path / f"bad-{CASES.index(case)}", seed=CASES.index(case))
    before = world.bucket()
    for command in COMMANDS:
        said = desk.registry(*arguments(command, model, tmp_path / "out", desk.root), "--json")
        wanted = case.codes.get(command, case.code)
        if command == "doctor":
            told = [check for check in said.json["checks"] if check["status"] != "ok"]
            assert bool(told) == (case.title not in LATE), "doctor looks for what keeps from reading and writing at all"
            assert all(check["fix"] for check in told)
            assert said.code == (1 if wanted else 0), said
            continue
        assert said.code == wanted, said
        if wanted:
            told = conforms(said.error, "error")
            assert re.search(case.why, f"{told['message']} {told['why']}"), told
            assert told["why"] or told["data"]["problems"]
            assert case.fix in told["fix"]
            assert told["fix"]
            assert "Traceback" not in said.err
    objects, uploads = world.bucket()
    left = {key for key, _ in objects - before[0] if "/_wb/probe/" not in key}
    assert before[0] <= objects
    assert uploads == before[1]
    if case.title in LATE:
        assert not any(key.endswith("/manifest.json") for key in left), "no version can be seen"
        assert any("/_wb/claims/" in key for key in left), "the claim stands, as docs/formats.md says"
    else:
        assert left == set()


class S3Bench(Bench):
    """A daemon's jobs whose home is a bucket; `keys` are those of its settings."""

    def __init__(self, place: Path, keys: dict[str, Any]) -> None:
        self.keys = keys
        super().__init__(place, publish=("all",))

    def open(self) -> None:
        """Start as after a restart, with the settings as they are now."""
        given = dict(self.keys)
        self.remotes["team"] = remote_settings("team", given.pop("url"), given)
        super().open()

    def connect(self, settings: RemoteSettings) -> Remote:
        """Open the bucket."""
        return open_remote(settings.url, settings=settings)


DAYS = (
    "a bucket that is not there", "another region, redirected", "a session that has expired", "writing denied",
    "a page, 200", "silence", "a certificate for another host", "a registry that only a newer version writes",
)  # fmt: skip


@pytest.mark.parametrize("title", DAYS)
def test_a_job_waits_and_says_why(title: str, world: World, tmp_path: Path) -> None:
    """A job keeps its bytes and waits with the cause and what to do; when the trouble is over it is published."""
    case = next(case for case in CASES if case.title == title)
    bench = S3Bench(tmp_path, case.remote(world) | {"patience": 0.3 if case.soon else 60.0})
    folder = lora_adapter(bench.runs / f"daemon-{DAYS.index(title)}" / "checkpoint-1", seed=DAYS.index(title))
    bench.settle(folder)
    bench.work(rounds=4)
    (job,) = bench.store.jobs()
    assert job.bundle is not None, "its bytes are kept"
    told = held_up(job)
    assert told["state"] == "waiting"
    assert re.search(case.why, told["message"]), told
    assert case.fix in told["fix"]
    health = bench.homes.health["team"]
    if title != "writing denied":  # reading works
        assert health.ok is False
    bench.homes.close()
    bench.keys = world.remote(url=f"s3://registry/mended-{DAYS.index(title)}")
    bench.restart()
    bench.work()
    assert bench.states() == {"checkpoint-1": "done"}
    bench.homes.close()
    bench.catalog.close()
