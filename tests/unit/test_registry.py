"""The plugin table, against fake distributions: metadata folders and modules written to a temporary folder."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

import rapid_infer.errors
from rapid_infer import registry
from rapid_infer.cli.models import _duplicates
from rapid_infer.errors import PluginError
from rapid_infer.registry import EntryPointTable, ModelTable, load_target

GROUP = "rapid_infer.models"
GOOD = "class Model:\n    pass\n"


def install(
    site: Path,
    distribution: str,
    targets: dict[str, str],
    *,
    version: str = "1.0",
    requires: tuple[str, ...] = (),
    modules: dict[str, str] | None = None,
    kind: str = "dist-info",
    group: str = GROUP,
) -> Path:
    """Write what `pip install` would leave in `site`; returns the metadata folder."""
    stem = distribution.replace("-", "_")
    folder = site / (f"{stem}-{version}.dist-info" if kind == "dist-info" else f"{stem}.egg-info")
    folder.mkdir(parents=True)
    header = [f"Name: {distribution}", f"Version: {version}", *(f"Requires-Dist: {line}" for line in requires)]
    metadata = "METADATA" if kind == "dist-info" else "PKG-INFO"
    (folder / metadata).write_text("Metadata-Version: 2.1\n" + "\n".join(header) + "\n\nRequires-Dist: no header\n")
    points = "".join(f"{name} = {target}\n" for name, target in targets.items())
    (folder / "entry_points.txt").write_text(f"[console_scripts]\ntool = nowhere:main\n\n[{group}]\n{points}")
    for module, source in (modules or {}).items():
        (site / f"{module}.py").write_text(source)
    return folder


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in imported():
        del sys.modules[name]


def imported() -> list[str]:
    return [name for name in sys.modules if name.startswith("fakeplug_")]


def table_of(*folders: Path) -> ModelTable:
    return ModelTable([str(folder) for folder in folders])


def test_listing_imports_nothing_and_resolving_imports_one_module(site: Path) -> None:
    for letter in "bac":
        modules = {f"fakeplug_{letter}": GOOD}
        install(site, f"plug-{letter}", {f"{letter.upper()}ForCausalLM": f"fakeplug_{letter}:Model"}, modules=modules)
    install(site, "other", {"X": "fakeplug_x:X"}, group="something.else")
    table = table_of(site)

    assert table.architectures() == ["AForCausalLM", "BForCausalLM", "CForCausalLM"]
    entry = table.lookup("BForCausalLM")
    assert (entry.target, entry.distribution, entry.version) == ("fakeplug_b:Model", "plug-b", "1.0")
    assert entry.source == "entry point"
    assert imported() == []

    model = table.resolve("BForCausalLM")
    assert model.__name__ == "Model"
    assert imported() == ["fakeplug_b"]
    assert load_target(entry.target) is model


def test_the_table_reads_sys_path_when_given_no_path(site: Path) -> None:
    install(site, "plug-a", {"FakeForCausalLM": "fakeplug_a:Model"})
    assert "FakeForCausalLM" in ModelTable().architectures()


def test_extras_in_a_target_are_dropped_and_a_nested_attribute_is_found(site: Path) -> None:
    source = "class Outer:\n    class Model:\n        pass\n"
    install(site, "plug-a", {"A": "fakeplug_a:Outer.Model [cuda]"}, modules={"fakeplug_a": source})
    assert table_of(site).resolve("A").__qualname__ == "Outer.Model"


def test_two_distributions_clash_unless_one_is_pinned(site: Path) -> None:
    install(site, "plug-a", {"A": "fakeplug_a:Model", "OnlyA": "fakeplug_a:Model"}, modules={"fakeplug_a": GOOD})
    install(site, "plug-b", {"A": "fakeplug_b:Model"}, version="2.0", modules={"fakeplug_b": GOOD})
    table = table_of(site)

    with pytest.raises(PluginError) as caught:
        table.resolve("A")
    for part in [
        "plug-a 1.0",
        "plug-b 2.0",
        "`pip uninstall plug-a`",
        "`pip uninstall plug-b`",
        "--model-plugin plug-",
    ]:
        assert part in str(caught.value)
    assert imported() == []
    assert table.architectures() == ["A", "OnlyA"]
    assert [entry.distribution for entry in table.entries()] == ["plug-a", "plug-b", "plug-a"]

    assert table.resolve("A", "plug-b").__module__ == "fakeplug_b"
    assert table.lookup("A", "Plug_A").distribution == "plug-a"
    assert table.lookup("OnlyA").distribution == "plug-a"


def test_a_pin_that_does_not_fit_is_an_error_that_says_what_the_distribution_has(site: Path) -> None:
    install(site, "plug-a", {"A": "fakeplug_a:Model"})
    install(site, "plug-b", {"B": "fakeplug_b:Model"})
    table = table_of(site)
    with pytest.raises(PluginError, match=r"plug-b does not provide architecture 'A' \(it provides B\).*plug-a 1.0"):
        table.lookup("A", "plug-b")
    with pytest.raises(PluginError, match=r"plug-c does not provide .*not installed"):
        table.lookup("A", "plug-c")


@pytest.mark.parametrize(
    ("source", "cause", "text"),
    [
        ("import fakeplug_nosuch", ModuleNotFoundError, "No module named 'fakeplug_nosuch'"),
        ("from json import nosuch", ImportError, "cannot import name 'nosuch'"),
        ("x = (", SyntaxError, "was never closed"),
        ("raise SystemExit(3)", SystemExit, "3"),
        ("\nNone.x", AttributeError, "fakeplug_bad.py:2"),
        ("Other = 1", AttributeError, "no attribute 'Model'"),
        (None, ModuleNotFoundError, "No module named 'fakeplug_bad'"),
    ],
)
def test_a_broken_plugin_is_named_with_its_cause_and_disturbs_no_other(
    site: Path, source: str | None, cause: type[BaseException], text: str
) -> None:
    install(site, "plug-bad", {"Bad": "fakeplug_bad:Model"}, modules={"fakeplug_bad": source} if source else None)
    install(site, "plug-good", {"Good": "fakeplug_good:Model"}, modules={"fakeplug_good": GOOD})
    table = table_of(site)
    with pytest.raises(PluginError) as caught:
        table.resolve("Bad")
    assert type(caught.value.__cause__) is cause
    for part in ["'Bad'", "plug-bad 1.0", "fakeplug_bad:Model", f"{cause.__name__}: ", text]:
        assert part in str(caught.value)
    assert table.resolve("Good").__module__ == "fakeplug_good"

    with pytest.raises(PluginError, match="fakeplug_bad:Model") as in_worker:
        load_target("fakeplug_bad:Model")
    assert type(in_worker.value.__cause__) is cause


def test_an_interrupt_during_an_import_stays_an_interrupt(site: Path) -> None:
    install(site, "plug-a", {"A": "fakeplug_a:Model"}, modules={"fakeplug_a": "raise KeyboardInterrupt"})
    with pytest.raises(KeyboardInterrupt):
        table_of(site).resolve("A")


def test_a_target_that_is_no_class_or_no_target_is_refused(site: Path) -> None:
    install(site, "plug-a", {"A": "fakeplug_a:model", "B": "fakeplug_a"}, modules={"fakeplug_a": "model = 1"})
    with pytest.raises(PluginError, match=r"'A': fakeplug_a:model \(plug-a 1.0\) is a int, not a class"):
        table_of(site).resolve("A")
    with pytest.raises(PluginError, match=r"'B'.*plug-a 1.0.*looks like 'pkg.mod:Attr', got 'fakeplug_a'"):
        table_of(site).resolve("B")


@pytest.mark.parametrize("requirement", ["rapid-infer>=99", "Rapid_Infer <0.0.1", "rapid-infer[serve]>=99"])
def test_a_requirement_the_runtime_does_not_meet_is_refused_before_importing(site: Path, requirement: str) -> None:
    modules = {"fakeplug_a": GOOD}
    install(site, "plug-a", {"A": "fakeplug_a:Model"}, requires=("torch", requirement), modules=modules)
    with pytest.raises(PluginError) as caught:
        table_of(site).resolve("A")
    specifier = requirement[requirement.index(next(c for c in requirement if c in "<>")) :]
    text = str(caught.value)
    assert f"plug-a 1.0 requires rapid-infer{specifier}, but rapid-infer {registry.__version__} is running" in text
    assert (
        f'`pip install --upgrade plug-a`) or a runtime for this plugin (`pip install "rapid-infer{specifier}"`' in text
    )
    assert imported() == []


OTHERS = ["rapid-infer", "rapid-infer>=0.0.1", "rapid-infer-llama>=99", "rapid-infer @ https://host/file.whl"]


@pytest.mark.parametrize(
    "requirement", [*OTHERS, 'rapid-infer>=99; python_version < "3"', 'rapid-infer>=99; extra == "dev"']
)
def test_other_requirements_do_not_stop_a_plugin(site: Path, requirement: str) -> None:
    install(site, "plug-a", {"A": "fakeplug_a:Model"}, requires=(requirement,), modules={"fakeplug_a": GOOD})
    assert table_of(site).resolve("A")


@pytest.fixture(params=["installed", "before 26"])
def packaging_release(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before packaging 26 a pre-release met no specifier that names none, unless the caller said so."""
    contains = SpecifierSet.contains

    def before_26(self: SpecifierSet, item: str, prereleases: bool | None = None) -> bool:
        return contains(self, item, prereleases=bool(self.prereleases) if prereleases is None else prereleases)

    if request.param == "before 26":
        monkeypatch.setattr(SpecifierSet, "contains", before_26)


@pytest.mark.usefixtures("packaging_release")
@pytest.mark.parametrize("version", ["0.3.0.dev1", "0.3.0a2", "0.3.0rc1", "0.3.0rc1.post1.dev2", "0.3.0.dev1+local"])
@pytest.mark.parametrize(
    ("specifier", "met"),
    [
        *[(specifier, True) for specifier in ("", ">=0.2", "~=0.2", "==0.3.*", ">=0.2,<0.4", ">=0.3.dev0", "!=0.3.0")],
        *[(specifier, False) for specifier in (">=0.3", "<0.3", "==0.3.0", ">=0.3.0rc2", "~=0.2.0")],
    ],
)
def test_a_prerelease_of_the_runtime_meets_what_its_number_meets(
    site: Path, monkeypatch: pytest.MonkeyPatch, version: str, specifier: str, met: bool
) -> None:
    monkeypatch.setattr(registry, "__version__", version)
    requires = (f"rapid-infer{specifier}",)
    install(site, "plug-a", {"A": "fakeplug_a:Model"}, requires=requires, modules={"fakeplug_a": GOOD})
    if met:
        assert table_of(site).resolve("A")
    else:
        wanted = SpecifierSet(specifier)
        with pytest.raises(PluginError, match=rf"requires rapid-infer{re.escape(str(wanted))}, but rapid-infer 0\.3"):
            table_of(site).resolve("A")


def test_a_malformed_requirement_is_the_plugins_error(site: Path) -> None:
    install(site, "plug-a", {"A": "fakeplug_a:Model"}, requires=("rapid-infer>=>1",))
    with pytest.raises(PluginError, match=r"plug-a 1.0 has a malformed requirement 'rapid-infer>=>1'"):
        table_of(site).resolve("A")


def test_an_unknown_architecture_says_what_is_installed_what_is_near_and_what_to_install(site: Path) -> None:
    with pytest.raises(PluginError, match=r"'LlamaForCausalLM'; installed: none; .*install rapid-infer-llama"):
        table_of(site).lookup("LlamaForCausalLM")
    install(site, "plug-a", {"Qwen9ForCausalLM": "a:A", "MambaForCausalLM": "a:B"})
    with pytest.raises(PluginError) as caught:
        table_of(site).lookup("Qwen8ForCausalLM")
    assert "installed: MambaForCausalLM, Qwen9ForCausalLM; did you mean Qwen9ForCausalLM?" in str(caught.value)
    assert "pip install" not in str(caught.value)


def test_an_installed_package_that_is_too_old_for_an_architecture_is_to_be_upgraded(site: Path) -> None:
    install(site, "rapid-infer-qwen3", {"Qwen3ForCausalLM": "a:A"})
    with pytest.raises(PluginError, match="pip install --upgrade rapid-infer-qwen3"):
        table_of(site).lookup("Qwen3MoeForCausalLM")


def test_registered_strings_are_entries_too(site: Path) -> None:
    (site / "fakeplug_a.py").write_text(GOOD)
    table = table_of(site)
    table.register("A", "fakeplug_a:Model")
    assert imported() == []
    entry = table.lookup("A")
    assert (entry.source, entry.distribution, entry.version) == ("registered", None, None)
    assert table.resolve("A").__module__ == "fakeplug_a"
    table.unregister("A")
    with pytest.raises(PluginError, match="'A' was not registered"):
        table.unregister("A")


def test_register_takes_strings_only() -> None:
    table = ModelTable([])
    with pytest.raises(TypeError, match="strings"):
        table.register("A", ModelTable)  # type: ignore[arg-type]
    for target in ["pkg.mod", "pkg.mod:", ":Attr", "pkg mod:Attr", "pkg/mod.py:Attr", ""]:
        with pytest.raises(PluginError, match=r"looks like 'pkg.mod:Attr'"):
            table.register("A", target)
    assert table.architectures() == []


def test_register_clashes_unless_told_to_override(site: Path) -> None:
    install(site, "plug-a", {"A": "fakeplug_a:Model"})
    table = table_of(site)
    with pytest.raises(PluginError, match=r"'A' is already fakeplug_a:Model \(plug-a 1.0\).*override=True"):
        table.register("A", "fakeplug_b:Model")
    table.register("A", "fakeplug_b:Model", override=True)
    assert table.lookup("A").target == "fakeplug_b:Model"
    assert table.lookup("A", "plug-a").target == "fakeplug_a:Model"
    with pytest.raises(PluginError, match="registered in this process"):
        table.register("A", "fakeplug_c:Model")
    table.register("A", "fakeplug_c:Model", override=True)
    table.unregister("A")
    assert table.lookup("A").target == "fakeplug_a:Model"


def test_the_fallback_serves_only_when_asked_for(site: Path) -> None:
    install(site, "plug-any", {"*": "fakeplug_any:Model"}, modules={"fakeplug_any": GOOD})
    install(site, "plug-a", {"A": "fakeplug_a:Model"})
    table = table_of(site)
    assert table.architectures() == ["A"]
    with pytest.raises(PluginError, match=r"fakeplug_any:Model \(plug-any 1.0\) is used only with `--model-impl auto`"):
        table.lookup("B")
    assert table.lookup("A", model_impl="auto").target == "fakeplug_a:Model"
    assert table.lookup("A", model_impl="fallback").target == "fakeplug_any:Model"
    assert table.lookup("B", model_impl="auto").target == "fakeplug_any:Model"
    assert table.lookup("A", "plug-any", "auto").target == "fakeplug_any:Model"
    assert table.resolve("B", "plug-any", "auto").__module__ == "fakeplug_any"
    with pytest.raises(
        PluginError, match=r"plug-a does not provide architecture '\*' \(it provides A\); '\*' comes from"
    ):
        table.lookup("B", "plug-a", "auto")


def test_a_fallback_that_is_asked_for_and_not_there(site: Path) -> None:
    install(site, "plug-a", {"AForCausalLM": "fakeplug_a:Model"})
    table = table_of(site)
    none = r"no installed plugin serves as a fallback for any architecture, which is an entry named '\*' of rapid_infer"
    assert table.lookup("AForCausalLM", model_impl="auto").target == "fakeplug_a:Model"
    with pytest.raises(PluginError, match=rf"model_impl='fallback': {none}.*; AForCausalLM comes from plug-a 1.0$"):
        table.lookup("AForCausalLM", model_impl="fallback")
    with pytest.raises(
        PluginError, match=rf"model_impl='auto': {none}.*; no installed plugin provides .*mean AForCaus"
    ):
        table.lookup("AaForCausalLM", model_impl="auto")


def hidden(table: ModelTable) -> list[tuple[str, str]]:
    return [(used.location, copy.location) for used, copy in table.duplicates()]


def test_one_distribution_found_twice_is_no_clash_and_the_first_on_the_path_wins(tmp_path: Path) -> None:
    here, site = tmp_path / "here", tmp_path / "site"
    stale = install(here, "plug-a", {"A": "old:Model"}, version="0.9", kind="egg-info")
    fresh = install(site, "plug-a", {"A": "new:Model", "B": "new:Other"})

    table = table_of(here, site)
    assert [entry.target for entry in table.entries()] == ["old:Model"]
    assert hidden(table) == [(str(stale), str(fresh))]
    with pytest.raises(PluginError, match=r"plug-a 1.0 declares it in .*site.*older copy.*models --check"):
        table.lookup("B")

    assert table_of(site, here).architectures() == ["A", "B"]


def test_stale_metadata_without_the_group_hides_the_installed_one_as_it_does_for_python(tmp_path: Path) -> None:
    stale = install(tmp_path / "here", "plug-a", {"x": "a:b"}, kind="egg-info", group="something.else")
    fresh = install(tmp_path / "site", "plug-a", {"A": "new:Model"})
    table = table_of(stale.parent, fresh.parent)
    assert table.architectures() == []
    assert hidden(table) == [(str(stale), str(fresh))]


def test_in_one_folder_installed_metadata_comes_before_egg_info_and_leftovers_do_not_count(tmp_path: Path) -> None:
    install(tmp_path, "plug-a", {"A": "old:Model"}, kind="egg-info")
    install(tmp_path, "plug-a", {"A": "new:Model"})
    install(tmp_path, "~lug-a", {"A": "left:Model"})
    table = table_of(tmp_path)
    assert table.lookup("A").target == "new:Model"
    assert len(table.duplicates()) == 1


def test_a_folder_that_is_on_the_path_twice_is_one_folder(tmp_path: Path) -> None:
    site, link = tmp_path / "site", tmp_path / "link"
    install(site, "plug-a", {"A": "new:Model"})
    link.symlink_to(site)
    table = table_of(site, link, site)
    assert table.lookup("A").target == "new:Model"
    assert list(_duplicates(table)) == []


def test_requirements_of_egg_info_are_read_from_its_own_file(site: Path) -> None:
    folder = install(site, "plug-a", {"A": "fakeplug_a:Model"}, kind="egg-info", modules={"fakeplug_a": GOOD})
    (folder / "requires.txt").write_text("torch\nrapid-infer>=99\n\n[dev]\npytest\n")
    with pytest.raises(PluginError, match="requires rapid-infer>=99"):
        table_of(site).resolve("A")


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"garbage without a header", None])
def test_unreadable_metadata_breaks_its_own_distribution_only(site: Path, content: bytes | None) -> None:
    folder = install(site, "plug-bad", {"Bad": "fakeplug_bad:Model"}, modules={"fakeplug_bad": GOOD})
    (folder / "METADATA").unlink()
    if content is not None:
        (folder / "METADATA").write_bytes(content)
    install(site, "plug-good", {"Good": "fakeplug_good:Model"}, modules={"fakeplug_good": GOOD})
    table = table_of(site)

    assert table.resolve("Good")
    assert table.architectures() == ["Bad", "Good"]
    assert [fault.partition(": ")[0] for fault in table.faults()] == [str(folder)]
    with pytest.raises(PluginError, match=r"'Bad': METADATA is unreadable .*reinstall plug-bad"):
        table.resolve("Bad")
    assert "fakeplug_bad" not in imported()


def test_unreadable_entry_points_are_a_fault_only_where_they_name_the_group(site: Path) -> None:
    ours = install(site, "plug-bad", {})
    (ours / "entry_points.txt").write_bytes(b"[rapid_infer.models]\nA = \xff\n")
    (install(site, "foreign", {}) / "entry_points.txt").write_bytes(b"[console_scripts]\nx = \xff\n")
    malformed = install(site, "plug-worse", {})
    (malformed / "entry_points.txt").write_text("[rapid_infer.models]\nno equals sign\n")
    install(site, "plug-good", {"Good": "fakeplug_good:Model"}, modules={"fakeplug_good": GOOD})
    table = table_of(site)
    assert table.resolve("Good")
    assert [fault.partition(": ")[0] for fault in table.faults()] == [str(ours), str(malformed)]
    with pytest.raises(PluginError, match=r"unreadable: .*plug_bad"):
        table.lookup("A")


def test_the_same_table_serves_another_group(site: Path) -> None:
    install(
        site, "plug-ops", {"fast": "fakeplug_ops:register"}, group="x.ops", modules={"fakeplug_ops": "register = 7"}
    )
    table = EntryPointTable("x.ops", [str(site)], what="op provider")
    assert table.load(table.lookup("fast")) == 7
    with pytest.raises(PluginError, match="no installed plugin provides op provider 'slow'; installed: fast"):
        table.lookup("slow")
    install(site, "plug-more", {"fast": "b:c"}, group="x.ops")
    with pytest.raises(PluginError, match=r"`pip uninstall plug-ops`$"):  # and no word of --model-plugin
        EntryPointTable("x.ops", [str(site)]).lookup("fast")


def test_importing_the_registry_imports_nothing_heavy() -> None:
    heavy = ["torch", "numpy", "transformers", "packaging", "importlib.metadata", "typer", "rich"]
    code = f"import sys, rapid_infer.registry; print([m for m in {heavy!r} if m in sys.modules])"
    root = Path(rapid_infer.errors.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
