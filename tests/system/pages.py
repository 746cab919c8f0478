"""HTML files in a real browser; screenshots are left in $SHARDKIT_ARTEFACTS, else in build/artefacts."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ARTEFACTS = Path(os.environ.get("SHARDKIT_ARTEFACTS") or ROOT / "build" / "artefacts")
SWITCHES = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-default-apps",
)  # fmt: skip


def found(*names: str) -> str | None:
    return next((path for name in names if (path := shutil.which(name))), None)


def program(*names: str) -> str:
    """A program's path; without it the test fails in CI, and is skipped elsewhere."""
    path = found(*names)
    if path is None:
        message = f"{names[0]} is not installed: apt-get install -y chromium chromium-driver"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return path


def opened(profile: Path) -> Iterator[Any]:
    """A browser without a window."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    chromium, driver = program("chromium", "chromium-browser", "google-chrome"), program("chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for switch in (*SWITCHES, f"--user-data-dir={profile}"):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driven = webdriver.Chrome(options=options, service=Service(driver))
    yield driven
    driven.quit()


def open_page(browser: Any, page: Path, *, width: int, height: int = 900, dark: bool = False) -> None:
    """Open a page at a size and wait until it is drawn."""
    features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    resize(browser, width, height)
    for log in ("browser", "performance"):
        browser.get_log(log)
    browser.get(page.as_uri())
    until = time.monotonic() + 30
    while time.monotonic() < until:
        if drawn := browser.execute_script("return document.documentElement.dataset.drawn"):
            assert drawn == "yes", browser.get_log("browser")
            return
        time.sleep(0.1)
    pytest.fail(f"the figures were not drawn in 30 s: {browser.get_log('browser')}")


def asked(browser: Any) -> list[str]:
    """What was fetched since a page was opened; not by the browser's own first page, which may still be loading."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requests = [each["params"] for each in events if each["method"] == "Network.requestWillBeSent"]
    own = ("chrome:", "chrome-untrusted:")
    return [each["request"]["url"] for each in requests if not each["documentURL"].startswith(own)]


def resize(browser: Any, width: int, height: int) -> None:
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def keep_screenshot(browser: Any, name: str, width: int) -> Path:
    """The whole page as a picture."""
    ARTEFACTS.mkdir(parents=True, exist_ok=True)
    resize(browser, width, browser.execute_script("return document.documentElement.scrollHeight"))
    time.sleep(0.5)
    path = ARTEFACTS / f"{name}.png"
    assert browser.save_screenshot(str(path))
    return path
