"""The report as a file: every figure is the JSON's, the verdict comes first, and hostile text stays text."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.report.reading import Element, check_text, read_page, resolve, script_json
from tests.report.samples import bench_result, live_result, plan_result

from rewarm.bench.result import Percentiles, Result
from rewarm.errors import ConfigError
from rewarm.plan import Plan
from rewarm.report import page as page_module
from rewarm.report import read_result, render, traces, write_report
from rewarm.report.bench_document import job_toml
from rewarm.workload.job import make_job

PLOTLY_SHA256 = "99784e3abfb07b142a15e521a439e6d9addceadb3f79553fd24c72774f0649ba"
replace = msgspec.structs.replace


@pytest.fixture(scope="module")
def both() -> tuple[Element, list[Any]]:
    results: list[Result | Plan] = [bench_result(), plan_result(), live_result()]
    return read_page(render(results)), [json.loads(msgspec.json.encode(result)) for result in results]


def figures(page: Element) -> list[dict[str, Any]]:
    """The specification of every chart."""
    return [script_json(page, plot.attributes["data-figure"]) for plot in page.with_attribute("data-figure")]


def test_every_figure_of_the_page_is_that_of_the_json(both: tuple[Element, list[Any]]) -> None:
    page, sources = both
    shown = page.with_attribute("data-pointer")
    assert len(shown) > 300
    for element in shown:
        value = resolve(sources, element.attributes["data-pointer"])
        assert json.loads(element.attributes["data-raw"]) == value, element
        check_text(element.text, value)


def test_every_point_of_every_chart_is_that_of_the_json(both: tuple[Element, list[Any]]) -> None:
    page, sources = both
    points = 0
    for figure in figures(page):
        for trace in figure["traces"]:
            exact = trace["meta"]["exact"]
            values = [resolve(sources, pointer) for pointer in trace["customdata"]]
            assert trace[exact] == values
            assert len(trace["x"]) == len(trace["y"]) == len(trace["hovertext"]) == len(values)
            points += len(values)
    assert points > 200


def test_a_text_that_is_not_the_value_is_noticed() -> None:
    for text, value in (("12.4 ms", 0.0123), ("2.00 GB/s", 2.1e9), ("50%", 0.52), ("yes", False), ("–", 1.0)):
        with pytest.raises((AssertionError, ValueError)):
            check_text(text, value)
    check_text("12.3 ms", 0.0123)


def test_the_results_themselves_are_in_the_page(both: tuple[Element, list[Any]]) -> None:
    page, sources = both
    assert [script_json(page, f"source-{place}") for place in range(3)] == sources


def test_the_verdict_comes_before_every_other_figure(both: tuple[Element, list[Any]]) -> None:
    page, sources = both
    bench, plan, live = page.all("article")
    assert sources[0]["verdicts"][0] in bench.all("p", **{"class": "lead"})[0].text
    head, _, rest = sources[1]["verdict"]["sentence"].partition("; ")
    assert head in plan.all("section", **{"class": "verdict"})[0].text
    assert rest[1:] in plan.all("section", **{"class": "verdict"})[0].text
    for article in (bench, plan, live):
        before = article.text.split("Verdict", 1)[0]
        assert re.sub(r"\W", "", before) == re.sub(r"\W", "", article.all("h2")[0].text)


def test_labels_say_where_figures_come_from(both: tuple[Element, list[Any]]) -> None:
    page, _ = both
    bench, plan, live = page.all("article")
    series = [button.attributes["data-name"] for button in bench.with_attribute("data-name")]
    targets = {name for name in series if name.split()[0] in ("flash", "local", "array", "recompute")}
    assert targets == {"flash (measured)", "local (emulated)", "array (emulated)", "recompute (modelled)"}
    media = [button.attributes["data-name"] for button in plan.with_attribute("data-name")]
    assert {name for name in media if "array" in name} == {"array (modelled)"}
    servers = {button.attributes["data-name"] for button in live.with_attribute("data-name")}
    assert {"tiered (measured)", "tiered: recompute (measured)", "plain: recompute (measured)"} <= servers


def test_every_chart_has_title_units_legend_text_and_table(both: tuple[Element, list[Any]]) -> None:
    page, _ = both
    charts = page.all("figure")
    titles = [chart.all("h4")[0].text for chart in charts]
    assert len(titles) == 17
    for article in page.all("article"):
        own = [chart.all("h4")[0].text for chart in article.all("figure")]
        assert len(own) == len(set(own))
    for chart, figure in zip(charts, figures(page), strict=True):
        described = chart.attributes["aria-describedby"]
        assert len(chart.all("p", id=described)[0].text) > 60
        legend = {button.attributes["data-name"] for button in chart.with_attribute("data-name")}
        assert legend == {trace["name"] for trace in figure["traces"]}
        assert figure["layout"]["xaxis"]["title"]["text"] or figure["layout"]["yaxis"]["title"]["text"]
        assert chart.all("table")[0].with_attribute("data-pointer")
        options = chart.all("option")
        assert len(options) == len(figure["choices"])
        assert all(figure["choices"])


def test_inputs_stand_under_their_origin(both: tuple[Element, list[Any]]) -> None:
    page, sources = both
    (section,) = page.all("section", id="inputs-1")
    for origin in ("measured", "given", "assumed"):
        table = next(t for t in section.all("table") if t.all("caption")[0].text == origin.capitalize())
        names = [row.all("th")[0].text for row in table.all("tbody")[0].all("tr")]
        assert names == [row["name"] for row in sources[1]["inputs"] if row["origin"] == origin]


@pytest.mark.parametrize("sample", [bench_result, live_result])
def test_the_job_in_the_page_runs_again(sample: Callable[[], Result]) -> None:
    result = sample()
    again = make_job(tomllib.loads(job_toml(result.job)), "page")
    assert msgspec.json.encode(again) == msgspec.json.encode(result.job)


def test_a_wave_of_a_server_has_its_queue_its_prefill_and_its_decode(both: tuple[Element, list[Any]]) -> None:
    page, _ = both
    *_, timeline = page.all("article")[2].all("figure")
    assert "Restore timeline" in timeline.all("h4")[0].text
    spec = script_json(page, timeline.with_attribute("data-figure")[0].attributes["data-figure"])
    decode, server, client = (spec["traces"][number] for number in spec["choices"][0])
    assert [trace["name"] for trace in (decode, server, client)] == [
        "decode", "server: queue, restore and prefill", "queued in the client",
    ]  # fmt: skip
    for end, first, sent in zip(decode["x"], server["x"], client["x"], strict=True):
        assert end > first > sent > 0


def test_a_wave_of_storage_has_its_queue_its_reading_its_prefill_and_its_decode(
    both: tuple[Element, list[Any]],
) -> None:
    page, sources = both
    *_, timeline = page.all("article")[0].all("figure")
    spec = script_json(page, timeline.with_attribute("data-figure")[0].attributes["data-figure"])
    short, drawn = ([spec["traces"][number] for number in spec["choices"][view]] for view in (0, 1))
    assert short == drawn[1:]
    assert [trace["name"] for trace in drawn] == [
        "decode (modelled)", "prefill of new tokens (modelled)", "reading", "waiting for the first blocks",
        "queued in the client",
    ]  # fmt: skip
    requests = sources[0]["cells"][0]["requests"]
    assert drawn[0]["x"] == [request["modelled_end_s"] for request in requests]
    for ends in zip(*(trace["x"] for trace in drawn), strict=True):
        assert list(ends) == sorted(ends, reverse=True)


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&\u2028"


def test_hostile_texts_stay_texts() -> None:
    result = bench_result()
    plain = read_page(render([result]))
    page = read_page(
        render(
            [
                replace(
                    result,
                    verdicts=[HOSTILE],
                    notes=[HOSTILE],
                    host={**result.host, "node": HOSTILE},
                    job={**result.job, "model": HOSTILE, "targets": {**result.job["targets"], HOSTILE: {
                        "url": HOSTILE, "emulated_bytes_per_s": None}}},
                    cells=[replace(cell, target=HOSTILE, cold_reason=HOSTILE) for cell in result.cells],
                )
            ]
        )
    )  # fmt: skip
    for tag in ("script", "img", "link", "iframe"):
        assert len(page.all(tag)) == len(plain.all(tag)), tag
    assert page.with_attribute("onerror") + page.with_attribute("onclick") == []
    assert page.all("p", **{"class": "lead"})[0].text == HOSTILE


def test_bad_news_comes_first() -> None:
    result = bench_result()
    cells = [replace(result.cells[0], cold="failed", cold_reason="came from memory"), *result.cells[1:]]
    page = read_page(render([replace(result, cells=cells)]))
    alert = page.all("div", **{"class": "alert"})[0]
    assert "not cold: came from memory" in alert.text
    assert page.text.index("came from memory") < page.text.index("Verdict")


def test_requests_that_failed_are_shown_as_failed() -> None:
    result = bench_result()
    none = Percentiles(None, None, None)
    failed = [
        replace(request, ttft_s=None, last_byte_s=None, first_byte_s=None) for request in result.cells[0].requests
    ]
    cells = [replace(result.cells[0], ttft_s=none, requests=failed), *result.cells[1:]]
    summary = [replace(result.summary[0], ttft_s=none, spread=None), *result.summary[1:]]
    page = read_page(render([replace(result, cells=cells, summary=summary)]))
    assert "failed" in page.all("dl")[0].text or any("failed" in row.text for row in page.all("tr"))
    ecdf = script_json(page, "distribution-0-figure")["traces"][0]
    assert ecdf["y"][-1] == 0.5, "half of the requests of two repeats never had their first token"


def test_a_result_of_an_earlier_version_is_shown_without_what_it_lacks() -> None:
    data = json.loads(msgspec.json.encode(bench_result()))
    del data["differences"]
    for cell in data["cells"]:
        for request in cell["requests"]:
            for name in ("submitted_s", "first_byte_s", "last_byte_s"):
                del request[name]
    page = read_page(render([read_result(json.dumps(data), "old.json")]))
    captions = [caption.text for caption in page.all("caption")]
    assert "Medians over the repeats" in captions
    assert "Differences and noise" not in captions


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "x.json is not the JSON of a result or a plan"),
        ("[1]", "x.json is not the JSON of a result or a plan"),
        ('{"schema": 1, "readings": []}', "neither a result of `rewarm bench -o` nor a plan"),
        ('{"schema": 1, "cells": []}', "x.json is not the JSON of a result or a plan.*version"),
        ('{"schema": "rewarm.trace/1"}', "its schema is 'rewarm.trace/1'"),
        (b"\xff\xfe", "x.json is not the JSON"),
    ],
)
def test_other_files_are_refused(text: str | bytes, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_result(text, "x.json")


def test_nothing_is_no_report() -> None:
    with pytest.raises(ConfigError, match="nothing to report"):
        render([])


def test_the_page_asks_nothing_of_a_network(both: tuple[Element, list[Any]], tmp_path: Path) -> None:
    write_report([plan_result()], tmp_path / "page.html")
    page = read_page((tmp_path / "page.html").read_text())
    policy = page.all("meta", **{"http-equiv": "Content-Security-Policy"})[0].attributes["content"]
    assert policy.startswith("default-src 'none'")
    assert [e.attributes.get("src") for e in page.with_attribute("src")] == []
    assert [e.attributes["href"] for e in page.with_attribute("href") if e.attributes["href"][0] not in "#d"] == []


def test_the_charting_library_is_the_unmodified_build() -> None:
    folder = Path(page_module.__file__).parent / "static"
    assert hashlib.sha256((folder / page_module.PLOTLY).read_bytes()).hexdigest() == PLOTLY_SHA256
    assert "MIT" in (folder / page_module.PLOTLY.replace(".min.js", ".LICENSE")).read_text()


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([0.0377, 0.0476], ["$0.036", "$0.038", "$0.04", "$0.042", "$0.044", "$0.046", "$0.048", "$0.05"]),
        ([2, 60], ["$2", "$5", "$10", "$20", "$50"]),
        ([0.01, 3.0], ["$0.01", "$0.02", "$0.05", "$0.1", "$0.2", "$0.5", "$1", "$2"]),
        ([1e-3, 1e4], ["$0.001", "$0.01", "$0.1", "$1", "$10", "$100", "$1,000", "$10,000"]),
        ([5.0], ["$4.8", "$5", "$5.2"]),
        ([0, None, "any"], None),
    ],
)
def test_logarithmic_axes_have_a_handful_of_round_ticks(values: list[Any], shown: list[str] | None) -> None:
    axis = traces.log_axis([{"x": values}], "x", "usd")
    assert axis["type"] == "log"
    assert axis.get("ticktext") == shown
