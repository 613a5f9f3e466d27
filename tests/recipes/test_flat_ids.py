"""Token ids of many rows in one array."""

import pickle

import pytest

from redco_flow.text.tokenizer import FlatIds, as_flat

ROWS = [[3, 1], [], [2**31 - 1, 0, 7]]


def test_rows_come_back_as_they_were_given():
    rows = FlatIds(ROWS)

    assert list(rows) == ROWS
    assert rows.lengths() == [2, 0, 3]
    assert len(rows) == 3
    assert list(FlatIds()) == []


def test_rows_travel_to_another_process():
    assert list(pickle.loads(pickle.dumps(FlatIds(ROWS)))) == ROWS


def test_lists_of_a_recipe_become_flat_and_flat_ids_stay_the_object_that_they_are():
    rows = FlatIds(ROWS)

    assert as_flat(rows) is rows
    assert list(as_flat(ROWS)) == ROWS


@pytest.mark.parametrize("wrong", [2**31, 1.5, "1", None])
def test_what_is_no_int32_is_an_error(wrong):
    with pytest.raises((OverflowError, TypeError)):
        FlatIds([[wrong]])


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 9])
def test_the_first_rows_are_taken_out_and_the_others_stay(num_rows):
    rows = FlatIds(ROWS)

    taken = rows.take_first(num_rows)
    rows.extend(taken)

    assert list(taken) == ROWS[:num_rows]
    assert list(rows) == ROWS[num_rows:] + ROWS[:num_rows]
