"""What of a job's log is shown while it runs: clean, whole lines, and not too much of it."""

import pytest

from redco_flow.orchestrate.run.attempt_files import LogTail, clean_line


@pytest.fixture
def log(tmp_path):
    return tmp_path / "rank0.log"


def test_a_line_is_shown_when_it_is_whole(log):
    tail = LogTail(log)
    log.write_bytes(b"one\ntw")
    first = tail.new_lines()
    with log.open("ab") as file:
        file.write(b"o\n")

    assert (first, tail.new_lines(), tail.new_lines()) == (["one"], ["two"], [])


def test_a_log_that_is_not_there_yet_has_no_lines(log):
    assert LogTail(log).new_lines() == []


def test_the_last_line_needs_no_newline(log):
    log.write_bytes(b"one\nthe end")

    assert LogTail(log).last_lines() == ["one", "the end"]


def test_of_a_progress_bar_the_last_drawing_is_shown():
    assert clean_line(b"10%\r50%\r100%\r") == "100%"


def test_colours_and_control_characters_are_left_out():
    assert clean_line(b"\x1b[31mred\x1b[0m \x07bell\x00") == "red bell"


def test_bytes_that_are_no_text_are_shown_as_replacements():
    assert clean_line(b"caf\xe9") == "caf�"


def test_a_line_of_50_megabytes_is_read_in_bounded_memory_and_capped(log):
    """Fault 37: no reader hangs, memory stays small, and what is shown is capped."""
    with log.open("wb") as file:
        for _ in range(50):
            file.write(b"x" * (1 << 20))
        file.write(b"\nthe end\n")
    tail = LogTail(log)

    lines = tail.last_lines()

    assert lines[-1] == "the end"
    assert max(len(line) for line in lines) < 2100


def test_of_ten_thousand_lines_at_once_the_last_are_shown_and_the_rest_is_counted(log):
    log.write_text("".join(f"line {number}\n" for number in range(10_000)))

    lines = LogTail(log).last_lines()

    assert lines[-1] == "line 9999"
    assert len(lines) == 201
    assert lines[0] == f"[9800 lines are not shown here; all of them are in {log}]"
