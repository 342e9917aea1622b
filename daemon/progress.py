"""How far one version has come: which slots it has filled, which layers are whole. A part of the ledger, and pure.

Slots are counted as a set: a tensor that comes twice, or that another tensor overlaps, must neither complete a layer
early nor keep it from completing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from . import events
from .lifecycle import LIFECYCLE, Turn, VersionState

ROLLING = None
"""The version of a shard that names none."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """What a model consists of, in numbers: the ledger's whole knowledge of it."""

    layer_of: Sequence[int | None]
    """Slot index -> layer number; None for what lies outside of the layers."""
    fusions: Mapping[int, tuple[int, ...]]
    """Layer -> the slots of its fused pair, over all leaves. Empty for a model that has no pairs."""
    layers: int
    names: Sequence[str]
    """Slot index -> name of its tensor."""

    def totals(self) -> dict[int | None, int]:
        """Return how many slots each layer has."""
        totals: dict[int | None, int] = {}
        for layer in self.layer_of:
            totals[layer] = totals.get(layer, 0) + 1
        return totals

    def named(self, slots: Iterable[int], limit: int) -> tuple[str, ...]:
        """Return the names of the first slots."""
        return tuple(self.names[slot] for slot in sorted(slots)[:limit])


@dataclass(slots=True)
class Version:
    """One version and how far it has come.

    The rolling version has no end: once a layer of it is whole, the layer's next round begins; and it goes live again
    and again.
    """

    number: int | None
    coverage: Coverage
    opened: float
    """When its first shard came, on the stimuli's clock; ``grown``: when it last got further."""
    grown: float
    state: VersionState = VersionState.OPEN
    missing: dict[int | None, int] = field(default_factory=dict)
    """Layer -> how many of its slots it has not filled yet."""
    filled: set[int] = field(default_factory=set)
    waits: set[int] = field(default_factory=set)
    """Slots that have come and lie beside no partner."""
    blocked: set[int] = field(default_factory=set)
    """Those of them that can't be placed without it."""
    fused: set[int] = field(default_factory=set)
    loaded: set[int] = field(default_factory=set)
    queued: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shards that wait for its turn, while another version is being staged: key -> slots."""
    expected: Counter[int] = field(default_factory=Counter)
    """How often each slot is among these."""
    approved: bool = False
    """Whether an operator has said that it shall go live."""
    committing: bool = False
    """Whether it has been told to go live: there is no way back."""
    restored: bool = False
    """Whether it was live before a restart: it goes live again whatever the settings say, and can't be aborted."""
    past: bool = False
    """Whether it belongs to a run before the present one: its number stands for nothing that may come."""
    promised: set[int] | None = None
    """What it will bring, if an index or a commit has told."""
    closed: bool = False
    """Whether all that has come is all that will."""
    marked: int = 0
    """If a marker has said so: when that came, on the shards' clock. Files that come later gainsay it."""
    promise: str = ""
    """What told of its end: ``index``, ``commit`` or ``STABLE``."""
    told: bool = False
    """Whether what is missing has been told since it last grew."""
    why: str = ""
    """Why it ended, or what it waits for."""
    fresh: bool = False
    """Whether anything has come since it began, or last went live."""
    refused: set[str] = field(default_factory=set)
    """Keys of its shards that were rejected and have not come again."""

    def __post_init__(self) -> None:
        if not self.missing:
            self.missing = self.coverage.totals()

    @property
    def label(self) -> str:
        """What to call it."""
        return "rolling version" if self.number is ROLLING else f"version {self.number}"

    @property
    def came(self) -> set[int]:
        """Slots that are in place or wait for a partner that need not come."""
        return (self.filled | self.waits) - self.blocked

    def turn(self, turn: Turn) -> None:
        """Go where the table leads."""
        after = LIFECYCLE.get((self.state, turn))
        if after is None:
            raise AssertionError(f"{self.label} is {self.state}: {turn!r} can't happen")
        self.state = after

    def advance(self, arrived: Iterable[int], fused: Iterable[int]) -> list[events.AnyEvent]:
        """Count what was put in place; return the events of the layers that became whole by it."""
        out: list[events.AnyEvent] = []
        arrived = set(arrived)
        for layer in fused:
            arrived.update(self.coverage.fusions[layer])
            if self.number is ROLLING or layer not in self.fused:
                self.fused.add(layer)
                out.append(events.LayerFused(layer=layer, version=self.number, message=f"layer {layer} fused"))
        self.fresh = True
        self.waits -= arrived
        self.blocked -= arrived
        touched: set[int | None] = set()
        for slot in arrived - self.filled:
            self.missing[self.coverage.layer_of[slot]] -= 1
            touched.add(self.coverage.layer_of[slot])
        self.filled |= arrived
        for layer in sorted(layer for layer in touched if layer is not None):
            if self.missing[layer] == 0 and layer not in self.loaded:
                self.loaded.add(layer)
                out.append(events.LayerLoaded(layer=layer, version=self.number, message=f"layer {layer} loaded"))
        return out

    def expect(self, key: str, slots: tuple[int, ...]) -> None:
        """A shard waits for the version's turn."""
        self.unexpect(key)
        self.queued[key] = slots
        self.expected.update(slots)

    def unexpect(self, key: str) -> None:
        """A shard waits no longer."""
        for slot in self.queued.pop(key, ()):
            self.expected[slot] -= 1
            if not self.expected[slot]:
                del self.expected[slot]

    def whole(self) -> bool:
        """Whether it has filled every slot."""
        return not any(self.missing.values())

    def lacks(self) -> set[int]:
        """Return the slots that keep it from being complete: of what was promised, or of the whole model."""
        if self.promised is not None:
            return (self.promised - self.came) | self.blocked
        if self.closed:
            return set(self.blocked)
        return set(range(len(self.coverage.layer_of))) - self.came

    def is_complete(self, *, live: bool) -> bool:
        """Whether it may go live, as far as its tensors go.

        Args:
            live: Whether something is live that can stand in for what it does not bring.
        """
        if not live or not self.fresh:
            return self.fresh and self.whole()
        if self.number is ROLLING:
            return not self.waits
        return self.whole() or ((self.promised is not None or self.closed) and not self.lacks())

    def unfill(self, slots: Iterable[int]) -> None:
        """Take slots back: their bytes were given up or could not be proven."""
        for slot in slots:
            self.waits.discard(slot)
            self.blocked.discard(slot)
            if slot in self.filled:
                self.filled.discard(slot)
                self.missing[self.coverage.layer_of[slot]] += 1

    def next_round(self) -> None:
        """The rolling version went live: layers that are whole begin anew."""
        self.fresh = False
        totals = self.coverage.totals()
        if self.whole():
            self.filled.clear()
            self.missing = dict(totals)
        for layer in self.loaded:
            self.filled = {slot for slot in self.filled if self.coverage.layer_of[slot] != layer}
            self.missing[layer] = totals[layer]
        self.loaded.clear()
        self.fused.clear()
