"""The ASGI application: checks the key, finds the handler, and turns every error into an answer."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import logging
import re
import time
import uuid
from typing import Any

import msgspec

from rapid_infer.errors import EngineDeadError, RapidInferError
from rapid_infer.server import events, routes
from rapid_infer.server.errors import ApiError
from rapid_infer.server.http import ClientGone, Exchange, Receive, Scope, Send
from rapid_infer.server.served import Served

logger = logging.getLogger("rapid_infer.server.requests")

CLIENT_GONE = 499
"""In log and metrics, for answers that nobody waited for."""

_OPEN = ("/health",)
_QUIET = ("/health", "/ready", "/metrics")
"""Asked by machines all the time; a line for each would hide the others."""

_REQUEST_ID = re.compile(rb"[\w.:/=+-]{1,128}")


class App:
    def __init__(self, served: Served) -> None:
        self.served = served
        self._keys = [key.encode() for key in served.settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1000})
            return
        exchange = Exchange(scope, receive, send, "")
        given = exchange.headers.get(b"x-request-id", b"")
        exchange.request_id = given.decode() if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        self.served.exchanges[exchange] = None
        try:
            await self._answer(exchange)
        finally:
            exchange.close()
            del self.served.exchanges[exchange]
            status = CLIENT_GONE if exchange.gone else exchange.status
            self.served.metrics.answered(status)
            if exchange.path not in _QUIET or status >= 400:
                self._log(exchange, status)

    async def _answer(self, exchange: Exchange) -> None:
        try:
            self._check_key(exchange)
            handler = routes.find(self.served, exchange)
            await handler(self.served, exchange)
        except ClientGone:
            pass
        except asyncio.CancelledError:
            if not exchange.gone:
                raise
            # The cancellation was ours: it ends here.
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
        except ApiError as error:
            await self._fail(exchange, error)
        except EngineDeadError as error:
            await self._fail(exchange, ApiError(500, str(error), code="engine_dead"))
        except RapidInferError as error:
            await self._fail(exchange, ApiError(400, str(error)))
        except Exception as error:
            logger.exception("request %s failed", exchange.request_id)
            await self._fail(exchange, ApiError(500, f"the server failed: {type(error).__name__}"))

    def _check_key(self, exchange: Exchange) -> None:
        """ApiError 401. All keys are compared, each in constant time."""
        if not self._keys or exchange.path in _OPEN:
            return
        scheme, _, value = exchange.headers.get(b"authorization", b"").partition(b" ")
        given = value.strip() if scheme.lower() == b"bearer" else b""
        if scheme.lower() == b"basic":
            # Browsers know nothing else; the key is the password.
            try:
                given = base64.b64decode(value.strip(), validate=True).partition(b":")[2]
            except binascii.Error:
                given = b""
        right = [hmac.compare_digest(given, key) for key in self._keys]
        if not any(right):
            challenge = "Basic" if exchange.path == "/" else "Bearer"
            raise ApiError(
                401,
                "a valid API key is needed: send the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers=(("www-authenticate", f'{challenge} realm="rapid_infer"'),),
            )

    async def _fail(self, exchange: Exchange, error: ApiError) -> None:
        if error.status >= 500:
            exchange.notes["error"] = error.message[:300]
        elif error.param is not None:
            # The message may quote what the client has sent.
            exchange.notes["param"] = error.param
        body = error.body()
        if not exchange.started:
            await exchange.respond_json(body, error.status, error.headers)
        else:
            exchange.status = error.status
            await exchange.end(events.Events.error(body) + events.DONE)

    def _log(self, exchange: Exchange, status: int) -> None:
        fields: dict[str, Any] = {
            "id": exchange.request_id,
            "method": exchange.method,
            "path": exchange.path,
            "status": status,
            **exchange.notes,
            "ms": round((time.perf_counter() - exchange.began) * 1000, 1),
        }
        if self.served.settings.log_format == "json":
            logger.info("%s", msgspec.json.encode({"time": time.time(), **fields}).decode())
        else:
            shown = {name: value if str(value).isprintable() else repr(value) for name, value in fields.items()}
            logger.info("%s", " ".join(f"{name}={value}" for name, value in shown.items()))
