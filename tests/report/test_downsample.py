import random

from redco_flow.report.charts import keep_extremes


def test_a_short_series_stays_whole():
    points = [(float(x), 1.0) for x in range(12)]

    assert keep_extremes(points, 5) == points


def test_a_spike_of_one_step_stays():
    points = [(float(x), 1.0) for x in range(5000)]
    points[1234] = (1234.0, 99.0)
    points[4321] = (4321.0, -99.0)

    kept = keep_extremes(points, 50)

    assert len(kept) <= 102
    assert {points[1234], points[4321]} <= set(kept)


def test_what_stays_was_measured_and_is_in_order():
    draw = random.Random(0)
    points = [(float(x), draw.random()) for x in range(0, 30000, 7)]

    kept = keep_extremes(points, 100)

    assert kept == sorted(set(kept) & set(points))
    assert (kept[0], kept[-1]) == (points[0], points[-1])


def test_steps_far_apart_are_no_obstacle():
    points = [(0.0, 1.0), *((1e6 + x, float(x)) for x in range(50))]

    assert len(keep_extremes(points, 5)) <= 12


def test_many_values_of_one_step_are_no_obstacle():
    points = [(3.0, float(y)) for y in range(50)]

    assert {(3.0, 0.0), (3.0, 49.0)} <= set(keep_extremes(points, 2))
