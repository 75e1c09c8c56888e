"""What holds for every test: no stray environment, no network beyond this machine, builders with readable asserts."""

import os
from pathlib import Path

import pytest

pytest.register_assert_rewrite("weighbridge_testlib")

_LEAKY = ("WEIGHBRIDGE_", "HF_", "AWS_", "XDG_")


@pytest.fixture(autouse=True)
def _own_world(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Give each test its own home, so that no setting of the person who runs it can change the result."""
    for name in list(os.environ):
        if name.startswith(_LEAKY) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(_private(home / "runtime")))
    monkeypatch.setenv("TZ", "UTC")


def _private(folder: Path) -> Path:
    folder.mkdir(mode=0o700)
    return folder
