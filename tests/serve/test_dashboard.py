"""The dashboard in a real browser, over a real pool with stub ranks under traffic."""

import re
import time

import pytest
from playwright.sync_api import expect
from tests.serve.browser import DESKTOP, PHONE, browser, chromium_path
from tests.serve.live_builders import prompt
from tests.serve.shown_pool import TOKEN, ShownPool

WAIT_MS = 20_000
EVIL = "<img src=x onerror=\"document.title='broken'\">"


@pytest.fixture(scope="module")
def shown():
    pool = ShownPool()
    pool.start()
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def chromium():
    with browser() as opened:
        yield opened


def tab(chromium, shown, viewport, **options):
    """An open page, and what it complained of."""
    context = chromium.new_context(viewport=viewport, **options)
    page = context.new_page()
    problems = []
    page.on("console", lambda said: problems.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(f"{shown.url}/dashboard?token={TOKEN}")
    expect(page.locator("#connection")).to_have_text("live", timeout=WAIT_MS)
    return page, problems


def until(page, condition):
    """Waits until a JavaScript expression is true; in Python, as the page's own policy forbids it to evaluate any."""
    give_up_s = time.monotonic() + WAIT_MS / 1000
    while not page.evaluate(condition):
        assert time.monotonic() < give_up_s, f"waited in vain for {condition}"
        page.wait_for_timeout(20)


def degrees(page):
    return page.eval_on_selector_all("#ranks .worker", "boxes => boxes.map(box => Number(box.dataset.degree))")


def overflow(page):
    """Pixels by which the page is wider than its window."""
    return page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_pool_is_followed_through_a_change_of_composition(chromium, shown, viewport):
    shown.do(shown.backend.set_composition("4x1,2x2"))
    page, problems = tab(chromium, shown, viewport)
    assert page.url.endswith("/dashboard"), "the token stays out of the address"
    until(page, "document.querySelectorAll('#ranks .worker').length === 6")
    assert sorted(degrees(page)) == [1, 1, 1, 1, 2, 2]
    expect(page.locator("#ranks .cell")).to_have_count(8)
    expect(page.locator("#decode .worker")).to_have_count(2)
    until(page, "document.querySelector('#ttft-p50').textContent.endsWith('s')")
    expect(page.locator("#drift")).to_contain_text(re.compile(r"CP1 \d\.\d\d"), timeout=WAIT_MS)

    # Why a request went where it went.
    page.locator("#filter").select_option("placement")
    page.locator("#hold").click()
    first = page.locator("#log button").first
    expect(first).to_contain_text("chat-")
    first.focus()
    page.keyboard.press("Enter")
    rows = page.locator("#detail tbody tr")
    assert rows.count() >= 4
    expect(page.locator("#detail tbody tr.chosen")).to_have_count(1)
    heads = page.locator("#detail thead th").all_text_contents()
    assert heads == ["worker", "J", "wait", "delay", "service", "gpu time", "miss", "cached", "E(R, P)"]
    for row in rows.all():
        cost, *terms = [float(text) for text in row.locator("td").all_text_contents()[1:-2]]
        assert sum(terms) == pytest.approx(cost, abs=0.005), "J is the sum of its terms"
    page.locator("#hold").click()

    # The cells regroup, and the log says so.
    page.locator("#filter").select_option("pool")
    shown.do(shown.backend.set_composition("2x4"))
    until(page, "[...document.querySelectorAll('#ranks .cell.draining, #ranks .cell.switching')].length > 0")
    until(page, "[...document.querySelectorAll('#ranks .worker')].map(box => box.dataset.degree).join() === '4,4'")
    expect(page.locator("#log button[data-kind=merge]").first).to_be_visible(timeout=WAIT_MS)
    expect(page.locator("#composition")).to_have_text("2x4")
    expect(page.locator("#controller")).to_contain_text("paused")
    assert overflow(page) <= 0
    assert problems == []
    page.context.close()


def test_a_lost_rank_is_shown_as_lost(chromium, shown):
    page, problems = tab(chromium, shown, DESKTOP)
    shown.call(shown.pool.ranks.kill, 5)
    expect(page.locator("#ranks .cell.lost")).to_have_text("5", timeout=WAIT_MS)
    expect(page.locator("#ranks .cell.lost")).to_have_count(0, timeout=WAIT_MS)
    assert problems == []
    page.context.close()


def test_what_a_client_sends_is_text_and_nothing_else(chromium, shown):
    page, problems = tab(chromium, shown, PHONE)
    assert shown.do(shown.ask(EVIL, prompt(1, 50), 1)) == 1
    page.locator("#filter").select_option("placement")
    entry = page.locator("#log button", has_text="<img").first
    expect(entry).to_be_visible(timeout=WAIT_MS)
    entry.evaluate("entry => entry.click()")
    expect(page.locator("#detail-title")).to_have_text(f"Why: placement of {EVIL}")
    assert page.title() == "Vertumnus: the live pool"
    assert page.locator("img").count() == 0
    assert overflow(page) <= 0
    assert problems == []
    page.context.close()


def test_nothing_jumps_while_figures_change(chromium, shown):
    page, _ = tab(chromium, shown, DESKTOP)
    until(page, "document.querySelectorAll('#log li').length > 20")
    places = """() => [...document.querySelectorAll('main > section, .tile, figure, .panel')].map(part => {
        const box = part.getBoundingClientRect();
        return [box.x, box.y, box.width, box.height].map(Math.round).join();
    })"""
    before = page.evaluate(places)
    number = page.evaluate("document.querySelector('#log time').textContent")
    until(page, f"document.querySelector('#log time').textContent !== '{number}'")
    assert page.evaluate(places) == before
    page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(chromium, shown, scheme):
    """A contrast of 4.5 at least, as WCAG asks for."""
    page, _ = tab(chromium, shown, DESKTOP, color_scheme=scheme)
    page.wait_for_selector(".worker .name")
    contrast = page.evaluate("""() => {
        const light = (colour) => {
            const [r, g, b] = colour.match(/[\\d.]+/g).map(Number).map((value) => {
                const share = value / 255;
                return share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
            });
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const found = {};
        for (const [name, text, ground] of [
            ["body", "body", "body"], ["note", ".note", ".tile"], ["serving", ".worker .name", ".tile"],
            ["busy", ".legend .cell.busy", ".legend .cell.busy"], ["lost", ".legend .cell.lost", ".tile"],
        ]) {
            const a = light(getComputedStyle(document.querySelector(text)).color);
            const b = light(getComputedStyle(document.querySelector(ground)).backgroundColor);
            found[name] = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        }
        return found;
    }""")
    assert min(contrast.values()) >= 4.5, contrast
    page.context.close()


def test_motion_stops_where_it_is_not_wanted_and_everything_has_a_name(chromium, shown):
    page, _ = tab(chromium, shown, DESKTOP, reduced_motion="reduce")
    page.wait_for_selector("#ranks .cell")
    motion = page.evaluate("""() => {
        const cell = document.querySelector('#ranks .cell');
        cell.className = 'cell switching';
        return getComputedStyle(cell).animationName;
    }""")
    assert motion == "none"
    nameless = page.evaluate("""[...document.querySelectorAll(
        '[role=img], [role=region], [role=listitem], [role=list], select, button, main > section'
    )].filter(part => !(part.getAttribute('aria-label') || part.getAttribute('aria-labelledby')
        || part.textContent.trim())).length""")
    assert nameless == 0
    page.context.close()


def test_without_the_token_the_page_says_what_to_do(chromium, shown):
    context = chromium.new_context(viewport=PHONE)
    page = context.new_page()
    page.goto(f"{shown.url}/dashboard")
    expect(page.locator("#connection")).to_contain_text("token", timeout=WAIT_MS)
    assert page.locator("#log li").count() == 0
    context.close()


def test_where_there_is_no_browser_the_tests_say_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(AssertionError, match="apt-get install chromium"):
        chromium_path()
