"""Make the picture of the run page for the documents: python -m tests.tools.page_pictures RUN [RUN ...] --output docs.

Writes run_page.png, a screenshot of the run page in its dark colours, with completions of the given runs.
"""

import argparse
import asyncio
import tempfile
from pathlib import Path

from PIL import Image

from qerl_pl.results.curves import read_curves
from qerl_pl.tools.page.render import page_of
from tests.browser import browser_tab

READY = 'document.body && document.body.dataset.ready === "yes"'
COLOURS = 96  # of a picture's palette


async def take(page: Path, output: Path, profile: Path) -> None:
    """Open the page and take the picture."""
    async with browser_tab(profile) as tab:
        await tab.open(page.as_uri(), scheme="dark", width=1200, height=760)
        await tab.wait_for(READY)
        await tab.value('document.getElementById("sort").value = "advantage-up"; filter()')
        await tab.value('colouring = 1; drawDetail(); document.getElementById("completions").scrollIntoView()')
        await tab.screenshot(output / "run_page.png")


def main() -> None:
    """Make the page of the given runs in a temporary folder, open it in Chromium, and save the screenshot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, default=Path("docs"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        page = Path(name, "page.html")
        page.write_text(page_of({run: read_curves(run) for run in options.runs}, limit=10_000), encoding="utf-8")
        asyncio.run(take(page, options.output, Path(name, "profile")))
    picture = options.output / "run_page.png"
    Image.open(picture).convert("RGB").quantize(COLOURS).save(picture, optimize=True)
    print(f"{picture}: {picture.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
