"""Search of the built site, typed into a browser."""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from functools import partial

import pytest
from tornado.websocket import websocket_connect

from tests.helpers import ROOT

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
FIRST_PAGES = {
    "GPT-2": "reference/paper-experiments/",
    "Kappa-IP": "choose/",
    "multi GPU": "how-to/(training-loop|survive-time-limits)/",  # the loop's, and nnU-Net's
    "DDP": "how-to/training-loop/",
    "ensemble": "how-to/compare-on-your-data/",
    "pretrained weights": "how-to/fine-tune/",
    "W&B": "how-to/log-metrics/",
    "Windows": "choose/",
}
"""The page that a query has to find first, as a regular expression."""

pytestmark = [
    pytest.mark.slow,  # builds the site
    pytest.mark.skipif(BROWSER is None, reason="needs Chromium"),
]


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Build the committed pages, serve them and return their address."""
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    subprocess.run(
        command, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, timeout=300
    )
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start Chromium and return the address of its first tab for the DevTools protocol."""
    assert BROWSER is not None
    profile = tmp_path_factory.mktemp("profile")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
    process = subprocess.Popen(
        [BROWSER, *options, f"--user-data-dir={profile}", "about:blank"],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "DevTools listening" in line)
        port = urllib.parse.urlsplit(line.split()[-1]).port
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as answer:
            tabs = json.load(answer)
        yield next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
    finally:
        process.kill()
        process.wait()


async def first_results(tab: str, site: str, queries: list[str]) -> dict[str, str]:
    """Return the page of the first result of each query."""
    connection = await websocket_connect(tab)
    number = 0

    async def call(method: str, **params: object) -> dict[str, dict[str, object]]:
        nonlocal number
        number += 1
        await connection.write_message(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(await connection.read_message())
            if message.get("id") == number:
                return message["result"]

    link = "document.querySelector('.md-search-result__link')"
    found = {}
    for query in queries:
        await call("Page.navigate", url=f"{site}?q={urllib.parse.quote(query)}")
        for _ in range(100):
            await asyncio.sleep(0.2)
            answer = await call("Runtime.evaluate", expression=f"{link} ? {link}.href : ''")
            address = str(answer["result"].get("value", ""))
            if address:
                break
        found[query] = re.sub(r"[?#].*", "", address).removeprefix(site)
    return found


def test_first_result_is_the_right_page(site: str, browser: str) -> None:
    found = asyncio.run(first_results(browser, site, list(FIRST_PAGES)))
    wrong = {q: page for q, page in found.items() if not re.fullmatch(FIRST_PAGES[q], page)}
    assert wrong == {}
