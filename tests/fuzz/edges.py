"""Targets with threads and sockets: the ingest socket as clients see it, and the loader with a real model."""

from __future__ import annotations

import queue
import struct
import threading
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch
import xxhash
import zmq
from material import HOSTILE, Choices, Pairs, mutated, tree, write
from parsers import INGEST
from safetensors.torch import load, load_file
from target import Input, Memory, memory_folder

from fusewire.daemon import demo, settings, wire
from fusewire.daemon.errors import Reason, printable
from fusewire.daemon.loader import Consumed, Loader, Source, Wanted
from fusewire.daemon.payload import Bytes, BytesPayload, HeadPayload, Payload
from fusewire.daemon.shard import LENGTH_BYTES
from fusewire.daemon.sources.socket import Broken, Offer, Order, Piece, SocketSource
from fusewire.daemon.stimuli import Expired, Inspected, NotReady, Placed, Refused
from fusewire.daemon.versions import Claim
from fusewire.model import DeepseekV2Config, DeepseekV2ForCausalLM, Generation, Slot

CHECKPOINT = Path(demo.__file__).parent / "checkpoints" / "v2"
PATIENCE = 15.0
"""Seconds."""
STREAMS = ("a", "b", "\x1b[31m")


# -------------------------------------------------------------------------------------------- the ingest socket


class Ingest:
    """Sequences of messages from two clients, with everything that an answer, a chunk and its end lead to.

    What must hold: nothing but the declared kinds comes out, each message that is malformed is answered, and at the end
    no client, no stream and no slot of the shared memory is left over.
    """

    name = "ingest"
    memory = Memory(40, 512 * 1024)
    chunk = 65536
    slots = 4

    def __init__(self) -> None:
        self._folder = memory_folder()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        made = settings.Socket(
            endpoint=f"ipc://{self._folder.name}/ingest",
            max_put_bytes=1 << 20,
            chunk_bytes=self.chunk,
            window_bytes=self.slots * self.chunk,
            shared_path="/dev/shm",  # noqa: S108 - what the setting is for
        )
        self._source = SocketSource(self._context, made, boot=Path(self._folder.name).name, mode=0o600)
        self._ends = 0
        self._clients = [self._context.socket(zmq.DEALER) for _ in range(2)]
        for client in self._clients:
            client.linger = 0
            client.connect(self._source.endpoint)

    def make(self, choices: Choices) -> Input:
        messages = [(choices.below(2), self._frames(choices)) for _ in range(1 + choices.below(8))]
        return Input((messages, choices.take(64)), sum(len(frame) for _, frames in messages for frame in frames))

    def _frames(self, choices: Choices) -> list[bytes]:
        stream = choices.pick(STREAMS)
        shard = choices.take(choices.below(64))
        usual = (
            [
                wire.encode(wire.Begin(stream=stream, nbytes=choices.pick((100, 0, 2**40)), shared=choices.one_in(2))),
                b"{}",
            ],
            [wire.encode(wire.Chunk(stream=stream, offset=choices.pick((0, 7)))), shard],
            [wire.encode(wire.Chunk(stream=stream, offset=0, slot=choices.below(5), nbytes=choices.pick((7, 2**40))))],
            [wire.encode(wire.Cancel(stream=stream))],
            [wire.encode(wire.Put()), shard],
        )
        frames = choices.pick(usual)
        if choices.one_in(3):
            frames = [mutated(tree(msgspec.json.decode(wire.encode(choices.pick(INGEST)))), choices), *frames[1:]]
        if choices.one_in(10):
            frames = frames[: choices.below(3)] + choices.some(2, lambda: choices.take(choices.below(9)))
        return ([b""] if choices.one_in(2) else []) + frames

    def act(self, content: tuple[list[tuple[int, list[bytes]]], bytes]) -> Any:
        messages, rest = content
        choices, came, deadline = Choices(rest), list[Any](), time.monotonic() + PATIENCE
        for number, frames in messages:
            if frames:
                self._clients[number].send_multipart(frames)
            self._pump(came, choices)
        answers: list[Any] = []
        for client in self._clients:  # what each sends is read in order: once this is answered, all the rest has been
            self._ends += 1
            client.send_multipart([b"", b'{"op":"end %d"}' % self._ends])
            while f"'end {self._ends}'" not in getattr(answers[-1] if answers else None, "detail", ""):
                self._pump(came, choices)
                assert time.monotonic() < deadline, f"no answer has come; before it there were {answers}"
                if client.poll(1):
                    answers.append(wire.decode_ingest_reply(client.recv_multipart()[-1]))
        return came, answers

    def _pump(self, came: list[Any], choices: Choices) -> None:
        """Do with what has come as the daemon does, at one time or another."""
        for one in self._source.offers():
            came.append(one)
            match one:
                case Offer() if one.nbytes is not None and not choices.one_in(4):
                    self._source.want(one.key)
                case Piece():
                    self._source.consumed(one.key, one.slot)
                case Broken():
                    self._source.answer(one.key, wire.Answer(status="rejected", reason=one.reason, detail=one.detail))
                case _ if choices.one_in(2):
                    self._source.answer(one.key, wire.Answer(status="applied"))

    def judge(self, _content: object, outcome: tuple[list[Any], list[Any]]) -> str:
        came, answers = outcome
        for one in came:
            assert isinstance(one, Offer | Order | Piece | Broken), one
            if isinstance(one, Offer):
                assert one.name == printable(one.name)
            if isinstance(one, Offer | Order):
                self._source.answer(one.key, wire.Answer(status="rejected", reason=Reason.INTERNAL_ERROR))
        for answer in answers:
            if isinstance(answer, wire.Answer):
                assert answer.detail == printable(answer.detail)
        assert not self._source._clients
        assert not self._source._streams._streams
        assert not self._source._streams._by_client
        assert sorted(self._source._streams._free) == list(range(self.slots))
        for client in self._clients:
            while client.poll(0):
                client.recv_multipart()
        refused = sum(isinstance(one, wire.Answer) and one.reason is not None for one in answers)
        return "refused" if refused > len(self._clients) else "taken"

    def close(self) -> None:
        self._source.close()
        self._context.destroy(linger=0)
        self._folder.cleanup()


# ------------------------------------------------------------------------------------------------- the loader


class Shard(NamedTuple):
    """A shard, and how it comes."""

    content: bytes
    staged: bool
    """Whether it goes to the model with two generations."""
    cuts: tuple[int, ...] | None
    """Sizes of the chunks that it comes in; None: it comes whole."""
    version: int | None
    claimed: int | None
    """The version that its message names."""
    xxh3: str | None


class Bench:
    """A loader and a model that serves.

    Args:
        generations: 1: shards are applied in place; 2: they are staged.
    """

    def __init__(self, generations: Literal[1, 2]) -> None:
        config = DeepseekV2Config.from_file(CHECKPOINT / "config.json")
        self.model = DeepseekV2ForCausalLM(config, generations=generations)
        self.told: queue.Queue[Any] = queue.Queue()
        self.loader = Loader(self.model, settings.Settings(model=settings.Model(config="")), self.told.put)
        self.loader.start()
        tensors: dict[str, torch.Tensor] = {}
        for path in sorted(CHECKPOINT.glob("model-*.safetensors")):
            tensors.update(load_file(path))
        self.model.stage(None)
        self.model.load_weights(tensors.items())
        self.model.carry(None)
        self.model.commit(None)
        assert self.model.serving
        staging = self.model.staging
        self.live = staging.generations[0] if staging.live is None else staging.live
        self.written = staging.staged

    def outcome(self) -> Any:
        """Return what the loader tells next of a shard."""
        while isinstance(told := self.told.get(timeout=PATIENCE), Expired | Consumed):
            pass
        return told

    def settle(self, version: int | None) -> None:
        """Let what a version has staged, and the halves that wait, go; return when that is done."""
        done = threading.Event()
        self.loader.release("k")
        self.loader.drop_version(version)
        self.loader._put(done.set)
        assert done.wait(PATIENCE)
        while not self.told.empty():
            assert isinstance(self.told.get(), Expired | Consumed)


def everything(generation: Generation) -> Bytes:
    """Return all bytes of a generation."""
    memory: Bytes = generation._storage.numpy()
    return memory


def place_of(generation: Generation, slot: Slot) -> slice:
    """Return where a slot's bytes lie among all."""
    rows = generation.bytes(slot)
    begin = rows.ctypes.data - everything(generation).ctypes.data
    return slice(begin, begin + rows.size)


class Loading:
    """A shard on its whole way into a real model: whole or in chunks, in place or staged.

    What must hold: a refusal leaves every byte of live weights as it was; an acceptance changes the slots that the
    shard names, to exactly its bytes, and no other byte. Where two generations are, the live one never changes. The
    oracle is safetensors' own reading of the shard.
    """

    name = "loading"
    memory = Memory(60, 4 * 1024 * 1024)
    limit = 256 * 1024

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._benches = {False: Bench(1), True: Bench(2)}
        self._slots = tuple(self._benches[True].model.table.slots.values())
        self._version = 0

    def make(self, choices: Choices) -> Input:
        header, data = self._plausible(choices)
        text = mutated(header, choices) if choices.one_in(2) else write(header, choices)
        content = struct.pack("<Q", len(text)) + text + data
        if choices.one_in(12):
            content = content[: choices.below(len(content) + 1)]
        cuts = tuple(1 + choices.below(4000) for _ in range(choices.below(20))) if choices.one_in(3) else None
        told = xxhash.xxh3_128_hexdigest(data) if choices.one_in(3) else "0" * 32 if choices.one_in(10) else None
        self._version += 1
        version = choices.pick((None, self._version))
        claimed = choices.pick((None, None, None, 7))
        return Input(Shard(content, choices.one_in(2), cuts, version, claimed, told), len(content))

    def _plausible(self, choices: Choices) -> tuple[Any, bytes]:
        """Make a shard of some of the model's tensors that is right, more or less."""
        header, data = Pairs(), b""
        if choices.one_in(6):
            keys = ("version", "step", "run", "xxh3", "format")
            header.append(("__metadata__", Pairs([(choices.pick(keys), choices.pick(("7", "8", "pt", *HOSTILE)))])))
        for _ in range(1 + choices.below(4)):
            slot = choices.pick(self._slots)
            dtype = choices.pick(("F32", "BF16", "F16", "BF16") * 5 + ("I32",))
            shape = list(slot.shape)
            odd = choices.below(40)
            if odd == 1:
                shape.reverse()
            elif odd == 2:
                shape[0] -= 1
            values = torch.full(shape, choices.pick((0.5, -1.25, 3e-5)), dtype=getattr(torch, _TORCH[dtype]))
            mine = bytearray(values.view(torch.uint8).numpy().tobytes())
            for _ in range(choices.below(4)):
                at = choices.below(len(mine))
                mine[at : at + 1] = choices.take(1) or b"\0"
            offsets = [len(data), len(data) + len(mine)]
            name = choices.pick((slot.name,) * 150 + ("x.rotary_emb.inv_freq", *HOSTILE))
            header.append((name, Pairs([("dtype", dtype), ("shape", shape), ("data_offsets", offsets)])))
            data += mine
        return header, data

    def act(self, content: Shard) -> Any:
        bench = self._benches[content.staged]
        before = everything(bench.live).copy(), everything(bench.written).copy()
        end = min(len(content.content), LENGTH_BYTES + int.from_bytes(content.content[:LENGTH_BYTES], "little"))
        head, data = content.content[:end], np.frombuffer(content.content[end:], dtype=np.uint8)

        def open_it() -> Payload:
            if content.cuts is not None:
                return HeadPayload.parse(head, data.size, header_limit=self.limit)
            return BytesPayload.parse(content.content, header_limit=self.limit)

        claims = () if content.claimed is None else (Claim("message header", content.claimed),)
        bench.loader.inspect("k", Source("shard", open_it, claims, None, content.xxh3))
        told = bench.outcome()
        if isinstance(told, Inspected):
            bench.loader.place("k", "shard", content.version)
            told = bench.outcome()
        if isinstance(told, Wanted):
            at = 0
            for size in (*(content.cuts or ()), data.size if content.xxh3 else 0):
                piece = data[at : at + size]
                if piece.size:
                    bench.loader.feed("k", piece, None, None)
                at += size
            bench.loader.fail("k", Reason.CLIENT_SILENT, "it has sent no more")
            told = bench.outcome()
        after = everything(bench.live).copy(), everything(bench.written).copy()
        bench.settle(content.version)
        return told, before, after

    def judge(self, content: Shard, outcome: tuple[Any, tuple[Bytes, Bytes], tuple[Bytes, Bytes]]) -> str:
        told, before, after = outcome
        bench = self._benches[content.staged]
        if content.staged:
            assert np.array_equal(before[0], after[0]), "live weights have changed"
            assert not bench.model.staging.brought(), "something of a version that was given up is left"
        assert bench.live.filled == len(self._slots), "slots of the live weights count as empty"
        assert not bench.model.pending(), "a half is left"
        if isinstance(told, Refused | NotReady):
            assert isinstance(told, Refused)
            assert told.reason is not Reason.INTERNAL_ERROR, told.detail
            assert content.staged or np.array_equal(before[1], after[1]), f"{told.reason} changed weights"
            assert content.staged or not told.unfilled
            return told.reason.value
        assert isinstance(told, Placed), told
        data = content.content[LENGTH_BYTES + int.from_bytes(content.content[:LENGTH_BYTES], "little") :]
        assert content.xxh3 in {None, xxhash.xxh3_128_hexdigest(data)}
        expected = before[1].copy()
        table = bench.model.table
        theirs = {name: tensor for name, tensor in load(content.content).items() if table.skip_reason(name) is None}
        slots = {name: table.slot(name) for name in theirs}
        waiting = set(told.waiting)
        assert set(told.arrived) | waiting == {index for slot in slots.values() for index in slot.indices}
        for name, slot in slots.items():
            if slot.index in waiting and not content.staged:
                continue  # it lies in the fusion cache
            dtype = bench.written.parameters[slot.parameter].dtype
            assert content.staged or theirs[name].isfinite().all(), f"{name} is not finite"
            rows = theirs[name].to(dtype).contiguous().view(-1).view(torch.uint8).numpy()
            expected[place_of(bench.written, slot)] = rows
        assert np.array_equal(expected, after[1]), "other bytes than the shard's, or in other places"
        return "in place" if not content.staged else "staged"

    def close(self) -> None:
        for bench in self._benches.values():
            assert bench.loader.stop(PATIENCE)


_TORCH = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "I32": "int32"}
