import pytest

from redco_flow.report.charts import Figure, Group, Line, LineChart, PointChart, plotly_figure


def chart(lines, **given):
    return LineChart(title="Loss", x_label="step", y_label="loss (nats)", lines=lines, **given)


def test_axes_are_named_with_their_units():
    layout = plotly_figure(chart([Line("training", [(1, 2.0), (2, 1.0)], 1)]))["layout"]

    assert layout["yaxis"]["title"]["text"] == "loss (nats)"
    assert layout["xaxis"]["title"]["text"] == "step"


@pytest.mark.parametrize(
    ("low", "may_be_log", "is_log"),
    [(200.0, True, True), (2.0, True, False), (200.0, False, False)],
)
def test_an_axis_begins_as_a_logarithmic_one_where_values_span_a_factor_of_ten(
    low, may_be_log, is_log
):
    drawn = plotly_figure(chart([Line("a", [(1, low), (2, 1.0)], 1)], may_be_log=may_be_log))

    assert (drawn["layout"]["yaxis"].get("type") == "log") == is_log


def test_no_logarithmic_scale_is_offered_where_nothing_is_positive():
    figures = [Figure("", chart([Line("a", [(1, y), (2, -1.0)], 1)])) for y in (1.0, -1.0)]

    assert [figure.has_log for figure in figures] == [True, False]


def test_only_lines_of_many_measurements_can_be_smoothed():
    dense = Line("training", [(1, 2.0), (2, 1.0), (3, 1.0)], 1)
    sparse = Line("evaluation", [(1, 2.0), (2, 1.0), (3, 1.0)], 2, is_sparse=True)

    drawn = plotly_figure(chart([dense, sparse]))

    assert [trace["meta"]["dense"] for trace in drawn["data"]] == [True, False]
    assert Figure("", chart([dense, sparse])).has_smoothing
    assert not Figure("", chart([sparse])).has_smoothing


def test_no_two_lines_look_the_same():
    lines = [Line(str(number), [(1, 1.0)], number) for number in range(1, 13)]

    data = plotly_figure(chart(lines))["data"]

    looks = [(trace["meta"]["colour"], trace["line"]["dash"]) for trace in data]
    assert len(set(looks)) == len(lines)


def test_the_chart_is_described_for_those_who_do_not_see_it():
    described = chart([Line("training", [(10, 2.5), (20, 1.5)], 1)]).description

    assert described == "Loss. training: from 2.500 at step 10 to 1.500 at step 20."


def test_five_thousand_points_become_few_with_all_spikes():
    points = [(step, 1.0 + (50.0 if step == 2500 else 0.0)) for step in range(1, 5001)]
    lines = chart([Line("training", points, 1)])

    (trace,) = plotly_figure(lines)["data"]

    assert len(trace["x"]) == len(trace["y"]) <= 1202
    assert lines.num_left_out == 5000 - len(trace["x"])
    assert max(trace["y"]) == 51.0


def test_a_single_point_is_drawn_as_a_dot():
    (trace,) = plotly_figure(chart([Line("eval", [(5, 1.0)], 2)]))["data"]

    assert trace["mode"] == "lines+markers"


def test_tags_that_plotly_would_read_are_escaped():
    name = "<a href='https://example.org'>x</a>"
    group = Group(name, ["<b>k</b>"], [1.0], [f"{name}\nsecond"], 1)
    points = PointChart(name, name, name, [group], x_kind="category", ticks=[(1.0, name)])
    lines = LineChart(name, name, name, [Line(name, [(1, 2.0)], 1)])

    for drawn in (plotly_figure(points), plotly_figure(lines)):
        assert "<" not in str(drawn).replace("<br>", "")
    assert plotly_figure(points)["data"][0]["text"][0].endswith("&lt;/a&gt;<br>second")
