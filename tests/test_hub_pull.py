"""Reading from the Hub: pull, verify, ls and show, never stale, never partial, with few requests."""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from weighbridge.registry import errors, layout
from weighbridge.registry.catalog import Catalog
from weighbridge.registry.flow import sync, tags, withdraw
from weighbridge.registry.flow.marker import open_registry
from weighbridge.registry.flow.pull import pull
from weighbridge.registry.flow.rebuild import rebuild
from weighbridge.registry.flow.resolve import resolve, unknown
from weighbridge.registry.flow.verify import verify_version
from weighbridge.registry.remotes.hub import client
from weighbridge.registry.remotes.hub.client import Patience
from weighbridge.registry.remotes.hub.remote import HubRemote
from weighbridge.registry.remotes.ledger import LEDGER_FILE
from weighbridge.registry.remotes.wrappers import Retrying
from weighbridge_testlib.builders import lora_adapter
from weighbridge_testlib.hub import Fault, TestHub
from weighbridge_testlib.hub import Limits as HubLimits
from weighbridge_testlib.hub.rig import environ, publish, remote, run
from weighbridge_testlib.hub.store import Repo

NAME = "medical-sft"
LARGE = {
    "adapter_config.json": b'{"peft_type":"LORA","r":4}\n',
    "adapter_model.safetensors": random.Random(1).randbytes(2_600_000),
    "tokenizer/tokenizer.json": b"{}",
    "tokenizer/empty.txt": b"",
}


@pytest.fixture
def ann(hub: TestHub, tmp_path: Path) -> Iterator[HubRemote]:
    """Publish one version with a larger file, as a member of the organisation."""
    found = remote(hub, tmp_path / "ann")
    publish(found, tmp_path / "run", files=LARGE)
    yield found
    found.close()


@pytest.fixture
def ben(hub: TestHub, tmp_path: Path) -> HubRemote:
    """Return the remote as a colleague with a read token sees it."""
    return remote(hub, tmp_path / "ben", token="hf_ben")


def repo_of(hub: TestHub) -> Repo:
    """Return the repository of the tests' name."""
    return hub.store.get(f"acme/{NAME}")


def holds(folder: Path) -> bool:
    """Tell whether a folder holds the bundle, byte for byte."""
    return all((folder / path).read_bytes() == body for path, body in LARGE.items())


@pytest.mark.usefixtures("ann")
def test_a_colleague_pulls_what_was_published(hub: TestHub, ben: HubRemote, tmp_path: Path) -> None:
    """With a read token the whole bundle arrives, verified, and the token goes to no other host."""
    done = pull(ben, NAME, 1, tmp_path / "there")
    assert holds(tmp_path / "there")
    assert {p.name for p in (tmp_path / "there").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "tokenizer", "README.md", "training.json", "manifest.json"
    }  # fmt: skip
    assert done.fetched == sum(map(len, LARGE.values()))
    assert all(len(seen.path.split("/")[4]) == 40 for seen in hub.asked("resolve"))


def test_what_came_by_xet_is_pulled_without_xet(hub: TestHub, tmp_path: Path, ben: HubRemote) -> None:
    """Files that were uploaded by xet are read over plain HTTP, in ranges that can be resumed."""
    ann = remote(hub, tmp_path / "ann", way="xet")
    publish(ann, tmp_path / "run", files=LARGE)
    ann.close()
    pull(ben, NAME, 1, tmp_path / "there")
    assert holds(tmp_path / "there")
    assert hub.count("reconstruction") == 0


@pytest.mark.usefixtures("ann")
def test_a_cut_pull_goes_on_where_it_stopped(hub: TestHub, ben: HubRemote, tmp_path: Path) -> None:
    """A connection cut in the middle costs the rest, not the whole; nothing is seen before all is there."""
    hub.faults.add(Fault("storage", "cut-body"))
    pull(Retrying(ben, sleep=lambda _: None), NAME, 1, tmp_path / "there")
    assert holds(tmp_path / "there")
    assert hub.count("storage") == 2


@pytest.mark.usefixtures("ann")
@pytest.mark.parametrize("route", ["storage", r"GET /acme/medical-sft/resolve/\w+/adapter_config.json"])
def test_a_flipped_bit_is_never_delivered(hub: TestHub, ben: HubRemote, tmp_path: Path, route: str) -> None:
    """One bit on the way, in a stored object or in a small file: the file is named and the target stays away."""
    hub.faults.add(Fault(route, "flip", times=9))
    with pytest.raises(errors.IntegrityError, match="adapter_"):
        pull(ben, NAME, 1, tmp_path / "there")
    assert not (tmp_path / "there").exists()


STALE = """
import json, sys
from huggingface_hub import snapshot_download
from pathlib import Path
print(json.dumps((Path(snapshot_download("acme/medical-sft")) / "weighbridge.json").read_text()))
"""


@pytest.mark.parametrize("status", [401, 403, 429, 500])
def test_a_refused_question_never_gives_an_older_answer(
    hub: TestHub, ann: HubRemote, ben: HubRemote, tmp_path: Path, status: int
) -> None:
    """The plain client quietly returns the snapshot it has; ours says that it could not ask."""
    env = environ(hub, tmp_path / "plain", token="hf_ben")
    assert json.loads(run(STALE, env))["n"] == 1
    publish(ann, tmp_path / "next", seed=2)
    hub.faults.add(Fault("info", status=status, times=99))
    assert json.loads(run(STALE, env))["n"] == 1, "the symptom: v2 is there, and the old one is given out"
    with pytest.raises((errors.DeniedError, errors.UnreachableError)):
        ben.read(layout.manifest(NAME, 2))
    with pytest.raises((errors.DeniedError, errors.UnreachableError)):
        pull(ben, NAME, 2, tmp_path / "there")
    assert not (tmp_path / "there").exists()


@pytest.mark.usefixtures("ann")
def test_a_silent_hub_does_not_hold_a_reader(hub: TestHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request has a time limit, and all its tries together; then it ends with an error that can be retried."""
    monkeypatch.setattr(client, "_PATIENT", 0.1)
    quick = remote(hub, tmp_path / "quick", patience=Patience(connect=1, answer=0.2))
    hub.faults.add(Fault("info", "stall", times=99, seconds=20))
    with pytest.raises(errors.UnreachableError, match="cannot look at"):
        quick.read(layout.manifest(NAME, 1))


def test_a_tag_that_was_moved_is_found_out(hub: TestHub, ann: HubRemote, ben: HubRemote, tmp_path: Path) -> None:
    """v1 set to another version's commit, or to a commit with other bytes, is refused by its own witnesses."""
    publish(ann, tmp_path / "2", seed=2)
    repo = repo_of(hub)
    first = repo.tags["v1"]
    repo.tags["v1"] = repo.tags["v2"]
    with pytest.raises(errors.IntegrityError, match="not what was published"):
        pull(ben, NAME, 1, tmp_path / "there")
    forged = dict(repo.commits[first].tree)
    manifest = json.loads(hub.store.body(forged["manifest.json"]))
    body = json.dumps(manifest | {"kind": "model"}).encode()
    made = hub.store.commit(
        repo, "main", title="forged", message="", author="eve", parent=None,
        changes=[("file", {"path": "manifest.json", "content": body})],
    )  # fmt: skip
    repo.tags["v2"] = made.oid
    with pytest.raises(errors.IntegrityError):
        pull(ben, NAME, 2, tmp_path / "there")
    assert not (tmp_path / "there").exists()


def test_a_version_without_its_tag_is_found_in_the_history(
    hub: TestHub, ann: HubRemote, ben: HubRemote, tmp_path: Path
) -> None:
    """A reader who may not set tags still finds what was committed."""
    publish(ann, tmp_path / "2", seed=2)
    repo_of(hub).tags.clear()
    pull(ben, NAME, 1, tmp_path / "there")
    assert holds(tmp_path / "there")


def test_a_ledger_that_somebody_removed_is_read_from_the_tags(
    hub: TestHub, ann: HubRemote, ben: HubRemote, tmp_path: Path
) -> None:
    """Versions are found by their tags, numbers go on behind them, and the next version writes the ledger again."""
    repo = repo_of(hub)
    hub.store.commit(
        repo, "main", title="tidy", message="", author="ann", parent=None,
        changes=[("deletedFile", {"path": LEDGER_FILE})],
    )  # fmt: skip
    assert json.loads(ben.read(layout.manifest(NAME, 1)))["content"]
    assert publish(ann, tmp_path / "same", files=LARGE).joined
    assert publish(ann, tmp_path / "2", seed=2).n == 2
    assert b'"n":1' in hub.store.body(repo.at()[LEDGER_FILE])


@pytest.mark.usefixtures("ann")
def test_what_is_not_there_is_said(hub: TestHub, ben: HubRemote, tmp_path: Path) -> None:
    """No such version, no such name, no right to see it, gated: each with the right class."""
    for name, n in ((NAME, 7), ("nothing", 1)):
        with pytest.raises(errors.NotFoundError):
            pull(ben, name, n, tmp_path / "there")
    eve = remote(hub, tmp_path / "eve", token="hf_eve")
    with pytest.raises(errors.NotFoundError):
        pull(eve, NAME, 1, tmp_path / "there")
    repo_of(hub).private, repo_of(hub).gated = False, "manual"
    with pytest.raises(errors.DeniedError) as caught:
        pull(eve, NAME, 1, tmp_path / "there")
    assert "ask for access" in (caught.value.fix or "")
    other = remote(hub, tmp_path / "other")
    publish(other, tmp_path / "run-2", "open-to-all", seed=2)
    other.close()
    hub.store.get("acme/open-to-all").private = False
    listed = eve.catalogue({})
    assert set(listed.ledgers) == {"open-to-all"}, "one gated repository hides no other"
    assert "restricted" in listed.problems[0]
    with pytest.raises(errors.DeniedError, match=NAME):
        unknown(eve, None, NAME)
    repo_of(hub).access.add("eve")
    pull(eve, NAME, 1, tmp_path / "there")
    assert holds(tmp_path / "there")


def test_a_withdrawn_version_is_refused_while_others_go_on(
    hub: TestHub, ann: HubRemote, ben: HubRemote, tmp_path: Path
) -> None:
    """The mark is looked for at every pull, not in what was read before."""
    registry = open_registry(ann, create=False)
    pull(ben, NAME, 1, tmp_path / "before")
    withdraw.withdraw(ann, registry, NAME, 1, who="ann", why="wrong data")
    with pytest.raises(errors.WithdrawnError):
        pull(ben, NAME, 1, tmp_path / "after")
    assert hub.bugs == []


def test_verify_reads_every_byte_of_a_commit(hub: TestHub, ann: HubRemote, ben: HubRemote) -> None:
    """Files, claim, card and history are compared; a changed object in storage is named."""
    assert [f.code for f in verify_version(ann, NAME, 1).findings] == ["history-differs"]  # the test's own history
    sha256 = repo_of(hub).at()["adapter_model.safetensors"].sha256 or ""
    body = hub.store.objects[sha256]
    hub.store.objects[sha256] = body[:-1] + bytes([body[-1] ^ 1])
    found = verify_version(ben, NAME, 1).findings
    assert [(f.code, f.subject) for f in found if f.severity == "block"] == [
        ("file-damaged", "adapter_model.safetensors")
    ]


# ------------------------------------------------------------------------------------------------------------ discovery


def test_an_organisation_is_listed_with_few_requests(
    hub: TestHub, ann: HubRemote, ben: HubRemote, tmp_path: Path
) -> None:
    """One request and one ledger for each name that is news; nothing new is one request. Foreign models cost none."""
    registry = open_registry(ann, create=False)
    for name in ("a", "b"):
        for seed in (1, 2):
            publish(ann, tmp_path / f"{name}{seed}", name, seed=seed)
    hub.store.create("model", "acme", "foreign", hub.store.tokens["hf_ann"])
    tags.move(ann, registry, "a", "prod", 1, "ann", "good")
    catalog = Catalog.open(None, registry.registry, durable=False)
    hub.seen.clear()
    report = sync.sync(ben, catalog)
    assert (report.objects, report.problems) == (3, [])
    assert (hub.count("list"), hub.count("resolve"), len(hub.seen)) == (1, 3, 4)
    hub.seen.clear()
    sync.sync(ben, catalog)
    assert len(hub.seen) == 1
    assert catalog.names() == ["a", "b", NAME]
    assert resolve(ben, catalog, "a").n == 2
    assert resolve(ben, catalog, "a:prod").n == 1
    assert resolve(None, catalog, "a:prod").n == 1
    assert catalog.tags("a") == {1: ["prod"], 2: ["latest"]} or catalog.tags("a") == {1: ["prod"]}
    digest = resolve(ben, catalog, "b@v1").content
    assert {resolve(ben, catalog, f"b@{digest}").n} == {1}
    withdraw.withdraw(ann, registry, "b", 2, who="ann", why=None)
    hub.store.delete("model", f"acme/{NAME}", hub.store.tokens["hf_ann"])
    hub.seen.clear()
    sync.sync(ben, catalog)
    assert (hub.count("list"), hub.count("resolve")) == (1, 1)
    assert catalog.names() == ["a", "b"]
    assert resolve(ben, catalog, "b").n == 1
    with pytest.raises(errors.UsageError, match="nothing to rebuild"):
        rebuild(ben, registry)
    catalog.close()


def test_an_organisation_of_two_hundred_costs_a_request_for_each_name_of_ours(
    hub: TestHub, ann: HubRemote, ben: HubRemote, tmp_path: Path
) -> None:
    """Two hundred repositories in pages of fifty: four requests, one more for each that holds versions; then four."""
    publish(ann, tmp_path / "a", "other")
    for number in range(198):
        hub.store.create("model", "acme", f"foreign-{number}", hub.store.tokens["hf_ann"])
    hub.store.limits = HubLimits(page=50)
    catalog = Catalog.open(None, "r", durable=False)
    for requests in (4 + 2, 4):
        hub.seen.clear()
        assert sync.sync(ben, catalog).problems == []
        assert len(hub.seen) == requests
        assert catalog.names() == [NAME, "other"]
    catalog.close()


def test_a_listing_that_uses_a_quota_up_goes_on_where_it_stopped(
    hub: TestHub, ann: HubRemote, ben: HubRemote, tmp_path: Path
) -> None:
    """What was read is kept and told, what is known is not forgotten, and the next look reads the rest."""
    for number in range(5):
        publish(ann, tmp_path / str(number), f"m{number}")
    catalog = Catalog.open(None, "r", durable=False)
    quota = Fault("resolve", status=429, skip=3, times=99, headers={"Retry-After": "240"})
    hub.faults.add(quota)
    report = sync.sync(ben, catalog)
    first = catalog.names()
    assert 0 < len(first) < 6
    assert "of 6 names were not read" in report.problems[0]
    with pytest.raises(errors.QuotaError):
        sync.sync(ben, catalog)
    assert catalog.names() == first
    hub.faults.clear()
    hub.seen.clear()
    assert sync.sync(ben, catalog).problems == []
    assert len(catalog.names()) == 6
    assert hub.count("resolve") == 6 - len(first)
    catalog.close()


def test_a_damaged_ledger_hides_one_name_only(hub: TestHub, ann: HubRemote, ben: HubRemote, tmp_path: Path) -> None:
    """What somebody broke by hand is named; all other names are listed as ever."""
    publish(ann, tmp_path / "a", "other")
    repo = repo_of(hub)
    hub.store.commit(
        repo, "main", title="oops", message="", author="ann", parent=None,
        changes=[("file", {"path": LEDGER_FILE, "content": b"{"})],
    )  # fmt: skip
    catalog = Catalog.open(None, "r", durable=False)
    report = sync.sync(ben, catalog)
    assert catalog.names() == ["other"]
    assert len(report.problems) == 1
    assert NAME in report.problems[0]
    catalog.close()


def command(env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """Run the real `registry`."""
    script = Path(sys.executable).with_name("registry")
    return subprocess.run([script, *words], env=env, capture_output=True, text=True, timeout=60, check=False)


def test_people_use_it_like_any_remote(hub: TestHub, tmp_path: Path) -> None:
    """push, ls, tag, pull, verify and show on hf://acme, by a publisher and by a colleague who may only read.

    The publisher's configuration names the Hub, and wins over an HF_ENDPOINT where nobody answers.
    """
    folder = lora_adapter(tmp_path / "runs" / "sft")
    text = "---\nlicense: apache-2.0\nbase_model: example-org/tiny-base\nlibrary_name: peft\n---\n\n# tiny adapter\n"
    (folder / "README.md").write_text(text)
    config = tmp_path / "weighbridge.toml"
    config.write_text(f'[remotes.own]\nurl = "hf://acme"\nendpoint = "{hub.url}"\n')
    ann = environ(hub, tmp_path / "ann", HF_ENDPOINT="http://127.0.0.1:9", WEIGHBRIDGE_CONFIG=str(config))
    done = command(ann, "push", str(folder), "--name", "tiny", "--json")
    assert done.returncode == 0, done.stderr
    pushed = json.loads(done.stdout)
    assert pushed["ref"] == "tiny@v1"
    assert pushed["location"].startswith("hf://acme/tiny@")
    assert hub.store.get("acme/tiny").private
    assert command(ann, "tag", "tiny@v1", "prod", "--why", "first").returncode == 0
    (copy,) = json.loads(command(ann, "show", "tiny", "--json").stdout)["copies"]
    assert copy["location"] == f"{hub.url}/acme/tiny/tree/v1", "the page of the tag, on the Hub that was asked"
    ben = environ(hub, tmp_path / "ben", token="hf_ben", WEIGHBRIDGE_REMOTE="hf://acme")
    listed = json.loads(command(ben, "ls", "--json").stdout)
    assert [(v["ref"], v["tags"], v["license"]) for v in listed["versions"]] == [
        ("tiny@v1", listed["versions"][0]["tags"], "apache-2.0")
    ]
    assert "prod" in listed["versions"][0]["tags"]
    there = tmp_path / "there"
    done = command(ben, "pull", "tiny:prod", str(there))
    assert done.returncode == 0, done.stderr
    assert (there / "adapter_model.safetensors").read_bytes() == (folder / "adapter_model.safetensors").read_bytes()
    for words in (["verify", str(there)], ["verify", "tiny@v1"], ["card", "tiny"]):
        done = command(ben, *words)
        assert done.returncode == 0, (words, done.stderr)
    done = command(environ(hub, tmp_path / "eve", token="hf_eve", WEIGHBRIDGE_REMOTE="hf://acme"), "pull", "tiny@v1")
    assert done.returncode == 3, done.stderr
    done = command(ben, "push", str(folder), "--name", "tiny2")
    assert done.returncode == 4, done.stderr
    assert "role is read" in done.stderr


def test_transformers_loads_a_tag(hub: TestHub, tmp_path: Path) -> None:
    """`from_pretrained("acme/name", revision="v1")` works for whoever has only that library."""
    ann = remote(hub, tmp_path / "ann")
    config = {"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 8, "vocab_size": 16}
    files = {"config.json": json.dumps(config).encode(), "model.safetensors": b"\2\0\0\0\0\0\0\0{}"}
    publish(ann, tmp_path / "run", "tiny", files=files)
    ann.close()
    program = """
import json
from transformers import AutoConfig
print(json.dumps(AutoConfig.from_pretrained("acme/tiny", revision="v1").n_embd))
"""
    assert run(program, environ(hub, tmp_path / "ben", token="hf_ben"), timeout=100) == 8


def test_doctor_says_who_we_are_there(hub: TestHub, tmp_path: Path) -> None:
    """The Hub is asked without being written to: names, role of the token, transport; no token is said plainly."""
    publish(remote(hub, tmp_path / "ann"), tmp_path / "run")
    config = tmp_path / "weighbridge.toml"
    config.write_text('[remotes.hub]\nurl = "hf://acme"\n')
    commits = hub.count("commit")
    done = command(environ(hub, tmp_path / "ann"), "doctor", "--config", str(config), "--json")
    checks = {c["check"] if "check" in c else c["name"]: c for c in json.loads(done.stdout)["checks"]}
    assert "1 names" in json.dumps(checks["remote-hub"])
    assert "token role write" in json.dumps(checks["remote-hub-write"])
    done = command(environ(hub, tmp_path / "ben", token="hf_ben"), "doctor", "--config", str(config), "--json")
    assert "role is read" in done.stdout
    done = command(environ(hub, tmp_path / "nobody", token=None), "doctor", "--config", str(config), "--json")
    assert "neither HF_TOKEN" in done.stdout
    config.write_text('[remotes.hub]\nurl = "hf://nobodyorg"\n')
    done = command(environ(hub, tmp_path / "ann"), "doctor", "--config", str(config), "--json")
    assert "a member of acme" in done.stdout
    assert hub.count("commit") == commits
