"""Which handler answers what, and the small ones."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any

from rapid_infer.server import conversation
from rapid_infer.server.chat import chat_completions
from rapid_infer.server.completions import completions
from rapid_infer.server.errors import ApiError, invalid
from rapid_infer.server.http import Exchange
from rapid_infer.server.sampling import check_model
from rapid_infer.server.schema import DetokenizeRequest, TokenizeRequest
from rapid_infer.server.served import Served
from rapid_infer.version import __version__

Handler = Callable[[Served, Exchange], Awaitable[None]]


async def health(served: Served, exchange: Exchange) -> None:
    """200 while the engine says something now and then."""
    wrong = served.health()
    if wrong is not None:
        raise ApiError(503, wrong)
    await exchange.respond_json({"status": "ok"})


async def ready(served: Served, exchange: Exchange) -> None:
    """200 while requests are taken."""
    wrong = "the server is shutting down" if served.draining else served.health()
    if wrong is not None:
        raise ApiError(503, wrong)
    await exchange.respond_json({"status": "ready"})


async def version(served: Served, exchange: Exchange) -> None:
    await exchange.respond_json({"version": __version__})


async def models(served: Served, exchange: Exchange) -> None:
    data = [_model(served, name) for name in served.settings.served_names]
    await exchange.respond_json({"object": "list", "data": data})


async def model(served: Served, exchange: Exchange) -> None:
    name = exchange.path.removeprefix("/v1/models/")
    check_model(served, name)
    await exchange.respond_json(_model(served, name))


def _model(served: Served, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "rapid_infer",
        "root": served.model,
        "max_model_len": served.info.max_model_len,
    }


async def metrics(served: Served, exchange: Exchange) -> None:
    stats = served.stats
    engine: dict[str, tuple[str, float]] = {}
    if stats is not None:
        used = 1 - stats.num_free_blocks / max(stats.num_usable_blocks, 1)
        engine = {
            "vllm:num_requests_running": ("Completions that run in the engine.", stats.num_running),
            "vllm:num_requests_waiting": ("Completions that wait in the engine.", stats.num_waiting),
            "vllm:kv_cache_usage_perc": ("Share of cache blocks in use; 1 is all.", used),
            "vllm:num_preemptions_total": ("Completions set aside for want of blocks.", stats.num_preemptions),
            "rapid_infer:late_graphs": ("CUDA graphs recorded while requests waited.", stats.num_late_graphs),
        }
    text = served.metrics.text(served.model, engine)
    await exchange.respond(200, text.encode(), "text/plain; version=0.0.4; charset=utf-8")


async def tokenize(served: Served, exchange: Exchange) -> None:
    body = await exchange.json(TokenizeRequest, served.settings.max_body)
    check_model(served, body.model)
    tokenizer = served.llm.tokenizer
    if tokenizer is None:
        raise invalid("prompt", "the server was started without the tokenizer")
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "give one of prompt and messages")
    if body.messages is not None:
        names = served.template_names()
        values = {name: value for name, value in (body.chat_template_kwargs or {}).items() if name in names}
        found = await conversation.encode(
            served,
            conversation.plain_messages(body.messages),
            conversation.plain_tools(body.tools),
            values,
            continued=bool(body.continue_final_message),
            add_generation_prompt=body.add_generation_prompt,
        )
        ids = found.ids
    else:
        text = body.prompt or ""
        work = tokenizer.encode if body.add_special_tokens is not False else tokenizer.encode_rendered
        ids = await served.off_loop(len(text), lambda: work(text))
    made: dict[str, Any] = {"count": len(ids), "max_model_len": served.info.max_model_len, "tokens": ids}
    if body.return_token_strs:
        made["token_strs"] = await served.off_loop(len(ids), lambda: list(map(tokenizer.token_text, ids)))
    await exchange.respond_json(made)


async def detokenize(served: Served, exchange: Exchange) -> None:
    body = await exchange.json(DetokenizeRequest, served.settings.max_body)
    check_model(served, body.model)
    tokenizer = served.llm.tokenizer
    if tokenizer is None:
        raise invalid("tokens", "the server was started without the tokenizer")
    for one in body.tokens:
        if not 0 <= one < served.info.vocab_size:
            raise invalid(
                "tokens", f"tokens holds {one}, outside the vocabulary: expected 0 to {served.info.vocab_size - 1}"
            )
    text = await served.off_loop(len(body.tokens), lambda: tokenizer.decode(body.tokens))
    await exchange.respond_json({"prompt": text})


async def page(served: Served, exchange: Exchange) -> None:
    """A small page to talk to the model."""
    text = resources.files("rapid_infer.server").joinpath("page.html").read_bytes()
    await exchange.respond(200, text, "text/html; charset=utf-8")


async def openapi(served: Served, exchange: Exchange) -> None:
    from rapid_infer.server.openapi import document

    await exchange.respond_json(document())


ROUTES: dict[str, dict[str, Handler]] = {
    "/": {"GET": page},
    "/health": {"GET": health},
    "/ready": {"GET": ready},
    "/version": {"GET": version},
    "/metrics": {"GET": metrics},
    "/openapi.json": {"GET": openapi},
    "/v1/models": {"GET": models},
    "/v1/completions": {"POST": completions},
    "/v1/chat/completions": {"POST": chat_completions},
    "/tokenize": {"POST": tokenize},
    "/detokenize": {"POST": detokenize},
}
"""Path -> method -> handler; `/v1/models/NAME` beside them, and the profile routes where they are turned on."""


def find(served: Served, exchange: Exchange) -> Handler:
    """ApiError 404 or 405."""
    methods = ROUTES.get(exchange.path)
    if methods is None and exchange.path.startswith("/v1/models/"):
        methods = {"GET": model}
    if methods is None and served.settings.profile_dir is not None:
        from rapid_infer.server.profile import PROFILE_ROUTES

        methods = PROFILE_ROUTES.get(exchange.path)
    if methods is None:
        raise ApiError(404, f"there is no {exchange.path:.200}; see docs/serving.md for the routes")
    method = "GET" if exchange.method == "HEAD" else exchange.method
    if method not in methods:
        allowed = ", ".join(methods)
        raise ApiError(
            405, f"{exchange.path} takes {allowed}, got {exchange.method:.20}", headers=(("allow", allowed),)
        )
    return methods[method]
