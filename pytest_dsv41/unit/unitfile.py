"""Unit files, drop-ins and environment files, read as systemd reads them, with line numbers.

The rules are those of systemd.syntax(7), systemd.unit(5), systemd.service(5) and systemd.exec(5);
the tests hold them against systemd's own answers. Nothing here touches a machine.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

__all__ = [
    "Assignment",
    "Change",
    "Command",
    "UnitFile",
    "changes",
    "drop_in_names",
    "environment_of",
    "expand",
    "fits",
    "in_order",
    "live",
    "parse_environment_file",
    "parse_unit_file",
    "split_commands",
    "split_words",
    "unit_name",
]

_BLANK: Final = " \t\n\r"
_LINE_END: Final = re.compile(rb"(?:\n\r?|\r\n?)\x00?|\x00")
_NAME: Final = re.compile(r"[A-Za-z0-9:_.\\@-]{1,247}")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# Keys that gather: each assignment adds, an empty one empties the list.
_LISTS_TEXT: Final = """
    ExecCondition ExecStartPre ExecStart ExecStartPost ExecReload ExecStop ExecStopPost
    Environment EnvironmentFile PassEnvironment UnsetEnvironment
    SuccessExitStatus RestartPreventExitStatus RestartForceExitStatus Sockets OpenFile
    LoadCredential LoadCredentialEncrypted SetCredential SetCredentialEncrypted ImportCredential
    ReadWritePaths ReadOnlyPaths InaccessiblePaths ExecPaths NoExecPaths BindPaths
    BindReadOnlyPaths TemporaryFileSystem MountImages ExtensionImages ExtensionDirectories
    SupplementaryGroups SystemCallFilter SystemCallLog SystemCallArchitectures
    RestrictAddressFamilies RestrictFileSystems RestrictNamespaces CapabilityBoundingSet
    AmbientCapabilities DeviceAllow IPAddressAllow IPAddressDeny IPIngressFilterPath
    IPEgressFilterPath BPFProgram SocketBindAllow SocketBindDeny RuntimeDirectory StateDirectory
    CacheDirectory LogsDirectory ConfigurationDirectory LogExtraFields IODeviceWeight
    IOReadBandwidthMax IOWriteBandwidthMax IOReadIOPSMax IOWriteIOPSMax CPUAffinity NUMAMask
    DisableControllers LogFilterPatterns Documentation RequiresMountsFor WantsMountsFor
"""
_LISTS: Final = frozenset(_LISTS_TEXT.split())
# Dependencies gather too, and cannot be emptied by a drop-in (systemd.unit(5)).
_DEPENDENCIES_TEXT: Final = """
    Wants Requires Requisite BindsTo PartOf Upholds Conflicts Before After OnFailure OnSuccess
    PropagatesReloadTo ReloadPropagatedFrom PropagatesStopTo StopPropagatedFrom JoinsNamespaceOf
"""
_DEPENDENCIES: Final = frozenset(_DEPENDENCIES_TEXT.split())
_CONDITION: Final = re.compile(r"(Condition|Assert)[A-Z]\w*")


@dataclass(frozen=True)
class Assignment:
    """One `Key=value` of a file: where it begins, and the value with continued lines joined."""

    path: str
    line: int
    section: str
    key: str
    value: str

    @property
    def name(self) -> str:
        """Section and key, as `Service.ExecStart`."""
        return f"{self.section}.{self.key}"

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


@dataclass(frozen=True)
class UnitFile:
    """A unit file or drop-in: its path, where links lead, its bytes, and what it assigns.

    `ignored` are the lines that systemd passes over, each with its number and the reason. `changed`
    is when the file, or the link to it, last changed on disk in any way (ctime, seconds).
    """

    path: str
    target: str
    data: bytes
    assignments: tuple[Assignment, ...]
    ignored: tuple[tuple[int, str], ...]
    changed: float = 0.0

    @property
    def sha256(self) -> str:
        """Of the bytes, 64 hex digits."""
        return hashlib.sha256(self.data).hexdigest()


@dataclass(frozen=True)
class Change:
    """What one file does to one subject: a key, or one variable of the environment.

    `beats` are the assignments of files read before it that no longer count because of it.
    """

    path: str
    subject: str
    by: tuple[Assignment, ...]
    beats: tuple[Assignment, ...]


def unit_name(name: str) -> str:
    """Return a service's full name, `.service` added where it is left out.

    Raises:
        ValueError: it is no name of a service.
    """
    full = name if name.endswith(".service") else f"{name}.service"
    stem = full.removesuffix(".service")
    if not _NAME.fullmatch(stem) or stem.startswith("@") or stem.endswith("@"):
        raise ValueError(
            "no name of a service; valid: letters, digits, ':', '_', '.', '-', '@', and no template"
        )
    return full


# -- files ----------------------------------------------------------------------------------------


def parse_unit_file(path: str, data: bytes, *, target: str = "", changed: float = 0.0) -> UnitFile:
    """Read a unit file or drop-in; what systemd ignores is kept with the reason."""
    assignments: list[Assignment] = []
    ignored: list[tuple[int, str]] = []
    section = ""
    for number, raw in _logical_lines(data):
        try:
            line = raw.decode().strip(_BLANK)
        except UnicodeDecodeError:
            ignored.append((number, "not UTF-8; nothing after it is read"))
            break
        if not line:
            continue
        if line[0] == "[":
            if line[-1] != "]":
                ignored.append((number, "no section header; nothing after it is read"))
                break
            section = line[1:-1]
            continue
        key, equals, value = line.partition("=")
        key = key.strip(_BLANK)
        if not equals or not key:
            ignored.append((number, "no assignment"))
        elif not section:
            ignored.append((number, "an assignment outside of any section"))
        else:
            assignments.append(Assignment(path, number, section, key, value.strip(_BLANK)))
    return UnitFile(path, target or path, data, tuple(assignments), tuple(ignored), changed)


def _logical_lines(data: bytes) -> list[tuple[int, bytes]]:
    """Each line with its number; a backslash at the end joins the next one, past comments."""
    lines: list[tuple[int, bytes]] = []
    begun, number = b"", 0
    for number_, raw in enumerate(_LINE_END.split(data.removeprefix(b"\xef\xbb\xbf")), 1):
        if raw.lstrip(_BLANK.encode())[:1] in (b"#", b";"):
            continue
        if not begun:
            number = number_
        whole = begun + raw
        slashes = len(whole) - len(whole.rstrip(b"\\"))
        if slashes % 2:
            begun = whole[:-1] + b" "
            continue
        lines.append((number, whole))
        begun = b""
    if begun:
        lines.append((number, begun))
    return lines


def parse_environment_file(data: bytes, *, version: int = 252) -> dict[str, str]:
    """Read a file of EnvironmentFile=: variables to values, the last of a name counts.

    Quotes, backslashes and comments are those of systemd.exec(5). `version` is systemd's: from 254
    on a backslash no longer continues a comment.
    """
    found: dict[str, str] = {}
    state, key, value = "before key", "", ""
    kept = 0  # how much of the value stays when blanks at its end are cut

    def push() -> None:
        name = key.rstrip(_BLANK)
        if _VARIABLE.fullmatch(name):
            found[name] = value[:kept]

    for char in data.decode("utf-8", "surrogateescape"):
        ends = char in "\n\r"
        if state == "before key":
            if char in "#;":
                state = "comment"
            elif char not in _BLANK:
                state, key, value, kept = "key", char, "", 0
        elif state == "key":
            if ends:
                state = "before key"
            elif char == "=":
                state = "before value"
            else:
                key += char
        elif state in ("before value", "value"):
            if ends:
                push()
                state = "before key"
            elif char == "\\":
                state = "escaped"
            elif state == "before value" and char in "'\"":
                state = char
            elif state == "value" or char not in _BLANK:
                state = "value"
                value += char
                kept = kept if char in _BLANK else len(value)
        elif state == "escaped":
            state = "value"
            if not ends:
                value += char
                kept = len(value)
        elif state in ("'", '"'):
            if char == state:
                state = "before value"
            elif char == "\\" and state == '"':
                state = "escaped in quotes"
            else:
                value += char
                kept = len(value)
        elif state == "escaped in quotes":
            state = '"'
            if char in '"\\`$':
                value += char
            elif not ends:
                value += f"\\{char}"
            kept = len(value)
        elif state == "comment":
            state = "escaped in comment" if char == "\\" else "before key" if ends else state
        else:
            state = "before key" if ends and version >= 254 else "comment"
    if state not in ("before key", "key", "comment", "escaped in comment"):
        push()
    return found


# -- words ----------------------------------------------------------------------------------------

_ESCAPES: Final = {
    "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v",
    "\\": "\\", '"': '"', "'": "'", "s": " ",
}  # fmt: skip
_NUMBERED: Final = re.compile(
    r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|([0-7]{3})", re.ASCII
)
_BARE_SEMICOLON: Final = re.compile(r";(?=[ \t\n\r]|$)")


def split_words(text: str) -> list[str]:
    """Split a value into words: quotes of both kinds, and C escapes, also inside of them.

    What stands before a quote that is not closed, or before an unknown escape, is read; systemd
    ignores the rest.
    """
    words: list[str] = []
    at = 0
    try:
        while (found := _next_word(text, at, relaxed=False)) is not None:
            word, at = found
            words.append(word)
    except ValueError:
        pass
    return words


def _next_word(text: str, at: int, *, relaxed: bool) -> tuple[str, int] | None:
    """The word that begins at or after `at`, and where it ends; None at the end of the text.

    Raises:
        ValueError: a quote is not closed; or, but `relaxed`, a backslash begins no escape.
    """
    size = len(text)
    while at < size and text[at] in _BLANK:
        at += 1
    if at == size:
        return None
    word, quote = bytearray(), ""
    while at < size and (quote or text[at] not in _BLANK):
        char = text[at]
        at += 1
        if char == "\\":
            read, at = _escape(text, at, relaxed=relaxed)
            word += read
        elif char == quote:
            quote = ""
        elif not quote and char in "'\"":
            quote = char
        else:
            word += char.encode("utf-8", "surrogateescape")
    if quote:
        raise ValueError("a quote is not closed")
    return word.decode("utf-8", "surrogateescape"), at


def _escape(text: str, at: int, *, relaxed: bool) -> tuple[bytes, int]:
    if text[at : at + 1] in _ESCAPES:
        return _ESCAPES[text[at]].encode(), at + 1
    found = _NUMBERED.match(text, at)
    byte, short, long, octal = found.groups() if found is not None else (None,) * 4
    number = int(octal, 8) if octal else int(byte or short or long or "0", 16)
    if found is None or number == 0 or (octal and number > 255) or number > 0x10FFFF:
        if not relaxed:
            raise ValueError("no escape")
        return f"\\{text[at : at + 1]}".encode("utf-8", "surrogateescape"), at + 1
    if short or long:
        return chr(number).encode("utf-8", "surrogatepass"), found.end()
    return bytes([number]), found.end()


@dataclass(frozen=True)
class Command:
    """One command of an Exec…= line: its prefixes (`-@:+!|`), its program and its words."""

    prefixes: str
    path: str
    argv: tuple[str, ...]


def split_commands(value: str) -> list[Command]:
    """Read the commands of one Exec…= assignment; a bare `;` stands between two of them.

    A command that systemd cannot read, and what follows it, is left out.
    """
    commands: list[Command] = []
    at = 0
    try:
        while (found := _next_word(value, at, relaxed=True)) is not None:
            first, at = found
            if first == ";":
                continue
            path = first.lstrip("-@:+!|")
            words: list[str] = []
            while True:
                while at < len(value) and value[at] in _BLANK:
                    at += 1
                if _BARE_SEMICOLON.match(value, at):
                    at += 1
                    break
                if value[at : at + 1] == "\\" and _BARE_SEMICOLON.match(value, at + 1):
                    words.append(";")
                    at += 2
                    continue
                if (found := _next_word(value, at, relaxed=True)) is None:
                    break
                word, at = found
                words.append(word)
            prefixes = first[: len(first) - len(path)]
            if not path or ("@" in prefixes and not words):
                break
            argv = words if "@" in prefixes else [path, *words]
            commands.append(Command(prefixes, path, tuple(argv)))
    except ValueError:
        pass
    return commands


def fits(written: str, loaded: str, unit: str) -> bool:
    """Whether a loaded word can come from the written one: specifiers that only the machine knows
    stand for anything.
    """
    pattern, at = "", 0
    known = _specifiers(unit)
    for found in re.finditer(r"%(.)", written, re.DOTALL):
        pattern += re.escape(written[at : found.start()])
        word = known.get(found[1])
        pattern += ".*" if word is None else re.escape(word)
        at = found.end()
    return re.fullmatch(pattern + re.escape(written[at:]), loaded, re.DOTALL) is not None


def _specifiers(unit: str) -> dict[str, str]:
    stem = unit.removesuffix(".service")
    prefix, _, instance = stem.partition("@")
    return {
        "%": "%",
        "n": unit,
        "N": stem,
        "p": prefix,
        "i": instance,
        "P": _unescape(prefix),
        "I": _unescape(instance),
        "j": prefix.rpartition("-")[2],
        "J": _unescape(prefix.rpartition("-")[2]),
    }


def _unescape(name: str) -> str:
    plain = name.replace("-", "/")
    return re.sub(r"\\x([0-9a-f]{2})", lambda m: chr(int(m[1], 16)), plain)


def expand(argv: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Fill variables into a command as systemd.service(5) says: `$A` alone becomes words, `${A}`
    stays in its word, `$$` is a dollar; what is not set is empty.
    """
    words: list[str] = list(argv[:1])
    for word in argv[1:]:
        alone = re.fullmatch(r"\$([A-Za-z_][A-Za-z0-9_]*)", word)
        if alone:
            words += split_words(environment.get(alone[1], ""))
            continue
        words.append(
            re.sub(
                r"\$\$|\$\{([A-Za-z_][A-Za-z0-9_]*)\}",
                lambda found: "$" if found[0] == "$$" else environment.get(found[1], ""),
                word,
            )
        )
    return words


# -- order and precedence -------------------------------------------------------------------------


def drop_in_names(unit: str) -> list[str]:
    """The names whose `.d` folders hold drop-ins of `unit`, the most specific first.

    For `a-b@c.service` also `a-b@.service`, `a-.service` and so on; `service.d`, which belongs to
    every service and yields to all of them, is not among them (systemd.unit(5)).
    """
    stem, _, suffix = unit.rpartition(".")
    prefix, at, instance = stem.partition("@")
    names = [unit]
    if at and instance:
        names += drop_in_names(f"{prefix}@.{suffix}")
    trailing = prefix.endswith("-")
    head, dash, _ = prefix.removesuffix("-").rpartition("-") if trailing else prefix.rpartition("-")
    if dash and head:
        built = f"{head}-@{instance}" if at and instance else f"{head}-"
        names += drop_in_names(f"{built}.{suffix}")
    return list(dict.fromkeys(names))


def in_order(found: Sequence[tuple[str, str]]) -> tuple[list[str], list[str]]:
    """Order drop-ins as systemd reads them: by file name, whatever the folder.

    Args:
        found: (folder, file name), the folders in order of precedence.

    Returns:
        The paths that are read, in order, and those that a file of the same name in a folder of
        higher precedence hides.
    """
    first: dict[str, str] = {}
    hidden: list[str] = []
    for folder, name in found:
        path = f"{folder}/{name}"
        if name not in first:
            first[name] = path
        elif first[name] != path:
            hidden.append(path)
    return [first[name] for name in sorted(first, key=os.fsencode)], list(dict.fromkeys(hidden))


def live(files: Sequence[UnitFile]) -> dict[str, tuple[Assignment, ...]]:
    """What counts in the end: each subject to the assignments that hold, files in reading order."""
    return _walk(files)[1]


def changes(files: Sequence[UnitFile]) -> list[Change]:
    """What every file after the first does, subject by subject, and which assignments it beats."""
    return _walk(files)[0]


def _walk(
    files: Sequence[UnitFile],
) -> tuple[list[Change], dict[str, tuple[Assignment, ...]]]:
    held: dict[str, list[Assignment]] = {}
    done: list[Change] = []
    for position, file in enumerate(files):
        by: dict[str, list[Assignment]] = {}
        beats: dict[str, list[Assignment]] = {}
        for assignment in file.assignments:
            for subject, lost, kept in _effect(assignment, held):
                by.setdefault(subject, []).append(assignment)
                beats.setdefault(subject, []).extend(a for a in lost if a.path != file.path)
                held[subject] = kept
        if position:
            done += [
                Change(file.path, subject, tuple(by[subject]), tuple(beats[subject]))
                for subject in by
            ]
    return done, {subject: tuple(kept) for subject, kept in held.items() if kept}


def _effect(
    assignment: Assignment, held: Mapping[str, list[Assignment]]
) -> list[tuple[str, list[Assignment], list[Assignment]]]:
    """The subjects that an assignment touches: which lose their say, and which hold after it."""
    name = assignment.name
    variables = f"{name} "
    if assignment.key in ("Environment", "UnsetEnvironment") and assignment.value:
        # A variable is its own subject: two files may set different ones side by side.
        words = split_words(assignment.value)
        if assignment.key == "Environment":
            words = [word for word in words if _sets_a_variable(word)]
        named = dict.fromkeys(word.partition("=")[0] for word in words)
        return [
            (variables + word, list(held.get(variables + word, ())), [assignment]) for word in named
        ]
    if assignment.key in ("Environment", "UnsetEnvironment"):
        touched = [s for s in held if s.startswith(variables) and held[s]]
        return [(subject, list(held[subject]), []) for subject in touched]
    before = list(held.get(name, ()))
    if assignment.key in _DEPENDENCIES:
        return [(name, [], [*before, assignment])]
    if assignment.key in _LISTS or _CONDITION.fullmatch(assignment.key):
        if not assignment.value:
            return [(name, before, [])]
        return [(name, [], [*before, assignment])]
    return [(name, before, [assignment])]


def _sets_a_variable(word: str) -> bool:
    """Whether systemd takes it as NAME=VALUE; it passes over any other word."""
    name, equals, _ = word.partition("=")
    return bool(equals and _VARIABLE.fullmatch(name))


def environment_of(held: Mapping[str, Sequence[Assignment]]) -> dict[str, tuple[str, Assignment]]:
    """The variables that Environment= sets in the end: the written value, and where it stands."""
    found: dict[str, tuple[str, Assignment]] = {}
    for subject, assignments in held.items():
        section, _, name = subject.partition(" ")
        if section != "Service.Environment" or not name:
            continue
        for word in split_words(assignments[-1].value):
            variable, _, value = word.partition("=")
            if variable == name and _sets_a_variable(word):
                found[name] = (value, assignments[-1])
    return found
