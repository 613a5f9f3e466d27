"""Batches early, results late."""

from redco_flow.engine.data.order import LateFetch, fetch_late, put_early


def test_two_batches_are_put_before_the_first_is_used():
    put = []
    batches = put_early(range(5), lambda item: put.append(item) or item)

    first = next(batches)

    assert (first, put) == (0, [0, 1, 2])
    assert list(batches) == [1, 2, 3, 4]


def test_fewer_batches_than_the_depth_all_arrive():
    assert list(put_early(range(1), str)) == ["0"]
    assert list(put_early([], str)) == []


def test_results_are_fetched_two_dispatches_later_and_none_is_lost():
    dispatched = []

    def results():
        for step in range(4):
            dispatched.append(step)
            yield step, step * 10

    found = [(tag, result, len(dispatched)) for tag, result in fetch_late(results())]

    assert found == [(0, 0, 3), (1, 10, 4), (2, 20, 4), (3, 30, 4)]


def test_draining_gives_all_that_waits_once():
    late = LateFetch()
    for step in range(2):
        assert list(late.push(step, step)) == []

    assert list(late.drain()) == [(0, 0), (1, 1)]
    assert list(late.drain()) == []
