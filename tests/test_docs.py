"""The manual is tested: printed pages are fresh, links lead somewhere, shown commands run and print what is shown."""

import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from weighbridge_testlib import builders

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("systemd/*.md"), *ROOT.glob("benchmarks/*.md")]
)
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
_SESSION = re.compile(r"<!-- session -->\n```\n(.*?)```\n<!-- /session -->", re.DOTALL)
_AGES = re.compile(r"\b\d+(?:ms|[smhdw])\b")


def test_printed_pages_are_fresh() -> None:
    """findings.md, errors.md, commands.md and the schemas say what the code says; `make docs` prints them."""
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "build.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link of a page names a file of this repository."""
    targets = [t for t in _LINK.findall(page.read_text()) if "://" not in t]
    assert [t for t in targets if not (page.parent / t).exists()] == []


def test_every_command_is_in_the_manual() -> None:
    """Each command of both programs has its own section with its help."""
    build = runpy.run_path(str(ROOT / "docs" / "build.py"))
    text = (ROOT / "docs" / "commands.md").read_text()
    for root, top in ((build["registry_command"], "registry"), (build["daemon_command"], "registryd")):
        for name, command in build["commands"](root, top):
            assert f"## {name}\n" in text
            assert command.help, f"{name} has no help"


def _keys(table: dict[str, Any]) -> set[str]:
    found = set(table)
    for value in table.values():
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, dict):
                found |= _keys(inner)
    return found


def test_every_setting_is_in_the_manual() -> None:
    """docs/configuration.md explains each key that config/example.toml shows."""
    example = tomllib.loads((ROOT / "config" / "example.toml").read_text())
    text = (ROOT / "docs" / "configuration.md").read_text()
    tables = {*example["remotes"], "daemon", "watch", "remotes", "cache"}
    assert {k for k in _keys(example) - tables if f"`{k}`" not in text} == set()


def _masked(text: str) -> list[str]:
    """Return the lines without what differs from run to run: ages, digests, rates, padding, order of parallel files."""
    text = re.sub(r"\b[0-9a-f]{12,64}\b", "HEX", text)
    text = re.sub(r"\d{4}-\d\d-\d\dT[\d:]+Z", "TIME", _AGES.sub("AGE", text))
    text = re.sub(r"in \d[\d.]* m?s\b|\d[\d.]* m?s\b|\d[\d.]* [kMG]B/s", "RATE", text)
    return sorted(re.sub(r"\s{2,}", "  ", line).rstrip() for line in text.splitlines())


def test_the_session_of_the_readme_is_real(tmp_path: Path) -> None:
    """The commands on the README's first screen run in a fresh folder and print what is shown there."""
    match = _SESSION.search((ROOT / "README.md").read_text())
    assert match, "the README has no session"
    run = tmp_path / "runs" / "medical" / "sft-0412"
    builders.trainer_checkpoint(run / "checkpoint-280", step=280, seed=1)
    (run / "weighbridge.yaml").write_text("owner: lw\n")
    world = dict(os.environ, COLUMNS="110", WEIGHBRIDGE_CONFIG=str(tmp_path / "weighbridge.toml"), LC_ALL="C.UTF-8")
    world["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{world['PATH']}"
    begin = ["registry", "init", "--remote", str(tmp_path / "remote")]
    subprocess.run(begin, cwd=tmp_path, env=world, check=True, capture_output=True)
    printed: list[str] = []
    for line in match[1].splitlines():
        if line.startswith("$ "):
            done = subprocess.run(
                shlex.split(line[2:]),
                cwd=tmp_path,
                env=world,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            printed += [line, *done.stdout.splitlines()]
    shown = "\n".join(printed).replace(f"{tmp_path}/remote", "/srv/weighbridge")
    assert _masked(shown) == _masked(match[1])
