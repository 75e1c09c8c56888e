"""The papers of a version: card and history, rendered from manifest, name and number around what people wrote."""

from weighbridge.registry import card
from weighbridge.registry.flow import notes
from weighbridge.registry.manifest import Manifest
from weighbridge.registry.remotes.protocol import Remote


def render(remote: Remote, manifest: Manifest, name: str, n: int, *, people: str | None = None) -> dict[str, bytes]:
    """Return README.md, and training.json where there is a history, by their paths.

    What people wrote as a note on this version or on one before wins over `people`, the README.md of the source.
    """
    # A note follows the version it is about: before the first one is committed there is none to look for.
    noted = notes.people(remote, name, n) if n > 1 else None
    rendered = {"README.md": card.render(manifest, name, n, people=people if noted is None else noted)}
    if manifest.facts.provenance.history is not None:
        rendered["training.json"] = card.training(manifest)
    return rendered
