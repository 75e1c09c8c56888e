"""A Hugging Face Hub for tests: an HTTP server on loopback that the unmodified client drives, LFS and xet alike.

    store.py     what a Hub holds: repositories, commits, objects, accounts; it refuses what the Hub refuses
    server.py    sockets, routing, the log of requests, and faults on demand (faults.py)
    api.py       /api/...: accounts, repositories, revisions, trees, commits, tags, discussions
    files.py     resolve, LFS batch and its storage host
    xet.py       the content-addressed store behind xet

Started by `with serve() as hub:` in tests, by `python -m weighbridge_testlib.hub` by hand.
"""

from weighbridge_testlib.hub.faults import Fault
from weighbridge_testlib.hub.server import TestHub, serve
from weighbridge_testlib.hub.store import Limits, Store

__all__ = ["Fault", "Limits", "Store", "TestHub", "serve"]
