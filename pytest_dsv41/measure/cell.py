"""A cell: one workload, defined down to its sampling, under a name that means nothing else."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from pytest_dsv41.durable import dump_json
from pytest_dsv41.errors import MeasurementRefused, UsageError
from pytest_dsv41.measure.corpus import find_prompt, text_sha256
from pytest_dsv41.text import one_line

__all__ = [
    "CACHES",
    "Builder",
    "Cell",
    "Request",
    "Sampling",
    "for_cells",
    "messages_sha256",
    "runs_beside",
]

CACHES: Final = ("cold", "fill", "warm", "any")
"""What a prompt cache may be asked to do; see `Sampling`."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Sampling:
    """How the server draws, and what it may keep between requests; part of a cell's definition.

    `cache`: `cold` (each request proved without cached prompt tokens), `fill` (cold, and kept
    under its salt for later), `warm` (what was filled under the same salt is reused, and proved),
    `any` (not controlled, not judged).
    """

    temperature: float = 1.0
    top_p: float | None = None
    top_k: int | None = None
    thinking: bool | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    priority: int | None = None
    ignore_eos: bool = True
    cache: Literal["cold", "fill", "warm", "any"] = "cold"
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.cache not in CACHES:
            raise ValueError(f"cache {self.cache!r}: valid: {', '.join(CACHES)}")
        if not 0 <= self.temperature <= 10:
            raise ValueError(f"temperature {self.temperature!r}: valid: 0 to 10")

    def to_json(self) -> dict[str, Any]:
        """Return the settings that are set."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Builder:
    """A prompt made by code: `module:function`, its arguments, and what it must hash to.

    `data` is the folder that the function reads, handed to it as `data`. Where it lies is no part
    of the definition: the text is pinned.
    """

    function: str
    sha256: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    data: Path | None = None

    def build(self) -> str:
        """Call the function and return its text.

        Raises:
            MeasurementRefused: kind `prompt-unbuilt` when it raises or returns no text, kind
                `prompt-pin` when the text is another one.
        """
        module, _, name = self.function.partition(":")
        arguments = dict(self.arguments)
        if self.data is not None:
            if not self.data.is_dir():
                raise MeasurementRefused(
                    "prompt-unbuilt", f"{self.function}: its data folder {self.data} is not there"
                )
            arguments["data"] = self.data
        try:
            text = getattr(importlib.import_module(module), name)(**arguments)
        except Exception as error:
            why = one_line(f"{type(error).__name__}: {error}", 150)
            raise MeasurementRefused("prompt-unbuilt", f"{self.function}: {why}") from error
        if not isinstance(text, str):
            raise MeasurementRefused("prompt-unbuilt", f"{self.function} returned no text")
        if text_sha256(text) != self.sha256:
            raise MeasurementRefused(
                "prompt-pin",
                f"{self.function}: the text hashes to {text_sha256(text)[:12]}…, "
                f"pinned is {self.sha256[:12]}…",
            )
        return text


def messages_sha256(messages: Sequence[Mapping[str, Any]]) -> str:
    """The identity of chat messages: one message's text, several as canonical JSON."""
    if len(messages) == 1 and isinstance(messages[0].get("content"), str):
        return text_sha256(messages[0]["content"])
    return text_sha256(dump_json([dict(message) for message in messages]))


@dataclass(frozen=True)
class Request:
    """One request as it will be sent. Exactly one of `prompt`, `messages`, `token_ids` is set."""

    max_tokens: int
    prompt: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    token_ids: tuple[int, ...] | None = None
    api: Literal["completions", "chat"] = "completions"
    sampling: Sampling = Sampling()
    seed: int | None = None
    salt: str | None = None
    name: str = ""
    late: bool = False
    """Sent only after all the others of its group decode."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer; they are no part of it."""

    def __post_init__(self) -> None:
        given = [part for part in (self.prompt, self.messages, self.token_ids) if part is not None]
        if len(given) != 1:
            raise ValueError("a request has one of prompt, messages, token_ids")
        if self.api == "chat" and self.token_ids is not None:
            raise ValueError("token ids go to completions")
        if self.api == "completions" and self.messages is not None:
            raise ValueError("messages go to chat")

    @property
    def prompt_sha256(self) -> str:
        """The identity of what is sent (RULES, "Prompt identity, in bytes")."""
        if self.prompt is not None:
            return text_sha256(self.prompt)
        if self.messages is not None:
            return messages_sha256(self.messages)
        return text_sha256(dump_json(list(self.token_ids or ())))

    def body(self, model: str) -> dict[str, Any]:
        """Return the request body that every OpenAI-like server takes."""
        body: dict[str, Any] = {"model": model, "max_tokens": self.max_tokens}
        if self.api == "chat":
            body["messages"] = (
                [dict(message) for message in self.messages]
                if self.messages is not None
                else [{"role": "user", "content": self.prompt}]
            )
        else:
            body["prompt"] = self.prompt if self.prompt is not None else list(self.token_ids or ())
        sampling = self.sampling
        body["temperature"] = sampling.temperature
        for name in ("top_p", "top_k", "priority"):
            if getattr(sampling, name) is not None:
                body[name] = getattr(sampling, name)
        if sampling.ignore_eos:
            body["ignore_eos"] = True
        if self.stop:
            body["stop"] = list(self.stop)
        kwargs = dict(sampling.chat_template_kwargs or {})
        if sampling.thinking is not None:
            kwargs["enable_thinking"] = sampling.thinking
        if kwargs:
            body["chat_template_kwargs"] = kwargs
        if sampling.logprobs is not None:
            if self.api == "chat":
                body |= {"logprobs": True, "top_logprobs": sampling.logprobs}
            else:
                body["logprobs"] = sampling.logprobs
        if self.seed is not None:
            body["seed"] = self.seed
        return body


@dataclass(frozen=True)
class Cell:
    """One workload: prompts (one a member), tokens, sampling. Another definition, another name.

    `prompts` name texts of a corpus, or stand for an entry of `builders`. `estimated_s` is how
    long one item takes, for plans; it is no part of the definition.
    """

    name: str
    prompts: tuple[str, ...]
    max_tokens: int
    kind: Literal["decode", "prefill"] = "decode"
    api: Literal["completions", "chat"] = "completions"
    sampling: Sampling = Sampling()
    estimated_s: float = 10.0
    description: str = ""
    builders: Mapping[str, Builder] = field(default_factory=dict)
    record: Literal["redacted", "bytes", "none"] = "redacted"
    late: int = 0
    """How many of the last members arrive only after all the others decode."""

    def __post_init__(self) -> None:
        if not self.name or not all(char.isalnum() or char in "-_." for char in self.name):
            raise ValueError(f"cell name {self.name!r}: letters, digits, - _ . only")
        if not self.prompts:
            raise ValueError(f"cell {self.name}: no prompts")
        if self.max_tokens < 1:
            raise ValueError(f"cell {self.name}: max_tokens {self.max_tokens}: at least 1")
        if not 0 <= self.late < len(self.prompts):
            raise ValueError(f"cell {self.name}: late {self.late}: valid: 0 to members - 1")

    @property
    def batch(self) -> int:
        """How many requests run at a time."""
        return len(self.prompts)

    @property
    def profile(self) -> Literal["single", "multi"]:
        """`single` for one request at a time, else `multi`."""
        return "single" if self.batch == 1 else "multi"

    def definition(self) -> dict[str, Any]:
        """Everything that makes this workload what it is, as JSON."""
        definition: dict[str, Any] = {
            "name": self.name,
            "prompts": list(self.prompts),
            "max_tokens": self.max_tokens,
            "kind": self.kind,
            "api": self.api,
            "sampling": self.sampling.to_json(),
        }
        if self.late:
            definition["late"] = self.late
        if self.builders:
            definition["builders"] = {
                name: {"function": b.function, "sha256": b.sha256, "arguments": dict(b.arguments)}
                for name, b in self.builders.items()
            }
        return definition

    def text(self, prompt: str) -> str:
        """Return the text of one of the cell's prompts, held against its pin.

        Raises:
            UsageError: no corpus has it.
            MeasurementRefused: kinds `prompt-pin`, `prompt-unbuilt`.
        """
        if prompt in self.builders:
            return self.builders[prompt].build()
        return find_prompt(prompt).text

    def requests(self, *, seed: int | None = None, salt: str | None = None) -> tuple[Request, ...]:
        """Return one request a member: seeds count up from `seed`, salts end in the member.

        Raises:
            UsageError: no corpus has a prompt.
            MeasurementRefused: a prompt is not the pinned one.
        """
        return tuple(
            Request(
                max_tokens=self.max_tokens,
                prompt=self.text(prompt),
                api=self.api,
                sampling=self.sampling,
                seed=None if seed is None else seed + member,
                salt=None if salt is None else f"{salt}-m{member}",
                name=prompt,
                late=member >= self.batch - self.late,
            )
            for member, prompt in enumerate(self.prompts)
        )


def for_cells(*declared: Cell) -> Callable[[_Function], _Function]:
    """Declare the cells that a pytest function measures.

    The function takes `measure` (and other fixtures as it likes) and is run once an item; it may
    be `async def`.

    Raises:
        UsageError: no cell, or one name twice.
    """
    names = [cell.name for cell in declared]
    if not names or len(set(names)) != len(names):
        raise UsageError(f"for_cells: {'one name twice' if names else 'none given'}")

    def mark(function: _Function) -> _Function:
        function.__dsv41_cells__ = declared  # type: ignore[attr-defined]
        return function

    return mark


def runs_beside(what: Literal["quality", "pilot"]) -> Callable[[_Function], _Function]:
    """Declare the pytest function that a window's quality cells, or its A/A pilot, run as."""

    def mark(function: _Function) -> _Function:
        function.__dsv41_cells__ = ()  # type: ignore[attr-defined]
        function.__dsv41_beside__ = what  # type: ignore[attr-defined]
        return function

    return mark
