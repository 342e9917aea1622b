"""Reading a shard's version from wherever a trainer may have put it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import NamedTuple

from .errors import Reason, ShardRejected, printable

LARGEST = 2**63 - 1
_FOLDER = re.compile(r"(?:(?:global_)?step_|checkpoint-|weight_v)?(\d{1,19})", re.ASCII)
"""Folder names that name a version: step_42, global_step_42, checkpoint-42, weight_v000042, 42."""
METADATA_KEYS = ("version", "weight_version", "step")
"""Keys of safetensors' __metadata__ that name a version."""


class Claim(NamedTuple):
    """What one source says a shard's version is."""

    source: str
    version: int


def versions_of_path(relative: PurePath) -> list[Claim]:
    """Return what the folders above a shard say, the outermost first."""
    claims = []
    for folder in relative.parts[:-1]:
        found = _FOLDER.fullmatch(folder)
        if found and int(found[1]) <= LARGEST:
            claims.append(Claim(f"folder {folder}", int(found[1])))
    return claims


def versions_of_metadata(metadata: Mapping[str, str]) -> list[Claim]:
    """Return what a shard's own metadata says.

    Raises:
        ShardRejected: VERSION_DISAGREEMENT: a key is there and is no version.
    """
    claims = []
    for key in METADATA_KEYS:
        text = metadata.get(key)
        if text is None:
            continue
        if not re.fullmatch(r"\d{1,19}", text, re.ASCII) or int(text) > LARGEST:
            raise ShardRejected(
                Reason.VERSION_DISAGREEMENT,
                f"metadata {key} is {printable(text, 40)!r}, which is no version: a whole number is needed",
            )
        claims.append(Claim(f"metadata {key}", int(text)))
    return claims


def run_of(told: str | None, metadata: Mapping[str, str]) -> str | None:
    """Return the trainer's incarnation, from the message's header or the shard's metadata.

    Raises:
        ShardRejected: VERSION_DISAGREEMENT: they differ.
    """
    inside = metadata.get("run")
    if told is not None and inside is not None and told != inside:
        detail = f"the message says run {printable(told, 40)}, the metadata {printable(inside, 40)}"
        raise ShardRejected(Reason.VERSION_DISAGREEMENT, detail)
    run = told or inside
    return printable(run) if run else None


def digest_of(told: str | None, metadata: Mapping[str, str]) -> str | None:
    """Return the xxh3-128 of the data section that the sender gives, as 32 hexadecimal digits.

    Raises:
        ShardRejected: DIGEST_MISMATCH: it is no digest, or message and metadata differ.
    """
    inside = metadata.get("xxh3")
    if inside is not None and not re.fullmatch(r"[0-9a-f]{32}", inside):
        raise ShardRejected(
            Reason.DIGEST_MISMATCH, "metadata xxh3 is no xxh3-128 digest: 32 hexadecimal digits are needed"
        )
    if told is not None and inside is not None and told != inside:
        raise ShardRejected(Reason.DIGEST_MISMATCH, "the message and the metadata give different digests")
    return told or inside


def reconcile(claims: Iterable[Claim]) -> int | None:
    """Return the one version that all claims name; None without any.

    Raises:
        ShardRejected: VERSION_DISAGREEMENT, naming the claims that differ.
    """
    claims = list(claims)
    if len({claim.version for claim in claims}) > 1:
        told = ", ".join(f"{printable(claim.source, 40)} says {claim.version}" for claim in claims)
        raise ShardRejected(Reason.VERSION_DISAGREEMENT, f"the version is not clear: {told}")
    return claims[0].version if claims else None
