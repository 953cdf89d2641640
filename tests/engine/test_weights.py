"""Weights: those of the reference, mapped rather than copied, and any bad file refused by name."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.models import copy_of, smollm2_folder, tiny_llama, tiny_model, tiny_qwen3, tiny_qwen3_moe
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from vertumnus.engine.model_config import Dtype, Family, ModelConfig
from vertumnus.engine.weights import DenseMlp, MoeMlp, check_tokenizer, load_weights, torch_dtype
from vertumnus.errors import ConfigError

LAYER = "model.layers.1"


def loaded(model, dtype=Dtype.FLOAT32):
    return load_weights(model.folder, model.config, dtype)


def named(weights):
    """Every weight under the name that the reference gives it."""
    yield "model.embed_tokens.weight", weights.embedding
    yield "model.norm.weight", weights.final_norm
    yield "lm_head.weight", weights.lm_head
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}"
        yield f"{prefix}.input_layernorm.weight", layer.input_norm
        yield f"{prefix}.post_attention_layernorm.weight", layer.post_attention_norm
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
            if getattr(layer, name) is not None:
                yield f"{prefix}.self_attn.{name}.weight", getattr(layer, name)
        if isinstance(layer.mlp, DenseMlp):
            for name in ("gate", "up", "down"):
                yield f"{prefix}.mlp.{name}_proj.weight", getattr(layer.mlp, name)
        else:
            yield f"{prefix}.mlp.gate.weight", layer.mlp.router
            yield f"{prefix}.mlp.experts.gate_up_proj", layer.mlp.gate_up
            yield f"{prefix}.mlp.experts.down_proj", layer.mlp.down


def same_weights(model, weights, dtype=Dtype.FLOAT32):
    state = model.reference.state_dict()
    found = dict(named(weights))
    assert found.keys() == state.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, state[name].to(torch_dtype(dtype))), name
        assert not tensor.requires_grad


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("saved", Dtype)
@pytest.mark.parametrize("asked", Dtype)
def test_weights_are_those_of_the_reference_in_any_dtype(family, saved, asked):
    model = tiny_model(family, dtype=saved)
    assert model.config.dtype is saved
    same_weights(model, loaded(model, asked), asked)


@pytest.mark.parametrize("family", Family)
def test_shards_give_the_same_weights(family):
    model = tiny_model(family, max_shard_bytes=50_000)
    assert len(list(model.folder.glob("*.safetensors"))) > 2
    same_weights(model, loaded(model))


def test_tied_head_is_the_embedding_itself():
    model = tiny_qwen3(is_tied=True)
    weights = loaded(model)
    assert weights.lm_head is weights.embedding
    same_weights(model, weights)


def test_sparse_and_dense_layers_are_told_apart():
    first, second = loaded(tiny_qwen3_moe()).layers
    assert isinstance(first.mlp, DenseMlp)
    assert isinstance(second.mlp, MoeMlp)


def anonymous_bytes():
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s+(\d+) kB", status)[1])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux says how memory is shared")
def test_weights_in_the_dtype_of_the_files_take_no_memory_of_their_own():
    folder = smollm2_folder()
    config = ModelConfig.from_folder(folder)
    before = anonymous_bytes()
    weights = load_weights(folder, config, Dtype.FLOAT32)
    assert anonymous_bytes() - before < 32 << 20
    assert sum(layer.q_proj.nbytes for layer in weights.layers) > 32 << 20


def test_loaded_weights_outlive_their_file(tmp_path):
    model = tiny_llama()
    folder = tmp_path / "model"
    shutil.copytree(model.folder, folder)
    weights = load_weights(folder, model.config, Dtype.FLOAT32)
    shutil.rmtree(folder)
    same_weights(model, weights)


@pytest.fixture
def broken():
    """Loads a model after `change` has altered its tensors (a dict by name)."""

    def broken(model, change, dtype=Dtype.FLOAT32):
        folder = copy_of(model)
        tensors = load_file(model.folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        return load_weights(folder, model.config, dtype)

    return broken


def refused(action, *words):
    with pytest.raises(ConfigError) as caught:
        action()
    for word in ("accepted", *words):
        assert str(word) in str(caught.value)


def test_experts_stacked_in_the_file_give_the_same_weights(broken):
    model = tiny_qwen3_moe()
    state = model.reference.state_dict()

    def stack(tensors):
        for name in [name for name in tensors if ".experts." in name]:
            del tensors[name]
        tensors |= {name: tensor for name, tensor in state.items() if ".experts." in name}

    same_weights(model, broken(model, stack))


def test_rotary_frequencies_and_a_repeated_head_in_the_file_are_left_aside(broken):
    model = tiny_llama(is_tied=True)

    def add(tensors):
        tensors[f"{LAYER}.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    same_weights(model, broken(model, add))


def test_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(broken):
    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    refused(lambda: broken(tiny_llama(is_tied=True), add), "lm_head.weight", "embedding")


def test_missing_tensors_are_listed(broken):
    def remove(tensors):
        for name in [name for name in tensors if "layers.1.mlp" in name]:
            del tensors[name]

    refused(lambda: broken(tiny_llama(), remove), f"{LAYER}.mlp.down_proj.weight", "lacks")
    refused(lambda: broken(tiny_qwen3_moe(), remove), f"{LAYER}.mlp.experts.0.down_proj.weight", "10 more")


def test_unexpected_tensors_are_listed(broken):
    def add(tensors):
        tensors[f"{LAYER}.self_attn.q_proj.bias"] = torch.zeros(64)

    refused(lambda: broken(tiny_llama(), add), f"{LAYER}.self_attn.q_proj.bias")


def test_wrong_shape_is_refused(broken):
    name = f"{LAYER}.self_attn.k_proj.weight"

    def narrow(tensors):
        tensors[name] = tensors[name][:16].clone()

    refused(lambda: broken(tiny_llama(), narrow), "model.safetensors", name, [16, 64], [32, 64])


def test_unsupported_number_format_is_refused(broken):
    def widen(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"].double()

    refused(lambda: broken(tiny_llama(), widen), "model.norm.weight", "F64", "BF16")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", Dtype)
@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.norm.weight", f"{LAYER}.mlp.experts.2.up_proj.weight"]
)
def test_value_that_is_not_finite_is_refused(broken, value, dtype, name):
    def spoil(tensors):
        tensors[name].view(-1)[3] = value

    refused(lambda: broken(tiny_qwen3_moe(), spoil, dtype), name, "NaN or infinite")


def test_value_beyond_the_asked_dtype_is_refused(broken):
    def enlarge(tensors):
        tensors["model.norm.weight"][0] = 1e6

    refused(lambda: broken(tiny_llama(), enlarge, Dtype.FLOAT16), "model.norm.weight", "overflows", "float16")
    broken(tiny_llama(), enlarge, Dtype.BFLOAT16)


def test_missing_files_are_refused(tmp_path):
    model = tiny_llama(max_shard_bytes=50_000)
    refused(lambda: load_weights(tmp_path, model.config, Dtype.FLOAT32), "model.safetensors", tmp_path)
    folder = copy_of(model)
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    refused(lambda: load_weights(folder, model.config, Dtype.FLOAT32), shard.name, "missing")


@pytest.mark.parametrize("num_kept", [0, 4, 8, 100, 5_000, -1])
def test_truncated_file_is_refused(num_kept):
    model = tiny_llama()
    folder = copy_of(model)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:num_kept])
    refused(lambda: load_weights(folder, model.config, Dtype.FLOAT32), "model.safetensors", "cut short")


BAD_INDEXES = {
    "no JSON": "{",
    "no map": json.dumps({"metadata": {}}),
    "list": json.dumps([1]),
    "list for map": json.dumps({"weight_map": []}),
    "number for file": json.dumps({"weight_map": {"a": 1}}),
    "file elsewhere": json.dumps({"weight_map": {"a": "../model.safetensors"}}),
    "absolute": json.dumps({"weight_map": {"a": "/etc/passwd"}}),
    "nested": json.dumps({"weight_map": {"a": ["x"]}}),
}


@pytest.mark.parametrize("text", BAD_INDEXES.values(), ids=BAD_INDEXES)
def test_bad_index_is_refused(text):
    model = tiny_llama(max_shard_bytes=50_000)
    folder = copy_of(model)
    (folder / "model.safetensors.index.json").write_text(text)
    refused(lambda: load_weights(folder, model.config, Dtype.FLOAT32), "model.safetensors.index.json")


def test_tensor_in_two_shards_is_refused():
    model = tiny_llama(max_shard_bytes=50_000)
    folder = copy_of(model)
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    save_file(load_file(first) | load_file(second), second)
    refused(lambda: load_weights(folder, model.config, Dtype.FLOAT32), first.name, second.name)


def tokenizer_of(folder, num_tokens):
    Tokenizer(WordLevel({f"w{index}": index for index in range(num_tokens)}, unk_token="w0")).save(
        str(folder / "tokenizer.json")
    )


def test_tokenizer_must_fit_the_embedding(tmp_path):
    config = tiny_llama().config
    check_tokenizer(tmp_path, config)
    tokenizer_of(tmp_path, config.vocab_size)
    check_tokenizer(tmp_path, config)
    check_tokenizer(tmp_path, replace(config, vocab_size=config.vocab_size + 64))
    tokenizer_of(tmp_path, config.vocab_size + 1)
    refused(lambda: check_tokenizer(tmp_path, config), "tokenizer.json", 129, 128)
    (tmp_path / "tokenizer.json").write_text("{}")
    refused(lambda: check_tokenizer(tmp_path, config), "tokenizer.json")
