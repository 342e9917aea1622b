"""Hands hostile inputs to every place where something from outside is read, and looks for one that does harm.

Run: ``make fuzz``, or ``python tests/fuzz/run.py [--count N] [--seed S] [--only NAME] [--replay FILE]``. Harm is: an
error that is not declared, a wrong answer (each target has an oracle), more than a second of CPU time, more memory
than is stated for each byte of the input, or a process that grows. An input depends on the seed, the target's name and
its number alone. One that does harm is written to a file, which ``--replay`` takes.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import hashlib
import os
import random
import resource
import sys
import time
import traceback
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from edges import Ingest, Loading
from material import Choices
from parsers import Events, Header, Lists, Settings, Versions, Wire
from target import Target

from fusewire.daemon import logs
from fusewire.daemon.settings import Log

TARGETS: dict[str, Callable[[], Target]] = {
    made.name: made for made in (Header, Wire, Events, Settings, Lists, Versions, Ingest, Loading)
}
SECONDS = 1.0
"""CPU time that one input may take."""
HANG = 60.0
"""Seconds after which the whole program is ended with a traceback: an input hangs, perhaps outside of Python."""
SAMPLE = 32
"""Of one input in so many the memory is measured."""
GROWTH = 128 * 1024 * 1024
"""Bytes that the process may grow by in all, for each target."""


class Harm(Exception):
    """An input did what none may do."""


class Tally:
    """What came of a target's inputs."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.slowest = 0.0
        self.most = 0
        """Bytes allocated at a time, for any input."""
        self.share = 0.0
        """The same as a share of what its input may take."""


def decisions(seed: int, name: str, number: int) -> bytes:
    """Return the bytes of which an input is made."""
    source = random.Random(f"{seed}/{name}/{number}")
    return source.randbytes(source.randrange(8, 400))


def one(target: Target, data: bytes, tally: Tally, *, measured: bool) -> None:
    """Try one input.

    Raises:
        Harm: It was slow, or took much memory.
        Exception: Whatever our code let out; AssertionError: the oracle disagrees.
    """
    made = target.make(Choices(data))
    before = 0
    if measured:
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
    begin = time.process_time()
    try:
        outcome = target.act(made.content)
    finally:
        seconds = time.process_time() - begin
        peak = tracemalloc.get_traced_memory()[1] if measured else 0
        tracemalloc.stop()
    tally.slowest = max(tally.slowest, 0.0 if measured else seconds)
    if seconds > SECONDS * (4 if measured else 1):  # to trace memory takes time
        raise Harm(f"{seconds:.2f} s for {made.nbytes} bytes: {SECONDS:g} s are allowed")
    taken, allowed = max(0, peak - before), target.memory.factor * made.nbytes + target.memory.besides
    tally.most, tally.share = max(tally.most, taken), max(tally.share, taken / allowed)
    if taken > allowed:
        raise Harm(f"{taken} bytes of memory for an input of {made.nbytes}: {allowed} are allowed")
    tally.outcomes[target.judge(made.content, outcome)] += 1


def fuzz(name: str, count: int, seed: int, failures: Path) -> bool:
    """Try so many inputs on a target; print what came of them. Returns whether none did harm."""
    target, tally = TARGETS[name](), Tally()
    begin = time.monotonic()
    resident = 0
    failures.mkdir(exist_ok=True)
    current = (failures / f"{name}-current").open("wb", buffering=0)  # stays if an input ends, or stops, this process
    try:
        for number in range(count):
            if number % 256 == 0:
                faulthandler.dump_traceback_later(HANG, exit=True, file=2)
            if number == count // 4:  # everything is warm by now
                gc.collect()
                resident = _resident()
            data = decisions(seed, name, number)
            os.ftruncate(current.fileno(), os.pwrite(current.fileno(), data, 0))
            try:
                one(target, data, tally, measured=number % SAMPLE == 0)
            except Exception:  # noqa: BLE001 - whatever it was, it is what we look for
                path = _keep(failures, name, data)
                print(f"{name}: input {number} of seed {seed} did harm:\n{traceback.format_exc()}")
                print(f"again: python {sys.argv[0]} --replay {path}")
                return False
    finally:
        faulthandler.cancel_dump_traceback_later()
        current.close()
        Path(current.name).unlink()
        target.close()
    growth = max(0, _resident() - resident)
    print(
        f"{name:9} {count:8,} inputs in {time.monotonic() - begin:6.1f} s   slowest {tally.slowest * 1e3:6.1f} ms   "
        f"memory {tally.most // 1024:5} KiB, {tally.share:4.0%} of the bound   grown by {growth / 1e6:5.1f} MB   "
        + ", ".join(f"{what} {number}" for what, number in tally.outcomes.most_common()),
        flush=True,
    )
    if growth > GROWTH:
        print(f"{name}: the process has grown by {growth} bytes: {GROWTH} are allowed")
        return False
    return True


def replay(path: Path) -> bool:
    """Try one input from a file again; print what it is and what comes of it."""
    name = path.name.partition("-")[0]
    target = TARGETS[name]()
    data = path.read_bytes()
    print(f"{name}: {target.make(Choices(data)).content!r}"[:4000])
    tally = Tally()
    try:
        one(target, data, tally, measured=False)
        one(target, data, tally, measured=True)
    except Exception:  # noqa: BLE001 - whatever it was
        print(traceback.format_exc())
        return False
    finally:
        target.close()
    print("no harm:", *tally.outcomes)
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000, help="inputs for each target (default: 100,000)")
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    parser.add_argument("--only", choices=TARGETS, action="append", help="this target alone; may be repeated")
    parser.add_argument("--failures", type=Path, default=Path("fuzz-failures"), help="where harmful inputs are kept")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="try one input again")
    given = parser.parse_args(arguments)
    faulthandler.enable()
    logs.configure(Log(level="warning", format="json"), Path(os.devnull).open("w"))  # noqa: SIM115 - to the end
    if given.replay is not None:
        return 0 if replay(given.replay) else 1
    seed = random.SystemRandom().randrange(2**32) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    good = [fuzz(name, given.count, seed, given.failures) for name in given.only or TARGETS]
    return 0 if all(good) else 1


def _resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _keep(failures: Path, name: str, data: bytes) -> Path:
    path = failures / f"{name}-{hashlib.sha256(data).hexdigest()[:12]}"
    path.write_bytes(data)
    return path


if __name__ == "__main__":
    raise SystemExit(main())
