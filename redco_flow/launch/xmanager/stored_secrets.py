"""Variables that a job itself fetches from Google's Secret Manager: only names travel with it.

Uses the token that Google's machines give to what runs on them. Nothing is kept or printed.
"""

from __future__ import annotations

import base64
import json
import urllib.request
from collections.abc import Mapping
from typing import Any

from redco_flow.errors import RedcoFlowError

STORED_VARIABLES = "REDCO_FLOW_STORED_VARIABLES"
"""Variable name to a secret version's name, as JSON."""

METADATA = "http://metadata.google.internal"
MANAGER = "https://secretmanager.googleapis.com"
_CREDENTIALS = "computeMetadata/v1/instance/service-accounts/default/token"
_SECONDS_TO_ASK = 30.0


class SecretNotFetched(RedcoFlowError):
    """Secret Manager did not give a secret; nothing has run. The message has no value."""


def fetch_stored_variables(
    environ: Mapping[str, str], *, metadata: str = METADATA, manager: str = MANAGER
) -> dict[str, str]:
    """Return the variables that STORED_VARIABLES names, with their values.

    Args:
        metadata, manager: the addresses of Google's services.

    Raises:
        SecretNotFetched: names the variable and the secret.
    """
    names: dict[str, str] = json.loads(environ.get(STORED_VARIABLES, "{}"))
    if not names:
        return {}
    try:
        token = _ask(f"{metadata}/{_CREDENTIALS}", {"Metadata-Flavor": "Google"})["access_token"]
    except (OSError, ValueError, KeyError) as error:
        raise SecretNotFetched(f"no token from {metadata}: {error}") from error
    authorized = {"Authorization": f"Bearer {token}"}
    found = {}
    for variable, name in names.items():
        try:
            said = _ask(f"{manager}/v1/{name}:access", authorized)
            found[variable] = base64.b64decode(said["payload"]["data"]).decode()
        except (OSError, ValueError, KeyError) as error:
            raise SecretNotFetched(
                f"variable {variable}: {name} could not be read ({error}); let the job's service "
                f"account have the role Secret Manager Secret Accessor."
            ) from error
    return found


def _ask(address: str, headers: Mapping[str, str]) -> Any:
    request = urllib.request.Request(address, headers=dict(headers))  # noqa: S310 (ours, above)
    with urllib.request.urlopen(request, timeout=_SECONDS_TO_ASK) as answer:  # noqa: S310
        return json.load(answer)
