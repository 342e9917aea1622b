"""The loader: the one thread that changes the model's weights. It does jobs in order and tells the outcomes.

It opens and checks a shard (`inspect`), copies it (`place`), closes it (`release`), lets halves go that waited too
long (`sweep`), and makes a version live (`verify`, `commit`, `rollback`). Outcomes are stimuli for the ledger, failures
included: nothing escapes from here but through the sink.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import structlog

from fusewire.model import (
    ConflictError,
    DeepseekV2ForCausalLM,
    Destination,
    ExpiredHalf,
    FusionCacheFull,
    LoadPlan,
    LoadReport,
    Slot,
    StagingError,
    StaleError,
    TensorMeta,
    Update,
    WeightsError,
)

from . import events, wire
from .copying import Copier, Copy
from .errors import Reason, ShardNotReady, ShardRejected, printable
from .payload import Bytes, BytesPayload, HeadPayload, Payload
from .settings import Settings
from .shard import TensorEntry
from .stimuli import (
    Committed,
    Expired,
    Inspected,
    Listed,
    NotReady,
    Placed,
    Refused,
    RolledBack,
    ShardStimulus,
    Stimulus,
    Verified,
)
from .streaming import Stream
from .versions import Claim, digest_of, reconcile, run_of, versions_of_metadata

GATE_TIMEOUT = 10.0
"""Seconds that a shard waits for a running forward pass before it is put off. With the copying itself less than half of
the time for which the kernel lets a leased file's next writer wait: a mapping must not be read any longer."""
STUCK_AFTER = 120.0
"""Seconds without a copied byte or a finished job after which the loader is reported as stuck."""

log = structlog.get_logger()


class Source(NamedTuple):
    """How to get at a shard: what the edge that found it hands to the loader."""

    name: str
    open: Callable[[], Payload]
    claims: tuple[Claim, ...] = ()
    """What the folder's name or the message's header say of its version."""
    run: str | None = None
    """The trainer's incarnation, as the message's header says."""
    xxh3: str | None = None
    """xxh3-128 of the data section, as the message's header says."""


class ListSource(NamedTuple):
    """How to get at what tells of a version's shards: an index, or the marker that all has been written."""

    what: str
    read: Callable[[], tuple[str, ...]] | None
    """Returns the names of the tensors; None: whatever has come is all."""
    claims: tuple[Claim, ...]


class _Job(NamedTuple):
    """Something for the loader's thread to do."""

    work: Callable[[], None]
    alone: bool
    """Whether it has to wait for a large shard that is being copied, with all that comes after it."""


class _Later(Exception):
    """This job has to wait for the large shard that is being copied."""


class Wanted(NamedTuple):
    """The bytes of a shard that comes in chunks are wanted now."""

    key: str


class Consumed(NamedTuple):
    """A chunk has been put in place, or passed over: its memory is free."""

    key: str
    slot: int | None


Told: TypeAlias = Stimulus | Wanted | Consumed


@dataclass(slots=True)
class _Open:
    payload: Payload
    plan: LoadPlan
    xxh3: str | None


class _Gathering:
    """A shard that comes in chunks and has to be whole before any of it can be placed."""

    def __init__(self, key: str, name: str, version: int | None, shard: _Open, data: Bytes) -> None:
        self.key = key
        self.name = name
        self.version = version
        self.shard = shard
        self.data = data
        self.position = 0
        self.heard = time.monotonic()

    @property
    def complete(self) -> bool:
        """Whether all bytes have come."""
        return self.position == self.data.size

    def feed(self, chunk: Bytes) -> None:
        """Take the next bytes."""
        np.copyto(self.data[self.position : self.position + chunk.size], chunk)
        self.position += chunk.size


@dataclass(slots=True)
class Pulse:
    """Signs of life, written by the loader's threads and read by the reactor: plain numbers, no lock."""

    copied: int = 0
    """Bytes copied since start; approximate while several threads copy."""
    busy_since: float | None = None
    beat: float = field(default_factory=time.monotonic)


class Loader:
    """A thread with a queue of jobs. All methods but `run` may be called from any thread.

    Args:
        model: The resident model; only this thread changes its weights.
        settings: Limits and the number of copy threads.
        sink: Takes each outcome; must not block.
    """

    def __init__(
        self,
        model: DeepseekV2ForCausalLM,
        settings: Settings,
        sink: Callable[[Told], None],
    ) -> None:
        self.model = model
        self.pulse = Pulse()
        self._unleased_bytes = settings.limits.unleased_bytes
        self._checks = settings.versions
        self._sink = sink
        self._copier = Copier(settings.loader.threads, settings.loader.block_bytes, self._advance, self._wake)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._next: deque[_Job | None] = deque()
        """Taken from the queue already, to be done before all others."""
        self._writing: list[frozenset[int]] = []
        """Slots of the large shards that are being copied."""
        self._open: dict[str, _Open] = {}
        self._streams: dict[str, Stream | _Gathering] = {}
        self._thread = threading.Thread(target=self._run, name="fusewire-loader", daemon=True)

    def start(self) -> None:
        """Begin to do jobs."""
        self._thread.start()

    def inspect(self, key: str, source: Source | ListSource) -> None:
        """Open and check a shard; tells Inspected, Listed, NotReady or Refused."""
        if isinstance(source, ListSource):
            self._put(lambda: self._guarded(key, lambda: self._list(key, source)))
        else:
            self._put(lambda: self._guarded(key, lambda: self._inspect(key, source)))

    def place(self, key: str, name: str, version: int | None) -> None:
        """Copy an inspected shard into the model; tells Placed or Refused."""
        self._put(lambda: self._guarded(key, lambda: self._place(key, name, version)))

    def feed(self, key: str, data: Bytes, slot: int | None, frame: object) -> None:
        """Put the next bytes of a shard that comes in chunks in place; tells Consumed, at the end Placed or Refused.

        Args:
            key: Of the shard.
            data: The bytes.
            slot: Of the shared segment, if they lie there.
            frame: Whatever keeps their memory.
        """
        self._put(lambda: self._feed(key, data, slot, frame))

    def fail(self, key: str, reason: Reason, detail: str) -> None:
        """The rest of a shard that comes in chunks will not come; tells Refused."""
        self._put(lambda: self._fail(key, ShardRejected(reason, detail)))

    def expire_streams(self, timeout: float) -> None:
        """Give up the shards whose next chunk has not come for ``timeout`` seconds."""
        self._put(lambda: self._expire_streams(timeout))

    def compare(self, key: str, version: int | None) -> None:
        """Compare an inspected shard with the live weights; tells Placed or Refused."""
        self._put(lambda: self._guarded(key, lambda: self._compare(key, version)))

    def verify(self, version: int | None) -> None:
        """Complete and verify the staged version; tells Verified."""
        self._put(lambda: self._sink(self._verify(version)), alone=True)

    def commit(self, version: int | None) -> None:
        """Make the staged version live; tells Committed."""
        self._put(lambda: self._sink(self._commit(version)), alone=True)

    def rollback(self, ticket: str) -> None:
        """Make the version before live again; tells RolledBack."""
        self._put(lambda: self._sink(self._rollback(ticket)), alone=True)

    def new_run(self) -> None:
        """Versions are counted anew."""
        self._put(self.model.forget_numbers, alone=True)

    def release(self, key: str) -> None:
        """Close a shard, if it is open."""
        self._put(lambda: self._close(key))

    def sweep(self) -> None:
        """Give up the halves that waited too long; tells Expired if there were any."""
        self._put(lambda: self._tell_expired(self.model.sweep()))

    def drop_version(self, version: int | None) -> None:
        """Give up what a version has staged, and its waiting halves; tells Expired if there were any."""

        def drop() -> None:
            self._end_streams(version, ShardRejected(Reason.STALE_VERSION, "its version has been given up"))
            self._tell_expired(self.model.drop_version(version))

        self._put(drop, alone=True)

    def set_limits(self, settings: Settings) -> None:
        """Take over the limits that may change while the daemon runs, between two jobs."""

        def change() -> None:
            self._unleased_bytes = settings.limits.unleased_bytes
            self._checks = settings.versions
            self.model.fusion.max_bytes = settings.fusion.max_bytes
            self.model.fusion.max_age = settings.fusion.max_age

        self._put(change, alone=True)

    def health(self) -> str:
        """Return ``ok``, or what is wrong."""
        if not self._thread.is_alive():
            return "the loader thread has ended"
        since = self.pulse.busy_since
        if since is not None and time.monotonic() - max(since, self.pulse.beat) > STUCK_AFTER:
            return f"no progress for {time.monotonic() - self.pulse.beat:.0f} s"
        return "ok"

    def stop(self, timeout: float) -> bool:
        """Give up the job at hand, close what is open. Returns whether that was done in time."""
        self._copier.cancel()
        self._jobs.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    # --------------------------------------------------------------------------- on the loader's thread

    def _put(self, work: Callable[[], None], *, alone: bool = False) -> None:
        self._jobs.put(_Job(work, alone))

    def _run(self) -> None:
        while (job := self._next.popleft() if self._next else self._jobs.get()) is not None:
            self._do(job)
        for key in list(self._streams):
            self._fail(key, ShardRejected(Reason.STOPPING, "the daemon is stopping; send it again later"))
        for key in list(self._open):
            self._close(key)
        self._copier.close()

    def _do(self, job: _Job) -> None:
        since = self.pulse.busy_since
        self.pulse.busy_since = self.pulse.beat = time.monotonic()
        try:
            job.work()
        except _Later:
            raise
        except Exception:
            log.exception("loader.defect")
        finally:
            self.pulse.busy_since = since

    def _meanwhile(self, done: threading.Event) -> None:
        """Do other shards' jobs while the copy threads are busy with a large one: a small one need not wait for it.

        Not those that concern a whole version, and nothing that comes after one of them.
        """
        while not done.is_set():
            job = self._next.popleft() if self._next else self._jobs.get()
            if job is None or job.alone:
                self._next.appendleft(job)
                return
            try:
                self._do(job)
            except _Later:
                self._next.appendleft(job)
                return

    def _wake(self) -> None:
        """Something large has been copied: whoever waits for jobs meanwhile has to look."""
        self._put(lambda: None)

    def _advance(self, nbytes: int) -> None:
        self.pulse.copied += nbytes
        self.pulse.beat = time.monotonic()

    def _guarded(self, key: str, work: Callable[[], ShardStimulus | None]) -> None:
        """Do the work on a shard and tell what came of it, whatever that is; None: nothing yet."""
        outcome: ShardStimulus | None
        try:
            outcome = work()
        except _Later:
            raise
        except ShardNotReady as unready:
            outcome = NotReady(key=key, now=time.monotonic(), why=str(unready))
        except ShardRejected as rejected:
            outcome = _refused(key, rejected.reason, rejected.detail)
        except Exception as error:
            log.exception("loader.defect", shard=key)
            outcome = _refused(key, Reason.INTERNAL_ERROR, f"{type(error).__name__}: {error}")
        if outcome is not None:
            self._sink(outcome)

    def _inspect(self, key: str, source: Source) -> ShardStimulus:
        payload = source.open()
        try:
            header = payload.header
            try:
                plan = self.model.table.plan(
                    {entry.name: TensorMeta(entry.dtype, entry.shape) for entry in header.tensors}
                )
            except WeightsError as error:
                raise ShardRejected(*_offence(error)) from error
            if not plan.slots and not plan.skipped:
                raise ShardRejected(Reason.NO_KNOWN_TENSOR, "the shard holds no tensor at all")
            version = reconcile([*source.claims, *versions_of_metadata(header.metadata)])
            run = run_of(source.run, header.metadata)
            xxh3 = digest_of(source.xxh3, header.metadata)
        except BaseException:
            payload.close()
            raise
        self._open[key] = _Open(payload, plan, xxh3)
        return Inspected(
            key=key,
            now=time.monotonic(),
            version=version,
            slots=tuple(index for slot in plan.slots for index in slot.indices),
            skipped=len(plan.skipped),
            nbytes=header.nbytes,
            run=run,
            identity=payload.identity,
            content=payload.identity and payload.identity.content,
        )

    def _list(self, key: str, source: ListSource) -> ShardStimulus:
        version = reconcile(source.claims)
        slots = None
        if source.read is not None:
            found, unknown = self.model.table.locate(source.read())
            if unknown:
                more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
                detail = f"it lists {printable(unknown[0], 100)}{more}: no tensor of this model has this name"
                raise ShardRejected(Reason.MALFORMED_INDEX, detail)
            slots = tuple(index for slot in found for index in slot.indices)
        return Listed(key=key, now=time.monotonic(), version=version, slots=slots, what=source.what)

    def _place(self, key: str, name: str, version: int | None) -> ShardStimulus | None:
        begin = time.monotonic()
        shard = self._open[key]
        payload = shard.payload
        self._wait_for_streams(shard.plan)
        if isinstance(payload, HeadPayload):
            return self._open_stream(key, name, version, shard)
        in_place = self.model.staging.in_place
        if in_place and self.model.serving and not payload.proven:
            payload = self._buffered(payload)
        if in_place:
            self._look_first(payload, shard)
        entries = {entry.name: entry for entry in payload.header.tensors}
        differing = self._copier.compare(payload, _copies(entries, self.model.repeats(shard.plan, version)))
        if differing:  # found before anything gives way to this shard
            raise ShardRejected(Reason.CONFLICT, str(ConflictError(version or 0, differing)))
        update = self._begin(shard.plan, version, name)
        self._tell_expired(update.expired)
        try:
            with update.writing(GATE_TIMEOUT), self._written(update) as beside:
                for one_round in update.rounds:
                    self._copier.run(payload, _copies(entries, one_round), beside)
                if not in_place:
                    self._check_digest(payload, shard.xxh3)
                payload.verify()
                report = self.model.finish(update)
        except BaseException as error:  # noqa: BLE001 - the update has to be given up whatever happened
            return self._failed(key, name, error, self._indices(self.model.abort(update)))
        return self._placed(key, version, shard.plan, report, begin)

    def _begin(self, plan: LoadPlan, version: int | None, name: str) -> Update:
        """Begin an update; with two generations, in the stage of its version."""
        staging = self.model.staging
        try:
            if not staging.in_place and not staging.is_open:
                self.model.stage(version)
            return self.model.begin(plan, version, name)
        except FusionCacheFull as error:
            raise ShardRejected(Reason.FUSION_CACHE_FULL, str(error)) from error
        except StaleError as error:
            raise ShardRejected(Reason.STALE_VERSION, str(error)) from error
        except StagingError as error:
            raise ShardRejected(Reason.MODEL_BUSY, str(error)) from error

    def _check_digest(self, payload: Payload, expected: str | None) -> None:
        if expected is not None and (found := self._copier.digest(payload)) != expected:
            raise ShardRejected(Reason.DIGEST_MISMATCH, f"its data has xxh3 {found}, the sender says {expected}")

    def _failed(self, key: str, name: str, error: BaseException, unfilled: tuple[int, ...]) -> Refused:
        """Say what became of an update that was given up."""
        match error:
            case ShardRejected():
                return _refused(key, error.reason, error.detail, unfilled)
            case TimeoutError():
                return _refused(key, Reason.MODEL_BUSY, str(error), unfilled)
            case Exception():
                log.error("loader.defect", shard=name, exc_info=error)
                return _refused(key, Reason.INTERNAL_ERROR, f"{type(error).__name__}: {error}", unfilled)
            case _:
                raise error

    def _buffered(self, payload: Payload) -> Payload:
        """Read an unproven shard as a whole and prove it, before a byte of it reaches live weights."""
        self._require_room(payload.header.nbytes)
        return BytesPayload.copy_of(payload)

    def _require_room(self, nbytes: int) -> None:
        if nbytes > self._unleased_bytes:
            raise ShardRejected(
                Reason.TOO_LARGE,
                f"{nbytes} bytes that are not proven have to be gathered in memory first; the limit is "
                f"{self._unleased_bytes} (limits.unleased_bytes). Split the shard, or run as the files' owner",
            )

    def _placed(self, key: str, version: int | None, plan: LoadPlan, report: LoadReport, begin: float) -> Placed:
        now = time.monotonic()
        waiting = {half.tensor for half in report.pending if half.version == version}
        table = self.model.table
        in_place = [name for name in (*report.loaded, *report.duplicates) if name not in waiting]
        return Placed(
            key=key,
            now=now,
            arrived=tuple(index for name in in_place for index in table.slot(name).indices),
            fused=report.fused,
            waiting={slot.index: slot.name for slot in plan.slots if slot.name in waiting},
            blocked=tuple(slot.index for slot in plan.slots if slot.name in waiting and self.model.blocked(slot.name)),
            pending=_pending(self.model, now),
            duplicates=len(report.duplicates),
            serving=self.model.serving,
            filled=self._filled(),
            seconds=now - begin,
        )

    def _filled(self) -> int:
        """Slots that hold weights: of the live generation, or of the first that is being filled."""
        return self.model.generation.filled

    # ------------------------------------------------------------------------ shards that come in chunks

    def _open_stream(self, key: str, name: str, version: int | None, shard: _Open) -> ShardStimulus | None:
        """Make ready for a shard's bytes, and ask for them.

        They go straight into staged rows. Where they can't (live rows are written whole shards at a time, and a
        quantised weight needs its scale first) they are gathered in memory, within the limit for unproven files.
        """
        header, model = shard.payload.header, self.model
        direct = not model.staging.in_place and not any(
            slot.group is not None and self._computed(slot.group) for slot in shard.plan.slots
        )
        if direct:
            return self._receive(key, self._stream(name, version, shard))
        self._require_room(header.nbytes)
        return self._receive(key, _Gathering(key, name, version, shard, np.empty(header.nbytes, dtype=np.uint8)))

    def _receive(self, key: str, stream: Stream | _Gathering) -> ShardStimulus | None:
        self._streams[key] = stream
        if not stream.complete:
            self._sink(Wanted(key))
            return None
        return self._end_of_stream(key)

    def _stream(self, name: str, version: int | None, shard: _Open) -> Stream:
        header = shard.payload.header
        update = self._begin(shard.plan, version, name)
        entries = {entry.name: entry for entry in header.tensors}
        compared, new = _copies(entries, update.compared), _copies(entries, update.destinations)
        return Stream(shard.plan, version, header.nbytes, compared, shard.xxh3, update=update, new=new)

    def _feed(self, key: str, data: Bytes, slot: int | None, frame: object) -> None:
        stream = self._streams.get(key)
        if stream is not None:
            try:
                stream.feed(data)
                self._advance(data.size)
                stream.heard = time.monotonic()
            except Exception as error:  # noqa: BLE001 - whatever it was, it is the end of this shard alone
                self._fail(key, error)
                stream = None
        del frame  # its memory may go now
        self._sink(Consumed(key, slot))
        if stream is not None and stream.complete:
            self._guarded(key, lambda: self._end_of_stream(key))

    def _end_of_stream(self, key: str) -> ShardStimulus | None:
        """All bytes have come."""
        stream = self._streams[key]
        if isinstance(stream, _Gathering):
            del self._streams[key]
            stream.shard.payload = BytesPayload(stream.shard.payload.header, stream.data)
            return self._place(key, stream.name, stream.version)
        try:
            stream.finish()
            if stream.update is None:
                del self._streams[key]
                return self._found_alike(key, stream.plan, stream.begun)
            report = self.model.finish(stream.update)
        except Exception as error:  # noqa: BLE001 - the update has to be given up whatever happened
            self._fail(key, error)
            return None
        stream.close()
        del self._streams[key]
        return self._placed(key, stream.version, stream.plan, report, stream.begun)

    def _fail(self, key: str, error: Exception) -> None:
        """Give up a shard that comes in chunks, and tell why."""
        if key in self._streams:
            unfilled = self._abort_stream(key)
            self._sink(self._failed(key, key, error, unfilled))

    def _abort_stream(self, key: str) -> tuple[int, ...]:
        """Give up a shard that comes in chunks; return the slots that hold nothing now."""
        stream = self._streams.pop(key, None)
        if not isinstance(stream, Stream) or stream.update is None:
            return ()
        stream.close()
        return self._indices(self.model.abort(stream.update))

    def _indices(self, tensors: Iterable[str]) -> tuple[int, ...]:
        return tuple(index for tensor in tensors for index in self.model.table.slot(tensor).indices)

    def _end_streams(self, version: int | None, error: ShardRejected) -> None:
        """A version's stage ends: what still comes of it has no place any more."""
        for key in [key for key, stream in self._streams.items() if stream.version == version]:
            self._fail(key, error)

    def _expire_streams(self, timeout: float) -> None:
        for key, stream in list(self._streams.items()):
            silent = time.monotonic() - stream.heard
            if silent > timeout:
                detail = f"its client has sent nothing for {silent:.0f} s (socket.stream_timeout)"
                self._fail(key, ShardRejected(Reason.CLIENT_SILENT, detail))

    def _wait_for_streams(self, plan: LoadPlan) -> None:
        """Two must not write the same rows: who comes second waits its turn, or apart if a client may take long."""

        def shared(taken: frozenset[int]) -> Slot | None:
            return next((slot for slot in plan.slots if not taken.isdisjoint(slot.indices)), None)

        if any(shared(taken) for taken in self._writing):
            raise _Later
        for stream in self._streams.values():
            if isinstance(stream, Stream) and (slot := shared(stream.slots)):
                raise ShardNotReady(f"another client is bringing {slot.name} at this moment")

    @contextlib.contextmanager
    def _written(self, update: Update) -> Iterator[Callable[[threading.Event], None] | None]:
        """While a shard is copied: what may be done beside it.

        Others may be placed meanwhile, in other rows of the same stage. Not in place, where forward passes wait; and
        not beside parts that are computed with, which find their partners at the beginning of their update.
        """
        plain = all(d.slot.group is None or not self._computed(d.slot.group) for d in update.destinations)
        if self.model.staging.in_place or not plain:
            yield None
            return
        self._writing.append(frozenset(index for d in update.destinations for index in d.slot.indices))
        try:
            yield self._meanwhile
        finally:
            self._writing.pop()

    def _computed(self, group: int) -> bool:
        return self.model.table.groups[group].computed

    # ------------------------------------------------------------------------------------- versions

    def _compare(self, key: str, version: int | None) -> ShardStimulus | None:
        """The version is live: the same bytes again are fine, anything else is refused."""
        begin = time.monotonic()
        shard = self._open[key]
        destinations, new = self.model.live_repeats(shard.plan, version)
        if new:
            detail = f"version {version} is live, and was complete without {new[0]}: send it under a new version"
            raise ShardRejected(Reason.VERSION_CLOSED, detail)
        entries = {entry.name: entry for entry in shard.payload.header.tensors}
        copies = _copies(entries, destinations)
        if isinstance(shard.payload, HeadPayload):
            return self._receive(key, Stream(shard.plan, version, shard.payload.header.nbytes, copies, shard.xxh3))
        differing = self._copier.compare(shard.payload, copies)
        if differing:
            raise ShardRejected(Reason.CONFLICT, str(ConflictError(version or 0, differing)))
        shard.payload.verify()
        return self._found_alike(key, shard.plan, begin)

    def _found_alike(self, key: str, plan: LoadPlan, begin: float) -> Placed:
        """All of a shard of the live version was there already."""
        now = time.monotonic()
        return Placed(
            key=key,
            now=now,
            arrived=tuple(index for slot in plan.slots for index in slot.indices),
            fused=(),
            waiting={},
            pending=_pending(self.model, now),
            duplicates=len(plan.slots),
            serving=self.model.serving,
            filled=self._filled(),
            seconds=now - begin,
        )

    def _verify(self, version: int | None) -> Verified:
        begin = time.monotonic()

        def failed(why: str) -> Verified:
            return Verified(now=time.monotonic(), version=version, failure=printable(why))

        try:
            closed = ShardRejected(Reason.VERSION_CLOSED, f"version {version} was complete without it")
            self._end_streams(version, closed)
            carried = self.model.carry(version)
            in_place = self.model.staging.in_place  # then every shard was searched before it was applied
            if self._checks.finite and not in_place:
                found = self.model.not_finite()
                if found:
                    log.error("version.not_finite", version=version, tensors=[str(one) for one in found[:100]])
                    more = f" and {len(found) - 1} more tensors, see the log" if len(found) > 1 else ""
                    return failed(f"not finite: {found[0]}{more}")
            tokens: tuple[int, ...] = ()
            fingerprint = ""
            if self._checks.canary and version is not None:
                canary = self.model.canary(self._checks.canary)
                if not canary.finite:
                    return failed("the canary's logits are not finite")
                tokens, fingerprint = canary.tokens, canary.fingerprint
        except (StagingError, TimeoutError) as error:
            return failed(str(error))
        except Exception as error:
            log.exception("loader.defect", version=version)
            return failed(f"a defect of ours, see the log: {type(error).__name__}: {error}")
        return Verified(
            now=time.monotonic(),
            version=version,
            fused=carried.fused,
            carried=carried.slots,
            carried_bytes=carried.nbytes,
            tokens=tokens,
            fingerprint=fingerprint,
            seconds=time.monotonic() - begin,
        )

    def _commit(self, version: int | None) -> Committed:
        try:
            leased = self.model.commit(version)
        except Exception as error:
            log.exception("loader.defect", version=version)
            why = printable(f"a defect of ours, see the log: {type(error).__name__}: {error}")
            return Committed(now=time.monotonic(), version=version, leased=0, failure=why)
        return Committed(now=time.monotonic(), version=version, leased=leased)

    def _rollback(self, ticket: str) -> RolledBack:
        try:
            leased = self.model.rollback()
        except StagingError as error:
            return RolledBack(now=time.monotonic(), ticket=ticket, failure=str(error))
        except Exception as error:  # the order has to be answered
            log.exception("loader.defect")
            return RolledBack(now=time.monotonic(), ticket=ticket, failure=str(error))
        return RolledBack(now=time.monotonic(), ticket=ticket, leased=leased)

    def _look_first(self, payload: Payload, shard: _Open) -> None:
        """In place there is no staged copy to look at: the shard itself is, before a byte of it reaches live rows."""
        self._check_digest(payload, shard.xxh3)
        if not self._checks.finite:
            return
        entries = {entry.name: entry for entry in payload.header.tensors}
        found = self._copier.search(payload, [entries[slot.name] for slot in shard.plan.slots])
        if found:
            raise ShardRejected(Reason.NOT_FINITE, f"NaN or infinity in {', '.join(found[:5])}")

    def _tell_expired(self, halves: Sequence[ExpiredHalf]) -> None:
        if not halves:
            return
        now = time.monotonic()
        told = tuple(
            events.FusionExpired(
                version=half.version,
                layer=half.layer,
                tensor=half.tensor,
                age=now - half.since,
                nbytes=half.nbytes,
                cause=half.cause,
                message=f"layer {half.layer}: {half.tensor} given up after {now - half.since:.0f} s "
                f"({half.cause}); its partner did not come",
            )
            for half in halves
        )
        slots = tuple((half.version, self.model.table.slots[half.tensor].index) for half in halves)
        self._sink(Expired(now=now, halves=told, slots=slots, pending=_pending(self.model, now)))

    def _close(self, key: str) -> None:
        self._abort_stream(key)
        shard = self._open.pop(key, None)
        if shard is not None:
            shard.payload.close()


def _copies(entries: Mapping[str, TensorEntry], destinations: Iterable[Destination]) -> list[Copy]:
    return [
        Copy(entry.start, entry.stop - entry.start, entry.dtype, destination)
        for destination in destinations
        for entry in (entries[destination.slot.name],)
    ]


def _pending(model: DeepseekV2ForCausalLM, now: float) -> tuple[wire.PendingHalf, ...]:
    return tuple(
        wire.PendingHalf(
            version=half.version,
            layer=half.layer,
            tensor=half.tensor,
            missing=half.missing,
            age=now - half.since,
            nbytes=half.nbytes,
            owned=half.owned,
        )
        for half in model.pending()
    )


def _refused(key: str, reason: Reason, detail: str, unfilled: tuple[int, ...] = ()) -> Refused:
    transient = reason in {Reason.CHANGED_WHILE_READING, Reason.MODEL_BUSY}
    return Refused(key=key, now=time.monotonic(), reason=reason, detail=detail, transient=transient, unfilled=unfilled)


def _offence(error: WeightsError) -> tuple[Reason, str]:
    """Put a list of offenders into one reason and one line; the whole list goes to the log."""
    offenders = error.offenders
    log.warning("shard.offenders", offenders=[f"{o.name}: {o.detail}" for o in offenders[:50]], count=len(offenders))
    first = offenders[0]
    more = f" (and {len(offenders) - 1} more, see the log)" if len(offenders) > 1 else ""
    return Reason(first.kind), f"{printable(first.name, 100)}: {first.detail}{more}"
