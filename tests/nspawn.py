"""fusewire under a real systemd, as root: ``python tests/nspawn.py [--root DIR]``, or ``make test-systemd``.

A Debian is made once with debootstrap and kept. Each run boots a copy of it with systemd-nspawn, installs this checkout
there with the README's own commands, and tries what only a running systemd can tell: readiness, who may do what,
reload, watchdog, stop, reboot. Then the copy is thrown away.

Needs debootstrap, systemd-nspawn, nsenter and setpriv. Everything is fetched on this side, the Debian by debootstrap
and wheels for its Python by pip with its own settings; the machine itself has no network.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).parents[1]
INSTALLED_FROM = ("daemon", "model", "config", "systemd", "pyproject.toml", "constraints.txt", "README.md", "LICENSE")
SUITE = "bookworm"
PACKAGES = "systemd,systemd-sysv,dbus,python3,python3-venv"
TOOLS = ("debootstrap", "systemd-nspawn", "nsenter", "setpriv")
PATIENCE = 60.0
"""Seconds for whatever takes moments on an idle machine."""
EXPOSURE_LIMIT = 1.8
RELOAD_TYPE_SINCE = 253
"""The first systemd that knows Type=notify-reload."""
FUSEWIRE = "/opt/fusewire/bin/fusewire"
TRAINER, OUTSIDER = "alice", "bob"
MODEL = Path("daemon/demo/checkpoints/v2")
LAYERS = {0, 1, 2}
EDITOR = r"""#!/bin/sh
# What a person would do in an editor.
exec sed -i -e 's|^config = .*|config = "/srv/model/config.json"|' -e 's|^checkpoint = .*|checkpoint = "/srv/model"|' \
  ${PORT:+-e "s|^port = .*|port = $PORT|" -e "s|^chunk_bytes = .*|chunk_bytes = 65536|"} "$1"
"""


ONE_SHARD = """
import glob, safetensors.torch as st
st.save_file({k: v for f in glob.glob("/srv/model/model-*") for k, v in st.load_file(f).items()}, "whole.safetensors")
"""
SHARES_MEMORY = """
from fusewire.daemon.client import Trainer
from fusewire.daemon.segment import Attached
with Trainer("ipc:///run/fusewire-0/ingest.sock", 10) as trainer:
    Attached(trainer.welcome.shared, trainer.welcome.chunk_bytes).close()
"""


class Unexpected(Exception):
    """A check, or what has to precede it, did not come out as it should."""


def expect(holds: object, what: str) -> None:
    """Raise `Unexpected` unless something holds."""
    if not holds:
        raise Unexpected(what)


def wait_until(what: str, wanted: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """Ask until the answer is true, and return it; `Unexpected` after so many seconds."""
    deadline = time.monotonic() + seconds
    while not (answer := wanted()):
        expect(time.monotonic() < deadline, f"not within {seconds:g} s: {what}")
        time.sleep(0.1)
    return answer


def here(*command: str | Path, seconds: float) -> None:
    """Run a program on this side; what it says is shown if it fails."""
    result = subprocess.run(
        command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds
    )
    expect(result.returncode == 0, f"{shlex.join(map(str, command))}: {result.returncode}\n{result.stdout[-3000:]}")


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    """Say how long something took."""
    begin = time.monotonic()
    yield
    print(f"{time.monotonic() - begin:8.1f} s  {what}", flush=True)


# ------------------------------------------------------------------------------------- what is kept between runs


def debian(root: Path) -> Path:
    """Return the folder of a small Debian, made if it is not there yet."""
    ready = root / SUITE
    if not ready.exists():
        new = root / f"{SUITE}.part"
        shutil.rmtree(new, ignore_errors=True)
        with timed("debootstrap"):
            here("debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, new, seconds=1800)
        new.rename(ready)
    return ready


def wheels(root: Path, base: Path, checkout: Path) -> Path:
    """Return the folder of all wheels that ``pip install .`` needs in the Debian, fetched if they are not there yet."""
    python = (base / "usr/bin/python3").readlink().name.removeprefix("python")
    wanted = [python.encode(), *((checkout / name).read_bytes() for name in ("pyproject.toml", "constraints.txt"))]
    ready = root / f"wheels-{hashlib.sha256(b'|'.join(wanted)).hexdigest()[:12]}"
    if not ready.exists():
        for old in root.glob("wheels-*"):
            shutil.rmtree(old)
        new = ready.with_suffix(".part")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
        pip += ["--dest", str(new), "--python-version", python, "--only-binary=:all:"]
        with timed("fetching wheels"):
            here(*pip, "-c", checkout / "constraints.txt", checkout, "setuptools>=77", seconds=1800)
        new.rename(ready)
    return ready


def copy_checkout(where: Path) -> Path:
    """Copy what an installation needs: building in the checkout itself would leave things in it."""
    where.mkdir()
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in INSTALLED_FROM:
        source = CHECKOUT / name
        if source.is_dir():
            shutil.copytree(source, where / name, ignore=skip)
        else:
            shutil.copy(source, where)
    return where


# ------------------------------------------------------------------------------------------------- the machine


class Machine:
    """A booted Debian.

    Args:
        root: Its folder.
        shown: Folder of this side -> where it is seen there, read-only.
    """

    def __init__(self, root: Path, shown: dict[Path, str]) -> None:
        self.root = root
        self.log = root.with_name("console.log")
        self._binds = [f"--bind-ro={folder}:{there}" for folder, there in shown.items()]
        self.nspawn: subprocess.Popen[bytes] | None = None
        self.leader = 0

    def boot(self) -> None:
        """Start it, and wait until everything that starts at boot has started."""
        # No network: its loopback and its ports are its own. Not registered: this side need not run systemd.
        options = ["--quiet", "--register=no", "--keep-unit", "--private-network", f"--machine=fusewire-{os.getpid()}"]
        with self.log.open("wb") as output:
            self.nspawn = subprocess.Popen(
                ["setpriv", "--pdeathsig=TERM", "systemd-nspawn", *options, *self._binds, "-D", self.root, "--boot"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # an interrupt from the keyboard is for us alone
            )
        self.leader = wait_until("the machine's first process", self._find_leader)
        wait_until("the machine is up", self._is_up)

    def reboot(self) -> None:
        """Shut it down from inside and start it again; with these options nspawn leaves the second half to us."""
        self.run("systemctl reboot", check=False)
        assert self.nspawn is not None
        self.nspawn.wait(PATIENCE)
        self.boot()

    def _is_up(self) -> bool:
        """Until its bus is there, the question fails."""
        return self.run("systemctl is-system-running", check=False).strip() in {"running", "degraded"}

    def _find_leader(self) -> int:
        assert self.nspawn is not None
        expect(self.nspawn.poll() is None, f"systemd-nspawn has ended:\n{self.log.read_text(errors='replace')[-3000:]}")
        for entry in Path("/proc").glob("[0-9]*/status"):
            with contextlib.suppress(OSError):
                status = entry.read_text()
                if f"\nPPid:\t{self.nspawn.pid}\n" in status and re.search(r"(?m)^NSpid:.*\t1$", status):
                    return int(entry.parent.name)
        return 0

    def command(self, shell: str, user: str, seconds: float, variables: dict[str, str] | None = None) -> list[str]:
        """Return the command that runs a line of shell there; it ends after so many seconds."""
        home = "/root" if user == "root" else f"/home/{user}"
        known = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": home, "LANG": "C.UTF-8", "SYSTEMD_PAGER": "cat"}
        environment = [f"{name}={text}" for name, text in {**known, **(variables or {})}.items()]
        limit = ["timeout", "--kill-after=5", f"{seconds:g}"]
        return [
            *("nsenter", "--all", "--target", str(self.leader), "env", "--ignore-environment", *environment),
            *(() if user == "root" else ("runuser", "-u", user, "--")),
            *(*limit, "sh", "-c", shell),
        ]

    def run(
        self,
        shell: str,
        *,
        user: str = "root",
        seconds: float = PATIENCE,
        check: bool = True,
        variables: dict[str, str] | None = None,
    ) -> str:
        """Run a line of shell there and return what it says; unless ``check`` is off, it has to succeed."""
        result = subprocess.run(
            self.command(shell, user, seconds, variables),
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds + 10,
        )
        expect(not check or result.returncode == 0, f"{user}: {shell}: {result.returncode}\n{result.stdout[-3000:]}")
        return result.stdout

    def refused(self, shell: str, user: str, reason: str) -> None:
        """Run what has to fail, with this reason."""
        said = self.run(f"{shell} && echo it works", user=user, check=False)
        expect("it works" not in said and reason in said, f"{user}: {shell}: {said}")

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Write a file there; not in /run or /tmp, which are mounts of the machine's own."""
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(mode)

    def close(self) -> None:
        """Shut it down, and kill it if it won't."""
        nspawn = self.nspawn
        while nspawn is not None and nspawn.poll() is None:
            nspawn.terminate() if self.leader else nspawn.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                nspawn.wait(PATIENCE / 2)
            self.leader = 0

    # ------------------------------------------------------------------------------------ asking the service

    def show(self, unit: str = "fusewire") -> dict[str, str]:
        """Return all properties of a unit."""
        lines = self.run(f"systemctl show {unit}").splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def is_in(self, state: str, unit: str = "fusewire") -> bool:
        """Whether a unit is in a state such as ``active/running``."""
        shown = self.show(unit)
        return f"{shown['ActiveState']}/{shown['SubState']}" == state

    def status(self, config: str = "/etc/fusewire/fusewire.toml", user: str = "root") -> dict[str, Any]:
        """Return what the daemon answers to `fusewire status`, or nothing if it doesn't."""
        said = self.run(f"{FUSEWIRE} status --json --config {config} --timeout 2", user=user, check=False)
        told: dict[str, Any] = json.loads(said) if said.startswith("{") else {}
        return told

    def daemons_log(self, unit: str = "fusewire") -> list[str]:
        """Return the lines that the daemon itself has written to the journal."""
        return self.run(f"journalctl -o cat --no-pager _TRANSPORT=stdout _SYSTEMD_UNIT={unit}.service").splitlines()

    def logged(self, event: str, since: int = 0) -> dict[str, Any]:
        """Return the newest entry of a name in the journal, of those after the first ``since`` lines."""
        found = [json.loads(line) for line in self.daemons_log()[since:]]
        named: list[dict[str, Any]] = [line for line in found if line["event"] == event]
        return named[-1] if named else {}

    def wait_live(self, version: int, config: str = "/etc/fusewire/fusewire.toml") -> None:
        """Wait until the model answers with a version."""
        wait_until(f"version {version} is live", lambda: self.status(config).get("version") == version)


# -------------------------------------------------------------------------------------------- what is written


def readme_commands() -> list[str]:
    """Return the commands of the README's "As a service"."""
    (chapter,) = re.findall(r"(?ms)^## As a service$(.*?)^## ", (CHECKOUT / "README.md").read_text())
    (block,) = re.findall(r"(?ms)^```console$(.*?)^```$", chapter)
    commands = [line.removeprefix("# ") for line in block.splitlines() if line.startswith("# ")]
    expect(commands, "the README has no commands for a service")
    return commands


def commands_in(file: str) -> list[str]:
    """Return the commands in the first comment of a unit or drop-in: those that are indented."""
    head = (CHECKOUT / "systemd" / file).read_text().split("\n\n")[0]
    return re.findall(r"(?m)^#   (\S.*)$", head)


def carry_out(machine: Machine, commands: list[str], **variables: str) -> None:
    """Run commands in the checkout's copy there, as root, one after the other."""
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/mnt/wheels", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    for command in commands:
        with timed(f"  # {command}"):
            machine.run(
                f"cd /root/fusewire && {command}",
                seconds=600,
                variables={**offline, "EDITOR": "/root/edit", **variables},
            )


def as_in_the_readme(machine: Machine) -> None:
    """The README's commands install the service and start it."""
    carry_out(machine, readme_commands())
    expect(machine.is_in("active/running"), "it runs")
    expect(machine.run("systemctl is-enabled fusewire").strip() == "enabled", "it is enabled")
    status = machine.status(user=TRAINER)
    expect(status.get("state") == "ready", f"it is ready: {status}")
    expect(status["layers"]["fused"] == sorted(LAYERS), f"its layers are fused: {status['layers']}")
    expect(machine.show()["StatusText"].startswith("ready"), "systemctl status says so")


def ready_comes_after_the_checkpoint(machine: Machine) -> None:
    """The unit is activating while the checkpoint is being loaded, also through a SIGHUP, and active right after."""
    machine.run("systemctl stop fusewire")
    lines = len(machine.daemons_log())
    shard = next((machine.root / "srv/model").glob("model-00006*"))
    with shard.open("r+b"):  # somebody writes it still: the daemon waits
        machine.run("systemctl start --no-block fusewire")
        wait_until("it answers", lambda: machine.status().get("state") == "starting")
        expect(machine.is_in("activating/start"), "not active while the checkpoint is being loaded")
        machine.run("systemctl kill --signal=HUP --kill-who=main fusewire")
        wait_until("it has reloaded", lambda: machine.logged("settings.reloaded", lines))
        expect(machine.is_in("activating/start"), "a reload does not end the start")
    wait_until("it is active", lambda: machine.is_in("active/running"))
    expect(machine.status()["state"] == "ready", "ready as soon as it is active")


def a_trainer_drops_shards_and_hears_of_them(machine: Machine) -> None:
    """A member of the group writes a version into the folder and hears it fuse and go live."""
    heard = machine.root.with_name("heard.jsonl")
    # It ends when its input does: killed from out here, it would leave a zombie there that nobody waits for.
    listen = f"{FUSEWIRE} listen --json --for {PATIENCE:g} & read line; kill $!"
    with heard.open("wb") as output:
        listening = subprocess.Popen(
            machine.command(listen, TRAINER, PATIENCE + 5), stdin=subprocess.PIPE, stdout=output
        )
    try:
        wait_until("the first line", heard.read_text)
        drop = "/var/lib/fusewire/shards/step_1"
        machine.run(f"mkdir {drop} && install -m 640 /srv/model/model-*.safetensors {drop}", user=TRAINER)
        wait_until("version.live", lambda: '"version.live"' in heard.read_text())
    finally:
        listening.communicate(timeout=PATIENCE + 20)
    events = [json.loads(line) for line in heard.read_text().splitlines()]
    fused = {event["layer"] for event in events if event.get("event") == "layer.fused" and event["version"] == 1}
    expect(fused == LAYERS, f"layer.fused of version 1: {events}")
    live = [event["version"] for event in events if event.get("event") == "version.live"]
    expect(live == [1], f"version.live: {live}")
    expect(not machine.status()["rejected"], "nothing was rejected")
    shown = machine.run("stat -c '%U %G %a' /var/lib/fusewire/shards/step_1/model-00001*").strip()
    expect(shown == f"{TRAINER} fusewire-trainers 640", f"whose the shard is: {shown}")


def nobody_else_can_write_or_connect(machine: Machine) -> None:
    """Who is not in the group can't; who is can't put another socket in the place of the daemon's."""
    machine.refused("touch /var/lib/fusewire/shards/x", OUTSIDER, "Permission denied")
    machine.refused("ls /run/fusewire", OUTSIDER, "Permission denied")
    for name in ("ingest", "events", "control"):
        connect = f"import socket; socket.socket(socket.AF_UNIX).connect('/run/fusewire/{name}.sock')"
        machine.refused(f'python3 -c "{connect}"', OUTSIDER, "Permission denied")
        machine.run(f'python3 -c "{connect}"', user=TRAINER)
        machine.refused(f"rm -f /run/fusewire/{name}.sock", TRAINER, "Permission denied")
    machine.refused(f"{FUSEWIRE} status --timeout 1", OUTSIDER, "fusewire:")
    machine.refused("touch /run/fusewire/x", TRAINER, "Permission denied")
    machine.refused("touch /var/lib/fusewire/x", TRAINER, "Permission denied")


def a_reload_changes_the_log_level(machine: Machine) -> None:
    """`systemctl reload` applies it, and the daemon goes on."""
    before, lines = machine.show(), len(machine.daemons_log())
    settings = machine.root / "etc/fusewire/fusewire.toml"
    text = settings.read_text()
    settings.write_text(text.replace('level = "info"', 'level = "debug"'))
    machine.run("systemctl reload fusewire")
    wait_until("settings.reloaded", lambda: machine.logged("settings.reloaded", lines))
    applied = machine.logged("settings.reloaded", lines)["applied"]
    expect(applied == ["log.level"], f"what was applied: {applied}")
    wait_until("a debug line", lambda: machine.logged("daemon.heartbeat", lines))
    settings.write_text(text)
    machine.run("systemctl reload fusewire")
    wait_until("back at info", lambda: machine.status().get("state") == "ready" and machine.is_in("active/running"))
    expect(machine.show()["MainPID"] == before["MainPID"], "the same process")


def the_watchdog_restarts_a_stuck_daemon(machine: Machine) -> None:
    """A daemon that is stopped dead is killed and started anew, and comes back with what the folder holds."""
    machine.write("/etc/systemd/system/fusewire.service.d/watchdog.conf", "[Service]\nWatchdogSec=5\n")
    machine.run("systemctl daemon-reload && systemctl restart fusewire")
    machine.wait_live(1)
    before = machine.show()
    machine.run("systemctl kill --signal=STOP --kill-who=main fusewire")
    wait_until("it was started again", lambda: int(machine.show()["NRestarts"]) == int(before["NRestarts"]) + 1)
    wait_until("it is up again", lambda: machine.is_in("active/running"))
    expect(machine.show()["MainPID"] not in {before["MainPID"], "0"}, "another process")
    said = machine.run("journalctl -o cat --no-pager -u fusewire")
    expect("Watchdog timeout" in said and "Failed with result 'watchdog'" in said, said[-2000:])
    expect(machine.status()["state"] == "ready", "ready as soon as it is active")
    machine.wait_live(1)
    pinged = time.monotonic()
    wait_until("it outlives its watchdog", lambda: time.monotonic() > pinged + 8)
    expect(int(machine.show()["NRestarts"]) == int(before["NRestarts"]) + 1, "pinged from then on")
    machine.run("rm /etc/systemd/system/fusewire.service.d/watchdog.conf && systemctl daemon-reload")


def a_stop_is_quick_and_clean(machine: Machine) -> None:
    """Within TimeoutStopSec, with exit status 0, and the sockets' folder is gone."""
    begin = time.monotonic()
    machine.run("systemctl stop fusewire")
    took, shown = time.monotonic() - begin, machine.show()
    expect((shown["Result"], shown["ExecMainStatus"], shown["ExecMainCode"]) == ("success", "0", "1"), str(shown))
    expect(took < float(shown["TimeoutStopUSec"].removesuffix("s")), f"{took:.1f} s of {shown['TimeoutStopUSec']}")
    expect(machine.is_in("inactive/dead"), "it is down")
    machine.run("test ! -e /run/fusewire")
    machine.run("systemctl start fusewire")


def little_is_exposed(machine: Machine) -> None:
    """`systemd-analyze security` gives the unit a low number."""
    said = machine.run("systemd-analyze security --no-pager fusewire.service")
    (number,) = re.findall(r"Overall exposure level for fusewire\.service: ([\d.]+)", said)
    expect(float(number) <= EXPOSURE_LIMIT, f"exposure {number}, more than {EXPOSURE_LIMIT}")


def an_instance_for_each_gpu(machine: Machine) -> None:
    """The template is valid; an instance runs beside the service, with settings, folders and sockets of its own."""
    machine.run("install -m 644 /root/fusewire/systemd/fusewire@.service /etc/systemd/system")
    said = machine.run("systemd-analyze verify --man=no fusewire@0.service")
    expect(not said, said)
    carry_out(machine, commands_in("fusewire@.service"), PORT="9106")
    machine.run("systemctl daemon-reload && systemctl start fusewire@0")
    config = "/etc/fusewire/0.toml"
    status = machine.status(config, TRAINER)
    expect(status["state"] == "ready" and status["pid"] != machine.status()["pid"], f"two daemons: {status}")
    variables = machine.run(f"tr '\\0' '\\n' < /proc/{status['pid']}/environ").splitlines()
    expect("CUDA_VISIBLE_DEVICES=0" in variables, "it sees its GPU alone")
    for script in (SHARES_MEMORY, ONE_SHARD):  # one that comes in chunks, whose memory the group can write
        machine.run(f"cd && /opt/fusewire/bin/python -c '{script}'", user=TRAINER)
    machine.run(f"cd && {FUSEWIRE} push whole.safetensors --version 7 --config {config}", user=TRAINER)
    machine.wait_live(7, config)
    expect(machine.status()["version"] == 1, "the other one has not heard of it")
    machine.run("install -m 640 -D -t /var/lib/fusewire-0/shards/step_8 /srv/model/model-*.safetensors", user=TRAINER)
    machine.wait_live(8, config)
    machine.refused("ls /run/fusewire-0 /var/lib/fusewire-0", OUTSIDER, "Permission denied")
    machine.run("systemctl stop fusewire@0")
    expect(machine.show("fusewire@0")["Result"] == "success", "it stops cleanly")


def a_reload_that_is_waited_for(machine: Machine) -> None:
    """With the drop-in for systemd 253 a reload comes back when it is done; 252 says that it doesn't know the type."""
    version = int(machine.run("systemctl --version").split()[1])
    carry_out(machine, commands_in("fusewire.service.d/notify-reload.conf"))
    said, shown = machine.run("systemd-analyze verify --man=no fusewire.service"), machine.show()
    expect(machine.is_in("active/running"), "it runs")
    if version < RELOAD_TYPE_SINCE:
        expect("Failed to parse service type, ignoring: notify-reload" in said, f"it warns: {said}")
        expect((shown["Type"], shown["CanReload"]) == ("notify", "no"), "the old type, and no reload")
    else:
        expect((said, shown["Type"]) == ("", "notify-reload"), f"the new type: {said}")
        lines = len(machine.daemons_log())
        machine.run("systemctl reload fusewire")
        expect(machine.logged("settings.reloaded", lines), "done when the command comes back")
        expect(machine.is_in("active/running"), "it goes on")
    machine.run("rm /etc/systemd/system/fusewire.service.d/notify-reload.conf && systemctl daemon-reload")


def a_key_is_handed_over(machine: Machine) -> None:
    """With the drop-in for credentials the daemon can read its key, and nobody else; without the key, no start."""
    carry_out(machine, commands_in("fusewire.service.d/credentials.conf"))
    pid = machine.show()["MainPID"]
    variables = dict(
        line.split("=", 1) for line in machine.run(f"tr '\\0' '\\n' < /proc/{pid}/environ").splitlines() if "=" in line
    )
    key = f"{variables['CREDENTIALS_DIRECTORY']}/fusewire.key"
    # Seen as the daemon sees it: with its user, in its mount namespace.
    said = machine.run(
        f"nsenter --mount --target {pid} setpriv --reuid=fusewire --clear-groups --regid=nogroup cat {key}"
    )
    expect(said == machine.run("cat /etc/fusewire/keys/fusewire.key_secret"), "the daemon reads its key")
    machine.refused(f"cat {key}", TRAINER, "cat: ")
    machine.refused("cat /etc/fusewire/keys/fusewire.key_secret", TRAINER, "Permission denied")

    machine.run("systemctl stop fusewire && rm /etc/fusewire/keys/fusewire.key_secret")
    machine.run("systemctl start fusewire", check=False)
    shown = machine.show()
    expect(shown["ExecMainStatus"] == "243", f"no start without its key: {shown['ExecMainStatus']}")
    machine.run("rm /etc/systemd/system/fusewire.service.d/credentials.conf && systemctl daemon-reload")
    machine.run("systemctl stop fusewire && systemctl reset-failed fusewire && systemctl start fusewire")


def it_comes_up_at_boot(machine: Machine) -> None:
    """After a reboot it is up and ready by itself, with what the folder holds."""
    machine.reboot()
    expect(machine.is_in("active/running"), "it is up")
    machine.wait_live(1)
    machine.refused("touch /var/lib/fusewire/shards/x", OUTSIDER, "Permission denied")


def every_line_of_the_log_is_json(machine: Machine) -> None:
    """Whatever the daemon has written to the journal so far is whole JSON."""
    lines = machine.daemons_log() + machine.daemons_log("fusewire@0")
    expect(len(lines) > 50, f"there are lines: {len(lines)}")
    for line in lines:
        try:
            expect({"event", "level", "timestamp"} <= set(json.loads(line)), f"what every line has: {line}")
        except ValueError as error:
            raise Unexpected(f"not JSON: {line!r}") from error


def a_wrong_setting_is_seen(machine: Machine) -> None:
    """It is not retried for ever, and the journal names it."""
    settings = machine.root / "etc/fusewire/fusewire.toml"
    settings.write_text(settings.read_text().replace("\nsettle = ", "\nsetle = "))
    machine.run("systemctl restart fusewire", check=False)
    wait_until("it stays down", lambda: machine.is_in("failed/failed"))
    expect("setle" in "\n".join(machine.daemons_log()), "the journal names the key")


CHECKS: tuple[Callable[[Machine], None], ...] = (
    as_in_the_readme,
    ready_comes_after_the_checkpoint,
    a_trainer_drops_shards_and_hears_of_them,
    nobody_else_can_write_or_connect,
    a_reload_changes_the_log_level,
    the_watchdog_restarts_a_stuck_daemon,
    a_stop_is_quick_and_clean,
    little_is_exposed,
    an_instance_for_each_gpu,
    a_reload_that_is_waited_for,
    a_key_is_handed_over,
    every_line_of_the_log_is_json,
    it_comes_up_at_boot,
    a_wrong_setting_is_seen,
)
"""In this order: each leaves the service running for the next, but for the last."""


def succeeds(check: Callable[[Machine], None], machine: Machine) -> bool:
    """Make one check and say how it went."""
    begin = time.monotonic()
    try:
        check(machine)
    except (Unexpected, subprocess.TimeoutExpired, LookupError, ValueError, OSError) as error:
        print(f"FAILED  {check.__doc__}\n{type(error).__name__}: {error}", flush=True)
        with contextlib.suppress(Unexpected, subprocess.TimeoutExpired):
            print(machine.run("journalctl --no-pager --lines 40", check=False), flush=True)
        return False
    print(f"passed {time.monotonic() - begin:6.1f} s  {check.__doc__}", flush=True)
    return True


def test(root: Path) -> int:
    """Make what is needed, boot, check, throw away. Returns the number of checks that failed."""
    base, place = debian(root), root / "machine"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    try:
        with timed("copying the Debian"):
            here("cp", "--archive", "--reflink=auto", base, place / "root", seconds=300)
        checkout = copy_checkout(place / "root/root/fusewire")
        shutil.copytree(checkout / MODEL, place / "root/srv/model")
        machine = Machine(place / "root", {wheels(root, base, checkout): "/mnt/wheels"})
        try:
            with timed("booting"):
                machine.boot()
            machine.run(f"useradd --create-home {TRAINER} && useradd --create-home {OUTSIDER}")
            machine.write("/root/edit", EDITOR, 0o755)
            failed = sum(not succeeds(check, machine) for check in CHECKS)
        finally:
            with timed("shutting down"):
                machine.close()
    finally:
        shutil.rmtree(place, ignore_errors=True)
    print(f"{len(CHECKS) - failed} passed, {failed} failed")
    return failed


def main() -> int:
    """Return the exit code: 0 if every check passed, 1 if not, 2 if there could be none."""
    description, _, _ = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--root", type=Path, default=CHECKOUT / "build/nspawn", metavar="DIR", help="what is kept: DIR")
    root = parser.parse_args().root.resolve()
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None]
    if os.geteuid() != 0 or lacking:
        needs = f"these programs: {', '.join(lacking)}" if lacking else "root"
        sys.stderr.write(f"{parser.prog} needs {needs} (Debian: apt install debootstrap systemd-container)\n")
        return 2
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda came, _: sys.exit(128 + came))  # so that everything is cleaned up
    root.mkdir(parents=True, exist_ok=True)
    with (root / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return 1 if test(root) else 0
        except BlockingIOError:
            sys.stderr.write(f"{root} is in use by another run\n")
        except Unexpected as error:
            sys.stderr.write(f"{error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
