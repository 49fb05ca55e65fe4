"""Bodies made from the server's own OpenAPI document, valid and not: no answer is a 500, and nothing is left behind."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from serving import Server

schemathesis = pytest.importorskip("schemathesis")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from schemathesis.generation import GenerationMode

    from rapid_infer.server.openapi import document

    SCHEMA = schemathesis.openapi.from_dict(document())

OPERATIONS = {result.ok().label: result.ok() for result in SCHEMA.get_all_operations()}
POSTS = [label for label in OPERATIONS if label.startswith("POST")]
EXAMPLES = 25


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("label", POSTS)
def test_fuzzed_bodies(server: Server, label: str, mode: Any) -> None:
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=OPERATIONS[label].as_strategy(generation_mode=mode))
    def fuzz(case: Any) -> None:
        answer = case.call(base_url=f"http://127.0.0.1:{server.port}", timeout=60)
        assert answer.status_code < 500, (case.body, answer.content)
        if answer.status_code >= 400:
            assert answer.json()["error"]["message"]

    fuzz()
    server.until_idle()
    assert "Traceback" not in server.text


def test_the_document_describes_what_is_there(server: Server) -> None:
    paths = server.get("/openapi.json").json["paths"]
    for path, methods in paths.items():
        for method in methods:
            assert server.call(method.upper(), path, {} if method == "post" else None).status in (200, 400)
