"""The Prefect UI in a real browser: schedules and runs are seen, paused, started, cancelled there.

Pictures of what was seen stay in pytest's base directory, in `screenshots`.
"""

import contextlib
import json
import time
from pathlib import Path

import pytest

from redco_flow.orchestrate.prefect.api import ask
from redco_flow.orchestrate.prefect.server import own_api
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.schedules import ScheduleDirectory
from redco_flow.tracking.workspace import Workspace
from tests.cli.conftest import Command, Served, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PIPELINE = """\
name: {name}
stages:
  gather: {{kind: weekly_kinds.gather, file: {name}.json}}
  fit: {{kind: weekly_kinds.fit, gate: gate}}
  answer: {{kind: weekly_kinds.answer, checkpoint: fit}}
  evaluate: {{metrics: [exact_match], predictions: answer}}
"""
# The machine may be at other work, and each firing is a few processes of Python.
MOST_SECONDS = 240


class Schedules(Command):
    """The command, in a folder with two pipelines whose schedules are served."""

    def add(self, name, *when, **week):
        """Write a pipeline with the week's data, and have it run again and again."""
        (self.folder / f"{name}.yaml").write_text(PIPELINE.format(name=name))
        (self.folder / f"{name}.json").write_text(json.dumps(week))
        return self.json("schedule", "add", f"{name}.yaml", *when)["page"]

    def firings(self, name):
        """The schedule's firings, as their records say."""
        workspace = Workspace(self.folder / "redco-workspace")
        return ScheduleDirectory.of(workspace, name).firings()


@pytest.fixture(scope="module")
def schedules(tmp_path_factory, prefect_server):
    """What serves ends with the last test."""
    command = Schedules(tmp_path_factory.mktemp("schedules"))
    command("serve", "--detach")
    yield command
    command("serve", "--stop")
    for name in ("often", "yearly"):  # other tests have the same server
        command.start("schedule", "rm", name).wait()


@pytest.fixture(scope="module")
def often(schedules, ui):  # which is there before the first firing
    """The page of a schedule that has fired by itself, and was then run once more."""
    page = schedules.add("often", "--cron", "* * * * *", skill=100)
    wait_elsewhere(ui, lambda: fired(page))
    schedules("schedule", "run", "often")
    return page


def fired(page):
    """The flow runs of a deployment's page that have begun, as the server reports them."""
    of = {"id": {"any_": [page.rpartition("/")[2]]}}
    begun = {"state": {"type": {"not_any_": ["SCHEDULED"]}}}
    return ask(own_api(), "/flow_runs/filter", {"deployments": of, "flow_runs": begun})


@pytest.fixture(scope="module")
def ui(chromium, schedules, tmp_path_factory):
    """A browser that was let in by the link that `redco-flow ui --prefect` prints."""
    context = chromium.new_context(viewport={"width": 1300, "height": 860})
    context.set_default_timeout(1000 * MOST_SECONDS)
    page = context.new_page()
    page.goto(schedules("ui", "--prefect").strip())
    page.wait_for_function("document.body.innerText.includes('Deployments')")
    page.pictures = tmp_path_factory.getbasetemp() / "screenshots"
    yield page
    context.close()


def wait_elsewhere(ui, look):
    """Wait on an empty page: the Prefect UI asks its server and draws without a pause."""
    ui.goto("about:blank")
    return wait_for(look, MOST_SECONDS)


def picture(ui, name):
    ui.screenshot(path=ui.pictures / f"{name}.png")


def test_a_schedule_that_fires_by_itself_is_seen_and_paused_on_its_page(schedules, ui, often):
    ui.goto(often)
    for flow_run in fired(often):
        ui.locator(f"a[href$='{flow_run['id']}']").wait_for()
    click_until(
        lambda: schedules.json("schedule", "show", "often")["is_paused"],
        lambda: switch_off(ui, often),
    )
    ended = wait_elsewhere(ui, lambda: all_ended(schedules, "often", least=2))
    ui.goto(often)
    ui.get_by_text("Ready", exact=True).wait_for()  # of the deployment: something serves it
    for firing in ended[:2]:  # their names now say what came of them
        named = ui.locator(f"a[href$='{firing.id}']", has_text=firing.told.partition(":")[0])
        named.wait_for()
    picture(ui, "schedule")

    assert "completed" in [firing.state for firing in ended]


def switch_off(ui, page):
    ui.goto(page)
    ui.get_by_role("switch", checked=True).click(timeout=30_000)


def all_ended(schedules, name, least=1):
    """All firings, once there are so many and they have ended."""
    found = schedules.firings(name)
    return found if len(found) >= least and all(one.has_ended for one in found) else None


def test_run_cancel_and_retry_on_the_pages_start_end_and_resume_a_run(schedules, ui):
    page = schedules.add("yearly", "--cron", "0 0 1 1 *", skill=130, is_slow=True)

    click_until(lambda: flow_runs_by_hand(page), lambda: quick_run(ui, page))
    firing = wait_elsewhere(ui, lambda: at_the_gate(schedules))
    run = RunDirectory(Path(firing.run_path))
    flow_run = f"{page.partition('/deployments/')[0]}/runs/flow-run/{firing.id}"
    click_until(run.cancel_requested, lambda: confirm(ui, flow_run, "Cancel", "Confirm"))

    wait_elsewhere(ui, lambda: run.read_state()["state"] == "cancelled")
    assert run.attempt("fit", 1).read_exit().cause == "cancelled"
    ui.goto(flow_run)
    ui.get_by_role("button", name="Retry", exact=True).wait_for()
    picture(ui, "cancelled")
    (schedules.folder / "gate").touch()
    click_until(lambda: is_tried_again(run), lambda: confirm(ui, flow_run, "Retry", "Retry"))
    wait_elsewhere(ui, lambda: run.read_state()["state"] == "completed")
    [firing] = wait_for(lambda: all_ended(schedules, "yearly"), MOST_SECONDS)
    assert (firing.state, firing.run) == ("completed", run.id)
    assert run.read_state()["stages"]["gather"]["attempt"] == 1  # what was done is not done again
    assert run.read_state()["stages"]["fit"]["attempt"] == 2


def click_until(has_worked, click):
    """Click, and again where the page has lost the click: it renders again when data arrive."""
    from playwright.sync_api import TimeoutError as NotThere

    def look():
        with contextlib.suppress(NotThere):  # or the click has worked, and the button is gone
            click()
        deadline = time.monotonic() + 30
        while not (found := has_worked()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    return wait_for(look, MOST_SECONDS)


def quick_run(ui, page):
    ui.goto(page)
    ui.get_by_role("button", name="Run", exact=True).click()
    ui.get_by_text("Quick run", exact=True).click()


def confirm(ui, flow_run, named, confirmed):
    """Click a button of a flow run's page and the button of the dialog that opens."""
    ui.goto(flow_run)
    ui.get_by_role("button", name=named, exact=True).click()
    ui.locator(".p-modal").get_by_role("button", name=confirmed, exact=True).click(timeout=30_000)


def flow_runs_by_hand(page):
    of = {"id": {"any_": [page.rpartition("/")[2]]}}
    found = ask(own_api(), "/flow_runs/filter", {"deployments": of})
    return [one for one in found if not one["auto_scheduled"]]


def is_tried_again(run):
    return run.latest_attempt("fit").number == 2


def at_the_gate(schedules):
    """The firing whose run waits in its second stage."""
    for one in schedules.firings("yearly"):
        if one.run and RunDirectory(Path(one.run_path)).attempt("fit", 1).progress_path.exists():
            return one
    return None


def test_the_page_of_a_run_shows_its_artifacts_and_tags(schedules, ui, often):
    firing = wait_elsewhere(ui, lambda: find_completed(schedules.firings("often")))
    run = RunDirectory(Path(firing.run_path))
    asked = []
    ui.on("request", lambda one: asked.append(one.url))

    ui.goto(run.read_state()["prefect_url"])
    for tag in ("pipeline: often", "profile: local", "schedule: often"):
        ui.get_by_text(tag, exact=True).first.wait_for()
    ui.get_by_text("Artifacts", exact=True).last.click()
    picture(ui, "run")
    ui.get_by_text("often-summary", exact=True).click()
    ui.wait_for_url("**/artifacts/artifact/**")
    ui.locator("table tbody tr").get_by_text("exact_match").first.wait_for()
    picture(ui, "summary")

    server = ui.url.partition("/artifacts/")[0]
    assert [url for url in asked if not url.startswith((server, "data:", "ws:", "blob:"))] == []


def test_the_page_of_all_runs_leads_to_the_prefect_ui(schedules, chromium, often):
    served = Served(schedules)
    context = chromium.new_context()
    context.set_default_timeout(1000 * MOST_SECONDS)
    page = context.new_page()
    try:
        page.goto(served.link)
        page.locator("button[data-view=schedules]").click()
        page.get_by_role("rowheader", name="often").wait_for()
        page.get_by_role("link", name="Prefect UI").click()
        page.wait_for_function("document.body.innerText.includes('Deployments')")
    finally:
        context.close()
        served.end()

    assert page.url.startswith(own_api().url.removesuffix("/api"))


def find_completed(firings):
    return next((one for one in firings if one.state == "completed"), None)
