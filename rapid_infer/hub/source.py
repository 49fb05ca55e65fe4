"""What a hub is to the rest of this package, and how an official client's errors become ours."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from rapid_infer.errors import HubError, RapidInferError
from rapid_infer.hub.entry import FileEntry
from rapid_infer.hub.reference import ModelRef


class SourceError(HubError):
    """A hub cannot be reached, does not have the model, or gives wrong bytes: another hub may do better."""


class Source(Protocol):
    """One hub. Both calls use its official client and raise SourceError when it does not give what was asked for."""

    name: str
    title: str
    endpoint: str
    default_revision: str

    def resolve(self, ref: ModelRef) -> str:
        """The commit that `ref.revision` (None: the default) means now."""
        ...

    def manifest(self, ref: ModelRef) -> list[FileEntry]:
        """All files at `ref.revision`, a commit that `resolve` gave; never empty."""
        ...

    def headers(self) -> Mapping[str, str]:
        """Request headers for this hub's own origin; they may hold a token."""
        ...


def endpoint_url(*candidates: str | None) -> str:
    """The first that is not empty, as a URL without a slash at its end; a bare host gets https."""
    url = next(text.strip() for text in candidates if text and text.strip()).rstrip("/")
    return url if url.lower().startswith(("http://", "https://")) else f"https://{url}"


@contextmanager
def client_errors(source: Source, ref: ModelRef) -> Iterator[None]:
    """Turn whatever an official client raises into a SourceError of one line."""
    try:
        yield
    except RapidInferError:
        raise
    except ImportError as error:
        raise SourceError(f"{source.title}: its client is not installed ({error}); install it with pip") from error
    except Exception as error:  # two clients, two HTTP libraries: their common base is Exception
        at = f"@{ref.revision}" if ref.revision else ""
        raise SourceError(f"{source.title} ({source.endpoint}): {ref.name}{at}: {explain(error)}") from error


_MEANINGS = (
    (("RevisionNotFound",), "no such revision"),
    (("GatedRepo",), "access to this model must be granted on its page, and a token be set"),
    (("RepositoryNotFound", "NotExist"), "no such model, or it is private and needs a token"),
    (("Authentication", "PermissionDenied"), "access denied; set a token, or one that may read this model"),
    (("Offline",), "its client is in offline mode"),
    (("RateLimit",), "too many requests; wait, or set a token"),
    (("Timeout",), "no answer in time"),
    (("Connect", "Network"), "no connection"),
    (("JSONDecode",), "the answer is not a hub's; check the endpoint"),
    (("HFValidation",), "no name that this hub can have"),
)


def explain(error: BaseException) -> str:
    """One line about a client's error, by its kind and status: its own text can hold URLs with signatures."""
    kinds = " ".join(kind.__name__ for kind in type(error).__mro__)
    status = getattr(getattr(error, "response", None), "status_code", None) or getattr(error, "status_code", None)
    for names, meaning in _MEANINGS:
        if any(name in kinds for name in names):
            return f"{meaning} ({type(error).__name__})"
    return f"HTTP {status}" if status else type(error).__name__
