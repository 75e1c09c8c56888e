"""What can be known before a byte is sent: who we are, what we may, what the Hub takes, and how it wants it."""

import importlib.util
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import urlsplit

import httpx2
from huggingface_hub.utils import get_session

from weighbridge.registry import errors, frontmatter, hub_rules
from weighbridge.registry.findings import finding
from weighbridge.registry.refs import shown
from weighbridge.registry.remotes.hub.client import Line
from weighbridge.registry.remotes.hub.errors import NO_XET
from weighbridge.registry.types import FileEntry

Transport = Literal["xet", "lfs"]
_KEPT: Final = 600.0
"""Seconds for which what was found out is believed."""

_TRUE: Final = frozenset({"1", "ON", "YES", "TRUE"})


class Limits(NamedTuple):
    """What the Hub is known to refuse, by its documentation and by what people report."""

    file: int = 50_000_000_000
    """Bytes of one file."""
    files: int = 10_000
    """Files of one folder, which is also more than one commit takes."""


def refusal(who: Mapping[str, Any], owner: str) -> str | None:
    """Return why a token makes no repository of an owner, by what whoami-v2 tells; None where it may, or is not told.

    A token of role write may what its user may, as an organisation's member; a fine-grained one what its scopes list.
    """
    wanted = owner.casefold()
    access = _access(who)
    if access.get("role") == "fineGrained":
        fine = access.get("fineGrained")
        if not isinstance(fine, dict) or not isinstance(fine.get("scoped"), list):
            return None
        scopes = [one for one in fine["scoped"] if isinstance(one, dict) and isinstance(one.get("entity"), dict)]
        names = {str(one["entity"].get("name")) for one in scopes if "repo.write" in (one.get("permissions") or [])}
        if any(name.partition("/")[0].casefold() == wanted for name in names):
            return None
        return f"its scopes give repo.write on {_listed(names) or 'nothing'}"
    orgs = who.get("orgs")
    if str(who.get("name")).casefold() == wanted or not isinstance(orgs, list):
        return None
    roles = {str(org.get("name")): org.get("roleInOrg") for org in orgs if isinstance(org, dict)}
    for name, role in roles.items():
        if name.casefold() == wanted:
            return f"{shown(str(who.get('name')))} only reads there" if role == "read" else None
    return f"it belongs to {shown(str(who.get('name')))}, a member of {_listed(roles) or 'no organisation'}"


def _access(who: Mapping[str, Any]) -> dict[str, Any]:
    auth = who.get("auth")
    access = auth.get("accessToken") if isinstance(auth, dict) else None
    return access if isinstance(access, dict) else {}


def _listed(names: Iterable[str]) -> str:
    return ", ".join(shown(name) for name in sorted(names))


class Preflight:
    """The checks of one line; what they find is kept for a while, because the Hub limits such questions harder."""

    def __init__(self, line: Line, limits: Limits) -> None:
        self._line = line
        self._limits = limits
        self._kept: dict[str, tuple[float, Any]] = {}
        self._lock = threading.Lock()

    def role(self) -> str:
        """Return what the token may do: read, write, fineGrained. Raises DeniedError without a token."""
        if self._line.token is None:
            raise errors.DeniedError(
                f"there is no token for {self._line.host}",
                why="neither HF_TOKEN, nor a stored login, nor a credential of the unit",
                fix="hf auth login, or set HF_TOKEN; for the daemon LoadCredential=hf-token:/etc/weighbridge/hf-token",
            )
        return str(_access(self._who()).get("role", "unknown"))

    def owns(self, owner: str) -> None:
        """Raise DeniedError where the Hub tells that this token makes no repository of an owner."""
        why = refusal(self._who(), owner)
        if why is not None:
            raise errors.DeniedError(
                f"the token may not write to {shown(owner)}",
                why=why,
                fix=f"check the name in the URL, join {shown(owner)} with write access, or use a token that has it: "
                "https://huggingface.co/settings/tokens",
            )

    def _who(self) -> dict[str, Any]:
        """Return what the Hub says of the token and whose it is."""
        found: dict[str, Any] | None = self._recall("whoami")
        if found is None:
            found = self._line.json(
                "cannot ask who the token belongs to", lambda: self._line.call("GET", "/api/whoami-v2"), dict
            )
            self._keep("whoami", found)
        return found

    def may_write(self, repo: str, *, exists: bool) -> None:
        """Raise DeniedError unless the token may write there, as far as that can be known."""
        if self.role() == "read":
            raise errors.DeniedError(
                f"the token may not write to {repo}",
                why="its role is read",
                fix="make one with write access: https://huggingface.co/settings/tokens",
            )
        if exists and self._recall(f"write {repo}") is None:
            self._line.ask(
                f"cannot write to {repo}", lambda: self._line.call("GET", f"/api/models/{repo}/auth-check/write")
            )
            self._keep(f"write {repo}", True)

    def forget(self, repo: str) -> None:
        """Ask again the next time: the Hub has just refused what it had allowed."""
        with self._lock:
            self._kept.pop(f"write {repo}", None)
            self._kept.pop("whoami", None)

    def size(self, repo: str, files: Sequence[FileEntry]) -> None:
        """Raise RefusedError that names every file and count beyond the limits."""
        limits = self._limits
        large = [file for file in files if file.size > limits.file]
        folders: dict[str, int] = {}
        for file in files:
            folder = file.path.rpartition("/")[0]
            folders[folder] = folders.get(folder, 0) + 1
        crowded = {folder: count for folder, count in folders.items() if count > limits.files}
        if not large and not crowded:
            return
        found = [
            finding(
                "hub-limit",
                file.path,
                f"{shown(file.path)} has {file.size} bytes, the Hub takes {limits.file}",
                "save it in smaller shards (max_shard_size)",
            )
            for file in large
        ]
        found += [
            finding(
                "hub-limit",
                folder or ".",
                f"{shown(folder or 'the top folder')} has {count} files, the Hub takes {limits.files}",
                "publish fewer files, or put them into several folders",
            )
            for folder, count in crowded.items()
        ]
        raise errors.RefusedError(
            f"{repo} cannot hold this version",
            why="; ".join(one.message for one in found[:4]),
            fix=found[0].fix,
            findings=found,
            over_size=[file.path for file in large],
            files=len(files),
        )

    def card(self, repo: str, card: bytes) -> None:
        """Raise RefusedError when the Hub would refuse the card: by its rules as known here, then in its own words."""
        front = frontmatter.load(frontmatter.split(card.decode("utf-8", "replace")).front or "").value
        known = hub_rules.faults(front) if isinstance(front, dict) else []
        if known:
            raise _refused(repo, "; ".join(known))

        def ask() -> httpx2.Response:
            body = {"content": card.decode("utf-8", "replace"), "repoType": "model"}
            return get_session().post(
                f"{self._line.endpoint}/api/validate-yaml", json=body, headers=self._line.headers()
            )

        what = f"cannot check the card of {repo}"
        answer = self._line.ask(what, ask)
        if answer.status_code == 400:
            try:
                said = answer.json()
                told = "; ".join(str(one.get("message", one)) for one in said.get("errors", [])) or said.get("error")
            except (ValueError, AttributeError):
                told = answer.text
            raise _refused(repo, str(told or "") or "the Hub refuses it")
        self._line.ask(what, lambda: _fine(answer))

    def transport(self, repo: str) -> Transport:
        """Return how large files go there: by xet where both sides have it and can reach each other, else by LFS.

        Raises UnreachableError naming both hosts when the store behind xet cannot be reached from here.
        """
        found = self.known_transport()
        if found is None:
            found = self._find_transport(repo)
            self._keep("transport", found)
        return found

    def known_transport(self) -> Transport | None:
        """Return the transport where nobody has to be asked."""
        if self._line.environ.get("HF_HUB_DISABLE_XET", "").upper() in _TRUE:
            return "lfs"
        if importlib.util.find_spec("hf_xet") is None:
            return "lfs"
        found: Transport | None = self._recall("transport")
        return found

    def _find_transport(self, repo: str) -> Transport:
        what = f"cannot prepare an upload to {repo}"
        path = f"/api/models/{repo}/xet-write-token/main"
        try:
            answer = self._line.ask(what, lambda: self._line.call("GET", path))
        except errors.NotFoundError:
            return "lfs"
        except errors.RefusedError as error:
            if error.data.get("status") in {405, 501}:
                return "lfs"
            raise
        where = answer.headers.get("X-Xet-Cas-Url", "")
        host = urlsplit(where).netloc
        if not host:
            raise errors.UnreachableError(what, why="the Hub names no store for xet", fix=NO_XET)
        try:
            with self._line.speaking(what):
                # Whatever it answers, it can be reached; a proxy on the way is used as it will be for the upload.
                get_session().get(where, timeout=self._line.patience.connect)
        except errors.UnreachableError as error:
            raise errors.UnreachableError(
                what,
                why=f"{self._line.host} answers, but the store {host} that it names does not: {error.why}",
                fix=f"let this machine reach {host}, or set HF_HUB_DISABLE_XET=1",
                hub=self._line.host,
                store=host,
            ) from error
        return "xet"

    def _recall(self, key: str) -> Any:
        with self._lock:
            at, value = self._kept.get(key, (0.0, None))
            return value if time.monotonic() - at < _KEPT else None

    def _keep(self, key: str, value: Any) -> None:
        with self._lock:
            self._kept[key] = (time.monotonic(), value)


def _refused(repo: str, why: str) -> errors.RefusedError:
    words = shown(why[:400])
    return errors.RefusedError(
        f"the Hub refuses the card of {repo}",
        why=words,
        fix="correct the front matter of the run's README.md",
        findings=[finding("hub-card-refused", "README.md", words, "correct its front matter")],
    )


def _fine(answer: httpx2.Response) -> None:
    answer.raise_for_status()
