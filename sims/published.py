"""The published numbers, in per cent as printed, with the number of trials behind them.

None stands for a number that was not published. Sources: WIN2 for the tables, RULES where named.
"""

from __future__ import annotations

POWER_TRIALS = 20_000
POWER: dict[tuple[bool, int, int], tuple[float, ...]] = {
    # (paired, nc, nx): LOSS at a true 5 % loss in revision 3 and 2, the same at 3 %, LOSS without
    # an effect in 3 and 2, WIN without an effect, WIN at a true gain of 3 % and of 5 %
    (False, 3, 3): (41.6, 74.6, 16.8, 45.3, 1.3, 8.4, 1.2, 17.3, 45.1),
    (False, 4, 3): (53.3, 76.7, 22.2, 43.6, 1.4, 5.8, 1.4, 26.4, 62.1),
    (False, 6, 3): (55.7, 80.1, 22.6, 42.7, 1.0, 3.7, 1.9, 35.7, 69.8),
    (False, 8, 3): (55.3, 81.5, 21.7, 42.0, 0.7, 2.8, 2.1, 37.8, 70.0),
    (False, 8, 4): (67.5, 72.7, 22.6, 27.9, 0.4, 0.8, 1.8, 51.6, 90.6),
    (True, 3, 3): (29.3, 55.4, 11.3, 30.0, 0.8, 4.8, 1.8, 19.5, 42.6),
    (True, 4, 4): (37.6, 42.7, 12.2, 16.8, 0.4, 1.0, 1.7, 32.3, 69.3),
    (True, 6, 6): (44.4, 44.7, 12.6, 13.6, 0.2, 0.3, 1.3, 55.1, 93.8),
    (True, 8, 8): (28.8, 28.8, 4.6, 4.6, 0.0, 0.0, 1.1, 71.8, 99.1),
}
POWER_REVISION_1 = {(False, 3, 3): 74.48, (False, 8, 4): 27.89}
"""LOSS at a true 5 % loss under revision 1 (replayed to two decimals)."""

NO_EFFECT_WINDOWS = 10_000
NO_EFFECT: dict[tuple[bool, int, int], dict[str, tuple[float, float]]] = {
    # rejected, accepted
    (True, 3, 3): {
        "revision 3, primary only": (1.7, 2.0),
        "revision 3": (4.0, 1.9),
        "revision 2": (11.4, 1.8),
        "revision 1": (32.5, 1.4),
    },
    (False, 4, 3): {
        "revision 3, primary only": (2.7, 2.1),
        "revision 3": (6.2, 2.0),
        "revision 2": (14.6, 1.9),
        "revision 1": (16.0, 1.8),
    },
}
NO_EFFECT_KNOWN = {((True, 3, 3), "revision 1", "rejected"): 32.6}
"""What the replayed stream gives where it is known to differ from the printed number (RULES)."""

Paired = tuple[int, int, float, float, bool, int]
PAIRED: dict[Paired, tuple[tuple[float | None, float | None], ...]] = {
    # (control starts, pairs, residual, start SD, registered, trials): (WIN, LOSS) without an
    # effect, at +3 %, +5 % and -3 %
    (2, 6, 0.01, 0.0, False, 20_000): ((0.0, 1.3), (91.0, 0.0), (97.3, 0.0), (0.0, 93.7)),
    (2, 12, 0.01, 0.0, False, 20_000): ((0.0, 2.2), (95.1, 0.0), (95.3, 0.0), (0.0, 95.3)),
    (2, 6, 0.02, 0.0, False, 20_000): ((0.6, 1.3), (44.5, 0.0), (83.7, 0.0), (0.0, 48.4)),
    (2, 12, 0.02, 0.0, False, 20_000): ((0.2, 2.2), (87.0, 0.0), (95.3, 0.0), (0.0, 92.7)),
    (2, 6, 0.01, 0.01, False, 5_000): ((4.5, 10.0), (53.6, 0.1), (70.8, 0.0), (0.0, 61.1)),
    (2, 6, 0.01, 0.01, True, 5_000): ((0.4, 0.4), (27.9, 0.0), (63.1, 0.0), (None, None)),
    (2, 12, 0.02, 0.01, True, 5_000): ((1.0, 1.0), (32.6, 0.0), (63.7, 0.0), (None, None)),
    (1, 6, 0.01, 0.01, False, 5_000): ((8.2, 13.5), (69.8, 0.2), (95.6, 0.0), (0.0, 77.2)),
}
MORE_PAIRS = {6: 44.0, 7: 65.0, 8: 74.0}
"""RULES section 5: WIN at +3 %, residual 2 %, without start drift, to the whole per cent."""

GATE_POSITIONS = 512
GATE_DOCUMENT_TRIALS = 1_000
# expected A/A flips: {factor: LOSS}, factor 1 = no effect. RULES' exact rates and the document's.
GATE_EXACT = {1.0: {4.0: 4.3, 10.0: 58.6}, 3.0: {4.0: 40.3, 10.0: 99.8}}
GATE_LITERAL_EXACT = {0.25: 2.1, 1.0: 13.0, 3.0: 26.4}
GATE_THREE_AA = 20.5
"""RULES: LOSS at 1 expected flip and 4 times the rate with three A/A comparisons."""
GATE_DOCUMENT = {
    0.25: {1.0: 0.1, 4.0: 0.2, 10.0: 1.1},
    1.0: {1.0: 0.0, 4.0: 4.9, 10.0: 54.8},
    3.0: {1.0: 0.0, 4.0: 38.8},
}
GATE_LITERAL_DOCUMENT = {0.25: 2.1, 1.0: 13.7, 3.0: 24.2}
GATE_LEAST_LOSING = {0: 7, 1: 10, 2: 12, 3: 14}
GATE_KL_MOST = 0.2
GATE_KL_HEAVY = 2.1
"""RULES: mean-KL false LOSS: at most 0.2 % up to a cv of 3 to 4, 2.1 % at a lognormal σ of 2."""

# (cell, cv of one repeat, design): half width in per cent, three decimals
RESOLUTION = {
    ("short-b1", 0.0255, "seeded:6"): 3.785,
    ("32k-b1", 0.0107, "seeded:6"): 1.588,
    ("32k-b1", 0.0107, "seeded:7"): 1.399,
    ("32k-b1", 0.0107, "seeded:8"): 1.265,
}

MODERATED_ARCHIVES, MODERATED_WINDOWS = 200, 1_000
# (paired, nc, nx): win2-v1 WIN at +3 and +5 %, win3-moderated WIN at +3 and +5 %
MODERATED = {
    (False, 4, 3): (26.3, 61.8, 34.3, 78.9),
    (True, 3, 3): (19.5, 42.6, 30.3, 72.0),
}
MODERATED_NOISY = 2.6
"""RULES: false calls a side where the window has 3 % and the archive 2 %."""
# n = 6, residual 1 %, start SD 1 % registered: WIN at +3 and +5 %, plain and widened; false WIN
# and false LOSS when widened
WIDENED = {"plain": (27.7, 63.3), "widened": (37.8, 86.5), "false calls": (0.6, 0.5)}

BRACKET_TRIALS = 1_000_000
# n: (LOSS without an effect, two decimals; LOSS at a true 5 % loss, one decimal)
BRACKET = {3: (0.93, 40.5), 4: (0.56, 58.4), 6: (0.28, 74.3)}
