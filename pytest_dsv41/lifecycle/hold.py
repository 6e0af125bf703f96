"""The HOLD: one file on every host that says whose window has production down.

The files are created in one fixed order, all or nothing, and removed only by their owner. Two
windows that open at once meet at the first host: one of them is refused there, and has created
nothing anywhere else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Callable
from pathlib import Path

from ..durable import dump_json, parse_json
from ..errors import Dsv41Error, RefusedByWorld, TransportError
from ..targets import HoldSite
from ..text import one_line
from .journal import utc_now
from .record import window_folder

__all__ = ["Hold", "HoldState"]

_Own = Callable[[str], bool]


class HoldState(enum.Enum):
    """Whose HOLD lies there."""

    NONE = "none"
    OWN = "own"
    FOREIGN = "foreign"
    UNREADABLE = "unreadable"
    """It names no owner, or its host does not answer: it counts as somebody's."""


@dataclasses.dataclass(frozen=True)
class Hold:
    """The HOLD over all of a target's hosts, seen by a campaign.

    A HOLD is *own* to an observer when its owner has a journal in the campaign's folder, and own
    to a window only when it is that window's. Another's is never changed, whatever it holds. Over
    several hosts the strangest file speaks: unreadable before foreign before own before none.
    """

    sites: tuple[HoldSite, ...]

    def __str__(self) -> str:
        return ", ".join(str(site) for site in self.sites) or "no host"

    def owner(self) -> tuple[HoldState, str]:
        """Read the files: NONE, FOREIGN with the owner's tag, or UNREADABLE with why."""
        return self._strangest(lambda _owner: False)

    def state_for_window(self, window_id: str) -> tuple[HoldState, str]:
        """As `owner`, with OWN when every HOLD there is is this window's."""
        return self._strangest(lambda owner: owner == window_id)

    def state_for_campaign(self, campaign: Path) -> tuple[HoldState, str]:
        """As `owner`, with OWN when every owner has a journal in the campaign."""
        return self._strangest(lambda owner: window_folder(campaign, owner) is not None)

    def answering(self) -> tuple[Hold, list[str]]:
        """The HOLD over the hosts that answer, and why the others do not."""
        sites, silent = [], []
        for site in self.sites:
            try:
                site.host.read(site.path)
            except TransportError as error:
                silent.append(one_line(str(error)))
            except (Dsv41Error, OSError):
                sites.append(site)
            else:
                sites.append(site)
        return Hold(tuple(sites)), silent

    def missing(self, window_id: str) -> list[HoldSite]:
        """The sites at which this window's HOLD does not lie."""
        return [site for site in self.sites if _owner_at(site) != (HoldState.FOREIGN, window_id)]

    def create(self, window_id: str, epoch: int) -> None:
        """Write it on every host, in order, all or nothing; where it is the window's it stays.

        Raises:
            RefusedByWorld: another HOLD lies there; its bytes are untouched.
            TransportError: a host does not answer.
        """
        created: list[HoldSite] = []
        try:
            for site in self.sites:
                if _owner_at(site) == (HoldState.FOREIGN, window_id):
                    continue
                record = {
                    "owner": window_id,
                    "epoch": epoch,
                    "host": site.host.identity(),
                    "utc": utc_now(),
                }
                # Before the act: a link that breaks during it may have let it happen.
                created.append(site)
                try:
                    site.host.create(site.path, dump_json(record) + "\n", fence=site.fence)
                except FileExistsError:
                    raise RefusedByWorld(Hold((site,)).refusal()) from None
        except Exception:
            for site in reversed(created):
                with contextlib.suppress(Dsv41Error, OSError):
                    _close_at(site, window_id)
            raise

    def refusal(self) -> str:
        """The line that refuses a window because of this HOLD."""
        for site in self.sites:
            state, owner = _owner_at(site)
            if state is HoldState.FOREIGN:
                return f"HOLD {site} belongs to {one_line(owner)}; it is not touched"
            if state is HoldState.UNREADABLE:
                return f"HOLD {site} is unreadable: {owner}; it is not touched"
        return f"HOLD {self} is gone again"

    def close(self, window_id: str) -> None:
        """Remove the window's own HOLD from every host; a missing one is fine.

        Raises:
            RefusedByWorld: one is not this window's; its bytes are untouched, the own ones go.
            TransportError: a host does not answer; the own ones on the others go.
        """
        failed: list[Dsv41Error | OSError] = []
        # In reverse: whoever creates in order meets the first host's HOLD until all are gone.
        for site in reversed(self.sites):
            try:
                _close_at(site, window_id)
            except (Dsv41Error, OSError) as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def _strangest(self, own: _Own) -> tuple[HoldState, str]:
        order = (HoldState.UNREADABLE, HoldState.FOREIGN, HoldState.OWN)
        found: dict[HoldState, str] = {}
        for site in self.sites:
            state, owner = _owner_at(site)
            if state is HoldState.FOREIGN and own(owner):
                state = HoldState.OWN
            found.setdefault(state, owner)
        return next(((s, found[s]) for s in order if s in found), (HoldState.NONE, ""))


def _owner_at(site: HoldSite) -> tuple[HoldState, str]:
    """NONE, FOREIGN with its owner's tag, or UNREADABLE with why."""
    try:
        raw = site.host.read(site.path)
    except (Dsv41Error, OSError) as error:
        return HoldState.UNREADABLE, one_line(str(error))
    if raw is None:
        return HoldState.NONE, ""
    try:
        owner = parse_json(raw)["owner"]
    except (ValueError, KeyError, TypeError):
        owner = None
    if not isinstance(owner, str) or not owner:
        return HoldState.UNREADABLE, "it does not name an owner"
    return HoldState.FOREIGN, owner


def _close_at(site: HoldSite, window_id: str) -> None:
    state, owner = _owner_at(site)
    if state is HoldState.NONE:
        return
    if (state, owner) != (HoldState.FOREIGN, window_id):
        raise RefusedByWorld(Hold((site,)).refusal())
    site.host.remove(site.path, fence=site.fence)
