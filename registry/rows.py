"""The row that `ls` shows of a version, taken from its manifest."""

from typing import Final

from weighbridge.registry import types
from weighbridge.registry.manifest import Manifest

_SEVERITIES: Final = ("note", "warn", "block")


def row_of(manifest: Manifest) -> types.Row:
    """Return what `ls` shows of a version, taken from its manifest."""
    facts = manifest.facts
    provenance = facts.provenance
    worst = max((f.severity for f in facts.findings), key=_SEVERITIES.index, default=None)
    return types.Row(
        kind=manifest.kind,
        base=facts.base.id,
        license=facts.license.id,
        size=manifest.size,
        parameters=facts.weights.parameters,
        owner=provenance.owner,
        step=provenance.step,
        run=f"{provenance.run.project}/{provenance.run.name}",
        run_id=provenance.run.id,
        run_started=provenance.started_at,
        worst=worst,
        created_at=provenance.created_at,
    )
