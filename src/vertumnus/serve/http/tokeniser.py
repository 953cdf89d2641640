"""Text to tokens and back, from a model's folder, without ever holding up the event loop for long."""

import asyncio
import json
import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from vertumnus.errors import ConfigError
from vertumnus.serve.errors import Overloaded
from vertumnus.serve.http.chat_template import ChatTemplate
from vertumnus.serve.http.detokeniser import ByteDetokeniser, Detokeniser, WindowDetokeniser

__all__ = ["Tokeniser"]

# One text is one thread's work; and a process that forks after parallel use would be warned at, on standard error.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

MAX_INLINE_CHARS = 4096
"""About a millisecond of work: less than a thread's hand-over costs under load."""

MESSAGE_CHARS = 64
"""What a message costs to render besides its content, in characters to tokenise."""


class Tokeniser:
    """Stateless, and safe to use from several threads. `encode` runs long texts in `num_threads` threads of its own.

    `tokenizers` releases the interpreter while it encodes.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        chat_template: ChatTemplate | None = None,
        num_threads: int = 2,
        max_waiting: int = 256,
    ) -> None:
        self.chat_template = chat_template
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenise")
        self._num_waiting = 0
        self.max_waiting = max_waiting
        """Long texts that wait for a thread; more are refused."""
        described = json.loads(tokenizer.to_str())
        decoder = described.get("decoder") or {}
        self._is_byte_level = decoder.get("type") == "ByteLevel"
        self._special = {token["id"] for token in described.get("added_tokens", ()) if token["special"]}
        self._token_bytes = lru_cache(maxsize=1 << 16)(self._find_token_bytes)

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str], **options: Any) -> "Tokeniser":
        """Reads tokenizer.json, tokenizer_config.json and chat_template.jinja. ConfigError where that is impossible."""
        path = Path(folder) / "tokenizer.json"
        try:
            # Through Python: the library's own reader says nothing of what is wrong with a path.
            tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"tokenizer {str(path)!r} cannot be read ({error.strerror}); accepted: a file") from error
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(
                f"tokenizer {str(path)!r} is not understood ({error}); accepted: a tokenizer.json"
            ) from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(tokenizer, chat_template=ChatTemplate.from_folder(folder), **options)

    async def encode(self, text: str, *, has_special_tokens: bool) -> "array[int]":
        """Token ids, with what the model's post-processor puts around a text (a BOS) where `has_special_tokens`.

        Raises Overloaded, having done nothing, where too many long texts wait.
        """
        return await self._run(len(text), self._encode, text, has_special_tokens)

    async def encode_chat(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> "array[int]":
        """Token ids of the prompt that the chat template makes of them. Raises ChatTemplateRefusal, and as `encode`.

        The model must have a template.
        """
        num_chars = sum(MESSAGE_CHARS + len(message["content"]) for message in messages)
        return await self._run(num_chars, self._encode_chat, messages, options)

    async def _run(self, num_chars: int, work: Callable[..., "array[int]"], *arguments: Any) -> "array[int]":
        """Here where it is little work, else in a thread."""
        if num_chars <= MAX_INLINE_CHARS:
            return work(*arguments)
        if self._num_waiting >= self.max_waiting:
            raise Overloaded("too many long prompts are being tokenised", retry_after_s=1.0)
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)
        finally:
            self._num_waiting -= 1

    def encode_now(self, text: str, *, has_special_tokens: bool) -> "array[int]":
        """`encode` in the caller's thread."""
        return self._encode(text, has_special_tokens)

    def _encode_chat(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> "array[int]":
        assert self.chat_template is not None
        # The template writes the special tokens itself.
        return self._encode(self.chat_template.render(messages, options), False)

    def _encode(self, text: str, has_special_tokens: bool) -> "array[int]":
        # The fast variant finds no character offsets, which nobody asks for here.
        encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=has_special_tokens)[0]
        return array("I", encoding.ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def detokeniser(self) -> Detokeniser:
        """For one answer; leaves special tokens out."""
        if self._is_byte_level:
            return ByteDetokeniser(self._visible_bytes)
        return WindowDetokeniser(self.decode)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for, also of a special one; empty for an id without a token."""
        return self._token_bytes(token_id)

    def close(self) -> None:
        """Waits for nothing; texts that wait for a thread are given up."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _visible_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._special else self._token_bytes(token_id)

    def _find_token_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            try:
                return bytes(map(BYTE_OF_CHARACTER.__getitem__, token))
            except KeyError:  # an added token: its own text
                return str(token).encode()
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False)).encode()


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE's alphabet: bytes that print stand for themselves, the others for characters from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_of_character()
