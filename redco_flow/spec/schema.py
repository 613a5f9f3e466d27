"""The JSON Schema of a pipeline file, for editors: completion and marks while typing.

Made from the same models that validate; what needs more than one place at once (references,
circles, which stage produces what) only loading can check.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from redco_flow.errors import UsageError
from redco_flow.spec.model import NAME_PATTERN
from redco_flow.spec.pipeline import PipelineSection
from redco_flow.spec.recipe_settings import (
    SETTINGS,
    kind_with_settings,
    settings_type_of,
)
from redco_flow.spec.stage_kind import StageKind, find_stage_kind, known_stage_kinds

_REFERENCE = {"type": "string", "pattern": r"\$\{"}
_DOTTED = {"type": "string", "pattern": r"\.|^python:"}


def json_schema(recipe: str | None = None) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a pipeline, every built-in stage kind included.

    Args:
        recipe: whose `Settings` say what `settings` has; None: any.

    Raises:
        UsageError: the recipe cannot be imported.
    """
    kinds = [find_stage_kind(name) for name in known_stage_kinds()]
    try:
        own = settings_type_of(recipe) if recipe else None
        typed = [kind_with_settings(kind, own) if own else kind for kind in kinds]
    except ValueError as error:
        raise UsageError(f"recipe '{recipe}': {error}") from error
    schema = schema_of(typed)
    if own:
        schema["properties"]["settings"] = {"$ref": f"#/$defs/{SETTINGS}"}
    return schema


def schema_of(kinds: list[StageKind]) -> dict[str, Any]:
    """Return the JSON Schema of pipelines whose stages are of these kinds, or of dotted ones."""
    models: list[type[BaseModel]] = [PipelineSection, *(kind.config_type for kind in kinds)]
    references, schema = models_json_schema(
        [(model, "validation") for model in models],
        title="redco-flow pipeline",
        description="A pipeline of redco-flow: data, model and stages.",
    )
    definitions = schema["$defs"]
    top = definitions.pop(_definition_name(references[PipelineSection, "validation"]))
    for kind in kinds:
        config = definitions.pop(_definition_name(references[kind.config_type, "validation"]))
        definitions[f"stage_{kind.name}"] = _stage_schema(kind, config)
    top["properties"]["stages"] = _stages_schema(kinds)
    schema = _with_references({**top, **schema})
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _definition_name(reference: dict[str, Any]) -> str:
    return str(reference["$ref"]).rpartition("/")[2]


def _stage_schema(kind: StageKind, config: dict[str, Any]) -> dict[str, Any]:
    """A stage's body: the Config's fields, its kind and what its input slots take."""
    said = f"{kind.name}; needed where the stage is not named so."
    properties = {"kind": {"const": kind.name, "description": said}, **config["properties"]}
    for name, slot in kind.inputs.items():
        one = {"type": ["string", "null"]}
        many = {"anyOf": [one, {"type": "array", "items": {"type": "string"}}]}
        aliased = ", RUN/STAGE, an artifact's id, or @ALIAS" if slot.kind == "checkpoint" else ""
        aliased += ", or @last" if slot.is_optional else ""
        taken = f"STAGE or STAGE/SELECTOR{aliased}: its input of kind {slot.kind}."
        value: dict[str, Any] = many if slot.many else one
        if slot.options:
            options = {option: config["properties"][key] for option, key in slot.options.items()}
            taken += f" Or {{{slot.kind}: REFERENCE, {': …, '.join(options)}: …}}."
            value = {"anyOf": [one, _with_options(slot.kind, options)]}
        properties[name] = {"description": taken, **value}
    required = [name for name in config.get("required", []) if name not in kind.sections]
    stage = {"type": ["object", "null"], "properties": properties, "additionalProperties": False}
    return {"title": f"stage kind {kind.name}", **stage, "required": required}


def _with_options(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    properties = {kind: {"type": "string"}, **options}
    closed = {"additionalProperties": False, "required": [kind]}
    return {"type": "object", "properties": properties, **closed}


def _stages_schema(kinds: list[StageKind]) -> dict[str, Any]:
    """A stage named like a kind may leave `kind` out; any other must say it."""
    others = {"properties": {"kind": _DOTTED}, "required": ["kind"], "type": "object"}
    named = {
        kind.name: {"anyOf": [{"$ref": f"#/$defs/stage_{kind.name}"}, _with_kind(kinds), others]}
        for kind in kinds
    }
    return {
        "description": PipelineSection.model_json_schema()["properties"]["stages"]["description"],
        "type": "object",
        "minProperties": 1,
        "propertyNames": {"pattern": NAME_PATTERN},
        "properties": named,
        "additionalProperties": {"anyOf": [_with_kind(kinds), others]},
    }


def _with_kind(kinds: list[StageKind]) -> dict[str, Any]:
    choices = [{"$ref": f"#/$defs/stage_{kind.name}"} for kind in kinds]
    return {"type": "object", "required": ["kind"], "anyOf": choices or [True]}


def _with_references(schema: Any) -> Any:
    """Let `${…}` stand wherever a number or a boolean may."""
    if isinstance(schema, list):
        return [_with_references(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: _with_references(part) for key, part in schema.items()}
    if schema.get("type") in ("integer", "number", "boolean"):
        known = {name: schema[name] for name in ("description", "default") if name in schema}
        return {**known, "anyOf": [schema, _REFERENCE]}
    return inner
