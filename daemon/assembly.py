"""Building the daemon's parts from its settings, and giving them back. Nothing here runs yet."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import structlog
import torch
import xxhash
import zmq

from fusewire.model import DeepseekV2Config, DeepseekV2ForCausalLM, SlotTable

from . import endpoints, wire
from .checkpoint import shards_of
from .curve import DOMAINS, Domain, Door, Guard, guard_of
from .errors import StartError
from .generator import Generation, Generator
from .journal import Journal
from .ledger import Ledger
from .loader import Consumed, Loader, Wanted
from .mailbox import Mailbox
from .memory import available_bytes
from .metrics import Metrics
from .progress import Coverage
from .publisher import Publisher
from .retention import Retention
from .ring import ring_for
from .roster import Policy
from .router import Router
from .settings import Settings
from .sources.folder import FolderSource, PathHint, ScanResult
from .sources.socket import SocketSource
from .spool import Spool
from .stimuli import Stimulus

log = structlog.get_logger()

SPOOL = "spool"
"""Folder of what was pushed, below state.path."""
CONTROL_HIGH_WATER = 64
"""Control requests that may queue per client."""


class Signalled(NamedTuple):
    """A signal has come."""

    number: int


class Idle(NamedTuple):
    """The last request on a generation that is not live has ended."""


Letter: TypeAlias = PathHint | ScanResult | Stimulus | Wanted | Consumed | Generation | Signalled | Idle
"""What other threads and signal handlers put into the reactor's mailbox."""


@dataclass(slots=True, kw_only=True)
class Parts:
    """All parts of the daemon. The reactor's thread uses them; loader, generator and folder have their own."""

    boot: str
    mailbox: Mailbox[Letter]
    publisher: Publisher
    control: Router
    ingest: SocketSource | None
    folder: FolderSource | None
    metrics: Metrics
    metrics_port: int | None
    model: DeepseekV2ForCausalLM
    ledger: Ledger
    loader: Loader
    generator: Generator
    checkpoint: list[Path]
    """Shards of the base checkpoint."""
    close: Callable[[], None]
    """Give back sockets, ports and file descriptors; threads must have been stopped."""
    retention: Retention | None
    journal: Journal | None
    spool: Spool | None
    guard: Guard | None
    """Which keys are accepted over TCP; None: no CURVE."""
    doors: dict[Domain, Door]
    """The guard's part of each socket; empty without one."""
    start_notes: tuple[str, ...] = ()
    """What was found at the start: one generation where two were wanted, a TCP socket without keys."""

    def notes(self) -> tuple[str, ...]:
        """Return what an operator should know of how the daemon had to set itself up."""
        notes = self.folder.notes() if self.folder is not None else ()
        notes += self.retention.notes() if self.retention is not None else ()
        notes += self.guard.notes() if self.guard is not None else ()
        return (*self.start_notes, *notes)


def assemble(settings: Settings) -> Parts:
    """Build everything.

    Raises:
        StartError: An endpoint or port is in use, a folder or a checkpoint can't be used.
        ConfigError: The model's config.json can't be read or is of an unsupported architecture.
    """
    checkpoint = shards_of(Path(settings.model.checkpoint)) if settings.model.checkpoint else []
    config = DeepseekV2Config.from_file(settings.model.config)
    boot, mode = uuid.uuid4().hex[:16], settings.control.socket_mode
    with contextlib.ExitStack() as undo:  # a failure half-way leaves no socket behind
        mailbox: Mailbox[Letter] = Mailbox()
        undo.callback(mailbox.close)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        undo.callback(context.destroy, linger=endpoints.LINGER_MS)
        metrics = Metrics()
        # Before any socket is bound: it answers for each peer that comes.
        guard = guard_of(settings.curve, os.environ, context, lambda domain: metrics.refused.labels(domain).inc())
        doors = {domain: guard.door(domain) for domain in DOMAINS} if guard is not None else {}
        publisher = Publisher(context, settings.events, boot=boot, mode=mode, door=doors.get("events"))
        control = Router(
            context,
            settings.control.endpoint,
            mode=mode,
            setting="control.endpoint",
            max_frame=wire.CONTROL_LIMIT,
            high_water=CONTROL_HIGH_WATER,
            door=doors.get("control"),
        )
        ingest = None
        if settings.socket.enabled:
            ingest = SocketSource(context, settings.socket, boot=boot, mode=mode, door=doors.get("ingest"))
            undo.callback(ingest.close)
        metrics_port = None
        if settings.metrics.enabled:
            metrics_port = metrics.start(settings.metrics.port)
            undo.callback(metrics.stop)
        folder = None
        if settings.folder.enabled:
            folder = FolderSource(settings.folder, mailbox.put)
        journal = spool = None
        if settings.state.path:
            journal, spool = _state(config, settings)
            undo.callback(journal.close)
        model, memory_note = _model(config, settings)
        model.staging.leases.on_idle = lambda _: mailbox.put(Idle())
        retention = None
        if folder is not None and settings.versions.retention != "keep":
            retention = Retention(settings.versions, folder.root)
        return Parts(
            boot=boot,
            mailbox=mailbox,
            publisher=publisher,
            control=control,
            ingest=ingest,
            folder=folder,
            metrics=metrics,
            metrics_port=metrics_port,
            model=model,
            ledger=Ledger(
                coverage_of(model.table, config.num_hidden_layers),
                held_limit=settings.socket.in_flight_bytes,
                known_limit=settings.limits.known_shards,
                policy=policy_of(settings),
                stream_limit=settings.socket.streams,
                client_stream_limit=settings.socket.streams_per_client,
                keep_pushed=spool is not None and settings.socket.durability == "spool",
            ),
            loader=Loader(
                model,
                settings,
                mailbox.put,
                ring=ring_for(model.device, settings.loader.ring_bytes, settings.loader.threads),
                spool=spool,
            ),
            generator=Generator(
                model,
                settings.control.generate_queue,
                mailbox.put,
                lease_seconds=settings.versions.lease_seconds,
            ),
            checkpoint=checkpoint,
            retention=retention,
            journal=journal,
            spool=spool,
            guard=guard,
            doors=doors,
            start_notes=tuple(filter(None, (memory_note, *(_open_notes(settings) if guard is None else ())))),
            close=undo.pop_all().close,
        )


def _state(config: DeepseekV2Config, settings: Settings) -> tuple[Journal, Spool]:
    """Open the journal and the spool. What was kept is read back even if nothing more is to be kept."""
    table = SlotTable.build(config, None)
    names = "\n".join(f"{name} {slot.shape}" for name, slot in table.slots.items())
    folder, sync = Path(settings.state.path), settings.state.sync
    model = xxhash.xxh3_128_hexdigest(names.encode())
    journal = Journal(folder, model, sync=sync, known_limit=settings.limits.known_shards)
    try:
        known = {record.place for record in journal.memory.shards if record.standing != "over"}
        spool = Spool(folder / SPOOL, limit=settings.state.spool_bytes, sync=sync, known=known)
    except BaseException:
        journal.close()
        raise
    return journal, spool


def _open_notes(settings: Settings) -> Iterator[str]:
    """Say which sockets any user of this host can connect to."""
    for name in ("socket", "events", "control"):
        endpoint = getattr(settings, name).endpoint
        if endpoint.startswith("tcp://"):
            yield f"{name}.endpoint = {endpoint}: every user of this host can connect; ipc, or keys (curve), prevent it"


def coverage_of(table: SlotTable, layers: int) -> Coverage:
    """Put a slot table into the ledger's terms."""
    slots = sorted(table.slots.values(), key=lambda slot: slot.index)
    return Coverage(
        layer_of=tuple(slot.layer for slot in slots),
        fusions={layer: tuple(slot.index for slot in fusion.slots) for layer, fusion in table.fusions.items()},
        layers=layers,
        names=tuple(slot.name for slot in slots),
    )


def policy_of(settings: Settings) -> Policy:
    """Put the settings that versions depend on into the ledger's terms."""
    return Policy(automatic=settings.versions.commit == "auto", stale_after=settings.versions.stale_after)


def _model(config: DeepseekV2Config, settings: Settings) -> tuple[DeepseekV2ForCausalLM, str]:
    """Build the model; with one generation and a note if two do not fit."""
    if settings.model.threads:
        torch.set_num_threads(settings.model.threads)
    wrong = [token for token in settings.versions.canary if token >= config.vocab_size]
    if wrong:
        raise StartError(f"versions.canary: token {wrong[0]} is outside of the vocabulary of {config.vocab_size}")
    dtype = None if settings.model.dtype == "checkpoint" else getattr(torch, settings.model.dtype)
    keep_fp8, generations, note = settings.model.fp8 == "keep", settings.model.generations, ""
    if generations == 2:  # noqa: PLR2004 - or one
        wanted = 2 * DeepseekV2ForCausalLM.nbytes(config, dtype, keep_fp8=keep_fp8)
        there = available_bytes(settings.model.device)
        if there is not None and wanted > there:
            generations = 1
            note = (
                f"model.generations = 2 needs {wanted} bytes, {there} are free on {settings.model.device}: weights are "
                "updated in place, without staging, verification and rollback"
            )
            log.warning("model.in_place", reason=note)
    model = DeepseekV2ForCausalLM(
        config,
        device=settings.model.device,
        dtype=dtype,
        keep_fp8=keep_fp8,
        generations=generations,
        fusion_max_bytes=settings.fusion.max_bytes,
        fusion_max_age=settings.fusion.max_age,
    )
    return model, note
