"""The page of `serve --dashboard`, in a browser where there is one."""

import http.client
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from manager_runs import managers
from processes import chromium
from tensor_dedup.memory_manager.client import connect
from tensor_dedup.memory_manager.server.dashboard import PAGE

SIZE = 1 << 20
NAME = "<b>an engine</b>"


def uses_base(state: dict[str, object]) -> int:
    """In another process: lease what the checkpoint has."""
    path = state["path"]
    assert isinstance(path, Path)
    state["client"] = client = connect(path, name="another", keep_connected=False)
    state["found"] = found = client.get(["layer"], "tuned")
    return len(found)


def dashboard(manager: managers.Manager) -> str:
    managers.until(lambda: "dashboard=" in manager.log.read_text())
    [url] = re.findall(r"dashboard=(\S+)", manager.log.read_text())
    return str(url)


def asked(url: str, host: str = "localhost", verb: str = "GET") -> tuple[int, str, dict[str, str]]:
    """Status, text and headers of an answer."""
    parts = urlsplit(url)
    assert parts.port is not None
    connection = http.client.HTTPConnection("127.0.0.1", parts.port, managers.PATIENCE_S)
    connection.request(verb, parts.path, headers={"Host": host})
    with connection.getresponse() as reply:
        return reply.status, reply.read().decode(), dict(reply.getheaders())


def overview(url: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(asked(f"{url}overview.json")[1])
    return found


class Shown(HTMLParser):
    """The exact bytes that a page shows by the id of their element, and its texts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.nbytes: dict[str, int] = {}
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append(tag)
        if found.get("id") and found.get("data-bytes"):
            self.nbytes[str(found["id"])] = int(str(found["data-bytes"]))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.mark.parametrize("in_a_browser", [False, True], ids=["as data", "in a browser"])
def test_with_two_clients_it_says_what_status_says(folder: Path, in_a_browser: bool) -> None:
    program = shutil.which("chromium")
    if in_a_browser and program is None:
        pytest.skip("no chromium; `apt-get install chromium` brings it")
    with managers.running(folder, "--dashboard") as manager:
        url = dashboard(manager)
        assert url.startswith("http://127.0.0.1:")
        actor = managers.Actor(manager.socket, uses_base)
        with manager.client(NAME) as client:
            kept = managers.build(client, "layer", managers.pattern(1, SIZE))
            kept += managers.build(client, "own", managers.pattern(2, SIZE))
            assert actor.step() == 1
            managers.until(lambda: overview(url)["saved_bytes"] == SIZE)
            found, status = overview(url), manager.overview()
            told = status.to_dict()
            assert told["saved_bytes"] == SIZE
            for table in ("checkpoints", "builds"):
                assert found[table] == told[table]
            assert len(found["clients"]) == 2
            without = {"uptime_s", "connected_s", "clients"}  # `status` is a client itself
            for one, other in [
                (found["totals"], told["totals"]),
                *zip(found["clients"], told["clients"], strict=True),
            ]:
                assert {k: v for k, v in one.items() if k not in without} == {
                    k: v for k, v in other.items() if k not in without
                }
            if in_a_browser:
                assert program is not None
                shown = Shown(drawn(program, url, folder))
                assert shown.nbytes["saved"] == SIZE
                assert shown.nbytes["leased"] == status.totals.leased_bytes == 2 * SIZE
                assert shown.nbytes["budget"] == status.totals.budget
                assert {NAME, "another", "base", "tuned"} <= set(shown.texts)
                assert shown.tags.count("b") == 1  # the headline's: the client's name made none
                assert "Live, every two seconds." in shown.texts
            actor.kill()
            del kept


@pytest.mark.parametrize(
    ("width", "dark"),
    [
        (400, True),
        (1600, False),
        pytest.param(400, False, marks=pytest.mark.long),
        pytest.param(1600, True, marks=pytest.mark.long),
    ],
)
def test_axe_finds_nothing_serious_and_nothing_else_is_asked(
    folder: Path, width: int, dark: bool
) -> None:
    with chromium.browser() as shown, managers.running(folder, "--dashboard") as manager:
        url = dashboard(manager)
        with manager.client(NAME) as client:
            kept = managers.build(client, "layer", managers.pattern(1, SIZE))
            shown.show(url, width, dark=dark)
            managers.until(lambda: shown.ask("document.body.innerText.includes('an engine')"))
            assert shown.ask("document.documentElement.scrollWidth") <= width
            assert {urlsplit(each).netloc for each in shown.requested} == {urlsplit(url).netloc}
            assert shown.accessibility() == []
            del kept


def drawn(program: str, url: str, folder: Path) -> str:
    """The page as a browser has it after a while."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    done = subprocess.run(
        [
            program,
            *options,
            f"--user-data-dir={folder / 'profile'}",
            "--virtual-time-budget=5000",
            "--dump-dom",
            url,
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_is_there_on_request_only_and_only_read(folder: Path) -> None:
    with managers.running(folder, "--dashboard") as manager:
        url = dashboard(manager)
        status, page, headers = asked(url)
        assert (status, page) == (200, PAGE)
        assert headers["Content-Security-Policy"].startswith("default-src 'none'; ")
        assert asked(url, verb="POST")[0] == 405
        assert asked(f"{url}metrics")[0] == 200
        for host, expected in (("127.0.0.1:1", 200), ("[::1]:1", 200), ("evil.example", 403)):
            assert asked(f"{url}overview.json", host)[0] == expected
            assert asked(f"{url}metrics", host)[0] == expected
    other = folder / "other"
    other.mkdir(mode=0o700)
    with managers.running(other, "--metrics", "0") as manager:
        managers.until(lambda: "metrics=" in manager.log.read_text())
        assert "dashboard=" not in manager.log.read_text()
        [base] = re.findall(r"metrics=(http://[\d.:]+/)", manager.log.read_text())
        assert [asked(f"{base}{path}")[0] for path in ("", "overview.json")] == [404, 404]


def test_it_needs_nothing_from_elsewhere() -> None:
    assert re.findall(r"https?:|//[a-z]|@import|url\(|innerHTML|<link(?! rel=\"icon\")", PAGE) == []
