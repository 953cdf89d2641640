"""Takes the screenshots of docs/watching.md: a pool of stub ranks under traffic, in the middle of a change.

Usage, from the repository's root: .venv/bin/python scripts/dashboard_screenshots.py [FOLDER]
"""

import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.serve.browser import DESKTOP, PHONE, browser  # noqa: E402  (the tests are no package to install)
from tests.serve.shown_pool import TOKEN, ShownPool  # noqa: E402

HISTORY_MS = 45_000
"""Of traffic, so that the charts show something."""
NUM_COLOURS = 255


def open_page(chromium: Browser, shown: ShownPool, viewport: dict[str, int], scheme: str) -> Page:
    page = chromium.new_context(viewport=viewport, color_scheme=scheme).new_page()
    page.goto(f"{shown.url}/dashboard?token={TOKEN}")
    page.locator("#ranks .worker").first.wait_for()
    return page


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shown = ShownPool()
    shown.start()
    try:
        with browser() as chromium:
            pages = [
                ("dashboard.png", open_page(chromium, shown, DESKTOP, "light")),
                ("dashboard-phone.png", open_page(chromium, shown, PHONE, "dark")),
            ]
            pages[0][1].wait_for_timeout(HISTORY_MS)
            for _, page in pages:
                page.locator("#filter").select_option("placement")
                page.locator("#log button").nth(3).click()
                page.locator("#filter").select_option("all")
            shown.do(shown.backend.set_composition("4x1,1x4"))
            for name, page in pages:
                page.locator("#ranks .cell.draining, #ranks .cell.switching").first.wait_for()
                page.screenshot(path=folder / name, full_page=True)
                Image.open(folder / name).quantize(NUM_COLOURS).save(folder / name, optimize=True)
    finally:
        shown.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images")
