"""A profile: what one model costs on one kind of hardware, and where every number comes from.

A profile is a small TOML file. Every number in it is written with its provenance:

    d_s = { value = 0.028, source = "estimated", note = "fixed cost of one step" }

In the program the numbers are plain attributes (`profile.switch_s`) and their provenance is looked up by the dotted
name they have in the file (`profile.provenance["coefficients.d_s"]`), so that whoever computes with a profile need not
care, and whoever prints one can say how far to trust it.
"""

import json
import math
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from importlib import resources
from pathlib import Path
from typing import Any

from vertumnus.core.cost import Coefficients, CostModel
from vertumnus.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class Source(Enum):
    """How a number came about."""

    MEASURED = "measured"  # on the hardware in question, with this program
    PUBLISHED = "published"  # by somebody else, for this model and hardware; or a vendor's specification
    ESTIMATED = "estimated"  # derived, carried over from similar hardware, or assumed


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where one number comes from; the note says how, in a few words."""

    source: Source
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The costs of one model on one kind of hardware.

    `coefficients` (eq. 2) and `kappa` (predicted service seconds per second that one worker sustains) are per degree;
    `kappa` is None where nobody has measured it. `intra_node_bytes_per_s` is a KV copy's rate over a GPU's link inside
    a node, `inter_node_bytes_per_s` the rate between two nodes, all their links together; each copy also takes
    `copy_latency_s`. A finished prefill's KV goes to the decode pool at `decode_bytes_per_s` per prefill node after
    `decode_latency_s`, and the decode pool then needs `first_token_s`. `switch_s` is the activation of other process
    groups, without the drain. `max_sequence_tokens` is None where only KV memory limits a request.
    """

    name: str
    model: str
    hardware: str
    degrees: tuple[int, ...]
    coefficients: Mapping[int, Coefficients]
    kv_bytes_per_token: int
    kv_capacity_tokens_per_gpu: int
    intra_node_bytes_per_s: float
    inter_node_bytes_per_s: float
    copy_latency_s: float
    decode_bytes_per_s: float
    decode_latency_s: float
    first_token_s: float
    switch_s: float
    provenance: Mapping[str, Provenance]
    kappa: Mapping[int, float] | None = None
    max_sequence_tokens: int | None = None
    note: str = ""
    _cost_model: CostModel = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raises ConfigError, naming the field, for a profile that cannot be used or a number without provenance."""
        for name in ("name", "model", "hardware"):
            if not getattr(self, name):
                raise ConfigError(f"{name} is empty; accepted: some text")
        _check_degrees(self.degrees)
        _check_covered("coefficients", self.coefficients, self.degrees)
        if self.kappa is not None:
            _check_covered("kappa", self.kappa, self.degrees)
        if "coefficients.d_s" in self.provenance and len(set(self.coefficients.values())) > 1:
            raise ConfigError("coefficients differ by degree under one provenance; accepted: a provenance per degree")
        numbers = dict(_numbers(self))
        for key, value in numbers.items():
            _check_number(key, value)
        for key in sorted(numbers.keys() ^ self.provenance.keys()):
            have = "a provenance but no value" if key in self.provenance else "a value but no provenance"
            raise ConfigError(f"{key} has {have}; accepted: both")
        object.__setattr__(self, "_cost_model", CostModel(self.coefficients))

    def cost_model(self) -> CostModel:
        """The cost model of these coefficients (one object, shared)."""
        return self._cost_model

    def with_kappa(self, kappa: Mapping[int, float], provenance: Provenance) -> "Profile":
        """The same profile with these capacities, one for each degree, all of one provenance."""
        others = {key: known for key, known in self.provenance.items() if not key.startswith("kappa.")}
        return replace(self, kappa=kappa, provenance=others | {f"kappa.{degree}": provenance for degree in kappa})

    def kv_capacity_blocks(self, block_tokens: int) -> int:
        """Whole KV blocks of this size that one GPU holds. Raises ConfigError if it holds none."""
        if not 0 < block_tokens <= self.kv_capacity_tokens_per_gpu:
            raise ConfigError(f"block_tokens is {block_tokens}; accepted: 1 to {self.kv_capacity_tokens_per_gpu}")
        return self.kv_capacity_tokens_per_gpu // block_tokens


# What the file calls a coefficient, and what eq. 2 calls it.
_COEFFICIENTS = {
    "d_s": "d",
    "a_s_per_token": "a",
    "b_s_per_token": "b",
    "c_s_per_token": "c",
    "alpha_s_per_pair": "alpha",
}
_COUNTS = ("kv_bytes_per_token", "kv_capacity_tokens_per_gpu", "max_sequence_tokens")
_RATES = ("intra_node_bytes_per_s", "inter_node_bytes_per_s", "decode_bytes_per_s")
_TIMES = ("copy_latency_s", "decode_latency_s", "first_token_s", "switch_s")
_TEXTS = ("name", "model", "hardware", "note")
_OPTIONAL = ("note", "kappa", "max_sequence_tokens")
_TOP_LEVEL = (*_TEXTS, "degrees", *_COUNTS, *_RATES, *_TIMES, "coefficients", "kappa")

_Number = int | float
_Table = dict[str, Any]


def _numbers(profile: Profile) -> Iterator[tuple[str, _Number]]:
    """Every number of a profile under its dotted name in the file, in the file's order."""
    for name in (*_COUNTS, *_RATES, *_TIMES):
        value = getattr(profile, name)
        if value is not None:
            yield name, value
    uniform = "coefficients.d_s" in profile.provenance  # one table for all degrees, as the paper has it
    tables = {"": profile.degrees[0]} if uniform else {f"{c}.": c for c in profile.degrees}
    for prefix, degree in tables.items():
        for key, symbol in _COEFFICIENTS.items():
            yield f"coefficients.{prefix}{key}", getattr(profile.coefficients[degree], symbol)
    if profile.kappa is not None:
        for degree in profile.degrees:
            yield f"kappa.{degree}", profile.kappa[degree]


def _check_degrees(degrees: tuple[int, ...]) -> None:
    powers = all(type(degree) is int and degree > 0 and degree & (degree - 1) == 0 for degree in degrees)
    if not degrees or not powers or list(degrees) != sorted(set(degrees)):
        raise ConfigError(f"degrees is {list(degrees)}; accepted: rising powers of two, at least one")


def _check_covered(name: str, values: Mapping[int, object], degrees: tuple[int, ...]) -> None:
    if set(values) != set(degrees):
        raise ConfigError(f"{name} has the degrees {sorted(values)}; accepted: one entry for each of {list(degrees)}")


def _check_number(key: str, value: object) -> None:
    if key in _COUNTS:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{key} is {value!r}; accepted: a whole number from 1")
        return
    must_be_positive = key in _RATES or key.startswith("kappa.")
    accepted = "a finite number > 0" if must_be_positive else "a finite number >= 0"
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise ConfigError(f"{key} is {value!r}; accepted: {accepted}")
    if value < 0 or (must_be_positive and value == 0):
        raise ConfigError(f"{key} is {value!r}; accepted: {accepted}")


# Reading


DEFAULT_PROFILE = "qwen3-30b-a3b-h20-3e"
BUILT_IN = (DEFAULT_PROFILE, "qwen3-30b-a3b-h100", "deepseek-v4-flash-h20-3e")


def load_profile(name_or_path: str | Path = DEFAULT_PROFILE) -> Profile:
    """The built-in profile of this name, or else the one in this file.

    Raises ConfigError, naming the file and the field, if there is none or it cannot be used.
    """
    origin = str(name_or_path)
    if origin in BUILT_IN:
        built_in = resources.files("vertumnus") / "profiles" / f"{origin}.toml"
        return parse_profile(built_in.read_text(encoding="utf-8"), origin=origin)
    try:
        text = Path(name_or_path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "not a text file"
        known = ", ".join(BUILT_IN)
        raise ConfigError(f"profile is {origin!r} ({reason}); accepted: a TOML file, or one of {known}") from None
    return parse_profile(text, origin=origin)


def parse_profile(text: str, origin: str) -> Profile:
    """The profile that a TOML text describes; `origin` is what error messages call it."""
    try:
        document = tomllib.loads(text)
        _check_keys("", document, _TOP_LEVEL, optional=_OPTIONAL)
        return _from_document(document)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{origin}: not TOML: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from None


def _check_keys(where: str, table: object, accepted: Collection[str], optional: Collection[str] = ()) -> None:
    """Raises ConfigError unless `table` is a table with the accepted keys, all but the optional ones present."""
    what = where or "the profile"
    names = ", ".join(accepted)
    if not isinstance(table, dict):
        raise ConfigError(f"{what} is {table!r}; accepted: a table with the keys {names}")
    for key in table:
        if key not in accepted:
            raise ConfigError(f"{what} has the unknown key {key!r}; accepted: {names}")
    for key in accepted:
        if key not in table and key not in optional:
            raise ConfigError(f"{what} lacks the key {key!r}; accepted: {names}")


class _Numbers:
    """Takes numbers out of a document and keeps the provenance of each."""

    def __init__(self) -> None:
        self.provenance: dict[str, Provenance] = {}

    def take(self, key: str, entry: object) -> Any:
        _check_keys(key, entry, ("value", "source", "note"), optional=("note",))
        assert isinstance(entry, dict)
        value, source, note = entry["value"], entry["source"], entry.get("note", "")
        sources = [known.value for known in Source]
        if source not in sources:
            raise ConfigError(f"{key}.source is {source!r}; accepted: {', '.join(sources)}")
        if not isinstance(note, str):
            raise ConfigError(f"{key}.note is {note!r}; accepted: text")
        _check_number(key, value)
        self.provenance[key] = Provenance(Source(source), note)
        return value if key in _COUNTS else float(value)

    def coefficients(self, where: str, table: object) -> Coefficients:
        _check_keys(where, table, _COEFFICIENTS)
        assert isinstance(table, dict)
        values = {symbol: self.take(f"{where}.{key}", table[key]) for key, symbol in _COEFFICIENTS.items()}
        return Coefficients(**values)


def _from_document(document: _Table) -> Profile:
    for key in _TEXTS:
        if not isinstance(document.get(key, ""), str):
            raise ConfigError(f"{key} is {document[key]!r}; accepted: text")
    degrees = document["degrees"]
    if not isinstance(degrees, list):
        raise ConfigError(f"degrees is {degrees!r}; accepted: a list of powers of two")
    _check_degrees(tuple(degrees))
    numbers = _Numbers()
    scalars = {key: numbers.take(key, document[key]) for key in (*_COUNTS, *_RATES, *_TIMES) if key in document}
    table = document["coefficients"]
    per_degree = isinstance(table, dict) and any(key.isdecimal() for key in table)
    if per_degree:
        _check_keys("coefficients", table, [str(degree) for degree in degrees])
        coefficients = {d: numbers.coefficients(f"coefficients.{d}", table[str(d)]) for d in degrees}
    else:
        coefficients = dict.fromkeys(degrees, numbers.coefficients("coefficients", table))
    kappa = None
    if "kappa" in document:
        _check_keys("kappa", document["kappa"], [str(degree) for degree in degrees])
        kappa = {d: numbers.take(f"kappa.{d}", document["kappa"][str(d)]) for d in degrees}
    return Profile(
        **{key: document[key] for key in _TEXTS if key in document},
        **scalars,
        degrees=tuple(degrees),
        coefficients=coefficients,
        kappa=kappa,
        provenance=numbers.provenance,
    )


# Writing


def write_profile(profile: Profile, path: str | Path, *, force: bool = False) -> None:
    """Writes the profile as TOML, all of it or nothing.

    Raises ConfigError if the path exists and `force` is not set, or if it cannot be written.
    """
    path = Path(path)
    if path.exists() and not force:
        raise ConfigError(f"output is {str(path)!r}, which exists; accepted: a new path, or --force to replace it")
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(format_profile(profile), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(f"output is {str(path)!r} ({error.strerror}); accepted: a path that can be written") from None


def format_profile(profile: Profile) -> str:
    """The profile as TOML text; `parse_profile` of it gives an equal profile."""
    lines = ["# A Vertumnus profile. docs/profiles.md explains every key.", ""]
    lines += [f"{key} = {_quoted(getattr(profile, key))}" for key in _TEXTS if getattr(profile, key)]
    lines += [f"degrees = {list(profile.degrees)}", ""]
    open_table = ""
    for key, value in _numbers(profile):
        table, _, leaf = key.rpartition(".")
        if table != open_table:
            lines += ["", f"[{table}]"]
            open_table = table
        known = profile.provenance[key]
        note = f", note = {_quoted(known.note)}" if known.note else ""
        lines.append(f'{leaf} = {{ value = {_figure(value)}, source = "{known.source.value}"{note} }}')
    return "\n".join(lines) + "\n"


def _figure(value: _Number) -> str:
    """The shortest text that reads back as this number: 2.29e+11 rather than 229000000000.0."""
    if isinstance(value, int):
        return str(value)
    short = f"{value:g}"
    return short if float(short) == value else repr(float(value))


def _quoted(text: str) -> str:
    """A TOML basic string: JSON's escapes, except that TOML also wants U+007F escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
