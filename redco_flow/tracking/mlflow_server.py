"""An MLflow server as a view of trainings and promotions: runs, versions of models, aliases.

Speaks MLflow's REST API, so that no machine needs its packages. A training's MLflow run is found
by its stage's fingerprint and a model's version by its artifact's id, so nothing of ours depends
on what the server says, and it can be filled again.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redco_flow.bounded import within
from redco_flow.tracking.aliases import Alias
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.results import StageResult
from redco_flow.tracking.workspace import Workspace

_SCHEME = "redco-flow"

FINGERPRINT_TAG = "redco_flow.fingerprint"
ARTIFACT_TAG = "redco_flow.artifact"
ADDRESS_VARIABLE = "MLFLOW_TRACKING_URI"

_SECONDS = 10.0  # for one read
_SECONDS_FOR_ALL = 30.0
_MOST_PARAMS = 100  # of one request
_MOST_CHARACTERS = 500  # of a parameter's value, as servers before 2.8 have it
_NOT_IN_NAMES = re.compile(r"[^\w\-. /]")


def tag_outputs(workspace: Workspace, result: StageResult) -> str:
    """Tag the MLflow run of a training with where each of its artifacts is.

    Returns:
        Why that could not be done; empty where it was.
    """
    store = ArtifactStore(workspace)
    try:
        server = MlflowServer.of(os.environ)
        run = server.find_run(result.fingerprint)
        if run:
            made = {name: store.find(one) for name, one in result.outputs.items()}
            tags = {
                f"redco_flow.output.{name}": source_of(one.path)
                for name, one in made.items()
                if one is not None
            }
            server.tag(run, tags)
        return ""
    except MlflowError as error:
        return f"MLflow does not know its artifacts: {error}"


def mirror_alias(workspace: Workspace, alias: Alias) -> str:
    """Have the registry's alias name the version that is the promoted checkpoint.

    Nothing is done where the environment names no MLflow server, or no run there trained it.

    Returns:
        Why that could not be done; empty where it was, or there was nothing to do.
    """
    if not os.environ.get(ADDRESS_VARIABLE, "").startswith("http"):
        return ""
    checkpoint = ArtifactStore(workspace).get(alias.checkpoint)
    try:
        server = MlflowServer.of(os.environ)
        run = server.find_run(str(checkpoint.produced_by.get("fingerprint", "")))
        if not run:
            return ""
        model, source = alias.name.model, source_of(checkpoint.path)
        version = server.version_of(model, checkpoint.id, run=run, source=source)
        server.set_alias(model, alias.name.alias, version)
        return ""
    except MlflowError as error:
        return f"MLflow's alias of {alias.name} was not moved: {error}"


def source_of(path: Path) -> str:
    """Return an artifact's place as an address that MLflow takes for no file of its own."""
    return f"{_SCHEME}://{path}"


class MlflowError(Exception):
    """The server did not do what it was asked; has its words, and no password."""


@dataclass(frozen=True)
class MlflowServer:
    """A tracking server.

    Args:
        url: its address, http or https.
        authorization: the header that lets us in; empty where the server asks for none.
    """

    url: str
    authorization: str = field(default="", repr=False)

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> MlflowServer:
        """Return the server that MLflow's own variables name.

        Raises:
            MlflowError: MLFLOW_TRACKING_URI is not set, or names no server.
        """
        url = environ.get(ADDRESS_VARIABLE, "")
        if not url.startswith(("http://", "https://")):
            raise MlflowError(
                f"environment variable {ADDRESS_VARIABLE} must hold the http address of an MLflow "
                "server; for files alone, `mlflow server` shows them as one"
            )
        token, user = environ.get("MLFLOW_TRACKING_TOKEN"), environ.get("MLFLOW_TRACKING_USERNAME")
        if token:
            return cls(url.rstrip("/"), f"Bearer {token}")
        if user:
            pair = f"{user}:{environ.get('MLFLOW_TRACKING_PASSWORD', '')}"
            return cls(url.rstrip("/"), f"Basic {base64.b64encode(pair.encode()).decode()}")
        return cls(url.rstrip("/"))

    def experiment(self, name: str) -> str:
        """Return the id of an experiment, made where there is none of this name."""
        try:
            found = self._get("experiments/get-by-name", experiment_name=name)
            return str(found["experiment"]["experiment_id"])
        except MlflowNotFound:
            return str(self._post("experiments/create", name=name)["experiment_id"])

    def find_run(self, fingerprint: str) -> str:
        """Return the id of the run that logs a stage of this fingerprint; empty where none does."""
        experiments = self._post("experiments/search", max_results=1000).get("experiments", ())
        found = self._post(
            "runs/search",
            experiment_ids=[one["experiment_id"] for one in experiments],
            filter=f"tags.`{FINGERPRINT_TAG}` = '{fingerprint}'",
            max_results=1,
        )
        return str(found["runs"][0]["info"]["run_id"]) if found.get("runs") else ""

    def create_run(
        self, experiment: str, name: str, params: Mapping[str, Any], tags: Mapping[str, str]
    ) -> str:
        """Return the id of a new run.

        Args:
            experiment: its id.
            params: settings, which may be nested; must hold no secret.
        """
        made = self._post(
            "runs/create",
            experiment_id=experiment,
            run_name=name,
            start_time=_now(),
            tags=_pairs(tags),
        )
        run = str(made["run"]["info"]["run_id"])
        flat = _pairs({key: text[:_MOST_CHARACTERS] for key, text in _flat(params).items()})
        for start in range(0, len(flat), _MOST_PARAMS):
            self._post("runs/log-batch", run_id=run, params=flat[start : start + _MOST_PARAMS])
        return run

    def log(self, run: str, scalars: Mapping[str, float], step: int) -> None:
        """Add numbers of one step; those that are not finite are left out."""
        metrics = [
            {"key": _name(key), "value": value, "step": step, "timestamp": _now()}
            for key, value in scalars.items()
            if math.isfinite(value)
        ]
        self._post("runs/log-batch", run_id=run, metrics=metrics)

    def tag(self, run: str, tags: Mapping[str, str]) -> None:
        """Write tags on a run, in place of those of the same names."""
        self._post("runs/log-batch", run_id=run, tags=_pairs(tags))

    def set_status(self, run: str, status: str) -> None:
        """Say where a run is: RUNNING, FINISHED, FAILED or KILLED."""
        end = {} if status == "RUNNING" else {"end_time": _now()}
        self._post("runs/update", run_id=run, status=status, **end)

    def version_of(self, model: str, artifact: str, *, run: str, source: str) -> str:
        """Return the version that an artifact is of a model, made where it is none yet.

        Args:
            model: a registered model, made where there is none.
            artifact: an id of ours.
            run: the id of the MLflow run that trained it; empty where none did.
            source: where its files are.
        """
        with contextlib.suppress(MlflowExists):
            self._post("registered-models/create", name=model)
        found = self._get("model-versions/search", filter=f"name='{model}'", max_results="1000")
        for version in found.get("model_versions", ()):
            if {"key": ARTIFACT_TAG, "value": artifact} in version.get("tags", ()):
                return str(version["version"])
        of_run = {"run_id": run} if run else {}
        tags = _pairs({ARTIFACT_TAG: artifact})
        made = self._post("model-versions/create", name=model, source=source, tags=tags, **of_run)
        return str(made["model_version"]["version"])

    def set_alias(self, model: str, alias: str, version: str) -> None:
        """Have an alias of a registered model name a version from now on."""
        self._post("registered-models/alias", name=model, alias=alias, version=version)

    def _get(self, path: str, **query: str) -> dict[str, Any]:
        return self._ask(f"{path}?{urllib.parse.urlencode(query)}", None)

    def _post(self, path: str, **body: Any) -> dict[str, Any]:
        return self._ask(path, json.dumps(body).encode())

    def _ask(self, path: str, body: bytes | None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json", "User-Agent": "redco-flow"}
        if self.authorization:
            headers["Authorization"] = self.authorization
        address = f"{self.url}/api/2.0/mlflow/{path}"
        request = urllib.request.Request(address, body, headers)  # noqa: S310 (http: see `of`)

        def exchange() -> bytes:
            with urllib.request.urlopen(request, timeout=_SECONDS) as answer:  # noqa: S310
                return bytes(answer.read())

        try:
            return dict(json.loads(within(_SECONDS_FOR_ALL, exchange) or b"{}"))
        except urllib.error.HTTPError as error:
            raise _error_of(error) from None
        except (OSError, ValueError) as error:
            raise MlflowError(f"no answer of the MLflow server: {error}") from error


class MlflowNotFound(MlflowError):
    """There is no such thing on the server."""


class MlflowExists(MlflowError):
    """There is one of this name already."""


def _error_of(error: urllib.error.HTTPError) -> MlflowError:
    try:
        said = json.loads(error.read())
    except ValueError:
        said = {}
    kinds = {"RESOURCE_DOES_NOT_EXIST": MlflowNotFound, "RESOURCE_ALREADY_EXISTS": MlflowExists}
    kind = kinds.get(str(said.get("error_code")), MlflowError)
    return kind(f"the MLflow server answers {error.code}: {said.get('message') or error.reason}")


def _pairs(values: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in values.items()]


def _flat(values: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """Nested settings by dotted name."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        name = f"{above}{_name(key)}"
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{name}.")
        else:
            flat[name] = value if isinstance(value, str) else json.dumps(value)
    return flat


def _name(key: str) -> str:
    """A name as MLflow takes it."""
    return _NOT_IN_NAMES.sub("_", key)


def _now() -> int:
    return int(time.time() * 1000)
