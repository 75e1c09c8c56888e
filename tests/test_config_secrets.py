"""Secrets of the configuration: never shown, and read only from where nobody else can read them."""

import pickle
from pathlib import Path

import pytest

from weighbridge.config.secrets import Secret, from_credential, from_environ, from_file
from weighbridge.registry.errors import NotFoundError, UsageError

CANARY = "hf_canarycanarycanary"


def test_a_secret_never_shows() -> None:
    """No way of printing, formatting or storing a secret gives it away; `reveal` does."""
    secret = Secret(CANARY)
    shown = f"{secret} {secret!r} {secret!s} {secret:>40} {[secret]} { ({'token': secret}) } %s" % secret
    assert CANARY not in shown
    assert "********" in shown
    assert secret.reveal() == CANARY
    with pytest.raises(TypeError):
        pickle.dumps(secret)
    assert not hasattr(secret, "__dict__")


def test_secrets_compare_by_text() -> None:
    """Equal secrets are equal; a secret equals no plain text."""
    assert Secret("a") == Secret("a")
    assert Secret("a") != Secret("b")
    assert Secret("a") != "a"
    assert len({Secret("a"), Secret("a")}) == 1
    assert not Secret("")


def test_secret_files_must_be_private(tmp_path: Path) -> None:
    """A token that others can read is refused with the command that closes it; a private one is read, stripped."""
    path = tmp_path / "token"
    path.write_text(CANARY + "\n")
    path.chmod(0o640)
    with pytest.raises(UsageError) as caught:
        from_file(path)
    assert caught.value.fix == f"chmod 600 {path}"
    assert CANARY not in f"{caught.value.what}{caught.value.why}"
    path.chmod(0o600)
    assert from_file(path).reveal() == CANARY
    path.write_text("\n")
    with pytest.raises(UsageError, match="holds no text"):
        from_file(path)
    with pytest.raises(NotFoundError):
        from_file(tmp_path / "none")


def test_secrets_come_from_environment_and_credentials(tmp_path: Path) -> None:
    """A secret is found in a variable or among the unit's credentials, and is absent where neither has it."""
    assert from_environ("HF_TOKEN", {"HF_TOKEN": f" {CANARY}\n"}) == Secret(CANARY)
    assert from_environ("HF_TOKEN", {"HF_TOKEN": ""}) is None
    assert from_environ("HF_TOKEN", {}) is None
    (tmp_path / "hf_token").write_text(CANARY)
    (tmp_path / "hf_token").chmod(0o400)
    environ = {"CREDENTIALS_DIRECTORY": str(tmp_path)}
    assert from_credential("hf_token", environ) == Secret(CANARY)
    assert from_credential("other", environ) is None
    assert from_credential("hf_token", {}) is None
