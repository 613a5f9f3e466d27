import signal

import pytest

from redco_flow.launch.worker_exit import WorkerExit, explain_error, explain_exit
from redco_flow.records import write_json
from redco_flow.tracking.attempt import AttemptDirectory, Cause

EXIT_1 = 1 << 8


@pytest.fixture
def attempt(tmp_path):
    return AttemptDirectory(tmp_path)


def test_code_zero_without_a_result_is_a_failure(attempt):
    cause, message = explain_exit(WorkerExit(0), attempt)

    assert (cause, message[:40]) == ("failed", "the worker ended with code 0 but wrote n")


def test_a_result_written_in_the_grace_counts_although_a_stop_was_asked(attempt):
    write_json(attempt.result_path, {})

    assert explain_exit(WorkerExit(0, stop_cause=Cause.CANCELLED), attempt)[0] == "completed"


def test_a_failure_without_an_error_record_points_at_the_log(attempt):
    cause, message = explain_exit(WorkerExit(EXIT_1), attempt)

    assert cause == "failed"
    assert message.endswith("exited with code 1 and left no error record; see the end of the log.")


def test_a_failure_whose_record_found_no_room_names_the_full_disk(attempt):
    output = b"error.json cannot be written: [Errno 28] No space left on device"

    _, message = explain_exit(WorkerExit(EXIT_1, last_output=output), attempt)

    assert "its output says 'No space left on device'" in message
    assert message.endswith("Free space on that disk, or choose another workspace.")


@pytest.mark.parametrize(
    ("number", "oom", "tail", "cause", "said"),
    [
        (signal.SIGKILL, "none", b"", "failed", "SIGKILL (signal 9), not by redco-flow"),
        (signal.SIGKILL, "cgroup", b"", "out_of_memory", "out-of-memory killer; its peak memory"),
        (signal.SIGABRT, "none", b"what(): std::bad_alloc", "out_of_memory", "num_model_shards"),
        (signal.SIGSEGV, "none", b"", "failed", "SIGSEGV (signal 11)"),
        (40, "none", b"", "failed", "signal 40"),
    ],
)
def test_a_signal_is_named_with_its_likely_cause(attempt, number, oom, tail, cause, said):
    ending = WorkerExit(int(number), oom_kill=oom, last_output=tail)

    found, message = explain_exit(ending, attempt)

    assert found == cause
    assert said in message


@pytest.mark.parametrize(
    ("peak_gib", "cause", "said"),
    [
        (33, "out_of_memory", "struck on this host meanwhile; its peak memory was 33.00 GiB of"),
        (32, "failed", "it may have run out of memory"),
        (1, "failed", "which process it took cannot be told from here"),
    ],
)
def test_a_kill_that_the_host_alone_has_counted_is_ours_only_if_no_process_can_be_larger(
    attempt, peak_gib, cause, said
):
    sizes = {"peak_memory_bytes": peak_gib << 30, "host_memory_bytes": 64 << 30}

    found, message = explain_exit(WorkerExit(signal.SIGKILL, oom_kill="host", **sizes), attempt)

    assert found == cause
    assert said in message
    assert "num_model_shards" in message


def test_a_kill_on_the_host_says_nothing_of_a_worker_that_crashed_by_itself(attempt):
    ending = WorkerExit(signal.SIGSEGV, oom_kill="host", peak_memory_bytes=2, host_memory_bytes=3)

    assert explain_exit(ending, attempt)[0] == "failed"


@pytest.mark.parametrize(
    ("error_type", "message", "cause", "advice"),
    [
        ("MemoryError", "", "out_of_memory", "num_model_shards"),
        ("_ArrayMemoryError", "Unable to allocate", "out_of_memory", "num_model_shards"),
        ("XlaRuntimeError", "RESOURCE_EXHAUSTED: Out of", "out_of_memory", "remat: full"),
        ("CheckpointError", "RESOURCE_EXHAUSTED: No space left on device", "failed", "Free space"),
        ("OSError", "[Errno 24] Too many open files: 'x'", "failed", "ulimit -n"),
        ("OSError", "[Errno 28] No space left on device: '/x'", "failed", "Free space"),
        ("ValueError", "the loss went away", "failed", ""),
    ],
)
def test_an_error_comes_with_advice_where_there_is_some(error_type, message, cause, advice):
    found, given = explain_error({"type": error_type, "message": message})

    assert found == cause
    assert advice in given
