"""The settings files of the repository against the Structs that read them: none of the keys may drift."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path

import pytest

from fusewire.daemon import settings
from fusewire.daemon.errors import SettingsError
from fusewire.daemon.reload import RELOADABLE

ROOT = Path(__file__).parents[1]
COMMENTED = ROOT / "config/fusewire.toml"
DEVELOPMENT = ROOT / "config/dev.toml"

DEFAULTS = settings.Settings(model=settings.Model(config="anything"))
EXAMPLE = "model.config"
"""The one key without a default."""


def values(of: settings.Settings) -> dict[str, object]:
    """Key -> its value, for every key that there is."""
    return {
        f"{section}.{key}": getattr(getattr(of, section), key)
        for section in of.__struct_fields__
        for key in getattr(of, section).__struct_fields__
    }


KEYS = list(values(DEFAULTS))


def comments() -> dict[str, str]:
    """Key -> the comment lines right above it."""
    found: dict[str, str] = {}
    section, block = "", list[str]()
    for line in COMMENTED.read_text().splitlines():
        if match := re.fullmatch(r"\[(\w+)\]", line):
            section, block = match[1], []
        elif line.startswith("#"):
            block.append(line.removeprefix("#").strip())
        elif match := re.match(r"(\w+) = ", line):
            found[f"{section}.{match[1]}"] = " ".join(block)
            block = []
        else:
            block = []
    return found


def test_every_key_is_listed_and_no_other() -> None:
    written = tomllib.loads(COMMENTED.read_text())

    assert [f"{section}.{key}" for section, table in written.items() for key in table] == KEYS


def test_the_values_written_are_the_defaults() -> None:
    written, default = values(settings.load(COMMENTED)), values(DEFAULTS)
    del written[EXAMPLE], default[EXAMPLE]

    assert written == default
    assert {key: type(item) for key, item in written.items()} == {key: type(item) for key, item in default.items()}


def test_the_example_path_of_the_model_is_absolute_and_visible_to_the_service() -> None:
    path = Path(settings.load(COMMENTED).model.config)

    assert path.is_absolute()
    assert path.name == "config.json"
    assert path.parts[1] not in {"home", "root", "tmp"}


def test_every_key_is_explained() -> None:
    explained = {key for key, text in comments().items() if len(text) > 20}

    assert set(KEYS) - explained == set()


def test_the_comments_say_what_a_reload_applies() -> None:
    assert {key for key, text in comments().items() if text.endswith("SIGHUP")} == RELOADABLE


def test_effective_values_are_read_back_alike(tmp_path: Path) -> None:
    effective = settings.load(COMMENTED)
    again = tmp_path / "again.toml"
    again.write_text(settings.dumps(effective))

    assert settings.load(again) == effective


def test_a_misspelt_key_in_the_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    changed = tmp_path / "fusewire.toml"
    changed.write_text(COMMENTED.read_text().replace("\nsettle = ", "\nsetle = "))

    with pytest.raises(SettingsError, match="setle"):
        settings.load(changed)


@pytest.mark.parametrize(
    "text",
    [
        "\xff",
        "model = " + "[" * 10_000,
        "model = " + "{a=" * 10_000,
        "model = " + "9" * 5000,
        'model = {config = "a\\u0000b"}',
        'model = {config = "~nobody-of-this-name/x"}',
        'model = {config = "x"}\nevents = {endpoint = "ipc://~nobody-of-this-name/x"}',
        'model = {config = "x"}\nevents = {heartbeat_interval = nan}',
        'model = {config = "x"}\n"\\u001b[31m" = 1',
    ],
    ids=range(9),
)
def test_whatever_stands_in_the_file_the_error_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "fusewire.toml"
    path.write_text(text, encoding="latin-1")

    with pytest.raises(SettingsError, match=r"fusewire\.toml: ") as refused:
        settings.load(path)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 400


def test_development_settings_stay_inside_the_checkout(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "config", tmp_path / "config")

    made = settings.load(tmp_path / "config/dev.toml")

    places = [made.model.config, made.model.checkpoint, made.folder.path]
    endpoints = [made.socket.endpoint, made.events.endpoint, made.control.endpoint]
    assert all(endpoint.startswith("ipc:///") for endpoint in endpoints)
    for place in places + [endpoint.removeprefix("ipc://") for endpoint in endpoints]:
        assert Path(place).resolve().is_relative_to(tmp_path.resolve())


def test_development_settings_name_a_checkpoint_that_is_there() -> None:
    made = settings.load(DEVELOPMENT)

    assert Path(made.model.config).is_file()
    assert (Path(made.model.checkpoint) / "model.safetensors.index.json").is_file()


def test_what_the_development_daemon_makes_is_ignored_by_git() -> None:
    made = settings.load(DEVELOPMENT)
    run = Path(made.folder.path).resolve().relative_to(ROOT.resolve()).parts[0]

    assert f"/{run}/" in (ROOT / ".gitignore").read_text().splitlines()
