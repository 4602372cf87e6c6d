"""A real browser in front of a real cluster. Wants Debian's `chromium` and playwright: see `make test-browser`."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.cluster import Cluster

TIMEOUT_MS = 60_000
expect.set_options(timeout=TIMEOUT_MS)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    assert path, "no chromium on the PATH: apt-get install chromium, or say CHROMIUM=/path/to/it"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def cluster(model_dir: Path) -> Iterator[Cluster]:
    with Cluster(model_dir, router_args=["--api-key", "the-key"]) as cluster:
        yield cluster


@pytest.fixture
def page(browser: Browser, cluster: Cluster) -> Iterator[Page]:
    """Open at `/`. It fails the test if it asks anybody but the router, or if a script of it fails."""
    credentials = {"username": "anybody", "password": "the-key", "origin": cluster.url}
    with browser.new_context(http_credentials=credentials) as context:  # type: ignore[arg-type]
        page = context.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        asked: list[str] = []
        failed: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: failed.append(str(error)))
        page.goto(cluster.url)
        page.wait_for_selector("#model option", state="attached")
        yield page
        elsewhere = [url for url in asked if not url.startswith((cluster.url, "data:"))]
        assert not elsewhere
        assert not failed
