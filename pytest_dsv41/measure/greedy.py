"""Greedy answers: what a server says at temperature 0, to be compared with what it said before."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_dsv41.engines import get_engine
from pytest_dsv41.measure.cell import Request, Sampling
from pytest_dsv41.measure.group import Endpoint, control_client, ended_by, stream_group

__all__ = ["Answer", "greedy_answers"]


@dataclass(frozen=True)
class Answer:
    """One answer: its prompt, text, finish reason and number of tokens."""

    prompt: str
    text: str
    finish: str
    tokens: int


def greedy_answers(
    endpoint: Endpoint,
    prompts: Sequence[str],
    *,
    max_tokens: int,
    deadline_s: float,
    stop: threading.Event | None = None,
    context: ssl.SSLContext | None = None,
) -> list[Answer]:
    """Ask `prompts` one after the other at temperature 0, each cold, and return the answers.

    The answers may end early (the end-of-text token counts). Counters are not looked at.

    Raises:
        MeasurementFailed: a request did not deliver, or the deadline came.
        MeasurementRefused: the server's counts contradict each other, or it serves no model.
    """
    deadline_ns = time.monotonic_ns() + int(deadline_s * 1e9)
    model = endpoint.model
    with ended_by(stop, deadline_ns):
        if not model:
            engine = get_engine(endpoint.engine)
            with control_client(
                endpoint, stop=stop, deadline_ns=deadline_ns, context=context
            ) as client:
                model = engine.models(endpoint.url, client=client)[0]
        answers = []
        for prompt in prompts:
            request = Request(
                max_tokens=max_tokens,
                prompt=prompt,
                sampling=Sampling(temperature=0.0, ignore_eos=False),
            )
            _, (stream,) = stream_group(
                endpoint, model, [request], deadline_ns=deadline_ns, stop=stop, context=context
            )
            answers.append(
                Answer(prompt, stream.text, stream.finish_reason or "", stream.completion_tokens)
            )
        return answers
