"""The command line. Each command is a few lines over the client library; torch is loaded by those that need it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn, Optional

import typer
from rich.console import Console
from rich.text import Text

from . import client, events, keys, render, settings, tuning
from .errors import FusewireError, SettingsError, printable

DEFAULT_CONFIG = "/etc/fusewire/fusewire.toml"
KEYGEN = """\
{secret}
  secret, mode 0600. Leave it with its owner. The daemon's own: curve.secret_key, or a systemd credential.
  A client's: fusewire push --key, FUSEWIRE_KEY, or ClientKeys.load in Python.
{public}
  public. Of a client: into the daemon's folder curve.trainers, curve.operators or curve.subscribers, then
  systemctl reload fusewire. Of the daemon: to each client, as --server-key."""
LONG = 10 * 365 * 86400.0
"""Seconds: as long as the user cares to listen."""

app = typer.Typer(
    name="fusewire",
    help="Keeps the weights of a resident DeepSeek-V2/V3 model current: shards in, fused layers out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
WIDTH = 200
"""Columns of a table that does not go to a terminal."""
out = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else WIDTH)

Config = Annotated[
    Path, typer.Option("--config", "-c", envvar="FUSEWIRE_CONFIG", help="Settings file of the daemon.", metavar="FILE")
]
Endpoint = Annotated[
    Optional[str],  # noqa: UP045 - typer reads it at run time
    typer.Option("--endpoint", "-e", help="Socket of the daemon; default: from the settings file.", metavar="ENDPOINT"),
]
Key = Annotated[
    Optional[Path],  # noqa: UP045 - typer reads it at run time
    typer.Option(
        "--key", "-k", envvar="FUSEWIRE_KEY", help="Your secret key, for a daemon that asks for it.", metavar="FILE"
    ),
]
ServerKey = Annotated[
    Optional[Path],  # noqa: UP045 - typer reads it at run time
    typer.Option(
        "--server-key", envvar="FUSEWIRE_SERVER_KEY", help="The daemon's public key, with --key.", metavar="FILE"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Timeout = Annotated[float, typer.Option("--timeout", "-t", help="Seconds to wait for an answer.", min=0.01)]


@app.command(epilog="Example: fusewire run --config /etc/fusewire/fusewire.toml")
def run(config: Config = Path(DEFAULT_CONFIG)) -> None:
    """Run the daemon in the foreground, until SIGTERM or SIGINT."""
    effective = settings.load(config)
    if effective.loader.non_temporal:
        tuning.start_again_if_needed()
    from .service import run as run_service  # noqa: PLC0415 - loads torch

    raise typer.Exit(run_service(effective, config))


@app.command("check-config", epilog="Example: fusewire check-config --config config/fusewire.toml")
def check_config(config: Config = Path(DEFAULT_CONFIG)) -> None:
    """Check a settings file and print the effective values, defaults included."""
    sys.stdout.write(settings.dumps(settings.load(config)))


@app.command(epilog="Example: fusewire push step_7/*.safetensors --version 7")
def push(  # noqa: PLR0913, PLR0917 - each is an option of the command
    files: Annotated[list[Path], typer.Argument(help="Shards in safetensors' format.", metavar="FILE...")],
    version: Annotated[
        Optional[int],  # noqa: UP045 - typer reads it at run time
        typer.Option("--version", "-v", help="The trainer's step; without it, the rolling version.", min=0),
    ] = None,
    commit: Annotated[
        bool, typer.Option("--commit", help="Say afterwards that the version is all there; the rest is carried over.")
    ] = False,
    trainer_run: Annotated[
        Optional[str],  # noqa: UP045 - typer reads it at run time
        typer.Option("--run", help="The trainer's incarnation; a new one restarts the numbering.", metavar="NAME"),
    ] = None,
    config: Config = Path(DEFAULT_CONFIG),
    endpoint: Endpoint = None,
    timeout: Timeout = 60.0,
    key: Key = None,
    server_key: ServerKey = None,
) -> None:
    """Send shards to the daemon and print each answer. Exit code 1 if any was not taken."""
    if commit and version is None:
        raise typer.BadParameter("--commit needs --version: shards without one go live by themselves")
    good = True
    where = _endpoint(endpoint, config, lambda s: s.socket.endpoint)
    with client.Trainer(where, timeout, run=trainer_run, digest=True, curve=_keys(key, server_key)) as trainer:
        for file in files:
            try:
                answers = trainer.push_file(file, version=version)
            except (OSError, client.ShardRejected, client.TensorTooLarge) as error:
                reason = error.strerror if isinstance(error, OSError) else str(error)
                out.print(Text.assemble(("not sent", "red"), f" {printable(file)}: {printable(reason)}"))
                good = False
                continue
            for answer in answers:
                out.print(render.answer_line(answer))
            good = good and answers[-1].status in {"applied", "accepted"}
        if commit and good and version is not None:
            told = trainer.commit(version)
            out.print(render.order_line(told.status, told.detail))
            good = told.status != "rejected"
    raise typer.Exit(0 if good else 1)


@app.command(epilog="Example: fusewire listen --json | jq .message")
def listen(
    config: Config = Path(DEFAULT_CONFIG),
    events_endpoint: Annotated[
        Optional[str],  # noqa: UP045 - typer reads it at run time
        typer.Option("--events", help="Events socket; default: from the settings file.", metavar="ENDPOINT"),
    ] = None,
    control_endpoint: Annotated[
        Optional[str],  # noqa: UP045 - typer reads it at run time
        typer.Option("--control", help="Control socket; default: from the settings file.", metavar="ENDPOINT"),
    ] = None,
    as_json: Json = False,
    heartbeats: Annotated[bool, typer.Option("--heartbeats", help="Print heartbeats, too.")] = False,
    seconds: Annotated[float, typer.Option("--for", help="Stop after so many seconds.", min=0.01)] = LONG,
    key: Key = None,
    server_key: ServerKey = None,
) -> None:
    """Print the daemon's state now, and then every event as it comes."""
    hears = _endpoint(events_endpoint, config, lambda s: s.events.endpoint)
    asks = _endpoint(control_endpoint, config, lambda s: s.control.endpoint)
    with client.Subscriber(hears, asks, curve=_keys(key, server_key)) as subscriber:
        _emit(subscriber.snapshot, render.snapshot_line, as_json)
        for event in subscriber.events(timeout=seconds):
            if heartbeats or not isinstance(event, events.Heartbeat):
                _emit(event, render.event_line, as_json)


@app.command(epilog="Example: fusewire status --json | jq .layers.fused")
def status(
    config: Config = Path(DEFAULT_CONFIG),
    endpoint: Endpoint = None,
    as_json: Json = False,
    timeout: Timeout = 10.0,
    key: Key = None,
    server_key: ServerKey = None,
) -> None:
    """Print what the daemon is and does: model, version, layers, what waits, what was rejected."""
    with _control(endpoint, config, timeout, _keys(key, server_key)) as control:
        _emit(control.status(), render.status_view, as_json)


@app.command(epilog="Example: fusewire pending")
def pending(
    config: Config = Path(DEFAULT_CONFIG),
    endpoint: Endpoint = None,
    as_json: Json = False,
    timeout: Timeout = 10.0,
    key: Key = None,
    server_key: ServerKey = None,
) -> None:
    """Print the halves that wait for their partner, and what they lack."""
    with _control(endpoint, config, timeout, _keys(key, server_key)) as control:
        _emit(control.pending(), render.pending_view, as_json)


@app.command(epilog="Example: fusewire versions --json | jq .live")
def versions(
    config: Config = Path(DEFAULT_CONFIG),
    endpoint: Endpoint = None,
    as_json: Json = False,
    timeout: Timeout = 10.0,
    key: Key = None,
    server_key: ServerKey = None,
) -> None:
    """Print every version that is open, live, retired or has ended, and what keeps the open ones from going live."""
    with _control(endpoint, config, timeout, _keys(key, server_key)) as control:
        _emit(control.versions(), render.versions_view, as_json)


Which = Annotated[
    Optional[int],  # noqa: UP045 - typer reads it at run time
    typer.Argument(help="Which version; default: the one that is being staged.", metavar="[VERSION]", min=0),
]


@app.command(epilog="Example: fusewire commit 42")
def commit(
    version: Which = None,
    config: Config = Path(DEFAULT_CONFIG),
    endpoint: Endpoint = None,
    timeout: Timeout = 60.0,
    key: Key = None,
    server_key: ServerKey = None,
) -> None:
    """Let a version go live: a verified one at once, an open one as soon as what has come of it is in place.

    What it did not bring is carried over from the live version.
    """
    with _control(endpoint, config, timeout, _keys(key, server_key)) as control:
        out.print(render.order_line("done", control.commit(version)))


@app.command(epilog="Example: fusewire rollback")
def rollback(
    config: Config = Path(DEFAULT_CONFIG),
    endpoint: Endpoint = None,
    timeout: Timeout = 60.0,
    key: Key = None,
    server_key: ServerKey = None,
) -> None:
    """Make the version before live again, byte for byte. Possible until a newer version's first shard."""
    with _control(endpoint, config, timeout, _keys(key, server_key)) as control:
        out.print(render.order_line("done", control.rollback()))


@app.command(epilog="Example: fusewire abort 42")
def abort(
    version: Which = None,
    config: Config = Path(DEFAULT_CONFIG),
    endpoint: Endpoint = None,
    timeout: Timeout = 10.0,
    key: Key = None,
    server_key: ServerKey = None,
) -> None:
    """Give up a version that is not live; what is live is not touched."""
    with _control(endpoint, config, timeout, _keys(key, server_key)) as control:
        out.print(render.order_line("done", control.abort(version)))


@app.command(epilog="Example: fusewire generate 12 7 80 --max-new-tokens 8")
def generate(
    token_ids: Annotated[list[int], typer.Argument(help="The prompt, as token ids.", metavar="ID...", min=0)],
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, max=4096)] = 24,
    config: Config = Path(DEFAULT_CONFIG),
    endpoint: Endpoint = None,
    as_json: Json = False,
    timeout: Timeout = 60.0,
    key: Key = None,
    server_key: ServerKey = None,
) -> None:
    """Continue token ids greedily with the live weights and print the new ones."""
    with _control(endpoint, config, timeout, _keys(key, server_key)) as control:
        reply = control.generate(token_ids, max_new_tokens)
    _emit(reply, lambda told: Text(" ".join(map(str, told.token_ids))), as_json)


@app.command(epilog="Example: fusewire digest")
def digest(
    config: Config = Path(DEFAULT_CONFIG),
    endpoint: Endpoint = None,
    as_json: Json = False,
    timeout: Timeout = 600.0,
    key: Key = None,
    server_key: ServerKey = None,
) -> None:
    """Print a digest of all live weights: two hosts that print the same one serve the same bytes."""
    with _control(endpoint, config, timeout, _keys(key, server_key)) as control:
        reply = control.digest()
    _emit(reply, lambda told: Text(told.digest), as_json)


@app.command(epilog="Example: fusewire inspect model-00001-of-00004.safetensors --config config.json")
def inspect(
    shard: Annotated[
        Optional[Path],  # noqa: UP045 - typer reads it at run time
        typer.Argument(help="A safetensors file; without it, the plan of the model is printed.", metavar="[FILE]"),
    ] = None,
    config: Annotated[
        Optional[Path],  # noqa: UP045 - typer reads it at run time
        typer.Option("--config", "-c", help="A model's config.json; default: the one in the file's folder."),
    ] = None,
    dequantize: Annotated[bool, typer.Option("--dequantize", help="As with model.fp8 = dequantize.")] = False,
    as_json: Json = False,
) -> None:
    """Print what a shard holds and where each tensor would go; without a shard, what a model is made of.

    Exit code 1 if the model would refuse any tensor.
    """
    from . import inspection  # noqa: PLC0415 - loads torch

    if shard is not None:
        config = config or inspection.config_beside(shard)
        found = inspection.inspect(shard, config, settings.Limits().header_bytes, keep_fp8=not dequantize)
        _emit(found, render.inspection_view, as_json)
        raise typer.Exit(1 if found.refused else 0)
    if config is None:
        raise typer.BadParameter("give a safetensors FILE, or a config.json with --config, or both")
    _emit(inspection.plan(config, keep_fp8=not dequantize), render.plan_view, as_json)


@app.command(epilog="Example: fusewire keygen keys --name alice")
def keygen(
    folder: Annotated[Path, typer.Argument(help="Where to write them; made if it is not there.", metavar="DIR")],
    name: Annotated[str, typer.Option("--name", "-n", help="Whose they are.", metavar="NAME")],
    force: Annotated[bool, typer.Option("--force", help="Overwrite keys of that name.")] = False,
) -> None:
    """Make a pair of keys for CURVE: NAME.key, to be handed out, and NAME.key_secret, for its owner alone."""
    public, secret = keys.make(folder, name, force=force)
    out.print(Text(KEYGEN.format(public=printable(public, 500), secret=printable(secret, 500))))


@app.command(epilog="Example: fusewire demo --family v3")
def demo(
    family: Annotated[str, typer.Option("--family", "-f", help="v2 or v3.", metavar="NAME")] = "v2",
    seed: Annotated[int, typer.Option("--seed", help="Of the shuffling.")] = 0,
) -> None:
    """Show the whole job on a tiny checkpoint: daemon, trainer and subscriber as processes of their own."""
    from .demo.run import main as run_demo  # noqa: PLC0415 - only the demo needs it

    raise typer.Exit(run_demo(family, seed))


def main() -> NoReturn:
    """Entry point: errors become one line and an exit code (2: settings or usage, 1: anything else)."""
    # A reader that goes away (| head) ends us in silence, as it does any other program.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    # A shell's background jobs inherit an ignored SIGINT; whoever sends us one all the same means it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with _one_line_errors():
        app()
    sys.exit(0)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    except (FusewireError, TimeoutError, MemoryError) as error:
        _fail(error, 2 if isinstance(error, SettingsError) else 1)
    except ValueError as error:
        if type(error).__name__ != "ConfigError":  # of fusewire.model, which may not have been loaded
            raise
        _fail(error, 2)


def _fail(error: Exception, code: int) -> NoReturn:
    sys.stderr.write(f"fusewire: {printable(error, 2000)}\n")
    sys.exit(code)


def _endpoint(given: str | None, config: Path, of: Callable[[settings.Settings], str]) -> str:
    return given or of(settings.load(config))


def _control(endpoint: str | None, config: Path, timeout: float, curve: client.ClientKeys | None) -> client.Control:
    return client.Control(_endpoint(endpoint, config, lambda s: s.control.endpoint), timeout, curve=curve)


def _keys(key: Path | None, server_key: Path | None) -> client.ClientKeys | None:
    if key is None and server_key is None:
        return None
    if key is None or server_key is None:
        raise typer.BadParameter("--key (yours) and --server-key (the daemon's public one) belong together")
    return client.ClientKeys.load(key, server_key)


def _emit(told: Any, view: Callable[[Any], Any], as_json: bool) -> None:  # noqa: ANN401 - any Struct of ours
    if as_json:
        sys.stdout.write(render.json_line(told) + os.linesep)
        sys.stdout.flush()
    else:
        out.print(view(told))
