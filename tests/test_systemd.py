"""The systemd files: valid, hardened, and in agreement with the settings and with one another."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from ctypes.util import find_library
from pathlib import Path, PurePosixPath

import pytest

from fusewire.daemon import settings

ROOT = Path(__file__).parents[1]
SERVICE = ROOT / "systemd/fusewire.service"
TEMPLATE = ROOT / "systemd/fusewire@.service"
NOTIFY_RELOAD = ROOT / "systemd/fusewire.service.d/notify-reload.conf"
CREDENTIALS = ROOT / "systemd/fusewire.service.d/credentials.conf"
SYSUSERS = ROOT / "systemd/fusewire.sysusers.conf"
TMPFILES = ROOT / "systemd/fusewire.tmpfiles.conf"
DEFAULTS = settings.Settings(model=settings.Model(config="anything"))

GROUP = "fusewire-trainers"
EXPOSURE_LIMIT = 2.5


def needs(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"{program} is not installed")


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        check=False,
        capture_output=True,
        text=True,
        timeout=30,
        env={**os.environ, "SYSTEMD_COLORS": "0", "SYSTEMD_EMOJI": "0", "LC_ALL": "C.UTF-8"},
    )


def directives(unit: Path = SERVICE) -> dict[str, list[str]]:
    """Directive -> its values, in order, of all sections together."""
    found: dict[str, list[str]] = {}
    for line in unit.read_text().splitlines():
        if match := re.match(r"(\w+)=(.*)", line):
            found.setdefault(match[1], []).append(match[2])
    return found


def only(name: str) -> str:
    (found,) = directives()[name]
    return found


def install(unit: Path, where: Path) -> Path:
    """Return a unit as systemd can check it: the program that it starts has to exist."""
    installed = where / unit.name
    program = shutil.which("true") or "/bin/true"
    text, count = re.subn(r"(?m)^ExecStart=.*$", f"ExecStart={program}", unit.read_text())
    assert count == 1
    installed.write_text(text)
    return installed


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    return install(SERVICE, tmp_path)


@needs("systemd-analyze")
@pytest.mark.parametrize("unit", [SERVICE, TEMPLATE])
def test_verify_has_no_complaint(unit: Path, tmp_path: Path) -> None:
    result = run("systemd-analyze", "verify", "--man=no", install(unit, tmp_path))

    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@needs("systemd-analyze")
def test_verify_would_have_complained(installed: Path) -> None:
    installed.write_text(installed.read_text().replace("ProtectClock=yes", "ProtectClok=yes"))

    result = run("systemd-analyze", "verify", "--man=no", installed)

    assert "ProtectClok" in result.stderr


@needs("systemd-analyze")
def test_exposure_is_low(installed: Path) -> None:
    result = run("systemd-analyze", "security", "--offline=true", "--no-pager", installed)

    match = re.search(r"Overall exposure level for fusewire\.service: ([\d.]+)", result.stdout)
    assert match is not None, result.stderr
    assert float(match[1]) <= EXPOSURE_LIMIT


@needs("systemd-sysusers")
def test_users_and_groups_are_made(tmp_path: Path) -> None:
    make_users(tmp_path)

    (user,) = re.findall(r"(?m)^fusewire:.*$", (tmp_path / "etc/passwd").read_text())
    (group,) = re.findall(rf"(?m)^{GROUP}:.*$", (tmp_path / "etc/group").read_text())
    _, _, _, primary, _, home, shell = user.split(":")
    assert primary == group.split(":")[2]
    assert home == str(PurePosixPath("/var/lib") / only("StateDirectory"))
    assert shell.endswith("nologin")


@needs("systemd-sysusers")
@needs("systemd-tmpfiles")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders to another user")
def test_the_drop_folder_belongs_to_the_trainers(tmp_path: Path) -> None:
    uid, gid = make_users(tmp_path)

    result = run("systemd-tmpfiles", f"--root={tmp_path}", "--create", TMPFILES)

    assert (result.returncode, result.stderr) == (0, "")
    drop = tmp_path / DEFAULTS.folder.path.lstrip("/")
    for folder, mode in ((drop, 0o2770), (drop.parent, 0o750)):
        found = folder.stat()
        assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (uid, gid, mode)


def make_users(root: Path) -> tuple[int, int]:
    (root / "etc").mkdir()
    (root / "var/lib").mkdir(parents=True)
    result = run("systemd-sysusers", f"--root={root}", SYSUSERS)
    assert result.returncode == 0, result.stderr
    match = re.search(r"(?m)^fusewire:[^:]*:(\d+):(\d+):", (root / "etc/passwd").read_text())
    assert match is not None
    return int(match[1]), int(match[2])


def test_sockets_and_drop_folder_of_the_settings_are_where_the_unit_may_write() -> None:
    runtime = PurePosixPath("/run") / only("RuntimeDirectory")
    state = PurePosixPath("/var/lib") / only("StateDirectory")

    for endpoint in (DEFAULTS.socket.endpoint, DEFAULTS.events.endpoint, DEFAULTS.control.endpoint):
        assert PurePosixPath(endpoint.removeprefix("ipc://")).parent == runtime
    assert PurePosixPath(DEFAULTS.folder.path).parent == state


def test_trainers_can_reach_the_sockets_and_nobody_else_can() -> None:
    folder = int(only("RuntimeDirectoryMode"), 8)

    assert only("Group") == GROUP
    assert folder & 0o070 == 0o050  # pass, not write: a writer could put its own socket in place of ours
    assert folder & 0o007 == 0
    assert DEFAULTS.control.socket_mode == 0o660


def test_the_state_folder_has_one_owner_and_mode() -> None:
    """Else systemd and systemd-tmpfiles would change it back and forth."""
    lines = [line.split() for line in TMPFILES.read_text().splitlines() if line.startswith("d ")]
    (state,) = [line for line in lines if line[1] == f"/var/lib/{only('StateDirectory')}"]

    assert state[2:5] == [only("StateDirectoryMode"), only("User"), only("Group")]


def test_the_program_and_its_settings_are_those_of_the_readme() -> None:
    command, _, config = only("ExecStart").rpartition(" --config ")
    readme = (ROOT / "README.md").read_text()

    assert command.endswith("/bin/fusewire run")
    assert f"python3 -m venv {command.removesuffix('/bin/fusewire run')}\n" in readme
    assert f"config/fusewire.toml {config}\n" in readme
    for name in ("fusewire.service", "fusewire.sysusers.conf", "fusewire.tmpfiles.conf"):
        assert f"systemd/{name} " in readme


def test_notification_and_stop() -> None:
    """notify-reload would need systemd 253; the stop has to fit, lingering sockets included."""
    assert only("Type") == "notify"
    assert only("NotifyAccess") == "main"
    assert int(only("WatchdogSec")) >= 10
    assert int(only("TimeoutStopSec")) == 10
    assert only("ExecReload") == "/bin/sh -c 'kill -HUP $MAINPID'", "/bin/kill is of a package that may be missing"


# ------------------------------------------------------------------------------- one daemon per GPU, and drop-ins

OF_AN_INSTANCE = {
    "Description": "fusewire on GPU %i: keeps a resident DeepSeek model's weights current",
    "ExecStart": "/opt/fusewire/bin/fusewire run --config /etc/fusewire/%i.toml",
    "RuntimeDirectory": "fusewire-%i",
    "StateDirectory": "fusewire-%i",
}
"""All that the template says otherwise than the unit, besides the environment."""
BASES = {"run": "RuntimeDirectory", "var/lib": "StateDirectory"}


def test_the_template_is_the_unit_but_for_what_is_an_instances_own() -> None:
    unit, template = directives(), directives(TEMPLATE)

    assert {name: values for name, values in template.items() if unit.get(name) != values} == {
        **{name: [value] for name, value in OF_AN_INSTANCE.items()},
        "Environment": ["CUDA_VISIBLE_DEVICES=%i", "CUDA_DEVICE_ORDER=PCI_BUS_ID", *unit["Environment"]],
    }
    assert list(unit) == list(template)


def test_the_templates_commands_make_settings_and_folders_of_an_instance(tmp_path: Path) -> None:
    commands = re.findall(r"(?m)^# +(sed .*) > (/etc/\S+)$", TEMPLATE.read_text())
    config, folders = (run("sh", "-c", f"cd {ROOT} && {command}").stdout for command, _ in commands)

    assert [path for _, path in commands] == ["/etc/fusewire/0.toml", "/etc/tmpfiles.d/fusewire-0.conf"]
    (tmp_path / "0.toml").write_text(config)
    made = settings.load(tmp_path / "0.toml")
    runtime, state = (f"/{where}/{OF_AN_INSTANCE[name]}".replace("%i", "0") for where, name in BASES.items())
    for endpoint in (made.socket.endpoint, made.events.endpoint, made.control.endpoint):
        assert PurePosixPath(endpoint.removeprefix("ipc://")).parent == PurePosixPath(runtime)
    assert made.folder.path == f"{state}/shards"
    lines = [line.split() for line in folders.splitlines() if line.startswith("d ")]
    own = [line.split() for line in TMPFILES.read_text().splitlines() if line.startswith("d ")]
    assert [line[1] for line in lines] == [state, f"{state}/shards"]
    assert [line[2:] for line in lines] == [line[2:] for line in own]


@needs("systemd-analyze")
@pytest.mark.parametrize("drop_in", [NOTIFY_RELOAD, CREDENTIALS])
def test_a_drop_in_is_understood(drop_in: Path, installed: Path) -> None:
    """systemd 252 has one complaint, which the drop-in's comment foretells."""
    version = int(run("systemd-analyze", "--version").stdout.split()[1])
    folder = installed.with_name(installed.name + ".d")
    folder.mkdir()
    shutil.copy(drop_in, folder)

    result = run("systemd-analyze", "verify", "--man=no", installed)

    complaints = result.stderr.splitlines()
    if drop_in is NOTIFY_RELOAD and version < 253:
        (only_one,) = complaints
        assert only_one.endswith("Failed to parse service type, ignoring: notify-reload")
    else:
        assert (result.returncode, complaints) == (0, [])


def test_the_drop_ins_say_what_they_are_for() -> None:
    assert directives(NOTIFY_RELOAD) == {"Type": ["notify-reload"], "ExecReload": [""]}
    assert directives(CREDENTIALS) == {"LoadCredential": ["fusewire.key:/etc/fusewire/keys/fusewire.key_secret"]}


def test_what_would_break_the_service_is_not_hardened_away() -> None:
    """Each was seen to break something; the unit's comments say what."""
    found = directives()

    for name in ("PrivateDevices", "MemoryDenyWriteExecute", "PrivateUsers", "PrivateNetwork"):
        assert name not in found
    assert found["SystemCallFilter"][-1] == "sched_setscheduler"
    assert "AF_NETLINK" in only("RestrictAddressFamilies").split()
    assert only("AmbientCapabilities") == only("CapabilityBoundingSet") == "CAP_LEASE"
    assert only("DevicePolicy") == "closed"
    assert found["DeviceAllow"] == ["char-nvidia* rw"]
    assert only("LimitMEMLOCK") == "infinity"


# ------------------------------------------------------------------- the daemon under the unit's call rules

CONFINED = Path(__file__).with_name("confined.py")
PATIENCE = 40.0
"""Seconds for a start; far below the unit's TimeoutStartSec."""
needs_libseccomp = pytest.mark.skipif(find_library("seccomp") is None, reason="libseccomp is not installed")


@needs("systemd-analyze")
@needs_libseccomp
@pytest.mark.parametrize(
    ("forbidden", "error"),
    [
        ("import os; os.sched_setaffinity(0, os.sched_getaffinity(0))", "PermissionError"),
        ("import os; os.nice(1)", "PermissionError"),
        ("import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)", "not supported by protocol"),
    ],
)
def test_what_the_unit_forbids_is_refused_here(forbidden: str, error: str) -> None:
    result = run(sys.executable, CONFINED, SERVICE, sys.executable, "-c", forbidden)

    assert error in result.stderr


@needs("systemd-analyze")
@needs_libseccomp
def test_the_daemon_lives_under_the_units_call_rules(tmp_path: Path) -> None:
    """Ready with its checkpoint loaded, pinging, alive after a reload, and gone in time when told to stop."""
    checkpoint = ROOT / "daemon/demo/checkpoints/v2"
    (tmp_path / "shards").mkdir()
    config = tmp_path / "fusewire.toml"
    config.write_text(
        f"""
        model = {{ config = "{checkpoint}/config.json", checkpoint = "{checkpoint}", dtype = "float32" }}
        folder.path = "shards"
        socket.endpoint = "ipc://ingest.sock"
        events.endpoint = "tcp://127.0.0.1:*"
        control.endpoint = "ipc://control.sock"
        state.path = "state"
        metrics.port = 0
        """
    )
    environment = {
        **os.environ,
        **dict([only("Environment").split("=", 1)]),
        "NOTIFY_SOCKET": str(tmp_path / "notify"),
        "WATCHDOG_USEC": "2000000",
    }
    command = [sys.executable, str(CONFINED), str(SERVICE), sys.executable, "-m", "fusewire.daemon"]
    log = tmp_path / "log"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd, log.open("wb") as output:
        systemd.bind(environment["NOTIFY_SOCKET"])
        daemon = subprocess.Popen(
            [*command, "run", "--config", str(config)], env=environment, stdout=output, stderr=output
        )
        try:
            wait_for(systemd, "READY=1", daemon, log)
            wait_for(systemd, "WATCHDOG=1", daemon, log)
            daemon.send_signal(signal.SIGHUP)
            wait_for(systemd, "WATCHDOG=1", daemon, log)
            daemon.send_signal(signal.SIGTERM)
            assert daemon.wait(float(only("TimeoutStopSec"))) == 0, log.read_text()
        finally:
            daemon.kill()
            daemon.wait()


def wait_for(systemd: socket.socket, line: str, daemon: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the daemon tells systemd a line."""
    deadline = time.monotonic() + PATIENCE
    systemd.settimeout(0.2)
    while time.monotonic() < deadline and daemon.poll() is None:
        try:
            if line in systemd.recv(4096).decode().splitlines():
                return
        except TimeoutError:
            continue
    pytest.fail(f"no {line} (exit code {daemon.poll()}):\n{log.read_text()}")
