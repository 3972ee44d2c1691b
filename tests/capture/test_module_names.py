"""Captured ops know the modules that they come from."""

from collections import defaultdict

import torch
from torch import Tensor, nn

from baechi_ext.capture.torch_joint import CaptureOptions, capture_joint
from baechi_ext.ir import OpGraph
from baechi_ext.ir.hints import DeviceMap, Pin, module_names, nearest_map, with_pins
from baechi_runtime.models.training_step import WithLoss


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Identity())
        self.embedding = nn.Embedding(8, 8)
        self.decoder = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8, bias=False)])
        self.decoder[1].weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.encoder(self.embedding(words)) * 2
        for layer in self.decoder:
            x = layer(x)
        return x


def captured() -> tuple:
    inputs = torch.randint(8, (4,)), torch.randint(8, (4,))
    return capture_joint(WithLoss(Two()), inputs, CaptureOptions())


def test_forward_backward_and_update_know_their_module() -> None:
    graph, _ = captured()
    modules = defaultdict(set)
    for op in graph.ops:
        modules[op.module, op.phase].add(op.op.removeprefix("aten.").split("_")[0])
    assert {"addmm"} == modules["encoder.0", "forward"]
    assert {"mm", "sum.dim"} == modules["encoder.0", "backward"]
    assert {"relu"} == modules["encoder.1", "forward"]
    assert {"threshold"} == modules["encoder.1", "backward"]
    assert {"embedding"} == modules["embedding", "forward"]
    assert {"embedding"} == modules["embedding", "backward"]
    assert modules["encoder.0", "update"] == {"optimizer.sgd"}
    assert "mul" in {part.split(".")[0] for part in modules["", "forward"]}
    assert modules["", "update"] == set()
    assert {"nll"} & modules[None, "forward"]  # the loss is not the model's
    assert dict(zip(graph.modules, graph.classes, strict=True))["encoder.0"] == "Linear"
    assert OpGraph.from_json(graph.to_json()).classes == graph.classes
    assert graph.modules == ("encoder", *(f"encoder.{i}" for i in range(4)), "embedding", "decoder", "decoder.0", "decoder.1")


def test_pins_and_maps_by_the_models_own_names() -> None:
    graph, _ = captured()
    pinned = with_pins(graph, [Pin("encoder.*", "1"), Pin("decoder.0.weight", "0")], ["cpu:0", "cpu:1"])
    assert {op.pin for op in pinned.ops if (op.module or "").startswith("encoder")} == {1}
    assert {op.pin for op in pinned.ops if op.id in ("update.model.decoder.0.weight",)} == {0}
    # The tied weight binds the embedding and the last layer.
    tied = {op.module for op in graph.ops if op.colocation == "model.embedding.weight"}
    assert {"embedding", "decoder.1"} <= tied
    devices = {"encoder": 1, "embedding": 0, "decoder": 0, "encoder.3": 1}
    hinted = DeviceMap("m", devices).apply(graph, ["cpu:0", "cpu:1"])
    assert {op.expert for op in hinted.ops if (op.module or "").startswith("encoder")} == {1}
    assert nearest_map(graph, [op.expert for op in hinted.ops]) == {"encoder": 1, "embedding": 0, "decoder": 0}
    assert "encoder.3" in module_names(graph)
