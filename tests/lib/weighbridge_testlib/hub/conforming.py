"""`VersionConformance` on a Hub, as the user whose environment this is; run by live.py, in a process of its own.

HF_ENDPOINT, HF_TOKEN and HF_HUB_DISABLE_XET are those of every user; CONFORMING_OWNER is the organisation, and the
repositories begin with CONFORMING_PREFIX.
"""

import os
import secrets
from pathlib import Path

from weighbridge.registry.remotes.hub.remote import HubRemote
from weighbridge.registry.remotes.protocol import Remote
from weighbridge_testlib.version_conformance import VersionConformance


class TestHub(VersionConformance):
    """The flow finds on a Hub what it needs of every remote."""

    def open(self, place: Path) -> Remote:
        """Open the organisation; all places are one there, and names keep the tests apart."""
        del place
        return HubRemote(os.environ["CONFORMING_OWNER"])

    def name(self) -> str:
        """Return a name that nobody has yet."""
        return f"{os.environ['CONFORMING_PREFIX']}{secrets.token_hex(4)}"
