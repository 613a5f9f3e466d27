"""Charts of what a job used of its host, as its supervisor sampled it."""

import pytest

from redco_flow.records import append_json_line
from redco_flow.report.run_time import system_sections
from redco_flow.report.stage_facts import StageFacts

GIB = 1 << 30


@pytest.fixture
def sampled(builder):
    """A stage of two attempts; the first ran without a GPU."""
    attempts = [builder.attempt("train") for _ in range(2)]
    for number, (attempt, gpus) in enumerate(zip(attempts, ([], [0, 1]), strict=True)):
        for second in (0, 30):
            used = [
                {
                    "index": gpu,
                    "utilization_percent": 50 + gpu,
                    "memory_used_bytes": GIB,
                    "memory_total_bytes": 2 * GIB,
                }
                for gpu in gpus
            ]
            sample = {"time": 1000.0 + 60 * number + second, "cpu_cores": 1.5, "gpus": used}
            sample |= {"memory_bytes": 3 * GIB, "disk_free_bytes": 5 * GIB}
            append_json_line(attempt.system_metrics_path, sample)
    return StageFacts("train", attempts=tuple(attempts))


def test_each_quantity_that_was_sampled_has_a_chart_over_all_attempts(sampled):
    [section] = system_sections([sampled, StageFacts("without")])

    lines = {
        one.title: [(line.label, list(line.points)) for line in one.chart.lines]
        for one in section.figures
    }
    # No line from one attempt to the next.
    assert lines["CPU"] == [("", [(0.0, 1.5), (0.5, 1.5), (1.0, None), (1.0, 1.5), (1.5, 1.5)])]
    assert lines["Memory"][0][1][0] == (0.0, 3.0)
    assert lines["Disk"][0][1][0] == (0.0, 5.0)
    assert lines["GPU utilization"] == [
        ("GPU 0", [(1.0, 50.0), (1.5, 50.0)]),
        ("GPU 1", [(1.0, 51.0), (1.5, 51.0)]),
    ]
    assert lines["GPU memory"][0] == ("GPU 0", [(1.0, 1.0), (1.5, 1.0)])


def test_a_damaged_record_is_named_and_a_torn_last_line_is_left_out(sampled):
    for number, text in enumerate(('{"time": "x"}\n', '{"time": 1')):
        with (sampled.attempts[number].system_metrics_path).open("a") as file:
            file.write(text)

    [section] = system_sections([sampled])

    assert f"{sampled.attempts[0].system_metrics_path}:3" in section.remark
    assert [one.title for one in section.figures] != []
