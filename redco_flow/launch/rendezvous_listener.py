"""Accept connections of a rendezvous: authenticate ranks, reject any other program.

A connection first sends the meeting's secret, raw and of fixed length; only then is anything of
it parsed, with limits and types. Each has one deadline, and none waits for another.
"""

from __future__ import annotations

import json
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

_WORD_BYTES = 32
_LENGTH = struct.Struct(">I")
_MAX_MESSAGE_BYTES = 1 << 20
_MAX_HOST_CHARACTERS = 255
_SECONDS_TO_SAY = 5.0
_SECONDS_TO_ANSWER = 5.0
_MAX_STRANGERS = 256
_SECONDS_BEFORE_EVICTION = 1.0
_SECONDS_WITHOUT_ROOM = 0.05
_MAX_LINES = 20
_BACKLOG = 1024

Log = Callable[[str], None]


@dataclass(frozen=True)
class Joining:
    """The facts that a rank sends.

    Args:
        facts: name to value, of everything that must be the same on every rank.
    """

    rank: int
    host: str
    facts: Mapping[str, str]

    @classmethod
    def parse(cls, data: bytes) -> Joining:
        """Read a message.

        Raises:
            ValueError: it is none; says why, in words that repeat nothing of it.
        """
        record = _parse(data)
        if record.keys() != {"rank", "host", "facts"}:
            raise ValueError("its message has other keys than rank, host and facts")
        rank, host, facts = record["rank"], record["host"], record["facts"]
        if type(rank) is not int or rank < 0:
            raise ValueError("its rank is no number")
        if not isinstance(host, str) or len(host) > _MAX_HOST_CHARACTERS:
            raise ValueError("its host is no name")
        if not isinstance(facts, dict) or not all(type(one) is str for one in facts.values()):
            raise ValueError("its facts are no texts by name")
        return cls(rank, host, facts)

    def to_bytes(self, word: str) -> bytes:
        """Return what a rank sends: the word, then the message."""
        record = {"rank": self.rank, "host": self.host, "facts": dict(self.facts)}
        return word.encode() + _frame(record)


@dataclass(eq=False)
class Connection:
    """A connection to the port.

    Args:
        peer: its address.
        joining: what it said, once it knew the word and has said all.
    """

    socket: socket.socket
    peer: str
    joining: Joining | None = None
    is_open: bool = True
    knows_word: bool = False
    opened_at: float = field(default_factory=time.monotonic)
    data: bytearray = field(default_factory=bytearray)

    def __str__(self) -> str:
        """Name it in a log."""
        return f"a connection from {self.peer}"

    def answer(self, refusal: str) -> None:
        """Tell a rank whether it may start ("") or why not; a rank that has left gets no answer."""
        try:
            self.socket.settimeout(_SECONDS_TO_ANSWER)
            self.socket.sendall(_frame({"refusal": refusal}))
        except OSError:  # it says so in its own log
            return


class RendezvousListener:
    """A free port of this host, and the connections to it.

    Args:
        log: takes lines for the log: who was sent away, and why.
    """

    def __init__(self, log: Log) -> None:
        self.word = secrets.token_hex(_WORD_BYTES // 2)
        self._log = log
        self._num_lines = 0
        self._strangers: dict[Connection, None] = {}  # in the order of their coming
        self._connections: set[Connection] = set()
        self._selector = selectors.DefaultSelector()
        self._socket = socket.create_server(("", 0), backlog=_BACKLOG)
        self._socket.setblocking(False)
        self._selector.register(self._socket, selectors.EVENT_READ)

    def __enter__(self) -> RendezvousListener:
        return self

    def __exit__(self, *_: object) -> None:
        if self._num_lines > _MAX_LINES:
            self._log(f"and {self._num_lines - _MAX_LINES} more connections were sent away.")
        for connection in list(self._connections):
            self._close(connection)
        self._selector.close()
        self._socket.close()

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._socket.getsockname()[1])

    def receive(self, seconds: float) -> list[Connection]:
        """Wait so long at most; return who has said all it had to say just now.

        Who is slow, does not know the word, says nonsense or more than it has to is sent away. A
        rank that was returned before and has left since is open no more.
        """
        joined = []
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                joined += [one for one in self._accept() if self._read(one)]
            elif key.data.is_open and self._read(key.data):
                joined.append(key.data)
        latest = time.monotonic() - _SECONDS_TO_SAY
        for connection in [one for one in self._strangers if one.opened_at < latest]:
            self.send_away(connection, f"it did not say who it is within {_SECONDS_TO_SAY:g} s")
        return joined

    def send_away(self, connection: Connection, why: str, refusal: str | None = None) -> None:
        """Close a connection and say so in the log.

        Args:
            refusal: sent to it first.
        """
        self._num_lines += 1
        if self._num_lines <= _MAX_LINES:
            self._log(f"{connection} was sent away: {why}.")
        if refusal is not None:
            connection.answer(refusal)
        self._close(connection)

    def _accept(self) -> list[Connection]:
        """Take in everybody who waits, as far as there is room."""
        accepted: list[Connection] = []
        while True:
            if not self._has_room():
                time.sleep(_SECONDS_WITHOUT_ROOM)
                break
            try:
                taken, address = self._socket.accept()
            except BlockingIOError:  # no connection waits
                break
            except OSError:  # it has left already, or no more files may be opened
                time.sleep(_SECONDS_WITHOUT_ROOM)
                break
            taken.setblocking(False)
            connection = Connection(taken, str(address[0]))
            self._strangers[connection] = None
            self._connections.add(connection)
            self._selector.register(taken, selectors.EVENT_READ, connection)
            accepted.append(connection)
        return accepted

    def _has_room(self) -> bool:
        if len(self._strangers) < _MAX_STRANGERS:
            return True
        oldest = next(iter(self._strangers))
        if time.monotonic() - oldest.opened_at < _SECONDS_BEFORE_EVICTION:
            return False
        self.send_away(oldest, f"it says nothing, and {_MAX_STRANGERS} do so")
        return True

    def _read(self, connection: Connection) -> bool:
        """Read what is there; return whether the message is whole now."""
        try:
            chunk = connection.socket.recv(1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            chunk = b""
        if not chunk:
            self.send_away(connection, "it left")
            return False
        connection.data += chunk
        try:
            connection.joining = self._message(connection)
        except ValueError as error:
            self.send_away(connection, str(error))
            return False
        if connection.joining is None:
            return False
        del self._strangers[connection]
        return True

    def _message(self, connection: Connection) -> Joining | None:
        """Return what the connection has said, or None where it has not said all."""
        if connection.joining is not None:
            raise ValueError("it goes on talking")
        data = connection.data
        if not connection.knows_word:
            if len(data) < _WORD_BYTES:
                return None
            if not secrets.compare_digest(bytes(data[:_WORD_BYTES]), self.word.encode()):
                raise ValueError("it does not know the word")
            connection.knows_word = True
        start = _WORD_BYTES + _LENGTH.size
        if len(data) < start:
            return None
        (length,) = _LENGTH.unpack_from(data, _WORD_BYTES)
        if length > _MAX_MESSAGE_BYTES or len(data) > start + length:
            raise ValueError("its message is too long")
        return Joining.parse(bytes(data[start:])) if len(data) == start + length else None

    def _close(self, connection: Connection) -> None:
        if connection.is_open:
            connection.is_open = False
            self._strangers.pop(connection, None)
            self._connections.discard(connection)
            self._selector.unregister(connection.socket)
            connection.socket.close()


class RendezvousAnswer:
    """Rank 0's answer, as it comes in.

    Args:
        connection: to rank 0; becomes one whose reads wait at most the seconds given to `read`.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._data = bytearray()

    def read(self, seconds: float) -> str | None:
        """Return the refusal, "" where there is none; None where the answer is not whole yet.

        Raises:
            ValueError, OSError: this is no rank 0, or it has left.
        """
        self._connection.settimeout(seconds)
        try:
            chunk = self._connection.recv(1 << 16)
        except TimeoutError:
            return None
        if not chunk:
            raise ValueError("the connection was closed")
        self._data += chunk
        if len(self._data) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._data)
        if length > _MAX_MESSAGE_BYTES or len(self._data) > _LENGTH.size + length:
            raise ValueError("its answer is too long")
        if len(self._data) < _LENGTH.size + length:
            return None
        refusal = _parse(bytes(self._data[_LENGTH.size :])).get("refusal")
        if not isinstance(refusal, str):
            raise ValueError("its answer is none of rank 0's")
        return refusal


def _frame(record: Mapping[str, Any]) -> bytes:
    data = json.dumps(record).encode()
    return _LENGTH.pack(len(data)) + data


def _parse(data: bytes) -> dict[str, Any]:
    try:
        record = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError("its message is not JSON") from None
    if not isinstance(record, dict):
        raise ValueError("its message is no record")
    return record
