"""A conversation to the prompt that the model was trained on, by the template in its folder."""

import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vertumnus.errors import ConfigError

__all__ = ["ChatTemplate", "ChatTemplateRefusal"]

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class ChatTemplateRefusal(Exception):
    """The template takes no such conversation; the message is its own, for the client."""


class ChatTemplate:
    """Rendered as transformers renders it: same sandbox, filters and functions, no automatic escaping."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Raises ConfigError where `source` is no template."""
        try:
            self._template = _compile(source)
        except TemplateError as error:
            raise ConfigError(f"chat template is broken ({error}); accepted: a Jinja template") from error
        self._special_tokens = dict(special_tokens or {})

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str]) -> "ChatTemplate | None":
        """chat_template.jinja, or what tokenizer_config.json says; None for a model without one."""
        config = _read_config(Path(folder) / "tokenizer_config.json")
        path = Path(folder) / "chat_template.jinja"
        source = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
        if isinstance(source, list):
            named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
            source = named.get("default")
        if source is None:
            return None
        if not isinstance(source, str):
            raise ConfigError("chat_template in tokenizer_config.json is no text; accepted: a Jinja template")
        return cls(
            source, {name: text for name in SPECIAL_TOKENS if (text := _token_text(config.get(name))) is not None}
        )

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] = MappingProxyType({})) -> str:
        """The prompt. `options`: what else the template may read, such as `add_generation_prompt`.

        Raises ChatTemplateRefusal where the template cannot make a prompt of it.
        """
        seen = {"tools": None, "documents": None, **self._special_tokens, **options, "messages": messages}
        try:
            return self._template.render(seen)
        except TemplateError as error:
            raise ChatTemplateRefusal(str(error)) from error
        except Exception as error:  # a template is a program of the model's makers: it can fail in any way
            raise ChatTemplateRefusal(f"the model's chat template failed on it ({type(error).__name__})") from error


def _compile(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path.name} cannot be read ({error}); accepted: a JSON object") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path.name} is no object; accepted: a JSON object")
    return found


def _token_text(token: Any) -> str | None:
    """A special token is written as its text, or as an object around it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
