"""KL references on disk (FORMATS): read and written byte for byte, damaged ones refused by name."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kl_files import CREATED, Documents, draw, following, manifest, write_base, write_kld

from pytest_dsv41.errors import MeasurementRefused, UsageError
from pytest_dsv41.quality.reference import (
    BaseFile,
    KldRecording,
    KldWriter,
    convert,
    corpus_plan,
    fingerprint,
    open_recording,
    read_receipt,
    read_report,
    score,
    verify,
)
from pytest_dsv41.quality.reference.kld import top_entries

FILES = ("kld.json", "tokens.i32", "logp.f16", "top.bin", "rows.f32")
DOCS: Documents = [("wiki", [3, 1, 4, 1, 5, 9], 2), ("code", [2, 6, 5, 3], 0)]
N_VOCAB = 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_kld(tmp_path / "ref", DOCS, draw(1, DOCS, N_VOCAB))


def writer(folder: Path, documents: Documents = DOCS, n_vocab: int = N_VOCAB) -> KldWriter:
    return KldWriter(
        folder,
        model="small-bf16",
        corpus="/corpora/mixed.jsonl",
        corpus_fnv1a64="a9d62b33c18b3d9c",
        n_vocab=n_vocab,
        documents=documents,
        created=CREATED,
    )


def same_bytes(one: Path, other: Path) -> None:
    for name in FILES:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@st.composite
def recordings(draw_: st.DrawFn) -> tuple[Documents, np.ndarray]:
    n_vocab = draw_(st.integers(16, 70))
    documents = []
    for _ in range(draw_(st.integers(1, 4))):
        ids = draw_(st.lists(st.integers(0, n_vocab - 1), min_size=2, max_size=9))
        start = draw_(st.integers(0, len(ids) - 2))
        documents.append((draw_(st.text(max_size=8)), ids, start))
    spread = draw_(st.sampled_from([0.0, 0.1, 3.0, 30.0, 40000.0]))
    logp = draw(draw_(st.integers(0, 2**32)), documents, n_vocab, spread)
    # Equal values: a tie keeps the lower id.
    logp[:, : draw_(st.integers(0, 8))] = logp[:, -1:]
    return documents, logp


@settings(max_examples=40, deadline=None)
@given(recording=recordings())
def test_a_recording_is_written_as_the_format_says_and_copied_byte_for_byte(
    recording: tuple[Documents, np.ndarray], tmp_path_factory: pytest.TempPathFactory
) -> None:
    documents, logp = recording
    base = tmp_path_factory.mktemp("kld")
    by_hand = write_kld(base / "hand", documents, logp)
    n_vocab = logp.shape[1]

    with writer(base / "own", documents, n_vocab) as own:
        for row in logp:
            own.append(row)
        own.finish()
    for name in ("kld.json", "tokens.i32", "logp.f16", "top.bin"):
        assert (base / "own" / name).read_bytes() == (by_hand / name).read_bytes(), name
    found = np.fromfile(base / "own" / "rows.f32", "<f4").reshape(-1, 2)
    expected = np.fromfile(by_hand / "rows.f32", "<f4").reshape(-1, 2)
    assert np.array_equal(found[:, 0], expected[:, 0])
    # The entropy is a sum: its last bit depends on the order.
    np.testing.assert_allclose(found[:, 1], expected[:, 1], rtol=3e-7, atol=1e-30)

    read = KldRecording(by_hand)
    assert [one.source for one in read.documents] == [source for source, _, _ in documents]
    assert read.next_tokens().tolist() == following(documents)
    with writer(base / "copy", documents, n_vocab) as copy, read.reader() as reader:
        for row0 in range(0, read.rows, 3):
            count = min(3, read.rows - row0)
            block = reader.read(row0, count)
            copy.append_encoded(
                block.codes, read.stored_top(row0, count), read.stored_rows(row0, count)
            )
        copy.finish()
    same_bytes(base / "copy", by_hand)


def test_keys_that_a_newer_recorder_wrote_stay_where_they_are(folder: Path) -> None:
    text = (folder / "kld.json").read_text()
    fields = {"engine": "1.2.0", **json.loads(text), "note": "größer"}
    (folder / "kld.json").write_text(json.dumps(fields, indent=1, ensure_ascii=False) + "\n")
    assert KldRecording(folder).manifest.to_bytes() == (folder / "kld.json").read_bytes()


def test_the_fingerprint_runs_on_over_the_lines_without_their_newlines() -> None:
    """One byte by hand: (basis xor byte) times prime, modulo 2^64, from the FORMATS' basis."""
    one = ((1469598103934665603 ^ 0x61) * 1099511628211) % 2**64
    assert fingerprint([b"a\n"]) == f"{one:016x}"
    two = ((one ^ 0x62) * 1099511628211) % 2**64
    assert fingerprint([b"a\n", b"b"]) == fingerprint([b"ab\n"]) == f"{two:016x}"
    assert fingerprint([]) == f"{1469598103934665603:016x}"
    assert fingerprint([b"a\r\n"]) != fingerprint([b"a\n"])


@pytest.mark.parametrize("count", [1, 5, 16])
def test_the_likeliest_come_first_and_a_tie_keeps_the_lower_id(count: int) -> None:
    row = np.array([-3, -1, -2, -1, -1, -9] * 3, np.float32)
    best = sorted(range(len(row)), key=lambda at: (-row[at], at))[:count]
    assert top_entries(row, count)[0].tolist() == best


def test_a_finished_reference_is_never_overwritten(folder: Path) -> None:
    before = {name: (folder / name).read_bytes() for name in FILES}
    with pytest.raises(UsageError, match="already holds a reference, which is never overwritten"):
        writer(folder)
    assert {name: (folder / name).read_bytes() for name in FILES} == before


def test_an_unfinished_recording_is_refused_by_readers_and_taken_over_by_the_next(
    tmp_path: Path,
) -> None:
    logp = draw(1, DOCS, N_VOCAB)
    with writer(tmp_path / "ref") as killed:
        killed.append(logp[0])
        with pytest.raises(MeasurementRefused, match="1 rows recorded; the documents have 6"):
            killed.finish()
    with pytest.raises(MeasurementRefused, match=r"has no kld\.json") as caught:
        open_recording(tmp_path / "ref")
    assert caught.value.kind == "unfinished"
    with writer(tmp_path / "ref") as again:
        for row in logp:
            again.append(row)
        again.finish()
    same_bytes(tmp_path / "ref", write_kld(tmp_path / "hand", DOCS, logp))


def test_of_two_recorders_in_one_folder_the_second_is_refused_and_harms_nothing(
    tmp_path: Path,
) -> None:
    logp = draw(1, DOCS, N_VOCAB)
    with writer(tmp_path / "ref") as one:
        for number, row in enumerate(logp):
            one.append(row)
            if number == 2:
                with pytest.raises(UsageError, match="another process records into it now"):
                    writer(tmp_path / "ref")
        one.finish()
    with pytest.raises(UsageError, match="never overwritten"):
        writer(tmp_path / "ref")
    same_bytes(tmp_path / "ref", write_kld(tmp_path / "hand", DOCS, logp))


def test_a_manifest_that_somebody_else_put_there_stays(tmp_path: Path) -> None:
    with writer(tmp_path / "ref") as one:
        for row in draw(1, DOCS, N_VOCAB):
            one.append(row)
        (tmp_path / "ref" / "kld.json").write_text("theirs")
        with pytest.raises(UsageError, match="it is not this recording's"):
            one.finish()
    assert (tmp_path / "ref" / "kld.json").read_text() == "theirs"


def test_links_of_an_unfinished_recording_are_not_written_through(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    for name in FILES[1:]:
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).symlink_to(mine)
        if name == "tokens.i32":
            with pytest.raises(OSError, match="symbolic links"):
                writer(folder)
        else:
            with writer(folder) as one:
                one.append(draw(1, DOCS, N_VOCAB)[0])
        assert mine.read_text() == "mine"


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"holds other files, such as thesis\.txt"):
        writer(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_disk_without_room_is_told_before_the_first_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _path: type("U", (), {"free": 1215})())
    # 6 rows of 40 float16, 16 entries of 8 bytes, 8 bytes.
    with pytest.raises(UsageError, match="1296 bytes are needed, 1215 are free"):
        writer(tmp_path / "ref")


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (np.full(N_VOCAB - 1, -3.0, np.float32), "vocabulary"),
        (np.r_[np.full(N_VOCAB - 1, -3.0), np.nan].astype(np.float32), "logprob"),
        (np.r_[np.full(N_VOCAB - 1, -3.0), 0.5].astype(np.float32), "logprob"),
    ],
)
def test_a_row_that_is_none_is_not_recorded(tmp_path: Path, row: np.ndarray, kind: str) -> None:
    with writer(tmp_path / "ref") as own, pytest.raises(MeasurementRefused) as caught:
        own.append(row)
    assert caught.value.kind == kind


# -- damaged folders ------------------------------------------------------------------------------


def change(**fields: Any) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        value = {**json.loads((folder / "kld.json").read_text()), **fields}
        value = {key: one for key, one in value.items() if one is not ...}
        (folder / "kld.json").write_text(json.dumps(value))

    return act


def document(**fields: Any) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        value = json.loads((folder / "kld.json").read_text())
        value["docs"][1].update(fields)
        (folder / "kld.json").write_text(json.dumps(value))

    return act


def cut(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-1])


def longer(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes() + b"\0")


def put(name: str, offset: int, data: bytes) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        raw = bytearray((folder / name).read_bytes())
        raw[offset : offset + len(data)] = data
        (folder / name).write_bytes(raw)

    return act


DAMAGED: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "no-folder": (
        lambda f: f.rename(f.with_name("away")), "missing", "ref: there is no such folder",
    ),
    "no-manifest": (lambda f: (f / "kld.json").unlink(), "unfinished", "ref: has no kld.json"),
    "not-json": (
        lambda f: (f / "kld.json").write_text("{"), "manifest", "kld.json: is not JSON",
    ),
    "a-list": (
        lambda f: (f / "kld.json").write_text("[]"), "manifest", "kld.json: is not a JSON object",
    ),
    "deep": (
        lambda f: (f / "kld.json").write_text("[" * 200_000), "manifest", "is not JSON",
    ),
    "another-format": (
        change(format="radiance-kld-2"), "format",
        "kld.json: format: 'radiance-kld-2', not 'radiance-kld-1'",
    ),
    "no-model": (change(model=...), "manifest", "kld.json: model: is missing or no text"),
    "short-fingerprint": (
        change(corpus_fnv1a64="a9d6"), "manifest", "corpus_fnv1a64: 'a9d6' is not 16 lower-case",
    ),
    "local-time": (
        change(created="2026-01-31T12:00:00"), "manifest", "created: '2026-01-31T12:00:00' is not",
    ),
    "other-top": (change(top=20), "manifest", "top: 20; radiance-kld-1 keeps 16"),
    "vocabulary-below-the-top": (change(n_vocab=15), "vocabulary", "n_vocab: 15; fewer than"),
    "vocabulary-of-text": (change(n_vocab="40"), "manifest", "n_vocab: 40; an integer"),
    "vocabulary-true": (change(n_vocab=True), "manifest", "n_vocab: True; an integer"),
    "wrong-vocabulary": (
        change(n_vocab=41), "size", "logp.f16: 480 bytes, too short: 6 rows of 41 tokens are 492",
    ),
    "no-documents": (change(docs=[]), "manifest", "docs: is missing, no list, or empty"),
    "rows-that-do-not-add-up": (change(rows=7), "rows", "rows: 7; its documents add up to 6"),
    "no-rows": (change(rows=0), "manifest", "rows: 0; an integer of at least 1"),
    "wrong-row0": (document(row0=2), "rows", r"docs\[1\]: row0: 2; the rows before it are 3"),
    "nothing-to-score": (
        document(score_from=3), "rows", r"docs\[1\]: 4 tokens leave nothing to score from",
    ),
    "negative-start": (document(score_from=-1), "manifest", r"docs\[1\]: score_from: -1"),
    "document-without-source": (document(source=None), "manifest", r"docs\[1\]: source"),
    "short-logp": (cut("logp.f16"), "size", "logp.f16: 479 bytes, too short"),
    "long-logp": (longer("logp.f16"), "size", "logp.f16: 481 bytes, too long"),
    "short-top": (cut("top.bin"), "size", "top.bin: 767 bytes, too short"),
    "short-rows": (cut("rows.f32"), "size", "rows.f32: 47 bytes, too short"),
    "short-tokens": (cut("tokens.i32"), "size", "tokens.i32: 39 bytes, too short"),
    "no-logp": (lambda f: (f / "logp.f16").unlink(), "missing", "logp.f16: is missing"),
    "token-outside": (
        put("tokens.i32", 4 * 7, struct.pack("<i", 40)), "tokens",
        "tokens.i32: token 7 is 40; the vocabulary has 40 tokens",
    ),
    "token-negative": (put("tokens.i32", 0, struct.pack("<i", -1)), "tokens", "token 0 is -1"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_folder_is_refused_by_name(folder: Path, name: str) -> None:
    damage, kind, message = DAMAGED[name]
    damage(folder)
    with pytest.raises(MeasurementRefused, match=message) as caught:
        open_recording(folder)
    assert caught.value.kind == kind
    assert "\n" not in str(caught.value)


ROW = 2 * N_VOCAB


def too_likely(folder: Path) -> None:
    """Row 5's other 24 tokens get e^-2 each, which adds 24 · 0.135 = 3.2."""
    row = np.fromfile(folder / "logp.f16", "<f2", N_VOCAB, offset=5 * ROW)
    row[np.argsort(-row, kind="stable")[16:]] = -2.0
    put("logp.f16", 5 * ROW, row.tobytes())(folder)


NAN, INF = struct.pack("<H", 0x7E00), struct.pack("<H", 0x7C00)
ROWS: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "nan": (
        put("logp.f16", 4 * ROW + 2 * 9, NAN), "logprob",
        r"row 4 \(document 1, position 1\): token 9 has the log-probability NaN",
    ),
    "signalling": (
        lambda f: put(
            "logp.f16", 2 * int(np.fromfile(f / "top.bin", "<i4")[0]), struct.pack("<H", 0xFD00)
        )(f),
        "logprob", "row 0 .*the log-probability NaN",
    ),
    "infinity": (put("logp.f16", 2 * ROW, INF), "logprob", "row 2 .*token 0 has"),
    "above-0": (
        put("logp.f16", 2 * 5, struct.pack("<e", 0.25)), "logprob", "row 0 .*0.25: above 0",
    ),
    "too-much": (too_likely, "sum", "row 5 .*probabilities add up to 4.2[0-9]"),
    "zeros": (put("logp.f16", 5 * ROW, b"\0" * ROW), "top", "row 5 .*and 0 in logp.f16"),
    "lost": (put("logp.f16", 3 * ROW, b"\0\xfc" * N_VOCAB), "top", "row 3 .*-65504 in logp"),
    "another-row": (
        lambda f: put("logp.f16", ROW, (f / "logp.f16").read_bytes()[:ROW])(f), "top", "row 1 ",
    ),
    "top-id-outside": (
        put("top.bin", 8 * 16 + 8 * 3, struct.pack("<i", 40)), "top",
        r"top.bin: row 1 \(document 0, position 3\): a token id outside the vocabulary",
    ),
    "top-id-twice": (
        lambda f: put("top.bin", 8, (f / "top.bin").read_bytes()[:4])(f), "top", "listed twice",
    ),
    "top-nan": (put("top.bin", 4, struct.pack("<f", np.nan)), "top", "exact value .* is NaN"),
    "nll-nan": (put("rows.f32", 16, struct.pack("<f", np.nan)), "nll", "row 2 .*log-likelihood"),
    "nll-signalling": (put("rows.f32", 16, struct.pack("<I", 0x7FA00000)), "nll", "row 2 .*is nan"),
    "top-signalling": (put("top.bin", 4, struct.pack("<I", 0x7FA00000)), "top", "exact value"),
    "nll-negative": (put("rows.f32", 0, struct.pack("<f", -1.0)), "nll", "row 0 .* is -1"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("side", ["reference", "candidate"])
def test_a_damaged_row_is_refused_by_name_when_scored(
    folder: Path, tmp_path: Path, name: str, side: str
) -> None:
    whole = write_kld(tmp_path / "whole", DOCS, draw(1, DOCS, N_VOCAB))
    damage, kind, message = ROWS[name]
    damage(folder)
    pair = (folder, whole) if side == "reference" else (whole, folder)
    with pytest.raises(MeasurementRefused, match=message) as caught:
        score(*(open_recording(path) for path in pair))
    assert caught.value.kind == kind
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(("name", "byte"), [("logp.f16", 479), ("top.bin", 760), ("rows.f32", 44)])
def test_a_file_cut_while_it_is_read_is_refused(folder: Path, name: str, byte: int) -> None:
    recording = open_recording(folder)
    with recording.reader() as reader:
        cut(name)(folder)
        with pytest.raises(MeasurementRefused, match=f"{name}: ends at byte {byte}") as caught:
            reader.read(0, recording.rows)
    assert caught.value.kind == "size"


# -- what a full read finds -----------------------------------------------------------------------


@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0, 12.0, 100.0])
@pytest.mark.parametrize("n_vocab", [16, 17, 4000])
def test_a_whole_recording_has_no_fault(tmp_path: Path, spread: float, n_vocab: int) -> None:
    documents = [("a", [1, 2, 3, 4, 5, 6, 7], 0)]
    write_kld(tmp_path / "ref", documents, draw(3, documents, n_vocab, spread))
    assert verify(open_recording(tmp_path / "ref")) == []


def swapped(folder: Path) -> None:
    raw = (folder / "top.bin").read_bytes()
    put("top.bin", 0, raw[8:16] + raw[:8])(folder)


def forgotten(folder: Path) -> None:
    """The likeliest token leaves the list, the others move up, an unlikely one fills it."""
    raw = (folder / "top.bin").read_bytes()
    listed = {struct.unpack_from("<i", raw, 8 * at)[0] for at in range(16)}
    other = min(set(range(N_VOCAB)) - listed)
    value = np.fromfile(folder / "logp.f16", "<f2")[other]
    put("top.bin", 0, raw[8 : 8 * 16] + struct.pack("<if", other, value))(folder)


FOUND: dict[str, tuple[Callable[[Path], None], str]] = {
    "sum": (too_likely, "row 5 .*add up to 4.2"),
    "order": (swapped, r"row 0 .*top.bin: not the likeliest first"),
    "missing": (forgotten, r"row 0 .*top.bin: .* likelier tokens are missing"),
    "nll": (put("rows.f32", 8 * 3, struct.pack("<f", 30.0)), "row 3 .*log-likelihood of 30"),
    "entropy": (put("rows.f32", 8 * 4 + 4, struct.pack("<f", 9.0)), "row 4 .*an entropy of 9"),
    "nan": (put("logp.f16", 5 * ROW, NAN), "row 5 .*token 0 has the log-probability NaN"),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_a_full_read_finds(folder: Path, name: str) -> None:
    damage, message = FOUND[name]
    damage(folder)
    (line,) = verify(open_recording(folder))
    assert re.search(message, line), line


# -- base files -----------------------------------------------------------------------------------

CHUNKS = [[5, 1, 2, 3, 4, 9, 8, 7], [1, 1, 2, 3, 5, 8, 0, 4]]
BASE_DOCS: Documents = [("", chunk, 4) for chunk in CHUNKS]


@pytest.mark.parametrize("n_vocab", [40, 41])
@pytest.mark.parametrize("pad", [True, False])
def test_a_base_file_is_a_recording_of_its_chunks_second_halves(
    tmp_path: Path, n_vocab: int, pad: bool
) -> None:
    """Rows = chunks × (n_ctx − 1 − n_ctx/2); position 4 of 8 is scored against token 5."""
    logp = draw(5, BASE_DOCS, n_vocab)
    base = open_recording(write_base(tmp_path / "a.base", CHUNKS, logp, pad=pad))
    assert isinstance(base, BaseFile)
    assert (base.rows, base.n_vocab, base.model) == (6, n_vocab, "a")
    assert [(one.tokens, one.score_from, one.row0) for one in base.documents] == [
        (8, 4, 0), (8, 4, 3),
    ]  # fmt: skip
    assert base.next_tokens().tolist() == [9, 8, 7, 8, 0, 4]
    with base.reader() as reader:
        block = reader.read(2, 3)
    np.testing.assert_allclose(
        block.nll, [-logp[row][token] for row, token in ((2, 7), (3, 8), (4, 0))], atol=2e-4
    )
    assert block.top1.tolist() == logp[2:5].argmax(axis=1).tolist()
    assert verify(base) == []


BASES: dict[str, tuple[Callable[[bytes], bytes], str, str]] = {
    "magic": (lambda raw: b"_logitz_" + raw[8:], "format", "does not begin with _logits_"),
    "empty": (lambda _raw: b"", "format", "no base file"),
    "header": (lambda raw: raw[:17], "size", "17 bytes, too short: no header"),
    "short": (lambda raw: raw[:-1], "size", "too short: 6 rows of 40 tokens make 612"),
    "long": (lambda raw: raw + b"\0", "size", "613 bytes, too long"),
    "tokens": (lambda raw: raw[:40], "size", "40 bytes, too short"),
    "no-chunks": (
        lambda raw: raw[:16] + struct.pack("<i", 0) + raw[20:], "manifest", "and 0 chunks",
    ),
    "negative": (
        lambda raw: raw[:12] + struct.pack("<i", -40) + raw[16:], "manifest", "-40 tokens",
    ),
    "token": (
        lambda raw: raw[:20] + struct.pack("<i", 77) + raw[24:], "tokens", "token 0 is 77",
    ),
    # Terabytes of tokens, or a thousand million documents, that only the header claims.
    "a header's context": (
        lambda raw: raw[:8] + struct.pack("<i", 2**31 - 1) + raw[12:], "size", "too short",
    ),
    "a header's chunks": (
        lambda raw: raw[:16] + struct.pack("<i", 2**31 - 1) + raw[20:], "size", "too short",
    ),
    "a header of ones": (
        lambda raw: raw[:8] + struct.pack("<iii", *3 * [2**31 - 1]) + raw[20:], "size", "too short",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BASES)
def test_a_damaged_base_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path = write_base(tmp_path / "a.base", CHUNKS, draw(5, BASE_DOCS, 40))
    damage, kind, message = BASES[name]
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(MeasurementRefused, match=message) as caught:
        open_recording(path)
    assert caught.value.kind == kind


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (struct.pack("<f", np.nan), "scale nan and minimum"),
        (struct.pack("<I", 0x7FA00000), "scale nan and minimum"),
        (struct.pack("<f", -1e-4), "scale -0.0001 and minimum"),
        (struct.pack("<ff", 0.0, -3.0), r"row 1 \(document 0, position 5\): its prob.* add up to"),
        (struct.pack("<ff", 1e-3, -3.0), "above 0"),
    ],
)
def test_a_damaged_row_of_a_base_file_is_refused_by_name(
    tmp_path: Path, head: bytes, message: str
) -> None:
    path = write_base(tmp_path / "a.base", CHUNKS, draw(5, BASE_DOCS, 40))
    raw = bytearray(path.read_bytes())
    start = 20 + 4 * 16 + (8 + 80)
    raw[start : start + len(head)] = head
    path.write_bytes(raw)
    with pytest.raises(MeasurementRefused, match=message):
        score(open_recording(path), open_recording(path))


def test_a_base_file_becomes_a_reference_that_says_no_more_than_it(tmp_path: Path) -> None:
    logp = draw(5, BASE_DOCS, 400, spread=6.0)
    base = BaseFile(write_base(tmp_path / "a.base", CHUNKS, logp), model="small")
    text = tmp_path / "text.txt"
    text.write_bytes(b"first\nsecond\n")
    convert(base, tmp_path / "ref", text)

    made = KldRecording(tmp_path / "ref")
    assert verify(made) == []
    fields = manifest([("text", chunk, 4) for chunk in CHUNKS], 400)
    for key in ("n_vocab", "top", "rows", "docs"):
        assert made.manifest.fields[key] == fields[key]
    assert made.manifest.fields["corpus_fnv1a64"] == fingerprint([b"firstsecond"])
    assert made.model == "small"
    floored = logp < logp.max(axis=1, keepdims=True) - 16.0
    assert floored.any()
    kept = np.fromfile(tmp_path / "ref" / "logp.f16", "<f2").reshape(logp.shape)
    assert np.isneginf(kept[floored]).all()
    np.testing.assert_allclose(kept[~floored], logp[~floored], rtol=2**-10, atol=3e-4)
    # As a reference it gives what the base file itself gives.
    other = BaseFile(write_base(tmp_path / "b.base", CHUNKS, draw(6, BASE_DOCS, 400, 6.0)))
    np.testing.assert_allclose(score(made, other).kl, score(base, other).kl, rtol=2e-3)


# -- pipes and devices in a file's place -----------------------------------------------------------


@pytest.mark.parametrize("name", ["kld.json", "tokens.i32", "logp.f16", "top.bin", "rows.f32"])
def test_a_pipe_in_a_files_place_is_refused_and_never_waited_for(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(MeasurementRefused, match=f"{name}: not a regular file"):
        open_recording(folder)


def test_what_never_ends_or_never_begins_is_no_input(tmp_path: Path, folder: Path) -> None:
    pipe, endless = tmp_path / "pipe", tmp_path / "endless"
    os.mkfifo(pipe)
    endless.symlink_to("/dev/zero")
    base = write_base(tmp_path / "a.base", CHUNKS, draw(5, BASE_DOCS, 40))
    for path in (pipe, endless):
        for call in (
            lambda path=path: BaseFile(path),
            lambda path=path: read_report(path),
            lambda path=path: corpus_plan(path, lambda _: [1, 2]),
            lambda path=path: convert(BaseFile(base), tmp_path / "new", path),
        ):
            with pytest.raises((MeasurementRefused, UsageError), match="not a regular file"):
                call()
        with pytest.raises(MeasurementRefused, match="receipt"):
            read_receipt(path)
    assert not (tmp_path / "new").exists()
