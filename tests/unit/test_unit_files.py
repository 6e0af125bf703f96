"""Unit files by the rules of systemd's manual pages; tests/real asks systemd itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_dsv41.unit.masking import masked_argv, masked_value
from pytest_dsv41.unit.unitfile import (
    changes,
    drop_in_names,
    environment_of,
    expand,
    fits,
    in_order,
    live,
    parse_environment_file,
    parse_unit_file,
    split_commands,
    split_words,
    unit_name,
)


def unit(text: str, path: str = "/etc/a.service") -> list[tuple[int, str, str]]:
    return [(a.line, a.name, a.value) for a in parse_unit_file(path, text.encode()).assignments]


# -- systemd.syntax(7) ----------------------------------------------------------------------------


def test_the_manuals_examples() -> None:
    text = (
        "[Section A]\nKeyOne=value 1\nKeyTwo=value 2\n\n# a comment\n\n[Section B]\n"
        "Setting=\"something\" \"some thing\" \"...\"\n"
        "KeyTwo=value 2 \\\n       value 2 continued\n\n"
        "[Section C]\nKeyThree=value 3\\\n# this line is ignored\n; this line is ignored too\n"
        "       value 3 continued\n"
    )  # fmt: skip
    assert unit(text) == [
        (2, "Section A.KeyOne", "value 1"),
        (3, "Section A.KeyTwo", "value 2"),
        (8, "Section B.Setting", '"something" "some thing" "..."'),
        (9, "Section B.KeyTwo", "value 2         value 2 continued"),
        (13, "Section C.KeyThree", "value 3        value 3 continued"),
    ]
    assert split_words('"something" "some thing" "..."') == ["something", "some thing", "..."]


def test_what_is_no_assignment_is_kept_with_its_line() -> None:
    file = parse_unit_file("/a", b"Early=1\n[Service]\nnonsense\n=2\nA=1\n[Broken\nB=2\n")
    assert [(a.line, a.name) for a in file.assignments] == [(5, "Service.A")]
    assert [line for line, _ in file.ignored] == [1, 3, 4, 6]
    assert parse_unit_file("/a", b"[Service]\nA=\xff\nB=1\n").assignments == ()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["\n", "\r\n"]),
            st.sampled_from(["", "  ", "# remark", "; remark"]),
            st.text(alphabet="abc=\u00e9 ", min_size=1, max_size=8),
        ),
        max_size=12,
    )
)
def test_every_assignment_is_found_on_its_line(parts: list[tuple[str, str, str]]) -> None:
    text, line, wanted = "[Service]\n", 1, []
    for end, between, value in parts:
        text += f"{between}{end}Key={value}{end}"
        line += 2
        wanted.append((line, "Service.Key", value.strip()))
    assert unit(text) == wanted


# -- words ----------------------------------------------------------------------------------------


def test_words_quotes_and_escapes() -> None:
    assert split_words("a 'b c' \"d 'e'\" f\"g h\"i") == ["a", "b c", "d 'e'", "fg hi"]
    assert split_words(r"a\x20b \u20ac \101 \s '\t'") == ["a b", "\u20ac", "A", " ", "\t"]
    assert split_words("one 'open") == ["one"]
    assert split_words(r"one \q two") == ["one"]


def test_commands_of_the_manual() -> None:
    # systemd.service(5), "COMMAND LINES".
    (one,) = split_commands("echo / >/dev/null & \\; ls")
    assert one.argv == ("echo", "/", ">/dev/null", "&", ";", "ls")
    two = split_commands('echo one ; echo "two two"')
    assert [command.argv for command in two] == [("echo", "one"), ("echo", "two two")]
    (named,) = split_commands("-@/bin/true name arg")
    assert (named.prefixes, named.path, named.argv) == ("-@", "/bin/true", ("name", "arg"))


def test_variables_of_the_manual() -> None:
    # systemd.service(5): "Environment=ONE='one' "TWO='two two' too" THREE=".
    words = split_words("ONE='one' \"TWO='two two' too\" THREE=")
    environment = dict(word.split("=", 1) for word in words)
    assert environment == {"ONE": "one", "TWO": "'two two' too", "THREE": ""}
    assert expand(["/bin/echo", "${ONE}", "${TWO}", "${THREE}"], environment) == [
        "/bin/echo", "one", "'two two' too", ""
    ]  # fmt: skip
    assert expand(["/bin/echo", "$ONE", "$TWO", "$THREE"], environment) == [
        "/bin/echo", "one", "two two", "too"
    ]  # fmt: skip
    assert expand(["/bin/echo", "$$5", "x${ONE}y"], environment) == ["/bin/echo", "$5", "xoney"]


def test_an_environment_file() -> None:
    text = (
        '# remark\n\nA=1\n B = two words  \nC=\' kept \'\nD="q \\" \\x $"\n; more\nE=one \\\ntwo\n'
        "F=x\nF=y\nnothing\n1BAD=z\n"
    )
    assert parse_environment_file(text.encode()) == {
        "A": "1", "B": "two words", "C": " kept ", "D": 'q " \\x $', "E": "one two", "F": "y"
    }  # fmt: skip
    continued = b"# remark \\\nA=1\nB=2\n"
    assert parse_environment_file(continued, version=252) == {"B": "2"}
    assert parse_environment_file(continued, version=254) == {"A": "1", "B": "2"}


@given(
    st.dictionaries(st.from_regex(r"[A-Z_][A-Z0-9_]{0,5}", fullmatch=True), st.text(max_size=12))
)
def test_a_quoted_environment_file_comes_back(values: dict[str, str]) -> None:
    values = {n: v.replace("\\", "/").replace('"', "'") for n, v in values.items()}
    values = {n: v.encode("utf-8", "ignore").decode() for n, v in values.items()}
    text = "".join(f'{name}="{value}"\n' for name, value in values.items())
    assert parse_environment_file(text.encode()) == values


def test_specifiers() -> None:
    assert fits("%n %N %p %i %%", "a-b@c.service a-b@c a-b c %", "a-b@c.service")
    assert not fits("%i", "d", "a@c.service")
    assert fits("/run/%H/x.%u", "/run/anything/x.root", "a.service")
    assert not fits("x.y", "xzy", "a.service")


# -- names, order, precedence ---------------------------------------------------------------------


def test_the_folders_of_the_manual() -> None:
    # systemd.unit(5): foo-bar-baz.service also looks into foo-bar-.service.d and foo-.service.d.
    assert drop_in_names("foo-bar-baz.service") == [
        "foo-bar-baz.service", "foo-bar-.service", "foo-.service"
    ]  # fmt: skip
    assert drop_in_names("plain.service") == ["plain.service"]
    assert drop_in_names("a@b.service")[:2] == ["a@b.service", "a@.service"]


@pytest.mark.parametrize("name", ["", "a b", "a/b", "x" * 300, "a@", "@a", "a@.service", "a\n"])
def test_no_name_of_a_service(name: str) -> None:
    with pytest.raises(ValueError, match="no name of a service"):
        unit_name(name)


def test_names_of_services() -> None:
    assert unit_name("a") == unit_name("a.service") == "a.service"
    assert unit_name("a@b:c.d") == "a@b:c.d.service"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["1", "10", "2", "Z", "a"]))))
def test_one_file_of_each_name_by_name(found: list[tuple[str, str]]) -> None:
    order, hidden = in_order(found)
    names = [path.rpartition("/")[2] for path in order]
    assert names == sorted({name for _, name in found})
    for path in order:
        folder, _, name = path.rpartition("/")
        assert folder == next(f for f, n in found if n == name)
    assert set(order) | set(hidden) == {f"{folder}/{name}" for folder, name in found}
    assert not set(order) & set(hidden)


BASE = "[Service]\nEnvironment=A=1 B=2\nExecStart=/bin/x\nUser=one\nExecStartPre=/bin/pre\n"


def held(*texts: str) -> dict[str, list[str]]:
    files = [parse_unit_file(f"/{n}", text.encode()) for n, text in enumerate(texts)]
    return {subject: [str(a) for a in kept] for subject, kept in live(files).items()}


def beaten(*texts: str) -> dict[tuple[str, str], list[str]]:
    files = [parse_unit_file(f"/{n}", text.encode()) for n, text in enumerate(texts)]
    return {(c.path, c.subject): [str(a) for a in c.beats] for c in changes(files)}


def test_a_variable_a_command_and_a_word_are_overridden_each_by_its_rule() -> None:
    drop = (
        "[Service]\nEnvironment=A=9\nExecStart=\nExecStart=/bin/y\nUser=two\nExecStartPre=/bin/q\n"
    )
    assert beaten(BASE, drop) == {
        ("/1", "Service.Environment A"): ["/0:2"],
        ("/1", "Service.ExecStart"): ["/0:3"],
        ("/1", "Service.User"): ["/0:4"],
        ("/1", "Service.ExecStartPre"): [],
    }
    assert held(BASE, drop) == {
        "Service.Environment A": ["/1:2"],
        "Service.Environment B": ["/0:2"],
        "Service.ExecStart": ["/1:4"],
        "Service.User": ["/1:5"],
        "Service.ExecStartPre": ["/0:5", "/1:6"],
    }


def test_an_empty_environment_beats_every_variable_and_dependencies_stay() -> None:
    assert beaten(BASE, "[Service]\nEnvironment=\nEnvironment=A=3\n") == {
        ("/1", "Service.Environment A"): ["/0:2"],
        ("/1", "Service.Environment B"): ["/0:2"],
    }
    base, drop = "[Unit]\nAfter=a.service\n", "[Unit]\nAfter=\nAfter=b.service\n"
    assert beaten(base, drop) == {("/1", "Unit.After"): []}
    files = [parse_unit_file("/0", base.encode()), parse_unit_file("/1", drop.encode())]
    assert [a.value for a in live(files)["Unit.After"]] == ["a.service", "", "b.service"]


def test_the_last_file_wins_and_the_middle_one_is_beaten_too() -> None:
    one, two = "[Service]\nEnvironment=A=2\n", "[Service]\nEnvironment=A=3\n"
    assert beaten(BASE, one, two)[("/2", "Service.Environment A")] == ["/1:2"]
    files = [parse_unit_file(f"/{n}", t.encode()) for n, t in enumerate((BASE, one, two))]
    environment = environment_of(live(files))
    assert {name: (value, str(at)) for name, (value, at) in environment.items()} == {
        "A": ("3", "/2:2"), "B": ("2", "/0:2")
    }  # fmt: skip


# -- secrets --------------------------------------------------------------------------------------


@given(st.text(min_size=8, max_size=40))
def test_only_what_is_plainly_none_is_shown(value: str) -> None:
    shown = masked_value("ANY", value)
    plain = value.startswith("/") or value.replace(".", "").lstrip("+-").isdigit()
    assert plain or value not in shown


def test_a_command_line_without_its_keys() -> None:
    argv = ["serve", "--api-key", "sk-1", "--token=abc", "--port", "1", "http://u:p@host/x"]
    assert masked_argv(argv) == "serve --api-key '***' '--token=***' --port 1 'http://***@host/x'"
    assert masked_value("HF_TOKEN", "/looks/like/a/path").startswith("sha256:")
    assert masked_value("ENV_FILE", "/srv/a.env") == "/srv/a.env"
