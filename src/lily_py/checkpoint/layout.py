"""Names: from the spellings of the field to one canonical name for each tensor of the model.

`mlx_lm` writes ``language_model.model.layers.0…``, Hugging Face ``model.language_model.layers.0…`` or
plain ``model.layers.0…``; all become ``layers.0…`` here, without ``.weight``. MLX's ``switch_mlp`` becomes
``experts``.
"""

from __future__ import annotations

import re

_PREFIXES = ("language_model.model.", "model.language_model.", "model.", "language_model.")
_VISION = re.compile(r"(model\.|language_model\.)*(vision_tower|visual|vision_model)\.")
_COMPUTED = re.compile(r"(^|\.)rotary_emb\.")

VISION_TOWER = "vision tower"
COMPUTED_TABLE = "table that the engine computes"
NOT_INDEXED = "not in the index"
TIED_HEAD = "output head of a tied model (the embedding is used)"
MTP_REPLACED = "MTP head, replaced by the one passed as mtp="
MTP_SIDECAR_REST = "tensor of the MTP source that isn't part of its head"


def canonical_name(name: str) -> str:
    """Return the canonical name of a module or tensor of the checkpoint, without ``.weight``."""
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            name = name[len(prefix) :]
            break
    return name.removesuffix(".weight").replace(".mlp.switch_mlp.", ".mlp.experts.")


def ignored_reason(name: str) -> str | None:
    """Say why a tensor isn't needed to run text, or None if it is (or isn't known)."""
    if _VISION.match(name):
        return VISION_TOWER
    if _COMPUTED.search(name):
        return COMPUTED_TABLE
    return None


def is_mtp(name: str) -> bool:
    """Tell whether a canonical name belongs to the multi-token-prediction head."""
    return name.startswith("mtp.")
