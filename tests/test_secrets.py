"""Secrets in files that would be published: found whole, never shown, and not seen where there are none."""

import json
import pickle
import random
import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weighbridge_testlib.builders as build
from weighbridge.adapters import secrets

LETTERS = string.ascii_letters
ALNUM = LETTERS + string.digits
HEX = "0123456789abcdef"


def word(length: int, alphabet: str = ALNUM) -> str:
    """Return the same odd word every time, made up here so that no scanner of this repository stumbles over it."""
    source = random.Random(length * 7919)
    return "".join(source.choice(alphabet) for _ in range(length))


SAMPLES = {
    "Hugging Face token": "hf_" + word(34, LETTERS),
    "OpenAI key": "sk-proj-" + word(64),
    "Anthropic key": "sk-ant-api03-" + word(95),
    "AWS access key": "AKIA" + word(16, string.ascii_uppercase + string.digits),
    "AWS secret key": "aws_secret_access_key = " + word(40),
    "GitHub token": "ghp_" + word(36),
    "GitLab token": "glpat-" + word(20),
    "Slack token": "xoxb-" + word(12, string.digits) + "-" + word(24),
    "Slack webhook": "https://hooks.slack.com/services/T" + word(9, string.ascii_uppercase) + "/B0/" + word(24),
    "Google API key": "AIza" + word(35),
    "private key": "-----BEGIN RSA " + "PRIVATE KEY-----\n" + word(64),
    "JSON web token": "eyJ" + word(20) + ".eyJ" + word(40) + "." + word(43),
    "Weights & Biases key": "WANDB_API_KEY=" + word(40, HEX),
    "npm token": "npm_" + word(36),
    "PyPI token": "pypi-AgEIcHlwaS5vcmc" + word(80),
    "Azure storage key": "AccountKey=" + word(86) + "==",
    "password in an address": "https://lw:" + word(12) + "@git.example.org/x",
    "key or password": 'api_key="' + word(32) + '"',
    "bearer token": "Authorization: Bearer " + word(40),
    "Telegram bot token": word(9, "123456789") + ":AA" + word(33),
    "Databricks token": "dapi" + word(32, HEX),
    "Stripe key": "sk_live_" + word(24),
}


@pytest.mark.parametrize("kind", sorted(SAMPLES))
def test_every_kind_is_found(kind: str) -> None:
    """Each kind is found in the middle of a line, and told by its name."""
    hits = secrets.scan_bytes(f'{{"x": 1, "y": "{SAMPLES[kind]}"}}\n'.encode())
    assert kind in [h.kind for h in hits]


@pytest.mark.parametrize("kind", sorted(SAMPLES))
@pytest.mark.parametrize("size", [7, 64, 4096])
def test_a_secret_across_a_border_is_found_once(kind: str, size: int) -> None:
    """However the file is cut into blocks, the hits and their places are the same."""
    raw = b"." * 300 + b"\n" + SAMPLES[kind].encode() + b"\n" + b"." * 300
    cut = [raw[i : i + size] for i in range(0, len(raw), size)]
    assert kind in [h.kind for h in secrets.scan_stream(cut)]
    assert sorted(h for h in secrets.scan_stream(cut) if h.kind == kind) == sorted(
        h for h in secrets.scan_bytes(raw) if h.kind == kind
    )


@settings(deadline=None)
@given(st.binary(max_size=200), st.integers(1, 90), st.integers(0, 12_000))
def test_no_noise_hides_a_secret(noise: bytes, size: int, before: int) -> None:
    """Bytes of any kind around a token, and blocks of any size, change nothing."""
    raw = b"\0" * before + noise + b'\n"' + SAMPLES["GitHub token"].encode() + b'"\n' + noise
    blocks = [raw[i : i + size * 97] for i in range(0, len(raw), size * 97)]
    assert "GitHub token" in [h.kind for h in secrets.scan_stream(blocks)]


@pytest.mark.parametrize(
    "text",
    [
        "hf_xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
        "export HF_TOKEN=hf_...",
        '"hub_token": "<HUB_TOKEN>"',
        "api_key = os.environ['OPENAI_API_KEY']",
        "api_key: your-api-key-goes-here-1",
        "password: null",
        "https://user:password@host/x",
        "http://localhost:8000/v1",
        "sha256: " + word(64, HEX),
        "commit " + word(40, HEX),
        '"eos_token": "<|end_of_text|>", "pad_token_id": 128004',
        "secret_key = settings.secret_key_of_the_app",
        '"auth_token": "${AUTH_TOKEN_FROM_VAULT_01}"',
        "task-sk-learn-pipeline-for-text-classification",
    ],
)
def test_placeholders_and_digests_are_none(text: str) -> None:
    """Examples, variables, hashes and special tokens are no secrets."""
    assert secrets.scan_bytes(text.encode()) == []


def test_a_large_vocabulary_is_clean() -> None:
    """Ten thousand random pieces of a tokenizer give no false alarm."""
    source = random.Random(7)
    parts = ["token", "secret", "api", "key", "sk-", "pass", "word", "Bearer", "@", "hf_", "_", "Ġ"]
    vocab = {
        "".join(source.choice(parts) for _ in range(source.randint(1, 5))) + word(i % 9 + 1): i for i in range(10_000)
    }
    raw = json.dumps({"model": {"vocab": vocab, "merges": [f"{a} {a}" for a in list(vocab)[:2000]]}}).encode()
    assert secrets.scan_bytes(raw) == []


def test_pickles_and_utf_16_hide_nothing() -> None:
    """A token inside a pickled object or a UTF-16 file is found in the raw bytes."""
    raw = pickle.dumps({"hub_token": SAMPLES["Hugging Face token"], "x": [1] * 50})
    assert "Hugging Face token" in [h.kind for h in secrets.scan_bytes(raw)]
    wide = f"key={SAMPLES['GitHub token']}\n".encode("utf-16")
    assert "GitHub token" in [h.kind for h in secrets.scan_stream([wide[:31], wide[31:]])]


def test_of_weights_only_the_header_is_read(tmp_path: Path) -> None:
    """A token in the header's metadata is found, the same bytes among the tensors are data."""
    token = SAMPLES["Hugging Face token"]
    told = build.write_safetensors(tmp_path / "a.safetensors", {"w": ("U8", (4,), None)}, {"note": token})
    assert [h.kind for h in secrets.scan_file(told)] == ["Hugging Face token"]
    data = token.encode()
    quiet = build.write_safetensors(tmp_path / "b.safetensors", {"w": ("U8", (len(data),), data)})
    assert secrets.scan_file(quiet) == []


def test_the_value_is_never_shown(tmp_path: Path) -> None:
    """A finding blocks, names file, kind and place, and holds no part of the secret."""
    folder = build.lora_adapter(tmp_path / "a", hub_token=SAMPLES["Hugging Face token"])
    found = secrets.scan([(p.name, p) for p in sorted(folder.iterdir())])
    [finding] = found
    assert (finding.code, finding.severity, finding.subject) == ("secret-in-file", "block", "adapter_config.json")
    assert finding.data["secret_files"] == ["adapter_config.json"]
    assert SAMPLES["Hugging Face token"][3:12] not in repr(found)


@pytest.mark.parametrize("kind", sorted(SAMPLES))
def test_repetition_hides_no_secret(kind: str) -> None:
    """A secret among thousands of alike entries of an index, digits and all, is found once, where it stands."""
    lines = [f'"model.layers.{i}.mlp.w{i % 3}": "model-{i:05d}-of-00900.safetensors",' for i in range(3000)]
    lines[1777] = f'"k{SAMPLES[kind][:2]}": "{SAMPLES[kind]}",'
    text = "\n".join(lines).encode()
    hits = [hit for hit in secrets.scan_bytes(text) if hit.kind == kind]
    assert len(hits) == 1
    assert abs(hits[0].offset - text.index(SAMPLES[kind].encode())) <= 24
