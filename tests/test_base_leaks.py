"""A base in a folder of one machine: its path goes nowhere where paths are not kept, and what was used is recorded."""

import json
from pathlib import Path

import msgspec
import pytest

from weighbridge.adapters.merge import casting
from weighbridge.adapters.merge.preview import look
from weighbridge.adapters.plan import Allowed, Policy
from weighbridge.config.settings import RemoteSettings
from weighbridge.registry.errors import RefusedError
from weighbridge.registry.flow.merged import Parent, base_of
from weighbridge.registry.flow.mirror import stricter
from weighbridge.registry.flow.recast import admit_cast
from weighbridge.registry.flow.withhold import held, withheld
from weighbridge.registry.manifest import Manifest, parse, seal
from weighbridge.registry.types import (
    BaseFacts,
    Facts,
    FileEntry,
    Finding,
    LineageEdge,
    ModelSeen,
    ModelUnseen,
    PublishedAs,
)
from weighbridge_testlib import builders
from weighbridge_testlib.desk import Desk, conforms
from weighbridge_testlib.shelf import facts as plain_facts

CARD = builders.card(None, "apache-2.0")
ENTRY = FileEntry(path="model.safetensors", size=8, sha256="0" * 64, role="weights")
PATH = "/data/lw/models/base"
OUTSIDE = RemoteSettings("outside", "/srv/outside", paths="rewrite")


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """Return a desk with two bases of one shape, an adapter that names the first by its folder, and a second remote."""
    desk = Desk(tmp_path, monkeypatch)
    builders.llama_model(tmp_path / "tA", seed=1, readme=CARD)
    builders.llama_model(tmp_path / "tB", seed=2, readme=CARD)
    builders.lora_adapter(tmp_path / "tad", base=str(tmp_path / "tA"), readme=CARD)
    (tmp_path / "outside").mkdir()
    with desk.config.open("a") as stream:
        stream.write(f'[remotes.outside]\nurl = "{tmp_path}/outside"\npaths = "rewrite"\nunknown_license = "block"\n')
    return desk


def sealed(desk: Desk, name: str, remote: str = "remote") -> Manifest:
    """Return the manifest of a name's first version."""
    return parse((desk.folder / remote / "models" / name / "v1" / "manifest.json").read_bytes())


def with_facts(**changed: object) -> Facts:
    """Return facts of which some are others."""
    facts = plain_facts()
    public = msgspec.structs.replace(facts.provenance, host=None)
    return msgspec.structs.replace(facts, **{"provenance": public, **changed})


@pytest.mark.parametrize(
    "changed",
    [
        {"base": BaseFacts(id=PATH)},
        {"base": BaseFacts(id="../models/base")},
        {"base": BaseFacts(evidence=f"the folder {PATH} was given")},
        {"lineage": [LineageEdge(relation="merged-from", ref=PATH)]},
        {"lineage": [LineageEdge(relation="extracted-from", ref=PATH)]},
        {"findings": [Finding(code="merge-base-other", severity="warn", subject="base", message=f"it is {PATH}")]},
        {"findings": [Finding(code="x", severity="note", subject="base", message="m", data={"base_model": PATH})]},
    ],
)
def test_a_path_in_the_facts_goes_nowhere_by_any_way(changed: dict[str, object]) -> None:
    """Base, evidence, lineage or finding: sealed nowhere but where paths are kept, and not delivered elsewhere."""
    facts = with_facts(**changed)
    assert held(facts)
    assert withheld(facts, Policy(paths="keep"), name="x", where="w") is facts
    refusal = stricter(seal([ENTRY], facts), OUTSIDE)
    assert refusal is not None
    assert "does not keep them" in refusal.why
    assert stricter(seal([ENTRY], facts), RemoteSettings("own", "/srv/own")) is None
    if "findings" in changed:
        assert PATH not in repr(withheld(facts, Policy(paths="rewrite"), name="x", where="w"))
        return
    with pytest.raises(RefusedError) as refused:
        withheld(facts, Policy(paths="rewrite"), name="x", where="w")
    assert [f.code for f in refused.value.data["findings"]] == ["base-local-path"]
    assert "nobody else can resolve it" in (refused.value.why or "")
    allowed = Policy(paths="rewrite", allowed=(Allowed(code="base-local-path", reason="known"),))
    assert "models/base" not in repr(withheld(facts, allowed, name="x", where="w"))


@pytest.mark.parametrize(
    "changed",
    [
        {"base": BaseFacts(id="example-org/tiny-base", evidence="adapter_config.json:base_model_name_or_path")},
        {"base": BaseFacts(id="tb@v1", evidence="its folder holds tb@v1")},
        {"lineage": [LineageEdge(relation="merged-from", ref="sha256:" + "0" * 64)]},
        {"lineage": [LineageEdge(relation="extracted-from", ref="global_step5/zero_pp_rank_0.pt and 3 more")]},
        {"findings": [Finding(code="x", severity="note", subject="a/b.json", message="a/b.json and 1/2 of it")]},
    ],
)
def test_what_is_no_path_goes_everywhere(changed: dict[str, object]) -> None:
    """Ids of the Hub and of the registry, digests and names inside the bundle are not taken for paths."""
    facts = with_facts(**changed)
    assert withheld(facts, Policy(paths="rewrite"), name="x", where="w") == facts
    assert stricter(seal([ENTRY], facts), OUTSIDE) is None


@pytest.mark.parametrize(
    ("known", "told"),
    [
        ({"host": "node7", "owner": "lw"}, "the host node7, the user lw"),
        ({"owner": "the vision team"}, None),
        ({"training": {"output_dir": PATH, "seed": 4}}, "paths in training"),
        ({"data": [{"name": "notes", "path": PATH}], "code": {"root": PATH}}, "paths in code, data"),
        ({"metrics": {"loss": 0.5}, "training": {"seed": 4}, "data": [{"id": "acme/notes"}]}, None),
    ],
)
def test_what_a_run_tells_of_its_machine_stays_where_it_was_kept(known: dict[str, object], told: str | None) -> None:
    """A host, its user and its paths are named and keep a version away; an owner whom somebody wrote down does not."""
    facts = with_facts()
    facts = msgspec.structs.replace(facts, provenance=msgspec.structs.replace(facts.provenance, **known))
    refusal = stricter(seal([ENTRY], facts), OUTSIDE)
    assert (refusal.why if refusal else None) == (told and f"the manifest holds {told}, and outside does not keep them")
    assert stricter(seal([ENTRY], facts), RemoteSettings("own", "/srv/own")) is None


def test_what_was_sealed_with_its_host_is_published_anew_without_it(desk: Desk) -> None:
    """A mirror that keeps no such facts refuses the version and what brings its claim along; the fix then works."""
    builders.lora_adapter(desk.folder / "a1", base="example-org/tiny-base", readme=CARD)
    whole = desk.config.read_text()
    desk.config.write_text(whole.partition("[remotes.outside]")[0])  # it comes later
    desk.ok("push", "a1", "--name", "t1", "--remote", "team")
    desk.config.write_text(whole)
    said = desk.registry("mirror", "t1", "--to", "outside", "--remote", "team", "--json")
    (row,) = conforms(said.json, "mirror")["versions"]
    host = sealed(desk, "t1").facts.provenance.host
    assert (said.code, row["outcome"], f"holds the host {host}, the user" in row["why"]) == (5, "refused", True)
    fix = "registry push FOLDER --name OTHER-NAME --remote outside publishes the files anew without them"
    assert row["fix"] == f'paths = "keep" in [remotes.outside] lets them go there; {fix}'
    desk.ok("withdraw", "t1@v1", "--remote", "team", "--reason", "r")
    said = desk.registry("mirror", "t1", "--to", "outside", "--remote", "team")
    assert (said.code, f"fix: {row['fix']}" in said.err) == (5, True)
    assert not (desk.folder / "outside/models/t1").exists()
    desk.ok("push", "a1", "--name", "other", "--remote", "outside")
    written = [path.read_text() for path in (desk.folder / "outside/models").rglob("*.json")]
    assert written
    assert not [text for text in written if str(host) in text]
    (desk.folder / "third").mkdir()
    desk.ok("mirror", "other", "--to", str(desk.folder / "third"), "--remote", "outside")


def test_what_may_be_mirrored_is_sealed_without_its_host(desk: Desk) -> None:
    """Where a configured remote keeps none, a push elsewhere names neither machine nor user: it can go there later.

    One that is given by its address counts as well; private paths of files are still that remote's own business.
    """
    builders.lora_adapter(desk.folder / "a1", base="example-org/tiny-base", readme=CARD)
    (desk.folder / "third").mkdir()
    for name, remote in (("t1", "team"), ("t3", str(desk.folder / "third"))):
        desk.ok("push", "a1", "--name", name, "--remote", remote)
        provenance = sealed(desk, name, "remote" if name == "t1" else "third").facts.provenance
        assert (provenance.host, provenance.owner) == (None, None)
        desk.ok("mirror", name, "--to", "outside", "--remote", remote)
        assert sealed(desk, name, "outside").digest
    desk.ok("push", "tad", "--name", "internal", "--remote", "team")


def test_merge_and_mirror_take_no_path_outside(desk: Desk) -> None:
    """Both end 5 with the words of a push, and leave nothing there; where paths are kept they go through."""
    outside = ("--remote", "outside")
    pushed = desk.registry("push", "tad", "--name", "t", *outside, "--json")
    said = desk.registry("merge", "tad", "--base", "tA", "--name", "t", *outside, "--json")
    assert (pushed.code, said.code) == (5, 5)
    for told in (pushed, said):
        assert f"which model of the Hub the base {desk.folder}/tA is, is unknown" in told.error["why"]
        assert told.error["fix"] == "name it in weighbridge.yaml: base: owner/model"
    desk.ok("merge", "tad", "--base", "tA", "--name", "t", "--remote", "team")
    mirrored = desk.registry("mirror", "t-merged-bf16", "--to", "outside", "--remote", "team")
    assert (mirrored.code, "private paths" in mirrored.err) == (5, True)
    assert str(desk.folder) not in "".join(
        path.read_text(errors="replace") for path in (desk.folder / "outside").rglob("*") if path.is_file()
    )
    assert not (desk.folder / "outside" / "models" / "t-merged-bf16" / "v1").exists()


def test_a_cast_takes_nothing_private_outside(tmp_path: Path) -> None:
    """What a remote that keeps paths has sealed, base, host and owner, goes on to none that does not keep them."""
    seen = casting.look(builders.llama_model(tmp_path / "model", readme=CARD), dtype="fp16")
    done = casting.cast(seen, tmp_path / "out", workers=1)
    parent = Parent(ref="t@v1", content="sha256:" + "0" * 64)
    known = msgspec.structs.replace(plain_facts().provenance, host="node7", owner="lw")
    original = with_facts(base=BaseFacts(id=PATH), provenance=known)
    strict = Policy(paths="rewrite")
    with pytest.raises(RefusedError, match="cannot be published as t-fp16"):
        admit_cast(done, seen, parent, original, name="t-fp16", policy=strict, host="h")
    kept = admit_cast(done, seen, parent, original, name="t-fp16", policy=Policy(), host="h").facts
    assert (kept.base.id, kept.provenance.host) == (PATH, "node7")
    original = with_facts(base=BaseFacts(id="example-org/tiny-base"), provenance=known)
    told = admit_cast(done, seen, parent, original, name="t-fp16", policy=strict, host="h").facts
    assert (told.base.id, told.provenance.host, told.provenance.owner) == ("example-org/tiny-base", None, None)


def test_a_base_that_a_person_names_goes_outside_by_its_id(desk: Desk) -> None:
    """weighbridge.yaml beside the adapter is evidence for a merge as it is for a push."""
    (desk.folder / "tad" / "weighbridge.yaml").write_text("base: example-org/tiny-base\n")
    desk.ok("merge", "tad", "--base", "tA", "--name", "t", "--remote", "outside")
    told = sealed(desk, "t-merged-bf16", "outside")
    assert (told.facts.base.id, told.facts.lineage[1].ref) == ("example-org/tiny-base",) * 2
    assert str(desk.folder) not in told.stored.decode()


def test_what_was_merged_with_is_recorded(desk: Desk) -> None:
    """The base is the one that was used, with its digest; what the adapter names stands apart."""
    desk.ok("merge", "tad", "--base", "tB", "--name", "folder", "--remote", "team")
    facts = sealed(desk, "folder-merged-bf16").facts
    assert facts.base.id == str(desk.folder / "tB")
    assert facts.base.evidence == f"it was given to the merge; the adapter names {desk.folder}/tA"
    assert facts.lineage[1].ref == facts.lineage[1].content == facts.base.content
    pushed = desk.ok("push", "tB", "--name", "tb", "--remote", "team", "--json").json
    desk.ok("merge", "tad", "--base", "tb@v1", "--name", "version", "--remote", "team")
    facts = sealed(desk, "version-merged-bf16").facts
    assert (facts.base.id, facts.base.content) == ("tb@v1", pushed["content"])
    assert (facts.lineage[1].ref, facts.lineage[1].content) == ("tb@v1", pushed["content"])


def test_the_record_of_a_folder_names_what_was_used_and_no_path(desk: Desk) -> None:
    """merge.json tells bases apart by their tensors, without a path; stderr says where nothing speaks for one."""
    sentence = "warn: nothing in the adapter tells whether this base is the one it was trained on"
    unlike = f"merge-base-other  the adapter was trained on {desk.folder}/tA, and tB has other tensors"
    builders.lora_adapter(desk.folder / "loose", base="example-org/tiny-base")
    records = {}
    for adapter, base, words in (
        ("tad", "tA", (False, False)),
        ("tad", "tB", (False, True)),
        ("loose", "tA", (True, False)),
    ):
        said = desk.ok("merge", adapter, "--base", base, "--to", f"{adapter}-{base}")
        assert (sentence in said.err, unlike in said.err) == words
        text = (desk.folder / f"{adapter}-{base}" / "merge.json").read_text()
        assert str(desk.folder) not in text
        records[adapter, base] = json.loads(text)
    right, wrong, loose = records.values()
    assert loose["facts"].keys() - right["facts"].keys() == {"base_model"}
    assert [one["base"] for one in records.values()] == [None, None, None]
    assert right["base_tensors"] == loose["base_tensors"] != wrong["base_tensors"]
    assert [one["adapters"][0]["base_model"] for one in (right, loose)] == ["<path>", "example-org/tiny-base"]
    desk.ok("push", "tA", "--name", "ta", "--remote", "team")
    desk.ok("merge", "tad", "--base", "ta@v1", "--to", "version", "--remote", "team")
    record = json.loads((desk.folder / "version" / "merge.json").read_text())
    assert (record["base"], record["base_tensors"]) == ("ta@v1", right["base_tensors"])


def test_a_folder_that_the_adapter_names_is_compared(tmp_path: Path) -> None:
    """The folder itself and an equal copy speak for the base; a changed value, dtype or name speaks against it."""
    first = builders.llama_model(tmp_path / "a", seed=1)
    adapter = builders.lora_adapter(tmp_path / "ad", base=str(first))
    (tmp_path / "link").symlink_to(first)
    copy = builders.llama_model(tmp_path / "copy", seed=1, shards=2)
    for base in (first, tmp_path / "link", copy):
        assert look([adapter], base, weigh=False).facts["base_identity"] == "folder"
    tensors = dict(builders.llama_tensors(seed=1))
    raw = bytearray(builders.pack(*tensors["model.norm.weight"]))
    raw[-1] ^= 1
    tensors["model.norm.weight"] = (*tensors["model.norm.weight"][:2], bytes(raw))
    other = builders.llama_model(tmp_path / "other", tensors=tensors)
    seen = look([adapter], other, weigh=False, called="b@v2")
    assert (seen.outcome, seen.facts["base_identity"]) == ("warn", None)
    told = next(one for one in seen.findings if one.code == "merge-base-other")
    assert told.message == f"the adapter was trained on {first}, and b@v2 has other tensors"
    unread = look([adapter], other, weigh=False, here=False)
    assert (unread.outcome, unread.facts["base_identity"]) == ("accept", None)


def test_a_folder_that_holds_a_version_is_that_version(desk: Desk) -> None:
    """What was pulled is called by its name and number, and by the id of the Hub where its files lie there as well."""
    desk.ok("push", "tA", "--name", "ta", "--remote", "team")
    desk.ok("pull", "ta@v1", "pulled", "--remote", "team")
    desk.ok("merge", "tad", "--base", "pulled", "--name", "x", "--remote", "team")
    facts = sealed(desk, "x-merged-bf16").facts
    assert (facts.base.id, facts.lineage[1].ref) == ("ta@v1", "ta@v1")
    files: dict[str, tuple[int, str | None]] = {one.path: (one.size, one.sha256) for one in sealed(desk, "ta").files}
    there = ModelSeen(id="acme/ta", commit="c" * 40, files=files)
    beneath = Parent(ref="ta@v1", content=sealed(desk, "ta").content)
    seen = look([desk.folder / "tad"], desk.folder / "pulled", weigh=False)
    for ask, wanted in ((lambda *_: there, ("acme/ta", "c" * 40)), (lambda *_: ModelUnseen(why="no"), ("ta@v1", None))):
        told, tried = base_of(
            seen, Parent(ref="tad", content="sha256:1"), beneath, keep=False, ask=ask,
            published=lambda *_: PublishedAs(ref="ta@v1", repo="acme/ta", tag="v1"),
        )  # fmt: skip
        assert ((told.id, told.revision), tried) == (wanted, [])
        assert str(desk.folder) not in repr(told)
