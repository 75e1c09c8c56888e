"""Small files that lie in folders of people: pipes are never waited for, and no nesting is a bug."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weighbridge.adapters import downloads, license, license_text, parents  # noqa: A004 - the module is about licences
from weighbridge.adapters.merge import preview
from weighbridge.registry import disk
from weighbridge.registry.flow import place
from weighbridge_testlib import builders

CACHED = "models--acme--base"

READ: dict[str, tuple[str, Callable[[Path], Any], Any]] = {
    "a manifest": ("manifest.json", place.ours, None),
    "a selection": (place.PARTIAL, place.selection, set()),
    "an unfinished pull": (place.UNFINISHED, lambda folder: place.look(folder).manifest, None),
    "a record of a download": (
        f"{downloads.RECORDS}/a.json.metadata",
        lambda folder: downloads.record(folder, "a.json"),
        None,
    ),
    "a recipe": (parents.RECIPES[0], parents.merge, None),
    "a download's source": (parents.DOWNLOAD, parents.download, None),
    "a branch of the Hub cache": (f"{CACHED}/refs/main", lambda f: license.cache_folder("acme/base", None, [f]), None),
}


@pytest.mark.parametrize("what", ["pipe", "deep"])
@pytest.mark.parametrize("which", READ)
def test_an_odd_file_tells_nothing(tmp_path: Path, which: str, what: str) -> None:
    """A pipe, or JSON deeper than any parser goes, is no file of its kind; nothing waits and nothing is raised."""
    name, read, nothing = READ[which]
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / CACHED / "snapshots").mkdir(parents=True, exist_ok=True)
    if what == "pipe":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).write_text('{"a":' * 100_000)
    assert read(tmp_path) == nothing


def test_a_small_file_is_read_within_its_bound(tmp_path: Path) -> None:
    """Up to the limit a regular file is read; longer ones and links are refused."""
    (tmp_path / "file").write_bytes(b"abcd")
    (tmp_path / "link").symlink_to("file")
    assert disk.read_small(tmp_path / "file", 4) == b"abcd"
    for name, limit in (("file", 3), ("link", 4)):
        with pytest.raises(OSError, match=name):
            disk.read_small(tmp_path / name, limit)


def test_a_circular_link_hides_nothing_else(tmp_path: Path) -> None:
    """A licence beside a link that leads back to itself is found; weights that are one refuse the merge."""
    adapter = builders.lora_adapter(tmp_path / "adapter")
    (adapter / "LICENSE").symlink_to("LICENSE")
    (adapter / "LICENSE.txt").write_text("MIT License\n")
    assert [path.name for path in license.license_files(adapter)] == ["LICENSE.txt"]
    (adapter / "adapter_model.safetensors").unlink()
    (adapter / "adapter_model.safetensors").symlink_to("adapter_model.safetensors")
    seen = preview.look([adapter], builders.llama_model(tmp_path / "base"))
    assert seen.outcome == "refuse"
    assert seen.findings[0].code == "link-dangling"


@pytest.mark.parametrize("piece", ["[", "[](", "<a", "]("])
def test_a_line_of_brackets_is_read_to_its_end(piece: str) -> None:
    """A card with a line of markup that never closes is read like any other, in time that grows with its length."""
    body = piece * 100_000 + "\nThis model is released under the MIT license.\n"
    assert [(one.line, one.name.id) for one in license_text.statements(body)] == [(2, "mit")]
