"""What the plain client does on a bad day, numbered as in docs/remotes-hub.md: why test_hub_faults.py asks for more."""

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils._http import default_client_factory

from weighbridge.registry.remotes.hub.client import Patience, make_client
from weighbridge_testlib.hub import Fault, TestHub, serve
from weighbridge_testlib.hub import Limits as HubLimits


@pytest.fixture
def hub() -> Iterator[TestHub]:
    """Run a Hub."""
    with serve() as running:
        yield running


def plain(hub: TestHub, token: str | None = "hf_ann") -> HfApi:
    """Return the library as it is, with an empty repository acme/plain."""
    if ("model", "acme/plain") not in hub.store.repos:
        hub.store.create("model", "acme", "plain", hub.store.tokens["hf_ann"])
    return HfApi(endpoint=hub.url, token=token or False)


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


def test_11_the_plain_client_waits_for_ever() -> None:
    """Its HTTP client has no time limit; ours has one for every part of a request."""
    assert default_client_factory().timeout == httpx2.Timeout(None)
    assert None not in make_client(Patience()).timeout.as_dict().values()


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
