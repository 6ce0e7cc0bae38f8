"""The JSON bodies of the HTTP interface, as OpenAI defines them, with what coldpage adds.

Requests are checked here and nowhere later. A field that would change the answer and is not
supported is refused: nobody gets other text than was asked for. One that nobody knows is reported
(see ``unread_fields``) and else ignored, as clients send what other servers understand.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from coldpage.engine.messages import ChatMessage, SamplingParams

__all__ = [
    "AssistantMessage",
    "ChatChoice",
    "ChatChunk",
    "ChatCompletion",
    "ChatRequest",
    "ChatTurn",
    "ChunkChoice",
    "ChunkDelta",
    "Completion",
    "CompletionChoice",
    "CompletionRequest",
    "ErrorBody",
    "ErrorDetail",
    "GenerationRequest",
    "Health",
    "ModelCard",
    "ModelList",
    "PromptTokensDetails",
    "StreamOptions",
    "TokensByTier",
    "UsageReport",
]

_MAX_STOP_STRINGS: Final = 4
_MAX_NAME_CHARS: Final = 256
# OpenAI's default for this older endpoint; chat has none and runs to the end of the context.
_COMPLETION_MAX_TOKENS: Final = 16
_MAX_INT32: Final = 2**31 - 1


def _refuse(sentence: str) -> PydanticCustomError:
    # pydantic takes the sentence for a template: a brace in it must not be read as a field.
    return PydanticCustomError("refused", "{sentence}", {"sentence": sentence})


def _text_of_content(content: object) -> object:
    if content is None:
        return ""
    if not isinstance(content, list):
        return content
    texts: list[str] = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            raise _refuse(f"only parts of type 'text' are supported, not {kind!r}")
        if not isinstance(part.get("text"), str):
            raise _refuse("a part of type 'text' needs a string 'text'")
        texts.append(part["text"])
    return "\n".join(texts)


def _is_token_id(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_INT32


def _require_encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _refuse("the text holds a lone surrogate, which is no Unicode character") from None
    return text


def _one_prompt(prompt: object) -> str | tuple[int, ...]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        if not prompt:
            raise _refuse("the prompt is empty")
        return _require_encodable(prompt)
    if isinstance(prompt, list) and prompt and all(_is_token_id(token) for token in prompt):
        return tuple(prompt)
    if isinstance(prompt, list) and len(prompt) > 1 and all(type(p) is not int for p in prompt):
        raise _refuse("one prompt a request is supported; send one request for each")
    raise _refuse("the prompt must be a string or a non-empty list of token ids")


def _stop_strings(stop: object) -> tuple[str, ...]:
    strings = [stop] if isinstance(stop, str) else stop
    if strings is None:
        return ()
    if not isinstance(strings, list) or not all(isinstance(s, str) and s for s in strings):
        raise _refuse("must be a non-empty string or a list of non-empty strings")
    if len(strings) > _MAX_STOP_STRINGS:
        raise _refuse(f"at most {_MAX_STOP_STRINGS} stop strings are supported")
    return tuple(_require_encodable(string) for string in strings)


def _only(*allowed: object, sentence: str) -> AfterValidator:
    def check(value: Any) -> Any:
        if value not in allowed:
            raise _refuse(sentence)
        return value

    return AfterValidator(check)


def _plain_text_format(response_format: dict[str, Any] | None) -> dict[str, Any] | None:
    if response_format is not None and response_format.get("type") != "text":
        raise _refuse("only the response format 'text' is supported")
    return response_format


_Text = Annotated[
    str,
    BeforeValidator(_text_of_content, json_schema_input_type=str | list[dict[str, Any]] | None),
    AfterValidator(_require_encodable),
]
_Prompt = Annotated[
    str | tuple[int, ...],
    PlainValidator(
        _one_prompt, json_schema_input_type=str | list[int] | list[str] | list[list[int]]
    ),
]
_StopStrings = Annotated[
    tuple[str, ...],
    PlainValidator(_stop_strings, json_schema_input_type=str | list[str] | None),
]
_Name = Annotated[str, Field(min_length=1, max_length=_MAX_NAME_CHARS)]
_Penalty = Annotated[float | None, _only(None, 0, sentence="penalties are not supported")]
_Tools = Annotated[list[Any] | None, _only(None, [], sentence="tools are not supported")]
_ToolChoice = Annotated[Any, _only(None, "none", "auto", sentence="tools are not supported")]
# OpenAI's, which change no answer, or only that of other models.
_WITHOUT_EFFECT: Final = frozenset(
    {
        *("metadata", "parallel_tool_calls", "prediction", "prompt_cache_key", "reasoning_effort"),
        *("prompt_cache_retention", "safety_identifier", "service_tier", "store", "user"),
        "verbosity",
    }
)


class StreamOptions(BaseModel):
    """What a streamed answer carries besides text."""

    include_usage: bool = False


class GenerationRequest(BaseModel):
    """What both generating endpoints take. Three fields are coldpage's own: see the README."""

    model_config = ConfigDict(frozen=True, extra="allow")

    model: _Name | None = None
    max_tokens: int | None = Field(None, ge=1, le=_MAX_INT32)
    temperature: float | None = Field(None, ge=0.0, le=2.0, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0.0, le=1.0, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1, le=_MAX_INT32, description="0 or -1: all tokens")
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: _StopStrings = ()
    ignore_eos: bool = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    session: _Name | None = Field(None, description="a name for the conversation; never needed")
    cache_salt: _Name | None = Field(None, description="share cached prefixes only under this salt")
    retain: bool = Field(False, description="keep the cache of this conversation before others'")
    n: Annotated[int | None, _only(None, 1, sentence="only n = 1 is supported")] = None
    presence_penalty: _Penalty = None
    frequency_penalty: _Penalty = None
    repetition_penalty: Annotated[
        float | None, _only(None, 1, sentence="penalties are not supported")
    ] = None
    logit_bias: Annotated[
        dict[str, Any] | None, _only(None, {}, sentence="a bias of tokens is not supported")
    ] = None
    min_p: Annotated[float | None, _only(None, 0, sentence="min_p is not supported")] = None
    min_tokens: Annotated[int | None, _only(None, 0, sentence="min_tokens is not supported")] = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise _refuse("stream_options is only allowed when stream is true")
        return self

    def sampling(self, max_tokens: int | None) -> SamplingParams:
        """The sampling parameters, with OpenAI's defaults where the request is silent."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            seed=self.seed,
            stop=self.stop,
            ignore_eos=self.ignore_eos,
        )

    @property
    def unread_fields(self) -> tuple[str, ...]:
        """Names of fields that have a value and that nobody here knows."""
        sent = self.model_extra or {}
        return tuple(n for n, v in sent.items() if v is not None and n not in _WITHOUT_EFFECT)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatTurn(BaseModel):
    """One message of a conversation; content parts of type ``text`` are joined by line breaks."""

    model_config = ConfigDict(frozen=True)

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: _Text = ""
    tool_calls: _Tools = None
    function_call: Annotated[Any, _only(None, sentence="tools are not supported")] = None


class ChatRequest(GenerationRequest):
    """The body of ``POST /v1/chat/completions``."""

    messages: list[ChatTurn] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=_MAX_INT32)
    logprobs: Annotated[
        bool | None, _only(None, False, sentence="log probabilities are not supported")
    ] = None
    top_logprobs: Annotated[
        int | None, _only(None, 0, sentence="log probabilities are not supported")
    ] = None
    tools: _Tools = None
    functions: _Tools = None
    tool_choice: _ToolChoice = None
    function_call: _ToolChoice = None
    modalities: Annotated[
        list[str] | None, _only(None, ["text"], sentence="only the modality 'text' is supported")
    ] = None
    response_format: Annotated[dict[str, Any] | None, AfterValidator(_plain_text_format)] = None

    @property
    def chat_messages(self) -> tuple[ChatMessage, ...]:
        """The conversation; ``developer`` is the newer name of ``system``."""
        return tuple(
            ChatMessage("system" if turn.role == "developer" else turn.role, turn.content)
            for turn in self.messages
        )

    @property
    def sampling_params(self) -> SamplingParams:
        """How to choose tokens; without a limit the answer may fill the context."""
        return self.sampling(self.max_completion_tokens or self.max_tokens)


class CompletionRequest(GenerationRequest):
    """The body of ``POST /v1/completions``: one prompt, as text or as token ids."""

    prompt: _Prompt
    logprobs: Annotated[int | None, _only(None, sentence="log probabilities are not supported")] = (
        None
    )
    echo: Annotated[bool | None, _only(None, False, sentence="echo is not supported")] = None
    suffix: Annotated[str | None, _only(None, "", sentence="a suffix is not supported")] = None
    best_of: Annotated[int | None, _only(None, 1, sentence="only best_of = 1 is supported")] = None

    @property
    def sampling_params(self) -> SamplingParams:
        """How to choose tokens; without a limit 16 tokens, as OpenAI has it."""
        return self.sampling(self.max_tokens or _COMPLETION_MAX_TOKENS)


class TokensByTier(BaseModel):
    """Reused prompt tokens, by the tier that held them."""

    hot: int = 0
    host: int = 0
    disk: int = 0


class PromptTokensDetails(BaseModel):
    """How much of the prompt was not computed again."""

    cached_tokens: int
    cached_tokens_by_tier: TokensByTier


class UsageReport(BaseModel):
    """Token counts of one answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class AssistantMessage(BaseModel):
    """The answer."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    """The only choice of an answer."""

    index: int
    message: AssistantMessage
    logprobs: None
    finish_reason: str


class ChatCompletion(BaseModel):
    """The answer of ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReport


class ChunkDelta(BaseModel):
    """What a chunk adds to the message."""

    role: Literal["assistant"] = "assistant"
    content: str = ""


class ChunkChoice(BaseModel):
    """The only choice of a chunk."""

    index: int
    delta: ChunkDelta
    logprobs: None
    finish_reason: str | None


class ChatChunk(BaseModel):
    """One event of a streamed chat answer; ``usage`` appears only where it was asked for."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsageReport | None = None


class CompletionChoice(BaseModel):
    """The only choice of a completion, or of an event of a streamed one."""

    index: int
    text: str
    logprobs: None
    finish_reason: str | None


class Completion(BaseModel):
    """The answer of ``/v1/completions``, and one event of a streamed one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageReport | None = None


class ModelCard(BaseModel):
    """A served model; the last two fields are coldpage's own."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    context_tokens: int
    dtype: str


class ModelList(BaseModel):
    """The answer of ``GET /v1/models``."""

    object: Literal["list"]
    data: list[ModelCard]


class Health(BaseModel):
    """The answer of ``GET /health``."""

    status: Literal["loading", "ready", "stopping", "down"]
    detail: str


class ErrorDetail(BaseModel):
    """One sentence, and what programs branch on."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every error, as OpenAI shapes it."""

    error: ErrorDetail
