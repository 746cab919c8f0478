"""report.html in a real browser: what it shows on a desktop, a phone and in the dark, and that it fetches nothing."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from shardkit.compare.report import render
from tests.comparisons import whole_comparison
from tests.system.pages import asked, keep_screenshot, open_page

PLOTS = {
    "loss": "path", "loss-difference": "path", "grad-norm": "path", "grad-norm-difference": "path",
    "throughput": "path", "speed-ratio": "path", "memory": "path", "communication": "path",
}  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    written = render(whole_comparison(), folder)
    assert [path.name for path in written] == ["report.md", "report.json", "report.html"]
    return folder / "report.html"


def contrast(one: str, other: str) -> float:
    """Of two CSS colours, as WCAG 2.2 defines it."""

    def luminance(color: str) -> float:
        parts = [float(part) / 255 for part in color[color.index("(") + 1 : -1].split(",")[:3]]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_each_figure_has_marks_and_the_verdicts_are_there(browser: Any, report: Path) -> None:
    open_page(browser, report, width=1280)
    for name, kind in PLOTS.items():
        marks = f"#plot-{name} svg [class*='mark-'][class*='role-mark'] {kind}"
        sizes = browser.execute_script(
            "return [...document.querySelectorAll(arguments[0])].map(each => each.getBoundingClientRect())"
            ".map(box => [box.width, box.height])",
            marks,
        )
        assert sizes, f"figure {name} has no marks"
        assert any(width > 3 or height > 3 for width, height in sizes), f"the marks of {name} have no size"
    text = browser.execute_script("return document.body.innerText")
    for word in (
        "equivalent",
        "different",
        "inconclusive",
        "failed",
        "different from step 1 on",
        "BatchNorm statistics",
        "Pick ",
        "python -m shardkit.launch recipe.yaml backend=ddp",
    ):
        assert word.lower() in text.lower(), word
    keep_screenshot(browser, "report-desktop", 1280)


def test_nothing_is_fetched_and_no_error_is_logged(browser: Any, report: Path) -> None:
    open_page(browser, report, width=1280)
    assert browser.get_log("browser") == []
    urls = asked(browser)
    assert {url.split(":")[0] for url in urls} <= {"file", "data"}
    assert [url for url in urls if url.startswith("file:")] == [report.as_uri()]


def test_the_file_is_small_enough_to_send(report: Path) -> None:
    assert report.stat().st_size < 5_000_000


def test_a_phone_shows_it_without_scrolling_sideways(browser: Any, report: Path) -> None:
    open_page(browser, report, width=390, height=844)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    too_wide = browser.execute_script(
        "return [...document.querySelectorAll('.plot svg')].filter(e => e.getBoundingClientRect().right > 390).length"
    )
    assert too_wide == 0
    keep_screenshot(browser, "report-phone", 390)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_and_lines_stand_out(browser: Any, report: Path, dark: bool) -> None:
    open_page(browser, report, width=1280, dark=dark)
    color = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
    page = browser.execute_script(color, "body", "backgroundColor")
    for selector in ("body", ".note", "figcaption", "a[href='#figures']"):
        assert contrast(page, browser.execute_script(color, selector, "color")) >= 4.5, selector
    for word in ("equivalent", "different", "inconclusive"):
        ground = browser.execute_script(color, f".word.{word}", "backgroundColor")
        assert contrast(ground, browser.execute_script(color, f".word.{word}", "color")) >= 4.5, word
    # Axis labels take the colour of the page.
    assert contrast(page, browser.execute_script(color, "#plot-loss .role-axis-label text", "fill")) >= 4.5
    lines = browser.execute_script(
        "return [...document.querySelectorAll('#plot-loss .mark-line path')].map(e => getComputedStyle(e).stroke)"
    )
    assert lines
    assert all(contrast(page, line) >= 3 for line in lines)
    if dark:
        keep_screenshot(browser, "report-dark", 1280)


def test_a_keyboard_reaches_everything(browser: Any, report: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    open_page(browser, report, width=1280)
    active = browser.switch_to.active_element
    active.send_keys(Keys.TAB)
    assert browser.switch_to.active_element.get_attribute("class") == "skip"
    assert browser.switch_to.active_element.rect["x"] >= 0
    browser.switch_to.active_element.send_keys(Keys.ENTER)
    assert browser.switch_to.active_element.get_attribute("id") == "content"
    reached = set()
    for _ in range(60):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        here = browser.switch_to.active_element
        reached.add(here.tag_name)
        outline = browser.execute_script("return getComputedStyle(arguments[0]).outlineStyle", here)
        assert here.tag_name == "body" or outline != "none", here.tag_name
        if {"summary", "pre", "div"} <= reached:
            return
    pytest.fail(f"the tab key reached only {reached}")


def test_a_screen_reader_finds_its_way(browser: Any, report: Path) -> None:
    open_page(browser, report, width=1280)
    count = "return document.querySelectorAll(arguments[0]).length"
    for landmark in ("header", "nav[aria-label]", "main", "footer", "h1"):
        assert browser.execute_script(count, landmark) == 1, landmark
    levels = browser.execute_script("return [...document.querySelectorAll('h1,h2,h3')].map(e => +e.tagName[1])")
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert browser.execute_script(count, "table") == browser.execute_script(count, "table > caption")
    assert browser.execute_script(count, ".plot svg[role=img][aria-label]") == len(PLOTS)
    assert browser.execute_script("return document.documentElement.lang") == "en"


def test_what_was_measured_cannot_become_markup(browser: Any, report: Path) -> None:
    open_page(browser, report, width=1280)
    assert browser.execute_script("return document.querySelectorAll('td b, th b, h3 b, p b').length") == 0
    assert "rank 1: <RuntimeError> & 'quotes'" in browser.execute_script("return document.body.innerText")
