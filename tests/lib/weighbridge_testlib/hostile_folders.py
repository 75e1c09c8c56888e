"""Folders that attack whoever looks into them: names, links, pipes, YAML and JSON bombs, paths that leave, sheer size.

`folders` writes one folder per attack. Like the files of hostile.py they only ever make the canary, if anything runs.
"""

import json
import os
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

from weighbridge_testlib import containers as c
from weighbridge_testlib.builders import (
    index_of,
    llama_config,
    llama_model,
    llama_tensors,
    lora_adapter,
    lora_config,
    safetensors_bytes,
    shard_names,
    split,
    trainer_checkpoint,
    write_json,
)
from weighbridge_testlib.containers import call, name

Make = Callable[[Path], object]
HUGE: Final = 1 << 40
"""Bytes of files that are all hole: nobody may read them whole."""

_PATHS: Final = {
    "climbs": "../../../etc/passwd",
    "absolute": "/etc/passwd",
    "climbs-inside": "a/../../../etc/passwd",
    "backslashes": "..\\..\\etc\\passwd",
    "drive": "C:\\Windows\\win.ini",
    "address": "file:///etc/passwd",
    "nul": "model\0.safetensors",
    "empty": "",
    "dots": ".",
    "folder": "shard/",
    "device": "/dev/zero",
    "long": "x" * 5000 + ".safetensors",
    "deep": "d/" * 3000 + "x.safetensors",
    "escape": "\x1b]0;owned\x07\x1b[2J.safetensors",
    "lines": "a\n  block  fake-finding  x.safetensors",
    "turned": "\u202esrotsnetefas.ledom",
    "surrogate": "\ud800.safetensors",
    "yaml": "--- !!python/object/apply:os.system ['x'] # .safetensors",
    "database": "'; DROP TABLE jobs; --.safetensors",
    "format": "%s%n{0.__class__}{{7*7}}${HOME}$(touch x).safetensors",
}
"""What an index may name as a shard."""

_NAMES: Final = {
    "escape": b"\x1b[2J\x1b]0;owned\x07.safetensors",
    "lines": b"a\nb\r\n  block  fake-finding.safetensors",
    "no-utf-8": b"\xff\xfe\x80.safetensors",
    "turned": "\u202esrotsnetefas.\u2066x".encode(),
    "option": b"--to",
    "shell": b"$(touch x);`touch x`|x&.safetensors",
    "yaml": b"- &a [*a, {: !!python name:os.system }] # .json",
    "database": b"'; DROP TABLE jobs; --.safetensors",
    "jinja": b"{{ ''.__class__.__mro__ }}{% raw %}.jinja",
    "format": b"%s%n%x{0.__class__}.safetensors",
    "long": b"x" * 243 + b".safetensors",
    "space": b" . . .safetensors ",
    "zero-width": "model\u200b\u2060.safetensors".encode(),
    "deletes": b"\x7f\x08\x08\x08.safetensors",
    "c1": "\x9b2J\x85.safetensors".encode(),
}
"""What a file or folder may be called."""


_STATE: Final = "trainer_state.json"
_INDEX: Final = "model.safetensors.index.json"


class Attack(NamedTuple):
    """One folder; `harmless` where it may be accepted, because nothing in it is taken in."""

    label: str
    make: Make
    harmless: bool = False


# --------------------------------------------------------------------------------------------------------------- parts


def deep(depth: int, opening: str = "[", closing: str = "]") -> str:
    """Return JSON that is nested so deep."""
    return opening * depth + closing * depth


def _model(folder: Path, **files: bytes | str) -> Path:
    """Write a sound model and put other files in place of some of its own; `__` in a name stands for a dot."""
    return _write(llama_model(folder), files)


def _adapter(folder: Path, **files: bytes | str) -> Path:
    return _write(lora_adapter(folder), files)


def _write(folder: Path, files: dict[str, bytes | str]) -> Path:
    for label, body in files.items():
        raw = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else body
        (folder / label.replace("__", ".")).write_bytes(raw)
    return folder


def _sharded(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Write a model of two shards whose index somebody changed."""
    parts = list(zip(shard_names(2), split(llama_tensors(), 2), strict=True))
    index = index_of(parts)
    change(index)
    return _write(llama_model(folder, shards=2), {_INDEX: json.dumps(index)})


def _header(table: object, body: bytes = b"", declared: int | None = None) -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode("utf-8", "surrogatepass")
    return (len(text) if declared is None else declared).to_bytes(8, "little") + text + body


def _hole(path: Path) -> Path:
    with path.open("wb") as stream:
        stream.truncate(HUGE)
    return path


def _without(path: Path) -> Path:
    path.unlink()
    return path


def _folder(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def _link(path: Path, target: str | Path) -> Path:
    path.symlink_to(target)
    return path


def _empty(folder: Path, names: Iterable[str]) -> Path:
    for label in names:
        (folder / label).touch()
    return folder


def _folders(folder: Path, names: Iterable[str]) -> Path:
    for label in names:
        (folder / label).mkdir()
    return folder


def _socket(path: Path) -> Path:
    here = Path.cwd()
    with socket.socket(socket.AF_UNIX) as listening:
        os.chdir(path.parent)  # the address of a socket has room for a hundred bytes only
        try:
            listening.bind(path.name)
        finally:
            os.chdir(here)
    return path


def _entry(dtype: str, shape: object, begin: object, end: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


# -------------------------------------------------------------------------------------------------------------- attacks


def _indexes() -> list[Attack]:
    def named(value: object) -> Make:
        return lambda folder: _sharded(folder, lambda index: index["weight_map"].update({"model.norm.weight": value}))

    found = [Attack(f"index-{label}", named(value)) for label, value in _PATHS.items()]
    found += [
        Attack(f"index-value-{label}", named(value))
        for label, value in {"number": 7, "list": ["a"], "nothing": None, "table": {"a": "b"}, "true": True}.items()
    ]

    def of_map(value: object) -> Make:
        return lambda folder: _sharded(folder, lambda index: index.update({"weight_map": value}))

    found += [
        Attack("index-map-list", of_map(["model.norm.weight"])),
        Attack("index-map-empty", of_map({})),
        Attack("index-thousands-of-files", of_map({f"t{i}": f"s{i}.safetensors" for i in range(100_000)})),
        Attack("index-thousands-of-climbs", of_map({f"t{i}": f"../{i}" for i in range(100_000)})),
        Attack("index-total-text", lambda f: _sharded(f, lambda i: i["metadata"].update(total_size="1" * 5000)), True),
        Attack("index-total-huge", lambda f: _sharded(f, lambda i: i["metadata"].update(total_size=10**4000)), True),
        Attack("index-total-infinite", lambda f: _sharded(f, lambda i: i["metadata"].update(total_size=1e999)), True),
        Attack("index-names-steer", lambda f: _sharded(f, lambda i: i["weight_map"].update({"\x1b[2J\n\u202e": "a"}))),
        Attack("index-deep", lambda f: (_sharded(f, dict), _write(f, {_INDEX: deep(200_000)}))),
        Attack("index-digits", lambda f: (
            _sharded(f, dict), _write(f, {_INDEX: '{"weight_map": ' + "9" * 1_000_000 + "}"})
        )),
        Attack("index-hole", lambda f: (_sharded(f, dict), _hole(f / "model.safetensors.index.json"))),
    ]  # fmt: skip
    return found


def _headers() -> list[Attack]:
    def only(body: bytes) -> Make:
        return lambda folder: _model(folder, model__safetensors=body)

    bodies: dict[str, bytes] = {
        "declares-everything": _header({}, declared=(1 << 64) - 1),
        "declares-a-gigabyte": _header({}, declared=1 << 30),
        "spaces": _header(b"{" + b" " * (24 << 20) + b"}"),
        "deep": _header(deep(300_000, '{"a":', "}").replace(":}", ":1}", 1).encode()),
        "deep-list": _header(b'{"a":' + deep(300_000).encode() + b"}"),
        "digits": _header(b'{"a":' + b"9" * 2_000_000 + b"}"),
        "many-empty": _header({f"t{i}": _entry("F32", [0], 0, 0) for i in range(50_000)}),
        "too-many": _header({f"{i}": 0 for i in range(210_000)}),
        "many-wrong": _header({f"{i}": _entry("F99", [1], 0, 4) for i in range(100_000)}),
        "many-over-each-other": _header({f"t{i}": _entry("F32", [1], 0, 4) for i in range(100_000)}, bytes(4)),
        "twice": _header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{}}', bytes(4)),
        "shape-overflows": _header({"a": _entry("F32", [1 << 62] * 64, 0, 4)}, bytes(4)),
        "shape-deep": _header({"a": _entry("F32", [1] * 1_000_000, 0, 4)}, bytes(4)),
        "shape-negative": _header({"a": _entry("F32", [-1, -4], 0, 16)}, bytes(16)),
        "shape-of-floats": _header({"a": _entry("F32", [1.0], 0, 4)}, bytes(4)),
        "shape-of-flags": _header({"a": _entry("F32", [True], 0, 4)}, bytes(4)),
        "offsets-negative": _header({"a": _entry("F32", [1], -4, 0)}, bytes(4)),
        "offsets-huge": _header({"a": _entry("U8", [1 << 62], 0, 1 << 62)}, bytes(4)),
        "offsets-infinite": _header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,1e999]}}', bytes(4)),
        "names-steer": _header({"\x1b]0;owned\x07\u202e\n": _entry("F32", [1], 0, 4)}, bytes(4)),
        "names-long": _header({"n" * 5_000_000: _entry("F32", [1], 0, 4)}, bytes(4)),
        "names-surrogate": _header({"\ud800": _entry("F32", [1], 0, 4)}, bytes(4)),
        "no-utf-8": _header(b'{"\xff":1}'),
        "constant": _header(b'{"a":NaN}'),
        "metadata-tables": _header({"__metadata__": {"a": {"b": 1}}}),
        "pickle-inside": c.torch_zip({"w": call(name("os", "system"), "true")}),
    }
    found = [Attack(f"safetensors-{label}", only(body)) for label, body in bodies.items()]
    notes = {"format": "pt", "ss_training_comment": "\x1b[2J\n" * 10_000, "a": "/home/lw/" * 200_000}
    found += [
        Attack("safetensors-hole", lambda f: (_model(f), _hole(f / "model.safetensors"))),
        Attack("safetensors-metadata-large", lambda f: _model(
            f, model__safetensors=safetensors_bytes(llama_tensors(), notes)
        ), True),
    ]  # fmt: skip
    return found


def _configs() -> list[Attack]:
    def changed(**fields: object) -> Make:
        return lambda folder: _model(folder, config__json=json.dumps(llama_config() | fields))

    def adapter(**fields: object) -> Make:
        return lambda folder: _adapter(folder, adapter_config__json=json.dumps(lora_config() | fields))

    long_name = "a" * 50_000 + "!"
    return [
        Attack("config-deep", lambda f: _model(f, config__json=deep(500_000))),
        Attack("config-deep-inside", lambda f: _model(f, config__json='{"a":' + deep(100_000) + "}")),
        Attack("config-digits", lambda f: _model(f, config__json='{"hidden_size":' + "9" * 1_000_000 + "}")),
        Attack("config-list", lambda f: _model(f, config__json="[1]")),
        Attack("config-hole", lambda f: (_model(f), _hole(f / "config.json"))),
        Attack("config-wide", changed(architectures=["X"] * 1_000_000), harmless=True),
        Attack("config-layers", changed(num_hidden_layers=10**15), harmless=True),
        Attack("config-layers-999", changed(num_hidden_layers=999)),
        Attack("config-vocabulary", changed(vocab_size=-(10**30))),
        Attack("config-texts", changed(vocab_size="1", hidden_size=[], num_hidden_layers={}), harmless=True),
        Attack("config-type-steers", changed(model_type="\x1b[2J\n", architectures=["\u202e\x07"]), harmless=True),
        Attack("config-code-climbs", changed(auto_map={"AutoModel": "../../evil--x.Model"}), harmless=True),
        Attack("config-code-deep", changed(auto_map={"AutoModel": ["a." * 100_000]}), harmless=True),
        Attack("config-bits-zero", changed(quantization_config={"quant_method": "gptq", "bits": 0}), harmless=True),
        Attack("config-bits-odd", changed(quantization_config={"quant_method": [], "bits": "\x1b"}), harmless=True),
        Attack("config-dtype-table", changed(torch_dtype={"a": 1}, dtype=None), harmless=True),
        Attack("config-infinite", changed(rope_theta=float("inf"), hidden_size=float("nan")), harmless=True),
        Attack("adapter-pattern-slow", adapter(target_modules="(a+)+$" + "(.*)*" * 50), harmless=True),
        Attack("adapter-pattern-slow-key", adapter(rank_pattern={"(a|a|aa)+$": 4, long_name: 8}), harmless=True),
        Attack("adapter-pattern-broken", adapter(target_modules="(((((" * 1000), harmless=True),
        Attack("adapter-patterns-many", adapter(rank_pattern={f"layer.{i}": 4 for i in range(50_000)}), harmless=True),
        Attack(
            "adapter-expressions-many", adapter(rank_pattern={f"(layer[.]){i}": 4 for i in range(9999)}), harmless=True
        ),
        Attack("adapter-rank-infinite", adapter(r=float("inf"), lora_alpha=float("nan")), harmless=True),
        Attack("adapter-rank-huge", adapter(r=10**4000), harmless=True),
        Attack("adapter-rank-negative", adapter(r=-8)),
        Attack("adapter-rank-text", adapter(r="\x1b[2J", lora_alpha={}), harmless=True),
        Attack("adapter-layers-many", adapter(layers_to_transform=list(range(1_000_000))), harmless=True),
        Attack("adapter-targets-many", adapter(target_modules=[f"m{i}" for i in range(200_000)])),
        Attack("adapter-base-steers", adapter(base_model_name_or_path="\x1b]0;owned\x07\n--- evil"), harmless=True),
        Attack("adapter-base-device", adapter(base_model_name_or_path="/dev/zero"), harmless=True),
        Attack("adapter-base-climbs", adapter(base_model_name_or_path="../" * 5000 + "etc"), harmless=True),
        Attack("adapter-deep", lambda f: _adapter(f, adapter_config__json=deep(300_000, '{"a":', "1}"))),
        Attack("adapter-type-odd", adapter(peft_type=["\x1b"] * 1000), harmless=True),
    ]  # fmt: skip


def _papers(canary: str) -> list[Attack]:
    laughs = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12))
    run = f"license: !!python/object/apply:os.mkdir ['{canary}']\n"
    fronts = {
        "laughs": laughs,
        "runs": run,
        "merges": "a: &a\n  b: 1\n" + "".join(f"c{i}:\n  <<: *a\n" for i in range(20_000)),
        "deep": "a: " + deep(20_000) + "\n",
        "deep-blocks": "".join(f"{'  ' * i}a:\n" for i in range(2000)),
        "never-ends": "license: 'mit\n" + "x" * 2_000_000,
        "numbers": "license: " + "9" * 1_000_000 + "\n",
        "binary": "license: \x00\x01\x1b[2J\n",
        "steers": 'license: "\\x1b[2J\\n"\nbase_model: "\\e]0;owned\\a"\n',
        "keys": "".join(f"k{i}: v\n" for i in range(50_000)),
        "odd-keys": "? [a, b]\n: c\n? {a: b}\n: d\n1: 2\nnull: 3\n",
        "twice": "license: mit\nlicense: apache-2.0\n" * 1000,
        "references": "a: &a [*a]\nlicense: *a\n",
        "dates": "license: 2026-99-99\nbase_model: 0x" + "f" * 5000 + "\n",
        "sexagesimal": "license: " + "1:" * 50_000 + "1\n",
    }
    found = [Attack(f"card-{label}", _carded(text), True) for label, text in fronts.items()]
    found += [Attack(f"sidecar-{label}", _noted(text), True) for label, text in fronts.items()]
    trainer = {"log_history": [{"loss": 0.5, "step": i} for i in range(100_000)], "global_step": 10}
    found += [
        Attack("card-hole", lambda f: (_adapter(f), _hole(f / "README.md")), True),
        Attack("card-large", lambda f: _adapter(f, README__md="word " * 8_000_000), True),
        Attack("card-slow", lambda f: _adapter(f, README__md="license " * 20_000 + "/" * 200_000 + " " * 9999), True),
        Attack("licence-hole", lambda f: (_adapter(f), _hole(f / "LICENSE")), True),
        Attack("state-deep", lambda f: (trainer_checkpoint(f, step=10), _write(f, {_STATE: deep(300_000)})), True),
        Attack("state-long", lambda f: (trainer_checkpoint(f, step=10), write_json(f / _STATE, trainer)), True),
        Attack("state-step", lambda f: trainer_checkpoint(f, step=10, state={"global_step": 10**400}), True),
        Attack("state-best-climbs", lambda f: trainer_checkpoint(
            f, step=10, state={"best_model_checkpoint": "../" * 3000 + "etc/\x1b[2J"}
        ), True),
        Attack("state-hole", lambda f: (trainer_checkpoint(f, step=10), _hole(f / _STATE)), True),
        Attack("tokenizer-deep", lambda f: _model(f, tokenizer__json=deep(300_000))),
        Attack("tokenizer-ids", lambda f: _model(f, tokenizer__json=json.dumps(
            {"model": {"vocab": {"a": 10**300, "b": -5, "c": "x"}}, "added_tokens": [{"id": 1e300}, 7, None]}
        )), True),
        Attack("tokenizer-hole", lambda f: (_model(f), _hole(f / "tokenizer.json"))),
        Attack("vocabulary-hole", lambda f: (_model(f), _hole(f / "vocab.txt"))),
        Attack("template-hole", lambda f: (_model(f), _hole(f / "chat_template.jinja"))),
        Attack("template-large", lambda f: _model(f, chat_template__jinja="{% if a %}" * 3_000_000), True),
        Attack("latest-hole", lambda f: (
            trainer_checkpoint(f, step=10, deepspeed_ranks=2), _hole(f / "latest")
        ), True),
        Attack("latest-climbs", lambda f: (
            trainer_checkpoint(f, step=10, deepspeed_ranks=2), _write(f, {"latest": "../../../etc\x1b[2J"})
        ), True),
    ]  # fmt: skip
    return found


def _places(outside: Path) -> list[Attack]:
    def linked(label: str, target: str | Path) -> Make:
        def make(folder: Path) -> None:
            _model(folder)
            (folder / label).unlink(missing_ok=True)
            (folder / label).symlink_to(target)

        return make

    def piped(label: str) -> Make:
        def make(folder: Path) -> None:
            trainer_checkpoint(folder, step=10, adapter=False, deepspeed_ranks=2)
            (folder / label).unlink(missing_ok=True)
            os.mkfifo(folder / label)

        return make

    found = [
        Attack(f"pipe-{label}", piped(label), label not in {"model.safetensors", "config.json"})
        for label in (
            "model.safetensors", "config.json", "README.md", "LICENSE", "weighbridge.yaml", _STATE, "latest",
            "tokenizer.json", "training_args.bin", "generation_config.json", "adapter_config.json", "pytorch_model.bin",
            "quantize_config.json", "modules.json", "scheduler.pt", "chat_template.jinja", ".metadata",
        )
    ]  # fmt: skip
    found += [
        Attack("socket", lambda f: (_model(f), _without(f / "model.safetensors"), _socket(f / "model.safetensors"))),
        Attack("link-weights-passwd", linked("model.safetensors", "/etc/passwd")),
        Attack("link-weights-zero", linked("model.safetensors", "/dev/zero")),
        Attack("link-weights-random", linked("model.safetensors", "/dev/urandom")),
        Attack("link-weights-memory", linked("model.safetensors", "/proc/self/mem")),
        Attack("link-config-passwd", linked("config.json", "/etc/passwd")),
        Attack("link-config-zero", linked("config.json", "/dev/zero")),
        Attack("link-config-tty", linked("config.json", "/dev/tty")),
        Attack("link-config-environment", linked("config.json", "/proc/self/environ")),
        Attack("link-card-zero", linked("README.md", "/dev/zero"), True),
        Attack("link-sidecar-zero", linked("weighbridge.yaml", "/dev/zero"), True),
        Attack("link-licence-zero", linked("LICENSE", "/dev/zero"), True),
        Attack("link-itself", linked("model.safetensors", "model.safetensors")),
        Attack("link-each-other", lambda f: (
            _model(f), _without(f / "model.safetensors"), _link(f / "a", "b"), _link(f / "b", "a"),
            _link(f / "model.safetensors", "a"),
        )),
        Attack("link-up", linked("up", ".."), True),
        Attack("link-root", linked("root", "/"), True),
        Attack("link-kernel", linked("proc", "/proc"), True),
        Attack("link-itself-folder", linked("here", "."), True),
        Attack("link-outside", lambda f: (_model(f), _link(f / "more", outside)), True),
        Attack("folder-as-weights", lambda f: (
            _model(f), _without(f / "model.safetensors"), _folder(f / "model.safetensors")
        )),
        Attack("folder-as-config", lambda f: (_model(f), _without(f / "config.json"), _folder(f / "config.json"))),
        Attack("folder-as-metadata", lambda f: _folder(f / ".metadata")),
        Attack("many-files", lambda f: (_model(f), _empty(f, (f"{i}.txt" for i in range(3000)))), True),
        Attack("many-weights", lambda f: (_model(f), _empty(f, (f"{i}.safetensors" for i in range(1000)))), True),
        Attack("many-folders", lambda f: (_model(f), _folders(f, map(str, range(1500)))), True),
        Attack("many-checkpoints", lambda f: (
            _model(f), _folders(f, (f"checkpoint-{i}" for i in range(2000)))
        ), True),
        Attack("very-deep", lambda f: (_model(f), _nested(f, 300)), True),
    ]  # fmt: skip
    for label, raw in _NAMES.items():
        found += [
            Attack(f"name-{label}", _named(raw), True),
            Attack(f"folder-name-{label}", _named_below(raw), True),
        ]
    return found


def _nested(folder: Path, depth: int) -> Path:
    here = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("deeper-and-deeper", dir_fd=here)
        inner = os.open("deeper-and-deeper", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    return folder


def _touch(folder: Path, raw: bytes, body: bytes) -> Path:
    with open(os.path.join(os.fsencode(folder), raw), "wb") as stream:  # noqa: PTH118, PTH123 - a name of any bytes
        stream.write(body)
    return folder


def _carded(text: str) -> Make:
    return lambda folder: _adapter(folder, README__md=f"---\n{text}---\n# x\n")


def _noted(text: str) -> Make:
    return lambda folder: _adapter(folder, weighbridge__yaml=text)


def _named(raw: bytes) -> Make:
    return lambda folder: _touch(_model(folder), raw, b"{}")


def _named_below(raw: bytes) -> Make:
    return lambda folder: _adapter(_below(_folder(folder), raw))


def _below(folder: Path, raw: bytes) -> Path:
    path = folder / os.fsdecode(raw)
    path.mkdir()
    return path


_DEAR: Final = frozenset(
    (
        "thousands", "many", "digits", "spaces", "deep", "too-many", "shape-deep", "names-long", "wide", "large",
        "never", "metadata-large", "state-long", "numbers", "keys", "merges", "laughs", "slow", "long",
    )
)  # fmt: skip
"""Words of labels whose attack is sheer size: they are made for the proof, not for every run of the tests."""


def folders(home: Path, canary: Path, *, light: bool = False, only: tuple[str, ...] = ("",)) -> list[Attack]:
    """Write every attack below `home` as a folder of its own, or those that are quick to make; return what was written.

    `only` are beginnings of labels. Besides `home` a folder is written that nothing may be taken from.
    """
    outside = home.parent / "outside"
    outside.mkdir(parents=True, exist_ok=True)
    (outside / "secret.safetensors").write_bytes(b"not yours")
    attacks = [*_indexes(), *_headers(), *_configs(), *_papers(str(canary)), *_places(outside)]
    if light:
        attacks = [attack for attack in attacks if not any(word in attack.label for word in _DEAR)]
    attacks = [attack for attack in attacks if attack.label.startswith(only)]
    for attack in attacks:
        attack.make(home / attack.label)
    return attacks
