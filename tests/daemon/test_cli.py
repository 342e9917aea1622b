"""The command line and the examples, as programs of their own, against a real daemon."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.main import get_command

from fusewire.daemon import demo
from fusewire.daemon.cli import app

CHECKPOINTS = Path(demo.__file__).parent / "checkpoints"
EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT = 60.0
Golden = Callable[[str], dict[str, Tensor]]
Done = subprocess.CompletedProcess[str]


def fusewire(*arguments: object, **environment: str) -> Done:
    command = [sys.executable, "-m", "fusewire.daemon", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT, check=False, env=os.environ | environment
    )


@pytest.fixture(scope="module")
def daemon(start_shared_daemon: Callable[..., Any]) -> Any:
    """A daemon with the V2 checkpoint."""
    running = start_shared_daemon("v2", model={"checkpoint": str(CHECKPOINTS / "v2")})
    running.wait_status(lambda status: status.state == "ready")
    return running


def test_push_prints_each_answer(daemon: Any, tmp_path: Path) -> None:
    half = "model.layers.0.self_attn.q_a_proj.weight"
    tensors = load_file(CHECKPOINTS / "v2" / "model-00002-of-00006.safetensors")
    save_file({half: tensors[half]}, tmp_path / "half.safetensors")
    save_file({"model.norm.weight": tensors[half]}, tmp_path / "bad.safetensors")
    (tmp_path / "garbage.safetensors").write_bytes(b"garbage" * 9)
    good = fusewire("push", CHECKPOINTS / "v2" / "model-00002-of-00006.safetensors", "-c", daemon.config_path)
    assert good.returncode == 0, good.stderr
    assert "applied model-00002-of-00006.safetensors: version rolling, 19 tensors" in good.stdout
    assert "fused layers 0" in good.stdout
    mixed = fusewire(
        "push", *sorted(tmp_path.glob("*.safetensors")), tmp_path / "none", "--version", 7, "-c", daemon.config_path
    )
    lines = mixed.stdout.splitlines()

    assert mixed.returncode == 1
    assert lines[0].startswith("rejected bad.safetensors: wrong_shape: model.norm.weight")
    assert lines[1].startswith("rejected garbage.safetensors: ")
    assert lines[2].startswith("applied half.safetensors: version 7, 1 tensors")
    assert "1 waiting for a partner" in lines[2]
    assert lines[3].startswith("not sent")

    pending = json.loads(fusewire("pending", "--json", "-c", daemon.config_path).stdout)
    assert [(p["tensor"], p["version"]) for p in pending] == [(half, 7)]
    assert half in fusewire("pending", "-c", daemon.config_path).stdout
    listed = json.loads(fusewire("versions", "--json", "-c", daemon.config_path).stdout)
    assert [(v["version"], v["staged"]) for v in listed["versions"] if v["state"] == "open"] == [(7, True)]
    given_up = fusewire("abort", 7, "-c", daemon.config_path)
    assert given_up.stdout.strip() == "done version 7 is aborted; what is live was not touched"


def test_status_for_people_and_for_programs(daemon: Any) -> None:
    told = json.loads(fusewire("status", "--json", FUSEWIRE_CONFIG=str(daemon.config_path)).stdout)
    assert told["state"] == "ready"
    assert told["layers"]["fused"] == [0, 1, 2]
    text = fusewire("status", "--endpoint", daemon.endpoint("control")).stdout
    for fact in ("ready", "deepseek_v2, 3 layers", "89 of 89 filled", "3 of 3: 0-2", "throughput", "two generations"):
        assert fact in text


def test_generate(daemon: Any, golden: Golden) -> None:
    expected = golden("v2")
    done = fusewire("generate", *expected["ids.a"][0].tolist(), "-c", daemon.config_path)
    assert done.stdout.split() == [str(token) for token in expected["gen.a"].tolist()]
    refused = fusewire("generate", 96, "-c", daemon.config_path)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == "fusewire: token id 96 is outside of the vocabulary of 96\n"


def test_listen_starts_with_the_state_and_goes_on(daemon: Any) -> None:
    command = [sys.executable, "-m", "fusewire.daemon", "listen", "-c", str(daemon.config_path)]
    programs = [
        subprocess.Popen([*command, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for more in ((), ("--json",))
    ]
    first = [program.stdout.readline() for program in programs if program.stdout]
    with daemon.trainer() as trainer:
        name = "model.norm.weight"
        trainer.push_tensors(
            {name: load_file(CHECKPOINTS / "v2" / "model-00006-of-00006.safetensors")[name]}, name="x\x1b[31m"
        )
    second = [program.stdout.readline() for program in programs if program.stdout]
    for program in programs:
        program.send_signal(signal.SIGINT)
        _, errors = program.communicate(timeout=TIMEOUT)
        assert (program.returncode, errors) == (130, "")

    assert first[0].startswith("now: ready, version ")
    assert json.loads(first[1])["kind"] == "snapshot"
    assert "shard x\\x1b[31m applied: 1 tensors" in second[0]
    assert json.loads(second[1])["event"] == "shard.applied"


def test_sigint_ends_listen_even_where_it_was_ignored(daemon: Any) -> None:
    """As in a background job of a script, or under some CI."""
    command = f"trap '' INT; exec {sys.executable} -m fusewire.daemon listen -c {daemon.config_path}"
    with subprocess.Popen(["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        assert program.stdout is not None
        program.stdout.readline()
        program.send_signal(signal.SIGINT)
        program.communicate(timeout=TIMEOUT)
        assert program.returncode == 130


def test_a_reader_that_goes_away_ends_listen_in_silence(daemon: Any) -> None:
    piped = f"{sys.executable} -m fusewire.daemon listen --heartbeats -c {daemon.config_path} | head -1"
    program = subprocess.Popen(
        ["bash", "-c", piped],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    output, errors = program.communicate(timeout=TIMEOUT)

    assert output.startswith("now: ")
    assert errors == ""


def test_inspect_says_where_each_tensor_would_go(tmp_path: Path) -> None:
    done = fusewire("inspect", CHECKPOINTS / "v3" / "model-00003-of-00008.safetensors", "--json")
    lines = {line["tensor"]: line for line in json.loads(done.stdout)["tensors"]}
    assert done.returncode == 0
    assert lines["model.layers.2.self_attn.q_a_proj.weight"]["target"] == (
        "model.layers.2.self_attn.fused_qkv_a_proj_with_mqa.weight[0:24]"
    )
    experts = [line["target"] for name, line in lines.items() if ".experts.7.down_proj" in name]
    assert experts == ["model.layers.1.mlp.experts.w2_weight[7, 0:64]"] or not experts
    text = fusewire("inspect", CHECKPOINTS / "v3" / "model-00008-of-00008.safetensors").stdout
    assert "multi-token" in text.replace("\n", " ")
    save_file({"model.nonsense": load_file(CHECKPOINTS / "v3/golden.safetensors")["ids.a"]}, tmp_path / "x.safetensors")
    config = CHECKPOINTS / "v3" / "config.json"
    refused = fusewire("inspect", tmp_path / "x.safetensors", "--config", config)
    assert refused.returncode == 1
    assert "unknown_tensor" in refused.stdout
    assert fusewire("inspect", tmp_path / "x.safetensors").returncode == 0, "without a config nothing is judged"
    (tmp_path / "y.safetensors").write_bytes(b"\0" * 9)
    broken = fusewire("inspect", tmp_path / "y.safetensors")
    assert (broken.returncode, broken.stderr.count("\n")) == (1, 1)
    assert "malformed_header" in broken.stderr


def test_inspect_prints_the_plan_of_a_real_model() -> None:
    config = Path(__file__).parents[2] / "config" / "models" / "DeepSeek-V3.json"
    plan = json.loads(fusewire("inspect", "--config", config, "--json").stdout)
    assert (plan["tensors"], plan["fused_layers"], plan["layers"]) == (90427, 61, 61)
    assert plan["fused"][1] == (
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight -> "
        "model.layers.0.self_attn.fused_qkv_a_proj_with_mqa.weight[1536:2112]"
    )
    assert plan["skipped"]["model.layers.61.*"].startswith("multi-token")
    assert 650e9 < sum(plan["nbytes"].values()) < 690e9
    text = fusewire("inspect", "--config", config, "--dequantize").stdout
    assert "90427 with a slot" in text
    assert "1.3 TB on 1 rank" in text
    assert fusewire("inspect").returncode == 2


def test_check_config_prints_the_effective_values(daemon: Any, tmp_path: Path) -> None:
    done = fusewire("check-config", "-c", daemon.config_path)
    effective = tomllib.loads(done.stdout)
    assert effective["folder"]["path"] == str(daemon.shards), "relative paths are those of the file's folder"
    assert effective["limits"]["header_bytes"] == 16 * 1024 * 1024
    again = tmp_path / "again.toml"
    again.write_text(done.stdout)
    assert fusewire("check-config", "-c", again).stdout == done.stdout


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (None, "No such file"),
        ("[model", "TOML"),
        ("", "model"),
        ('[model]\nconfig = "x"\nconfg = "y"', "confg"),
        ('[model]\nconfig = "x"\n[lgo]', "lgo"),
        ("[model]\nconfig = 3", "config"),
        ('[model]\nconfig = "x"\n[log]\nlevel = "loud"', "loud"),
        ('[model]\nconfig = "x"\n[loader]\nthreads = 0', "threads"),
        ('[model]\nconfig = "x"\n[folder]\nsettle = -1.0', "settle"),
    ],
)
def test_bad_settings_are_named_in_one_line(text: str | None, named: str, tmp_path: Path) -> None:
    path = tmp_path / "fusewire.toml"
    if text is not None:
        path.write_text(text)
    for command in ("check-config", "run", "status"):
        done = fusewire(command, "-c", path)
        assert done.returncode == 2
        assert named in done.stderr
        assert str(path) in done.stderr
        assert done.stderr.count("\n") == 1


def test_no_daemon(tmp_path: Path) -> None:
    begin = time.monotonic()
    done = fusewire("status", "-e", f"ipc://{tmp_path}/none", "-t", 0.2)

    assert done.returncode == 1
    assert done.stderr.startswith(f"fusewire: the daemon at ipc://{tmp_path}/none could not be reached within 0.2 s")
    assert time.monotonic() - begin < 10


COMMANDS = [
    *("run", "check-config", "push", "listen", "status", "pending", "generate", "inspect", "demo"),
    *("versions", "commit", "rollback", "abort", "digest", "keygen"),
]


def test_these_are_all_commands() -> None:
    assert sorted(get_command(app).commands) == sorted(COMMANDS)  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str) -> None:
    assert f"Example: fusewire {command}" in (get_command(app).commands[command].epilog or "")  # type: ignore[attr-defined]


def test_help_is_quick_and_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; sys.argv = ['fusewire', '--help']\n"
    code += "from fusewire.daemon.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, done.stderr
    assert all(command in done.stdout for command in COMMANDS)


def test_the_examples_run(start_daemon: Callable[..., Any]) -> None:
    daemon = start_daemon("v2")
    with subprocess.Popen(
        [
            *(sys.executable, str(EXAMPLES / "subscriber.py"), "--events", daemon.endpoint("events")),
            *("--control", daemon.endpoint("control"), "--timeout", "8"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as subscriber:
        assert subscriber.stdout is not None
        assert subscriber.stdout.readline() == "fused before we came: []\n"
        shards = sorted((CHECKPOINTS / "v2").glob("model-*.safetensors"))
        trainer = subprocess.run(
            [
                sys.executable,
                str(EXAMPLES / "trainer.py"),
                "--endpoint",
                daemon.endpoint("ingest"),
                "--version",
                "3",
                *shards,
            ],
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        assert trainer.returncode == 0, trainer.stderr
        assert trainer.stdout.count(": applied shard") == len(shards)
        output, errors = subscriber.communicate(timeout=TIMEOUT)
        assert errors == ""
        assert "layer 0 was fused by version 3\nthe model answers\n" in output
        assert "layer 2 fused, version 3" in output


def test_the_demo_succeeds_and_can_fail(tmp_path: Path) -> None:
    done = fusewire("demo", "--family", "v3", "--seed", 5)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout
    assert "layer 2 fused" in done.stdout, "the subscriber's lines"
    tampered = tmp_path / "checkpoints"
    subprocess.run(["cp", "-r", CHECKPOINTS, tampered], check=True)
    golden = load_file(tampered / "v2" / "golden.safetensors")
    golden["gen.a"] = golden["gen.a"] + 1
    save_file(golden, tampered / "v2" / "golden.safetensors")
    code = (
        "import pathlib, sys; from fusewire.daemon.demo import run\n"
        f"run.CHECKPOINTS = pathlib.Path({str(tampered)!r}); sys.exit(run.main('v2'))"
    )
    failed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert failed.returncode == 1
    assert "FAILED: the generated tokens are not the golden ones" in failed.stdout
    assert "SUCCESS" not in failed.stdout
