"""From a checkpoint to a container that may serve: what is derived, spliced, verified and gated.

FRANK-ARCHON "The payload chain" is the source. Every long step ends with a receipt, written as its
last act; nothing else is taken for a proof that it was done.
"""

from __future__ import annotations
