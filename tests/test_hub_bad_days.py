"""Everything that can go wrong with a Hub, through a real `registry push` and through the daemon's jobs.

Each row says with which exit code the command ends, which words stand in why and fix, and what the daemon makes of it:
what can pass by itself or by another's hand is tried again, what cannot is blocked.
"""

import io
import json
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest

from weighbridge.daemon.report import held_up, problems, undelivered
from weighbridge.registry import errors, layout
from weighbridge.registry.cli.main import main
from weighbridge.registry.flow import commit_publish
from weighbridge.registry.remotes import commits
from weighbridge.registry.remotes.hub import client
from weighbridge.registry.remotes.hub.client import Patience
from weighbridge_testlib.builders import card, lora_adapter
from weighbridge_testlib.hub import Fault, TestHub, serve
from weighbridge_testlib.hub.bench import HubBench, adapter, close_all
from weighbridge_testlib.hub.rig import environ, publish, remote

QUICK = Patience(connect=1, answer=0.3, commit=0.3, stall=0.5)
QUOTA = "You have exceeded the rate limit for repository commits (128 per hour)."
FULL = "Private repository storage limit reached for acme"
WINDOW = {"RateLimit": '"api";r=0;t=200', "RateLimit-Policy": '"fixed window";"api";q=1000;w=300'}


class Day(NamedTuple):
    """What goes wrong, how the command ends, and what becomes of a job."""

    faults: tuple[Fault, ...]
    code: int
    why: str
    fix: str
    state: str = "waiting"
    token: str | None = "hf_ann"
    way: str = "lfs"
    tries: int = 1
    """Requests of the kind that goes wrong which one push may make at most."""


DAYS = {
    "no token": Day((), 4, "no token for", "hf auth login", token=None),
    "role read": Day((), 4, "its role is read", "write access", token="hf_ben"),
    "not a member": Day((), 4, "don't have the rights", "write access to the organisation", token="hf_eve"),
    "token revoked": Day((Fault("info", status=401, times=99),), 4, "answered 401", "hf auth login", tries=2),
    "no Hub at the address": Day((Fault("whoami", status=404, times=99),), 3, "answered 404", "HF_ENDPOINT"),
    "no right to write": Day((Fault("commit", status=403, times=99),), 4, "answered 403", "write access"),
    "pull requests only": Day((Fault("commit", status=412, times=99),), 4, "3 times", "only open pull", tries=3),
    "removed meanwhile": Day(
        (Fault("commit", status=404, code="RepoNotFound", times=99),), 3, "not there, or this token", "hf auth whoami"
    ),
    "a name that is taken": Day(
        (Fault("commit", status=409, times=99, message="a reference of that name"),), 7, "a reference", "look at what",
        "blocked",
    ),
    "too large": Day((Fault("commit", status=413, times=99),), 5, "answered 413", "change what is named", "blocked"),
    "card refused": Day(
        (Fault("validate-yaml", status=400, times=99, message='"license" must be one of [mit]'),),
        5, "must be one of", "front matter", "blocked",
    ),
    "organisation full": Day((Fault("commit", status=403, message=FULL, times=99),), 1, FULL, "free storage", "blocked",
                             tries=2),
    "payment due": Day((Fault("create", status=402, times=99),), 1, "answered 402", "enlarge its plan", "blocked"),
    "commits used up": Day((Fault("commit", status=429, message=QUOTA, times=99),), 6, "128 per hour", "about an hour"),
    "requests used up": Day((Fault("preupload", status=429, headers=WINDOW, times=99),), 6, "429", "201 s"),
    "out of order": Day((Fault("info", status=503, times=99),), 6, "answered 503", "repeat", tries=2),
    "commit without an answer": Day((Fault("commit", status=504, times=99),), 6, "answered 504", "", tries=4),
    "cut off": Day((Fault("info", "cut", times=99),), 6, "no whole answer", "repeat it", tries=2),
    "silent": Day((Fault("info", "stall", times=99, seconds=9),), 6, "no whole answer", "repeat it", tries=2),
    "store blocked": Day((), 6, "localhost:9", "HF_HUB_DISABLE_XET=1", way="xet"),
}  # fmt: skip


@pytest.fixture(scope="module")
def hub() -> Iterator[TestHub]:
    """Run one Hub for all days; each has a name of its own."""
    with serve() as running:
        yield running


@pytest.fixture(autouse=True)
def _quick(hub: TestHub, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Wait for nobody: the pauses are tested where they belong."""
    monkeypatch.setattr(commit_publish, "LOOKS", (0.0,))
    monkeypatch.setattr(commits, "UNMOVED", (0.0, 0.0))
    monkeypatch.setattr(client, "_PATIENT", 0.0)
    monkeypatch.setattr(client, "Patience", lambda: QUICK)
    monkeypatch.setattr(client, "get_token", lambda: None)
    yield
    hub.faults.clear()
    hub.cas_host = None
    close_all()


def registry(env: dict[str, str], monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> tuple[int, str, str]:
    """Run `registry` in this process as somebody with this environment; return exit code, stdout and stderr."""
    for key in ("HF_TOKEN", "HF_HUB_DISABLE_XET"):
        monkeypatch.delenv(key, raising=False)
    for key in ("HF_ENDPOINT", "HF_TOKEN", "HF_HUB_DISABLE_XET"):
        if key in env:
            monkeypatch.setenv(key, env[key])
    monkeypatch.setenv("WEIGHBRIDGE_CACHE", f"{env['HOME']}/cache")
    monkeypatch.setenv("WEIGHBRIDGE_REMOTE", "hf://acme")
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(word) for word in words])
    return code, out.getvalue(), err.getvalue()


@pytest.mark.parametrize("name", DAYS)
def test_a_push_says_what_why_and_what_to_do(
    hub: TestHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The command ends with its code and three sentences, after no more requests than can help, and shows no trace."""
    day = DAYS[name]
    folder = lora_adapter(tmp_path / "run" / "final", seed=1)
    env = environ(hub, tmp_path, token=day.token, **({"HF_HUB_DISABLE_XET": "1"} if day.way == "lfs" else {}))
    hub.cas_host = "http://localhost:9" if day.way == "xet" else None
    hub.faults.add(*day.faults)
    hub.seen.clear()
    code, _, said = registry(env, monkeypatch, "push", folder, "--name", f"push-{name.replace(' ', '-')}", "--json")
    told = json.loads(said.splitlines()[-1])
    assert (code, told["exit_code"]) == (day.code, day.code), told
    assert day.why in f"{told['message']} {told['why']}"
    assert day.fix in (told["fix"] or "")
    assert told["fix"]
    assert "Traceback" not in said
    for fault in day.faults:
        assert hub.count(fault.on) <= day.tries + (fault.on == "info"), "a base is asked about once"


@pytest.mark.parametrize("name", [name for name in DAYS if DAYS[name].way == "lfs"])
def test_the_daemon_waits_where_that_can_help(hub: TestHub, tmp_path: Path, name: str) -> None:
    """`status` tells the same words; a job that waits is published once the cause is gone, a blocked one is not."""
    day = DAYS[name]
    env = {"token": day.token}
    bench = HubBench(tmp_path, lambda: remote(hub, tmp_path / "home", token=env["token"], patience=QUICK), home="hub",
                     name=f"daemon-{name.replace(' ', '-')}")  # fmt: skip
    adapter(bench, "run", 1)
    bench.settle()
    hub.faults.add(*day.faults)
    bench.work(rounds=1)
    (job,) = bench.store.jobs()
    (told,) = [held_up(job)] if job.until is not None else problems(job)
    assert (bench.states(), told["state"]) == ({"final": day.state}, day.state)
    assert day.why in told["message"]
    assert day.fix in (told["fix"] or "")
    hub.faults.clear()
    env["token"] = "hf_ann"
    bench.restart()
    bench.work()
    assert bench.states() == {"final": "done" if day.state == "waiting" else "blocked"}


@pytest.mark.parametrize(
    ("fault", "state", "words"),
    [
        (Fault("commit", status=404, code="RepoNotFound", times=99), "waiting", "not there, or this token"),
        (Fault("commit", status=403, times=99), "waiting", "answered 403"),
        (Fault("commit", status=503, times=99), "waiting", "answered 503"),
        (Fault("commit", status=403, message=FULL, times=99), "blocked", FULL),
        (Fault("commit", status=413, times=99), "blocked", "answered 413"),
    ],
    ids=["removed", "denied", "out of order", "full", "too large"],
)
def test_a_mirror_waits_where_that_can_help(hub: TestHub, tmp_path: Path, fault: Fault, state: str, words: str) -> None:
    """A delivery is told with the cause, and carried once that is gone unless it never can be."""
    name = f"mirror-{fault.status}-{state}"
    bench = HubBench(tmp_path, lambda: remote(hub, tmp_path / "home", patience=QUICK), home="team", mirrors=("hub",),
                     name=name)  # fmt: skip
    adapter(bench, "run", 1)
    bench.settle()
    bench.work()
    assert bench.states() == {"final": "done"}
    hub.faults.add(fault)
    bench.deliveries.step()
    (row,) = bench.store.deliveries("1")
    assert (row["state"], words in row["reason"]) == (state, True), row["reason"]
    told = undelivered(bench.store, bench.homes)
    away = bench.homes.health["hub"].error is not None
    assert [(one["state"], words in one["message"]) for one in told] == ([] if away else [(state, True)])
    assert all(f"registry mirror {name}@v1 --to hub" in one["fix"] for one in told)
    hub.faults.clear()
    bench.deliver()
    assert [row["state"] for row in bench.store.deliveries("1")] == ["done" if state == "waiting" else "blocked"]
    commits = hub.count("commit")
    bench.restart()
    bench.deliver()  # nothing that was tried and cannot be is sent again at every start
    assert hub.count("commit") == commits


def test_a_quota_is_waited_for_as_long_as_the_hub_says(hub: TestHub, tmp_path: Path) -> None:
    """The job's next try is not before the hour is over, whatever else happens meanwhile."""
    bench = HubBench(tmp_path, lambda: remote(hub, tmp_path / "home", patience=QUICK), home="hub", name="quota")
    adapter(bench, "run", 1)
    bench.settle()
    hub.faults.add(Fault("commit", status=429, message=QUOTA, times=99))
    bench.work(rounds=1)
    (job,) = bench.store.jobs()
    assert job.until is not None
    assert 3500 < job.until - job.updated_at < 3700


def test_a_gated_base_stops_nobody(hub: TestHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version is published, and its card says that users need access to the base."""
    base = hub.store.create("model", "acme", "gated-base", hub.store.tokens["hf_ann"])
    base.gated = "manual"
    folder = lora_adapter(tmp_path / "run", base="acme/gated-base")
    (folder / "README.md").write_text(card("acme/gated-base"))
    env = environ(hub, tmp_path, HF_HUB_DISABLE_XET="1")
    code, out, said = registry(env, monkeypatch, "push", folder, "--name", "on-gated", "--json")
    assert code == 0, said
    assert "base-gated" in {f["code"] for f in json.loads(out)["findings"]}
    text = hub.store.body(hub.store.get("acme/on-gated").at()["README.md"]).decode()
    assert "the base acme/gated-base is gated" in text.replace("\\", "")


def test_a_push_says_where_a_renamed_repository_is(
    hub: TestHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version keeps its name; push and show tell what its repository is called now."""
    env = environ(hub, tmp_path, HF_HUB_DISABLE_XET="1")
    for seed, words in ((1, ""), (2, "the repository of old-name is called new-name now")):
        folder = lora_adapter(tmp_path / f"run-{seed}" / "final", seed=seed)
        code, out, said = registry(env, monkeypatch, "push", folder, "--name", "old-name", "--share")
        assert (code, out) == (0, f"old-name@v{seed}\n"), said
        assert words in said
        if seed == 1:
            hub.store.move("model", "acme/old-name", "acme/new-name", hub.store.tokens["hf_ann"])
    code, out, said = registry(env, monkeypatch, "ls", "--json")
    assert code == 0, said
    assert {row["ref"] for row in json.loads(out)["versions"]} >= {"old-name@v2"}


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault("refs", status=500, times=99), errors.RetryableError),
        (Fault("tag", status=500, times=99), errors.OutcomeUnknownError),
        (Fault("lfs-batch", status=413, times=99), errors.RefusedError),
    ],
    ids=lambda value: value.on if isinstance(value, Fault) else "",
)
def test_what_fails_later_is_taken_up_again(
    hub: TestHub, tmp_path: Path, fault: Fault, kind: type[errors.WeighbridgeError]
) -> None:
    """In the middle of a second version: its class, words and few requests; the next try goes on."""
    ann, name = remote(hub, tmp_path / "ann"), f"later-{fault.on}"
    publish(ann, tmp_path / "first", name, seed=9)
    hub.seen.clear()
    hub.faults.add(fault)
    with pytest.raises(kind) as caught:
        publish(ann, tmp_path / "run", name)
    assert caught.value.why
    assert caught.value.fix
    assert hub.count(fault.on) <= 5
    hub.faults.clear()
    assert publish(ann, tmp_path / "again", name).n == 2
    ann.close()


def test_a_lost_answer_to_a_tag_or_a_new_repository_is_looked_up(hub: TestHub, tmp_path: Path) -> None:
    """Both are looked for before anything is repeated."""
    ann = remote(hub, tmp_path / "ann")
    hub.seen.clear()
    hub.faults.add(Fault("create", "lose", status=504), Fault("tag", "lose", status=0))
    assert publish(ann, tmp_path / "run", "lost").n == 1
    assert (hub.count("create"), hub.count("tag")) == (1, 1)
    assert json.loads(ann.read(layout.manifest("lost", 1)))["content"]
    ann.close()
