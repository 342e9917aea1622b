"""The resident model: its weights, the forward pass over them, and the loading of new ones."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from . import decoder
from .cache import LatentCache
from .config import DeepseekV2Config
from .errors import ConflictError, NotReadyError, Offender, WeightsError
from .fusion import ExpiredHalf, FusionCache, PendingHalf
from .gate import Gate
from .generation import SAFETENSORS_DTYPES, Generation
from .loading import Destination, LoadReport, Update, Weights, alone, groups_whole, pending, repeats
from .names import LoadPlan, SlotTable, TensorMeta, names_by_layer
from .rope import Rope
from .weights import ModelWeights

GATE_TIMEOUT = 300.0
"""Seconds that a forward pass waits for an update in place, or the other way round."""


class DeepseekV2ForCausalLM:
    """A DeepSeek-V2 or V3 model whose weights can be loaded in any number of calls, in any order.

    Args:
        config: The model's numbers.
        device: Where the weights lie.
        dtype: Of the parameters; None: as the config says. e_score_correction_bias stays float32.
        keep_fp8: Whether fp8 weights stay so, with their scales, and are dequantised block by block in the forward
            pass; else they are stored dequantised.
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
        fusion_max_bytes: int = 2 << 30,
        fusion_max_age: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config.require_supported()
        self.config = config
        self.device = torch.device(device)
        self.table = SlotTable.build(config, None if dtype is None else SAFETENSORS_DTYPES[dtype], keep_fp8=keep_fp8)
        self.generation = Generation(self.table, self.device)
        self.fusion = FusionCache(self.table.groups, self.device, fusion_max_bytes, fusion_max_age, clock)
        self.gate = Gate()
        self._state = Weights(self.generation, self.fusion, self.gate, clock)
        self._weights = ModelWeights.from_parameters(config, self.generation.parameters)
        self._rope = Rope(config, self.device)
        self._serving = False
        self._untold: list[ExpiredHalf] = []

    # ------------------------------------------------------------------------------------- serving

    @property
    def serving(self) -> bool:
        """Whether every slot is filled and every pair is whole, each from one version."""
        return self._serving

    ready = serving

    @property
    def dtype(self) -> torch.dtype:
        """The parameters' dtype."""
        return self._weights.embed_tokens.dtype

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
        with self.gate.reading(GATE_TIMEOUT):
            return self._forward(token_ids, cache)

    @torch.inference_mode()
    def generate(
        self,
        token_ids: Tensor,
        max_new_tokens: int = 24,
        *,
        deadline: float | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Tensor:
        """Continue sequences greedily; see `decoder.generate`.

        Args:
            token_ids: int64 [batch, tokens].
            max_new_tokens: How many to add at most.
            deadline: On `time.monotonic`.
            cancelled: Asked before each token.

        Returns:
            int64 [batch, tokens + new]: the prompts and what follows.

        Raises:
            NotReadyError: Weights are missing.
            TimeoutError: The deadline passed, or it was cancelled.
        """
        cache = self._cache(token_ids.shape[0], token_ids.shape[1] + max_new_tokens)
        return decoder.generate(
            lambda new: self._forward(new, cache)[:, -1],
            token_ids,
            max_new_tokens=max_new_tokens,
            eos_token_id=self.config.eos_token_id,
            hold=partial(self.gate.reading, GATE_TIMEOUT),
            deadline=deadline,
            cancelled=cancelled,
        )

    def _cache(self, batch: int, capacity: int) -> LatentCache:
        return LatentCache(self.config, batch, capacity, self.dtype, self.device)

    def _forward(self, token_ids: Tensor, cache: LatentCache) -> Tensor:
        # An update that failed gives the gate back before it is given up.
        if not self._serving or self.generation.torn:
            raise NotReadyError(f"the model is not ready: {self.missing_summary()}")
        return decoder.forward(self.config, self._weights, self._rope, token_ids, cache)

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
        if version is not None:
            self._refuse_changes(repeats(self._state, plan, version), version, pairs, tensors)
        update = self.begin(plan, version, source)
        try:
            with update.writing(GATE_TIMEOUT):
                for destination in update.destinations:
                    destination.write(0, tensors[destination.slot.name].reshape(-1).to(self.device))
                return self.finish(update)
        except BaseException:
            self._untold += update.expired
            self.abort(update)
            raise

    def begin(self, plan: LoadPlan, version: int | None, source: str) -> Update:
        """Begin an update; end it by `finish` or `abort`. See `Update` for what it raises."""
        return Update(self._state, plan, version, source, serving=self._serving)

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
        return (*untold, *self.fusion.expire())

    def drop_version(self, version: int) -> tuple[ExpiredHalf, ...]:
        """Give up the halves of a version that another has superseded."""
        return self.fusion.drop(version)

    def pending(self) -> tuple[PendingHalf, ...]:
        """Return all halves that wait. For the thread that loads."""
        return tuple(pending(self._state))

    def _reconsider(self) -> None:
        filled = self.generation.filled == len(self.table.slots)
        self._serving = filled and groups_whole(self.generation)
        self.generation.torn = False  # last: a forward pass may look at both at any time

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
