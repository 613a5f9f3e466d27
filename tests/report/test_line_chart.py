import itertools
import re

from redco_flow.report.chart import Line, LineChart, draw


def chart(lines, **given):
    return LineChart(title="Loss", x_label="step", y_label="loss (nats)", lines=lines, **given)


def positions_of_labels(svg):
    found = re.findall(r'class="end-label[^>]* y="([\d.]+)">', svg)
    return sorted(float(one) for one in found)


def test_axes_are_named_with_their_units():
    svg = draw(chart([Line("training", [(1, 2.0), (2, 1.0)], 1)]))

    assert ">loss (nats)</text>" in svg
    assert ">step</text>" in svg


def test_a_logarithmic_axis_says_so():
    assert "log scale" in draw(chart([Line("a", [(1, 200.0), (2, 1.0)], 1)], may_be_log=True))
    assert "log scale" not in draw(chart([Line("a", [(1, 2.0), (2, 1.0)], 1)], may_be_log=True))


def test_a_line_is_labelled_at_its_end_with_its_last_value():
    svg = draw(chart([Line("training", [(1, 2.0), (2, 1.25)], 1)]))

    assert ">training 1.250</text>" in svg


def test_labels_of_close_lines_do_not_overlap():
    lines = [Line(name, [(1, 5.0), (2, 1.0 + i / 1000)], i) for i, name in enumerate("abcde", 1)]

    places = positions_of_labels(draw(chart(lines)))

    gaps = [after - before for before, after in itertools.pairwise(places)]
    assert min(gaps) >= 14.9
    assert places[-1] <= 320


def test_every_measured_value_is_named_where_one_points_at_it():
    svg = draw(chart([Line("training", [(10, 2.5), (20, 1.5)], 1), Line("eval", [(20, 1.75)], 2)]))

    assert "<title>step 10 · training 2.500</title>" in svg
    assert "<title>step 20 · training 1.500 · eval 1.750</title>" in svg


def test_the_chart_is_described_for_those_who_do_not_see_it():
    svg = draw(chart([Line("training", [(10, 2.5), (20, 1.5)], 1)]))

    assert 'role="img"' in svg
    assert 'aria-label="Loss. training: from 2.500 at step 10 to 1.500 at step 20."' in svg


def test_five_thousand_points_make_a_small_picture_with_all_spikes():
    points = [(step, 1.0 + (50.0 if step == 2500 else 0.0)) for step in range(1, 5001)]
    lines = chart([Line("training", points, 1)])

    svg = draw(lines)

    assert len(svg) < 60_000
    assert lines.num_left_out > 4000
    assert svg.count('class="stretch"') <= 120
    highest = min(float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", svg.split('class="line')[1]))
    assert highest < 60


def test_rare_measurements_can_all_be_pointed_at():
    points = [(step, 1.0) for step in range(1, 5001)]
    rare = [(step, 1.5) for step in (777, 1234, 4999)]

    svg = draw(chart([Line("training", points, 1), Line("eval", rare, 2, is_sparse=True)]))

    assert all(f"step {step:,} · training 1.000 · eval 1.500" in svg for step, _ in rare)


def test_a_single_point_is_drawn_as_a_dot():
    svg = draw(chart([Line("eval", [(5, 1.0)], 2)]))

    assert "<circle" in svg.split('class="line')[1].split("</g>")[0]


def test_names_are_escaped():
    svg = draw(chart([Line("<script>", [(1, 2.0), (2, 1.0)], 1)]))

    assert "<script>" not in svg
    assert "&lt;script&gt;" in svg
