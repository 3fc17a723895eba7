"""Messages of libraries that no user needs are suppressed, and no others are."""

import errno
import logging
import os
import threading
import warnings
from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from callbacks import progress
from qerl_pl.cli.console import MESSAGES, quieten


@pytest.fixture(autouse=True)
def own_filters():
    before = {name: list(logging.getLogger(name).filters) for name in MESSAGES}
    for name in MESSAGES:  # an earlier test of this process may have held messages back
        logging.getLogger(name).filters = []
    format_of_before = warnings.formatwarning
    with warnings.catch_warnings():
        yield
    warnings.formatwarning = format_of_before
    threading.excepthook = threading.__excepthook__
    for name, filters in before.items():
        logging.getLogger(name).filters = filters


def said(tmp_path, caplog) -> str:
    caplog.clear()
    with caplog.at_level(logging.INFO):
        Trainer(accelerator="cpu", logger=CSVLogger(tmp_path), enable_model_summary=False)
        rank_zero_info("the run's own message")
    return caplog.text


def test_advertisements_are_held_back_and_our_own_messages_are_not(tmp_path, caplog):
    before = said(tmp_path, caplog)
    assert "TPU available" in before, "Lightning no longer says it: take it out of the list"
    quieten()
    quieten()
    after = said(tmp_path, caplog)
    assert "the run's own message" in after
    assert "TPU available" not in after
    assert "Tip" not in after


@pytest.mark.parametrize(
    "text",
    [
        '.fit(ckpt_path="last") is set, but there is no last checkpoint available. HINT',
        "Using ModelCheckpoint with manual optimization and every_n_train_steps, but no state was saved",
        "Precision loss occurred in moment calculation due to catastrophic cancellation.",
    ],
)
def test_warnings_about_what_is_as_it_should_be_are_not_shown(text):
    quieten()
    with warnings.catch_warnings(record=True) as caught:
        warnings.warn(text, stacklevel=1)
        warnings.warn("another one", stacklevel=1)
    assert [str(one.message) for one in caught] == ["another one"]


def test_own_warnings_are_a_line_and_others_keep_their_place():
    quieten()
    own = str(Path(progress.__file__))
    assert warnings.formatwarning("too short", UserWarning, own, 3) == "warning: too short\n"
    assert "lib.py:3: UserWarning: too short" in warnings.formatwarning("too short", UserWarning, "/x/lib.py", 3)


class Writer(threading.Thread):
    """Thread that fails as TensorBoard's writer does when the disk is full: it raises an error, and keeps it in
    ``exception``, so that the main thread can raise it, too."""

    exception: BaseException | None = None

    def run(self) -> None:
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.exception = error
            raise


def test_an_error_that_a_thread_keeps_for_the_main_thread_has_no_traceback_and_others_have(capsys):
    quieten()
    for thread, said in ((Writer(), False), (threading.Thread(target=lambda: 1 / 0), True)):
        thread.start()
        thread.join()
        assert ("Traceback" in capsys.readouterr().err) == said
