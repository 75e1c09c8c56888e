"""Which model of the Hub a base in a local folder is: proven by sha256 or unknown, and what the Hub says of a base."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from weighbridge.adapters import downloads, prove_base
from weighbridge.adapters.inspect import inspect
from weighbridge.adapters.plan import Policy
from weighbridge.registry import errors
from weighbridge.registry.card import render
from weighbridge.registry.flow.admission import Admission
from weighbridge.registry.flow.admit import admit
from weighbridge.registry.hashing import sha256_file
from weighbridge.registry.manifest import Manifest, seal
from weighbridge.registry.remotes.hub.client import Patience
from weighbridge.registry.remotes.hub.remote import HubRemote
from weighbridge.registry.types import FileEntry, Models, ModelSeen, ModelUnseen, PublishedAs, RunFacts
from weighbridge_testlib import builders
from weighbridge_testlib.hub import Fault, TestHub, serve
from weighbridge_testlib.hub.rig import remote

COMMIT, OTHER = "a" * 40, "b" * 40
REWRITE = Policy(paths="rewrite")


def base_at(folder: Path, *, name: str | None = "acme/base", seed: int = 0) -> Path:
    """Leave a tiny model in two shards, whose config says what it was loaded as."""
    builders.llama_model(folder, shards=2, seed=seed, readme=None)
    config = json.loads((folder / "config.json").read_text())
    builders.write_json(folder / "config.json", config | ({"_name_or_path": name} if name else {}))
    return folder


def seen(folder: Path, name: str = "acme/base", commit: str = COMMIT, **more: Any) -> ModelSeen:
    """Return what a Hub that holds this folder says of it."""
    files: dict[str, tuple[int, str | None]] = {
        p.name: (p.stat().st_size, sha256_file(p)) for p in folder.glob("*.safetensors")
    }
    return ModelSeen(id=name, commit=commit, files=files, **more)


def answering(*known: ModelSeen, asked: list[tuple[str, str | None]] | None = None) -> Models:
    """Return a Hub that knows these models, each at its commit and at main."""

    def ask(repo: str, revision: str | None) -> ModelSeen | ModelUnseen:
        if asked is not None:
            asked.append((repo, revision))
        found = [one for one in known if one.id == repo and revision in {None, one.commit}]
        return found[0] if found else ModelUnseen("no such model", absent=True)

    return ask


def in_cache(root: Path, folder: Path, name: str = "acme/base", commit: str = COMMIT) -> Path:
    """Put the files of a folder into a Hub cache, as the client lays them out."""
    repo = root / f"models--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / commit
    (repo / "blobs").mkdir(parents=True)
    (repo / "refs").mkdir()
    snapshot.mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    for file in folder.glob("*.safetensors"):
        blob = repo / "blobs" / sha256_file(file)
        shutil.copyfile(file, blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def recorded(folder: Path, commit: str = COMMIT, *, at: float | None = None) -> None:
    """Leave the records that `hf download --local-dir` writes."""
    place = folder / downloads.RECORDS
    place.mkdir(parents=True)
    for file in folder.glob("*.safetensors"):
        when = file.stat().st_mtime if at is None else at
        (place / f"{file.name}.metadata").write_text(f"{commit}\n{sha256_file(file)}\n{when}\n")


def take(folder: Path, policy: Policy = REWRITE, **options: Any) -> Admission:
    """Admit the adapter in a folder."""
    found = inspect(folder)
    return admit(found.artifacts[0], name="m", run=RunFacts(project="p", name="r", id="1"), policy=policy, **options)


def codes(admission: Admission) -> set[str]:
    """Return the codes of all findings about the base."""
    return {f.code for f in admission.findings if f.code.startswith("base-")}


# ------------------------------------------------------------------------------------------------- the proof


def test_what_the_config_says_counts_only_with_the_same_bytes(tmp_path: Path) -> None:
    """A model that was trained further still says what it was loaded as: its own weights tell them apart."""
    base = base_at(tmp_path / "anything")
    proof = prove_base.prove(str(base), ask=answering(seen(base)))
    assert proof.evidence is not None
    assert (proof.evidence.value, proof.evidence.revision) == ("acme/base", COMMIT)
    assert "sha256 of acme/base" in proof.evidence.why
    further = base_at(tmp_path / "further", seed=1)
    proof = prove_base.prove(str(further), ask=answering(seen(base)))
    assert proof.evidence is None
    assert "acme/base, on the Hub: its model-00001-of-00002.safetensors has another sha256" in proof.tried


@pytest.mark.parametrize(
    "place", ["acme/base", "models--acme--base", "x/acme__base", "y/acme--base"], ids=lambda p: p.replace("/", "+")
)
def test_a_folders_name_only_says_where_to_look(tmp_path: Path, place: str) -> None:
    """Named as the model or not: without the same bytes it is nothing."""
    base = base_at(tmp_path / place, name=None)
    proof = prove_base.prove(str(base), ask=answering(seen(base)))
    assert proof.evidence is not None
    assert proof.evidence.value == "acme/base"
    assert prove_base.prove(str(base), ask=answering()).evidence is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda files: files.pop(min(files)), "it has no model-00001"),
        (lambda files: files.update({min(files): (1, "0" * 64)}), "has 1 bytes, this one"),
        (lambda files: files.update({min(files): (files[min(files)][0], None)}), "no sha256 of its"),
    ],
    ids=["missing", "size", "unstored"],
)
def test_every_weights_file_must_be_there(
    tmp_path: Path, change: Callable[[dict[str, tuple[int, str | None]]], object], words: str
) -> None:
    """One shard that is missing, shorter, or without a checksum proves nothing, and is named."""
    base = base_at(tmp_path / "base")
    told = seen(base)
    change(told.files)
    proof = prove_base.prove(str(base), ask=answering(told))
    assert proof.evidence is None
    assert words in " ".join(proof.tried)


def test_a_hub_cache_is_enough(tmp_path: Path) -> None:
    """Without a network, and whatever the folder is called: the cache holds files of the same sha256."""
    base = base_at(tmp_path / "base", name=None)
    in_cache(tmp_path / "hub", base)
    in_cache(tmp_path / "hub", base_at(tmp_path / "b", seed=7), "acme/twin", OTHER)
    proof = prove_base.prove(str(base), caches=[tmp_path / "hub"])
    assert proof.evidence is not None
    assert (proof.evidence.value, proof.evidence.revision) == ("acme/base", COMMIT)
    assert "in the Hub cache" in proof.evidence.why
    linked = tmp_path / "linked"
    shutil.copytree(tmp_path / "hub" / "models--acme--base" / "snapshots" / COMMIT, linked, symlinks=False)
    assert prove_base.prove(str(linked), caches=[tmp_path / "hub"]).evidence == proof.evidence


def test_records_of_a_download_spare_the_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorded commit is asked for first and nothing is hashed; an edited file is not what was recorded."""
    base = base_at(tmp_path / "base")
    told = seen(base)
    recorded(base)
    monkeypatch.setattr(prove_base, "HASH_MAX", 0)
    asked: list[tuple[str, str | None]] = []
    proof = prove_base.prove(str(base), ask=answering(told, asked=asked))
    assert proof.evidence is not None
    assert asked == [("acme/base", COMMIT)]
    weights = base / "model-00001-of-00002.safetensors"
    os.utime(weights, (0, weights.stat().st_mtime + 60))
    proof = prove_base.prove(str(base), ask=answering(told))
    assert proof.evidence is None
    assert "larger than what is hashed" in " ".join(proof.tried)


@pytest.mark.parametrize(
    ("named", "words"), [("/no/such/folder", "not on this machine"), ("../base", "not on this machine")]
)
def test_what_is_not_here_is_unknown(named: str, words: str) -> None:
    """A path of another machine proves nothing, and nobody is asked about it."""
    asked: list[tuple[str, str | None]] = []
    proof = prove_base.prove(named, ask=answering(asked=asked))
    assert (proof.evidence, proof.tried, asked) == (None, (f"its folder is {words}",), [])


# ------------------------------------------------------------------------------------------------- what is sealed


def test_a_proven_base_replaces_the_path(tmp_path: Path) -> None:
    """Config, card and manifest name the model of the Hub with its commit, and say how that is known."""
    base = base_at(tmp_path / "base")
    done = take(builders.lora_adapter(tmp_path / "run", base=str(base), readme=None), ask=answering(seen(base)))
    assert (done.facts.base.id, done.facts.base.revision) == ("acme/base", COMMIT)
    assert "sha256" in (done.facts.base.evidence or "")
    config = json.loads(done.transform["adapter_config.json"])
    assert (config["base_model_name_or_path"], config["revision"]) == ("acme/base", COMMIT)
    assert codes(done) == set()
    sealed = seal([FileEntry("adapter_config.json", 1, "0" * 64, "config")], done.facts)
    text = render(sealed, "m", 1).decode()
    assert "base_model: acme/base" in text
    assert f"revision {COMMIT}" in text
    assert str(tmp_path) not in text + sealed.stored.decode()


def pulled(folder: Path) -> Manifest:
    """Make a base what `registry pull` leaves: its files and the sealed manifest beside them."""
    entries = [
        FileEntry(
            one.name, one.stat().st_size, sha256_file(one), "weights" if one.suffix == ".safetensors" else "config"
        )
        for one in sorted(base_at(folder, name=None).iterdir())
    ]
    sealed = seal(entries, take(folder, Policy()).facts)
    (folder / "manifest.json").write_bytes(sealed.stored)
    return sealed


def test_a_pulled_base_is_its_version_by_digest(tmp_path: Path) -> None:
    """The version is recorded by its content, and is the model that the Hub holds under its tag with the same bytes."""
    base = tmp_path / "base"
    sealed = pulled(base)
    known = {(sealed.content, sealed.digest): PublishedAs("tiny@v3", "acme/tiny", "v3")}
    there = {("acme/tiny", "v3"): seen(base, "acme/tiny")}
    run = builders.lora_adapter(tmp_path / "run", base=str(base), readme=None)
    more: dict[str, Any] = {"published": lambda *told: known.get(told)}

    def ask(*asked: Any) -> ModelSeen | ModelUnseen:
        return there.get(asked, ModelUnseen("no such model", absent=True))

    found = take(run, ask=ask, **more).facts
    assert (found.base.id, found.base.revision, found.base.content) == ("acme/tiny", COMMIT, sealed.content)
    assert [(edge.ref, edge.content) for edge in found.lineage] == [("tiny@v3", sealed.content)]
    alone = take(run, Policy(), **more)
    assert (alone.facts.base.id, alone.facts.base.content) == (None, sealed.content)
    assert [edge.ref for edge in alone.facts.lineage] == ["tiny@v3"]
    assert any("it is tiny@v3, which lies on no Hub" in one.message for one in alone.findings)
    shard = base / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    assert take(run, Policy(), **more).facts.base.content is None, "trained further, it is another model"


def test_an_unproven_base_blocks_with_what_was_tried(tmp_path: Path) -> None:
    """The refusal says which model it may be, what was compared, and where to name it; elsewhere it is a warning."""
    base, other = base_at(tmp_path / "base"), base_at(tmp_path / "other", seed=1)
    run = builders.lora_adapter(tmp_path / "run", base=str(base), readme=None)
    with pytest.raises(errors.RefusedError) as caught:
        take(run, ask=answering(seen(other)))
    assert "acme/base, on the Hub: its model-00001-of-00002.safetensors has another sha256" in (caught.value.why or "")
    assert "weighbridge.yaml" in (caught.value.fix or "")
    with pytest.raises(errors.UnreachableError, match="yet"):
        take(run, ask=lambda *_: ModelUnseen("no connection"))  # a silence refuses nothing
    kept = take(run, Policy(), ask=answering(seen(other)))
    assert {"base-unproven", "base-local-path"} <= codes(kept)
    assert kept.facts.base.id is None


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        (ModelUnseen("no such model", absent=True), "base-not-on-hub", "is not to be found on the Hub"),
        (ModelUnseen("no connection"), "base-unasked", "is unknown: no connection"),
        (ModelSeen("example-org/tiny-base", COMMIT, gated="manual"), "base-gated", "needs access to it"),
        (ModelSeen("example-org/renamed", COMMIT), "base-renamed", "is called example-org/renamed now"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("base-") else "",
)
def test_what_the_hub_says_of_a_base_stands_on_the_card(
    tmp_path: Path, answer: ModelSeen | ModelUnseen, code: str, words: str
) -> None:
    """Missing, out of reach, gated, renamed: each is told with its consequence, and none stops the publication."""
    done = take(builders.lora_adapter(tmp_path / "run"), ask=lambda *_: answer)
    assert codes(done) == {code}
    assert done.facts.base.id == "example-org/tiny-base"
    text = render(seal([FileEntry("adapter_config.json", 1, "0" * 64, "config")], done.facts), "m", 1).decode()
    assert words in text


def test_the_bases_licence_is_read_on_the_hub(tmp_path: Path) -> None:
    """No licence here: the base's is inherited, with its name and link; a looser one of our own is told."""
    card = {"license": "other", "license_name": "tiny-community", "license_link": "LICENSE", "language": ["en"]}
    ask = answering(ModelSeen("example-org/tiny-base", COMMIT, card=card))
    done = take(builders.lora_adapter(tmp_path / "run", readme=None), ask=ask)
    assert (done.facts.license.id, done.facts.license.name, done.facts.license.source) == (
        "other", "tiny-community", "base"
    )  # fmt: skip
    assert "the card of example-org/tiny-base on the Hub" in (done.facts.license.evidence or "")
    closed = answering(ModelSeen("example-org/tiny-base", COMMIT, card={"license": "cc-by-nc-4.0"}))
    done = take(builders.lora_adapter(tmp_path / "free"), ask=closed)
    assert "license-looser-than-base" in {f.code for f in done.findings}


# ------------------------------------------------------------------------------------------------- asking a real Hub


@pytest.fixture(scope="module")
def hub() -> Iterator[TestHub]:
    """Run a Hub that holds a gated base."""
    with serve() as running:
        repo = running.store.create("model", "acme", "base", running.store.tokens["hf_ann"])
        repo.gated = "manual"
        body = b"---\nlicense: gemma\n---\n# base\n"
        changes = [
            ("file", {"path": "README.md", "content": body}),
            ("file", {"path": "config.json", "content": b"{}"}),
        ]
        running.store.commit(repo, "main", title="t", message="", author="ann", parent=None, changes=changes)
        yield running


@pytest.fixture
def eve(hub: TestHub, tmp_path: Path) -> Iterator[HubRemote]:
    """Return the remote of a stranger, whom nobody let in."""
    hub.faults.clear()
    found = remote(hub, tmp_path / "eve", token="hf_eve", patience=Patience(connect=1, answer=0.3))
    yield found
    found.close()


def test_a_gate_hides_no_facts(hub: TestHub, eve: HubRemote) -> None:
    """Who may not read the files still learns that there is a gate, which licence there is, and which commit."""
    said = eve.model("acme/base", None)
    assert isinstance(said, ModelSeen)
    assert (said.id, said.gated, said.card["license"]) == ("acme/base", "manual", "gemma")
    assert said.files["config.json"] == (2, None)
    hub.seen.clear()
    assert eve.model("acme/base", None) is said
    assert hub.seen == []


@pytest.mark.parametrize(
    ("fault", "absent"),
    [
        (Fault("info", status=401), False),
        (Fault("info", status=403, code="GatedRepo"), False),
        (Fault("info", status=404, code="RepoNotFound"), True),
        (Fault("info", status=429, headers={"Retry-After": "60"}), False),
        (Fault("info", status=503), False),
        (Fault("info", "stall", seconds=5), False),
    ],
    ids=["401", "403", "404", "429", "503", "silent"],
)
def test_no_answer_about_a_base_is_an_error(hub: TestHub, eve: HubRemote, fault: Fault, absent: bool) -> None:
    """A Hub that refuses, has no such model or is silent gives an unknown with its cause, after one question."""
    hub.faults.add(fault)
    hub.seen.clear()
    said = eve.model("acme/base", None)
    assert isinstance(said, ModelUnseen)
    assert said.why
    assert said.absent == absent
    eve.model("acme/base", None)
    assert hub.count("info") == 1


def test_an_offline_machine_asks_nobody_about_a_base(hub: TestHub, eve: HubRemote) -> None:
    """With HF_HUB_OFFLINE the base's standing is unknown, and said so."""
    eve.line.environ = {**eve.line.environ, "HF_HUB_OFFLINE": "1"}
    hub.seen.clear()
    said = eve.model("acme/base", None)
    assert isinstance(said, ModelUnseen)
    assert "HF_HUB_OFFLINE" in said.why
    assert hub.seen == []
