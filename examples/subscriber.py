"""A subscriber: waits until the model is ready, then prints what happens to it.

Run: ``python examples/subscriber.py --events ipc:///run/fusewire/events.sock --control ipc:///run/fusewire/control.sock``
"""

import argparse

from fusewire.daemon.client import Subscriber
from fusewire.daemon.events import LayerFused, ShardRefused

parser = argparse.ArgumentParser()
parser.add_argument("--events", default="ipc:///run/fusewire/events.sock")
parser.add_argument("--control", default="ipc:///run/fusewire/control.sock")
parser.add_argument("--timeout", type=float, default=60, help="seconds to wait and to listen")
options = parser.parse_args()

with Subscriber(options.events, options.control) as subscriber:
    # The state is complete from the start, however late we join. Flushed: through a pipe, too, each line comes in time.
    print(f"fused before we came: {sorted(subscriber.fused)}", flush=True)

    # Every wait has a deadline; TimeoutError says how things stand.
    version = subscriber.wait_for_layer(0, timeout=options.timeout)
    print(f"layer 0 was fused by version {version}", flush=True)
    subscriber.wait_ready(timeout=options.timeout)
    print("the model answers", flush=True)

    # Each event comes once and in order, also those from before the waits above.
    for event in subscriber.events(timeout=options.timeout):
        match event:
            case LayerFused():
                print(f"layer {event.layer} fused, version {event.version}", flush=True)
            case ShardRefused():
                print(f"{event.shard} was rejected: {event.reason}: {event.detail}", flush=True)
