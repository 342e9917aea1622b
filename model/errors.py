"""What can go wrong with a model: an unusable config, unusable tensors, missing weights, a full cache."""

from __future__ import annotations

from typing import NamedTuple


class ConfigError(ValueError):
    """A config.json that can't be used; the message names the key, its value and what is supported."""


class Offender(NamedTuple):
    """One tensor that does not fit the slot table."""

    name: str
    kind: str
    """``unknown_tensor``, ``wrong_shape`` or ``wrong_dtype``."""
    detail: str


class WeightsError(Exception):
    """Tensors that do not fit; every one of them is listed, and nothing was changed."""

    def __init__(self, offenders: tuple[Offender, ...]) -> None:
        self.offenders = tuple(sorted(offenders))
        lines = "".join(f"\n  {offender.name}: {offender.detail}" for offender in self.offenders)
        super().__init__(f"{len(self.offenders)} tensors do not fit this model; nothing was loaded:{lines}")


class ConflictError(Exception):
    """A numbered version brought other bytes for slots that it had already filled; nothing was changed."""

    def __init__(self, version: int, names: tuple[str, ...]) -> None:
        self.version = version
        self.names = names
        super().__init__(
            f"version {version} has already brought other bytes for {', '.join(names)}; "
            "send changed weights under a new version"
        )


class NotReadyError(Exception):
    """A forward pass over weights that are not all there; the message counts what is missing."""


class FusionCacheFull(Exception):
    """Halves that have to wait are larger than the whole bound of the fusion cache; nothing was changed."""


class StaleError(Exception):
    """A numbered version brought slots that a newer one has filled; nothing was changed."""

    def __init__(self, version: int, names: tuple[str, ...]) -> None:
        self.version = version
        self.names = names
        super().__init__(f"version {version} comes too late: a newer version has filled {', '.join(names[:5])}")
