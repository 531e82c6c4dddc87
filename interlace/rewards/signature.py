"""Calls of a reward function with the arguments that its signature names.

A function of one response may name any of `prompt`, `response`, `answer`, `metadata`, `messages`, `completion_ids` and
the columns of its row. A function that names `completions` (TRL) scores a batch: each of its arguments is a list with
one value for each sample. verl's names `solution_str`, `ground_truth`, `extra_info` and `data_source` are known too.
"""

import inspect
import json
from collections import ChainMap, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from interlace.core.callables import unwrap_partial
from interlace.core.errors import UserError, nearest
from interlace.core.tasks import is_cancelled
from interlace.core.types import JSON

SINGLE = ("prompt", "response", "answer", "metadata", "messages", "completion_ids")
"""Arguments of a function of one response; a column of the row is one too."""
BATCHED = ("prompts", "completions", "responses", "completion_ids")
"""Arguments of a function of a batch; a list of the values of a column is one too."""
MARKS_A_BATCH = frozenset({"prompts", "completions", "responses"})
"""Names that request a batch."""
OF_ONE_RESPONSE = frozenset({"prompt", "response", "completion", "solution_str"})
"""Names that no function of a batch has."""
DATA_SOURCE = "data_source"
"""verl's name for the data set of a row: its column, or the name of the file or data set."""
OF_A_TRAINER = ("trainer_state", "log_extra", "log_metric", "trainer", "args")
"""Arguments that TRL's trainer passes and a run does not have."""
ANSWER, GROUND_TRUTH = "answer", "ground_truth"
"""The answer of a row, and verl's name for it."""
CHAT = "messages"
"""Column of a chat's messages in the metadata of its row."""

AnyFunction: TypeAlias = Callable[..., Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreRequest:
    """Inputs of a reward function for one sample."""

    prompt: str
    response: str
    answer: str
    """The answer as text; empty if the row has none. A function gets it with the type of its column, and as text if it
    declares the argument as `str`."""
    metadata: Mapping[str, JSON]
    messages: tuple[Mapping[str, JSON], ...] = ()
    """Conversation of the prompt; empty if the function does not name it."""
    completion_ids: tuple[int, ...] = ()
    """Tokens of the response; empty if the function does not name them."""
    source: str = ""
    """Name of the data set."""
    is_chat: bool = False
    """True if the author of the row wrote a chat."""

    @property
    def columns(self) -> dict[str, JSON]:
        """Returns the columns of the row by name, the prompt and the answer included."""
        return {"prompt": self.prompt, **self.given_answer, **self.metadata}

    @property
    def given_answer(self) -> dict[str, JSON]:
        """Returns the answer by its name, with the type of its column; empty if the row has none."""
        if ANSWER in self.metadata:  # a number, or another column of this name
            return {ANSWER: self.metadata[ANSWER]}
        return {ANSWER: self.answer} if self.answer else {}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RewardCall:
    """A reward function and its arguments."""

    function: AnyFunction
    name: str
    """Name that the user gave the function."""
    signature: inspect.Signature
    required: tuple[str, ...] = ()
    """Arguments without a default."""
    optional: tuple[str, ...] = ()
    """Arguments with a default, which is used if the row has no such column."""
    takes_any: bool = False
    """True if the function has `**kwargs`, which receive all other arguments and columns."""
    is_batched: bool = False
    is_async: bool = False

    def names(self, argument: str) -> bool:
        return self.takes_any or self._has_parameter(argument)

    def _has_parameter(self, argument: str) -> bool:
        return argument in self.required or argument in self.optional

    @property
    def has_own_total(self) -> bool:
        """Returns whether the function has verl's form: in a mapping that it returns, `score` is the reward."""
        return self._has_parameter("solution_str")

    def missing(self, request: ScoreRequest) -> str | None:
        """Returns the first required argument that a row cannot provide; None if it provides all."""
        given = self._batch_arguments([request]) if self.is_batched else self._make_arguments(request)
        has = given.by_name()
        lacks_answer = not request.given_answer
        for name in self.required:
            is_answer = name == "answer" or (name == "ground_truth" and name not in request.metadata)
            if name not in has or (is_answer and lacks_answer):
                return name
        return None

    async def scores(self, requests: Sequence[ScoreRequest]) -> list[Any]:
        """Returns the function's value for each request; the exception in place of a value that it raised."""
        if self.is_batched:
            found: dict[int, Any] = {}
            for places in self._group_by_columns(requests):
                values = await self._score_batch([requests[place] for place in places])
                found.update(zip(places, values, strict=True))
            return [found[place] for place in range(len(requests))]
        return [await self._score_one(request) for request in requests]

    def _group_by_columns(self, requests: Sequence[ScoreRequest]) -> Iterable[Sequence[int]]:
        """Returns the places of the requests of each call: a column that one row lacks is still passed for the others.

        The answer always counts as named, because it may be passed as `ground_truth`.
        """
        places: dict[frozenset[str], list[int]] = {}
        for place, request in enumerate(requests):
            named = frozenset(name for name in request.columns if name == "answer" or self.names(name))
            places.setdefault(named, []).append(place)
        return places.values()

    async def _score_one(self, request: ScoreRequest) -> Any:
        try:
            return await self._call_function(self._make_arguments(request))
        except BaseException as error:  # code of a response may run here and exit, or raise Ctrl-C's
            if is_cancelled():
                raise
            return error

    async def _score_batch(self, requests: Sequence[ScoreRequest]) -> list[Any]:
        try:
            values = await self._call_function(self._batch_arguments(requests))
            return self._one_value_each(values, len(requests))
        except RewardTypeError as error:
            return [error] * len(requests)
        except BaseException as error:  # as above
            if is_cancelled():
                raise  # a time limit ended the call: the function is not called again
            if len(requests) == 1:
                return [error]
            # Only the sample that the function cannot score fails.
            return [value for request in requests for value in await self._score_batch([request])]

    def _one_value_each(self, values: Any, count: int) -> list[Any]:
        if hasattr(values, "tolist"):  # an array or a tensor
            values = values.tolist()
        if not isinstance(values, Sequence) or isinstance(values, str | bytes | bytearray):
            raise RewardTypeError(
                f"the reward function returned {values!r:.80}: {self.name} scores a batch, so it must return a list "
                f"of {count} numbers"
            )
        if len(values) != count:
            raise RewardTypeError(
                f"the reward function returned {len(values)} numbers for {count} responses: {self.name} must return "
                "one for each"
            )
        return list(values)

    async def _call_function(self, given: "_Arguments") -> Any:
        bound = inspect.BoundArguments(self.signature, OrderedDict(self._choose_arguments(given)))
        found = self.function(*bound.args, **bound.kwargs)
        return await found if inspect.isawaitable(found) else found

    def _choose_arguments(self, given: "_Arguments") -> dict[str, Any]:
        """Returns the arguments of a call in the order of the signature."""
        found: dict[str, Any] = {}
        by_name = given.by_name()
        for parameter in self.signature.parameters.values():
            if parameter.kind == parameter.VAR_KEYWORD:
                _, taken = unwrap_partial(self.function)
                taken |= {*self.required, *self.optional}
                found[parameter.name] = {name: value for name, value in given.values.items() if name not in taken}
            elif self._has_parameter(parameter.name) and parameter.name in by_name:
                value = by_name[parameter.name]
                found[parameter.name] = _write_answer(value) if _is_text_answer(parameter) else value
        return found

    def _make_arguments(self, request: ScoreRequest) -> "_Arguments":
        """Returns every argument that a function of one response may name."""
        values: dict[str, Any] = {
            **request.metadata,
            "prompt": request.prompt,
            "response": request.response,
            "metadata": request.metadata,
            "messages": list(request.messages),
            "completion_ids": list(request.completion_ids),
            **request.given_answer,
        }
        response: dict[str, Any] = dict.fromkeys(("completion", "solution_str"), request.response)
        return _Arguments(values=values, response=response, fallbacks=self._make_fallbacks(request))

    def _make_fallbacks(self, request: ScoreRequest) -> dict[str, Any]:
        """Returns arguments for which the row may have a column; an empty answer only if the function needs one."""
        found: dict[str, Any] = {"extra_info": request.metadata, DATA_SOURCE: request.source}
        for name in (ANSWER, GROUND_TRUTH):
            if request.given_answer or name in self.required:
                found[name] = request.given_answer.get(ANSWER, request.answer)
        return found

    def _batch_arguments(self, requests: Sequence[ScoreRequest]) -> "_Arguments":
        """Returns every argument that a function of a batch may name: lists with one value for each request."""
        rows = [{**request.metadata, **request.given_answer} for request in requests]
        others = [self._make_fallbacks(request) for request in requests]
        completions = [
            [{"role": "assistant", "content": request.response}] if request.is_chat else request.response
            for request in requests
        ]
        values = {
            **_collect_columns(rows),
            "prompts": [list(request.messages) if request.is_chat else request.prompt for request in requests],
            "completions": completions,
            "completion_ids": [list(request.completion_ids) for request in requests],
        }
        if not self.takes_any:
            values["metadata"] = [request.metadata for request in requests]
        responses = {"responses": [request.response for request in requests]}
        return _Arguments(values=values, response=responses, fallbacks=_collect_columns(others))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Arguments:
    """Values of the arguments of a call by name."""

    values: dict[str, Any]
    """Values that `**kwargs` receives too."""
    response: dict[str, Any]
    """Other names of the response, which come before a column."""
    fallbacks: dict[str, Any]
    """Values of names that are not a column of the row."""

    def by_name(self) -> Mapping[str, object]:
        """Returns all values."""
        return ChainMap(self.response, self.values, self.fallbacks)


def _is_text_answer(parameter: inspect.Parameter) -> bool:
    """Returns whether an argument is the answer, declared as text or as a list of texts."""
    declared = parameter.annotation
    name = declared if isinstance(declared, str) else str(getattr(declared, "__name__", ""))
    is_text = name == "str" or str(declared).endswith("[str]")
    return parameter.name in (ANSWER, GROUND_TRUTH) and is_text


def _write_answer(value: Any) -> Any:
    """Returns numbers and truth values as text, written as in JSON; of a list, each of its values."""
    if isinstance(value, list):
        return [_write_answer(each) for each in value]
    return json.dumps(value) if isinstance(value, bool | int | float) else value


def _collect_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Returns the values of each name that all rows have."""
    return {name: [row[name] for row in rows] for name in rows[0] if all(name in row for row in rows)}


class RewardTypeError(UserError):
    """A reward function returned a value that is not a reward: the same mistake for every sample."""


def reward_call(function: object, name: str = "") -> RewardCall:
    """Returns how a function, an object with `score`, or a class of such objects is called.

    name: the name that the user gave it; by default its own. Raises UserError for a signature that no call can satisfy.
    """
    found = _callable_of(function, name or name_of_function(function))
    name = name or name_of_function(function)
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        raise UserError(
            f"reward {name!r} has no signature that Python can read, so its arguments have no names. Wrap it: "
            "def reward(response, answer): ..."
        ) from None
    call = RewardCall(function=found, name=name, signature=signature, is_async=is_async(found))
    return _with_arguments(call)


def _with_arguments(call: RewardCall) -> RewardCall:
    _, fixed = unwrap_partial(call.function)  # a row's column does not replace an argument of a partial
    kinds = list(call.signature.parameters.values())
    named = [each for each in kinds if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    free = [each for each in named if each.name not in fixed]
    call = replace(
        call,
        required=tuple(each.name for each in free if each.default is each.empty),
        optional=tuple(each.name for each in free if each.default is not each.empty),
        takes_any=any(each.kind == each.VAR_KEYWORD for each in kinds),
        is_batched=any(each.name in MARKS_A_BATCH for each in free),
    )
    _refuse_impossible(call)
    return call


def _refuse_impossible(call: RewardCall) -> None:
    """Raises UserError for a signature that no row can satisfy."""
    owner, _, method = call.name.rpartition(".")
    if owner and call.required[:1] == ("self",) and inspect.isfunction(call.function):
        raise UserError(
            f"reward {call.name!r} is a method of the class {owner}, without an object. Make one and give its method: "
            f"{owner}(...).{method}."
        )
    if foreign := next((name for name in call.required if name in OF_A_TRAINER), None):
        raise UserError(
            f"reward {call.name!r} has the argument {foreign!r}, which only TRL's trainer passes. Remove it or give it "
            f"a default. {list_accepted_names(call)}"
        )
    one = [name for name in call.required if name in OF_ONE_RESPONSE]
    if call.is_batched and one:
        raise UserError(
            f"reward {call.name!r} names {one[0]!r}, which is one response's, and "
            f"{next(name for name in (*call.required, *call.optional) if name in MARKS_A_BATCH)!r}, which is a "
            f"batch's. Use one kind: {', '.join(SINGLE)}, or {', '.join(BATCHED)}."
        )
    annotation = call.signature.return_annotation
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    is_list = text.lower().removeprefix("typing.").startswith(("list", "tuple", "sequence"))
    if annotation is None or text in ("None", "NoneType", "str", "bytes") or (is_list and not call.is_batched):
        wanted = "a list with one number for each response" if call.is_batched else "a number, a bool or a dict of them"
        batch = " A function of a batch names `completions`." if is_list else ""
        raise UserError(f"reward {call.name!r} is declared to return {text}: a reward is {wanted}.{batch}")


def list_accepted_names(call: RewardCall, columns: Sequence[str] = ()) -> str:
    """Returns a sentence with the arguments that a reward function may have."""
    names = BATCHED if call.is_batched else SINGLE
    found = f", which are {', '.join(columns)}" if columns else ""
    return f"A reward function may name {', '.join(names)}, and columns of the row{found}."


def check_row(call: RewardCall, request: ScoreRequest, place: str) -> None:
    """Raises UserError if a row lacks a column that a reward function names. place: of the row, for the message."""
    name = call.missing(request)
    if name is None:
        return
    columns = list(request.columns)
    wanted = "answer" if name == "ground_truth" else name
    empty = ", or an empty one" if wanted == "answer" else ""
    usual = [name for name in ("solution", "ground_truth", "target", "label", "reward_model") if name in columns]
    if wanted == "answer" and usual:
        path = "reward_model.ground_truth" if usual[0] == "reward_model" else usual[0]
        hint = f" Set task.columns.answer={path}."
    else:
        hint = nearest(name, columns) if name != "answer" else ""
    raise UserError(
        f"{place} has no {wanted!r}{empty}, which reward {call.name!r} names; its columns are {', '.join(columns)}."
        f"{hint} {list_accepted_names(call)}"
    )


def is_async(function: object) -> bool:
    """Returns whether calls of a function, or of the function in a partial, are awaited."""
    inner, _ = unwrap_partial(function)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)


def name_of_function(function: object) -> str:
    """Returns the name of a function for messages: its own, the name of the function in a partial, or of its class."""
    inner, _ = unwrap_partial(function)
    return str(getattr(inner, "__qualname__", "") or type(inner).__name__).replace("<locals>.", "")


def _callable_of(function: object, name: str) -> AnyFunction:
    if inspect.isclass(function):
        try:
            needed = [
                each.name
                for each in inspect.signature(function).parameters.values()
                if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
            ]
        except (TypeError, ValueError):
            needed = []
        if needed:
            raise UserError(
                f"reward {name!r} is a class, and an object of it needs {', '.join(needed)}: make the object and give "
                f"it, {name}(...)."
            )
        try:
            function = function()
        except Exception as error:
            raise UserError(f"reward {name!r} is a class, and no object of it can be made: {error!r:.200}") from error
    if callable(function):
        return function
    score = getattr(function, "score", None)
    if callable(score):
        found: AnyFunction = score
        return found
    raise UserError(
        f"reward {name!r} is a {type(function).__name__}, not something that can be called: give a function, an object "
        "with a method `score`, or the name of a built-in."
    )
