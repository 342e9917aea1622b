"""The service: the reactor that owns every socket, and the place where the ledger's instructions become I/O.

One thread, the main one, polls the sockets and the mailbox into which all other threads put what they have to
say. It never copies weights, scans folders, parses big headers or runs the model: named threads do.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import Any, assert_never

import msgspec
import structlog
import zmq

from . import events, logs, notify, reload, reports, wire
from . import settings as settings_module
from .assembly import Idle, Letter, Parts, Signalled, assemble, policy_of
from .control import Control, Phase
from .errors import FusewireError, Reason, StartError, printable
from .generator import Generation
from .lease import install_lease_signal_handling
from .ledger import State
from .loader import Consumed, ListSource, Source, Wanted
from .manifest import MARKER, is_index, is_marker, read_index
from .payload import BytesPayload, HeadPayload, Identity, Payload, open_file
from .progressbar import ProgressBar
from .records import Memory
from .recovery import Recovery
from .settings import Settings
from .sources.folder import PathHint, ScanResult
from .sources.scan import FileHint
from .sources.socket import Broken, Offer, Order, Piece
from .stimuli import (
    Answered,
    Commit,
    Compare,
    Discard,
    DropVersion,
    Freed,
    Gone,
    Inspect,
    Instruction,
    NewRun,
    Ordered,
    Place,
    Publish,
    Recalled,
    Record,
    Release,
    Reply,
    Retire,
    Rollback,
    Seen,
    Stimulus,
    Stop,
    Tick,
    Verify,
)
from .versions import Claim, run_of, versions_of_path

log = structlog.get_logger()

TICK = 0.5
"""Longest time in seconds that the reactor sleeps."""
STOP_GRACE = 2.0
"""Seconds after a stop signal in which the shards that are being copied may still be finished."""
JOIN_TIMEOUT = 1.0
"""Seconds given to each thread to end. With STOP_GRACE and the sockets' linger: less than 5 s in all."""
UNNEEDED = 10_000
"""Removals that wait for the journal; what belongs to those beyond stays till the next start, or where it is."""
EXTENSION = 30.0
"""Seconds of start-up time asked of systemd each time that bytes have advanced."""

OUTWARD = (Answered, Publish, Reply)
"""Instructions after which somebody knows, so that what led to them has to be written first."""

_LEVELS: dict[type[events.Event], str] = {
    events.ShardRefused: "warning",
    events.FusionExpired: "warning",
    events.VersionIncomplete: "warning",
    events.VersionAborted: "error",
    events.VersionSuperseded: "warning",
    events.VersionComplete: "debug",
    events.Heartbeat: "debug",
    events.LayerLoaded: "debug",
}
"""Event -> level at which it is logged; all others at info. No line per tensor: journald drops floods."""


def run(settings: Settings, config_path: Path) -> int:
    """Run the daemon until it is told to stop.

    Args:
        settings: The effective settings.
        config_path: The file that they come from, read again at SIGHUP.

    Returns:
        The exit code: 0 after a clean stop.

    Raises:
        StartError: It can't start; the message says why and what to do.
        ConfigError: The model's config.json can't be read or is of an unsupported architecture.
    """
    logs.configure(settings.log)
    notify.status("building the model")
    parts = assemble(settings)
    service = Service(parts, settings, config_path)
    try:
        return service.run()
    finally:
        service.close()


class Service:
    """The reactor: takes in what happens, feeds the ledger, performs its instructions.

    Args:
        parts: All parts of the daemon, built and not yet running.
        settings: The effective settings.
        config_path: The file that they come from.
    """

    def __init__(self, parts: Parts, settings: Settings, config_path: Path) -> None:
        self.parts = parts
        self.settings = settings
        self.config_path = config_path
        self.ledger = parts.ledger
        self.loader = parts.loader
        self.phase: Phase = "starting"
        self.control = Control(parts, _model_line(parts, settings), lambda: self.phase, self._feed)
        self._stop_at: float | None = None
        self._orders: dict[str, int] = {}
        """Trainers' orders that have not been answered: ticket -> version."""
        self._sources: dict[str, Source] = {}
        """How to open the shards that the folder does not hold: those of clients and of the base checkpoint."""
        self._expected: set[str] = set()
        """Keys of the base checkpoint's shards that are not in place yet."""
        self._recovery: Recovery | None = None
        """What was live before a restart, until it is again."""
        self._unneeded: deque[Retire | Discard] = deque(maxlen=UNNEEDED)
        """What may be thrown away, once it is written down that nothing rests on it."""
        self._due = dict.fromkeys(("heartbeat", "sweep", "streams", "watchdog", "progress", "journal"), 0.0)
        self._extended_at = -1
        self._performers = self._table()
        self._bar = ProgressBar(sum(path.stat().st_size for path in parts.checkpoint))

    # ---------------------------------------------------------------------------------- three phases

    def run(self) -> int:
        """Start, serve, stop. Returns the exit code."""
        with self._signals():
            self._start()
            while self._stop_at is None or (self.ledger.in_flight and time.monotonic() < self._stop_at):
                self._turn()
            self._shutdown()
        return 0

    def close(self) -> None:
        """Give everything back, however `run` ended."""
        self._bar.close()
        if self.parts.folder is not None:
            self.parts.folder.stop()
        self.parts.generator.stop(JOIN_TIMEOUT)
        self.loader.stop(JOIN_TIMEOUT)
        for removing in (self.parts.retention, self.parts.spool):
            if removing is not None:
                removing.stop(JOIN_TIMEOUT)
        self.parts.close()

    def _start(self) -> None:
        parts = self.parts
        self._poller = zmq.Poller()
        self._poller.register(parts.mailbox.fileno(), zmq.POLLIN)
        self._poller.register(parts.publisher.socket, zmq.POLLIN)
        self._poller.register(parts.control.socket, zmq.POLLIN)
        if parts.ingest is not None:
            self._poller.register(parts.ingest.socket, zmq.POLLIN)
        if parts.guard is not None:
            self._poller.register(parts.guard.socket, zmq.POLLIN)
        parts.loader.start()
        parts.generator.start()
        for part in (parts.retention, parts.spool, parts.journal):
            if part is not None:
                part.start()
        self._recall()
        if self._recovery is None:
            self._load_checkpoint()
        if parts.folder is not None:
            parts.folder.start()
        log.info(
            "daemon.started",
            boot=parts.boot,
            model=_model_line(parts, self.settings),
            ingest=parts.ingest.endpoint if parts.ingest else None,
            events=parts.publisher.endpoint,
            control=parts.control.endpoint,
            folder=self.settings.folder.path if parts.folder else None,
            metrics_port=parts.metrics_port,
            notes=parts.notes(),
        )
        if not self._expected and self._recovery is None:
            self._become_ready()

    def _load_checkpoint(self) -> None:
        # The operator names the folder: in a hub's cache its shards are links to where the bytes lie.
        shards = {f"checkpoint:{path.name}": path.resolve() for path in self.parts.checkpoint}
        self._expected.update(shards)  # all of them, before the first can be in place
        for path, (key, place) in zip(self.parts.checkpoint, shards.items(), strict=True):
            identity = Identity.of(place.stat())
            self._sources[key] = Source(path.name, self._opener(place))
            self._feed(
                Seen(
                    key=key,
                    name=path.name,
                    source="checkpoint",
                    identity=identity,
                    content=identity.content,
                    place=str(place),
                    now=time.monotonic(),
                )
            )

    def _recall(self) -> None:
        """Take over what was written down before a restart; begin to restore what was live."""
        journal, parts = self.parts.journal, self.parts
        if journal is None or journal.memory == Memory():
            return
        memory, now = journal.memory, time.monotonic()
        journal.memory = Memory()  # it may be large, and is not needed again
        self._feed(Recalled(now=now, memory=memory))
        folders = {"checkpoint": Path("/")}
        if parts.folder is not None:
            folders["folder"] = parts.folder.root
        if parts.spool is not None:
            folders["socket"] = parts.spool.folder
        recovery = Recovery(memory, folders, lambda path, approve: self._opener(path, approve)())
        if memory.standing.ready:
            self._recovery = recovery
            log.info("daemon.restoring", version=memory.standing.live, bytes=recovery.total)
            for problem in recovery.problems():
                log.error("restore.missing", shard=problem, remedy="put it back, or push a whole version")
            if parts.checkpoint and not recovery.rests_on({str(path.resolve()) for path in parts.checkpoint}):
                what = "model.checkpoint is not what the live weights rest on: they are restored all the same"
                log.warning("restore.other_checkpoint", reason=what, remedy="move state.path away to begin with it")
            self._bar = ProgressBar(recovery.total)
            self._restore_next()
        for seen, source in recovery.staged(now):
            if source is not None:
                self._sources[seen.key] = source
            elif parts.folder is None:
                continue
            self._feed(seen)

    def _restore_next(self) -> None:
        """One at a time, in their order: where two fill the same slots, the later one has the last word."""
        assert self._recovery is not None
        found = self._recovery.next(time.monotonic())
        if found is not None:
            seen, source = found
            self._sources[seen.key] = source
            self._feed(seen)

    def _become_ready(self) -> None:
        """Sockets are bound, and the base checkpoint, if there is one, is in place."""
        self._bar.close()
        self.phase = "serving"
        notify.ready(reports.headline(self.ledger))

    def _turn(self) -> None:
        """Wait, then take in what has come from each side."""
        parts = self.parts
        for ready, _ in self._poller.poll(self._patience()):
            if ready == parts.mailbox.fileno():
                for letter in parts.mailbox.drain():
                    self._open_letter(letter)
            elif ready is parts.publisher.socket:
                if parts.publisher.take_subscriptions():
                    self._heartbeat()
            elif ready is parts.control.socket:
                self.control.answer()
            elif parts.guard is not None and ready is parts.guard.socket:
                parts.guard.answer()
            else:
                self._take_offers()
        if self.ledger.versions.leased:
            self._look_for_leases()
        self._feed(Tick(now=time.monotonic()))
        self._routine()

    def _patience(self) -> int:
        """Return how long the reactor may sleep, in milliseconds."""
        due = self.ledger.next_due()
        return math.ceil(1000 * (TICK if due is None else max(0.0, min(TICK, due - time.monotonic()))))

    def _shutdown(self) -> None:
        self.loader.stop(JOIN_TIMEOUT)
        self.parts.generator.stop(JOIN_TIMEOUT)
        for letter in self.parts.mailbox.drain():  # what the threads said last
            self._open_letter(letter)
        waiting = tuple(half.tensor for half in self.ledger.pending)
        shards = reports.waiting_shards(self.ledger)
        message = f"stopping: {len(waiting)} halves and {len(shards)} shards were still waiting"
        log.info("daemon.stopped", halves=waiting, shards=[shard.shard for shard in shards])
        self._publish(events.Stopping(version=self.ledger.versions.live, message=message, waiting=waiting[:100]))

    # --------------------------------------------------------------------------------- what comes in

    def _open_letter(self, letter: Letter) -> None:
        match letter:
            case Stimulus():
                self._feed(letter)
            case Idle():
                self._look_for_leases()
            case Wanted() | Consumed():
                self._stream_goes_on(letter)
            case PathHint():
                if self.parts.folder is not None:
                    looked = time.monotonic()
                    self._take_hint(self.parts.folder.look(letter), looked)
            case ScanResult():
                for hint in letter.hints:
                    self._take_hint(hint, letter.at)
            case Generation():
                self.parts.control.reply(letter.envelope, letter.reply)
            case Signalled():
                self._signalled(letter.number)
            case _:
                assert_never(letter)

    def _stream_goes_on(self, letter: Wanted | Consumed) -> None:
        assert self.parts.ingest is not None
        if isinstance(letter, Wanted):
            self.parts.ingest.want(letter.key)
        else:
            self.parts.ingest.consumed(letter.key, letter.slot)

    def _take_offers(self) -> None:
        assert self.parts.ingest is not None
        for came in self.parts.ingest.offers():
            match came:
                case Piece(key, data, slot, frame):
                    self.loader.feed(key, data, slot, frame)
                case Offer():
                    self._take_offer(came)
                case Order():
                    self._take_order(came)
                case Broken():
                    self._take_break(came)
                case _:
                    assert_never(came)

    def _take_break(self, broken: Broken) -> None:
        """The rest of a shard will not come: whoever has it at the moment gives it up."""
        shard = self.ledger.shards.get(broken.key)
        if shard is not None and shard.state is State.STREAMING:
            self.loader.fail(broken.key, broken.reason, broken.detail)
        elif shard is not None:
            self._feed(Gone(key=broken.key, now=time.monotonic()))

    def _take_offer(self, offer: Offer) -> None:
        frame, limit = offer.payload, self.settings.limits.header_bytes

        def open_frame() -> Payload:
            if offer.nbytes is not None:
                return HeadPayload.parse(frame.buffer, offer.nbytes, header_limit=limit)
            return BytesPayload.parse(frame.buffer, header_limit=limit)

        claims = () if offer.version is None else (Claim("message header", offer.version),)
        self._sources[offer.key] = Source(offer.name, open_frame, claims, offer.run, offer.xxh3)
        held, now = len(frame.buffer), time.monotonic()
        self._feed(
            Seen(
                key=offer.key,
                name=offer.name,
                source="socket",
                held=held,
                stream=offer.nbytes is not None,
                claimed=offer.version,
                client=offer.client,
                now=now,
            )
        )

    def _take_order(self, order: Order) -> None:
        """A trainer says that a version is all there, or gives it up."""
        request, slots = order.request, None
        unknown: tuple[str, ...] = ()
        if isinstance(request, wire.Commit) and request.tensors is not None:
            found, missing = self.parts.model.table.locate(request.tensors)
            slots, unknown = tuple(index for slot in found for index in slot.indices), tuple(missing[:3])
        self._orders[order.key] = request.version
        self._feed(
            Ordered(
                now=time.monotonic(),
                ticket=order.key,
                order="commit" if isinstance(request, wire.Commit) else "abort",
                version=request.version,
                slots=slots,
                unknown=tuple(map(printable, unknown)),
                by_trainer=True,
                run=run_of(request.run, {}),
            )
        )

    def _look_for_leases(self) -> None:
        """A generation may be written again once nobody reads it. Asked, and not only heard: hearing has gaps."""
        staging = self.parts.model.staging
        if self.ledger.versions.leased and not staging.staged_leases().leases:
            self._feed(Freed(now=time.monotonic()))

    def _take_hint(self, hint: FileHint, looked: float) -> None:
        key, now = f"folder:{hint.relative}", time.monotonic()
        if hint.identity is None:
            self._feed(Gone(key=key, now=now))
            return
        identity = hint.identity
        self._feed(
            Seen(
                key=key,
                name=printable(hint.relative),
                source="folder",
                identity=identity,
                content=identity.content,
                changed=identity.ctime_ns,
                looked=looked,
                claimed=_claimed(hint.relative),
                place=str(hint.relative),
                now=now,
            )
        )

    def _source(self, key: str) -> Source | ListSource:
        """Say how to open a shard. One of the folder is found by its name, so that nothing is kept for it."""
        kept = self._sources.get(key)
        if kept is not None:
            return kept
        assert self.parts.folder is not None
        relative = Path(key.removeprefix("folder:"))
        path = self.parts.folder.root / relative
        claims = tuple(versions_of_path(relative))
        if is_marker(relative):
            return ListSource(MARKER, None, claims)
        if is_index(relative):
            after = self.settings.folder.incomplete_after
            return ListSource("index", lambda: read_index(path, after), claims)
        return Source(printable(relative), self._opener(path), claims)

    def _opener(self, path: Path, approve: Callable[[Identity], None] = lambda _: None) -> Callable[[], Payload]:
        def open_path() -> Payload:
            settings = self.settings
            return open_file(
                path,
                leases=settings.loader.leases,
                settle=settings.folder.settle,
                incomplete_after=settings.folder.incomplete_after,
                header_limit=settings.limits.header_bytes,
                approve=approve,
            )

        return open_path

    # --------------------------------------------------------------------------------- what goes out

    def _feed(self, stimulus: Stimulus) -> None:
        todo = self.ledger.handle(stimulus)
        # First what is written down: an answer must not be forgotten by a restart. What nobody is told of can wait.
        told = any(isinstance(instruction, OUTWARD) for instruction in todo)
        for instruction in todo:
            if isinstance(instruction, Record):
                self._write_down(instruction, at_once=told)
        for instruction in todo:
            self._perform(instruction)
        if told and self._unneeded:
            self._clear_away()

    def _clear_away(self) -> None:
        """Throw away what nothing rests on any more: never before a restart would know that, too."""
        if self.parts.journal is not None and not self.parts.journal.settled:
            return
        unneeded = list(self._unneeded)
        self._unneeded.clear()
        for instruction in unneeded:
            if isinstance(instruction, Retire):
                self._retire(instruction)
            else:
                self._discard(instruction)

    def _write_down(self, record: Record, *, at_once: bool) -> None:
        journal = self.parts.journal
        if journal is not None and at_once:
            journal.write(record.entries)
        elif journal is not None:
            journal.note(record.entries)

    def _perform(self, instruction: Instruction) -> None:
        self._performers[type(instruction)](instruction)

    def _table(self) -> dict[type[Instruction], Callable[[Any], None]]:
        """Instruction -> how it is carried out; a test compares it with the ledger's list of them."""
        loader, ledger = self.loader, self.ledger
        return {
            Inspect: lambda i: loader.inspect(i.key, self._source(i.key)),
            Place: lambda i: loader.place(i.key, ledger.shards[i.key].name, i.version, i.keep),
            Compare: lambda i: loader.compare(i.key, i.version),
            Release: lambda i: loader.release(i.key),
            DropVersion: lambda i: loader.drop_version(i.version),
            Verify: lambda i: loader.verify(i.version),
            Commit: lambda i: loader.commit(i.version),
            Rollback: lambda i: loader.rollback(i.ticket),
            NewRun: lambda _: loader.new_run(),
            Retire: self._unneeded.append,
            Record: lambda _: None,  # done already
            Discard: self._unneeded.append,
            Publish: lambda i: self._publish(i.event),
            Reply: lambda i: self._answer(i.key, i.answer),
            Answered: lambda i: self._settle(i.ticket, i.failure, i.detail),
        }

    def _retire(self, retire: Retire) -> None:
        if self.parts.retention is not None:
            files = [(key.removeprefix("folder:"), identity) for key, identity in retire.keys]
            self.parts.retention.retire(retire.version, files)

    def _discard(self, discard: Discard) -> None:
        if self.parts.spool is not None:
            for number in discard.numbers:
                self.parts.spool.discard(number)

    def _publish(self, event: events.AnyEvent) -> None:
        sent = self.parts.publisher.publish(event)
        match sent:
            case events.ShardApplied():
                self.control.note(sent)
            case events.ModelReady():
                self._is_it_up()
            case events.VersionAborted() if self.phase == "starting" and self._recovery is None:
                raise StartError(f"model.checkpoint = {self.settings.model.checkpoint}: {sent.cause}")
            case _:
                pass
        self.parts.metrics.record(sent)
        level = _LEVELS.get(type(sent), "info")
        getattr(log, level)(sent.__struct_config__.tag, seq=sent.seq, version=sent.version, message=sent.message)

    def _settle(self, ticket: str, failure: str, detail: str) -> None:
        """Answer an order, on the socket that it came from."""
        if ticket in self._orders:
            version = self._orders.pop(ticket)
            answer = wire.Answer(
                status="rejected" if failure else "accepted",
                version=version,
                reason=Reason.STALE_VERSION.value if failure else None,
                detail=printable(failure or detail),
            )
            if self.parts.ingest is not None:
                self.parts.ingest.answer(ticket, answer)
        else:
            self.control.settle(ticket, failure, detail)

    def _answer(self, key: str, answer: wire.Answer) -> None:
        self._sources.pop(key, None)
        if answer.durability == "spool" and not (self.parts.journal is not None and self.parts.journal.settled):
            answer = msgspec.structs.replace(answer, durability="memory")
        if self.parts.ingest is not None:
            self.parts.ingest.answer(key, answer)
        if key.startswith("restore:") and self._recovery is not None and answer.status == "applied":
            self._restore_next()
        if key in self._expected:
            self._expected.discard(key)
            self._checkpoint_came(answer)

    def _checkpoint_came(self, answer: wire.Answer) -> None:
        folder = self.settings.model.checkpoint
        if self._stop_at is not None:
            return
        if answer.status != "applied":
            raise StartError(
                f"model.checkpoint = {folder}: shard {answer.shard} was {answer.status}: "
                f"{answer.reason}: {answer.detail}"
            )
        if not self._expected and not self.parts.model.generation.filled == len(self.parts.model.table.slots):
            raise StartError(
                f"model.checkpoint = {folder} does not fill the model: {self.parts.model.missing_summary()}"
            )
        self._is_it_up()

    def _is_it_up(self) -> None:
        """The start has ended once the base checkpoint, or what is restored, is in place and live."""
        if self.phase == "starting" and not self._expected and self.ledger.versions.ready:
            self._recovery = None
            self._become_ready()

    # --------------------------------------------------------------------------------------- routine

    def _routine(self) -> None:
        """What is done by the clock: heartbeats, expiry, the watchdog, the start's progress."""
        if self._is_due("heartbeat", self.settings.events.heartbeat_interval):
            self._heartbeat()
            spool = self.parts.spool
            self.parts.metrics.observe(self.ledger, self.control.health(), 0 if spool is None else spool.used)
        if self.ledger.pending and self._is_due("sweep", 1.0):
            self.loader.sweep()
        if self.ledger.streams and self._is_due("streams", 1.0):
            self.loader.expire_streams(self.settings.socket.stream_timeout)
        if self._is_due("journal", 1.0):
            if self.parts.journal is not None:
                self.parts.journal.retry()
            self._clear_away()
        interval = notify.watchdog_interval()
        if interval is not None and self._is_due("watchdog", interval / 3):
            # The ping speaks for every thread, not just for this one.
            failures = self.control.failures()
            if failures:
                log.error("daemon.ailing", **failures)
            else:
                notify.watchdog()
        if self._is_due("progress", 1.0):
            self._tell_progress()

    def _is_due(self, what: str, interval: float) -> bool:
        now = time.monotonic()
        if now < self._due[what]:
            return False
        self._due[what] = now + interval
        return True

    def _tell_progress(self) -> None:
        if self.phase != "starting":
            notify.status(reports.headline(self.ledger))
            return
        copied = self.loader.pulse.copied
        self._bar.update(copied)
        recovery = self._recovery
        if recovery is None:
            notify.status(f"loading {self.settings.model.checkpoint}: {copied / 1e9:.1f} GB")
        else:
            missing = recovery.problems()
            lacks = f"; {len(missing)} shards can't be had: {missing[0]}" if missing else ""
            notify.status(printable(f"restoring {recovery.label}: {copied / 1e9:.1f} GB{lacks}"))
            if missing:  # somebody has to do something: to be started again would not help
                notify.extend_timeout(EXTENSION)
        if copied != self._extended_at:  # only while bytes advance: a start that is stuck must time out
            self._extended_at = copied
            notify.extend_timeout(EXTENSION)

    def _heartbeat(self) -> None:
        versions = self.ledger.versions
        message = reports.headline(self.ledger)
        self._publish(events.Heartbeat(version=versions.live, ready=versions.ready, message=message))

    # --------------------------------------------------------------------------------------- signals

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Turn signals into letters while the reactor runs."""
        install_lease_signal_handling()
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # a scraper, or a log's reader, that goes away is not our end
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        before = {
            number: signal.signal(number, lambda came, _: self.parts.mailbox.put(Signalled(came))) for number in numbers
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _signalled(self, number: int) -> None:
        if number == signal.SIGHUP:
            self._reload()
            return
        log.info("daemon.stopping", signal=signal.Signals(number).name)
        if self._stop_at is None:
            self._stop_at = time.monotonic() + STOP_GRACE
            self.phase = "stopping"
            notify.stopping()
            if self.parts.folder is not None:
                self.parts.folder.stop()
            self._feed(Stop(now=time.monotonic()))

    def _reload(self) -> None:
        """Apply what can change without a restart; say what cannot. A bad file changes nothing."""
        serving = self.phase == "serving"  # else the READY=1 after it would say that a start has ended
        if serving:
            notify.reloading()
        if self.parts.guard is not None:
            self.parts.guard.reload()
        try:
            outcome = reload.compare(self.settings, settings_module.load(self.config_path))
        except FusewireError as error:
            log.error("settings.not_reloaded", reason=str(error), remedy="the old settings stay in force")  # noqa: TRY400
        else:
            self.settings = outcome.effective
            logs.set_level(outcome.effective.log.level)
            self.ledger.held_limit = outcome.effective.socket.in_flight_bytes
            self.ledger.known_limit = outcome.effective.limits.known_shards
            self.ledger.versions.policy = policy_of(outcome.effective)
            self.loader.set_limits(outcome.effective)
            log.info("settings.reloaded", applied=outcome.applied)
            if outcome.refused:
                log.warning("settings.need_restart", keys=outcome.refused)
        if serving:
            notify.ready(reports.headline(self.ledger))


def _claimed(relative: PurePath) -> int | None:
    """The version that a file's folder names, if it names one."""
    claims = {claim.version for claim in versions_of_path(relative)}
    return claims.pop() if len(claims) == 1 else None


def _model_line(parts: Parts, settings: Settings) -> str:
    config = parts.model.config
    dtype = config.torch_dtype if settings.model.dtype == "checkpoint" else settings.model.dtype
    return f"{config.model_type}, {config.num_hidden_layers} layers, {dtype}, {settings.model.device}"
