"""Documents: attention that stays inside a document; see README.md."""

import torch

from picotron_min.extension import Extension
from picotron_min.extensions.documents.attention import inside_documents
from picotron_min.model import Llama
from picotron_min.placement import Table


class DocumentMask(Extension):
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def connect(self, model: Llama, table: Table) -> None:
        for attention in (layer.self_attn for layer in model.model.layers.values()):
            attention.core_attention = inside_documents(attention.core_attention, self.device)
