"""The page of a model on a hub, as copied from a browser, as the model's name."""

import os
import re
from typing import NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

from rapid_infer.errors import HubError

_HOSTS = {
    "huggingface.co": "hf",
    "www.huggingface.co": "hf",
    "hf.co": "hf",
    "modelscope.cn": "ms",
    "www.modelscope.cn": "ms",
}
_TABS = ("", "summary", "files", "feedback", "discussions", "quickstart", "model-card")
"""What follows org/name on pages that are about the whole model."""


class Page(NamedTuple):
    """A model's page: on "hf" or "ms", `org/name` as written, and the revision in the URL, if any."""

    hub: str
    name: str
    revision: str | None


def model_page(text: str) -> Page | None:
    """Take a URL apart, or None when `text` is none. HubError for one that is not the page of one model.

    Hosts are those of the hubs, and of $HF_ENDPOINT and $MODELSCOPE_ENDPOINT; a hub's own also without `https://`.
    """
    written = re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is not None
    if not written and text.partition("/")[0].lower() not in _HOSTS:
        return None
    try:
        parts = urlsplit(text if written else f"https://{text}")
    except ValueError as error:
        raise HubError(f"model reference: got a URL that cannot be read ({error}); expected org/name") from error
    hub = _hosts().get(_host(parts)) if parts.scheme in ("http", "https") else None
    if hub is None:
        raise _unknown(parts)
    path = parts.path.strip("/")
    if hub == "ms":
        path = path.removeprefix("models/") if path.startswith("models/") else ""
    owner, _, rest = path.partition("/")
    name, _, rest = rest.partition("/")
    revision = None
    if rest.startswith("tree/"):
        revision, _, rest = rest.removeprefix("tree/").partition("/")
    if owner in ("", "datasets", "spaces", "docs", "models") or not name or rest not in _TABS:
        raise HubError(
            f"model reference: got {_shown(parts)!r}, which is not the page of one model; expected a URL such as "
            "https://huggingface.co/org/name or https://modelscope.cn/models/org/name, or org/name itself"
        )
    return Page(hub, f"{owner}/{name}", unquote(revision) if revision else None)


def _hosts() -> dict[str, str]:
    hosts = dict(_HOSTS)
    for variable, hub in (("HF_ENDPOINT", "hf"), ("MODELSCOPE_ENDPOINT", "ms"), ("MODELSCOPE_DOMAIN", "ms")):
        if endpoint := os.environ.get(variable, "").strip():
            hosts[_host(urlsplit(endpoint if "://" in endpoint else f"https://{endpoint}"))] = hub
    return hosts


def _host(parts: SplitResult) -> str:
    return parts.netloc.rpartition("@")[2].lower()


def _shown(parts: SplitResult) -> str:
    """The URL without what may be a password or a signature."""
    return f"{parts.scheme}://{_host(parts)}{parts.path}"


def _unknown(parts: SplitResult) -> HubError:
    host = f"https://{_host(parts)}"
    return HubError(
        f"model reference: got {_shown(parts)!r}, which is on no hub that is known; expected a URL of huggingface.co "
        f"or modelscope.cn; for a mirror set HF_ENDPOINT or MODELSCOPE_ENDPOINT to {host}, and write hf:org/name or "
        "ms:org/name"
    )
