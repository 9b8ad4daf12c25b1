"""A real headless Chromium, and the report opened in it from disk with the network off."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.report.samples import bench_result, live_result, plan_result

from rewarm.bench.result import Result
from rewarm.plan import Plan
from rewarm.report import write_report

ARTEFACTS = Path(__file__).resolve().parents[2] / "out" / "screenshots"
"""Pictures of the pages, for people to look at after a run."""
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
WAIT_MS = 30_000


@dataclass
class Opened:
    """A page under test and everything it did."""

    page: Any
    requests: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)


Open = Callable[..., Opened]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    executable = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
    if executable is None:
        pytest.skip("no Chromium is installed: the report is not seen by a real browser (apt: chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install 'rewarm[browser]'")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages: a result, a result of servers, a plan, and all together."""
    folder = tmp_path_factory.mktemp("pages")
    results: dict[str, list[Result | Plan]] = {
        "bench": [bench_result()],
        "live": [live_result()],
        "plan": [plan_result()],
        "all": [bench_result(), plan_result(), live_result()],
    }
    for name, shown in results.items():
        write_report(shown, folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in results}


@pytest.fixture
def open_page(chromium: Any, files: dict[str, Path]) -> Iterator[Open]:
    """Open a page by name; the options are those of a browser context."""
    contexts = []

    def open_it(name: str, *, width: int = 1280, scheme: str = "light", **options: Any) -> Opened:
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **options)
        contexts.append(context)
        context.set_offline(True)
        context.set_default_timeout(WAIT_MS)
        opened = Opened(context.new_page())
        opened.page.on("request", lambda request: opened.requests.append(request.url))
        opened.page.on("console", lambda message: opened.messages.append(message.text))
        opened.page.on("pageerror", lambda error: opened.messages.append(str(error)))
        opened.page.goto(files[name].as_uri())
        if options.get("java_script_enabled", True):
            opened.page.wait_for_selector("html[data-drawn]")
        return opened

    yield open_it
    for context in contexts:
        context.close()
