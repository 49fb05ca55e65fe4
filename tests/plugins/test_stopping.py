"""When a request ends, and why: the model's stop tokens from both config files, the user's own, and length."""

from __future__ import annotations

import pytest

from rapid_infer import SamplingParams
from rapid_infer.errors import RequestError
from rapid_infer.testing import TINY

LENGTH = 24


@pytest.fixture(scope="module")
def run(llama):
    """A greedy run of which the tests make some tokens stop tokens."""
    found = llama.oracle.clear_runs([6], LENGTH, seed=9)[0]
    assert len(set(found.tokens)) > LENGTH / 2
    return found


@pytest.fixture
def ends_at(tiny):
    """The same model with stop tokens in config.json and in generation_config.json."""

    def make(config, generation):
        files = None if generation is None else {"eos_token_id": generation}
        return tiny("llama", config_updates={"eos_token_id": config}, generation=files)

    return make


def until(run, *stop):
    return run.tokens[: min(run.tokens.index(token) for token in stop) + 1]


def complete(llm, run, **params):
    return llm.generate([run.prompt], SamplingParams(**{"temperature": 0, "max_tokens": LENGTH, **params}))[0].outputs[
        0
    ]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("config", "generation"),
    [(8, None), ([8, 4], None), (None, 8), (12, 8), (8, 12), (8, [12, 16]), ([16, 12], [8, 16])],
    ids=str,
)
def test_the_model_s_stop_tokens_are_those_of_both_files(config, generation, depth, run, ends_at, open_llm):
    def ids(places):
        return [run.tokens[n] for n in places] if isinstance(places, list) else places and run.tokens[places]

    llm = open_llm(ends_at(ids(config), ids(generation)), queue_depth=depth)
    stop = set()
    for value in (ids(config), ids(generation)):
        stop |= set(value) if isinstance(value, list) else {value} - {None}
    assert set(llm.engine.inputs.info.stop_token_ids) == stop
    output = complete(llm, run)
    assert output.token_ids == until(run, *stop)
    assert output.finish_reason == "stop"


@pytest.mark.parametrize("depth", [1, 2])
def test_ignore_eos_goes_past_the_model_s_stop_tokens_only(depth, run, ends_at, open_llm):
    llm = open_llm(ends_at(run.tokens[3], [run.tokens[5], run.tokens[7]]), queue_depth=depth)
    output = complete(llm, run, ignore_eos=True)
    assert output.token_ids == run.tokens
    assert output.finish_reason == "length"
    mine = run.tokens[10]
    output = complete(llm, run, ignore_eos=True, stop_token_ids=[mine])
    assert output.token_ids == until(run, mine)
    assert output.finish_reason == "stop"
    again = complete(llm, run, ignore_eos=True, stop_token_ids=[run.tokens[5], mine])
    assert again.token_ids == until(run, run.tokens[5], mine)


def test_a_request_s_stop_tokens_end_it_alone(run, llama, open_llm):
    llm = open_llm(llama)
    stops = [(), (run.tokens[0],), (run.tokens[4], 198), (run.tokens[9], run.tokens[6], 0, 1), ()]
    params = [SamplingParams(temperature=0, max_tokens=LENGTH, stop_token_ids=stop) for stop in stops]
    outputs = [output.outputs[0] for output in llm.generate([run.prompt] * 5, params)]
    for output, stop in zip(outputs, stops):
        known = [token for token in stop if token in run.tokens]
        assert output.token_ids == (until(run, *known) if known else run.tokens)
        assert output.finish_reason == ("stop" if known else "length")


def test_stop_tokens_do_not_outlive_their_request(run, llama, open_llm):
    llm = open_llm(llama, max_num_seqs=1)
    for stop in ((run.tokens[9], run.tokens[6], run.tokens[4]), (198, run.tokens[9]), (198,), ()):
        output = complete(llm, run, stop_token_ids=stop)
        known = [token for token in stop if token in run.tokens]
        assert output.token_ids == (until(run, *known) if known else run.tokens)


@pytest.mark.parametrize("depth", [1, 2])
def test_max_tokens(depth, run, llama, open_llm):
    llm = open_llm(llama, queue_depth=depth)
    counts = [1, 2, 3, 15, 16, 17, LENGTH]
    params = [SamplingParams(temperature=0, max_tokens=n) for n in counts]
    for n, output in zip(counts, llm.generate([run.prompt] * len(counts), params)):
        assert output.outputs[0].token_ids == run.tokens[:n]
        assert output.outputs[0].finish_reason == "length"
    assert len(complete(llm, run, max_tokens=SamplingParams().max_tokens).token_ids) == 16


def test_a_stop_token_that_is_also_the_last_allowed_one_is_a_stop(run, llama, open_llm):
    place = next(n for n in range(5, LENGTH) if run.tokens[n] not in run.tokens[:n])
    output = complete(open_llm(llama), run, max_tokens=place + 1, stop_token_ids=[run.tokens[place]])
    assert output.token_ids == run.tokens[: place + 1]
    assert output.finish_reason == "stop"


@pytest.mark.parametrize("block", [4, 16])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_ends_where_the_model_s_length_does(depth, block, run, llama, open_llm):
    limit = 20
    llm = open_llm(llama, max_model_len=limit, queue_depth=depth, block_size=block)
    for params in ({"max_tokens": None}, {"max_tokens": 1000}):
        output = complete(llm, run, **params)
        assert output.token_ids == run.tokens[: limit - len(run.prompt)]
        assert output.finish_reason == "length"
    longest = (run.prompt + run.tokens)[: limit - 1]
    output = llm.generate([longest], SamplingParams(temperature=0, max_tokens=None))[0].outputs[0]
    assert output.token_ids == [run.tokens[len(longest) - len(run.prompt)]]
    with pytest.raises(RequestError, match="max_model_len=20"):
        llm.generate([[1] * limit])


def test_the_whole_of_the_model_s_own_length_can_be_used(tiny, open_llm):
    """The last position has its row of the rope table and its column of the block table."""
    model = tiny("qwen3", {"max_position_embeddings": 61})
    [found] = model.oracle.clear_runs([50], 11, seed=1)
    for block in (4, 7, 64):
        llm = open_llm(model, block_size=block, queue_depth=2)
        assert llm.engine.core.info.max_model_len == 61
        output = llm.generate([found.prompt], SamplingParams(temperature=0, max_tokens=None))[0].outputs[0]
        assert output.token_ids == found.tokens


def test_invalid_requests_leave_the_others_alone(run, llama, open_llm):
    llm = open_llm(llama)
    vocab = TINY["vocab_size"]
    for prompt in ([], [vocab], [-1], [1] * 512):
        with pytest.raises(RequestError):
            llm.generate([run.prompt, prompt])
    assert not llm.engine.has_unfinished_requests()
    assert complete(llm, run).token_ids == run.tokens
