"""OpenAI's own client against POST /v1/completions."""

import pytest

from tests.serve.serving import held, serving, wait_for

openai = pytest.importorskip("openai", reason="pip install openai")


@pytest.fixture(scope="module")
def clients(models):
    with serving(models) as (http, server):
        yield openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0), http, server


def test_a_completion_is_what_generate_writes(clients):
    client, http, _ = clients
    for model, prompt in (("pairs", "say 3"), ("texts", "say"), ("puzzle", "_ _ a _")):
        given = {"model": model, "prompt": prompt, "temperature": 1.0, "seed": 5}
        plain = http.post("/v1/generate", json={**given, "policy": "margin", "steps": 3}).json()
        found = client.completions.create(**given, extra_body={"policy": "margin", "steps": 3})
        assert found.object == "text_completion"
        assert found.choices[0].text == plain["text"]
        assert found.model == model
        assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens
        assert found.usage.prompt_tokens == {"pairs": 5, "texts": 3, "puzzle": 1}[model]
        *chunks, end = client.completions.create(
            **given, stream=True, stream_options={"include_usage": True}, extra_body={"policy": "margin", "steps": 3}
        )
        assert "".join(chunk.choices[0].text for chunk in chunks) == plain["text"]
        assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].choices[0].finish_reason == found.choices[0].finish_reason
        assert end.usage == found.usage
    assert [model.id for model in client.models.list()] == ["pairs", "texts", "puzzle"]


def test_a_stream_comes_from_left_to_right_before_the_end(clients):
    client, _, _ = clients
    chunks = client.completions.create(
        model="texts", prompt="say", stream=True, extra_body={"policy": "left-to-right", "steps": 17}
    )
    texts = [chunk.choices[0].text for chunk in chunks]
    assert len(texts) > 4
    assert all(texts[:-1])
    masked_again = client.completions.create(model="texts", prompt="say", stream=True, extra_body={"policy": "p2"})
    assert len(list(masked_again)) == 1, "what may still change was sent"


def test_a_completion_ends_where_it_is_told_to(clients):
    client, _, _ = clients
    given = {
        "model": "texts",
        "prompt": "say",
        "seed": 1,
        "temperature": 1.0,
        "extra_body": {"policy": "left-to-right", "steps": 17},
    }
    whole = client.completions.create(**given)
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("length", 17)
    assert client.completions.create(**given, max_tokens=4).usage.completion_tokens == 4
    text = whole.choices[0].text
    place = next(n for n in range(2, len(text) - 2) if text[n].isascii() and text[n] not in text[:n])
    for stop in (text[place], [text[place : place + 2], "never there"]):
        cut = client.completions.create(**given, stop=stop)
        assert (cut.choices[0].text, cut.choices[0].finish_reason) == (text[:place], "stop")
        chunks = list(client.completions.create(**given, stop=stop, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == text[:place]
    pair = {"model": "pairs", "prompt": "say 3", "extra_body": {"policy": "margin"}}
    full = client.completions.create(**pair)
    assert full.choices[0].finish_reason == "stop"
    short = client.completions.create(**pair, max_tokens=1)
    assert full.choices[0].text.startswith(short.choices[0].text.rstrip("\ufffd"))


def test_errors_are_those_that_the_client_knows(clients, models, monkeypatch):
    client, _, _ = clients
    with pytest.raises(openai.NotFoundError, match="choose from pairs, texts, puzzle"):
        client.completions.create(model="gpt-3.5-turbo-instruct", prompt="a")
    with pytest.raises(openai.UnprocessableEntityError, match="give a shorter prompt"):
        client.completions.create(model="pairs", prompt="a" * 50)
    with pytest.raises(openai.UnprocessableEntityError, match="give a shorter prompt"):
        client.completions.create(model="pairs", prompt="a" * 50, stream=True)
    with serving(models[2:], rows=1, queue=1) as (http, server), held(monkeypatch) as gate:
        other = openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0)
        streams = [other.completions.create(model="puzzle", prompt="_ _ _ _", stream=True)]
        wait_for(lambda: server.worker.running == 1)
        streams += [other.completions.create(model="puzzle", prompt="_ _ _ _", stream=True)]
        with pytest.raises(openai.RateLimitError):
            other.completions.create(model="puzzle", prompt="_ _ _ _")
        gate.set()
        assert [len(list(stream)) >= 1 for stream in streams] == [True, True]
