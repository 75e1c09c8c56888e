"""A proxy's plan that refuses what the policies of docs/policies do not allow, as AWS would.

It knows the actions, resources and conditions that stand in those files, and refuses any other: a policy that grows a
word that is not understood here fails its test.
"""

import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from weighbridge_testlib.proxy import Fault, Request

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "policies"


class Policies:
    """Allows what one of the named policies allows and none denies; `refused` holds what was not allowed."""

    def __init__(self, names: Sequence[str], bucket: str, prefix: str) -> None:
        self.refused: list[str] = []
        self._statements = [
            statement
            for name in names
            for statement in json.loads(
                (FOLDER / f"{name}.json").read_text().replace("BUCKET", bucket).replace("PREFIX", prefix)
            )["Statement"]
        ]

    def __call__(self, request: Request) -> Fault | None:
        """Refuse a request that no policy allows."""
        action, resource, context = meaning(request)
        fitting = [s for s in self._statements if fits(s, action, resource, context)]
        allowed = any(s["Effect"] == "Allow" for s in fitting) and not any(s["Effect"] == "Deny" for s in fitting)
        if allowed:
            return None
        self.refused.append(f"{action} {resource}")
        return Fault("deny")


def meaning(request: Request) -> tuple[str, str, Mapping[str, str | None]]:
    """Return the action, the resource and the context of a request, as AWS documents them."""
    address = urlsplit(request.target)
    query = parse_qs(address.query, keep_blank_values=True)
    bucket, _, key = unquote(address.path).lstrip("/").partition("/")
    context = {
        "s3:prefix": query["prefix"][0] if "prefix" in query else None,
        "s3:if-none-match": request.header("if-none-match"),
        "s3:ObjectCreationOperation": str(request.method == "PUT" or "uploadId" in query).lower(),
        "aws:SecureTransport": "true",  # the proxy itself speaks http only
    }
    if not key:
        return (
            {"uploads": "s3:ListBucketMultipartUploads", "lifecycle": "s3:GetLifecycleConfiguration"}.get(
                next((word for word in ("uploads", "lifecycle") if word in query), ""), "s3:ListBucket"
            ),
            f"arn:aws:s3:::{bucket}",
            context,
        )
    parts = "uploadId" in query
    if request.method in {"PUT", "POST"}:
        creates = (request.method == "PUT" and not parts) or (request.method == "POST" and parts)
        context["s3:ObjectCreationOperation"] = str(creates).lower()
        action = "s3:PutObject"
    elif request.method == "DELETE":
        action = "s3:AbortMultipartUpload" if parts else "s3:DeleteObject"
    else:
        action = "s3:ListMultipartUploadParts" if parts else "s3:GetObject"
    return action, f"arn:aws:s3:::{bucket}/{key}", context


def fits(statement: Mapping[str, Any], action: str, resource: str, context: Mapping[str, str | None]) -> bool:
    """Tell whether a statement speaks of a request."""
    assert set(statement) <= {"Sid", "Effect", "Principal", "Action", "Resource", "Condition"}
    return (
        any(fnmatchcase(action, pattern) for pattern in listed(statement["Action"]))
        and any(fnmatchcase(resource, pattern) for pattern in listed(statement["Resource"]))
        and all(holds(kind, tests, context) for kind, tests in statement.get("Condition", {}).items())
    )


def holds(kind: str, tests: Mapping[str, Any], context: Mapping[str, str | None]) -> bool:
    """Tell whether a condition holds."""
    for name, wanted in tests.items():
        value = context[name]
        match kind:
            case "StringLike":
                found = value is not None and any(fnmatchcase(value, pattern) for pattern in listed(wanted))
            case "Null":
                found = (value is None) == (wanted == "true")
            case "Bool":
                found = value == wanted
            case _:
                raise AssertionError(f"the condition {kind} is not known here")
        if not found:
            return False
    return True


def listed(value: Any) -> list[str]:
    """Return one or several values as a list."""
    return [value] if isinstance(value, str) else list(value)
