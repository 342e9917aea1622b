"""The settings: a TOML file read into frozen Structs. Unknown key, wrong type, missing file: an error.

Every key with its default and its reason stands in ``config/fusewire.toml``; a test keeps the two alike.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from .errors import SettingsError, printable

MIB = 1024 * 1024
GIB = 1024 * MIB

Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]
Bytes = Annotated[int, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Model(_Section, frozen=True, kw_only=True):
    """Which model is resident, and where its first weights come from."""

    config: str
    """Path of the checkpoint's config.json."""
    checkpoint: str = ""
    """Folder of a Hugging Face checkpoint to load at start; empty: start without weights."""
    dtype: Literal["checkpoint", "float32", "bfloat16", "float16"] = "checkpoint"
    fp8: Literal["keep", "dequantize"] = "keep"
    """What becomes of block-quantised weights: kept with their scales, or stored in ``dtype``."""
    generations: Literal[1, 2] = 2
    """Sets of weights in memory: 2, one live and one staged; 1: updates in place."""
    device: str = "cpu"
    threads: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Torch's threads for forward passes; 0 leaves torch's own choice."""


class Folder(_Section, frozen=True, kw_only=True):
    """The drop folder."""

    enabled: bool = True
    path: str = "/var/lib/fusewire/shards"
    reconcile_interval: Seconds = 5.0
    """Seconds between full scans: events are hints, the scan is the truth."""
    settle: Seconds = 0.5
    """Seconds for which a file must not have changed, where no read lease tells that its writer is done."""
    incomplete_after: Seconds = 30.0
    """Seconds without growth after which an incomplete file that nobody can be seen writing is rejected."""
    polling: Literal["auto", "always", "never"] = "auto"


class Socket(_Section, frozen=True, kw_only=True):
    """Where trainers push shards."""

    enabled: bool = True
    endpoint: str = "ipc:///run/fusewire/ingest.sock"
    durability: Literal["spool", "memory"] = "spool"
    """Whether what is pushed is kept in ``state.path``, so that it survives a restart."""
    max_put_bytes: Bytes = 256 * MIB
    in_flight_bytes: Bytes = 1 * GIB
    chunk_bytes: Annotated[int, msgspec.Meta(ge=65536, le=8 * MIB)] = 4 * MIB
    """Largest chunk of a shard that is sent in several messages."""
    window_bytes: Bytes = 32 * MIB
    """Bytes of chunks that one client may have on their way; all streams have as much together as each its own."""
    streams: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 16
    """Shards that may be coming in chunks at the same time; one more is answered ``busy``."""
    streams_per_client: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 8
    """The same for one client: a connection, or with CURVE a key; one more is answered ``busy``."""
    stream_timeout: Seconds = 30.0
    """Seconds without a chunk after which a shard is given up."""
    shared_memory: bool = True
    """Whether clients on this host may hand chunks over in shared memory."""
    shared_path: str = ""
    """Folder for the shared segment, on a tmpfs; empty: beside an ipc endpoint if that is one, else /dev/shm."""


class Events(_Section, frozen=True, kw_only=True):
    """Where events are published."""

    endpoint: str = "ipc:///run/fusewire/events.sock"
    heartbeat_interval: Seconds = 2.0
    remembered: Count = 20_000
    """Events kept for ``replay``."""


class Control(_Section, frozen=True, kw_only=True):
    """Where questions are answered."""

    endpoint: str = "ipc:///run/fusewire/control.sock"
    socket_mode: Annotated[int, msgspec.Meta(ge=0, le=0o777)] = 0o660
    """Mode of all ipc sockets."""
    generate_queue: Count = 8
    """``generate`` requests that may wait; one more is refused."""


class Curve(_Section, frozen=True, kw_only=True):
    """Who may speak over TCP."""

    secret_key: str = ""
    """File of the daemon's secret key; empty: systemd's credential ``fusewire.key`` if there is one, else no CURVE."""
    trainers: str = ""
    """Folder of public keys, one ``*.key`` each: who may push."""
    operators: str = ""
    """The same: who may ask, order and listen."""
    subscribers: str = ""
    """The same: who may listen, and ask how things stand."""


class Versions(_Section, frozen=True, kw_only=True):
    """When a version goes live, and what becomes of it afterwards."""

    commit: Literal["auto", "manual"] = "auto"
    finite: bool = True
    """Whether weights are searched for NaN and infinity before they go live."""
    canary: list[Annotated[int, msgspec.Meta(ge=0)]] = msgspec.field(default_factory=lambda: [0, 1, 2, 3])
    """Token ids that a version is run on before it goes live; empty: none."""
    stale_after: Seconds = 300.0
    """Seconds without growth after which a staged version counts as stalled."""
    lease_seconds: Seconds = 300.0
    """Longest time for which one ``generate`` request may keep the weights that it began with."""
    retention: Literal["keep", "delete", "archive"] = "keep"
    """What becomes of the files of versions that no live weights rest on any more."""
    archive: str = ""
    """Folder for ``archive``, on the same file system as the drop folder."""


class Fusion(_Section, frozen=True, kw_only=True):
    """Bounds of the fusion cache."""

    max_bytes: Bytes = 2 * GIB
    max_age: Seconds = 3600.0


class Limits(_Section, frozen=True, kw_only=True):
    """What a shard may cost."""

    header_bytes: Annotated[int, msgspec.Meta(ge=8, le=100_000_000)] = 16 * MIB
    unleased_bytes: Bytes = 4 * GIB
    """Largest shard file without a read lease that is buffered, to be proven before live weights change."""
    known_shards: Count = 200_000
    """Shards whose outcome is remembered; the oldest are forgotten first."""


class Loader(_Section, frozen=True, kw_only=True):
    """How bytes are copied."""

    threads: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    block_bytes: Annotated[int, msgspec.Meta(ge=65536)] = 4 * MIB
    ring_bytes: Annotated[int, msgspec.Meta(ge=16 * MIB)] = 128 * MIB
    """Pinned host memory through which bytes get to a GPU."""
    non_temporal: bool = True
    """Whether ``run`` starts itself again with glibc's threshold for copies past the caches lowered."""
    leases: bool = True
    """False: never take read leases, read with preadv (for file systems on which leases misbehave)."""


class State(_Section, frozen=True, kw_only=True):
    """What has to survive a restart."""

    path: str = "/var/lib/fusewire/state"
    """Folder of the journal and the spool; empty: nothing survives."""
    sync: bool = False
    """Whether what is acknowledged is on the disk first: it then survives the death of the machine, too."""
    spool_bytes: Bytes = 64 * GIB
    """Bytes of pushed shards that are kept; what comes beyond is applied and does not survive a restart."""


class Log(_Section, frozen=True, kw_only=True):
    """Where and how much is logged."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "console", "json"] = "auto"


class Metrics(_Section, frozen=True, kw_only=True):
    """Prometheus metrics over HTTP, on loopback only."""

    enabled: bool = True
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 9105
    """0 takes any free port; it is logged."""


class Settings(_Section, frozen=True, kw_only=True):
    """Everything that can be set."""

    model: Model
    folder: Folder = Folder()
    socket: Socket = Socket()
    events: Events = Events()
    control: Control = Control()
    curve: Curve = Curve()
    versions: Versions = Versions()
    fusion: Fusion = Fusion()
    limits: Limits = Limits()
    loader: Loader = Loader()
    state: State = State()
    log: Log = Log()
    metrics: Metrics = Metrics()


def load(path: str | os.PathLike[str]) -> Settings:
    """Read a settings file. Relative paths in it are taken relative to the folder of the file.

    Raises:
        SettingsError: The file can't be read, isn't TOML, or holds an unknown key or an impossible value; the
            message names the file and the key.
    """
    path = Path(path)
    try:
        settings = msgspec.toml.decode(path.read_bytes(), type=Settings)
    except OSError as error:
        raise SettingsError(
            f"settings file {path}: {error.strerror}. Give its path with --config; "
            "config/fusewire.toml in the source tree is a commented one to start from."
        ) from error
    except msgspec.ValidationError as error:
        raise SettingsError(f"settings file {path}: {printable(error)}") from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # an int of thousands of digits is a ValueError
        raise SettingsError(f"settings file {path}: not valid TOML: {printable(error)}") from error
    if settings.versions.retention == "archive" and not settings.versions.archive:
        raise SettingsError(f'settings file {path}: versions.retention = "archive" needs versions.archive, a folder')
    try:
        return _resolved(settings, path.absolute().parent)
    except ValueError as error:
        raise SettingsError(f"settings file {path}: {printable(error)}") from error


def dumps(settings: Settings) -> str:
    """Return the effective values as TOML."""
    return msgspec.toml.encode(settings).decode()


def _resolved(settings: Settings, base: Path) -> Settings:
    def absolute(value: str) -> str:
        if "\0" in value:
            raise ValueError(f"no path can be {value!r}: it holds a NUL")
        try:
            return str(base / Path(value).expanduser()) if value else value
        except RuntimeError as error:
            raise ValueError(f"the path {value!r} names a user without a home folder") from error

    def endpoint(value: str) -> str:
        scheme, separator, address = value.partition("://")
        return f"{scheme}{separator}{absolute(address)}" if scheme == "ipc" and address else value

    replace = msgspec.structs.replace
    return replace(
        settings,
        model=replace(
            settings.model,
            config=absolute(settings.model.config),
            checkpoint=absolute(settings.model.checkpoint),
        ),
        folder=replace(settings.folder, path=absolute(settings.folder.path)),
        socket=replace(
            settings.socket,
            endpoint=endpoint(settings.socket.endpoint),
            shared_path=absolute(settings.socket.shared_path),
        ),
        events=replace(settings.events, endpoint=endpoint(settings.events.endpoint)),
        control=replace(settings.control, endpoint=endpoint(settings.control.endpoint)),
        state=replace(settings.state, path=absolute(settings.state.path)),
        curve=replace(
            settings.curve,
            **{key: absolute(getattr(settings.curve, key)) for key in settings.curve.__struct_fields__},
        ),
        versions=replace(settings.versions, archive=absolute(settings.versions.archive)),
    )
