"""What `redco-flow doctor` says of XManager where it is installed."""

import pytest

from redco_flow.launch.xmanager.executor import examine_xmanager

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def test_a_good_installation_has_nothing_to_mend(xmanager):
    library, database = examine_xmanager()

    assert library.is_good, library.detail
    assert "xmanager 0.8" in library.detail
    assert database.is_good, database.detail
    assert str(xmanager) in database.detail


def test_a_package_that_does_not_import_is_told(xmanager, monkeypatch, tmp_path):
    (tmp_path / "docker.py").write_text("raise ImportError('this docker is broken')")
    monkeypatch.syspath_prepend(tmp_path)

    library, _ = examine_xmanager()

    assert not library.is_good
    assert "this docker is broken" in library.detail
