"""A small HTTP server for tests that answers as a test's function says."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Any] | tuple[int, Any, dict[str, str]] | None


@contextmanager
def serving(answer: Callable[[str, Any, dict[str, str]], Answer], port: int = 0) -> Iterator[str]:
    """The address of a server whose `answer(path, payload, headers)` is (status, JSON value or text[, headers]); None hangs up.

    port: where it listens; 0 for any that is free.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            payload = json.loads(self.rfile.read(length)) if length else None
            given = answer(self.path, payload, dict(self.headers))
            if given is None:
                self.close_connection = True
                return
            status, value, *headers = given
            body = (value if isinstance(value, str) else json.dumps(value)).encode()
            self.send_response(status)
            for name, text in ({"Content-Length": str(len(body))} | (headers[0] if headers else {})).items():
                self.send_header(name, text)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            """Nothing: the test says what matters."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

    server = Server(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
