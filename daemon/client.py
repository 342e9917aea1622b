"""The client library: for trainers that push, for subscribers that wait, for operators that ask. Needs no torch."""

from .errors import DaemonUnreachable, FusewireError, ProtocolError, ShardRejected
from .rpc import Control, RequestFailed
from .subscriber import ANY, Subscriber
from .trainer import TensorTooLarge, Trainer

__all__ = [
    "ANY",
    "Control",
    "DaemonUnreachable",
    "FusewireError",
    "ProtocolError",
    "RequestFailed",
    "ShardRejected",
    "Subscriber",
    "TensorTooLarge",
    "Trainer",
]
