"""The HTML page of a run, opened in a browser: it works with 10 000 completions, and requests nothing from other
addresses."""

import asyncio
import json
import random
from pathlib import Path

import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from qerl_pl.__main__ import main as command
from qerl_pl.rollout.token_file import RowTokens, write_tokens
from tests.browser import Tab, browser_tab, chromium

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.skipif(chromium() is None, reason="there is no Chromium")]
WORDS = ["so", "the", "sum", "is", "twelve", "and", "we", "get", "it", "by", "half", "of", "what", "left"]
NUM_ROLLOUTS, EACH = 40, 250
PIECES = {at: f" {word}" for at, word in enumerate(WORDS)}


def write_rollout(folder: Path, step: int, count: int = EACH, length: int = 250, *, tokens: bool = False) -> None:
    """Write a run's file of ``count`` completions of a rollout, each of ``length`` tokens; every token is a word. With
    ``tokens``, also write the file with the log-probabilities and other values of each token."""
    drawn = random.Random(step)
    lines, rows = [], []
    for at in range(count):
        ids = drawn.choices(range(len(WORDS)), k=length)
        reward = None if at == 7 else float(at % 2)
        text = "".join(PIECES[token] for token in ids) + (" needle" if (step, at) == (NUM_ROLLOUTS - 1, 3) else "")
        lines.append(
            {
                "question": f"What is {step} and {at}?",
                "prompt": f"<|user|>What is {step} and {at}?",
                "completion": text,
                "answer": str(at),
                "reward": reward,
                "rewards": {"accuracy": reward},
                "reasons": {"accuracy": f"{at} is not {step}"},
                "num_tokens": length,
                "finished": True,
            }
        )
        values = torch.rand(3, length, generator=torch.Generator().manual_seed(at))
        numbers = -6 * values[0], values[1] - 0.5, 3 * values[2]
        rows.append(RowTokens(torch.tensor(ids), *numbers, at / count - 0.5, teacher=-values[1]))
    path = folder / "completions" / f"train-{step:06d}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if tokens:
        write_tokens(path.with_suffix(".safetensors"), rows, PIECES)


@pytest.fixture
def runs(tmp_path) -> list[Path]:
    """Make the folders of two runs that differ in the seed only, with 10 000 completions together. Every tenth rollout
    also has a file with values of each token."""
    folders = [tmp_path / f"seed-{seed}" for seed in (1, 2)]
    for seed, folder in enumerate(folders, 1):
        with SummaryWriter(str(folder)) as writer:
            for step in range(NUM_ROLLOUTS // 2):
                for tag in ("train/reward", "val/accuracy", "policy/entropy", "gap/mean_abs", "time/rollout_s"):
                    writer.add_scalar(tag, step / 40 * seed, step)
                for tag, value in (("memory/peak_gib", 10.0), ("memory/predicted_peak_gib", 11.0 + seed)):
                    writer.add_scalar(tag, value, step)
                for most in (1, 4) if seed == 2 and step % 3 else ():  # the first run did not draft
                    for name, value in (("tokens", 2.5), ("drafted", 70.0), ("accepted", 15.0)):
                        writer.add_scalar(f"speculation/{name}_{most}", value + step / 10, step)
        (folder / "config.yaml").write_text(f"seed_everything: {seed}\nmodel: {{base: here}}\n")
    for step in range(NUM_ROLLOUTS):
        write_rollout(folders[step % 2], step, tokens=step % 10 == 0)
    return folders


SEARCH = """(() => {
  const box = document.getElementById("search"), start = performance.now();
  box.value = %r;
  filter();
  document.body.offsetHeight;
  return performance.now() - start;
})()"""
READY = 'document.body && document.body.dataset.ready === "yes"'


def test_ten_thousand_completions_are_painted_searched_and_sorted_at_once(runs, tmp_path):
    page = tmp_path / "page.html"
    assert command(["report", *map(str, runs), "--html", str(page)]) == 0

    async def visit() -> None:
        async with browser_tab(tmp_path / "profile") as tab:
            await look(tab)
            assert tab.errors == []

    async def look(tab: Tab) -> None:
        await tab.open(page.as_uri())
        await tab.wait_for(READY, seconds=60)
        paint = await tab.value('performance.getEntriesByName("first-contentful-paint")[0].startTime')
        assert paint < 2000
        print(f"first paint after {paint:.0f} ms of a page of {page.stat().st_size / 2**20:.0f} MiB")
        assert await tab.value('document.getElementById("count").textContent.startsWith("10,000 of 10,000")')
        times = [await tab.value(SEARCH % word) for word in ("needle", "twelve and", "no such thing")]
        print("searches in ms:", times)
        assert min(times) < 300
        await tab.value(SEARCH % "needle")
        assert await tab.value('document.querySelectorAll(".item").length') == 1
        await tab.value(SEARCH % "")
        await tab.value('document.getElementById("sort").value = "advantage-up"; filter()')
        assert "advantage -0.5" in await tab.value('document.querySelector(".item").textContent')
        assert await tab.value('document.querySelectorAll("#detail .text span").length') == 250
        assert await tab.value('document.querySelectorAll(".item").length') < 60, "those out of sight are not drawn"
        assert await tab.value('document.querySelectorAll(".chart").length') == 1
        assert await tab.value('document.querySelectorAll(".chart polyline").length') == 2
        assert await tab.value('document.querySelectorAll(".chart circle").length') == 2 * 13
        assert "NaN" not in await tab.value('document.querySelector(".chart").outerHTML')
        assert tab.requests == [page.as_uri()], "a request left the page"

    asyncio.run(visit())
