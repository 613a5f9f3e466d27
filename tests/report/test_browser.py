"""The page in a real browser: what it asks the network for, whether it fits, what it shows."""

import contextlib
import itertools
import json
import os
import subprocess
import sys

import pytest

from redco_flow.report.page import build_report

pytestmark = pytest.mark.slow

_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--remote-debugging-pipe"),
)

_AS_3_AND_4 = """
import os, sys
read, write = (os.dup(os.dup(int(number))) for number in sys.argv[1:3])
os.dup2(read, 3)
os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """Chromium through its debugging pipe: commands in, answers and events out."""

    def __init__(self, program, profile) -> None:
        to_child, self.write_fd = os.pipe()
        self.read_fd, from_child = os.pipe()
        # Chromium reads commands from descriptor 3 and writes answers to 4.
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                _AS_3_AND_4,
                str(to_child),
                str(from_child),
                program,
                *_FLAGS,
                f"--user-data-dir={profile}",
                "about:blank",
            ],
            pass_fds=(to_child, from_child),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_child)
        os.close(from_child)
        self.events: list[dict] = []
        self._numbers = itertools.count(1)
        self._rest = b""
        self._session: dict[str, str] = {}
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.ask(f"{domain}.enable")

    def ask(self, method, **params):
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params, **self._session}
        os.write(self.write_fd, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def open(self, path, *, width=1100, height=900, scheme="light", medium="screen"):
        self.events.clear()
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("Emulation.setEmulatedMedia", media=medium, features=features)
        self.ask("Page.navigate", url=path.as_uri())
        while not self.named("Page.loadEventFired"):
            self.events.append(self._next())

    def named(self, *methods):
        return [one["params"] for one in self.events if one.get("method") in methods]

    def evaluate(self, expression):
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"][
            "value"
        ]

    def close(self):
        with contextlib.suppress(OSError):
            os.close(self.write_fd)
        self.process.kill()
        self.process.wait()
        os.close(self.read_fd)

    def _next(self):
        while b"\0" not in self._rest:
            data = os.read(self.read_fd, 1 << 16)
            assert data, "Chromium ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


@pytest.fixture(scope="module")
def browser(chromium, tmp_path_factory):
    opened = Browser(chromium, tmp_path_factory.mktemp("chromium"))
    yield opened
    opened.close()


@pytest.fixture
def page(builder, workspace):
    return build_report(builder.whole(), workspace)


def test_the_page_asks_for_nothing_and_complains_of_nothing(browser, page):
    browser.open(page)

    asked = [one["request"]["url"] for one in browser.named("Network.requestWillBeSent")]
    assert [url for url in asked if not url.startswith("data:")] == [page.as_uri()]
    complaints = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
    assert browser.named(*complaints) == []
    assert "demo-" in browser.evaluate("document.title")


@pytest.mark.parametrize("width", [360, 800, 1400])
def test_the_page_fits_into_every_window(browser, page, width):
    browser.open(page, width=width)

    assert browser.evaluate("document.documentElement.scrollWidth") <= width


def test_the_colours_follow_the_readers_scheme(browser, page):
    backgrounds = []
    for scheme in ("light", "dark"):
        browser.open(page, scheme=scheme)
        backgrounds.append(browser.evaluate("getComputedStyle(document.body).backgroundColor"))

    assert backgrounds == ["rgb(246, 247, 249)", "rgb(14, 18, 23)"]


def test_paper_is_white_whatever_the_readers_scheme(browser, page):
    browser.open(page, scheme="dark", medium="print")

    assert (
        browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    )
    assert browser.evaluate("getComputedStyle(document.body).color") == "rgb(28, 33, 40)"
    assert browser.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"


def test_paper_shows_a_long_source_whole(browser, builder, workspace):
    source = "word\n" * 300
    row = {"row_id": "1", "source": source, "prediction": "p", "references": ["r"]}
    page = build_report(builder.whole([row]), workspace)
    height = "document.querySelector('.sample').getBoundingClientRect().height"

    browser.open(page)
    on_screen = browser.evaluate(height)
    browser.open(page, medium="print")

    assert on_screen < 1000
    assert browser.evaluate(height) > 3000


def test_pointing_at_a_chart_shows_the_values_there(browser, page):
    browser.open(page, height=4000)
    middle = browser.evaluate(
        "(() => { const box = document.querySelectorAll('.chart .stretch')[15]"
        ".querySelector('rect').getBoundingClientRect();"
        "return [box.x + box.width / 2, box.y + box.height / 2] })()"
    )
    shown = (
        "[...document.querySelectorAll('.stretch text')]"
        ".filter(one => getComputedStyle(one).visibility == 'visible').map(one => one.textContent)"
    )
    before = browser.evaluate(shown)

    browser.ask("Input.dispatchMouseEvent", type="mouseMoved", x=middle[0], y=middle[1])

    assert before == []
    assert len(after := browser.evaluate(shown)) == 1
    assert after[0].startswith("step 160 · training 1.")


def test_nothing_runs_that_a_model_or_a_user_wrote(browser, builder, workspace):
    trap = "</style><img src=x onerror=document.title='trapped'><script>document.title='trapped'"
    rows = [{"row_id": trap, "source": trap, "prediction": trap, "references": [trap]}]
    run = builder.whole(rows)

    browser.open(build_report(run, workspace))

    assert browser.evaluate("document.title").startswith("demo-")
    assert browser.evaluate("document.querySelectorAll('script, img').length") == 0
