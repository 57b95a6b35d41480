"""The benchmark scripts run in their smallest form and print what a figure needs: ratio, range, pairs, versions, command."""

import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest
import torch

from scripts.bench.bench_growth import report_growth
from scripts.bench.common import Report, interleave, speed_ratio
from scripts.bench.engine_teams import TINY, Setup, check_close, heats
from scripts.bench.gpu_parity import Case, computed, deviation, tolerance, truth
from scripts.bench.slow_link import NAMESPACES, PREFIX, LinkError, SlowLink, left_behind
from tests.harness.t0 import REPOSITORY, pretrain_environment

BENCH = REPOSITORY / "scripts" / "bench"
RATIO = re.compile(r"ratio (\d+\.\d+) \(range (\d+\.\d+)-(\d+\.\d+), (\d+) pairs\)")


def run(*arguments: object, timeout: float = 120) -> str:
    """Output of python on a benchmark script."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=REPOSITORY,
        env=pretrain_environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def assert_complete(output: str, pairs: int) -> None:
    """Versions, the command, and at least one ratio inside its range."""
    assert f"torch {torch.__version__}" in output
    assert re.search(r"^command: .*scripts/bench/bench_", output, re.MULTILINE)
    ratios = RATIO.findall(output)
    assert ratios, output
    for median, low, high, count in ratios:
        assert float(low) <= float(median) <= float(high)
        assert int(count) == pairs


def test_training_benchmark_of_one_process(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "results.json"
    output = run(BENCH / "bench_training.py", "--tiny", "--dtype", "fp32", "--pairs", 2, "--threads", 1, "--json", file)
    shares = re.findall(r"forward ([\d.]+)%, backward ([\d.]+)%, optimizer ([\d.]+)%", output)
    assert shares and all(float(share) > 0 for line in shares for share in line)
    assert_complete(output, 2)
    assert "shares of a step: forward" in output
    written = json.loads(file.read_text(encoding="utf-8"))
    assert written["versions"]["torch"] == torch.__version__
    assert any("speed_ratio" in result for result in written["results"])


def test_training_benchmark_of_two_ranks_compares_each_engine_with_ddp() -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    output = run(*launcher, BENCH / "bench_training.py", "--tiny", "--dtype", "bf16", "--batch", "gb2", "--pairs", 2)
    assert_complete(output, 2)
    assert len(RATIO.findall(output)) == 9, "three engines, each against DDP with main params, autocast and bf16 weights"


def test_collectives_benchmark_lists_each_operation_size_and_dtype(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "results.json"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    output = run(*launcher, BENCH / "bench_collectives.py", "--tiny", "--pairs", 2, "--json", file)
    for operation in ("reduce_scatter", "all_gather", "all_reduce"):
        for dtype in ("fp32", "bf16"):
            assert f"{operation}, {dtype}, 2 ranks, 2 pairs" in output
    assert json.loads(file.read_text(encoding="utf-8"))["results"]


def test_model_benchmark() -> None:
    output = run(BENCH / "bench_single_process.py", "--tiny", "--dtype", "fp32", "--pairs", 2, "--threads", 1)
    assert_complete(output, 2)


def test_optimizer_step_benchmark_counts_the_bytes_of_a_step(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "results.json"
    output = run(BENCH / "bench_optimizer_step.py", "--tiny", "--dtype", "fp32", "bf16", "fp16", "--pairs", 2, "--json", file)
    assert_complete(output, 2)
    # main params and two moments read and written: 24; fp32 gradients read: 4; 16-bit: parameters written: 2
    assert re.findall(r"GB/s of (\d+) bytes/element", output) == ["28", "30", "28"]
    results = [result for result in json.loads(file.read_text(encoding="utf-8"))["results"] if "time_ratio" in result]
    assert {(result["title"], result["reference"]) for result in results} == {
        (dtype, limit) for dtype in ("fp32", "bf16", "fp16") for limit in ("fused Adam, flat", "touch once")
    }


def test_start_benchmark_names_what_only_the_product_imports() -> None:
    output = run(BENCH / "bench_start.py", "--tiny", "--pairs", 1)
    assert_complete(output, 1)
    extra = re.search(r"^only the product imports: (.*)$", output, re.MULTILINE)
    assert extra is not None
    packages = {item.split()[0] for item in extra.group(1).split(", ")}
    assert packages <= {"megatron", "yaml", "_yaml"}, "the run imports a package that it does not use"


def test_gpu_check_runs_on_a_cpu(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "results.json"
    flags = ["--device", "cpu", "--tiny", "--skip", "compile", "--pairs", "1", "--json", str(file)]
    done = subprocess.run(
        ["bash", str(REPOSITORY / "scripts" / "gpu_check.sh"), *flags],
        env=pretrain_environment({"PYTHON": sys.executable}),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    checks = [result for result in json.loads(file.read_text(encoding="utf-8"))["results"] if result["title"] == "check"]
    assert {check["section"] for check in checks if check["status"] == "PASS"} == {"numerics", "training", "throughput"}
    assert any("transformer_engine" in check["check"] for check in checks)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_check_without_gpu_says_so() -> None:
    done = subprocess.run(
        ["bash", str(REPOSITORY / "scripts" / "gpu_check.sh")],
        env=pretrain_environment({"PYTHON": sys.executable}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "no CUDA device" in done.stderr


def test_gpu_check_skips_what_does_not_fit_into_its_time() -> None:
    output = run(BENCH / "gpu_check.py", "--device", "cpu", "--tiny", "--budget-minutes", 0)
    assert "PASS: 0 PASS, 0 FAIL" in output
    assert "s of the budget are left" in output


def test_parity_check_notices_a_gradient_that_is_5_percent_off_or_missing() -> None:
    true = truth(bf16=True, packed=False)
    good = computed(Case(torch.device("cpu"), bf16=True))
    assert deviation(good, true).grad < tolerance(bf16=True)
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    found = deviation(dataclasses.replace(good, grads=good.grads | {name: good.grads[name] * 1.05}), true)
    assert found.grad > tolerance(bf16=True)
    assert found.parameter == name
    assert deviation(dataclasses.replace(good, grads={}), true).grad == float("inf")


def test_interleaving_rotates_and_pairs_by_turn() -> None:
    order: list[str] = []
    seconds = interleave({name: lambda name=name: order.append(name) for name in "abc"}, 3, warmup=0)  # type: ignore[misc]
    assert "".join(order) == "abcbcacab"
    assert {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3, "c": 3}
    ratio = speed_ratio({"own": [1.0, 2.0, 4.0], "theirs": [2.0, 2.0, 2.0]}, "own", "theirs")
    assert (ratio["speed_ratio"], ratio["range"], ratio["pairs"]) == (1.0, [0.5, 2.0], 3)


ENGINES = ["local", "product-overlap", "ddp", "zero-redundancy", "fsdp2"]


def test_engine_benchmark_compares_the_product_with_each_peer_and_counts_its_state(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "results.json"
    flags = [
        "--tiny",
        "--batch",
        "gb8",
        "--pairs",
        2,
        "--bucket-size",
        4096,
        "--environment",
        tmp_path / "none",
        "--json",
        file,
    ]
    output = run(BENCH / "bench_dist_optimizer.py", *flags, "--engines", *ENGINES, "megatron-core")
    assert_complete(output, 2)
    results = json.loads(file.read_text(encoding="utf-8"))["results"]
    assert {result["reference"] for result in results if "time_ratio" in result} == set(ENGINES) - {"product-overlap"}
    assert "megatron-core DistributedOptimizer: not measured, or broke off: no environment" in output
    state = {result["engine"]: result["ranks"] for result in results if "engine" in result and "ranks" in result}
    assert set(state) == set(ENGINES)
    assert all(rank["peak_rss"] > rank["import_rss"] > 0 for ranks in state.values() for rank in ranks)
    table = next(result for result in results if "padding, bytes" in result.get("header", ()))
    assert [row[5] for row in table["rows"] if row[0].startswith("product")] == ["12.000, equal"]


def test_engines_that_do_not_train_alike_are_found_out() -> None:
    check_close("first loss", {"a": 4.0, "b": 4.00001, "c": 4.0}, 1e-5)
    for value in (4.1, float("nan")):
        with pytest.raises(SystemExit, match="b: first loss"):
            check_close("first loss", {"a": 4.0, "b": value, "c": 4.0}, 1e-5)


def test_engines_run_in_several_heats_where_memory_is_short() -> None:
    setup = Setup(TINY, "fp32", 8, 4, 4096)
    keys, always = ["local", "product", "product-overlap", "ddp", "fsdp2", "deepspeed-1"], ("product-overlap", "ddp")
    assert heats(keys, always, setup, 2, 99) == [keys]
    assert heats(keys, always, setup, 2, 4) == [
        ["local", "product", "product-overlap", "ddp"],
        ["product-overlap", "ddp", "fsdp2", "deepspeed-1"],
    ]
    assert [len(heat) for heat in heats(keys, always, setup, 2, 1)] == [3, 3, 3, 3]


def test_growth_benchmark() -> None:
    output = run(BENCH / "bench_growth.py", "--tiny", "--pairs", 2, "--parts", "ranks", "--bucket-size", 4096)
    assert_complete(output, 2)
    assert "2 ranks / 1 rank time ratio" in output


def test_growth_is_measured_against_the_line_through_the_smallest_and_the_largest(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = {"4 layers": [1.0, 1.0], "2 ranks": [2.2, 2.2], "16 layers": [4.0, 4.0]}
    report_growth(Report(), "fp32", seconds, "layers")
    assert "8 layers / line through 4 and 16 time ratio 1.100 (range 1.100-1.100, 2 pairs)" in capsys.readouterr().out


@pytest.fixture
def slow_link_is_possible() -> None:
    try:
        with SlowLink("1gbit"):
            pass
    except LinkError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("slow_link_is_possible")
def test_slow_link_benchmark_counts_what_crosses_the_link_and_leaves_nothing_behind(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "results.json"
    flags = ["--tiny", "--pairs", 2, "--bucket-size", 4096, "--json", file]
    output = run(
        BENCH / "bench_slow_link.py", *flags, "--engines", "local", "product", "product-reduce", "product-overlap", "ddp"
    )
    assert_complete(output, 2)
    assert "one flag more: product-reduce / product time ratio" in output
    results = json.loads(file.read_text(encoding="utf-8"))["results"]
    assert {"ideal", "ddp"} <= {result["reference"] for result in results if result.get("contestant") == "product-overlap"}
    table = next(result for result in results if "of predicted" in result.get("header", ()))
    sent = {row[0]: row[-1] for row in table["rows"]}
    assert sent.pop("compute alone") == ""
    # gradients and parameters, headers, and per step a few small messages (norm, barrier): 115 kB are needed here
    assert all(1.0 <= float(ratio) < 1.2 for ratio in sent.values()), sent
    assert left_behind() == ()


@pytest.mark.usefixtures("slow_link_is_possible")
def test_slow_link_is_removed_when_the_benchmark_is_told_to_stop() -> None:
    command = [sys.executable, str(BENCH / "bench_slow_link.py"), "--tiny", "--engines", "local", "ddp"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=pretrain_environment()
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("versions:")  # the link is there
        assert (NAMESPACES / f"{PREFIX}{process.pid}-1").exists()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert not list(NAMESPACES.glob(f"{PREFIX}{process.pid}-*"))


@pytest.mark.usefixtures("slow_link_is_possible")
def test_half_built_slow_link_is_removed_and_what_a_dead_process_left_is_cleaned(tmp_path: pathlib.Path) -> None:
    (tmp_path / "tc").write_text("#!/bin/sh\necho no such qdisc >&2\nexit 1\n")
    (tmp_path / "tc").chmod(0o755)
    environment = pretrain_environment({"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    command = [sys.executable, str(BENCH / "bench_slow_link.py"), "--tiny"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "no such qdisc" in done.stderr
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    subprocess.run(["ip", "netns", "add", f"{PREFIX}{gone.pid}-0"], check=True)
    assert run(BENCH / "bench_slow_link.py", "--clean").strip() == f"removed: {PREFIX}{gone.pid}-0"
    assert run(BENCH / "bench_slow_link.py", "--clean").strip() == "removed: nothing"


def test_slow_link_benchmark_says_what_it_lacks(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, str(BENCH / "bench_slow_link.py"), "--tiny"]
    environment = pretrain_environment({"PATH": str(tmp_path)})
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "run this script as root" in done.stderr or "apt-get install iproute2" in done.stderr


def test_pipeline_benchmark_compares_each_schedule_with_1f1b_and_each_bubble_with_its_own_figure() -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    output = run(*launcher, BENCH / "bench_pipeline.py", "--tiny", "--microbatches", 4, "--pairs", 2)
    assert_complete(output, 2)
    for name in ("interleaved", "zb_h1", "zb_v"):
        assert re.search(rf"{name} / 1f1b speed ratio", output)
    rows = re.findall(r"^\| (1f1b|interleaved|zb_h1|zb_v) +\|.*\| ([\d.]+)% +\| ([\d.]+)% ", output, re.MULTILINE)
    assert len(rows) == 4 and all(0 < float(measured) < 100 and 0 < float(own) < 100 for _, measured, own in rows)
    assert float(rows[0][2]) == pytest.approx(20.0, abs=8.0)  # 1F1B's (P - 1) / (M + P - 1), if F and B of the stages cost alike


def test_tensor_parallel_benchmark_counts_what_is_sent_and_what_is_exposed() -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    output = run(*launcher, BENCH / "bench_tensor_parallel.py", "--tiny", "--pairs", 2)
    assert_complete(output, 2)
    rows = {name.strip(): row for name, row in re.findall(r"^\| ([a-z ]+?) +\| (.*) \|$", output, re.MULTILINE)}
    counts = {name: int(row.split("|")[2]) for name, row in rows.items() if name in ("tensor", "tensor and sequence", "data")}
    assert counts["data"] == 0 < counts["tensor"] < counts["tensor and sequence"]
