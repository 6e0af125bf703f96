"""The HOLD: a file on the host that says whose window has production down."""

from __future__ import annotations

import dataclasses
import enum
import json
from pathlib import Path

from ..durable import create_exclusive, dump_json, remove
from ..errors import RefusedByWorld
from ..text import one_line
from .journal import utc_now
from .record import window_folder

__all__ = ["Hold", "HoldState"]


class HoldState(enum.Enum):
    """Whose HOLD lies there."""

    NONE = "none"
    OWN = "own"
    FOREIGN = "foreign"
    UNREADABLE = "unreadable"


@dataclasses.dataclass(frozen=True)
class Hold:
    """The HOLD file of one host, seen by a campaign.

    A HOLD is *own* to an observer when its owner has a journal in the campaign's folder, and own
    to a window only when it is that window's. Another's is never changed, whatever it holds.
    """

    path: Path

    def owner(self) -> tuple[HoldState, str]:
        """Read the file: NONE, FOREIGN with its owner's tag, or UNREADABLE with why."""
        try:
            raw = self.path.read_bytes()
        except FileNotFoundError:
            return HoldState.NONE, ""
        except OSError as error:
            return HoldState.UNREADABLE, one_line(str(error))
        try:
            record = json.loads(raw)
            owner = record["owner"]
        except (ValueError, KeyError, TypeError):
            return HoldState.UNREADABLE, "it does not name an owner"
        if not isinstance(owner, str) or not owner:
            return HoldState.UNREADABLE, "it does not name an owner"
        return HoldState.FOREIGN, owner

    def state_for_window(self, window_id: str) -> tuple[HoldState, str]:
        """As `owner`, with OWN when it is this window's."""
        state, owner = self.owner()
        if state is HoldState.FOREIGN and owner == window_id:
            return HoldState.OWN, owner
        return state, owner

    def state_for_campaign(self, campaign: Path) -> tuple[HoldState, str]:
        """As `owner`, with OWN when the owner has a journal in the campaign."""
        state, owner = self.owner()
        if state is HoldState.FOREIGN and window_folder(campaign, owner) is not None:
            return HoldState.OWN, owner
        return state, owner

    def create(self, window_id: str, epoch: int, host: str) -> None:
        """Write it, once.

        Raises:
            RefusedByWorld: a HOLD lies there already; its bytes are untouched.
        """
        record = {"owner": window_id, "epoch": epoch, "host": host, "utc": utc_now()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            create_exclusive(self.path, dump_json(record) + "\n")
        except FileExistsError as error:
            raise RefusedByWorld(self.refusal()) from error

    def refusal(self) -> str:
        """The line that refuses a window because of this HOLD."""
        state, owner = self.owner()
        if state is HoldState.FOREIGN:
            return f"HOLD {self.path} belongs to {one_line(owner)}; it is not touched"
        return f"HOLD {self.path} is {state.value}: {owner}; it is not touched"

    def close(self, window_id: str) -> None:
        """Remove the window's own HOLD; a missing one is fine.

        Raises:
            RefusedByWorld: it is not this window's; its bytes are untouched.
        """
        state, _ = self.state_for_window(window_id)
        if state is HoldState.NONE:
            return
        if state is not HoldState.OWN:
            raise RefusedByWorld(self.refusal())
        remove(self.path)
