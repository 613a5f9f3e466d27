"""Write the generated parts of the docs, which are committed.

    python docs/build_reference.py      # or: make reference

Generated are the pages `docs/reference/*.md` (keys, verbs, API, support matrix), and each fenced
block below a line `<!-- file: PATH -->`, or `<!-- file: PATH:FIRST:LAST -->` for some of its lines.
`tests/test_reference.py` compares them with the sources.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from api_page import api_page

from redco_flow.cli.main import build_parser
from redco_flow.spec.other_names import OTHER_NAMES
from redco_flow.spec.profile import profile_model
from redco_flow.spec.schema import json_schema

PROJECT = Path(__file__).resolve().parent.parent
REFERENCE = PROJECT / "docs" / "reference"
NOTE = "<!-- Written by docs/build_reference.py (make reference). -->"
BLOCK = re.compile(
    r"(<!-- file: (?P<file>[^\s:]+)(?::(?P<first>\d+):(?P<last>\d+))? -->\n+```\w*\n).*?(?=^```$)",
    re.DOTALL | re.MULTILINE,
)

Schema = Mapping[str, Any]


def with_files(text: str) -> str:
    """A page whose fenced blocks hold the current text of the files that they name."""

    def block(match: re.Match[str]) -> str:
        lines = (PROJECT / match["file"]).read_text(encoding="utf-8").splitlines(keepends=True)
        if match["first"]:
            lines = lines[int(match["first"]) - 1 : int(match["last"])]
        return match[1] + "".join(lines)

    return BLOCK.sub(block, text)


def reference_pages() -> dict[str, str]:
    """The generated pages but the support matrix, by their names in docs/reference."""
    pages = {
        "pipeline.md": _pipeline_page(),
        "profile.md": _profile_page(),
        "commands.md": _commands_page(),
        "api.md": api_page(),
        "other_tools.md": _other_tools_page(),
    }
    return {name: _page(lines) for name, lines in pages.items()}


def support_page() -> str:
    """The support matrix, made in another process: collecting tests imports JAX."""
    script = Path(__file__).with_name("support.py")
    done = subprocess.run(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, check=True
    )
    return _page(iter(done.stdout.splitlines()))


def _page(lines: Iterator[str]) -> str:
    title, *rest = lines
    return "\n".join([title, "", NOTE, *rest]) + "\n"


def _pipeline_page() -> Iterator[str]:
    schema = json_schema()
    stages = {name: body for name, body in schema["$defs"].items() if name.startswith("stage_")}
    others = {name: body for name, body in schema["$defs"].items() if name not in stages}
    yield from (
        "# Pipeline keys",
        "",
        "Generated from the models that validate a pipeline; `redco-flow schema` prints a JSON",
        "Schema for editors. `${env:NAME,default}` or `${key}` may replace a value.",
        "",
        "## The file",
        "",
    )
    yield from _table(schema)
    for name, body in stages.items():
        yield from ("", f"## {_heading(name)}", "")
        yield from _table(body)
    for name, body in others.items():
        yield from ("", f"## {_heading(name)}", "", _summary(body), "")
        yield from _table(body)


def _profile_page() -> Iterator[str]:
    schema = profile_model().model_json_schema()
    yield from (
        "# Profile keys",
        "",
        "A profile is a file in `cluster_profiles/`. `extends: NAME` merges it into another one,",
        "key by key. `redco-flow profile NAME` prints the result; `profile.KEY=VALUE` on the",
        "command line changes it for one run.",
        "",
        "## The file",
        "",
    )
    yield from _table(schema)
    for name, body in schema["$defs"].items():
        yield from ("", f"## {_heading(name)}", "", _summary(body), "")
        yield from _table(body)


def _other_tools_page() -> Iterator[str]:
    yield from (
        "# Coming from Axolotl, TRL, LLaMA-Factory or NeMo-Run",
        "",
        "A key below is refused in a pipeline, with the name that is used here. Rows keep",
        "their form (`data.format`: messages, sharegpt, alpaca, prompt_completion), `lora.targets`",
        "takes names such as `q_proj` or `all-linear`, and `redco-flow init DIRECTORY --data FILE`",
        "writes a pipeline for a file.",
        "",
        "| elsewhere | here |",
        "|---|---|",
    )
    yield from (f"| {elsewhere} | {here} |" for elsewhere, here in OTHER_COMMANDS)
    yield from ("", "## Keys", "", "| key | of | here |", "|---|---|---|")
    for key, (tool, settings) in OTHER_NAMES.items():
        yield f"| `{key}` | {tool} | {' or '.join(f'`{one}`' for one in settings)} |"


OTHER_COMMANDS = (
    (
        "`axolotl train FILE`, `llamafactory-cli train FILE`, `trl sft --config FILE`",
        "`redco-flow run FILE`",
    ),
    ("`axolotl preprocess --debug`", "`redco-flow plan FILE --show-examples 3`"),
    (
        "`accelerate launch`, `torchrun`, an sbatch script, `run.SlurmExecutor(…)`",
        "`-p PROFILE`: [a file](profile.md) in `cluster_profiles/`",
    ),
    ("`axolotl merge-lora`, `llamafactory-cli export`", "`redco-flow export CHECKPOINT DIR`"),
    ("`axolotl inference`, `llamafactory-cli chat`", "`redco-flow chat CHECKPOINT`"),
    ("`llamafactory-cli api`, `trl vllm-serve`", "`redco-flow serve-model CHECKPOINT`"),
    (
        "`resume_from_checkpoint`",
        "`redco-flow resume RUN`; a stage that was killed resumes by itself",
    ),
)


def _heading(name: str) -> str:
    """The title of a model: `stage_train` is "Stage kind train", an executor's Config "slurm"."""
    if name.startswith("stage_"):
        return f"Stage kind {name.removeprefix('stage_')}"
    *_, folder, _, model = ["", *name.split("__")] if "__" in name else ["", "", "", name]
    return f"Executor {folder}" if folder and model == "Config" else model


def _anchor(name: str) -> str:
    return _heading(name).lower().replace(" ", "-")


def _summary(body: Schema) -> str:
    """The model's docstring without its list of fields."""
    text: str = body.get("description", "")
    return text.partition("\n\nArgs:")[0]


def _table(schema: Schema) -> Iterator[str]:
    """One row per key: type, default, meaning."""
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    required = schema.get("required", ())
    for name, body in schema.get("properties", {}).items():
        default = "**required**" if name in required else _default(body)
        meaning = " ".join(body.get("description", "").split())
        yield f"| `{name}` | {_type(body)} | {default} | {_cell(meaning)} |"


def _default(body: Schema) -> str:
    inner = next((one for one in body.get("anyOf", ()) if "default" in one), body)
    value = inner.get("default")
    if "default" not in inner or isinstance(value, dict | list):
        return ""  # in the section's own table
    return f"`{json.dumps(value)}`"


def _type(body: Schema) -> str:
    """The type in words; a section links to its own table."""
    if "$ref" in body:
        name = body["$ref"].rpartition("/")[2]
        return f"[{_heading(name)}](#{_anchor(name)})"
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
    yield from ("# Command line", "", "`redco-flow VERB --help` prints the same.")
    for name, parser in _verbs(build_parser()):
        yield from _verb(name, parser)


def _verbs(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def _verb(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    """A verb's section: usage, description, a row per argument; then its own verbs."""
    actions = [
        action
        for action in parser._actions
        if action.help != argparse.SUPPRESS
        and not isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
    ]
    verbs = list(_verbs(parser))
    names = [_argument(action) for action in actions if not action.option_strings]
    options = ["[OPTIONS]"] if any(action.option_strings for action in actions) else []
    usage = " ".join(["redco-flow", name, *(["VERB"] if verbs else []), *names, *options])
    yield from ("", f"{'##' if ' ' not in name else '###'} {name}", "", f"`{usage}`")
    if parser.description:
        yield from ("", parser.description.strip())
    if parser.epilog:
        yield from ("", "```text", parser.epilog.strip("\n"), "```")
    if actions:
        yield from ("", "| argument | meaning |", "|---|---|")
        for action in sorted(actions, key=lambda action: bool(action.option_strings)):
            yield f"| `{_argument(action)}` | {_cell(action.help or '')} |"
    for verb, inner in verbs:
        yield from _verb(f"{name} {verb}", inner)


def _argument(action: argparse.Action) -> str:
    """An argument as help pages write it: `FILE`, `[RUN]`, `-p, --profile PROFILE`."""
    metavar = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    if action.choices and not action.metavar:
        metavar = "{" + ",".join(map(str, action.choices)) + "}"
    text = metavar if isinstance(metavar, str) else " ".join(metavar)
    if action.option_strings:
        return " ".join([", ".join(action.option_strings), *([] if action.nargs == 0 else [text])])
    return {"?": f"[{text}]", "*": f"[{text} ...]", "+": f"{text} ..."}.get(str(action.nargs), text)


def main() -> None:
    """Write all generated parts."""
    for name, text in (reference_pages() | {"support.md": support_page()}).items():
        (REFERENCE / name).write_text(text, encoding="utf-8")
    for path in (PROJECT / "docs").rglob("*.md"):
        path.write_text(with_files(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
