"""The settings of harness."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from redco_flow.local_paths import files_below, is_folder
from redco_flow.models.find import FAMILIES, find_module_name
from redco_flow.spec.model import DataFolder, NonNegativeInt, Placement, PositiveInt, Text, Texts
from redco_flow.spec.stage_kind import InputSlot, StageConfig
from redco_flow.stages.device_layout import layout_problems

INPUTS = {"checkpoint": InputSlot(kind="checkpoint", default_selector="last")}
OUTPUTS = {"metrics": "metrics"}
SEVERAL_PROCESSES = True


class Config(StageConfig):
    """Evaluation by EleutherAI's lm-eval, on its tasks or your own.

    Args:
        tasks: names of tasks, groups or tags: those in `tasks_folder`, or lm-eval's.
        tasks_folder: a folder with tasks of your own, as lm-eval reads them: YAML, and Python
            functions that they name. Relative paths in them (`data_files`) begin there. All its
            files are part of the fingerprint.
        num_fewshot: examples before each question; None: what each task says.
        num_examples: the first ones of each task; None: all.
        apply_chat_template: render questions by the chat template of the checkpoint's tokenizer.
        system_instruction: a system prompt before each question.
        max_length: tokens that the model reads at once; None: as many as its config says.
        max_gen_toks: tokens to generate at most where a task does not say it.
        bootstrap_iters: draws for the standard errors of pooled metrics.
        confirm_run_unsafe_code: allow tasks that run what the model writes.
        seed: of the choice of few-shot examples, and of draws: of a task's own, as the order of
            answers, and of those at a temperature. As `lm-eval --seed`.
        batch_size: rows at once over all devices.
        num_model_shards: devices that split every product among them.
        fsdp: data-parallel devices that share one copy of the parameters as they are loaded.
    """

    tasks: Texts = Field(min_length=1)
    tasks_folder: DataFolder | None = None
    num_fewshot: NonNegativeInt | None = None
    num_examples: PositiveInt | None = None
    apply_chat_template: bool = False
    system_instruction: Text | None = None
    max_length: Annotated[int, Field(ge=2)] | None = None
    max_gen_toks: PositiveInt = 256
    bootstrap_iters: NonNegativeInt = 100_000
    confirm_run_unsafe_code: bool = False
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 1234
    batch_size: Annotated[PositiveInt, Placement()] = 16
    num_model_shards: Annotated[PositiveInt, Placement()] = 1
    fsdp: Annotated[PositiveInt, Placement()] = 1

    @field_validator("tasks")
    @classmethod
    def _named_once(cls, tasks: list[str]) -> list[str]:
        if len(set(tasks)) < len(tasks):
            raise ValueError("names a task twice")
        return tasks


def device_problems(config: Config, num_devices: int) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield which settings this number of devices cannot have."""
    return layout_problems(config, num_devices)


def code_modules(config: Config) -> list[str]:
    """Every family: which one the checkpoint is of, no plan can know."""
    return [*map(find_module_name, FAMILIES)]


def data_files(config: Config) -> list[Path]:
    """Return the files of the user's own tasks."""
    folder = config.tasks_folder
    if folder is None:
        return []
    return [path for path in files_below(folder) if "__pycache__" not in path.parts]


def data_identity(config: Config) -> dict[str, Any]:
    """Return the version of lm-eval, whose tasks change with it."""
    return {"lm-eval": importlib.metadata.version("lm-eval")} if _is_installed() else {}


def data_problems(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield what keeps the evaluation from starting."""
    if not _is_installed():
        advice = "pip install 'redco-flow[harness]'"
        yield ("tasks",), f"needs the package lm-eval, which is not installed: {advice}"
    folder = config.tasks_folder
    if (
        folder is not None
        and is_folder(folder)
        and not any(path.suffix == ".yaml" for path in data_files(config))
    ):
        yield ("tasks_folder",), f"{folder} is no folder with tasks: it has no .yaml file"


def _is_installed() -> bool:
    return importlib.util.find_spec("lm_eval") is not None
