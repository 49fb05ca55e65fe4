"""Every provider of every op against the op's reference in fp32, and the rules of the registry."""

import importlib
import itertools
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rapid_infer import known_plugins
from rapid_infer.errors import ConfigError, PluginError
from rapid_infer.ops import OPS, Op, OpInfo, OpResolver, attention_params, load_providers, register
from rapid_infer.ops import registry as ops_registry
from rapid_infer.ops.registry import REFERENCE, op
from rapid_infer.testing.op_cases import TOLERANCE, cases_of, check
from rapid_infer.testing.op_cases.attention import make_metadata

load_providers()

ROOT = Path(__file__).resolve().parents[2]
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


LONG = ("paged_attention", "quantized_experts")
"""Those with so many cases that a second type waits for the slow tests."""


def cases() -> Iterator[Any]:
    for name, one in OPS.items():
        for provider, dtype, device in itertools.product(one.providers, TOLERANCE, DEVICES):
            # Triton's interpreter, which is slow, runs float16 as it runs bfloat16.
            slow = (provider, device) == ("triton", "cpu") and (
                dtype == torch.float16 or (dtype == torch.bfloat16 and name in LONG)
            )
            label = "-".join((name, provider, str(dtype).removeprefix("torch."), device))
            yield pytest.param(name, provider, dtype, device, id=label, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(("name", "provider", "dtype", "device"), cases())
def test_provider_equals_reference(name: str, provider: str, dtype: torch.dtype, device: str) -> None:
    defined, ran, reasons = OPS[name], 0, set()
    torch.manual_seed(0)
    for case in cases_of(defined, dtype, device):
        why_not = defined.providers[provider].supports(OpInfo.of(device, dtype, **case.extra))
        reasons.update(why_not)
        if not why_not:
            check(defined, provider, case, dtype)
            ran += 1
    if not ran:
        pytest.skip("; ".join(sorted(reasons)))


@pytest.mark.parametrize("name", OPS)
def test_arguments_are_mutated_only_where_the_op_says_so(name: str) -> None:
    defined = OPS[name]
    for case in cases_of(defined, torch.float32, "cpu"):
        args = {key: value.clone() if isinstance(value, Tensor) else value for key, value in case.kwargs.items()}
        defined.reference(**args)
        tensors = {key: value for key, value in args.items() if isinstance(value, Tensor)}
        changed = {k for k, v in tensors.items() if not torch.equal(v.nan_to_num(), case.kwargs[k].nan_to_num())}
        assert changed == set(defined.mutates)


@pytest.mark.parametrize(
    ("name", "provider"),
    [(name, p) for name in ("paged_attention", "mla_decode", "mla_context") for p in OPS[name].providers],
)
def test_what_no_row_has_written_does_not_matter(name: str, provider: str) -> None:
    """In slots past each row's last key, where other rows of the step have some, and in blocks that nobody has."""
    torch.manual_seed(0)
    defined = OPS[name]
    if why_not := defined.providers[provider].supports(OpInfo.of("cpu", torch.float32, head_dim=16, block_size=4)):
        pytest.skip("; ".join(why_not))
    seq_lens = [5, 7, 33, 40, 9, 22]
    case = next(case for case in cases_of(defined, torch.float32, "cpu") if len(case.kwargs["metadata"].rows) > 2)
    metadata, blocks = make_metadata(seq_lens, [1, 1, 1, 1, 4, 3], 4, "cpu")
    unwritten = torch.ones(blocks, 4, dtype=torch.bool)
    for row, n in enumerate(seq_lens):
        key = torch.arange(n)
        unwritten[metadata.block_table[row, key // 4].long(), key % 4] = False
    tokens, results = len(metadata.slots), []
    caches = [key for key in case.kwargs if key.endswith("cache")]
    args = {key: torch.randn(tokens, *case.kwargs[key].shape[1:]) for key in ("q", "out", "lse") if key in case.kwargs}
    args |= {key: torch.randn(blocks, 4, *case.kwargs[key].shape[2:]) for key in caches}
    for poison in (0.0, torch.nan):
        given = {**case.kwargs, **{key: value.clone() for key, value in args.items()}, "metadata": metadata}
        metadata.plans.clear()
        for key in caches:
            given[key][unwritten] = poison
        returned = defined.providers[provider].fn(**given)
        results.append([given[key] for key in defined.mutates] if returned is None else [returned])
    assert not any(result.isnan().any() for result in results[1])
    torch.testing.assert_close(*results)


def nothing(info: OpInfo) -> Sequence[str]:
    return ()


@pytest.fixture
def double() -> Iterator[Op]:
    """A made-up op with a slow and a picky provider."""

    @op(info=("head_dim", "window"), cases="fake_op_cases:made_up_double")
    def made_up_double(x: Tensor) -> Tensor:
        return x * 2

    @register("made_up_double", "fast", priority=10, supports=nothing)
    def fast(x: Tensor) -> Tensor:
        return x + x

    @register("made_up_double", "picky", priority=20, supports=lambda info: ["needs SM 90", "needs a library"])
    def picky(x: Tensor) -> Tensor:
        raise AssertionError

    yield made_up_double
    del OPS["made_up_double"]


def test_an_op_from_outside_brings_its_cases(double: Op, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (
        *("import torch", "from rapid_infer.testing.op_cases import Case", "def made_up_double(dtype, device):"),
        "    yield Case({'x': torch.ones(2, dtype=dtype, device=device)}, {'head_dim': 16})",
    )
    (tmp_path / "fake_op_cases.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    (case,) = cases_of(double, torch.float32, "cpu")
    check(double, "fast", case, torch.float32)
    register("made_up_double", "wrong", priority=1, supports=nothing)(lambda x: x)
    with pytest.raises(AssertionError, match="not close"):
        check(double, "wrong", case, torch.float32)
    double.cases = None
    with pytest.raises(PluginError, match=r"op made_up_double has no test cases: name them, @op\(cases='my_package"):
        cases_of(double, torch.float32, "cpu")


INFO = OpInfo("cpu", torch.float32)


def test_the_highest_priority_that_can_run_is_bound(double: Op) -> None:
    assert list(double.reasons(INFO)) == ["picky", "fast", REFERENCE]
    assert double.bind(INFO).provider == "fast"


def test_the_users_list_comes_before_priorities(double: Op) -> None:
    assert double.bind(INFO, [REFERENCE, "fast"]).provider == REFERENCE
    assert double.bind(INFO, ["picky", REFERENCE]).provider == REFERENCE
    resolver = OpResolver("cpu", {"made_up_double": ["torch"]})
    assert resolver.bind("made_up_double", torch.float32).provider == REFERENCE


def test_when_no_wanted_provider_can_run_all_reasons_are_listed(double: Op) -> None:
    with pytest.raises(ConfigError) as error:
        double.bind(INFO, ["picky"])
    assert str(error.value) == (
        "no provider of op made_up_double in op_priority can run on cpu in torch.float32: "
        "picky: needs SM 90, needs a library; one of these can: fast, torch"
    )
    del double.providers[REFERENCE], double.providers["fast"]
    register("made_up_double", "other", priority=1, supports=lambda info: ["wrong day"])(lambda x: x)
    with pytest.raises(ConfigError, match=r"picky: needs SM 90, needs a library; other: wrong day"):
        double.bind(INFO)


def test_an_unknown_provider_in_the_users_list_is_an_error(double: Op) -> None:
    with pytest.raises(ConfigError, match="op made_up_double has no provider 'fats'; it has: picky, fast, torch"):
        double.bind(INFO, ["fats", "fast"])


def test_an_unknown_op_in_the_users_list_is_an_error_with_a_near_match() -> None:
    with pytest.raises(ConfigError, match="unknown op 'paged_atention': did you mean 'paged_attention'"):
        OpResolver("cpu", {"paged_atention": ["cpu"]})


def test_a_provider_of_a_package_that_is_not_installed_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(OPS["paged_attention"].providers, "flashinfer", raising=False)
    with pytest.raises(
        ConfigError, match=r"no provider 'flashinfer'; it has: .*`pip install rapid-infer-ops-attention`$"
    ):
        OPS["paged_attention"].bind(INFO, ["flashinfer"])


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Installs a package that declares a module of providers, in place of the one before."""

    def install(source: str, requires: str = "rapid-infer>=0.1") -> None:
        folder = tmp_path / "fake_ops-1.0.dist-info"
        folder.mkdir(exist_ok=True)
        head = f"Metadata-Version: 2.1\nName: fake-ops\nVersion: 1.0\nRequires-Dist: {requires}\n"
        (folder / "METADATA").write_text(head)
        (folder / "entry_points.txt").write_text("[rapid_infer.ops]\nfake = fake_ops:silu_and_mul\n")
        (tmp_path / "fake_ops.py").write_text(source)
        sys.modules.pop("fake_ops", None)
        importlib.invalidate_caches()

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(ops_registry, "_loaded", set(ops_registry._loaded))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield install
    sys.modules.pop("fake_ops", None)
    OPS["silu_and_mul"].providers.pop("fake", None)


def test_a_package_brings_its_providers(package: Callable[..., None]) -> None:
    package("1 / 0")
    with pytest.raises(
        PluginError, match=r"operators 'fake': cannot load fake_ops:silu_and_mul \(fake-ops 1.0\): ZeroD"
    ):
        load_providers()
    good = (
        "from rapid_infer.ops import register\n"
        "@register('silu_and_mul', 'fake', priority=1, supports=lambda info: ())\n"
        "def silu_and_mul(gate_up): ...\n"
    )
    package(good, "rapid-infer>=9")
    with pytest.raises(PluginError, match=r"fake-ops 1.0 requires rapid-infer>=9, but rapid-infer .* is running"):
        load_providers()
    assert "fake" not in OPS["silu_and_mul"].providers
    package(good)
    load_providers()
    load_providers()
    assert OPS["silu_and_mul"].bind(INFO, ["fake"]).provider == "fake"


def test_our_package_of_attention_declares_its_providers(tmp_path: Path) -> None:
    """What its pyproject.toml says is what an installer would write."""
    project = tomllib.loads((ROOT / "plugins" / "ops_attention" / "pyproject.toml").read_text())["project"]
    folder = tmp_path / "rapid_infer_ops_attention-0.1.0.dist-info"
    folder.mkdir()
    lines = [
        f"Name: {project['name']}",
        f"Version: {project['version']}",
        *map("Requires-Dist: {}".format, project["dependencies"]),
    ]
    (folder / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n")
    points = project["entry-points"]["rapid_infer.ops"]
    (folder / "entry_points.txt").write_text("[rapid_infer.ops]\n" + "\n".join(f"{k} = {v}" for k, v in points.items()))
    code = "from rapid_infer.ops import *; load_providers(); print(*OPS['paged_attention'].providers)"
    path = [str(tmp_path), str(ROOT / "plugins" / "ops_attention" / "src"), str(ROOT)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) >= set(known_plugins.KNOWN_PROVIDERS)


def test_a_provider_for_an_unknown_op_is_refused_with_a_near_match() -> None:
    with pytest.raises(PluginError, match="provider 'mine': no op 'rms_nrom', did you mean 'rms_norm'"):
        register("rms_nrom", "mine", priority=1, supports=nothing)(lambda x: x)


def test_a_provider_with_another_signature_is_refused(double: Op) -> None:
    with pytest.raises(PluginError, match=r"'mine' of op made_up_double takes \['y'\], expected \['x'\]"):
        register("made_up_double", "mine", priority=1, supports=nothing)(lambda y: y)
    assert "mine" not in double.providers


def test_a_provider_name_is_used_once(double: Op) -> None:
    with pytest.raises(PluginError, match="op made_up_double already has a provider 'fast'"):
        register("made_up_double", "fast", priority=1, supports=nothing)(lambda x: x)


def test_counters_say_what_ran(double: Op) -> None:
    resolver = OpResolver("cpu", {"made_up_double": ["fast", "torch"]})
    first, second = (resolver.bind("made_up_double", torch.float32) for _ in range(2))
    unused = resolver.bind("rms_norm", torch.float32)
    for bound in (first, second, second):
        assert bound(x=torch.ones(1)).item() == 2
    assert resolver.counts() == {"made_up_double=fast": 3, f"rms_norm={unused.provider}": 0}
    assert "made_up_double=fast, calls=2" in repr(second)


def test_supports_sees_the_layers_own_facts(double: Op) -> None:
    seen: list[OpInfo] = []
    register("made_up_double", "nosy", priority=99, supports=lambda info: seen.append(info) or [])(lambda x: x)
    OpResolver("cpu").bind("made_up_double", torch.bfloat16, head_dim=64)
    assert [(f.device, f.dtype, f.capability, f.extra) for f in seen] == [
        ("cpu", torch.bfloat16, None, {"head_dim": 64})
    ]


def test_a_fact_that_the_op_does_not_declare_is_an_error_given_or_read(double: Op) -> None:
    with pytest.raises(PluginError, match="op made_up_double has no info 'head_dims', did you mean 'head_dim'") as got:
        OpResolver("cpu").bind("made_up_double", torch.float32, head_dims=64)
    assert str(got.value).endswith("(it has: head_dim, window)")
    with pytest.raises(PluginError, match=r"op rms_norm has no info 'window' \(it has: none\)"):
        OpResolver("cpu").bind("rms_norm", torch.float32, window=True)
    for read in (lambda info: info.extra.get("windows"), lambda info: info.extra["windows"]):
        register("made_up_double", "wrong", priority=1, supports=read)(lambda x: x)
        with pytest.raises(PluginError, match="no info 'windows', did you mean 'window'"):
            OpResolver("cpu").bind("made_up_double", torch.float32)
        del double.providers["wrong"]


def test_an_option_of_attention_is_refused_by_every_provider_that_does_not_name_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_params, "OPTIONS", (*attention_params.OPTIONS, "chunk"))
    info = OpInfo("cuda", torch.bfloat16, (9, 0), {"chunk": True})
    for name, provider in OPS["paged_attention"].providers.items():
        assert ("has no chunk" in provider.supports(info)) == (name != REFERENCE), name


def test_an_installed_package_adds_a_provider(double: Op, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "fakeops-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: fakeops\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[rapid_infer.ops]\nfakeops = fakeops_providers:register\n")
    (tmp_path / "fakeops_providers.py").write_text(
        "from rapid_infer.ops import register\n\n\n"
        "@register('made_up_double', 'fakeops', priority=50, supports=lambda info: ())\n"
        "def double(x):\n    return 2 * x\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(ops_registry, "_loaded", set(ops_registry._loaded))
    try:
        bound = OpResolver("cpu").bind("made_up_double", torch.float32)
        OpResolver("cpu")
    finally:
        sys.modules.pop("fakeops_providers", None)
    assert bound.provider == "fakeops"
    assert bound(torch.ones(1)).item() == 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 8, 9, 200])
def test_norms_round_where_the_reference_does(device: str, rows: int) -> None:
    """Once before the weight is applied and once after, whatever else is in the batch."""
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 576).bfloat16().to(device), torch.randn(576).bfloat16().to(device)
    provider = {"cpu": "cpu", "cuda": "triton"}[device]
    found = OPS["rms_norm"].providers[provider].fn(x, weight, 1e-6)
    differ = found != OPS["rms_norm"].reference(x, weight, 1e-6)
    assert differ.float().mean() < 1e-3
