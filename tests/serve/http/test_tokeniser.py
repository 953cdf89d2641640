"""Tokens and prompts are those of transformers; long texts wait elsewhere."""

import asyncio
import json
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tests.serve.http.servers import model_folder, tokeniser

from vertumnus.errors import ConfigError
from vertumnus.serve.errors import Overloaded
from vertumnus.serve.http.chat_template import ChatTemplate, ChatTemplateRefusal
from vertumnus.serve.http.tokeniser import MAX_INLINE_CHARS, Tokeniser


@pytest.fixture(scope="module")
def reference():
    return transformers.AutoTokenizer.from_pretrained(model_folder(), local_files_only=True)


@given(text=st.text(max_size=80))
def test_tokens_are_those_of_transformers(reference, text):
    assert list(tokeniser().encode_now(text, has_special_tokens=True)) == reference(text).input_ids
    plain = reference(text, add_special_tokens=False).input_ids
    assert list(tokeniser().encode_now(text, has_special_tokens=False)) == plain


MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text(max_size=20)}),
    min_size=1,
    max_size=4,
)


@given(messages=MESSAGES, add_generation_prompt=st.booleans())
def test_prompt_of_a_chat_is_that_of_transformers(reference, messages, add_generation_prompt):
    template = tokeniser().chat_template
    expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    assert template.render(messages, {"add_generation_prompt": add_generation_prompt}) == expected


WIDE_TEMPLATE = """
{%- set ns = namespace(n=0) %}
{{- bos_token }}{% for m in messages %}
    {%- if m.role == 'skip' %}{% continue %}{% endif %}
    {%- if m.role == 'bad' %}{{ raise_exception('no ' + m.role + ' here') }}{% endif %}
    {%- set ns.n = ns.n + 1 %}
  {{ m | tojson }} {{ m | tojson(indent=2) }} {{ m.content | trim }} {{ m.get('name', '-') }} {{ ns.n }}
{% endfor %}{% if thinking is defined and thinking %}<think>{% endif %}{{ eos_token }} <&> {{ strftime_now('%Y') }}
{%- if tools is none %} no tools{% endif %}
"""


def test_wide_template_is_rendered_as_transformers_does(reference):
    messages = [
        {"role": "user", "content": " <b>hi</b> & 'you' é ", "name": "me"},
        {"role": "skip", "content": ""},
        {"role": "user", "content": "2"},
    ]
    expected = reference.apply_chat_template(
        messages, chat_template=WIDE_TEMPLATE, tokenize=False, thinking=True, add_generation_prompt=True
    )
    special = {"bos_token": reference.bos_token, "eos_token": reference.eos_token}
    template = ChatTemplate(WIDE_TEMPLATE, special)
    assert template.render(messages, {"thinking": True, "add_generation_prompt": True}) == expected
    assert "<think>" not in template.render(messages)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (WIDE_TEMPLATE, "no bad here"),
        ("{{ messages[0].nothing.at_all }}", "no attribute"),
        ("{{ messages[0].content + 5 }}", "TypeError"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_template_that_takes_no_such_conversation_says_why(source, said):
    with pytest.raises(ChatTemplateRefusal, match=said):
        ChatTemplate(source, {"bos_token": ""}).render([{"role": "bad", "content": "x"}])


def test_template_is_found_where_models_keep_it(tmp_path):
    assert ChatTemplate.from_folder(tmp_path) is None
    config = {"eos_token": {"content": "</s>"}, "bos_token": None}
    write = lambda extra: (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | extra))  # noqa: E731
    write({"chat_template": "one {{ eos_token }}{{ bos_token }}"})
    assert ChatTemplate.from_folder(tmp_path).render([]) == "one </s>"
    write({"chat_template": [{"name": "tool", "template": "t"}, {"name": "default", "template": "two"}]})
    assert ChatTemplate.from_folder(tmp_path).render([]) == "two"
    (tmp_path / "chat_template.jinja").write_text("three")
    assert ChatTemplate.from_folder(tmp_path).render([]) == "three"


@pytest.mark.parametrize("content", ["{% if %}", None])
def test_broken_files_are_refused_by_name(tmp_path, content):
    with pytest.raises(ConfigError, match=r"tokenizer\.json.*accepted"):
        Tokeniser.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json.*accepted"):
        Tokeniser.from_folder(tmp_path)
    if content is None:
        (tmp_path / "tokenizer_config.json").write_text("[1]")
    else:
        (tmp_path / "chat_template.jinja").write_text(content)
    with pytest.raises(ConfigError, match="accepted"):
        ChatTemplate.from_folder(tmp_path)


def test_loop_goes_on_while_a_long_text_is_tokenised():
    """Turns of the loop are counted, not seconds: a loop that is held up has none."""
    text = "The capital of France is Paris, and 東京 is large. " * 8000

    async def run():
        encoding = asyncio.ensure_future(tokeniser().encode(text, has_special_tokens=True))
        num_turns = 0
        while not encoding.done():
            num_turns += 1
            await asyncio.sleep(0)
        return num_turns, encoding.result()

    num_turns, token_ids = asyncio.run(run())
    assert len(token_ids) > 100_000
    assert num_turns > 50


def test_texts_beyond_the_bound_are_refused_and_short_ones_are_not():
    busy = Tokeniser(tokeniser()._tokenizer, num_threads=1, max_waiting=2)
    text = "word " * MAX_INLINE_CHARS

    async def run():
        waiting = [asyncio.ensure_future(busy.encode(text, has_special_tokens=True)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await busy.encode(text, has_special_tokens=True)
        assert len(await busy.encode("short", has_special_tokens=True)) > 0
        first, second = await asyncio.gather(*waiting)
        assert first == second
        assert len(await busy.encode(text, has_special_tokens=True)) == len(first)

    asyncio.run(run())
    busy.close()
