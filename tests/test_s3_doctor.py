"""`registry doctor` about a bucket: what its store was seen to do, what may be missing, and rules that would delete."""

from pathlib import Path
from typing import Any

import pytest

from weighbridge.config.settings import RemoteSettings
from weighbridge.registry.cli.checks import s3 as checks
from weighbridge.registry.errors import UsageError
from weighbridge.registry.flow.marker import open_registry
from weighbridge.registry.remotes.s3 import health, probe
from weighbridge.registry.remotes.s3.client import place_of
from weighbridge.registry.remotes.s3.remote import S3Remote
from weighbridge_testlib import seaweed as servers
from weighbridge_testlib.desk import Desk
from weighbridge_testlib.policies import Policies
from weighbridge_testlib.proxy import Fault, Proxy, Request
from weighbridge_testlib.seaweed import Server


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    servers.credentials(monkeypatch)
    monkeypatch.setattr(probe, "_known", {})


def doctor(tmp_path: Path, patch: pytest.MonkeyPatch, url: str, endpoint: str, *more: str) -> dict[str, dict[str, Any]]:
    """Run doctor for one bucket and return its checks by name."""
    desk = Desk(tmp_path / "desk", patch)
    lines = [f'url = "{url}"', f'endpoint = "{endpoint}"', 'patience = "1m"', *(line for line in more if "=" in line)]
    desk.config.write_text("[remotes.team]\n" + "\n".join(lines) + "\n")
    said = desk.registry("doctor", "team", "--json", *(word for word in more if word.startswith("--")))
    return {check["name"]: check for check in said.json["checks"]}


def test_a_good_bucket(seaweed: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket that keeps its promises says so, and what was found is kept for the next command."""
    remote = S3Remote(seaweed.place("doctor"))
    open_registry(remote, create=True)
    remote.close()
    found = doctor(tmp_path, monkeypatch, "s3://registry/doctor", seaweed.endpoint)
    assert {check["status"] for check in found.values()} == {"ok"}
    assert "SeaweedFS" in found["remote-team-probe"]["message"]
    assert "0 names" in found["remote-team"]["message"]
    assert list((tmp_path / "desk" / "cache" / "s3").iterdir())


def test_only_looking(seaweed: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --no-write nothing is put into the bucket, and nothing is claimed of its store."""
    found = doctor(tmp_path, monkeypatch, "s3://registry/looked-at", seaweed.endpoint, "--no-write")
    assert "not tried out" in found["remote-team-probe"]["message"]
    assert seaweed.client().list_objects_v2(Bucket="registry", Prefix="looked-at/").get("Contents", []) == []


@pytest.mark.parametrize(
    ("bucket", "endpoint", "doubt"),
    [
        ("weights", "https://weights.s3.corp.example", True),
        ("models", "https://gateway.example/s3/models/", True),
        ("models", "https://s3.example", False),
        ("models", "https://bucket.vpce-1.s3.eu-west-1.vpce.amazonaws.com", False),
        ("models", "https://a1b2.execute-api.eu-west-1.amazonaws.com/models", True),
        ("models", "https://models.s3.eu-west-1.amazonaws.com", None),
        ("models", "https://models.s3-eu-west-1.amazonaws.com", None),
        ("models", "https://s3.amazonaws.com/models", None),
        ("models", "https://s3.cn-north-1.amazonaws.com.cn/models", None),
    ],
)
def test_an_endpoint_with_the_buckets_name_is_refused_where_that_is_certain(
    bucket: str, endpoint: str, doubt: bool | None
) -> None:
    """Of S3 itself it is a mistake; elsewhere a host or a gateway's path may be called so, and doctor warns."""
    settings = RemoteSettings("team", f"s3://{bucket}/p", endpoint=endpoint)
    if doubt is None:
        with pytest.raises(UsageError, match="names the bucket"):
            place_of(settings)
        return
    place = place_of(settings)
    told = [check.name for check in checks._endpoint(place, "remote-team", settings)]
    assert told == ["remote-team-endpoint"] * doubt


def test_a_bucket_without_promises(juicefs: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that keeps no promises fails with what it lacks; chosen for one writer by hand, it is a warning."""
    found = doctor(tmp_path, monkeypatch, "s3://registry/bad", juicefs.endpoint)
    check = found["remote-team-probe"]
    assert check["status"] == "FAIL"
    assert 'writers = "one"' in check["fix"]
    assert "not refused" in check["message"]
    assert "sha256 is not verified" in check["message"]
    found = doctor(tmp_path / "2", monkeypatch, "s3://registry/bad", juicefs.endpoint, 'writers = "one"')
    assert found["remote-team-probe"]["status"] == "warn"


def test_one_writer_where_many_could(seaweed: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting for bad stores is named where it is not needed."""
    found = doctor(tmp_path, monkeypatch, "s3://registry/one", seaweed.endpoint, 'writers = "one"')
    assert "not needed" in found["remote-team-writers"]["message"]


def test_a_role_that_may_not_list_or_write(seaweed: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the right to write pull works; without the right to list it fails, with the policy that grants it."""
    remote = S3Remote(seaweed.place("rights"))
    open_registry(remote, create=True)
    remote.close()
    with Proxy(seaweed.endpoint, Policies(["reader"], "registry", "rights")) as proxy:
        found = doctor(tmp_path, monkeypatch, "s3://registry/rights", proxy.endpoint)
    assert found["remote-team-probe"]["status"] == "warn"
    assert "pull works" in found["remote-team-probe"]["message"]
    with Proxy(seaweed.endpoint, Policies(["reader"], "registry", "other")) as proxy:
        found = doctor(tmp_path / "2", monkeypatch, "s3://registry/rights", proxy.endpoint)
    assert found["remote-team"]["status"] == "FAIL"


def test_a_role_that_may_read_but_not_list(seaweed: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A right to list that is missing is named beside the policy that grants it."""
    remote = S3Remote(seaweed.place("unlisted"))
    remote.create("weighbridge.json", b"{}")
    remote.close()
    denied = []

    def plan(request: Request) -> Fault | None:
        if "list-type" in request.target and "delimiter" not in request.target:
            denied.append(request)
            return Fault("deny")
        return None

    with Proxy(seaweed.endpoint, plan) as proxy:
        found = doctor(tmp_path, monkeypatch, "s3://registry/unlisted", proxy.endpoint)
    assert found["remote-team-list"]["status"] == "FAIL"
    assert "reader.json" in found["remote-team-list"]["fix"]
    assert denied


RULE = {"ID": "old", "Status": "Enabled", "Filter": {"Prefix": "team/"}, "Expiration": {"Days": 30}}


@pytest.mark.parametrize(
    ("changes", "harms"),
    [
        ({}, True),
        ({"Filter": {"Prefix": ""}}, True),
        ({"Filter": {"Prefix": "team/registry/models/"}}, True),
        ({"Filter": {"And": {"Prefix": "team/", "Tags": []}}}, True),
        ({"Filter": {"Prefix": "other/"}}, False),
        ({"Filter": {"Prefix": "team/registry/_wb/probe/"}}, False),
        ({"Status": "Disabled"}, False),
        ({"Expiration": {"ExpiredObjectDeleteMarker": True}}, False),
        ({"Expiration": {}, "Transitions": [{"Days": 1, "StorageClass": "DEEP_ARCHIVE"}]}, True),
        ({"Expiration": {}, "Transitions": [{"Days": 1, "StorageClass": "STANDARD_IA"}]}, False),
        ({"Expiration": {}, "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 7}}, False),
    ],
)
def test_rules_that_would_harm(changes: dict[str, Any], harms: bool) -> None:
    """A rule harms when it deletes or archives what lies below the prefix; one for unfinished uploads is welcome."""
    assert bool(list(health.harm(RULE | changes, "team/registry/"))) is harms


def test_a_rule_of_the_bucket_is_named(seaweed: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that deletes old objects below the prefix is a warning with its name."""
    client = seaweed.client()
    rule = {"ID": "tidy", "Status": "Enabled", "Filter": {"Prefix": "ruled/"}, "Expiration": {"Days": 3650}}
    client.put_bucket_lifecycle_configuration(Bucket="registry", LifecycleConfiguration={"Rules": [rule]})
    try:
        found = doctor(tmp_path, monkeypatch, "s3://registry/ruled", seaweed.endpoint)
        other = doctor(tmp_path / "2", monkeypatch, "s3://registry/free", seaweed.endpoint)
    finally:
        client.delete_bucket_lifecycle(Bucket="registry")
    assert found["remote-team-lifecycle"]["status"] == "warn"
    assert "tidy" in found["remote-team-lifecycle"]["message"]
    assert "remote-team-lifecycle" not in other
