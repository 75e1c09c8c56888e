"""Every rule of `registry diagnose`: it speaks where its cause is there, and is silent where it is not."""

from collections import Counter
from pathlib import Path

import pytest

from weighbridge.adapters.diagnose.answer import Diagnosis, diagnose
from weighbridge.adapters.diagnose.rule import STAGES
from weighbridge.adapters.diagnose.symptoms import SYMPTOMS
from weighbridge.adapters.diagnose.table import ROWS, RULES
from weighbridge.registry.findings import CODES
from weighbridge_testlib.ailments import AILMENTS, Asked, Dice

SEEDS = range(3)
NOWHERE = {"HOME": "/nonexistent"}
ELSEWHERE = {
    "license-denied", "file-name-unsafe", "file-extra", "file-missing", "file-size", "file-damaged", "manifest-damaged",
    "claim-damaged", "card-damaged", "pull-unfinished", "secret-in-file", "path-outside-bundle", "sidecar-invalid",
    "hub-limit", "hub-card-refused", "merge-impossible", "merge-not-streamed", "merge-layers-replicated",
    "merge-changes-nothing", "merge-not-finite", "merge-unproven", "publish-refused", "wait-limit", "name-taken",
    "name-invalid", "job-quarantined", "mirror-diverged", "mirror-refuses", "file-unsearched", "merge-not-made",
    "merge-memory-short", "cast-impossible", "cast-changes-nothing", "cast-unproven",
}  # fmt: skip
"""Blocking findings about publishing, versions and merging: no program that loads the files ever meets them."""


def ask(asked: Asked, text: str | None = None) -> Diagnosis:
    """Diagnose what an ailment's builder made, with no Hub cache in sight."""
    return diagnose(asked.path, text, base=str(asked.base) if asked.base is not None else None, environ=NOWHERE)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", AILMENTS)
def test_a_rule_speaks_where_its_cause_is(tmp_path: Path, name: str, seed: int) -> None:
    """With each text that people see, the cause is found and explains it; a fault is found without any text, too."""
    rule, ailment = next(r for r in RULES if r.name == name), AILMENTS[name]
    asked = ailment.sick(tmp_path, Dice(seed))
    found: list[bool] = []
    for text in ailment.said:
        answer = ask(asked, f"Traceback (most recent call last):\n{text}\n")
        mine = [cause for cause in answer.causes if cause.rule == name]
        found.append(bool(mine))
        assert all(set(cause.explains) <= set(rule.symptoms) and cause.explains for cause in mine), text
        if mine:
            assert answer.outcome in {"found", "wait"}
            assert all(cause.message and cause.fix and cause.subject for cause in mine)
    assert all(found) if name != "shape-in-text" else any(found), ailment.said
    if rule.severity != "note":
        assert name in {cause.rule for cause in ask(asked).causes}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", AILMENTS)
def test_a_rule_is_silent_where_its_cause_is_not(tmp_path: Path, name: str, seed: int) -> None:
    """The same texts over a sound folder of the same kind never bring the cause up."""
    ailment = AILMENTS[name]
    asked = ailment.well(tmp_path, Dice(seed))
    for text in (*ailment.said, None):
        assert name not in {cause.rule for cause in ask(asked, text).causes}
    # A complete ZeRO folder is no sound model: that its weights are in rank files alone is said of it.
    assert {cause.rule for cause in ask(asked).causes} == ({"zero-only"} if name == "rank-file-gone" else set())


def test_every_rule_has_both_folders() -> None:
    """The table of rules and the table of folders name the same rules, each once."""
    assert Counter(rule.name for rule in RULES) == Counter(list(AILMENTS))


def test_the_tables_hold_together() -> None:
    """Rules name known symptoms, stages and codes; every symptom has a rule, every row of the tables a symptom."""
    for rule in RULES:
        assert set(rule.symptoms) <= set(SYMPTOMS), rule.name
        assert rule.symptoms, rule.name
        assert rule.stage in STAGES
        assert set(rule.codes) <= set(CODES)
    assert {name for rule in RULES for name in rule.symptoms} == set(SYMPTOMS)
    assert {name for names in ROWS.values() for name in names} <= set(SYMPTOMS)
    assert all(
        part == part.lower() and part
        for each in SYMPTOMS.values()
        for says in (*each.says, *each.words)
        for part in says
    )


def test_no_blocking_finding_is_left_out() -> None:
    """Whatever makes inspect refuse a folder for its files, some rule hands it on."""
    handed = {code for rule in RULES for code in rule.codes}
    assert {name for name, code in CODES.items() if code.severity == "block"} - handed == ELSEWHERE
