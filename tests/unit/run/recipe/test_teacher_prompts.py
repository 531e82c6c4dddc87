"""The context of a teacher is checked on every row."""

import json
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

from interlace.core.errors import UserError
from interlace.models.loading import load_tokenizer
from interlace.models.tiny import build_tokenizer
from interlace.run.recipe.load import load_recipe
from interlace.run.recipe.prompts import (
    check_context,
    prompt_reader,
    recipe_prompts,
    styles_by_source,
    text_reader,
    writes_space,
)
from tests.support.tokenizers import spacing_tokenizer


def test_a_later_row_without_the_column_is_found(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1", "answer": "2", "hint": "3"}\n{"prompt": "4", "answer": "5"}\n')
    changes = [f"task={path}", "reference.model=null", "reference.context='{hint}'"]
    recipe = load_recipe("distill", changes)
    with pytest.raises(UserError, match="has no column"):
        check_context(recipe, recipe_prompts(recipe).train, load_tokenizer(recipe.model))


def test_the_teacher_reads_the_context_within_the_prompt_of_the_policy(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "7 + 5 =", "answer": "12"}\n')
    changes = [f"task={path}", "reference.model=null", "reference.context='It is {answer}. '"]

    plain = build_tokenizer(256)
    plain.add_special_tokens({"bos_token": "<bos>"})
    start = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", plain.bos_token_id)])
    plain.backend_tokenizer.post_processor = start
    chat = build_tokenizer(256, chat=True)
    chat.chat_template += "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    off = ["model=tiny:micro-chat", "renderer.chat_template_kwargs={enable_thinking: false}"]
    for tokenizer, further in ((plain, []), (chat, off)):
        recipe = load_recipe("distill", [*changes, *further])
        [prompt] = recipe_prompts(recipe, tokenizer).train
        read = prompt_reader(recipe, tokenizer)
        assert read is not None
        whole = tokenizer.decode(prompt.token_ids)
        assert whole.startswith("<bos>") or whole.endswith("<think></think>")
        assert tokenizer.decode(read(prompt).token_ids) == whole.replace("7 + 5", "It is 12. 7 + 5")


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_a_plain_prompt_continues_its_context_without_a_space_of_the_tokenizer(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "7+5=", "answer": "12"}\n')
    tokenizer = spacing_tokenizer(kind)
    recipe = load_recipe("distill", [f"task={path}", "reference.model=null", "reference.context='Hint:'"])
    [prompt] = recipe_prompts(recipe, tokenizer).train
    read = prompt_reader(recipe, tokenizer)
    assert read is not None
    assert read(prompt).token_ids.tolist() == tokenizer("Hint:7+5=", add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(("answer", "expected"), [(" ' + m.content", True), ("' + m.content", False), (None, False)])
def test_a_space_of_the_chat_template_before_answers_is_found(answer: str | None, expected: bool) -> None:
    tokenizer = build_tokenizer(256)
    if answer is not None:
        tokenizer.chat_template = (
            "{% for m in messages %}{{ '[' + m.content + ']' if m.role == 'user' else '" + answer + " }}{% endfor %}"
        )
    assert writes_space(tokenizer) is expected


def test_the_teacher_reads_the_tools_of_a_row_and_the_variables_of_the_template(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    path.write_text(json.dumps({"prompt": "7 + 5 =", "answer": "12", "tools": [tool]}) + "\n")
    tokenizer = build_tokenizer(256, chat=True)
    tokenizer.chat_template = "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}" + str(
        tokenizer.chat_template
    )
    changes = [f"task={path}", "model=tiny:micro-chat", "reference.model=null", "reference.context='It is {answer}. '"]
    recipe = load_recipe("distill", changes)
    [prompt] = recipe_prompts(recipe, tokenizer).train
    whole = tokenizer.decode(prompt.token_ids)
    read = prompt_reader(recipe, tokenizer)
    assert read is not None and whole.startswith("add;")
    assert tokenizer.decode(read(prompt).token_ids) == whole.replace("7 + 5", "It is 12. 7 + 5")
    tokenizer.chat_template += "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    other = text_reader(tokenizer, {"enable_thinking": False})
    assert tokenizer.decode(other(prompt).token_ids) == whole + "<think></think>"


def test_a_teacher_reads_the_system_message_of_a_prompt_without_a_chat_template(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "7+5=", "answer": "12"}\n')
    system = "task.format.system=Be brief."
    plain = load_recipe("distill", [f"task={path}", "reference.model=null", "reference.context='Hint:'", system])
    for tokenizer in (spacing_tokenizer("t5"), build_tokenizer(256)):
        [prompt] = recipe_prompts(plain, tokenizer).train
        read = prompt_reader(plain, tokenizer)
        assert read is not None
        assert "Hint:Be brief." in tokenizer.decode(read(prompt).token_ids)

    teacher = build_tokenizer(256)
    chat = load_recipe("distill", [f"task={path}", "reference.model=null", system, "model=tiny:micro-chat"])
    for recipe, tokenizer in ((plain, teacher), (chat, build_tokenizer(256, chat=True))):
        [prompt] = recipe_prompts(recipe, tokenizer).train
        other = text_reader(teacher, style_of=styles_by_source(recipe))
        assert teacher.decode(other(prompt).token_ids) == "Be brief.\n\n7+5="
