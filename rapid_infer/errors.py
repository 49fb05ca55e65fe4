"""Typed errors: every mistake a user can make ends in one of these, with a message that says what, got, expected and
what to do.

The command line prints them as one line and exits with code 2 (`EngineDeadError`, which is ours: 1).
"""


class RapidInferError(Exception):
    """Base of all errors that rapid_infer raises on purpose."""


class ConfigError(RapidInferError, ValueError):
    """A model's config.json or an engine option is missing, malformed or unsupported."""


class PluginError(RapidInferError):
    """No plugin, several plugins, or a broken plugin for what was asked."""


class WeightError(RapidInferError):
    """The checkpoint does not fill the model exactly, or its files cannot be read."""


class HubError(RapidInferError):
    """Model files could not be found, fetched or verified."""


class RequestError(RapidInferError, ValueError):
    """One request is invalid; the engine and all other requests are unaffected."""


class EngineDeadError(RapidInferError, RuntimeError):
    """The engine cannot run another step; carries the first cause."""
