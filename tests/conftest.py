"""What holds for every test: no stray environment, no network beyond this machine, builders with readable asserts."""

import compileall
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("weighbridge_testlib")

# How fast this machine is at the moment says nothing about the product.
settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")

_LEAKY = ("WEIGHBRIDGE_", "HF_", "AWS_", "XDG_")


def pytest_configure(config: pytest.Config) -> None:
    """Compile product and test library once: the hundreds of commands that tests start would each do it anew."""
    if not hasattr(config, "workerinput"):
        for part in ("registry", "daemon", "adapters", "config", "tests/lib"):
            compileall.compile_dir(config.rootpath / part, quiet=2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take long; within both halves the random order stands."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


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


@pytest.fixture(autouse=True)
def _gradients() -> Iterator[None]:
    """Let no test that merges in this process keep the next one from training."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_grad_enabled(True)


def _private(folder: Path) -> Path:
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Run SeaweedFS for all tests of this process that need an S3 server."""
    servers = importlib.import_module("weighbridge_testlib.seaweed")
    with servers.running(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture(scope="session")
def juicefs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Run the JuiceFS gateway, an S3 server that ignores conditions and checksums."""
    servers = importlib.import_module("weighbridge_testlib.seaweed")
    with servers.juicefs(tmp_path_factory.mktemp("juicefs")) as server:
        yield server


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Run a Hub; nobody waits long for a lost commit to arrive, and no token of it goes to another host."""
    monkeypatch.setattr("weighbridge.registry.flow.commit_publish.LOOKS", (0.0, 0.05))
    with importlib.import_module("weighbridge_testlib.hub").serve() as running:
        yield running
        assert running.leaked() == []
