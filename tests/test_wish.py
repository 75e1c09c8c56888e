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
from weighbridge.registry.cli.judging import judge
from weighbridge.registry.cli.wish import Wish
from weighbridge.registry.types import ModelUnseen
asked = []
def ask(repo, revision):
    asked.append(repo)
    return ModelUnseen("nobody knows", absent=True)
chosen = remote_settings("hub", "hf://acme")
good, empty = Wish(Path(sys.argv[1]), name="sft"), Wish(Path(sys.argv[2]), name="sft")
there, nothing, cut = begin(good, chosen), begin(empty, chosen), begin(good, chosen)
os.kill(cut._pid, signal.SIGKILL)
gate = threading.Event()
threading.Thread(target=gate.wait).start()
refused = begin(good, chosen) is None
gate.set()
for one in (there, nothing, cut):
    one.listen(ask)
admission, name = there.found()
_, own, _ = judge(good, chosen, values=0, ask=ask)
lost = [nothing.found(), cut.found()] == [None, None]
there.end(), nothing.end(), cut.end()
print(json.dumps([name, len(admission.files), admission == own, lost, refused, asked]))
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
    """It asks about the base through the command; a copy that met an error, was ended or could not begin gives none."""
    lora_adapter(tmp_path / "good", seed=1)
    (tmp_path / "empty").mkdir()
    found = run(LOOKED, os.environ, str(tmp_path / "good"), str(tmp_path / "empty"))
    name, files, same, lost, refused, asked = found
    assert (name, same, lost, refused) == ("sft", True, True, True)
    assert files > 1
    assert len(asked) == 2
