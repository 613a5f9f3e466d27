"""The settings of script, and how they become the words of the script's command line."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from redco_flow.errors import UsageError
from redco_flow.local_paths import exists, expanded, files_below, is_file, is_folder
from redco_flow.spec.find import find_file
from redco_flow.spec.model import ContentOf, DataFile, Scalar, Text
from redco_flow.spec.names import shown
from redco_flow.spec.stage_kind import Declaration, InputSlot, StageConfig
from redco_flow.tracking.code_digest import read_script

SEVERAL_PROCESSES = True

# What argparse takes for a value although it begins with "-".
_NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+")


def _found(text: str) -> str:
    """The path made absolute; one in `examples/` may be that of the project's own."""
    path = expanded(text)
    if path.parts[:1] == ("examples",) and not exists(path):
        with suppress(UsageError):
            path = find_file("examples", path)
    return str(path.absolute())


class Config(StageConfig):
    """A script of one's own.

    Args:
        path: the Python file, relative to the current directory as data files are. It and the
            modules beside it that it imports are part of the fingerprint.
        arguments: the script's options. A number or a text becomes `--name value`, `true`
            `--name`, `false` `--no-name`, a list `--name value value`, and `null` nothing.
        inputs: what the script reads, given to it as `--name PATH`: STAGE or STAGE/OUTPUT is the
            folder of an artifact; anything else a file or folder.
        outputs: what the script makes, given to it as `--name FOLDER`: empty folders, which must
            hold a file in the end. Each becomes an artifact.
    """

    path: Annotated[Text, AfterValidator(_found), ContentOf()]
    arguments: dict[str, Scalar | list[bool | int | float | str]] = Field(default_factory=dict)
    inputs: dict[str, DataFile] = Field(default_factory=dict)
    outputs: list[str] = Field(default_factory=list)


def declare(body: Mapping[str, Any], stages: Collection[str]) -> Declaration:
    """Read what a stage takes in and makes; all names are the script's options, so each is one."""
    inputs = body.get("inputs")
    given = inputs.items() if isinstance(inputs, dict) else ()
    outputs = body.get("outputs")
    made = [one for one in outputs if isinstance(one, str)] if isinstance(outputs, list) else []
    slots = {name: InputSlot(kind="") for name, text in given if _is_reference(text, stages)}
    problems = (*_name_problems(body), *_argument_problems(body))
    return Declaration(slots, {name: name for name in made}, problems)


def output_names(config: Config) -> list[str]:
    """Return what the stage declares."""
    return config.outputs


def logged_metrics(config: Config) -> None:
    """Return None: what a script logs is not known before it runs."""


def code_files(config: Config) -> Mapping[str, Path]:
    """Return the script and the modules beside it."""
    return read_script(Path(config.path)).files


def code_modules(config: Config) -> list[str]:
    """Return what else the script imports that is not installed."""
    return list(read_script(Path(config.path)).modules)


def data_files(config: Config) -> list[Path]:
    """Return the files among the inputs, those in folders included, in the inputs' names' order."""
    paths = [Path(text) for _, text in sorted(config.inputs.items())]
    return [file for path in paths for file in _files(path)]


def data_problems(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield what keeps the script from starting: it is not Python."""
    path = Path(config.path)
    if not is_file(path):
        return  # reported already
    try:
        compile(path.read_bytes(), str(path), "exec")
    except SyntaxError as error:
        yield ("path",), f"is not Python, at {path}:{error.lineno}: {error.msg}"
    except (ValueError, OSError) as error:  # null bytes; not readable
        yield ("path",), f"{path} is not Python: {error}"


def words(config: Config, inputs: Mapping[str, Path], outputs: Mapping[str, Path]) -> list[str]:
    """Return the words behind the script's name on its command line.

    Args:
        inputs: the paths of artifacts; those of files are in the Config.
        outputs: the folders to write to.
    """
    found = [word for name, value in config.arguments.items() for word in _option(name, value)]
    paths = {**config.inputs, **inputs, **outputs}
    return [*found, *(word for name, path in paths.items() for word in (f"--{name}", str(path)))]


def _option(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, list):
        return [f"--{name}", *map(_word, value)]
    word = _word(value)
    # Behind a space it would be taken for an option.
    return [f"--{name}={word}"] if word.startswith("-") else [f"--{name}", word]


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is_reference(text: Any, stages: Collection[str]) -> bool:
    """Whether an input is of a stage: it names one, or is nothing else either."""
    if not isinstance(text, str) or not text:
        return False
    names_stage = any(text == stage or text.startswith(f"{stage}/") for stage in stages)
    return names_stage or not exists(expanded(text))


def _files(path: Path) -> list[Path]:
    if not is_folder(path):
        return [path]
    return files_below(path)


def _name_problems(body: Mapping[str, Any]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    seen: dict[str, str] = {}
    for section, name, path in _names(body):
        if not name.isidentifier():
            yield path, f"{shown(name)} is no Python identifier; it becomes the option --{name}"
        elif name in seen:
            yield path, f"'{name}' is in {seen[name]} already; each option has one meaning"
        seen.setdefault(name, f"'{section}'")


def _names(body: Mapping[str, Any]) -> Iterator[tuple[str, str, tuple[str | int, ...]]]:
    """Yield each name that becomes an option: where it stands, and its path in the body."""
    for section in ("arguments", "inputs"):
        for name in body[section] if isinstance(body.get(section), dict) else ():
            yield section, str(name), (section, name)
    outputs = body.get("outputs")
    for index, name in enumerate(outputs if isinstance(outputs, list) else ()):
        yield "outputs", str(name), ("outputs", index)


def _argument_problems(body: Mapping[str, Any]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    arguments = body.get("arguments")
    for name, value in arguments.items() if isinstance(arguments, dict) else ():
        for index, item in enumerate(value if isinstance(value, list) else ()):
            word = str(item)
            if word.startswith("-") and not _NEGATIVE_NUMBER.fullmatch(word):
                message = f"{shown(item)} in a list would be taken for an option; give it by itself"
                yield ("arguments", name, index), message
