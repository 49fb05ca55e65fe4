"""Blocks that several requests share: which tokens count as cached, who holds what, and that no token changes by it."""

from __future__ import annotations

import pytest

from rapid_infer import SamplingParams

MAX_TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
SAMPLED = {"temperature": 1.0, "max_tokens": MAX_TOKENS}
PREFIX = [7 * n % 199 for n in range(1, 65)]


def whole_blocks(length, size):
    """Tokens of the whole blocks before the last token, which is always computed."""
    return (length - 1) // size * size


def generate(llm, prompts):
    outputs = llm.generate(prompts, GREEDY)
    return [output.outputs[0].token_ids for output in outputs], [output.num_cached_tokens for output in outputs]


def wanted(model, prompts):
    """What transformers gives for `prompts`, none of which may have a close call."""
    runs = model.oracle.greedy(prompts, MAX_TOKENS)
    gap = min(run.gap for run in runs)
    print(f"smallest top-1/top-2 gap {gap:.2e}")
    assert gap > 1e-3
    return [run.tokens for run in runs]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("model_name", ["llama", "windowed"])
def test_prompts_as_long_as_what_is_cached_give_or_take_one(model_name, size, depth, request, open_llm):
    model = request.getfixturevalue(model_name)
    llm = open_llm(model, block_size=size, queue_depth=depth, max_num_batched_tokens=24)
    prompts = [PREFIX[:n] for n in (1, size - 1, size, size + 1, 31, 32, 33, 47, 48, 49, 63, 64)]
    expected = wanted(model, prompts)
    assert generate(llm, [PREFIX]) == ([expected[-1]], [0])
    for prompt, tokens in zip(prompts, expected):
        assert generate(llm, [prompt]) == ([tokens], [whole_blocks(len(prompt), size)])


@pytest.mark.parametrize("position", [0, 15, 16, 31, 32])
def test_a_prompt_shares_only_what_comes_before_its_first_other_token(position, llama, open_llm):
    llm = open_llm(llama, block_size=16)
    other = [*PREFIX[:position], (PREFIX[position] + 2) % 199, *PREFIX[position + 1 :]]
    expected = wanted(llama, [PREFIX, other])
    assert generate(llm, [PREFIX]) == (expected[:1], [0])
    assert generate(llm, [other]) == (expected[1:], [position // 16 * 16])
    assert generate(llm, [PREFIX, other]) == (expected, [48, 48])


def test_the_same_block_after_another_one_is_not_shared(llama, open_llm):
    llm = open_llm(llama, block_size=16)
    swapped = PREFIX[16:32] + PREFIX[:16] + PREFIX[32:]
    expected = wanted(llama, [PREFIX, swapped])
    assert generate(llm, [PREFIX]) == (expected[:1], [0])
    assert generate(llm, [swapped]) == (expected[1:], [0])


@pytest.mark.parametrize(("size", "tokens"), [(4, 8), (4, 9), (4, 12), (16, 8)])
def test_a_next_turn_shares_the_answer_as_well(size, tokens, llama, open_llm):
    llm = open_llm(llama, block_size=size)
    answer = llm.generate([PREFIX[:24]], SamplingParams(temperature=0, max_tokens=tokens))[0].outputs[0].token_ids
    turn = PREFIX[:24] + answer + PREFIX[40:50]
    # The last token of the answer was chosen but never computed.
    assert generate(llm, [turn]) == (wanted(llama, [turn]), [whole_blocks(24 + tokens, size)])


@pytest.mark.parametrize("budget", [512, 20])
def test_prompts_that_arrive_together_share_as_if_they_came_one_by_one(budget, llama, open_llm):
    size = 4
    llm = open_llm(llama, block_size=size, max_num_batched_tokens=budget)
    prompts = [
        PREFIX[:40],
        PREFIX[:40],
        PREFIX[:22] + PREFIX[40:50],
        PREFIX[:41],
        PREFIX[1:30],
        PREFIX[:22] + PREFIX[40:48],
    ]
    tokens, cached = generate(llm, prompts)
    assert tokens == wanted(llama, prompts)
    expected = [min(whole_blocks(len(p), size), common(p, prompts[:i]) // size * size) for i, p in enumerate(prompts)]
    assert expected == [0, 36, 20, 40, 0, 28]
    if budget == 512:
        assert cached == expected
    else:
        assert all(0 <= got <= most for got, most in zip(cached, expected))


def common(prompt, earlier):
    def length(other):
        return next((n for n, (a, b) in enumerate(zip(prompt, other)) if a != b), min(len(prompt), len(other)))

    return max((length(other) for other in earlier), default=0)


@pytest.mark.parametrize("model_name", ["llama", "windowed"])
def test_requests_admitted_in_one_step_hold_the_same_blocks(model_name, request, open_llm):
    model = request.getfixturevalue(model_name)
    llm = open_llm(model, block_size=16)
    engine, core = llm.engine, llm.engine.core
    prompts = [[*PREFIX[:40], n] for n in range(5)]
    for n, prompt in enumerate(prompts):
        engine.add_request(str(n), prompt, GREEDY)
    free = core.cache.num_free
    engine.step()
    running = core.scheduler.running
    assert len(running) == 5
    for group in range(core.cache.num_groups):
        pool = core.cache.pool_of(group)
        tables = [held.blocks[group] for held in running]
        assert all(table[:2] == tables[0][:2] for table in tables)
        assert len({table[2] for table in tables}) == 5
        assert [pool.count(block) for block in tables[0]] == [5, 5, 1]
    assert free - core.cache.num_free == (2 + 5) * core.cache.num_groups
    assert [held.num_cached_tokens for held in running] == [0, 32, 32, 32, 32]
    got = {}
    while engine.has_unfinished_requests():
        got |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
    assert [got[str(n)] for n in range(5)] == wanted(model, prompts)


@pytest.mark.parametrize("caching", [True, False])
def test_n_completions_of_one_prompt_hold_its_blocks_together(caching, llama, open_llm):
    llm = open_llm(llama, block_size=16, enable_prefix_caching=caching)
    engine, core = llm.engine, llm.engine.core
    engine.add_request("three", PREFIX[:40], SamplingParams(n=3, seed=1, **SAMPLED))
    engine.add_request("one", PREFIX[:40], GREEDY)
    engine.step()
    tables = [held.blocks[0] for held in core.scheduler.running]
    assert all(table[:2] == tables[0][:2] for table in tables[:3])
    assert len({table[2] for table in tables}) == 4
    assert (tables[3][:2] == tables[0][:2]) == caching
    while engine.has_unfinished_requests():
        engine.step()


def test_without_prefix_caching_nothing_is_shared(llama, open_llm):
    llm = open_llm(llama, block_size=4, enable_prefix_caching=False)
    expected = wanted(llama, [PREFIX[:40]])
    for _ in range(2):
        assert generate(llm, [PREFIX[:40], PREFIX[:40]]) == (expected * 2, [0, 0])
    assert all(pool.num_cached == 0 for pool in llm.engine.core.cache.pools)


def test_a_reset_cache_shares_nothing(windowed, open_llm):
    llm = open_llm(windowed, block_size=4)
    expected = wanted(windowed, [PREFIX[:40]])
    assert generate(llm, [PREFIX[:40]]) == (expected, [0])
    assert generate(llm, [PREFIX[:40]]) == (expected, [36])
    llm.reset_prefix_cache()
    assert all(pool.num_cached == 0 for pool in llm.engine.core.cache.pools)
    assert generate(llm, [PREFIX[:40]]) == (expected, [0])


def test_a_reset_while_requests_run_changes_no_token(windowed, open_llm):
    llm = open_llm(windowed, block_size=4)
    prompts = [PREFIX[:40], PREFIX[:40]]
    stream = llm.stream(prompts[0], GREEDY)
    tokens = list(next(stream).outputs[0].token_ids)
    llm.reset_prefix_cache()
    expected = wanted(windowed, prompts)
    assert generate(llm, prompts)[0] == expected
    tokens += [token for output in stream for token in output.outputs[0].token_ids]
    assert tokens == expected[0]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_four_completions_take_turns_in_one_row(caching, depth, qwen3, open_llm):
    texts = []
    for _ in range(2):
        llm = open_llm(
            qwen3, block_size=4, max_num_seqs=1, queue_depth=depth, enable_prefix_caching=caching, max_model_len=96
        )
        output = llm.generate([PREFIX[:20]], SamplingParams(n=4, seed=11, **SAMPLED))[0]
        assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
        assert [completion.finish_reason for completion in output.outputs] == ["length"] * 4
        texts.append([tuple(completion.token_ids) for completion in output.outputs])
        assert all(len(text) == MAX_TOKENS for text in texts[-1])
    assert len(set(texts[0])) == 4
    assert texts[0] == texts[1]
    together = open_llm(qwen3).generate([PREFIX[:20]], SamplingParams(n=4, seed=11, **SAMPLED))[0]
    assert [tuple(completion.token_ids) for completion in together.outputs] == texts[0]


def test_the_first_of_n_completions_is_that_of_one(qwen3, open_llm):
    llm = open_llm(qwen3)
    prompt = PREFIX[:20]
    single, double, triple = (
        [c.token_ids for c in llm.generate([prompt], SamplingParams(n=n, seed=5, **SAMPLED))[0].outputs]
        for n in (1, 2, 3)
    )
    assert double[:1] == single
    assert triple[:2] == double
    assert len({tuple(tokens) for tokens in triple}) == 3


@pytest.mark.parametrize("operators", ["default", "triton", "triton, every row by itself"])
def test_groups_grow_and_vanish_while_others_run(operators, tiny, open_llm, monkeypatch):
    """Two prefixes and requests with neither; Triton's decode attention reads what neighbours share only once."""
    model, options, seen = tiny("llama", {"num_hidden_layers": 1}), {"block_size": 16}, []
    if operators != "default":
        pytest.importorskip("triton")
        from rapid_infer.ops.providers.triton.attention import decode as attention_decode
        from rapid_infer.ops.providers.triton.attention import groups as attention_groups
        from rapid_infer.ops.providers.triton.attention import shared as attention_shared
        from rapid_infer.ops.providers.triton.attention import tile as attention_tile

        plan = attention_decode.decode_plan

        def noted(*arguments):
            made = plan(*arguments)
            if made.shared is not None:
                seen.append(made.shared.rows[:, 0].tolist())
            return made

        monkeypatch.setattr(attention_decode, "decode_plan", noted)
        monkeypatch.setattr(attention_shared, "SHARING", operators == "triton")
        monkeypatch.setattr(attention_tile, "MAX_TILE", 16)
        monkeypatch.setattr(attention_groups, "MIN_BLOCKS", 2)
        monkeypatch.setattr(attention_groups, "MIN_SAVED", 2)
        options["op_priority"] = {"paged_attention": ["triton"]}
    other = [11 * n % 197 for n in range(5, 53)]
    first, second = ([*PREFIX[:32], 3, n] for n in (1, 2)), ([*PREFIX[:32], 4, n, n] for n in (1, 2))
    arrivals = {0: [*first, PREFIX[40:50]], 1: [[*other, n] for n in (1, 2, 3)], 2: [*second, other[3:40]]}
    lengths = {0: 3, 1: 5, 2: 5}
    engine, prompts, got = open_llm(model, **options).engine, [], {}
    for step in range(10):
        for prompt in arrivals.get(step, ()):
            params = SamplingParams(temperature=0, max_tokens=lengths[step])
            engine.add_request(str(len(prompts)), prompt, params)
            prompts.append((prompt, lengths[step]))
        got |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
    assert not engine.has_unfinished_requests()
    expected = wanted(model, [prompt for prompt, _ in prompts])
    assert [got[str(n)] for n in range(9)] == [run[:length] for run, (_, length) in zip(expected, prompts)]
    # Blocks that each decode row shares, from step to step; of three with 48 tokens in common two compute one.
    steps = list(dict.fromkeys(map(tuple, seen)))
    expected = [(2, 2, 0, 3, 3), (2, 2, 0, 3, 3, 3), (3, 3, 3, 2, 2, 0), (2, 2, 0)]
    assert steps == (expected if operators == "triton" else [])
