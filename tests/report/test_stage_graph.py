import re

import pytest

from redco_flow.report.stage_facts import read_stages
from redco_flow.report.stage_graph import stage_graph


def graph(builder, run):
    return stage_graph(read_stages(run, builder.workspace, pytest.fail).values())


def test_every_stage_comes_after_what_it_was_made_from(builder):
    found = graph(builder, builder.whole())

    columns = {node.name: node.x for node in found.nodes}
    order = ["data", "preprocess", "train", "predict", "evaluate"]
    assert [node.name for node in sorted(found.nodes, key=lambda one: one.x)] == order
    assert columns["train"] < columns["predict"] < columns["evaluate"]
    # data to preprocess; preprocess to train and predict; train to predict; predict to evaluate
    assert len(found.edges) == 5
    assert "train to predict" in found.description


def test_no_boxes_overlap_and_all_lie_within(builder):
    dataset = builder.preprocess()["dataset"]
    for name in "abc":
        builder.train(dataset, stage=f"train_{name}", settings={"name": name})

    found = graph(builder, builder.close())

    places = [(node.x, node.y) for node in found.nodes]
    assert len(set(places)) == len(places) == 5
    assert all(x + 148 <= found.width and y + 46 <= found.height for x, y in places)


def test_without_results_there_is_no_graph(builder):
    builder.fail("train")

    assert graph(builder, builder.close("failed")) is None


def test_the_page_has_the_graph_with_a_text_for_those_who_do_not_see_it(builder, read_report):
    page = read_report(builder.whole())

    (drawn,) = (one for one in page.all("svg") if one.get("class") == "graph")
    assert re.match(r"What was made from what: data to preprocess, ", drawn["aria-label"])


def test_the_environment_has_hosts_devices_and_versions(builder, read_report):
    page = read_report(builder.whole())

    assert "train local node7" in page.text
    assert "jax\xa00.11.0" in page.html.replace("&nbsp;", "\xa0")
