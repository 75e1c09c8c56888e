"""What `doctor` asks a bucket beside the probe: rules that would delete or archive versions, and the right to list."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from weighbridge.registry import errors
from weighbridge.registry.refs import shown
from weighbridge.registry.remotes.s3.client import Connection
from weighbridge.registry.remotes.s3.probe import FOLDER

_ARCHIVES: Final = frozenset({"GLACIER", "DEEP_ARCHIVE"})
"""Classes whose objects have to be restored before they can be read."""


def refuse_unlisted(link: Connection) -> None:
    """List one object of the prefix. Raises DeniedError for a role that may not list."""
    what = f"cannot list {shown(link.place.url)}"
    link.ask("list_objects_v2", what, tries=3, Prefix=link.place.prefix, MaxKeys=1)


def lifecycle(link: Connection) -> Iterator[str]:
    """Yield, in words, each rule of the bucket that would harm what lies below the prefix.

    Raises DeniedError for a role that may not look at the rules; most may not, and need not.
    """
    what = f"cannot look at the lifecycle rules of {shown(link.place.url)}"
    try:
        answer = link.ask("get_bucket_lifecycle_configuration", what, tries=3)
    except errors.WeighbridgeError as error:
        if error.data.get("s3_code") in {"NoSuchLifecycleConfiguration", "NotImplemented", "501"}:
            return
        raise
    for rule in answer.get("Rules", ()):
        yield from harm(rule, link.place.prefix)


def harm(rule: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Yield what one rule would do to the objects below a prefix."""
    scope = _scope(rule)
    if rule.get("Status") != "Enabled" or not (scope.startswith(prefix) or prefix.startswith(scope)):
        return
    if scope.startswith(f"{prefix}{FOLDER}"):
        return  # what a probe leaves may go
    name = shown(str(rule.get("ID") or "without a name"))
    expires = rule.get("Expiration", {})
    if "Days" in expires or "Date" in expires:
        yield f"the lifecycle rule {name} deletes objects below {shown(scope) or 'the whole bucket'}"
    for move in rule.get("Transitions", ()):
        if move.get("StorageClass") in _ARCHIVES:
            yield f"the lifecycle rule {name} moves objects to {move['StorageClass']}, where nobody can pull them"


def _scope(rule: Mapping[str, Any]) -> str:
    """Return the prefix that a rule is for; one that goes by tags or sizes is taken to be for all."""
    kind = rule.get("Filter", {})
    return str(rule.get("Prefix") or kind.get("Prefix") or kind.get("And", {}).get("Prefix") or "")
