"""Pages that are made when the site is built: every key, every verb, and what was tried."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from redco_flow.cli.main import build_parser
from redco_flow.spec.profile import profile_model
from redco_flow.spec.schema import json_schema

Schema = Mapping[str, Any]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that stand in no file."""
    pages = {
        "reference/pipeline.md": _pipeline_page(),
        "reference/profile.md": _profile_page(),
        "reference/commands.md": _commands_page(),
        "reference/support.md": _support_page(),
    }
    for path, lines in pages.items():
        files.append(File.generated(config, path, content="\n".join(lines)))
    return files


def _pipeline_page() -> Iterator[str]:
    schema = json_schema()
    stages = {name: body for name, body in schema["$defs"].items() if name.startswith("stage_")}
    others = {name: body for name, body in schema["$defs"].items() if name not in stages}
    yield from (
        "# Pipeline keys",
        "",
        "Made from the models that validate a pipeline; `redco-flow schema` prints the same as a",
        "JSON Schema for editors. `${env:NAME,default}` or `${key}` may stand where a value may.",
        "",
        "## The file",
        "",
    )
    yield from _table(schema)
    for name, body in stages.items():
        yield from ("", f"## Stage kind {name.removeprefix('stage_')} {{ #{name} }}", "")
        yield from _table(body)
    for name, body in others.items():
        yield from ("", f"## {name} {{ #{name} }}", "", _summary(body), "")
        yield from _table(body)


def _profile_page() -> Iterator[str]:
    schema = profile_model().model_json_schema()
    yield from (
        "# Profile keys",
        "",
        "A profile is a file in `cluster_profiles/`. `extends: NAME` lays it over another one, key",
        "by key. `redco-flow profile NAME` prints the result; `profile.KEY=VALUE` on the command",
        "line changes it for one run.",
        "",
        "## The file",
        "",
    )
    yield from _table(schema)
    for name, body in schema["$defs"].items():
        yield from ("", f"## {name} {{ #{name} }}", "", _summary(body), "")
        yield from _table(body)


def _summary(body: Schema) -> str:
    """What the model's docstring says before it lists the fields."""
    text: str = body.get("description", "")
    return text.partition("\n\nArgs:")[0]


def _table(schema: Schema) -> Iterator[str]:
    """One row a key: its type, its default, its meaning."""
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    required = schema.get("required", ())
    for name, body in schema.get("properties", {}).items():
        default = "**needed**" if name in required else _default(body)
        meaning = " ".join(body.get("description", "").split())
        yield f"| `{name}` | {_type(body)} | {default} | {_cell(meaning)} |"


def _default(body: Schema) -> str:
    inner = next((one for one in body.get("anyOf", ()) if "default" in one), body)
    value = inner.get("default")
    if "default" not in inner or isinstance(value, dict | list):
        return ""  # its own table has them
    return f"`{json.dumps(value)}`"


def _type(body: Schema) -> str:
    """The type in words; a section links to its own table."""
    if "$ref" in body:
        name = body["$ref"].rpartition("/")[2]
        return f"[{name}](#{name})"
    if "anyOf" in body:
        kinds = [_type(one) for one in body["anyOf"] if one.get("pattern") != r"\$\{"]
        return _cell(" or ".join(dict.fromkeys(kind for kind in kinds if kind)))
    if "enum" in body:
        return " or ".join(f"`{value}`" for value in body["enum"])
    if "const" in body:
        return f"`{body['const']}`"
    kind = body.get("type", "")
    if isinstance(kind, list):
        return " or ".join(kind)
    if kind == "array":
        return f"list of {_type(body.get('items', {})) or 'values'}"
    limits = [
        f"{sign} {body[key]}"
        for key, sign in (
            ("minimum", "≥"),
            ("exclusiveMinimum", ">"),
            ("maximum", "≤"),
            ("exclusiveMaximum", "<"),
        )
        if key in body
    ]
    return " ".join([{"object": "mapping"}.get(kind, kind), ", ".join(limits)]).strip()


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _commands_page() -> Iterator[str]:
    yield from ("# Command line", "", "`redco-flow VERB --help` prints the same.", "")
    parser = build_parser()
    for action in parser._subparsers._group_actions if parser._subparsers else ():
        for name, verb in (action.choices or {}).items():
            yield from (f"## {name}", "", "```text", _help(verb), "```", "")


def _support_page() -> list[str]:
    """What was tried, in a process of its own: collecting tests imports JAX and sets its flags."""
    script = Path(__file__).with_name("support.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    if done.returncode != 0:
        raise PluginError(f"{script.name} failed:\n{done.stderr or done.stdout}")
    return done.stdout.splitlines()


def _help(parser: argparse.ArgumentParser) -> str:
    """The help of a verb, at a width that does not depend on the terminal."""
    with mock.patch.dict(os.environ, COLUMNS="96"):
        return parser.format_help().strip()
