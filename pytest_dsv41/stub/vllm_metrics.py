"""vLLM's `/metrics`: every family it prints with speculative decoding, fed by the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pytest_dsv41.stub.engine import Engine, Job, Step
from pytest_dsv41.stub.metrics import Counter, Gauge, Histogram, Registry
from pytest_dsv41.stub.profile import Profile

Later = Callable[[float, Callable[[], None]], None]

__all__ = ["FINISH_REASONS", "VllmLedger"]

FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")

_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_FEW = (1, 2, 5, 10, 20)
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)


def _one_two_five(limit: int) -> tuple[int, ...]:
    edges = []
    power = 1
    while power <= limit:
        edges += [power * m for m in (1, 2, 5) if power * m <= limit]
        power *= 10
    return tuple(edges)


_COUNTERS = (
    ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache."),
    ("vllm:prefix_cache_hits", "Tokens found in the prefix cache."),
    ("vllm:external_prefix_cache_queries", "Tokens looked up in the external prefix cache."),
    ("vllm:external_prefix_cache_hits", "Tokens found in the external prefix cache."),
    ("vllm:mm_cache_queries", "Items looked up in the multi-modal cache."),
    ("vllm:mm_cache_hits", "Items found in the multi-modal cache."),
    ("vllm:num_preemptions", "Preemptions of running requests."),
    ("vllm:prompt_tokens", "Prefill tokens processed."),
    ("vllm:prompt_tokens_by_source", "Prompt tokens by where they came from."),
    ("vllm:prompt_tokens_cached", "Prompt tokens that were cached."),
    ("vllm:prompt_tokens_cached_by_source", "Cached prompt tokens by where they came from."),
    ("vllm:generation_tokens", "Generated tokens."),
    ("vllm:request_success", "Finished requests by reason."),
    ("vllm:admission_rejections", "Requests refused at the door."),
)
_SPEC = (
    ("vllm:spec_decode_num_drafts", "Number of spec decoding drafts."),
    ("vllm:spec_decode_num_draft_tokens", "Number of draft tokens."),
    ("vllm:spec_decode_num_accepted_tokens", "Number of accepted draft tokens."),
    ("vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by position."),
)
_ESTIMATES = (
    ("vllm:estimated_flops_per_gpu", "Estimated floating point operations."),
    ("vllm:estimated_read_bytes_per_gpu", "Estimated bytes read."),
    ("vllm:estimated_write_bytes_per_gpu", "Estimated bytes written."),
)
_GAUGES = (
    ("vllm:num_requests_running", "Requests in the running batch."),
    ("vllm:num_requests_waiting", "Requests that wait."),
    ("vllm:num_requests_waiting_by_reason", "Requests that wait, by reason."),
    ("vllm:engine_sleep_state", "Sleep state of the engine."),
    ("vllm:kv_cache_usage_perc", "KV-cache usage; 1 is full."),
)
# No edges: 1, 2, 5, 10 … up to max_model_len.
_HISTOGRAMS: tuple[tuple[str, str, Sequence[float]], ...] = (
    ("vllm:request_prompt_tokens", "Prompt tokens of a request.", ()),
    ("vllm:request_generation_tokens", "Generated tokens of a request.", ()),
    ("vllm:iteration_tokens_total", "Tokens of an engine step.", _ITERATION),
    ("vllm:request_max_num_generation_tokens", "Most tokens a request could make.", ()),
    ("vllm:request_params_n", "The n parameter.", _FEW),
    ("vllm:request_params_max_tokens", "The max_tokens parameter.", ()),
    ("vllm:time_to_first_token_seconds", "Time from arrival to the first token.", _TTFT),
    ("vllm:inter_token_latency_seconds", "Time between engine outputs of a request.", _ITL),
    ("vllm:request_time_per_output_token_seconds", "Mean time per output token.", _ITL),
    ("vllm:e2e_request_latency_seconds", "Time from arrival to the end.", _LATENCY),
    ("vllm:request_queue_time_seconds", "Time in the state WAITING.", _LATENCY),
    ("vllm:request_inference_time_seconds", "Time in the state RUNNING.", _LATENCY),
    ("vllm:request_prefill_time_seconds", "Time in the PREFILL phase.", _LATENCY),
    ("vllm:request_decode_time_seconds", "Time in the DECODE phase.", _LATENCY),
    ("vllm:request_num_preemptions", "Preemptions of a request.", _PREEMPTIONS),
    ("vllm:request_prefill_kv_computed_tokens", "KV tokens computed for a prompt.", ()),
)
_PROMPT_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
_CACHED_SOURCES = ("device", "host", "p2p", "disk", "external_unspecified")
_REJECTIONS = ("max_num_queued_reqs", "max_num_queued_tokens")


def _one() -> float:
    return 1


def _zero() -> float:
    return 0


class VllmLedger:
    """Turns what the engine did into vLLM's metrics.

    `later` runs a call after some seconds (at once after none): counters may lag.
    Engine stamps (queue, prefill, inference, decode) are monotonic, TTFT and e2e use the wall
    clock, as vLLM has it; `wall` is that clock and may be stepped by a fault.
    """

    def __init__(self, profile: Profile, wall: Callable[[], float], later: Later) -> None:
        self.profile = profile
        self.wall = wall
        self.engine: Engine | None = None
        self.engines = 1
        self.registry = Registry()
        self.later = later
        self.reset()

    def labels(self, index: int, **more: str) -> dict[str, str]:
        """Return the labels of a series of engine `index`."""
        return {"engine": str(index), "model_name": self.profile.model, **more}

    def reset(self) -> None:
        """Begin again at zero with new `_created` stamps: what a restart of the engine does."""
        registry = Registry()
        # The order is the real server's.
        for name, text in (*(_SPEC if self.profile.draft_tokens else ()), *_ESTIMATES):
            registry.add(Counter(name, text))
        for name, text in _GAUGES:
            registry.add(Gauge(name, text))
        for name, text in _COUNTERS:
            registry.add(Counter(name, text))
        lengths = _one_two_five(self.profile.max_model_len)
        for name, text, edges in _HISTOGRAMS:
            registry.add(Histogram(name, text, edges or lengths))
        registry.add(Gauge("vllm:cache_config_info", "Configuration of the cache."))
        for index in range(self.engines):
            self._bind(registry, index)
        self.registry = registry
        for index in range(self.engines):
            self._begin(index)

    def text(self, *, created: bool = True, without: Iterable[str] = ()) -> str:
        """Return the exposition."""
        return self.registry.text(created=created, without=without)

    def add_engine(self) -> None:
        """Print a second engine from now on (its counters start at zero)."""
        if self.engines == 1:
            self.engines = 2
            self._bind(self.registry, 1)
            self._begin(1)

    def _bind(self, registry: Registry, index: int) -> None:
        def bind(name: str, read: Callable[[], float], **more: str) -> None:
            gauge = registry.families[name]
            assert isinstance(gauge, Gauge)
            gauge.bind(self.labels(index, **more), read)

        def waiting() -> float:
            return self.engine.waiting if self.engine and index == 0 else 0

        bind("vllm:num_requests_running", lambda: self._running(index))
        bind("vllm:num_requests_waiting", waiting)
        bind("vllm:num_requests_waiting_by_reason", waiting, reason="capacity")
        bind("vllm:num_requests_waiting_by_reason", _zero, reason="deferred")
        for state in ("awake", "weights_offloaded", "discard_all"):
            read = _one if state == "awake" else _zero
            bind("vllm:engine_sleep_state", read, sleep_state=state)
        bind("vllm:kv_cache_usage_perc", lambda: self.engine.kv_usage if self.engine else 0)
        config = registry.families["vllm:cache_config_info"]
        assert isinstance(config, Gauge)
        facts = {
            "block_size": str(self.profile.block_size),
            "cache_dtype": "auto",
            "enable_prefix_caching": "True",
            "engine": str(index),
            "num_gpu_blocks": str(self.profile.kv_tokens // self.profile.block_size),
        }
        config.bind(facts, _one)

    def _running(self, index: int) -> float:
        if self.engine is None:
            return 0
        return sum(1 for job in self.engine.running.values() if job.engine_index == index)

    def _begin(self, index: int) -> None:
        """Make the series that exist from the start with 0."""
        families, labels = self.registry.families, self.labels(index)
        for name, family in families.items():
            if isinstance(family, Gauge):
                continue
            if name == "vllm:admission_rejections":
                for reason in _REJECTIONS:
                    family.at({"model_name": self.profile.model, "reason": reason})
            elif name == "vllm:request_success":
                for reason in FINISH_REASONS:
                    family.at({**labels, "finished_reason": reason})
            elif name == "vllm:prompt_tokens_by_source":
                for source in _PROMPT_SOURCES:
                    family.at({**labels, "source": source})
            elif name == "vllm:prompt_tokens_cached_by_source":
                for source in _CACHED_SOURCES:
                    family.at({**labels, "source": source})
            elif name == "vllm:spec_decode_num_accepted_tokens_per_pos":
                for position in range(self.profile.draft_tokens):
                    family.at({**labels, "position": str(position)})
            else:
                family.at(labels)

    # ---- the engine's news -----------------------------------------------------------------

    def inc(self, name: str, amount: float, index: int, **more: str) -> None:
        """Add to a counter of engine `index`."""
        family = self.registry.families[name]
        assert isinstance(family, Counter)
        family.inc(amount, self.labels(index, **more))

    def observe(self, name: str, value: float, index: int) -> None:
        """Add an observation to a histogram of engine `index`."""
        family = self.registry.families[name]
        assert isinstance(family, Histogram)
        family.observe(value, self.labels(index))

    def scheduled(self, job: Job) -> None:
        """Count the look-up in the prefix cache."""
        self.later(job.lag, lambda: self._count_lookup(job))

    def _count_lookup(self, job: Job) -> None:
        self.inc("vllm:prefix_cache_queries", len(job.ask.prompt), job.engine_index)
        self.inc("vllm:prefix_cache_hits", job.cached, job.engine_index)

    def stepped(self, job: Job, step: Step, stamp: float, before: float | None) -> None:
        """Count a step's tokens and what the drafter did."""
        wall = self.wall()
        self.later(job.lag, lambda: self._count_step(job, step, stamp, before, wall))

    def _count_step(
        self, job: Job, step: Step, stamp: float, before: float | None, wall: float
    ) -> None:
        index = job.engine_index
        fresh = len(job.ask.prompt) - job.cached
        self.inc("vllm:generation_tokens", len(step.choices), index)
        self.observe(
            "vllm:iteration_tokens_total", len(step.choices) + (fresh if step.first else 0), index
        )
        if step.first:
            self.inc("vllm:prompt_tokens", len(job.ask.prompt), index)
            self.inc("vllm:prompt_tokens_by_source", fresh, index, source="local_compute")
            self.inc("vllm:prompt_tokens_by_source", job.cached, index, source="local_cache_hit")
            self.inc("vllm:prompt_tokens_cached", job.cached, index)
            self.inc("vllm:prompt_tokens_cached_by_source", job.cached, index, source="device")
            self.observe(
                "vllm:time_to_first_token_seconds", max(0.0, wall - job.arrival_wall), index
            )
        elif before is not None:
            self.observe("vllm:inter_token_latency_seconds", stamp - before, index)
        if step.drafted:
            self.inc("vllm:spec_decode_num_drafts", 1, index)
            self.inc("vllm:spec_decode_num_draft_tokens", step.drafted, index)
            self.inc("vllm:spec_decode_num_accepted_tokens", step.accepted, index)
            for position in range(step.accepted):
                self.inc(
                    "vllm:spec_decode_num_accepted_tokens_per_pos",
                    1,
                    index,
                    position=str(position),
                )

    def preempted(self, job: Job, times: int) -> None:
        """Count the preemptions."""
        self.inc("vllm:num_preemptions", times, job.engine_index)

    def finished(self, job: Job, reason: str) -> None:
        """Count the request's end."""
        wall = self.wall()
        self.later(job.lag, lambda: self._count_end(job, reason, wall))

    def _count_end(self, job: Job, reason: str, wall: float) -> None:
        index = job.engine_index
        self.inc("vllm:request_success", 1, index, finished_reason=reason)
        prompt, made = len(job.ask.prompt), len(job.tokens)
        self.observe("vllm:request_prompt_tokens", prompt, index)
        self.observe("vllm:request_generation_tokens", made, index)
        self.observe("vllm:request_max_num_generation_tokens", made, index)
        self.observe("vllm:request_params_n", 1, index)
        self.observe("vllm:request_params_max_tokens", job.ask.max_tokens, index)
        self.observe("vllm:request_num_preemptions", 0, index)
        self.observe("vllm:request_prefill_kv_computed_tokens", prompt - job.cached, index)
        self.observe("vllm:e2e_request_latency_seconds", max(0.0, wall - job.arrival_wall), index)
        scheduled, first, last = job.scheduled, job.first, job.last
        if scheduled is None or first is None or last is None:
            return
        self.observe("vllm:request_queue_time_seconds", scheduled - job.arrival, index)
        self.observe("vllm:request_inference_time_seconds", last - scheduled, index)
        self.observe("vllm:request_prefill_time_seconds", first - scheduled, index)
        self.observe("vllm:request_decode_time_seconds", last - first, index)
        if made > 1:
            self.observe(
                "vllm:request_time_per_output_token_seconds", (last - first) / (made - 1), index
            )
