"""From the engine's tokens to what a user reads: text, stop strings, log-probabilities, n completions each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rapid_infer.engine.results import StepOutputs, TokenLogprobs
from rapid_infer.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput, RequestOutputKind
from rapid_infer.params import SamplingParams
from rapid_infer.text import Detokenizer, StopStrings, Tokenizer


@dataclass(slots=True, eq=False)
class _Completion:
    """One of a request's n sequences. `unread`: tokens whose text nobody has needed yet.

    `special_stops`: stop strings that are special tokens, which the text does not show. `watched`: somebody needs the
    text after each step. `told`: its end is in a delta already.
    """

    output: CompletionOutput
    params: SamplingParams
    detokenizer: Detokenizer | None
    stop: StopStrings | None
    special_stops: dict[int, str]
    watched: bool
    told: bool = False
    num_tokens: int = 0
    unread: list[int] = field(default_factory=list)

    @property
    def matched(self) -> str | None:
        """The stop string that is complete."""
        return None if self.stop is None else self.stop.matched

    def read(self) -> None:
        """Turn the unread tokens into text."""
        tokens, output = self.unread, self.output
        if not tokens:
            return
        output.token_ids += tokens
        self.num_tokens += len(tokens)
        if self.detokenizer is not None:
            text = self.detokenizer.add(tokens)
            if self.stop is not None:
                text = self.stop.push(text, watch=self.num_tokens > self.params.min_tokens)
            output.text += text
        tokens.clear()

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        output, params = self.output, self.params
        # A stop token is no part of the text unless asked for.
        last = self.unread[-1:] if reason is FinishReason.STOP else []
        special = self.special_stops.get(last[0]) if last else None
        hidden = [] if params.include_stop_str_in_output else last
        del self.unread[len(self.unread) - len(hidden) :]
        self.read()
        output.token_ids += hidden
        if self.matched is not None:
            output.finish_reason, output.stop_reason = FinishReason.STOP.value, self.matched
            return
        if self.detokenizer is not None:
            tail = self.detokenizer.flush()
            output.text += self.stop.push(tail, watch=False) + self.stop.flush() if self.stop is not None else tail
        output.finish_reason, output.error = reason.value, error
        if special is not None and params.include_stop_str_in_output:
            output.text += special
        if last:
            output.stop_reason = last[0] if last[0] in params.stop_token_ids else special


@dataclass(slots=True, eq=False)
class _Parent:
    """A request as the user added it. `shown`: after each step; `delta`: what is new alone."""

    output: RequestOutput
    shown: bool
    delta: bool
    completions: dict[str, _Completion] = field(default_factory=dict)
    """By the engine's id."""


class OutputProcessor:
    """Holds the requests that have not ended, by the user's id and by the engine's."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._parents: dict[str, _Parent] = {}
        self._live: dict[str, tuple[_Parent, _Completion]] = {}
        self._unwatched: list[str] = []
        self._log: list[list[int]] = []

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._parents

    def __len__(self) -> int:
        return len(self._parents)

    def add(
        self, output: RequestOutput, params: SamplingParams, kind: RequestOutputKind, engine_ids: Iterable[str]
    ) -> None:
        """Expect results of the n completions named `engine_ids`; `output` is what they are added to."""
        shown, delta = kind is not RequestOutputKind.FINAL_ONLY, kind is RequestOutputKind.DELTA
        parent = _Parent(output, shown, delta)
        for index, name in enumerate(engine_ids):
            detokenizer = None
            if self._tokenizer is not None:
                detokenizer = self._tokenizer.detokenizer(output.prompt_token_ids, params.skip_special_tokens)
            stop = StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
            special = self._tokenizer.special_stops(params) if self._tokenizer is not None and stop is not None else {}
            watched = shown or stop is not None
            completion = _Completion(CompletionOutput(index), params, detokenizer, stop, special, watched)
            if params.logprobs is not None:
                completion.output.logprobs, completion.output.cumulative_logprob = [], 0.0
            output.outputs.append(completion.output)
            parent.completions[name] = completion
            self._live[name] = parent, completion
        if params.prompt_logprobs is not None:
            output.prompt_logprobs = [None]
        self._parents[output.request_id] = parent

    def engine_ids(self, request_ids: Iterable[str]) -> list[str]:
        """The engine's ids of these requests; unknown ones are skipped."""
        parents = (self._parents.get(request_id) for request_id in request_ids)
        return [name for parent in parents if parent is not None for name in parent.completions]

    def discard(self, request_ids: Iterable[str]) -> list[str]:
        """Forget requests, as for a caller that went away; returns the engine's ids to abort."""
        request_ids = list(request_ids)
        names = self.engine_ids(request_ids)
        for request_id in request_ids:
            self._parents.pop(request_id, None)
        return [name for name in names if self._live.pop(name, None) is not None]

    def process(self, step: StepOutputs) -> tuple[list[RequestOutput], list[str]]:
        """Outputs of the requests that have something new, and the engine's ids that a stop string has ended."""
        # A batch that just goes on, and nobody reads along.
        if step.request_ids == self._unwatched and not (
            step.finished or step.logprobs or step.prompt_logprobs or step.num_cached_tokens
        ):
            self._log.append(step.token_ids)
            return [], []
        self._empty_log()
        live = self._live
        # Outputs come in the order of the tokens: a set has none.
        touched: dict[_Parent, None] = {}
        for name, cached in step.num_cached_tokens.items():
            if name in live and live[name][1].output.index == 0:
                live[name][0].output.num_cached_tokens = cached
        for name, pieces in step.prompt_logprobs.items():
            if name in live and (prompt := live[name][0].output.prompt_logprobs) is not None:
                prompt += map(self._logprobs, pieces)
        for name, one in step.logprobs.items():
            if name in live:
                self._add_logprobs(live[name][1].output, one)
        for name, token in zip(step.request_ids, step.token_ids):
            if name in live:
                parent, completion = live[name]
                completion.unread.append(token)
                if completion.watched:
                    touched[parent] = None
        self._unwatched = [] if touched else step.request_ids
        for finished in step.finished:
            if finished.request_id in live:
                parent, completion = live.pop(finished.request_id)
                completion.end(finished.reason, finished.error)
                if completion.output.index == 0:
                    parent.output.num_cached_tokens = finished.num_cached_tokens
                touched[parent] = None
        outputs: list[RequestOutput] = []
        stopped: list[str] = []
        for parent in touched:
            done = parent.output.finished = self._read(parent, stopped)
            if done:
                del self._parents[parent.output.request_id]
            if done or parent.shown:
                outputs.append(self._output(parent))
        return outputs, stopped

    def _empty_log(self) -> None:
        """Hand the tokens of steps that nobody looked at to their completions."""
        for name, tokens in zip(self._unwatched, zip(*self._log)):
            if name in self._live:
                self._live[name][1].unread += tokens
        self._log = []

    def _read(self, parent: _Parent, stopped: list[str]) -> bool:
        """Bring the completions up to date, and end those whose stop string is complete; returns whether all ended."""
        done = True
        for name, completion in parent.completions.items():
            if completion.output.finish_reason is None:
                completion.read()
                if completion.matched is None:
                    done = False
                    continue
                completion.end(FinishReason.STOP)
                del self._live[name]
                stopped.append(name)
        return done

    def _output(self, parent: _Parent) -> RequestOutput:
        if not parent.delta:
            return parent.output
        whole = parent.output
        deltas = []
        for completion in parent.completions.values():
            if not completion.told:
                completion.told = completion.output.finished
                if completion.told or completion.output.token_ids:
                    deltas.append(_split_off(completion.output))
        prompt = whole.prompt_logprobs
        whole.prompt_logprobs = None if prompt is None else []
        return RequestOutput(
            whole.request_id,
            whole.prompt,
            whole.prompt_token_ids,
            deltas,
            whole.num_cached_tokens,
            prompt,
            whole.finished,
        )

    def _add_logprobs(self, output: CompletionOutput, one: TokenLogprobs) -> None:
        if output.logprobs is not None and output.cumulative_logprob is not None:
            output.logprobs.append(self._logprobs(one))
            output.cumulative_logprob += one.values[0]

    def _logprobs(self, one: TokenLogprobs) -> dict[int, Logprob]:
        ranks = [one.rank, *range(1, len(one.token_ids))]
        found: dict[int, Logprob] = {}
        for token, value, rank in zip(one.token_ids, one.values, ranks):
            text = self._tokenizer.token_text(token) if self._tokenizer is not None else None
            found.setdefault(token, Logprob(value, rank, text))
        return found


def _split_off(output: CompletionOutput) -> CompletionOutput:
    """What has not been shown yet; `output` keeps the rest of its state."""
    new = CompletionOutput(
        output.index,
        output.text,
        output.token_ids,
        output.finish_reason,
        output.stop_reason,
        output.error,
        output.logprobs,
        output.cumulative_logprob,
    )
    output.text, output.token_ids = "", []
    if output.logprobs is not None:
        output.logprobs = []
    return new
