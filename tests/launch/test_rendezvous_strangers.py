"""Who else finds the rendezvous' port: real ranks in processes of their own, strangers by sockets.

What a stranger sends is built here, byte by byte, from what the protocol is documented to be.
"""

import contextlib
import json
import socket
import stat
import struct
import subprocess
import sys
import threading
import time

import pytest

from redco_flow.records import read_json_if_present

RANK = """
import sys
from pathlib import Path
from redco_flow.launch.processes import RankInfo
from redco_flow.launch.rendezvous import CannotMeet, Rendezvous

folder, rank, num_processes, seconds = sys.argv[1:]
rank_info = RankInfo(rank=int(rank), num_processes=int(num_processes))
log = lambda line: print(line, file=sys.stderr, flush=True)
try:
    print(Rendezvous(
        Path(folder), rank_info, {"config.rate": "1"}, float(seconds), log=log).meet().coordinator)
except CannotMeet as error:
    print(error)
"""
SECONDS = 400


def deep(word):
    """A message of a hundred thousand nested lists."""
    return framed(word, b"[" * 100_000)


def framed(word, message):
    return word.encode() + struct.pack(">I", len(message)) + message


def said(secret, **record):
    return framed(secret, json.dumps(record).encode())


@pytest.fixture
def group(tmp_path):
    """Start ranks, each a process; what is left of them ends with the test."""
    ranks = []

    def start(rank, num_processes=2, seconds=SECONDS):
        words = [str(tmp_path), str(rank), str(num_processes), str(seconds)]
        process = subprocess.Popen(
            [sys.executable, "-c", RANK, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        ranks.append(process)
        return process

    yield start
    for process in ranks:
        process.kill()
        process.communicate()


@pytest.fixture
def meeting(tmp_path):
    """Return where rank 0 listens, once it does."""

    def meeting():
        deadline = time.monotonic() + 400
        while (record := read_json_if_present(tmp_path / "ranks" / "meeting0.json")) is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return record

    return meeting


@pytest.fixture
def connect():
    """Connect to a port of this host; the connections last as long as the test."""
    with contextlib.ExitStack() as connections:

        def connect(port, data=b""):
            connection = socket.create_connection(("127.0.0.1", port), timeout=300)
            connections.enter_context(connection)
            connection.sendall(data)
            return connection

        yield connect


def is_closed(connection):
    """Wait until the other side has closed it; what it says before is thrown away."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(1 << 16):
            pass
    return True


def outcome(*ranks):
    """What the ranks printed, once they have ended, and rank 0's log."""
    ended = [rank.communicate(timeout=SECONDS + 30) for rank in ranks]
    return {words.strip().rpartition(":")[2] for words, _ in ended}, ended[0][1]


SCANS = {
    "nothing": b"",
    "a web browser": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "a deep packet": b"[" * 100_000,
    "much": b"\0" * (4 << 20),
}


def test_a_port_scanner_is_sent_away_and_the_group_meets(group, meeting, connect):
    """Fault 44: 100,000 open brackets ended rank 0 by a RecursionError."""
    host = group(0)
    port = meeting()["port"]

    for data in [*SCANS.values(), *[b"y" * 40] * 30]:
        with contextlib.suppress(OSError):  # sent away before it has said all
            connect(port, data).shutdown(socket.SHUT_WR)
    met, log = outcome(host, group(1))

    assert met == {str(port)}
    assert "does not know the word" in log
    assert "more connections were sent away" in log  # twenty lines are told, the rest is counted


def test_a_slow_writer_and_silent_connections_do_not_hold_the_group_up(group, meeting, connect):
    """Fault 44: sixty silent connections, one after the other, used the minute for it up."""
    host = group(0, seconds=60)
    record = meeting()
    silent = [connect(record["port"]) for _ in range(100)]
    slow = connect(record["port"], record["word"].encode()[:8])

    met, _ = outcome(host, group(1))

    assert met == {str(record["port"])}
    assert all(map(is_closed, [*silent, slow]))


@pytest.mark.slow
def test_a_rank_that_is_missing_is_missed_in_time_by_a_rank_zero_kept_busy(group, meeting, connect):
    """Fault 44: a byte now and then held rank 0 for as long as it came."""
    host = group(0, seconds=4)
    record = meeting()
    over, sent = threading.Event(), []

    def drip():
        connection = connect(record["port"])
        for letter in record["word"]:
            with contextlib.suppress(OSError):
                connection.sendall(letter.encode())
            sent.append(letter)
            if over.wait(2):  # the whole word would take a minute
                return

    dripping = threading.Thread(target=drip)
    dripping.start()
    words, _ = host.communicate(timeout=400)
    over.set()
    dripping.join()

    assert "rank 1 of 2 did not arrive within 4 s" in words
    assert len(sent) < len(record["word"])


LIES = {
    "no rank of this job": {"rank": 99, "host": "x", "facts": {"config.rate": "1"}},
    "rank 0 itself": {"rank": 0, "host": "x", "facts": {"config.rate": "1"}},
    "a negative rank": {"rank": -1, "host": "x", "facts": {}},
    "a rank that is true": {"rank": True, "host": "x", "facts": {}},
    "a rank in words": {"rank": "1", "host": "x", "facts": {}},
    "facts as a list": {"rank": 1, "host": "x", "facts": [1]},
    "facts that are numbers": {"rank": 1, "host": "x", "facts": {"config.rate": 1}},
    "a host that is none": {"rank": 1, "host": None, "facts": {}},
    "a key too many": {"rank": 1, "host": "x", "facts": {}, "word": "x"},
    "no facts": {"rank": 1, "host": "x"},
}


def test_a_liar_who_knows_the_word_does_not_count(group, meeting, connect):
    """Fault 44: with the word, rank 99 counted, and wrong types ended rank 0."""
    host = group(0)
    record = meeting()
    word, port = record["word"], record["port"]
    nonsense = [
        deep(word),
        framed(word, b"null"),
        framed(word, b"\xff"),
        word.encode() + b"\xff" * 8,
    ]

    liars = [connect(port, said(word, **lie)) for lie in LIES.values()]
    liars += [connect(port, data) for data in nonsense]
    assert all(map(is_closed, liars))
    met, log = outcome(host, group(1))

    assert met == {str(port)}
    assert "there is no rank 99 to come: this job has 2" in log
    assert "its rank is no number" in log


def test_a_false_rank_gives_way_to_the_one_that_does_the_same_as_rank_zero(group, meeting, connect):
    """Fault 44: the ranks meet in time; connections that are no rank of the job do not count."""
    host = group(0, num_processes=3)
    record = meeting()
    liar = connect(record["port"], said(record["word"], rank=1, host="liar", facts={}))

    true = group(1, num_processes=3)
    assert is_closed(liar)
    met, log = outcome(host, true, group(2, num_processes=3))

    assert met == {str(record["port"])}
    assert "rank 1 is here already" in log


def test_a_second_rank_of_one_number_is_told_who_is_there_and_the_group_meets(
    group, meeting, connect
):
    """Fault 44: the ranks meet in time; connections that are no rank of the job do not count."""
    host = group(0, num_processes=3)
    record = meeting()
    true = {"rank": 1, "facts": {"config.rate": "1"}}
    first = connect(record["port"], said(record["word"], host="first", **true))
    second = connect(record["port"], said(record["word"], host="second", **true))

    words = second.recv(1 << 16)
    met, log = outcome(host, group(2, num_processes=3))

    assert b"rank 1 is here already, from host 'first'; this is host 'second'." in words
    assert json.loads(first.recv(1 << 16)[4:]) == {"refusal": ""}
    assert met == {str(record["port"])}
    assert "was sent away: rank 1 is here already" in log


def test_a_rank_that_left_while_it_waited_does_not_count(group, meeting, connect):
    """Fault 44: the ranks meet in time; connections that are no rank of the job do not count."""
    host = group(0, num_processes=3)
    record = meeting()
    true = {"rank": 1, "host": "x", "facts": {"config.rate": "1"}}
    connect(record["port"], said(record["word"], **true)).close()

    met, log = outcome(host, group(1, num_processes=3), group(2, num_processes=3))

    assert met == {str(record["port"])}
    assert "it left" in log


def test_the_word_of_a_meeting_is_for_its_user_alone(group, meeting, tmp_path):
    """Fault 44: the ranks meet in time; connections that are no rank of the job do not count."""
    host = group(0)
    meeting()

    mode = stat.S_IMODE((tmp_path / "ranks" / "meeting0.json").stat().st_mode)

    assert mode == 0o600
    outcome(host, group(1))
