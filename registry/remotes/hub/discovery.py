"""What an organisation holds: one listing, and one ledger for each name that is news.

The listing tells which repositories are ours and at which commits they stand; a commit that is known needs no second
look, whatever its repository is called by now. The ledger says whose versions a repository holds: they keep their name
when somebody renames it.
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from weighbridge.registry import errors
from weighbridge.registry.refs import name_fault
from weighbridge.registry.remotes.commits import Listing
from weighbridge.registry.remotes.hub.repositories import Repositories
from weighbridge.registry.remotes.ledger import Ledger

PARALLEL: Final = 4

Read = Callable[[str, str], Ledger | None]
"""Returns the ledger of a repository at a commit."""


def listing(repositories: Repositories, read: Read, known: Mapping[str, str]) -> Listing:
    """Return the names with their heads, and the ledgers of those that do not stand at the commit that is known.

    When the Hub will not answer any more in the middle (an organisation of hundreds of names may use a quota up), what
    was read counts, the rest is left as it is known, and the next listing goes on there.
    """
    found = repositories.all()
    at = {commit: name for name, commit in known.items()}
    heads: dict[str, str] = {}
    news: list[str] = []
    for repo, commit in found.items():
        name = at.get(commit)
        if name is None or (name != repo and name in found):
            news.append(repo)
            continue
        heads[name] = commit
        if name != repo:
            repositories.follow(name, repo)
    ledgers: dict[str, Ledger] = {}
    problems: list[str] = []
    late: list[errors.WeighbridgeError] = []
    for repo, answer in _read(read, found, news):
        if isinstance(answer, Ledger):
            name = answer.name if name_fault(answer.name) is None else repo
            if name != repo and (name in found or name in heads):
                problems.append(f"{repositories.owner}/{repo}: it holds versions of {name}, which lies elsewhere")
                continue
            if name != repo:
                repositories.follow(name, repo)
            heads[name], ledgers[name] = found[repo], answer
        elif isinstance(answer, errors.UnreachableError):
            late.append(answer)
        else:
            heads[repo] = found[repo]
            if answer is not None:
                problems.append(f"{repositories.owner}/{repo}: {answer.what} ({answer.why})")
    if late:
        if not ledgers:
            raise late[0]
        heads = {**known, **heads}
        problems.append(f"{len(late)} of {len(found)} names were not read: {late[0].why}; look again later")
    return Listing(heads=heads, ledgers=ledgers, problems=problems)


def _read(
    read: Read, found: Mapping[str, str], news: Iterable[str]
) -> Iterable[tuple[str, Ledger | errors.WeighbridgeError | None]]:
    """Yield each repository with its ledger, or what came instead; after a refusal for now nobody is asked any more."""
    stop: list[errors.UnreachableError] = []

    def one(repo: str) -> Ledger | errors.WeighbridgeError | None:
        if stop:
            return stop[0]
        try:
            return read(repo, found[repo])
        except errors.UnreachableError as error:
            stop.append(error)
            return error
        except (errors.IntegrityError, errors.DeniedError, errors.NotFoundError) as error:
            return error  # damaged, gated or gone meanwhile: that is no reason to hide the others

    with ThreadPoolExecutor(PARALLEL, thread_name_prefix="catalogue") as pool:
        repos = list(news)
        yield from zip(repos, pool.map(one, repos), strict=True)
