"""The life of a version, as a table. Pure.

``python -m fusewire.daemon.lifecycle`` prints it as the diagram in docs/versions.md.
"""

from __future__ import annotations

import enum
import sys


class VersionState(enum.StrEnum):
    """Where a version stands."""

    OPEN = "open"
    """Some of its tensors have come."""
    COMPLETE = "complete"
    """All have come that will."""
    VERIFIED = "verified"
    """Its weights are finite, and the canary has run on them."""
    LIVE = "live"
    """Forward passes that begin now use it."""
    RETIRED = "retired"
    """Another one is live; it can be gone back to until a newer one's first byte."""
    ABORTED = "aborted"
    """Given up: by an operator or its trainer, or because it was not fit to go live."""
    SUPERSEDED = "superseded"
    """Given up for a newer one."""


class Turn(enum.StrEnum):
    """What happens to a version."""

    FILLED = "all that it brings has come"
    PASSED = "verification passed"
    FAILED = "verification failed"
    COMMITTED = "commit"
    REPLACED = "another goes live"
    RESTORED = "rollback"
    WITHDRAWN = "abort"
    OVERTAKEN = "a newer one takes its place"


_S, _T = VersionState, Turn

LIFECYCLE: dict[tuple[VersionState, Turn], VersionState] = {
    (_S.OPEN, _T.FILLED): _S.COMPLETE,
    (_S.OPEN, _T.WITHDRAWN): _S.ABORTED,
    (_S.OPEN, _T.OVERTAKEN): _S.SUPERSEDED,
    (_S.COMPLETE, _T.PASSED): _S.VERIFIED,
    (_S.COMPLETE, _T.FAILED): _S.ABORTED,
    (_S.COMPLETE, _T.WITHDRAWN): _S.ABORTED,
    (_S.COMPLETE, _T.OVERTAKEN): _S.SUPERSEDED,
    (_S.VERIFIED, _T.COMMITTED): _S.LIVE,
    (_S.VERIFIED, _T.WITHDRAWN): _S.ABORTED,
    (_S.VERIFIED, _T.OVERTAKEN): _S.SUPERSEDED,
    (_S.LIVE, _T.REPLACED): _S.RETIRED,
    (_S.RETIRED, _T.RESTORED): _S.LIVE,
}
"""(state, what happens) -> state. What is missing here can't happen."""

OVER = frozenset({_S.ABORTED, _S.SUPERSEDED})
"""States that nothing leads out of."""


def diagram() -> str:
    """Return the table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {VersionState.OPEN}: its first shard"]
    lines += [f"    {state} --> {after}: {turn}" for (state, turn), after in LIFECYCLE.items()]
    lines += [f"    {state} --> [*]" for state in VersionState if state in OVER]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(diagram() + "\n")
