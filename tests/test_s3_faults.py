"""Publishing and pulling through a network that breaks: nothing wrong comes out, nothing is doubled or left over."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from weighbridge.registry import errors
from weighbridge.registry.remotes.s3 import multipart
from weighbridge.registry.remotes.s3.probe import Probe, examine
from weighbridge.registry.remotes.s3.remote import S3Remote
from weighbridge.registry.remotes.wrappers import Retrying
from weighbridge_testlib import seaweed as servers
from weighbridge_testlib.proxy import Fault, Kind, Plan, Proxy, Request, flipped
from weighbridge_testlib.s3_rounds import Rounds
from weighbridge_testlib.seaweed import Server

# An answer so damaged that the library cannot parse it leaves its socket to the garbage collector.
pytestmark = [pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"), pytest.mark.long]

KEY = "models/m/v1/w"
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    servers.credentials(monkeypatch)


@pytest.fixture
def through(seaweed: Server, request: pytest.FixtureRequest) -> Iterator[Callable[[Plan], tuple[S3Remote, Proxy]]]:
    """Open remotes behind proxies of a plan; everything is closed afterwards."""
    opened: list[tuple[S3Remote, Proxy]] = []
    prefix = "".join(c if c.isalnum() else "-" for c in request.node.name)

    def connect(plan: Plan) -> tuple[S3Remote, Proxy]:
        proxy = Proxy(seaweed.endpoint, plan, stall=3).__enter__()
        place = seaweed.place(prefix, endpoint=proxy.endpoint, read_timeout=0.5)
        remote = S3Remote(place, single=MIB, part=multipart.PART_LEAST)
        remote.link.patience = 0.002
        remote.probe.trust(S3Remote(seaweed.place(prefix)).probe.ask())
        opened.append((remote, proxy))
        return remote, proxy

    yield connect
    for remote, proxy in opened:
        remote.close()
        proxy.__exit__(None, None, None)


def first(kind: Kind, method: str, at: int = 0) -> Plan:
    """Return a plan that breaks the first request of a method."""
    done: list[Request] = []

    def plan(request: Request) -> Fault | None:
        if request.method == method and not done:
            done.append(request)
            return Fault(kind, at)
        return None

    return plan


@pytest.mark.parametrize(
    ("kind", "at", "expected"),
    [
        ("refuse", 0, errors.OutcomeUnknownError),
        ("cut-request", 60, errors.OutcomeUnknownError),
        ("lost", 0, errors.OutcomeUnknownError),
        ("stall", 0, errors.OutcomeUnknownError),
        ("cut", 10, errors.OutcomeUnknownError),
        ("busy", 0, errors.RetryableError),
        ("flip-request", -8, errors.RetryableError),
    ],
)
def test_a_write_that_breaks_says_what_is_known(
    through: Callable[[Plan], tuple[S3Remote, Proxy]], kind: Kind, at: int, expected: type[Exception]
) -> None:
    """Without an answer the outcome is unknown and nothing is repeated blindly; with a refusal it is known."""
    remote, proxy = through(first(kind, "PUT", at))
    with pytest.raises(errors.WeighbridgeError) as caught:
        remote.create("a", b"mine" * 100)
    assert type(caught.value) is expected
    assert [request.method for request in proxy.requests] == ["PUT"]
    Retrying(remote, sleep=lambda _: None).create("b", b"mine")
    assert remote.read("b") == b"mine"


@pytest.mark.parametrize("kind", ["refuse", "cut-request", "lost", "stall", "cut", "busy"])
def test_a_lost_answer_is_settled_by_looking(through: Callable[[Plan], tuple[S3Remote, Proxy]], kind: Kind) -> None:
    """Whether or not the write was carried out, its writer ends up knowing that the object is its own."""
    remote, _ = through(first(kind, "PUT"))
    Retrying(remote, sleep=lambda _: None).create("a", b"mine")
    assert remote.read("a") == b"mine"


def test_damage_on_the_way_out_is_refused(through: Callable[[Plan], tuple[S3Remote, Proxy]], tmp_path: Path) -> None:
    """A bit that flips in the body of a part is found by the server, and the part is sent again."""
    body = bytes(range(256)) * 25_000
    source = tmp_path / "f"
    source.write_bytes(body)

    def plan(request: Request) -> Fault | None:
        return Fault("flip-request", -8 * 1000) if "partNumber=1" in request.target and not seen(request) else None

    once: list[int] = []

    def seen(request: Request) -> bool:
        once.append(request.number)
        return len(once) > 1

    remote, proxy = through(plan)
    remote.upload(KEY, source, len(body), hashlib.sha256(body).hexdigest())
    assert len(proxy.broken) == 1
    assert b"".join(map(bytes, remote.fetch(KEY))) == body


@pytest.mark.parametrize("size", [100, 3 * MIB])
def test_damage_on_the_way_in_is_found(through: Callable[[Plan], tuple[S3Remote, Proxy]], size: int) -> None:
    """A bit that flips in a small object on its way is found by its checksum, and the object is read again."""
    body = bytes(range(256)) * (size // 256 + 1)
    remote, proxy = through(first("flip", "GET", -8 * 50))
    remote.create("a", body)
    assert remote.read("a") == body
    assert [fault.kind for _, fault in proxy.broken] == ["flip"]


def test_damage_where_it_lies_is_named(through: Callable[[Plan], tuple[S3Remote, Proxy]]) -> None:
    """A small object that comes back wrong every time is damaged, not unreachable."""
    remote, _ = through(lambda request: Fault("flip", -80) if request.method == "GET" else None)
    remote.create("a", b"0123456789" * 100)
    with pytest.raises(errors.IntegrityError, match="damaged"):
        remote.read("a")


def test_a_cut_download_goes_on(through: Callable[[Plan], tuple[S3Remote, Proxy]], seaweed: Server) -> None:
    """A download that breaks off is gone on with from where it stopped, window by window."""
    body = bytes(range(256)) * 90_000  # 22 MiB: three windows
    cuts: list[int] = []

    def plan(request: Request) -> Fault | None:
        if request.method == "GET" and len(cuts) < 4:
            cuts.append(request.number)
            return Fault("cut", 1_000_000)
        return None

    remote, _ = through(plan)
    direct = S3Remote(remote.link.place._replace(endpoint=seaweed.endpoint, read_timeout=20))
    direct.create("a", body)
    direct.close()
    assert b"".join(map(bytes, Retrying(remote, sleep=lambda _: None).fetch("a"))) == body
    assert len(cuts) == 4


def test_a_storm_is_weathered(through: Callable[[Plan], tuple[S3Remote, Proxy]], tmp_path: Path) -> None:
    """When the store asks for fewer requests for a while, all of them slow down, and the upload ends well."""
    body = bytes(300) * 40_000
    source = tmp_path / "f"
    source.write_bytes(body)
    remote, proxy = through(lambda request: Fault("busy") if 3 < request.number < 14 else None)
    remote.link.pace.most = 0.05
    Retrying(remote, attempts=20, base=0.01).upload(KEY, source, len(body), hashlib.sha256(body).hexdigest())
    assert len(proxy.broken) == 10
    assert remote.stat(KEY).sha256 == hashlib.sha256(body).hexdigest()


def test_the_probe_judges_nothing_by_broken_answers(seaweed: Server, tmp_path: Path) -> None:
    """Through a network that breaks, the probe finds the store good or finds out nothing; never bad."""
    judged = 0
    for seed in range(12):
        with Proxy(seaweed.endpoint, Sometimes(seed)) as proxy:
            place = seaweed.place("probe-broken", endpoint=proxy.endpoint, read_timeout=0.5)
            remote = S3Remote(place)
            remote.link.patience = 0.002
            try:
                found = examine(remote.link)
            except errors.UnreachableError:
                continue
            finally:
                remote.close()
            judged += 1
            assert found.whole
    assert judged
    assert Probe(S3Remote(seaweed.place("x", bucket="none")).link, tmp_path / "none").known() is None


class Sometimes:
    """Loses or cuts some answers, a different set for each seed."""

    KINDS: tuple[Kind, ...] = ("refuse", "lost", "busy", "cut")

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, request: Request) -> Fault | None:
        """Break one request in nine."""
        place = request.number * 7 + self.seed * 5
        return Fault(self.KINDS[place % 4], place) if place % 9 == 0 else None


def test_forty_rounds(seaweed: Server, tmp_path: Path) -> None:
    """Three requests in ten break, in every way there is: no wrong byte, no version twice, no upload left."""
    found = Rounds(seaweed, tmp_path, "rounds", seed=4).run(40)
    assert found.rounds == 40
    assert (found.wrong, found.leaked) == (0, 0)
    assert set(found.broken) == {"refuse", "busy", "cut-request", "flip-request", "lost", "stall", "cut", "flip"}


def test_one_bit_is_one_bit() -> None:
    """The proxy changes exactly one bit."""
    wire = bytes(100)
    assert [sum(byte.bit_count() for byte in flipped(wire, at)) for at in (0, 7, 799, 800, -1)] == [1] * 5
