"""Bytes of files: resolve, the LFS batch protocol, and the storage host behind both."""

import hashlib
import math
from typing import Any
from urllib.parse import quote

from weighbridge_testlib.hub.server import Answer, Request, Routes, TestHub
from weighbridge_testlib.hub.store import Entry, Refused, Repo

ROUTES = Routes()
P = "(?:/(?P<kind>datasets|spaces|kernels))?/(?P<ns>[^/_][^/]*)/(?P<name>[^/]+?)"
KINDS = {None: "model", "datasets": "dataset", "spaces": "space", "kernels": "kernel"}


# ------------------------------------------------------------------------------------------------------------- resolve


@ROUTES.add("GET|HEAD", f"{P}/resolve/(?P<rev>[^/]+)/{{file:path}}")
def resolve(hub: TestHub, request: Request) -> Answer:
    """Answer for one file: small ones at once, stored ones by a redirect to the storage host."""
    parts = request.parts
    kind, repo_id = KINDS[parts.get("kind") or None], f"{parts['ns']}/{parts['name']}"
    new = hub.store.moved.get((kind, repo_id.lower()))
    if new is not None:
        return Answer(status=307, headers={"Location": request.path.replace(repo_id, new, 1)})
    repo = hub.store.find(kind, repo_id, request.token, content=True)
    commit = repo.resolve(parts["rev"])
    entry = commit.tree.get(parts["file"])
    known = {"X-Repo-Commit": commit.oid, "Accept-Ranges": "bytes"}
    if entry is None:
        raise Refused(404, "EntryNotFound", "Entry not found", headers=known)
    if entry.data is not None:
        return ranged(request, entry.data, known | {"ETag": f'"{entry.oid}"'})
    return Answer(status=302, headers=known | _linked(hub, repo, commit.oid, entry))


def _linked(hub: TestHub, repo: Repo, commit: str, entry: Entry) -> dict[str, str]:
    sha256 = entry.sha256 or ""
    headers = {
        "X-Linked-Etag": f'"{sha256}"',
        "X-Linked-Size": str(entry.size),
        "ETag": f'"{sha256}"',
        "Location": f"{hub.storage}/_storage/{quote(repo.id, safe='')}/{sha256}",
        "Content-Length": "0",
    }
    if hub.xet and sha256 in hub.store.xet_files:
        route = f"{hub.url}/api/{repo.kind}s/{repo.id}/xet-read-token/{commit}"
        headers |= {"X-Xet-Hash": hub.store.xet_files[sha256], "Link": f'<{route}>; rel="xet-auth"'}
    return headers


def ranged(request: Request, body: bytes, headers: dict[str, str]) -> Answer:
    """Answer with a body, or the range of it that was asked for."""
    wanted = request.headers.get("range")
    if wanted is None or not wanted.startswith("bytes="):
        return Answer(body, 200, headers)
    first, _, last = wanted.removeprefix("bytes=").split(",")[0].partition("-")
    start = int(first) if first else max(0, len(body) - int(last))
    end = min(int(last), len(body) - 1) if last and first else len(body) - 1
    if start >= len(body):
        raise Refused(416, None, "Range not satisfiable", headers={"Content-Range": f"bytes */{len(body)}"})
    headers = headers | {"Content-Range": f"bytes {start}-{end}/{len(body)}"}
    return Answer(body[start : end + 1], 206, headers)


# ----------------------------------------------------------------------------------------------------------------- LFS


@ROUTES.add("POST", f"{P}\\.git/info/lfs/objects/batch")
def batch(hub: TestHub, request: Request) -> Answer:
    """Say of each object where it goes; one that is there needs no action."""
    parts = request.parts
    kind, repo_id = KINDS[parts.get("kind") or None], f"{parts['ns']}/{parts['name']}"
    repo = hub.store.find(kind, repo_id, request.token, write=True, content=True)
    found = [_action(hub, repo, wanted) for wanted in request.json()["objects"]]
    return Answer({"transfer": "multipart" if hub.multipart else "basic", "objects": found})


def _action(hub: TestHub, repo: Repo, wanted: dict[str, Any]) -> dict[str, Any]:
    sha256, size = wanted["oid"], wanted["size"]
    if sha256 in repo.objects:
        if size != len(hub.store.objects[sha256]):
            return {"oid": sha256, "size": size, "error": {"code": 422, "message": "another size is stored"}}
        return {"oid": sha256, "size": size}
    try:
        hub.store.check_room(repo, sha256, size)
    except Refused as refusal:
        return {"oid": sha256, "size": size, "error": {"code": refusal.status, "message": refusal.message}}
    where = f"{hub.storage}/_storage/{quote(repo.id, safe='')}/{sha256}?size={size}&kind={repo.kind}"
    upload: dict[str, Any] = {"href": where}
    if hub.multipart:
        count = math.ceil(size / hub.multipart)
        header = {str(n): f"{where}&part={n}" for n in range(1, count + 1)} | {"chunk_size": str(hub.multipart)}
        complete = where.replace("/_storage/", "/_lfs/complete/").replace(hub.storage, hub.url)
        upload = {"href": complete, "header": header}
    verify = f"{hub.url}/_lfs/verify/{repo.kind}/{repo.id}"
    return {"oid": sha256, "size": size, "actions": {"upload": upload, "verify": {"href": verify}}}


@ROUTES.add("PUT", "/_storage/{repo}/{sha256}")
def put(hub: TestHub, request: Request) -> Answer:
    """Take an object or one part of it; the address is the permission."""
    repo = hub.store.get(request.parts["repo"], request.one("kind") or "model")
    sha256, size, part = request.parts["sha256"], int(request.one("size") or 0), request.one("part")
    if part is not None:
        with hub.store.lock:
            hub.parts.setdefault(sha256, {})[int(part)] = request.body
        return Answer(headers={"ETag": f'"{hashlib.md5(request.body).hexdigest()}"'})
    if len(request.body) != size:
        raise Refused(400, None, f"{len(request.body)} bytes came, {size} were announced")
    hub.store.put_object(repo, request.body, sha256)
    return Answer(headers={"ETag": f'"{sha256}"'})


@ROUTES.add("POST", "/_lfs/complete/{repo}/{sha256}")
def complete(hub: TestHub, request: Request) -> Answer:
    """Put the parts of an object together."""
    repo = hub.store.get(request.parts["repo"], request.one("kind") or "model")
    sha256 = request.parts["sha256"]
    if sha256 in repo.objects:
        return Answer({})
    held = hub.parts.get(sha256, {})
    body = b""
    for part in request.json()["parts"]:
        piece = held.get(part["partNumber"])
        if piece is None or part["etag"].strip('"') != hashlib.md5(piece).hexdigest():
            raise Refused(400, None, f"part {part['partNumber']} is not what was sent")
        body += piece
    if len(body) != int(request.one("size") or 0):
        raise Refused(400, None, "the parts are not as long as was announced")
    hub.store.put_object(repo, body, sha256)
    hub.parts.pop(sha256, None)
    return Answer({})


@ROUTES.add("POST", "/_lfs/verify/{kind}/{ns}/{name}")
def verify(hub: TestHub, request: Request) -> Answer:
    """Confirm that an object is there with its size."""
    parts = request.parts
    repo = hub.store.find(parts["kind"], f"{parts['ns']}/{parts['name']}", request.token, write=True)
    wanted = request.json()
    if wanted["oid"] not in repo.objects or len(hub.store.objects[wanted["oid"]]) != wanted["size"]:
        raise Refused(404, None, "The object is not there, or has another size")
    return Answer({})


@ROUTES.add("GET|HEAD", "/_storage/{repo}/{sha256}")
def get(hub: TestHub, request: Request) -> Answer:
    """Give an object out."""
    body = hub.store.objects.get(request.parts["sha256"])
    if body is None:
        raise Refused(404, None, "NoSuchKey")
    return ranged(request, body, {"ETag": f'"{request.parts["sha256"]}"', "Accept-Ranges": "bytes"})


@ROUTES.add("GET", "/api/(?P<kind>models|datasets|spaces)/{ns}/{name}/lfs-files")
def lfs_files(hub: TestHub, request: Request) -> Answer:
    """List the stored objects of a repository."""
    parts = request.parts
    repo = hub.store.find(parts["kind"].removesuffix("s"), f"{parts['ns']}/{parts['name']}", request.token, write=True)
    names = {entry.sha256: path for commit in repo.commits.values() for path, entry in commit.tree.items()}
    return Answer(
        [
            {
                "fileOid": sha256,
                "filename": names.get(sha256, sha256),
                "oid": sha256,
                "size": len(hub.store.objects[sha256]),
                "pushedAt": "2026-01-01T00:00:00.000Z",
                "ref": None,
            }
            for sha256 in sorted(repo.objects)
        ]
    )
