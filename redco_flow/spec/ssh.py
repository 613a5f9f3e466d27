"""Machines that are reached over SSH, in a profile: their addresses, and a cluster's login node."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints, ValidationError

from redco_flow.errors import UsageError
from redco_flow.local_paths import expanded
from redco_flow.spec.model import Line, PositiveInt, StrictModel

_PROGRAM = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_TARGET = re.compile(r"(?:([^@:]+)@)?([^@:]+)(?::(.+))?")


def _expanded(text: str) -> str:
    return str(expanded(_replaced(text)))


def _replaced(text: str) -> str:
    if "${" in text:
        raise ValueError("must not hold '${': a variable here is one of this machine")
    return text


def _on_a_host(text: str) -> str:
    if not text.startswith(("/", "~/")):
        raise ValueError("must begin with / or ~/ (the home directory on the host)")
    if ".." in Path(text).parts:
        raise ValueError("must not hold '..'")
    if ":" in text:
        raise ValueError("must not hold ':', which separates paths in PATH and PYTHONPATH")
    return _replaced(text)


def _program(text: str) -> str:
    return text if _PROGRAM.fullmatch(text) else _on_a_host(text)


HostAddress = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:-]*$")]
"""A DNS name, an IP address, or an alias of ~/.ssh/config."""
UserName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.@-]*$")]
JumpHost = Annotated[
    str,
    StringConstraints(
        pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9][A-Za-z0-9_.-]*(:[0-9]{1,5})?$"
    ),
]
"""`[user@]host[:port]`, through which a host is reached."""
LocalFile = Annotated[Line, AfterValidator(_expanded)]
HostPath = Annotated[Line, AfterValidator(_on_a_host)]
HostProgram = Annotated[Line, AfterValidator(_program)]
"""A program's path on a host, or a name that is looked for in its PATH."""


class SshTarget(StrictModel):
    """A machine that is reached over SSH.

    Args:
        address: a host name or an IP address.
        user, port: None leaves them to ~/.ssh/config, then to SSH's own defaults.
        key: a private key's file on this machine; None takes the agent's and SSH's default files.
        jump_host: `[USER@]HOST[:PORT]` through which it is reached.
    """

    address: HostAddress
    user: UserName | None = None
    port: Annotated[PositiveInt, Field(le=65535)] | None = None
    key: LocalFile | None = None
    jump_host: JumpHost | None = None

    @property
    def label(self) -> str:
        """The host in messages and records: the address, with its port where one is given."""
        return self.address if self.port is None else f"{self.address}:{self.port}"


class LoginNode(SshTarget):
    """A cluster's login node, from which runs are started that are submitted from elsewhere.

    Args:
        address: a host name, an IP address or an alias of ~/.ssh/config.
        known_hosts: the file of its key; None takes ~/.ssh/known_hosts. No other key is accepted.
        workspace: the workspace on the cluster; takes the place of the profile's `workspace`.
        python: the interpreter there that has redco-flow: a path, or a name in its PATH.
    """

    known_hosts: LocalFile | None = None
    workspace: HostPath = "~/redco-workspace"
    python: HostProgram = "python3"


def login_node(text: str, base: LoginNode | None = None) -> LoginNode:
    """Return the node that `--ssh [USER@]HOST[:WORKSPACE]` means.

    Args:
        base: of the profile; has what the text does not name, and the way to its own address.

    Raises:
        UsageError: it is not written so.
    """
    found = _TARGET.fullmatch(text)
    try:
        if found is None:
            raise ValueError("write [USER@]HOST[:WORKSPACE]")
        user, address, workspace = found.groups()
        given = {"address": address, "user": user, "workspace": workspace}
        values = {} if base is None else base.model_dump(mode="json")
        if base is not None and address != base.address:  # the way to another machine is another
            values = {key: values[key] for key in ("known_hosts", "workspace", "python")}
        return LoginNode.from_json(values | {key: one for key, one in given.items() if one})
    except ValidationError as error:
        first = error.errors()[0]
        message = f"{first['loc'][0]}: {first['msg'].removeprefix('Value error, ')}"
        raise UsageError(f"--ssh {text!r}: {message}.") from error
    except ValueError as error:
        raise UsageError(f"--ssh {text!r}: {error}.") from error
