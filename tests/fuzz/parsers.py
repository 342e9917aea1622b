"""Targets without a thread or a socket: the header of a shard, messages and events, settings, indices and versions."""

from __future__ import annotations

import json
import math
import struct
import tomllib
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import msgspec
from material import HOSTILE, ODD, Choices, Pairs, Raw, mutate_bytes, mutated, tree, write
from safetensors import deserialize
from target import Input, Memory, Refusal, attempt, memory_folder

from fusewire.daemon import events, manifest, settings, versions, wire
from fusewire.daemon.errors import ProtocolError, Reason, SettingsError, ShardNotReady, ShardRejected, printable
from fusewire.daemon.lifecycle import VersionState
from fusewire.daemon.payload import BytesPayload, HeadPayload, open_file
from fusewire.daemon.shard import DTYPE_BITS, LENGTH_BYTES, ShardHeader
from fusewire.daemon.sources.scan import is_wanted

NAMES = ("a", "b", "model.norm.weight", "x:y", '"\\', "ü", *HOSTILE)
BY_FILE = 16
"""One input in so many goes through a file, too, which takes longer."""


def plausible_header(choices: Choices) -> tuple[Any, int]:
    """Make the tree of a header, and the size of its data. It is right, unless tensors overlap or leave a hole."""
    end, pairs = 0, Pairs()
    if choices.one_in(4):
        pairs.append(("__metadata__", Pairs(choices.some(3, lambda: (choices.pick(NAMES), choices.pick(HOSTILE))))))
    for number in range(choices.below(5)):
        dtype = choices.pick((*DTYPE_BITS, "F4", "F8_E4M3FNUZ", "C64"))
        shape = choices.some(3, lambda: choices.pick((1, 2, 3, 0, 5, 7)))
        nbytes = math.prod(shape) * DTYPE_BITS.get(dtype, 8) // 8
        if choices.one_in(8):
            end = max(0, end + choices.pick((-1, -2, -4, -8, 1, 4)))
        entry = Pairs([("dtype", dtype), ("shape", shape), ("data_offsets", [end, end + nbytes])])
        pairs.append((choices.pick((f"t{number}", f"t{number}", choices.pick(NAMES))), entry))
        end += nbytes
    return pairs, end


class Header:
    """The header of a shard: in memory, as a head alone, and in a file. The oracle is the safetensors library."""

    name = "header"
    memory = Memory(40, 128 * 1024)
    limit = 256 * 1024

    def __init__(self) -> None:
        self._folder = memory_folder()
        self._path = Path(self._folder.name) / "x.safetensors"

    def make(self, choices: Choices) -> Input:
        header, size = plausible_header(choices)
        by_file = choices.one_in(BY_FILE)
        text = mutated(header, choices)
        length = choices.pick(
            (len(text),) * 12 + (len(text) - 1, len(text) + 1, 0, 1, self.limit + 1, 2**63, 2**64 - 1)
        )
        size = max(0, size + choices.pick((0,) * 12 + (1, -1, 8, -8)))
        data = (choices.take(size) * 2 + bytes(size))[:size]
        shard = struct.pack("<Q", max(0, length)) + text + data
        if choices.one_in(8):
            shard = shard[: choices.below(len(shard) + 1)]
        if choices.one_in(16):
            shard = mutate_bytes(shard, choices)
        return Input((shard, by_file), len(shard))

    def act(self, content: tuple[bytes, bool]) -> tuple[Any, Any, Any]:
        shard, by_file = content
        whole = attempt(lambda: BytesPayload.parse(shard, header_limit=self.limit).header)
        end = min(len(shard), LENGTH_BYTES + int.from_bytes(shard[:LENGTH_BYTES], "little"))
        head = attempt(lambda: HeadPayload.parse(shard[:end], len(shard) - end, header_limit=self.limit).header)
        return whole, head, self._by_file(shard) if by_file else whole

    def _by_file(self, shard: bytes) -> Any:
        self._path.write_bytes(shard)

        def header() -> ShardHeader:
            opened = open_file(self._path, leases=False, settle=0, incomplete_after=0, header_limit=self.limit)
            opened.close()
            return opened.header

        return attempt(header)

    def judge(self, content: tuple[bytes, bool], outcome: tuple[Any, Any, Any]) -> str:
        shard, _ = content
        whole, head, file = outcome
        if not isinstance(whole, Refusal):
            assert whole == head == file
            same_as_safetensors(shard, whole)
            return "accepted"
        reasons = set()
        for refused in outcome:
            assert isinstance(refused, Refusal), f"refused in one way, accepted in another: {outcome}"
            refused.check()
            assert isinstance(refused.error, ShardRejected), refused
            assert isinstance(refused.error.reason, Reason)
            reasons.add(refused.error.reason)
        assert len(reasons) == 1, reasons
        return reasons.pop().value

    def close(self) -> None:
        self._folder.cleanup()


def same_as_safetensors(shard: bytes, header: ShardHeader) -> None:
    """Compare names, dtypes, shapes and bytes with what the library reads; and see that the bytes are all spoken of."""
    theirs = deserialize(shard)
    mine = [(entry.name, list(entry.shape), entry.dtype) for entry in header.tensors]
    assert sorted(mine) == sorted((name, list(found["shape"]), found["dtype"]) for name, found in theirs)
    data = {name: bytes(found["data"]) for name, found in theirs}
    end = 0
    for entry in header.tensors:
        assert entry.start == end
        assert shard[header.data_offset + entry.start : header.data_offset + entry.stop] == data[entry.name]
        end = entry.stop
    assert header.data_offset + end == len(shard)
    text = shard[LENGTH_BYTES : header.data_offset]
    assert (json.loads(text).get("__metadata__") or {}) == header.metadata


# ------------------------------------------------------------------------------------------------------ messages

_HALF = wire.PendingHalf(version=1, layer=0, tensor="t", missing=("u",), age=1.5, nbytes=3, owned=True)
_REJECTED = wire.RejectedShard(shard="s", source="folder", reason="truncated", detail="d", time=1.5)
_VERSION = wire.VersionStatus(version=7, state=VersionState.OPEN, missing=("t",), missing_count=1)
_LAYERS = wire.Layers(total=3, fusable=3, fused=(0, 1), loaded=(0,), waiting=())
_EVENT = events.LayerFused(layer=3, seq=5, boot="b", time=1.5, version=7, message="layer 3 fused")
INGEST = (
    wire.Put(version=3, name="n", run="r", xxh3="0" * 32),
    wire.Hello(),
    wire.Begin(stream="s", nbytes=10, version=3, shared=True),
    wire.Chunk(stream="s", offset=0, slot=1, nbytes=4),
    wire.Cancel(stream="s"),
    wire.Commit(version=3, tensors=["a", "b"], run="r"),
    wire.Abort(version=3),
)
CONTROL = (
    wire.GetStatus(),
    wire.GetSnapshot(),
    wire.GetReplay(since=3),
    wire.GetPending(),
    wire.GetVersions(),
    wire.CommitVersion(version=3),
    wire.RollbackVersion(),
    wire.AbortVersion(),
    wire.Generate(token_ids=[1, 2], max_new_tokens=3, timeout=1.5),
)
INGEST_REPLIES = (
    wire.Answer(status="applied", shard="s", version=3, fused=(1,), waiting=("t",), stream="s", detail="d"),
    wire.Credit(stream="s", chunks=2, slots=(1, 2)),
    wire.Welcome(boot="b", max_put_bytes=1, chunk_bytes=2, shared="/x"),
)
CONTROL_REPLIES = (
    wire.Status(
        boot="b",
        pid=1,
        state="ready",
        uptime=1.5,
        model="m",
        mode="in place",
        version=None,
        versions=(_VERSION,),
        run=None,
        staging_waits="",
        slots_filled=1,
        slots_total=2,
        layers=_LAYERS,
        pending=(_HALF,),
        rejected=(_REJECTED,),
        waiting_shards=(wire.WaitingShard(shard="s", source="socket", state="queued"),),
        counters={"events": 1.0},
        throughput=0.5,
        health={"loader": "ok"},
        notes=("n",),
    ),
    wire.Snapshot(
        boot="b", seq=3, ready=True, version=7, fused=((0, None), (1, 3)), loaded=(), pending=(), rejected=(_REJECTED,)
    ),
    wire.Replay(boot="b", complete=True, events=(_EVENT, events.ModelReady(seq=6))),
    wire.Pending(pending=(_HALF,)),
    wire.Generated(token_ids=(1, 2), version=3, seconds=0.5),
    wire.VersionList(live=7, staging_waits="w", versions=(_VERSION,)),
    wire.Done(detail="d"),
    wire.Failed(error="e", detail=("f",)),
)
EVENTS: tuple[events.AnyEvent, ...] = (
    _EVENT,
    events.LayerLoaded(layer=30, seq=2, version=7),
    events.VersionComplete(cause="index"),
    events.VersionIncomplete(version=3, missing=("a",), missing_count=2, cause="index"),
    events.VersionVerified(version=3, carried=1, carried_bytes=2, tokens=(3,), fingerprint="f", seconds=0.5),
    events.VersionLive(version=0),
    events.VersionRolledBack(version=0, previous=1),
    events.VersionAborted(version=1, cause="NaN"),
    events.VersionSuperseded(version=1, cause="newer"),
    events.ModelReady(),
    events.ShardApplied(shard="a", source="folder", tensors=1, skipped=0, waiting=("x",), nbytes=2, seconds=0.1),
    events.ShardRefused(shard="s", source="socket", reason="truncated", detail="d"),
    events.FusionExpired(layer=0, tensor="t", age=1.5, nbytes=3, cause="age"),
    events.Heartbeat(ready=True),
    events.Stopping(waiting=("a", "b"), seq=2**63 - 1),
)
DECODERS: tuple[tuple[Callable[[bytes], Any], tuple[msgspec.Struct, ...]], ...] = (
    (wire.decode_ingest_request, INGEST),
    (wire.decode_control_request, CONTROL),
    (wire.decode_ingest_reply, INGEST_REPLIES),
    (wire.decode_control_reply, CONTROL_REPLIES),
)
"""A decoder, and one message of each kind that it knows."""


class Wire:
    """Every decoder of messages, the daemon's and the clients'. The oracle is Python's own JSON parser."""

    name = "wire"
    memory = Memory(40, 64 * 1024)

    def make(self, choices: Choices) -> Input:
        decoder, messages = choices.pick(DECODERS)
        message = choices.pick(messages)
        frame = mutated(tree(json.loads(wire.encode(message))), choices)
        return Input((choices.pick((decoder, decoder, choices.pick(DECODERS)[0])), frame), len(frame))

    def act(self, content: tuple[Callable[[bytes], Any], bytes]) -> Any:
        decode, frame = content
        return attempt(lambda: decode(frame), ProtocolError)

    def judge(self, content: tuple[Callable[[bytes], Any], bytes], outcome: Any) -> str:
        decode, frame = content
        if isinstance(outcome, Refusal):
            outcome.check()
            return "refused"
        again = wire.encode(outcome)
        assert decode(again) == outcome
        same_as_json(frame, again)
        return "accepted"

    def close(self) -> None:
        pass


class _Twice(Exception):
    """A key stands twice; which of the two counts, parsers do not agree on."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise _Twice
    return dict(pairs)


def leniently(content: bytes, pairs: Callable[[list[tuple[str, Any]]], Any] = dict) -> Any:
    """Read JSON, whatever is in the parts that nobody looks at: they may hold what is no UTF-8, or any number."""

    def whole(text: str) -> int | str:
        return int(text) if len(text) < 1000 else text

    return json.loads(content.decode(errors="replace"), parse_int=whole, object_pairs_hook=pairs)


def same_as_json(frame: bytes, again: bytes) -> None:
    """See that what was read is what stands there. Of what is unknown, nothing is kept; what is missing is added."""
    try:
        said = leniently(frame, _once)
    except _Twice:
        return
    assert _within(json.loads(again), said), f"{frame!r} was read as {again!r}"


def _within(understood: Any, said: Any) -> bool:
    if isinstance(understood, dict):
        return all(key not in said or _within(value, said[key]) for key, value in understood.items())
    if isinstance(understood, list):
        return len(understood) == len(said) and all(map(_within, understood, said))
    return bool(understood == (float(said) if isinstance(understood, float) else said))


class Events:
    """The three frames of an event."""

    name = "events"
    memory = Memory(40, 64 * 1024)

    def make(self, choices: Choices) -> Input:
        topic, sequence, _ = frames = events.encode(choices.pick(EVENTS))
        frames[2] = mutated(tree(json.loads(frames[2])), choices)
        if choices.one_in(6):
            frames[0] = mutate_bytes(topic, choices)
        if choices.one_in(6):
            frames[1] = mutate_bytes(sequence, choices)
        if choices.one_in(12):
            frames = frames[: choices.below(4)] + choices.some(2, lambda: choices.take(3))
        return Input(frames, sum(map(len, frames)))

    def act(self, content: list[bytes]) -> Any:
        return attempt(lambda: events.decode(content), ProtocolError)

    def judge(self, content: list[bytes], outcome: Any) -> str:
        if isinstance(outcome, Refusal):
            outcome.check()
            return "refused"
        topic, sequence, body = content
        assert events.decode(events.encode(outcome)) == outcome
        assert events.encode(outcome)[:2] == [topic, sequence]
        same_as_json(body, events.encode(outcome)[2])
        return "accepted"

    def close(self) -> None:
        pass


# ------------------------------------------------------------------------------------------------------ settings

_DEFAULTS = json.loads(msgspec.json.encode(settings.Settings(model=settings.Model(config="config.json"))))
_TOML_ODD = (
    *(Raw(text) for text in ("0x1F", "1_000", "inf", "nan", "-0", "1979-05-27", "'~nobody-of-this-name/x'")),
    *(Raw(text) for text in ("'~/x'", '"a\\u0000b"', '"""\nx"""', "{a = 1}", "[" * 2000, "{a=" * 2000, "[1, 'a']")),
    *ODD,
)


class Settings:
    """A settings file."""

    name = "settings"
    memory = Memory(400, 512 * 1024)

    def __init__(self) -> None:
        self._folder = memory_folder()
        self._path = Path(self._folder.name) / "fusewire.toml"

    def make(self, choices: Choices) -> Input:
        lines = [] if choices.one_in(20) else ["[model]", 'config = "config.json"']
        for section in choices.some(3, lambda: choices.pick(tuple(_DEFAULTS))):
            lines += [f"[{section}]"] if f"[{section}]" not in lines or choices.one_in(10) else []
            lines += choices.some(3, lambda section=section: self._line(choices, section))  # type: ignore[misc]
        content = "\n".join(lines).encode(errors="surrogatepass")
        for _ in range(choices.pick((0, 0, 1, 2))):
            content = mutate_bytes(content, choices)
        return Input(content, len(content))

    def _line(self, choices: Choices, section: str) -> str:
        key, value = choices.pick(tuple(_DEFAULTS[section].items()))
        key = choices.pick((key,) * 10 + ("verison", "a.b", '"\\u001b"', "x" * 300))
        if choices.one_in(3):
            value = choices.pick(_TOML_ODD)
        return f"{key} = {write(value, Choices(b'')).decode(errors='surrogatepass')}"

    def act(self, content: bytes) -> Any:
        self._path.write_bytes(content)
        return attempt(lambda: settings.load(self._path), SettingsError)

    def judge(self, content: bytes, outcome: Any) -> str:
        if isinstance(outcome, Refusal):
            outcome.check()
            return "refused"
        again = settings.dumps(outcome)
        self._path.write_text(again)
        assert settings.load(self._path) == outcome
        read = tomllib.loads(again)
        for section, table in tomllib.loads(content.decode()).items():
            for key, value in table.items():
                assert read[section][key] == value or isinstance(value, str)  # a path is made absolute
        return "accepted"

    def close(self) -> None:
        self._folder.cleanup()


# -------------------------------------------------------------------------------------------- indices and versions

_FOLDERS = ("step_42", "global_step_7", "checkpoint-0", "weight_v000042", "99", "9" * 19, "9" * 25, "step_", "٣", ".x")
_FILES = ("a.safetensors", "STABLE", "model.safetensors.index.json", ".hidden.safetensors", "b.safetensors.part")
_TOLD = ("7", "07", "-1", "+1", "1e3", "٣", "9" * 19, str(2**63), "9" * 5000, " 7", "7\n", *HOSTILE)
_DIGESTS = (None, "0" * 32, "f" * 32, "F" * 32, "0" * 31, "0" * 32 + "\n", *HOSTILE)


class Lists:
    """An index of shards, by memory and by file. The oracle is Python's own JSON parser."""

    name = "index"
    memory = Memory(40, 64 * 1024)

    def __init__(self) -> None:
        self._folder = memory_folder()
        self._path = Path(self._folder.name) / "model.safetensors.index.json"

    def make(self, choices: Choices) -> Input:
        weights = Pairs(choices.some(4, lambda: (choices.pick(NAMES), choices.pick(("1.safetensors", *HOSTILE)))))
        index = Pairs([("metadata", Pairs([("total_size", 1)])), ("weight_map", weights)])
        content = mutated(index, choices)
        return Input((content, choices.one_in(BY_FILE)), len(content))

    def act(self, content: tuple[bytes, bool]) -> tuple[Any, Any]:
        index, by_file = content
        found = attempt(lambda: manifest.parse_index(index), ValueError)
        if not by_file:
            return found, None
        self._path.write_bytes(index)
        return found, attempt(lambda: manifest.read_index(self._path, 0.0), (ShardNotReady, ShardRejected))

    def judge(self, content: tuple[bytes, bool], outcome: tuple[Any, Any]) -> str:
        found, read = outcome
        if isinstance(found, Refusal):
            found.check()
            if read is not None:
                read.check()
                assert read.error.reason is Reason.MALFORMED_INDEX
            return "refused"
        assert found == tuple(leniently(content[0])["weight_map"])
        assert read in (None, found)
        return "accepted"

    def close(self) -> None:
        self._folder.cleanup()


class Versions:
    """What a path, a message and a shard's metadata claim of its version, its run and its bytes."""

    name = "versions"
    memory = Memory(40, 64 * 1024)

    def make(self, choices: Choices) -> Input:
        folders = choices.some(5, lambda: choices.pick((*_FOLDERS, *HOSTILE[1:])))
        path = PurePath(*folders, choices.pick((*_FILES, *HOSTILE[1:])))
        keys = (*versions.METADATA_KEYS, "run", "xxh3")
        metadata = dict(choices.some(3, lambda: (choices.pick(keys), choices.pick((*_TOLD, *_DIGESTS[1:])))))
        told = choices.pick((None, "r", *HOSTILE)), choices.pick(_DIGESTS)
        size = len(str(path)) + sum(len(key) + len(value or "") for key, value in metadata.items())
        return Input((path, metadata, told), size)

    def act(self, content: tuple[PurePath, dict[str, str], tuple[str | None, str | None]]) -> Any:
        path, metadata, (run, digest) = content
        is_wanted(path)

        def all_of_it() -> Any:
            claims = [*versions.versions_of_path(path), *versions.versions_of_metadata(metadata)]
            return (
                claims,
                versions.reconcile(claims),
                versions.run_of(run, metadata),
                versions.digest_of(digest, metadata),
            )

        return attempt(all_of_it, ShardRejected)

    def judge(self, content: tuple[PurePath, dict[str, str], tuple[str | None, str | None]], outcome: Any) -> str:
        if isinstance(outcome, Refusal):
            outcome.check(800)  # of ten folders; what leaves the daemon is cut
            return "refused"
        path, metadata, (_, digest) = content
        claims, version, run, found = outcome
        said = {int("".join(filter(str.isdecimal, part))) for part in path.parts[:-1] if part[-1:].isdecimal()}
        said |= {int(metadata[key]) for key in versions.METADATA_KEYS if metadata.get(key, "").strip().isdecimal()}
        assert {claim.version for claim in claims} <= said
        assert version is None or 0 <= version < 2**63
        assert {version} == {claim.version for claim in claims} or (not claims and version is None)
        assert run is None or run == printable(run)
        assert found in {digest, metadata.get("xxh3")}
        return "accepted"

    def close(self) -> None:
        pass
