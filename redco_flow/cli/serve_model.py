"""The verb serve-model: a checkpoint behind OpenAI's API, for trying it."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from typing import Any

from redco_flow.cli.arguments import (
    Verbs,
    add_checkpoint,
    add_workspace,
    cannot_listen,
    check_port,
    workspace_path,
)
from redco_flow.cli.chat import add_model_options, end_of_log, model_request
from redco_flow.errors import UsageError
from redco_flow.tracking.artifacts import Artifact
from redco_flow.tracking.workspace import Workspace

TOKEN_VARIABLE = "REDCO_FLOW_MODEL_TOKEN"  # noqa: S105 (a name)
_PORT = 8000


def register(verbs: Verbs) -> None:
    """Declare the verb."""
    serve = verbs.add("serve-model", _serve)
    add_checkpoint(serve, or_published=True)
    serve.add_argument(
        "--port", type=int, default=_PORT, metavar="N", help=f"port; 0 takes a free one ({_PORT})"
    )
    serve.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help=f"address to listen at (127.0.0.1); others need a token in {TOKEN_VARIABLE}",
    )
    add_model_options(serve)
    add_workspace(serve)


def _serve(options: argparse.Namespace) -> int:
    from redco_flow.orchestrate.checkpoints.chat import (
        Chat,
        ProcessDied,
        conversing,
        find_model,
        name_of,
    )
    from redco_flow.orchestrate.checkpoints.completions import Completions

    model = find_model(Workspace(workspace_path(options).absolute()), options.checkpoint)
    request = {**model_request(options), **conversing(model), "needs_template": False}
    names = [name_of(model), options.checkpoint]
    if isinstance(model, Artifact):
        names = list(dict.fromkeys([*names, model.id]))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with (
        _listening(options) as server,
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log,
    ):
        sys.stderr.write(f"loading {names[0]}\n")
        try:
            with Chat(request, log.fileno()) as chat:
                server.completions = Completions(chat, names)
                sys.stderr.write(f"{server.url} answers as model {names[0]}; Ctrl-C ends it\n")
                server.serve_forever()
                if server.died is not None:
                    raise server.died
        except ProcessDied as error:
            raise ProcessDied(f"{error} It said:{end_of_log(log)}") from error
        except KeyboardInterrupt:
            sys.stderr.write("ended\n")
    return 0


def _listening(options: argparse.Namespace) -> Any:
    """Return the server, before the model is loaded: a port that is taken is known at once."""
    from redco_flow.orchestrate.checkpoints.model_server import ModelServer
    from redco_flow.orchestrate.http_server import LOOPBACK

    token = os.environ.get(TOKEN_VARIABLE, "")
    if options.host not in LOOPBACK and not token:
        raise UsageError(
            f"--host {options.host}: other machines could ask the model. Set {TOKEN_VARIABLE} to a "
            "token that requests must have as `Authorization: Bearer TOKEN`."
        )
    check_port(options.port)
    try:
        return ModelServer(options.host, options.port, token)
    except OSError as error:
        raise cannot_listen(options.host, options.port, error) from error
