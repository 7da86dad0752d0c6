"""Published architectures by name, without their weights: the sizes of well-known models, from configs/ beside this file."""

from __future__ import annotations

from pathlib import Path

_CONFIG_DIR = Path(__file__).parent / "configs"
# Names on model hubs → the configuration of the same sizes.
_ALIASES = {
    "llama-2-7b-hf": "Llama-2-7b",
    "llama-2-7b-chat": "Llama-2-7b",
    "llama-2-7b-chat-hf": "Llama-2-7b",
    "llama-3-8b": "Llama-3-8B-Instruct",
    "meta-llama-3-8b": "Llama-3-8B-Instruct",
    "meta-llama-3-8b-instruct": "Llama-3-8B-Instruct",
    "tinyllama-1.1b-chat-v1.0": "TinyLlama-1.1B",
    "tinyllama-1.1b-intermediate-step-1431k-3t": "TinyLlama-1.1B",
}


def published_names() -> tuple[str, ...]:
    """The names of the models in configs/."""
    return tuple(sorted((path.stem for path in _CONFIG_DIR.glob("*.json")), key=str.lower))


def published_config(model_id: str) -> Path | None:
    """The config.json of 'phi-1_5' or 'microsoft/phi-1_5', in any letter case; None for an unknown model, and for paths."""
    if model_id.startswith((".", "/", "~")) or model_id.count("/") > 1:
        return None
    name = model_id.rpartition("/")[2].lower()
    known = {published.lower(): published for published in published_names()} | _ALIASES
    return _CONFIG_DIR / f"{known[name]}.json" if name in known else None
