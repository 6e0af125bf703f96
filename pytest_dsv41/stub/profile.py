"""What a stub server is told: one flat set of settings, on the command line or in a TOML file.

The table `OPTIONS` is the only list of them: the command line, the TOML reader and the messages
are made from it. Times are milliseconds, rates are relative (0.003 is 0.3 %).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_dsv41.errors import SpecError

if TYPE_CHECKING:  # importing either costs start time
    import argparse
    from pathlib import Path

__all__ = ["OPTIONS", "Option", "Profile", "add_arguments", "from_arguments", "load_profile"]


class Profile(NamedTuple):
    """The settings of one stub server. `OPTIONS` says what each means and which values are valid.

    `Profile()` is a vLLM with a drafter of 3 tokens, 8 ms a round and no noise.
    """

    host: str = "127.0.0.1"
    port: int = 0
    uds: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    model: str = "stub"
    engine: str = "vllm"
    version: str = "0.33.0"
    round_ms: float = 8.0
    prefill_ms: float = 4.0
    prefill_ms_per_token: float = 0.02
    acceptance: tuple[float, ...] = (0.7,)
    draft_tokens: int = 3
    noise: float = 0.0
    drift: float = 0.0
    batch_cost: float = 0.0
    seed: int = 0
    max_running: int = 16
    max_model_len: int = 262144
    max_logprobs: int = 20
    kv_tokens: int = 1048576
    block_size: int = 16
    eos_tokens: int = 0
    reasoning_tokens: int = 0
    perturb: float = 0.0
    loading_ms: float = 0.0
    on_term: str = "exit"
    prompt_tokens_details: bool = True
    per_request_metrics: bool = False
    per_request_spec: str = "none"
    force_include_usage: bool = False
    load_tracking: bool = False
    dev_mode: bool = True
    profiler: bool = True
    realtime: bool = True
    offer: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    fault: tuple[str, ...] = ()
    truth: str = ""

    def accepts(self, position: int) -> float:
        """Return the chance that the draft token at `position` (0, 1, …) is accepted.

        Given that every token before it was; the last value of `acceptance` holds for the rest.
        """
        return self.acceptance[min(position, len(self.acceptance) - 1)]


class Option(NamedTuple):
    """One setting: its field in `Profile`, kind, valid values and the line `--help` prints."""

    name: str
    kind: str  # text | int | float | flag | floats | texts
    help: str
    low: float = -math.inf
    high: float = math.inf
    choices: tuple[str, ...] = ()


OPTIONS: tuple[Option, ...] = (
    Option("host", "text", "loopback address to listen on"),
    Option("port", "int", "port to listen on; 0 takes a free one", 0, 65535),
    Option("uds", "text", "listen on this Unix socket and on no port"),
    Option("tls_cert", "text", "serve TLS with this certificate (PEM)"),
    Option("tls_key", "text", "its key, where the certificate's file does not hold it"),
    Option("model", "text", "served model name; the text of the answers depends on it"),
    Option("engine", "text", "dialect", choices=("vllm", "llamacpp")),
    Option("version", "text", "version the server says it is"),
    Option("round_ms", "float", "milliseconds of one decoding round of a lone request", 0),
    Option("prefill_ms", "float", "milliseconds from admission to the first token, fixed part", 0),
    Option("prefill_ms_per_token", "float", "milliseconds added by each uncached prompt token", 0),
    Option(
        "acceptance",
        "floats",
        "chance that a draft token is accepted, given the one before was; a comma list by position",
        0,
        1,
    ),
    Option("draft_tokens", "int", "draft tokens a round; 0 is a server without speculation", 0, 64),
    Option("noise", "float", "relative SD of a request's round time, one draw per request", 0, 0.3),
    Option("drift", "float", "relative change of the round time per request served", -0.5, 0.5),
    Option("batch_cost", "float", "relative round time added by each further request", 0),
    Option("seed", "int", "seed of the noise and of sampled requests without a seed", 0, 2**63),
    Option("max_running", "int", "requests decoded at once; more wait", 1),
    Option("max_model_len", "int", "tokens of prompt and answer together", 16),
    Option("max_logprobs", "int", "most logprobs a request may ask for", 0, 30),
    Option("kv_tokens", "int", "tokens the KV cache holds", 16),
    Option("block_size", "int", "tokens of one block of the prefix cache", 1),
    Option("eos_tokens", "int", "an answer without ignore_eos ends after so many; 0 never", 0),
    Option("reasoning_tokens", "int", "a chat answer begins with so many reasoning tokens", 0),
    Option("perturb", "float", "SD of a disturbance of the logits: another, near model", 0),
    Option("loading_ms", "float", "answer 503 for so long after the start", 0),
    Option("on_term", "text", "what SIGTERM does: end at once, or hang", choices=("exit", "hang")),
    Option("prompt_tokens_details", "flag", "cached_tokens in usage"),
    Option("per_request_metrics", "flag", "timings in the usage chunk (vLLM)"),
    Option(
        "per_request_spec",
        "text",
        "speculative figures in the usage chunk (vLLM)",
        choices=("none", "summary", "detailed"),
    ),
    Option("force_include_usage", "flag", "usage in every chunk, asked or not (vLLM)"),
    Option("load_tracking", "flag", "/load tells the truth (vLLM)"),
    Option("dev_mode", "flag", "/reset_prefix_cache and /server_info exist (vLLM)"),
    Option("profiler", "flag", "/start_profile and /stop_profile exist (vLLM)"),
    Option("realtime", "flag", "real-time scheduling where it is permitted, for exact pacing"),
    Option(
        "offer",
        "texts",
        "do what a chat asks beside text; may be given more than once",
        choices=("vision", "tools", "json", "efforts"),
    ),
    Option(
        "deny",
        "texts",
        "refuse what a chat asks beside text; may be given more than once",
        choices=("vision", "tools", "json", "efforts"),
    ),
    Option("fault", "texts", "fault for every request, name[=arg]; may be given more than once"),
    Option("truth", "text", "append the ground truth to this file, one JSON line a write"),
)

_BY_NAME = {option.name: option for option in OPTIONS}
_LOOPBACK = ("127.", "::1", "localhost")


def _valid(option: Option) -> str:
    if option.choices:
        return " | ".join(option.choices)
    words = {
        "text": "text",
        "texts": "a list of texts",
        "int": "a whole number",
        "float": "a number",
        "floats": "a number or a list of numbers",
        "flag": "true | false",
    }[option.kind]
    if option.low != -math.inf and option.high != math.inf:
        return f"{words} from {option.low:g} to {option.high:g}"
    if option.low != -math.inf:
        return f"{words}, at least {option.low:g}"
    return words


def _convert(option: Option, value: Any) -> Any:
    """Return `value` in the field's type; ValueError when it is not valid."""
    if option.kind == "flag":
        if not isinstance(value, bool):
            raise ValueError
        return value
    if option.kind == "texts":
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)) or not all(isinstance(i, str) for i in items):
            raise ValueError
        if option.choices and not set(items) <= set(option.choices):
            raise ValueError
        return tuple(items)
    if option.kind == "text":
        if not isinstance(value, str) or (option.choices and value not in option.choices):
            raise ValueError
        return value
    if isinstance(value, bool):
        raise ValueError
    if option.kind == "floats":
        parts = value.split(",") if isinstance(value, str) else value
        if isinstance(parts, (int, float)):
            parts = [parts]
        if not isinstance(parts, (list, tuple)) or not parts:
            raise ValueError
        return tuple(_number(option, part) for part in parts)
    return _number(option, value)


def _number(option: Option, value: Any) -> float | int:
    number = float(value)
    if not (option.low <= number <= option.high):
        raise ValueError
    if option.kind != "int":
        return number
    whole = int(value)
    if whole != number:
        raise ValueError
    return whole


def make_profile(
    values: dict[str, Any], *, where: str = "", base: Profile | None = None
) -> Profile:
    """Return a Profile from `values`, over `base`. UsageError names key, value and valid values."""
    prefix = f"{where}: " if where else ""
    checked: dict[str, Any] = {}
    for name, value in values.items():
        option = _BY_NAME.get(name)
        if option is None:
            raise SpecError(f"{prefix}unknown setting {name!r}; valid: {', '.join(_BY_NAME)}")
        try:
            checked[name] = _convert(option, value)
        except (TypeError, ValueError, OverflowError):
            raise SpecError(f"{prefix}{name} = {value!r}; valid: {_valid(option)}") from None
    profile = (base or Profile())._replace(**checked)
    if not profile.host.startswith(_LOOPBACK):
        raise SpecError(f"{prefix}host = {profile.host!r}; valid: a loopback address")
    if profile.engine == "llamacpp" and "version" not in checked and profile.version == "0.33.0":
        profile = profile._replace(version="b11434")
    if profile.engine == "llamacpp" and "block_size" not in checked and profile.block_size == 16:
        # llama.cpp reuses a prompt token by token, not by blocks.
        profile = profile._replace(block_size=1)
    return profile


def load_profile(path: Path | str) -> Profile:
    """Return the Profile a TOML file holds (flat, or under a table `[stub]`).

    SpecError, one line, when the file is missing, is no TOML or holds a wrong key or value.
    """
    return make_profile(_read_toml(str(path)), where=str(path))


def _read_toml(path: str) -> dict[str, Any]:
    import tomllib

    try:
        with open(path, "rb") as file:  # noqa: PTH123 - pathlib is not loaded yet at this point
            table = tomllib.load(file)
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: not valid TOML: {error}") from None
    inner = table.get("stub", table)
    if not isinstance(inner, dict):
        raise SpecError(f"{path}: stub must be a table")
    return inner


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` one flag a setting, and `--profile` (whose values the flags override)."""
    from argparse import SUPPRESS, BooleanOptionalAction

    parser.add_argument("--profile", metavar="FILE", help="TOML file with settings of these names")
    defaults = Profile()
    for option in OPTIONS:
        flag = "--" + option.name.replace("_", "-")
        default = getattr(defaults, option.name)
        if option.kind == "floats":
            default = ",".join(f"{value:g}" for value in default)
        text = f"{option.help} (default: {default})" if default not in ("", ()) else option.help
        text = text.replace("%", "%%")
        if option.kind == "flag":
            parser.add_argument(flag, action=BooleanOptionalAction, default=SUPPRESS, help=text)
        elif option.kind == "texts":
            parser.add_argument(
                flag,
                action="append",
                default=SUPPRESS,
                metavar=f"{{{'|'.join(option.choices)}}}" if option.choices else "NAME[=ARG]",
                help=text,
            )
        else:
            choices = "|".join(option.choices)
            metavar = f"{{{choices}}}" if choices else option.name.upper()
            parser.add_argument(flag, default=SUPPRESS, metavar=metavar, help=text)


def from_arguments(args: argparse.Namespace) -> Profile:
    """Return the Profile of parsed arguments: the file's values, then the flags over them."""
    given = vars(args)
    base = load_profile(given["profile"]) if given.get("profile") else None
    flags = {o.name: given[o.name] for o in OPTIONS if o.name in given}
    return make_profile(flags, base=base)
