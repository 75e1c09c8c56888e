"""What goes wrong between a cluster and the Hub, one test for each public failure, numbered as in docs/remotes-hub.md.

Ours; the symptom on the plain client stands beside it or, under the same number, in test_hub_symptoms.py. 13 has both
in test_hub_pull.py: a_refused_question_never_gives_an_older_answer.

Plans of faults: a stale head once (test_hub_publish.py: somebody_commits_in_between), 504 though it landed (05), a
refused card (test_hub_publish.py: a_card_is_checked), storage used up (test_hub_bad_days.py: organisation full),
limits known beforehand (17).
"""

import os
import resource
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi

from weighbridge.adapters.inspect import inspect
from weighbridge.adapters.plan import Policy
from weighbridge.registry import errors
from weighbridge.registry.flow import tags
from weighbridge.registry.flow.admit import admit
from weighbridge.registry.flow.marker import open_registry
from weighbridge.registry.remotes import commits
from weighbridge.registry.remotes.hub import locks
from weighbridge.registry.remotes.hub.client import Patience
from weighbridge.registry.remotes.hub.preflight import Limits
from weighbridge.registry.remotes.hub.remote import HubRemote
from weighbridge.registry.types import RunFacts
from weighbridge_testlib.builders import lora_adapter
from weighbridge_testlib.hub import Fault, TestHub, serve
from weighbridge_testlib.hub import Limits as HubLimits
from weighbridge_testlib.hub.rig import LFS, XET, environ, publish, remote, run
from weighbridge_testlib.hub.store import Repo

NAME = "medical-sft"


def repo_of(hub: TestHub) -> Repo:
    """Return the repository of the tests' name."""
    return hub.store.get(f"acme/{NAME}")


def titles(hub: TestHub) -> list[str]:
    """Return the titles of main's commits, newest first."""
    return [commit.title for commit in repo_of(hub).history("main")]


def number(who: HubRemote, place: Path, seed: int) -> int:
    """Publish a content of its own and return its number."""
    return publish(who, place / str(seed), seed=seed).n


def at_once(calls: Sequence[Callable[[], int]]) -> list[int]:
    """Return what all of them return; they begin together."""
    gate = threading.Barrier(len(calls))
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(lambda call: (gate.wait(), call())[1], calls))


def test_07_a_remote_that_always_says_stale_is_given_up_on(
    hub: TestHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing moves, a refusal as stale is no race: after three tries the token's rights are named.

    They are spread over three seconds: where reads lag behind, somebody else's commit is seen by then.
    """
    ann = remote(hub, tmp_path / "ann")
    publish(ann, tmp_path / "1")
    hub.seen.clear()
    hub.faults.add(Fault("commit", status=412, times=99))
    with monkeypatch.context() as patch:
        patch.setattr(commits, "UNMOVED", (0.0, 0.0))
        with pytest.raises(errors.DeniedError, match="cannot be committed"):
            publish(ann, tmp_path / "2", seed=2)
    assert hub.count("commit") == 3
    hub.seen.clear()
    pauses: list[float] = []
    monkeypatch.setattr(ann, "_sleep", pauses.append)
    with pytest.raises(errors.DeniedError, match="nothing can be said"):
        tags.move(ann, open_registry(ann, create=False), NAME, "prod", 1, "ann", None)
    assert hub.count("commit") == 3
    assert 3 <= sum(pauses) < 5
    stale = commits.Stale("nothing can be said")
    for parent in "abcdef":
        assert stale.pause(parent, parent) < 1
        assert stale.pause(parent, parent) > 2
        assert stale.pause(parent, "moved") == 0
    ann.close()


def test_12_a_blocked_store_is_named(hub: TestHub, tmp_path: Path) -> None:
    """The Hub answers and the store it names does not: both are named before anything is sent."""
    hub.cas_host = "http://localhost:9"
    ann = remote(hub, tmp_path / "ann", way="xet")
    with pytest.raises(errors.UnreachableError) as caught:
        publish(ann, tmp_path / "run")
    assert "localhost:9" in (caught.value.why or "")
    assert hub.url.removeprefix("http://") in (caught.value.why or "")
    assert "HF_HUB_DISABLE_XET" in (caught.value.fix or "")
    assert hub.count("commit") == 0
    ann.close()


def test_19_an_offline_machine_asks_nobody(hub: TestHub, tmp_path: Path) -> None:
    """With HF_HUB_OFFLINE the job is told to wait, and not one request goes out."""
    ann = remote(hub, tmp_path / "ann")
    ann.line.environ = {**ann.line.environ, "HF_HUB_OFFLINE": "1"}
    with pytest.raises(errors.UnreachableError, match="cannot") as caught:
        publish(ann, tmp_path / "run")
    assert "HF_HUB_OFFLINE" in (caught.value.why or "")
    assert hub.seen == []
    ann.close()


def test_01_quotas_and_full_storage_are_told_as_such(tmp_path: Path) -> None:
    """The commit quota says when to come back; a full organisation is permanent; nothing is half there."""
    with serve(limits=HubLimits(commits_per_hour=1)) as hub:
        ann = remote(hub, tmp_path / "ann")
        publish(ann, tmp_path / "1")
        with pytest.raises(errors.QuotaError) as quota:
            publish(ann, tmp_path / "2", seed=2)
        assert (quota.value.data["quota"], quota.value.data["retry_after"]) == ("commits", 3600.0)
        assert hub.count("commit") == 2
        ann.close()
    with serve(limits=HubLimits(storage=2500)) as hub:
        ann = remote(hub, tmp_path / "ann2")
        publish(ann, tmp_path / "3")
        with pytest.raises(errors.StorageFullError):
            publish(ann, tmp_path / "4", seed=2)
        assert hub.count("commit") == 1
        ann.close()


def test_11_a_silent_server_is_left(hub: TestHub, tmp_path: Path) -> None:
    """When no byte moves, the upload is ended; nothing is seen, and the next try goes through."""
    patience = Patience(connect=2, answer=0.5, commit=5, stall=0.7)
    ann = remote(hub, tmp_path / "ann", way="child", patience=patience)
    hub.faults.add(Fault("lfs-put", "stall", seconds=20))
    with pytest.raises(errors.UnreachableError, match="cannot upload"):
        publish(ann, tmp_path / "1")
    assert [c.title for c in repo_of(hub).history("main")] == ["initial commit"]
    hub.faults.add(Fault("info", "stall", seconds=20))
    assert publish(ann, tmp_path / "2").n == 1
    ann.close()


@pytest.mark.parametrize("way", ["lfs", "child"])
@pytest.mark.parametrize("status", [500, 504, 0])
def test_05_a_commit_that_landed_without_an_answer_is_not_made_twice(
    hub: TestHub, tmp_path: Path, status: int, way: str
) -> None:
    """After a 5xx or a cut connection the head is looked at first: our version there means done."""
    ann = remote(hub, tmp_path / "ann", way=way)
    hub.faults.add(Fault("commit", "lose", status=status))
    receipt = publish(ann, tmp_path / "run")
    assert receipt.n == 1
    assert hub.count("commit") == 1
    assert [c.title for c in repo_of(hub).history("main")] == [f"{NAME} v1", "initial commit"]
    ann.close()


def test_03_and_04_a_commit_that_did_not_land_is_repeated(hub: TestHub, tmp_path: Path) -> None:
    """A refused or cut commit that left no trace is made again, and no file is sent again for it."""
    ann = remote(hub, tmp_path / "ann")
    hub.faults.add(Fault("commit", status=503), Fault("commit", "cut"))
    assert publish(ann, tmp_path / "run").n == 1
    assert (hub.count("commit"), hub.count("lfs-put")) == (3, 1)
    ann.close()


def test_02_nothing_is_asked_twice(hub: TestHub, tmp_path: Path) -> None:
    """Quota used up by re-checking files: one preupload per 256 files, and none for a content that is there."""
    ann = remote(hub, tmp_path / "ann")
    files = {f"part/{n:03d}.txt": b"%d" % n for n in range(257)} | {"adapter_config.json": b"{}"}
    publish(ann, tmp_path / "1", files=files)
    assert hub.count("preupload") == 3  # two for 258 files, one for the papers
    hub.seen.clear()
    publish(ann, tmp_path / "2", files=files)
    assert hub.count("preupload") == 0
    ann.close()


PARALLEL = """
import json
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError
api = HfApi()
head, said = api.model_info("acme/medical-sft").sha, []
for name in "ab":
    try:
        api.create_commit("acme/medical-sft", [CommitOperationAdd(name, b"x")], commit_message=name, parent_commit=head)
        said.append(200)
    except HfHubHTTPError as error:
        said.append(error.response.status_code)
print(json.dumps(said))
"""


def test_06_parallel_writers_plan_again(hub: TestHub, tmp_path: Path) -> None:
    """The plain client's second writer gets a 412 and ends; ours looks, takes the next number and commits on top."""
    ann, other = remote(hub, tmp_path / "ann"), remote(hub, tmp_path / "other")
    publish(ann, tmp_path / "1")
    assert run(PARALLEL, environ(hub, tmp_path / "plain", **LFS)) == [200, 412]
    landed = at_once([partial(number, who, tmp_path, seed) for seed, who in ((2, ann), (3, other))])
    assert sorted(landed) == [2, 3]
    assert sorted(repo_of(hub).tags) == ["v1", "v2", "v3"]
    ann.close()
    other.close()


TWICE = """
import json, sys
from huggingface_hub import HfApi
print(json.dumps(HfApi().upload_folder(repo_id="acme/plain", folder_path=sys.argv[1]).oid))
"""


def test_05_the_plain_client_commits_twice(hub: TestHub, tmp_path: Path) -> None:
    """A commit that landed with a 500 is made again by the plain client's folder upload; ours looks at the head."""
    hub.store.create("model", "acme", "plain", hub.store.tokens["hf_ann"])
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "w.safetensors").write_bytes(b"w" * 3000)
    hub.faults.add(Fault("commit", "lose", status=500))
    run(TWICE, environ(hub, tmp_path / "plain", **XET), str(tmp_path / "folder"))
    assert len(hub.store.get("acme/plain").history("main")) == 3
    ann = remote(hub, tmp_path / "ann", way="xet")
    hub.faults.add(Fault("commit", "lose", status=500))
    publish(ann, tmp_path / "run")
    assert titles(hub) == [f"{NAME} v1", "initial commit"]
    ann.close()


@pytest.mark.parametrize("way", ["lfs", "child"])
def test_08_what_was_uploaded_is_not_uploaded_again(hub: TestHub, tmp_path: Path, way: str) -> None:
    """One of several large files fails: the next try sends that one, and none of the others."""
    ann = remote(hub, tmp_path / "ann", way=way)
    files = {f"w{n}.safetensors": bytes([n]) * 70_000 for n in range(4)} | {"adapter_config.json": b"{}"}
    hub.faults.add(Fault("lfs-put", status=403, skip=2))
    with pytest.raises(errors.DeniedError):
        publish(ann, tmp_path / "1", files=files)
    assert titles(hub) == ["initial commit"]
    hub.seen.clear()
    assert publish(ann, tmp_path / "2", files=files).n == 1
    assert hub.count("lfs-put") <= 2
    ann.close()


NO_XET = """
import json
from huggingface_hub import CommitOperationAdd, HfApi
api = HfApi()
api.create_repo("acme/plain")
try:
    api.create_commit("acme/plain", [CommitOperationAdd("w.safetensors", b"w" * 3000)], commit_message="w")
    print(json.dumps("done"))
except Exception as error:
    print(json.dumps(type(error).__name__))
"""


def test_09_the_plain_client_fails_without_xet(tmp_path: Path) -> None:
    """On a Hub without xet no weight file of the plain client arrives; ours has found out and sends it by LFS."""
    with serve(xet=False) as hub:
        assert run(NO_XET, environ(hub, tmp_path / "plain", **XET)) != "done"
        ann = remote(hub, tmp_path / "ann", way="xet")
        assert publish(ann, tmp_path / "run").n == 1
        ann.close()


def test_10_too_few_descriptors_are_told_as_such(hub: TestHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which limit is to be raised is said, and the next try goes on; the plain client: tests/proofs/hub_scarce.py."""
    few = [True]

    class Few(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            if few[0]:
                resource.prlimit(self.pid, resource.RLIMIT_NOFILE, (5, 5))

    monkeypatch.setattr("subprocess.Popen", Few)
    ann = remote(hub, tmp_path / "ann", way="child")
    with pytest.raises(errors.RetryableError, match="cannot upload") as caught:
        publish(ann, tmp_path / "1")
    assert "Too many open files" in (caught.value.why or "")
    assert "LimitNOFILE" in (caught.value.fix or "")
    few[0] = False
    assert publish(ann, tmp_path / "2").n == 1
    ann.close()


def test_10_an_upload_that_memory_ran_out_for_is_told_as_such(
    hub: TestHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel kills the child and nobody else: what happened is named, nothing is seen, the next try goes on."""
    children: list[int] = []

    class Known(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            children.append(self.pid)

    monkeypatch.setattr("subprocess.Popen", Known)
    ann = remote(hub, tmp_path / "ann", way="child")
    hub.watch = lambda _, line: os.kill(children.pop(), signal.SIGKILL) if "/_storage" in line and children else None
    with pytest.raises(errors.RetryableError, match="cannot upload") as caught:
        publish(ann, tmp_path / "1")
    assert "memory" in (caught.value.why or "")
    assert titles(hub) == ["initial commit"]
    hub.watch = lambda _when, _line: None
    assert publish(ann, tmp_path / "2").n == 1
    ann.close()


def test_14_locks_that_lie_cost_nothing(hub: TestHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none can be had, or everybody gets one, commits are guarded all the same: each version has its number."""
    (tmp_path / "file").write_text("in the way")
    with locks.held(tmp_path / "file", "acme/m"), locks.held(tmp_path / "locks", "acme/n"):
        pass
    monkeypatch.setattr(locks, "held", lambda _folder, _name: nullcontext())
    everybody = [remote(hub, tmp_path / who) for who in ("ann", "other")]
    publish(everybody[0], tmp_path / "first", seed=9)
    landed = at_once([partial(number, who, tmp_path, seed) for seed, who in enumerate(everybody)])
    assert sorted(landed) == [2, 3]
    for one in everybody:
        one.close()


def test_15_a_token_that_may_not_create_still_writes(hub: TestHub, tmp_path: Path) -> None:
    """A fine-grained token gets 403 on creating what is there already; what is there is never created again."""
    ann = remote(hub, tmp_path / "ann")
    publish(ann, tmp_path / "1")
    ann.close()
    hub.faults.add(Fault("create", status=403, times=99))
    fine = remote(hub, tmp_path / "fine", token="hf_fine")
    assert publish(fine, tmp_path / "2", seed=2).n == 2
    assert hub.count("create") == 1
    with pytest.raises(errors.DeniedError, match="cannot make the repository"):
        publish(fine, tmp_path / "3", "other", seed=3)
    fine.close()


def test_16_links_are_resolved_and_what_is_left_out_is_told(hub: TestHub, tmp_path: Path) -> None:
    """The plain client skips links to folders and links to nothing without a word; ours follows, tells or refuses."""
    shared, folder = tmp_path / "shared", tmp_path / "run"
    lora_adapter(shared / "weights")
    (shared / "logs").mkdir()
    (shared / "logs" / "scores.json").write_text("{}")
    folder.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors", "README.md"):
        (folder / name).symlink_to(shared / "weights" / name)
    (folder / "scores").symlink_to(shared / "logs", target_is_directory=True)
    (folder / "notes.txt").symlink_to(tmp_path / "gone.txt")
    plain = HfApi(endpoint=hub.url, token="hf_ann")
    plain.create_repo("acme/plain")
    plain.upload_folder(repo_id="acme/plain", folder_path=folder, allow_patterns=["*.json", "*.txt"])
    assert sorted(hub.store.get("acme/plain").at()) == [".gitattributes", "adapter_config.json"], "nobody was told"
    (artifact,) = inspect(folder).artifacts
    taken = admit(artifact, name=NAME, run=RunFacts(project="p", name="r", id="1"), policy=Policy())
    assert {one.path for one in taken.facts.left_out} == {"notes.txt", "scores/scores.json"}
    ann = remote(hub, tmp_path / "ann")
    bodies = {file.path: Path(file.source).read_bytes() for file in taken.files}
    publish(ann, tmp_path / "stage", files=bodies)
    assert hub.store.body(repo_of(hub).at()["adapter_model.safetensors"]) == bodies["adapter_model.safetensors"]
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.safetensors").symlink_to(tmp_path / "gone.safetensors")
    assert inspect(folder).outcome == "refuse", "a weight that is a link to nothing"
    ann.close()


def test_17_limits_are_known_beforehand(hub: TestHub, tmp_path: Path) -> None:
    """Too many files or one that is too large: refused with the limits before a byte is sent, and for good."""
    ann = remote(hub, tmp_path / "ann", limits=Limits(file=2000, files=5))
    files = {f"f{n}.txt": b"x" for n in range(6)} | {"model.safetensors": b"w" * 13_512}
    with pytest.raises(errors.RefusedError) as caught:
        publish(ann, tmp_path / "run", files=files)
    assert (caught.value.data["over_size"], caught.value.data["files"]) == (["model.safetensors"], 7)
    assert {f.code for f in caught.value.data["findings"]} == {"hub-limit"}
    assert [hub.count(kind) for kind in ("create", "preupload", "lfs-batch", "commit")] == [0, 0, 0, 0] or (
        hub.count("create") == 1
    )
    assert hub.sent() == 0
    ann.close()


def test_18_and_20_every_question_carries_the_token_and_whoami_is_asked_once(hub: TestHub, tmp_path: Path) -> None:
    """A shared address has an anonymous limit, and an upload without changes once lost its token."""
    ann = remote(hub, tmp_path / "ann")
    for turn in range(3):
        publish(ann, tmp_path / str(turn), seed=1 + turn // 2)
    assert hub.count("whoami") == 1
    asked = [seen for seen in hub.seen if seen.path.startswith("/api/") and "agent-harnesses" not in seen.path]
    assert {seen.token for seen in asked} == {"hf_ann"}
    assert all("weighbridge/" in seen.agent for seen in asked)
    ann.close()


def test_21_a_version_is_never_skipped_because_another_is_on_its_way(hub: TestHub, tmp_path: Path) -> None:
    """Three versions asked for while the first is still uploading: all of them land."""
    ann = remote(hub, tmp_path / "ann")
    hub.faults.add(Fault("lfs-put", "slow", seconds=0.1))
    assert sorted(at_once([partial(number, ann, tmp_path, seed) for seed in (1, 2, 3)])) == [1, 2, 3]
    ann.close()


def test_an_answer_that_no_hub_gives_is_told(hub: TestHub, tmp_path: Path) -> None:
    """What a proxy says in the Hub's place is no bug: it is asked again, then told, and nothing is published."""
    ann = remote(hub, tmp_path / "ann")
    hub.faults.add(Fault("info", status=200, times=99))
    with pytest.raises(errors.RetryableError) as caught:
        publish(ann, tmp_path / "run")
    assert "no answer of a Hub" in (caught.value.why or "")
    hub.faults.clear()
    assert publish(ann, tmp_path / "again").n == 1
    ann.close()
