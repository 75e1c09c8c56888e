"""Paths of somebody's machine: found with their field, rewritten by evidence, left to a person without."""

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weighbridge.adapters import paths
from weighbridge.adapters.paths import Evidence
from weighbridge.registry.types import Finding

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def raw(**fields: Any) -> bytes:
    """Return a JSON file as transformers writes it."""
    return (json.dumps(fields, indent=2) + "\n").encode()


@pytest.mark.parametrize(
    "value",
    [
        "/home/lw/models/x",
        "/root/autodl-tmp/models/Mistral-7B",
        "/Users/lw/x",
        "/mnt/nfs/models/x",
        "/scratch/runs/42",
        "/lustre/team/x/y",
        "/workspace/out/final",
        "/data/models/Tiny",
        "/apps/llm/weights/base",
        "C:\\Users\\lw\\models",
        "D:/models/x",
        "\\\\nas\\share\\x",
        "file:///srv/x/y",
        "~/models/x",
        "./local-base",
        "../base",
        "models/Qwen2.5-7B",
    ],
)
def test_every_form_of_a_path_is_found_in_a_base_field(value: str) -> None:
    """Homes, mounts, Windows, file URLs and relative folders are told with field and value."""
    [hit] = paths.scan("adapter_config.json", raw(peft_type="LORA", base_model_name_or_path=value))
    assert (hit.field, hit.value) == ("base_model_name_or_path", value)
    [finding] = paths.findings([hit])
    assert finding.data["local_paths"] == [value]
    assert finding.severity == "warn"


@pytest.mark.parametrize("value", ["Qwen/Qwen3-8B", "gpt2", "https://huggingface.co/a/b", "hf://a/b", "s3://m/x", ""])
def test_ids_and_addresses_are_no_paths(value: str) -> None:
    """What names a model on a remote is left alone."""
    assert paths.scan("config.json", raw(_name_or_path=value, model_type="x", text=value)) == []


@pytest.mark.parametrize("value", ["</think>", "/", "/no_think", "a/b/c", "^/(home|data)", "1/2/3", "./x", "//comment"])
def test_markup_and_fractions_are_no_paths(value: str) -> None:
    """A slash alone makes no path."""
    assert paths.scan("config.json", raw(text=value, stop=[value])) == []


def test_paths_are_found_at_any_depth_and_inside_text() -> None:
    """Nested values, lists and command lines are searched; vocabularies and prompts are not."""
    hits = paths.scan(
        "config.json",
        raw(
            a={"b": ["x", {"cmd": "train.py --data /home/lw/d.json --out /mnt/a/b/c"}]}, chat_template="see /home/lw/x"
        ),
    )
    assert [(h.field, h.value) for h in hits] == [("a.b[1].cmd", "/home/lw/d.json"), ("a.b[1].cmd", "/mnt/a/b/c")]
    assert paths.scan("tokenizer.json", raw(model={"vocab": {"/home/lw/x": 1}}, x="/home/lw/x")) == []
    assert paths.scan("tokenizer_config.json", raw(tokenizer_file="/home/lw/tokenizer.json"))


def test_prose_is_searched_and_examples_are_passed_over() -> None:
    """A real home in a text is found, `/home/user` and `/path/to` are examples."""
    text = "run in /home/lw/src/x.py,\nor /home/user/x, /path/to/model, ~/x, https://a.test/home/b/c\n/usr/bin/env\n"
    assert [h.value for h in paths.scan_text("README.md", text)] == ["/home/lw/src/x.py", "~/x"]


@given(st.binary(max_size=300), st.sampled_from(["config.json", "README.md", "x.yaml"]))
def test_no_bytes_make_the_scan_fail(body: bytes, name: str) -> None:
    """Any bytes give hits or none, and a rewrite or none."""
    paths.scan(name, body)
    paths.rewrite(name, body, lambda _field, value: paths.base_evidence(value))
    paths.outside_bundle(name, body, [])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (f"/x/.cache/huggingface/hub/models--Qwen--Qwen2.5-7B/snapshots/{COMMIT}", ("Qwen/Qwen2.5-7B", COMMIT)),
        (f"/x/models--gpt2/snapshots/{COMMIT}/", ("gpt2", COMMIT)),
        ("/x/models--acme--a--b/snapshots/main", ("acme/a--b", None)),
        ("/home/lw/Qwen2.5-7B", None),
    ],
)
def test_a_cache_path_states_id_and_commit(value: str, expected: tuple[str, str | None] | None) -> None:
    """The layout of the Hub cache names the repository; a plain folder name does not."""
    found = paths.from_cache(value)
    if expected is None or "--" in expected[0]:
        assert found is None
    else:
        assert found is not None
        assert (found.value, found.revision) == expected


def test_evidence_is_taken_nearest_first_and_never_guessed() -> None:
    """Sidecar, cache path, card, other files of the run; two ids without a matching name are none."""
    cached = f"/c/models--Qwen--Qwen3-8B/snapshots/{COMMIT}"
    assert paths.base_evidence(cached, sidecar="acme/x", card=["acme/y"]) == Evidence(
        "acme/x", "weighbridge.yaml names the base"
    )
    assert paths.base_evidence(cached, card=["acme/y"]) == Evidence(
        "Qwen/Qwen3-8B", "a Hub cache path names it with its commit", COMMIT
    )
    assert paths.base_evidence("./b", card=["acme/y"], siblings=[("acme/z", "x.json")]) == Evidence(
        "acme/y", "the card names it as base_model"
    )
    assert paths.base_evidence("/m/Base-7B", siblings=[("acme/base-7b", "adapter_config.json")]) == Evidence(
        "acme/base-7b", "adapter_config.json names it"
    )
    assert paths.base_evidence("/m/y", card=["acme/x", "acme/y"]) == Evidence(
        "acme/y", "the card names it as base_model"
    )
    assert paths.base_evidence("/m/z", card=["acme/x", "acme/y"]) is None
    assert paths.base_evidence("/models/Qwen3-8B") is None
    assert paths.base_evidence("/m/z", card=["./z"], sidecar="../z") is None


def test_a_rewrite_changes_one_value_and_records_both_hashes() -> None:
    """The file keeps every other byte; the finding holds id, evidence and both digests, not the path."""
    old = raw(
        base_model_name_or_path=f"/home/lw/models--Qwen--Qwen3-8B/snapshots/{COMMIT}", revision=None, r=4, note="é"
    )
    done = paths.rewrite("adapter_config.json", old, lambda _field, value: paths.base_evidence(value))
    assert done.raw is not None
    new = json.loads(done.raw)
    assert new == json.loads(old) | {"base_model_name_or_path": "Qwen/Qwen3-8B", "revision": COMMIT}
    assert done.left == []
    [finding] = done.findings
    assert finding.code == "private-path-rewritten"
    assert finding.data["sha256_before"] == hashlib.sha256(old).hexdigest()
    assert finding.data["sha256_after"] == hashlib.sha256(done.raw).hexdigest()
    assert "/home" not in repr(finding)
    assert done.raw.count(b"\n") == old.count(b"\n")


def test_without_evidence_nothing_is_rewritten() -> None:
    """A path that nothing explains stays for a person, and a revision somebody wrote stays."""
    old = raw(base_model_name_or_path="/home/lw/x", output_dir="/home/lw/out")
    done = paths.rewrite("adapter_config.json", old, lambda _field, value: paths.base_evidence(value))
    assert done.raw is None
    assert [h.field for h in done.left] == ["base_model_name_or_path", "output_dir"]
    pinned = raw(base_model_name_or_path="./x", revision="v1")
    kept = paths.rewrite("adapter_config.json", pinned, lambda *_: Evidence("a/b", "test", COMMIT))
    assert json.loads(kept.raw or b"{}") == {"base_model_name_or_path": "a/b", "revision": "v1"}


def test_escaped_slashes_and_other_spellings_are_rewritten() -> None:
    """JSON that escapes what it need not is changed in place all the same."""
    old = b'{"base_model_name_or_path" :"\\/home\\/lw\\/x","a":"\\u00e9"}'
    done = paths.rewrite("adapter_config.json", old, lambda *_: Evidence("a/b", "test"))
    assert done.raw == b'{"base_model_name_or_path" :"a/b","a":"\\u00e9"}'


def test_a_tokenizers_files_become_those_of_the_bundle() -> None:
    """A path to a file that lies in the bundle becomes its name; one that leaves the bundle blocks."""
    old = raw(tokenizer_file="/root/.cache/x/tokenizer.json", special_tokens_map_file="/root/gone/map.json")
    done = paths.rewrite("tokenizer_config.json", old, lambda *_: None, ["tokenizer.json"])
    assert json.loads(done.raw or b"{}")["tokenizer_file"] == "tokenizer.json"
    assert [h.field for h in done.left] == ["special_tokens_map_file"]
    bad = paths.outside_bundle(
        "tokenizer_config.json", raw(vocab_file=".env", merges_file="merges.txt"), ["merges.txt"]
    )
    assert [(f.code, f.severity, f.data["field"]) for f in bad] == [("path-outside-bundle", "block", "vocab_file")]


def test_findings_can_be_told_without_the_paths() -> None:
    """For places where paths may not go, a finding keeps its file and fields only."""
    [finding] = paths.findings(paths.scan("config.json", raw(_name_or_path="/home/lw/x")))
    told = paths.redacted(finding)
    assert "/home/lw" not in repr(told)
    assert told.data["fields"] == ["_name_or_path"]
    other = Finding(
        code="base-local-path",
        severity="warn",
        subject="adapter_config.json",
        message="the base is named by a path, /home/lw/x/y: nobody can resolve it",
        fix="see /mnt/a/b/c",
        data={"base_model": "./x", "rank": 4},
    )
    told = paths.redacted(other)
    assert (told.message, told.fix, told.data) == (
        "the base is named by a path, <path>: nobody can resolve it",
        "see <path>",
        {"rank": 4},
    )


@settings(deadline=None, max_examples=300)
@given(
    st.lists(
        st.sampled_from(
            (
                "/",
                "home",
                "/home/lw/x",
                "~/",
                "~",
                "C:\\Users\\lw",
                "c:/",
                "file:",
                "file:///mnt/a/b",
                "//",
                "://",
                " ",
                '"',
                "x.y",
                "/tmp/a/b",
                "/data/",
                "\\",
                ":",
                "é",
                "http://a/home/b",
                "D:",
                "\n",
                ".",
                "/srv/one/two/",
            )
        ),
        max_size=12,
    ).map("".join)
)
def test_paths_are_found_around_slashes_as_they_are_found_anywhere(text: str) -> None:
    """Looking around the slashes alone finds exactly what trying every character finds."""
    everywhere = [match[0].rstrip(".,:!") for match in paths._EMBEDDED.finditer(text)]
    assert paths._embedded(text) == everywhere
