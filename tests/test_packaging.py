"""What gets installed, from what, and how the targets of the Makefile make it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from typer.main import get_group

from fusewire.daemon.cli import app

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = {"fusewire.daemon": "daemon", "fusewire.model": "model"}
CHECKPOINTS = Path("daemon/demo/checkpoints")


def sources() -> set[str]:
    """Return the names, in an installation, of all files that should be in it."""
    found = set()
    for folder in PACKAGES.values():
        for path in (ROOT / folder).rglob("*"):
            relative = path.relative_to(ROOT)
            if path.suffix == ".py" or path.name == "py.typed" or relative.is_relative_to(CHECKPOINTS):
                found |= {f"fusewire/{relative}"} if path.is_file() else set()
    return found


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    exact = [re.fullmatch(r"([\w.-]+)==([\w.]+)", line) for line in lines if not line.startswith("#")]
    assert all(exact), "every line pins one version, without a local part such as +cpu"
    return {canonicalize_name(match[1]): match[2] for match in exact if match}


def make(target: str, where: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run make, without the variables of a make that may have started these tests."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", "--no-print-directory", target, *(f"{name}={text}" for name, text in variables.items())],
        cwd=where,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


def python(path: Path, script: str) -> str:
    """Make a stand-in for an interpreter."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a fresh checkout, as far as make needs one."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def test_packages_are_the_folders_that_hold_python_files() -> None:
    folders = {path.parent for name in PACKAGES.values() for path in (ROOT / name).rglob("*.py")}

    names = {"fusewire." + ".".join(folder.relative_to(ROOT).parts) for folder in folders}

    assert set(PROJECT["tool"]["setuptools"]["packages"]) == names
    assert PROJECT["tool"]["setuptools"]["package-dir"] == PACKAGES


def test_the_type_checkers_links_lead_to_the_packages() -> None:
    for folder in PACKAGES.values():
        assert (ROOT / "typings/fusewire" / folder).resolve() == (ROOT / folder).resolve()


def test_every_requirement_is_pinned_inside_its_range() -> None:
    project = PROJECT["project"]
    extras = project["optional-dependencies"].values()
    wanted = [*project["dependencies"], *(requirement for extra in extras for requirement in extra)]
    pinned = pins()
    misfits = [
        f"{requirement} but {pinned.get(canonicalize_name(requirement.name))}"
        for requirement in map(Requirement, wanted)
        if not requirement.specifier.contains(pinned.get(canonicalize_name(requirement.name), "0.dev0"))
    ]

    assert misfits == []
    assert pinned["torch"] == "2.13.0"
    assert "fusewire" not in pinned


def test_wheel_and_source_archive_hold_what_they_should(tmp_path: Path) -> None:
    """The wheel is built from the source archive, so that is proven to be enough."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for folder in PACKAGES.values():
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)

    result = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path / "dist", tree],
        check=False,
        capture_output=True,
        text=True,
        timeout=110,
    )

    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (licence,) = [name for name in archive.namelist() if name.endswith("/LICENSE")]
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
        (entry_points,) = [name for name in archive.namelist() if name.endswith("/entry_points.txt")]
        assert b"fusewire = fusewire.daemon.cli:main" in archive.read(entry_points)
    assert names == sources()
    (source,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(source) as archive:
        assert any(name.endswith("/LICENSE") for name in archive.getnames())


def test_the_licence_is_whole() -> None:
    text = (ROOT / "LICENSE").read_text()

    assert "Apache License" in text.splitlines()[1]
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["project"]["license"] == "Apache-2.0"


def test_the_changelog_knows_the_version() -> None:
    assert f"[{PROJECT['project']['version']}]" in (ROOT / "CHANGELOG.md").read_text()


def test_help_lists_every_target_and_is_the_default(checkout: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"(?m)^\.PHONY: (.*)$", makefile)

    result = make("help", checkout)

    assert re.findall(r"(?m)^  make ([a-z-]+)  ", result.stdout) == phony.split()
    assert ".DEFAULT_GOAL := help" in makefile


@pytest.mark.parametrize("target", ["demo", "test", "run", "bench", "test-gpu", "test-systemd"])
def test_a_python_that_is_too_old_is_named_with_the_remedy(checkout: Path, tmp_path: Path, target: str) -> None:
    old = python(tmp_path / "python3.10", "exit 1")

    result = make(target, checkout, PYTHON=old)

    assert result.returncode != 0
    assert "3.11 or newer" in result.stderr
    assert old in result.stderr
    assert not (checkout / ".venv").exists()


def test_a_missing_venv_module_is_named_with_the_remedy(checkout: Path, tmp_path: Path) -> None:
    stripped = python(tmp_path / "python", 'case "$2" in *ensurepip*) exit 1;; esac')

    result = make("demo", checkout, PYTHON=stripped)

    assert result.returncode != 0
    assert "apt install python3-venv" in result.stderr
    assert not (checkout / ".venv").exists()


def test_installed_once_with_the_constraints_and_again_when_they_change(checkout: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    recorder = f'echo "$@" >> {log}'
    program = f"mkdir -p .venv/bin; printf '#!/bin/sh\\n{recorder}\\n' > .venv/bin/python"
    commands = f"{program}; chmod +x .venv/bin/python; cp .venv/bin/python .venv/bin/fusewire"
    fake = python(tmp_path / "python", f'if [ "$2" = venv ]; then {commands}; fi')
    install = "-m pip --quiet --disable-pip-version-check install -c constraints.txt -e .[dev]"

    assert make("demo", checkout, PYTHON=fake).returncode == 0
    assert make("demo", checkout, PYTHON=fake).returncode == 0

    assert log.read_text().splitlines() == [install, "demo", "demo"]

    later = (checkout / ".venv/.installed").stat().st_mtime + 5
    os.utime(checkout / "constraints.txt", (later, later))
    assert make("demo", checkout, PYTHON=fake).returncode == 0
    assert log.read_text().splitlines() == [install, "demo", "demo", install, "demo"]


def test_an_installation_that_failed_is_begun_anew(checkout: Path, tmp_path: Path) -> None:
    program = "mkdir -p .venv/bin; printf '#!/bin/sh\\nexit 1\\n' > .venv/bin/python; chmod +x .venv/bin/python"
    fake = python(tmp_path / "python", f'if [ "$2" = venv ]; then {program}; fi')

    assert make("demo", checkout, PYTHON=fake).returncode != 0

    assert not (checkout / ".venv/.installed").exists()


def test_continuous_integration_runs_what_developers_run() -> None:
    script = ROOT / ".ci/run"
    lines = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]

    assert os.access(script, os.X_OK)
    assert script.read_text().startswith("#!/usr/bin/env bash\n")
    assert lines[0] == "set -euo pipefail"
    assert lines[-1] == "make test"


def test_the_architecture_lists_every_file_and_no_other() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for folder in PACKAGES.values():
        (chapter,) = re.findall(rf"(?ms)^### {folder}/$(.*?)(?=^###? |\Z)", text)
        rows = re.findall(r"(?m)^\| (`.*?) \|", chapter)
        listed = [name for row in rows for name in re.findall(r"`(.+?)`", row)]
        files = [str(path.relative_to(ROOT / folder)) for path in (ROOT / folder).rglob("*.py")]

        assert sorted(listed) == sorted(name for name in files if not name.endswith("__init__.py"))


def test_the_papers_lead_to_files_that_exist() -> None:
    broken = [
        f"{paper.name}: {target}"
        for paper in ROOT.glob("*.md")
        for target in re.findall(r"\]\(([^)#:]+)\)", paper.read_text())
        if not (ROOT / target).exists()
    ]

    assert broken == []


def test_the_readme_lists_every_command_and_no_other() -> None:
    rows = re.findall(r"(?m)^\| `fusewire ([a-z-]+)", (ROOT / "README.md").read_text())

    assert sorted(rows) == sorted(get_group(app).commands)
