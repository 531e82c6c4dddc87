"""Turns are appended to existing tokens, with the chat templates of public models."""

import copy
import json
import random
import re
from dataclasses import dataclass

import pytest

from interlace.core.errors import UserError
from interlace.core.messages import Message, ToolCall, ToolSpec
from interlace.rollouts.rendering.chat_template import Renderer
from interlace.rollouts.rendering.config import RendererConfig
from interlace.rollouts.rendering.load import check_renderer, create_renderer, find_parser, load_parser
from interlace.rollouts.rendering.parsers.base import MarkedText, read_argument
from interlace.run.recipe.load import load_recipe
from interlace.run.recipe.prompts import recipe_prompts
from tests.support.chat_templates import GIVEN, PLAIN_TEMPLATE, PUBLISHED, tokenizer_of
from tests.support.conversations import TOOLS, answers, calls, hermes, text, user

ALL = ("own", *PUBLISHED, *GIVEN)


def renderer_of(name: str, config: RendererConfig = RendererConfig()) -> Renderer:  # noqa: B008 - frozen
    return create_renderer(tokenizer_of(name), config)


@dataclass
class Count:
    turns: int = 0
    branches: int = 0
    """Turns that the proof said would begin a branch; the conversation ends there."""
    rendered_anew: int = 0
    """Turns whose context, rendered from its messages, does not begin with the tokens that were there."""


def sampled(renderer: Renderer, rng: random.Random) -> list[int]:
    """An answer as a model may draw it: spelled in any way, cut or ended."""
    tokenizer = renderer._tokenizer
    said = [] if renderer._opens_thought or rng.random() < 0.7 else ["<think>\n" + text(rng, 2) + "\n</think>\n\n"]
    if renderer._opens_thought:
        said.append(text(rng, 2) + "\n</think>\n\n")
    said.append(text(rng, 2))
    if rng.random() < 0.5:
        said.append(written(renderer, calls(rng), rng))
    ids: list[int] = list(tokenizer("".join(said), add_special_tokens=False)["input_ids"])
    stops = set(renderer.stop_token_ids)
    ids = [token for token in ids if token not in stops]
    if rng.random() < 0.3:  # drawn byte by byte, as no tokenizer would cut the same text
        ids = [token for one in ids for token in split_token(renderer, one, rng)]
    if rng.random() < 0.2:
        return ids[: rng.randrange(len(ids) + 1)] or [5]
    return [*ids, renderer.stop_token_ids[0]]


def written(renderer: Renderer, some: list[ToolCall], rng: random.Random) -> str:
    """Calls in the format of the renderer's parser, or in Hermes', which is text to some."""
    bodies = [(call.name, json.dumps(call.arguments)) for call in some]
    match type(renderer._parser).__name__:
        case "MistralParser":
            return "[TOOL_CALLS][" + ", ".join(f'{{"name": "{n}", "arguments": {a}}}' for n, a in bodies) + "]"
        case "DeepSeekParser":
            bar = "\uff5c"
            begin, sep, end = (f"<{bar}tool▁{name}{bar}>" for name in ("call▁begin", "sep", "call▁end"))
            inner = "".join(f"{begin}{n}{sep}{a}{end}" for n, a in bodies)
            return f"<{bar}tool▁calls▁begin{bar}>{inner}<{bar}tool▁calls▁end{bar}>"
    return hermes(some, rng)


def split_token(renderer: Renderer, token: int, rng: random.Random) -> list[int]:
    piece = renderer._text.decode([token])
    if len(piece) < 2 or token in renderer._text.tags.values() or rng.random() < 0.8:
        return [token]
    first = renderer._text._encode(piece[:1])
    return [*first, *renderer._text._encode(piece[1:])]


def converse(renderer: Renderer, rng: random.Random, count: Count) -> None:
    said = [Message(role="system", content=text(rng))] if rng.random() < 0.5 else []
    said.append(user(rng))
    tools = TOOLS if renderer.proof.has_tools else ()
    ids = renderer.render(said, tools)
    for _ in range(rng.randrange(1, 5)):
        drawn = sampled(renderer, rng)
        answer = renderer.parse(drawn, prompt_ids=ids, tools=tools)
        for size in rng.sample(range(len(drawn)), k=min(3, len(drawn))):
            so_far = renderer.begun(drawn[:size], tools=tools).content.rstrip("\ufffd")
            assert answer.content.startswith(so_far), "a client would have read what is no part of the answer"
        new = answers(answer, rng) or [user(rng)]
        before = [*ids, *drawn]
        after = renderer.extend(before, answer, new, tools)
        said += [answer, *new]
        count.turns += 1
        if after is None:
            assert not renderer.proof.may_append("tool" if answer.tool_calls else "user", branch_on_rewrite=False)
            count.branches += 1
            return
        assert after[: len(before)] == before, "earlier tokens were touched"
        assert len(after) > len(before)
        try:
            anew = renderer.render(said, tools)
        except UserError:  # such as several calls, which some templates refuse
            anew = []
        count.rendered_anew += anew[: len(before)] != before
        ids = after


def fuzz(name: str, conversations: int) -> Count:
    renderer, count = renderer_of(name), Count()
    for seed in range(conversations):
        converse(renderer, random.Random(f"{name} {seed}"), count)
    return count


@pytest.mark.parametrize("name", ALL)
def test_tokens_of_earlier_turns_are_never_touched(name: str) -> None:
    count = fuzz(name, 30)
    assert count.rendered_anew + count.branches > count.turns / 4, (
        "the fuzz has turns that writing the text again would break"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_ten_thousand_conversations(name: str) -> None:
    count = fuzz(name, 1000)
    print(f"{name}: {count.rendered_anew} of {count.turns} turns would have broken; {count.branches} branches")


@pytest.mark.parametrize("name", ALL)
def test_what_is_appended_is_what_the_template_writes(name: str) -> None:
    """Where a model spells as the tokenizer does, and nothing is rewritten, both ways give the same tokens."""
    renderer = renderer_of(name)
    tools = TOOLS if renderer.proof.has_tools else ()
    said = [Message(role="user", content="What is 12 plus 34?")]
    ids = renderer.render(said, tools)
    whole = renderer.render([*said, Message(role="assistant", content="A sum."), said[0]], tools)
    drawn = [*renderer._text.encode("A sum."), renderer._text.tags.get(renderer._closing, renderer.stop_token_ids[0])]
    appended = renderer.extend([*ids, *drawn], Message(role="assistant", content="A sum."), said, tools)
    if not renderer.proof.user.appends:
        assert appended is None and any("becomes a branch" in note for note in renderer.notes)
        return
    assert appended is not None
    if not renderer.proof.user.rewrites and renderer._closing:
        assert appended == whole
    assert renderer._text.decode(appended).endswith(renderer._text.decode(ids)[-20:])


def test_a_call_and_its_answer_are_written_as_the_template_writes_them() -> None:
    renderer = renderer_of("qwen2_5")
    said = [Message(role="user", content="What?")]
    ids = renderer.render(said, TOOLS)
    drawn = renderer._text.encode('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><|im_end|>')
    answer = renderer.parse(drawn, prompt_ids=ids, tools=TOOLS)
    new = [Message(role="tool", content="noon", tool_call_id=answer.tool_calls[0].id, name="now")]
    appended = renderer.extend([*ids, *drawn], answer, new, TOOLS)
    assert appended == renderer.render([*said, answer, *new], TOOLS)


def test_a_tag_that_was_typed_is_no_tag() -> None:
    renderer = renderer_of("qwen2_5")
    tags = renderer._text.tags
    plain = renderer.render([Message(role="user", content="x")])
    typed = renderer.render([Message(role="user", content="<|im_end|><tool_call>x\ue0003\ue001")])
    for tag in ("<|im_end|>", "<tool_call>"):
        assert typed.count(tags[tag]) == plain.count(tags[tag])
    assert "<|im_end|><tool_call>x\ue0003\ue001" in renderer._text.decode(typed)
    spelled = [*renderer._text._spelled("<tool_call>"), *renderer._text.encode('{"name": "now"}')]
    assert renderer.parse(spelled, tools=TOOLS).tool_calls == ()
    drawn = [tags["<tool_call>"], *renderer._text.encode('{"name": "now"}'), tags["</tool_call>"]]
    assert [call.name for call in renderer.parse(drawn, tools=TOOLS).tool_calls] == ["now"]


def test_a_turn_that_was_cut_is_closed() -> None:
    renderer = renderer_of("qwen3")
    ids = renderer.render([Message(role="user", content="x")])
    cut = renderer._text.encode("<think>\nthe sum")
    after = renderer.extend([*ids, *cut], renderer.parse(cut), [Message(role="user", content="go on")])
    assert after is not None
    added = renderer._text.decode(after[len(ids) + len(cut) :])
    assert added.startswith("\n</think>\n\n<|im_end|>\n<|im_start|>user\ngo on<|im_end|>")
    ended = [*cut, renderer.stop_token_ids[0]]
    after = renderer.extend([*ids, *ended], renderer.parse(ended), [Message(role="user", content="go on")])
    assert after is not None and renderer._text.decode(after[len(ids) + len(ended) :]).startswith("\n<|im_start|>user")


def test_a_stop_token_that_is_a_tag_of_calls_or_text_ends_no_answer() -> None:
    """The calls are read, and the template's end tag follows the token in the next context."""
    tokenizer = tokenizer_of("qwen3")
    plain = create_renderer(tokenizer, RendererConfig())
    word = plain._text.encode("sum")[-1]
    stops = (plain._text.tags["</tool_call>"], word)
    renderer = create_renderer(tokenizer, RendererConfig(), stops)
    ids = renderer.render([Message(role="user", content="x")], TOOLS)
    drawn = renderer._text.encode('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    answer = renderer.parse(drawn, prompt_ids=ids, tools=TOOLS)
    assert drawn[-1] == stops[0] and [(call.name, call.error) for call in answer.tool_calls] == [("now", "")]
    new = [Message(role="tool", content="noon", tool_call_id=answer.tool_calls[0].id, name="now")]
    assert renderer.extend([*ids, *drawn], answer, new, TOOLS) == plain.extend([*ids, *drawn], answer, new, TOOLS)
    assert renderer.parse(renderer._text.encode("the sum")).content == "the sum"


def test_where_the_text_of_a_turn_depends_on_its_history_each_turn_is_a_branch() -> None:
    counting = copy.deepcopy(tokenizer_of("own"))
    counting.chat_template = (
        "{% for message in messages %}<|im_start|>{{ messages | length }}{{ message.content }}<|im_end|>{% endfor %}"
    )
    renderer = create_renderer(counting, RendererConfig())
    assert not renderer.proof.user.appends
    assert any("becomes a branch" in note for note in renderer.notes)
    ids = renderer.render([Message(role="user", content="x")])
    assert (
        renderer.extend([*ids, 5], Message(role="assistant", content="y"), [Message(role="user", content="z")]) is None
    )


def test_a_template_that_rewrites_appends_or_branches_as_is_set() -> None:
    append, branch = renderer_of("qwen3"), renderer_of("qwen3", RendererConfig(on_rewrite="branch"))
    assert append.proof.user.rewrites and not renderer_of("qwen2_5").notes
    assert "stay as they were drawn" in append.notes[0] and "becomes a branch" in branch.notes[0]
    ids = append.render([Message(role="user", content="x")])
    answer, new = Message(role="assistant", content="y"), [Message(role="user", content="z")]
    assert append.extend([*ids, 5], answer, new) and branch.extend([*ids, 5], answer, new) is None


def test_a_message_of_the_user_after_results_of_tools_begins_a_branch_as_well() -> None:
    """The template removes thoughts of earlier turns at each message of a user, also if results come first."""
    append, branch = renderer_of("qwen3_5_think"), renderer_of("qwen3_5_think", RendererConfig(on_rewrite="branch"))
    ids = append.render([Message(role="user", content="x")], TOOLS)
    call = ToolCall(id="000000001", name="now", arguments={})
    answer = Message(role="assistant", content="", reasoning="hm", tool_calls=(call,))
    drawn = append.answer([Message(role="user", content="x")], answer, TOOLS)
    result, following = Message(role="tool", content="noon", tool_call_id=call.id), Message(role="user", content="y")
    assert branch.extend([*ids, *drawn], answer, [result], TOOLS)
    assert append.extend([*ids, *drawn], answer, [result, following], TOOLS)
    assert branch.extend([*ids, *drawn], answer, [result, following], TOOLS) is None


def test_a_later_conversation_with_the_same_tools_is_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer, texts = renderer_of("qwen3"), list[str]()
    render = renderer.text
    monkeypatch.setattr(renderer, "text", lambda *args: texts.append(render(*args)) or texts[-1])  # type: ignore[func-returns-value]
    for content in ("first", "second"):
        renderer.render([Message(role="user", content=content)], TOOLS)
    assert sum("second" in text for text in texts) == 1


def test_tools_may_stand_in_the_prompt_where_a_template_has_none() -> None:
    without = copy.deepcopy(tokenizer_of("own"))
    without.chat_template = PLAIN_TEMPLATE
    ignorant = create_renderer(without, RendererConfig())
    assert not ignorant.proof.has_tools
    with pytest.raises(UserError, match=r"would not know search, now.* Set renderer\.tools=prompt"):
        ignorant.render([Message(role="user", content="What do you know about research?")], TOOLS)
    renderer = create_renderer(without, RendererConfig(tools="prompt"))
    assert renderer.proof.has_tools and renderer.proof.tool.appends and not renderer.notes
    ids = renderer.render([Message(role="user", content="x")], TOOLS)
    assert '"name": "search"' in renderer._text.decode(ids)
    answer = Message(
        role="assistant", content="", tool_calls=(ToolCall(id="a", name="now"), ToolCall(id="b", name="now"))
    )
    new = [Message(role="tool", content=each, tool_call_id=each, name="now") for each in "ab"]
    after = renderer.extend([*ids, renderer.stop_token_ids[0]], answer, new, TOOLS)
    assert after is not None
    assert renderer._text.decode(after[len(ids) + 1 :]).startswith(
        "\n<|im_start|>user\n<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response><|im_end|>"
    )


@pytest.mark.parametrize("name", ["llama3_1", "qwen3_5_think", "deepseekv3"])
def test_calls_are_read_in_the_format_that_the_prompt_asks_for(name: str) -> None:
    """Not in the format of the chat template, whose tools the setting replaces."""
    renderer = renderer_of(name, RendererConfig(tools="prompt"))
    ids = renderer.render([Message(role="user", content="x")], TOOLS)
    said = ("hm</think>" if renderer._opens_thought else "") + "So "
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    drawn = renderer._text.encode(said + call)
    answer = renderer.parse([*drawn, renderer.stop_token_ids[0]], prompt_ids=ids, tools=TOOLS)
    assert answer.content == "So" and [(call.name, call.error) for call in answer.tool_calls] == [("now", "")]


def test_parsers_are_found_by_the_template() -> None:
    kinds = {name: type(renderer_of(name)._parser).__name__ for name in PUBLISHED}
    assert kinds["qwen2_5"] == "HermesParser" and kinds["qwen3"] == "Qwen3Parser"
    assert kinds["qwen3_5_think"] == "Qwen3CoderParser" and kinds["llama3_1"] == "Llama3Parser"
    assert kinds["deepseekv3"] == "DeepSeekParser"
    assert type(find_parser("{{ '[TOOL_CALLS]' }}")).__name__ == "MistralParser"
    assert type(find_parser("nothing")).__name__ == "HermesParser"
    with pytest.raises(UserError, match=r"renderer.parser: unknown parser 'herms'. Did you mean 'hermes'"):
        check_renderer(RendererConfig(parser="herms"))


@pytest.mark.parametrize("name", ["glm4moe", "lfm2_v2"])
def test_a_template_whose_calls_no_parser_reads_is_refused_for_tools(name: str) -> None:
    """Otherwise each call would be text, and a run would train a model that never calls a tool."""
    assert all(renderer_of(each).proof.reads_calls for each in ("own", "qwen2_5", "qwen3_5_think", "llama3_1"))
    assert "does not read the calls" in renderer_of(name).notes[0]
    with pytest.raises(UserError, match=r"'tools' has tools, and no built-in parser reads .* Set renderer.parser"):
        recipe_prompts(load_recipe("calculator"), tokenizer_of(name))
    set_by_hand = load_recipe("calculator", ["renderer.parser=hermes"])
    assert recipe_prompts(set_by_hand, tokenizer_of(name)).train


CALLS = [
    (
        "mistral",
        'So [TOOL_CALLS][{"name": "now", "arguments": {}, "id": "abcdefghi"}, '
        '{"name": "search", "arguments": {"limit": 2}}]',
    ),
    ("mistral", 'So [TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]search[ARGS]{"limit": 2}'),
    ("deepseek", '<think>hm</think>So BEGINCALLnowSEP{}ENDCALLsearchSEP{"limit": 2}ENDSTOP'),
    (
        "deepseek",
        'So BEGINCALLfunctionSEPnow\n```json\n{}\n```END\nCALLfunctionSEPsearch\n```json\n{"limit": 2}\n```ENDSTOP',
    ),
]


@pytest.mark.parametrize(("name", "said"), CALLS)
def test_calls_are_read_in_the_formats_of_mistral_and_deepseek(name: str, said: str) -> None:
    names = {"BEGIN": "calls▁begin", "STOP": "calls▁end", "CALL": "call▁begin", "SEP": "sep", "END": "call▁end"}
    words = re.compile("|".join(names))
    if name == "deepseek":
        said = words.sub(lambda found: f"<\uff5ctool▁{names[found[0]]}\uff5c>", said)
    parser = load_parser(name)
    found = parser.parse(MarkedText(text=said, marks={}), TOOLS)
    assert [(call.name, call.arguments, call.error) for call in found.calls] == [
        ("now", {}, ""),
        ("search", {"limit": 2}, ""),
    ]
    assert found.content == "So" and found.reasoning == ("hm" if "hm" in said else None)
    cut = parser.parse(MarkedText(text=said[: said.index("limit")], marks={}), TOOLS)
    assert cut.calls[-1].error and cut.content == "So"
    for size in range(len(said)):
        begun = parser.begun(MarkedText(text=said[:size], marks={}), TOOLS)
        assert "So".startswith(begun.content) and not begun.calls


def test_a_template_that_refuses_says_so() -> None:
    tool = ToolSpec(name="now")
    odd = [
        Message(role="user", content="x"),
        Message(role="assistant", content="", tool_calls=(ToolCall(name="a"),) * 2),
    ]
    with pytest.raises(UserError, match=r"cannot be applied to messages of user, assistant: .*single tool-calls"):
        renderer_of("llama3_1").render(odd, (tool,))


def test_variables_of_a_chat_template_come_from_the_settings_and_from_a_turn() -> None:
    tokenizer = copy.deepcopy(tokenizer_of("own"))
    tokenizer.chat_template += "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    plain = create_renderer(tokenizer, RendererConfig())
    off = create_renderer(tokenizer, RendererConfig(chat_template_kwargs={"enable_thinking": False}))
    asked = [Message(role="user", content="hi")]
    assert plain.variant({"enable_thinking": False}).render(asked) == off.render(asked) != plain.render(asked)
    assert off.variant({"enable_thinking": True}).render(asked) == plain.render(asked)
    assert off.variant({"enable_thinking": False}) is off and plain.variant({"a": 1}) is plain.variant({"a": 1})
    with pytest.raises(UserError, match="add_generation_prompt is set by the conversation"):
        plain.variant({"add_generation_prompt": False})


@pytest.mark.parametrize(
    ("written", "schema", "value"),
    [
        ('["a"]', {"anyOf": [{"type": "array"}, {"type": "null"}]}, ["a"]),
        ("null", {"anyOf": [{"type": "array"}, {"type": "null"}]}, None),
        ('{"x": 1}', {"$ref": "#/$defs/Place"}, {"x": 1}),
        ('{"x": 1}', {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]}, {"x": 1}),
        ("12", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "12"),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("12", {"type": ["integer", "null"]}, 12),
        ("True", {"oneOf": [{"type": "boolean"}]}, True),
        ("2", {"enum": [1, 2]}, 2),
        ("2", {"enum": ["1", "2"]}, "2"),
        ("null", {"type": "string"}, "null"),
        ("[1", {"type": "array"}, "[1"),
        ("5", {"$ref": "#/$defs/Loop"}, "5"),
        ("5", {}, "5"),
    ],
)
def test_an_argument_of_bare_text_is_read_by_all_that_its_schema_allows(
    written: str, schema: dict[str, object], value: object
) -> None:
    definitions = {"Place": {"type": "object"}, "Loop": {"$ref": "#/$defs/Loop"}}
    assert read_argument(written, schema, definitions) == value
