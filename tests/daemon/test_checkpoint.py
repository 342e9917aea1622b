"""Finding a checkpoint's shards, and which settings a running daemon takes over."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from fusewire.daemon import reload
from fusewire.daemon.checkpoint import INDEX, SINGLE, shards_of
from fusewire.daemon.errors import StartError
from fusewire.daemon.settings import Folder, Fusion, Log, Model, Settings


def write_index(folder: Path, content: object) -> None:
    (folder / INDEX).write_text(content if isinstance(content, str) else json.dumps(content))


def test_the_index_names_the_shards(tmp_path: Path) -> None:
    write_index(tmp_path, {"weight_map": {"a": "2.safetensors", "b": "1.safetensors", "c": "2.safetensors"}})
    for name in ("1.safetensors", "2.safetensors", "leftover.safetensors"):
        (tmp_path / name).touch()

    assert [path.name for path in shards_of(tmp_path)] == ["1.safetensors", "2.safetensors"]


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    (tmp_path / SINGLE).touch()

    assert shards_of(tmp_path) == [tmp_path / SINGLE]


def test_all_missing_shards_are_listed(tmp_path: Path) -> None:
    write_index(tmp_path, {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}})
    with pytest.raises(StartError, match=r"2 of the 2 .*1\.safetensors, 2\.safetensors"):
        shards_of(tmp_path)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 100_000]
    + [{"weight_map": {"a": name}} for name in ("../x", "/etc/passwd", "a/b", "", ".", 3, None)],
)
def test_a_malformed_index_is_named(tmp_path: Path, content: object) -> None:
    write_index(tmp_path, content)
    with pytest.raises(StartError, match=r"model\.safetensors\.index\.json"):
        shards_of(tmp_path)


def test_no_folder_and_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="no such folder"):
        shards_of(tmp_path / "none")
    with pytest.raises(StartError, match="neither"):
        shards_of(tmp_path)


def test_a_reload_takes_over_what_it_can() -> None:
    old = Settings(model=Model(config="a"))
    new = Settings(
        model=Model(config="b"),
        log=Log(level="debug", format="json"),
        fusion=Fusion(max_age=1.0),
        folder=Folder(settle=1.0, path="/elsewhere"),
    )
    outcome = reload.compare(old, new)

    assert set(outcome.applied) == {"log.level", "fusion.max_age", "folder.settle"}
    assert set(outcome.refused) == {"model.config", "log.format", "folder.path"}
    assert outcome.effective == Settings(
        model=Model(config="a"), log=Log(level="debug"), fusion=Fusion(max_age=1.0), folder=Folder(settle=1.0)
    )


def test_every_reloadable_key_exists() -> None:
    settings = Settings(model=Model(config="a"))
    keys = {
        f"{section}.{key}"
        for section in Settings.__struct_fields__
        for key in getattr(settings, section).__struct_fields__
    }

    assert keys >= reload.RELOADABLE
    assert msgspec.structs.fields(Settings)
