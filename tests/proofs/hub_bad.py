"""A user's bad days with the Hub: every command and the daemon, as processes, on a Hub that fails in each way known.

    PYTHONPATH=tests/lib python tests/proofs/hub_bad.py [--days silent renamed] [--acts push status] [--workers 2]

Prints day, command, seconds, exit code and first line. Fails on a traceback, another exit code than the table's, a
failure without why and fix, a target that is half there, and anything on the Hub that a reader would take for a version
and that is not whole.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Final, NamedTuple

from weighbridge.registry.hashing import sha256_bytes
from weighbridge_testlib.builders import card, lora_adapter
from weighbridge_testlib.hub import Fault, Limits, TestHub, serve
from weighbridge_testlib.hub.rig import environ
from weighbridge_testlib.hub.store import Repo
from weighbridge_testlib.yard import BIN, BrokenError, Yard, until

ALWAYS: Final = 10**6
QUOTA: Final = "You have exceeded the rate limit for repository commits (128 per hour)."
FULL: Final = "Private repository storage limit reached for acme"
WINDOW: Final = {"RateLimit": '"api";r=0;t=200', "RateLimit-Policy": '"fixed window";"api";q=1000;w=300'}
READS: Final = ("ls", "show", "pull", "verify", "mirror-from")
WRITES: Final = ("push", "again", "adopt", "mirror-to", "tag")
ACTS: Final = (*READS, *WRITES, "doctor", "status")
READY: Final = "ready"
"""The name that is there before the day begins."""


class Day(NamedTuple):
    """What is wrong, and how commands end on it: by name, by kind (reads, writes), or all."""

    codes: Mapping[str, int]
    faults: tuple[Fault, ...] = ()
    env: Mapping[str, str | None] = {}
    prepare: Callable[[TestHub], None] = lambda _hub: None
    xet: bool = True
    limits: Limits | None = None
    job: str = "waiting"
    """What becomes of the daemon's job."""
    acts: tuple[str, ...] = ACTS


def every(status: int, **more: Any) -> tuple[Fault, ...]:
    """Return the fault of a Hub that answers everything with a status."""
    return (Fault("any", status=status, times=ALWAYS, **more),)


def on(route: str, status: int, **more: Any) -> tuple[Fault, ...]:
    """Return the fault of a Hub that answers one kind of request with a status."""
    return (Fault(route, status=status, times=ALWAYS, **more),)


def everything(code: int, **more: int) -> dict[str, int]:
    """Return one code for all commands, and others by name."""
    return {"all": code, "status": 0, **more}


def written(code: int, **more: int) -> dict[str, int]:
    """Return the codes of a day on which only writing fails."""
    return {"reads": 0, "writes": code, "doctor": 0, "status": 0, **more}


def _renamed(hub: TestHub) -> None:
    hub.store.move("model", f"acme/{READY}", "acme/called-otherwise", hub.store.tokens["hf_ann"])


def _given_away(hub: TestHub) -> None:
    hub.store.add_user("ann", "hf_ann", orgs=["acme", "umbrella"])
    hub.store.rename_owner("acme", "umbrella")


def _gone(hub: TestHub) -> None:
    del hub.store.repos["model", f"acme/{READY}"]


def _disabled(hub: TestHub) -> None:
    hub.store.get(f"acme/{READY}").disabled = True


def _gated(hub: TestHub) -> None:
    hub.store.get(f"acme/{READY}").gated = "manual"
    hub.store.get(f"acme/{READY}").private = False


def _gated_base(hub: TestHub) -> None:
    hub.store.add_user("olga", "hf_olga", orgs=["example-org"])
    hub.store.create("model", "example-org", "tiny-base", hub.store.tokens["hf_olga"]).gated = "manual"


def _no_store(hub: TestHub) -> None:
    hub.cas_host = "http://localhost:9"


DAYS: Final[dict[str, Day]] = {
    "a good day": Day(everything(0), job="done"),
    "xet": Day(everything(0), env={"HF_HUB_DISABLE_XET": None}, job="done"),
    "no xet there": Day(everything(0), env={"HF_HUB_DISABLE_XET": None}, xet=False, job="done"),
    "store blocked": Day(written(6, tag=0), env={"HF_HUB_DISABLE_XET": None}, prepare=_no_store),
    "no token": Day({"reads": 3, "writes": 4, "tag": 3, "ls": 0, "doctor": 0, "status": 0}, env={"HF_TOKEN": None}),
    "a read token": Day(written(4), env={"HF_TOKEN": "hf_ben"}),
    "a stranger's token": Day(
        {"reads": 3, "writes": 4, "tag": 3, "ls": 0, "doctor": 0, "status": 0}, env={"HF_TOKEN": "hf_eve"}
    ),
    "a revoked token": Day(everything(4, doctor=1), env={"HF_TOKEN": "hf_gone"}),
    "gated": Day(
        {"reads": 4, "ls": 0, "writes": 4, "doctor": 0, "status": 0}, env={"HF_TOKEN": "hf_eve"}, prepare=_gated
    ),
    "a gated base": Day(everything(0), prepare=_gated_base, job="done"),
    "disabled": Day(
        {"all": 4, **dict.fromkeys(("ls", "push", "adopt", "mirror-to", "doctor", "status"), 0)},
        prepare=_disabled,
        job="done",
    ),
    "gone": Day({"reads": 3, "writes": 0, "ls": 0, "doctor": 0, "status": 0}, prepare=_gone, job="done"),
    "renamed": Day(everything(0), prepare=_renamed, job="done"),
    "another owner": Day({"all": 3, "ls": 0, "push": 4, "mirror-to": 4, "doctor": 0, "status": 0}, prepare=_given_away),
    "offline": Day(everything(6, doctor=1), env={"HF_HUB_OFFLINE": "1"}),
    "nobody there": Day(everything(6, doctor=1), env={"HF_ENDPOINT": "http://127.0.0.1:9"}),
    "no address": Day(everything(2, doctor=1), env={"HF_ENDPOINT": "huggingface.co"}),
    "a dead proxy": Day(everything(6, doctor=1), env={"HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": ""}),
    "silent": Day(
        everything(6, doctor=1),
        (Fault("any", "stall", times=ALWAYS, seconds=900),),
        acts=("ls", "pull", "push", "status"),
    ),
    "cut": Day(everything(6, doctor=1), (Fault("any", "cut", times=ALWAYS),)),
    "a login page": Day(everything(6, doctor=1), every(200)),
    "401": Day(everything(4, doctor=1), every(401)),
    "403": Day(everything(4, doctor=1), every(403)),
    "404": Day(everything(3, doctor=1), every(404)),
    "409": Day(everything(7, doctor=1), every(409), job="blocked"),
    "412": Day(everything(7, doctor=1), every(412), job="blocked"),
    "413": Day(everything(5, doctor=1), every(413), job="blocked"),
    "429": Day(everything(6, doctor=1), every(429, headers=WINDOW)),
    "500": Day(everything(6, doctor=1), every(500)),
    "503": Day(everything(6, doctor=1), every(503)),
    "card refused": Day(
        written(5, tag=0), on("validate-yaml", 400, message='"license" must be one of [mit]'), job="blocked"
    ),
    "no right to create": Day(written(4, again=0, adopt=0, tag=0), on("create", 403)),
    "a plan too small": Day(written(1, again=0, adopt=0, tag=0), on("create", 402), job="blocked"),
    "no right to commit": Day(written(4), on("commit", 403)),
    "pull requests only": Day(written(4), on("commit", 412)),
    "removed meanwhile": Day(written(3), on("commit", 404, code="RepoNotFound")),
    "too large": Day(written(5), on("commit", 413), job="blocked"),
    "storage full": Day(written(1), on("commit", 403, message=FULL), job="blocked"),
    "commits used up": Day(written(6), on("commit", 429, message=QUOTA)),
    "commit 503": Day(written(6), on("commit", 503)),
    "commit cut": Day(written(6), (Fault("commit", "cut", times=ALWAYS),)),
    "upload refused": Day(written(4, tag=0), on("lfs-put", 403)),
    "tag 503": Day(written(6, tag=0), on("tag", 503)),
    "download cut": Day(
        written(0, pull=6, **{"mirror-from": 6}), (Fault("storage", "cut-body", times=ALWAYS),), job="done"
    ),
    "a flipped bit": Day(
        written(0, pull=5, **{"mirror-from": 5}), (Fault("storage", "flip", times=ALWAYS),), job="done"
    ),
}


class Row(NamedTuple):
    """One command on one day."""

    day: str
    act: str
    seconds: float
    code: int
    first: str
    faults: list[str]


class Desk:
    """One user on one day: a Hub, a folder of weights, a directory remote, and a home that remembers nothing."""

    def __init__(self, hub: TestHub, place: Path, day: Day) -> None:
        self.hub, self.place, self.day = hub, place, day
        for seed in (1, 2, 3):
            (lora_adapter(place / f"run-{seed}", seed=seed) / "README.md").write_text(card())
        self.config = place / "weighbridge.toml"
        self.config.write_text(f'[remotes.hub]\nurl = "hf://acme"\n[remotes.team]\nurl = "{place}/team"\n')
        self.good = environ(hub, place / "good", HF_HUB_DISABLE_XET="1", WEIGHBRIDGE_CONFIG=str(self.config))
        for words in (("push", place / "run-1", "--name", READY, "--remote", "hub"),
                      ("push", place / "run-3", "--name", "local", "--remote", "team")):  # fmt: skip
            done = self.run(self.good, *words)
            assert done.returncode == 0, done.stderr
        foreign = hub.store.create("model", "acme", "foreign", hub.store.tokens["hf_ann"])
        changes = [("file", {"path": "words.txt", "content": b"somebody's"})]
        hub.store.commit(foreign, "main", title="theirs", message="", author="ben", parent=None, changes=changes)

    def env(self, act: str) -> dict[str, str]:
        """Return the environment of this day for one command, with a home of its own."""
        found = environ(
            self.hub, self.place / f"home-{act}", HF_HUB_DISABLE_XET="1", WEIGHBRIDGE_CONFIG=str(self.config)
        )
        found |= {key: value for key, value in self.day.env.items() if value is not None}
        return {key: value for key, value in found.items() if self.day.env.get(key, "") is not None}

    def run(self, env: Mapping[str, str], *words: str | Path) -> subprocess.CompletedProcess[str]:
        """Run `registry`."""
        return subprocess.run(
            [str(BIN / "registry"), *map(str, words)], env=dict(env), cwd=self.place, capture_output=True, text=True,
            timeout=600, check=False,
        )  # fmt: skip

    def words(self, act: str) -> tuple[str | Path, ...]:
        """Return the command of an act."""
        run, to_hub = self.place / "run-2", ("--remote", "hub")
        return {
            "ls": ("ls", *to_hub),
            "show": ("show", f"{READY}@v1", *to_hub),
            "pull": ("pull", f"{READY}@v1", self.place / "pulled", *to_hub),
            "verify": ("verify", f"{READY}@v1", *to_hub),
            "mirror-from": ("mirror", READY, *to_hub, "--to", self.place / "copy"),
            "push": ("push", run, "--name", "fresh", *to_hub),
            "again": ("push", run, "--name", READY, "--share", *to_hub),
            "adopt": ("push", run, "--name", "foreign", "--adopt", *to_hub),
            "mirror-to": ("mirror", "local", "--remote", "team", "--to", "hub"),
            "tag": ("tag", f"{READY}@v1", "prod", "--why", "tried", *to_hub),
            "doctor": ("doctor",),
        }[act]


def one_day(name: str, acts: Sequence[str]) -> list[Row]:
    """Go through the commands of a day."""
    day = DAYS[name]
    with tempfile.TemporaryDirectory() as folder, serve(xet=day.xet, limits=day.limits) as hub:
        desk = Desk(hub, Path(folder), day)
        day.prepare(hub)
        hub.faults.add(*day.faults)
        chosen = [act for act in acts if act in day.acts]
        return [guarded(desk, name) if act == "status" else commanded(desk, name, act) for act in chosen]


def guarded(desk: "Desk", name: str) -> Row:
    """Watch the daemon; one that does not start, settle or end is told as a fault."""
    try:
        return watched(desk, name)
    except BrokenError as error:
        return Row(name, "status", 0.0, -1, "(the daemon)", [str(error)])


def commanded(desk: Desk, name: str, act: str) -> Row:
    """Run one command and judge it."""
    began = time.monotonic()
    done = desk.run(desk.env(act), *desk.words(act))
    seconds = time.monotonic() - began
    faults = [*half(desk.hub), *told(act, done)]
    codes = desk.day.codes
    wanted = next(codes[key] for key in (act, "reads" if act in READS else "writes", "all") if key in codes)
    if done.returncode != wanted:
        faults.append(f"ended with {done.returncode}, not with {wanted}: {done.stderr[-400:]!r}")
    target = {"pull": "pulled", "mirror-from": "copy/models"}.get(act)
    if target is not None and done.returncode != 0 and any((desk.place / target).glob("**/manifest.json")):
        faults.append(f"{target} holds something")
    lines = [line for line in f"{done.stderr}\n{done.stdout}".splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    return Row(name, act, seconds, done.returncode, (errors or lines or ["(nothing)"])[0], faults)


def told(act: str, done: subprocess.CompletedProcess[str]) -> Iterator[str]:
    """Yield what is wrong with the words of a command."""
    said = done.stdout + done.stderr
    if "Traceback" in said:
        yield f"a traceback: {said[-600:]!r}"
    if "hf_ann" in said or "hf_gone" in said:
        yield "it shows the token"
    if done.returncode != 0 and act != "doctor":
        for word in ("error:", "  why: ", "  fix: "):
            if not re.search(f"^{word}", done.stderr, re.MULTILINE):
                yield f"it says no {word.strip(': ')}: {done.stderr[-400:]!r}"


def watched(desk: Desk, name: str) -> Row:
    """Let the daemon publish the same, and judge what `registry status` says of it."""
    yard = Yard(desk.place / "yard")
    yard.env = {
        **yard.env,
        **{key: value for key, value in desk.env("status").items() if key.startswith(("HF_", "HTTP_", "NO_"))},
    }
    with yard:
        yard.configure(watch={"name": "daemons"}, remote={"url": "hf://acme"})
        (lora_adapter(yard.runs / "team/run/final", seed=9) / "README.md").write_text(card())
        began = time.monotonic()
        with yard.daemon():
            answers: list[dict[str, Any]] = []

            def settled() -> bool:
                done = yard.registry("status", "--json")
                answers.append(json.loads(done.stdout))
                return any(standing(answers[-1])) or answers[-1]["queue"].get("done", 0) > 0

            until(settled, 200, "the job to stand", every=0.5)
            seconds, plain = time.monotonic() - began, yard.registry("status")
    problems = list(standing(answers[-1]))
    faults = [*half(desk.hub)]
    state = problems[0]["state"] if problems else "done"
    if state != desk.day.job:
        faults.append(f"the job is {state}, not {desk.day.job}: {problems}")
    faults += [f"no fix: {one}" for one in problems if not one.get("fix")]
    log = (yard.folder / "registryd.log").read_text(errors="replace")
    if "Traceback" in log + plain.stdout + plain.stderr:
        faults.append(f"a traceback: {log[-800:]!r}")
    first = f"{problems[0]['state']}: {problems[0]['message']}" if problems else "published"
    return Row(name, "status", seconds, plain.returncode, first, faults)


def standing(status: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the problems of jobs; a remote that does not answer is one of its own beside them."""
    yield from (one for one in status["problems"] if one.get("state") in {"waiting", "blocked"})


def half(hub: TestHub) -> Iterator[str]:
    """Yield what a reader of the Hub would take for a version and what is not one."""
    for (kind, _), repo in list(hub.store.repos.items()):
        if kind != "model":
            continue
        yield from (f"{repo.id} has the branch {branch}" for branch in repo.branches if branch != "main")
        whole = {commit.oid for commit in repo.history("main") if sound(hub, repo, commit.oid)}
        yield from (f"the tag {tag} of {repo.id} stands at no whole version"
                    for tag, at in repo.tags.items() if at not in whole)  # fmt: skip
        yield from (f"{repo.id} holds half a version: {commit.title}"
                    for commit in repo.history("main")
                    if re.fullmatch(r"\S+ v\d+", commit.title) and commit.oid not in whole)  # fmt: skip


def sound(hub: TestHub, repo: Repo, commit: str) -> bool:
    """Tell whether a commit holds every file of its manifest, byte for byte."""
    tree = repo.commits[commit].tree
    if "manifest.json" not in tree or "weighbridge.json" not in tree:
        return False
    manifest = json.loads(hub.store.body(tree["manifest.json"]))
    return all(
        one["path"] in tree and sha256_bytes(hub.store.body(tree[one["path"]])) == one["sha256"]
        for one in manifest["files"]
    )


def main() -> int:
    """Go through the days; 0 when everything held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", nargs="+", choices=sorted(DAYS))
    parser.add_argument("--acts", nargs="+", choices=ACTS)
    parser.add_argument("--workers", type=int, default=2, help="days at the same time")
    given = parser.parse_args()
    failures = 0
    with ThreadPoolExecutor(given.workers) as pool:
        days = given.days or DAYS
        for done in as_completed([pool.submit(one_day, day, given.acts or ACTS) for day in days]):
            rows = done.result()
            for row in rows:
                print(f"{row.day:18} {row.act:12} {row.seconds:6.1f} s  {row.code}  {row.first}", flush=True)
                for words in row.faults:
                    print(f"hub_bad: {row.day}, {row.act}: {words}", flush=True)
                failures += len(row.faults)
    print(f"hub_bad: {len(days)} days: {'FAILED' if failures else 'held'}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
