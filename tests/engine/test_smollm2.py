"""The small real model: a plain folder that transformers and the engine read alike, written whole or not at all."""

import json

import pytest
import torch
import transformers
from tests.engine.models import smollm2_folder

from vertumnus.engine import smollm2
from vertumnus.engine.model_config import Dtype, Family, ModelConfig
from vertumnus.engine.weights import check_tokenizer, load_weights
from vertumnus.errors import ConfigError


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(smollm2_folder(), local_files_only=True)


@pytest.fixture(scope="module")
def model():
    return transformers.AutoModelForCausalLM.from_pretrained(smollm2_folder(), local_files_only=True).eval()


def test_folder_says_what_the_model_is():
    config = ModelConfig.from_folder(smollm2_folder())
    assert config.family is Family.LLAMA
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert config.num_parameters == 134_515_008
    assert config.max_positions == 8192
    assert config.has_tied_embeddings
    assert config.dtype is Dtype.FLOAT32
    assert config.stop_token_ids == (2,)
    check_tokenizer(smollm2_folder(), config)


def test_weights_of_the_engine_are_those_of_transformers(model):
    config = ModelConfig.from_folder(smollm2_folder())
    weights = load_weights(smollm2_folder(), config, Dtype.FLOAT32)
    state = model.state_dict()
    assert torch.equal(weights.embedding, state["model.embed_tokens.weight"])
    assert torch.equal(weights.lm_head, state["lm_head.weight"])
    assert torch.equal(weights.layers[29].k_proj, state["model.layers.29.self_attn.k_proj.weight"])


def test_converted_model_speaks(model, tokenizer):
    token_ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.inference_mode():
        logits_V = model(token_ids).logits[0, -1]
    assert tokenizer.decode([int(logits_V.argmax())]) == " Paris"


@pytest.mark.parametrize("text", ["Hello, world!", "naïve café, 東京 🙂", "def f(x):\n\treturn x  # 12345\n", " a  b "])
def test_tokenizer_gives_back_its_text(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_chat_template_marks_the_turns(tokenizer):
    shown = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert "<|im_start|>user\nHi<|im_end|>" in shown
    assert shown.endswith("<|im_start|>assistant\n")


@pytest.fixture
def writes(monkeypatch, tmp_path):
    """Stands in for the conversion; what it writes is in the returned function's hands."""
    monkeypatch.setattr(smollm2, "find_gguf", lambda: tmp_path / "weights.gguf")

    def writes(write):
        monkeypatch.setattr(smollm2, "_write", lambda source, folder, dtype: write(folder))

    return writes


def write_config(folder):
    (folder / "config.json").write_text(json.dumps({"new": True}))


def test_folder_appears_whole_and_replaces_a_model_when_forced(writes, tmp_path):
    writes(write_config)
    folder = tmp_path / "model"
    smollm2.convert(folder)
    (folder / "old.txt").touch()
    smollm2.convert(folder, force=True)
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_failed_conversion_leaves_everything_as_it_was(writes, tmp_path):
    def fail(folder):
        write_config(folder)
        raise RuntimeError("broken weights")

    folder = tmp_path / "model"
    writes(fail)
    with pytest.raises(RuntimeError):
        smollm2.convert(folder)
    assert not list(tmp_path.iterdir())

    writes(write_config)
    smollm2.convert(folder)
    (folder / "old.txt").touch()
    writes(fail)
    with pytest.raises(RuntimeError):
        smollm2.convert(folder, force=True)
    assert (folder / "old.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_full_disk_is_refused_in_one_sentence(writes, tmp_path):
    def fail(folder):
        raise OSError(28, "No space left on device")

    writes(fail)
    with pytest.raises(ConfigError, match=r"No space left.*accepted"):
        smollm2.convert(tmp_path / "model")


def test_only_a_model_folder_is_ever_replaced(tmp_path):
    smollm2.check_output(tmp_path / "new", force=False)
    empty = tmp_path / "empty"
    empty.mkdir()
    smollm2.check_output(empty, force=True)
    own = tmp_path / "own"
    own.mkdir()
    (own / "thesis.txt").touch()
    link = tmp_path / "link"
    link.symlink_to(empty)
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "none")
    for path in (own, own / "thesis.txt", link, dangling, tmp_path / "none" / "new"):
        with pytest.raises(ConfigError, match="accepted"):
            smollm2.check_output(path, force=True)
    with pytest.raises(ConfigError, match="--force"):
        smollm2.check_output(empty, force=False)


@pytest.mark.parametrize("package", [smollm2.GGUF_PACKAGE, *smollm2.NEEDED_PACKAGES])
def test_missing_package_is_named(monkeypatch, package):
    found = smollm2.find_spec
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None if name == package else found(name))
    with pytest.raises(ConfigError, match=f"{package.replace('_', '-')}.*accepted.*pip install"):
        smollm2.find_gguf()
