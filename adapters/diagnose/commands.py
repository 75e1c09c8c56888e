"""The commands that mend: each one exists in this product, in a shell, or is a few words of Python.

Words in capitals are for the reader to fill in. Nothing here overwrites weights: they are written anew beside.
"""

import os
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

_ENDS: Final = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".engine", ".plan", ".trt")
_CACHED = re.compile(
    r"models--(?P<owner>[\w.-]+?)--(?P<name>[\w.-]+?)/snapshots/(?P<commit>[0-9a-f]{7,40})/(?P<inner>.*)", re.DOTALL
)
_COPY: Final = (
    "[shutil.copy(f, d) for f in s.iterdir() "
    "if f.is_file() and f.suffix in {'.json', '.jinja', '.model', '.txt', '.md'}]"
)


class Fill(str):
    """A number that the reader has to fill in: it stands bare, so that Python stops where it was forgotten."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def quoted(path: Path | str) -> str:
    """Return a path as a shell takes it; one that begins with a dash is no option."""
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


def python(code: str) -> str:
    """Return a line of Python as a command, in the quotes that are easiest to read."""
    plain = not any(character in code for character in '"$`\\!')
    return f'python3 -c "{code}"' if plain else f"python3 -c {shlex.quote(code)}"


def beside(path: Path, ending: str) -> Path:
    """Return a new name beside a folder or file; of `.` and `..` the real name is taken."""
    whole = path if path.name not in {"", ".."} else Path(os.path.realpath(path))
    stem = next((whole.name.removesuffix(end) for end in _ENDS if whole.name.endswith(end)), whole.name)
    return whole.with_name(f"{stem}-{ending}")


def inspect(path: Path | str) -> str:
    """Look again, file by file."""
    return f"registry inspect {quoted(path)} -o wide"


def extract(source: Path, *options: str, ending: str = "safetensors") -> str:
    """Take the weights out of a checkpoint into a new folder."""
    more = "".join(f" {shlex.quote(one)}" for one in options)
    return f"registry extract {quoted(source)} --to {quoted(beside(source, ending))}{more}"


def merge(adapter: Path, base: Path | str | None) -> str:
    """Merge an adapter into its base."""
    named = "BASE" if base is None else quoted(base)
    return f"registry merge {quoted(adapter)} --base {named} --to {quoted(beside(adapter, 'merged'))}"


class Origin(NamedTuple):
    """Where a file of a Hub cache comes from: the repository, the commit, and the path in it (`` for all of it)."""

    repo: str
    commit: str
    inner: str


def origin(path: Path) -> Origin | None:
    """Return what a path says of the Hub cache it lies in, None outside of one."""
    match = _CACHED.search(f"{path.absolute()}/")
    if match is None:
        return None
    return Origin(f"{match['owner']}/{match['name']}", match["commit"], match["inner"].strip("/"))


def fetch(path: Path, *, folder: bool = False) -> str:
    """Fetch a file or a folder again: from the Hub where the path says which repository, else from its writer.

    What is a folder here is fetched as one; `folder` says so of one that is not here.
    """
    whole = folder or path.is_dir()
    known = origin(path)
    if known is not None:
        wanted = f"--include {quoted(f'{known.inner}/*')}" if whole and known.inner else quoted(known.inner)
        asked = f"hf download {shlex.quote(known.repo)}" + (f" {wanted}" if known.inner else "")
        return f"{asked} --revision {known.commit} --force-download"
    if whole:
        return f"rsync -r --checksum --partial HOST:FOLDER/ {quoted(path)}/"
    return f"rsync --checksum --partial HOST:FOLDER/{quoted(path.name)} {quoted(path)}"


def set_fields(path: Path, fields: Mapping[str, Any]) -> str:
    """Set fields of a JSON file."""
    return python(
        f"import json, pathlib; p = pathlib.Path({str(path)!r}); c = json.loads(p.read_text()); "
        f"c.update({dict(fields)!r}); p.write_text(json.dumps(c, indent=2))"
    )


def drop_fields(path: Path, fields: Iterable[str]) -> str:
    """Take fields out of a JSON file."""
    return python(
        f"import json, pathlib; p = pathlib.Path({str(path)!r}); c = json.loads(p.read_text()); "
        f"[c.pop(k, None) for k in {sorted(fields)!r}]; p.write_text(json.dumps(c, indent=2))"
    )


def rename_keys(folder: Path, new: str) -> str:
    """Write the safetensors of a folder anew with other names; `new` is Python that makes the new name out of `k`."""
    target = beside(folder, "renamed")
    return python(
        "import json, pathlib, shutil; from safetensors.torch import load_file, save_file; "
        f"s, d = pathlib.Path({str(folder)!r}), pathlib.Path({str(target)!r}); d.mkdir(); {_COPY}; "
        f"n = lambda k: {new}; "
        "[save_file({n(k): v for k, v in load_file(f).items()}, d / f.name, {'format': 'pt'}) "
        "for f in s.glob('*.safetensors')]; "
        "[f.write_text(json.dumps({**(x := json.loads(f.read_text())), "
        "'weight_map': {n(k): v for k, v in x['weight_map'].items()}})) for f in d.glob('*.index.json')]"
    )


def rebuild_index(folder: Path, files: Iterable[str], index: str) -> str:
    """Write the index of some shards from their headers."""
    return python(
        f"import json, pathlib; d = pathlib.Path({str(folder)!r}); "
        "h = lambda f: ((b := f.open('rb')), json.loads(b.read(int.from_bytes(b.read(8), 'little'))), b.close())[1]; "
        f"t = [(k, n, v) for n in {sorted(files)!r} for k, v in h(d / n).items() if k != '__metadata__']; "
        f"(d / {index!r}).write_text(json.dumps({{'metadata': {{'total_size': "
        "sum(v['data_offsets'][1] - v['data_offsets'][0] for _, _, v in t)}, 'weight_map': {k: n for k, n, _ "
        "in t}}, indent=2))"
    )


def mark_format(path: Path) -> str:
    """Write a safetensors file anew with the mark that says which framework its tensors are of."""
    target = path.with_name(path.name.removesuffix(".safetensors") + ".marked.safetensors")
    return python(
        "from safetensors.torch import load_file, save_file; "
        f"save_file(load_file({str(path)!r}), {str(target)!r}, {{'format': 'pt'}})"
    )


def move(source: Path, target: Path) -> str:
    """Give a file another name, never over one that is there."""
    return f"mv -n {quoted(source)} {quoted(target)}"


def copy(source: Path, target: Path) -> str:
    """Copy a file, never over one that is there."""
    return f"cp -n {quoted(source)} {quoted(target)}"


def remove(paths: Iterable[Path]) -> str:
    """Delete files, each one confirmed."""
    return "rm -i " + " ".join(quoted(path) for path in paths)


def install(*packages: str) -> str:
    """Install Python packages."""
    return "pip install -U " + " ".join(shlex.quote(package) for package in packages)


def serve_adapter(folder: Path, base: str | None, rank: int) -> str:
    """Serve an adapter on its base with room for its rank."""
    allowed = next((size for size in (8, 16, 32, 64, 128, 256, 320, 512) if size >= rank), rank)
    named = "BASE" if base is None else shlex.quote(base)
    return (
        f"vllm serve {named} --enable-lora --max-lora-rank {allowed} --lora-modules {shlex.quote(f'adapter={folder}')}"
    )
