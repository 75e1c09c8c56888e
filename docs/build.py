"""Print the parts of the manual that come from the code: `python docs/build.py`, or `--check` to find what is stale.

Findings, errors and commands are tables over the classes and functions themselves; the schemas of what is on disk come
from the frozen values that are written there.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from weighbridge.adapters.diagnose.symptoms import SYMPTOMS
from weighbridge.adapters.diagnose.table import ROWS, RULES
from weighbridge.daemon.commands import registryd as daemon_command
from weighbridge.registry import errors, findings, types
from weighbridge.registry.cli.group import registry as registry_command

HERE = Path(__file__).parent
NOTE = "<!-- printed by docs/build.py; change the code, not this page -->\n\n"


def finding_page() -> str:
    """Return docs/findings.md."""
    lines = [
        "# Findings\n",
        NOTE + "Severity: *block* refuses the artifact, *warn* is shown wherever the version is, *note* is recorded.",
        "*wait* means the folder is not finished. `registry allow` can allow a blocking finding, except those about",
        "integrity.\n",
        "| code | severity | wait | integrity | meaning |\n|---|---|---|---|---|",
    ]
    lines += [
        f"| `{name}` | {code.severity} | {_yes(code.waits)} | {_yes(code.integrity)} | {code.meaning} |"
        for name, code in sorted(findings.CODES.items())
    ]
    return "\n".join(lines) + "\n"


def _yes(value: bool) -> str:
    return "yes" if value else ""


def error_page() -> str:
    """Return docs/errors.md."""
    lines = [
        "# Errors\n",
        NOTE + "An error says what happened, why, and what to do. With `--json` it is one object on stderr",
        "([schema](schemas/error.schema.json)).\n",
        "| exit code | code | meaning |\n|---|---|---|",
    ]
    for kind in sorted(errors.kinds(), key=lambda k: (k.exit_code, k.code)):
        meaning = (kind.__doc__ or "").splitlines()[0]
        lines.append(f"| {kind.exit_code} | `{kind.code}` | {meaning} |")
    lines += [
        "\n0 is success, 130 an interrupt. `inspect` ends 0 on accept and warn, 5 on refuse, 8 on wait;",
        "`diagnose` 0 when it found nothing, 5 when it found a cause, 8 when the folder is not finished.",
    ]
    return "\n".join(lines) + "\n"


def commands(root: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    """Yield every command below a group with its full name."""
    if isinstance(root, click.Group):
        context = click.Context(root, info_name=name)
        for sub in root.list_commands(context):
            found = root.get_command(context, sub)
            if found is not None and not found.hidden:
                yield from commands(found, f"{name} {sub}")
    else:
        yield name, root


def command_page() -> str:
    """Return docs/commands.md: the help of every command."""
    lines = ["# Commands\n", NOTE.rstrip() + "\n"]
    for root, top in ((registry_command, "registry"), (daemon_command, "registryd")):
        for name, command in commands(root, top):
            context = click.Context(command, info_name=name, max_content_width=100, terminal_width=100)
            lines += [f"## {name}\n", "```", command.get_help(context), "```\n"]
    return "\n".join(lines)


def diagnose_page() -> str:
    """Return docs/diagnose.md: symptoms as loaders word them, the causes that are looked for, and what mends them."""
    lines = [
        "# Diagnose\n",
        NOTE
        + "`registry diagnose PATH` looks for every cause below in the files; with `--error TEXT`, or a whole log on",
        "standard input (`--error -`), those that explain the text come first. A cause is told only where it is there,",
        "with the file, the figure and the command that mends it. *note* explains and is no fault: it is told only",
        "where a text asks for it. Texts are matched without regard to case, in one line or across one wrap; people's",
        "own words count in short texts only.\n",
        "| row of the tables | symptoms |\n|---|---|",
    ]
    for row, names in ROWS.items():
        lines.append(f"| {row} | {', '.join(f'[{SYMPTOMS[name].title}](#{name})' for name in names)} |")
    lines.append("\n## Symptoms")
    for symptom in SYMPTOMS.values():
        told = {"Seen as": symptom.says, "In people's words": symptom.words}
        rules = ", ".join(f"[{rule.name}](#rule-{rule.name})" for rule in RULES if symptom.name in rule.symptoms)
        lines += [
            f'\n### <a id="{symptom.name}"></a>{symptom.title[0].upper()}{symptom.title[1:]}\n',
            *(f"{how}: {_patterns(says)}.\n" for how, says in told.items() if says),
            f"Usually: {symptom.means}.\n",
            f"Causes looked for: {rules}.",
        ]
    lines.append("\n## Causes\n\n| rule | severity | cause | remedy | findings it hands on |\n|---|---|---|---|---|")
    for rule in RULES:
        codes = ", ".join(f"`{code}`" for code in rule.codes)
        name = f'<a id="rule-{rule.name}"></a>`{rule.name}`'
        lines.append(f"| {name} | {rule.severity} | {rule.cause} | {rule.remedy} | {codes} |")
    return "\n".join(lines) + "\n"


def _patterns(says: tuple[tuple[str, ...], ...]) -> str:
    """Return patterns as Markdown, their fragments apart by dots."""
    return ", ".join(f"`{' ... '.join(part.strip() for part in parts).replace('`', '')}`" for parts in says)


def schema(value: type[Any], title: str, **extra: Any) -> str:
    """Return the JSON Schema of a frozen value as text; unknown fields stay allowed."""
    (body,), parts = msgspec.json.schema_components([value], ref_template="#/$defs/{name}")
    top = dict(parts.pop(value.__name__)) if "$ref" in body else dict(body)
    top.get("properties", {}).update(extra)
    top["required"] = sorted({*top.get("required", []), *extra})
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, **top}
    if parts:
        document["$defs"] = parts
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def pages() -> dict[str, str]:
    """Return every printed file by its path under docs/."""
    (files,), file_parts = msgspec.json.schema_components([list[types.FileEntry]], ref_template="#/$defs/{name}")
    del file_parts["FileEntry"]["title"]
    files["items"] = file_parts["FileEntry"]
    return {
        "findings.md": finding_page(),
        "errors.md": error_page(),
        "commands.md": command_page(),
        "diagnose.md": diagnose_page(),
        "schemas/manifest.schema.json": schema(
            types.Facts,
            types.SCHEMA_MANIFEST,
            schema={"const": types.SCHEMA_MANIFEST},
            content={"type": "string", "pattern": "^sha256:[0-9a-f]{64}$"},
            files=files,
            tool={"type": "object", "required": ["name", "version"]},
        ),
        "schemas/claim.schema.json": schema(types.Claim, types.SCHEMA_CLAIM),
        "schemas/tag.schema.json": schema(types.TagMove, types.SCHEMA_TAG),
        "schemas/feed-entry.schema.json": schema(types.FeedEntry, types.SCHEMA_FEED),
        "schemas/registry.schema.json": schema(types.Registry, types.SCHEMA_REGISTRY),
    }


def main() -> int:
    """Write the pages, or with --check name those that differ."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = [name for name, text in pages().items() if not (HERE / name).exists() or (HERE / name).read_text() != text]
    for name in stale:
        if not check:
            (HERE / name).parent.mkdir(exist_ok=True)
            (HERE / name).write_text(pages()[name])
        sys.stderr.write(f"{'stale' if check else 'wrote'} docs/{name}\n")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
