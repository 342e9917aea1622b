"""The thread that answers `generate`: forward passes must not keep the reactor from its sockets."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import structlog
import torch

from fusewire.model import DeepseekV2ForCausalLM, NotReadyError

from . import wire
from .router import Envelope

log = structlog.get_logger()


class Generation(NamedTuple):
    """An answer that is ready to be sent."""

    envelope: Envelope
    reply: wire.Generated | wire.Digest | wire.Failed


class _Job(NamedTuple):
    envelope: Envelope
    request: wire.Generate | wire.GetDigest
    deadline: float


class Generator:
    """One thread and a bounded queue of requests.

    Args:
        model: The resident model.
        waiting: Requests that may wait; one more is refused at once.
        lease_seconds: Longest time for which one request may keep the weights that it began with.
        sink: Takes each answer; must not block.
    """

    def __init__(
        self,
        model: DeepseekV2ForCausalLM,
        waiting: int,
        sink: Callable[[Generation], None],
        *,
        lease_seconds: float,
    ) -> None:
        self._model = model
        self._lease_seconds = lease_seconds
        self._sink = sink
        self._jobs: queue.Queue[_Job | None] = queue.Queue(waiting)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fusewire-generate", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def submit(self, envelope: Envelope, request: wire.Generate | wire.GetDigest) -> wire.Failed | None:
        """Queue a request; its answer comes through the sink. Returns a refusal when that can't be done."""
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        try:
            self._jobs.put_nowait(_Job(envelope, request, time.monotonic() + request.timeout))
        except queue.Full:
            return wire.Failed(
                error=f"{self._jobs.maxsize} generate requests are waiting already (control.generate_queue): "
                "try again later"
            )
        return None

    def health(self) -> str:
        """Return ``ok``, or what is wrong."""
        return "ok" if self._thread.is_alive() else "the generate thread has ended"

    def stop(self, timeout: float) -> bool:
        """Give up the request at hand at its next token, drop the rest. Returns whether it ended in time."""
        self._stopping.set()
        while True:
            try:
                self._jobs.get_nowait()
            except queue.Empty:
                break
        self._jobs.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _refusal(self, request: wire.Generate | wire.GetDigest) -> wire.Failed | None:
        if not self._model.ready:
            return wire.Failed(error=f"the model is not ready: {self._model.missing_summary()}")
        if isinstance(request, wire.GetDigest):
            return None
        config = self._model.config
        largest = max(request.token_ids)
        if largest >= config.vocab_size:
            return wire.Failed(error=f"token id {largest} is outside of the vocabulary of {config.vocab_size}")
        length = len(request.token_ids) + request.max_new_tokens
        if length > config.max_position_embeddings:
            return wire.Failed(
                error=f"{len(request.token_ids)} prompt and {request.max_new_tokens} new tokens are more "
                f"than the {config.max_position_embeddings} positions of the model"
            )
        return None

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._sink(Generation(job.envelope, self._answer(job)))

    def _answer(self, job: _Job) -> wire.Generated | wire.Digest | wire.Failed:
        """Do what is asked, with the weights that are live at the beginning."""
        begin = time.monotonic()
        last = begin + self._lease_seconds
        until = min(job.deadline, last)
        try:
            with self._model.lease() as lease:
                if isinstance(job.request, wire.GetDigest):
                    digest, nbytes = self._model.digest(lease, deadline=until, cancelled=self._stopping.is_set)
                    seconds = time.monotonic() - begin
                    return wire.Digest(digest=digest, version=lease.version, nbytes=nbytes, seconds=seconds)
                prompt = torch.tensor([job.request.token_ids], device=self._model.device)
                tokens = self._model.generate(
                    prompt,
                    max_new_tokens=job.request.max_new_tokens,
                    lease=lease,
                    deadline=until,
                    cancelled=self._stopping.is_set,
                )
        except NotReadyError as error:
            return wire.Failed(error=str(error))
        except TimeoutError as error:
            told = str(error)
            if last < job.deadline and time.monotonic() > last:
                told += f"; no request may keep its weights for longer than {self._lease_seconds:g} s"
                told += " (versions.lease_seconds)"
            return wire.Failed(error=told)
        except Exception as error:
            log.exception("generate.defect")
            return wire.Failed(error=f"internal error: {type(error).__name__}: {error}")
        new = tokens[0, prompt.shape[1] :].tolist()
        return wire.Generated(token_ids=tuple(new), version=lease.version, seconds=time.monotonic() - begin)
