"""Tables of compare: they fit the terminal, and scores that cannot be compared have a footnote."""

from pathlib import Path

import pytest

from redco_flow.cli.text import page_text
from redco_flow.report.compared_run import ComparedRun
from redco_flow.report.comparison import comparison_page
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.score_identity import ScoreIdentity


def compared(label, **metrics) -> ComparedRun:
    run = ComparedRun(run=RunDirectory(Path(label)), label=label)
    run.__dict__.update(
        settings={f"stages.train.setting_{index}": f"{label} {index}" for index in range(6)},
        identities={"accuracy": ScoreIdentity("test", label)},
        metrics=metrics,
        directions={},
        parts={},
        trainings={},
        state="completed",
        created_at="",
        seconds=5.0,
    )
    return run


def comparison_text(runs, width) -> str:
    return page_text(comparison_page(runs, ""), width)


@pytest.mark.parametrize(("num_runs", "num_metrics"), [(2, 3), (2, 40), (30, 2), (12, 12)])
@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_wide_comparison_is_transposed_or_in_blocks_and_no_value_is_cut(
    num_runs, num_metrics, width
):
    runs = [
        compared(f"demo-{run:06d}", **{f"metric_{i}": 1000.0 * run + i for i in range(num_metrics)})
        for run in range(num_runs)
    ]

    lines = comparison_text(runs, width).splitlines()

    assert max(map(len, lines)) <= width
    words = " ".join(lines).split()
    for run in range(num_runs):
        assert f"demo-{run:06d}" in words
        for index in range(num_metrics):
            assert f"{1000.0 * run + index:.4g}" in words
            assert f"metric_{index}" in words


def test_a_comparison_of_scores_on_other_rows_has_a_footnote():
    text = comparison_text([compared("a", accuracy=1.0), compared("b", accuracy=2.0)], 300)

    assert "2 [1]" in text.splitlines()[2]
    assert text.splitlines()[3] == "[1] not compared with a: other rows of 'test'"
