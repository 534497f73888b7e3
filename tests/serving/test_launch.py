"""What `vmoer serve` refuses before vLLM starts, in one line each, and the command line that it writes.

Oracle: the mistake that was made on purpose.
"""

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import transformers as tf

import vmoer
from vmoer.cli import run as command_line
from vmoer.errors import InputError
from vmoer.evaluation.threshold import FORMAT, write_threshold
from vmoer.metrics.calibrators import Choice, OutputTemperature
from vmoer.saved import calibrator
from vmoer.saved.store import read_folder
from vmoer.serving import launch


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base model and a run for it."""
    root = tmp_path_factory.mktemp("launch")
    model = tiny.model("granitemoe")
    model.save_pretrained(root / "base")
    vmoer.attach(model, vmoer.MeanField(layers=[1]))
    vmoer.save(model, root / "run")
    return root / "base", root / "run"


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`launch.prepare` as if vLLM were there."""
    monkeypatch.setattr(launch, "check_vllm", lambda: None)
    return launch.prepare


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_command_line_that_it_writes(folders: tuple[Path, Path], prepared: Any, tmp_path: Path) -> None:
    base, run = folders
    chosen = {
        "format": FORMAT,
        "form": "letters",
        "signal": "novelty",
        "threshold": 0.5,
        "risk": 0.1,
        "confidence": 0.9,
    }
    write_threshold(tmp_path / "threshold.json", chosen | {"temperature": 1.3})
    port = free_port()
    options = [
        "--tensor-parallel-size",
        "2",
        "--port",
        str(port),
        "--load-format",
        "safetensors",
        "--host",
        "127.0.0.1",
    ]
    command = prepared(str(base), str(run), tmp_path / "threshold.json", options)
    said = command.arguments
    assert said[1:5] == ["-m", "vllm.entrypoints.cli.main", "serve", str(base)]
    assert said[said.index("--load-format") + 1] == "vmoer"
    extra = json.loads(said[said.index("--model-loader-extra-config") + 1])
    assert extra == {"router": str(run.resolve()), "load_format": "safetensors"}
    assert said[said.index("--tensor-parallel-size") + 1] == "2"
    assert said[said.index("--port") + 1] == str(port)
    assert "--enable-return-routed-experts" in said
    told = json.loads(command.environment["VMOER_SERVING"])["threshold"]
    names = ("form", "signal", "threshold", "risk", "confidence")
    assert told == {name: chosen[name] for name in names} | {"calibrated": False}
    assert command.environment["VLLM_USE_V2_MODEL_RUNNER"] == "1"


def test_no_vllm_and_a_version_out_of_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"needs vLLM: pip install 'vmoer\[vllm\]'"):
        launch.check_vllm()
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: object())
    for version, good in (("0.31.2", False), ("0.32.0+cpu", True), ("0.33.0", True), ("0.34.0", False), ("1.0", False)):
        monkeypatch.setattr(launch, "_version", lambda name, found=version: found)
        if good:
            launch.check_vllm()
        else:
            with pytest.raises(InputError, match=f"vLLM {version} is not supported"):
                launch.check_vllm()


def test_a_dense_model(folders: tuple[Path, Path], prepared: Any, tmp_path: Path) -> None:
    config = tf.LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24, vocab_size=61
    )
    tf.LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="dense model"):
        prepared(str(tmp_path), str(folders[1]), None, [])


def test_a_run_of_another_model(folders: tuple[Path, Path], prepared: Any, tmp_path: Path) -> None:
    """Other router weights of the same shape, and a model without the layer."""
    base, run = folders
    model = tf.AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        model.model.layers[1].block_sparse_moe.router.weight.mul_(1.5)
    model.save_pretrained(tmp_path / "changed")
    with pytest.raises(InputError, match="another base model: its router weights differ"):
        prepared(str(tmp_path / "changed"), str(run), None, [])
    tiny.model("granitemoe", num_hidden_layers=1).save_pretrained(tmp_path / "short")
    with pytest.raises(InputError, match=r"layer 1 of .* has no router"):
        prepared(str(tmp_path / "short"), str(run), None, [])


def test_a_damaged_run_and_methods_that_cannot_be_served(
    folders: tuple[Path, Path], prepared: Any, tmp_path: Path
) -> None:
    """Refused though the model is not even there: nothing of it was read."""
    shutil.copytree(folders[1], tmp_path / "run")
    data = bytearray((tmp_path / "run" / "router.safetensors").read_bytes())
    data[-3] ^= 1
    (tmp_path / "run" / "router.safetensors").write_bytes(data)
    with pytest.raises(InputError, match=r"router\.safetensors"):
        prepared("no/such/model", str(tmp_path / "run"), None, [])
    model = tiny.model("granitemoe")
    for number, config in enumerate(
        (vmoer.VariationalTemperature(), vmoer.Temperature(), vmoer.MeanField(sampling="mc"))
    ):
        vmoer.attach(model, config)
        vmoer.save(model, tmp_path / str(number))
        vmoer.detach(model)
        with pytest.raises(InputError, match="cannot be served: "):
            prepared("no/such/model", str(tmp_path / str(number)), None, [])


def test_an_unmerged_adapter(prepared: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny.model("granitemoe"), settings)
    vmoer.attach(model, vmoer.MeanField(layers=[1]))
    vmoer.save(model, tmp_path / "run")
    with pytest.raises(InputError, match=r"over a LoRA adapter, .*: vmoer merge .*run --out DIR, then vmoer serve DIR"):
        prepared("no/such/model", str(tmp_path / "run"), None, [])


def test_pipeline_parallelism_a_taken_port_and_bad_options(folders: tuple[Path, Path], prepared: Any) -> None:
    for option in ("--pipeline-parallel-size", "-pp"):
        with pytest.raises(InputError, match="pipeline parallelism"):
            prepared(*map(str, folders), None, [option, "2"])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port} cannot be used"):
            prepared(*map(str, folders), None, ["--host", "127.0.0.1", "--port", str(port)])
    for odd in ("http", "99999", "-1", "1.5"):
        with pytest.raises(InputError, match=f"--port: {odd} is not a port from 0 to 65535"):
            prepared(*map(str, folders), None, [f"--port={odd}"])
    for odd in ("[1]", "{", "3"):
        with pytest.raises(InputError, match=r"--model-loader-extra-config: .* is not a JSON object"):
            prepared(*map(str, folders), None, ["--model-loader-extra-config", odd])
    with pytest.raises(InputError, match=r"host no\.such\.host\.invalid cannot be used"):
        prepared(*map(str, folders), None, ["--host", "no.such.host.invalid", "--port", "0"])


def test_an_address_of_ipv6(folders: tuple[Path, Path], prepared: Any) -> None:
    try:
        taken = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port} cannot be used"):
            prepared(*map(str, folders), None, ["--host", "::1", "--port", str(port)])
    said = prepared(*map(str, folders), None, ["--host", "::1", "--port", str(port)]).arguments
    assert said[said.index("--host") + 1] == "::1"


def test_what_signals_do_not_come_through(folders: tuple[Path, Path], prepared: Any) -> None:
    """Refused though neither the model nor the run is there. Names are spelled as vLLM's parser takes them."""
    refused = {
        "pipeline parallelism": [["-pp", "2"], ["--pipeline_parallel_size=2"], ["--pipeline-parallel", "2"]],
        "expert parallelism over": [
            ["-ep", "-tp", "2", "-dp", "2"],
            ["--enable_expert_parallel", "--tensor_parallel_size", "2", "--data_parallel_size=4"],
        ],
        "micro-batches": [["--enable-dbo"], ["--enable_dbo"], ["--ubatch-size", "2"]],
        "reads no --config": [["--config", "options.yaml"], ["--config=options.yaml"]],
        "takes the model as its first argument": [["--model", "other"]],
        "as one JSON object": [["--model_loader_extra_config.router", "other"]],
    }
    for reason, cases in refused.items():
        for options in cases:
            with pytest.raises(InputError, match=reason):
                prepared("no/such/model", "no/such/run", None, options)
    for options in (
        ["-ep", "-tp", "2"],
        ["-ep", "-dp", "2"],
        ["-tp", "2", "-dp", "2"],
        ["--enable-dbo", "--no-enable-dbo"],
    ):
        said = prepared(*map(str, folders), None, [*options, "--port", "0"]).arguments
        assert said[5 : 5 + len(options)] == options


def test_what_it_writes_itself_comes_last_and_wins(folders: tuple[Path, Path], prepared: Any) -> None:
    base, run = map(str, folders)
    given = ["--max_num_seqs", "4", "--load_format", "safetensors", "--no-enable-return-routed-experts", "--uds", "s"]
    said = prepared(base, run, None, given).arguments
    assert said[5:10] == ["--max-num-seqs", "4", "--no-enable-return-routed-experts", "--uds", "s"]
    assert said.count("--load-format") == 1
    assert json.loads(said[said.index("--model-loader-extra-config") + 1])["load_format"] == "safetensors"
    assert said.index("--enable-return-routed-experts") > 10
    assert not {"--port", "--host"} & set(said)


def test_the_calibrator_of_a_run_and_the_threshold_that_was_chosen_with_it(prepared: Any, tmp_path: Path) -> None:
    """It goes to the server without being asked for. Oracle: the file's own content, and mistakes made on purpose."""
    model = tiny.model("granitemoe")
    model.save_pretrained(tmp_path / "base")
    vmoer.attach(model, vmoer.MeanField(layers=[1]))
    about: dict[str, Any] = {"options": [4], "task": "t", "method": "vglr-mf"}
    for name, averaging in (("run", "router"), ("full", "full")):
        choice = Choice(OutputTemperature(1.7), {}, np.empty((0, 4)))
        content = calibrator.described(choice, averaging=averaging, passes=8, **about)
        vmoer.save(model, tmp_path / name, calibrator=content)
    stored = calibrator.of(read_folder(tmp_path / "run"))
    assert stored is not None
    chosen = {"format": FORMAT, "form": "letters", "signal": "predictive_entropy", "threshold": 0.5, "risk": 0.1}
    chosen |= {"confidence": 0.9, "averaging": "router", "calibrator": stored.digest}
    file = tmp_path / "threshold.json"

    def told(run: str = "run", calibrated: bool = True) -> Any:
        options = ["--port", str(free_port())]
        command = prepared(str(tmp_path / "base"), str(tmp_path / run), file, options, calibrated=calibrated)
        return json.loads(command.environment["VMOER_SERVING"])

    write_threshold(file, chosen)
    assert told()["threshold"]["calibrated"] is True
    assert told()["calibrator"] == stored.file
    with pytest.raises(InputError, match="chosen with another calibrator than the run has"):
        told(calibrated=False)
    with pytest.raises(InputError, match="averaging full over 8 passes, and this is router: give --no-calibrator"):
        told("full")
    write_threshold(file, chosen | {"averaging": "full"})
    with pytest.raises(InputError, match="for averaging full, and a server answers in one pass"):
        told()
    write_threshold(file, {name: value for name, value in chosen.items() if name != "calibrator"})
    assert told("full", calibrated=False)["calibrator"] is None


def test_a_threshold_on_what_the_server_does_not_compute(
    folders: tuple[Path, Path], prepared: Any, tmp_path: Path
) -> None:
    chosen = {"format": FORMAT, "form": "letters", "signal": "prompt_tokens", "threshold": 0.5, "risk": 0.1}
    write_threshold(tmp_path / "threshold.json", chosen | {"confidence": 0.9})
    with pytest.raises(InputError, match="does not compute prompt_tokens"):
        prepared(*map(str, folders), tmp_path / "threshold.json", [])


def test_on_the_command_line_it_is_one_line(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    assert command_line(["serve", str(folders[0]), "--router", str(folders[1]), "--max-num-seqs", "4"]) == 2
    assert capsys.readouterr().err.splitlines() == ["vmoer serve needs vLLM: pip install 'vmoer[vllm]'"]
