"""The benchmarks' report, made from results that are known; and that each script can at least say what it does."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
ABOUT = {"machine": "2 cores, test", "cpu": "Some CPU", "memory_bytes": 16 << 30, "measured": "2026-01-02 03:04 UTC"}
FLOOR, USUAL, EVENT = (
    "memcpy, 2 threads (the floor)",
    "usual: load_file + cat + copy_, 1 thread",
    "fusewire: close() to event",
)


def timed(title: str, nbytes: int, floor: float, usual: float, mine: float, **more: Any) -> list[dict[str, Any]]:
    """Return what `harness.table` returns; the median of three is the one that is given."""
    return [
        {"title": title, "way": way, "bytes": nbytes, "seconds": [seconds * 0.5, seconds, seconds * 3], **more}
        for way, seconds in ((FLOOR, floor), (USUAL, usual), (EVENT, mine))
    ]


def dropped(count: int, seconds: float, **changes: int) -> dict[str, Any]:
    record = {
        "part": "files",
        "x": count,
        "seconds": seconds,
        "lost": 0,
        "twice": 0,
        "refused": 0,
        "waiting": 0,
        "counted": count,
        "events": count,
        "cpu_seconds": seconds / 2,
        "extra_bytes": 1000 * count,
    }
    return record | changes


RESULTS: dict[str, list[dict[str, Any]]] = {
    "folder": [
        *timed("fused pair", 65_000_000, 0.004, 0.040, 0.008),
        *timed("V2-wide shard", 2_000_000_000, 0.100, 0.300, 0.200),
    ],
    "latency": [
        {"way": "folder: close() to event, idle", "seconds": [0.002] * 99 + [0.3]},
        {"way": "socket: call to event, idle", "seconds": [0.001] * 100},
        {"way": "folder: close() to event, beside shards of 3.4 GB", "seconds": [0.004] * 100},
        {"way": "socket: call to event, beside shards of 3.4 GB", "seconds": [0.005] * 100},
        {"idle_cpu": 0.001, "beyond_bytes": 100_000_000, "start_seconds": 3.0},
    ],
    "ingest": [
        {"title": "a third of a layer", "way": "memcpy, 1 thread (the floor)", "bytes": 900_000_000, "seconds": [0.1]},
        {"title": "a third of a layer", "way": "chunks by shared memory", "bytes": 900_000_000, "seconds": [0.2]},
        {"title": "a third of a layer", "way": "chunks as messages (ipc)", "bytes": 900_000_000, "seconds": [1.0]},
        {"way": "messages", "stalled": True, "bytes_per_second": 2e9, "extra_bytes": 48_000_000},
    ],
    "names": [
        {"phase": "header", "microseconds": 4.0},
        {"phase": "placing", "microseconds": 6.0},
        {"phase": "safe_open", "microseconds": 25.0},
        {"phase": "daemon", "microseconds": 30.0},
    ],
    "widths": [{"model": "V3-wide", "bytes": 1, "seconds": 1.0}],
    "versions": [
        {"part": "pause", "bytes": 1_000_000, "commits": [2e-5], "around": [1e-5], "idle": [1e-5]},
        {"part": "pause", "bytes": 100_000_000, "commits": [3e-5], "around": [2e-5], "idle": [1e-5]},
        {"part": "daemon", "shards": 8, "idle": 40.0, "busy": 30.0, "extra_bytes": 2_000_000},
    ],
    "growth": [
        *timed("1", 20_000_000, 0.002, 0.010, 0.004, part="bytes", x=20_000_000, tensors=2),
        *timed("10", 200_000_000, 0.020, 0.100, 0.040, part="bytes", x=200_000_000, tensors=20),
        *timed("64", 65_000_000, 0.004, 0.010, 0.008, part="tensors", x=63, tensors=63),
        *timed("6,400", 65_000_000, 0.004, 0.300, 0.100, part="tensors", x=6399, tensors=6399),
        dropped(100, 0.1),
        dropped(10_000, 20.0),
        {"part": "subscribers", "x": 100, "latencies": [0.005] * 100, "events": 400, "cpu_seconds": 0.4},
    ],
    "overhead": [
        {
            "model": model,
            "bytes": 1_000_000,
            "starts": [{"imports": 2.0, "building": 0.1, "loading": 0.2}],
            "idle_cpu": 0.002,
            "beyond_bytes": 150_000_000,
        }
        for model in ("demo's model", "V2-wide model")
    ],
    "peers": [
        *(
            {"part": "time", "title": "t", "way": way, "bytes": 10**9, "seconds": [seconds]}
            for way, seconds in (
                ("memcpy, 1 thread", 0.2),
                (FLOOR, 0.1),
                ("page cache: preadv, 1 thread", 0.25),
                ("safetensors load_file + copy_", 0.3),
                (EVENT, 0.125),
            )
        ),
        {"part": "memory", "way": "safetensors load_file + copy_", "extra_bytes": 5_000_000},
        {"part": "memory", "way": EVENT, "extra_bytes": 0},
        {"part": "missing", "way": "fastsafetensors", "distribution": "fastsafetensors"},
        {"part": "version", "way": "safetensors load_file", "version": "0.8.0"},
        {"part": "probe", "way": "safetensors load_file", "probe": "a name that comes twice", "outcome": "taken"},
        {"part": "probe", "way": "fusewire", "probe": "a name that comes twice", "outcome": "refused"},
    ],
}
"""Every benchmark's results, in round figures."""


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """``report(results, *options)``: the report's output, its document and its figure (None: not written)."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    main = importlib.import_module("report").main

    def make(results: dict[str, list[dict[str, Any]]], *options: str) -> tuple[str, str | None, str | None]:
        folders = tmp_path / "results", tmp_path / "docs"
        for folder in folders:
            folder.mkdir()
        for name, records in results.items():
            (folders[0] / f"{name}.json").write_text(json.dumps(ABOUT | {"records": records}))
        assert main(["--results", str(folders[0]), "--docs", str(folders[1]), *options]) == 0
        document, figure = folders[1] / "performance.md", folders[1] / "growth.svg"
        return (
            capsys.readouterr().out,
            document.read_text() if document.exists() else None,
            figure.read_text() if figure.exists() else None,
        )

    return make


def cells(text: str, what: str) -> list[str]:
    """Return a table's line by its first cell."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {what} |")]
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_the_report_has_the_right_figures(report: Any) -> None:
    printed, document, _ = report(RESULTS)

    assert document.splitlines()[0].startswith("<!-- Generated by benchmarks/report.py")
    assert cells(document, "fused pair, close() to event") == [
        "8.0 ms for 65.0 MB",
        "0.50",
        "at least 0.8 of the floor",
        "**no**",
    ]
    assert cells(document, "V2-wide shard, close() to event")[1:] == ["0.50", "at least 0.9 of the floor", "**no**"]
    assert cells(document, "fused pair, beside the usual reload")[0] == "5.0 times as fast"
    assert cells(document, "16 KB by the folder, idle, the worst")[0] == "p50 2.0 ms, p99 300.0 ms, worst 300.0 ms"
    assert cells(document, "16 KB by the folder, idle, the worst")[3] == "**no**"
    assert cells(document, "pushing as messages")[1:] == ["0.10", "at least 0.45 of memcpy on 1 thread", "**no**"]
    assert cells(document, "cost of a tensor beside its bytes")[0] == "10.0 us; safe_open and copy_: 25.0 us"
    assert "exponent 1.00" in cells(document, "growth with bytes")[0]
    assert cells(document, "files at once: growth with their number")[0] == "1.0 ms each of 100, 2.0 ms each of 10,000"
    assert cells(document, "files at once: growth with their number")[3] == "**no**"
    assert cells(document, "start to READY, demo's model")[0] == "2.30 s, imports 2.00 s of it"
    assert cells(document, "beside the fastest other loader")[:2] == [
        "125.0 ms; safetensors load_file + copy_: 300.0 ms",
        "0.80",
    ]
    assert cells(document, "20.0 MB") == ["2.0 ms", "10.0 ms", "4.0 ms", "0.50", "5.00"]
    assert cells(document, "10,000") == ["20.00 s", "2.0 ms", "1.0 ms", "1.0 ms", "0 / 0 / 0", "1.0 KB"]
    assert cells(document, "safetensors load_file + copy_ 0.8.0") == ["300.0 ms", "0.33", "+5 MB"]
    assert cells(document, "fastsafetensors")[0] == "not installed"
    assert cells(document, "a name that comes twice") == ["taken", "refused"]
    assert (
        "| page cache: preadv, 1 thread | `peers.py` | 1.00 GB | 250.0 ms | 250.0 ms to 250.0 ms | 4.00 |" in document
    )
    assert cells(document, "`folder.py`") == ["2026-01-02 03:04 UTC", "2 cores, test", "Some CPU", "16 GiB"]
    assert "not measured" not in document
    assert "V2-wide shard, close() to event" in printed
    assert document.index("The machine's own limits") < document.index("fused pair, close() to event")


def test_a_lost_file_is_no_success(report: Any) -> None:
    growth = [dropped(100, 0.1, lost=1, counted=99)]

    _, document, _ = report({"growth": growth})

    assert cells(document, "files at once: lost, refused or applied twice")[3] == "**no**"


@pytest.mark.parametrize("missing", ["folder", "latency", "ingest", "names", "versions", "growth", "overhead", "peers"])
def test_what_is_missing_is_named_and_nothing_is_invented(report: Any, missing: str) -> None:
    _, document, figure = report({name: records for name, records in RESULTS.items() if name != missing})

    assert cells(document, f"`{missing}.py`")[0] == "not measured"
    assert re.search(r"\| not measured \| - \| .* \| not measured \|", document)
    assert "nan" not in document
    assert (figure is None) == (missing == "growth")


def test_without_any_results_everything_is_not_measured(report: Any) -> None:
    _, document, figure = report({})

    body = document[document.index("| what | figure |") : document.index("## How it grows")]
    lines = [line for line in body.splitlines()[2:] if line.startswith("|")]
    assert lines
    assert all(line.endswith("| not measured |") for line in lines)
    assert figure is None


def test_short_runs_print_their_table_and_write_nothing(report: Any) -> None:
    printed, document, figure = report({"folder": RESULTS["folder"]}, "--quick")

    assert "fused pair, close() to event" in printed
    assert "not measured" not in printed
    assert (document, figure) == (None, None)


def test_the_figure_is_whole_xml_with_a_line_for_each_way(report: Any) -> None:
    _, document, figure = report(RESULTS)

    root = ET.fromstring(figure)  # noqa: S314 - our own
    space = {"svg": "http://www.w3.org/2000/svg"}
    lines = root.findall("svg:polyline", space)
    texts = [text.text for text in root.findall("svg:text", space)]
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert len(lines) == 3 + 3 + 1
    assert {"fusewire", "memcpy, 2 threads", "bytes", "tensors", "files"} <= set(texts)
    for line in lines:
        for point in line.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 < x < width
            assert 0 < y < height
    assert "(growth.svg)" in document


def test_every_benchmark_says_what_it_does() -> None:
    """In one process, as torch takes long to import."""
    scripts = sorted(path for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text())
    program = """
import contextlib, io, runpy, sys
for path in sys.argv[1:]:
    sys.argv, out = [path, "--help"], io.StringIO()
    sys.path[0] = path.rpartition("/")[0]
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        print(path, end.code, "usage:" in out.getvalue(), len(out.getvalue()) > 100)
"""
    result = subprocess.run(
        [sys.executable, "-c", program, *map(str, scripts)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert [path.name for path in scripts] == [
        f"{name}.py"
        for name in sorted(
            (
                "folder",
                "gpu",
                "growth",
                "ingest",
                "latency",
                "names",
                "overhead",
                "peers",
                "report",
                "soak",
                "versions",
                "widths",
            )
        )
    ]
    assert result.stdout.splitlines() == [f"{path} 0 True True" for path in scripts], result.stderr
