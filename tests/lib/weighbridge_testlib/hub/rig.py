"""What tests of the Hub need besides the server: fresh processes, so that the client reads its environment anew."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from weighbridge.registry.flow.marker import open_registry
from weighbridge.registry.flow.publish import publish as flow_publish
from weighbridge.registry.remotes.hub.child import GROUP
from weighbridge.registry.remotes.hub.client import Patience
from weighbridge.registry.remotes.hub.preflight import Limits
from weighbridge.registry.remotes.hub.remote import HubRemote
from weighbridge.registry.types import Receipt
from weighbridge_testlib.hub.server import TestHub
from weighbridge_testlib.hub.store import Entry, blob, git_oid, pointer
from weighbridge_testlib.publishing import OWNER, candidate, rendered

LFS: Final = {"HF_HUB_DISABLE_XET": "1"}
XET: Final[dict[str, str]] = {}
TRANSPORTS: Final = {"lfs": LFS, "child": LFS, "xet": XET}
"""Small LFS uploads are made in this process; `child` has them made by a child process as large ones are."""


def environ(hub: TestHub, home: Path, *, token: str | None = "hf_ann", **more: str) -> dict[str, str]:
    """Return the environment of a user of this Hub, with a home of its own and no way to any other Hub."""
    found = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    found |= {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home / "hf"),
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p.endswith("tests/lib")),
    }
    if token is not None:
        found["HF_TOKEN"] = token
    return found | more


def remote(
    hub: TestHub,
    home: Path,
    *,
    token: str | None = "hf_ann",
    way: str = "lfs",
    private: bool = True,
    patience: Patience | None = None,
    limits: Limits | None = None,
) -> HubRemote:
    """Return the organisation acme of this Hub as a remote, as a user with a home of its own sees it."""
    env = environ(hub, home, token=token, **TRANSPORTS[way])
    inline = 0 if way == "child" else GROUP
    return HubRemote(
        "acme",
        environ=env,
        private=private,
        patience=patience,
        limits=limits,
        inline=inline,
        sleep=lambda _: None,
    )


def publish(remote: HubRemote, folder: Path, name: str = "medical-sft", **more: Any) -> Receipt:
    """Publish a tiny adapter, another one for another seed; the files lie in `folder`."""
    again, adopt, render = more.pop("again", False), more.pop("adopt", False), more.pop("render", rendered)
    made = candidate(remote, folder, name, **more)
    registry = open_registry(remote, create=True)
    return flow_publish(remote, "hub", registry, made, OWNER, render=render, again=again, adopt=adopt)


def model(hub: TestHub, repo: str, folder: Path) -> str:
    """Put the files of a folder into a new or known repository of acme, as somebody else uploaded them.

    Returns the commit.
    """
    store = hub.store
    owner, _, name = repo.partition("/")
    known = store.repos.get(("model", repo.lower()))
    held = known or store.create("model", owner, name, store.who("hf_ann"))
    tree = {}
    for path in sorted(one for one in folder.iterdir() if one.is_file()):
        data = path.read_bytes()
        if store.mode(path.name, len(data), data[:64]) == "lfs":
            digest = hashlib.sha256(data).hexdigest()
            store.put_object(held, data, digest)
            tree[path.name] = Entry(len(data), git_oid(pointer(digest, len(data))), sha256=digest)
        else:
            tree[path.name] = blob(data)
    made = store.write(held, held.branches["main"], tree, "a model", message="", author="ann")
    held.branches["main"] = made.oid
    return made.oid


def run(program: str, env: Mapping[str, str], *args: str, timeout: float = 60) -> Any:
    """Run a Python program in a process of its own; what it prints last is JSON and is returned."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *args],
        env=dict(env),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def hf(env: Mapping[str, str], *args: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run the real `hf` command."""
    command = Path(sys.executable).with_name("hf")
    return subprocess.run(
        [str(command), *args], env=dict(env), capture_output=True, text=True, timeout=timeout, check=False
    )
