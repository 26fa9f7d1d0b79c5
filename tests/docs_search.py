"""Test the search of the built documentation with typical questions: ``make docs-search``.

``python -m tests.docs_search docs/_build/html`` opens the search page in headless Chromium with each question, and
prints the questions whose page is not among the first results.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from selenium.webdriver.support.wait import WebDriverWait

from tests.docs_layout import chromium

if TYPE_CHECKING:
    from selenium import webdriver

QUESTIONS = {
    "publish headers": "howto/publish-safely.html",
    "consumer receives nothing": "troubleshooting.html",
    "DeliveryUnknown": "troubleshooting.html",
    "dead letter": "howto/dead-letters.html",
    "FastAPI": "howto/app.html",
    "pytest fixture": "howto/test-with-the-cluster.html",
    "kubernetes": "howto/deploy.html",
    "prometheus": "howto/observe.html",
    "migrate pynsq": "howto/migrate.html",
    "read topic spark": "howto/read-with-spark.html",
    "TLS certificate": "howto/connect.html",
    "ordered partition key": "explanation/guarantees.html",
}
_FIRST = 8
_RESULTS = "return [...document.querySelectorAll('ul.search li a')].map((link) => link.href);"
_FINISHED = "const p = document.querySelector('.search-summary'); return p !== null && /found/i.test(p.textContent);"


def unanswered(folder: Path) -> list[str]:
    """Return a line for each question whose page is not among the first results."""
    root = folder.resolve().as_uri()
    found = []
    with chromium() as browser:
        for question, page in QUESTIONS.items():
            browser.get(f"{root}/search.html?q={quote(question)}")
            WebDriverWait(browser, 20).until(lambda driver: driver.execute_script(_FINISHED))
            results = list(dict.fromkeys(link.partition("?")[0].partition("#")[0] for link in _links(browser)))
            if f"{root}/{page}" not in results[:_FIRST]:
                shown = [link.removeprefix(f"{root}/") for link in results[:_FIRST]]
                found.append(f"{question}: {page} is not among {shown}")
    return found


def _links(browser: webdriver.Chrome) -> list[str]:
    links: list[str] = browser.execute_script(_RESULTS)
    return links


def main() -> int:
    """Print the questions without an answer; the status is 1 if there are any."""
    found = unanswered(Path(sys.argv[1]))
    sys.stdout.write("".join(f"{line}\n" for line in found))
    sys.stdout.write(f"{len(QUESTIONS)} questions: {len(found)} without an answer among the first {_FIRST} results\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
