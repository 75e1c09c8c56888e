"""`latest`: of the newest run the greatest step, whatever the order of arrival."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge.registry.catalog import Catalog
from weighbridge.registry.flow import feed
from weighbridge.registry.times import spelled
from weighbridge.registry.types import FeedEntry
from weighbridge_testlib.shelf import facts, manifest_of, payload


def told(*versions: tuple[str, str | None, int | None], claimed: Sequence[float] | None = None) -> list[FeedEntry]:
    """Return the entries of versions given as (run, start, step), numbered from 1, claimed a second apart."""
    return [
        feed.version_entry(
            "a",
            n,
            manifest_of(payload(n), facts(run=run, started_at=start, step=step)),
            stored_at=spelled(claimed[n - 1] if claimed else 1e9 + n),
        )
        for n, (run, start, step) in enumerate(versions, 1)
    ]


def latest(entries: Sequence[FeedEntry]) -> int | None:
    """Return what a fresh catalogue says after these entries."""
    catalog = Catalog.open(None, "r", durable=False)
    catalog.apply(1, entries)
    row = catalog.name("a")
    catalog.close()
    return None if row is None else row["latest"]


def test_the_greatest_step_of_a_run_wins_not_the_last_to_arrive() -> None:
    """A backlog scan that publishes step 100 after step 300 does not move it back."""
    assert latest(told(("r", None, 200), ("r", None, 300), ("r", None, 100))) == 2


def test_equal_steps_are_decided_by_number() -> None:
    """A checkpoint written again with other bytes is the newer one."""
    assert latest(told(("r", None, 300), ("r", None, 300))) == 2


def test_the_newest_run_is_the_one_that_started_last() -> None:
    """An old run that is found late stays old, however great its step."""
    new, old = ("new", "2026-02-01T00:00:00Z", 10), ("old", "2026-01-01T00:00:00Z", 9000)
    assert latest(told(new, old)) == 1
    assert latest(told(old, new)) == 2


def test_without_a_start_the_store_time_of_the_first_claim_counts() -> None:
    """The run whose first claim is younger is newer, whoever claimed last."""
    entries = told(("a", None, 10), ("b", None, 10), ("a", None, 20), claimed=[1000.0, 2000.0, 3000.0])
    assert latest(entries) == 2


def test_open_void_and_withdrawn_versions_do_not_count() -> None:
    """Only committed versions that were not taken back can be latest; a run without any is no run."""
    entries = told(("r", "2026-01-01T00:00:00Z", 100), ("s", "2026-02-01T00:00:00Z", 200))
    assert latest([*entries, feed.withdrawn_entry("a", 2, b"x")]) == 1
    assert latest([*entries, *[feed.withdrawn_entry("a", n, b"x") for n in (1, 2)]]) is None
    assert latest([entries[0], feed.void_entry("a", 2, b"x")]) == 1


def test_a_version_without_a_step_gives_way() -> None:
    """What has no known step comes after everything that has one."""
    assert latest(told(("r", None, 1), ("r", None, None))) == 1
    assert latest(told(("r", None, None), ("r", None, None))) == 2


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.sampled_from([None, "2026-01-01T00:00:00Z", "2026-02-01T00:00:00+01:00"]),
            st.one_of(st.none(), st.integers(0, 3)),
        ),
        min_size=1,
        max_size=7,
    ),
    st.integers(0, 1000),
)
def test_order_and_portions_never_matter(versions: list[tuple[str, str | None, int | None]], seed: int) -> None:
    """Told in any order, all at once or one by one, the result is the same."""
    entries = told(*versions)
    once = latest(entries)
    shuffled = [*entries]
    random.Random(seed).shuffle(shuffled)
    catalog = Catalog.open(None, "r", durable=False)
    for seq, entry in enumerate(shuffled, 1):
        catalog.apply(seq, [entry])
    row = catalog.name("a")
    catalog.close()
    assert row is not None
    assert row["latest"] == once


def test_latest_is_worked_out_when_facts_arrive_and_only_read_later() -> None:
    """The name's row holds it, so that a reader finds it by one look-up."""
    catalog = Catalog.open(None, "r", durable=False)
    catalog.apply(1, told(("r", None, 1), ("r", None, 2)))
    assert catalog.tags("a") == {2: ["latest"]}
    assert catalog.link.execute("SELECT latest FROM names").fetchall() == [(2,)]
    catalog.close()


@pytest.mark.parametrize("step", [0, 2**40])
def test_steps_are_numbers(step: int) -> None:
    """Zero is a step, and a great one is greater than a small one."""
    assert latest(told(("r", None, step), ("r", None, None))) == 1
