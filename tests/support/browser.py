"""Chromium, controlled through its driver."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from tests.support.missing import skip_without

__all__ = ("Browser", "running_browser", "start_chrome")

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_LONGEST = 20.0  # seconds; the machine of the tests may be busy


class Browser:
    """A browser tab.

    Args:
        driver: driver of the browser.
        url: URL of the page under test, without a trailing slash.
    """

    def __init__(self, driver: Chrome, url: str) -> None:
        self.driver = driver
        self.url = url

    def open(self, path: str) -> None:
        """Load a page."""
        self.driver.get(self.url + path)

    def show_as(self, *, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Set the size of the window and the colour scheme."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def wait(self, holds: Callable[[], Any]) -> Any:
        """Wait until a condition holds; return its value."""
        return WebDriverWait(self.driver, _LONGEST, 0.05).until(lambda _: holds())

    def script(self, text: str) -> Any:
        """Return the value of a script's expression."""
        return self.driver.execute_script(f"return {text}")

    @property
    def text(self) -> str:
        """Visible text of the page."""
        return str(self.script("document.body.innerText"))

    def wait_text(self, text: str) -> None:
        """Wait until the page shows a text."""
        self.wait(lambda: text in self.text)

    def row(self, key: str) -> str:
        """Return the text of a row of a table, by its key."""
        return str(self.script(f"document.querySelector('tr[data-key=\"{key}\"]')?.innerText ?? ''"))

    def click(self, selector: str) -> None:
        """Click an element. The script of the page may replace it at any time: find and click are one step."""
        self.driver.execute_script("document.querySelector(arguments[0]).click()", selector)

    def press(self, label: str, *, action: str, within: str = "body") -> None:
        """Press the button of an action, and confirm if the page asks for it.

        Args:
            label: label of the button.
            action: last segment of the form's path.
            within: selector of an element around the form.
        """
        form = f'{within} form[action="/actions/{action}"]'
        buttons = self.driver.execute_script(
            "return [...document.querySelectorAll(arguments[0] + ' button')].map(found => found.innerText)", form
        )
        assert label in buttons, (label, buttons)
        before = self.driver.find_element(By.TAG_NAME, "html")
        self.driver.execute_script(
            "[...document.querySelectorAll(arguments[0] + ' button')]"
            ".find(found => found.innerText === arguments[1]).click()",
            form,
            label,
        )
        self._wait_loaded(before)
        if self.script("document.querySelector('input[name=sure]') !== null"):
            before = self.driver.find_element(By.TAG_NAME, "html")
            self.click("main button.danger")
            self._wait_loaded(before)

    def _wait_loaded(self, before: Any) -> None:
        self.wait(lambda: self.driver.find_element(By.TAG_NAME, "html") != before)
        self.wait(lambda: self.script("document.readyState") == "complete")

    def fill(self, name: str, text: str) -> None:
        """Replace the value of a field."""
        self.driver.execute_script(
            "document.querySelector('[name=\"' + arguments[0] + '\"]:not([type=hidden])').value = arguments[1]",
            name,
            text,
        )

    def errors(self) -> list[str]:
        """Return the errors in the browser's console since the last call: of scripts and of security policies."""
        return [str(entry["message"]) for entry in self.driver.get_log("browser")]  # type: ignore[no-untyped-call]


def start_chrome(browser: str | None, driver: str | None) -> Chrome:
    """Return a browser without a window; selenium raises if a program is missing."""
    options = ChromeOptions()
    options.binary_location = browser or ""
    words = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    words.append("--force-prefers-reduced-motion")  # each number that changes is animated, 60 times a second
    if os.geteuid() == 0:
        words.append("--no-sandbox")
    for word in words:
        options.add_argument(word)
    return Chrome(options=options, service=Service(driver))


@contextmanager
def running_browser() -> Iterator[Chrome]:
    """Start a browser without a window; skip the test if it is not installed."""
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        skip_without("Chromium", "chromium", "chromium-driver")
    started = start_chrome(browser, driver)
    try:
        yield started
    finally:
        started.quit()
