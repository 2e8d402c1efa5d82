"""Headless Chromium for tests of MLflow's UI."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow_site import Site, started_site
from playwright.sync_api import Browser, Page, expect, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
#: A page takes one or two seconds, and several times longer on a busy machine.
TIMEOUT_MS = 60_000


@pytest.fixture(scope="session")
def chromium() -> str:
    """Return the path of the browser. Without one, skip the test, or fail it if HPCDIST_REQUIRE_BROWSER=1."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        reason = "Chromium is not installed: `sudo apt-get install chromium` enables the tests of MLflow's UI"
        if os.environ.get("HPCDIST_REQUIRE_BROWSER") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return found


# Module scope: while playwright runs, no other test can run an event loop in this thread.
@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    expect.set_options(timeout=TIMEOUT_MS)
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=chromium, args=FLAGS)


@pytest.fixture(scope="package")
def site(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Return finished, failed and stopped runs and a sweep, shown by `hpcdist ui`."""
    with started_site(tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("ui")) as started:
        yield started


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Iterator[Page]:
    """Open a page in a new browser context, and take a screenshot at the end of the test."""
    with browser.new_context(viewport={"width": 1600, "height": 1400}) as context:
        context.set_default_timeout(TIMEOUT_MS)
        page = context.new_page()
        page.on("pageerror", lambda error: print(f"error of MLflow's page: {error}"))
        # On a machine with twenty times more processes than cores, MLflow's page once ended like this.
        page.add_locator_handler(
            page.get_by_role("heading", name="Something went wrong"), lambda: page.reload(), times=2
        )
        yield page
        page.screenshot(path=tmp_path / "end.png")
