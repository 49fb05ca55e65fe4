"""Extensions are installed metadata: a table of strings per entry-point group, and the table of models on top of it.

Building a table reads `entry_points.txt` files and runs no plugin code; loading an entry imports exactly one module.
Whoever resolves an entry hands its target string to the worker processes, which call `load_target` and never come here.
This module knows no model, no torch and no command line.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from rapid_infer.errors import PluginError
from rapid_infer.known_plugins import KNOWN_PLUGINS
from rapid_infer.version import __version__

if TYPE_CHECKING:
    from importlib.metadata import Distribution

API_VERSION = 1
"""Number of the plugin interface; it grows when plugins written for the previous one stop working."""

RUNTIME = "rapid-infer"
FALLBACK = "*"
"""The name under which an entry serves any architecture."""

_TARGET = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*):([^\W\d]\w*(?:\.[^\W\d]\w*)*)")


@dataclass(frozen=True)
class Entry:
    """One extension as strings. `distribution` and `version` are None for an entry registered in this process."""

    name: str
    target: str
    distribution: str | None
    version: str | None
    source: Literal["entry point", "registered"]
    location: str = ""
    """The metadata folder that declared it."""
    requires: tuple[str, ...] = ()
    """The distribution's own requirements on rapid-infer, as written."""
    fault: str | None = None
    """Why the distribution's METADATA cannot be used; such an entry is listed, but refuses to load."""

    @property
    def origin(self) -> str:
        """Where the entry comes from, in words for a message."""
        return f"{self.distribution} {self.version or '?'}" if self.distribution else "registered in this process"


@dataclass(frozen=True)
class Installed:
    """One distribution on the path, seen through one group (`targets` is empty when it does not declare the group)."""

    name: str
    version: str | None
    location: str
    targets: Mapping[str, str] = field(default_factory=dict)
    requires: tuple[str, ...] = ()
    fault: str | None = None

    def entries(self) -> list[Entry]:
        """The group's entries of this distribution."""
        return [
            Entry(name, target, self.name, self.version, "entry point", self.location, self.requires, self.fault)
            for name, target in self.targets.items()
        ]


class EntryPointTable:
    """The extensions of one entry-point group: those installed, and those registered in this process.

    Metadata is read once, on first use. `path` replaces `sys.path`. In messages an entry is called `what`, `pin_option`
    is the option that chooses a distribution, and `known` names the package to install for a missing name.
    """

    def __init__(
        self,
        group: str,
        path: list[str] | None = None,
        *,
        what: str = "entry",
        pin_option: str | None = None,
        known: Mapping[str, str] | None = None,
    ) -> None:
        self.group = group
        self._path = path
        self._what = what
        self._pin_option = pin_option
        self._known = known or {}
        self._registered: dict[str, Entry] = {}

    @cached_property
    def _scan(self) -> tuple[dict[str, Installed], list[Installed]]:
        """The distributions that Python uses, by name, and later copies on the path, which these hide."""
        used: dict[str, Installed] = {}
        hidden: list[Installed] = []
        for location, dist in _distributions(self._path):
            found = _inspect(dist, self.group, location)
            if used.setdefault(_normal(found.name), found) is not found:
                hidden.append(found)
        return used, hidden

    def names(self) -> list[str]:
        """All names, sorted; one that two distributions claim appears once."""
        used, _ = self._scan
        return sorted({name for found in used.values() for name in found.targets} | self._registered.keys())

    def entries(self) -> list[Entry]:
        """All entries by name; clashing ones all appear, overridden and hidden ones do not."""
        return [entry for name in self.names() for entry in self.candidates(name)]

    def duplicates(self) -> list[tuple[Installed, Installed]]:
        """Copies of a distribution that are hidden, each after the one that is used."""
        used, hidden = self._scan
        return [(used[_normal(found.name)], found) for found in hidden]

    def faults(self) -> list[str]:
        """Distributions of the group whose metadata cannot be read, one line each."""
        used, _ = self._scan
        return [f"{found.location}: {found.fault}" for found in used.values() if found.fault]

    def candidates(self, name: str, distribution: str | None = None) -> list[Entry]:
        """The entries that could serve `name`; a `distribution` leaves only what that one installs."""
        if distribution is None and name in self._registered:
            return [self._registered[name]]
        used, _ = self._scan
        found = used.values() if distribution is None else filter(None, [used.get(_normal(distribution))])
        return [entry for one in found for entry in one.entries() if entry.name == name]

    def lookup(self, name: str, distribution: str | None = None) -> Entry:
        """The one entry for `name`, nothing imported.

        Raises PluginError when nothing provides it, or when two distributions do and `distribution` does not pin one.
        """
        found = self.candidates(name, distribution)
        if not found:
            raise PluginError(self.missing(name) if distribution is None else self._not_pinned(name, distribution))
        if len(found) > 1:
            raise PluginError(self._clash(name, found))
        return found[0]

    def load(self, entry: Entry) -> object:
        """Import the entry's module and return the attribute it names.

        Raises PluginError before importing when the distribution asks for another rapid-infer, and, with the cause
        attached, when the import raises anything or the attribute is missing.
        """
        label = f"{self._what} {entry.name!r}: "
        if entry.fault:
            raise PluginError(f"{label}{entry.fault}; reinstall {entry.distribution}")
        _check_requirements(label, entry)
        return load_target(entry.target, label, f" ({entry.origin})")

    def register(self, name: str, target: str, *, override: bool = False) -> None:
        """Add an entry for this process, as the string `pkg.mod:Attr`; nothing is imported.

        Raises TypeError for anything but strings and PluginError for a malformed target, or for a name that is already
        taken, installed or registered, unless `override` is true.
        """
        if not isinstance(name, str) or not isinstance(target, str):
            raise TypeError(
                f"register takes the {self._what} and 'pkg.mod:Attr' as strings, because worker processes import "
                f"it by name; got {name!r} and {target!r}"
            )
        if not name or not _TARGET.fullmatch(target):
            raise PluginError(f"{self._what} {name!r}: a target looks like 'pkg.mod:Attr', got {target!r}")
        taken = self.candidates(name)
        if taken and not override:
            owners = " and ".join(f"{entry.target} ({entry.origin})" for entry in taken)
            raise PluginError(f"{self._what} {name!r} is already {owners}; pass override=True to replace it here")
        self._registered[name] = Entry(name, target, None, None, "registered")

    def unregister(self, name: str) -> None:
        """Take back `register(name, ...)`; installed entries show again. PluginError if it was not registered."""
        if self._registered.pop(name, None) is None:
            raise PluginError(f"{self._what} {name!r} was not registered in this process")

    def _clash(self, name: str, found: list[Entry]) -> str:
        owners = " and ".join(f"{entry.origin} ({entry.target})" for entry in found)
        removes = " or ".join(f"`pip uninstall {entry.distribution}`" for entry in found)
        number, keep = ("two", "one") if len(found) == 2 else (str(len(found)), "all but one")
        pin = f", or choose one for this run: `{self._pin_option} {found[0].distribution}`" if self._pin_option else ""
        return f"{self._what} {name!r} is provided by {number} distributions: {owners}; remove {keep}: {removes}{pin}"

    def _not_pinned(self, name: str, distribution: str) -> str:
        owners = ", ".join(entry.origin for entry in self.candidates(name)) or "nothing installed"
        has = [e.name for e in self.entries() if _normal(e.distribution or "") == _normal(distribution)]
        offers = f"it provides {', '.join(has)}" if has else f"it is not installed, or declares no {self.group}"
        return f"{distribution} does not provide {self._what} {name!r} ({offers}); {name!r} comes from {owners}"

    def missing(self, name: str) -> str:
        """Why nothing provides `name`, and what to install."""
        names = [known for known in self.names() if known != FALLBACK]
        lines = [f"no installed plugin provides {self._what} {name!r}; installed: {', '.join(names) or 'none'}"]
        if near := _near(name, names):
            lines.append(f"did you mean {' or '.join(near)}?")
        _, hidden = self._scan
        if stale := next((entry for found in hidden for entry in found.entries() if entry.name == name), None):
            lines.append(
                f"{stale.origin} declares it in {stale.location}, but an older copy of its metadata comes first on the "
                "path: see `rapid-infer models --check`"
            )
        if package := self._known.get(name):
            present = any(_normal(e.distribution or "") == package for e in self.entries())
            lines.append(f"to get it: `pip install {'--upgrade ' if present else ''}{package}`")
        for entry in self.candidates(FALLBACK):
            lines.append(f"the fallback {entry.target} ({entry.origin}) is used only with `--model-impl auto`")
        lines.extend(f"unreadable: {fault}" for fault in self.faults())
        return "; ".join(lines)


class ModelTable(EntryPointTable):
    """Which class serves an architecture. All methods but `resolve` and `load` run no plugin code."""

    def __init__(self, path: list[str] | None = None) -> None:
        super().__init__(
            "rapid_infer.models", path, what="architecture", pin_option="--model-plugin", known=KNOWN_PLUGINS
        )

    def architectures(self) -> list[str]:
        """The architectures that are installed or registered, sorted, without the fallback."""
        return [name for name in self.names() if name != FALLBACK]

    def lookup(self, name: str, distribution: str | None = None, model_impl: str = "plugin") -> Entry:
        """The entry for the architecture `name`, of `distribution` if given.

        With `model_impl` auto the entry named `*` where there is no other, with fallback in any case. Raises
        PluginError when there is none, or when two distributions provide it and `distribution` does not choose.
        """
        if model_impl == "plugin" or (model_impl == "auto" and self.candidates(name, distribution)):
            return super().lookup(name, distribution)
        if distribution is None and not self.candidates(FALLBACK):
            raise PluginError(self._no_fallback(name, model_impl))
        return super().lookup(FALLBACK, distribution)

    def _no_fallback(self, arch: str, model_impl: str) -> str:
        plugins = [entry.origin for entry in self.candidates(arch)]
        other = f"{arch} comes from {', '.join(plugins)}" if plugins else self.missing(arch)
        return (
            f"model_impl={model_impl!r}: no installed plugin serves as a fallback for any architecture, which is an "
            f"entry named {FALLBACK!r} of {self.group}; {other}"
        )

    def load(self, entry: Entry) -> type:
        """Import the entry's module and return its class; PluginError as in `EntryPointTable.load`, or if no class."""
        loaded = super().load(entry)
        if not isinstance(loaded, type):
            kind = type(loaded).__name__
            raise PluginError(f"architecture {entry.name!r}: {entry.target} ({entry.origin}) is a {kind}, not a class")
        return loaded

    def resolve(self, arch: str, plugin: str | None = None, model_impl: str = "plugin") -> type:
        """`load(lookup(...))`: imports exactly one module. Raises PluginError."""
        return self.load(self.lookup(arch, plugin, model_impl))


ModelRegistry = ModelTable()
"""The models of this process."""


def load_target(target: str, label: str = "", origin: str = "") -> object:
    """Import `pkg.mod:Attr` and return the attribute, asking no registry; PluginError with the cause if that fails.

    `label` and `origin` say in the message what it is for and where it comes from.
    """
    try:
        if not _TARGET.fullmatch(target):
            raise ValueError(f"a target looks like 'pkg.mod:Attr', got {target!r}")
        return pkgutil.resolve_name(target)
    except (Exception, SystemExit) as error:
        raise PluginError(f"{label}cannot load {target}{origin}: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """Type, text, and the deepest line that is not import machinery: a bare AttributeError says too little."""
    skip = {__file__, importlib.__file__, pkgutil.__file__}
    place = ""
    trace = error.__traceback__
    while trace:
        file = trace.tb_frame.f_code.co_filename
        if file not in skip and not file.startswith("<frozen "):
            place = f" (at {file}:{trace.tb_lineno})"
        trace = trace.tb_next
    return f"{type(error).__name__}: {error}{place}"


def _check_requirements(label: str, entry: Entry) -> None:
    if not entry.requires:
        return
    from packaging.requirements import InvalidRequirement, Requirement

    for text in entry.requires:
        try:
            wanted = Requirement(text)
        except InvalidRequirement as error:
            raise PluginError(f"{label}{entry.origin} has a malformed requirement {text!r}: {error}") from error
        applies = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
        if applies and not wanted.specifier.contains(__version__, prereleases=True):
            raise PluginError(
                f"{label}{entry.origin} requires {RUNTIME}{wanted.specifier}, but {RUNTIME} {__version__} is "
                f"running; install a plugin for this runtime (`pip install --upgrade {entry.distribution}`) or a "
                f'runtime for this plugin (`pip install "{RUNTIME}{wanted.specifier}"`)'
            )


def _near(name: str, names: list[str]) -> list[str]:
    from difflib import get_close_matches

    # Nearly every name ends in ForCausalLM; with that ending everything would be near.
    stems: dict[str, list[str]] = {}
    for known in names:
        stems.setdefault(_stem(known), []).append(known)
    return [known for stem in get_close_matches(_stem(name), stems, n=3) for known in stems[stem]]


def _stem(name: str) -> str:
    return re.sub(r"(For[A-Z]\w*|LMHeadModel|Model)$", "", name).lower()


def _normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _distributions(path: list[str] | None) -> list[tuple[str, Distribution]]:
    """All distributions in path order, and in a fixed order inside a folder, where Python's is that of the disk."""
    from importlib import metadata

    folders: dict[str, int] = {}
    found: list[tuple[tuple[int, bool, str], str, Distribution]] = []
    for dist in metadata.distributions() if path is None else metadata.distributions(path=path):
        location = str(getattr(dist, "_path", None) or f"{dist.name}.{type(dist).__name__}")
        folder, _, file = location.rpartition(os.sep)
        if file.startswith("~"):  # what pip left of an interrupted uninstall
            continue
        order = (folders.setdefault(folder, len(folders)), file.endswith(".egg-info"), file)
        found.append((order, location, dist))
    return [(location, dist) for _, location, dist in sorted(found, key=lambda item: item[0])]


def _inspect(dist: Distribution, group: str, location: str) -> Installed:
    """METADATA is parsed only for a distribution that declares the group; for the others the file name must do."""
    name, release = _split_file_name(location)
    try:
        if group not in (dist.read_text("entry_points.txt") or ""):
            return Installed(name, release, location)
        points = dist.entry_points.select(group=group)
        targets = {point.name: point.value.partition("[")[0].strip() for point in points}
    except Exception as error:
        if isinstance(error, UnicodeDecodeError) and group.encode() not in error.object:
            return Installed(name, release, location)
        return Installed(name, release, location, fault=_unreadable("entry_points.txt", error))
    try:
        name, release, requires = _read_metadata(dist)
    except Exception as error:
        return Installed(name, release, location, targets, fault=_unreadable("METADATA", error))
    return Installed(name, release, location, targets, requires)


def _unreadable(file: str, error: Exception) -> str:
    return f"{file} is unreadable ({type(error).__name__}: {error})"


def _read_metadata(dist: Distribution) -> tuple[str, str, tuple[str, ...]]:
    from email import message_from_string

    text = dist.read_text("METADATA") or dist.read_text("PKG-INFO")
    if not text:
        raise FileNotFoundError("no METADATA file, or an empty one")
    header = message_from_string(text.partition("\n\n")[0])  # the long description is not our business
    name, release = header["Name"], header["Version"]
    if not name or not release:
        raise ValueError("no Name or no Version in it")
    wanted = header.get_all("Requires-Dist") or dist.requires or []
    names = (re.match(r"[\w.-]+", text.strip()) for text in wanted)
    return name, release, tuple(text for text, match in zip(wanted, names) if match and _normal(match[0]) == RUNTIME)


def _split_file_name(location: str) -> tuple[str, str | None]:
    folder, _, file = location.rpartition(os.sep)
    if file.lower() == "egg-info":  # inside pkg-1.0-py3.11.egg
        file = os.path.basename(folder)
    name, _, rest = file.rpartition(".")[0].partition("-")
    return name.replace("_", "-"), rest.partition("-")[0] or None
