"""The demo: daemon, trainer and subscriber as processes, and the model's tokens against the golden ones."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from safetensors.numpy import load_file

from fusewire.daemon.client import Control, Subscriber
from fusewire.daemon.errors import FusewireError

CHECKPOINTS = Path(__file__).parent / "checkpoints"
"""Tiny checkpoints of each family, with the logits and tokens that transformers computed from them."""
START_TIMEOUT = 60.0
LOAD_TIMEOUT = 60.0
STOP_TIMEOUT = 10.0

_SETTINGS = """\
[model]
config = "{checkpoint}/config.json"
dtype = "float32"
[folder]
path = "shards"
[socket]
endpoint = "ipc://ingest.sock"
[events]
endpoint = "ipc://events.sock"
[control]
endpoint = "ipc://control.sock"
[state]
path = "state"
[metrics]
port = 0
[log]
level = "warning"
"""


class DemoFailed(FusewireError):
    """The demo did not come to its good end; the message says where it stopped."""


def main(family: str = "v2", seed: int = 0) -> int:
    """Run the demo and print what happens.

    Args:
        family: Which of the CHECKPOINTS: ``v2`` or ``v3`` (``v2lite`` has no pairs to fuse).
        seed: Of the shuffling.

    Returns:
        0 if the tokens that the model generated are the golden ones; 1 otherwise.
    """
    begin = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="fusewire-demo-") as folder:
            _demo(Path(folder), CHECKPOINTS / family, seed)
    except FusewireError as error:
        print(f"demo        FAILED: {error}", flush=True)
        return 1
    print(f"demo        done in {time.monotonic() - begin:.0f} s", flush=True)
    return 0


def _demo(folder: Path, checkpoint: Path, seed: int) -> None:
    (folder / "shards").mkdir()
    config = folder / "fusewire.toml"
    config.write_text(_SETTINGS.format(checkpoint=checkpoint))
    endpoint = {name: f"ipc://{folder}/{name}.sock" for name in ("ingest", "events", "control")}
    golden = load_file(checkpoint / "golden.safetensors")
    prompt, expected = golden["ids.a"][0].tolist(), golden["gen.a"].tolist()

    _say(f"a daemon with an empty model of {checkpoint.name}, a subscriber, and then a trainer")
    with (
        _process("daemon", "-m", "fusewire.daemon", "run", "--config", str(config)) as daemon,
        Control(endpoint["control"], timeout=5) as control,
    ):
        _wait_until_up(control, daemon)
        try:
            control.generate(prompt, max_new_tokens=len(expected))
        except FusewireError as error:
            _say(f"asked to generate before there are weights, the daemon refuses: {error}")
        else:
            raise DemoFailed("an empty model generated tokens")
        with (
            Subscriber(endpoint["events"], endpoint["control"], timeout=10) as subscriber,
            _process("subscriber", "-m", "fusewire.daemon", "listen", "--config", str(config)),
        ):
            trainer = [
                *("-m", "fusewire.daemon.demo.trainer", "--checkpoint", str(checkpoint)),
                *("--folder", str(folder / "shards"), "--endpoint", endpoint["ingest"]),
                *("--seed", str(seed)),
            ]
            delivered = subprocess.run([sys.executable, *trainer], timeout=LOAD_TIMEOUT, check=False)
            if delivered.returncode:
                raise DemoFailed(f"the trainer ended with exit code {delivered.returncode}")
            subscriber.wait_ready(timeout=LOAD_TIMEOUT)
            status = control.status()
            _say(
                f"version {status.version} is live: layers {list(status.layers.fused)} fused, "
                f"{status.slots_filled} of {status.slots_total} slots filled, {len(status.pending)} waiting"
            )
            generated = list(control.generate(prompt, max_new_tokens=len(expected)).token_ids)
    _say(f"prompt    {prompt}")
    _say(f"generated {generated}")
    _say(f"golden    {expected}")
    if generated != expected:
        raise DemoFailed("the generated tokens are not the golden ones")
    if set(status.layers.fused) != set(range(status.layers.total)) or not status.layers.fusable:
        raise DemoFailed(f"only the layers {list(status.layers.fused)} were fused")
    _say("SUCCESS: every layer fused, and all generated tokens equal the golden ones")


def _say(text: str) -> None:
    print(f"demo        {text}", flush=True)


def _wait_until_up(control: Control, daemon: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while True:
        if daemon.poll() is not None:
            raise DemoFailed(f"the daemon ended with exit code {daemon.returncode}")
        try:
            control.status()
        except FusewireError:
            if time.monotonic() > deadline:
                raise
        else:
            return


@contextlib.contextmanager
def _process(name: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a part of the demo; at the end ask it to stop, and insist that it does so cleanly."""
    process = subprocess.Popen([sys.executable, *arguments])
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            _say(f"the {name} did not stop within {STOP_TIMEOUT:.0f} s")


def _arguments(argv: Sequence[str]) -> tuple[str, int]:
    return (argv[0] if argv else "v2"), int(argv[1]) if len(argv) > 1 else 0


if __name__ == "__main__":
    raise SystemExit(main(*_arguments(sys.argv[1:])))
