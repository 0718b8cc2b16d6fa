"""The page, in a headless Chromium: what it shows, that it stays alive, and that nothing else gets in or out.

Skipped where Playwright (the extra ``dev``) or Chromium (Debian: ``apt-get install chromium``) is missing.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from hicache.admin.client import Admin
from hicache.admin.status import Sample
from hicache.admin.verbs import STATUS
from hicache.daemon import status_feed
from tests.daemon.client import DESCRIPTOR, Client
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import object_key
from tests.daemon.rig import DaemonProcess, http_get
from tests.page.conftest import MIB, TOKENS

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is missing: install the extra dev")
if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is missing: apt-get install chromium")

PHONE = {"width": 375, "height": 812}
StartTenants = Callable[..., ThreadedDaemon]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


class Visit:
    """One page of a daemon, and everything it complained of or asked for."""

    def __init__(self, browser: Browser, address: str, **settings: Any) -> None:  # Any: what a context takes
        self.page: Page = browser.new_page(**settings)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.failures: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("requestfailed", lambda request: self.failures.append(f"{request.url} {request.failure}"))
        self.page.set_default_timeout(20_000)
        self.base = f"http://{address}/"
        self.page.goto(self.base)

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    def wait_text(self, selector: str, pattern: str) -> None:
        """Returns when the text of an element matches; fails with what it was."""
        playwright.expect(self.page.locator(selector)).to_have_text(re.compile(pattern, re.DOTALL), timeout=20_000)

    def check_quiet(self) -> None:
        """Nothing was complained of, and nobody else was asked for anything."""
        assert self.complaints == []
        assert [url for url in self.requests if not url.startswith(self.base)] == []


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Visit]]:
    visits: list[Visit] = []

    def go(address: str, **settings: Any) -> Visit:  # Any: what a context takes
        visits.append(Visit(browser, address, **settings))
        return visits[-1]

    yield go
    for one in visits:
        one.page.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events come soon."""
    monkeypatch.setattr(status_feed, "TICK_S", 0.05)


@pytest.mark.usefixtures("quick")
def test_it_loads_shows_the_figures_and_follows_them(start_tenants: StartTenants, visit: Callable[..., Visit]) -> None:
    daemon = start_tenants()
    with Client(daemon.target, token=TOKENS["alice"]) as alice:
        seen = visit(daemon.ready.http)
        seen.wait_text("#state", "^ready$")
        assert seen.text("#slowest") == "Nothing was moved."
        keys = [object_key(number) for number in range(3)]
        alice.put_stream(keys, [b"x" * MIB] * 3)
        alice.lookup([*keys, object_key(9)])
        alice.get_stream(keys[:1], [MIB + 1])
        seen.wait_text("#tiers", r"L3, the store\s*3\.\d MiB of 64\.0 MiB, 3 objects")
        seen.wait_text("#hits", r"75\.0%\s*of 4 objects found")
        seen.wait_text("#bytes", r"written, 3\.0 MiB in all")
        seen.wait_text("#latency", r"put\s*[\d.]+ m?s\s*[\d.]+ m?s\s*1")
        seen.wait_text("#slowest", r"put 1\.0 MiB.*alice, object [0-9a-f]{12}")
        seen.wait_text("#errors", r"size mismatch, get objects\s*1")
        seen.wait_text("#sessions", r"1\s*of 64 sessions")
        seen.wait_text("#namespaces", r"tiny\s*alice")
        assert seen.page.title() == "hicached: ready"
        seen.check_quiet()


@pytest.mark.usefixtures("quick")
def test_quota_bars_are_as_long_as_quotas_are_full(start_tenants: StartTenants, visit: Callable[..., Visit]) -> None:
    daemon = start_tenants()
    with Client(daemon.target, token=TOKENS["alice"]) as alice, Client(daemon.target, token=TOKENS["bob"]) as bob:
        alice.put_stream([object_key(number) for number in range(2)], [b"x" * MIB] * 2)
        bob.put_stream([object_key(number) for number in range(10)], [b"y"] * 10)
        seen = visit(daemon.ready.http)
        seen.wait_text("#tenants", r"10 of 10 objects")
        used = {tenant.name: tenant.used_bytes for tenant in Admin(daemon.ready.http).ask(STATUS).tenants}
        for label, share, kind in (
            ("alice: 2.", used["alice"] / (4 * MIB), "bar"),
            ("bob: 10 of 10 objects", 1.0, "bar bad"),
            ("carol: 0 B of 64.0 MiB, no quota", 0.0, "bar"),
        ):
            bar = seen.page.locator(f"#tenants .bar[aria-label^='{label}']")
            width = bar.evaluate("(bar) => bar.firstChild.getBoundingClientRect().width / bar.clientWidth")
            assert width == pytest.approx(share, abs=0.01)
            assert bar.get_attribute("class") == kind
            assert bar.get_attribute("aria-valuenow") == str(round(share * 100))
        seen.check_quiet()


def test_it_says_so_when_the_daemon_is_killed_and_recovers_with_it(
    start: Callable[..., DaemonProcess], visit: Callable[..., Visit]
) -> None:
    daemon = start()
    address = daemon.ready["http"]
    seen = visit(address)
    seen.wait_text("#state", "^ready$")
    assert seen.page.locator("#trouble").is_hidden()
    daemon.kill()
    seen.wait_text("#state", "^lost$")
    seen.wait_text("#trouble", "^hicached does not answer since .*trying again")
    assert seen.page.locator("#trouble").get_attribute("role") == "alert"
    assert seen.page.locator("main.stale").count() == 1
    assert seen.page.title() == "hicached: lost"
    start(http=address)
    seen.wait_text("#state", "^ready$")
    assert seen.page.locator("#trouble").is_hidden()
    assert seen.page.locator("main.stale").count() == 0
    assert all("ERR_" in complaint for complaint in seen.complaints), "only that nobody answered"


@pytest.mark.usefixtures("quick")
def test_names_of_others_are_text_and_no_script_but_its_own_runs(
    daemon: ThreadedDaemon, visit: Callable[..., Visit]
) -> None:
    attack = '<img src=x onerror="document.title=1"><script>document.title=2</script>'
    with Client(daemon.target, descriptor=DESCRIPTOR | {"model": attack}):
        seen = visit(daemon.ready.http)
        seen.wait_text("#namespaces", "<img src=x onerror=")
        assert seen.page.locator("#namespaces img, #namespaces script").count() == 0
        assert seen.page.title() == "hicached: ready"
        seen.check_quiet()
        seen.page.evaluate(
            """() => {
                const script = document.createElement("script");
                script.textContent = "document.title = 'taken over'";
                const image = document.createElement("img");
                image.src = "http://127.0.0.1:9/steal";
                const button = document.createElement("button");
                button.setAttribute("onclick", "document.title = 'taken over'");
                document.body.append(script, image, button);
                button.click();
            }"""
        )
        assert seen.page.title() == "hicached: ready"
        assert len([text for text in seen.complaints if "Content Security Policy" in text]) == 3
        assert seen.failures == ["http://127.0.0.1:9/steal csp"]


def hour() -> list[Sample]:
    """Samples of an hour with a gap."""
    gap: dict[str, Any] = dict.fromkeys(("hit_rate", "ceiling", "get_p50_s", "get_p99_s"))  # Any: of several types
    some = {"hit_rate": 0.5, "ceiling": 0.75, "get_p50_s": 0.001, "get_p99_s": 0.25}
    return [
        Sample(
            at_s=1e9 + 10 * number,
            read_bytes_per_s=2.0**30 * (number % 7),
            written_bytes_per_s=0.0,
            lookup_p50_s=None,
            lookup_p99_s=None,
            put_p50_s=None,
            put_p99_s=None,
            used_bytes=0,
            sessions=0,
            errors=0,
            **(gap if 100 < number < 120 else some),
        )
        for number in range(360)
    ]


@pytest.mark.usefixtures("quick")
def test_charts_show_the_hour_with_its_gaps(daemon: ThreadedDaemon, visit: Callable[..., Visit]) -> None:
    daemon.daemon.status_feed.reporter.history_samples.extend(hour())
    seen = visit(daemon.ready.http)
    seen.wait_text("#bytes-chart", r"6\.0 GiB/s")
    seen.wait_text("#latency-chart", r"250 ms, root scale")
    hits = seen.page.locator("#hits-chart path")
    assert hits.count() == 2
    assert (hits.nth(0).get_attribute("d") or "").count("M") == 2, "a gap parts the line"
    assert (seen.page.locator("#bytes-chart path").nth(0).get_attribute("d") or "").count("M") == 1
    ceiling = hits.nth(1).get_attribute("d") or ""
    assert {float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", ceiling)} == {26.0}, "three quarters up"
    assert [float(x) for x in re.findall(r"[ML]([\d.]+) ", ceiling)][:: len(hour())] == [0.0], "from the left"
    seen.page.evaluate("samples = samples.slice(-60); showHistory()")
    seen.wait_text("#bytes-chart", "9 min ago")
    young = seen.page.locator("#bytes-chart path").nth(0).get_attribute("d") or ""
    assert young.startswith("M0.0 "), "a young daemon's chart is as long as it has been there"
    seen.check_quiet()


@pytest.mark.usefixtures("quick")
def test_a_phone_needs_no_sideways_scrolling(start_tenants: StartTenants, visit: Callable[..., Visit]) -> None:
    daemon = start_tenants()
    with Client(daemon.target, token=TOKENS["carol"], descriptor=DESCRIPTOR | {"model": "m" * 128}) as carol:
        carol.put_stream([object_key(1)], [b"x" * MIB])
        seen = visit(daemon.ready.http, viewport=PHONE)
        seen.wait_text("#namespaces", "mmm")
        seen.wait_text("#slowest", "carol")
        assert seen.page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
        widths = seen.page.evaluate(
            "[...document.querySelectorAll('section')].map((s) => [s.scrollWidth, s.clientWidth])"
        )
        assert len(widths) == 8
        assert all(content <= room for content, room in widths)
        seen.check_quiet()


def luminance(colour: str) -> float:
    """Of ``rgb(r, g, b)``, as WCAG 2 has it."""
    channels = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_light_and_in_dark(
    daemon: ThreadedDaemon, visit: Callable[..., Visit], scheme: str
) -> None:
    seen = visit(daemon.ready.http, color_scheme=scheme)
    seen.wait_text("#state", "^ready$")
    colours = seen.page.evaluate(
        """() => {
            const texts = document.querySelectorAll("h1, h2, small, .pill, .muted, b, th, td, figcaption span");
            return [...texts].map((element) => {
                let ground = element;
                while (getComputedStyle(ground).backgroundColor === "rgba(0, 0, 0, 0)") ground = ground.parentElement;
                return [element.tagName, getComputedStyle(element).color, getComputedStyle(ground).backgroundColor];
            });
        }"""
    )
    assert len(colours) > 20
    for tag, text, ground in colours:
        lighter, darker = sorted((luminance(text), luminance(ground)), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= 4.5, (tag, text, ground)
    ground = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (luminance(ground) < 0.05) == (scheme == "dark")


def test_the_document_has_no_handlers_styles_or_addresses_of_others(daemon: ThreadedDaemon) -> None:
    status, html = http_get(daemon.ready.http, "/")
    assert status == 200
    assert not re.search(
        r"\son\w+\s*=|\sstyle\s*=|javascript:|innerHTML|outerHTML|insertAdjacentHTML|document\.write", html
    )
    others = set(re.findall(r"https?://[^\s\"'`)]+", html)) - {"http://www.w3.org/2000/svg"}
    assert others == set()
