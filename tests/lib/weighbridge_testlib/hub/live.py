"""The remote against a real Hub, on throw-away repositories of your own: `make test-hub-live ORG=you`. Not part of CI.

It makes `weighbridge-live-<random>` under the organisation or user, private, goes through a publisher's and a reader's
day with it in both transports, and deletes it. HF_TOKEN needs write access; HF_ENDPOINT chooses another Hub.
"""

import argparse
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from weighbridge.registry import errors, layout
from weighbridge.registry.catalog import Catalog
from weighbridge.registry.flow import sync, tags, withdraw
from weighbridge.registry.flow.marker import open_registry
from weighbridge.registry.flow.publish import publish as flow_publish
from weighbridge.registry.flow.pull import pull
from weighbridge.registry.flow.resolve import resolve
from weighbridge.registry.remotes.hub.remote import HubRemote
from weighbridge_testlib.publishing import OWNER, candidate, rendered


def day(remote: HubRemote, name: str, place: Path, say: Callable[[str], None]) -> None:
    """Publish, publish again, tag, list, pull, withdraw; raises AssertionError where something is not as it must be."""
    registry = open_registry(remote, create=True)
    bundle = {
        "adapter_config.json": b'{"peft_type":"LORA"}\n',
        "adapter_model.safetensors": secrets.token_bytes(300_000),
        "tokenizer/tokenizer.json": b"{}",
    }
    first = candidate(remote, place / "1", name, files=bundle)
    receipt = flow_publish(remote, "live", registry, first, OWNER, render=rendered)
    assert (receipt.n, receipt.joined) == (1, False), receipt
    say(f"published v1, {receipt.verified}, {receipt.location}")
    again = candidate(remote, place / "2", name, files=bundle)
    assert flow_publish(remote, "live", registry, again, OWNER, render=rendered).joined
    say("the same bytes kept their number")
    other = candidate(
        remote, place / "3", name, files=bundle | {"adapter_config.json": b'{"peft_type":"LORA","r":8}\n'}
    )
    assert flow_publish(remote, "live", registry, other, OWNER, render=rendered).n == 2
    tags.move(remote, registry, name, "prod", 1, "live")
    say("published v2, tagged v1 as prod")
    catalog = Catalog.open(None, registry.registry, durable=False)
    sync.sync(remote, catalog)
    assert resolve(remote, catalog, f"{name}:prod").n == 1
    assert resolve(remote, catalog, name).n == 2
    catalog.close()
    done = pull(remote, name, 1, place / "there")
    assert all((place / "there" / path).read_bytes() == body for path, body in bundle.items())
    say(f"listed, resolved and pulled {done.fetched} bytes")
    tags.move(remote, registry, name, "prod", None, "live")
    withdraw.withdraw(remote, registry, name, 1, who="live", why="the test is over")
    try:
        pull(remote, name, 1, place / "gone")
    except errors.WithdrawnError:
        say("withdrew v1, and it is refused")
    else:
        raise AssertionError("a withdrawn version was pulled")
    assert remote.read(layout.claim(name, 2))


def main() -> int:
    """Run both transports; 0 when all of it held."""
    parser = argparse.ArgumentParser(prog="make test-hub-live", description=__doc__)
    parser.add_argument("org", help="the organisation or user that the throw-away repository is made under")
    given = parser.parse_args()
    for way in ("lfs", "xet"):
        environ = {key: value for key, value in os.environ.items() if key != "HF_HUB_DISABLE_XET"}
        environ |= {"HF_HUB_DISABLE_XET": "1"} if way == "lfs" else {}
        remote = HubRemote(given.org, environ=environ)
        name = f"weighbridge-live-{secrets.token_hex(4)}"
        began = time.monotonic()

        def say(words: str, way: str = way, began: float = began) -> None:
            sys.stdout.write(f"{way} {time.monotonic() - began:6.1f} s  {words}\n")
            sys.stdout.flush()

        try:
            with tempfile.TemporaryDirectory() as place:
                day(remote, name, Path(place), say)
        finally:
            if remote.head(name) is not None:
                remote.line.api.delete_repo(f"{given.org}/{name}")
                say("deleted the repository")
            remote.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
