"""Batches as a consumer sees them: slices, resume, errors in the reading thread."""

import threading

import datasets
import numpy as np
import pytest

from redco_flow.engine.data.batches import EvalBatches, TrainBatches, read_rows
from redco_flow.engine.errors import DataError


def collate(examples):
    return {"x": np.array([example["x"] for example in examples], np.int32)}


def rows_of(num_examples):
    return [{"x": 10 * index} for index in range(num_examples)]


def train_batches(examples, collate_fn=collate, **changes):
    settings = {"global_batch_size": 4, "seed": 1, "stop_step": 6} | changes
    return TrainBatches(examples, collate_fn, **settings)


def reading_threads():
    return [t for t in threading.enumerate() if t.name.startswith("grain-prefetch")]


def assert_reading_threads_end():
    for thread in reading_threads():
        thread.join(timeout=400)
    assert not reading_threads()


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_the_processes_together_read_the_data_once_per_epoch(num_processes):
    """Engine case 25: the ranks together read the dataset once an epoch."""
    examples = rows_of(10)
    seen = []

    for index in range(num_processes):
        parts = train_batches(
            examples, process_index=index, num_processes=num_processes, stop_step=3
        )
        for batch in parts:
            assert len(batch.arrays["x"]) == 4 // num_processes
            seen.extend(batch.arrays["x"][batch.mask == 1].tolist())

    assert sorted(seen) == [10 * index for index in range(10)]


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_every_process_has_as_many_batches_though_the_rows_do_not_divide(num_processes):
    """Engine case 23: all ranks run equal numbers of steps."""
    for num_examples in (1, 5, 8, 13, 17):
        counts = []
        for process in range(num_processes):
            training = train_batches(
                rows_of(num_examples),
                global_batch_size=8,
                stop_step=2 * -(-num_examples // 8),
                process_index=process,
                num_processes=num_processes,
            )
            evaluation = EvalBatches(
                rows_of(num_examples),
                collate,
                batch_size=8,
                process_index=process,
                num_processes=num_processes,
            )
            counts.append((sum(1 for _ in training), sum(1 for _ in evaluation)))

        steps = -(-num_examples // 8)
        assert counts == [(2 * steps, steps)] * num_processes


@pytest.mark.parametrize("num_examples", [1, 3, 4, 5])
def test_sizes_around_one_batch_train_and_evaluate_every_example_once(num_examples):
    """Engine case 26: every example is trained on and evaluated once."""
    examples = rows_of(num_examples)
    steps = -(-num_examples // 4)

    trained = list(train_batches(examples, stop_step=2 * steps))
    evaluated = list(EvalBatches(examples, collate, batch_size=4))

    for epoch in range(2):
        kept = [b.arrays["x"][b.mask == 1] for b in trained if b.epoch == epoch]
        assert sorted(np.concatenate(kept)) == [10 * i for i in range(num_examples)]
    kept = np.concatenate([b.arrays["x"][b.mask == 1] for b in evaluated])
    assert kept.tolist() == [10 * i for i in range(num_examples)]


def test_a_masked_mean_over_uneven_evaluation_batches_is_the_mean_over_the_examples():
    """Engine case 27, batch side."""
    examples = rows_of(11)

    totals, weights = 0.0, 0.0
    for index in range(2):
        for batch in EvalBatches(
            examples, collate, batch_size=4, process_index=index, num_processes=2
        ):
            totals += float(np.sum(batch.arrays["x"] * batch.mask))
            weights += float(np.sum(batch.mask))

    assert totals / weights == np.mean([example["x"] for example in examples])


def test_evaluation_keeps_the_order_of_the_examples():
    """Engine case 28, batch side."""
    batches = list(EvalBatches(rows_of(9), collate, batch_size=4))

    assert [b.rows[b.mask == 1].tolist() for b in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert len(EvalBatches(rows_of(9), collate, batch_size=4)) == 3


def test_the_shuffle_differs_between_epochs_and_agrees_between_processes():
    """Engine case 29: the order differs between epochs and agrees between ranks."""
    examples = rows_of(8)
    whole = [b.rows.tolist() for b in train_batches(examples, stop_step=8)]
    halves = [
        [
            b.rows.tolist()
            for b in train_batches(examples, stop_step=8, process_index=i, num_processes=2)
        ]
        for i in range(2)
    ]

    assert whole[:2] != whole[2:4]
    assert whole == [first + second for first, second in zip(*halves, strict=True)]


def test_resume_in_mid_epoch_continues_with_the_uninterrupted_run_s_rows():
    """Engine case 30: training goes on with the next batch."""
    examples = rows_of(10)
    uninterrupted = [b.arrays["x"].tolist() for b in train_batches(examples, stop_step=9)]

    for start in range(9):
        resumed = train_batches(examples, start_step=start, stop_step=9)
        assert [b.arrays["x"].tolist() for b in resumed] == uninterrupted[start:]
        assert [b.step for b in resumed] == list(range(start, 9))


class Watched(list):
    """Rows that note which of them were read."""

    def __init__(self, rows):
        super().__init__(rows)
        self.read = []

    def __getitem__(self, index):
        self.read.append(index)
        return super().__getitem__(index)


def test_a_seek_reads_no_row_of_the_batches_before_it():
    """Engine case 30: training goes on with the next batch."""
    examples = Watched(rows_of(40))

    (batch,) = train_batches(examples, start_step=1000, stop_step=1001)

    assert batch.step == 1000
    assert sorted(examples.read) == sorted(batch.rows)


@pytest.mark.parametrize("arrange", ["shuffled", "in order"])
def test_a_process_reads_and_collates_its_own_rows_alone(arrange):
    examples, num_collated = Watched(rows_of(16)), []

    def counting(rows):
        num_collated.append(len(rows))
        return collate(rows)

    part = {"process_index": 1, "num_processes": 2}
    if arrange == "shuffled":
        batches = list(train_batches(examples, counting, stop_step=4, **part))
    else:
        batches = list(EvalBatches(examples, counting, batch_size=4, **part))

    assert examples.read == [row for batch in batches for row in sorted(batch.rows)]
    assert num_collated == [2] * 4


def test_another_number_of_processes_keeps_the_global_order():
    """Engine case 31: the order of examples is the same."""
    examples = rows_of(10)
    orders = []
    for count in (1, 2, 4):
        parts = [
            [
                b.rows
                for b in train_batches(examples, start_step=2, process_index=i, num_processes=count)
            ]
            for i in range(count)
        ]
        orders.append([np.concatenate(slices).tolist() for slices in zip(*parts, strict=True)])

    assert orders[0] == orders[1] == orders[2]


def test_arrow_data_and_a_list_give_the_same_batches():
    rows = [{"x": 10 * i, "text": f"row {i}"} for i in range(11)]
    arrow = datasets.Dataset.from_list(rows)

    def texts(examples):
        return {
            "x": np.array([e["x"] for e in examples]),
            "text": np.array([e["text"] for e in examples]),
        }

    for one, other in zip(train_batches(rows, texts), train_batches(arrow, texts), strict=True):
        np.testing.assert_array_equal(one.arrays["x"], other.arrays["x"])
        np.testing.assert_array_equal(one.arrays["text"], other.arrays["text"])


def test_a_batch_is_one_read_of_its_distinct_rows():
    class Table:
        def __init__(self):
            self.reads = []

        def __len__(self):
            return 5

        def __getitem__(self, index):
            raise AssertionError("single rows are slow")

        def __getitems__(self, indices):
            self.reads.append(indices)
            return [{"x": index} for index in indices]

    table = Table()

    found = read_rows(table, np.array([4, 0, 4, 2, 4]))

    assert [row["x"] for row in found] == [4, 0, 4, 2, 4]
    assert table.reads == [[0, 2, 4]]


def test_a_partial_batch_repeats_a_real_row_for_every_process():
    """Engine case 26: a process without a real row still gets a batch of the right shape."""
    last = [
        list(train_batches(rows_of(5), stop_step=2, process_index=i, num_processes=4))[-1]
        for i in range(4)
    ]

    assert [batch.mask.tolist() for batch in last] == [[1.0], [0.0], [0.0], [0.0]]
    assert len({batch.rows.item() for batch in last}) == 1


@pytest.mark.parametrize("num_ahead", [0, 2])
def test_a_collate_error_reaches_the_consumer_with_its_rows_and_ends_the_thread(num_ahead):
    def picky(examples):
        if any(example["x"] == 70 for example in examples):
            raise KeyError("no summary")
        return collate(examples)

    batches = iter(
        TrainBatches(
            rows_of(12), picky, global_batch_size=4, seed=0, stop_step=3, num_ahead=num_ahead
        )
    )
    with pytest.raises(DataError) as caught:
        list(batches)

    assert "each alone fails too: [7]" in str(caught.value)
    assert "KeyError: 'no summary'" in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)
    assert list(batches) == []
    assert_reading_threads_end()


def test_a_read_error_names_the_rows():
    class Broken(list):
        def __getitem__(self, index):
            raise OSError(5, "Input/output error")

    batches = EvalBatches(Broken([1, 2, 3]), collate, batch_size=2)

    with pytest.raises(DataError, match=r"step 0: reading rows \[0, 1\] failed: OSError"):
        list(batches)


def test_a_stop_iteration_in_collate_is_an_error_and_no_silent_end():
    def ends(examples):
        return {"x": next(iter(()))}

    with pytest.raises(DataError, match="StopIteration"):
        list(EvalBatches(rows_of(3), ends, batch_size=2))


def test_an_array_without_the_batch_s_leading_dim_is_refused():
    def flat(examples):
        return {"x": np.zeros(4), "n": np.zeros((3, 2))}

    with pytest.raises(DataError, match=r"'n' of shape \(3, 2\) for 4 examples"):
        list(train_batches(rows_of(8), flat))


def test_the_thread_prepares_batches_before_they_are_asked_for():
    third = threading.Event()

    def watched(examples):
        if examples[0]["x"] == 40:
            third.set()
        return collate(examples)

    with iter(EvalBatches(rows_of(10), watched, batch_size=2, num_ahead=2)) as batches:
        next(batches)
        assert third.wait(timeout=400)


def test_leaving_an_endless_iteration_ends_its_thread():
    with iter(train_batches(rows_of(8), stop_step=None)) as batches:
        for batch in batches:
            if batch.step == 20:
                break
    batches.close()

    assert batch.epoch == 10
    assert list(batches) == []
    assert_reading_threads_end()


def test_forgetting_to_close_does_not_keep_the_thread():
    for batch in train_batches(rows_of(8), stop_step=None):
        if batch.step == 3:
            break

    assert_reading_threads_end()


def test_a_batch_that_does_not_split_over_the_processes_names_the_nearest_sizes():
    """Engine case 6, batch side."""
    with pytest.raises(DataError, match="nearest sizes are 8 and 12"):
        train_batches(rows_of(8), global_batch_size=10, num_processes=4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start_step": -1}, "start_step is -1"),
        ({"process_index": 2, "num_processes": 2}, "process_index 2 of num_processes 2"),
        ({"process_index": 0, "num_processes": 0}, "num_processes 0"),
    ],
)
def test_impossible_positions_are_refused(changes, message):
    with pytest.raises(DataError, match=message):
        train_batches(rows_of(8), **changes)
