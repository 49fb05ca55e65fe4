"""From the engine's tokens to what a user reads: text, stop strings, log-probabilities, n completions each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rapid_infer.engine.results import Finished, StepOutputs, TokenLogprobs
from rapid_infer.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput, RequestOutputKind
from rapid_infer.params import SamplingParams
from rapid_infer.text import Detokenizer, StopStrings, Tokenizer


@dataclass
class _Completion:
    """One of a request's n sequences. `unread`: tokens whose text nobody has needed yet."""

    output: CompletionOutput
    params: SamplingParams
    detokenizer: Detokenizer | None
    stop: StopStrings | None
    num_tokens: int = 0
    unread: list[int] = field(default_factory=list)

    def take(self, token: int, ends: bool) -> None:
        """`ends`: it is a stop token, which is no part of the text unless asked for."""
        self.num_tokens += 1
        if ends and not self.params.include_stop_str_in_output:
            self.read()
            self.output.token_ids.append(token)
            return
        self.unread.append(token)
        if self.stop is not None:
            self.read()

    def read(self) -> None:
        """Turn the unread tokens into text."""
        if not self.unread:
            return
        self.output.token_ids += self.unread
        if self.detokenizer is not None:
            text = self.detokenizer.add(self.unread)
            if self.stop is not None:
                text = self.stop.push(text, watch=self.num_tokens > self.params.min_tokens)
            self.output.text += text
        self.unread = []

    def end(self, reason: str, error: str | None = None) -> None:
        self.read()
        output = self.output
        if self.detokenizer is not None and (self.stop is None or self.stop.matched is None):
            tail = self.detokenizer.flush()
            output.text += self.stop.push(tail, watch=False) + self.stop.flush() if self.stop is not None else tail
        output.finish_reason, output.error = reason, error
        if self.stop is not None and self.stop.matched is not None:
            output.stop_reason = self.stop.matched
        elif reason == FinishReason.STOP and output.token_ids[-1] in self.params.stop_token_ids:
            output.stop_reason = output.token_ids[-1]


@dataclass
class _Parent:
    """A request as the user added it."""

    output: RequestOutput
    kind: RequestOutputKind
    completions: dict[str, _Completion] = field(default_factory=dict)
    """By the engine's id."""


class OutputProcessor:
    """Holds the requests that have not ended, by the user's id and by the engine's."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._parents: dict[str, _Parent] = {}
        self._owner: dict[str, tuple[_Parent, _Completion]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._parents

    def __len__(self) -> int:
        return len(self._parents)

    def add(
        self, output: RequestOutput, params: SamplingParams, kind: RequestOutputKind, engine_ids: Iterable[str]
    ) -> None:
        """Expect results of the n completions named `engine_ids`; `output` is what they are added to."""
        parent = _Parent(output, kind)
        for index, name in enumerate(engine_ids):
            detokenizer = None
            if self._tokenizer is not None:
                detokenizer = self._tokenizer.detokenizer(output.prompt_token_ids, params.skip_special_tokens)
            stop = StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
            completion = _Completion(CompletionOutput(index), params, detokenizer, stop)
            if params.logprobs is not None:
                completion.output.logprobs, completion.output.cumulative_logprob = [], 0.0
            output.outputs.append(completion.output)
            parent.completions[name] = completion
            self._owner[name] = (parent, completion)
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
        return [name for name in names if self._owner.pop(name, None) is not None]

    def fail(self, request_id: str, error: str) -> RequestOutput | None:
        """End a whole request with an error that did not come from a step."""
        parent = self._parents.pop(request_id, None)
        if parent is None:
            return None
        for name, completion in parent.completions.items():
            if self._owner.pop(name, None) is not None:
                completion.end(FinishReason.ERROR, error)
        return self._output(parent)

    def process(self, step: StepOutputs) -> tuple[list[RequestOutput], list[str]]:
        """Outputs of the requests that have something new, and the engine's ids that a stop string has ended."""
        touched: dict[str, _Parent] = {}
        stopped: list[str] = []
        owners = self._owner
        ending = {finished.request_id for finished in step.finished if finished.reason is FinishReason.STOP}
        for name, cached in step.num_cached_tokens.items():
            if name in owners and owners[name][1].output.index == 0:
                owners[name][0].output.num_cached_tokens = cached
        for name, pieces in step.prompt_logprobs.items():
            if name in owners and (scores := owners[name][0].output.prompt_logprobs) is not None:
                # Every completion scores the prompt; the first one's scores are kept.
                scores += map(self._logprobs, pieces) if owners[name][1].output.index == 0 else []
        for name, token in zip(step.request_ids, step.token_ids):
            if name not in owners:
                continue
            parent, completion = owners[name]
            if name in step.logprobs:
                self._add_logprobs(completion.output, step.logprobs[name])
            completion.take(token, name in ending)
            if completion.stop is not None and completion.stop.matched is not None:
                completion.end(FinishReason.STOP)
                del owners[name]
                stopped.append(name)
                touched[parent.output.request_id] = parent
            elif parent.kind is not RequestOutputKind.FINAL_ONLY:
                touched[parent.output.request_id] = parent
        for finished in step.finished:
            if finished.request_id in owners:
                parent, completion = owners.pop(finished.request_id)
                _finish(parent, completion, finished)
                touched[parent.output.request_id] = parent
        return self._outputs(touched.values()), stopped

    def _outputs(self, touched: Iterable[_Parent]) -> list[RequestOutput]:
        outputs = []
        for parent in touched:
            done = parent.output.finished
            if done:
                del self._parents[parent.output.request_id]
            if done or parent.kind is not RequestOutputKind.FINAL_ONLY:
                outputs.append(self._output(parent))
        return outputs

    def _output(self, parent: _Parent) -> RequestOutput:
        for completion in parent.completions.values():
            completion.read()
        if parent.kind is not RequestOutputKind.DELTA:
            return parent.output
        whole = parent.output
        deltas = [_split_off(completion.output) for completion in parent.completions.values()]
        scores, whole.prompt_logprobs = whole.prompt_logprobs, [] if whole.prompt_logprobs is not None else None
        return RequestOutput(
            whole.request_id, whole.prompt, whole.prompt_token_ids, deltas, whole.num_cached_tokens, scores
        )

    def _add_logprobs(self, output: CompletionOutput, scores: TokenLogprobs) -> None:
        if output.logprobs is not None and output.cumulative_logprob is not None:
            output.logprobs.append(self._logprobs(scores))
            output.cumulative_logprob += scores.values[0]

    def _logprobs(self, scores: TokenLogprobs) -> dict[int, Logprob]:
        ranks = [scores.rank, *range(1, len(scores.token_ids))]
        found: dict[int, Logprob] = {}
        for token, value, rank in zip(scores.token_ids, scores.values, ranks):
            text = self._tokenizer.token_text(token) if self._tokenizer is not None else None
            found.setdefault(token, Logprob(value, rank, text))
        return found


def _finish(parent: _Parent, completion: _Completion, finished: Finished) -> None:
    completion.end(finished.reason.value, finished.error)
    if completion.output.index == 0:
        parent.output.num_cached_tokens = finished.num_cached_tokens


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
