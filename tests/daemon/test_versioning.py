"""Versions in the whole daemon: flips under load, hands on the lever, bad weights, files afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file
from torch import Tensor

from fusewire.daemon import demo, events
from fusewire.daemon.client import RequestFailed
from fusewire.model import DeepseekV2Config, DeepseekV2ForCausalLM

CHECKPOINTS = Path(demo.__file__).parent / "checkpoints"
TIMEOUT = 30.0
NORM = "model.norm.weight"
StartDaemon = Callable[..., Any]
NextEvent = Callable[..., Any]
Tensors = dict[str, Tensor]
Golden = Callable[[str], Tensors]
PROMPT = [5, 9, 2]


def vary(tensors: Tensors, version: int) -> Tensors:
    return {name: tensor.roll(version, 0).contiguous() for name, tensor in tensors.items()}


def answer_of(tensors: Tensors, count: int) -> list[int]:
    """What a cold load of these weights alone goes on with."""
    config = DeepseekV2Config.from_file(CHECKPOINTS / "v2" / "config.json")
    model = DeepseekV2ForCausalLM(config, dtype=torch.float32)
    model.load_weights(tensors.items())
    tokens: list[int] = model.generate(torch.tensor([PROMPT]), count)[0, len(PROMPT) :].tolist()
    return tokens


def cli(daemon: Any, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fusewire.daemon", *arguments, "--config", str(daemon.config_path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)


def test_requests_across_flips(start_daemon: StartDaemon, checkpoint_tensors: Golden) -> None:
    """Each answer is that of its own version, token for token; none is lost; versions land all the time."""
    base, count, kinds = checkpoint_tensors("v2"), 40, 4
    expected = [answer_of(vary(base, kind), count) for kind in range(kinds)]
    assert len(set(map(tuple, expected))) == kinds
    daemon = start_daemon("v2", control={"generate_queue": 64})
    with daemon.trainer() as trainer:
        trainer.push_bytes(save(vary(base, 0)), version=0)
    daemon.wait_status(lambda status: status.version == 0)
    stop, failures, answers = threading.Event(), [], []

    def ask() -> None:
        with daemon.control() as control:
            while not stop.is_set():
                try:
                    reply = control.generate(PROMPT, max_new_tokens=count)
                except Exception as error:  # noqa: BLE001 - any is a failure of the test
                    failures.append(error)
                    return
                answers.append((reply.version, list(reply.token_ids)))

    askers = [threading.Thread(target=ask) for _ in range(4)]
    for asker in askers:
        asker.start()
    with daemon.trainer() as trainer:
        for version in range(1, 13):
            shards = list(vary(base, version % kinds).items())
            for first in range(0, len(shards), 30):
                assert trainer.push_bytes(save(dict(shards[first : first + 30])), version=version).status == "applied"
            daemon.wait_status(lambda status, version=version: status.version == version)
    stop.set()
    for asker in askers:
        asker.join(TIMEOUT)

    assert failures == []
    assert len({version for version, _ in answers}) >= 4
    wrong = [(version, found) for version, found in answers if found != expected[version % kinds]]
    assert wrong == []


def test_staging_waits_for_a_long_request_and_says_so(
    start_daemon: StartDaemon, checkpoint_tensors: Golden, tmp_path: Path
) -> None:
    base = checkpoint_tensors("v2")
    longer = json.loads((CHECKPOINTS / "v2" / "config.json").read_text()) | {"max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(json.dumps(longer))
    daemon = start_daemon("v2", model={"config": str(tmp_path / "config.json")}, versions={"lease_seconds": 1.5})
    replies: list[Any] = []

    def ask() -> None:
        with daemon.control() as control:
            try:
                replies.append(control.generate(PROMPT, max_new_tokens=4000, timeout=25))
            except RequestFailed as error:
                replies.append(str(error))

    with daemon.trainer() as trainer:
        trainer.push_bytes(save(base), version=1)
        daemon.wait_status(lambda status: status.version == 1)
        asker = threading.Thread(target=ask)
        asker.start()
        time.sleep(0.3)
        trainer.push_bytes(save(vary(base, 2)), version=2)
        daemon.wait_status(lambda status: status.version == 2)
        folder = daemon.shards / "step_3"
        folder.mkdir()
        save_file(vary(base, 3), folder / "all.safetensors")
        status = daemon.wait_status(lambda status: any(shard.state == "waiting" for shard in status.waiting_shards))
        assert "1 requests still read the weights of the version before, the oldest for" in status.staging_waits
        daemon.wait_status(lambda status: status.version == 3)
    asker.join(TIMEOUT)
    assert "versions.lease_seconds" in replies[0]


def test_hands_on_the_lever(start_daemon: StartDaemon, checkpoint_tensors: Golden) -> None:
    base = checkpoint_tensors("v2")
    daemon = start_daemon("v2", versions={"commit": "manual"})
    first, second = answer_of(vary(base, 1), 12), answer_of(vary(base, 2), 12)
    with daemon.trainer() as trainer, daemon.control() as control:
        for version, expected in ((1, first), (2, second)):
            trainer.push_bytes(save(vary(base, version)), version=version)
            daemon.wait_status(
                lambda status, version=version: any(
                    v.version == version and v.state == "verified" for v in status.versions
                )
            )
            done = cli(daemon, "commit", str(version))
            assert (done.returncode, done.stdout.strip()) == (0, f"done version {version} is live")
            assert list(control.generate(PROMPT, max_new_tokens=12).token_ids) == expected

        done = cli(daemon, "rollback")
        assert "version 1 is live again" in done.stdout
        assert list(control.generate(PROMPT, max_new_tokens=12).token_ids) == first
        listed = cli(daemon, "versions").stdout
        assert "live" in listed
        assert "retired" in listed
        cli(daemon, "rollback")
        assert list(control.generate(PROMPT, max_new_tokens=12).token_ids) == second

        trainer.push_bytes(save({NORM: base[NORM] + 1}), version=5)
        failed = cli(daemon, "rollback")
        assert (failed.returncode, "version 5 is being staged over it" in failed.stderr) == (1, True)
        assert "missing: model.embed_tokens.weight" in cli(daemon, "versions").stdout
        assert "aborted" in cli(daemon, "abort").stdout
        assert list(control.generate(PROMPT, max_new_tokens=12).token_ids) == second
        assert cli(daemon, "abort").returncode == 1
        assert trainer.push_bytes(save({NORM: base[NORM] + 1}), version=5).reason == "stale_version"


@pytest.mark.parametrize("generations", [1, 2])
def test_weights_that_are_not_finite_never_answer(
    generations: int, start_daemon: StartDaemon, checkpoint_tensors: Golden, next_event: NextEvent
) -> None:
    base = checkpoint_tensors("v2")
    daemon = start_daemon("v2", model={"generations": generations})
    bad = {name: tensor.clone() for name, tensor in base.items()}
    bad[NORM][3] = float("nan")
    with daemon.trainer() as trainer, daemon.control() as control, daemon.subscriber() as subscriber:
        trainer.push_bytes(save(base), version=1)
        daemon.wait_status(lambda status: status.version == 1)
        before = control.generate(PROMPT, max_new_tokens=12).token_ids
        answer = trainer.push_bytes(save(bad), version=2)
        if generations == 2:
            aborted = next_event(subscriber, events.VersionAborted)
            assert aborted.cause == f"not finite: {NORM}: 1 NaN of {base[NORM].numel()}"
        else:
            assert (answer.reason, NORM in answer.detail) == ("not_finite", True)
        assert daemon.status().version == 1
        assert control.generate(PROMPT, max_new_tokens=12).token_ids == before
        assert trainer.push_bytes(save(vary(base, 3)), version=3).status == "applied"
        daemon.wait_status(lambda status: status.version == 3)


def test_a_digest_that_does_not_fit(start_daemon: StartDaemon, checkpoint_tensors: Golden) -> None:
    from fusewire.daemon.client import Trainer  # noqa: PLC0415

    base = checkpoint_tensors("v2")
    daemon = start_daemon("v2")
    with Trainer(daemon.endpoint("ingest"), digest=True) as trainer:
        assert trainer.push_bytes(save(base), version=1).status == "applied"
    with daemon.trainer() as trainer:
        answer = trainer.push_bytes(save({NORM: base[NORM]}, metadata={"xxh3": "0" * 32}), version=2)
        assert (answer.reason, "xxh3" in answer.detail) == ("digest_mismatch", True)
        answer = trainer.push_bytes(save({NORM: base[NORM]}, metadata={"xxh3": "nonsense"}), version=2)
        assert answer.reason == "digest_mismatch"


def test_a_partial_version_over_the_socket(
    start_daemon: StartDaemon, checkpoint_tensors: Golden, next_event: NextEvent
) -> None:
    base = checkpoint_tensors("v2")
    half = "model.layers.1.self_attn.q_a_proj.weight"
    daemon = start_daemon("v2", model={"checkpoint": str(CHECKPOINTS / "v2")})
    with daemon.trainer() as trainer, daemon.subscriber() as subscriber, daemon.control() as control:
        assert trainer.push_bytes(save({half: base[half] * 2}), version=7).waiting == (half,)
        assert trainer.commit(8).status == "accepted"
        late = trainer.commit(7, [half, NORM])
        assert (late.status, late.detail) == ("accepted", f"version 7 waits for 1 tensors: {NORM}")
        incomplete = next_event(subscriber, events.VersionIncomplete)
        assert (incomplete.version, incomplete.missing, incomplete.cause) == (7, (NORM,), "commit")
        trainer.push_bytes(save({NORM: base[NORM] + 1}), version=7)
        fused = next_event(subscriber, events.LayerFused)
        assert (fused.layer, fused.version) == (1, 7)
        next_event(subscriber, events.VersionLive, version=7)
        expected = answer_of(base | {half: base[half] * 2, NORM: base[NORM] + 1}, 12)
        reply = control.generate(PROMPT, max_new_tokens=12)
        assert (list(reply.token_ids), reply.version) == (expected, 7)
        closed = trainer.push_bytes(save({"lm_head.weight": base["lm_head.weight"]}), version=7)
        assert closed.reason == "version_closed"
        refused = trainer.commit(3)
        assert (refused.status, refused.detail) == ("rejected", "version 3 is over: version 7 is live")


def test_a_new_run_restarts_the_numbering(start_daemon: StartDaemon, checkpoint_tensors: Golden) -> None:
    from fusewire.daemon.client import Trainer  # noqa: PLC0415

    base = checkpoint_tensors("v2")
    daemon = start_daemon("v2")
    with Trainer(daemon.endpoint("ingest"), run="monday") as trainer:
        trainer.push_bytes(save(base), version=57)
        daemon.wait_status(lambda status: status.version == 57)
    with Trainer(daemon.endpoint("ingest"), run="tuesday") as trainer:
        assert trainer.push_bytes(save(vary(base, 1)), version=1).status == "applied"
        assert daemon.wait_status(lambda status: status.version == 1).run == "tuesday"
    with Trainer(daemon.endpoint("ingest"), run="monday") as trainer:
        assert trainer.push_bytes(save(base), version=58).reason == "stale_version"


@pytest.mark.parametrize("retention", ["keep", "delete", "archive"])
def test_files_of_versions_that_are_over(
    retention: str, start_daemon: StartDaemon, checkpoint_tensors: Golden, tmp_path: Path
) -> None:
    base = checkpoint_tensors("v2")
    archive = tmp_path / "archive"
    archive.mkdir()
    daemon = start_daemon("v2", versions={"retention": retention, "archive": str(archive)})

    def write(version: int) -> Path:
        folder: Path = daemon.shards / f"step_{version}"
        folder.mkdir()
        save_file(vary(base, version), folder / "all.safetensors")
        return folder

    one = write(1)
    daemon.wait_status(lambda status: status.version == 1)
    (one / "notes.txt").write_text("not a shard")
    foreign = one / "foreign.safetensors"
    save_file({"nonsense": torch.ones(1)}, foreign)
    daemon.wait_status(lambda status: status.rejected)
    two = write(2)
    daemon.wait_status(lambda status: status.version == 2)
    three = write(3)
    daemon.wait_status(lambda status: status.version == 3)
    assert (two / "all.safetensors").exists(), "a rollback would go back to it"
    four = write(4)  # staged over version 2
    daemon.wait_status(lambda status: status.version == 4)
    deadline = time.monotonic() + TIMEOUT
    while retention != "keep" and two.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)

    assert (one / "all.safetensors").exists() is (retention == "keep")
    assert foreign.exists(), "what was not applied is not ours"
    assert (one / "notes.txt").exists()
    assert (three / "all.safetensors").exists()
    assert (four / "all.safetensors").exists()
    assert sorted(str(p.relative_to(archive)) for p in archive.rglob("*.safetensors")) == (
        ["step_1/all.safetensors", "step_2/all.safetensors"] if retention == "archive" else []
    )
    assert daemon.status().version == 4


def test_two_generations_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said with the bytes; the weights are then updated in place."""
    from fusewire.daemon import assembly  # noqa: PLC0415
    from fusewire.daemon.settings import Model, Settings  # noqa: PLC0415

    config = DeepseekV2Config.from_file(CHECKPOINTS / "v2" / "config.json")
    needed = DeepseekV2ForCausalLM.nbytes(config)
    settings = Settings(model=Model(config=str(CHECKPOINTS / "v2" / "config.json")))
    for there, generations in ((2 * needed - 1, 1), (2 * needed, 2), (None, 2)):
        monkeypatch.setattr(assembly, "available_bytes", lambda _, there=there: there)
        model, note = assembly._model(config, settings)
        assert len(model.staging.generations) == generations
        assert (f"needs {2 * needed} bytes, {there} are free" in note) is (generations == 1)
    assert tmp_path.exists()
