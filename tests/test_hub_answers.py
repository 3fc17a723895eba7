"""The program waits only a few seconds for a Hugging Face hub that does not answer, and prints beforehand that it asks
the hub."""

import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from qerl_pl.model import hub


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Address of a server that accepts connections and never answers. The hub's client uses this address as the
    hub's."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub, "ANSWER_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        yield address


@pytest.mark.parametrize("load", [hub.hub_config, hub.hub_folder])
def test_a_hub_without_an_answer_is_asked_once_and_said_to_be_silent(deaf, load, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    begin = time.monotonic()
    with pytest.raises(ValueError, match=r"no folder Someone/Unknown .*, and the hub cannot be reached"):
        load("Someone/Unknown")
    with pytest.raises(ValueError, match="the hub cannot be reached"):
        load("Someone/Other")
    assert time.monotonic() - begin < 5
    printed = capsys.readouterr().err
    assert printed.startswith(f"asking {deaf}, for at most 0 s ...\n")
    assert printed.count("does not answer; only models in the cache here can be used") == 1


def test_any_answer_is_one(monkeypatch):
    class Missing(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with HTTPServer(("127.0.0.1", 0), Missing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        assert hub.hub_answers()
        server.shutdown()


def test_offline_nothing_is_asked(deaf, monkeypatch, capsys):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert not hub.hub_answers()
    assert capsys.readouterr().err == ""
