"""What `registry push` advises can be pasted into a shell; what its copy finds in a folder is what it would find."""

import os
import shlex
from pathlib import Path

import pytest

from weighbridge.registry.cli.push import push
from weighbridge.registry.cli.wish import Wish
from weighbridge_testlib.builders import lora_adapter
from weighbridge_testlib.hub.rig import run

LOOKED = """
import json, os, signal, sys, threading
from pathlib import Path
from weighbridge.registry.cli.ahead import begin
from weighbridge.registry.cli.context import remote_settings
from weighbridge.registry.cli import push
from weighbridge.registry.cli.judging import judge
from weighbridge.registry.cli.main import main
from weighbridge.registry.cli.wish import Wish
from weighbridge.registry.errors import RefusedError, describe
from weighbridge.registry.types import ModelSeen, ModelUnseen
asked, loud = [], []
threading.excepthook = loud.append
def ask(repo, revision):
    asked.append(repo)
    return ModelUnseen("nobody knows", absent=True)
chosen = remote_settings("hub", "hf://acme")
good, empty = Wish(Path(sys.argv[1]), name="sft"), Wish(Path(sys.argv[2]), name="sft")
there, nothing, cut, odd, large = [begin(wish, chosen) for wish in (good, empty, good, good, good)]
os.kill(cut._pid, signal.SIGKILL)
gate = threading.Event()
blocked = threading.Thread(target=gate.wait)
blocked.start()
refused = begin(good, chosen) is None
gate.set()
blocked.join()
for one in (there, nothing, cut):
    one.listen(ask)
for one, word in ((odd, chr(0xD800)), (large, 1 << 70)):
    one.listen(lambda repo, revision, word=word: ModelSeen(repo, "c0", card={"a": word}))
admission, name = there.found()
_, own, _ = judge(good, chosen, values=0, ask=ask)
lost = [one.found() for one in (cut, odd, large)] == [None] * 3
met = []
for look in (nothing.found, lambda: judge(empty, chosen, values=0, ask=ask)):
    try:
        look()
    except RefusedError as error:
        met.append(describe(error))
for one in (there, nothing, cut, odd, large):
    one.end()
begun = []
push.begin = lambda *given: begun.append(begin(*given)) or begun[-1]
code = main(["push", sys.argv[1], "--name", "sft", "--remote", "hf://no/such/place"])
try:
    left = os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    left = None
ended = [code, begun[0] is not None, left, begun[0]._line.closed]
print(json.dumps([name, len(admission.files), admission == own, lost, refused, asked, len(loud), ended, met]))
"""


@pytest.mark.parametrize(
    "wish",
    [
        Wish(Path("runs/sft/checkpoint-280")),
        Wish(Path("my runs/it's $HOME"), name="sft", kind="adapter", ema="prefer", share=True, remote="hub"),
        Wish(Path("-rf"), allowed=(("license-unknown", 'asked "legal"'), ("base-not-on-hub", 'asked "legal"'))),
        Wish(Path("日本"), again=True, adopt=True, config="/etc/weigh bridge.toml", remote="hf://acme"),
    ],
    ids=["plain", "quoted", "dash", "all"],
)
def test_the_whole_command_says_the_same_again(wish: Wish) -> None:
    """Read as a shell and the command line read it, it asks for what was asked for."""
    program, command, *words = shlex.split(wish.command())
    params = push.make_context("push", words).params
    assert (program, command) == ("registry", "push")
    assert os.path.normpath(params["path"]) == str(wish.path)
    assert (params["codes"], params["reason"]) == (
        tuple(code for code, _ in wish.allowed),
        wish.allowed[0][1] if wish.allowed else None,
    )
    told = {field: params[field] for field in ("name", "kind", "ema", "share", "again", "adopt", "remote", "config")}
    assert told == {field: getattr(wish, field) for field in told}


def test_a_copy_finds_what_the_command_would_find(tmp_path: Path) -> None:
    """It asks about the base through the command, and hands over what it refuses.

    One that was ended, could not begin, or was told what cannot be told gives nothing, quietly; none outlives a command
    whose remote cannot be opened.
    """
    lora_adapter(tmp_path / "good", seed=1)
    (tmp_path / "empty").mkdir()
    found = run(LOOKED, os.environ, str(tmp_path / "good"), str(tmp_path / "empty"))
    name, files, same, lost, refused, asked, loud, ended, met = found
    assert (name, same, lost, refused) == ("sft", True, True, True)
    assert files > 1
    assert len(asked) == 2
    assert loud == 0
    assert ended == [2, True, None, True]
    assert met[0] == met[1]
    assert "nothing that can be published" in met[0]["message"]
