"""Metrics for Prometheus, through ``prometheus_client``."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
import weakref
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from ringlet.ring.variables import read_port
from ringlet.ring.wire.addresses import family_of

Record = dict[str, Any]
log = logging.getLogger("ringlet")

PHASES = ("compress", "communicate", "decompress")
MOST = 16  # connections at a time, each with a thread; the oldest makes room
PAUSE = 0.1  # seconds until it is looked again whether there is a descriptor for who connects
EVERY = 0.05  # seconds between two visits, after a first few at once
PATIENCE = 10.0  # seconds that one may say nothing
LONGEST = 1 << 14  # bytes of what one may ask


class Prometheus:
    """Keeps counters and gauges in a ``registry`` (None: one of its own); a sink of records.

    Every metric has the label ``rank``. Raises ImportError when prometheus_client is missing.
    """

    def __init__(self, rank: int, registry: Any = None) -> None:
        client = _client()
        self.registry = client.CollectorRegistry() if registry is None else registry
        self._rank = str(rank)
        self._server: Any = None

        def make(kind: Any, name: str, text: str, *labels: str) -> Any:
            return kind(f"ringlet_{name}", text, ["rank", *labels], registry=self.registry)

        counter, gauge = client.Counter, client.Gauge
        self._raw = make(counter, "raw_bytes", "What would have been sent uncompressed.")
        self._wire = make(counter, "wire_bytes", "What was sent.")
        self._phase = make(counter, "phase_seconds", "Time of the engine's thread.", "phase")
        self._tensors = make(counter, "tensors", "Tensors reduced.")
        self._steps = make(counter, "steps", "Steps of groups.", "group")
        self._abandoned = make(counter, "abandoned_steps", "Steps that failed on all ranks.")
        self._skipped = make(counter, "skipped_steps", "Steps reduced and then not taken.")
        self._ratio = make(gauge, "compression_ratio", "Raw bytes over wire bytes, last step.")
        self._seconds = make(client.Histogram, "step_seconds", "First tensor to last result.")
        self._plain = make(gauge, "uncompressed_step_seconds", "Estimate for the last step.")
        self._error = make(gauge, "relative_error", "What an encoding loses.", "layer")
        self._residual = make(gauge, "residual_norm", "What compression holds back.", "layer")

    def write(self, record: Record) -> None:
        """Count a record."""
        kind = record["kind"]
        if kind in ("step", "loose"):
            self._count(record)
        elif kind == "layers":
            for layer in record["layers"]:
                if "relative_error" in layer:
                    self._error.labels(self._rank, layer["name"]).set(layer["relative_error"])
                if "residual_norm" in layer:
                    self._residual.labels(self._rank, layer["name"]).set(layer["residual_norm"])
        elif kind == "abandoned":
            self._abandoned.labels(self._rank).inc()
        elif kind == "skipped":
            self._skipped.labels(self._rank).inc()

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.stop()
            self._server = None

    def listen(self, host: str, port: int) -> int:
        """Serve the registry over HTTP at /metrics; return the port. OSError if it is taken."""
        self._server = Server(host, port, _client().make_wsgi_app(self.registry))
        return int(self._server.server_port)

    def _count(self, record: Record) -> None:
        rank = self._rank
        self._raw.labels(rank).inc(record["raw_bytes"])
        self._wire.labels(rank).inc(record["wire_bytes"])
        self._tensors.labels(rank).inc(record["tensors"])
        for phase in PHASES:
            self._phase.labels(rank, phase).inc(record[f"{phase}_s"])
        if record["kind"] == "step":
            self._steps.labels(rank, record["group"]).inc()
            self._ratio.labels(rank).set(record["ratio"])
            self._seconds.labels(rank).observe(record["seconds"])
            if "uncompressed_s" in record:
                self._plain.labels(rank).set(record["uncompressed_s"])


class _Bounded:
    """What a visitor says; whoever says more than LONGEST bytes is hung up on."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._left = stream, LONGEST
        self.close = stream.close

    def readline(self, most: int) -> bytes:
        """Read a line of ``most`` bytes at most. Raises ConnectionAbortedError."""
        line: bytes = self._stream.readline(min(most, self._left + 1))
        self._left -= len(line)
        if self._left < 0:
            raise ConnectionAbortedError(f"a visitor says more than {LONGEST} bytes")
        return line


class _Visit(WSGIRequestHandler):
    """One connection; prints nothing."""

    timeout = PATIENCE

    def setup(self) -> None:
        """Begin: what a stranger says is no reason to take memory from training."""
        super().setup()
        self.rfile: Any = _Bounded(self.rfile)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class Server(ThreadingMixIn, WSGIServer):
    """Serves ``app`` by HTTP until ``stop``. Everybody may ask who reaches ``host``.

    So strangers get no more than MOST descriptors and threads of this process, which trains, and
    one visit every EVERY seconds: an answer takes the interpreter from training.
    """

    daemon_threads = True
    request_queue_size = 2 * MOST

    def __init__(self, host: str, port: int, app: Any) -> None:
        address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0][4][0]
        self.address_family = family_of(str(address))
        self._lock = threading.Lock()
        self._open: list[Any] = []  # connections, the oldest first
        self._due = 0.0  # when the last visit was due, by the monotonic clock
        super().__init__((str(address), port), _Visit)
        _listening.add(self)
        self.set_app(app)
        self._thread = threading.Thread(
            target=self.serve_forever, args=(0.1,), name="ringlet-prometheus", daemon=True
        )
        self._thread.start()

    def get_request(self) -> Any:
        """Let somebody in. Who waits stays ready: without a descriptor, not to be asked at once."""
        now = time.monotonic()
        self._due = max(self._due + EVERY, now - (MOST - 1) * EVERY)
        if self._due > now:
            time.sleep(self._due - now)
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(PAUSE)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection on a thread of its own."""
        with self._lock:
            self._open.append(request)
            oldest = self._open.pop(0) if len(self._open) > MOST else None
        if oldest is not None:
            with suppress(OSError):  # it has just ended
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        with self._lock, suppress(ValueError):
            self._open.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing of those who go too early."""
        log.debug("metrics were not served to %s", client_address, exc_info=True)

    def stop(self) -> None:
        """Listen no more, and end all connections."""
        self.shutdown()
        self.server_close()
        self._thread.join()
        with self._lock:
            for request in self._open:
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)


_listening: weakref.WeakSet[Server] = weakref.WeakSet()


def _give_up_all() -> None:
    """Close what a process that was forked holds: the rank could not listen there again."""
    for server in list(_listening):
        for held in (server.socket, *server._open):
            with suppress(OSError):
                held.close()


os.register_at_fork(after_in_child=_give_up_all)


def serve(where: str | int, rank: int, machine_rank: int) -> Prometheus:
    """Serve metrics at ``where``, "[host:]port", unless it is 0 plus the rank on this machine.

    Port 0 stands for any that is free, which the log tells.
    Raises ValueError when ``where`` makes no sense, OSError when the port cannot be had.
    """
    host, port = read_port("prometheus", str(where))
    number = port + machine_rank if port else 0
    if number > 65535:
        raise ValueError(
            f"prometheus={where!r}: there is no port {number} for local rank {machine_rank}"
        )
    sink, host = Prometheus(rank), host or "127.0.0.1"
    try:
        found = sink.listen(host, number)
    except (OSError, UnicodeError) as error:  # which a name with an empty part is to the resolver
        unknown = isinstance(error, socket.gaierror | UnicodeError)
        raise OSError(
            f"metrics cannot be served on port {number} of {host}: "
            f"{getattr(error, 'strerror', None) or error}; let RINGLET_PROMETHEUS, or prometheus=, "
            f"name {'an address of this host' if unknown else 'another port'}"
        ) from error
    if not number:
        log.warning("rank %d serves metrics for Prometheus on port %d of %s", rank, found, host)
    return sink


def _client() -> Any:
    try:
        import prometheus_client
    except ImportError:
        raise ImportError(
            "metrics for Prometheus need prometheus_client: pip install 'ringlet[viz]'"
        ) from None
    return prometheus_client
