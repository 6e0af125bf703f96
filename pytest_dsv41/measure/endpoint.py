"""Where a server answers: known to who only looks at a machine, and measures nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_dsv41.address import check_url

__all__ = ["Endpoint"]


@dataclass(frozen=True)
class Endpoint:
    """Where a server answers. An empty model is read from `/v1/models`.

    Raises:
        UsageError: the URL is no server's address (`check_url`).
    """

    url: str
    engine: str = "vllm"
    model: str = ""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Sent with every request (an API key); never in a record."""

    def __post_init__(self) -> None:
        check_url(self.url)
