"""Publishing to the Hub: one guarded commit and one tag per version, whatever others do at the same time."""

import json
import random
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from weighbridge.registry import errors, layout
from weighbridge.registry.card import render as render_card
from weighbridge.registry.card import split_people
from weighbridge.registry.flow import notes, tags
from weighbridge.registry.flow.marker import open_registry
from weighbridge.registry.flow.publish import Render, standing
from weighbridge.registry.flow.publish import publish as flow_publish
from weighbridge.registry.hashing import sha256_bytes
from weighbridge.registry.manifest import Manifest
from weighbridge.registry.remotes.hub.preflight import Limits
from weighbridge.registry.remotes.ledger import LEDGER_FILE, VERSION_FILE, parse_ledger
from weighbridge.registry.remotes.table import open_remote
from weighbridge_testlib.hub import Fault, TestHub, serve
from weighbridge_testlib.hub.rig import environ, publish, remote, run
from weighbridge_testlib.hub.store import Repo
from weighbridge_testlib.publishing import OWNER, candidate
from weighbridge_testlib.shelf import payload

NAME = "medical-sft"
MIB = 1 << 20
WAYS = ("lfs", "child", "xet")


def repo_of(hub: TestHub) -> Repo:
    """Return the repository of the tests' name."""
    return hub.store.get(f"acme/{NAME}")


def edit(hub: TestHub, path: str, body: bytes, title: str = "by hand") -> None:
    """Change a file as a person on the website does."""
    repo = repo_of(hub)
    hub.store.commit(
        repo, "main", title=title, message="", author="ann", parent=None,
        changes=[("file", {"path": path, "content": body})],
    )  # fmt: skip


def by_hand(hub: TestHub, files: dict[str, bytes], name: str = NAME) -> Repo:
    """Make a repository with files, as somebody who knows nothing of us does."""
    repo = hub.store.create("model", "acme", name, hub.store.tokens["hf_ann"])
    changes = [("file", {"path": path, "content": body}) for path, body in files.items()]
    hub.store.commit(repo, "main", title="by hand", message="", author="ann", parent=None, changes=changes)
    return repo


# ---------------------------------------------------------------------------------------------------------- one version


@pytest.mark.parametrize("way", WAYS)
def test_a_version_is_one_commit_and_one_tag(hub: TestHub, tmp_path: Path, way: str) -> None:
    """The tree holds exactly the bundle, its papers and what says whose it is; the tag names the commit."""
    ann = remote(hub, tmp_path / "ann", way=way)
    receipt = publish(ann, tmp_path / "run")
    repo, bundle = repo_of(hub), payload(1)
    assert (receipt.n, receipt.verified, receipt.joined) == (1, "sha256-read", False)
    assert [c.title for c in repo.history("main")] == [f"{NAME} v1", "initial commit"]
    assert repo.tags == {"v1": repo.head.oid}
    assert receipt.location == f"hf://acme/{NAME}@{repo.head.oid}"
    papers = {"README.md", "training.json", "manifest.json", VERSION_FILE, LEDGER_FILE, ".gitattributes"}
    assert set(repo.at()) == set(bundle) | papers
    assert {path: hub.store.body(repo.at()[path]) for path in bundle} == bundle
    said = json.loads(hub.store.body(repo.at()[VERSION_FILE]))
    assert (said["name"], said["n"], said["content"]) == (NAME, 1, receipt.content)
    assert said["registry"] == open_registry(ann, create=False).registry
    assert repo.private
    assert hub.count("xorb" if way == "xet" else "lfs-put") == 1
    assert hub.count("lfs-put" if way == "xet" else "xorb") == 0
    ann.close()


def test_the_plain_client_loads_a_version_by_its_tag(hub: TestHub, tmp_path: Path) -> None:
    """Whoever has only the Hub's client gets the same files with revision="v1", also after a later version."""
    ann = remote(hub, tmp_path / "ann")
    for seed in (1, 2):
        publish(ann, tmp_path / str(seed), seed=seed)
    program = """
import json, sys
from pathlib import Path
from huggingface_hub import ModelCard, snapshot_download
place = Path(snapshot_download("acme/medical-sft", revision=sys.argv[1]))
print(json.dumps({str(p.relative_to(place)): p.read_bytes().hex() for p in place.rglob("*") if p.is_file()}))
"""
    for seed in (1, 2):
        found = run(program, environ(hub, tmp_path / "ben", token="hf_ben"), f"v{seed}")
        assert {path: bytes.fromhex(found[path]) for path in payload(seed)} == payload(seed)
    ann.close()


def test_the_same_bytes_keep_their_number_and_nothing_is_sent(hub: TestHub, tmp_path: Path) -> None:
    """A content that has a number keeps it, whoever comes; no commit, no upload, and the receipt says joined.

    So does what was made of the same things in the same way, whose content nobody knows before it is made again.
    """
    ann, other = remote(hub, tmp_path / "ann"), remote(hub, tmp_path / "other", token="hf_fine")
    first = publish(ann, tmp_path / "a", derivation="sha256:dd")
    hub.seen.clear()
    again = publish(other, tmp_path / "b")
    registry = open_registry(other, create=False)
    made = [standing(other, "hub", registry, NAME, partial(str, f"sha256:{what}")) for what in ("dd", "ee")]
    assert [there and (there[0].n, there[1].content) for there in made] == [(1, first.content), None]
    assert (again.n, again.content, again.joined) == (1, first.content, True)
    assert [hub.count(kind) for kind in ("commit", "preupload", "lfs-batch", "tag")] == [0, 0, 0, 0]
    ann.close()
    other.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_new_version_replaces_the_tree_and_sends_only_what_is_new(hub: TestHub, tmp_path: Path, way: str) -> None:
    """Files of the version before are gone, unchanged objects are not sent again, and both versions stay whole."""
    ann = remote(hub, tmp_path / "ann", way=way)
    one = {"adapter_config.json": b"{}", "a.safetensors": b"a" * 5000, "old.safetensors": b"o" * 5000}
    two = {"adapter_config.json": b"{}", "a.safetensors": b"a" * 5000, "new.safetensors": b"n" * 5000}
    publish(ann, tmp_path / "1", files=one)
    hub.seen.clear()
    publish(ann, tmp_path / "2", files=two)
    repo = repo_of(hub)
    assert {p for p in repo.at() if p.endswith(".safetensors")} == {"a.safetensors", "new.safetensors"}
    assert {p for p in repo.at("v1") if p.endswith(".safetensors")} == {"a.safetensors", "old.safetensors"}
    assert hub.count("xorb" if way == "xet" else "lfs-put") == 1
    assert sorted(repo.tags) == ["v1", "v2"]
    told = parse_ledger(hub.store.body(repo.at()[LEDGER_FILE]), "x")
    assert [t.n for t in told.versions] == [1, 2]
    ann.close()


@pytest.mark.parametrize("way", ["lfs", "xet"])
def test_a_large_file_travels_in_parts(tmp_path: Path, way: str) -> None:
    """From 64 MiB on a child process sends it: by LFS in the parts the Hub asks for, by xet in chunks, each once."""
    block = random.Random(1).randbytes(4 * MIB)
    body = b"".join(block[n:] + block[:n] for n in range(17)) + b"the end"
    with serve(multipart=16 * MIB) as hub:
        ann = remote(hub, tmp_path / "ann", way=way)
        moved: list[int] = []
        made = candidate(ann, tmp_path / "run", files={"adapter_config.json": b"{}", "model.safetensors": body})
        registry = open_registry(ann, create=True)
        receipt = flow_publish(ann, "hub", registry, made, OWNER, render=_plain, progress=moved.append)
        assert receipt.files["model.safetensors"] == sha256_bytes(body)
        assert hub.store.body(repo_of(hub).at("v1")["model.safetensors"]) == body
        assert sum(moved) == len(body) + 2
        if way == "lfs":
            assert [seen.size for seen in hub.asked("lfs-put")] == [16 * MIB] * 4 + [4 * MIB + 7]
        else:
            assert hub.count("lfs-put") == 0
            assert hub.sent() < 2 * len(block)  # what comes again is not sent again
        ann.close()


def test_claims_are_chained_and_read_back_to_the_byte(hub: TestHub, tmp_path: Path) -> None:
    """A claim is put together from two files; its digest is the one that the next claim and the ledger name."""
    ann = remote(hub, tmp_path / "ann")
    for seed in (1, 2, 3):
        publish(ann, tmp_path / str(seed), seed=seed)
    claims = [json.loads(ann.read(layout.claim(NAME, n))) for n in (1, 2, 3)]
    told = parse_ledger(hub.store.body(repo_of(hub).at()[LEDGER_FILE]), "x")
    assert [c["prev"] for c in claims] == [None, told.versions[0].claim, told.versions[1].claim]
    assert all(c["manifest"].encode() == ann.read(layout.manifest(NAME, c["n"])) for c in claims)
    ann.close()


def test_the_token_is_nowhere_to_be_seen(hub: TestHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the command line nor the environment of the process that uploads holds it."""
    ann = remote(hub, tmp_path / "ann", way="child")
    shown: list[str] = []

    class Spy(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            shown.append(Path(f"/proc/{self.pid}/environ").read_text() + Path(f"/proc/{self.pid}/cmdline").read_text())

    monkeypatch.setattr("subprocess.Popen", Spy)
    publish(ann, tmp_path / "run")
    assert shown
    assert not any("hf_ann" in text for text in shown)
    ann.close()


# -------------------------------------------------------------------------------------------- others at the same time


def test_a_persons_edit_only_moves_the_parent(hub: TestHub, tmp_path: Path) -> None:
    """Words that people wrote on the website stay on the cards of later versions; nothing of theirs is overwritten."""
    ann = remote(hub, tmp_path / "ann")
    publish(ann, tmp_path / "1", render=_card)
    card = hub.store.body(repo_of(hub).at()["README.md"]).decode()
    edit(hub, "README.md", (card + "\n\n## Limits\n\nNot for dosage.\n").encode())
    publish(ann, tmp_path / "2", seed=2, render=_card)
    repo = repo_of(hub)
    card = hub.store.body(repo.at()["README.md"]).decode()
    assert "Not for dosage." in card
    assert f"# {NAME} v2" in card
    assert [c.title for c in repo.history("main")][:3] == [f"{NAME} v2", "by hand", f"{NAME} v1"]
    publish(ann, tmp_path / "3", seed=3, render=_card_with(split_people(card)))
    assert hub.store.body(repo_of(hub).at()["README.md"]).count(b"Not for dosage.") == 1
    ann.close()


def _card(manifest: Manifest, name: str, n: int) -> dict[str, bytes]:
    return {"README.md": render_card(manifest, name, n)}


def _card_with(people: str) -> Render:
    return lambda manifest, name, n: {"README.md": render_card(manifest, name, n, people=people)}


def test_somebody_commits_in_between(hub: TestHub, tmp_path: Path) -> None:
    """A parent that has moved is looked at, and the version is committed on top; never by force."""
    ann = remote(hub, tmp_path / "ann")
    publish(ann, tmp_path / "1")
    hub.faults.add(Fault("commit", status=412, times=1, message="A commit has happened since."))
    receipt = publish(ann, tmp_path / "2", seed=2)
    assert receipt.n == 2
    assert [c.title for c in repo_of(hub).history("main")] == [f"{NAME} v2", f"{NAME} v1", "initial commit"]
    assert None not in hub.parents
    ann.close()


def _plain(manifest: Manifest, name: str, n: int) -> dict[str, bytes]:
    return {"README.md": f"# {name} v{n}\n{manifest.content}\n".encode()}


# --------------------------------------------------------------------------------------------------------- lost answers


def test_whoever_comes_adds_a_missing_tag(hub: TestHub, tmp_path: Path) -> None:
    """A publisher that died before the tag leaves a whole version; readers find it, the next publisher tags it."""
    ann = remote(hub, tmp_path / "ann")
    hub.faults.add(Fault("tag", status=403))
    with pytest.raises(errors.DeniedError):
        publish(ann, tmp_path / "1")
    assert repo_of(hub).tags == {}
    assert json.loads(remote(hub, tmp_path / "ben", token="hf_ben").read(layout.manifest(NAME, 1)))["content"]
    assert publish(ann, tmp_path / "2").joined
    assert list(repo_of(hub).tags) == ["v1"]
    ann.close()


def test_a_tag_of_somebody_else_is_left_alone(hub: TestHub, tmp_path: Path) -> None:
    """A tag v2 that stands elsewhere is never moved: numbers go on behind it."""
    ann = remote(hub, tmp_path / "ann")
    publish(ann, tmp_path / "1")
    repo_of(hub).tags["v2"] = repo_of(hub).history("main")[-1].oid
    assert publish(ann, tmp_path / "2", seed=2).n == 3
    assert repo_of(hub).tags["v2"] == repo_of(hub).history("main")[-1].oid
    with pytest.raises(errors.DivergedError):
        ann.tag(NAME, 2, repo_of(hub).head.oid)
    ann.close()


def test_a_file_that_arrived_damaged_is_given_up(hub: TestHub, tmp_path: Path) -> None:
    """What is read back differs, twice: the number is given up in the ledger, readers refuse it, the next is v2."""
    ann = remote(hub, tmp_path / "ann")
    hub.faults.add(Fault(r"GET /acme/medical-sft/resolve/[0-9a-f]+/adapter_config.json", "flip", times=2))
    with pytest.raises(errors.IntegrityError, match="given up"):
        publish(ann, tmp_path / "1")
    assert repo_of(hub).tags == {}
    told = parse_ledger(hub.store.body(repo_of(hub).at()[LEDGER_FILE]), "x")
    assert "adapter_config.json" in (told.versions[0].void or "")
    assert "void" in json.loads(ann.read(layout.manifest(NAME, 1)))
    assert publish(ann, tmp_path / "2").n == 2
    ann.close()


def test_one_wrong_look_costs_nothing(hub: TestHub, tmp_path: Path) -> None:
    """A bit that flips on the way back is looked at again before anything is given up."""
    ann = remote(hub, tmp_path / "ann")
    hub.faults.add(Fault(r"GET /acme/medical-sft/resolve/[0-9a-f]+/adapter_config.json", "flip"))
    assert publish(ann, tmp_path / "1").n == 1
    ann.close()


# ------------------------------------------------------------------------------------------------ before a byte is sent


def test_limits_are_checked_before_a_byte_is_sent(hub: TestHub, tmp_path: Path) -> None:
    """A file that is too large and a folder with too many files are named, with the limits."""
    ann = remote(hub, tmp_path / "ann", limits=Limits(file=2000, files=1))
    with pytest.raises(errors.RefusedError) as caught:
        publish(ann, tmp_path / "run")
    assert caught.value.data["over_size"] == []
    ann.close()
    small = remote(hub, tmp_path / "small", limits=Limits(file=1000))
    with pytest.raises(errors.RefusedError, match="cannot hold") as caught:
        publish(small, tmp_path / "run")
    assert caught.value.data["over_size"] == ["adapter_model.safetensors"]
    assert "2000 bytes, the Hub takes 1000" in (caught.value.why or "")
    assert [hub.count(kind) for kind in ("preupload", "lfs-batch", "commit")] == [0, 0, 0]
    small.close()


def test_a_card_is_checked_before_a_byte_is_sent(hub: TestHub, tmp_path: Path) -> None:
    """A card that breaks a rule of the Hub's is refused here, with its rule; licences and the rest it judges itself."""
    ann = remote(hub, tmp_path / "ann")
    with pytest.raises(errors.RefusedError, match="refuses the card") as caught:
        publish(ann, tmp_path / "run", render=lambda *_: {"README.md": b"---\nlanguage: english\n---\n# x\n"})
    assert "\"language\" 'english': not a code" in (caught.value.why or "")
    assert hub.count("validate-yaml") == 0
    with pytest.raises(errors.RefusedError, match="refuses the card") as caught:
        publish(ann, tmp_path / "2", render=lambda *_: {"README.md": b"---\nlicense: of next year\n---\n# x\n"})
    assert "must be one of [apache-2.0" in (caught.value.why or "")
    assert [hub.count(kind) for kind in ("preupload", "lfs-batch", "commit")] == [0, 0, 0]
    ann.close()


@pytest.mark.parametrize(("token", "word"), [("hf_ben", "role is read"), (None, "no token"), ("hf_eve", "403")])
def test_the_scope_is_checked_first(hub: TestHub, tmp_path: Path, token: str | None, word: str) -> None:
    """No token, one that may only read, and one of a stranger: each is told so at once."""
    who = remote(hub, tmp_path / "who", token=token)
    with pytest.raises(errors.DeniedError) as caught:
        publish(who, tmp_path / "run")
    assert word in f"{caught.value.what} {caught.value.why}"
    assert caught.value.fix
    assert [hub.count(kind) for kind in ("preupload", "lfs-batch", "commit")] == [0, 0, 0]
    who.close()


# ------------------------------------------------------------------------------------------- tags, notes, withdrawals


def test_tags_move_by_commits_and_git_tags_follow(hub: TestHub, tmp_path: Path) -> None:
    """Moves are kept with who and why; of two at once one is told who won; revision="prod" works for everybody."""
    ann = remote(hub, tmp_path / "ann")
    registry = open_registry(ann, create=True)
    for seed in (1, 2):
        publish(ann, tmp_path / str(seed), seed=seed)
    tags.move(ann, registry, NAME, "prod", 1, "ann")
    assert repo_of(hub).tags["prod"] == repo_of(hub).tags["v1"]
    tags.move(ann, registry, NAME, "prod", 2, "ann", "better")
    assert repo_of(hub).tags["prod"] == repo_of(hub).tags["v2"]
    other = remote(hub, tmp_path / "other")
    assert [(m.seq, m.to, m.why) for m in tags.history(other, NAME, "prod")] == [(1, 1, None), (2, 2, "better")]
    with pytest.raises(errors.ExistsError):
        other.create(layout.tag(NAME, "prod", 2), b"{}")
    tags.move(ann, registry, NAME, "prod", None, "ann")
    assert "prod" not in repo_of(hub).tags
    assert {"v1", "v2"} == set(repo_of(hub).tags)
    assert publish(ann, tmp_path / "3", seed=3).n == 3
    assert len(tags.history(other, NAME, "prod")) == 3
    ann.close()
    other.close()


def test_notes_change_the_next_card(hub: TestHub, tmp_path: Path) -> None:
    """What people say of a version is kept beside it, and a lost answer does not say it twice."""
    ann = remote(hub, tmp_path / "ann")
    registry = open_registry(ann, create=True)
    publish(ann, tmp_path / "1")
    hub.faults.add(Fault("commit", "lose", status=504))
    notes.add(ann, registry, NAME, 1, "card", text="Only for triage.", who="ann")
    assert [note.text for note in notes.read(ann, NAME, 1)] == ["Only for triage."]
    assert notes.people(ann, NAME, 2) == "Only for triage."
    ann.close()


def test_keys_that_are_no_versions_are_refused(hub: TestHub, tmp_path: Path) -> None:
    """A file alone is no version, and nothing is ever removed."""
    ann = remote(hub, tmp_path / "ann")
    acts: tuple[Callable[[], None], ...] = (
        lambda: ann.create("catalog/feed/000000000001.json", b"{}"),
        lambda: ann.create(layout.claim(NAME, 1), b"{}"),
        lambda: ann.upload(layout.version(NAME, 1, "w"), tmp_path, 1, "0" * 64),
        lambda: ann.delete(layout.version(NAME, 1, "w")),
    )
    for act in acts:
        with pytest.raises(errors.UsageError):
            act()
    assert open_remote("hf://acme").url == "hf://acme"
    ann.close()
