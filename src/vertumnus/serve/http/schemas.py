"""The bodies that clients send, as they are parsed and as /openapi.json shows them.

Fields that OpenAI's API has and this one does not act on are either harmless (accepted, like every unknown field) or
would change the answer: those may only say what changes nothing.
"""

from typing import Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "CompositionRequest",
    "DrainRequest",
    "PauseRequest",
    "neutral_values",
    "prompt_schemas",
]

MAX_MESSAGES = 8192
MAX_STOP_TOKENS = 64


def prompt_schemas(vocab_size: int) -> list[dict[str, Any]]:
    """The forms that a prompt can have."""
    text = {"type": "string", "minLength": 1}
    token_id = {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}
    token_ids = {"type": "array", "items": token_id, "minItems": 1}
    return [
        text,
        token_ids,
        *({"type": "array", "items": one, "minItems": 1, "maxItems": 1} for one in (text, token_ids)),
    ]


Prompt = Annotated[
    Any,  # a list of token ids is far quicker taken as it is and checked at once than integer by integer
    WithJsonSchema({"anyOf": prompt_schemas(1 << 32)}),
    Field(description="Text or token ids; a list of several prompts is refused."),
]

_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
Message = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "required": ["role", "content"],
            "properties": {
                "role": {"type": "string", "minLength": 1},
                "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART, "minItems": 1}]},
            },
        }
    ),
]

StopStringList = Annotated[list[str], Field(fail_fast=True)]
Int64 = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]


def _must_be(*values: Any) -> Any:
    """A field that is not acted on and may only say what changes nothing; see `neutral_values`."""
    return Field(default=None, description="Not supported.", json_schema_extra={"enum": [None, *values]})


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None


class _Request(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy; 1 where absent.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, description="Extension; 0 and -1 mean all.")
    seed: Int64 | None = None
    stop: str | StopStringList | None = None
    stop_token_ids: Annotated[list[Int64], Field(fail_fast=True, max_length=MAX_STOP_TOKENS)] | None = Field(
        None, description="Extension: further tokens that end the answer."
    )
    ignore_eos: bool | None = Field(None, description="Extension: the model's own stop tokens do not end the answer.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    n: Any = _must_be(1)
    best_of: Any = _must_be(1)
    frequency_penalty: Any = _must_be(0)
    presence_penalty: Any = _must_be(0)
    repetition_penalty: Any = _must_be(1)
    logit_bias: Any = _must_be({})
    min_p: Any = _must_be(0)
    min_tokens: Any = _must_be(0)
    use_beam_search: Any = _must_be(False)
    prompt_logprobs: Any = _must_be()
    guided_json: Any = _must_be()
    guided_regex: Any = _must_be()
    guided_choice: Any = _must_be()
    guided_grammar: Any = _must_be()
    structured_outputs: Any = _must_be()
    response_format: Any = _must_be({"type": "text"})


class CompletionRequest(_Request):
    """`POST /v1/completions`."""

    prompt: Prompt
    logprobs: int | None = Field(None, ge=0, description="Alternatives to show for each token.")
    echo: Any = _must_be(False)
    suffix: Any = _must_be("")


class ChatRequest(_Request):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, description="Needs `logprobs`.")
    add_generation_prompt: bool | None = Field(None, description="Extension; true where absent.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Extension: what the model's chat template may read besides."
    )
    tools: Any = _must_be([])
    tool_choice: Any = _must_be("none", "auto")
    functions: Any = _must_be([])
    function_call: Any = _must_be("none", "auto")
    modalities: Any = _must_be(["text"])
    audio: Any = _must_be()
    reasoning_effort: Any = _must_be()
    verbosity: Any = _must_be()
    web_search_options: Any = _must_be()
    continue_final_message: Any = _must_be(False)
    chat_template: Any = _must_be()
    documents: Any = _must_be([])


def neutral_values(model: type[BaseModel]) -> dict[str, tuple[Any, ...]]:
    """What each field that is not acted on may say besides null."""
    extras = {name: field.json_schema_extra for name, field in model.model_fields.items()}
    return {name: tuple(cast(Any, extra)["enum"][1:]) for name, extra in extras.items() if extra is not None}


class CompositionRequest(BaseModel):
    """`POST /admin/composition`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    composition: str = Field(min_length=1, max_length=256, examples=["1x2,2x1"])


class DrainRequest(BaseModel):
    """`POST /admin/drain`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    worker_id: int | None = Field(None, ge=0, lt=1 << 63, description="Absent: the whole pool.")


class ResumeRequest(BaseModel):
    """`POST /admin/resume`: an empty object."""

    model_config = ConfigDict(strict=True, extra="forbid")


class PauseRequest(BaseModel):
    """`POST /admin/pause-controller`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    paused: bool
