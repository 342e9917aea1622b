"""The client library: for trainers that push, for subscribers that wait, for operators that ask. Needs no torch."""

from .errors import DaemonUnreachable, FusewireError, KeyFileError, ProtocolError, ShardRejected
from .keys import ClientKeys
from .rpc import Control, RequestFailed
from .subscriber import ANY, Subscriber
from .trainer import TensorTooLarge, Trainer

__all__ = [
    "ANY",
    "ClientKeys",
    "Control",
    "DaemonUnreachable",
    "FusewireError",
    "KeyFileError",
    "ProtocolError",
    "RequestFailed",
    "ShardRejected",
    "Subscriber",
    "TensorTooLarge",
    "Trainer",
]
