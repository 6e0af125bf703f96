"""Cells, requests, prompt identity, the corpus and its pins."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from pathlib import Path

import pytest

import pytest_dsv41.measure as measure_room
from cells.test_decode import test_decode as decode_cells
from cells.test_shared import ORDER
from cells.test_shared import test_shared as shared_cells
from cells.test_shared import test_shared_prefill as prefill_cells
from pytest_dsv41.errors import MeasurementRefused, UsageError
from pytest_dsv41.measure import (
    METRICS,
    Builder,
    Cell,
    Request,
    Sampling,
    for_cells,
    prompt_identity,
)
from pytest_dsv41.measure.corpus import PACKAGED, PROMPT_SHA256, Corpus, find_prompt
from pytest_dsv41.measure.cut import cut_texts


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_a_prompts_identity_is_the_hash_of_its_bytes() -> None:
    assert Request(1, prompt="é").prompt_sha256 == sha("é")
    message = {"role": "user", "content": "é"}
    assert Request(1, messages=(message,), api="chat").prompt_sha256 == sha("é")
    both = (message, {"role": "assistant", "content": "b"})
    canonical = '[{"content":"\\u00e9","role":"user"},{"content":"b","role":"assistant"}]'
    assert Request(1, messages=both, api="chat").prompt_sha256 == sha(canonical)
    assert Request(1, token_ids=(1, 22, 3)).prompt_sha256 == sha("[1,22,3]")


def test_several_identities_make_one_in_any_order() -> None:
    a, b = sha("a"), sha("b")
    assert prompt_identity([a]) == a
    assert prompt_identity([b, a]) == prompt_identity([a, b]) == sha("\n".join(sorted([a, b])))
    assert prompt_identity([a, a]) == sha(f"{a}\n{a}")  # duplicates are kept


def test_members_have_their_own_seeds_and_salts() -> None:
    cell = Cell("x", ("demo-1", "demo-2"), 16)
    one, two = cell.requests(seed=40, salt="w")
    assert (one.seed, two.seed) == (40, 41)
    assert one.salt != two.salt
    assert one.prompt != two.prompt
    assert [request.seed for request in cell.requests()] == [None, None]


def test_everything_that_makes_the_workload_is_in_the_definition() -> None:
    cell = Cell("x", ("demo-1",), 16)
    others = [
        Cell("y", ("demo-1",), 16),
        Cell("x", ("demo-2",), 16),
        Cell("x", ("demo-1", "demo-2"), 16),
        Cell("x", ("demo-1", "demo-2"), 16, late=1),
        Cell("x", ("demo-1",), 17),
        Cell("x", ("demo-1",), 16, kind="prefill"),
        Cell("x", ("demo-1",), 16, api="chat"),
        *(
            Cell("x", ("demo-1",), 16, sampling=sampling)
            for sampling in (
                Sampling(temperature=0.5),
                Sampling(top_p=0.9),
                Sampling(thinking=True),
                Sampling(chat_template_kwargs={"effort": "high"}),
                Sampling(priority=10),
                Sampling(ignore_eos=False),
                Sampling(cache="warm"),
            )
        ),
    ]
    definitions = [json.dumps(c.definition(), sort_keys=True) for c in (cell, *others)]
    assert len(set(definitions)) == len(definitions)
    assert Cell("x", ("demo-1",), 16, estimated_s=99.0).definition() == cell.definition()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Cell("a b", ("p",), 1),
        lambda: Cell("a/b", ("p",), 1),
        lambda: Cell("", ("p",), 1),
        lambda: Cell("a", (), 1),
        lambda: Cell("a", ("p",), 0),
        lambda: Cell("a", ("p",), 1, late=1),
        lambda: Sampling(cache="hot"),  # type: ignore[arg-type]
        lambda: Sampling(temperature=-1),
        lambda: Request(1),
        lambda: Request(1, prompt="a", token_ids=(1,)),
        lambda: Request(1, token_ids=(1,), api="chat"),
    ],
)
def test_what_is_no_cell_is_said_at_once(make: object) -> None:
    with pytest.raises(ValueError):
        make()  # type: ignore[operator]


def test_the_decorator_keeps_functions_and_coroutines_as_they_are() -> None:
    cell = Cell("x", ("demo-1",), 16)

    @for_cells(cell)
    def plain() -> int:
        return 3

    @for_cells(cell)
    async def later() -> None: ...

    assert plain() == 3
    assert plain.__dsv41_cells__ == (cell,)  # type: ignore[attr-defined]
    assert inspect.iscoroutinefunction(later)
    assert later.__dsv41_cells__ == (cell,)  # type: ignore[attr-defined]
    with pytest.raises(UsageError):
        for_cells(cell, cell)
    with pytest.raises(UsageError):
        for_cells()


def test_a_body_says_what_the_sampling_says() -> None:
    sampling = Sampling(temperature=0.5, top_p=0.9, thinking=False, priority=10, logprobs=20)
    chat = Request(9, prompt="p", api="chat", sampling=sampling, seed=3).body("m")
    assert chat == {
        "model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "p"}],
        "temperature": 0.5, "top_p": 0.9, "priority": 10, "ignore_eos": True, "seed": 3,
        "chat_template_kwargs": {"enable_thinking": False}, "logprobs": True, "top_logprobs": 20,
    }  # fmt: skip
    plain = Request(9, token_ids=(1, 2), sampling=Sampling(ignore_eos=False)).body("m")
    assert plain == {"model": "m", "max_tokens": 9, "prompt": [1, 2], "temperature": 1.0}


def test_every_packaged_prompt_is_the_pinned_one() -> None:
    corpus = Corpus.load(PACKAGED)
    assert {"short", "demo-1", "demo-2", "demo-3"} <= set(corpus.cuts)
    for name in corpus.cuts:
        assert sha((PACKAGED / f"{name}.txt").read_text()) == corpus.prompt(name).sha256


def make_corpus(folder: Path, **texts: str) -> Corpus:
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
    cuts = {n: {"file": f"{n}.txt", "tokens": 1, "sha256": sha(t)} for n, t in texts.items()}
    (folder / "cuts.json").write_text(json.dumps(cuts))
    return Corpus.load(folder)


def test_a_changed_text_is_refused(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "c", a="hello")
    assert corpus.prompt("a").text == "hello"
    (tmp_path / "c" / "a.txt").write_text("hello ")
    with pytest.raises(MeasurementRefused) as refused:
        corpus.prompt("a")
    assert refused.value.kind == "prompt-pin"


def test_a_registered_pin_stands_over_the_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PROMPT_SHA256, "a", sha("another"))
    with pytest.raises(MeasurementRefused):
        make_corpus(tmp_path / "c", a="hello").prompt("a")


def test_a_named_corpus_comes_before_the_packaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_corpus(tmp_path / "c", short="mine")
    assert find_prompt("short").text != "mine"
    monkeypatch.setenv("DSV41_CORPUS", str(tmp_path / "c"))
    assert find_prompt("short").text == "mine"
    assert find_prompt("demo-1").tokens is None
    with pytest.raises(UsageError, match="dsv41 corpus cut"):
        find_prompt("nowhere")


PIN = f'"sha256": "{"0" * 64}"'


@pytest.mark.parametrize(
    "text",
    [
        "[]", "{", '{"a": {"sha256": "short"}}', '{"a": 3}', f'{{"a": {{"file": 5, {PIN}}}}}',
        f'{{"a": {{"file": "x\\u0000", {PIN}}}}}', f'{{"a": {{"file": "\\ud800", {PIN}}}}}',
    ],
)  # fmt: skip
def test_a_broken_cuts_file_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "cuts.json").write_text(text)
    with pytest.raises(UsageError) as wrong:
        Corpus.load(tmp_path)
    assert "\n" not in str(wrong.value)


def test_a_text_that_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    make_corpus(tmp_path / "c", a="x")
    (tmp_path / "c" / "a.txt").unlink()
    os.mkfifo(tmp_path / "c" / "a.txt")
    with pytest.raises(UsageError, match=r"a.txt: no file"):
        Corpus.load(tmp_path / "c").prompt("a")


def test_a_cuts_file_cannot_point_outside_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    make_corpus(folder, a="x")
    (tmp_path / "secret.txt").write_text("x")
    cuts = {"a": {"file": "../secret.txt", "tokens": 1, "sha256": sha("x")}}
    (folder / "cuts.json").write_text(json.dumps(cuts))
    with pytest.raises(UsageError, match="outside"):
        Corpus.load(folder).prompt("a")


def test_cuts_follow_one_another_and_are_the_longest_that_fit(tmp_path: Path) -> None:
    text = " ".join(f"word{i}" for i in range(200))

    def count(piece: str) -> int:
        return len(piece.split()) + 1  # one special token

    one, two = cut_texts(text, [("a", 10), ("b", 20)], count, tmp_path)
    assert (one.tokens, two.tokens) == (10, 20)
    assert text.startswith(one.text + two.text)
    assert count(text[: len(one.text) + 1]) > 10
    corpus = Corpus.load(tmp_path)
    assert corpus.prompt("b").text == two.text
    with pytest.raises(UsageError, match="of this name"):
        cut_texts(text, [("a", 3)], count, tmp_path)
    behind = len(one.text + two.text)
    (three,) = cut_texts(text, [("three", 5)], count, tmp_path / "on", start=behind)
    assert text.startswith(three.text, behind)
    short = f"c: the text is too short: 900 tokens asked from character {behind} of {len(text)} on"
    with pytest.raises(UsageError, match=f"^{short}$"):
        cut_texts(text, [("c", 900)], count, tmp_path, start=behind)
    assert set(Corpus.load(tmp_path).cuts) == {"a", "b"}


def words(piece: str) -> int:
    return len(piece.split())


TEXT = " ".join(f"word{i}" for i in range(200))


def test_a_cut_overwrites_nothing_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(TEXT)
    with pytest.raises(UsageError, match=r"book.txt: exists and is another text"):
        cut_texts(TEXT, [("a", 10), ("book", 20)], words, tmp_path)
    assert (tmp_path / "book.txt").read_text() == TEXT
    assert not (tmp_path / "cuts.json").exists()


def test_a_cut_that_was_ended_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("pytest_dsv41.measure.cut.write_atomic", killed)
        with pytest.raises(KeyboardInterrupt):
            cut_texts(TEXT, [("a", 10), ("b", 20)], words, tmp_path)
    assert (tmp_path / "b.txt").exists()
    one, two = cut_texts(TEXT, [("a", 10), ("b", 20)], words, tmp_path)
    corpus = Corpus.load(tmp_path)
    assert [corpus.prompt(name).text for name in ("a", "b")] == [one.text, two.text]


def test_two_cuts_into_one_corpus_at_a_time_keep_each_other(tmp_path: Path) -> None:
    def count(piece: str) -> int:
        if not (tmp_path / "cuts.json").exists():
            cut_texts(TEXT, [("other", 5)], words, tmp_path)
        return words(piece)

    cut_texts(TEXT, [("a", 10)], count, tmp_path)
    assert set(Corpus.load(tmp_path).cuts) == {"a", "other"}


def test_a_tokenizer_that_counts_one_text_twice_and_differently_is_refused(tmp_path: Path) -> None:
    looks: dict[str, int] = {}

    def count(piece: str) -> int:
        looks[piece] = looks.get(piece, 0) + 1
        return words(piece) - (looks[piece] > 1)

    with pytest.raises(MeasurementRefused, match="counted as 10 and as 9") as refused:
        cut_texts(TEXT, [("a", 10)], count, tmp_path / "c")
    assert refused.value.kind == "tokenize"
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("name", ["", ".", "../a", "a/b", "é", "a b", "-a", "x" * 65, "a\n"])
def test_a_name_that_is_no_files_is_said_before_anything_is_counted(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(UsageError, match="no name") as wrong:
        cut_texts(TEXT, [("a", 10), (name, 10)], lambda _: pytest.fail("counted"), tmp_path)
    assert len(str(wrong.value).splitlines()) == 1


def test_a_folder_that_cannot_take_a_corpus_is_said_before_anything_is_counted(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    for place in (tmp_path / "file", tmp_path / "file" / "c", tmp_path / "gone"):
        with pytest.raises(UsageError, match="no folder that can be written to"):
            cut_texts(TEXT, [("a", 10)], lambda _: pytest.fail("counted"), place)


def built(size: int) -> str:
    return "x" * size


def read(data: Path, name: str) -> str:
    return (data / name).read_text()


def test_a_built_prompt_must_hash_to_its_pin() -> None:
    good = Builder(f"{__name__}:built", sha("xxx"), {"size": 3})
    cell = Cell("x", ("made",), 4, builders={"made": good})
    assert cell.requests()[0].prompt == "xxx"
    for builder, kind in (
        (Builder(f"{__name__}:built", sha("xxx"), {"size": 4}), "prompt-pin"),
        (Builder(f"{__name__}:nothing", sha("xxx")), "prompt-unbuilt"),
        (Builder("no_such_module:f", sha("xxx")), "prompt-unbuilt"),
    ):
        with pytest.raises(MeasurementRefused) as refused:
            Cell("x", ("made",), 4, builders={"made": builder}).requests()
        assert refused.value.kind == kind


def test_a_builder_reads_its_data_folder_and_its_place_is_no_part_of_the_cell(
    tmp_path: Path,
) -> None:
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "x.txt").write_text("hello")
    cells = [
        Cell("x", ("p",), 4, builders={"p": Builder(f"{__name__}:read", sha("hello"),
                                                    {"name": "x.txt"}, tmp_path / place)})
        for place in ("one", "two", "gone")
    ]  # fmt: skip
    assert [cell.requests()[0].prompt for cell in cells[:2]] == ["hello", "hello"]
    assert cells[0].definition() == cells[1].definition()
    with pytest.raises(MeasurementRefused, match="gone is not there") as refused:
        cells[2].requests()
    assert refused.value.kind == "prompt-unbuilt"


def test_the_default_order_holds_no_cell_that_runs_only_when_named() -> None:
    names = [cell.name for function in (shared_cells, prefill_cells, decode_cells)
             for cell in function.__dsv41_cells__]  # fmt: skip
    assert set(ORDER) <= set(names)
    assert not any(name.startswith(("ctl-", "bridge-", "seeded-")) for name in ORDER)


def test_metrics_have_the_orientation_of_the_rules() -> None:
    assert {name: metric.lower_is_better for name, metric in METRICS.items()} == {
        "ms_per_round": True,
        "accepted_per_round": False,
        "ttft_ms": True,
        "decode_tok_s": False,
        "client_tok_s": False,
        "prefill_tok_s": False,
        "rounds": True,
        "fairness": False,
    }
    assert [name for name, metric in METRICS.items() if metric.needs_speculation] == [
        "accepted_per_round"
    ]


def test_the_rooms_public_names_exist() -> None:
    for name in measure_room.__all__:
        assert hasattr(measure_room, name)
