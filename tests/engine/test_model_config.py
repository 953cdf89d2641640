"""What a folder says: read as transformers reads it, and anything that is not built is refused by name."""

import json
import math

import pytest
from tests.engine.models import CLASSES, ROPES, tiny_llama, tiny_model, tiny_qwen3_moe

from vertumnus.engine.model_config import (
    NEUTRAL_VALUES,
    Dtype,
    Family,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    YarnScaling,
)
from vertumnus.errors import ConfigError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1000,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32}
QWEN3_MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}


@pytest.fixture
def read(tmp_path):
    """Reads a folder of these fields; a field that is ... is left out."""

    def read(fields, generation=None):
        written = {name: value for name, value in fields.items() if value is not ...}
        (tmp_path / "config.json").write_text(json.dumps(written))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return ModelConfig.from_folder(tmp_path)

    return read


def refused(action, *words):
    with pytest.raises(ConfigError) as caught:
        action()
    for word in ("accepted", *words):
        assert str(word) in str(caught.value)


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("rope", ROPES)
def test_saved_models_are_read_with_their_own_sizes(family, rope):
    model = tiny_model(family, rope=rope, num_kv_heads=1)
    config, reference = model.config, model.reference.config
    assert config.family is family
    assert config.has_qk_norm is (family is not Family.LLAMA)
    assert config.num_layers == reference.num_hidden_layers
    assert config.head_dim == config.rope.head_dim == reference.head_dim
    assert config.num_heads_per_kv_head == 4
    assert config.rope.theta == reference.rope_parameters["rope_theta"]
    assert config.num_parameters == sum(parameter.numel() for parameter in model.reference.parameters())
    assert (config.experts is not None) is (family is Family.QWEN3_MOE)


@pytest.mark.parametrize("is_tied", [False, True])
def test_tied_embeddings_are_counted_once(is_tied):
    model = tiny_llama(is_tied=is_tied)
    assert model.config.has_tied_embeddings is is_tied
    assert model.config.num_parameters == sum(parameter.numel() for parameter in model.reference.parameters())


@pytest.mark.parametrize("fields", [LLAMA, QWEN3, QWEN3_MOE], ids=["llama", "qwen3", "qwen3-moe"])
def test_fields_left_out_mean_what_they_mean_to_transformers(read, fields):
    optional = ("rms_norm_eps", "eos_token_id", *(("num_key_value_heads", "head_dim") if fields is LLAMA else ()))
    fields = fields | dict.fromkeys(optional, ...)
    config = read(fields)
    written = {name: value for name, value in fields.items() if value is not ...}
    reference = CLASSES[config.family][0](**written)
    assert config.rms_norm_eps == reference.rms_norm_eps
    assert config.num_kv_heads == reference.num_key_value_heads
    assert config.head_dim == reference.head_dim
    assert config.has_tied_embeddings == reference.tie_word_embeddings
    assert config.rope.theta == reference.rope_parameters["rope_theta"]
    if config.experts is not None:
        assert config.experts.has_normalised_weights == reference.norm_topk_prob
        assert config.experts.sparse_layers == {0, 1, 2, 3}


def test_qwen3_without_head_dim_has_128(read):
    assert read(QWEN3 | {"head_dim": ...}).head_dim == CLASSES[Family.QWEN3][0]().head_dim == 128


def test_kv_bytes_follow_layers_heads_and_dtype(read):
    config = read(LLAMA)
    assert config.kv_bytes_per_token_layer(Dtype.FLOAT32) == 2 * 2 * 8 * 4
    assert config.kv_bytes_per_token(Dtype.BFLOAT16) == 4 * 2 * 2 * 8 * 2


SCALINGS = {
    "none": ({"rope_type": "default"}, None),
    "linear": ({"type": "linear", "factor": 2}, LinearScaling(2.0)),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 250,
        },
        Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=250),
    ),
    "yarn": (
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 250, "truncate": False},
        YarnScaling(factor=8.0, original_max_positions=250, is_truncated=False),
    ),
    "yarn, factor by the lengths": (
        {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 250},
        YarnScaling(factor=4.0, original_max_positions=250),
    ),
}


@pytest.mark.parametrize(("values", "scaling"), SCALINGS.values(), ids=SCALINGS)
def test_rope_is_read_in_the_style_of_transformers_4_and_5(read, values, scaling):
    older = read(LLAMA | {"rope_theta": 5e5, "rope_scaling": values})
    newer = read(LLAMA | {"rope_parameters": values | {"rope_theta": 5e5}})
    both = read(LLAMA | {"rope_theta": 5e5, "rope_scaling": values, "rope_parameters": values})
    assert older.rope == newer.rope == both.rope
    assert older.rope.theta == 5e5
    assert older.rope.scaling == scaling


def test_yarn_extends_the_positions_and_never_shortens_them(read):
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 1000}
    assert read(LLAMA | {"rope_scaling": yarn | {"factor": 4}}).max_positions == 4000
    assert read(LLAMA | {"rope_scaling": yarn | {"factor": 4}, "max_position_embeddings": 5000}).max_positions == 5000


def test_sparse_layers_follow_step_and_list(read):
    config = read(QWEN3_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": True})
    assert config.experts is not None
    assert config.experts.sparse_layers == {1}
    assert config.experts.has_normalised_weights
    assert [config.is_sparse_layer(layer) for layer in range(4)] == [False, True, False, False]


def test_number_of_experts_is_read_under_both_its_names(read):
    config = read(QWEN3_MOE | {"num_experts": ..., "num_local_experts": 6})
    assert config == read(QWEN3_MOE)
    assert tiny_qwen3_moe().config.experts.num_experts == 4


def test_stop_tokens_of_both_files_are_united(read):
    assert read(LLAMA).stop_token_ids == (2,)
    assert read(LLAMA, {"eos_token_id": [7, 2, 5]}).stop_token_ids == (2, 5, 7)
    assert read(LLAMA | {"eos_token_id": None}, {"eos_token_id": None}).stop_token_ids == ()


def test_dtype_is_read_under_both_its_names(read):
    assert read(LLAMA).dtype is Dtype.FLOAT32
    assert read(LLAMA | {"torch_dtype": "bfloat16"}).dtype is Dtype.BFLOAT16
    assert read(LLAMA | {"dtype": "float16"}).dtype is Dtype.FLOAT16


def test_values_that_change_nothing_are_accepted(read):
    neutral = {name: values[0] for name, values in NEUTRAL_VALUES.items() if values}
    config = read(QWEN3_MOE | neutral | {"sliding_window": 4096, "max_window_layers": 3, "made_up": {"a": 1}})
    assert config == read(QWEN3_MOE)
    assert read(LLAMA | dict.fromkeys(NEUTRAL_VALUES, None) | {"sliding_window": None}) == read(LLAMA)


YARN = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 100}
BAD_FIELDS = {
    "architecture": ({"architectures": ["MixtralForCausalLM"]}, ("Mixtral", "LlamaForCausalLM", "Qwen3Moe")),
    "no architecture": ({"architectures": ...}, ("architectures", "missing")),
    "two architectures": ({"architectures": ["LlamaForCausalLM", "Qwen3ForCausalLM"]}, ("architectures",)),
    "model type": ({"model_type": "mistral"}, ("model_type", "mistral", "llama")),
    "quantised": ({"quantization_config": {"quant_method": "awq"}}, ("quantization_config", "awq", "none")),
    "activation": ({"hidden_act": "gelu"}, ("hidden_act", "gelu", "silu")),
    "attention bias": ({"attention_bias": True}, ("attention_bias", "True", "False")),
    "MLP bias": ({"mlp_bias": True}, ("mlp_bias",)),
    "tensor parallel": ({"pretraining_tp": 2}, ("pretraining_tp", 2)),
    "own code": ({"auto_map": {"AutoModel": "x.Y"}}, ("auto_map",)),
    "sliding window": ({"sliding_window": 512}, ("sliding_window", 512)),
    "window in use": ({"sliding_window": 512, "use_sliding_window": True}, ("use_sliding_window",)),
    "layer types": ({"layer_types": ["full_attention", "sliding_attention"]}, ("layer_types", "full_attention")),
    "no size": ({"hidden_size": ...}, ("hidden_size", "missing")),
    "fraction": ({"hidden_size": 64.5}, ("hidden_size", "64.5")),
    "boolean size": ({"num_hidden_layers": True}, ("num_hidden_layers", "True")),
    "no layers": ({"num_hidden_layers": 0}, ("num_hidden_layers", "0")),
    "text": ({"vocab_size": "100"}, ("vocab_size", "100")),
    "absurd": ({"num_hidden_layers": 10**9}, ("num_hidden_layers", 10**9)),
    "heads": ({"num_key_value_heads": 3}, ("num_key_value_heads", 3, 8)),
    "odd head": ({"head_dim": 9}, ("head_dim", 9, "even")),
    "no head size": ({"hidden_size": 65}, ("head_dim", "missing")),
    "epsilon": ({"rms_norm_eps": 0}, ("rms_norm_eps", 0)),
    "infinite": ({"rms_norm_eps": math.inf}, ("rms_norm_eps", "inf")),
    "beyond floats": ({"rope_theta": 10**400}, ("rope_theta", "accepted: a number above 0")),
    "not a number": ({"rope_theta": math.nan}, ("rope_theta", "nan")),
    "tied": ({"tie_word_embeddings": "yes"}, ("tie_word_embeddings", "yes")),
    "dtype": ({"dtype": "float64"}, ("dtype", "float64", "bfloat16")),
    "stop token": ({"eos_token_id": 100}, ("eos_token_id", 100, 99)),
    "stop tokens": ({"eos_token_id": [1, "x"]}, ("eos_token_id",)),
    "rope kind": ({"rope_scaling": {"rope_type": "longrope"}}, ("rope_type", "longrope", "yarn")),
    "old rope kind": ({"rope_scaling": {"type": "dynamic", "factor": 2}}, ("type", "dynamic", "linear")),
    "rope field": ({"rope_scaling": YARN | {"mrope_section": [1]}}, ("rope_scaling", "mrope_section")),
    "rope by layer": ({"rope_parameters": {"full_attention": YARN}}, ("rope_parameters", "full_attention")),
    "rope text": ({"rope_scaling": "yarn"}, ("rope_scaling", "yarn")),
    "no rope factor": ({"rope_scaling": {"type": "linear"}}, ("rope_scaling", "factor", "missing")),
    "rope factor": ({"rope_scaling": YARN | {"factor": -1}}, ("factor", -1)),
    "rope base": ({"rope_theta": 1}, ("rope_theta", 1)),
    "partial rope": ({"rope_scaling": YARN | {"partial_rotary_factor": 0.5}}, ("partial_rotary_factor", 0.5)),
    "partial rope beside": ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor", 0.5)),
    "two ropes": ({"rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}}, ("rope_scaling",)),
    "llama3 bounds": (
        {"rope_scaling": SCALINGS["llama3"][0] | {"high_freq_factor": 1}},
        ("high_freq_factor", 1, "low_freq_factor"),
    ),
}


@pytest.mark.parametrize(("change", "words"), BAD_FIELDS.values(), ids=BAD_FIELDS)
def test_field_that_is_not_supported_is_refused_by_name(read, change, words):
    refused(lambda: read(LLAMA | change), "config.json", *words)


BAD_EXPERTS = {
    "no experts": ({"num_experts": 0}, ("num_experts", 0)),
    "more than all": ({"num_experts_per_tok": 7}, ("num_experts_per_tok", 7, 6)),
    "no size": ({"moe_intermediate_size": ...}, ("moe_intermediate_size", "missing")),
    "layer beyond": ({"mlp_only_layers": [4]}, ("mlp_only_layers", 4, 3)),
    "shared expert": ({"shared_expert_intermediate_size": 64}, ("shared_expert_intermediate_size", 64)),
    "sigmoid scores": ({"scoring_func": "sigmoid"}, ("scoring_func", "sigmoid", "softmax")),
}


@pytest.mark.parametrize(("change", "words"), BAD_EXPERTS.values(), ids=BAD_EXPERTS)
def test_experts_that_are_not_supported_are_refused_by_name(read, change, words):
    refused(lambda: read(QWEN3_MOE | change), "config.json", *words)


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"\xff\xfe\x00", b"[" * 100_000])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_garbled_file_is_refused(tmp_path, name, text):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / name).write_bytes(text)
    refused(lambda: ModelConfig.from_folder(tmp_path), name)


def test_missing_folder_or_file_is_refused(tmp_path):
    refused(lambda: ModelConfig.from_folder(tmp_path / "none"), "model folder", "none")
    refused(lambda: ModelConfig.from_folder(tmp_path), "config.json", "No such file")
