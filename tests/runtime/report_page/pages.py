"""Pages in a real browser."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest


def needs_browser() -> list[pytest.MarkDecorator]:
    """The marks of tests that open one."""
    lacks = shutil.which("chromium") is None or shutil.which("chromedriver") is None
    return [
        pytest.mark.skipif(find_spec("selenium") is None, reason="selenium drives the browser; pip install 'baechi-ext[dev]'"),
        pytest.mark.skipif(lacks, reason="needs a browser; apt install chromium chromium-driver"),
        pytest.mark.skipif("TEST_SRCDIR" in os.environ, reason="Bazel's tests see no browser; make test does"),
    ]


@contextlib.contextmanager
def headless(profile: Path) -> Iterator[Any]:
    """Chromium without a window, which keeps its files in that folder."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"), env={**os.environ, "HOME": str(profile)})
    driver = webdriver.Chrome(options=options, service=service)
    driver.set_page_load_timeout(60)
    driver.set_script_timeout(60)
    try:
        yield driver
    finally:
        driver.quit()


class Page:
    """A page that was opened in the browser, this many pixels wide."""

    def __init__(self, browser: Any, path: Path, width: int = 1280) -> None:
        self.browser = browser
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        for log in ("browser", "performance"):
            browser.get_log(log)
        browser.get(path.as_uri())
        self.drawn()

    def run(self, script: str, *arguments: object) -> Any:
        return self.browser.execute_script(script, *arguments)

    def drawn(self) -> None:
        """Waits until everything is drawn that waits for the next frame."""
        self.browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(arguments[0])))")

    def click(self, section: str, script: str, *arguments: object) -> None:
        """Clicks with the mouse in a section's canvas, where a script says."""
        canvas = self.browser.find_element("css selector", f"#{section} canvas")
        self.run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", canvas)
        self.drawn()
        x, y = self.run(f"return {script}", *arguments)
        left, top = self.run("const box = arguments[0].getBoundingClientRect(); return [box.x, box.y]", canvas)
        from selenium import webdriver

        actions = webdriver.ActionChains(self.browser, duration=0)
        actions.w3c_actions.pointer_action.move_to_location(round(left + 1 + x), round(top + 1 + y))
        actions.click().perform()
        self.drawn()

    def press(self, node: Any) -> None:
        """Clicks on an element, which is brought into sight first."""
        self.run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", node)
        node.click()
        self.drawn()

    def keys(self, section: str, keys: str, inside: str = "canvas") -> None:
        """Presses keys on something in a section."""
        node = self.browser.find_element("css selector", f"#{section} {inside}")
        self.run("arguments[0].focus()", node)
        node.send_keys(keys)
        self.drawn()

    def text(self, selector: str) -> str:
        return self.browser.find_element("css selector", selector).text

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.browser.get_log("browser")]

    def requests(self) -> list[str]:
        """Addresses that the page asked for, itself left out; the browser's own new tab, which comes first, is another document."""
        events = [json.loads(entry["message"])["message"] for entry in self.browser.get_log("performance")]
        sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
        own = self.browser.current_url
        urls = [request["request"]["url"] for request in sent if request["documentURL"].partition("#")[0] == own.partition("#")[0]]
        return [url for url in urls if url != own and not url.startswith("data:")]
