"""A trainer: pushes new weights to a daemon, once from a file and once from memory.

Run: ``python examples/trainer.py --endpoint ipc:///run/fusewire/ingest.sock --version 7 SHARD...``
"""

import argparse

from safetensors.torch import load_file

from fusewire.daemon.client import Trainer

parser = argparse.ArgumentParser()
parser.add_argument("shards", nargs="+")
parser.add_argument("--endpoint", default="ipc:///run/fusewire/ingest.sock")
parser.add_argument("--version", type=int, default=None)
options = parser.parse_args()

with Trainer(options.endpoint, timeout=60) as trainer:
    for path in options.shards:
        # A file is sent as it is; one that is too large for a message is split between tensors.
        for answer in trainer.push_file(path, version=options.version):
            print(f"{path}: {answer.status} {answer.detail}")
            if answer.status == "rejected":
                raise SystemExit(f"{answer.reason}: {answer.detail}")

        # Tensors may just as well come from memory, in any split: here, each one alone. Those that the daemon
        # has already with the same bytes do no harm.
        for name, tensor in load_file(path).items():
            answer = trainer.push_tensors({name: tensor}, version=options.version)
            for layer in answer.fused:
                print(f"layer {layer} fused")
