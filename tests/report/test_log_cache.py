"""Logs of a live page: lines are read once, and charts of long logs keep every spike."""

from redco_flow.records import append_json_line
from redco_flow.report.log_cache import LogCache


def test_appended_records_follow_and_a_file_that_was_replaced_is_read_again(builder):
    attempt, logs = builder.attempt("train"), LogCache()
    for step in (1, 2):
        append_json_line(attempt.metrics_path, {"step": step, "loss": 1.0})
    first = [one["step"] for one in logs.metrics(attempt)]
    with attempt.metrics_path.open("a") as file:
        file.write('{"step": 3, "loss": 1.0}\n{"step": 4, "lo')
    second = [one["step"] for one in logs.metrics(attempt)]

    attempt.metrics_path.unlink()
    append_json_line(attempt.metrics_path, {"step": 7})

    assert (first, second) == ([1, 2], [1, 2, 3])
    assert list(logs.metrics(attempt)) == [{"step": 7}]


def test_a_long_log_keeps_extremes_starts_and_evaluations_only(builder):
    attempt = builder.attempt("train")
    losses = {500: 9.0, 7_000: -9.0}
    lines = [f'{{"step": {n}, "loss": {losses.get(n, 1.0)}}}\n' for n in range(1, 20_001)]
    lines[9_000:9_000] = ['{"step": 9000, "metrics": {"accuracy": 0.5}}\n']
    attempt.metrics_path.write_text("".join(lines))

    kept = list(LogCache().metrics(attempt))

    assert len(kept) < 8_000
    assert [one["step"] for one in kept] == sorted(one["step"] for one in kept)
    assert {one["step"]: one["loss"] for one in kept if one.get("loss", 1.0) != 1.0} == losses
    assert [one for one in kept if "metrics" in one] != []
    assert (kept[0]["step"], kept[-1]["step"]) == (1, 20_000)
