"""Which profiles' hosts can be cleaned at all; the hosts themselves are in tests/hosts."""

import pytest

from redco_flow.errors import UsageError
from redco_flow.orchestrate.hosts_cleaning import clean_profile_hosts
from redco_flow.spec.profile import Profile


def test_a_profile_without_hosts_is_refused_with_its_executor():
    with pytest.raises(UsageError, match=r"'local' runs on no hosts \(its executor is local\)"):
        clean_profile_hosts(Profile(), None, dry_run=True)


def test_a_profile_that_keeps_all_is_refused_unless_an_age_is_named(tmp_path):
    hosts = {"addresses": [{"address": "192.0.2.1"}], "keep_days": 0}
    profile = Profile.from_json(
        {"executor": "hosts", "hosts": hosts, "workspace": str(tmp_path / "workspace")}
    )

    with pytest.raises(UsageError, match=r"hosts\.keep_days .* is 0.*--older-than DAYS"):
        clean_profile_hosts(profile, None, dry_run=False)
