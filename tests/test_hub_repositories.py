"""Repositories that are there already: made by hand, adopted, renamed, given to another organisation."""

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import pytest

from weighbridge.registry import errors, layout
from weighbridge.registry.card import render as render_card
from weighbridge.registry.catalog import Catalog
from weighbridge.registry.flow import sync, tags
from weighbridge.registry.flow.marker import open_registry
from weighbridge.registry.flow.publish import publish as flow_publish
from weighbridge.registry.flow.pull import pull
from weighbridge.registry.flow.resolve import resolve
from weighbridge.registry.manifest import Manifest
from weighbridge.registry.remotes.hub import numbers
from weighbridge.registry.remotes.hub.remote import HubRemote
from weighbridge.registry.remotes.ledger import LEDGER_FILE, parse_ledger
from weighbridge_testlib.hub import TestHub
from weighbridge_testlib.hub.rig import environ, publish, remote
from weighbridge_testlib.hub.store import Repo
from weighbridge_testlib.publishing import OWNER, candidate
from weighbridge_testlib.shelf import facts, payload

NAME = "medical-sft"


def repo_of(hub: TestHub, name: str = NAME) -> Repo:
    """Return a repository."""
    return hub.store.get(f"acme/{name}")


def by_hand(hub: TestHub, files: dict[str, bytes], name: str = NAME) -> Repo:
    """Make a repository with files, as somebody who knows nothing of us does."""
    repo = hub.store.create("model", "acme", name, hub.store.tokens["hf_ann"])
    changes = [("file", {"path": path, "content": body}) for path, body in files.items()]
    hub.store.commit(repo, "main", title="by hand", message="", author="ann", parent=None, changes=changes)
    return repo


def rename(hub: TestHub, old: str, new: str) -> None:
    """Rename a repository as its owner does on the website."""
    hub.store.move("model", f"acme/{old}", new if "/" in new else f"acme/{new}", hub.store.tokens["hf_ann"])


def _plain(manifest: Manifest, name: str, n: int) -> dict[str, bytes]:
    return {"README.md": f"# {name} v{n}\n{manifest.content}\n".encode()}


def _card(manifest: Manifest, name: str, n: int) -> dict[str, bytes]:
    return {"README.md": render_card(manifest, name, n)}


def test_a_foreign_repository_is_adopted_only_when_asked(hub: TestHub, tmp_path: Path) -> None:
    """Files of somebody else are not touched unasked; then its history, settings and words stay, and numbers go on."""
    files = {"model.safetensors": b"theirs", "README.md": b"---\nlicense: mit\n---\n# Ours since 2024\n"}
    repo = by_hand(hub, {"README.md": files["README.md"], "config.json": b"{}"})
    repo.tags |= {"v1": repo.head.oid, "v3": repo.head.oid, "release": repo.head.oid}
    repo.private, repo.gated = False, "manual"
    before = repo.head.oid
    ann = remote(hub, tmp_path / "ann")
    with pytest.raises(errors.NameTakenError, match="somebody else") as caught:
        publish(ann, tmp_path / "run", render=_card)
    assert "--adopt" in (caught.value.fix or "")
    assert repo.head.oid == before
    receipt = publish(ann, tmp_path / "run", adopt=True, render=_card)
    assert receipt.n == 4
    assert before in [c.oid for c in repo.history("main")]
    assert (repo.private, repo.gated) == (False, "manual")
    assert b"# Ours since 2024" in hub.store.body(repo.at()["README.md"])
    assert "config.json" not in repo.at()
    assert "config.json" in repo.at("v1")
    assert publish(ann, tmp_path / "next", seed=2, render=_card).n == 5
    ann.close()


def test_an_empty_repository_made_by_hand_is_simply_used(hub: TestHub, tmp_path: Path) -> None:
    """Somebody made the repository, public and with a card: it keeps both."""
    by_hand(hub, {"README.md": b"# Soon here\n"})
    ann = remote(hub, tmp_path / "ann")
    assert publish(ann, tmp_path / "run", render=_card).n == 1
    assert not repo_of(hub).private
    assert b"# Soon here" in hub.store.body(repo_of(hub).at()["README.md"])
    ann.close()


def test_repositories_are_public_only_where_the_rule_says_so(hub: TestHub, tmp_path: Path) -> None:
    """Private unless the remote's settings say otherwise."""
    ann = remote(hub, tmp_path / "ann", private=False)
    publish(ann, tmp_path / "run")
    assert not repo_of(hub).private
    ann.close()


def test_a_name_has_one_kind_one_run_and_one_home(hub: TestHub, tmp_path: Path) -> None:
    """A second kind, a second run without sharing, and the versions of another registry are refused."""
    ann = remote(hub, tmp_path / "ann")
    registry = open_registry(ann, create=True)
    publish(ann, tmp_path / "1")
    made = candidate(ann, tmp_path / "2", seed=2, about=msgspec.structs.replace(facts(step=2), kind="model"))
    with pytest.raises(errors.NameTakenError, match="holds adapter versions"):
        flow_publish(ann, "hub", registry, made, OWNER, render=_plain)
    about = facts(step=3)
    run_facts = msgspec.structs.replace(about.provenance.run, id="another-run")
    about = msgspec.structs.replace(about, provenance=msgspec.structs.replace(about.provenance, run=run_facts))
    made = candidate(ann, tmp_path / "3", seed=3, about=about)
    with pytest.raises(errors.NameTakenError, match="belongs to the run"):
        flow_publish(ann, "hub", registry, made, OWNER, render=_plain, share=False)
    other = msgspec.structs.replace(registry, registry="00000000-0000-0000-0000-000000000000")
    with pytest.raises(errors.NameTakenError, match="another registry"):
        flow_publish(ann, "hub", other, made, OWNER, render=_plain)
    ann.close()


# ------------------------------------------------------------------------------------------------------------- renamed


def test_a_renamed_repository_goes_on_under_its_name(hub: TestHub, tmp_path: Path) -> None:
    """Versions keep their name and go to where the repository is now; the receipt says where that is."""
    ann = remote(hub, tmp_path / "ann")
    publish(ann, tmp_path / "1")
    ann.close()
    rename(hub, NAME, "elsewhere")
    ann = remote(hub, tmp_path / "ann")
    receipt = publish(ann, tmp_path / "2", seed=2)
    repo = repo_of(hub, "elsewhere")
    assert (receipt.name, receipt.n) == (NAME, 2)
    assert receipt.location == f"hf://acme/elsewhere@{repo.head.oid}"
    assert sorted(repo.tags) == ["v1", "v2"]
    tags.move(ann, open_registry(ann, create=False), NAME, "prod", 1, "ann")
    assert repo.tags["prod"] == repo.tags["v1"]
    assert ("model", f"acme/{NAME}") not in hub.store.repos, "nobody made the old name anew"
    ann.close()


def test_nothing_is_written_to_an_old_name(hub: TestHub, tmp_path: Path) -> None:
    """The Hub redirects questions; what writes goes to the new name at once, also where a job is taken up half-way."""
    ann = remote(hub, tmp_path / "ann")
    publish(ann, tmp_path / "1")
    ann.close()
    rename(hub, NAME, "elsewhere")
    hub.seen.clear()
    late = remote(hub, tmp_path / "late")
    assert late.head(NAME) == repo_of(hub, "elsewhere").head.oid
    assert late.called(NAME) == "elsewhere"
    publish(late, tmp_path / "2", seed=2)
    assert [s.line for s in hub.seen if s.method != "GET" and f"acme/{NAME}" in s.path] == []
    late.close()


def test_a_repository_that_is_renamed_while_it_is_known_is_not_written_to_by_its_old_name(
    hub: TestHub, tmp_path: Path
) -> None:
    """Whoever has looked at it before it was renamed, as a daemon has, looks again before anything is sent."""
    ann = remote(hub, tmp_path / "ann")
    publish(ann, tmp_path / "1")
    rename(hub, NAME, "elsewhere")
    hub.seen.clear()
    assert publish(ann, tmp_path / "2", seed=2).location.startswith("hf://acme/elsewhere@")
    assert [s.line for s in hub.seen if s.method != "GET" and f"acme/{NAME}" in s.path] == []
    kept = ann.writer(NAME, "a content", 10)
    rename(hub, "elsewhere", "beyond")
    assert ann.head(NAME) is not None
    assert ann.writer(NAME, "a content", 10) is not kept, "it writes to a name of before"
    ann.close()


def test_readers_find_a_renamed_repository_by_its_versions_name(hub: TestHub, tmp_path: Path) -> None:
    """`ls` and `pull` know the name that the versions have; the website's name is told apart, not taken as damage."""
    ann, ben = remote(hub, tmp_path / "ann"), remote(hub, tmp_path / "ben", token="hf_ben")
    publish(ann, tmp_path / "1")
    catalog = Catalog.open(None, open_registry(ann, create=False).registry, durable=False)
    sync.sync(ben, catalog)
    rename(hub, NAME, "elsewhere")
    hub.seen.clear()
    assert sync.sync(ben, catalog).problems == []
    assert len(hub.seen) == 1, "its head is known: a new name is no news"
    for fresh in (catalog, Catalog.open(None, "anew", durable=False)):
        reader = remote(hub, tmp_path / "ben", token="hf_ben")
        sync.sync(reader, fresh)
        assert fresh.names() == [NAME]
        there = tmp_path / f"there-{fresh.id}"
        pull(reader, NAME, resolve(reader, fresh, NAME).n, there)
        assert {path: (there / path).read_bytes() for path in payload(1)} == payload(1)
        with pytest.raises(errors.NotFoundError, match=f"holds the versions of {NAME}") as caught:
            reader.read(layout.manifest("elsewhere", 1))
        assert f"{NAME}@v1" in (caught.value.fix or "")
        fresh.close()
    with pytest.raises(errors.NameTakenError, match=f"holds the versions of {NAME}"):
        publish(ann, tmp_path / "2", "elsewhere", seed=2)
    ann.close()


def test_a_name_that_comes_back_is_found_again(hub: TestHub, tmp_path: Path) -> None:
    """Renamed and renamed back while we look on: what is asked for next is asked under the old name again."""
    ann = remote(hub, tmp_path / "ann")
    publish(ann, tmp_path / "1")
    rename(hub, NAME, "elsewhere")
    assert ann.head(NAME) == repo_of(hub, "elsewhere").head.oid
    rename(hub, "elsewhere", NAME)
    del hub.store.moved["model", f"acme/{NAME}"]
    hub.store.moved.pop(("model", "acme/elsewhere"))
    assert publish(ann, tmp_path / "2", seed=2).location.startswith(f"hf://acme/{NAME}@")
    ann.close()


def test_two_repositories_with_one_names_versions_are_told(hub: TestHub, tmp_path: Path) -> None:
    """A copy of a repository, or a new one under the old name: the one that has the name counts, the other is named."""
    ann = remote(hub, tmp_path / "ann")
    publish(ann, tmp_path / "1")
    rename(hub, NAME, "elsewhere")
    other = by_hand(hub, {LEDGER_FILE: hub.store.body(repo_of(hub, "elsewhere").at()[LEDGER_FILE])})
    found = remote(hub, tmp_path / "ben", token="hf_ben").catalogue({})
    assert found.heads[NAME] == other.head.oid
    assert "elsewhere" not in found.heads
    assert "acme/elsewhere: it holds versions of medical-sft" in found.problems[0]
    ann.close()


def test_another_spelling_is_refused(hub: TestHub, tmp_path: Path) -> None:
    """The Hub ignores case; names are unique without it, so the one that is there is named."""
    ann = remote(hub, tmp_path / "ann")
    publish(ann, tmp_path / "1")
    with pytest.raises(errors.NameTakenError, match=NAME):
        publish(ann, tmp_path / "2", "Medical-SFT", seed=2)
    ann.close()


def test_a_renamed_organisation_is_another_remote_until_it_is_taken_over(hub: TestHub, tmp_path: Path) -> None:
    """The new address is named; there a push that adopts goes on with number, history and claims of before."""
    ann = remote(hub, tmp_path / "ann")
    publish(ann, tmp_path / "1")
    hub.store.rename_owner("acme", "acme-ai")
    with pytest.raises(errors.NotFoundError, match="is acme-ai/medical-sft now") as caught:
        publish(ann, tmp_path / "2", seed=2)
    assert 'url = "hf://acme-ai"' in (caught.value.fix or "")
    assert caught.value.data["remote"] == "hf://acme", "for the daemon: how a remote is set up, not the job's fault"
    ann.close()
    fresh = HubRemote("acme-ai", environ=environ(hub, tmp_path / "fresh", HF_HUB_DISABLE_XET="1"))
    with pytest.raises(errors.NameTakenError, match="another registry") as taken:
        publish(fresh, tmp_path / "2", seed=2)
    assert "--adopt" in (taken.value.fix or "")
    assert publish(fresh, tmp_path / "2", seed=2, adopt=True).n == 2
    assert publish(fresh, tmp_path / "3", seed=3).n == 3
    told = parse_ledger(hub.store.body(hub.store.get(f"acme-ai/{NAME}").at()[LEDGER_FILE]), "x")
    assert told.registry == open_registry(fresh, create=False).registry
    claims = [json.loads(fresh.read(layout.claim(NAME, n))) for n in (1, 2, 3)]
    assert [c["prev"] for c in claims] == [None, told.versions[0].claim, told.versions[1].claim]
    pull(fresh, NAME, 1, tmp_path / "there")
    assert (tmp_path / "there" / "adapter_model.safetensors").is_file()
    fresh.close()


def test_a_mirrors_repository_is_never_adopted(hub: TestHub, tmp_path: Path) -> None:
    """Versions whose home is a folder or a bucket stay that home's: --adopt is for what a Hub's own address made."""
    ann = remote(hub, tmp_path / "ann")
    registry = msgspec.structs.replace(open_registry(ann, create=True), registry="0b8f7d1e-6f4c-4b9a-9d55-0d9a3a3e2f11")
    flow_publish(ann, "hub", registry, candidate(ann, tmp_path / "1"), OWNER, render=_plain)
    with pytest.raises(errors.NameTakenError, match="another registry") as caught:
        publish(ann, tmp_path / "2", seed=2, adopt=True)
    assert "--adopt" not in (caught.value.fix or "")
    ann.close()


# ------------------------------------------------------------------------------------------------- deleted and set back


def test_a_noted_number_is_never_lowered(tmp_path: Path) -> None:
    """Whoever notes last, and however many do so at once, the highest stays; another name has its own."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(partial(numbers.note, tmp_path, "hub acme/m"), [3, 9, 1, 8, 2, 7, 4, 6]))
    numbers.note(tmp_path, "hub acme/m", 5)
    assert (numbers.highest(tmp_path, "hub acme/m"), numbers.highest(tmp_path, "hub acme/n")) == (9, 0)


def test_numbers_do_not_begin_anew_where_a_repository_was_deleted(hub: TestHub, tmp_path: Path) -> None:
    """Who has seen v2 is refused, with a repository made anew or without one; what is taken over goes on with v3."""
    ann = remote(hub, tmp_path / "ann")
    for seed in (1, 2):
        publish(ann, tmp_path / str(seed), seed=seed)
    ann.close()
    hub.store.delete("model", f"acme/{NAME}", hub.store.tokens["hf_ann"])
    ann = remote(hub, tmp_path / "ann")
    with pytest.raises(errors.NameTakenError, match="is gone") as caught:
        publish(ann, tmp_path / "3", seed=3)
    assert "v1 to v2 were published there" in str(caught.value.why)
    assert (caught.value.data["option"], caught.value.data["last"]) == ("adopt", 2)
    assert ("model", f"acme/{NAME}") not in hub.store.repos, "nothing was made for a refusal"
    hub.store.create("model", "acme", NAME, hub.store.tokens["hf_ann"])
    with pytest.raises(errors.NameTakenError, match="has lost versions"):
        publish(ann, tmp_path / "4", seed=3)
    assert [publish(ann, tmp_path / str(seed), seed=seed, adopt=seed == 5).n for seed in (5, 6)] == [3, 4]
    ann.close()


def test_numbers_do_not_repeat_where_a_history_was_set_back(hub: TestHub, tmp_path: Path) -> None:
    """A branch that stands where it stood before v2, without its tag, does not get another v2."""
    ann = remote(hub, tmp_path / "ann")
    publish(ann, tmp_path / "1")
    repo = repo_of(hub)
    before = repo.branches["main"]
    publish(ann, tmp_path / "2", seed=2)
    repo.branches["main"] = before
    del repo.tags["v2"]
    with pytest.raises(errors.NameTakenError, match="has lost versions"):
        publish(ann, tmp_path / "3", seed=3)
    assert publish(ann, tmp_path / "1-again").n == 1, "the same bytes join the version that is there"
    assert publish(ann, tmp_path / "3-adopted", seed=3, adopt=True).n == 3
    ann.close()
