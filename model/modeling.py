"""The resident model: its weights, the forward pass over them, and the loading of new ones."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from . import decoder
from .cache import LatentCache
from .config import DeepseekV2Config
from .errors import ConflictError, NotReadyError, Offender, WeightsError
from .finite import NotFinite, not_finite
from .fusion import ExpiredHalf, FusionCache, PendingHalf
from .gate import Gate
from .generation import SAFETENSORS_DTYPES, Generation, digest, settle, storage_layout
from .loading import Destination, LoadReport, Update, Weights, alone, groups_whole, place_alone, repeats
from .names import LoadPlan, SlotTable, TensorMeta, names_by_layer
from .rope import Rope
from .staging import Carried, Staging, StagingError
from .weights import ModelWeights

GATE_TIMEOUT = 300.0
"""Seconds that a forward pass waits for an update in place, or the other way round."""


class Lease(NamedTuple):
    """The weights that a request began with, and keeps until it has ended."""

    generation: int
    """Which one."""
    version: int | None
    """What it is called; None is the rolling version."""


class Canary(NamedTuple):
    """What the staged weights make of a few tokens."""

    tokens: tuple[int, ...]
    """The most likely next tokens after the last one, the best first."""
    fingerprint: str
    """A hash of the float32 logits of all positions: alike only for alike weights, on the same kind of machine."""
    finite: bool


class DeepseekV2ForCausalLM:
    """A DeepSeek-V2 or V3 model whose weights can be loaded in any number of calls, in any order.

    Args:
        config: The model's numbers.
        device: Where the weights lie.
        dtype: Of the parameters; None: as the config says. e_score_correction_bias stays float32.
        keep_fp8: Whether fp8 weights stay so, with their scales, and are dequantised block by block in the forward
            pass; else they are stored dequantised.
        generations: Sets of weights in memory. 1: loading changes the weights in place, between forward passes.
            2: loading fills the one that is not live; see `stage`, `carry`, `commit`.
        fusion_max_bytes: Bound of the halves that wait in copies, in bytes.
        fusion_max_age: Seconds after which a waiting half is given up.
        clock: Tells the time in seconds.

    Loading is for one thread at a time; forward passes may run in others meanwhile.
    """

    def __init__(
        self,
        config: DeepseekV2Config,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        *,
        keep_fp8: bool = True,
        generations: Literal[1, 2] = 1,
        fusion_max_bytes: int = 2 << 30,
        fusion_max_age: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config.require_supported()
        self.config = config
        self.device = torch.device(device)
        self.table = SlotTable.build(config, None if dtype is None else SAFETENSORS_DTYPES[dtype], keep_fp8=keep_fp8)
        self.staging = Staging([Generation(self.table, self.device) for _ in range(generations)])
        self.fusion = FusionCache(self.table.groups, self.device, fusion_max_bytes, fusion_max_age, clock)
        self.gate = Gate()
        self._clock = clock
        self._weights = [
            ModelWeights.from_parameters(config, generation.parameters) for generation in self.staging.generations
        ]
        self._rope = Rope(config, self.device)
        self._serving = False
        self._untold: list[ExpiredHalf] = []

    @staticmethod
    def nbytes(config: DeepseekV2Config, dtype: torch.dtype | None = None, *, keep_fp8: bool = True) -> int:
        """Return how many bytes one generation of a model takes, without allocating any."""
        table = SlotTable.build(config, None if dtype is None else SAFETENSORS_DTYPES[dtype], keep_fp8=keep_fp8)
        return storage_layout(table)[1]

    # ------------------------------------------------------------------------------------- serving

    @property
    def serving(self) -> bool:
        """Whether it answers: something is live, and (in place) whole at this moment."""
        return self._serving

    ready = serving

    @property
    def generation(self) -> Generation:
        """The generation that answers; before there is one, the one that is being filled."""
        return self.staging.live or self.staging.staged

    @property
    def dtype(self) -> torch.dtype:
        """The parameters' dtype."""
        return self._weights[0].embed_tokens.dtype

    def missing_summary(self) -> str:
        """Say how many slots of which layers are missing, and which pairs are not whole."""
        missing = names_by_layer(self.generation.missing())
        total = len(self.table.slots)
        count = sum(map(len, missing.values()))
        layers = [layer for layer in missing if layer is not None]
        parts = [f"layers {_ranges(layers)}"] if layers else []
        parts += missing.get(None, [])
        text = f"{count} of {total} slots are missing ({', '.join(parts)})" if count else "all slots are filled"
        broken = sorted({half.layer for half in alone(self.generation)})
        return f"{text}; the pairs of layers {_ranges(broken)} are not whole" if broken else text

    @contextlib.contextmanager
    def lease(self) -> Iterator[Lease]:
        """Keep the live weights as they are until the end; others may go live meanwhile.

        Raises:
            NotReadyError: Nothing is live yet.
        """
        taken = self.staging.leases.take()
        if taken is None:
            raise NotReadyError(f"the model is not ready: {self.missing_summary()}")
        index, token = taken
        try:
            yield Lease(index, self.staging.generations[index].version)
        finally:
            # On a GPU the host runs ahead of the kernels that it has begun, and they still read these weights. If they
            # hang, so does the lease: nobody may write what they may be reading.
            settle(self.device)
            self.staging.leases.end(index, token)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Keep updates in place off during a forward pass, until the device has done it."""
        with self.gate.reading(GATE_TIMEOUT):
            try:
                yield
            finally:
                if self.staging.in_place:  # with two, the lease keeps them off
                    settle(self.device)

    @torch.inference_mode()
    def __call__(self, token_ids: Tensor) -> Tensor:
        """Return the logits of whole sequences.

        Args:
            token_ids: int64 [batch, tokens].

        Returns:
            float32 [batch, tokens, vocab_size].

        Raises:
            NotReadyError: Weights are missing; the message counts them by layer.
        """
        cache = self._cache(token_ids.shape[0], token_ids.shape[1])
        with self.lease() as lease, self._reading():
            return self._forward(lease.generation, token_ids, cache)

    @torch.inference_mode()
    def generate(
        self,
        token_ids: Tensor,
        max_new_tokens: int = 24,
        *,
        lease: Lease | None = None,
        deadline: float | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Tensor:
        """Continue sequences greedily, all with the weights that were live at the beginning; see `decoder.generate`.

        Args:
            token_ids: int64 [batch, tokens].
            max_new_tokens: How many to add at most.
            lease: One that the caller holds, to know the version; None: one of its own.
            deadline: On `time.monotonic`.
            cancelled: Asked before each token.

        Returns:
            int64 [batch, tokens + new]: the prompts and what follows.

        Raises:
            NotReadyError: Weights are missing.
            TimeoutError: The deadline passed, or it was cancelled.
        """
        if lease is None:
            with self.lease() as own:
                return self.generate(token_ids, max_new_tokens, lease=own, deadline=deadline, cancelled=cancelled)
        cache = self._cache(token_ids.shape[0], token_ids.shape[1] + max_new_tokens)
        index = lease.generation
        return decoder.generate(
            lambda new: self._forward(index, new, cache)[:, -1],
            token_ids,
            max_new_tokens=max_new_tokens,
            eos_token_id=self.config.eos_token_id,
            hold=self._reading,
            deadline=deadline,
            cancelled=cancelled,
        )

    def digest(
        self, lease: Lease, *, deadline: float | None = None, cancelled: Callable[[], bool] = lambda: False
    ) -> tuple[str, int]:
        """Return a digest of all parameters, and how many bytes they have; see `generation.digest`.

        Args:
            lease: On the weights to be read.
            deadline: On `time.monotonic`.
            cancelled: Asked now and then.

        Raises:
            TimeoutError: The deadline passed, it was cancelled, or an update in place kept it out.
        """
        with self.gate.reading(GATE_TIMEOUT):
            return digest(self.staging.generations[lease.generation], deadline, cancelled)

    def _cache(self, batch: int, capacity: int) -> LatentCache:
        return LatentCache(self.config, batch, capacity, self.dtype, self.device)

    def _forward(self, index: int, token_ids: Tensor, cache: LatentCache) -> Tensor:
        # An update in place that failed gives the gate back before it is given up.
        # With two, a lease is proof enough: a generation is leased only once it is whole.
        if self.staging.in_place and (not self._serving or self.generation.torn):
            raise NotReadyError(f"the model is not ready: {self.missing_summary()}")
        return decoder.forward(self.config, self._weights[index], self._rope, token_ids, cache)

    # ------------------------------------------------------------------------------------- versions

    def stage(self, version: int | None) -> None:
        """Begin to stage a version; in place, nothing happens. Raises StagingError; see `Staging.begin`."""
        self.staging.begin(version)

    def carry(self, version: int | None) -> Carried:
        """The version has brought all that it will: let what is live stand in for the rest.

        Raises:
            StagingError: Slots are missing, and nothing is live yet; or quantised weights that are stored dequantised
                came without their scales, or scales without them: no part of these can be carried over.
            TimeoutError: In place: a forward pass did not end.
        """
        self.staging.of(version)
        stuck = [half for half in self.fusion.pending() if half.version == version]
        stuck = [half for half in stuck if self.blocked(half.tensor)]
        if stuck:
            told = "; ".join(f"{half.tensor} lacks {', '.join(half.missing)}" for half in stuck[:5])
            raise StagingError(f"{len(stuck)} tensors can't be placed without those that did not come: {told}")
        if not self.staging.in_place:
            return self.staging.carry()
        begin = time.monotonic()
        try:
            layers, nbytes = place_alone(self._state(version), version, GATE_TIMEOUT)
        finally:
            self._reconsider()
        return Carried(0, nbytes, time.monotonic() - begin, layers)

    def blocked(self, tensor: str) -> bool:
        """Whether a tensor that waits can't be placed before its partners: it has to be computed with them."""
        group = self.table.slot(tensor).group
        return group is not None and self.table.groups[group].computed

    def not_finite(self) -> list[NotFinite]:
        """Return the tensors of the staged version that hold NaN or infinity. In place: of all weights."""
        slots = self.table.slots.values() if self.staging.in_place else self.staging.brought()
        return not_finite(self.staging.staged, slots)

    @torch.inference_mode()
    def canary(self, token_ids: Sequence[int], best: int = 4) -> Canary:
        """Run a few tokens through the staged weights, which must be complete."""
        tokens = torch.tensor([list(token_ids)], device=self.device)
        index = self.staging.generations.index(self.staging.staged)
        cache = self._cache(1, len(token_ids))
        with self.gate.reading(GATE_TIMEOUT):
            logits = decoder.forward(self.config, self._weights[index], self._rope, tokens, cache)[0]
        leading = logits[-1].topk(min(best, logits.shape[-1])).indices.tolist()
        raw = logits.cpu().contiguous().numpy().tobytes()
        return Canary(tuple(leading), hashlib.blake2b(raw, digest_size=8).hexdigest(), bool(logits.isfinite().all()))

    def commit(self, version: int | None) -> int:
        """Make the staged version live; it must be complete. Returns how many leases the one before still has."""
        if self.staging.in_place:
            self.generation.version = version
            self.staging.end(version)
            return 0
        self.staging.of(version)
        held = self.staging.flip()
        self._serving = True
        self._untold += self.fusion.drop(version)
        return held

    def rollback(self) -> int:
        """Make the version before live again, byte for byte. Returns how many leases the other still has.

        Raises:
            StagingError: It is not there any more.
        """
        if self.staging.in_place:
            raise StagingError("there is one generation only: a version that is applied in place can't be taken back")
        version, was_open = self.staging.version, self.staging.is_open
        held = self.staging.flip_back()
        if was_open:  # nothing of it was in its rows, or there would be nothing to go back to
            self._untold += self.fusion.drop(version)
        return held

    def drop_version(self, version: int | None) -> tuple[ExpiredHalf, ...]:
        """Give up what a version has staged, and its waiting halves; what is live is not touched."""
        staging = self.staging
        rows: list[PendingHalf] = []
        if not staging.in_place and staging.is_open and staging.version == version:
            rows = alone(staging.staged, staging.stage)
            staging.drop()
        told = (ExpiredHalf(version, h.layer, h.tensor, h.since, h.nbytes, "superseded") for h in rows)
        return (*told, *self.fusion.drop(version))

    def forget_numbers(self) -> None:
        """A trainer counts anew: whatever it sends now is newer than what is there.

        Numbered halves that wait, and a numbered version that is being staged, are given up: what comes under their
        numbers from now on is not theirs. The next `sweep` tells of them.
        """
        over = {half.version for half in self.pending() if half.owned}
        if self.staging.is_open:
            over.add(self.staging.version)
        for version in over - {None}:
            self._untold += self.drop_version(version)
        self.staging.forget_numbers()

    # ------------------------------------------------------------------------------------- loading

    def load_weights(
        self, pairs: Iterable[tuple[str, Tensor]], version: int | None = None, source: str = "load_weights"
    ) -> LoadReport:
        """Load any part of a checkpoint: any subset, in any number of calls, in any order.

        Args:
            pairs: (checkpoint name, tensor). All of them are checked before the first is copied. A name that
                comes twice: the later one wins; in a numbered version both must have the same bytes.
            version: The trainer's step; None is the rolling version.
            source: What to call these tensors in stamps.

        Returns:
            What was loaded, fused and skipped, and all halves that wait now.

        Raises:
            WeightsError: Unknown names, wrong shapes or dtypes; all are listed.
            ConflictError: The version had brought other bytes for some of the slots.
            StaleError: A newer version has filled some of the slots.
            FusionCacheFull: Halves that have to wait are larger than the cache. In each case nothing changed.
            TimeoutError: A forward pass did not end. The weights are as before; halves that were given up to make
                room are told by the next `sweep`.
        """
        pairs = list(pairs)
        tensors = dict(pairs)
        plan = self._plan(pairs)
        opened = not self.staging.in_place and not self.staging.is_open
        if opened:
            self.stage(version)
        try:
            if version is not None:
                self._refuse_changes(repeats(self._state(version), plan, version), version, pairs, tensors)
            update = self.begin(plan, version, source)
        except BaseException:
            if opened:
                self.staging.drop()
            raise
        try:
            with update.writing(GATE_TIMEOUT):
                for destination in update.destinations:
                    destination.write(0, tensors[destination.slot.name].reshape(-1).to(self.device))
                settle(self.device)
                return self.finish(update)
        except BaseException:
            self._untold += update.expired
            self.abort(update)
            raise

    def repeats(self, plan: LoadPlan, version: int | None) -> tuple[Destination, ...]:
        """Return what this version has brought of these tensors already; changes nothing. See `loading.repeats`."""
        if not self.staging.in_place and not self.staging.is_open:
            return ()
        return repeats(self._state(version), plan, version)

    def live_repeats(self, plan: LoadPlan, version: int | None) -> tuple[tuple[Destination, ...], tuple[str, ...]]:
        """Return the values that tensors of the live version must have, and the names that it did not bring."""
        live = self.generation
        found, new = [], []
        for slot in plan.slots:
            stamps = live.of_stack(slot) if slot.count > 1 else [live.stamps[slot.index]]
            if all(stamp is not None and stamp.version == version for stamp in stamps):
                found.append(Destination.of_rows(live, slot))
            else:
                new.append(slot.name)
        return tuple(found), tuple(new)

    def begin(self, plan: LoadPlan, version: int | None, source: str, *, again: bool = False) -> Update:
        """Begin an update; end it by `finish` or `abort`. See `Update` for its arguments and for what it raises."""
        serving = self._serving and self.staging.in_place
        return Update(self._state(version), plan, version, source, serving=serving, again=again)

    def finish(self, update: Update) -> LoadReport:
        """End an update whose destinations have been filled, within its `writing`."""
        report = update.finish()
        self._reconsider()
        return report

    def abort(self, update: Update) -> tuple[str, ...]:
        """Give an update up; return the names of the slots that hold nothing now."""
        unfilled = update.abort()
        self._reconsider()
        return unfilled

    def sweep(self) -> tuple[ExpiredHalf, ...]:
        """Give up the halves that have waited too long; return them with those that no report has told."""
        untold, self._untold = tuple(self._untold), []
        return (*untold, *self.fusion.expire(), *self._expire_staged())

    def _expire_staged(self) -> tuple[ExpiredHalf, ...]:
        """The rolling version's halves that lie in staged rows: it goes live only once none waits, so none may stay.

        A numbered version may well bring one half only; it ends by its manifest.
        """
        staging = self.staging
        if staging.in_place or not staging.is_open or staging.version is not None or staging.live is None:
            return ()
        limit = self._clock() - self.fusion.max_age
        old = [half for half in alone(staging.staged, staging.stage) if half.since <= limit]
        staging.undo([self.table.slots[half.tensor] for half in old])
        return tuple(ExpiredHalf(None, half.layer, half.tensor, half.since, half.nbytes, "age") for half in old)

    def pending(self) -> tuple[PendingHalf, ...]:
        """Return all halves that wait. For the thread that loads."""
        staging = self.staging
        if not staging.in_place and not staging.is_open:  # a generation that was rolled back has its stage's stamps
            return tuple(self.fusion.pending())
        return (*self.fusion.pending(), *alone(staging.staged, None if staging.in_place else staging.stage))

    def _state(self, version: int | None) -> Weights:
        staging = self.staging
        return Weights(
            staging.staged, self.fusion, self.gate, self._clock, staging.of(version), in_place=staging.in_place
        )

    def _reconsider(self) -> None:
        """After an update in place: does the model answer? With two generations, only a commit changes that."""
        staged = self.staging.staged
        if self.staging.in_place:
            self._serving = staged.filled == len(self.table.slots) and groups_whole(staged)
            if self._serving and self.staging.live is None:
                self.staging.leases.flip(0)
        staged.torn = False  # last: a forward pass may look at both at any time

    def _plan(self, pairs: list[tuple[str, Tensor]]) -> LoadPlan:
        """Check all tensors, also those whose name comes again in the same call."""
        metas = [(n, TensorMeta(SAFETENSORS_DTYPES.get(t.dtype, str(t.dtype)), tuple(t.shape))) for n, t in pairs]
        last = dict(metas)
        offenders: set[Offender] = set()
        for name, meta in metas:
            if meta != last[name]:
                try:
                    self.table.plan({name: meta})
                except WeightsError as error:
                    offenders.update(error.offenders)
        try:
            plan = self.table.plan(last)
        except WeightsError as error:
            raise WeightsError((*error.offenders, *offenders)) from None
        if offenders:
            raise WeightsError(tuple(offenders))
        return plan

    def _refuse_changes(
        self,
        came: tuple[Destination, ...],
        version: int,
        pairs: list[tuple[str, Tensor]],
        tensors: dict[str, Tensor],
    ) -> None:
        """Refuse other bytes for what this version has brought already, before or in this very call."""
        changed = {
            name
            for name, tensor in pairs
            if self.table.skip_reason(name) is None and tensor is not tensors[name] and not _same(tensor, tensors[name])
        }
        changed |= {d.slot.name for d in came if not d.holds(0, tensors[d.slot.name].reshape(-1).to(self.device))}
        if changed:
            raise ConflictError(version, tuple(sorted(changed)))


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bytes: NaN equals itself, and 0 is not -0."""
    one, other = one.reshape(-1).contiguous(), other.reshape(-1).contiguous()
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _ranges(numbers: Iterable[int]) -> str:
    """Write numbers compactly: 0-2, 5."""
    runs = itertools.groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    spans = [[number for _, number in run] for _, run in runs]
    return ", ".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans)
