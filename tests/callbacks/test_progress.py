"""The callback Progress: the line that shows on a terminal how far a run is, and how other output is printed while this
line is shown."""

import io
import logging
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from callbacks.progress import Progress


class Terminal(io.StringIO):
    """Stream that counts as a terminal and keeps what is written to it."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("ends", ["teardown", "on_exception"])
def test_messages_and_errors_have_lines_of_their_own(monkeypatch, ends):
    terminal = Terminal()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, terminal)
    handlers: list[logging.Handler] = [logging.StreamHandler(terminal)]
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "handlers", handlers)
    trainer: Any = SimpleNamespace(is_global_zero=True)
    progress, module = Progress(), SimpleNamespace(rollout_index=3, num_rollouts=9)
    progress.setup(trainer, module, "fit")  # pyright: ignore
    progress.on_train_start(trainer, module)  # pyright: ignore
    rank_zero_info("vLLM starts")
    getattr(progress, ends)(trainer, module, None)
    print("error: no such file")
    text = terminal.getvalue()
    assert "rollouts 3/9" in text
    for line in ("vLLM starts", "error: no such file"):
        assert re.search(rf"[\r\n]{line}\n", text), text
    assert logging.getLogger("lightning.pytorch").handlers == handlers
