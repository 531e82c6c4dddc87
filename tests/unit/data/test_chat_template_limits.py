"""Malicious chat templates are refused in time; ordinary ones give the same text as transformers."""

import time

import pytest

from interlace.data import chat_template_limits
from interlace.data.chat_template_limits import ChatTemplateError, render_chat
from interlace.models.tiny import build_tokenizer

MESSAGES = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "100000 {x:100000} %d?"},
    {"role": "assistant", "content": "a", "reasoning_content": "why"},
    {"role": "user", "content": "b"},
]
BOMBS = [
    "{{ 'x' * 10**10 }}",
    "{{ 10**10 * 'x' }}",
    "{% for a in range(10**9) %}{% endfor %}",
    "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
    "{% for a in 'x' * 1000 %}{% for b in 'x' * 1000 %}{% for c in 'x' * 1000 %}{% endfor %}{% endfor %}{% endfor %}",
    "{{ 10 ** (10**10) }}",
    "{% set n = namespace(x=3) %}{% for i in range(100) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "{% set n = namespace(x='x') %}{% for i in range(100) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='x') %}{% for i in range(100) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x='x') %}{% for i in range(100) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "{% set n = namespace(x='xxxx') %}{% for i in range(9) %}{% set n.x = n.x.replace('x', n.x) %}{% endfor %}",
    "{{ 'x'|center(10000000000) }}",
    "{{ 'x'.ljust(10000000000) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '{:10000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10000000000) }}",
    "{{ ('x' * 9999999)|list|join('x' * 99999) }}",
    "{{ ('x' * 99999).join(('x' * 9999999)|list) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ ''.__class__.__mro__ }}{{ cycler.__init__.__globals__ }}",
]
HONEST = [
    "{% for message in messages %}{{ '<' + message['role'] + '>' ~ message.content | trim }}\n{% endfor %}",
    "{%- set ns = namespace(n=0) %}{%- for m in messages[::-1] %}{%- set ns.n = ns.n + loop.index0 %}"
    "{%- if loop.last %}{{ ns.n % 7 }}{% endif %}{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
    "{% macro say(m, tail='!') %}[{{ m.role.upper() }}]{{ m.content.split(' ')[-1] }}{{ tail }}{% endmacro %}"
    "{% for m in messages %}{{ say(m, tail='?' * 3) }}{% endfor %}{% if add_generation_prompt %}go{% endif %}",
    "{% for m in messages %}{% generation %}{{ m | tojson(indent=2) }}{% endgeneration %}{% endfor %}",
    "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}"
    "{{ messages | map(attribute='role') | join(', ') }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages | last }}",
    "{% macro wrap() %}<{{ caller(1) }}>{% endmacro %}{% call(x) wrap() %}{{ x }}{% endcall %}{{ eos_token }}",
    "{{ dict(a=1) }}{{ '%s %5d' % ('a', 3) }}"
    "{{ '{} {:>5}'.format('a', 3) }}{{ [1, 2] + [messages[0].role] }}{{ 2 ** 3 }}",
    "{% for m in messages if m.role != 'system' %}{{ loop.length }}{{ loop.nextitem.role if loop.nextitem }}"
    "{{ m.content.replace('b', 'cc').strip() }}{% else %}none{% endfor %}{{ m is defined }}{{ ('a', 'b')[1] }}",
]


@pytest.mark.parametrize("template", BOMBS)
def test_a_bomb_is_refused_in_time(template: str) -> None:
    tokenizer = build_tokenizer(64, chat=True)
    tokenizer.chat_template = template
    start = time.process_time()
    with pytest.raises(ChatTemplateError):
        render_chat(tokenizer, MESSAGES, add_generation_prompt=True)
    assert time.process_time() - start < 6


@pytest.mark.parametrize("template", HONEST)
def test_an_honest_template_writes_what_transformers_writes(template: str) -> None:
    tokenizer = build_tokenizer(64, chat=True)
    tokenizer.chat_template = template
    whole = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert render_chat(tokenizer, MESSAGES, add_generation_prompt=True) == whole


def test_time_in_which_a_rendering_waits_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine other processes take the time."""

    class Waiting(str):
        def strip(self, *_: object) -> str:
            time.sleep(0.3)
            return str(self)

    monkeypatch.setattr(chat_template_limits, "MAX_SECONDS", 0.2)
    tokenizer = build_tokenizer(64, chat=True)
    tokenizer.chat_template = "{{ messages[0].content.strip() }}{{ messages[0].content ~ '!' }}"
    messages = [{"role": "user", "content": Waiting("a")}]
    assert render_chat(tokenizer, messages, add_generation_prompt=False) == "aa!"
