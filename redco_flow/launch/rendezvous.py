"""Let the ranks of a job find each other, and make sure they are about to do the same thing.

Rank 0 listens on a free port and writes where into the attempt's directory; the others connect,
each says its facts (config, code, versions, settings of JAX), and all get one answer: the address
that JAX may use, or why nobody starts. The port that was reached here is the one JAX gets, so a
wrong address or a firewall shows here, in words, and not as an abort minutes later.
Sockets and files only; knows no JAX.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redco_flow.errors import RedcoFlowError
from redco_flow.launch.process_place import ProcessPlace
from redco_flow.records import read_json_if_present, write_json

_CONNECT_SECONDS = 5.0
_SECONDS_BETWEEN_LOOKS = 0.2
_MAX_MESSAGE_BYTES = 1 << 20
_MAX_DIFFERENCES_SHOWN = 5

Facts = Mapping[str, str]
WhileWaiting = Callable[[str], None]


class CannotMeet(RedcoFlowError):
    """The ranks did not come together, or are not about to do the same; nothing has run."""


@dataclass(frozen=True)
class Meeting:
    """What the ranks agreed on.

    Args:
        coordinator: host:port for `jax.distributed.initialize`; None: there is nothing to do.
    """

    coordinator: str | None


@dataclass
class Rendezvous:
    """The meeting of one start of a job.

    Args:
        folder: the attempt's directory, which every rank can read.
        place: of this process.
        facts: name to value, of everything that must be the same on every rank.
        seconds: how long to wait for the others.
        while_waiting: called again and again with words on what is waited for; may raise.
    """

    folder: Path
    place: ProcessPlace
    facts: Facts
    seconds: float
    while_waiting: WhileWaiting = lambda _: None
    _deadline: float = field(init=False)

    def __post_init__(self) -> None:
        self._deadline = time.monotonic() + self.seconds

    @property
    def path(self) -> Path:
        """The file in which rank 0 says where it listens."""
        return self.folder / "ranks" / f"meeting{self.place.restart}.json"

    def meet(self) -> Meeting:
        """Return once every rank is here and all agree.

        Raises:
            CannotMeet: a rank is missing, cannot be reached, or differs; names it.
        """
        return self._host() if self.place.rank == 0 else self._join()

    def call_off(self) -> None:
        """Rank 0: tell the others that there is nothing to do."""
        self._announce({"nothing_to_do": True})

    # Rank 0

    def _host(self) -> Meeting:
        with socket.create_server(("", 0), backlog=self.place.num_processes) as listener:
            port = listener.getsockname()[1]
            word = secrets.token_hex(16)
            self._announce({"addresses": own_addresses(), "port": port, "word": word})
            guests: dict[int, tuple[socket.socket, dict[str, Any]]] = {}
            with contextlib.ExitStack() as open_sockets:
                while len(guests) < self.place.num_processes - 1:
                    self._wait_for_ranks(set(guests))
                    for connection, said in self._receive(listener, word, open_sockets):
                        guests[int(said["rank"])] = (connection, said)
                refusal = self._compare({rank: said for rank, (_, said) in guests.items()})
                for connection, _ in guests.values():
                    _send(connection, {"refusal": refusal})
        if refusal:
            raise CannotMeet(refusal)
        return Meeting(f"{own_addresses()[0]}:{port}")

    def _announce(self, record: dict[str, Any]) -> None:
        self.path.parent.mkdir(exist_ok=True)
        write_json(self.path, record)

    def _wait_for_ranks(self, present: set[int]) -> None:
        missing = sorted(set(range(1, self.place.num_processes)) - present)
        names = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        self.while_waiting(f"waiting for {names} of {self.place.num_processes}")
        if time.monotonic() > self._deadline:
            raise CannotMeet(
                f"{names} of {self.place.num_processes} did not arrive within {self.seconds:g} s: "
                f"see logs/rank{missing[0]}.log and the job's own log. If it only starts slowly, "
                f"raise rendezvous_seconds in the profile."
            )

    def _receive(
        self, listener: socket.socket, word: str, open_sockets: contextlib.ExitStack
    ) -> Iterator[tuple[socket.socket, dict[str, Any]]]:
        """Take in whoever knocks and knows the word; strangers are sent away."""
        listener.settimeout(_SECONDS_BETWEEN_LOOKS)
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            return
        open_sockets.callback(connection.close)
        connection.settimeout(_CONNECT_SECONDS)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            said = _read(connection)
            if secrets.compare_digest(str(said["word"]), word):
                yield connection, said

    def _compare(self, guests: Mapping[int, Mapping[str, Any]]) -> str:
        """Say what differs between rank 0 and the others; "" if nothing does."""
        differences = []
        for rank, said in sorted(guests.items()):
            theirs: Facts = said["facts"]
            for key in sorted({*self.facts, *theirs}):
                mine, other = self.facts.get(key, "not set"), theirs.get(key, "not set")
                if mine != other:
                    host = said["host"]
                    differences.append(
                        f"{key} is {mine!r} on rank 0, {other!r} on rank {rank} ({host})"
                    )
        if not differences:
            return ""
        shown = "; ".join(differences[:_MAX_DIFFERENCES_SHOWN])
        more = len(differences) - _MAX_DIFFERENCES_SHOWN
        rest = f"; and {more} more" if more > 0 else ""
        return f"the ranks do not agree, so none started: {shown}{rest}."

    # The others

    def _join(self) -> Meeting:
        told = self._wait_for_address()
        if told.get("nothing_to_do"):
            return Meeting(None)
        connection, address = self._connect(told["addresses"], told["port"])
        with connection:
            host = os.uname().nodename
            said = {"word": told["word"], "rank": self.place.rank, "host": host}
            _send(connection, {**said, "facts": dict(self.facts)})
            connection.settimeout(self.seconds)
            try:
                answer = _read(connection)
            except (OSError, ValueError) as error:
                raise CannotMeet(
                    f"rank 0 left the meeting at {address}:{told['port']}, or another program "
                    f"listens there ({error or 'no answer'}): see logs/rank0.log."
                ) from error
        if answer["refusal"]:
            raise CannotMeet(answer["refusal"])
        return Meeting(f"{address}:{told['port']}")

    def _wait_for_address(self) -> dict[str, Any]:
        while (told := read_json_if_present(self.path)) is None:
            self.while_waiting("waiting for rank 0")
            if time.monotonic() > self._deadline:
                raise CannotMeet(
                    f"rank 0 did not write {self.path} within {self.seconds:g} s: see "
                    f"logs/rank0.log; or this host does not see the same workspace."
                )
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        record: dict[str, Any] = told
        return record

    def _connect(self, addresses: list[str], port: int) -> tuple[socket.socket, str]:
        """Reach rank 0 by the first of its addresses that works from here."""
        problems: dict[str, str] = {}
        while True:
            for address in addresses:
                try:
                    return socket.create_connection((address, port), _CONNECT_SECONDS), address
                except OSError as error:
                    problems[address] = str(error)
            self.while_waiting(f"cannot reach rank 0 at port {port}")
            if time.monotonic() > self._deadline:
                tried = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
                raise CannotMeet(
                    f"{os.uname().nodename} cannot reach rank 0 at port {port} within "
                    f"{self.seconds:g} s ({tried}): the hosts' names do not resolve there, or a "
                    f"firewall is between them."
                )
            time.sleep(_SECONDS_BETWEEN_LOOKS)


def own_addresses() -> list[str]:
    """Return the names and addresses by which other hosts may reach this one, best first.

    The node's name in Slurm, then the host's own name where it is more than the loopback
    (Debian gives it 127.0.1.1), then the address by which SSH came in, then the one that packets
    leave from.
    """
    host = socket.gethostname()
    names = [
        os.environ.get("SLURMD_NODENAME", ""),
        host if not _is_loopback(host) else "",
        *os.environ.get("SSH_CONNECTION", "").split()[2:3],
    ]
    return list(dict.fromkeys([*filter(None, names), _outgoing_address()]))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except OSError:
        return True  # it does not resolve at all


def _outgoing_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: only chooses a route
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _send(connection: socket.socket, record: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # who has left meanwhile says so in its own log
        connection.sendall(json.dumps(record).encode() + b"\n")


def _read(connection: socket.socket) -> dict[str, Any]:
    data = b""
    while not data.endswith(b"\n"):
        chunk = connection.recv(1 << 16)
        if not chunk or len(data) > _MAX_MESSAGE_BYTES:
            raise ValueError("the connection was closed")
        data += chunk
    record: dict[str, Any] = json.loads(data)
    return record
