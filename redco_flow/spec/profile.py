"""A profile: where and how stages run. Never part of a fingerprint; contains no secrets."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    PrivateAttr,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from redco_flow.errors import ConfigError, Problem, UsageError
from redco_flow.local_paths import expanded
from redco_flow.records import change_mark
from redco_flow.spec.devices import DeviceFacts
from redco_flow.spec.document import Document, KeyPath, Origin, leaves, written_at
from redco_flow.spec.executor import executor_config, executor_problem, known_executors
from redco_flow.spec.find import find_file
from redco_flow.spec.interpolation import READ_BY_A_JOB, interpolate
from redco_flow.spec.model import (
    OF_RECORD,
    EnvironmentValue,
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StrictModel,
    Text,
    VariableName,
    field_paths,
    is_open,
    known_keys,
)
from redco_flow.spec.names import dotted
from redco_flow.spec.overrides import KeySpace, apply_override, for_profile, read_override
from redco_flow.spec.problems import FullPath, raise_if_any, validated
from redco_flow.spec.secret_check import secret_problems
from redco_flow.spec.ssh import LoginNode
from redco_flow.spec.yaml import parse_file

_EXTENDS = "extends"
_SETTINGS = "settings"

OF_THE_RUN = frozenset(
    ("name", "workspace", "max_parallel_stages", "prefect_api_url", "start_prefect_server")
) | {"launcher", "ssh", "defaults"}
"""Keys of a profile that are of a run as a whole."""


LOCAL_LAUNCHER = "local"


def _expanded(text: str) -> str:
    path = expanded(text)
    if path.parts[:1] and path.parts[0].startswith("~"):
        raise ValueError(f"there is no user '{path.parts[0][1:]}' on this machine")
    return str(path)


class RetryBudgets(StrictModel):
    """The number of retries of a stage, by the cause of the last attempt's end.

    Each retry is a new attempt that resumes from the last checkpoint. What Slurm requeues by
    itself (a preemption, a dead node) stays one attempt and costs nothing here.

    Args:
        preempted: None is unlimited.
        node_failure: a host of the job died, or could not be reached any more.
        timeout: the job's time was over; not counted of a stage that ran in it after another
            stage of its group, for the next attempt has a job's whole time.
        stalled: a process reported no progress for stall_timeout_minutes.
        out_of_memory: the cluster ended a process for want of memory.
        lost: no record, queue or accounting has the job, and its heartbeat has stopped.
        failed: any other end; also of a process that was killed for want of memory perhaps, but
            not surely.
    """

    preempted: NonNegativeInt | None = None
    node_failure: NonNegativeInt = 3
    timeout: NonNegativeInt = 10
    stalled: NonNegativeInt = 0
    lost: NonNegativeInt = 0
    failed: NonNegativeInt = 0
    out_of_memory: NonNegativeInt = 0

    def allows(self, cause: str, num_ended: int) -> bool:
        """Say whether to try again after `num_ended` attempts that ended by this cause."""
        if cause not in type(self).model_fields:
            return False
        budget = getattr(self, cause)
        return budget is None or num_ended <= budget


def _directory_of_a_node(text: str) -> str:
    if not re.fullmatch(r"(?:/|\$[A-Za-z_]\w*)(?:[^$\0\n]|\$[A-Za-z_]\w*)*", text):
        raise ValueError(
            "must be a path that begins with / or with a variable of the job, as $SLURM_TMPDIR or "
            "/lscratch/$SLURM_JOB_ID"
        )
    return text


class Staging(StrictModel):
    """Use of the disks that nodes have of their own.

    Args:
        directory: on such a disk; must exist on every node. $NAME is a variable of the job, set by
            the site or in `environment`: $SLURM_TMPDIR, $TMPDIR, /lscratch/$SLURM_JOB_ID.
        inputs: copy a stage's input artifacts to this directory before it reads them, once for all
            processes of a node.
        checkpoints: write checkpoints to this directory and then to the workspace; for stages that
            run as one process.
    """

    directory: Annotated[Text, AfterValidator(_directory_of_a_node)]
    inputs: bool = True
    checkpoints: bool = False


class Profile(StrictModel):
    """A cluster profile: where and how to run.

    Args:
        name: the file's name by default.
        executor: starts the jobs: local, slurm, hosts, xmanager, or a dotted module.
        workspace: the folder of runs and artifacts, relative to the current directory.
        num_cpu_devices: number of JAX's CPU devices, where there is no accelerator.
        missing_gpus: if JAX finds fewer GPUs than a stage requests, `error` ends it before its work
            begins, and `warn` uses the existing devices.
        environment: variables for the process of every stage.
        staging: use of the nodes' own disks; null: they are not used.
        stall_timeout_minutes: a stage without progress for this time is stopped.
        grace_seconds: time between the request to stop and the kill.
        max_parallel_stages: independent stages that run at once.
        prefect_api_url: the Prefect API that runs report to; None: that of PREFECT_API_URL, or our
            own server on this host where it runs (`redco-flow ui --prefect` starts it).
        start_prefect_server: start our own server with a run where it does not run yet.
        launcher: the process that drives a run: on this machine (local), or a small job of the
            profile's executor (slurm).
        retries: number of retries of a stage, by the cause of its end.
        devices: facts about kinds of devices, by the name in `gpu_type` or a target, for
            `plan --fit`.
        ssh: the cluster's login node, where `run` starts the run and the verbs that show or
            continue it look for it.
        defaults: keys of a pipeline, used where a pipeline file has none; under `stages`, only
            for stages of the file.
    """

    name: Name = "local"
    executor: Text = "local"
    workspace: Annotated[Text, AfterValidator(_expanded)] = "redco-workspace"
    num_cpu_devices: PositiveInt = 1
    missing_gpus: Literal["error", "warn"] = "error"
    environment: dict[VariableName, EnvironmentValue] = Field(default_factory=dict)
    staging: Staging | None = None
    stall_timeout_minutes: PositiveFloat = 30.0
    grace_seconds: NonNegativeFloat = 30.0
    max_parallel_stages: PositiveInt = 2
    prefect_api_url: Text | None = None
    start_prefect_server: bool = False
    launcher: Text = LOCAL_LAUNCHER
    retries: RetryBudgets = RetryBudgets()
    devices: dict[Name, DeviceFacts] = Field(default_factory=dict)
    ssh: LoginNode | None = None
    defaults: dict[str, Any] = Field(default_factory=dict)

    _written_defaults: Document | None = PrivateAttr(default=None)

    @field_validator("launcher")
    @classmethod
    def _check_launcher(cls, launcher: str, info: ValidationInfo) -> str:
        executor = info.data.get("executor")
        if launcher == LOCAL_LAUNCHER or executor is None:
            return launcher
        executors = dict.fromkeys((*known_executors(), executor))  # or one of the user's own
        drives = [one for one in executors if executor_config(one).drives_runs]
        if launcher not in drives:
            raise ValueError(f"must be {' or '.join([LOCAL_LAUNCHER, *drives])}")
        if launcher != executor:
            raise ValueError(
                f"{launcher} is for profiles with that executor, and this one has {executor}"
            )
        if info.data.get("start_prefect_server"):
            raise ValueError(
                f"{launcher} and start_prefect_server exclude each other: the server would be on "
                f"the job's node; name one by prefect_api_url"
            )
        return launcher

    @model_validator(mode="after")
    def _check_section(self) -> Profile:
        self.section.check()
        return self

    @classmethod
    def from_record(cls, values: Mapping[str, Any]) -> Profile:
        """Read a run's record of its profile, with the section of the executor that it names.

        It may be another version's: keys that executors' sections had then are left out, and
        options of sbatch that are refused now are kept.

        Raises:
            pydantic.ValidationError: every mistake, with its place.
        """
        model = profile_model(values.get("executor", "local"))
        known = {
            name: {key: inner for key, inner in value.items() if key in keys}
            if name in known_executors() and (keys := known_keys(model, (name,)))
            else value
            for name, value in values.items()
        }
        return model.model_validate_json(json.dumps(known), context=OF_RECORD)

    @property
    def section(self) -> Any:
        """The executor's own section: the `Config` of its module."""
        return getattr(self, self.executor if self.executor in known_executors() else _SETTINGS)

    def defaults_under(self, document: Document) -> Document:
        """Return the defaults as the layer below a pipeline's document."""
        layer = self._written_defaults or written_at(self.defaults, Origin(f"profile {self.name}"))
        written = document.get(("stages",))
        for stage in layer.get(("stages",)) or ():
            if not isinstance(written, dict) or stage not in written:
                layer = layer.without(("stages", stage))
        return layer


@functools.cache
def profile_model(executor: str = "local") -> type[Profile]:
    """Return the model of profiles: what all have, and the sections of executors.

    Args:
        executor: a dotted one has its section under `settings`.

    Raises:
        ValueError: there is no such executor, or it is none.
    """
    names = dict(zip(known_executors(), known_executors(), strict=True))
    if executor not in names:
        names[_SETTINGS] = executor
    sections: dict[str, Any] = {}
    for key, name in names.items():
        config = executor_config(name)
        sections[key] = (config, Field(config(), description=f"where the executor is {name}."))
    return create_model("Profile", __base__=Profile, __doc__=Profile.__doc__, **sections)


def load_profile(
    given: str | Path = "local",
    overrides: Sequence[str] = (),
    *,
    environ: Mapping[str, str] = os.environ,
    is_elsewhere: bool = False,
) -> Profile:
    """Read a profile, with what it extends (`extends: NAME`, or a path) laid under it.

    Args:
        given: a path, or the name of a file in cluster_profiles.
        overrides: `profile.key=value`; those without `profile.` are the pipeline's.
        is_elsewhere: whether it is read for another machine, which may have the variables of the
            environment that are not set here: their references stay, except below `ssh:`.

    Raises:
        UsageError: there is no such profile.
        ConfigError: every mistake in it.
    """
    path = find_file("cluster_profiles", given)
    document, problems = _read_layers(path)
    document, more = _with_overrides(document, for_profile(overrides))
    problems += more + list(secret_problems(document)) + _shell_variable_problems(document)
    # The pipeline's own references stand for what the pipeline says, not for what stands here.
    defaults = document.section(("defaults",))
    document, unreplaced = interpolate(document.without(("defaults",)), environ)
    document = document.with_part(("name",), _name_of(document, path))
    problems += unreplaced + list(secret_problems(document))
    if defaults.values is not None:
        document = document.with_part(("defaults",), defaults)
    profile, more = validated_profile(document)
    # A text whose reference could not be replaced has been reported: one problem is enough.
    places = {(one.source, one.line, one.column) for one in unreplaced if one.line}
    problems += [one for one in more if (one.source, one.line, one.column) not in places]
    if is_elsewhere:
        here = [one for one in problems if not one.is_of_machine or "'ssh." in one.message]
        problems = here if here or profile is not None else problems
    raise_if_any(problems)
    assert profile is not None
    if defaults.values is not None:
        profile._written_defaults = defaults
    return profile


_READ_BY_A_SHELL = ("setup", "srun_options")


def _shell_variable_problems(document: Document) -> list[Problem]:
    """Report `$NAME` where no job reads it; the settings of a user's own executor may use one.

    $ORIGIN, $LIB and $PLATFORM are of the dynamic linker, as in LD_LIBRARY_PATH.
    """
    problems = []
    for key in leaves(document.without(("defaults",)).without((_SETTINGS,)).values):
        name = re.search(r"\$(?!(?:ORIGIN|LIB|PLATFORM)\b)([A-Za-z_]\w*)", str(document.get(key)))
        if name and key[-1] not in _READ_BY_A_SHELL and key != READ_BY_A_JOB:
            problems.append(
                document.origin(key).problem(
                    f"'{dotted(key)}': ${name[1]} is not replaced; an environment variable is "
                    f"written ${{env:{name[1]}}}"
                )
            )
    return problems


def load_own_profile(given: str | Path, overrides: Sequence[str] = ()) -> Profile:
    """Return `load_profile(...)` for what runs on this machine, not on a login node.

    Raises:
        UsageError: there is no such profile, or it has `ssh:`.
        ConfigError: as of `load_profile`.
    """
    profile = load_profile(given, overrides)
    if profile.ssh is not None:
        raise UsageError(
            f"profile {given} is for the login node {profile.ssh.label} (`ssh:`), and this command "
            f"does not run over SSH: give it on the cluster, with a profile without `ssh:`."
        )
    return profile


def has_login_node(given: str | Path, overrides: Sequence[str] = ()) -> bool:
    """Whether a profile has `ssh:`, whatever mistakes it has elsewhere.

    Raises:
        UsageError: there is no such profile.
        ConfigError: it is no YAML, or mistakes of `extends`.
    """
    document, _ = _read_layers(find_file("cluster_profiles", given))
    document, _ = _with_overrides(document, for_profile(overrides))
    return document.get(("ssh",)) is not None


def merged_layers(given: str | Path) -> Document:
    """Return a profile as written, with what it extends laid under it; references stay.

    Raises:
        UsageError, ConfigError: as of `load_profile`.
    """
    document, problems = _read_layers(find_file("cluster_profiles", given))
    raise_if_any(problems)
    return document


def _read_layers(path: Path) -> tuple[Document, list[Problem]]:
    """Return a file with the profiles that it extends, each laid under the one that does.

    Mappings merge, all else is replaced; every value keeps the line that it was written in.

    Raises:
        ConfigError: a file that is no mapping or no YAML, and mistakes of `extends`.
    """
    document, problems = _parse(path)
    chain = [path]
    while (extended := document.get((_EXTENDS,))) is not None:
        base = _base_of(document, extended, chain)
        lower, more = _parse(base)
        problems += more
        chain.append(base)
        # Each is named after its own file, and extends for itself.
        document = lower.without(("name",)).merged(document.without((_EXTENDS,)))
    return document.without((_EXTENDS,)), problems


def _parse(path: Path) -> tuple[Document, list[Problem]]:
    document, problems = _parsed(path, change_mark(path))
    return document, list(problems)


@functools.lru_cache
def _parsed(path: Path, _: tuple[int, int]) -> tuple[Document, list[Problem]]:
    """Parse a file once while it is not changed: `has_login_node` reads it, then `load_profile`."""
    document, problems = parse_file(path)
    if document.values is None:
        raise_if_any(problems)
        return Document({}, document.origins), problems
    if not isinstance(document.values, dict):
        raise ConfigError([document.origin(()).problem("a profile must be a mapping of keys")])
    return document, problems


def _base_of(document: Document, extended: object, chain: Sequence[Path]) -> Path:
    """Find the file that is meant: not one of those that extend it.

    So a profile may have the name of the one that comes with the project, and extend it.
    """
    origin = document.origin((_EXTENDS,))
    if not isinstance(extended, str):
        message = f"extends must be one profile's name or path, not {type(extended).__name__}"
        raise ConfigError([origin.problem(message)])
    try:
        return find_file("cluster_profiles", extended, beside=chain[-1].parent, left_out=chain)
    except UsageError as error:
        extending = ", which extends ".join(str(path) for path in chain)
        is_own = Path(extended).stem in [path.stem for path in chain]
        hint = f" (It may not be {extending}.)" if is_own else ""
        raise ConfigError([origin.problem(f"extends: {error}{hint}")]) from error


def validated_profile(
    document: Document, full_path: FullPath = lambda path: path
) -> tuple[Profile | None, list[Problem]]:
    """Return the document as a profile, or None with what is wrong with it.

    Args:
        full_path: as of `validated`.
    """
    model, problem = _model_of(document)
    if not problem:
        return validated(model, document, root="the profile", full_path=full_path)
    rest = document.without(("executor",))
    _, problems = validated(model, rest, root="the profile", full_path=full_path)
    place = document.origin(("executor",))
    return None, [*problems, place.problem(f"'{dotted(full_path(('executor',)))}': {problem}")]


def _model_of(document: Document) -> tuple[type[Profile], str | None]:
    """The model of profiles with the executor that is named, or without it and why not."""
    executor = document.get(("executor",))
    if not isinstance(executor, str):
        return profile_model(), None
    if problem := executor_problem(executor):
        return profile_model(), problem
    return profile_model(executor), None


def _name_of(document: Document, path: Path) -> Document:
    if "name" in document.values:
        return document.section(("name",))
    return written_at(path.stem, Origin(str(path)))


def _with_overrides(document: Document, overrides: Sequence[str]) -> tuple[Document, list[Problem]]:
    space = KeySpace()
    model, _ = _model_of(document)
    for path, info in field_paths(model):
        space.settings.add(path)
        if is_open(info.annotation):
            space.open_paths.add(path)
    problems: list[Problem] = []
    for text in overrides:
        override, more = read_override(text)
        problems += more
        if override is None:
            continue
        try:
            for path in space.find(override.key):
                document = apply_override(document, override, path)
        except ValueError as error:
            problems.append(Origin("command line").problem(f"profile.{override.key}: {error}"))
    return document, problems


def read_stage_profile(
    stage: str, own: Document, profile: Profile
) -> tuple[Profile | None, list[Problem]]:
    """Return the profile of a stage, or None with what is wrong with it.

    Args:
        own: the value of the stage's key `runs_on`, a name or a mapping.
        profile: the run's.
    """
    path: KeyPath = ("stages", stage, "runs_on")
    if isinstance(own.values, str):
        try:
            return _of_the_same_run(load_profile(own.values), profile, own, path)
        except (UsageError, ConfigError) as error:
            return None, [own.origin(()).problem(f"'{dotted(path)}': {error}")]
    if problems := [
        own.origin((key,)).problem(
            f"'{dotted((*path, key))}': {key} is of a whole run; set profile.{key}"
        )
        for key in own.values
        if key in OF_THE_RUN
    ]:
        return None, problems
    values = profile.model_dump(mode="json", exclude={"launcher"})
    base = written_at(values, Origin(f"profile {profile.name}"))
    found, problems = validated_profile(base.merged(own), lambda inner: (*path, *inner))
    return _of_the_same_run(found, profile, own, path) if found else (None, problems)


def _of_the_same_run(
    found: Profile, profile: Profile, own: Document, path: KeyPath
) -> tuple[Profile, list[Problem]]:
    problem = stage_launcher_problem(profile.launcher, found.executor)
    advice = (
        f"Set it to {{}} or to a profile with executor {profile.launcher}, or add --launcher "
        f"{LOCAL_LAUNCHER}"
    )
    problems = []
    if problem:
        problems.append(own.origin(()).problem(f"'{dotted(path)}': {problem}. {advice}"))
    of_run = {key: getattr(profile, key) for key in OF_THE_RUN - {"name"}}
    return found.model_copy(update=of_run), problems


def stage_launcher_problem(launcher: str, executor: str) -> str | None:
    """Say why a stage with this executor cannot be in a run with this launcher; None: it can."""
    if launcher in (LOCAL_LAUNCHER, executor):
        return None
    return (
        f"the stage has executor {executor}, and launcher {launcher} allows stages of the executor "
        f"{launcher} only: its job may continue on another node, where others cannot be followed"
    )
