"""How ranks find each other, by real sockets on this machine."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from redco_flow.launch.processes import RankInfo
from redco_flow.launch.rendezvous import ADDRESS_VARIABLE, CannotMeet, Rendezvous, own_addresses
from redco_flow.records import read_json_if_present, write_json

FACTS = {"config.learning_rate": "0.01", "version.jax": "0.10.2"}


@pytest.fixture
def meet(tmp_path):
    """Let ranks meet, each in a thread; return what each got: a meeting, or its error."""

    def one(rank, facts, num_processes, seconds):
        rank_info = RankInfo(rank=rank, num_processes=num_processes)
        try:
            return Rendezvous(tmp_path, rank_info, facts, seconds).meet()
        except CannotMeet as error:
            return str(error)

    def meet(*facts, num_processes=None, seconds=400):
        num_processes = num_processes or len(facts)
        with ThreadPoolExecutor(len(facts)) as pool:
            futures = [
                pool.submit(one, rank, said, num_processes, seconds)
                for rank, said in enumerate(facts)
            ]
            return [future.result() for future in futures]

    return meet


def test_all_ranks_get_the_address_of_rank_zero_at_one_free_port(meet):
    meetings = meet(FACTS, FACTS, FACTS)

    (port,) = {meeting.coordinator.rpartition(":")[2] for meeting in meetings}
    with socket.create_server(("", int(port))):  # free for JAX again
        pass


@pytest.mark.parametrize(("named", "address"), [("lo", "127.0.0.1"), ("NODEhost", "localhost")])
def test_the_interface_or_name_of_the_profile_is_tried_first(meet, monkeypatch, named, address):
    monkeypatch.setenv(ADDRESS_VARIABLE, named)
    monkeypatch.setenv("SLURMD_NODENAME", "local")

    assert {one.coordinator.rpartition(":")[0] for one in meet(FACTS, FACTS)} == {address}


@pytest.mark.parametrize(
    ("named", "said"),
    [("ib77", "no network interface 'ib77'.*it has .*lo"), ("ic-NODE", "the name ic-no such host")],
)
def test_an_interface_or_name_that_a_host_lacks_is_named(monkeypatch, named, said):
    monkeypatch.setenv(ADDRESS_VARIABLE, named)
    monkeypatch.setenv("SLURMD_NODENAME", "no such host")

    with pytest.raises(CannotMeet, match=said):
        own_addresses()


def test_ranks_that_differ_all_stop_and_the_key_and_the_rank_are_named(meet):
    """Engine case 18: all ranks stop before step 0, and the key is named."""
    told = meet(FACTS, FACTS, FACTS | {"config.learning_rate": "0.1"})

    assert told[0] == told[1] == told[2]
    assert "config.learning_rate is '0.01' on rank 0, '0.1' on rank 2" in told[0]


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_after_the_time_for_it(meet):
    """Engine case 20: the error names the rank."""
    told = meet(FACTS, FACTS, num_processes=4, seconds=20)

    assert "ranks 2, 3 of 4 did not arrive within 20 s" in told[0]
    assert "rank 0 left the meeting" in told[1]


def test_without_rank_zero_the_others_say_where_they_looked(tmp_path):
    rank_info = RankInfo(rank=1, num_processes=2)

    with pytest.raises(CannotMeet, match=r"rank 0 did not write .*meeting0\.json within 0\.5 s"):
        Rendezvous(tmp_path, rank_info, FACTS, 0.5).meet()


def seconds_to_give_up(rendezvous, port, said):
    """Meet at a port where there is no rank 0; the error says so."""
    rendezvous.path.parent.mkdir()
    write_json(rendezvous.path, {"addresses": ["127.0.0.1"], "port": port, "word": "x"})
    started = time.monotonic()
    with pytest.raises(CannotMeet, match=said):
        rendezvous.meet()
    return time.monotonic() - started


def test_a_port_without_a_listener_is_a_clear_error_in_time(tmp_path):
    """Engine cases 19 and 24: the error comes at the configured time; another port is taken, or the
    error names it.
    """
    rank_info = RankInfo(rank=1, num_processes=2)
    rendezvous = Rendezvous(tmp_path, rank_info, FACTS, 0.5)
    with socket.socket() as bound:  # taken, and deaf
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        seconds = seconds_to_give_up(
            rendezvous, port, rf"cannot reach rank 0 at port {port}.*refused"
        )

    assert 0.5 <= seconds < 60  # a look more on an idle machine


def test_a_port_at_which_another_program_keeps_silent_is_an_error_in_time(tmp_path):
    """Engine case 19: the error comes at the configured time."""
    rendezvous = Rendezvous(tmp_path, RankInfo(rank=1, num_processes=2), FACTS, 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        said = rf"127\.0\.0\.1:{port}, or another .*timed out"
        seconds = seconds_to_give_up(rendezvous, port, said)

    assert seconds < 60  # and not the system's own limit, two minutes


def test_two_jobs_of_one_host_meet_at_ports_of_their_own(tmp_path):
    """Engine case 24: the first job's port is taken while the second job chooses."""
    waiting = threading.Event()
    rank_infos = [RankInfo(rank=rank, num_processes=2) for rank in range(2)]

    with ThreadPoolExecutor(4) as pool:
        first_host = Rendezvous(tmp_path / "a", rank_infos[0], FACTS, 400, lambda _: waiting.set())
        first_host.folder.mkdir()
        first = pool.submit(first_host.meet)
        assert waiting.wait(400)
        (tmp_path / "b").mkdir()
        second = list(
            pool.map(lambda p: Rendezvous(tmp_path / "b", p, FACTS, 400).meet(), rank_infos)
        )
        assert not first.done()
        joined = Rendezvous(tmp_path / "a", rank_infos[1], FACTS, 400).meet()

    ports = [meeting.coordinator.rpartition(":")[2] for meeting in (joined, *second)]
    assert ports[0] != ports[1] == ports[2]


def test_a_stranger_at_the_port_is_sent_away_and_the_ranks_meet(tmp_path):
    def knock(for_what):
        record = read_json_if_present(host.path)
        if record and not knocked:
            with socket.create_connection(("127.0.0.1", record["port"])) as stranger:
                stranger.sendall(b'{"word": "guess", "rank": 1}\n')
            knocked.append(True)

    knocked = []
    host = Rendezvous(tmp_path, RankInfo(num_processes=2), FACTS, 400, knock)
    guest = Rendezvous(tmp_path, RankInfo(rank=1, num_processes=2), FACTS, 400)
    with ThreadPoolExecutor(2) as pool:
        meetings = list(pool.map(lambda one: one.meet(), [host, guest]))

    assert knocked
    assert meetings[0].coordinator.rpartition(":")[2] == meetings[1].coordinator.rpartition(":")[2]


def test_a_meeting_that_is_called_off_sends_the_others_home(tmp_path):
    first = Rendezvous(tmp_path, RankInfo(num_processes=2), FACTS, 400)
    assert not first.is_called_off()
    first.call_off()
    assert first.is_called_off()

    meeting = Rendezvous(tmp_path, RankInfo(rank=1, num_processes=2), FACTS, 400).meet()

    assert meeting.coordinator is None


@pytest.mark.parametrize(
    ("gpus", "processes", "local_rank", "expected"),
    [(0, 4, 1, None), (8, 1, 0, list(range(8))), (8, 4, 1, [2, 3]), (8, 8, 7, [7])],
)
def test_the_gpus_of_a_host_are_shared_evenly(gpus, processes, local_rank, expected):
    rank_info = RankInfo(gpus_per_host=gpus, processes_per_host=processes, local_rank=local_rank)

    assert rank_info.local_device_ids == expected
    assert RankInfo.from_environment(rank_info.to_environment()) == rank_info


def test_gpus_that_cannot_be_shared_evenly_are_refused():
    with pytest.raises(ValueError, match="let processes_per_host divide"):
        _ = RankInfo(gpus_per_host=8, processes_per_host=3).local_device_ids
