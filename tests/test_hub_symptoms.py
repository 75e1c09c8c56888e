"""What the plain client does on a bad day, numbered as in docs/remotes-hub.md: why test_hub_faults.py asks for more.

Three symptoms belong to older clients (14, 18) or to a library that loops without end around this one (7): what is left
of them today is shown, and each says so.
"""

import atexit
import fcntl
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest
from huggingface_hub import CommitOperationAdd, CommitScheduler, HfApi, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils._http import default_client_factory

from weighbridge.registry.remotes.hub.client import Patience, make_client
from weighbridge_testlib.hub import Fault, TestHub, serve
from weighbridge_testlib.hub import Limits as HubLimits
from weighbridge_testlib.hub.rig import LFS, XET, environ, model, run


def plain(hub: TestHub, token: str | None = "hf_ann") -> HfApi:
    """Return the library as it is, with an empty repository acme/plain."""
    if ("model", "acme/plain") not in hub.store.repos:
        hub.store.create("model", "acme", "plain", hub.store.tokens["hf_ann"])
    return HfApi(endpoint=hub.url, token=token or False)


def shards(folder: Path) -> Path:
    """Write four files of weights that have nothing in common."""
    folder.mkdir()
    for n in range(4):
        (folder / f"w{n}.safetensors").write_bytes(random.Random(n).randbytes(70_000))
    return folder


def commit(api: HfApi, count: int = 1) -> None:
    """Commit some small files."""
    files = [CommitOperationAdd(f"{n}.txt", b"%d" % n) for n in range(count)]
    api.create_commit("acme/plain", files, commit_message="by the plain client")


def test_01_the_plain_client_cannot_tell_the_two_quotas_apart() -> None:
    """A 429 whose rate header still has requests left: neither when to come back nor what is used up is told."""
    with serve(limits=HubLimits(commits_per_hour=1)) as hub:
        api = plain(hub)
        commit(api)
        with pytest.raises(HfHubHTTPError) as caught:
            commit(api, 2)
        assert caught.value.response.status_code == 429
        assert "r=949" in caught.value.response.headers["RateLimit"]


def test_02_the_plain_client_asks_about_every_file_again(hub: TestHub, tmp_path: Path) -> None:
    """An upload of a folder that is there already still asks about its files, each time."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").write_text("a")
    for _ in range(3):
        plain(hub).upload_folder(repo_id="acme/plain", folder_path=tmp_path / "folder")
    assert hub.count("preupload") == 3


@pytest.mark.parametrize("fault", [Fault("commit", status=503), Fault("commit", "cut")], ids=["503", "cut"])
def test_03_and_04_the_plain_client_gives_up_at_once(hub: TestHub, fault: Fault) -> None:
    """One 503, or one cut connection, ends the process that trains."""
    hub.faults.add(fault)
    with pytest.raises((HfHubHTTPError, httpx2.TransportError)):
        commit(plain(hub))
    assert hub.count("commit") == 1


def test_07_the_plain_client_calls_a_missing_right_a_race(hub: TestHub) -> None:
    """Told to refresh and try again, a caller does so for ever; the loop itself is that of `datasets`, without an end.

    A token that may only open pull requests gets a 412 from some Hubs; nothing moved, and no word says so.
    """
    api = plain(hub)
    words = "A commit has happened since. Please refresh and try again."
    hub.faults.add(Fault("commit", status=412, times=99, message=words))
    heads = set()
    for _ in range(4):
        head = api.model_info("acme/plain").sha
        heads.add(head)
        with pytest.raises(HfHubHTTPError, match="refresh and try again") as caught:
            api.create_commit("acme/plain", [CommitOperationAdd("a", b"a")], commit_message="a", parent_commit=head)
        assert "right" not in str(caught.value)
    assert len(heads) == 1, "there never was a race"


UPLOAD = """
import json, sys
from huggingface_hub import HfApi
try:
    HfApi().upload_folder(repo_id="acme/plain", folder_path=sys.argv[1])
    print(json.dumps("done"))
except Exception as error:
    print(json.dumps(str(error)))
"""


def test_08_the_plain_client_begins_from_zero(hub: TestHub, tmp_path: Path) -> None:
    """When the last request of an upload by xet fails, the next try sends every file again."""
    plain(hub)
    folder = shards(tmp_path / "folder")
    env = environ(hub, tmp_path / "plain", **XET)
    hub.faults.add(Fault("shard", status=403))
    assert "403" in run(UPLOAD, env, str(folder))
    before = hub.sent()
    assert before > 4 * 70_000
    assert run(UPLOAD, env, str(folder)) == "done"
    assert hub.sent() == 2 * before


def test_11_the_plain_client_waits_for_ever() -> None:
    """Its HTTP client has no time limit; ours has one for every part of a request."""
    assert default_client_factory().timeout == httpx2.Timeout(None)
    assert None not in make_client(Patience()).timeout.as_dict().values()


def test_12_the_plain_client_tries_a_blocked_store_for_minutes(hub: TestHub, tmp_path: Path) -> None:
    """HF_ENDPOINT is another host than the store; the Hub that named it is not told, nor what helps.

    By itself it is still trying after five minutes; here it is told to try once.
    """
    plain(hub)
    hub.cas_host = "http://localhost:9"
    env = environ(hub, tmp_path / "plain", HF_XET_CLIENT_RETRY_MAX_ATTEMPTS="0", **XET)
    said = run(UPLOAD, env, str(shards(tmp_path / "folder")))
    assert "localhost:9" in said
    assert hub.url not in said
    assert "HF_HUB_DISABLE_XET" not in said


def test_14_the_plain_client_relies_on_locks_of_the_file_system(
    hub: TestHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a lock says yes to everybody, as on some shared disks, both processes of a node fetch the same file.

    Older clients wrote both into one file; the one that we ask for at least keeps them apart, so that bytes stay whole.
    """
    body = b"w" * 5000
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "w.safetensors").write_bytes(body)
    model(hub, "acme/plain", tmp_path / "model")
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    both = threading.Barrier(2)

    def meet(when: str, line: str) -> None:
        if when == "before" and line.startswith("GET /_storage"):
            both.wait(30)

    hub.watch = meet
    with ThreadPoolExecutor(2) as pool:
        paths = [pool.submit(fetched, hub, tmp_path / "cache") for _ in range(2)]
        assert [Path(path.result()).read_bytes() for path in paths] == [body, body]
    assert hub.count("storage") == 2


def fetched(hub: TestHub, cache: Path) -> str:
    """Return a file as the library fetches it into a cache."""
    return hf_hub_download("acme/plain", "w.safetensors", cache_dir=cache, endpoint=hub.url, token="hf_ann")


def test_15_the_plain_client_fails_on_creating_what_exists(hub: TestHub) -> None:
    """A token that may write but not create gets a 403, although there is nothing to create."""
    hub.faults.add(Fault("create", status=403))
    with pytest.raises(HfHubHTTPError, match="403"):
        plain(hub, "hf_fine").create_repo("acme/plain")


def test_17_the_plain_client_gets_no_reason() -> None:
    """Too many files in a folder: the Hub says 403 and no word more."""
    with serve(limits=HubLimits(entries=5)) as hub:
        with pytest.raises(HfHubHTTPError, match="403") as caught:
            commit(plain(hub), 6)
        assert caught.value.server_message in (None, "", "None")


def test_18_the_plain_client_keeps_its_token_since_2_4(hub: TestHub, tmp_path: Path) -> None:
    """An upload without changes lost the token that it was given; the release that we ask for at least does not."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").write_text("a")
    api = HfApi(endpoint=hub.url, token=False)
    plain(hub)
    for _ in range(2):
        api.upload_folder(repo_id="acme/plain", folder_path=tmp_path / "folder", token="hf_ann")
    assert hub.count("commit") == 1
    assert {seen.token for seen in hub.seen if "/plain" in seen.path} == {"hf_ann"}


LATE = """
import json, os
from huggingface_hub import HfApi
os.environ["HF_HUB_OFFLINE"] = "1"
print(json.dumps(HfApi().model_info("acme/plain").id))
"""


def test_19_the_plain_client_does_not_hear_that_a_node_is_offline(hub: TestHub, tmp_path: Path) -> None:
    """HF_HUB_OFFLINE counts when the library is loaded: a run that says so afterwards goes out all the same."""
    plain(hub)
    assert run(LATE, environ(hub, tmp_path / "plain", **LFS)) == "acme/plain"
    assert hub.count("info") == 1


def test_20_the_anonymous_share_one_limit() -> None:
    """Behind one address everybody without a token counts together; with a token each counts alone."""
    with serve(limits=HubLimits(requests=2)) as hub:
        hub.store.create("model", "acme", "plain", hub.store.tokens["hf_ann"])
        for _ in range(2):
            plain(hub, None).list_repo_refs("acme/plain")
        with pytest.raises(HfHubHTTPError) as caught:
            plain(hub, None).list_repo_refs("acme/plain")
        assert caught.value.response.status_code == 429
        assert plain(hub).list_repo_refs("acme/plain").branches


def test_21_what_the_plain_client_is_asked_for_while_it_is_busy_never_arrives(hub: TestHub, tmp_path: Path) -> None:
    """Its scheduler pushes whatever is there once the last push is done; the Trainer leaves the push out altogether.

    Of three versions of a file, the second is asked for while the first is on its way, and no commit holds it.
    """
    api, folder = plain(hub), tmp_path / "folder"
    folder.mkdir()
    weights = folder / "w.txt"
    weights.write_text("one")
    busy, gate = threading.Event(), threading.Event()

    def hold(when: str, line: str) -> None:
        if when == "before" and "/commit/" in line:
            busy.set()
            gate.wait(30)

    hub.watch = hold
    scheduler = CommitScheduler(repo_id="acme/plain", folder_path=folder, every=600, hf_api=api)
    assert busy.wait(30)
    pushes = []
    for stamp, words in ((1, "two"), (2, "three")):
        weights.write_text(words)
        os.utime(weights, (stamp, stamp))
        pushes.append(scheduler.trigger())
    gate.set()
    for push in pushes:
        push.result(30)
    scheduler.stop()
    atexit.unregister(scheduler._push_to_hub)
    repo = hub.store.get("acme/plain")
    held = [commit.tree["w.txt"].data for commit in repo.history("main") if "w.txt" in commit.tree]
    assert held == [b"three", b"one"]
