"""The document at /openapi.json, from the schema of requests."""

from __future__ import annotations

from typing import Any

import msgspec

from rapid_infer.server import schema
from rapid_infer.version import __version__

BODIES: dict[str, tuple[type, str]] = {
    "/v1/completions": (schema.CompletionRequest, "Complete prompts"),
    "/v1/chat/completions": (schema.ChatRequest, "Answer a conversation"),
    "/tokenize": (schema.TokenizeRequest, "Token ids of a text or a conversation"),
    "/detokenize": (schema.DetokenizeRequest, "Text of token ids"),
}
QUERIES = {
    "/v1/models": "The models that are served",
    "/health": "Whether the engine lives",
    "/ready": "Whether requests are taken",
    "/version": "The version",
    "/metrics": "Counts, for Prometheus",
}


def document() -> dict[str, Any]:
    kinds = [kind for kind, _ in BODIES.values()]
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {}
    for (path, (_, summary)), body in zip(BODIES.items(), schemas):
        content = {"application/json": {"schema": body}}
        paths[path] = {
            "post": {
                "summary": summary,
                "requestBody": {"required": True, "content": content},
                "responses": {"200": {"description": "done"}, **_ERRORS},
            }
        }
    for path, summary in QUERIES.items():
        paths[path] = {"get": {"summary": summary, "responses": {"200": {"description": "as asked"}, **_ERRORS}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "rapid_infer", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }


_ERRORS = {"default": {"description": 'an error, as {"error": {"message", "type", "param", "code"}}'}}
