"""The page in a real browser: what it asks the network for, whether it fits, what it shows."""

import re

import pytest

from redco_flow.report.page import build_report

pytestmark = pytest.mark.slow


@pytest.fixture
def page(builder, workspace):
    return build_report(builder.whole(), workspace)


def traces(page, number=0):
    """The names and values of a chart's lines, as they are drawn."""
    return page.evaluate(
        "number => document.querySelectorAll('.plot')[number].data.map(one => [one.name, one.y])",
        number,
    )


def test_the_page_asks_for_nothing_and_complains_of_nothing(open_page, page):
    opened = open_page(page)

    assert "demo-" in opened.drawn().title()
    assert [url for url in opened.asked if not url.startswith("data:")] == [page.as_uri()]
    assert opened.complaints == []


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (390, "dark")])
def test_the_page_fits_and_is_accessible(open_page, page, width, scheme):
    opened = open_page(page, width=width, scheme=scheme)

    drawn = opened.drawn()

    assert drawn.evaluate("document.documentElement.scrollWidth") <= width
    assert opened.violations() == []


def test_charts_follow_the_readers_scheme_and_paper_is_white(open_page, page):
    drawn = open_page(page, scheme="light").drawn()
    colours = """() => [
        getComputedStyle(document.body).backgroundColor,
        document.querySelector('.plot .scatterlayer .js-line').style.stroke,
    ]"""
    line = "() => document.querySelector('.plot .scatterlayer .js-line').style.stroke"

    light = drawn.evaluate(colours)
    drawn.emulate_media(color_scheme="dark")
    drawn.wait_for_function(f"stroke => ({line})() != stroke", arg=light[1])
    dark = drawn.evaluate(colours)
    drawn.emulate_media(color_scheme="dark", media="print")
    drawn.wait_for_function(f"stroke => ({line})() == stroke", arg=light[1])

    assert light == ["rgb(246, 247, 249)", "rgb(11, 98, 196)"]
    assert dark == ["rgb(14, 18, 23)", "rgb(108, 178, 255)"]
    assert drawn.evaluate(colours) == ["rgb(255, 255, 255)", "rgb(11, 98, 196)"]
    assert not drawn.is_visible("nav")
    assert drawn.evaluate("document.querySelector('.plot svg').clientWidth") <= 680  # A4


def test_paper_shows_a_long_source_whole(open_page, builder, workspace):
    source = "word\n" * 300
    row = {"row_id": "1", "source": source, "prediction": "p", "references": ["r"]}
    drawn = open_page(build_report(builder.whole([row]), workspace)).drawn()

    on_screen = drawn.locator(".sample").bounding_box()["height"]
    drawn.emulate_media(media="print")

    assert on_screen < 1000
    assert drawn.locator(".sample").bounding_box()["height"] > 3000


def test_pointing_at_a_chart_shows_the_values_there(open_page, page):
    drawn = open_page(page).drawn()
    plot = drawn.locator(".plot").first
    plot.scroll_into_view_if_needed()
    box = plot.locator(".nsewdrag").bounding_box()

    drawn.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    drawn.wait_for_selector(".plot .hoverlayer .legend text")
    shown = plot.locator(".hoverlayer").text_content()

    assert re.search(r"1[56]0\s*training : 1\.", shown), shown


def test_the_log_scale_is_switched_and_dragging_zooms(open_page, page):
    drawn = open_page(page).drawn()
    plot, log = drawn.locator(".plot").nth(1), drawn.locator("input.log").nth(1)
    axis = "() => document.querySelectorAll('.plot')[1]._fullLayout.yaxis.type"
    x_range = "() => document.querySelectorAll('.plot')[1]._fullLayout.xaxis.range"

    before = drawn.evaluate(axis)
    log.check()
    drawn.wait_for_function(f"({axis})() == 'log'")
    whole = drawn.evaluate(x_range)
    plot.scroll_into_view_if_needed()
    box = plot.locator(".nsewdrag").bounding_box()
    middle = box["y"] + box["height"] / 2
    drawn.mouse.move(box["x"] + 0.25 * box["width"], middle)
    drawn.mouse.down()
    drawn.mouse.move(box["x"] + 0.75 * box["width"], middle, steps=5)
    drawn.mouse.up()
    drawn.wait_for_function(f"whole => ({x_range})()[0] > whole[0]", arg=whole)
    zoomed = drawn.evaluate(x_range)
    log.uncheck()
    drawn.wait_for_function(f"({axis})() == 'linear'")

    assert before == "linear"
    assert (zoomed[1] - zoomed[0]) / (whole[1] - whole[0]) == pytest.approx(0.5, abs=0.02)
    assert drawn.evaluate(x_range) == zoomed  # what the reader chose stays


def test_no_button_of_a_chart_sends_it_anywhere(open_page, page):
    drawn = open_page(page).drawn()

    titles = drawn.locator(".modebar-btn").evaluate_all("all => all.map(one => one.dataset.title)")

    assert len(set(titles)) == 6
    assert not [title for title in titles if "cloud" in title.lower() or "share" in title.lower()]
    assert drawn.locator(".modebar a[href]").count() == 0


def test_smoothing_is_off_until_the_reader_switches_it_on(open_page, page):
    drawn = open_page(page).drawn()
    (name, logged), evaluation = traces(drawn)

    drawn.locator("input.smoothing").first.fill("0.5")
    drawn.wait_for_function("document.querySelector('.plot').data.length == 3")

    weights, values = 0.0, 0.0
    expected = []
    for value in logged:  # a mean whose weights halve with each record
        weights, values = 0.5 * weights + 0.5, 0.5 * values + 0.5 * value
        expected.append(values / weights)
    assert name == "training"
    (raw, smoothed, unchanged) = traces(drawn)
    assert raw == [name, logged]
    assert smoothed[0] == "training (smoothed)"
    assert smoothed[1] == pytest.approx(expected)
    assert unchanged == evaluation


def test_samples_are_searched_and_others_shown_on_demand(open_page, page):
    drawn = open_page(page).drawn()
    shown, search = drawn.locator(".sample:visible"), drawn.locator("input.search")
    everything = drawn.locator(".sample").count()

    counts = [shown.count()]
    search.fill("blue spice 4")
    counts.append(shown.count())
    said = drawn.locator(".controls output[aria-live]").text_content()
    search.fill("")
    counts.append(shown.count())
    drawn.locator("input.all").check()
    counts.append(shown.count())

    # Of 60 rows: 4 and 40 to 49.
    assert (counts, everything, said) == ([10, 11, 10, 60], 60, "11 found")


def test_nothing_runs_that_a_model_or_a_user_wrote(open_page, builder, workspace):
    trap = "</style><img src=x onerror=document.title='trapped'><script>document.title='trapped'"
    rows = [{"row_id": trap, "source": trap, "prediction": trap, "references": [trap]}]
    label = f"</script>{trap}</script><a href='https://example.org'>x</a>"
    dataset = builder.preprocess()["dataset"]
    measured = [{"step": 9 + n, "metrics": {label: 1.0, "other": 2.0}} for n in (0, 1)]
    records = [{"step": n, "loss": 1.0, label: 2.0} for n in range(1, 9)]
    best = builder.train(dataset, records=[*records, *measured])["checkpoint/best/rouge2"]
    builder.predict(best, dataset, rows)

    opened = open_page(build_report(builder.close(), workspace))
    drawn = opened.drawn()

    assert drawn.title().startswith("demo-")
    assert drawn.locator("img").count() == 0
    assert drawn.locator("script:not([type])").count() == 2
    assert drawn.locator(".plot a[href]").count() == 0
    assert f"val/{label}" in drawn.locator(".plot .legendtext").all_text_contents()
    assert opened.complaints == []
