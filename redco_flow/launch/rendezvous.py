"""Let the ranks of a job find each other, and make sure they are about to do the same thing.

Rank 0 listens on a free port and writes where into the attempt's directory; the others connect,
each says its facts (config, code, versions, settings of JAX), and all get one answer: the address
that JAX may use, or why none starts. The port that was reached here is the one JAX gets, so a
wrong address or a firewall shows here, in words, and not as an abort minutes later.
Another program that finds the port is no rank and holds nothing up. Sockets and files only.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redco_flow.errors import RedcoFlowError
from redco_flow.launch.processes import RankInfo
from redco_flow.launch.rendezvous_listener import (
    Connection,
    Joining,
    RendezvousAnswer,
    RendezvousListener,
)
from redco_flow.records import read_json_if_present, write_json

_CONNECT_SECONDS = 5.0
_SECONDS_BETWEEN_LOOKS = 0.2
_MAX_DIFFERENCES_SHOWN = 5
_MAX_VALUE_CHARACTERS = 200

ADDRESS_VARIABLE = "REDCO_FLOW_RENDEZVOUS_ADDRESS"
"""The variable of a job with the interface, or pattern of names, by which hosts are reached."""

_NODE = "NODE"
_SIOCGIFADDR = 0x8915  # netdevice(7): the IPv4 address of an interface

Facts = Mapping[str, str]
WhileWaiting = Callable[[str], None]


class CannotMeet(RedcoFlowError):
    """The ranks did not come together, or are not about to do the same; nothing has run."""


@dataclass(frozen=True)
class Meeting:
    """The agreement of the ranks: address and facts.

    Args:
        coordinator: host:port for `jax.distributed.initialize`; None: there is nothing to do.
    """

    coordinator: str | None


@dataclass
class Rendezvous:
    """The meeting of one start of a job.

    Args:
        folder: the attempt's directory, which every rank can read.
        rank_info: of this process.
        facts: name to value, of everything that must be the same on every rank.
        seconds: how long to wait for the others.
        while_waiting: called again and again with words on what is waited for; may raise.
        log: takes lines for the log: who was no rank of this job.
    """

    folder: Path
    rank_info: RankInfo
    facts: Facts
    seconds: float
    while_waiting: WhileWaiting = lambda _: None
    log: Callable[[str], None] = lambda _: None
    _deadline: float = field(init=False)

    def __post_init__(self) -> None:
        self._deadline = time.monotonic() + self.seconds

    @property
    def path(self) -> Path:
        """The file in which rank 0 says where it listens."""
        return self.folder / "ranks" / f"meeting{self.rank_info.restart}.json"

    def meet(self) -> Meeting:
        """Return once every rank is here and all agree.

        Raises:
            CannotMeet: a rank is missing, cannot be reached, or differs; names it.
        """
        return self._host() if self.rank_info.rank == 0 else self._join()

    def call_off(self) -> None:
        """Rank 0: tell the others that there is nothing to do."""
        self._announce({"nothing_to_do": True})

    def is_called_off(self) -> bool:
        """Tell whether rank 0 has said by now that there is nothing to do."""
        told = read_json_if_present(self.path) or {}
        return bool(told.get("nothing_to_do"))

    # Rank 0

    def _host(self) -> Meeting:
        with RendezvousListener(self.log) as listener:
            port, addresses = listener.port, own_addresses()
            self._announce({"addresses": addresses, "port": port, "word": listener.word})
            self._deadline = time.monotonic() + self.seconds  # the others can come from now on
            guests: dict[int, Connection] = {}
            while len(guests) < self.rank_info.num_processes - 1:
                self._wait_for_ranks(set(guests))
                arrived = listener.receive(_SECONDS_BETWEEN_LOOKS)
                guests = {rank: one for rank, one in guests.items() if one.is_open}
                for connection in filter(lambda one: one.is_open, arrived):
                    self._seat(listener, guests, connection)
            refusal = self._refusal({rank: _joining(one) for rank, one in guests.items()})
            for connection in guests.values():
                connection.answer(refusal)
        if refusal:
            raise CannotMeet(refusal)
        return Meeting(f"{addresses[0]}:{port}")

    def _announce(self, record: dict[str, Any]) -> None:
        self.path.parent.mkdir(exist_ok=True)
        write_json(self.path, record, private=True)  # the word is for the ranks alone

    def _seat(
        self, listener: RendezvousListener, guests: dict[int, Connection], connection: Connection
    ) -> None:
        """Count a connection as the rank that it says it is, or send it away.

        Of two that say so, the first counts, unless only the second is about to do the same as
        this rank.
        """
        said = _joining(connection)
        if not 0 < said.rank < self.rank_info.num_processes:
            why = (
                f"there is no rank {said.rank} to come: this job has {self.rank_info.num_processes}"
            )
            listener.send_away(connection, why, f"{why}.")
            return
        earlier = guests.get(said.rank)
        if earlier is None:
            guests[said.rank] = connection
            return
        is_false = self._differs(_joining(earlier)) and not self._differs(said)
        false, true = (earlier, connection) if is_false else (connection, earlier)
        why = f"rank {said.rank} is here already, from host {_joining(true).host!r}"
        guests[said.rank] = true
        listener.send_away(false, why, f"{why}; this is host {_joining(false).host!r}.")

    def _wait_for_ranks(self, present: set[int]) -> None:
        missing = sorted(set(range(1, self.rank_info.num_processes)) - present)
        names = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        self.while_waiting(f"waiting for {names} of {self.rank_info.num_processes}")
        if time.monotonic() > self._deadline:
            raise CannotMeet(
                f"{names} of {self.rank_info.num_processes} did not arrive within "
                f"{self.seconds:g} s: see logs/rank{missing[0]}.log and the job's own log. If it "
                f"only starts slowly, raise rendezvous_seconds in the profile."
            )

    def _refusal(self, guests: Mapping[int, Joining]) -> str:
        """Say what differs between rank 0 and the others; "" if nothing does."""
        differences = [
            f"{key} is {_shown(mine)} on rank 0, {_shown(other)} on rank {rank} ({said.host})"
            for rank, said in sorted(guests.items())
            for key, mine, other in self._differences(said)
        ]
        if not differences:
            return ""
        shown = "; ".join(differences[:_MAX_DIFFERENCES_SHOWN])
        more = len(differences) - _MAX_DIFFERENCES_SHOWN
        rest = f"; and {more} more" if more > 0 else ""
        return f"the ranks do not agree, so none started: {shown}{rest}."

    def _differs(self, said: Joining) -> bool:
        return any(True for _ in self._differences(said))

    def _differences(self, said: Joining) -> Iterator[tuple[str, str, str]]:
        for key in sorted({*self.facts, *said.facts}):
            mine, other = self.facts.get(key, "not set"), said.facts.get(key, "not set")
            if mine != other:
                yield key, mine, other

    # The others

    def _join(self) -> Meeting:
        told = self._wait_for_address()
        if told.get("nothing_to_do"):
            return Meeting(None)
        connection, address = self._connect(told["addresses"], told["port"])
        with connection:
            said = Joining(self.rank_info.rank, os.uname().nodename, self.facts)
            try:
                connection.sendall(said.to_bytes(told["word"]))
                refusal = self._wait_for_answer(RendezvousAnswer(connection))
            except (OSError, ValueError) as error:
                raise CannotMeet(
                    f"rank 0 left the meeting at {address}:{told['port']}, or another program "
                    f"listens there ({error or 'no answer'}): see logs/rank0.log."
                ) from error
        if refusal:
            raise CannotMeet(refusal)
        return Meeting(f"{address}:{told['port']}")

    def _wait_for_answer(self, answer: RendezvousAnswer) -> str:
        """Wait as long as rank 0 may: it began to before this one came.

        Raises:
            TimeoutError, ValueError, OSError: there was none, or it is not rank 0's.
        """
        deadline = time.monotonic() + self.seconds
        while (refusal := answer.read(_SECONDS_BETWEEN_LOOKS)) is None:
            self.while_waiting("waiting for the other ranks")
            if time.monotonic() > deadline:
                raise TimeoutError("timed out")
        return refusal

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

    The one that the profile names, then the node's name in Slurm, then the host's own name where
    it is more than the loopback (Debian gives it 127.0.1.1), then the address by which SSH came in,
    then the one that packets leave from.

    Raises:
        CannotMeet: this host does not have the one that the profile names.
    """
    host = socket.gethostname()
    names = [
        _named_address(os.environ.get(ADDRESS_VARIABLE, ""), host),
        os.environ.get("SLURMD_NODENAME", ""),
        host if not _is_loopback(host) else "",
        *os.environ.get("SSH_CONNECTION", "").split()[2:3],
    ]
    return list(dict.fromkeys([*filter(None, names), _outgoing_address()]))


def _named_address(named: str, host: str) -> str:
    if _NODE not in named:
        return _interface_address(named) if named else ""
    name = named.replace(_NODE, os.environ.get("SLURMD_NODENAME", host))
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        raise CannotMeet(
            f"{host} does not know the name {name} ({error}), which slurm.rendezvous_address "
            f"({named}) makes: correct it in the profile."
        ) from error
    return name


def _interface_address(interface: str) -> str:
    request = struct.pack("256s", interface.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
        except OSError as error:
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise CannotMeet(
                f"{os.uname().nodename} has no network interface '{interface}' with an IPv4 "
                f"address ({error.strerror}), which slurm.rendezvous_address names: it has {known}."
                f" A pattern of host names has {_NODE} in it, as in ic-{_NODE}."
            ) from error


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


def _joining(connection: Connection) -> Joining:
    assert connection.joining is not None
    return connection.joining


def _shown(value: str) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_VALUE_CHARACTERS else f"{text[:_MAX_VALUE_CHARACTERS]}…"
