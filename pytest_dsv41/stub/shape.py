"""The faults of an answer's events: where roles, usage, finish and errors stand, and what is told.

Works on the chunks of both dialects, which agree in `choices[0].delta`, `finish_reason` and
`usage`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pytest_dsv41.stub.engine import Step
from pytest_dsv41.stub.faults import Faults
from pytest_dsv41.stub.language import Choice
from pytest_dsv41.stub.wire import Event

__all__ = ["Regroup", "Shaper"]


class Regroup:
    """Cuts the engine's steps anew: k tokens an event, whatever the rounds were."""

    def __init__(self, faults: Faults) -> None:
        self._size = faults.count("tokens-per-event") if "tokens-per-event" in faults else 0
        self._held: list[Choice] = []

    def steps(self, step: Step) -> list[Step]:
        """Return the steps to be told instead of `step`; none while tokens are held back."""
        if not self._size:
            return [step]
        self._held.extend(step.choices)
        told: list[Step] = []
        size = len(step.choices) if step.first else self._size
        while len(self._held) >= size > 0:
            told.append(step._replace(choices=tuple(self._held[:size]), finish=None))
            del self._held[:size]
        if step.finish is not None:
            if self._held or not told:
                told.append(step._replace(choices=tuple(self._held)))
                self._held.clear()
            else:
                told[-1] = told[-1]._replace(finish=step.finish)
        return told


class Shaper:
    """Turns a dialect's events into those a fault asks for."""

    def __init__(self, faults: Faults, error: Callable[[], dict[str, Any]]) -> None:
        self._faults = faults
        self._error = error
        self._told = 0
        self._role: Event | None = None
        self._held_text = ""
        self._delta_from = 0
        self._swallow = faults.count("swallow") if "swallow" in faults else 0
        self.failed = False
        self.usage = ""
        if "usage" in faults:
            self.usage = faults.parts("usage")[0]

    def want_usage(self, include: bool, continuous: bool) -> tuple[bool, bool]:
        """Return whether usage is told at the end, and in every chunk."""
        if self.usage in ("absent", "null"):
            return False, False
        if self.usage in ("continuous", "nonmonotonic", "delta"):
            return True, True
        if self.usage in ("final", "wrong", "last-choice"):
            return True, continuous
        return include, continuous

    # ---- while tokens come -----------------------------------------------------------------

    def step(self, events: list[Event]) -> list[Event]:
        """Return the events of one step as they are told. `failed` is set by an error event."""
        if not self._faults:
            return events
        out: list[Event] = []
        for event in events:
            if self.failed:
                break
            if event.kind == "role":
                out += self._shape_role(event)
            else:
                out += self._shape_token(event)
        return out

    def _shape_role(self, event: Event) -> list[Event]:
        faults = self._faults
        assert event.body is not None
        delta = event.body["choices"][0]["delta"]
        if "role-absent" in faults or "role-with-token" in faults:
            return []
        if "role-null" in faults:
            delta["content"] = None
        if "role-bare" in faults:
            delta.pop("content", None)
        self._mend_usage(event.body)
        if "role-late" in faults:
            self._role = event
            return []
        return [event]

    def _shape_token(self, event: Event) -> list[Event]:
        faults, body = self._faults, event.body
        assert body is not None
        if "error" in faults and faults.parts("error")[0] == "first":
            self.failed = True
            return [self._error_event()]
        choice = body["choices"][0] if body.get("choices") else {}
        delta = choice.get("delta")
        if delta is not None:
            self._shape_delta(delta)
        if "hold-text" in faults:
            self._hold_text(choice)
        self._mend_usage(body)
        self._told += 1
        out = [event]
        if event.kind == "finish":
            out = self._shape_finish(event, choice)
        elif self._swallow > 0 and self._told > 1:
            self._swallow -= event.tokens
            out = []
        if self._role is not None:
            out.append(self._role)
            self._role = None
        is_mid = "error" in faults and faults.parts("error")[0] == "mid"
        if is_mid and self._told == faults.count("error", 1):
            self.failed = True
            out.append(self._error_event())
        return out

    def _shape_delta(self, delta: dict[str, Any]) -> None:
        faults = self._faults
        if "role-with-token" in faults and self._told == 0:
            delta["role"] = "assistant"
        if "reasoning-field" in faults:
            name = str(faults.text("reasoning-field"))
            for known in ("reasoning", "reasoning_content"):
                if known in delta:
                    text = delta.pop(known)
                    names = ("reasoning", "reasoning_content") if name == "both" else (name,)
                    delta.update(dict.fromkeys(names, text))
                    break

    def _hold_text(self, choice: dict[str, Any]) -> None:
        place, key = (choice["delta"], "content") if "delta" in choice else (choice, "text")
        if key not in place:
            return
        text = self._held_text + (place[key] or "")
        release = self._told >= self._faults.count("hold-text") or choice.get("finish_reason")
        place[key], self._held_text = (text, "") if release else ("", text)

    def _shape_finish(self, event: Event, choice: dict[str, Any]) -> list[Event]:
        faults, body = self._faults, event.body
        assert body is not None
        if "finish-reason" in faults:
            choice["finish_reason"] = faults.text("finish-reason")
        if "no-finish" in faults:
            choice["finish_reason"] = None
            return [event._replace(kind="token")]
        if "finish-own" not in faults:
            return [event]
        if event.tokens == 0:
            return [event._replace(wait=faults.seconds("finish-own"))]
        reason = choice["finish_reason"]
        tokens = {**body, "choices": [{**choice, "finish_reason": None}]}
        for key in ("stop_reason", "weight_versions"):
            if "delta" in choice:
                tokens["choices"][0].pop(key, None)
        own_choice = {**choice, "finish_reason": reason, "logprobs": None}
        for key in ("token_ids", "prompt_token_ids"):
            if key in own_choice:
                own_choice[key] = None
        if "delta" in choice:
            own_choice["delta"] = {"content": ""}
        else:
            own_choice["text"] = ""
        own = {**body, "choices": [own_choice]}
        tokens.pop("system_fingerprint", None)
        return [
            Event("token", tokens, event.tokens),
            Event("finish", own, 0, faults.seconds("finish-own")),
        ]

    # ---- usage -----------------------------------------------------------------------------

    def _mend_usage(self, body: dict[str, Any]) -> None:
        if self.usage == "null":
            body["usage"] = None
            return
        usage = body.get("usage")
        if not usage or self.usage not in ("nonmonotonic", "delta"):
            return
        count = usage["completion_tokens"]
        if self.usage == "nonmonotonic" and self._told % 3 == 2:
            usage["completion_tokens"] = max(0, count - 3)
        elif self.usage == "delta":
            usage["completion_tokens"] = count - self._delta_from
            self._delta_from = count
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]

    # ---- the end ---------------------------------------------------------------------------

    def tail(self, events: Sequence[Event]) -> list[Event]:
        """Return what follows the finish as it is told."""
        faults = self._faults
        if not faults:
            return list(events)
        out: list[Event] = []
        if "error" in faults and faults.parts("error")[0] == "after-finish":
            out.append(self._error_event())
        for event in events:
            if event.kind == "usage":
                out += self._tail_usage(event)
            elif event.kind == "done":
                out += self._tail_done(event)
            else:
                out.append(event)
        return out

    def _tail_usage(self, event: Event) -> list[Event]:
        if self.usage == "last-choice":
            return []
        if self.usage == "wrong" and event.body is not None:
            self._falsify(event.body["usage"])
        wait = self._faults.seconds("usage-late") if "usage-late" in self._faults else 0.0
        return [event._replace(wait=wait)]

    def _tail_done(self, event: Event) -> list[Event]:
        faults = self._faults
        if "no-done" in faults:
            return []
        wait = faults.seconds("done-late") if "done-late" in faults else 0.0
        return [event._replace(wait=wait)] + [event] * ("double-done" in faults)

    def move_usage(self, last: list[Event], tail: Sequence[Event]) -> None:
        """Put the usage of `tail` into the last choice chunk, when a fault asks for it."""
        if self.usage != "last-choice":
            return
        usage = next((e.body["usage"] for e in tail if e.kind == "usage" and e.body), None)
        for event in reversed(last):
            if event.body is not None and event.body.get("choices"):
                event.body["usage"] = usage
                return

    def _falsify(self, usage: dict[str, Any]) -> None:
        parts = self._faults.parts("usage")
        wrong = int(parts[1]) if len(parts) > 1 else 1
        usage["completion_tokens"] += wrong
        usage["total_tokens"] += wrong

    def _error_event(self) -> Event:
        return Event("error", self._error())
