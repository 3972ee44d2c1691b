"""Flags about CUDA devices: what contradicts itself, and what needs what is not there."""

import pytest
import torch

from baechi_runtime.cli.main import main

EXCLUDED = [
    (["train", "--split_gpu=2", "--num_devices=2"], "--split_gpu and --num_devices cannot be used together"),
    (["train", "--split_gpu=2", "--num_gpus=2"], "--split_gpu and --num_gpus cannot be used together"),
    (["train", "--split_gpu=2", "--workers=process"], "--split_gpu is for one process; drop --workers=process"),
    (["train", "--cuda_graphs"], "--cuda_graphs is for CUDA devices of one process; add --num_gpus=N or --split_gpu=N"),
    (["train", "--cuda_graphs", "--num_gpus=2", "--workers=process"], "--cuda_graphs is for CUDA devices of one process"),
    (["train", "--cuda_graphs", "--no_cuda_graphs", "--num_gpus=2"], "--cuda_graphs and --no_cuda_graphs cannot be used together"),
    (["train", "--use_free_memory"], "--use_free_memory is for CUDA devices; add --num_gpus=N"),
    (["probe-links", "--use_free_memory", "--num_devices=2"], "--use_free_memory is for CUDA devices"),
    (["probe-links", "--split_gpu=2", "--num_gpus=2"], "--split_gpu and --num_gpus cannot be used together"),
]


@pytest.mark.parametrize(("line", "message"), EXCLUDED)
def test_contradictions(line: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line) in (1, 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {message}")
    assert captured.err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
@pytest.mark.parametrize("line", [["train"], ["probe-links"], ["train", "--cuda_graphs"]])
def test_a_gpu_that_is_not_there(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*line, "--split_gpu=4"]) == 1
    message = "error: --split_gpu=4 needs a CUDA device and this machine has none; use --num_devices=4 for CPU workers\n"
    assert capsys.readouterr().err == message
