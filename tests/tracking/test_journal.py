import json
import threading

import pytest

from redco_flow.tracking.journal import Journal, read_journal


def test_events_are_numbered_from_one(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")

    journal.append("run_started", profile="local")
    journal.append("stage_started", stage="train")

    records = list(journal.read())
    assert [(one["seq"], one["event"]) for one in records] == [
        (1, "run_started"),
        (2, "stage_started"),
    ]
    assert records[0]["profile"] == "local"


def test_another_process_continues_the_numbers(tmp_path):
    Journal(tmp_path / "journal.jsonl").append("run_started")

    assert Journal(tmp_path / "journal.jsonl").append("run_resumed")["seq"] == 2


@pytest.mark.parametrize("torn", ['{"seq": 2, "ti', '{"seq": 2}', '{"seq": 2, "text": "é'])
def test_a_torn_last_line_was_never_written(tmp_path, torn):
    path = tmp_path / "journal.jsonl"
    Journal(path).append("run_started")
    with path.open("a") as file:
        file.write(torn)
    assert [one["event"] for one in read_journal(path)] == ["run_started"]

    Journal(path).append("run_resumed")

    assert [(one["seq"], one["event"]) for one in read_journal(path)] == [
        (1, "run_started"),
        (2, "run_resumed"),
    ]


def test_a_journal_of_nothing_but_a_torn_line_begins_anew(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_text('{"seq": 1')

    assert Journal(path).append("run_started")["seq"] == 1
    assert len(path.read_text().splitlines()) == 1


def test_a_last_line_longer_than_a_block_is_continued(tmp_path):
    path = tmp_path / "journal.jsonl"
    Journal(path).append("run_started")
    Journal(path).append("stage_failed", message="x" * 200_000)

    assert Journal(path).append("run_resumed")["seq"] == 3


def test_order_is_by_sequence_number_whatever_the_clock_says(tmp_path):
    """Fault 35: the clock jumps an hour back between two events."""
    times = iter(["2026-01-01T12:00:00+00:00", "2026-01-01T11:00:00+00:00"])
    journal = Journal(tmp_path / "journal.jsonl", clock=lambda: next(times))

    journal.append("run_started")
    journal.append("run_completed")

    first, second = journal.read()
    assert first["time"] > second["time"]
    assert (first["seq"], first["event"]) == (1, "run_started")
    assert (second["seq"], second["event"]) == (2, "run_completed")


def test_threads_share_a_journal_without_losing_or_repeating_a_number(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")

    def append() -> None:
        for _ in range(25):
            journal.append("progress")

    threads = [threading.Thread(target=append) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [one["seq"] for one in journal.read()] == list(range(1, 101))


def test_a_field_cannot_take_the_journals_own_name(tmp_path):
    with pytest.raises(ValueError, match="seq"):
        Journal(tmp_path / "journal.jsonl").append("run_started", seq=9)


def test_an_event_that_is_not_json_is_refused_and_takes_no_number(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")

    with pytest.raises(ValueError, match="JSON"):
        journal.append("loss", value=float("nan"))

    assert journal.append("run_started")["seq"] == 1


def test_a_full_disk_names_the_journal_and_leaves_it_whole(on_small_disk):
    """Fault 20: the error names the disk, earlier checkpoints are intact, and a background save
    fails before "done".
    """
    output = on_small_disk("""
        import json, sys
        from pathlib import Path
        from redco_flow.tracking.journal import Journal, read_journal
        path = Path(sys.argv[1], "journal.jsonl")
        journal = Journal(path)
        journal.append("run_started")
        try:
            while True:
                journal.append("progress", text="x" * 50_000)
        except OSError as error:
            print(json.dumps(str(path) in str(error)))
        numbers = [one["seq"] for one in read_journal(path)]
        print(json.dumps(path.read_bytes().endswith(b"}\\n")))
        print(json.dumps(numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 5))
    """)

    assert [json.loads(line) for line in output.splitlines()] == [True, True, True]
