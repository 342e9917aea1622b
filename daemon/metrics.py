"""Prometheus metrics, in a registry of their own, over HTTP on loopback."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from . import events
from .errors import StartError
from .ledger import Ledger

HOST = "127.0.0.1"


class Metrics:
    """What is counted and shown; the names are part of the interface."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._server: tuple[WSGIServer, Thread] | None = None

        def counter(name: str, help_: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"fusewire_{name}", help_, labels, registry=self.registry)

        def gauge(name: str, help_: str) -> Gauge:
            return Gauge(f"fusewire_{name}", help_, registry=self.registry)

        self.applied = counter("shards_applied", "Shards whose tensors are in place or wait", ("source",))
        self.rejected = counter("shards_rejected", "Shards refused", ("source", "reason"))
        self.bytes = counter("bytes_applied", "Bytes of applied shards")
        self.fused = counter("layers_fused", "Fused pairs that became whole")
        self.expired = counter("fusion_expired", "Halves given up", ("cause",))
        self.events = counter("events", "Events published")
        self.seconds = Histogram(
            "fusewire_apply_seconds",
            "From the first byte copied to the last",
            registry=self.registry,
            buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 2, 10, 60),
        )
        self.pending_halves = gauge("pending_halves", "Halves that wait for their partner")
        self.pending_bytes = gauge("pending_bytes", "Bytes of waiting halves that the fusion cache holds")
        self.slots_filled = gauge("slots_filled", "Slots filled")
        self.slots_total = gauge("slots_total", "Slots of the model")
        self.ready = gauge("ready", "1 when the model can answer")
        self.versions = counter("versions", "Versions by what became of them", ("state",))
        self.incomplete = counter("versions_incomplete", "Times that a version was found incomplete", ("cause",))
        self.carried = counter("bytes_carried", "Bytes carried over from the live version")
        self.verify_seconds = Histogram(
            "fusewire_verify_seconds",
            "Carrying over and verifying a version",
            registry=self.registry,
            buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 2, 10, 60),
        )
        self.leased = gauge("leased_requests", "Requests that keep the generation before from being written")
        self.refused = counter("peers_refused", "Connections and messages refused for their key", ("socket",))
        self.healthy = Gauge(
            "fusewire_healthy", "1 while this part of the daemon does its work", ("part",), registry=self.registry
        )
        self.spool = gauge("spool_bytes", "Bytes of pushed shards that are kept for a restart")
        self.version = gauge("live_version", "The live numbered version; -1 before there is one")

    def record(self, event: events.AnyEvent) -> None:
        """Count an event that was published."""
        self.events.inc()
        match event:
            case events.ShardApplied():
                self.applied.labels(event.source).inc()
                self.bytes.inc(event.nbytes)
                self.seconds.observe(event.seconds)
            case events.ShardRefused():
                self.rejected.labels(event.source, event.reason).inc()
            case events.LayerFused():
                self.fused.inc()
            case (
                events.VersionLive() | events.VersionRolledBack() | events.VersionAborted() | events.VersionSuperseded()
            ):
                self.versions.labels(event.topic.removeprefix("version.").rstrip("/")).inc()
            case events.VersionIncomplete():
                self.incomplete.labels(event.cause).inc()
            case events.VersionVerified():
                self.carried.inc(event.carried_bytes)
                self.verify_seconds.observe(event.seconds)
            case events.FusionExpired():
                self.expired.labels(event.cause).inc()
            case _:
                pass

    def observe(self, ledger: Ledger, health: Mapping[str, str], spooled: int) -> None:
        """Show the ledger's state, that of each part (``ok``, or what is wrong), and the bytes in the spool."""
        for part, told in health.items():
            self.healthy.labels(part).set(told == "ok")
        self.spool.set(spooled)
        self.pending_halves.set(len(ledger.pending))
        self.pending_bytes.set(sum(half.nbytes for half in ledger.pending if half.owned))
        self.slots_filled.set(ledger.filled)
        self.slots_total.set(len(ledger.versions.coverage.layer_of))
        self.ready.set(ledger.versions.ready)
        self.leased.set(ledger.versions.leased)
        self.version.set(-1 if ledger.versions.live is None else ledger.versions.live)

    def start(self, port: int) -> int:
        """Serve them on loopback; return the port, which is a free one if 0 was asked for.

        Raises:
            StartError: The port is in use.
        """
        try:
            self._server = start_http_server(port, addr=HOST, registry=self.registry)
        except OSError as error:
            raise StartError(
                f"metrics.port = {port}: {error.strerror}. Choose another port, or metrics.enabled = false"
            ) from error
        return int(self._server[0].server_port)

    def stop(self) -> None:
        """Stop serving."""
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join(1)
            self._server = None
