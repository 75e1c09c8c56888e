"""What may be published of an artifact, in files, facts and changed bytes: what `admit` gives and `prepare` takes."""

from typing import Any

import msgspec

from weighbridge.registry.flow.sources import SourceFile
from weighbridge.registry.types import Facts, Finding, Value


class Admission(Value, frozen=True):
    """What publish.prepare takes; `people` is the text people wrote for the card.

    `transform` holds the bytes of changed files, `made` what is made out of sources while it is staged.
    """

    files: list[SourceFile]
    facts: Facts
    transform: dict[str, bytes]
    findings: list[Finding]
    people: str | None = None
    made: dict[str, Any] = msgspec.field(default_factory=dict)
    inputs: list[SourceFile] = msgspec.field(default_factory=list)
    """What `made` is made out of where it is more than the one file."""

    def size_of(self, file: SourceFile) -> int:
        """Return the bytes of a file as it is published."""
        if file.path in self.transform:
            return len(self.transform[file.path])
        return int(self.made[file.path].size) if file.path in self.made else file.size

    @property
    def size(self) -> int:
        """Bytes of all files as they are published."""
        return sum(map(self.size_of, self.files))
