"""The interface of stage kinds, and their lookup by the name in YAML.

A kind is a package with two modules, as `redco_flow.stages.<name>`: `config`, which is light, for
login nodes read it, and `run`, which only jobs import. Any importable dotted name will do, also of
one module with all of it, whose top level must then be light:

    SECTIONS = ("recipe", "model", "data")      # top-level sections it takes, fields of Config
    INPUTS = {"dataset": InputSlot(kind="dataset")}     # not fields of Config
    OUTPUTS = {"checkpoint": "checkpoint"}      # output name -> artifact kind
    SEVERAL_PROCESSES = True                    # optional: jax.distributed may span several
    class Config(StageConfig): ...
    def run(context, config): ...               # StageContext, Config -> StageOutputs
    def run_shard(context, config, shard): ...  # optional: a part; returns what joins all parts,
                                                # () -> StageOutputs; Config has num_shards
    def output_names(config): ...               # optional: ["checkpoint/last", ...], all of them
    def code_modules(config): ...               # optional: modules that determine the result
    def code_files(config): ...                 # optional: source files that do so, by a name
    def declare(body, stages): ...              # optional: inputs and outputs that a stage itself
                                                # names in its YAML, and what is wrong with them
    def input_problems(config, given): ...      # optional: (path in Config, message) of inputs that
                                                # its settings need or have no use for; `given` are
                                                # the slots that the pipeline says
    def data_files(config): ...                 # optional: raw data files to digest; else those
                                                # of DataFile, DataFiles and DataFolder fields,
                                                # list[DataFile] and dict[str, DataFile]
    def named_files(config, workspace): ...     # optional: data file -> the files that its rows
                                                # name -> NamedFile; the Workspace has a cache
    def data_problems(config): ...              # optional: (path in Config, message) of mistakes
                                                # that a quick look into the data shows
    def device_problems(config, num_devices): ...   # optional: (path in Config, message) of
                                                # settings that do not fit this number of devices
    def upstream_problems(config, upstream, outputs): ...   # optional: (slot, path in the Config of
                                                # that slot's stage, or () for the slot itself,
                                                # message); slot -> Config, slot -> its output
    def artifact_problems(config, slot, metadata): ...  # optional: messages, where the settings do
                                                # not fit the metadata of a published artifact that
                                                # the slot names by id, alias or run
    def data_identity(config): ...              # optional: identity of data that is no file
    def hub_references(config): ...             # optional: names on the hub (`HubReference`); else
                                                # those in its sections `model` and `data`
    def logged_metrics(config): ...             # optional: name -> "min" or "max", which is better,
                                                # of what it logs while it trains, such as
                                                # `val/eval_loss`; None: not known beforehand
    def conclude(config, finished): ...         # optional: FinishedStage -> words for people: what
                                                # the launcher does, once or more often, when the
                                                # result stands

    EXAMPLES_MODULE = "lab.examples"            # optional: the module of the function
                                                # show_examples(config, dataset, number), for
                                                # `plan --show-examples`: ShownExamples or None;
                                                # `dataset` is the stage's, where it was made
    FIT_MODULE = "lab.fit"                      # optional: a program that answers `plan --fit`, as
                                                # `redco_flow.stages.train.fit` does
    FIT_IGNORES = ("learning_rate",)            # optional: settings that its answer is the same for
    def searched_settings(config): ...          # optional: key of Config -> settings that, with
                                                # this value of the key, the answer has as `chosen`;
                                                # the value is auto, cheapest or first
                                                # (`orchestrate.run.objectives`)

Imports kinds by name only: nothing here depends on any particular stage.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import Field

from redco_flow.local_paths import files_below, is_folder
from redco_flow.spec.data_files import as_list
from redco_flow.spec.hub_reference import HubReference
from redco_flow.spec.model import ContentOf, Name, Placement, StrictModel, Text, marked
from redco_flow.spec.names import (
    dotted_name_advice,
    find_module,
    import_named,
    known_packages,
    listed,
    nearest,
)
from redco_flow.spec.pipeline import SECTION_NAMES, Resources

STAGES_PACKAGE = "redco_flow.stages"


class StageConfig(StrictModel):
    """Base of every stage kind's Config; fields that only place the work carry `Placement`.

    Args:
        resources: what the stage asks of the machines.
        runs_on: another profile's name, or keys of a profile that replace those of the run's for
            this stage alone, as {slurm: {partition: cpu}}.
        group: consecutive stages of one name share one job of the cluster, one after the other;
            where a profile has no queue, nothing changes.
    """

    LEFT_OUT: ClassVar[tuple[type, ...]] = (Placement,)
    """Marks of the fields that do not determine the stage's result."""

    resources: Resources = Resources()
    runs_on: Annotated[Text | dict[str, Any], Placement()] = Field(default_factory=dict)
    group: Annotated[Name | None, Placement()] = None


@dataclass(frozen=True)
class InputSlot:
    """An artifact that a stage takes in.

    Args:
        kind: the artifact's kind: dataset, checkpoint, predictions, metrics; "" takes any.
        default_selector: which of the producer's artifacts where the pipeline says none:
            "last" takes `checkpoint/last`, "" takes the output named like the kind.
        many: the slot takes a list of references; absent means every producer.
        is_optional: absent means nothing; so does an alias that names nothing yet.
        replaced_by: a key of Config next to which absent means nothing.
        options: keys that may be written next to the reference, as `{checkpoint: REFERENCE,
            optimizer: true}`, each with the field of Config that it sets.
    """

    kind: str
    default_selector: str = ""
    many: bool = False
    is_optional: bool = False
    replaced_by: str = ""
    options: Mapping[str, str] = field(default_factory=dict)


class NamedFile(NamedTuple):
    """A file, such as an image, that a row of a data file names.

    Args:
        real: its path, without symbolic links.
        named: the path that the row gives, from the folder where it begins.
    """

    real: Path
    named: Path


NamedFiles = Mapping[str, NamedFile | None]
"""By the path that rows have, the file; None where no file may be read for it."""


@dataclass(frozen=True)
class Declaration:
    """Inputs and outputs of one stage of a kind with `declare`.

    Args:
        inputs: slots below the stage's key `inputs`; other keys of it are the Config's.
        outputs: output name -> artifact kind.
        problems: (path in the stage's body, message) of what is wrong.
    """

    inputs: Mapping[str, InputSlot]
    outputs: Mapping[str, str]
    problems: tuple[tuple[tuple[str | int, ...], str], ...] = ()


@dataclass(frozen=True)
class ShownExamples:
    """Examples of a dataset to look at.

    Args:
        notes: shares and warnings, a line each.
        examples: each in pieces, and whether each is learnt.
    """

    notes: list[str]
    examples: list[list[list[Any]]]


def _no_problems(*_: Any) -> tuple[()]:
    return ()


def _hub_references_of_sections(config: StageConfig) -> Iterable[HubReference]:
    """The names in the sections that may have some; imported late, as a kind is."""
    if not any(hasattr(config, section) for section in ("model", "pretrained", "data")):
        return ()
    shared = import_named(f"{STAGES_PACKAGE}.data.hub_references")
    references: Iterable[HubReference] = shared.hub_references(config)
    return references


def _named_data(config: StageConfig) -> list[Path]:
    """The files of the fields of which `settings` keep the names alone."""
    found: list[Path] = []
    for _, value in marked(config, ContentOf):
        texts = value.values() if isinstance(value, dict) else as_list(value)
        for text in texts:
            if is_folder(text):
                found += files_below(text)
            elif "/" in text:  # one that is not there is reported; without a slash it is a name
                found.append(Path(text))
    return found


def _no_metrics(*_: Any) -> dict[str, str]:
    return {}


def _no_settings(*_: Any) -> dict[str, tuple[str, ...]]:
    return {}


def _no_files(*_: Any) -> dict[Path, NamedFiles]:
    return {}


@dataclass(frozen=True)
class StageKind:
    """A stage kind as its modules declare it.

    Args:
        run_module: the dotted module with `run`.
        modules: all of them, which determine the result.
    """

    name: str
    run_module: str
    modules: tuple[str, ...]
    config_type: type[StageConfig]
    inputs: Mapping[str, InputSlot]
    outputs: Mapping[str, str]
    sections: tuple[str, ...]
    output_names: Callable[[Any], list[str]] | None
    code_modules: Callable[[Any], list[str]]
    code_files: Callable[[Any], Mapping[str, Path]]
    input_problems: Callable[[Any, Collection[str]], Iterable[tuple[tuple[str, ...], str]]]
    data_files: Callable[[Any], list[Path]]
    data_problems: Callable[[Any], Iterable[tuple[tuple[str, ...], str]]]
    data_identity: Callable[[Any], dict[str, Any]]
    hub_references: Callable[[Any], Iterable[HubReference]] = _hub_references_of_sections
    named_files: Callable[[Any, Any], Mapping[Path, NamedFiles]] = _no_files
    device_problems: Callable[[Any, int], Iterable[tuple[tuple[str, ...], str]]] = _no_problems
    upstream_problems: Callable[
        [Any, Mapping[str, Any], Mapping[str, str]], Iterable[tuple[str, tuple[str, ...], str]]
    ] = _no_problems
    artifact_problems: Callable[[Any, str, Mapping[str, Any]], Iterable[str]] = _no_problems
    logged_metrics: Callable[[Any], Mapping[str, str] | None] = _no_metrics
    declare: Callable[[Mapping[str, Any], Collection[str]], Declaration] | None = None
    conclude: Callable[[Any, Any], str] | None = None
    examples_module: str | None = None
    fit_module: str | None = None
    fit_ignores: tuple[str, ...] = ()
    searched_settings: Callable[[Any], Mapping[str, tuple[str, ...]]] = _no_settings
    runs_on_several_processes: bool = False
    runs_in_shards: bool = False

    def show_examples(self, config: Any, dataset: Path | None, number: int) -> ShownExamples | None:
        """Return examples of a stage's data; None where its kind or settings have none to show.

        Args:
            dataset: the directory of the dataset that the stage made; None: it has not run.
            number: how many, at most.

        Raises:
            ValueError: they cannot be made before the stage has run; says what to do.
        """
        if self.examples_module is None:
            return None
        show = import_named(self.examples_module).show_examples
        shown: ShownExamples | None = show(config, dataset, number)
        return shown

    def slot_path(self, slot: str) -> tuple[str, ...]:
        """Return where in a stage's body an input is written."""
        return (slot,) if self.declare is None else ("inputs", slot)


def find_stage_kind(name: str) -> StageKind:
    """Import the kind called `name` and read its declarations.

    Raises:
        ValueError: there is no such module, it cannot be imported, or it is no stage kind.
    """
    module_name = find_module(STAGES_PACKAGE, name)
    if module_name is None:
        known = known_stage_kinds()
        raise ValueError(
            f"there is no stage kind '{name}'{nearest(name, known)} Known kinds: "
            f"{listed(known)}; {dotted_name_advice(name)}"
        )
    parts = tuple(f"{module_name}.{part}" for part in ("config", "run"))
    are_apart = all(find_module(STAGES_PACKAGE, part) for part in parts)
    try:
        module = import_named(parts[0] if are_apart else module_name)
    except ValueError as error:
        raise ValueError(f"stage kind '{name}': {error}") from error
    return _read_declarations(name, module, parts if are_apart else (module_name,))


def known_stage_kinds() -> tuple[str, ...]:
    """Return the names of the built-in stage kinds, sorted."""
    return known_packages(STAGES_PACKAGE, having="config")


def _read_declarations(name: str, module: ModuleType, modules: tuple[str, ...]) -> StageKind:
    where = f"stage kind '{name}' ({module.__name__})"
    config_type = getattr(module, "Config", None)
    if not (isinstance(config_type, type) and issubclass(config_type, StageConfig)):
        raise ValueError(f"{where} has no class Config(StageConfig); it is not a stage kind.")
    is_one_module = len(modules) == 1
    if is_one_module and not callable(getattr(module, "run", None)):
        raise ValueError(f"{where} has no function run(context, config); it is not a stage kind.")
    kind = StageKind(
        name=name,
        run_module=modules[-1],
        modules=modules,
        config_type=config_type,
        inputs=dict(getattr(module, "INPUTS", {})),
        outputs=dict(getattr(module, "OUTPUTS", {})),
        sections=tuple(getattr(module, "SECTIONS", ())),
        output_names=getattr(module, "output_names", None),
        code_modules=getattr(module, "code_modules", lambda config: []),
        code_files=getattr(module, "code_files", lambda config: {}),
        input_problems=getattr(module, "input_problems", lambda config, given: ()),
        data_files=getattr(module, "data_files", _named_data),
        data_problems=getattr(module, "data_problems", lambda config: ()),
        data_identity=getattr(module, "data_identity", lambda config: {}),
        hub_references=getattr(module, "hub_references", _hub_references_of_sections),
        named_files=getattr(module, "named_files", _no_files),
        device_problems=getattr(module, "device_problems", _no_problems),
        upstream_problems=getattr(module, "upstream_problems", _no_problems),
        artifact_problems=getattr(module, "artifact_problems", _no_problems),
        logged_metrics=getattr(module, "logged_metrics", _no_metrics),
        declare=getattr(module, "declare", None),
        conclude=getattr(module, "conclude", None),
        examples_module=getattr(module, "EXAMPLES_MODULE", None),
        fit_module=getattr(module, "FIT_MODULE", None),
        fit_ignores=tuple(getattr(module, "FIT_IGNORES", ())),
        searched_settings=getattr(module, "searched_settings", _no_settings),
        runs_on_several_processes=bool(getattr(module, "SEVERAL_PROCESSES", False)),
        runs_in_shards=callable(getattr(module, "run_shard", None))
        or (not is_one_module and "num_shards" in config_type.model_fields),
    )
    problem = _declaration_problem(kind)
    if problem:
        raise ValueError(f"{where}: {problem}")
    return kind


def _declaration_problem(kind: StageKind) -> str | None:
    """Say what is wrong with a kind's declarations, or None."""
    fields = kind.config_type.model_fields
    if kind.runs_in_shards and "num_shards" not in fields:
        return "it has run_shard, but its Config has no num_shards; add the field."
    for section in kind.sections:
        if section not in SECTION_NAMES:
            return f"SECTIONS names '{section}'; allowed: {', '.join(SECTION_NAMES)}."
        if section not in fields:
            return f"SECTIONS names '{section}', which is no field of Config; add the field."
    for slot in kind.inputs:
        if slot in fields or slot in ("kind", *SECTION_NAMES):
            return f"INPUTS names '{slot}', which is also a key of the stage; rename one of them."
    for output, artifact in kind.outputs.items():
        if output != artifact and not re.match(re.escape(artifact) + "/.", output):
            return (
                f"OUTPUTS: '{output}' must be named like its artifact kind, "
                f"'{artifact}' or '{artifact}/SELECTOR'."
            )
    return None
