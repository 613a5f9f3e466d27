"""An example that collects what it trains on continues where it stopped, to the last bit.

It stops between rounds, whose examples follow from the parameters so far. Those that collect
nothing resume as `tests/stages/test_script.py` shows.
"""

import numpy as np
import pytest
from example_scripts import PROJECT
from stage_kinds import script

from redco_flow.runtime.context import Stopped

pytestmark = pytest.mark.slow


def test_an_example_stopped_in_the_middle_ends_as_one_that_was_not(bench, stop_at_look):
    pytest.importorskip("gymnasium", reason="install gymnasium")

    def run(**options):
        settings = {
            "path": str(PROJECT / "examples" / "ddpg.py"),
            "arguments": {"num_rounds": 3, "num_updates": 4, "num_envs": 2},
            "outputs": ["params"],
        }
        made = bench.run(script, settings, **options)
        return dict(np.load(made["params"].path / "params.npz"))

    def stopping(*args, **options):
        found = context(*args, **options)
        found.stop = stop_at_look(2)
        return found

    whole = run()
    context = bench.context
    bench.context = stopping
    with pytest.raises(Stopped):
        run(work="same")
    bench.context = context
    resumed = run(work="same")

    assert max(r["start_step"] for r in bench.records() if r["kind"] == "start") > 0
    assert resumed.keys() == whole.keys()
    for key in whole:
        np.testing.assert_array_equal(resumed[key], whole[key])
