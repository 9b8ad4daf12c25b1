"""The report in a real browser, from disk, with the network off: seen, heard, hovered, typed at and printed."""

from __future__ import annotations

import itertools
import json
import re
from importlib import resources
from typing import Any

import pytest
from tests.browser.conftest import ARTEFACTS, Open, Opened
from tests.report.reading import resolve

pytestmark = pytest.mark.browser

AXE_TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
VIEWS = list(itertools.product(("bench", "plan", "live"), ("light", "dark"), (1280, 390)))
CONTRAST_GRAPHICS = 3.0
"""WCAG 2.2, 1.4.11: graphical objects against what is beside them."""


def axe(opened: Opened) -> list[str]:
    """What the accessibility checker complains about."""
    script = (resources.files("axe_playwright_python") / "axe.min.js").read_text()
    opened.page.evaluate(script)
    found = opened.page.evaluate("tags => axe.run({ runOnly: tags })", AXE_TAGS)
    assert len(found["passes"]) > 20
    return [f"{v['id']}: {node['target']} {node['failureSummary']}" for v in found["violations"] for node in v["nodes"]]


def plots(opened: Opened) -> list[dict[str, Any]]:
    """What every chart draws now."""
    found: list[dict[str, Any]] = opened.page.evaluate(
        """() => [...document.querySelectorAll(".plot")].map((plot) => ({
            figure: plot.dataset.figure, choice: plot.closest("figure").querySelector("select")?.value ?? null,
            traces: plot.data.map(({ name, x, y, customdata, hovertext, meta, marker, line }) =>
                ({ name, x: [...x], y: [...y], customdata, hovertext, meta, color: marker?.color ?? line?.color })),
        }))"""
    )
    return found


def embedded(opened: Opened, identity: str) -> Any:
    """The JSON of a script element."""
    return json.loads(opened.page.locator(f"#{identity}").text_content())


@pytest.mark.parametrize(("name", "scheme", "width"), VIEWS)
def test_it_opens_quietly_fits_and_is_accessible(open_page: Open, name: str, scheme: str, width: int) -> None:
    opened = open_page(name, scheme=scheme, width=width)
    ARTEFACTS.mkdir(parents=True, exist_ok=True)
    opened.page.screenshot(path=ARTEFACTS / f"{name}-{scheme}-{width}.png", full_page=True)
    assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert axe(opened) == []
    opened.page.evaluate("document.querySelectorAll('details').forEach((found) => { found.open = true; })")
    assert axe(opened) == []
    small = opened.page.evaluate(
        """() => [...document.querySelectorAll("button, select, summary")].map((e) => e.getBoundingClientRect())
            .filter((box) => box.width && box.height < 24).length"""
    )
    assert small == 0, "everything that is pressed is at least 24 pixels high"
    assert [url for url in opened.requests if not url.startswith("data:")] == [opened.page.url]
    assert opened.messages == []


def test_an_error_of_the_page_would_be_noticed(open_page: Open) -> None:
    opened = open_page("plan")
    opened.page.evaluate("console.error('seen')")
    opened.page.evaluate("fetch('https://example.org/x').catch(() => {})")
    opened.page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=\"data:,\">')")
    assert "seen" in opened.messages
    assert any("Content Security Policy" in text for text in opened.messages), "the page may not ask a network"
    assert any(text.startswith("image-alt") for text in axe(opened))


def test_every_chart_draws_the_numbers_of_the_json_in_every_view(open_page: Open) -> None:
    opened = open_page("all")
    sources = [embedded(opened, f"source-{place}") for place in range(3)]
    points = 0
    for select in [None, *opened.page.locator("select").all()]:
        views = select.locator("option").all() if select else [None]
        for view in views:
            if select and view:
                select.select_option(view.get_attribute("value"))
            for plot in plots(opened):
                spec = embedded(opened, plot["figure"])
                shown = spec["choices"][int(plot["choice"])] if plot["choice"] else range(len(spec["traces"]))
                assert [t["name"] for t in plot["traces"]] == [spec["traces"][n]["name"] for n in shown]
                for trace in plot["traces"]:
                    values = [resolve(sources, pointer) for pointer in trace["customdata"]]
                    assert trace[trace["meta"]["exact"]] == values
                    points += len(values)
    assert points > 1000
    cells = opened.page.locator("[data-pointer]").evaluate_all(
        "all => all.map((e) => [e.dataset.pointer, JSON.parse(e.dataset.raw)])"
    )
    assert len(cells) > 300
    assert [(pointer, raw) for pointer, raw in cells if resolve(sources, pointer) != raw] == []
    assert opened.messages == []


def test_hovering_tells_the_figure(open_page: Open) -> None:
    opened = open_page("bench")
    chart = opened.page.locator("figure").first
    chart.scroll_into_view_if_needed()
    points = chart.locator(".scatterlayer .trace").first.locator(".point")
    place = points.last.bounding_box()
    opened.page.mouse.move(place["x"] + place["width"] / 2 - 40, place["y"] + 40)
    opened.page.mouse.move(place["x"] + place["width"] / 2, place["y"] + place["height"] / 2, steps=4)
    label = chart.locator(".hoverlayer .hovertext")
    label.wait_for()
    said = chart.locator(".spoken").text_content()
    assert said in [text for trace in plots(opened)[0]["traces"] for text in trace["hovertext"]]
    assert re.sub(r"\s", "", label.text_content()) == re.sub(r"\s", "", said)


def test_a_legend_entry_switches_its_lines_off_and_on(open_page: Open) -> None:
    opened = open_page("bench")
    before = plots(opened)[0]["traces"]
    button = opened.page.locator("figure").first.locator(".legend button").first
    name = button.get_attribute("data-name")
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert [t["name"] for t in plots(opened)[0]["traces"]] == [t["name"] for t in before if t["name"] != name]
    opened.page.keyboard.press("Space")
    assert button.get_attribute("aria-pressed") == "true"
    assert plots(opened)[0]["traces"] == before
    everyone = opened.page.locator("figure").first.locator(".legend button").all()
    for entry in everyone:
        entry.click()
    assert plots(opened)[0]["traces"] == []
    opened.page.locator(".plot").first.press("ArrowRight")
    assert opened.messages == []


def test_the_keyboard_alone_reads_a_chart(open_page: Open) -> None:
    opened = open_page("bench")
    opened.page.keyboard.press("Tab")
    assert opened.page.evaluate("document.activeElement.textContent") == "Skip to the verdict"
    for _ in range(60):
        opened.page.keyboard.press("Tab")
        if opened.page.evaluate("document.activeElement.classList.contains('plot')"):
            break
    else:
        raise AssertionError("Tab does not reach a chart")
    spoken = opened.page.locator(".spoken").first
    traces = plots(opened)[0]["traces"]
    for key, expected in (
        ("ArrowRight", traces[0]["hovertext"][0]),
        ("ArrowRight", traces[0]["hovertext"][1]),
        ("ArrowRight", traces[0]["hovertext"][1]),
        ("ArrowDown", traces[1]["hovertext"][1]),
        ("ArrowLeft", traces[1]["hovertext"][0]),
        ("Escape", ""),
    ):
        opened.page.keyboard.press(key)
        assert spoken.text_content() == expected
    assert opened.page.locator(".hoverlayer .hovertext").count() == 0


def test_colours_can_be_switched_and_stand_out(open_page: Open) -> None:
    opened = open_page("bench")
    seen = []
    for label in ("Dark colours", "Light colours"):
        colors = {trace["color"] for plot in plots(opened) for trace in plot["traces"]}
        ground = opened.page.evaluate("getComputedStyle(document.querySelector('.chart')).backgroundColor")
        weak = {color for color in colors if contrast(color, ground) < CONTRAST_GRAPHICS}
        waiting = opened.page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--p1').trim()")
        assert weak <= {waiting}, "waiting is drawn faint, and told apart by its pattern and place"
        seen.append(colors)
        assert opened.page.locator("#theme").text_content() == label
        opened.page.locator("#theme").click()
    assert seen[0].isdisjoint(seen[1])


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2.2 between two colours, `#rrggbb` or `rgb(..)`."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(color: str) -> float:
    """Relative luminance of WCAG 2.2."""
    if color.startswith("#"):
        channels = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    else:
        channels = [int(text) / 255 for text in re.findall(r"\d+", color)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("name", ["bench", "plan"])
def test_it_prints_in_light_colours_within_the_sheet(open_page: Open, name: str) -> None:
    opened = open_page(name, scheme="dark")
    opened.page.evaluate(
        """() => addEventListener("beforeprint", () => {
            window.printed = [document.documentElement.dataset.theme,
                Math.max(...[...document.querySelectorAll(".plot .main-svg")].map((svg) => svg.clientWidth))];
        })"""
    )
    pdf = opened.page.pdf(path=ARTEFACTS / f"{name}.pdf", format="A4", margin={"top": "12mm", "bottom": "12mm"})
    assert len(pdf) > 50_000
    theme, widest = opened.page.evaluate("window.printed")
    assert (theme, 0 < widest <= 720) == ("light", True)
    assert opened.page.evaluate("document.documentElement.dataset.theme") is None, "the screen is as it was"
    assert opened.messages == []


def test_without_scripts_the_verdict_and_the_tables_remain(open_page: Open) -> None:
    opened = open_page("bench", java_script_enabled=False)
    assert opened.page.locator(".lead").is_visible()
    assert opened.page.locator("table").first.is_visible() or opened.page.locator("summary").first.is_visible()
    assert opened.page.locator(".plot noscript p").first.is_visible()
    assert not opened.page.locator("#theme").is_visible()


def test_the_result_can_be_saved_from_the_page(open_page: Open) -> None:
    opened = open_page("bench")
    with opened.page.expect_download() as download:
        opened.page.locator("[data-save]").click()
    assert json.loads(download.value.path().read_text()) == embedded(opened, "source-0")
