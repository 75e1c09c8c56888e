"""/api/...: accounts, repositories, revisions, trees, commits, tags, branches, discussions, cards."""

import base64
import json
from typing import Any
from urllib.parse import parse_qs, urlencode

from weighbridge_testlib.hub.cards import faults_of, front_matter
from weighbridge_testlib.hub.server import Answer, Request, Routes, TestHub, spelled
from weighbridge_testlib.hub.store import Commit, Discussion, Entry, Refused, Repo

ROUTES = Routes()
KINDS = {"models": "model", "datasets": "dataset", "spaces": "space", "kernels": "kernel"}
R = "/api/(?P<kind>models|datasets|spaces|kernels)/{ns}/{name}"


def repo_of(hub: TestHub, request: Request, *, write: bool = False, content: bool = False) -> Repo:
    """Return the repository that a request is about; questions about an old name are redirected, writes are not."""
    parts = request.parts
    if request.method == "GET":
        redirect(hub, request)
    return hub.store.find(
        KINDS[parts["kind"]], f"{parts['ns']}/{parts['name']}", request.token, write=write, content=content
    )


def redirect(hub: TestHub, request: Request) -> None:
    """Raise Refused with the new address of a repository that was renamed; nothing where it was not."""
    parts = request.parts
    old = f"{parts['ns']}/{parts['name']}"
    new = hub.store.moved.get((KINDS[parts["kind"]], old.lower()))
    if new is not None:
        query = f"?{urlencode(request.query, doseq=True)}" if request.query else ""
        raise Refused(307, None, "moved", headers={"Location": request.path.replace(old, new, 1) + query})


# ------------------------------------------------------------------------------------------------------------ accounts


@ROUTES.add("GET", "/api/whoami-v2")
def whoami(hub: TestHub, request: Request) -> Answer:
    """Say who asks."""
    token = request.token
    if token is None:
        raise Refused(401, None, "Invalid username or password.")
    orgs = sorted(hub.store.users[token.user])
    return Answer(
        {
            "type": "user",
            "id": token.user,
            "name": token.user,
            "fullname": token.user.title(),
            "email": f"{token.user}@example.org",
            "orgs": [{"type": "org", "name": org, "fullname": org.title(), "roleInOrg": "write"} for org in orgs],
            "auth": {"type": "access_token", "accessToken": {"displayName": "test", "role": token.role}},
        }
    )


@ROUTES.add("GET", f"{R}/auth-check")
@ROUTES.add("GET", f"{R}/auth-check/write")
def auth_check(hub: TestHub, request: Request) -> Answer:
    """Say whether the token may read or write."""
    repo_of(hub, request, write=request.path.endswith("/write"), content=True)
    return Answer({})


# -------------------------------------------------------------------------------------------------------- repositories


@ROUTES.add("POST", "/api/repos/create")
def create(hub: TestHub, request: Request) -> Answer:
    """Create a repository."""
    wanted = request.json()
    if "private" in wanted:
        raise Refused(400, None, "'private' is not a field: write visibility")
    owner = wanted.get("organization") or (request.token.user if request.token else "")
    kind = wanted.get("type") or "model"
    try:
        repo = hub.store.create(
            kind, owner, wanted["name"], request.token, private=wanted.get("visibility") == "private"
        )
    except Refused as refusal:
        if "url" in refusal.body:
            refusal.body["url"] = f"{hub.url}/{refusal.body['url']}"
        raise
    return Answer({"url": f"{hub.url}/{repo.id}", "name": repo.id, "id": repo.id})


@ROUTES.add("DELETE", "/api/repos/delete")
def delete(hub: TestHub, request: Request) -> Answer:
    """Remove a repository."""
    wanted = request.json()
    owner = wanted.get("organization") or (request.token.user if request.token else "")
    hub.store.delete(wanted.get("type") or "model", f"{owner}/{wanted['name']}", request.token)
    return Answer({})


@ROUTES.add("POST", "/api/repos/move")
def move(hub: TestHub, request: Request) -> Answer:
    """Rename a repository."""
    wanted = request.json()
    hub.store.move(wanted.get("type") or "model", wanted["fromRepo"], wanted["toRepo"], request.token)
    return Answer({})


@ROUTES.add("PUT", f"{R}/settings")
def settings(hub: TestHub, request: Request) -> Answer:
    """Change visibility and gate."""
    repo = repo_of(hub, request, write=True)
    wanted = request.json()
    if "visibility" in wanted:
        repo.private = wanted["visibility"] == "private"
    if "gated" in wanted:
        repo.gated = wanted["gated"]
    return Answer({})


@ROUTES.add("GET", R)
@ROUTES.add("GET", f"{R}/revision/{{rev}}")
def info(hub: TestHub, request: Request) -> Answer:
    """Describe a repository at a revision."""
    repo = repo_of(hub, request)
    commit = repo.resolve(request.parts.get("rev") or "main")
    return Answer(described(hub, repo, commit, blobs=request.flag("blobs")))


@ROUTES.add("GET", "/api/models")
def models(hub: TestHub, request: Request) -> Answer:
    """List models, newest first, by author, words and tags."""
    author, words = request.one("author"), request.one("search")
    found = []
    for (kind, _), repo in sorted(hub.store.repos.items(), key=lambda item: (-item[1].head.time, item[0])):
        if kind != "model" or (author and repo.owner.lower() != author.lower()) or (words and words not in repo.id):
            continue
        try:
            hub.store.find(kind, repo.id, request.token)
        except Refused:
            continue
        found.append(repo)
    size = min(int(request.one("limit") or hub.store.limits.page), hub.store.limits.page)
    start = int(request.one("cursor") or 0)
    wanted = [w for name in ("expand", "expand[]") for w in request.query.get(name, [])]
    listed = []
    for repo in found[start : start + size]:
        whole = described(hub, repo, repo.head)
        keep = {"id", "modelId", *wanted} if wanted else whole.keys() - {"siblings"}
        if request.flag("full"):
            keep = set(whole)
        listed.append({k: v for k, v in whole.items() if k in keep})
    headers = {}
    if start + size < len(found) and not request.one("limit"):
        query = urlencode({**request.query, "cursor": [str(start + size)]}, doseq=True)
        headers["Link"] = f'<{hub.url}/api/models?{query}>; rel="next"'
    return Answer(listed, headers=headers)


def described(hub: TestHub, repo: Repo, commit: Commit, *, blobs: bool = False) -> dict[str, Any]:
    """Return what the Hub says of a repository."""
    card = commit.tree.get("README.md")
    data = front_matter(hub.store.body(card).decode("utf-8", "replace")) if card else {}
    siblings = []
    for path, entry in sorted(commit.tree.items()):
        sibling: dict[str, Any] = {"rfilename": path}
        if blobs:
            sibling |= {"size": entry.size, "blobId": entry.oid}
            if entry.sha256:
                sibling["lfs"] = {"sha256": entry.sha256, "size": entry.size, "pointerSize": entry.pointer_size}
        siblings.append(sibling)
    return {
        "_id": repo.id,
        "id": repo.id,
        "modelId": repo.id,
        "author": repo.owner,
        "sha": commit.oid,
        "lastModified": spelled(repo.head.time),
        "createdAt": spelled(repo.created),
        "private": repo.private,
        "gated": repo.gated,
        "disabled": repo.disabled,
        "downloads": 0,
        "likes": 0,
        "tags": [str(tag) for tag in data.get("tags", [])] if isinstance(data.get("tags"), list) else [],
        "cardData": data,
        "siblings": siblings,
        "usedStorage": sum(len(hub.store.objects[sha]) for sha in repo.objects),
    }


# ------------------------------------------------------------------------------------------------- trees and revisions


def entry_json(hub: TestHub, path: str, entry: Entry, last: Commit | None) -> dict[str, Any]:
    """Return one file of a tree as the Hub lists it."""
    found: dict[str, Any] = {"type": "file", "path": path, "size": entry.size, "oid": entry.oid}
    if entry.sha256:
        found["lfs"] = {"oid": entry.sha256, "size": entry.size, "pointerSize": entry.pointer_size}
        if entry.sha256 in hub.store.xet_files:
            found["xetHash"] = hub.store.xet_files[entry.sha256]
    if last is not None:
        found["lastCommit"] = {"id": last.oid, "title": last.title, "date": spelled(last.time)}
        found["securityFileStatus"] = {"status": "safe", "avScan": None, "pickleImportScan": None}
    return found


def last_change(repo: Repo, commit: Commit, path: str) -> Commit:
    """Return the commit that gave a file its bytes."""
    while commit.parent and repo.commits[commit.parent].tree.get(path) == commit.tree.get(path):
        commit = repo.commits[commit.parent]
    return commit


@ROUTES.add("GET", f"{R}/tree/{{rev}}")
@ROUTES.add("GET", f"{R}/tree/{{rev}}/{{sub:path}}")
def tree(hub: TestHub, request: Request) -> Answer:
    """List a tree, in pages."""
    repo = repo_of(hub, request, content=True)
    commit = repo.resolve(request.parts["rev"])
    sub = request.parts.get("sub", "").strip("/")
    expand, deep = request.flag("expand"), request.flag("recursive")
    root = f"{sub}/" if sub else ""
    if sub and not any(path.startswith(root) for path in commit.tree):
        raise Refused(404, "EntryNotFound", f"{sub} does not exist on {request.parts['rev']}")
    listed: dict[str, dict[str, Any]] = {}
    for path, entry in sorted(commit.tree.items()):
        if not path.startswith(root):
            continue
        folders = path.removeprefix(root).split("/")[:-1]
        for depth in range(1, len(folders) + 1 if deep else min(2, len(folders) + 1)):
            folder = root + "/".join(folders[:depth])
            listed.setdefault(folder, {"type": "directory", "path": folder, "oid": "0" * 40, "size": 0})
        if deep or not folders:
            listed[path] = entry_json(hub, path, entry, last_change(repo, commit, path) if expand else None)
    size = 50 if expand else hub.store.limits.page
    start = int(request.one("cursor") or 0)
    rows = list(listed.values())
    headers = {}
    if start + size < len(rows):
        query = urlencode({**request.query, "cursor": [str(start + size)]}, doseq=True)
        headers["Link"] = f'<{hub.url}{request.path}?{query}>; rel="next"'
    return Answer(rows[start : start + size], headers=headers)


@ROUTES.add("POST", f"{R}/paths-info/{{rev}}")
def paths_info(hub: TestHub, request: Request) -> Answer:
    """Describe some files; unknown ones are left out."""
    repo = repo_of(hub, request, content=True)
    commit = repo.resolve(request.parts["rev"])
    form = parse_qs(request.body.decode(), keep_blank_values=True)
    expand = form.get("expand", ["false"])[0].lower() == "true"
    found = []
    for path in form.get("paths", []):
        entry = commit.tree.get(path)
        if entry is not None:
            found.append(entry_json(hub, path, entry, last_change(repo, commit, path) if expand else None))
        elif any(p.startswith(f"{path.rstrip('/')}/") for p in commit.tree):
            found.append({"type": "directory", "path": path.rstrip("/"), "oid": "0" * 40, "size": 0})
    return Answer(found)


@ROUTES.add("GET", f"{R}/refs")
def refs(hub: TestHub, request: Request) -> Answer:
    """List branches, tags and pull requests."""
    repo = repo_of(hub, request)

    def rows(names: dict[str, str], prefix: str) -> list[dict[str, str]]:
        return [{"name": n, "ref": prefix + n, "targetCommit": oid} for n, oid in sorted(names.items())]

    found: dict[str, Any] = {
        "branches": rows(repo.branches, "refs/heads/"),
        "tags": rows(repo.tags, "refs/tags/"),
        "converts": [],
    }
    if request.flag("include_prs"):
        found["pullRequests"] = rows(repo.pulls, "")
    return Answer(found)


@ROUTES.add("GET", f"{R}/commits/{{rev}}")
def commits(hub: TestHub, request: Request) -> Answer:
    """List the commits of a revision, newest first, in pages."""
    repo = repo_of(hub, request)
    rows = [
        {
            "id": commit.oid,
            "title": commit.title,
            "message": commit.message,
            "date": spelled(commit.time),
            "authors": [{"user": commit.author}],
        }
        for commit in repo.history(request.parts["rev"])
    ]
    size, start = min(50, hub.store.limits.page), int(request.one("p") or 0)
    headers = {}
    if (start + 1) * size < len(rows):
        query = urlencode({**request.query, "p": [str(start + 1)]}, doseq=True)
        headers["Link"] = f'<{hub.url}{request.path}?{query}>; rel="next"'
    return Answer(rows[start * size : (start + 1) * size], headers=headers)


@ROUTES.add("POST", f"{R}/branch/{{branch:path}}")
def make_branch(hub: TestHub, request: Request) -> Answer:
    """Create a branch."""
    repo = repo_of(hub, request, write=True)
    branch = request.parts["branch"]
    if branch.startswith("refs/"):
        raise Refused(400, None, "Invalid branch name")
    with hub.store.lock:
        if branch in repo.branches:
            raise Refused(409, None, f"Reference already exists: {branch}")
        repo.branches[branch] = repo.resolve(request.json().get("startingPoint") or "main").oid
    return Answer({})


@ROUTES.add("DELETE", f"{R}/branch/{{branch:path}}")
def drop_branch(hub: TestHub, request: Request) -> Answer:
    """Delete a branch other than main."""
    repo = repo_of(hub, request, write=True)
    branch = request.parts["branch"]
    if branch == "main":
        raise Refused(403, None, "You cannot delete the main branch")
    if repo.branches.pop(branch, None) is None:
        raise Refused(404, "RevisionNotFound", f"Branch {branch} does not exist")
    return Answer({})


@ROUTES.add("POST", f"{R}/tag/{{rev}}")
def make_tag(hub: TestHub, request: Request) -> Answer:
    """Create a tag; one that is there never moves."""
    repo = repo_of(hub, request, write=True)
    name = request.json()["tag"]
    with hub.store.lock:
        commit = repo.resolve(request.parts["rev"])
        if name in repo.tags:
            raise Refused(409, None, f"Tag reference exists already: {name}")
        repo.tags[name] = commit.oid
    return Answer({})


@ROUTES.add("DELETE", f"{R}/tag/{{tag}}")
def drop_tag(hub: TestHub, request: Request) -> Answer:
    """Delete a tag."""
    repo = repo_of(hub, request, write=True)
    if repo.tags.pop(request.parts["tag"], None) is None:
        raise Refused(404, "RevisionNotFound", f"Tag {request.parts['tag']} does not exist")
    return Answer({})


@ROUTES.add("POST", f"{R}/super-squash/{{branch}}")
def squash(hub: TestHub, request: Request) -> Answer:
    """Make one commit of a branch's history."""
    repo = repo_of(hub, request, write=True)
    with hub.store.lock:
        head = repo.resolve(request.parts["branch"])
        title = request.json().get("message") or "Super-squash branch"
        made = hub.store.write(repo, None, head.tree, title, message="", author=head.author)
        repo.branches[request.parts["branch"]] = made.oid
    return Answer({})


# ------------------------------------------------------------------------------------------------------------- commits


@ROUTES.add("POST", "/api/validate-yaml")
def validate_yaml(hub: TestHub, request: Request) -> Answer:  # noqa: ARG001 - every route is called alike
    """Check a card's front matter."""
    found = faults_of(request.json().get("content", ""))
    if found:
        return Answer({"errors": [{"message": f} for f in found], "warnings": []}, 400)
    return Answer({"errors": [], "warnings": []})


@ROUTES.add("POST", f"{R}/preupload/{{rev}}")
def preupload(hub: TestHub, request: Request) -> Answer:
    """Say of each file how it is to be sent, and what is there now."""
    repo = repo_of(hub, request, write=True, content=True)
    files = request.json()["files"]
    if len(files) > 256:
        raise Refused(413, None, "too many files")
    base = repo.resolve(request.parts["rev"]).tree
    answer = []
    for file in files:
        mode = hub.store.mode(file["path"], file["size"], base64.b64decode(file.get("sample") or ""))
        found = base.get(file["path"])
        oid = None if found is None else found.sha256 or found.oid
        answer.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
    return Answer({"files": answer})


@ROUTES.add("POST", f"{R}/commit/{{rev}}")
def commit(hub: TestHub, request: Request) -> Answer:
    """Make a commit, on a branch or as a new pull request."""
    repo = repo_of(hub, request, write=True, content=True)
    lines = [json.loads(line) for line in request.body.splitlines() if line.strip()]
    if not lines or lines[0]["key"] != "header":
        raise Refused(400, None, "the first line of a commit is its header")
    header = lines[0]["value"]
    hub.parents.append(header.get("parentCommit"))
    changes = []
    for line in lines[1:]:
        value = dict(line["value"])
        if line["key"] == "file":
            value["content"] = base64.b64decode(value["content"])
        changes.append((line["key"], value))
    author = request.token.user if request.token else ""
    pull = request.flag("create_pr")
    branch = request.parts["rev"]
    with hub.store.lock:
        if pull:
            num = max(repo.discussions, default=0) + 1
            branch = f"refs/pr/{num}"
        made = hub.store.commit(
            repo,
            branch,
            title=header.get("summary", ""),
            message=header.get("description", ""),
            author=author,
            parent=header.get("parentCommit"),
            changes=changes,
            pull=pull,
        )
        answer = {"success": True, "commitOid": made.oid, "commitUrl": f"{hub.url}/{repo.id}/commit/{made.oid}"}
        if pull:
            repo.discussions[num] = Discussion(
                num, made.title, made.message, author, made.time, pull=True, base=repo.head.oid
            )
            answer["pullRequestUrl"] = f"{hub.url}/{repo.id}/discussions/{num}"
    return Answer(answer)


# --------------------------------------------------------------------------------------------------------- discussions


@ROUTES.add("POST", f"{R}/discussions")
def discuss(hub: TestHub, request: Request) -> Answer:
    """Open a discussion or a pull request."""
    repo = repo_of(hub, request)
    wanted = request.json()
    author = request.token.user if request.token else ""
    with hub.store.lock:
        num = max(repo.discussions, default=0) + 1
        pull = bool(wanted.get("pullRequest"))
        repo.discussions[num] = Discussion(
            num, wanted["title"], wanted.get("description") or "", author, hub.store.clock(), pull, repo.head.oid
        )
        if pull:
            repo.pulls[f"refs/pr/{num}"] = repo.head.oid
            repo.discussions[num].status = "draft"
    return Answer({"num": num, "url": f"{hub.url}/{repo.id}/discussions/{num}", "pullRequest": pull})


@ROUTES.add("GET", f"{R}/discussions/{{num}}")
def discussion(hub: TestHub, request: Request) -> Answer:
    """Describe a discussion."""
    repo = repo_of(hub, request)
    found = repo.discussions.get(int(request.parts["num"]))
    if found is None:
        raise Refused(404, None, "Discussion not found")
    return Answer(_discussion(repo, found))


@ROUTES.add("POST", f"{R}/discussions/{{num}}/{{act}}")
def act_on(hub: TestHub, request: Request) -> Answer:
    """Merge a pull request, change a status, or comment."""
    repo = repo_of(hub, request, write=True)
    with hub.store.lock:
        found = repo.discussions[int(request.parts["num"])]
        wanted = request.json()
        if request.parts["act"] == "merge":
            head = repo.commits[repo.pulls[f"refs/pr/{found.num}"]]
            made = hub.store.write(
                repo, repo.head.oid, head.tree, found.title, message=found.description, author=found.author
            )
            repo.branches["main"] = made.oid
            found.status = "merged"
        elif request.parts["act"] == "status":
            found.status = wanted["status"]
        else:
            found.comments.append(wanted.get("comment", ""))
    return Answer({"newStatus": {"id": "0", "author": {"name": found.author}, "createdAt": spelled(found.time),
                                 "type": "status-change", "data": {"status": found.status}}})  # fmt: skip


def _discussion(repo: Repo, found: Discussion) -> dict[str, Any]:
    return {
        "num": found.num,
        "title": found.title,
        "author": {"name": found.author},
        "createdAt": spelled(found.time),
        "status": found.status,
        "repo": {"name": repo.id, "type": repo.kind},
        "isPullRequest": found.pull,
        "events": [],
        "changes": {"base": found.base} if found.pull else {},
        "filesWithConflicts": [],
        "diff": "",
    }
