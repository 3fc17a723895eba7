"""Serve the HTML page of runs on this machine, updated while the runs continue."""

from __future__ import annotations

import json
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from qerl_pl.tools.page.collect import collect, news
from qerl_pl.tools.page.render import render

LOCAL = "127.0.0.1"


def make_server(folders: Sequence[Path], *, port: int, limit: int) -> ThreadingHTTPServer:
    """Create a server of the page; ``serve_forever`` runs it.

    It binds to 127.0.0.1 and answers GET only. Requests cannot name files of the disk. Requests for another host name
    are refused, because a foreign web page could make a browser send them.

    Args:
        folders: folders of the runs.
        port: TCP port; 0 takes a free one.
        limit: most completions on the page.

    Raises:
        OSError: the port is in use.
    """
    collect(folders, limit=0)  # reports a folder without a run before the server starts

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host, _, _ = (self.headers.get("Host") or "").partition(":")
            if host not in (LOCAL, "localhost"):
                self.send_error(403, "addressed to another host")
                return
            url = urlsplit(self.path)
            if url.path == "/":
                self._send("text/html", render(*collect(folders, limit=limit), follow=True))
            elif url.path == "/news":
                after = parse_qs(url.query).get("after", ["0"])[0]
                if not after.isdecimal():
                    self.send_error(400, "after is no whole number")
                    return
                self._send("application/json", json.dumps(news(folders, after=int(after)), allow_nan=False))
            else:
                self.send_error(404)

        def _send(self, kind: str, text: str) -> None:
            data = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Do not log requests, because an open page sends one every three seconds."""

    return ThreadingHTTPServer((LOCAL, port), Handler)
