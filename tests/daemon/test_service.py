"""The whole daemon: real processes, files and sockets, against golden tokens and bytes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq
from safetensors.torch import save, save_file
from torch import Tensor

from fusewire.daemon import client, demo, events, wire

CHECKPOINTS = Path(demo.__file__).parent / "checkpoints"
TIMEOUT = 30.0
StartDaemon = Callable[..., Any]
Golden = Callable[[str], dict[str, Tensor]]
NextEvent = Callable[..., Any]


def tokens(golden: dict[str, Tensor]) -> tuple[list[int], list[int]]:
    """Return the golden prompt and its 24 greedy tokens."""
    return golden["ids.a"][0].tolist(), golden["gen.a"].tolist()


def deal(tensors: dict[str, Tensor], seed: int) -> list[dict[str, Tensor]]:
    """Cut a checkpoint into small shards, shuffled; halves of a pair fall where they fall."""
    dice = random.Random(seed)
    names = dice.sample(sorted(tensors), len(tensors))
    shards = []
    while names:
        size = dice.randint(1, 9)
        shards.append({name: tensors[name] for name in names[:size]})
        names = names[size:]
    return shards


@pytest.mark.parametrize("family", ["v2", "v3", "v2lite"])
def test_a_checkpoint_split_over_both_ways_gives_the_golden_tokens(
    family: str, start_daemon: StartDaemon, golden: Golden, checkpoint_tensors: Golden
) -> None:
    daemon = start_daemon(family)
    prompt, expected = tokens(golden(family))
    fused: list[int] = []
    with daemon.subscriber() as subscriber, daemon.trainer() as trainer, daemon.control() as control:
        for number, shard in enumerate(deal(checkpoint_tensors(family), seed=7)):
            if number % 2:
                save_file(shard, daemon.shards / f"{number}.safetensors")
            else:
                assert trainer.push_bytes(save(shard)).status == "applied"
        for event in subscriber.events(timeout=TIMEOUT):
            if isinstance(event, events.LayerFused):
                fused.append(event.layer)
            if isinstance(event, events.ModelReady):
                break
        generated = control.generate(prompt, max_new_tokens=len(expected))
        status = control.status()

    assert list(generated.token_ids) == expected
    assert sorted(fused) == ([] if family == "v2lite" else [0, 1, 2]), "each layer exactly once"
    assert (status.state, status.slots_filled, status.pending) == ("ready", status.slots_total, ())
    assert status.layers.loaded == (0, 1, 2)


def test_an_empty_model_refuses_to_generate_and_says_what_is_missing(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    with (
        daemon.control() as control,
        pytest.raises(Exception, match=r"not ready: \d+ of \d+ slots .*layers? 0"),
    ):
        control.generate([1, 2, 3], max_new_tokens=1)


def test_a_base_checkpoint_makes_the_model_ready(start_daemon: StartDaemon, golden: Golden) -> None:
    daemon = start_daemon("v3", model={"checkpoint": str(CHECKPOINTS / "v3")})
    daemon.wait_status(lambda status: status.state == "ready")
    prompt, expected = tokens(golden("v3"))
    with daemon.control() as control:
        assert list(control.generate(prompt, max_new_tokens=24).token_ids) == expected


@pytest.mark.parametrize("generations", [1, 2])
def test_an_update_equals_a_cold_load_of_the_new_weights(
    generations: int, start_daemon: StartDaemon, golden: Golden, checkpoint_tensors: Golden
) -> None:
    """B over A, halves apart, both ways; then A again: the tokens are those of a cold load each time."""
    old = checkpoint_tensors("v2")
    new = {name: tensor.flip(0).contiguous() for name, tensor in old.items()}
    cold = start_daemon()
    for number, shard in enumerate(deal(new, seed=1)):
        save_file(shard, cold.shards / f"{number}.safetensors")
    cold.wait_status(lambda status: status.state == "ready")
    daemon = start_daemon(model={"checkpoint": str(CHECKPOINTS / "v2"), "generations": generations})
    prompt, before = tokens(golden("v2"))
    with cold.control() as control:
        after = list(control.generate(prompt, max_new_tokens=24).token_ids)
    assert after != before, "the two sets of weights must differ for this test to mean anything"

    with daemon.control() as control, daemon.trainer() as trainer:
        for version, weights, expected in ((1, new, after), (2, old, before)):
            folder = daemon.shards / f"step_{version}"
            folder.mkdir()
            for number, shard in enumerate(deal(weights, seed=version)):
                if number % 2:
                    save_file(shard, folder / f"{number}.safetensors")
                else:
                    assert trainer.push_bytes(save(shard), version=version).status == "applied"
            status = daemon.wait_status(lambda status, version=version: status.version == version)
            assert status.pending == ()
            reply = control.generate(prompt, max_new_tokens=24)
            assert (list(reply.token_ids), reply.version) == (expected, version)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_waiting_half_is_visible_everywhere_and_changes_nothing(
    in_place: bool, start_daemon: StartDaemon, golden: Golden, checkpoint_tensors: Golden
) -> None:
    daemon = start_daemon(model={"checkpoint": str(CHECKPOINTS / "v2"), "generations": 1 if in_place else 2})
    half = "model.layers.1.self_attn.q_a_proj.weight"
    other = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
    tensors = checkpoint_tensors("v2")
    prompt, expected = tokens(golden("v2"))
    with daemon.trainer() as trainer, daemon.control() as control:
        answer = trainer.push_bytes(save({half: tensors[half] * 2}), version=4)
        assert (answer.status, answer.waiting, answer.fused) == ("applied", (half,), ())
        (pending,) = control.pending()
        assert (pending.tensor, pending.version, pending.missing, pending.owned) == (half, 4, (other,), in_place)
        assert daemon.status().layers.waiting == (1,)
        with daemon.subscriber() as late:
            assert late.snapshot.pending[0].tensor == half
        assert list(control.generate(prompt, max_new_tokens=24).token_ids) == expected
        # Another version's half is no partner: it waits for its turn, at the client's.
        with client.Trainer(daemon.endpoint("ingest"), timeout=0.3) as hasty:
            answer = hasty.push_bytes(save({other: tensors[other] * 2}), version=5)
        assert (answer.status, answer.detail) == ("busy", "version 4 is being staged")
        answer = trainer.push_bytes(save({other: tensors[other] * 2}), version=4)
        assert answer.fused == (1,)
        assert control.pending() == ()
        assert trainer.commit(4).status == "accepted"
        daemon.wait_status(lambda status: status.version == 4)
        assert list(control.generate(prompt, max_new_tokens=24).token_ids) != expected


@pytest.mark.parametrize(("generations", "version"), [(1, 9), (1, None), (2, None)])
def test_a_half_whose_partner_never_comes_expires_aloud(
    generations: int,
    version: int | None,
    start_daemon: StartDaemon,
    checkpoint_tensors: Golden,
    next_event: NextEvent,
) -> None:
    """With two generations a numbered version may well bring one half only: its commit tells."""
    daemon = start_daemon(
        model={"checkpoint": str(CHECKPOINTS / "v2"), "generations": generations}, fusion={"max_age": 0.3}
    )
    half = "model.layers.2.self_attn.q_a_proj.weight"
    with daemon.trainer() as trainer, daemon.subscriber() as subscriber:
        trainer.push_bytes(save({half: checkpoint_tensors("v2")[half]}), version=version)
        event = next_event(subscriber, events.FusionExpired)
    status = daemon.status()

    assert (event.tensor, event.layer, event.version, event.cause) == (half, 2, version, "age")
    assert event.age >= 0.3
    assert (status.pending, status.counters["halves_expired"]) == ((), 1)


def test_plain_pyzmq_is_enough(start_daemon: StartDaemon) -> None:
    """Three lines, as in the README."""
    daemon = start_daemon()
    shard = next(CHECKPOINTS.glob("v2/model-00002*")).read_bytes()

    client: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REQ)
    client.connect(daemon.endpoint("ingest"))
    client.send_multipart([b'{"op": "put", "version": 3}', shard])

    assert client.poll(round(TIMEOUT * 1000))
    answer = json.loads(client.recv())
    client.close(0)
    assert (answer["status"], answer["version"]) == ("applied", 3)


def test_versions_that_disagree_are_rejected(start_daemon: StartDaemon, checkpoint_tensors: Golden) -> None:
    daemon = start_daemon()
    tensors = {"model.norm.weight": checkpoint_tensors("v2")["model.norm.weight"]}
    with daemon.trainer() as trainer:
        answer = trainer.push_bytes(save(tensors, metadata={"version": "4"}), version=5)
        assert (answer.status, answer.reason) == ("rejected", "version_disagreement")
        answer = trainer.push_bytes(save(tensors, metadata={"version": "4"}))
        assert (answer.status, answer.version) == ("applied", 4)
    folder = daemon.shards / "step_7"
    folder.mkdir()
    save_file(tensors, folder / "a.safetensors", metadata={"version": "8"})
    status = daemon.wait_status(lambda status: len(status.rejected) == 2)
    assert status.rejected[-1].reason == "version_disagreement"


def test_a_stale_version_is_rejected(start_daemon: StartDaemon, checkpoint_tensors: Golden) -> None:
    daemon = start_daemon()
    tensors = checkpoint_tensors("v2")
    with daemon.trainer() as trainer:
        assert trainer.push_bytes(save(tensors), version=10).status == "applied"
        daemon.wait_status(lambda status: status.version == 10)
        answer = trainer.push_bytes(save(tensors), version=9)
        assert (answer.status, answer.reason) == ("rejected", "stale_version")
        again = trainer.push_bytes(save(tensors), version=10)
        assert (again.status, again.fused) == ("applied", ()), "the same bytes again are fine"
        name = "model.norm.weight"
        conflict = trainer.push_bytes(save({name: tensors[name] + 1}), version=10)
        assert (conflict.status, conflict.reason) == ("rejected", "conflict")


def test_what_is_in_the_folder_before_the_start_is_loaded(start_daemon: StartDaemon, golden: Golden) -> None:
    """Also after a kill: the folder still holds everything."""
    daemon = start_daemon()
    for path in sorted(CHECKPOINTS.glob("v2/model-*.safetensors")):
        (daemon.shards / path.name).write_bytes(path.read_bytes())
    daemon.wait_status(lambda status: status.state == "ready")
    daemon.kill()
    daemon.start()
    daemon.wait_up()
    daemon.wait_status(lambda status: status.state == "ready")
    prompt, expected = tokens(golden("v2"))
    with daemon.control() as control:
        assert list(control.generate(prompt, max_new_tokens=24).token_ids) == expected


def test_hundreds_of_files_at_once_are_all_applied(start_daemon: StartDaemon, checkpoint_tensors: Golden) -> None:
    daemon = start_daemon("v3")
    for number, (name, tensor) in enumerate(sorted(checkpoint_tensors("v3").items())):
        save_file({name: tensor}, daemon.shards / f"{number:04}.safetensors")
    status = daemon.wait_status(lambda status: status.state == "ready" and not status.waiting_shards)

    assert status.counters["shards_applied"] == len(checkpoint_tensors("v3"))
    assert status.counters["shards_rejected"] == 0
    assert status.counters["layers_fused"] == 3


# ------------------------------------------------------------------------------------- stop and reload


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_cleanly_and_what_waits_is_reported(
    number: int, start_daemon: StartDaemon, checkpoint_tensors: Golden, next_event: NextEvent
) -> None:
    daemon = start_daemon()
    half = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    with daemon.trainer() as trainer, daemon.subscriber() as subscriber:
        trainer.push_bytes(save({half: checkpoint_tensors("v2")[half]}))
        begin = time.monotonic()
        daemon.process.send_signal(number)
        event = next_event(subscriber, events.Stopping)
        assert daemon.process.wait(10) == 0
    assert time.monotonic() - begin < 5
    assert event.waiting == (half,)
    assert daemon.log()[-1]["event"] in {"daemon.stopped", "daemon.stopping"}
    assert any(half in str(line) for line in daemon.log() if line["event"] == "daemon.stopped")


def test_sighup_applies_what_it_can_and_says_what_it_cannot(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    daemon.write_settings({"log": {"level": "debug"}, "model": {"dtype": "bfloat16"}, "fusion": {"max_age": 5.0}})
    daemon.process.send_signal(signal.SIGHUP)
    reloaded = _wait_log(daemon, "settings.reloaded")
    restart = _wait_log(daemon, "settings.need_restart")
    assert (sorted(reloaded["applied"]), restart["keys"]) == (
        ["fusion.max_age", "log.level"],
        ["model.dtype"],
    )

    daemon.config_path.write_text("nonsense = [")
    daemon.process.send_signal(signal.SIGHUP)
    assert str(daemon.config_path) in _wait_log(daemon, "settings.not_reloaded")["reason"]
    assert daemon.status().state == "not_ready", "it goes on"


def _wait_log(daemon: Any, event: str) -> dict[str, Any]:
    deadline = time.monotonic() + TIMEOUT
    while True:
        for line in daemon.log():
            if line["event"] == event:
                return dict(line)
        assert time.monotonic() < deadline, daemon.log_path.read_text()
        time.sleep(0.02)


def test_systemd_hears_of_it(start_daemon: StartDaemon, notify_socket: Any) -> None:
    """READY only once the checkpoint is loaded; then a status, pings, and the end."""
    address = notify_socket.getsockname()
    daemon = start_daemon(
        model={"checkpoint": str(CHECKPOINTS / "v2")},
        popen={"env": {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "600000"}},
    )
    heard = ""
    while "READY=1" not in heard:
        heard += notify_socket.recv(4096).decode() + "\n"
    assert daemon.status().state == "ready"
    assert re.search(r"STATUS=ready.*3/3 layers fused", heard)
    while heard.count("WATCHDOG=1") < 3:
        heard += notify_socket.recv(4096).decode() + "\n"
    daemon.process.terminate()
    while "STOPPING=1" not in heard:
        heard += notify_socket.recv(4096).decode() + "\n"


def test_a_reload_during_the_start_does_not_end_the_start(
    start_daemon: StartDaemon, notify_socket: Any, tmp_path: Path
) -> None:
    """A reload ends with READY=1, and that is also what ends a start."""
    checkpoint = Path(shutil.copytree(CHECKPOINTS / "v2", tmp_path / "checkpoint"))
    last = checkpoint / "model-00006-of-00006.safetensors"
    whole = last.read_bytes()
    last.write_bytes(b"")
    heard = b""
    with last.open("r+b") as writer:  # it is waited for, with leases or without
        daemon = start_daemon(
            model={"checkpoint": str(checkpoint)}, popen={"env": {"NOTIFY_SOCKET": notify_socket.getsockname()}}
        )
        assert daemon.status().state == "starting"
        daemon.process.send_signal(signal.SIGHUP)
        _wait_log(daemon, "settings.reloaded")
        assert daemon.status().state == "starting", "answered after the reload"
        notify_socket.settimeout(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                heard += notify_socket.recv(4096) + b"\n"
        assert b"STATUS=loading" in heard
        assert b"READY=1" not in heard
        assert b"RELOADING=1" not in heard
        writer.write(whole)
    notify_socket.settimeout(TIMEOUT)
    while b"READY=1" not in heard:
        heard += notify_socket.recv(4096) + b"\n"

    daemon.process.send_signal(signal.SIGHUP)
    while b"RELOADING=1" not in heard:
        heard += notify_socket.recv(4096) + b"\n"
    ended = notify_socket.recv(4096)
    assert ended.startswith(b"READY=1"), "a reload that systemd waits for ends"


def test_metrics_are_served_on_loopback(start_daemon: StartDaemon, checkpoint_tensors: Golden) -> None:
    daemon = start_daemon()
    with daemon.trainer() as trainer:
        trainer.push_bytes(save(checkpoint_tensors("v2")), version=1)
    port = _wait_log(daemon, "daemon.started")["metrics_port"]
    deadline = time.monotonic() + TIMEOUT
    while True:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
            text = response.read().decode()
        if "fusewire_ready 1.0" in text:
            break
        assert time.monotonic() < deadline, text
        time.sleep(0.05)
    assert "fusewire_layers_fused_total 3.0" in text
    assert 'fusewire_shards_applied_total{source="socket"} 1.0' in text


# -------------------------------------------------------------------------------------------- bad starts


def _fails(daemon: Any) -> str:
    """Wait for the daemon to end with an error; return its one message."""
    assert daemon.process.wait(TIMEOUT) in {1, 2}
    text = daemon.log_path.read_text()
    assert "Traceback" not in text
    return str(text)


def test_a_folder_that_does_not_exist(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(up=False, folder={"path": "no/such/folder"})
    assert re.search(r"no/such/folder", _fails(daemon))


def test_an_endpoint_in_use(start_daemon: StartDaemon) -> None:
    first = start_daemon()
    second = start_daemon(up=False, control={"endpoint": first.endpoint("control")})
    assert "in use" in _fails(second)
    assert first.status().state == "not_ready", "the first one is not disturbed"


def test_a_tcp_endpoint_for_everybody_is_refused(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(up=False, socket={"endpoint": "tcp://0.0.0.0:5555"})
    assert "loopback" in _fails(daemon)


def test_a_config_of_another_architecture(start_daemon: StartDaemon, tmp_path: Path) -> None:
    other = tmp_path / "config.json"
    other.write_text(json.dumps({"model_type": "llama", "hidden_size": 8}))
    daemon = start_daemon(up=False, model={"config": str(other)})
    assert "llama" in _fails(daemon)


@pytest.mark.parametrize("damage", ["missing", "truncated", "incomplete"])
def test_a_base_checkpoint_that_is_not_whole(damage: str, start_daemon: StartDaemon, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for path in (CHECKPOINTS / "v2").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    victim = folder / "model-00004-of-00006.safetensors"
    if damage == "truncated":
        victim.write_bytes(victim.read_bytes()[:-10])
    else:
        victim.unlink()
    if damage == "incomplete":
        index = folder / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        content["weight_map"] = {k: v for k, v in content["weight_map"].items() if v != victim.name}
        index.write_text(json.dumps(content))
    message = _fails(start_daemon(up=False, model={"checkpoint": str(folder)}))
    assert {
        "missing": victim.name,
        "truncated": "truncated",
        "incomplete": "slots",
    }[damage] in message


def test_a_missing_settings_file_and_an_unknown_key(tmp_path: Path) -> None:
    def run(path: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "fusewire.daemon", "run", "--config", str(path)]
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)

    missing = run(tmp_path / "none.toml")
    assert missing.returncode != 0
    assert "none.toml" in missing.stderr
    bad = tmp_path / "bad.toml"
    bad.write_text('[model]\nconfig = "x"\n[folder]\npaht = "y"\n')
    unknown = run(bad)
    assert unknown.returncode != 0
    assert "paht" in unknown.stderr
    assert os.linesep.join(unknown.stderr.splitlines()[:1])


def test_wire_status_survives_a_round_trip(start_daemon: StartDaemon) -> None:
    status = start_daemon().status()
    assert wire.decode_control_reply(wire.encode(status)) == status
