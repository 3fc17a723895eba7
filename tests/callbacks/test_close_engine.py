"""An engine that cannot be closed does not hide why the run failed."""

from __future__ import annotations

from typing import Any

import pytest

from callbacks.process import CloseEngine


class Broken:
    """A module whose engine fails at the end, too."""

    def __init__(self) -> None:
        self.engine = self

    def close(self) -> None:
        raise RuntimeError("device lost")


def test_an_engine_that_cannot_be_closed_is_a_warning():
    module: Any = Broken()
    trainer: Any = None
    with pytest.warns(RuntimeWarning, match="could not be closed: RuntimeError..device lost"):
        CloseEngine().on_exception(trainer, module, ValueError("the run's own error"))
