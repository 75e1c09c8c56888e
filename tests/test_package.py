"""What a stranger installs: one import name, the four parts below it, units and data files."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build the wheel from this checkout."""
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return zipfile.ZipFile(next(out.glob("*.whl")))


def test_only_one_name_lands_in_site_packages(wheel: zipfile.ZipFile) -> None:
    """No `config` or `adapters` of ours can shadow somebody else's package of that name."""
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {t for t in tops if not t.endswith((".dist-info", ".data"))} == {"weighbridge"}


@pytest.mark.parametrize(
    "path",
    [
        "weighbridge/registry/manifest.py",
        "weighbridge/daemon/service.py",
        "weighbridge/adapters/checkpoint.py",
        "weighbridge/config/example.toml",
        "weighbridge/py.typed",
    ],
)
def test_every_part_is_in_the_wheel(wheel: zipfile.ZipFile, path: str) -> None:
    """The four folders at the root install below the one import name, data files included."""
    assert path in wheel.namelist()


def test_units_are_installed_for_every_user(wheel: zipfile.ZipFile) -> None:
    """The systemd units land in share/, where an administrator finds them."""
    assert any(name.endswith("share/weighbridge/systemd/weighbridge.service") for name in wheel.namelist())


@pytest.mark.parametrize("part", ["registry", "daemon", "adapters", "config"])
def test_the_source_tree_holds_links_and_nothing_else(part: str) -> None:
    """An editable install reaches the folders at the root through four relative links."""
    link = ROOT / "src" / "weighbridge" / part
    assert link.is_symlink()
    assert link.resolve() == ROOT / part


def test_the_four_folders_cannot_be_imported_bare() -> None:
    """Outside the checkout `import config` and `import registry` find nothing of ours."""
    code = "import importlib.util as u, sys; sys.exit(any(u.find_spec(n) for n in ('registry', 'daemon', 'config')))"
    assert subprocess.run([sys.executable, "-c", code], cwd="/", check=False).returncode == 0


def test_no_program_hides_a_module_of_python() -> None:
    """Python puts a program's folder first, so a benchmark called `inspect` would be imported by `dataclasses`."""
    programs = [path for folder in ("benchmarks", "tests", "tests/proofs") for path in (ROOT / folder).glob("*.py")]
    assert len(programs) > 20
    assert {path.stem for path in programs} & sys.stdlib_module_names == set()
