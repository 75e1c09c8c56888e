"""Which Python files a model's config needs: the modules of auto_map and what they import from beside themselves.

The files are searched as text and never imported.
"""

import json
import re
from pathlib import Path
from typing import Any, Final

from weighbridge.adapters.formats.source import contents

FILE_LIMIT: Final = 4 << 20
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+\.(?P<module>[A-Za-z_][\w]*)[ \t]+import|from[ \t]+\.[ \t]+import[ \t]+(?P<names>[\w, \t]+))",
    re.MULTILINE,
)


def needed(config: Path) -> set[str]:
    """Return the names of the Python files, relative to the config's folder, that a config's auto_map needs.

    A class in another repository (`owner/name--module.Class`) is written `owner/name--module.py`: it is never here.
    """
    try:
        document = json.loads(contents(config, FILE_LIMIT))
    except (OSError, ValueError, RecursionError):
        return set()
    waiting = sorted(_modules(document.get("auto_map") if isinstance(document, dict) else None))
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        waiting.extend(_imports(config.parent / name))
    return found


def _modules(value: Any) -> set[str]:
    """Return the files of every `module.Class` in an auto_map, however deep."""
    if isinstance(value, str) and "." in value:
        return {value.rpartition(".")[0].replace(".", "/") + ".py"}
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return {name for item in inner for name in _modules(item)}


def _imports(file: Path) -> list[str]:
    try:
        text = contents(file, FILE_LIMIT).decode("utf-8", "replace")
    except OSError:
        return []
    found: list[str] = []
    for match in _IMPORT.finditer(text):
        if match["module"]:
            found.append(match["module"] + ".py")
        else:
            beside = [word.strip().split(" ")[0] for word in (match["names"] or "").split(",")]
            found.extend(f"{word}.py" for word in beside if word and (file.parent / f"{word}.py").is_file())
    return found
