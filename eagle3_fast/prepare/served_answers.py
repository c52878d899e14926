"""A server (vLLM, SGLang, any that speaks OpenAI's chat completions) lets the verifier answer, many prompts at once.

Every turn is one request. What the server refuses for a prompt's own sake is left out and counted. A server that is gone, or that
refuses one prompt after another, ends the run in one line; answers that are still in flight then are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from eagle3_fast.config import RunConfig
from eagle3_fast.endpoint import Endpoint, EndpointError, in_flight
from eagle3_fast.log import say_once
from eagle3_fast.prepare.answers import Chat, Prompt, Reply, Row, converse

CHAT_COMPLETIONS = "/v1/chat/completions"
OF_ONE_PROMPT = (200, 400, 413, 422)  # statuses of answers that tell of the prompt, not of the server
REFUSALS_IN_A_ROW = 16  # so many are no fault of the prompts


def _whole_letters(text: str) -> str:
    text.encode()  # half a surrogate pair is a ValueError
    return text


_Text = Annotated[str, AfterValidator(_whole_letters)]
_Ids = list[Annotated[int, Field(ge=0)]]


class _Message(BaseModel):
    content: _Text | None = None
    reasoning_content: _Text | None = None
    reasoning: _Text | None = None  # newer vLLM


class _Choice(BaseModel):
    message: _Message
    finish_reason: str
    token_ids: _Ids | None = None
    prompt_token_ids: _Ids | None = None  # SGLang


class _Usage(BaseModel):
    completion_tokens: int = 0


class _Completion(BaseModel):
    """The part of a chat completion that is read here."""

    choices: list[_Choice] = Field(min_length=1, max_length=1)
    prompt_token_ids: _Ids | None = None  # vLLM
    usage: _Usage | None = None


class ServedAnswerer:
    """Asks `endpoint` for the replies of `model`; `parameters` are those of every request."""

    def __init__(self, endpoint: Endpoint, model: str, config: RunConfig) -> None:
        section = config.regenerate
        self.endpoint = endpoint
        self.concurrency = section.concurrency
        self.parameters: dict[str, Any] = {
            "model": model,
            "max_tokens": section.max_new_tokens,
            "temperature": section.temperature,
            "top_p": section.top_p,
            "return_token_ids": True,
            **section.sampling_params,
        }

    @staticmethod
    def settings(config: RunConfig) -> dict[str, Any]:
        """Of the model, by its name, and sampling; which server has it does not matter."""
        decisive = {"max_new_tokens", "temperature", "top_p", "sampling_params"}
        return {"model": config.train.verifier.verifier_name_or_path, **config.regenerate.model_dump(include=decisive)}

    @classmethod
    def load(cls, config: RunConfig) -> ServedAnswerer:
        """Raises EndpointError when the server does not answer or serves another model than the verifier."""
        section = config.regenerate
        assert section.endpoint is not None
        endpoint = Endpoint(section.endpoint, section.request_timeout, section.max_retries)
        return cls(endpoint, endpoint.served_model(config.train.verifier.verifier_name_or_path), config)

    def answers(self, prompts: list[Prompt], answered: set[int]) -> Iterator[tuple[list[Row], int]]:
        """Rows as they come. A refusal counts once the server has answered another prompt, now or in an earlier run.

        Raises EndpointError when the server is gone or answers nothing.
        """
        any_answer = bool(answered)
        refused: list[Row] = []
        error: EndpointError | None = None
        unanswered = iter([prompt for prompt in prompts if prompt.id not in answered])
        for prompt, future in in_flight(
            lambda prompt: converse([prompt], self.reply), unanswered, self.concurrency, _of_one_prompt
        ):
            outcome = future.exception()
            if isinstance(outcome, EndpointError):
                error = outcome
                say_once(f"left out: {outcome}")
                refused.append({"id": prompt.id, "messages": [], "finish_reason": "refused by the server"})
                if len(refused) >= REFUSALS_IN_A_ROW:
                    raise EndpointError(f"{len(refused)} prompts in a row were refused; the last: {outcome}", outcome.status)
            else:
                rows, tokens = future.result()
                yield [*refused, *rows], tokens
                refused, any_answer = [], True
        if error is not None and not any_answer:
            raise error
        if refused:
            yield refused, 0

    def reply(self, chats: list[Chat]) -> list[Reply]:
        """One reply to each chat. Raises EndpointError."""
        return [self._ask(chat) for chat in chats]

    def _ask(self, chat: Chat) -> Reply:
        try:
            answer = self.endpoint.post(CHAT_COMPLETIONS, {**self.parameters, "messages": chat})
        except EndpointError as error:
            if error.status == 400 and "context length" in str(error).lower():  # vLLM and SGLang both say it so
                return Reply("", "prompt too long", 0)
            raise
        try:
            return _reply(_Completion.model_validate(answer))
        except ValidationError as error:
            first = error.errors()[0]
            where = f"{self.endpoint.url}{CHAT_COMPLETIONS}"
            what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise EndpointError(f"{where}: its answer is no chat completion ({what})", 200) from None


def _of_one_prompt(error: BaseException) -> bool:
    return isinstance(error, EndpointError) and error.status in OF_ONE_PROMPT


def _reply(completion: _Completion) -> Reply:
    (choice,) = completion.choices
    text, reasoning = choice.message.content or "", choice.message.reasoning or choice.message.reasoning_content or ""
    prompt_ids, reply_ids = completion.prompt_token_ids or choice.prompt_token_ids, choice.token_ids
    if not (prompt_ids and reply_ids):
        say_once("the server gives no token ids with its answers; `prepare` will make them with the chat template")
    tokens = completion.usage.completion_tokens if completion.usage else len(reply_ids or ())
    reason = choice.finish_reason if (text + reasoning).strip() else "empty reply"
    return Reply(text, reason, tokens, reasoning, prompt_ids, reply_ids)
