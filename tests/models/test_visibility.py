from __future__ import annotations

import numpy as np
import pytest

from redco_flow.models.attention.bias import as_arrays, band_bias, default_positions, row_biases


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("is_causal", [True, False])
def test_the_band_hides_the_future_and_what_is_far_back(is_causal, window):
    found = band_bias(5, 5, is_causal=is_causal, window=window)

    expected = np.zeros((5, 5), bool)
    for query in range(5):
        for key in range(5):
            is_past = not is_causal or key <= query
            is_near = window is None or query - key < window
            expected[query, key] = is_past and is_near
    visible = np.ones((5, 5), bool) if found is None else np.asarray(found)[0, 0] == 0
    np.testing.assert_array_equal(visible, expected)


def test_rows_hide_padding_and_other_documents():
    mask = np.array([[0, 1, 1, 1]])
    segments = np.array([[1, 1, 2, 2]])

    padding, others = as_arrays(row_biases(mask, segments))

    np.testing.assert_array_equal(np.asarray(padding)[0, 0, 0] == 0, mask[0] == 1)
    same = segments[0][:, None] == segments[0][None, :]
    np.testing.assert_array_equal(np.asarray(others)[0, 0] == 0, same)


@pytest.mark.parametrize(
    ("mask", "segments", "expected"),
    [
        (None, None, [0, 1, 2, 3, 4, 5]),
        ([0, 0, 1, 1, 1, 1], None, [0, 0, 0, 1, 2, 3]),
        ([1, 1, 1, 0, 0, 0], None, [0, 1, 2, 2, 2, 2]),
        (None, [1, 1, 2, 3, 3, 3], [0, 1, 0, 0, 1, 2]),
        ([1, 1, 1, 1, 0, 0], [4, 4, 7, 7, 0, 0], [0, 1, 0, 1, 0, 1]),
    ],
)
def test_positions_count_tokens_and_begin_anew_in_every_document(mask, segments, expected):
    rows = [None if values is None else np.array([values]) for values in (mask, segments)]

    np.testing.assert_array_equal(default_positions((1, 6), *rows), [expected])
