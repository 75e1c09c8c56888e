"""The test Hub, driven by the real client and the real `hf` command: what a Hub does, and what it refuses."""

import hashlib
import json
import math
import os
import random
import signal
import struct
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from weighbridge_testlib.hub import Fault, Limits, TestHub, serve
from weighbridge_testlib.hub.lz4 import decode_frame
from weighbridge_testlib.hub.rig import LFS, TRANSPORTS, environ, hf, run
from weighbridge_testlib.hub.xet import hash_text, parse_xorb

ROUND_TRIP = """
import hashlib, json, os, sys, tempfile
from pathlib import Path
from huggingface_hub import (CommitOperationAdd, CommitOperationCopy, CommitOperationDelete, HfApi, ModelCard,
                             get_safetensors_metadata, snapshot_download)
from huggingface_hub.errors import HfHubHTTPError, RevisionNotFoundError
api, folder = HfApi(), Path(sys.argv[1])
said = {"who": api.whoami()["name"]}
api.create_repo("acme/m", private=True)
api.create_repo("acme/m", private=True, exist_ok=True)
api.auth_check("acme/m", write=True)
first = api.upload_folder(repo_id="acme/m", folder_path=folder, commit_message="first").oid
api.create_tag("acme/m", tag="v1", tag_message="one")
api.create_branch("acme/m", branch="run/42")
api.upload_file(repo_id="acme/m", revision="run/42", path_or_fileobj=b"x", path_in_repo="x.txt")
pull = api.create_commit("acme/m", [CommitOperationAdd("y.txt", b"y")], commit_message="why", create_pr=True)
api.merge_pull_request("acme/m", pull.pr_num)
changes = [CommitOperationCopy("model.safetensors", "copy.safetensors"), CommitOperationDelete("empty.txt")]
api.create_commit("acme/m", changes, commit_message="copy", parent_commit=api.model_info("acme/m").sha)
tree = {f.path: f for f in api.list_repo_tree("acme/m", recursive=True) if hasattr(f, "size")}
said["tree"] = sorted(tree)
said["lfs"] = tree["model.safetensors"].lfs.sha256
said["info"] = [f.path for f in api.get_paths_info("acme/m", ["README.md", "nothing"], expand=True)]
said["refs"] = sorted(r.name for r in api.list_repo_refs("acme/m").branches)
said["commits"] = [c.title for c in api.list_repo_commits("acme/m")]
for revision in ("v1", "main", "run/42", first, "refs/pr/1"):
    place = Path(snapshot_download("acme/m", revision=revision))
    for file in folder.rglob("*"):
        if file.is_file() and (revision == "v1" or file.name != "empty.txt"):
            assert (place / file.relative_to(folder)).read_bytes() == file.read_bytes(), (revision, file)
report = api.verify_repo_checksums("acme/m", revision="v1")
assert not report.mismatches and not report.missing_paths, report
said["tensors"] = get_safetensors_metadata("acme/m").parameter_count
said["license"] = ModelCard.load("acme/m").data.license
try:
    api.model_info("acme/m", revision="nowhere")
except RevisionNotFoundError:
    said["nowhere"] = True
api.delete_file("y.txt", "acme/m")
api.super_squash_history("acme/m")
said["squashed"] = len(api.list_repo_commits("acme/m"))
said["objects"] = len(list(api.list_lfs_files("acme/m")))
api.move_repo("acme/m", "acme/renamed")
said["moved"] = api.model_info("acme/m").id
said["listed"] = [m.id for m in api.list_models(author="acme", expand=["sha", "siblings"])]
api.delete_repo("acme/renamed")
said["gone"] = api.repo_exists("acme/renamed")
print(json.dumps(said))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder such as people upload: weights, text, an empty file, a name in Japanese."""
    root = tmp_path / "folder"
    root.mkdir()
    waves = struct.pack("<60000f", *(math.sin(n / 50) for n in range(60_000)))
    data = random.Random(1).randbytes(2_000_000) + b"the same again and again " * 40_000 + waves
    tensor = {"w": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}
    header = json.dumps(tensor).encode()
    (root / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    (root / "README.md").write_text("---\nlicense: mit\n---\n# hello\n")
    (root / "empty.txt").write_bytes(b"")
    (root / "名 前 #1?.txt").write_text("こんにちは")
    return root


@pytest.mark.parametrize("way", ["lfs", "multipart", "xet"])
def test_the_real_client_goes_round(folder: Path, tmp_path: Path, way: str) -> None:
    """Repositories, commits, tags, branches, pull requests, copies, downloads and moves work in every transport."""
    with serve(multipart=700_000 if way == "multipart" else None, xet=way == "xet") as hub:
        said = run(ROUND_TRIP, environ(hub, tmp_path, **TRANSPORTS["xet" if way == "xet" else "lfs"]), str(folder))
        assert hub.leaked() == []
        assert not hub.count("lfs-put") if way == "xet" else not hub.count("xorb")
        assert hub.count("lfs-put") == {"lfs": 1, "multipart": 5, "xet": 0}[way]
    sha256 = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert said["lfs"] == sha256
    assert said["tree"] == [
        ".gitattributes", "README.md", "copy.safetensors", "model.safetensors", "y.txt", "名 前 #1?.txt"
    ]  # fmt: skip
    assert (said["who"], said["license"], said["info"]) == ("ann", "mit", ["README.md"])
    assert list(said["tensors"]) == ["U8"]
    assert said["refs"] == ["main", "run/42"]
    assert said["commits"] == ["copy", "why", "first", "initial commit"]
    assert (said["nowhere"], said["squashed"], said["objects"]) == (True, 1, 1)
    assert (said["moved"], said["listed"], said["gone"]) == ("acme/renamed", ["acme/renamed"], False)


@pytest.mark.parametrize("way", ["lfs", "xet"])
def test_the_real_command_goes_round(hub: TestHub, folder: Path, tmp_path: Path, way: str) -> None:
    """`hf` logs in, makes a repository, uploads a folder, tags it, lists it, downloads it and verifies it."""
    env = environ(hub, tmp_path, **TRANSPORTS[way])
    for words in (
        ["auth", "whoami"],
        ["repos", "create", "acme/m", "--private"],
        ["upload", "acme/m", str(folder), ".", "--commit-message", "by hand"],
        ["repos", "tag", "create", "acme/m", "v1"],
        ["models", "ls", "--author", "acme"],
        ["download", "acme/m", "--revision", "v1", "--local-dir", str(tmp_path / "there")],
    ):
        done = hf(env, *words)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
    for file in folder.rglob("*"):
        if file.is_file():
            assert (tmp_path / "there" / file.relative_to(folder)).read_bytes() == file.read_bytes()
    assert hub.store.get("acme/m").private
    assert (
        hf(env, "cache", "verify", "acme/m", "--revision", "v1", "--local-dir", str(tmp_path / "there")).returncode == 0
    )


REFUSALS = """
import json
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError
api, said = HfApi(), {}
def try_it(name, act):
    try:
        act()
        said[name] = "done"
    except HfHubHTTPError as error:
        said[name] = [type(error).__name__, error.response.status_code, error.server_message]
    except Exception as error:
        said[name] = [type(error).__name__, str(error)[:80]]
head = api.model_info("acme/m").sha
def add(name, body=b"x", api=api, **more):
    return api.create_commit("acme/m", [CommitOperationAdd(name, body)], commit_message=name, **more)
add("a")
try_it("stale", lambda: add("b", parent_commit=head))
try_it("prefix", lambda: add("b", parent_commit=api.model_info("acme/m").sha[:8]))
try_it("absent", lambda: api.create_commit("acme/m", [CommitOperationDelete("nothing")], commit_message="d"))
try_it("card", lambda: add("README.md", b"---\\nlicense: my own\\n---\\n"))
try_it("tag", lambda: [api.create_tag("acme/m", tag="v1") for _ in range(2)])
try_it("branch", lambda: [api.create_branch("acme/m", branch="b") for _ in range(2)])
try_it("main", lambda: api.delete_branch("acme/m", branch="main"))
try_it("missing", lambda: api.model_info("acme/nothing"))
try_it("exists", lambda: api.create_repo("acme/m"))
try_it("foreign", lambda: api.create_repo("others/m"))
read = HfApi(token="hf_ben")
try_it("reader", lambda: add("z", api=read))
try_it("reader may read", lambda: read.model_info("acme/m"))
try_it("stranger", lambda: HfApi(token="hf_eve").model_info("acme/m"))
try_it("nobody", lambda: HfApi(token=False).model_info("acme/m"))
try_it("bad token", lambda: HfApi(token="hf_forged").whoami())
print(json.dumps(said))
"""


def test_it_refuses_what_the_hub_refuses(hub: TestHub, tmp_path: Path) -> None:
    """Stale parents, absent files, bad cards, taken tags, missing scopes: each with the Hub's status and code."""
    hub.store.create("model", "acme", "m", hub.store.tokens["hf_ann"], private=True)
    said = run(REFUSALS, environ(hub, tmp_path, **LFS))
    assert said["stale"][:2] == ["HfHubHTTPError", 412]
    assert said["prefix"] == "done"
    assert said["absent"][:2] == ["RemoteEntryNotFoundError", 404]
    assert said["card"][0] == "ValueError"
    assert [said[key][1] for key in ("tag", "branch", "main", "exists", "foreign", "reader")] == [
        409, 409, 403, 409, 403, 403
    ]  # fmt: skip
    assert said["reader may read"] == "done"
    assert {said[key][0] for key in ("missing", "stranger", "nobody")} == {"RepositoryNotFoundError"}
    assert said["bad token"][1] == 401


WRONG_SIZE = """
import json, sys
from pathlib import Path
from huggingface_hub import CommitOperationAdd, HfApi
api, path = HfApi(), Path(sys.argv[1])
path.write_bytes(b"a" * 3000)
one = CommitOperationAdd("w.safetensors", str(path))
path.write_bytes(b"a" * 5000)
try:
    api.create_commit("acme/m", [one], commit_message="grown")
    print(json.dumps("done"))
except Exception as error:
    print(json.dumps(type(error).__name__))
"""


@pytest.mark.parametrize("way", ["lfs", "xet"])
def test_a_file_that_grows_meanwhile_is_not_committed(hub: TestHub, tmp_path: Path, way: str) -> None:
    """The plain client sends the old size with the new bytes; this Hub compares both and refuses."""
    hub.store.create("model", "acme", "m", hub.store.tokens["hf_ann"])
    assert run(WRONG_SIZE, environ(hub, tmp_path, **TRANSPORTS[way]), str(tmp_path / "w")) != "done"
    assert "w.safetensors" not in hub.store.get("acme/m").at()


def test_quotas_are_told_apart(tmp_path: Path) -> None:
    """The commit quota comes with a rate header that has requests left, the request quota with one that has none."""
    program = """
import json
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError
api, said = HfApi(), []
api.create_repo("acme/m")
for name in "ab":
    try:
        api.create_commit("acme/m", [CommitOperationAdd(name, b"")], commit_message=name)
    except HfHubHTTPError as error:
        said.append([error.response.status_code, error.response.headers["RateLimit"], error.server_message])
try:
    for _ in range(9):
        api.whoami()
except HfHubHTTPError as error:
    said.append([error.response.status_code, error.response.headers["RateLimit"], ""])
print(json.dumps(said))
"""
    with serve(limits=Limits(commits_per_hour=1, requests=12)) as hub:
        commits, requests = run(program, environ(hub, tmp_path, **LFS))
    assert commits[0] == requests[0] == 429
    assert "r=949" in commits[1]
    assert "commits" in commits[2]
    assert "r=0" in requests[1]


def test_faults_strike_when_they_are_told_to(hub: TestHub) -> None:
    """Refused, lost, cut, flipped, stalled and slow answers: each on its path, after its number, as often as told."""
    with httpx2.Client(base_url=hub.url, headers={"Authorization": "Bearer hf_ann"}, timeout=1.0) as client:
        hub.faults.add(Fault("whoami", status=503, times=2, skip=1, headers={"Retry-After": "7"}))
        answers = [client.get("/api/whoami-v2") for _ in range(4)]
        assert [a.status_code for a in answers] == [200, 503, 503, 200]
        assert answers[1].headers["Retry-After"] == "7"
        hub.faults.add(Fault("create", "lose", status=500))
        body = {"name": "m", "organization": "acme", "type": "model", "visibility": "public"}
        assert client.post("/api/repos/create", json=body).status_code == 500
        assert client.get("/api/models/acme/m").json()["id"] == "acme/m"
        hub.faults.add(Fault("info", "cut"), Fault("info", "cut-body"))
        for _ in range(2):
            with pytest.raises(httpx2.HTTPError):
                client.get("/api/models/acme/m")
        hub.faults.add(Fault("resolve", "flip"))
        where = "/acme/m/resolve/main/.gitattributes"
        flipped, whole = client.get(where).content, client.get(where).content
        assert len(flipped) == len(whole)
        assert sum(a != b for a, b in zip(flipped, whole, strict=True)) == 1
        hub.faults.add(Fault("info", "stall", seconds=5))
        with pytest.raises(httpx2.TimeoutException):
            client.get("/api/models/acme/m", timeout=0.1)
        hub.faults.add(Fault("resolve", "slow", seconds=0.2))
        assert client.get(where).content == whole
        assert [fault.act for fault, _ in hub.faults.met] == [
            "refuse", "refuse", "lose", "cut", "cut-body", "flip", "stall", "slow"
        ]  # fmt: skip


def test_trees_and_histories_come_in_pages(tmp_path: Path) -> None:
    """A listing that is longer than a page is followed to its end by the client."""
    program = """
import json
from huggingface_hub import CommitOperationAdd, HfApi
api = HfApi()
api.create_repo("acme/m")
for n in range(3):
    files = [CommitOperationAdd(f"{n}/{i}.txt", b"%d" % i) for i in range(4)]
    api.create_commit("acme/m", files, commit_message=str(n))
    api.create_repo(f"acme/other-{n}")
print(json.dumps([len(list(api.list_repo_tree("acme/m", recursive=True))), len(api.list_repo_commits("acme/m")),
                  len(list(api.list_models(author="acme")))]))
"""
    with serve(limits=Limits(page=2)) as hub:
        assert run(program, environ(hub, tmp_path, **LFS)) == [16, 4, 4]


def test_chunks_are_unpacked_as_they_were_packed() -> None:
    """LZ4 frames with literals, near and far copies and runs come out right; so do grouped and plain chunks."""
    frame = bytes.fromhex("04224d184040c0")
    block = bytes([0x44]) + b"abcd" + bytes([4, 0]) + bytes([0x50]) + b"tail!"  # abcd, 8 more of the same, tail!
    packed = frame + len(block).to_bytes(4, "little") + block + bytes(4)
    assert decode_frame(packed) == b"abcdabcdabcdtail!"
    plain = frame + (3 | 1 << 31).to_bytes(4, "little") + b"xyz" + bytes(4)
    assert decode_frame(plain) == b"xyz"
    body = b"a whole chunk"
    head = bytes([0]) + len(body).to_bytes(3, "little") + bytes([0]) + len(body).to_bytes(3, "little")
    assert parse_xorb(head + body + b"XETBLOB and so on").chunks == [body]
    assert hash_text(bytes(range(32))).startswith("0706050403020100")


@pytest.mark.parametrize("way", ["lfs", "xet"])
def test_the_remotes_suite_holds_on_it(hub: TestHub, tmp_path: Path, way: str) -> None:
    """What every remote has to do, in a fresh process that knows the Hub only by its environment.

    It is the program that people run against a real Hub; no repository is left behind.
    """
    command = [sys.executable, "-W", "ignore", "-m", "weighbridge_testlib.hub.live", "acme", "--way", way]
    done = subprocess.run(command, env=environ(hub, tmp_path), capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "15 passed" in done.stdout
    assert hub.store.repos == {}
    assert hub.leaked() == []
    assert (hub.count("lfs-put") > 0, hub.count("xorb") > 0) == (way == "lfs", way == "xet")


def test_developers_start_it_by_hand(tmp_path: Path) -> None:
    """`python -m weighbridge_testlib.hub` says what to set, answers, and ends on Ctrl-C."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "HOME": str(tmp_path)}
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p.endswith("tests/lib"))
    command = [sys.executable, "-W", "ignore", "-m", "weighbridge_testlib.hub", "--port", "0", "--fault", "whoami:503"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[5].rstrip(";")
        answers = [httpx2.get(f"{url}/api/whoami-v2", headers={"Authorization": "Bearer hf_ann"}) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [503, 200]
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
