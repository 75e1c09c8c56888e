"""`registry doctor` on what merges by rule need."""

from pathlib import Path

import pytest

from weighbridge.config.load import read_text
from weighbridge.registry.cli.checks.check import FAIL, OK, WARN
from weighbridge.registry.cli.checks.merges import merges

RULE = '[[watch]]\nroot = "/scratch/runs"\nmerge = "best"\n'


def checked(text: str) -> dict[str, tuple[str, str, str | None]]:
    """Return what is found for a configuration, by name."""
    settings = read_text(text, "/etc/weighbridge.toml", {"HOME": "/home/anna"}, resolve=False)
    return {check.name: (check.status, check.message, check.fix) for check in merges(settings)}


def test_nothing_is_said_where_no_rule_merges() -> None:
    """Without a rule that merges there is nothing to check."""
    assert checked(RULE.replace("best", "never")) == {}
    assert checked(RULE)["merge"][0] == OK


def test_folders_that_are_not_there_are_named(tmp_path: Path) -> None:
    """A folder of bases that is missing is a warning with the command that makes it."""
    found = checked(f'{RULE}[merge]\nbases = ["{tmp_path}", "{tmp_path}/gone"]\n')
    assert found["merge-bases"] == (
        WARN,
        f"{tmp_path}/gone is not there: no base is found in it",
        f"mkdir -p {tmp_path}/gone",
    )


def test_without_slurm_a_rule_that_needs_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs that are missing are named, and both ways out."""
    monkeypatch.setenv("PATH", str(tmp_path))
    status, message, fix = checked(f'{RULE}[merge]\nexecutor = "slurm"\nscratch = "{tmp_path}/x"\n')["merge-slurm"]
    assert status == FAIL
    assert "sbatch, squeue, scontrol, scancel cannot be found" in message
    assert 'executor = "local"' in (fix or "")
