"""References: number, tag, name, digest, step; ambiguity lists the matches, and what is not there is explained."""

from collections.abc import Iterator

import pytest

from weighbridge.registry import layout
from weighbridge.registry.catalog import Catalog
from weighbridge.registry.errors import NotFoundError, UsageError, WithdrawnError
from weighbridge.registry.flow import sync, tags
from weighbridge.registry.flow.resolve import resolve
from weighbridge.registry.remotes.memory import MemoryRemote
from weighbridge_testlib.shelf import Shelf, payload


@pytest.fixture
def shelf() -> Shelf:
    """Return a registry with two names, an open, a given-up and a withdrawn number, and a tag."""
    shelf = Shelf(MemoryRemote())
    shelf.publish("sft", step=100)
    shelf.publish("sft", step=300)
    shelf.publish("sft", step=200)
    shelf.claim("sft", step=400)
    shelf.claim("sft", step=500)
    shelf.void("sft", 5)
    shelf.publish("sft", step=600)
    shelf.withdraw("sft", 6)
    shelf.publish("other", payload(1), step=100)
    tags.move(shelf.remote, shelf.registry, "sft", "prod", 1, who="lw")
    return shelf


@pytest.fixture
def catalog(shelf: Shelf) -> Iterator[Catalog]:
    """Return the catalogue of that registry."""
    opened = Catalog.open(None, "r", durable=False)
    sync.sync(shelf.remote, opened)
    yield opened
    opened.close()


@pytest.mark.parametrize("online", [True, False])
@pytest.mark.parametrize(
    ("ref", "step", "found"),
    [
        ("sft@v1", None, "sft@v1"),
        ("sft:prod", None, "sft@v1"),
        ("sft", None, "sft@v2"),
        ("sft:latest", None, "sft@v2"),
        ("sft", 200, "sft@v3"),
    ],
)
def test_each_kind_of_reference(
    shelf: Shelf, catalog: Catalog, *, ref: str, step: int | None, found: str, online: bool
) -> None:
    """A number, a tag, a plain name (= latest) and a step lead to one version, with and without the remote."""
    assert resolve(shelf.remote if online else None, catalog, ref, step=step).ref == found


def test_a_digest_leads_to_its_version(shelf: Shelf, catalog: Catalog) -> None:
    """Eight digits are enough; a name before them narrows the search."""
    row = catalog.version("sft", 2)
    assert row is not None
    digits = row["content"].removeprefix("sha256:")
    assert resolve(shelf.remote, catalog, f"@sha256:{digits[:8]}").ref == "sft@v2"
    found = resolve(shelf.remote, catalog, f"sft@sha256:{digits}")
    assert (found.ref, found.manifest, found.card) == ("sft@v2", row["manifest"], row["card"])


def test_an_ambiguous_digest_lists_the_matches(shelf: Shelf, catalog: Catalog) -> None:
    """The same content under two names is not guessed away."""
    row = catalog.version("sft", 1)
    assert row is not None
    digits = row["content"].removeprefix("sha256:")[:12]
    with pytest.raises(UsageError) as caught:
        resolve(shelf.remote, catalog, f"@sha256:{digits}")
    assert caught.value.data["matches"] == ["other@v1", "sft@v1"]
    assert "other@v1" in str(caught.value.why)
    assert resolve(shelf.remote, catalog, f"other@sha256:{digits}").ref == "other@v1"


def test_an_ambiguous_step_lists_the_matches(shelf: Shelf) -> None:
    """Two runs that share a name and have the same step are told apart by the person."""
    shelf.publish("sft", step=100, run="run-2")
    catalog = Catalog.open(None, "r", durable=False)
    sync.sync(shelf.remote, catalog)
    with pytest.raises(UsageError) as caught:
        resolve(None, catalog, "sft", step=100)
    assert caught.value.data["matches"] == ["sft@v1", "sft@v7"]
    catalog.close()


@pytest.mark.parametrize("online", [True, False])
@pytest.mark.parametrize(
    ("ref", "kind", "words"),
    [
        ("sft@v4", NotFoundError, "not finished"),
        ("sft@v5", NotFoundError, "given up"),
        ("sft@v6", WithdrawnError, "withdrawn"),
        ("sft@v9", NotFoundError, "there is no sft@v9"),
        ("sft:best", NotFoundError, "no tag 'best'"),
        ("nobody", NotFoundError, "no name 'nobody'"),
        ("@sha256:ffffffff", NotFoundError, "nothing begins"),
    ],
)
def test_what_is_not_there_is_explained(
    shelf: Shelf, catalog: Catalog, *, ref: str, kind: type[Exception], words: str, online: bool
) -> None:
    """Unfinished, given up, withdrawn, unknown: each has its own sentence."""
    with pytest.raises(kind, match=words):
        resolve(shelf.remote if online else None, catalog, ref)


def test_a_near_name_and_the_steps_there_are_are_named(shelf: Shelf, catalog: Catalog) -> None:
    """A slip of the finger is answered with what was probably meant."""
    with pytest.raises(NotFoundError) as caught:
        resolve(shelf.remote, catalog, "stf")
    assert "sft" in str(caught.value.why)
    with pytest.raises(NotFoundError) as caught:
        resolve(shelf.remote, catalog, "sft", step=150)
    assert "100, 200" in str(caught.value.why)
    with pytest.raises(NotFoundError) as caught:
        resolve(shelf.remote, catalog, "sft:best")
    assert "latest, prod" in str(caught.value.why)
    for ref in ("SFT", "SFT:best"):
        with pytest.raises(NotFoundError, match="there is no name 'SFT'") as caught:
            resolve(shelf.remote, catalog, ref)
        assert caught.value.why == "did you mean sft?"


def test_a_step_needs_a_plain_name(catalog: Catalog) -> None:
    """A number or a tag beside a step is a contradiction."""
    for ref in ("sft@v1", "sft:prod", "@sha256:00000000"):
        with pytest.raises(UsageError, match="--step"):
            resolve(None, catalog, ref, step=100)


def test_a_tag_is_read_from_the_remote_itself(shelf: Shelf, catalog: Catalog) -> None:
    """A move whose announcement is missing counts at once for whoever asks the remote."""
    move = tags.move(shelf.remote, shelf.registry, "sft", "prod", 3, who="lw")
    shelf.remote.delete(layout.feed(len(list(shelf.remote.list(layout.FEED)))))
    assert move.seq == 2
    assert resolve(shelf.remote, catalog, "sft:prod").ref == "sft@v3"
    assert resolve(None, catalog, "sft:prod").ref == "sft@v1"


def test_a_number_the_catalogue_does_not_know_is_asked_of_the_remote(shelf: Shelf, catalog: Catalog) -> None:
    """A version that was published a moment ago can be named at once."""
    shelf.publish("sft", step=700)
    assert resolve(shelf.remote, catalog, "sft@v7").ref == "sft@v7"
    assert resolve(shelf.remote, None, "sft@v7").ref == "sft@v7"
    with pytest.raises(NotFoundError):
        resolve(None, catalog, "sft@v7")
