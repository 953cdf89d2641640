"""Dataclasses to plain values that msgpack carries, and back: one packer and one unpacker per annotation.

Unpacking checks every field against its annotation, so that what a handler gets has the types that it declares.
Whole numbers in a row (token ids, slots) travel as little-endian int32 bytes.
"""

import dataclasses
import sys
from array import array
from collections import abc
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from vertumnus.engine.errors import WireError

_T = TypeVar("_T")
Packer = Callable[[Any], Any]
Unpacker = Callable[[Any, str], Any]
_SCALARS: dict[Any, tuple[type, ...]] = {int: (int,), str: (str,), bytes: (bytes,), bool: (bool,), float: (float, int)}


@cache
def packer(kind: Any) -> Packer:
    """What makes plain values of those that are annotated as `kind`."""
    if dataclasses.is_dataclass(kind):
        assert isinstance(kind, type)
        packers = {name: packer(hint) for name, hint in _hints(kind).items()}
        return lambda value: {name: pack(getattr(value, name)) for name, pack in packers.items()}
    if kind is float:
        return float
    if kind in _SCALARS:
        return lambda value: value
    if isinstance(kind, type) and issubclass(kind, Enum):
        return lambda value: value.value
    if (item := _optional(kind)) is not None:
        pack = packer(item)
        return lambda value: None if value is None else pack(value)
    items = get_args(kind)
    if _is_row(kind):
        if items[0] is int:
            return _int32_bytes
        pack = packer(items[0])
        return lambda value: [pack(each) for each in value]
    assert get_origin(kind) is tuple
    pack_each = [packer(item) for item in items]
    return lambda value: [pack(each) for pack, each in zip(pack_each, value, strict=True)]


@cache
def unpacker(kind: Any) -> Unpacker:
    """What makes them of plain values again; it is called with the value and what to call it in a WireError."""
    if dataclasses.is_dataclass(kind):
        assert isinstance(kind, type)
        return _dataclass_unpacker(kind)
    if kind in _SCALARS:
        return _scalar_unpacker(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _enum_unpacker(kind)
    if (item := _optional(kind)) is not None:
        unpack = unpacker(item)
        return lambda value, path: None if value is None else unpack(value, path)
    return _sequence_unpacker(kind)


def from_plain(kind: type[_T], value: object, name: str) -> _T:
    """A dataclass from the plain values that it travels as. Raises WireError; `name` is what it calls the value."""
    try:
        annotation: Any = kind
        found: _T = unpacker(annotation)(value, name)
    except ValueError as error:  # what the dataclass itself does not accept
        raise WireError(f"{name}: {error}") from error
    return found


def shown(value: object) -> str:
    """A value in an error message, cut short."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _dataclass_unpacker(kind: type[Any]) -> Unpacker:
    unpackers = {name: unpacker(hint) for name, hint in _hints(kind).items()}

    def unpack(value: Any, path: str) -> Any:
        if not isinstance(value, dict) or value.keys() != unpackers.keys():
            raise WireError(f"{path} has other fields than {', '.join(unpackers) or 'none'}")
        return kind(**{name: unpack(value[name], f"{path}.{name}") for name, unpack in unpackers.items()})

    return unpack


def _scalar_unpacker(kind: type) -> Unpacker:
    accepted = _SCALARS[kind]

    def unpack(value: Any, path: str) -> Any:
        if type(value) not in accepted:
            raise WireError(f"{path} is {shown(value)}; accepted: {kind.__name__}")
        return kind(value)

    return unpack


def _enum_unpacker(kind: type[Enum]) -> Unpacker:
    by_value = {member.value: member for member in kind}

    def unpack(value: Any, path: str) -> Any:
        if not isinstance(value, str) or value not in by_value:
            raise WireError(f"{path} is {shown(value)}; accepted: {', '.join(by_value)}")
        return by_value[value]

    return unpack


def _sequence_unpacker(kind: Any) -> Unpacker:
    items = get_args(kind)
    if not _is_row(kind):
        unpack_each = [unpacker(item) for item in items]

        def unpack_fixed(value: Any, path: str) -> Any:
            if not isinstance(value, list) or len(value) != len(unpack_each):
                raise WireError(f"{path} is {shown(value)}; accepted: {len(unpack_each)} values")
            return tuple(unpack(each, path) for unpack, each in zip(unpack_each, value, strict=True))

        return unpack_fixed
    if items[0] is int:
        return _int32_row
    unpack = unpacker(items[0])

    def unpack_row(value: Any, path: str) -> Any:
        if not isinstance(value, list):
            raise WireError(f"{path} is {shown(value)}; accepted: a list")
        return tuple(unpack(each, f"{path}[{place}]") for place, each in enumerate(value))

    return unpack_row


def _hints(kind: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _optional(kind: Any) -> Any:
    """X of X | None."""
    if get_origin(kind) not in (UnionType, Union):
        return None
    (item,) = [each for each in get_args(kind) if each is not NoneType]
    return item


def _is_row(kind: Any) -> bool:
    """Any number of values of one type."""
    return get_origin(kind) is abc.Sequence or (get_origin(kind) is tuple and get_args(kind)[-1] is Ellipsis)


def _int32_bytes(values: Sequence[int]) -> bytes:
    row = array("i", values)
    assert row.itemsize == 4
    if sys.byteorder == "big":
        row.byteswap()
    return row.tobytes()


def _int32_row(value: Any, path: str) -> tuple[int, ...]:
    if not isinstance(value, bytes) or len(value) % 4:
        raise WireError(f"{path} is {shown(value)}; accepted: int32 bytes")
    row = array("i")
    row.frombytes(value)
    if sys.byteorder == "big":
        row.byteswap()
    return tuple(row)
