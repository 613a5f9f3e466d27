"""Records of firings: which of them are kept."""

from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.schedules import MAX_KEPT, Firing, FiringState, ScheduleDirectory


def test_old_firings_are_deleted_except_the_last_good_one_and_the_open_ones(tmp_path):
    """Fault 60."""
    directory = ScheduleDirectory(tmp_path / "weekly")
    number = iter(range(10_000))

    def write(state, count=1):
        for _ in range(count):
            index = next(number)
            with directory.locked():
                directory.write_firing(Firing(str(index), f"2026-01-01T{index:06}", state))

    write(FiringState.COMPLETED, 2)  # 0, 1
    write(FiringState.WAITING)  # 2
    write(FiringState.SKIPPED, MAX_KEPT + 3)
    write(FiringState.FAILED, MAX_KEPT + 3)

    claimed, _ = directory.claim(Firing("new", utc_now(), FiringState.WAITING))

    kept = {one.id: one.state for one in directory.firings()}
    assert claimed.id == "new"
    assert list(kept)[:2] == ["1", "2"]
    states = list(kept.values())
    assert states.count(FiringState.SKIPPED) == states.count(FiringState.FAILED) == MAX_KEPT
