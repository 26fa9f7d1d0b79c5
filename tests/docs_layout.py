"""Measure whether a page of the built documentation is wider than the screen: ``make docs-layout``.

``python -m tests.docs_layout docs/_build/html`` opens each page in headless Chromium at the widths of a phone and of a
laptop, and prints the pages that scroll sideways. Tables and code may scroll inside of a page.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.browser import start_chrome

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

WIDTHS = (390, 1280)

_SCRIPT = """
const page = document.documentElement;
const wide = [...document.querySelectorAll('.content *')].filter(
  (one) => one.getBoundingClientRect().right > page.clientWidth + 1
    && !one.closest('pre, .table-wrapper, .highlight'));
return [page.scrollWidth, page.clientWidth, wide.slice(0, 3).map((one) => one.outerHTML.slice(0, 80))];
"""


def chromium() -> Chrome:
    """Return a headless Chromium; as a context manager it ends on exit."""
    return start_chrome(shutil.which("chromium"), shutil.which("chromedriver"))


def overflows(folder: Path) -> list[str]:
    """Return a line for each page and width at which the page is wider than the screen."""
    # a window of Chromium is at least 500 pixels wide: the device is emulated
    found = []
    for width in WIDTHS:
        with chromium() as browser:
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            for page in sorted(folder.rglob("*.html")):
                browser.get(page.resolve().as_uri())
                scroll, client, wide = browser.execute_script(_SCRIPT)
                if scroll > client or wide:
                    found.append(f"{page.relative_to(folder)} at {width} px: {scroll} px wide {wide}")
    return found


def main() -> int:
    """Print the pages that overflow; the status is 1 if there are any."""
    folder = Path(sys.argv[1])
    pages = len(list(folder.rglob("*.html")))
    found = overflows(folder)
    sys.stdout.write("".join(f"{line}\n" for line in found))
    sys.stdout.write(f"{pages} pages at {' and '.join(map(str, WIDTHS))} px: {len(found)} overflow\n")
    return 1 if found or not pages else 0


if __name__ == "__main__":
    sys.exit(main())
