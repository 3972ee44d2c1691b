"""Architectures of transformers, as small as they can be: trained placed they are what they are unplaced. All are slow together."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import baechi_ext

transformers = pytest.importorskip("transformers")

STEPS = 5
Inputs = Callable[[], dict[str, Any]]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = {**SIZES, "vocab_size": 99, "max_position_embeddings": 64}
MARKS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CAUSAL = {**TEXT, **MARKS, "num_key_value_heads": 2}
OLD = {**TEXT, **MARKS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
ENCODER = {**TEXT, "num_labels": 3}
PICTURES = {**SIZES, "image_size": 32, "patch_size": 8, "num_labels": 5}
TOWER = {**SIZES, "image_size": 32, "patch_size": 8}
STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 5}
WINDOWS = {
    **{k: PICTURES[k] for k in ("image_size", "num_labels")},
    "patch_size": 4,
    "embed_dim": 16,
    "depths": [1, 1],
    "num_heads": [2, 4],
}
PYRAMID = {
    **{"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [3, 3], "strides": [2, 2]},
    **{"num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16, "num_labels": 3},
}
BOTH = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))}
TRANSLATING = {**BOTH, **MARKS, "d_model": 32, "vocab_size": 99, "max_position_embeddings": 64, "decoder_start_token_id": 1}
T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
T5 |= {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
WAVES = {**SIZES, "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2, "num_labels": 3}
WAVES |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "vocab_size": 20, "classifier_proj_size": 16}
SERIES = {"prediction_length": 4, "context_length": 6, "lags_sequence": [1, 2], "num_time_features": 1, "d_model": 16}
SERIES |= {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "encoder_layers": 2, "decoder_layers": 1}


def words() -> Tensor:
    return torch.randint(5, 90, (4, 12))


def following() -> dict[str, Any]:
    text = words()
    return {"input_ids": text, "labels": text}


def answering() -> dict[str, Any]:
    return {"input_ids": words(), "labels": words()}


def classified() -> dict[str, Any]:
    return {"input_ids": words(), "labels": torch.randint(0, 3, (4,))}


def seen() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(0, 5, (2,))}


def segmented() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(0, 3, (2, 32, 32))}


def paired() -> dict[str, Any]:
    return {"input_ids": words(), "pixel_values": torch.randn(4, 3, 32, 32), "return_loss": True}


def heard() -> dict[str, Any]:
    return {"input_values": torch.randn(2, 800), "labels": torch.randint(0, 3, (2,))}


def measured() -> dict[str, Any]:
    past = {"past_values": torch.randn(3, 8), "past_time_features": torch.randn(3, 8, 1), "past_observed_mask": torch.ones(3, 8)}
    return {**past, "future_values": torch.randn(3, 4), "future_time_features": torch.randn(3, 4, 1)}


CASES: dict[str, tuple[dict[str, Any], Inputs]] = {
    **{f"{name}ForCausalLM": (CAUSAL, following) for name in ("Llama", "Mistral", "Qwen2", "Phi3", "StableLm", "Cohere", "Olmo2")},
    **{f"{name}ForCausalLM": ({**CAUSAL, "head_dim": 8}, following) for name in ("Qwen3", "Gemma", "Gemma2", "Glm")},
    **{f"{name}ForCausalLM": ({**TEXT, **MARKS}, following) for name in ("Phi", "GPTNeoX", "Persimmon", "Falcon")},
    "MixtralForCausalLM": ({**CAUSAL, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}, following),
    "OlmoeForCausalLM": ({**CAUSAL, "num_experts": 4, "num_experts_per_tok": 2}, following),
    "MambaForCausalLM": ({**TEXT, **MARKS, "state_size": 8}, following),
    "OPTForCausalLM": ({**TEXT, **MARKS, "ffn_dim": 64, "word_embed_proj_dim": 32}, following),
    "GPTJForCausalLM": ({**OLD, "rotary_dim": 4}, following),
    **dict.fromkeys(("GPTBigCodeForCausalLM", "OpenAIGPTLMHeadModel", "BloomForCausalLM"), (OLD, following)),
    **{f"{name}ForSequenceClassification": (ENCODER, classified) for name in ("Bert", "Roberta", "MPNet", "FNet", "Yoso")},
    "ElectraForSequenceClassification": ({**ENCODER, "embedding_size": 32}, classified),
    "DebertaV2ForSequenceClassification": ({**ENCODER, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, classified),
    "LongformerForSequenceClassification": ({**ENCODER, "attention_window": [4, 4]}, classified),
    "XLNetForSequenceClassification": (
        {"vocab_size": 99, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64, "num_labels": 3},
        classified,
    ),
    **{f"{name}ForConditionalGeneration": (TRANSLATING, answering) for name in ("Bart", "MBart", "Pegasus", "M2M100", "PLBart")},
    "MarianMTModel": (TRANSLATING, answering),
    **{f"{name}ForConditionalGeneration": (T5, answering) for name in ("T5", "MT5", "LongT5", "UMT5")},
    **{f"{name}ForImageClassification": (PICTURES, seen) for name in ("ViT", "DeiT", "Beit", "Dinov2", "ViTMSN")},
    **{f"{name}ForImageClassification": ({**WINDOWS, "window_size": 2}, seen) for name in ("Swin", "Swinv2")},
    **{f"{name}ForImageClassification": ({**STAGES, "num_stages": 2}, seen) for name in ("ConvNext", "ConvNextV2")},
    "ResNetForImageClassification": ({**STAGES, "embedding_size": 8, "layer_type": "basic"}, seen),
    "SegformerForSemanticSegmentation": (PYRAMID, segmented),
    "CLIPModel": ({"text_config": {**TEXT, "projection_dim": 16}, "vision_config": {**TOWER, "projection_dim": 16}}, paired),
    "SiglipModel": ({"text_config": TEXT, "vision_config": TOWER}, paired),
    **{f"{name}ForSequenceClassification": (WAVES, heard) for name in ("Wav2Vec2", "Hubert", "WavLM", "UniSpeech")},
    "TimeSeriesTransformerForPrediction": (SERIES, measured),
    "InformerForPrediction": (SERIES, measured),
    "ViTMAEForPreTraining": (
        {**TOWER, "decoder_hidden_size": 32, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2},
        lambda: {"pixel_values": torch.randn(2, 3, 32, 32)},
    ),
}
"""Class of a model -> its configuration, and what makes a batch."""


def trained(name: str, place: Callable[[nn.Module], object]) -> tuple[list[float], nn.Module]:
    """The losses of a few steps, from the same weights, batches and draws each time."""
    kind, (sizes, inputs) = getattr(transformers, name), CASES[name]
    torch.manual_seed(0)
    model = kind(kind.config_class(**sizes)).train()
    place(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(1)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(**inputs()).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_a_placed_architecture_trains_as_unplaced(name: str, one_thread: None) -> None:
    expected, _ = trained(name, lambda model: None)
    place = partial(baechi_ext.parallelize, devices=2, method="random", keep_placed=True)
    losses, model = trained(name, place)
    report = baechi_ext.report(model)
    assert (report.refusal, report.placed_steps >= STEPS - 2) == ("", True)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert len(set(losses)) == STEPS
